package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// Damage is a live record that is not what was written. It is reported each time that it is found.
type Damage struct {
	// Offset is the record's offset in the partition.
	Offset units.ExtentOffset
	// Segment is the number of the segment, or of the segment that the value's key belongs to.
	Segment uint32
	// Hash is the hash of the value's key, or its low 32 bits; 0 for a segment.
	Hash uint64
	// LostBytes, if not 0, says that this is not a record but a chunk: so many of its live bytes belong to records that
	// are not there. The keys are known when they are read.
	LostBytes int64
}

// scrubState is a slow walk over all sealed chunks. It uses a slot that compaction does not need, and returns it as
// soon as compaction does.
type scrubState struct {
	// next is the chunk that is read next.
	next format.ChunkNumber
	// dueNS is when the next piece may be read.
	dueNS int64
	// passed is how many chunks in a row were not to be read. resting: this turn has done as much as it has time for.
	passed  int
	resting bool
}

const (
	// scrubPasses is how many chunks the scrub passes in a turn, scrubRecords how many records it checks. Either takes
	// 50 µs at most, with records of common lengths.
	scrubPasses  = 8192
	scrubRecords = 256
)

// rest ends what a turn does for the scrub.
func (s *Store) rest() {
	s.scrub.resting = true
	s.wake(s.now + 1)
}

// scrubStep starts the scrub or continues it.
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
	case s.scrub.resting:
		return
	case !sl.scrub:
		if sl.busy || !s.nextToScrub() {
			return
		}
		sl.Begin(s.scrub.next)
		sl.busy, sl.scrub = true, true
		s.pool.Pin(sl.Chunk)
	}
	s.checkRecords(sl)
	if n := s.readPiece(sl); n > 0 {
		s.stats.Scrubbed += n
		s.scrub.dueNS = max(s.scrub.dueNS, s.now-1e9) + n*1e9/s.cfg.ScrubBytesPerSec
	}
	if !sl.Reading && sl.running == 0 && (sl.Failed || sl.Ended()) {
		if !sl.Failed && (sl.Holes > 0 || sl.Sound < int64(s.pool.Chunks[sl.Chunk].Live)) {
			s.compact.suspect = sl.Chunk // once endScrub has returned the slot
		}
		s.scrub.next++
		s.endScrub(sl)
		s.progress++
	}
}

// nextToScrub finds the next chunk to read. If there is none, the scrub waits for as long as a chunk takes.
func (s *Store) nextToScrub() bool {
	n := format.ChunkNumber(len(s.pool.Chunks))
	for range scrubPasses {
		s.scrub.next %= n
		c := &s.pool.Chunks[s.scrub.next]
		if c.State == space.Damaged && c.Pins == 0 {
			s.pool.Reseal(s.scrub.next) // what could not be read may be readable now
		}
		if c.State == space.Sealed {
			s.scrub.passed = 0
			return true
		}
		s.scrub.next++
		if s.scrub.passed++; s.scrub.passed == int(n) {
			s.scrub.passed = 0
			s.scrub.dueNS = s.now + s.cfg.ChunkBytes*1e9/s.cfg.ScrubBytesPerSec
			s.wake(s.scrub.dueNS)
			return false
		}
	}
	s.rest()
	return false
}

// endScrub returns the slot.
func (s *Store) endScrub(sl *slot) {
	if sl.Reading || sl.running > 0 {
		return
	}
	sl.busy, sl.scrub = false, false
	s.pool.Unpin(sl.Chunk)
}

// checkRecords checks records that were read.
func (s *Store) checkRecords(sl *slot) {
	for n := 0; s.freeInt.N > 0; n++ {
		if n == scrubRecords {
			s.rest()
			return
		}
		rec, offset, sound := sl.Next()
		if rec == nil {
			if sl.Searching {
				s.rest()
			}
			return
		}
		if sound {
			continue
		}
		s.checkLive(sl, rec, offset)
	}
}

// checkLive reports a damaged record if it is live. Its header may be wrong, too. So what that says is used only to
// find the segment that knows whether the record is live.
func (s *Store) checkLive(sl *slot, rec []byte, offset units.ExtentOffset) {
	switch {
	case len(rec) < format.MinSegmentBytes:
	case !sl.Key:
		s.startMove(sl, op{kind: opVerify, ready: true, hash: uint64(format.Value(rec).Hash()), old: offset})
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
