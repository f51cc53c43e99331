// Package slab holds records in tables whose memory comes from a pool that they share. A table names its records by
// their index, and takes and gives back memory in chunks: one without records has none, and many tables that are seldom
// busy at once need no more than what is in use.
//
//	Table ──┐ chunks of records
//	Table ──┼────────────────────> Pool, which keeps the free ones
//	Table ──┘
//
// A Pool and its Tables are for one goroutine at a time.
package slab

import (
	"fmt"
	"math/bits"

	"jbofd/internal/invariants"
	"jbofd/internal/list"
)

// Pool is memory for the records of several Tables.
type Pool[T any] struct {
	// shift is the logarithm of the number of records of a chunk.
	shift uint8
	free  [][]T
	// low is the smallest number of free chunks since the last Trim: so many were not needed.
	low int
}

// keep is how many free chunks a Pool keeps at least: they are for the next records after a pause.
const keep = 2

// NewPool returns a Pool whose chunks have that many records, a power of two up to 64.
func NewPool[T any](records int) *Pool[T] {
	if records < 1 || records > 64 || records&(records-1) != 0 {
		panic(fmt.Sprintf("slab: chunks of %d records", records))
	}
	return &Pool[T]{shift: uint8(bits.TrailingZeros(uint(records)))}
}

// take returns a chunk of zeroed records. It allocates when more are in use than before.
//
// hot: 0 allocs
func (p *Pool[T]) take() []T {
	n := len(p.free) - 1
	if n < 0 {
		return make([]T, 1<<p.shift)
	}
	c := p.free[n]
	p.free[n] = nil
	p.free, p.low = p.free[:n], min(p.low, n)
	return c
}

func (p *Pool[T]) put(c []T) { p.free = append(p.free, c) }

// Trim gives up the chunks that were not needed since the last Trim, but for a few, and reports whether there may be
// some to give up the next time.
func (p *Pool[T]) Trim() (more bool) {
	n := min(p.low, max(len(p.free)-keep, 0))
	// Chunks are taken from the end, so that those at the beginning were not used.
	left := copy(p.free, p.free[n:])
	clear(p.free[left:])
	p.free, p.low = p.free[:left], left
	return left > keep
}

// Free is the number of records in chunks that no Table has.
func (p *Pool[T]) Free() int { return len(p.free) << p.shift }

// Table is a number of records of a Pool. Init must be called first.
type Table[T any] struct {
	// Links are for lists of the Table's records.
	Links list.Links

	pool   *Pool[T]
	max, n int32
	chunks [][]T
	// taken says which records of each chunk are taken, a bit each. All chunks before open are full.
	taken []uint64
	open  int
}

// Init makes an empty Table of at most that many records.
func (t *Table[T]) Init(p *Pool[T], most int) { *t = Table[T]{pool: p, max: int32(most)} }

// N is the number of records.
func (t *Table[T]) N() int { return int(t.n) }

// Max is how many records there may be.
func (t *Table[T]) Max() int { return int(t.max) }

// Room is how many more there may be.
func (t *Table[T]) Room() int { return int(t.max - t.n) }

// End is above the index of each record.
func (t *Table[T]) End() int32 { return int32(len(t.chunks)) << t.pool.shift }

// Has reports whether there is a record with an index, which may be any number.
func (t *Table[T]) Has(i int32) bool {
	return i >= 0 && i < t.End() && t.taken[i>>t.pool.shift]>>(i&t.mask())&1 != 0
}

func (t *Table[T]) mask() int32 { return 1<<t.pool.shift - 1 }

// At returns a record. It stays where it is until it is put back.
//
// hot: 0 allocs
func (t *Table[T]) At(i int32) *T { return &t.chunks[i>>t.pool.shift][i&t.mask()] }

// Take adds a record, which is zero, and returns its index: the lowest one that is free. There must be Room. It
// allocates when the Tables of the Pool have more than before.
//
// hot: 0 allocs
func (t *Table[T]) Take() int32 {
	invariants.Check(t.n < t.max, "slab: a record more than there may be")
	all := ^uint64(0) >> (64 - 1<<t.pool.shift)
	for t.open < len(t.chunks) && t.taken[t.open] == all {
		t.open++
	}
	if t.open == len(t.chunks) {
		t.grow()
	}
	bit := bits.TrailingZeros64(^t.taken[t.open])
	t.taken[t.open] |= 1 << bit
	t.n++
	return int32(t.open<<t.pool.shift + bit)
}

// TakeAt adds a record with an index that is free.
//
// hot: 0 allocs
func (t *Table[T]) TakeAt(i int32) *T {
	for t.End() <= i {
		t.grow()
	}
	invariants.Check(!t.Has(i), "slab: a record is taken twice")
	t.taken[i>>t.pool.shift] |= 1 << (i & t.mask())
	t.n++
	return t.At(i)
}

func (t *Table[T]) grow() {
	t.chunks, t.taken = append(t.chunks, t.pool.take()), append(t.taken, 0)
	for len(t.Links) < int(t.End()) {
		t.Links = append(t.Links, list.NoRecord)
	}
}

// Put takes a record out of the Table.
//
// hot: 0 allocs
func (t *Table[T]) Put(i int32) {
	invariants.Check(t.Has(i), "slab: a record that is free is put back")
	c := int(i >> t.pool.shift)
	*t.At(i) = *new(T)
	t.taken[c] &^= 1 << (i & t.mask())
	t.n--
	t.open = min(t.open, c)
	for n := len(t.chunks) - 1; n >= 0 && t.taken[n] == 0; n-- {
		t.pool.put(t.chunks[n])
		t.chunks[n] = nil
		t.chunks, t.taken = t.chunks[:n], t.taken[:n]
	}
	t.open = min(t.open, len(t.chunks))
}
