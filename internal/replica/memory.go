package replica

import (
	"fmt"
	"math/bits"

	"jbofd/internal/invariants"
)

// Memory is the memory for the values of the replicas of one partition: a region for each distance from the end of a
// chain. The last member of a chain frees a value when its own store has it; each member upstream also waits for all
// members downstream. If replicas at different distances shared a region, chains in a cycle could wait for each other's
// memory for ever.
//
// A region is divided into blocks by halving (a buddy allocator), so that a block is found, and joined with its
// neighbour again, in a few steps. The unused rest of a value's block is freed at once, as blocks of its own: with the
// header in front of it, a value of 4096 bytes would otherwise take 8192.
type Memory struct{ regions []region }

// unitBytes is the length of the shortest block.
const unitBytes = 512

// region is the memory of one place.
type region struct {
	buf []byte
	// first are the free blocks of each order, which are unitBytes<<order long, as lists that are linked in both
	// directions by the number of the first unit. order is that of a free block, or notFree.
	first      []int32
	next, prev []int32
	order      []uint8
	// taken is how many bytes are in blocks that are taken.
	taken int
}

const (
	noUnit  = -1
	notFree = 0xFF
)

// block is a piece of a region. The zero block is none.
type block struct {
	unit, units int32
	place       uint8
	taken       bool
}

// NewMemory returns a Memory with a region of that length, a power of two, for each place. The regions are the
// caller's memory, if alloc is set, and are used until the Memory is.
//
// Errors: those of alloc.
func NewMemory(places, bytes int, alloc func(n int) ([]byte, error)) (*Memory, error) {
	if places < 1 || bytes < unitBytes || bytes&(bytes-1) != 0 {
		panic(fmt.Sprintf("replica: %d regions of %d bytes", places, bytes))
	}
	m := &Memory{regions: make([]region, places)}
	for i := range m.regions {
		r := &m.regions[i]
		var err error
		if r.buf, err = alloc(bytes); err != nil {
			return nil, err
		}
		units := bytes / unitBytes
		r.next, r.prev, r.order = make([]int32, units), make([]int32, units), make([]uint8, units)
		for u := range r.order {
			r.order[u] = notFree
		}
		r.first = make([]int32, bits.Len(uint(units)))
		for o := range r.first {
			r.first[o] = noUnit
		}
		r.push(0, uint8(len(r.first)-1))
	}
	return m, nil
}

// take takes a block of at least n bytes, n > 0, of a place, or reports that there is none.
//
// hot: 0 allocs
func (m *Memory) take(place, n int) (b block, ok bool) {
	place = min(place, len(m.regions)-1)
	r := &m.regions[place]
	order := bits.Len(uint((n - 1) / unitBytes))
	o := order
	for o < len(r.first) && r.first[o] == noUnit {
		o++
	}
	if o >= len(r.first) {
		return block{}, false
	}
	u := r.first[o]
	r.unlink(u)
	for o > order {
		o--
		r.push(u+1<<o, uint8(o))
	}
	units := int32((n + unitBytes - 1) / unitBytes)
	r.pushAll(u+units, u+1<<order)
	r.taken += int(units) * unitBytes
	return block{unit: u, units: units, place: uint8(place), taken: true}, true
}

// pushAll makes blocks of the units from one to another, and joins them with their neighbours.
func (r *region) pushAll(from, to int32) {
	for from < to {
		o := min(bits.TrailingZeros32(uint32(from)|1<<30), bits.Len32(uint32(to-from))-1)
		r.join(from, uint8(o))
		from += 1 << o
	}
}

// join makes a free block, together with its neighbours that are free.
func (r *region) join(u int32, o uint8) {
	for int(o) < len(r.first)-1 {
		other := u ^ 1<<o
		if r.order[other] != o {
			break
		}
		r.unlink(other)
		u = min(u, other)
		o++
	}
	r.push(u, o)
}

// bytes returns the first n bytes of a block.
func (m *Memory) bytes(b block, n int) []byte {
	at := int(b.unit) * unitBytes
	return m.regions[b.place].buf[at : at+n : at+int(b.units)*unitBytes]
}

// put gives a block back.
//
// hot: 0 allocs
func (m *Memory) put(b block) {
	r := &m.regions[b.place]
	r.taken -= int(b.units) * unitBytes
	if invariants.Enabled { // whoever still uses the block finds something else
		all := m.bytes(b, int(b.units)*unitBytes)
		for i := range all {
			all[i] = 0xEE
		}
	}
	r.pushAll(b.unit, b.unit+b.units)
}

// isHalfFree reports whether half of a place is free, or more.
func (m *Memory) isHalfFree(place int) bool {
	r := &m.regions[min(place, len(m.regions)-1)]
	return 2*r.taken <= len(r.buf)
}

func (r *region) push(u int32, order uint8) {
	f := r.first[order]
	if r.next[u], r.prev[u], r.order[u] = f, noUnit, order; f != noUnit {
		r.prev[f] = u
	}
	r.first[order] = u
}

func (r *region) unlink(u int32) {
	n, p := r.next[u], r.prev[u]
	if n != noUnit {
		r.prev[n] = p
	}
	if p != noUnit {
		r.next[p] = n
	} else {
		r.first[r.order[u]] = n
	}
	r.order[u] = notFree
}
