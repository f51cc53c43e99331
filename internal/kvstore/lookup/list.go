package lookup

import (
	"math/bits"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// A List returns the keys in the order of their bit-reversed hashes. The keys of a segment share the low bits of their
// hashes, so that a segment is a contiguous range of this order, before and after a split. Keys with the same hash are
// ordered by their bytes.

// listed is a key of the segment that is being listed.
type listed struct {
	position uint64
	item     int
}

// beginList starts a List at its key.
func (m *Machine) beginList(i int32) {
	o := &m.ops[i]
	o.position = 0
	if o.keyLen > 0 {
		o.position = bits.Reverse64(o.hash)
	}
	o.length = uint32(len(nvme.NewKVList(o.value)))
	m.list(i)
}

// maxSkips is how many empty segments, or groups of them, all Lists together pass between two calls of
// Machine.Continue. In a table of 2 GB each takes 30 ns.
const maxSkips = 1024

// list reads the segment at the position of a List, skipping empty ones.
func (m *Machine) list(i int32) {
	o := &m.ops[i]
	for ; m.skips < maxSkips; m.skips++ {
		o.segment = m.Table.Segment(bits.Reverse64(o.position))
		empty := m.Table.Empty(o.segment)
		if empty == 0 {
			o.entry = m.Table.Get(o.segment)
			m.readSegment(i)
			return
		}
		if !m.pass(i, empty) {
			m.endList(i)
			return
		}
		if o.isRange() && m.stops(i) {
			return
		}
	}
	m.links.Push(&m.skipping, i)
}

// Continue continues what a turn of the store had no more time for: Lists that skip empty segments, and range ops with
// long results. It is called in each turn, and again soon if Waits says so at the end of the turn.
func (m *Machine) Continue() {
	m.skips, m.choresDone = 0, 0
	for n := m.skipping.N; n > 0; n-- {
		m.list(m.links.Pop(&m.skipping))
	}
	m.doChores()
	m.unpark()
}

// Waits reports that something waits for the next Continue.
func (m *Machine) Waits() bool { return m.skipping.N > 0 || m.chores.N > 0 }

// pass moves the position behind all hashes that share their low n bits with it, and reports whether there are others.
func (o *op) pass(n int) bool {
	width := uint64(1) << (64 - n)
	o.position = o.position&^(width-1) + width
	o.keyLen = 0
	return o.position != 0
}

// listRead continues a List whose segment was read. It appends the keys of the segment to the result and goes on to the
// next segment. The List ends when the result is full or the last segment is done. If the segment has moved since the
// read was started, the List looks for its segment again.
func (m *Machine) listRead(i int32) {
	o := &m.ops[i]
	if m.moved(o) {
		m.restart(i)
		return
	}
	seg, _ := m.check(i, nil)
	switch {
	case seg == nil: // check has ended the List, or reads the segment again
	case seg.Lossy():
		m.lost(i) // the host could not tell a List without the lost keys from a complete one
	case m.listSegment(o, seg) && o.pass(m.Table.Bits(o.segment)):
		m.list(i)
	default:
		m.finish(i, Found)
	}
}

// listSegment appends the keys of a segment, starting at the position, and reports whether all of them fit.
func (m *Machine) listSegment(o *op, seg format.Segment) bool {
	from := nvme.KVCursorAt(o.position, o.key[:o.keyLen])
	out := nvme.KVList(o.value[:o.length:len(o.value)])
	for _, k := range m.sorted(seg, o.segment, &from, true) {
		if !m.exists(seg.Item(k.item), bits.Reverse64(k.position)) {
			continue
		}
		next, ok := out.Append(seg.Item(k.item).Key())
		if !ok {
			return false
		}
		out = next
		o.length = uint32(len(out))
	}
	return true
}
