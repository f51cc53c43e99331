package kvstore

import (
	"math"
	"math/bits"

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
	// Hash is the hash of the value's key; 0 for a segment.
	Hash uint64
	// First and Last are the positions that it concerns: that of the value's key, or those of the segment. For a chunk
	// there are none, and First is above Last.
	First, Last uint64
	// Unreadable: it is a segment that the drive does not return, so that it is not known whether it is damaged. An
	// audit reports that, and it does not count.
	Unreadable bool
	// LostBytes, if not 0, says that this is not a record but a chunk: so many of its live bytes belong to records that
	// are not there. The keys are known when they are read.
	LostBytes int64
}

// scrubState is a slow walk over all sealed chunks. It uses a slot that compaction does not need, and returns it as
// soon as compaction does.
type scrubState struct {
	// next is the chunk that is read next.
	next format.ChunkNumber
	// pinned: the chunk that is being read is pinned, because the scrub does not wait for the time of the next piece.
	// While it waits, which may take hours, the chunk may be emptied and used again. epoch is that of the chunk.
	pinned bool
	epoch  space.Epoch
	// dueNS is when the next piece may be read.
	dueNS int64
	// passed is how many chunks in a row were not to be read. resting: this turn has done as much as it has time for.
	passed  int
	resting bool
	// passes is how many passes through all chunks have ended. began is when the present one has, sinceDamaged is
	// Stats.Damaged then, and unreadable how many blocks it could not read. last is what the pass before has found.
	passes              int64
	began, sinceDamaged int64
	unreadable          int64
	// pausedNS is since when the rate is 0, if it is.
	pausedNS int64
	last     ScrubPass
}

// ScrubPass is what a pass of the scrub, or of the present one so far, has found.
type ScrubPass struct {
	// TookNS is how long it took, without the time for which the rate was 0.
	TookNS int64
	// Damaged counts the damaged records that were found meanwhile, by whatever has read them, and lossy segments.
	// Unreadable is how many blocks could not be read; of a chunk with many of them, not all.
	Damaged, Unreadable int64
}

// ScrubState describes the scrub.
type ScrubState struct {
	// BytesPerSec is its rate; 0: it does nothing.
	BytesPerSec int64
	// Chunk of Chunks is read, or is next. Passes have ended since New.
	Chunk, Chunks, Passes int64
	// Present is what the present pass has found so far, Last what the one before has, if Passes is not 0.
	Present, Last ScrubPass
}

// ScrubState returns how far the scrub is.
func (s *Store) ScrubState() ScrubState {
	return ScrubState{BytesPerSec: s.cfg.ScrubBytesPerSec, Chunk: int64(s.scrub.next),
		Chunks: int64(len(s.pool.Chunks)), Passes: s.scrub.passes, Present: s.scrubPass(), Last: s.scrub.last}
}

func (s *Store) scrubPass() ScrubPass {
	until := s.now
	if s.cfg.ScrubBytesPerSec <= 0 {
		until = s.scrub.pausedNS
	}
	return ScrubPass{TookNS: until - s.scrub.began, Damaged: s.stats.Damaged - s.scrub.sinceDamaged,
		Unreadable: s.scrub.unreadable}
}

// SetScrubRate changes the rate of the scrub; 0: it pauses where it is.
func (s *Store) SetScrubRate(bytesPerSec int64) {
	switch c := &s.scrub; {
	case s.cfg.ScrubBytesPerSec > 0 && bytesPerSec <= 0:
		c.pausedNS = s.now
	case s.cfg.ScrubBytesPerSec <= 0 && bytesPerSec > 0:
		c.began += s.now - c.pausedNS
	}
	s.cfg.ScrubBytesPerSec, s.scrub.dueNS = bytesPerSec, s.now
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
	// The last slot is the last that compaction takes.
	sl := &s.compact.slots[len(s.compact.slots)-1]
	switch {
	case s.stopping || s.cfg.ScrubBytesPerSec <= 0:
		if sl.scrub {
			s.endScrub(sl)
		}
		return
	case s.now < s.scrub.dueNS:
		if s.scrub.pinned && !sl.Reading && sl.running == 0 {
			s.pinScrubbed(sl, false)
		}
		s.wake(s.scrub.dueNS)
		return
	case s.scrub.resting:
		return
	case !sl.scrub:
		if sl.busy || !s.nextToScrub() {
			return
		}
		sl.Begin(s.scrub.next)
		sl.busy, sl.scrub, s.scrub.epoch = true, true, s.pool.Chunks[sl.Chunk].Epoch
		s.pinScrubbed(sl, true)
	case !s.scrub.pinned:
		if !s.isScrubbed(sl) {
			s.nextChunk()
			s.endScrub(sl)
			s.progress++
			return
		}
		s.pinScrubbed(sl, true)
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
		s.scrub.unreadable += int64(sl.Unreadable)
		s.nextChunk()
		s.endScrub(sl)
		s.progress++
	}
}

