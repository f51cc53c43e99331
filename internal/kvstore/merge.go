package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/list"
)

// After a mass deletion the table has many segments with few keys, or none. It then becomes shorter again, by linear
// hashing backwards: the last segment is merged into the one that it was once split from (lookup.Buddy), one after the
// other.
//
// A merge writes one record: that of the segment which takes the keys in. The record says how many bits of a hash
// decide whether a key belongs to it, and thereby that the other segment does not exist any more. So a restart finds
// all of a merge or nothing. Both segments have no writers from the time when they were read until the record is
// durable, even if a write has failed, because then a restart may find it or not.
//
// A segment that is empty, and has no record, is taken off the table without a write: as long as none of the keys that
// could belong to it is written to the other segment, it makes no difference; and when one is, that record says it.
// But the record of the other one must not have such keys that a split has left there. And there must be no increment
// under way. It has the length that the table had when it began, and would lack that the segment has become empty since
// the stream before.
//
// Lists, ranges and cursors go by positions, which do not depend on the length of the table.

const (
	// The table becomes shorter if it has more than shrinkAt times as many segments as it needs, until it has shrinkTo
	// times as many. It becomes longer if it has too few, so that neither undoes the other.
	shrinkAt, shrinkTo = 3, 2
	// maxEmptied is how many empty segments are taken off the table in one turn without a read, for 20 µs.
	maxEmptied = 1024
	// refusedNS is how long two segments are left alone that cannot be merged, because one of them has lost keys, or
	// because they would become too long.
	refusedNS = 600e9
)

type mergeStage uint8

const (
	mergeNone   mergeStage = iota
	mergeReads             // the two segments are being read, or have writes under way
	mergeWrites            // the record is being written
	mergeBroken            // a write has failed; it is repeated when a segment has a writer, or the table must grow
)

// mergeState is the merge of the last segment of the table.
type mergeState struct {
	stage mergeStage
	// allowed: the last checkpoint says that the table may become shorter (format.Summary.Merges). Only behind such a
	// one does recovery make it shorter: behind one of an older program the records may have too few hash bits.
	allowed bool
	// least is how many segments a Settle wants the table to have. asked: one has asked for that since the last round
	// of splits.
	least int64
	asked bool
	// shrinking: the table becomes shorter until it has shrinkTo times the segments that it needs.
	shrinking bool
	// last and into are active segments, of which the first one is merged into the other.
	last, into int32
	// made: into has the keys of last.
	made bool
	// emptied is how many empty segments this turn has taken off the table.
	emptied int
	// retryNS is when the next merge may begin after one was given up.
	retryNS int64
}

// idle reports that nothing is under way.
func (m *mergeState) idle() bool { return m.stage == mergeNone || m.stage == mergeBroken }

// holds reports whether segment i takes part in a merge.
func (m *mergeState) holds(i int32) bool { return m.stage != mergeNone && (i == m.last || i == m.into) }

// needs is how many segments the table needs: one for every KeysPerSegment objects, and so many that their records have
// at most Config.longBytes on average. So tombstones and identities count as soon as they matter. The table has the
// length by objects as long as there are few of them, because twice as many of the longest objects fit into longBytes.
// It needs more if a Settle has said so since the store was opened.
//
// A partition of a cluster has some of the ranges of positions, and the segments of all others are empty: the keys are
// in a few of the segments, which would be so much longer. So the table also grows, up to maxSparse times, until those
// that are not empty have at most twice KeysPerSegment on average. Twice, because with few keys to a segment some are
// empty in any table.
//
// KeyLive also counts the keys that splits have left in their sources, for a while, and what is lost in damaged chunks,
// so that the table may have up to twice the segments that tombstones and identities need. Recovery finds the same.
func (s *Store) needs() int64 {
	return max(s.leastNeeds(), s.sparse())
}

// leastNeeds is needs without what a table needs because many of its segments are empty.
func (s *Store) leastNeeds() int64 {
	return max(s.objects/int64(s.cfg.KeysPerSegment), s.pool.KeyLive/int64(s.cfg.longBytes), s.merge.least)
}

// lacks is how many segments the table is to grow by. Only a partition with room grows because segments are empty: a
// longer table takes room of checkpoints, and makes nothing possible that is not without it.
func (s *Store) lacks() int64 {
	need := s.needs()
	if used, most := s.Fullness(); used > most/8*7 {
		need = s.leastNeeds()
	}
	return need - int64(s.tbl.Len())
}

