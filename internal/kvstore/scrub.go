package kvstore

import (
	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/format"
)

// Damage is a live record that is not what was written. It is reported whenever it is come upon.
type Damage struct {
	// Offset is its place in the partition.
	Offset int64
	// Segment is the number of the segment, its own or of the value's key.
	Segment uint32
	// Hash is that of the value's key, 0 for a segment.
	Hash uint64
}

// scrubState is the slow walk over all sealed chunks. It uses a slot that compaction does not need, and gives it back at
// once when it does.
type scrubState struct {
	// next is the chunk to look at next.
	next int32
	// dueNS is when it may read on.
	dueNS int64
}

// scrubStep begins or continues.
func (s *Store) scrubStep() {
	if s.cfg.ScrubBytesPerSec <= 0 {
		return
	}
	// The last slot is the last that compaction takes.
	sl := &s.compact.slots[len(s.compact.slots)-1]
	switch {
	case s.stopping:
		if sl.scrub {
			s.endScrub(sl)
		}
		return
	case s.now < s.scrub.dueNS:
		s.wake(s.scrub.dueNS)
		return
	case !sl.scrub:
		if sl.busy || !s.nextToScrub() {
			return
		}
		sl.Begin(s.scrub.next, true)
		sl.busy, sl.scrub = true, true
		s.pool.Pin(sl.Chunk)
	}
	s.look(sl)
	if n := s.readOn(sl); n > 0 {
		s.stats.Scrubbed += n
		s.scrub.dueNS = max(s.scrub.dueNS, s.now-1e9) + n*1e9/s.cfg.ScrubBytesPerSec
	}
	if !sl.Reading && sl.running == 0 && (sl.Failed || sl.Ended()) {
		s.scrub.next++
		s.endScrub(sl)
		s.progress++
	}
}

// nextToScrub finds the next chunk to look at. If there is none it waits as for a chunk.
func (s *Store) nextToScrub() bool {
	n := int32(len(s.pool.Chunks))
	for range n {
		s.scrub.next %= n
		if c := &s.pool.Chunks[s.scrub.next]; c.State == chunks.Sealed {
			return true
		}
		s.scrub.next++
	}
	s.scrub.dueNS = s.now + s.cfg.ChunkBytes*1e9/s.cfg.ScrubBytesPerSec
	s.wake(s.scrub.dueNS)
	return false
}

// endScrub gives the slot back.
func (s *Store) endScrub(sl *slot) {
	if sl.Reading || sl.running > 0 {
		return
	}
	sl.busy, sl.scrub = false, false
	s.pool.Unpin(sl.Chunk)
}

// look checks the records that were read.
func (s *Store) look(sl *slot) {
	for s.freeInt.N > 0 {
		rec, offset, sound := sl.Next()
		if rec == nil {
			return
		}
		if sound {
			continue
		}
		s.suspect(sl, rec, offset)
	}
}

// suspect reports a record that is not sound if it is live. It is not believed, but the number of its segment is where to ask.
func (s *Store) suspect(sl *slot, rec []byte, offset int64) {
	switch {
	case len(rec) < format.SegmentHeaderBytes:
	case !sl.Key:
		s.startMove(sl, op{kind: opVerify, ready: true, hash: format.Value(rec).Hash(), old: offset})
	default:
		if n := format.Segment(rec).Number(); n < s.tbl.Len() && s.tbl.Get(n).Offset() == offset {
			s.damage(Damage{Offset: offset, Segment: n})
		}
	}
}

// damage counts and reports a damaged record.
func (s *Store) damage(d Damage) {
	s.stats.Damaged++
	s.out.Damage = append(s.out.Damage, d)
}
