package kvstore

import (
	"jbofd/internal/kvstore/fifo"
	"jbofd/internal/kvstore/format"
)

// splitsMost is how many segments are added to the table at once.
const splitsMost = 32

// splitState is the addition of segments to the table, several at once: each is filled with keys from its source and
// written. The sources are not: what they have too many is ignored, and left out when they are written next.
// Until all of the new ones are durable the sources must not change, or a crash could bring the older state of a moved
// key back; not even after a write that has failed, for that may be found after a restart. So they are held
// until a round of writes succeeds.
//
// The new ones are in the key log in the order of their numbers, and recovery does not believe one whose
// predecessor it has not found.
type splitState struct {
	// n is how many are being added; 0: none. src and dst are active segments.
	n        int
	src, dst [splitsMost]int32
	// writing: a round of writes is under way, of which ended have ended; failed is why one has failed, if one has.
	writing bool
	ended   int
	failed  Status
	// again: a checkpoint has begun in the middle of the round, so that recovery would find a part of it.
	again bool
	// made: there are dsts. broken: a round has failed; there is another one when a source has a writer.
	made, broken bool
	// retryNS is when to try again after a source could not be read.
	retryNS int64
}

// idle reports that nothing is under way.
func (sp *splitState) idle() bool { return sp.n == 0 || sp.broken && !sp.writing }

// grow begins splits if the table is too small for its objects, and brings them forward.
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
	case sp.broken && writers == 0:
		return
	case !sp.made:
		s.makeNewborn()
	}
	sp.writing, sp.ended, sp.failed, sp.again = true, 0, OK, false
	for _, i := range sp.dst[:sp.n] {
		s.segs[i].force = true
		s.consider(i)
	}
}

// beginSplits takes hold of as many sources as the table lacks segments, and reports whether there is one.
func (s *Store) beginSplits() bool {
	sp := &s.split
	lacks := s.objects/int64(s.cfg.KeysPerSegment) - int64(s.tbl.Len())
	if lacks <= 0 || s.stopping || s.now < sp.retryNS {
		return false
	}
	*sp = splitState{n: int(min(lacks, splitsMost, int64(s.tbl.Room())))}
	for j := range sp.n {
		i, fresh := s.activate(s.tbl.Source(s.tbl.Len()+uint32(j)), payer{background: true})
		sp.src[j], sp.dst[j] = i, nobody
		s.segs[i].held = true
		if fresh {
			s.load(i)
		}
	}
	return sp.n > 0
}

// makeNewborn fills the new segments.
func (s *Store) makeNewborn() {
	sp := &s.split
	sp.made = true
	for j := range sp.n {
		number := s.tbl.Len() + uint32(j)
		sp.dst[j], _ = s.activate(number, payer{background: true})
		d, seg := &s.segs[sp.dst[j]], format.Segment(s.segs[sp.src[j]].buf)
		d.newborn = true
		d.buf = s.enough(d.buf, seg.LengthBytes())
		s.blank(sp.dst[j])
		copy(d.buf[format.SegmentHeaderBytes:seg.LengthBytes()], seg[format.SegmentHeaderBytes:])
		format.Segment(d.buf).SetLengthBytes(seg.LengthBytes())
		format.Segment(d.buf).Filter(func(key []byte) bool { return s.tbl.Moves(format.HashKey(s.hashSeed, key), number) })
	}
}

// newbornEnded counts the end of a write, and ends the round with the last.
func (s *Store) newbornEnded() {
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

// splitsDone: the new segments are of the table.
func (s *Store) splitsDone() {
	done := s.split
	s.split = splitState{}
	first := s.tbl.Len()
	s.tbl.Grow(first + uint32(done.n))
	s.stats.Splits += int64(done.n)
	for j, i := range done.dst[:done.n] {
		s.segs[i].newborn = false
		s.tbl.Set(first+uint32(j), s.segs[i].entry)
	}
	for _, i := range done.src[:done.n] {
		s.own(i)
	}
	for _, i := range done.src[:done.n] {
		s.release(i)
	}
	for _, i := range done.dst[:done.n] {
		s.consider(i)
	}
}

// release lets go of a source whose keys were taken, and sorts its writers.
func (s *Store) release(i int32) {
	a := &s.segs[i]
	waiting := a.waiting
	a.waiting = fifo.None
	// It stays while its writers are sorted.
	for waiting.N > 0 {
		s.dispatch(s.opLinks.Pop(&waiting))
	}
	a.held = false
	s.consider(i)
}

// abandonSplits lets go of the sources because one of them, i, could not be read or written.
func (s *Store) abandonSplits(i int32) {
	was := s.split
	s.split = splitState{retryNS: s.now + retryNS}
	for _, k := range was.src[:was.n] {
		s.segs[k].held = false
		switch {
		case k != i:
			s.consider(k)
		case s.segs[k].waiting.N > 0:
			s.load(k)
			s.consider(k)
		default:
			s.deactivate(k)
		}
	}
}
