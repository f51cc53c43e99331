package format

import (
	"bytes"

	"jbofd/internal/units"
)

// Find returns the offset in b of the item of a key, or 0 if the segment does not contain the key. b must be a
// valid segment: one that has passed Check, or that was made by the methods below.
//
// hot: 0 allocs
func (b Segment) Find(key []byte) int {
	for off := SegmentHeaderBytes; off < b.LengthBytes(); {
		it := b.Item(off)
		if bytes.Equal(it.Key(), key) {
			return off
		}
		off += it.LengthBytes()
	}
	return 0
}

// FindValue returns the offset in b of the item whose value begins at byte valueOffset of the partition, or 0 if no
// item refers to that value: the value is obsolete then. b must be valid as for Find.
//
// hot: 0 allocs
func (b Segment) FindValue(valueOffset units.ExtentOffset) int {
	for off := SegmentHeaderBytes; off < b.LengthBytes(); {
		it := b.Item(off)
		if it.ValueOffset() == valueOffset {
			return off
		}
		off += it.LengthBytes()
	}
	return 0
}

// Clear makes b an empty segment with the given number.
func (b Segment) Clear(number uint32) {
	clear(b[:SegmentHeaderBytes])
	b.SetNumber(number)
	b.SetLengthBytes(SegmentHeaderBytes)
}

// Insert appends an item for a key and returns its offset. The view must have room for it, and the segment must not
// become longer than MaxSegmentBytes.
//
// hot: 0 allocs
func (b Segment) Insert(key []byte) int {
	at := b.LengthBytes()
	b.SetLengthBytes(at + ItemHeaderBytes + len(key))
	b.SetItems(b.Items() + 1)
	b.Item(at).SetKeyLen(len(key))
	copy(b.Item(at).Key(), key)
	return at
}

// Remove removes the item at offset at, which Find or FindValue has returned.
//
// hot: 0 allocs
func (b Segment) Remove(at int) {
	n := b.Item(at).LengthBytes()
	copy(b[at:], b[at+n:b.LengthBytes()])
	b.SetLengthBytes(b.LengthBytes() - n)
	b.SetItems(b.Items() - 1)
}

// Filter removes the items for whose key keep returns false.
//
// hot: 0 allocs
func (b Segment) Filter(keep func(key []byte) bool) {
	out, items := SegmentHeaderBytes, 0
	for off := out; off < b.LengthBytes(); {
		it := b.Item(off)
		n := it.LengthBytes()
		if keep(it.Key()) {
			if out != off {
				copy(b[out:], b[off:off+n])
			}
			out += n
			items++
		}
		off += n
	}
	b.SetLengthBytes(out)
	b.SetItems(items)
}
