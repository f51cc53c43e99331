package lookup

import (
	"encoding/binary"

	"jbofd/internal/units"
)

const (
	// EntryBytes is the length of an entry.
	EntryBytes = 5
	// FirstSegments is the number of segments of a new table.
	FirstSegments = 16
)

// placeUnit is the alignment of segments (format.KeyUnit).
const placeUnit = 32

// classBytes is how much is read for a segment of each length class.
var classBytes = [8]int{256, 384, 512, 768, 1024, 2048, 4096, 1 << 16}

// Entry is the place of a segment in the key log: 37 bits of offset in units of 32 bytes, and 3 bits for the class of
// its length. 0: the segment is empty.
type Entry uint64

// NewEntry returns the entry of a segment at an offset of the partition, a multiple of 32 below 4 TiB.
func NewEntry(offset units.ExtentOffset, lengthBytes int) Entry {
	class := 0
	for classBytes[class] < lengthBytes {
		class++
	}
	return Entry(offset/placeUnit<<3) | Entry(class)
}

// Offset is the segment's offset in the partition.
func (e Entry) Offset() units.ExtentOffset { return units.ExtentOffset(e>>3) * placeUnit }

// MaxBytes is an upper bound of the segment's length: what has to be read.
func (e Entry) MaxBytes() int { return classBytes[e&7] }

// SegTbl is the table of segments, the store's index: 5 bytes of DRAM for each segment. It grows by linear hashing.
// With n segments, 2^k <= n < 2^(k+1), the segment of a hash is its low k+1 bits, or its low k bits if there is no such
// segment yet. Therefore a new segment n takes keys from exactly one other, which is n without its highest bit.
//
// Source: LEED (SIGCOMM'23), section 3.2; there the table does not grow.
type SegTbl struct {
	mem []byte
	n   uint32
	// mask is 2^(k+1) - 1.
	mask uint32
}

// NewSegTbl returns an empty table in mem, which is not touched before it is needed.
func NewSegTbl(mem []byte) SegTbl { return SegTbl{mem: mem[:len(mem)/EntryBytes*EntryBytes]} }

// Grow extends the table to n segments, at most Max. The new ones are empty.
func (t *SegTbl) Grow(n uint32) {
	clear(t.mem[int(t.n)*EntryBytes : int(n)*EntryBytes])
	t.n = n
	for t.mask = 1; t.mask < n; t.mask = t.mask<<1 | 1 {
	}
}

// Len is the number of segments.
func (t *SegTbl) Len() uint32 { return t.n }

// Max is the largest possible number of segments.
func (t *SegTbl) Max() int { return len(t.mem) / EntryBytes }

// Bytes are all entries, in the order of the segments' numbers.
func (t *SegTbl) Bytes() []byte { return t.mem[:int(t.n)*EntryBytes] }

// Segment returns the number of the segment that a hash belongs to.
func (t *SegTbl) Segment(hash uint64) uint32 { // hot: 0 allocs
	i := uint32(hash) & t.mask
	if i >= t.n {
		i &= t.mask >> 1
	}
	return i
}

// Bits is the number of low bits of a hash that decide whether it belongs to segment i.
func (t *SegTbl) Bits(i uint32) (bits int) {
	for 1<<bits <= t.mask {
		bits++
	}
	// A segment below half of the mask is decided by one bit less as long as it has not been split.
	if half := t.mask>>1 + 1; i < half && i+half >= t.n {
		bits--
	}
	return bits
}

// Room is the number of segments that can be added whose sources are in the table already.
func (t *SegTbl) Room() int { return min(int(t.mask)+1, t.Max()) - int(t.n) }

// Source is the segment from which a new one, one of the next Room, takes keys.
func (t *SegTbl) Source(number uint32) uint32 { return number & (t.mask >> 1) }

// Moves reports whether a key of the source goes to the new segment.
func (t *SegTbl) Moves(hash uint64, number uint32) bool { return uint32(hash)&t.mask == number }

// Get returns the entry of a segment.
func (t *SegTbl) Get(i uint32) Entry { // hot: 0 allocs
	b := t.mem[int(i)*EntryBytes:][:EntryBytes]
	return Entry(binary.LittleEndian.Uint32(b)) | Entry(b[4])<<32
}

// Set changes the entry of a segment.
func (t *SegTbl) Set(i uint32, e Entry) { // hot: 0 allocs
	b := t.mem[int(i)*EntryBytes:][:EntryBytes]
	binary.LittleEndian.PutUint32(b, uint32(e))
	b[4] = byte(e >> 32)
}
