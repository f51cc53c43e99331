package format

import (
	"fmt"
	"hash/crc32"

	"jbofd/internal/units"
)

// Segment is a view of a segment in the key log: all keys whose hash belongs to one segment number. A segment is
// written as a whole at every change. The view may be longer than the record.
//
//	0  u32  CRC32C of the rest, from Seed       16 u32  segment number
//	4  u8   magic 'S' or 'L'                    20 u16  length in bytes, of header and items
//	5  u40  durable versions                    22 u13  number of items
//	10 u48  version                                u3   extra units
//	                                            24 …    items, changes, zeroes
//
// The record is its length, rounded up to KeyUnit, and the extra units. The space behind the items holds the changes
// (Change).
//
// Versions in the key log ascend without gaps, except where a write did not end. The durable versions are two numbers
// of 20 bits, from and to: when this segment was written, the writes of all versions from version-from to version-to
// had ended. If recovery does not find one of them it was damaged, and not torn by a crash.
//
// An item is 9 bytes and the key:
//
//	0  u8   length of the key, 1 to 16, or 0    4  u40  place of the value in units of 8 bytes,
//	1  u24  length of the value                         0 for a value of length 0,
//	                                                    1 for a key that does not exist (Item.Gone)
//	                                            9  …    key
//
// The value of a key may be in several pieces, each with a record of its own. The item of the key has the first piece.
// Items without a key, right behind it, have the others in order (Item.Continues).
//
// A segment with the magic 'L' is lossy: an earlier record of it was damaged, and it has only what was written since.
// Of a key without an item it is not known whether it exists. That is why a deleted key has an item there.
type Segment []byte

const (
	// SegmentHeaderBytes is the length of a segment without items.
	SegmentHeaderBytes = 24
	// ItemHeaderBytes is the length of an item without its key.
	ItemHeaderBytes = 9
	// MaxSegmentBytes is the longest segment.
	MaxSegmentBytes = 1<<16 - KeyUnit

	segmentMagic = 'S'
	lossyMagic   = 'L'
	segMagic     = 4
	segDurable   = 5
	segVersion   = 10
	segNumber    = 16
	segLength    = 20
	segItems     = 22
)

func (b Segment) Version() uint64      { return uint48(b[segVersion:]) }
func (b Segment) SetVersion(v uint64)  { putUint48(b[segVersion:], v) }
func (b Segment) Number() uint32       { return le.Uint32(b[segNumber:]) }
func (b Segment) SetNumber(v uint32)   { le.PutUint32(b[segNumber:], v) }
func (b Segment) LengthBytes() int     { return int(le.Uint16(b[segLength:])) }
func (b Segment) SetLengthBytes(v int) { le.PutUint16(b[segLength:], uint16(v)) }
func (b Segment) Items() int           { return int(le.Uint16(b[segItems:]) & maxItems) }

// SetItems sets the number of items, and the number of extra units to 0.
func (b Segment) SetItems(v int) { le.PutUint16(b[segItems:], uint16(v)) }

// Lossy reports whether the segment lacks keys that were lost.
func (b Segment) Lossy() bool { return b[segMagic] == lossyMagic }

// SetLossy makes the segment lossy or complete.
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

// Item returns the item at an offset. The first one is at SegmentHeaderBytes, the next one behind the LengthBytes of
// the one before.
func (b Segment) Item(off int) Item { return Item(b[off:]) }

// Seal computes the checksum of a segment whose seed is given.
func (b Segment) Seal(seed uint32) {
	b.SetLossy(b.Lossy())
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
	const what = "segment"
	switch {
	case len(b) < SegmentHeaderBytes:
		return bad(what, "length", len(b), "at least 24")
	case !b.Begins():
		return bad(what, "magic", b[segMagic], segmentMagic)
	case b.LengthBytes() < SegmentHeaderBytes || b.LengthBytes() > min(len(b), MaxSegmentBytes):
		return bad(what, "length", b.LengthBytes(), fmt.Sprintf("24 to %d", min(len(b), MaxSegmentBytes)))
	case b.ExtentBytes() > len(b):
		return bad(what, "length with all units", b.ExtentBytes(), fmt.Sprintf("at most %d", len(b)))
	}
	if got, want := le.Uint32(b), crc32.Update(seed, castagnoli, b[4:b.ExtentBytes()]); got != want {
		return bad(what, "CRC32C", fmt.Sprintf("%#08x", got), fmt.Sprintf("%#08x", want))
	}
	off := SegmentHeaderBytes
	whole := 0 // the length of the value of the last key so far
	for i := range b.Items() {
		if off+ItemHeaderBytes > b.LengthBytes() {
			return bad(what, "number of items", b.Items(), i)
		}
		it := b.Item(off)
		if !it.Continues() {
			whole = 0
		}
		switch {
		case it.Continues() && (whole == 0 || it.ValueLen() == 0) || it.KeyLen() > MaxKey:
			return bad(what, fmt.Sprintf("key length of item %d", i), it.KeyLen(), "1 to 16")
		case whole+it.ValueLen() > MaxValue:
			return bad(what, fmt.Sprintf("value length of item %d", i), whole+it.ValueLen(), "at most 1 MiB")
		}
		whole += it.ValueLen()
		off += it.LengthBytes()
	}
	if off != b.LengthBytes() {
		return bad(what, "length", b.LengthBytes(), off)
	}
	return nil
}

