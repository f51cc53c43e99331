package lookup

import (
	"bytes"
	"cmp"
	"math/bits"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// A List goes through the keys in the order of their hashes with the bits reversed: a segment is what has the same
// low bits, and so it is a range of this order before and after a split. Keys of one hash stand in the order
// of their bytes.

// listed is a key of the segment that is being listed.
type listed struct {
	position uint64
	item     int
}

// beginList begins a List at its key.
func (m *Machine) beginList(i int32) {
	o := &m.ops[i]
	o.position = 0
	if o.keyLen > 0 {
		o.position = bits.Reverse64(o.hash)
	}
	o.length = uint32(len(nvme.NewKVList(o.value)))
	m.list(i)
}

// list reads the segment of the position where a List is.
func (m *Machine) list(i int32) {
	o := &m.ops[i]
	for {
		o.segment = m.Table.Segment(bits.Reverse64(o.position))
		if o.entry = m.Table.Get(o.segment); o.entry != 0 {
			break
		}
		if !m.nextSegment(o) {
			m.finish(i, Found)
			return
		}
	}
	m.readSegment(i)
}

// nextSegment moves the position behind its segment, and reports whether there is anything.
func (m *Machine) nextSegment(o *op) bool {
	width := uint64(1) << (64 - m.Table.Bits(o.segment))
	o.position = o.position&^(width-1) + width
	o.keyLen = 0
	return o.position != 0
}

// listRead takes the segment that was read.
func (m *Machine) listRead(i int32) {
	o := &m.ops[i]
	if m.Table.Segment(bits.Reverse64(o.position)) != o.segment || m.elsewhere(o) {
		m.list(i)
		return
	}
	seg := m.check(i)
	switch {
	case seg == nil:
	case m.listSegment(o, seg) && m.nextSegment(o):
		m.list(i)
	default:
		m.finish(i, Found)
	}
}

// listSegment appends the keys of a segment from the position on, and reports whether all found room.
func (m *Machine) listSegment(o *op, seg format.Segment) bool {
	found := m.listed[:0]
	for off := format.SegmentHeaderBytes; off < seg.LengthBytes(); {
		it := seg.Item(off)
		hash := format.HashKey(m.HashSeed, it.Key())
		position := bits.Reverse64(hash)
		// A key that a split has taken away is not here any more.
		if m.Table.Segment(hash) == o.segment && (position > o.position || position == o.position && bytes.Compare(it.Key(), o.key[:o.keyLen]) >= 0) {
			found = append(found, listed{position: position, item: off})
		}
		off += it.LengthBytes()
	}
	m.listed = found
	slices.SortFunc(found, func(a, b listed) int {
		if a.position != b.position {
			return cmp.Compare(a.position, b.position)
		}
		return bytes.Compare(seg.Item(a.item).Key(), seg.Item(b.item).Key())
	})
	out := nvme.KVList(o.value[:o.length:len(o.value)])
	for _, k := range found {
		next, ok := out.Append(seg.Item(k.item).Key())
		if !ok {
			return false
		}
		out = next
		o.length = uint32(len(out))
	}
	return true
}
