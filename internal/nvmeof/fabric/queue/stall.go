package queue

import "time"

// stall is what Stuck remembers.
type stall struct {
	// slot, askedNS and got are the oldest data asked for that has not come whole and how much
	// of it has, sinceNS when that changed last.
	slot, got        int
	askedNS, sinceNS int64
}

// Stuck reports whether the host has owed data that it was asked for, without any progress, for
// limit. A host that answers in order may take as long as it likes for everything, as it goes on. The
// lock is held.
func (q *Queue) Stuck(now int64, limit time.Duration) bool {
	oldest := stall{slot: -1}
	q.m.Awaited(func(i, got int) {
		if asked := q.slots[i].askedNS; oldest.slot < 0 || asked < oldest.askedNS {
			oldest = stall{slot: i, got: got, askedNS: asked}
		}
	})
	last := &q.stall
	if oldest.slot < 0 || oldest.slot != last.slot || oldest.got != last.got || oldest.askedNS != last.askedNS {
		*last = oldest
		last.sinceNS = now
		return false
	}
	return now-last.sinceNS > int64(limit)
}
