package pcie

import (
	"sync/atomic"
	"unsafe"
)

// MMIO are the registers of a device, or memory that it has, mapped into memory. The mapping begins at a page.
type MMIO []byte

// Load32 implements Registers.
func (m MMIO) Load32(offset int) uint32 {
	return load32((*uint32)(unsafe.Pointer(&m[offset : offset+4][0])))
}

// Store32 implements Registers.
//
// hot: 0 allocs
func (m MMIO) Store32(offset int, v uint32) {
	store32((*uint32)(unsafe.Pointer(&m[offset : offset+4][0])), v)
}

// Load64 implements Memory.
func (m MMIO) Load64(offset int) uint64 {
	return load64((*uint64)(unsafe.Pointer(&m[offset : offset+8][0])))
}

// Store64 implements Memory.
func (m MMIO) Store64(offset int, v uint64) {
	store64((*uint64)(unsafe.Pointer(&m[offset : offset+8][0])), v)
}

// word is a 32-bit word of memory that the device reads or writes, at a multiple of 4.
func word(memory []byte, offset int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&memory[offset : offset+4][0]))
}
