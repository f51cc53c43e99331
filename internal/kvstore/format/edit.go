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

// FindValue returns the offset in b of the item whose value, or piece of one, begins at byte valueOffset of the
// partition, or 0 if no item refers to that: it is obsolete then. b must be valid as for Find.
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

// Clear makes b an empty segment with the given number, and complete.
func (b Segment) Clear(number uint32) {
	clear(b[:SegmentHeaderBytes])
	b.SetNumber(number)
	b.SetLengthBytes(SegmentHeaderBytes)
}

// Vacant reports whether the segment says only that it has no keys. Such a segment needs no record.
func (b Segment) Vacant() bool { return b.Items() == 0 && !b.Lossy() }

// Complete makes a lossy segment complete: keys without an item do not exist.
func (b Segment) Complete() {
	b.SetLossy(false)
	out, items := SegmentHeaderBytes, 0
	for off := out; off < b.LengthBytes(); {
		it := b.Item(off)
		n := it.LengthBytes()
		if !it.Gone() {
			copy(b[out:], b[off:off+n])
			out += n
			items++
		}
		off += n
	}
	b.SetLengthBytes(out)
	b.SetItems(items)
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

// Pieces returns the number of pieces of the value of a key, whose item is at offset at, and its length.
//
// hot: 0 allocs
func (b Segment) Pieces(at int) (n, valueLen int) {
	for off := at; off < b.LengthBytes(); n++ {
		it := b.Item(off)
		if off > at && !it.Continues() {
			break
		}
		valueLen += it.ValueLen()
		off += it.LengthBytes()
	}
	return n, valueLen
}

// Extend inserts n items without a key behind the item at offset at. The view must have room for them, and the segment
// must not become longer than MaxSegmentBytes.
//
// hot: 0 allocs
func (b Segment) Extend(at, n int) {
	from, length := at+b.Item(at).LengthBytes(), n*ItemHeaderBytes
	copy(b[from+length:], b[from:b.LengthBytes()])
	clear(b[from : from+length])
	b.SetLengthBytes(b.LengthBytes() + length)
	b.SetItems(b.Items() + n)
}

// Truncate removes all pieces but the first of the value of a key, whose item is at offset at.
//
// hot: 0 allocs
func (b Segment) Truncate(at int) {
	n, _ := b.Pieces(at)
	from, length := at+b.Item(at).LengthBytes(), (n-1)*ItemHeaderBytes
	copy(b[from:], b[from+length:b.LengthBytes()])
	b.SetLengthBytes(b.LengthBytes() - length)
	b.SetItems(b.Items() - (n - 1))
}

// Remove removes the item of a key at offset at, which Find has returned, with all pieces of its value.
//
// hot: 0 allocs
func (b Segment) Remove(at int) {
	b.Truncate(at)
	n := b.Item(at).LengthBytes()
	copy(b[at:], b[at+n:b.LengthBytes()])
	b.SetLengthBytes(b.LengthBytes() - n)
	b.SetItems(b.Items() - 1)
}

// Filter removes the keys for which keep returns false.
//
// hot: 0 allocs
func (b Segment) Filter(keep func(key []byte) bool) {
	out, items, kept := SegmentHeaderBytes, 0, false
	for off := out; off < b.LengthBytes(); {
		it := b.Item(off)
		n := it.LengthBytes()
		if !it.Continues() {
			kept = keep(it.Key())
		}
		if kept {
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
