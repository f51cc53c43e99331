package format

import (
	"fmt"
	"hash/crc32"
)

// Segment is a view of a segment in the key log: all keys whose hash belongs to one segment number. A segment is
// written as a whole at every change. The view may be longer than the record.
//
//	0  u32  CRC32C of the rest, from Seed       16 u32  segment number
//	4  u8   magic 's' or 'l'                    20 u16  length in bytes, of header and items
//	5  u40  durable versions                    22 u13  number of items
//	10 u48  version of the record                  u3   extra units
//	                                            24 u64  clock
//	                                            32 u3   version width: 0, or 1 to 7 for 2 to 8
//	                                               u5   hash bits
//	                                            33 …    items, changes, zeroes
//
// The record is its length, rounded up to KeyUnit, and the extra units. The space behind the items holds the changes
// (Change).
//
// Versions of records in the key log ascend without gaps, except where a write did not end. The durable versions are
// two numbers of 20 bits, from and to: when this segment was written, the writes of all versions from version-from to
// version-to had ended. If recovery does not find one of them it was damaged, and not torn by a crash.
//
// The clock is at least the version of each object that the segment has or had, so that recovery knows which versions
// were given, also to Deletes. Items have only the low bytes of their versions, as many as the version width says: the
// version is the greatest number up to the clock with these low bytes. See Item.
//
// The hash bits are how many low bits of a key's hash decided, when the segment was written, whether the key belongs to
// it, modulo 32; 0: that is not known. If it is still as many, the segment was not split since, and all of its keys
// belong to it. If it is n, there was no segment with a number greater by 2^n: see Summary.Merges.
//
// A segment with the magic 'l' is lossy: an earlier record of it was damaged, and it has only what was written since.
// Of a key without an item it is not known whether it exists. That is why a deleted key has an item there.
//
// Segments of versions 2 and 3 of the format have the magic 'S' or 'L', no clock and no version width: the items begin
// at byte 24. They are read as if the clock were 1 and the width 0, so that all objects have version 1. Upgrade makes
// such a segment one of version 4.
type Segment []byte

const (
	// SegmentHeaderBytes is the length of a segment without items. Those of old versions have less.
	SegmentHeaderBytes = 33
	// MinSegmentBytes is the shortest header of a segment, of an old version.
	MinSegmentBytes = 24
	oldSegmentBytes = MinSegmentBytes
	// UpgradeBytes is how much longer Upgrade makes a segment, at most.
	UpgradeBytes = SegmentHeaderBytes - oldSegmentBytes
	// MaxSegmentBytes is the longest segment that is made longer.
	MaxSegmentBytes = 1<<16 - KeyUnit
	// LongestSegment is the longest segment that there may be: one of MaxSegmentBytes that was upgraded.
	LongestSegment = MaxSegmentBytes + UpgradeBytes

	segmentMagic, oldSegmentMagic = 's', 'S'
	lossyMagic, oldLossyMagic     = 'l', 'L'
	segMagic                      = 4
	segDurable                    = 5
	segVersion                    = 10
	segNumber                     = 16
	segLength                     = 20
	segItems                      = 22
	segClock                      = 24
	segWidth                      = 32
	widthBits, widthMask          = 3, 1<<3 - 1
)

// Version is the version of the record, not that of an object.
func (b Segment) Version() uint64      { return uint48(b[segVersion:]) }
func (b Segment) SetVersion(v uint64)  { putUint48(b[segVersion:], v) }
func (b Segment) Number() uint32       { return le.Uint32(b[segNumber:]) }
func (b Segment) SetNumber(v uint32)   { le.PutUint32(b[segNumber:], v) }
func (b Segment) LengthBytes() int     { return int(le.Uint16(b[segLength:])) }
func (b Segment) SetLengthBytes(v int) { le.PutUint16(b[segLength:], uint16(v)) }
func (b Segment) Items() int           { return int(le.Uint16(b[segItems:]) & maxItems) }

// SetItems sets the number of items, and the number of extra units to 0.
func (b Segment) SetItems(v int) { le.PutUint16(b[segItems:], uint16(v)) }

// Old reports whether the segment was written with version 2 or 3 of the format.
func (b Segment) Old() bool { return b[segMagic] == oldSegmentMagic || b[segMagic] == oldLossyMagic }

// First is the offset of the first item.
func (b Segment) First() int {
	if b.Old() {
		return oldSegmentBytes
	}
	return SegmentHeaderBytes
}

// Clock is at least the version of each object that the segment has or had. Recode sets it.
func (b Segment) Clock() uint64 {
	if b.Old() {
		return 1
	}
	return le.Uint64(b[segClock:])
}

// Width is how many bytes of its version each item with a key has.
func (b Segment) Width() int {
	if b.Old() {
		return 0
	}
	if w := int(b[segWidth] & widthMask); w > 0 {
		return w + 1
	}
	return 0
}

func (b Segment) setWidth(w int) { b[segWidth] = b[segWidth]&^widthMask | byte(max(0, w-1)) }

