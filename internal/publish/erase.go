package publish

import (
	"jbofd/internal/drive"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// eraseStep is how much one request zeroes. It is small, so that hosts' I/O is served in between.
const eraseStep = 32 << 20

// Erase zeroes a range of a drive whose namespace is not published any more, so that the next user of the range does
// not see what it held. It first waits for the commands that the drive has: a write that is slow must not land behind
// the zeroes. It ends early when stop is closed.
//
// Errors: target.ErrStopped, target.ErrInFlight; the drive's.
func (p *Publisher) Erase(d *drive.Drive, offset units.DriveOffset, length units.Bytes, stop <-chan struct{}) error {
	if err := p.cfg.Service.DrainDrive(d, stop); err != nil {
		return err
	}
	for end := offset.Add(length); offset < end; offset = offset.Add(eraseStep) {
		select {
		case <-stop:
			return target.ErrStopped
		default:
		}
		io := &drive.IO{Op: pipeline.WriteZeroes, Flags: ssd.Unmap, Offset: offset,
			Len: min(eraseStep, end.Sub(offset))}
		if err := do(d, io); err != nil {
			return err
		}
	}
	return Flush(d)
}

// Flush flushes a drive.
//
// Errors: the drive's.
func Flush(d *drive.Drive) error { return do(d, &drive.IO{Op: pipeline.Flush}) }

// waitSink is a drive.Sink for one IO that somebody waits for.
type waitSink chan struct{}

// do runs io and waits for it.
func do(d *drive.Drive, io *drive.IO) error {
	s := make(waitSink, 1)
	io.Init(s, 0)
	var b drive.Batch
	b.Add(io)
	d.Submit(&b)
	d.Env().Wait(s, -1)
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
