//go:build !amd64 && !arm64

package pcie

import "sync/atomic"

func load32(p *uint32) uint32     { return atomic.LoadUint32(p) }
func store32(p *uint32, v uint32) { atomic.StoreUint32(p, v) }
func readBarrier()                {}
