//go:build !amd64 && !arm64

package pcie

import "sync/atomic"

func load32(p *uint32) uint32     { return atomic.LoadUint32(p) }
func store32(p *uint32, v uint32) { atomic.StoreUint32(p, v) }
func readBarrier()                {}
func load64(p *uint64) uint64     { return atomic.LoadUint64(p) }
func store64(p *uint64, v uint64) { atomic.StoreUint64(p, v) }
func fullBarrier()                {}
