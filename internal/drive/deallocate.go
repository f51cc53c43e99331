package drive

import (
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// deallocateRanges deallocates IO.Ranges one after the other. Each range is a command of its own as far as others are
// concerned: it claims its range while it is at the device, and the list as a whole is not atomic.
type deallocateRanges struct{}

func (deallocateRanges) admits(io *IO) units.Bytes { return io.Ranges[io.nextRange].Len }
func (deallocateRanges) reads(*IO) bool            { return false }

func (deallocateRanges) next(io *IO, _ []byte) ssd.Request {
	r := io.Ranges[io.nextRange]
	return ssd.Request{Op: ssd.Deallocate, Flags: io.Flags, Offset: int64(r.Offset), Len: int64(r.Len)}
}

func (deallocateRanges) completed(io *IO, _ []byte) (over bool, err error) {
	io.nextRange++
	return io.nextRange >= len(io.Ranges), nil
}
