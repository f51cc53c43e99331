//go:build amd64 || arm64

package pcie

// load32 reads a register.
//
//go:noescape
func load32(p *uint32) uint32

// store32 writes a register. Memory that was written before is visible to the device when it sees the write. It is not
// sync/atomic's Store, which is a locked exchange on amd64: a device need not know that, and it reads the register.
//
//go:noescape
func store32(p *uint32, v uint32)

// load64 and store64 read and write a word of the device's memory. They are one access each.
//
//go:noescape
func load64(p *uint64) uint64

//go:noescape
func store64(p *uint64, v uint64)

// fullBarrier keeps accesses that follow it behind those before it, whatever they are.
//
//go:noescape
func fullBarrier()

// readBarrier keeps loads that follow it behind those before it.
//
//go:noescape
func readBarrier()