// pinScrubbed pins the chunk that is being read, or undoes that.
func (s *Store) pinScrubbed(sl *slot, pin bool) {
	if s.scrub.pinned = pin; pin {
		s.pool.Pin(sl.Chunk)
	} else {
		s.pool.Unpin(sl.Chunk)
	}
}

// isScrubbed reports whether the chunk in which the scrub has rested still has what has been read of it, and may have
// more.
func (s *Store) isScrubbed(sl *slot) bool {
	if int(sl.Chunk) >= len(s.pool.Chunks) {
		return false
	}
	c := &s.pool.Chunks[sl.Chunk]
	return c.State == space.Sealed && c.Epoch == s.scrub.epoch
}

// nextChunk lets the scrub go on with the next chunk.
func (s *Store) nextChunk() {
	if s.scrub.next++; int(s.scrub.next) < len(s.pool.Chunks) {
		return
	}
	c := &s.scrub
	c.next, c.last = 0, s.scrubPass()
	c.passes++
	c.began, c.sinceDamaged, c.unreadable = s.now, s.stats.Damaged, 0
}

// nextToScrub finds the next chunk to read. If there is none, the scrub waits for as long as a chunk takes.
func (s *Store) nextToScrub() bool {
	n := format.ChunkNumber(len(s.pool.Chunks))
	for range scrubPasses {
		s.scrub.next = min(s.scrub.next, n-1) // there may be fewer than before
		c := &s.pool.Chunks[s.scrub.next]
		// An audit reports what a damaged chunk has lost as long as the chunk is left as damaged.
		if c.State == space.Damaged && c.Pins == 0 && !s.audit.Running {
			s.resealDamaged(s.scrub.next) // what could not be read may be readable now
		}
		if c.State == space.Sealed {
			s.scrub.passed = 0
			return true
		}
		s.nextChunk()
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
	if s.scrub.pinned {
		s.pinScrubbed(sl, false)
	}
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
		if !sound {
			s.checkLive(sl, rec, offset)
			continue
		}
		if sl.Key && format.Segment(rec).Lossy() {
			s.damagedSegment(rec, offset)
		}
	}
}

// damagedSegment reports a segment if the record is the present one.
func (s *Store) damagedSegment(rec []byte, offset units.ExtentOffset) {
	if n := format.Segment(rec).Number(); n < s.tbl.Len() && s.tbl.Get(n).Offset() == offset {
		s.damage(Damage{Offset: offset, Segment: n})
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
		s.damagedSegment(rec, offset)
	}
}

// hashOf is the hash of the key that an item of a segment belongs to: pieces of values follow the item of their key.
func (s *Store) hashOf(seg format.Segment, at int) (hash uint64) {
	for i := seg.First(); i <= at; i += seg.Item(i).LengthBytes() {
		if it := seg.Item(i); it.HasKey() {
			hash = format.HashKey(s.hashSeed, it.Key())
		}
	}
	return hash
}

// damage counts and reports a damaged record.
func (s *Store) damage(d Damage) {
	if !d.Unreadable {
		s.stats.Damaged++
	}
	switch d.First = bits.Reverse64(d.Hash); {
	case d.LostBytes > 0:
		d.First, d.Last = 1, 0
	case d.Hash != 0:
		d.Last = d.First
	default:
		d.First = bits.Reverse64(uint64(d.Segment))
		d.Last = d.First | math.MaxUint64>>s.tbl.Bits(d.Segment)
	}
	s.out.Damage = append(s.out.Damage, d)
}
