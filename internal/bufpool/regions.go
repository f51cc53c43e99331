package bufpool

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// Regions has the addresses of a pool's regions for a device, which has to be told of a region before it accesses
// memory of it: once, when memory of the region is first used. Any goroutine may call its methods.
type Regions struct {
	pool *Pool
	tell func(base []byte) (at uint64, err error)
	// at has the address of each region, plus 1. 0: the device was not told of it yet; refused: tell has failed, with
	// the error in why.
	at []atomic.Uint64

	// mu guards why, and admits one call of tell at a time.
	mu  sync.Mutex
	why error
}

// refused is in Regions.at for a region of which the device cannot be told.
const refused = ^uint64(0)

// Init makes r the regions of a pool, which may be nil. tell tells the device of a region, and returns the region's
// address for the device.
func (r *Regions) Init(p *Pool, tell func(base []byte) (at uint64, err error)) {
	r.pool, r.tell = p, tell
	if p != nil {
		r.at = make([]atomic.Uint64, p.Regions())
	}
}

// Address returns the address of memory for the device, or false if b is not in the pool, or the device cannot access
// its region.
func (r *Regions) Address(b []byte) (uint64, bool) { // hot: 0 allocs
	if r.pool == nil {
		return 0, false
	}
	i, base, ok := r.pool.RegionOf(b)
	if !ok {
		return 0, false
	}
	at := r.at[i].Load()
	if at == 0 {
		at = r.add(i, base)
	}
	if at == refused {
		return 0, false
	}
	return at - 1 + uint64(OffsetIn(base, b)), true
}

// add tells the device of a region, and returns what is then in at for it.
func (r *Regions) add(i int, base []byte) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.at[i].Load(); at != 0 {
		return at
	}
	address, err := r.tell(base)
	at := address + 1
	if err != nil {
		at, r.why = refused, fmt.Errorf("data is copied: %w", err)
	}
	r.at[i].Store(at)
	return at
}

// Refused returns why the device cannot access a region, or nil if it can access all of which it was told.
func (r *Regions) Refused() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.why
}
