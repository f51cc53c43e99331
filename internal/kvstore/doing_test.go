package kvstore

import (
	"slices"

	"jbofd/internal/kvstore/space"
)

// Doing reports whether the store is in the middle of something, for tests that stop it there.
func (s *Store) Doing(what string) bool {
	if s.phase != ready {
		return false
	}
	state := func(st segState) bool {
		return slices.ContainsFunc(s.split.src[:s.split.n], func(i int32) bool { return s.segs[i].state == st })
	}
	slotIs := func(is func(sl *slot) bool) bool {
		for i := range s.compact.slots {
			if sl := &s.compact.slots[i]; sl.busy && is(sl) {
				return true
			}
		}
		return false
	}
	switch what {
	case "nothing":
		return s.Idle()
	case "a request reads":
		return s.reads.Busy() > 0
	case "a request writes":
		return s.freeOps.N < s.cfg.Requests
	case "a chunk is opened":
		return s.logs[keyLog].opening || s.logs[userLog].opening || s.logs[movedLog].opening
	case "the scrub reads":
		return slotIs(func(sl *slot) bool { return sl.scrub && sl.Reading })
	case "the scrub waits for its rate":
		return slotIs(func(sl *slot) bool { return sl.scrub && !sl.Reading && s.scrub.dueNS > s.now+1e9 })
	case "the scrub waits for the next round":
		return !slotIs(func(sl *slot) bool { return sl.scrub }) && s.scrub.dueNS > s.now+1e9
	case "the scrub asks about a damaged value":
		return slotIs(func(sl *slot) bool { return sl.scrub && sl.running > 0 })
	case "an audit looks at segments":
		return s.audit.Running && s.audit.Looked > 0
	case "a suspicious chunk waits":
		return s.compact.suspect != none
	case "a victim is read":
		return slotIs(func(sl *slot) bool { return !sl.scrub && sl.Reading })
	case "values are moved":
		return s.compact.values > 0 && s.compact.running > 0
	case "segments are moved":
		return s.compact.keys > 0 && s.compact.running > 0
	case "compaction pauses":
		return s.compact.futile > maxFutile
	case "a victim could not be read":
		return s.compact.retryNS > s.now
	case "a checkpoint waits for the key log":
		return s.ckpt.stage == ckptBarrier
	case "a checkpoint's pages are written":
		return s.ckpt.stage == ckptPage
	case "a checkpoint's superblocks are written":
		return s.ckpt.stage == ckptSuper
	case "a checkpoint is tried again":
		return s.ckpt.retryNS > s.now
	case "sources of a split are read":
		return s.split.n > 0 && !s.split.writing && state(segLoading)
	case "new segments are written":
		return s.split.writing
	case "a split is tried again":
		return s.split.retryNS > s.now && s.split.n == 0
	case "a split has failed":
		return s.split.broken && !s.split.writing
	case "Puts wait for compaction":
		return s.logs[userLog].starved
	case "Puts wait for a checkpoint":
		return s.logs[userLog].starved && s.pool.Obsolete > 0
	case "segments wait for compaction":
		return s.compact.blocked
	case "segments wait for a checkpoint":
		return s.compact.blocked && s.pool.Obsolete > 0
	case "moved values wait for a chunk":
		return s.logs[movedLog].starved
	case "a chunk is damaged":
		return slices.ContainsFunc(s.pool.Chunks, func(c space.Chunk) bool { return c.State == space.Damaged })
	case "settling":
		return s.settling
	}
	panic("no such state: " + what)
}
