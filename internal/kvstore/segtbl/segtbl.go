// Package segtbl is the DRAM of a key-value partition: a table with the place of each segment in the
// key log, 5 bytes each, that grows by linear hashing.
package segtbl

import "encoding/binary"

const (
	// EntryBytes is the DRAM of a segment.
	EntryBytes = 5
	// First is how many segments a new table has.
	First = 16
)

// placeUnit is what segments are aligned to (format.KeyUnit).
const placeUnit = 32

// classBytes are how much to read for a segment of each class.
var classBytes = [8]int{256, 384, 512, 768, 1024, 2048, 4096, 1 << 16}

// Entry says where a segment is: 37 bits of place in units of 32 bytes, 3 bits of class of
// length. 0: it is empty.
type Entry uint64

// NewEntry is that of a segment at an offset in the partition, a multiple of 32 below 4 TiB.
func NewEntry(offset int64, lengthBytes int) Entry {
	class := 0
	for classBytes[class] < lengthBytes {
		class++
	}
	return Entry(offset/placeUnit<<3) | Entry(class)
}

// Offset is the segment's place in the partition.
func (e Entry) Offset() int64 { return int64(e>>3) * placeUnit }

// MaxBytes is at least the segment's length.
func (e Entry) MaxBytes() int { return classBytes[e&7] }

// Table is the table of segments. With n segments, 2^k <= n < 2^(k+1), the segment of a hash is its low
// k+1 bits, or its low k bits if there is no such segment yet. So segment n takes keys from one
// other, n without its highest bit, and from no other.
type Table struct {
	mem []byte
	n   uint32
	// mask is 2^(k+1) - 1.
	mask uint32
}

// New is an empty table in that memory, which is not touched before it is needed.
func New(mem []byte) Table { return Table{mem: mem[:len(mem)/EntryBytes*EntryBytes]} }

// Grow makes the table n segments large, at most Max. The new ones are empty.
func (t *Table) Grow(n uint32) {
	clear(t.mem[int(t.n)*EntryBytes : int(n)*EntryBytes])
	t.n = n
	for t.mask = 1; t.mask < n; t.mask = t.mask<<1 | 1 {
	}
}

// Len is the number of segments.
func (t *Table) Len() uint32 { return t.n }

// Max is how many segments there may be.
func (t *Table) Max() int { return len(t.mem) / EntryBytes }

// Bytes are the entries in the order of their numbers.
func (t *Table) Bytes() []byte { return t.mem[:int(t.n)*EntryBytes] }

// Segment returns the segment of a hash.
func (t *Table) Segment(hash uint64) uint32 { // hot: 0 allocs
	i := uint32(hash) & t.mask
	if i >= t.n {
		i &= t.mask >> 1
	}
	return i
}

// Bits is how many low bits of a hash decide that its segment is i.
func (t *Table) Bits(i uint32) (bits int) {
	for 1<<bits <= t.mask {
		bits++
	}
	// Those below half the mask have the longer number only if their other half is in the table.
	if half := t.mask>>1 + 1; i < half && i+half >= t.n {
		bits--
	}
	return bits
}

// Room is how many segments can be added whose sources are in the table already.
func (t *Table) Room() int { return min(int(t.mask)+1, t.Max()) - int(t.n) }

// Source is the segment that the new one takes keys from, one of the next Room.
func (t *Table) Source(number uint32) uint32 { return number & (t.mask >> 1) }

// Moves reports whether a key of its source goes to that new segment.
func (t *Table) Moves(hash uint64, number uint32) bool { return uint32(hash)&t.mask == number }

// Get returns the entry of a segment.
func (t *Table) Get(i uint32) Entry { // hot: 0 allocs
	b := t.mem[int(i)*EntryBytes:][:EntryBytes]
	return Entry(binary.LittleEndian.Uint32(b)) | Entry(b[4])<<32
}

// Set changes it.
func (t *Table) Set(i uint32, e Entry) { // hot: 0 allocs
	b := t.mem[int(i)*EntryBytes:][:EntryBytes]
	binary.LittleEndian.PutUint32(b, uint32(e))
	b[4] = byte(e >> 32)
}
