package drive

import (
	"bytes"

	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// compare reads a range as verify does and compares it with the host's data, which is in Buf. It ends with the first
// piece that differs.
type compare struct{}

func (compare) admits(io *IO) units.Bytes { return io.pieceBytes() }
func (compare) reads(*IO) bool            { return true }

func (compare) next(io *IO, scratch []byte) ssd.Request { return verify{}.next(io, scratch) }

func (compare) completed(io *IO, scratch []byte) (over bool, err error) {
	n := io.pieceBytes()
	if !bytes.Equal(scratch[:n], io.Buf.B[io.done:io.done+n]) {
		return true, ErrMismatch
	}
	return verify{}.completed(io, nil)
}