// sparse is what the table needs because many of its segments are empty.
func (s *Store) sparse() int64 {
	return sparseNeeds(s.objects, int64(s.tbl.Occupied()), int64(s.tbl.Len()), int64(s.cfg.KeysPerSegment))
}

// sparseNeeds is how many segments a table of so many needs, of which so many are not empty. In floating point, because
// the product of objects and segments may have more than 63 bits.
func sparseNeeds(objects, occupied, segments, keys int64) int64 {
	// Without the first key of each, which needs its segment however long the table is.
	more := float64(objects - occupied)
	if more <= 0 {
		return 0
	}
	return int64(min(more*float64(segments)/float64(2*max(1, occupied)), float64(objects)*maxSparse) / float64(keys))
}

// maxSparse is how many times as many segments a table may have as its objects need, because most segments are empty: 5
// bytes of DRAM for each, which with 13 keys to a segment are up to 12 bytes an object.
const maxSparse = 32

// updateShrinking sets shrinking, and returns it: whether the table has too many segments.
func (s *Store) updateShrinking() bool {
	m, need := &s.merge, max(s.needs(), lookup.FirstSegments)
	most := shrinkAt * need
	switch {
	case s.cfg.eager:
		most = max(need+1, 2*s.sparse()) // else splits and merges would follow each other for ever
	case m.shrinking:
		most = shrinkTo * need
	}
	m.shrinking = int64(s.tbl.Len()) > most
	return m.shrinking
}

// shrink begins merges if the table has too many segments, and continues the one that is under way.
func (s *Store) shrink() {
	m := &s.merge
	if m.stage == mergeNone && !s.beginMerge() || m.stage == mergeWrites {
		return
	}
	last, into := &s.segs[m.last], &s.segs[m.into]
	switch {
	case last.state != segLoaded || into.state != segLoaded:
		return
	case m.stage == mergeBroken && last.waiting.N+into.waiting.N == 0 && s.needs() <= int64(s.tbl.Len()):
		return // nobody waits for it: no writer of the two, and no split, which begins only without a merge
	case m.made:
	case last.entry == 0 && format.Segment(last.buf).Vacant() && !into.stale && !format.Segment(into.buf).Lossy() &&
		!s.writesIncrement():
		s.mergeDone() // nothing has to be written
		return
	case !s.takeIn(last, into):
		s.abandonMerge(none, refusedNS)
		return
	}
	m.made, m.stage, into.merging, into.force = true, mergeWrites, true, true
	s.schedule(m.into)
}

// beginMerge takes empty segments off the end of the table, and then takes hold of the last segment and of the one that
// it is merged into. It reports whether there are two to be merged.
func (s *Store) beginMerge() bool {
	m := &s.merge
	// While the outcome of a write is indeterminate, a segment that is empty may have keys after a restart. The record
	// of a merge takes from the space that placeForKeys keeps back (writeSegments), so none begins without some
	// besides.
	if !s.updateShrinking() || s.stopping || s.split.n > 0 || s.failures != s.ckpt.covered || s.placeForKeys() <= 0 {
		return false
	}
	if s.now < m.retryNS {
		s.wake(m.retryNS)
		return false
	}
	if !m.allowed {
		s.ckpt.wanted = s.ckpt.wanted || s.ckpt.stage == ckptIdle
		return false
	}
	if s.writesIncrement() {
		return false // its end is followed by a turn
	}
	for ; s.updateShrinking(); m.emptied++ {
		if m.emptied == maxEmptied {
			s.wake(s.now + 1)
			return false
		}
		last := s.tbl.Len() - 1
		into, _ := lookup.Buddy(last)
		if s.tbl.Get(last) != 0 || s.tbl.Get(into) != 0 || s.isActive(last) || s.isActive(into) {
			m.last, m.into = s.hold(last), s.hold(into)
			m.stage, m.made = mergeReads, false
			return true
		}
		s.cutTable(last)
	}
	return false
}

// writesIncrement reports that what has changed in the table is being copied to an increment.
func (s *Store) writesIncrement() bool {
	return s.ckpt.increment && s.ckpt.stage >= ckptNote && s.ckpt.stage <= ckptPage
}