// DecidedBy reports whether that number of low bits of a key's hash decided, when SetDecidedBy was called last, whether
// the key belongs to the segment.
func (b Segment) DecidedBy(bits int) bool {
	return !b.Old() && b[segWidth]>>widthBits != 0 && b[segWidth]>>widthBits == byte(bits&31)
}

func (b Segment) SetDecidedBy(bits int) {
	b[segWidth] = b[segWidth]&widthMask | byte(bits&31)<<widthBits
}

// Limit is how many segments there were at most when the segment was written: one more would have had a part of its
// keys. 0: that is not known.
func (b Segment) Limit() int64 {
	if b.Old() || b[segWidth]>>widthBits == 0 {
		return 0
	}
	return int64(b.Number()) + 1<<(b[segWidth]>>widthBits)
}

// Lossy reports whether the segment lacks keys that were lost.
func (b Segment) Lossy() bool { return b[segMagic] == lossyMagic || b[segMagic] == oldLossyMagic }

// SetLossy makes a segment, which must not be an old one, lossy or complete.
func (b Segment) SetLossy(lossy bool) {
	if b[segMagic] = segmentMagic; lossy {
		b[segMagic] = lossyMagic
	}
}

// maxItems is what the field for the number of items can hold. The longest segment has fewer.
const maxItems = 1<<13 - 1

// ExtentBytes is the length of the record in the key log.
func (b Segment) ExtentBytes() int {
	return RoundUp(b.LengthBytes(), KeyUnit) + int(le.Uint16(b[segItems:])>>13)*KeyUnit
}

// maxBack is how far back the durable versions can reach.
const maxBack = 1<<20 - 1

// Durable returns the first and the last version that were durable when the segment was written. If first > last there
// are none.
func (b Segment) Durable() (first, last uint64) {
	v := uint40(b[segDurable:])
	if v == 0 {
		return 1, 0
	}
	return b.Version() - min(b.Version(), v>>20), b.Version() - min(b.Version(), v&maxBack)
}

// SetDurable sets the durable versions, or as many of them as the field can hold. The version must be set before.
func (b Segment) SetDurable(first, last uint64) {
	putUint40(b[segDurable:], 0)
	if v := b.Version(); first <= last && last < v && v-last <= maxBack {
		putUint40(b[segDurable:], min(v-first, maxBack)<<20|v-last)
	}
}

// Item returns the item at an offset. The first one is at First, the next one behind the LengthBytes of the one before.
func (b Segment) Item(off int) Item { return Item{seg: b, at: off} }

// Begins reports whether b has the magic of a segment, valid or not.
func (b Segment) Begins() bool {
	return len(b) >= oldSegmentBytes && (b.Old() || b[segMagic] == segmentMagic || b[segMagic] == lossyMagic)
}

// Seal computes the checksum of a segment whose seed is given. The magic is set if it has none.
func (b Segment) Seal(seed uint32) {
	if !b.Begins() {
		b.SetLossy(false)
	}
	le.PutUint32(b, crc32.Update(seed, castagnoli, b[4:b.ExtentBytes()]))
}

// Check verifies the checksum, which Seal computed from the same seed, and that the items fill the length exactly.
// After it all views of items are within bounds. It does not check the segment number, which the caller compares with
// the one that it expects, nor whether a key occurs twice.
//
// Errors: ErrCorrupt naming the field.
//
// hot: 0 allocs (if nothing is wrong)
func (b Segment) Check(seed uint32) error {
	_, err := b.CheckFor(seed, nil)
	return err
}

// CheckFor is Check and Find, for who needs nothing but the item of a key. The checksum says that the bytes are those
// that were written. So the items in front of the key's are only walked over, within bounds, and those behind are not
// looked at. Everything is verified if the key has no item, or one that others belong to.
//
// hot: 0 allocs (if nothing is wrong)
func (b Segment) CheckFor(seed uint32, key []byte) (at int, err error) {
	if err := b.checkHeader(seed); err != nil {
		return 0, err
	}
	if at := b.findSimple(key); at > 0 {
		return at, nil
	}
	return b.checkItems(key)
}

func (b Segment) checkHeader(seed uint32) error {
	const what = "segment"
	switch {
	case len(b) < oldSegmentBytes:
		return bad(what, "length", len(b), "at least 24")
	case !b.Begins():
		return bad(what, "magic", b[segMagic], segmentMagic)
	case b.LengthBytes() < b.First() || b.LengthBytes() > min(len(b), LongestSegment):
		return bad(what, "length", b.LengthBytes(), fmt.Sprintf("%d to %d", b.First(), min(len(b), LongestSegment)))
	case b.ExtentBytes() > len(b):
		return bad(what, "length with all units", b.ExtentBytes(), fmt.Sprintf("at most %d", len(b)))
	}
	if got, want := le.Uint32(b), crc32.Update(seed, castagnoli, b[4:b.ExtentBytes()]); got != want {
		return bad(what, "CRC32C", checksum(got), checksum(want))
	}
	return nil
}

