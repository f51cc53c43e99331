package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/list"
	"jbofd/internal/units"
)

// maxSplits is how many segments are added to the table at once.
const maxSplits = 32

// splitState is the addition of segments to the table, several at once. Each new segment is filled with keys of its
// source and written. The sources are not written: keys that have moved are ignored in them, and left out at their next
// write.
//
// Until all new segments are durable the sources must not change. Otherwise a crash could bring back an older state of
// a key that has moved. This holds even after a failed write, whose outcome is indeterminate: the sources are held
// until a round of writes succeeds.
//
// The new segments are in the key log in the order of their numbers, and recovery ignores one whose predecessor it has
// not found.
type splitState struct {
	// n is how many segments are being added; 0: none. src and dst are active segments.
	n        int
	src, dst [maxSplits]int32
	// writing: a round of writes is under way, of which ended have ended. failed is why one has failed, if so.
	writing bool
	ended   int
	failed  Status
	// again: a checkpoint has begun during the round, so that recovery would find only a part of it.
	again bool
	// made: the new segments have been filled. broken: a round has failed, and the next one begins when a source has a
	// writer, or a Settle asks for it.
	made, broken bool
	// retryNS is when to try again after a source could not be read.
	retryNS int64
}

// idle reports that nothing is under way.
func (sp *splitState) idle() bool { return sp.n == 0 || sp.broken && !sp.writing }

// grow starts splits if the table is too small (needs), and continues them.
func (s *Store) grow() {
	sp := &s.split
	if sp.n == 0 && !s.beginSplits() || sp.writing || s.ckpt.stage == ckptBarrier {
		return
	}
	writers := 0
	for _, i := range sp.src[:sp.n] {
		if s.segs[i].state != segLoaded {
			return
		}
		writers += s.segs[i].waiting.N
	}
	switch {
	case sp.broken && writers == 0 && !s.merge.asked:
		return
	case !sp.made && !s.fillAdded():
		s.abandonSplits(none)
		return
	}
	sp.writing, sp.ended, sp.failed, sp.again = true, 0, OK, false
	s.merge.asked = false
	for _, i := range sp.dst[:sp.n] {
		s.segs[i].force = true
		s.schedule(i)
	}
}

// beginSplits takes hold of as many sources as the table lacks segments, and reports whether there is one.
func (s *Store) beginSplits() bool {
	sp := &s.split
	lacks := s.lacks()
	if lacks <= 0 || s.stopping || s.now < sp.retryNS || s.merge.stage != mergeNone {
		return false
	}
	*sp = splitState{n: int(min(lacks, maxSplits, int64(s.tbl.Room())))}
	for j := range sp.n {
		i, fresh := s.activate(s.tbl.Source(s.tbl.Len()+uint32(j)), payer{background: true})
		sp.src[j], sp.dst[j] = i, none
		s.segs[i].held = true
		if fresh || s.segs[i].state == segUnread {
			s.load(i)
		}
	}
	return sp.n > 0
}

// fillAdded fills the new segments, and reports whether there was memory for them. Without it none is active.
func (s *Store) fillAdded() bool {
	sp := &s.split
	for j := range sp.n {
		number := s.tbl.Len() + uint32(j)
		sp.dst[j], _ = s.activate(number, payer{background: true})
		d, seg := &s.segs[sp.dst[j]], format.Segment(s.segs[sp.src[j]].buf)
		d.added = true
		if !s.makeLen(d, seg.LengthBytes()) {
			for _, i := range sp.dst[:j+1] {
				s.segs[i].added = false
				s.deactivate(i)
			}
			return false
		}
		s.blank(sp.dst[j])
		format.Segment(d.buf).CopyItems(seg)
		format.Segment(d.buf).Filter(func(key []byte) bool {
			return s.tbl.Moves(format.HashKey(s.hashSeed, key),
				number)
		})
		format.Segment(d.buf).SetDecidedBy(s.tbl.Bits(number))
	}
	sp.made = true
	return true
}

// forgetAdded forgets that a new segment was written at an offset, because compaction has found it there, and reports
// whether that is possible: not while the round may end with success. The next round writes all of them again.
func (s *Store) forgetAdded(offset units.ExtentOffset) bool {
	sp := &s.split
	if !sp.made {
		return true
	}
	for _, i := range sp.dst[:sp.n] {
		a := &s.segs[i]
		if a.bytes == 0 || a.entry.Offset() != offset {
			continue
		}
		if sp.writing {
			return false
		}
		s.pool.SubLive(offset, a.bytes)
		a.entry, a.bytes = 0, 0
	}
	return true
}

// addedWritten counts the end of a write, and ends the round with the last one.
func (s *Store) addedWritten() {
	sp := &s.split
	if sp.ended++; sp.ended < sp.n {
		return
	}
	sp.writing = false
	s.progress++
	switch {
	case sp.failed != OK:
		sp.broken = true
		for _, i := range sp.src[:sp.n] {
			s.failReady(i, sp.failed)
		}
	case !sp.again:
		s.splitsDone()
	}
}

// splitsDone makes the new segments part of the table.
func (s *Store) splitsDone() {
	done := s.split
	s.split = splitState{}
	first := s.tbl.Len()
	s.tbl.Grow(first + uint32(done.n))
	s.stats.Splits += int64(done.n)
	for j, i := range done.dst[:done.n] {
		s.segs[i].added = false
		s.tbl.Set(first+uint32(j), s.segs[i].entry)
		if s.audit.counted(s.segs[done.src[j]].number) {
			s.countSegment(format.Segment(s.segs[i].buf), -1) // they will be counted in their new segment
		}
	}
	for _, i := range done.src[:done.n] {
		s.dropMovedKeys(i)
	}
	for _, i := range done.src[:done.n] {
		s.release(i)
	}
	for _, i := range done.dst[:done.n] {
		s.schedule(i)
	}
}

// release lets go of a source and hands its writers to the segments that their keys belong to now.
func (s *Store) release(i int32) {
	a := &s.segs[i]
	waiting := a.waiting
	a.waiting = list.None
	// The segment is held, and so stays active, until all writers have been handed over.
	for waiting.N > 0 {
		s.dispatch(s.opLinks.Pop(&waiting))
	}
	a.held = false
	s.schedule(i)
}

// abandonSplits lets go of the sources, because source i could not be read or, with none, because there is no memory.
func (s *Store) abandonSplits(i int32) {
	was := s.split
	s.split = splitState{retryNS: s.now + retryNS}
	for _, k := range was.src[:was.n] {
		s.segs[k].held = false
		if k == i {
			s.segs[k].state = segUnread
		}
		s.schedule(k)
	}
}
