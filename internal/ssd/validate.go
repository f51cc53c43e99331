package ssd

import "fmt"

// Validate checks a request against the geometry of the device. Every implementation calls it for each request that
// Submit takes. A request of length 0 is valid and does nothing.
//
// Errors: ErrRange (offset or length outside or not in whole blocks, or Buf
// shorter than Len); ErrUnsupported (unknown Op).
//
// Cost: 0 allocs when valid.
func Validate(info *Info, r *Request) error {
	if r.Op >= Ops {
		return fmt.Errorf("%w: %v", ErrUnsupported, r.Op)
	}
	if r.Op == Flush {
		return nil
	}
	mask := int64(info.BlockSize - 1)
	if r.Offset < 0 || r.Len < 0 || (r.Offset|r.Len)&mask != 0 || r.Offset > info.SizeBytes ||
		r.Len > info.SizeBytes-r.Offset {
		return fmt.Errorf("%w: %v of %d bytes at %d, device of %d bytes in blocks of %d", ErrRange, r.Op, r.Len,
			r.Offset, info.SizeBytes, info.BlockSize)
	}
	if r.Op <= Write && int64(len(r.Buf)) < r.Len {
		return fmt.Errorf("%w: %v of %d bytes with a buffer of %d", ErrRange, r.Op, r.Len, len(r.Buf))
	}
	return nil
}