// findSimple returns the offset of the item of a key in a segment whose header is valid, if that item is valid and no
// others belong to it. 0 is inconclusive: the key may have an item.
func (b Segment) findSimple(key []byte) int {
	if len(key) == 0 || len(key) > MaxKey || b.Old() {
		return 0
	}
	b = b[:b.LengthBytes()]
	width, want := b.Width(), tailOf(key)
	first, n, alike := byte(0), ItemHeaderBytes, false
	for off := SegmentHeaderBytes; off < len(b); {
		if b[off] != first { // see FindNumber
			first = b[off]
			n = itemBytes(first, width)
			alike = int(first&itemKeyLen) == len(key)
		}
		next := off + n
		if next > len(b) {
			return 0
		}
		if alike && want.endsAt(b, next) && want.headIs(b, next, key) {
			if next < len(b) && b[next]&itemKeyLen-1 >= identityKey-1 || !b.usual(off, width) {
				return 0
			}
			return off
		}
		off = next
	}
	return 0
}

// usual reports whether the item of a key, which is within the segment, is valid.
func (b Segment) usual(off, width int) bool {
	it, clock := b.Item(off), b.Clock()
	return it.ValueLen() <= MaxValue && (clock>>(8*width) > 0 || it.Version()-1 < clock)
}

// checkItems verifies the items of a segment whose header is right, and returns the offset of the item of a key, or 0
// if there is none.
func (b Segment) checkItems(want []byte) (at int, err error) {
	const what = "segment"
	items, end := b.Items(), b.LengthBytes()
	off, i, whole := b.First(), 0, 0
	if !b.Old() {
		if off, i, whole = b.skipUsual(off, items, b.Width(), b.Clock()); i == items && off == end {
			return b.Find(want), nil // as nearly always
		}
	}
	c := itemCheck{seg: b, clock: b.Clock(), width: b.Width(), old: b.Old(), key: i > 0, whole: whole}
	for ; i < items; i++ {
		if !c.old {
			to, n, length := b.skipUsual(off, items-i, c.width, c.clock)
			if n > 0 {
				c.whole, c.key = length, true
				off = to
				if i += n; i == items {
					break
				}
			}
		}
		if off >= end || off+itemBytes(b[off], c.width) > end {
			return 0, bad(what, "number of items", items, i)
		}
		if err := c.check(i, off); err != nil {
			return 0, err
		}
		off += itemBytes(b[off], c.width)
	}
	if off != end {
		return 0, bad(what, "length", end, off)
	}
	return b.Find(want), nil
}

// skipUsual walks over the usual items from an offset on, at most so many: those of keys, valid, checked without their
// views. It returns the offset behind them, how many there are, and the length of the value of the last one.
func (b Segment) skipUsual(off, most, width int, clock uint64) (to, n, valueLen int) {
	end, room := b.LengthBytes(), len(b)-ItemHeaderBytes-8
	low := uint64(1)<<(8*width) - 1 // the low bytes of versions
	anyVersion := clock > low
	first, length, isKey := byte(0), ItemHeaderBytes, false
	for ; n < most && off <= room; n++ {
		head := le.Uint64(b[off:])
		if byte(head) != first { // most items are as long as the one before, see FindNumber
			first = byte(head)
			length = itemBytes(first, width)
			isKey = first&itemKeyLen-1 < MaxKey
		}
		value, v := head>>8&0xffffff, le.Uint64(b[off+ItemHeaderBytes:])&low
		if !isKey || off+length > end || value > MaxValue || !anyVersion && v-1 >= clock {
			break
		}
		off, valueLen = off+length, int(value)
	}
	return off, n, valueLen
}

// itemCheck verifies the items of a segment, one after the other.
type itemCheck struct {
	seg   Segment
	clock uint64
	width int
	old   bool
	// key: there was an item of a key. whole is the length of the value of the last one so far.
	key   bool
	whole int
}

// check verifies the item of that number and offset, which is within the segment.
func (c *itemCheck) check(i, off int) error {
	const what = "segment"
	it, b := c.seg.Item(off), c.seg[off:]
	named := func(field string) string { return fmt.Sprintf("%s of item %d", field, i) }
	switch {
	case c.old && b[0] > MaxKey:
		return bad(what, named("key length"), b[0], "1 to 16")
	case it.Continues():
		if c.whole == 0 || it.ValueLen() == 0 || it.flags()&^flagLong != 0 {
			return bad(what, named("key length"), b[0], "1 to 16")
		}
	case it.IsIdentity():
		if !c.key || it.flags() != 0 {
			return bad(what, named("key length"), b[0], "1 to 16")
		}
		c.whole = 0
		return nil
	case it.KeyLen() > MaxKey:
		return bad(what, named("key length"), it.KeyLen(), "1 to 16")
	case it.Version()-1 >= c.clock: // 0, or greater than the clock
		return bad(what, named("version"), it.Version(), fmt.Sprintf("1 to %d", c.clock))
	default:
		c.whole, c.key = 0, true
	}
	if c.whole += it.ValueLen(); c.whole > MaxValue {
		return bad(what, named("value length"), c.whole, "at most 1 MiB")
	}
	return nil
}
