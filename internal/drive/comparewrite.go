package drive

import (
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// compareWrite is a fused Compare and Write: it compares the range with the first half of Buf and, if they are equal,
// writes the second half. An exclusive claim keeps all other IOs that change the range away from the first read to the
// end of the write, so that the two are atomic.
//
// It passes the pipeline once, for both requests: if the write waited there again, for its tenant's cap perhaps, the
// claim would keep other tenants from the range for as long. The pipeline charges it for the read and the write.
type compareWrite struct{}

func (compareWrite) admits(io *IO) units.Bytes { return io.Len }
func (compareWrite) reads(io *IO) bool         { return !io.writing }

func (compareWrite) next(io *IO, scratch []byte) ssd.Request {
	if io.writing {
		return ssd.Request{Op: ssd.Write, Flags: io.Flags, Offset: int64(io.Offset), Len: int64(io.Len),
			Buf: io.Buf.B[io.Len:]}
	}
	return compare{}.next(io, scratch)
}

func (compareWrite) completed(io *IO, scratch []byte) (over bool, err error) {
	if io.writing {
		return true, nil
	}
	over, err = compare{}.completed(io, scratch)
	if over && err == nil {
		io.writing, over = true, false
	}
	return over, err
}
