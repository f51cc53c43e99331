package kvstore

import "slices"

// givesUp reports that one victim after the other has failed for so long that Puts no longer wait for the next: not
// that long if the store is to stop.
func (s *Store) givesUp() bool {
	patience := int64(patienceNS)
	if s.stopping {
		patience /= 10
	}
	return s.compact.failed > maxFailed && s.now-s.compact.sinceNS >= patience
}

// lacksCheckpoint reports that a checkpoint, or the superblock that names it, could not be written for so long that
// writes no longer wait for the space that it would free. It is tried again and again nevertheless.
func (s *Store) lacksCheckpoint() bool {
	patience := int64(patienceNS)
	if s.stopping {
		patience /= 10
	}
	c := &s.ckpt
	return c.failed > maxFailed && s.now-c.sinceNS >= patience && !c.busy
}

// retrying reports that victims which could not be emptied will be tried again soon, or that a chunk can be chosen as
// soon as a block in it is restored.
func (s *Store) retrying() bool {
	c := &s.compact
	if s.restores() || s.givesUp() {
		return s.restores()
	}
	for i := range c.avoided {
		if a := &c.avoided[i]; a.pinned || a.tries <= maxAwaited && s.isDamaged(a) {
			return true
		}
	}
	return s.now < c.retryNS
}

// restores reports that a block is being restored, which pins its chunk. Writes wait for that as long as for victims:
// patienceNS.
func (s *Store) restores() bool {
	most := int(patienceNS / retryNS)
	if s.stopping {
		most /= 10
	}
	return s.restoring > 0 && slices.ContainsFunc(s.groups, func(g group) bool {
		return g.tries > 0 && g.tries <= most
	})
}

// failsWrites reports that the drive has failed a write a short while ago.
func (s *Store) failsWrites() bool { return s.badWriteNS != 0 && s.now-s.badWriteNS < lastChoiceNS }

// noSpace is the status of writes for which there is no space: DeviceError if that is because chunks cannot be read, or
// because a block cannot be restored, or others cannot be written.
func (s *Store) noSpace() Status {
	if s.givesUp() || s.restoring > 0 || s.failsWrites() || s.lacksCheckpoint() {
		return DeviceError
	}
	for i := range s.compact.avoided {
		if s.isDamaged(&s.compact.avoided[i]) {
			return DeviceError
		}
	}
	return CapacityExceeded
}

// failOutOfSpace ends writes that wait for space if no space can be won, as noSpace says. Writes of hosts (userLog) end
// as soon as compaction empties nothing, because no chunk is worth it or it pauses, and no checkpoint runs or is to be
// repeated, which may win space. Everything else that waits, moves of compaction and changes of segments included, ends
// only if nothing is left that could free a chunk: no I/O in flight, no chunk obsolete and no checkpoint running unless
// checkpoints fail for long, no retry due after a failed read of a victim unless compaction gives up, none of a
// restore, no search for the next record of a victim, and no progress in this round of steps. before is the count of
// progress and of the pool's changes at the beginning of the round.
func (s *Store) failOutOfSpace(before uint64) {
	lacks := s.lacksCheckpoint()
	if s.compact.nothing && s.logs[userLog].starved && (lacks || s.ckpt.stage == ckptIdle && s.now >= s.ckpt.retryNS) {
		s.failSealed(userLog, s.noSpace())
	}
	if s.retrying() {
		return
	}
	if len(s.ios) != len(s.freeIO) || s.progress+s.pool.Changes != before || s.searching() ||
		!lacks && (s.pool.Obsolete > 0 || s.ckpt.stage != ckptIdle) {
		return
	}
	for l := range s.logs {
		if s.logs[l].starved {
			s.failSealed(l, s.noSpace())
		}
	}
	for n := s.dirty.N; s.compact.blocked && n > 0; n-- {
		i := s.segLinks.Pop(&s.dirty)
		s.segs[i].dirty = false
		s.failReady(i, s.noSpace())
		s.schedule(i)
		s.progress++
	}
}

// searching reports whether the walk through a victim, or through empty segments, goes on in the next turn.
func (s *Store) searching() bool {
	skips := s.audit.Running && s.audit.skipping || s.expiry.running && s.expiry.skipping
	return skips || slices.ContainsFunc(s.compact.slots, func(sl slot) bool {
		return sl.busy && !sl.scrub && sl.Searching && !sl.Failed // one that has failed is not searched
	})
}
