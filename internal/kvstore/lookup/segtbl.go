package lookup

import (
	"encoding/binary"
	"math/bits"

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
	// used counts the segments that are not empty by class: the low classBits bits of their numbers. So a List passes
	// the empty segments of a table that was once full of keys quickly. Their length is a power of two.
	used      []uint32
	classBits int
}

// classSegments is how many segments a class has in a table of the greatest length, at most.
const classSegments = 4096

// NewSegTbl returns an empty table in mem, which is not touched before it is needed. Besides it has 4 bytes for every
// 2048 to 4096 segments.
func NewSegTbl(mem []byte) SegTbl {
	t := SegTbl{mem: mem[:len(mem)/EntryBytes*EntryBytes]}
	t.classBits = max(1, bits.Len(uint((t.Max()-1)/classSegments)))
	t.used = make([]uint32, 1<<t.classBits)
	return t
}

// Grow extends the table to n segments, at most Max. The new ones are empty.
func (t *SegTbl) Grow(n uint32) {
	clear(t.mem[int(t.n)*EntryBytes : int(n)*EntryBytes])
	t.Extend(n)
}

// Extend extends the table to n segments, at most Max, whose entries Load gives.
func (t *SegTbl) Extend(n uint32) {
	t.n = n
	t.mask = max(1, uint32(1)<<bits.Len32(n)-1)
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
func (t *SegTbl) Bits(i uint32) int {
	n := bits.Len32(t.mask)
	// A segment below half of the mask is decided by one bit less as long as it has not been split.
	if half := t.mask>>1 + 1; i < half && i+half >= t.n {
		n--
	}
	return n
}

// Empty is the number of low bits of a hash that belongs to segment i, such that the segments of all hashes with these
// bits are empty: those of i itself, or fewer if many segments around it are empty; 0 if i is not empty.
func (t *SegTbl) Empty(i uint32) int {
	if t.Get(i) != 0 {
		return 0
	}
	if n := t.Bits(i); n <= t.classBits || t.used[t.class(i)] > 0 {
		return n
	}
	return t.classBits
}

func (t *SegTbl) class(i uint32) uint32 { return i & uint32(len(t.used)-1) }

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
	if was := t.Get(i); (was == 0) != (e == 0) {
		if e == 0 {
			t.used[t.class(i)]--
		} else {
			t.used[t.class(i)]++
		}
	}
	binary.LittleEndian.PutUint32(b, uint32(e))
	b[4] = byte(e >> 32)
}

// Load changes the bytes of the entries from offset on. The table must be loaded from its beginning to its end, and
// nothing else may change it meanwhile.
func (t *SegTbl) Load(offset int64, data []byte) {
	n := copy(t.Bytes()[offset:], data)
	for i := offset / EntryBytes; (i+1)*EntryBytes <= offset+int64(n); i++ {
		if t.Get(uint32(i)) != 0 {
			t.used[t.class(uint32(i))]++
		}
	}
}
