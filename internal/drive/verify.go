package drive

import (
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// verify reads a range, a scratch buffer's length at a time, and keeps nothing of it: the device says whether it can be
// read.
type verify struct{}

// pieceBytes is how much the next read of a Verify, Compare or CompareWrite covers.
func (io *IO) pieceBytes() units.Bytes { return min(io.Len-io.done, scratchBytes) }

func (verify) admits(io *IO) units.Bytes { return io.pieceBytes() }
func (verify) reads(*IO) bool            { return true }

func (verify) next(io *IO, scratch []byte) ssd.Request {
	n := io.pieceBytes()
	r := ssd.Request{Op: ssd.Read, Offset: int64(io.Offset.Add(io.done)), Len: int64(n), Buf: scratch[:n]}
	if io.done == 0 && io.Op != pipeline.CompareWrite { // whose flags are its write's
		r.Flags = io.Flags // FUA: the first piece makes all that was written before durable
	}
	return r
}

func (verify) completed(io *IO, _ []byte) (over bool, err error) {
	io.done += io.pieceBytes()
	return io.done >= io.Len, nil
}
