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

// SegTbl is the table of segments, the store's index: 5 bytes of DRAM for each segment. It grows and shrinks by linear
// hashing. With n segments, 2^k <= n < 2^(k+1), the segment of a hash is its low k+1 bits, or its low k bits if there
// is no such segment yet. Therefore a new segment n takes keys from exactly one other, which is n without its highest
// bit. Its keys go back there when the table shrinks.
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
	// occupied is the sum of used.
	occupied int
	// changed has a bit for each unit of entries that has changed since it was written to a checkpoint. units counts
	// them.
	changed []byte
	units   int
	// whole is the memory of mem and changed.
	whole []byte
}

// A unit is so many entries, which share a bit of SegTbl.changed.
const (
	UnitSegments = 4
	UnitBytes    = UnitSegments * EntryBytes
)

// inMem is the least memory of a table that has its bits of changed units there, behind the entries.
const inMem = 1 << 20

// classSegments is how many segments a class has in a table of the greatest length, at most.
const classSegments = 4096

// TableBytes is the length of the memory of a table of so many segments.
func TableBytes(segments int64) int64 {
	return segments*EntryBytes + segments/(8*UnitSegments) + 8*UnitBytes + 1
}

// NewSegTbl returns an empty table in mem, which is not touched before it is needed. Besides it has 4 bytes for every
// 2048 to 4096 segments.
func NewSegTbl(mem []byte) SegTbl {
	t := SegTbl{}
	t.lay(mem)
	t.classBits = classBitsFor(t.Max())
	t.used = make([]uint32, 1<<t.classBits)
	return t
}

func classBitsFor(most int) int { return max(1, bits.Len(uint((most-1)/classSegments))) }

// MemoryBytes is the memory that a table of n segments, of most that there may be, takes: the entries, their marks, and
// the counts of segments that are not empty.
func MemoryBytes(n uint32, most int) int64 {
	return int64(n)*EntryBytes + int64(n)/(8*UnitSegments) + 4<<classBitsFor(most)
}

// Grow extends the table to n segments, at most Max. The new ones are empty, and count as changed.
func (t *SegTbl) Grow(n uint32) {
	first := t.n
	clear(t.mem[int(first)*EntryBytes : int(n)*EntryBytes])
	t.Extend(n)
	for i := first; i < n; i += UnitSegments - i%UnitSegments {
		t.change(i)
	}
}

// Extend extends the table to n segments, at most Max, whose entries Load gives.
func (t *SegTbl) Extend(n uint32) {
	for i := (t.n + UnitSegments - 1) / UnitSegments; i*UnitSegments < n; {
		if i%8 == 0 && (i+8)*UnitSegments <= n {
			t.changed[i/8] = 0
			i += 8
			continue
		}
		t.changed[i/8] &^= 1 << (i % 8)
		i++
	}
	t.n = n
	t.mask = max(1, uint32(1)<<bits.Len32(n)-1)
}

// Shrink shortens the table to n segments, at least 1. The keys of those behind must have been merged into the others.
// All memory behind the entries that are left may be zeroed.
func (t *SegTbl) Shrink(n uint32) {
	for i := n; i < t.n; i++ {
		t.set(i, 0)
	}
	for u := (n + UnitSegments - 1) / UnitSegments; u*UnitSegments < t.n; u++ {
		if b, bit := &t.changed[u/8], byte(1)<<(u%8); *b&bit != 0 {
			*b &^= bit
			t.units--
		}
	}
	t.n = n
	t.mask = max(1, uint32(1)<<bits.Len32(n)-1)
}

// Buddy is the segment that the keys of the table's last one belong to if the table is shortened by it, and the number
// of low bits of their hashes that decide that. It is the Source of the last one.
func Buddy(last uint32) (into uint32, decidedBy int) {
	n := bits.Len32(last) - 1
	return last &^ (1 << n), n
}

// lay divides the memory of the table.
func (t *SegTbl) lay(mem []byte) {
	t.whole = mem
	n := len(mem) / (8*UnitBytes + 1)
	if len(mem) >= inMem {
		t.mem, t.changed = mem[:n*8*UnitBytes], mem[n*8*UnitBytes:][:n]
		return
	}
	t.mem = mem[:len(mem)/EntryBytes*EntryBytes]
	t.changed = make([]byte, len(t.mem)/(8*UnitBytes)+1)
}

// Capacity is how many segments a table in so many bytes of memory may have.
func Capacity(memBytes int) int {
	if memBytes >= inMem {
		return min(memBytes/(8*UnitBytes+1)*8*UnitSegments, maxSegments)
	}
	return memBytes / EntryBytes
}

