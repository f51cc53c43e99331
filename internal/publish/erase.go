package publish

import (
	"fmt"
	"time"

	"jbofd/internal/drive"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// eraseStep is how many bytes one request zeroes. It is small, so that hosts' I/O is served in between.
const eraseStep = 32 << 20

const (
	// erasePatience is how long the drive may take for a step: longer than one does that works, its retries included.
	erasePatience = time.Minute
	// stopEvery is how long Erase may take to see that it is to stop.
	stopEvery = 10 * time.Millisecond
)

// ErrUnanswered: a drive has not answered for erasePatience.
var ErrUnanswered = fmt.Errorf("the drive has not answered for %v; try again when it does", erasePatience)

// Erase zeroes a range of a drive whose namespace is not published any more, so that the next user of the range does
// not see what it held. It first waits, for 10 s at most, until the commands that the drive had before have ended:
// otherwise a slow write could still overwrite the zeroes. When it returns without an error, the zeroes are durable;
// after an error some of the range may be zeroed, also later, and the caller may try again: until then Vacate keeps the
// range from a user, whose writes late zeroes would undo. It ends early when stop is closed, and does not wait for a
// drive that does not answer. Unless nil, progress is told how many bytes are zeroed, after each step.
//
// Errors: target.ErrInFlight, commands have not ended in time; target.ErrStopped; ErrUnanswered; the drive's.
func (p *Publisher) Erase(d *drive.Drive, offset units.DriveOffset, length units.Bytes, progress func(done units.Bytes),
	stop <-chan struct{}) (err error) {
	if err := p.Drain(d, stop); err != nil {
		return err
	}
	defer func() {
		if err != nil { // whatever it says: a drive that was given up may have requests
			p.leftover(d)
		}
	}()
	begin, end := offset, offset.Add(length)
	for ; offset < end; offset = offset.Add(eraseStep) {
		io := &drive.IO{Op: pipeline.WriteZeroes, Flags: ssd.Unmap, Offset: offset,
			Len: min(eraseStep, end.Sub(offset))}
		if err := do(d, io, erasePatience, stop); err != nil {
			return err
		}
		if progress != nil {
			progress(offset.Add(io.Len).Sub(begin))
		}
	}
	return do(d, &drive.IO{Op: pipeline.Flush}, erasePatience, stop)
}

// Flush flushes a drive, however long that takes.
//
// Errors: the drive's.
func Flush(d *drive.Drive) error { return do(d, &drive.IO{Op: pipeline.Flush}, -1, nil) }

// waitSink is the drive.Sink of one IO. It gets a value when the IO is done.
type waitSink chan struct{}

// do submits io and waits until it is done; unless patience is negative, no longer than that. An io that is not waited
// for any more is carried out nevertheless, unless it still waits for its turn.
//
// Errors: target.ErrStopped, ErrUnanswered; the drive's.
func do(d *drive.Drive, io *drive.IO, patience time.Duration, stop <-chan struct{}) error {
	select {
	case <-stop:
		return target.ErrStopped
	default:
	}
	s := make(waitSink, 1)
	io.Init(s, 0)
	var b drive.Batch
	b.Add(io)
	d.Submit(&b)
	env := d.Env()
	if patience < 0 {
		env.Wait(s, -1)
		return io.Err
	}
	for late := env.Now() + int64(patience); !env.Wait(s, stopEvery); {
		select {
		case <-stop:
			d.Abort(io)
			return target.ErrStopped
		default:
		}
		if env.Now() >= late {
			d.Abort(io)
			return ErrUnanswered
		}
	}
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
