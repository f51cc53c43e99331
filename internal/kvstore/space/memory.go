package space

import (
	"errors"
	"fmt"
)

// ErrNoMemory is wrapped by the errors of a store, or of swapping, that lacks memory for a buffer.
var ErrNoMemory = errors.New("kvstore: not enough memory")

// Alloc returns n zeroed bytes for I/O, aligned to the device's blocks.
type Alloc func(n int) ([]byte, error)

// HeapAlloc is an Alloc for devices that take any memory.
func HeapAlloc(n int) ([]byte, error) { return make([]byte, n), nil }

// Buffers takes several buffers one after the other and remembers the first failure, so that a caller checks once.
type Buffers struct {
	Alloc Alloc
	// Err is the first failure, nil if there was none. It wraps ErrNoMemory and what Alloc has returned.
	Err error
}

// Take returns n bytes, or nil after a failure. The name what is used in Err.
func (b *Buffers) Take(what string, n int) []byte {
	if b.Err != nil {
		return nil
	}
	buf, err := b.Alloc(n)
	if err != nil {
		b.Err = fmt.Errorf("%w for %s: %w", ErrNoMemory, what, err)
		return nil
	}
	return buf
}
