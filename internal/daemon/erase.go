package daemon

import (
	"errors"

	"jbofd/internal/drive"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// eraseStep is how much one request zeroes. It is small, so that hosts' I/O is served in between.
const eraseStep = 32 << 20

// errStopping: the daemon stops before the range is erased.
var errStopping = errors.New("the daemon is stopping; delete the namespace again when it is back")

// erase zeroes a range of a drive whose namespace is not configured any more, so that the next user of the
// range does not see what it held. It first waits for the commands that the drive has: a write that is slow must not
// land behind the zeroes. It ends early when the daemon stops.
func (n *Node) erase(o *drive.Drive, offset, length int64) error {
	err := n.service.DrainDrive(o, n.stopping)
	if errors.Is(err, target.ErrStopped) {
		return errStopping
	}
	if err != nil {
		return err
	}
	s := make(waitSink, 1)
	io := &drive.IO{Op: pipeline.WriteZeroes, Flags: ssd.Unmap}
	io.Init(s, 0)
	for end := offset + length; offset < end; offset += eraseStep {
		select {
		case <-n.stopping:
			return errStopping
		default:
		}
		io.Offset, io.Len = offset, min(eraseStep, end-offset)
		if err := s.do(o, io); err != nil {
			return err
		}
	}
	io.Op, io.Flags, io.Offset, io.Len = pipeline.Flush, 0, 0, 0
	return s.do(o, io)
}

// waitSink is a drive.Sink for one IO at a time, with a method that waits for its end.
type waitSink chan struct{}

// do runs io and waits for it.
func (s waitSink) do(o *drive.Drive, io *drive.IO) error {
	var b drive.Batch
	b.Add(io)
	o.Submit(&b)
	<-s
	return io.Err
}

// Admitted implements drive.Sink. It does nothing: no IO here waits for data.
func (s waitSink) Admitted(*drive.IO) bool { return false }

// Done implements drive.Sink.
func (s waitSink) Done(*drive.IO) bool {
	s <- struct{}{}
	return false
}

// Kick implements drive.Sink.
func (s waitSink) Kick() {}