// Item is a view of an item of a segment.
type Item []byte

// Continues reports whether the item has no key but a piece of the value of the key before it.
func (b Item) Continues() bool { return b[0] == 0 }

func (b Item) KeyLen() int     { return int(b[0]) }
func (b Item) SetKeyLen(v int) { b[0] = byte(v) }

// ValueLen is the length of the value, or of the item's piece of it.
func (b Item) ValueLen() int     { return int(uint24(b[1:])) }
func (b Item) SetValueLen(v int) { putUint24(b[1:], uint32(v)) }
func (b Item) Key() []byte       { return b[ItemHeaderBytes : ItemHeaderBytes+b.KeyLen()] }
func (b Item) LengthBytes() int  { return ItemHeaderBytes + b.KeyLen() }

// ValueOffset is the offset of the value, or of the item's piece of it, in the partition.
func (b Item) ValueOffset() units.ExtentOffset     { return units.ExtentOffset(uint40(b[4:])) * ValueUnit }
func (b Item) SetValueOffset(v units.ExtentOffset) { putUint40(b[4:], uint64(v)/ValueUnit) }

// gonePlace is the place, in units of ValueUnit, of a key that does not exist. No value is there.
const gonePlace = 1

// Gone reports whether the item says that its key does not exist. Only lossy segments have such items.
func (b Item) Gone() bool { return b.ValueLen() == 0 && uint40(b[4:]) == gonePlace }

// SetGone makes the item say that its key does not exist.
func (b Item) SetGone() {
	b.SetValueLen(0)
	putUint40(b[4:], gonePlace)
}

// Value is a view of a value in the value log. It may be longer than the record.
//
//	0  u32  CRC32C of the rest, from Seed       8  u64  hash of the key
//	4  u8   magic 'V'                           16 u48  version
//	5  u24  length of the value, at least 1     22 2 B  reserved
//	                                            24 …    value
type Value []byte

const (
	// ValueHeaderBytes is the length of a record before its value.
	ValueHeaderBytes = 24

	valueMagic  = 'V'
	valMagic    = 4
	valLength   = 5
	valHash     = 8
	valVersion  = 16
	valReserved = 22
)

// ValueBytes is the length of the record of a value of that length.
func ValueBytes(valueLen int) int { return RoundUp(ValueHeaderBytes+valueLen, ValueUnit) }

func (b Value) ValueLen() int       { return int(uint24(b[valLength:])) }
func (b Value) SetValueLen(v int)   { putUint24(b[valLength:], uint32(v)) }
func (b Value) Hash() uint64        { return le.Uint64(b[valHash:]) }
func (b Value) SetHash(v uint64)    { le.PutUint64(b[valHash:], v) }
func (b Value) Version() uint64     { return uint48(b[valVersion:]) }
func (b Value) SetVersion(v uint64) { putUint48(b[valVersion:], v) }
func (b Value) Data() []byte        { return b[ValueHeaderBytes : ValueHeaderBytes+b.ValueLen()] }

// Seal computes the checksum of a value whose seed is given.
func (b Value) Seal(seed uint32) {
	b[valMagic] = valueMagic
	le.PutUint16(b[valReserved:], 0)
	le.PutUint32(b, crc32.Update(seed, castagnoli, b[4:ValueHeaderBytes+b.ValueLen()]))
}

// Check verifies the record.
//
// Errors: ErrCorrupt naming the field.
//
// hot: 0 allocs (if nothing is wrong)
func (b Value) Check(seed uint32) error {
	const what = "value"
	switch {
	case len(b) < ValueHeaderBytes:
		return bad(what, "length", len(b), "at least 24")
	case b[valMagic] != valueMagic:
		return bad(what, "magic", b[valMagic], valueMagic)
	case b.ValueLen() < 1 || b.ValueLen() > min(len(b)-ValueHeaderBytes, MaxValue):
		return bad(what, "length", b.ValueLen(), fmt.Sprintf("1 to %d", min(len(b)-ValueHeaderBytes, MaxValue)))
	}
	if got, want := le.Uint32(b), crc32.Update(seed, castagnoli, b[4:ValueHeaderBytes+b.ValueLen()]); got != want {
		return bad(what, "CRC32C", fmt.Sprintf("%#08x", got), fmt.Sprintf("%#08x", want))
	}
	if !zero(b[valReserved:ValueHeaderBytes]) {
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}

// Begins reports whether b has the magic of a segment, valid or not.
func (b Segment) Begins() bool {
	return len(b) >= SegmentHeaderBytes && (b[segMagic] == segmentMagic || b[segMagic] == lossyMagic)
}

// Begins reports whether b has the magic of a value, valid or not.
func (b Value) Begins() bool { return len(b) >= ValueHeaderBytes && b[valMagic] == valueMagic }
