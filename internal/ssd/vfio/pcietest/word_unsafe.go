package pcietest

import (
	"sync/atomic"
	"unsafe"
)

// word is a 32-bit word of memory that the host reads or writes, too.
func word(b []byte) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b[:4][0])) }
