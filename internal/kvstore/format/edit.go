package format

import "bytes"

// Find returns where in a checked segment the key's item is, 0: nowhere.
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

// FindValue returns where the item is whose value is at that place of the partition, 0: nowhere.
//
// hot: 0 allocs
func (b Segment) FindValue(place int64) int {
	for off := SegmentHeaderBytes; off < b.LengthBytes(); {
		it := b.Item(off)
		if it.ValueOffset() == place {
			return off
		}
		off += it.LengthBytes()
	}
	return 0
}

// Clear makes it an empty segment of that number.
func (b Segment) Clear(number uint32) {
	clear(b[:SegmentHeaderBytes])
	b.SetNumber(number)
	b.SetLengthBytes(SegmentHeaderBytes)
}

// Insert adds an item for the key behind the others and returns where. There is room for it behind the segment, and it does not
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

// Remove takes the item at that offset out.
//
// hot: 0 allocs
func (b Segment) Remove(at int) {
	n := b.Item(at).LengthBytes()
	copy(b[at:], b[at+n:b.LengthBytes()])
	b.SetLengthBytes(b.LengthBytes() - n)
	b.SetItems(b.Items() - 1)
}

// Filter keeps the items whose key is wanted.
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
