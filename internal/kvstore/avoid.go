package kvstore

import (
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

const (
	// avoidNS is how long compaction avoids a chunk after the first time that it could not be emptied.
	avoidNS = 100e6
	// maxAvoided is how many chunks are avoided before compaction pauses after each further one.
	maxAvoided = 4
	// Puts that wait for space are refused once more than maxFailed victims in a row have failed, for patienceNS.
	maxFailed  = 5
	patienceNS = 3e9
	// lastChoiceNS is the time between two tries from then on, and when all chunks that are worth emptying are avoided.
	// For that long Puts may be refused after the drive works again.
	lastChoiceNS = 1e9
	// maxAwaited is after how many tries writes no longer wait for the next try of a damaged chunk.
	maxAwaited = 5
)

// avoided is a chunk that could not be emptied.
type avoided struct {
	chunk format.ChunkNumber
	epoch space.Epoch
	tries int
	dueNS int64
	// pinned: much of the chunk, or a segment of one of its values, could not be read. It is pinned until dueNS, so
	// that compaction chooses others, and for twice as long each time.
	pinned bool
	// damaged: some blocks could not be read, and all that is live elsewhere in the chunk was moved, so that it is
	// Damaged. It is tried again when there is no other to choose, because the drive may be able to read it by then:
	// from dueNS on, or lastChoiceNS after the last failure if something waits for space.
	damaged bool
	// reported: its losses were reported when it was first found damaged.
	reported bool
	// audits is how many audits had ended when it was damaged no longer, to be tried again. What it has lost is nothing
	// to those that end later.
	audits int
}

// avoidedOf returns the index of the entry of a chunk that could not be emptied, or -1.
func (s *Store) avoidedOf(chunk format.ChunkNumber) int {
	epoch := s.pool.Chunks[chunk].Epoch
	return slices.IndexFunc(s.compact.avoided[:], func(a avoided) bool {
		return a.tries > 0 && a.chunk == chunk && a.epoch == epoch
	})
}

// avoidedEntry returns the entry of a chunk that could not be emptied, and counts the try.
func (s *Store) avoidedEntry(chunk format.ChunkNumber) *avoided {
	c := &s.compact
	if c.failed++; c.failed == 1 {
		c.sinceNS = s.now
	}
	c.failedNS = s.now
	all := c.avoided[:]
	i := s.avoidedOf(chunk)
	if i < 0 {
		i = 0
		for k := range all {
			if all[k].dueNS < all[i].dueNS {
				i = k
			}
		}
		if all[i].pinned {
			s.pool.Unpin(all[i].chunk)
		}
		all[i] = avoided{chunk: chunk, epoch: s.pool.Chunks[chunk].Epoch}
	}
	a := &all[i]
	a.dueNS = s.now + avoidNS<<min(a.tries, 8)
	a.tries++
	return a
}

// avoid keeps compaction from a chunk for a while.
func (s *Store) avoid(chunk format.ChunkNumber) {
	a := s.avoidedEntry(chunk)
	a.pinned = true
	s.pool.Pin(chunk)
	s.notEmptied(chunk, a.tries)
	pinned := 0
	for k := range s.compact.avoided {
		if s.compact.avoided[k].pinned {
			pinned++
		}
	}
	if pinned >= maxAvoided { // it may be the whole drive
		wait := int64(retryNS)
		if s.givesUp() {
			wait = lastChoiceNS // each try may use up room
		}
		s.compact.retryNS = s.now + wait
		s.wake(s.compact.retryNS)
	}
}

// avoidDamaged notes that a chunk is damaged because blocks could not be read, and reports whether it was for the first
// time. It may have been avoided before, when so much could not be read that nothing was known to be damaged.
// unaudited: an audit has ended while the chunk was tried again.
func (s *Store) avoidDamaged(chunk format.ChunkNumber) (first, unaudited bool) {
	a := s.avoidedEntry(chunk)
	a.dueNS = s.now + avoidNS<<min(a.tries, 14) // half an hour in the end: the blocks may be lost
	first, a.damaged, a.reported = !a.reported, true, true
	return first, a.audits != s.audit.ended
}

// resealDamaged lets compaction choose a damaged chunk again, because the drive may be able to read it by now.
func (s *Store) resealDamaged(chunk format.ChunkNumber) {
	if i := s.avoidedOf(chunk); i >= 0 {
		s.compact.avoided[i].damaged, s.compact.avoided[i].audits = false, s.audit.ended
	}
	s.pool.Reseal(chunk)
}

// isDamaged reports whether an entry is that of a chunk that is still damaged, and may be tried again.
func (s *Store) isDamaged(a *avoided) bool {
	if !a.damaged || int(a.chunk) >= len(s.pool.Chunks) {
		return false
	}
	c := &s.pool.Chunks[a.chunk]
	return c.State == space.Damaged && c.Epoch == a.epoch && c.Pins == 0
}

// forgive lets compaction choose avoided chunks again whose time has come.
func (s *Store) forgive() {
	for i := range s.compact.avoided {
		switch a := &s.compact.avoided[i]; {
		case !a.pinned:
		case s.now < a.dueNS:
			s.wake(a.dueNS)
		default:
			a.pinned = false
			s.pool.Unpin(a.chunk)
		}
	}
}

// retryAvoided lets compaction choose the avoided chunk that is due first although it is not due, lastChoiceNS after
// the last failure, and reports whether it does. While an audit runs, a damaged one is left to it, unless something
// waits for space.
func (s *Store) retryAvoided() bool {
	c := &s.compact
	var first *avoided
	for i := range c.avoided {
		a := &c.avoided[i]
		if a.pinned || s.isDamaged(a) && (s.now >= a.dueNS && !s.audit.Running || s.starved()) {
			if first == nil || a.dueNS < first.dueNS {
				first = a
			}
		}
	}
	switch due := c.failedNS + lastChoiceNS; {
	case first == nil:
		return false
	case s.now < due:
		s.wake(due)
		return false
	case first.pinned:
		first.pinned = false
		s.pool.Unpin(first.chunk)
	default:
		s.resealDamaged(first.chunk)
	}
	return true
}