// isActive reports whether the segment of that number is active.
func (s *Store) isActive(number uint32) bool {
	for i := s.table[int(number)&(len(s.table)-1)]; i != none; i = s.segs[i].chain {
		if s.segs[i].number == number {
			return true
		}
	}
	return false
}

// hold makes a segment active and lets its writers wait.
func (s *Store) hold(number uint32) int32 {
	i, fresh := s.activate(number, payer{background: true})
	s.segs[i].held = true
	if fresh || s.segs[i].state == segUnread {
		s.load(i)
	}
	return i
}

// takeIn adds the keys of the last segment to the one that it is merged into, and reports whether that is possible: not
// if one of them has lost keys, because then the other one would have, too.
func (s *Store) takeIn(last, into *activeSeg) bool {
	from, to := format.Segment(last.buf), format.Segment(into.buf)
	clock := max(from.Clock(), to.Clock())
	width := max(from.Width(), to.Width(), from.WidthFor(clock, clock), to.WidthFor(clock, clock))
	keys := from.Keys() + to.Keys()
	n := from.LengthBytes() + to.LengthBytes() - format.SegmentHeaderBytes
	if from.Lossy() || to.Lossy() || n+keys*maxWidth > format.MaxSegmentBytes {
		return false
	}
	if !s.makeLen(last, n+keys*maxWidth) || !s.makeLen(into, n+keys*maxWidth) {
		return false
	}
	from, to = format.Segment(last.buf), format.Segment(into.buf)
	from.Recode(clock, width)
	to.Recode(clock, width)
	to.AppendItems(from)
	_, bits := lookup.Buddy(last.number)
	to.SetDecidedBy(bits)
	return true
}

// mergeFailed ends a write of a merge that has failed.
func (s *Store) mergeFailed(st Status) {
	m := &s.merge
	s.segs[m.into].state, s.segs[m.into].merging = segLoaded, false
	m.stage = mergeBroken
	s.progress++
	s.failReady(m.last, st)
	s.failReady(m.into, st)
}

// mergeDone takes the last segment off the table, when the other one has its keys.
func (s *Store) mergeDone() {
	m := &s.merge
	last, into := &s.segs[m.last], &s.segs[m.into]
	content := format.Segment(last.buf)
	if last.bytes > 0 {
		s.died(last.number, last.entry.Offset(), last.bytes)
	}
	switch counted := s.audit.counted(last.number); {
	case counted == s.audit.counted(into.number):
	case counted:
		// The audit has counted the last segment, but has not reached into, where it will count its keys.
		s.countSegment(content, -1)
	default:
		s.countSegment(content, 1)
	}
	s.noteExpiry(content.FirstExpiry())
	if e := &s.expiry; e.running && e.identities && e.identityDue == 0 {
		e.identityDue = max(1, s.wall) // the round may have passed the segment that has them now
	}
	s.cutTable(last.number)
	_, bits := lookup.Buddy(last.number)
	format.Segment(into.buf).SetDecidedBy(bits)
	s.stats.Merges++
	m.stage, into.merging = mergeNone, false
	s.progress++
	// The writers of the last segment go to the other one, which is still held.
	waiting := last.waiting
	last.waiting = list.None
	for waiting.N > 0 {
		i := s.opLinks.Pop(&waiting)
		switch o := &s.ops[i]; o.kind {
		case opRewrite, opAudit, opExpire, opProbe: // they were about the segment
			s.finish(i, OK)
		default:
			s.dispatch(i)
		}
	}
	for _, i := range [...]int32{m.last, m.into} {
		s.segs[i].held = false
		s.schedule(i)
	}
}

// abandonMerge lets go of the segments, because segment i could not be read or, with none, because they cannot be
// merged. The next merge begins after a time.
func (s *Store) abandonMerge(i int32, forNS int64) {
	m := &s.merge
	m.stage, m.retryNS = mergeNone, s.now+forNS
	for _, k := range [...]int32{m.last, m.into} {
		s.segs[k].held = false
		if k == i {
			s.segs[k].state = segUnread
		}
		s.schedule(k)
	}
}

// cutTable takes the last segment off the table, which has no keys, or none any more.
func (s *Store) cutTable(last uint32) {
	s.tbl.Shrink(last)
	s.audit.Looked = min(s.audit.Looked, last)
	s.expiry.looked = min(s.expiry.looked, last)
}
