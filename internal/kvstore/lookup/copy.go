package lookup

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// A CopyOut reads the values of several objects at once. Each is read by an op of its own, which is a Get whose segment
// was read already, and which writes to its place in the result.

// copyValue is the kind of such an op.
const copyValue = Digest + 1

// Limits of the values that are read at once: by all CopyOuts, by one, and of those longer than mediumRecord by all. So
// many ops are kept for them, so that they take none of others; and most buffers are left to others.
const (
	maxCopies     = 16
	maxCopiesEach = 8
	maxLongCopies = 1
)

// mayCopy reports whether the read of a value of n bytes may begin.
func (m *Machine) mayCopy(ro *rangeOp, n int) bool {
	copies, long := m.copies, m.longCopies
	if !m.checkedLast && m.awaited > 0 { // it is the turn of the check that waits
		copies++
		if m.awaited > mediumRecord {
			long++
		}
	}
	return copies < maxCopies && ro.copies < maxCopiesEach && (n <= mediumRecord || long < maxLongCopies)
}

// beginCopy starts to read the value of the key at an offset of a segment, for the entry at an offset of the result.
func (m *Machine) beginCopy(parent int32, seg format.Segment, item, entry int) {
	o := &m.ops[parent]
	ro := &m.ranges[o.ranged]
	e, _ := ro.out.EntryAt(entry)
	i := m.links.Pop(&m.free)
	c := &m.ops[i]
	*c = op{
		kind: copyValue, tenant: o.tenant, background: o.background, keyLen: uint8(e.KeyLen()),
		hash: format.HashKey(m.HashSeed, e.Key()), value: e.Value(), length: uint32(e.ValueLen()), parent: parent,
		target: uint32(entry), segment: o.segment, entry: o.entry, life: o.life, buf: c.buf, big: none,
		pieces: c.pieces[:0],
	}
	copy(c.key[:], e.Key())
	m.checkedLast = false
	ro.copies++
	m.copies++
	if c.length > mediumRecord {
		m.longCopies++
	}
	pieces, _ := seg.Pieces(item)
	m.readPieces(i, seg, item, pieces)
}

// refreshes reports whether a copyValue can go on with what its key has now, and says so in the entry.
func (m *Machine) refreshes(o *op, seg format.Segment, at, valueLen int) bool {
	ro := &m.ranges[m.ops[o.parent].ranged]
	e, _ := ro.out.EntryAt(int(o.target))
	it, identities := seg.Item(at), seg.LiveIdentities(at, ro.unix)
	if valueLen != e.ValueLen() || identities != e.Identities() || it.Expired(ro.unix) {
		return false
	}
	if identities > 0 {
		m.setIdentities(e, seg, at, ro.unix)
	}
	e.SetVersion(it.Version())
	e.SetExpires(it.Expiry())
	return true
}

// copied ends the read of one value. The result is cut at the first entry whose value could not be read.
func (m *Machine) copied(i int32, r Result) {
	c := &m.ops[i]
	parent, entry := c.parent, int(c.target)
	o := &m.ops[parent]
	ro := &m.ranges[o.ranged]
	c.value = nil
	if c.length > mediumRecord {
		m.longCopies--
	}
	ro.copies--
	m.copies--
	m.returnBuffer(i)
	m.links.PushFront(&m.free, i)
	if r != Found && (ro.cut == 0 || entry < ro.cut) {
		ro.cut, ro.why = entry, r
	}
	if ro.ended && ro.copies == 0 {
		m.sealRange(parent)
	}
}

// unpark continues CopyOuts that wait to read values.
func (m *Machine) unpark() {
	for n := m.parked.N; n > 0 && m.parked.N > 0 && m.copies < maxCopies; n-- {
		i := m.links.Pop(&m.parked)
		o := &m.ops[i]
		ro := &m.ranges[o.ranged]
		// A split may have moved the keys behind the cursor to another segment, though not those before it.
		o.position = ro.cursor.Position
		switch {
		case !m.mayCopy(ro, ro.wants):
			m.links.Push(&m.parked, i)
		case ro.cut > 0 || m.Stopping && ro.out.Items() > 0:
			m.endRange(i, Found, 0)
		case m.moved(o):
			m.list(i)
		default:
			m.rangeSegment(i, format.Segment(m.bytesOf(o)))
		}
	}
}

// maxAgain is how often a CopyOut is begun again.
const maxAgain = 8

// beginsAgain reports whether a CopyOut is to be begun again, and resets it for that: its first object was deleted, or
// has become longer or shorter, while its value was read. Its result would have nothing, and end where it begins.
func (m *Machine) beginsAgain(o *op, ro *rangeOp) bool {
	if ro.cut != nvme.KVRangeHeaderBytes || ro.why != NotFound || ro.again == maxAgain || m.Stopping ||
		ro.looked >= ro.looks {
		return false
	}
	ro.again++
	ro.out, ro.cursor = ro.out[:ro.cut], ro.from
	ro.out.SetItems(0)
	ro.lossy, ro.ended, ro.cut = false, false, 0
	o.position = ro.from.Position
	return true
}

// cutRange goes on to look for the last entry before the first one whose value could not be read. It reports whether
// that was found; then the entries behind it are left out. If there is none, and the first one is lost, it is passed.
func (m *Machine) cutRange(ro *rangeOp) (done bool) {
	for ro.at < ro.cut {
		if m.choresDone += choreEntry; m.choresDone > choreBytes {
			return false
		}
		e, next := ro.out.EntryAt(ro.at)
		ro.before, ro.at = e.Cursor(), next
		ro.passed++
	}
	flags := ro.out.Flags() &^ nvme.KVComplete
	switch {
	case ro.passed > 0:
	case ro.why == NotFound:
		ro.result, flags = Found, 0
	default:
		e, _ := ro.out.EntryAt(ro.at)
		ro.before, ro.result, flags = e.Cursor(), ro.why, flags|nvme.KVLost
	}
	ro.out, ro.cursor = ro.out[:ro.cut], ro.before
	ro.out.SetItems(ro.passed)
	ro.out.SetFlags(flags)
	return true
}
