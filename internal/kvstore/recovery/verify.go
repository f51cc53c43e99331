package recovery

import (
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
)

// noteUnverified notes the values that were written with a segment, if a loss of power may have taken them.
func (m *Machine) noteUnverified(seg format.Segment, known bool) {
	from := m.image.Super.VolatileFrom()
	if from == 0 || seg.Version() < from {
		return
	}
	pool, hash := m.image.Pool, uint64(0) // of the last key
	for at, i := seg.First(), 0; i < seg.Items(); i++ {
		it := seg.Item(at)
		at += it.LengthBytes()
		if it.HasKey() {
			hash = format.HashKey(m.image.Super.HashSeed(), it.Key())
		}
		place := it.ValueOffset()
		// The place of a value of length 0 is in no chunk.
		if it.ValueLen() == 0 || !pool.Contains(place) {
			continue
		}
		isNew := pool.Within(place) >= m.afterCheckpoint(pool.Of(place))
		if known {
			isNew = slices.ContainsFunc(m.changes, func(c format.Change) bool {
				return c.Item >= 0 && c.Item <= i && i <= c.Item+c.More
			})
		}
		if isNew {
			m.values = append(m.values, value{version: seg.Version(), hash: hash, place: place, length: it.ValueLen(),
				bytes: it.RecordBytes()})
		}
	}
}

// verify reads the noted values of a chunk, as many at once as there is memory for.
func (m *Machine) verify() {
	m.looked = 0
	m.beginPieces()
	for used := 0; m.looked < len(m.values) && m.looked < headerReads; m.looked++ {
		v := &m.values[m.looked]
		start, n := m.image.Pool.Around(v.place, v.bytes, m.cfg.BlockSize)
		if used+n > len(m.image.Buf) {
			break
		}
		m.readPiece(piece{offset: start, from: used, to: used + n})
		v.buf, v.from, v.to = m.image.Buf[used+int(v.place-start):used+n], used, used+n
		used += n
	}
	if m.stage = verify; m.looked == 0 {
		m.values, m.stage = m.values[:0], replay
		m.readKeys()
	}
}

// verified checks the values that were read. The first segment whose value is missing does not count, and neither do
// those after it. A value that cannot be read was not lost with the power.
func (m *Machine) verified() {
	for _, v := range m.values[:m.looked] {
		if i, _ := slices.BinarySearch(m.unread, v.from); i < len(m.unread) && m.unread[i] < v.to {
			continue
		}
		if rec := format.Value(v.buf); rec.Check(m.image.Pool.Seed(v.place)) != nil || !rec.HasHash(v.hash) ||
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
	if m.cut = version; !m.lossy {
		m.loss = Loss{}
	}
	m.restart()
}

// restart starts again from the checkpoint.
func (m *Machine) restart() {
	m.keys, m.gaps, m.values, m.partial, m.changes = nil, nil, nil, nil, nil
	m.uncounted, m.skipped, m.failures = m.lossy, 0, 0
	m.image.Table = lookup.NewSegTbl(m.cfg.SegTbl)
	m.image.Pool.Doubtful = nil
	if m.image.Super.Checkpoint() == 0 {
		m.image.Version, m.image.Objects = 1, 0
		m.classify()
		return
	}
	m.beginPages()
}