// Memory is the memory of the table.
func (t *SegTbl) Memory() []byte { return t.whole }

// SetMemory gives the table other memory, which has room for the segments that there are. It begins with the content of
// the memory before, as far as it is not shorter than that; the memory before may be gone. Or it is a part of the same
// memory.
func (t *SegTbl) SetMemory(mem []byte) {
	n := (int(t.n)+UnitSegments-1)/UnitSegments/8 + 1
	marks := t.changed[:min(n, len(t.changed))]
	if len(t.whole) >= inMem && len(mem) >= len(t.whole) {
		marks = mem[len(t.mem):][:len(marks)]
	}
	t.lay(mem)
	copy(t.changed, marks)
}

// Len is the number of segments.
func (t *SegTbl) Len() uint32 { return t.n }

// Occupied is the number of segments that are not empty.
func (t *SegTbl) Occupied() int { return t.occupied }

// maxSegments is the most that a table may have, whatever memory there is: numbers have 32 bits.
const maxSegments = 1 << 31

// Max is the largest possible number of segments.
func (t *SegTbl) Max() int { return min(len(t.mem)/EntryBytes, maxSegments) }

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
	t.change(i)
	t.set(i, e)
}

func (t *SegTbl) set(i uint32, e Entry) {
	b := t.mem[int(i)*EntryBytes:][:EntryBytes]
	if was := t.Get(i); (was == 0) != (e == 0) {
		if e == 0 {
			t.used[t.class(i)]--
			t.occupied--
		} else {
			t.used[t.class(i)]++
			t.occupied++
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
			t.occupied++
		}
	}
}

// change marks the unit of segment i.
func (t *SegTbl) change(i uint32) {
	b, bit := &t.changed[i/(8*UnitSegments)], byte(1)<<(i/UnitSegments%8)
	if *b&bit == 0 {
		*b |= bit
		t.units++
	}
}

// Changed is the number of units that have changed since they were written to a checkpoint.
func (t *SegTbl) Changed() int { return t.units }

// maxPassed bounds how many units TakeChanged passes: for 20 µs.
const maxPassed = 8 * 8192

// TakeChanged returns the first changed unit from number from on, as if it had not changed any more, and the number
// from which to continue. Without one, unit is nil, and more says whether there may be one further on. A unit in which
// the table ends, at n segments, keeps its mark.
func (t *SegTbl) TakeChanged(from, n uint32) (unit []byte, number, next uint32, more bool) { // hot: 0 allocs
	units := (n + UnitSegments - 1) / UnitSegments
	end := min(units, from+maxPassed)
	for i := from; i < end; {
		b := &t.changed[i/8]
		if i%8 == 0 && *b == 0 {
			i += 8
			continue
		}
		if *b>>(i%8)&1 == 0 {
			i++
			continue
		}
		if t.keepsMark(i, n) {
			return t.mem[int(i)*UnitBytes : int(n)*EntryBytes], i, i + 1, true
		}
		*b &^= 1 << (i % 8)
		t.units--
		return t.mem[int(i)*UnitBytes:][:UnitBytes], i, i + 1, true
	}
	return nil, 0, end, end < units
}

// keepsMark reports whether a table of n segments ends in unit i, so that another one may be written to it later.
func (t *SegTbl) keepsMark(i, n uint32) bool { return (i+1)*UnitSegments > n }

// Unmark takes the marks of the units that begin from offset from to offset to of the entries, which were written to a
// checkpoint of n segments. A unit that has been written in part, and changes before the rest is, keeps its mark.
func (t *SegTbl) Unmark(from, to int64, n uint32) {
	for i := uint32((from + UnitBytes - 1) / UnitBytes); int64(i)*UnitBytes < to && !t.keepsMark(i, n); i++ {
		if b, bit := &t.changed[i/8], byte(1)<<(i%8); *b&bit != 0 {
			*b &^= bit
			t.units--
		}
	}
}

// LoadUnit changes the entries of a unit to those in a checkpoint, without a mark. Entries behind the end of the table
// do not count.
func (t *SegTbl) LoadUnit(number uint32, data []byte) {
	for i := range uint32(UnitSegments) {
		if n := number*UnitSegments + i; number <= t.n/UnitSegments && n < t.n {
			b := data[i*EntryBytes:]
			t.set(n, Entry(binary.LittleEndian.Uint32(b))|Entry(b[4])<<32)
		}
	}
}
