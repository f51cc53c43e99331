package daemon

import (
	"errors"
	"time"

	"jbofd/internal/owner"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// eraseStep is how much one request zeroes: little enough to let hosts' I/O pass
// in between.
const eraseStep = 32 << 20

// quiesceTimeout is how long commands from before may take to end.
const quiesceTimeout = 10 * time.Second

// errStopping: the daemon stops before the range is erased.
var errStopping = errors.New("the daemon is stopping; delete the namespace again when it is back")

// errUnderWay: an SSD still has commands from before.
var errUnderWay = errors.New("commands that hosts sent before are still under way; try again")

// erase zeroes a range that no command may reach any more, so that whoever gets it
// next does not see what it held. Commands that were sent while one still could
// are waited for first: a write whose data come late must not land in it. It ends
// early when stopping is closed.
func erase(stopping <-chan struct{}, o *owner.Owner, offset, length int64) error {
	late := time.NewTimer(quiesceTimeout)
	defer late.Stop()
	for range 2 { // the first may be the rest of an earlier call's that gave up
		select {
		case <-o.Quiesce():
		case <-stopping:
			return errStopping
		case <-late.C:
			return errUnderWay
		}
	}
	s := make(waitSink, 1)
	io := &owner.IO{Op: pipeline.WriteZeroes, Flags: ssd.Unmap}
	io.Init(s, 0)
	for end := offset + length; offset < end; offset += eraseStep {
		select {
		case <-stopping:
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

// waitSink is told of one IO at a time.
type waitSink chan struct{}

// do runs io and waits for it.
func (s waitSink) do(o *owner.Owner, io *owner.IO) error {
	var b owner.Batch
	b.Add(io)
	o.Submit(&b)
	<-s
	return io.Err
}

// Admitted implements owner.Sink; nothing is ever fetched.
func (s waitSink) Admitted(*owner.IO) bool { return false }

// Done implements owner.Sink.
func (s waitSink) Done(*owner.IO) bool {
	s <- struct{}{}
	return false
}

// Kick implements owner.Sink.
func (s waitSink) Kick() {}
