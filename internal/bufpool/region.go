package bufpool

import (
	"math/bits"

	"golang.org/x/sys/unix"
)

// region is one buddy allocator.
type region struct {
	// free[o] is a bitmap of the free blocks of order o.
	free [maxOrders][]uint64
	// count[o] is how many bits of free[o] are set.
	count [maxOrders]int32
	// serial holds, at the first minimal block of an allocated buffer, that
	// buffer's serial number, and 0 elsewhere: what tells a double Put.
	serial    []uint32
	freeBytes int64
}

// find returns the region, lowest or highest first, that has a free block of
// order o to upto, and the smallest such order there; region -1 if none has.
func (p *Pool) find(o, upto int, highest bool, skip int) (ri, order int) {
	words := len(p.avail)
	for k := range words {
		w := k
		if highest {
			w = words - 1 - k
		}
		var any uint64
		for _, some := range p.avail[w][o : upto+1] {
			any |= some
		}
		if skip >= 0 && skip/64 == w {
			any &^= 1 << (skip % 64)
		}
		if any == 0 {
			continue
		}
		bit := bits.TrailingZeros64(any)
		if highest {
			bit = 63 - bits.LeadingZeros64(any)
		}
		q := o
		for p.avail[w][q]&(1<<bit) == 0 {
			q++
		}
		return w*64 + bit, q
	}
	return -1, 0
}

// ensureTaken makes the region's memory accessible.
func (p *Pool) ensureTaken(ri int) bool {
	if p.taken[ri].Load() {
		return true
	}
	n := p.cfg.RegionBytes
	if err := unix.Mprotect(p.arena[ri*n:(ri+1)*n], unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return false // out of commit: as good as an empty pool; counted as a failure
	}
	p.taken[ri].Store(true)
	return true
}

// release marks a block free and merges it with its free buddies.
func (p *Pool) release(ri, o, i int) {
	r := &p.regions[ri]
	for o < p.orders-1 {
		buddy := i ^ 1
		if r.free[o][buddy/64]&(1<<(buddy%64)) == 0 {
			break
		}
		p.clearFree(ri, o, buddy)
		i >>= 1
		o++
	}
	p.setFree(ri, o, i)
}

func (p *Pool) setFree(ri, o, i int) {
	r := &p.regions[ri]
	r.free[o][i/64] |= 1 << (i % 64)
	r.count[o]++
	if o == p.orders-1 {
		p.whole++
	}
	p.avail[ri/64][o] |= 1 << (ri % 64)
}

func (p *Pool) clearFree(ri, o, i int) {
	r := &p.regions[ri]
	r.free[o][i/64] &^= 1 << (i % 64)
	r.count[o]--
	if o == p.orders-1 {
		p.whole--
	}
	if r.count[o] == 0 {
		p.avail[ri/64][o] &^= 1 << (ri % 64)
	}
}

func firstBit(set []uint64) int {
	for w, v := range set {
		if v != 0 {
			return w*64 + bits.TrailingZeros64(v)
		}
	}
	panic("invariant broken: bufpool: free count without a free block")
}

// Regions is how many regions the pool may come to have; indices below it are
// valid for Region.
func (p *Pool) Regions() int { return len(p.taken) + len(p.arenas.taken) }

// Region returns region i's memory, or false while it has not been taken into
// use. Without locks.
func (p *Pool) Region(i int) ([]byte, bool) {
	if i >= len(p.taken) {
		return p.arenas.region(i)
	}
	if !p.taken[i].Load() {
		return nil, false
	}
	n := p.cfg.RegionBytes
	return p.arena[i*n : (i+1)*n : (i+1)*n], true
}

// RegionOf returns which region b lies in, wholly, and that region's memory; ok
// is false for memory that is not the pool's.
//
// Cost: 0 allocs, no lock: an address comparison.
func (p *Pool) RegionOf(b []byte) (index int, base []byte, ok bool) { // hot: 0 allocs
	if len(b) == 0 {
		return 0, nil, false
	}
	off := addrOf(b) - p.base // wraps far beyond len(arena) if b lies below
	if off >= uintptr(len(p.arena)) {
		return p.arenas.regionOf(b)
	}
	n := uintptr(p.cfg.RegionBytes)
	index = int(off / n)
	if off%n+uintptr(len(b)) > n || !p.taken[index].Load() {
		return 0, nil, false
	}
	return index, p.arena[index*int(n) : (index+1)*int(n)], true
}

// OffsetIn returns where b begins in base, both memory of one region.
func OffsetIn(base, b []byte) int { return int(addrOf(b) - addrOf(base)) }
