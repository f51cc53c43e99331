package drive

import "jbofd/internal/ssd"

// deallocateRanges deallocates IO.Ranges one after the other. Each range is a command of its own as far as others are
// concerned: it claims its range while it is at the device, and the list as a whole is not atomic.
type deallocateRanges struct{}

func (deallocateRanges) admits(io *IO) int64 { return io.Ranges[io.at].Len }
func (deallocateRanges) reads(*IO) bool      { return false }

func (deallocateRanges) next(io *IO, _ []byte) ssd.Request {
	r := io.Ranges[io.at]
	return ssd.Request{Op: ssd.Deallocate, Flags: io.Flags, Offset: r.Offset, Len: r.Len}
}

func (deallocateRanges) completed(io *IO, _ []byte) (over bool, err error) {
	io.at++
	return io.at >= int64(len(io.Ranges)), nil
}
