package recovery

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// readKeys reads the next chunk of the key log, to replay what was written since the checkpoint or to count everything.
func (m *Machine) readKeys() {
	switch {
	case m.step < len(m.keys):
		i := m.keys[m.step]
		from := format.ChunkOffset(m.cfg.BlockSize)
		if m.stage == replay {
			from = m.afterCheckpoint(i)
		}
		if m.load(i, from, m.image.Pool.End()); m.pending == 0 {
			m.scanSegments() // nothing was written to the chunk since the checkpoint
		}
	case m.stage == replay && !m.acceptLoss():
	case m.stage == replay && m.uncounted:
		m.beginCount()
	default:
		m.findTails()
	}
}

// beginCount starts to count the live bytes of all chunks from zero.
func (m *Machine) beginCount() {
	m.stage, m.step, m.keys, m.image.Objects = count, 0, m.keys[:0], 0
	for i := range m.image.Pool.Chunks {
		c := &m.image.Pool.Chunks[i]
		c.Live = 0
		if c.Kind == format.KeyLog {
			m.keys = append(m.keys, format.ChunkNumber(i))
		}
	}
	m.readKeys()
}

// scanSegments goes through the part of the key log that was read, and replays each segment in it, or counts it in the
// stage count. Like a Walk it looks for segments at every multiple of KeyUnit, because a group may have been torn.
func (m *Machine) scanSegments() {
	i, pool, buf := m.keys[m.step], m.image.Pool, m.loaded()
	unread, end := m.unread, 0
	for at := 0; at < len(buf); {
		if len(unread) > 0 && unread[0] == at {
			unread = unread[1:]
			if m.stage == replay && at-end <= maxInFlight {
				m.skipped += int64(m.cfg.BlockSize)
			}
		}
		offset := pool.At(i, m.at.Add(at))
		seg := format.Segment(buf[at:])
		if !seg.Begins() || seg.Check(pool.Seed(offset)) != nil {
			at += format.KeyUnit
			continue
		}
		if m.stage == count {
			m.countSegment(seg, offset)
		} else if !m.replaySegment(seg, offset) {
			return
		}
		at += seg.ExtentBytes()
		end = at
	}
	m.step++
	if m.stage == count {
		m.readKeys()
	} else {
		m.keyEnd = m.at.Add(end)
		newer := pool.Chunks[i].Epoch.N() > format.Summary(m.summary[:]).LastEpoch()
		m.found[i].vacant = newer && end == 0 && len(m.unread) == 0
		m.verify()
	}
}

// replaySegment makes a segment the newest of its number. It returns false if the replay has ended or starts again.
func (m *Machine) replaySegment(seg format.Segment, offset units.ExtentOffset) bool {
	v := seg.Version()
	m.noteObjects(seg)
	m.noteNamed(seg)
	if m.last = max(m.last, v); v < m.image.Version || v >= m.cut {
		return true
	}
	if m.image.Version < v {
		m.missing(m.image.Version, v-1, m.skipped)
	}
	m.skipped = 0
	if first, last := seg.Durable(); !m.wereDurable(first, last) {
		return false
	}
	m.image.Version = v + 1
	m.noteUse(seg)
	n := seg.Number()
	if n >= m.image.Table.Len() && m.rebuild && m.hasLength && v < m.nextVersion {
		return true // a segment that was merged into another one before the last checkpoint
	}
	if n > m.image.Table.Len() && !m.mayMiss(v) {
		// A segment that a split has added, but not all that were added before it: the split was not done, so that none
		// of its sources has changed and this segment counts for nothing. Unless those before it are missing: then the
		// sources may have changed.
		return true
	}
	fresh := n == m.image.Table.Len()
	if !m.growTable(n + 1) {
		return false
	}
	merged := m.shrinkTable(seg)
	e := lookup.NewEntry(offset, seg.ExtentBytes())
	if seg.Vacant() {
		e = 0
	}
	m.image.Table.Set(n, e)
	m.applyChanges(seg, offset, fresh, merged)
	return true
}

// shrinkTable shortens the table to the length that it had at most when a segment was written, and reports whether it
// was longer. The segments behind that have been merged into others: only the last one at a time, so that the record of
// the other one, if it is not this one, comes before this one in the key log; or they were empty, which leaves no
// record. Without the checkpoint there are segments that were written when the table was still shorter.
func (m *Machine) shrinkTable(seg format.Segment) bool {
	t, limit := &m.image.Table, seg.Limit()
	known := m.merges || m.rebuild && !m.hasLength
	if !known || limit == 0 || limit >= int64(t.Len()) || m.rebuild && m.hasLength && seg.Version() < m.nextVersion {
		return false
	}
	t.Shrink(uint32(limit))
	return true
}

// noteObjects notes the greatest object version that was given, and the first expiry. Segments that do not count are
// noted as well: their versions were given, too.
func (m *Machine) noteObjects(seg format.Segment) {
	m.image.Clock = max(m.image.Clock, seg.Clock())
	if e := seg.FirstExpiry(); e != 0 && (m.image.FirstExpiry == 0 || e < m.image.FirstExpiry) {
		m.image.FirstExpiry = e
	}
}

