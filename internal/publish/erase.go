package publish

import (
	"jbofd/internal/drive"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// eraseStep is how many bytes one request zeroes. It is small, so that hosts' I/O is served in between.
const eraseStep = 32 << 20

// Erase zeroes a range of a drive whose namespace is not published any more, so that the next user of the range does
// not see what it held. It first waits, for 10 s at most, until the commands that the drive had before have ended:
// otherwise a slow write could still overwrite the zeroes. When it returns without an error, the zeroes are durable;
// after an error some of the range may be zeroed, and the caller may try again. It ends early when stop is closed.
// Unless nil, progress is told how many bytes are zeroed, after each step.
//
// Errors: target.ErrInFlight, commands have not ended in time; target.ErrStopped; the drive's.
func (p *Publisher) Erase(d *drive.Drive, offset units.DriveOffset, length units.Bytes, progress func(done units.Bytes),
	stop <-chan struct{}) error {
	if err := p.Drain(d, stop); err != nil {
		return err
	}
	begin, end := offset, offset.Add(length)
	for ; offset < end; offset = offset.Add(eraseStep) {
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
		if progress != nil {
			progress(offset.Add(io.Len).Sub(begin))
		}
	}
	return Flush(d)
}

// Flush flushes a drive.
//
// Errors: the drive's.
func Flush(d *drive.Drive) error { return do(d, &drive.IO{Op: pipeline.Flush}) }

// waitSink is the drive.Sink of one IO. It gets a value when the IO is done.
type waitSink chan struct{}

// do submits io and waits until it is done.
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
