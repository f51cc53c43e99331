package recovery

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
)

// noteUnverified notes the values that were written with a segment, if a loss of power may have taken them.
func (m *Machine) noteUnverified(seg format.Segment, known bool) {
	from := m.image.Super.VolatileFrom()
	if from == 0 || seg.Version() < from {
		return
	}
	note := func(it format.Item) {
		if it.ValueLen() > 0 && m.image.Pool.Contains(it.ValueOffset()) {
			m.values = append(m.values, value{version: seg.Version(), hash: format.HashKey(m.image.Super.HashSeed(),
				it.Key()), place: it.ValueOffset(), length: it.ValueLen()})
		}
	}
	for _, c := range m.changes {
		if known && c.Item >= 0 {
			note(seg.NumberedItem(c.Item))
		}
	}
	for at, n := format.SegmentHeaderBytes, seg.Items(); n > 0 && !known; n-- {
		it := seg.Item(at)
		at += it.LengthBytes()
		place, pool := it.ValueOffset(), m.image.Pool
		// The place of a value of length 0 is in no chunk.
		if pool.Contains(place) && pool.Within(place) >= m.afterCheckpoint(pool.Of(place)) {
			note(it)
		}
	}
}

// verify reads the noted values of a chunk, as many at once as there is memory for.
func (m *Machine) verify() {
	m.looked = 0
	for used := 0; m.looked < len(m.values) && m.looked < headerReads; m.looked++ {
		v := &m.values[m.looked]
		start, n := m.image.Pool.Around(v.place, format.ValueBytes(v.length), m.cfg.BlockSize)
		if used+n > len(m.image.Buf) {
			break
		}
		m.read(0, start, m.image.Buf[used:used+n])
		v.buf = m.image.Buf[used+int(v.place-start) : used+n]
		used += n
	}
	if m.stage = verify; m.looked == 0 {
		m.values, m.stage = m.values[:0], replay
		m.readKeys()
	}
}

// verified checks the values that were read. The first segment whose value is missing does not count, and neither do
// those after it.
func (m *Machine) verified() {
	for _, v := range m.values[:m.looked] {
		if rec := format.Value(v.buf); rec.Check(m.image.Pool.Seed(v.place)) != nil || rec.Hash() != v.hash ||
			rec.ValueLen() != v.length {
			m.restartUpTo(v.version)
			return
		}
	}
	m.values = m.values[m.looked:]
	m.verify()
}

// restartUpTo starts again from the checkpoint, to replay the key log only up to that version.
func (m *Machine) restartUpTo(version uint64) {
	m.cut = version
	m.keys, m.gaps, m.values, m.uncounted, m.partial, m.changes = nil, nil, nil, false, nil, nil
	m.image.Table = lookup.NewSegTbl(m.cfg.SegTbl)
	m.stage, m.step = readPages, 0
	m.readPages()
}