// applyChanges counts what a segment says it has changed. A fresh segment, which a split has added, may have a previous
// record from a round of writes that had not ended when the checkpoint began; that one was not counted. The record of
// the segment that was merged into it has died if merged says that this has made the table shorter.
func (m *Machine) applyChanges(seg format.Segment, offset units.ExtentOffset, fresh, merged bool) {
	changes, known := seg.Changes(m.changes[:0])
	m.changes = changes
	m.noteUnverified(seg, known)
	if m.uncounted = m.uncounted || !known; m.uncounted {
		return
	}
	if !seg.Vacant() {
		m.addLive(m.image.Pool.Of(offset), seg.ExtentBytes())
	}
	for i, c := range changes {
		m.image.Objects += int64(c.Keys)
		if c.Died > 0 && !(fresh && i == 0) && (merged || !c.Merged) {
			m.subLive(c.Chunk, c.Died)
		}
		if c.Item >= 0 {
			for n := range c.More + 1 {
				m.addLiveValue(seg.NumberedItem(c.Item + n))
			}
		}
	}
}

// subLive subtracts n bytes from those that are live in chunk i.
func (m *Machine) subLive(i format.ChunkNumber, n int) {
	switch all := m.image.Pool.Chunks; {
	case int(i) >= len(all) || i < 0:
		m.uncounted = true
	case m.found[i].reopened:
	case int64(all[i].Live) < int64(n):
		m.uncounted = true
	default:
		all[i].Live -= uint32(n)
	}
}

// addLive adds n bytes to those that are live in chunk i.
func (m *Machine) addLive(i format.ChunkNumber, n int) {
	m.found[i].reopened = false
	m.image.Pool.Chunks[i].Live += uint32(n)
}

// addLiveValue counts the value of an item as live.
func (m *Machine) addLiveValue(it format.Item) {
	place := it.ValueOffset()
	if it.ValueLen() == 0 || !m.image.Pool.Contains(place) {
		return
	}
	m.addLive(m.image.Pool.Of(place), it.RecordBytes())
}

// markHeadlessDamaged makes chunks damaged whose header is lost although values in them are live. Their values cannot
// be read, but the chunks are not used again.
func (m *Machine) markHeadlessDamaged() {
	if m.rebuild {
		m.giveUpCheckpoint()
	}
	for i := range m.image.Pool.Chunks {
		if c := &m.image.Pool.Chunks[i]; c.State == space.Free && c.Live > 0 {
			*c = space.Chunk{Epoch: c.Epoch, Live: c.Live, Kind: format.ValueLog, State: space.Damaged}
		}
	}
}

// noteNamed notes the chunks that a segment refers to, on a device that was volatile. After a loss of power another
// opening may find fewer segments, and then values count that are obsolete now.
func (m *Machine) noteNamed(seg format.Segment) {
	if m.image.Super.VolatileFrom() == 0 {
		return
	}
	for at, n := seg.First(), seg.Items(); n > 0; n-- {
		it := seg.Item(at)
		at += it.LengthBytes()
		if place := it.ValueOffset(); it.ValueLen() > 0 && m.image.Pool.Contains(place) {
			m.found[m.image.Pool.Of(place)].named = true
		}
	}
}

// freeVacant frees the chunks that the logs have opened in vain. A drive that fails may have written the header of one
// free chunk after the other, and without any that is free there is no checkpoint.
func (m *Machine) freeVacant() {
	last := format.Summary(m.summary[:]).LastEpoch()
	for i := range m.found {
		c, f := &m.image.Pool.Chunks[i], &m.found[i]
		values := c.Kind == format.ValueLog && c.State == space.Sealed && c.Epoch.N() > last && !f.named &&
			m.image.Super.VolatileFrom() > 0
		if (f.vacant || values) && c.Live == 0 {
			*c = space.Chunk{Epoch: c.Epoch, State: space.Free}
		}
	}
}

// countSegment counts a segment and the values of its keys as live, if it is the newest segment of its number: the
// replay has made the SegTbl point to that one. It adds the number of keys that exist to image.Objects.
//
// A segment may still have keys that a split has moved to another segment. They do not count here, nor do the items
// that follow the item of such a key and have no key of their own: further pieces of its value.
func (m *Machine) countSegment(seg format.Segment, offset units.ExtentOffset) {
	n, table := seg.Number(), &m.image.Table
	if n >= table.Len() || table.Get(n) != lookup.NewEntry(offset, seg.ExtentBytes()) {
		return
	}
	m.addLive(m.image.Pool.Of(offset), seg.ExtentBytes())
	here := false // the latest key belongs to this segment and is not deleted
	for at := seg.First(); at < seg.LengthBytes(); {
		it := seg.Item(at)
		at += it.LengthBytes()
		if it.HasKey() {
			here = table.Segment(format.HashKey(m.image.Super.HashSeed(), it.Key())) == n && !it.Gone()
			if here {
				m.image.Objects++
			}
		}
		if here {
			m.addLiveValue(it)
		}
	}
}
