package kvstore

import (
	"math"
	"slices"

	"jbofd/internal/kvstore/lookup"
)

// unreadables are segments whose reads have failed. A read that fails says less than one that returns something else:
// the drive may be unreachable for a while, or fail one read and not the next. A segment is lost if its read fails
// again and again while the drive reads others, and so often that chance does not explain it.
type unreadables struct {
	last [8]unreadable
	// any: there is one in last.
	any bool
	// reads is the number of reads of segments that have succeeded, losses how often one was found lost. transient
	// counts reads that have failed of segments that were read later, or that are not in last.
	reads, transient, losses uint64
	// probed is the segment that was probed last.
	probed uint32
}

// unreadable is a segment that was read in vain, for the first time at sinceNS, for the last time at lastNS. failed
// counts the reads that have failed. tries counts a failure only if others were read since the one before: while the
// drive reads nothing, one is as good as many. reads and transient are those of unreadables at sinceNS, lastReads is
// the number of reads at lastNS.
type unreadable struct {
	number           uint32
	entry            lookup.Entry
	tries            int
	failed           uint64
	sinceNS, lastNS  int64
	reads, transient uint64
	lastReads        uint64
}

// What it takes for an unreadable segment to count as lost, besides maxTries. settleReads is for one of which a Settle
// asks, because somebody else has what is lost.
const (
	unreadableNS    = 1e9
	unreadableReads = 100
	settleReads     = 16
	// leastChance is the binary logarithm of the chance, at most, that the reads of a segment that is not lost have
	// failed so often.
	leastChance = -24
	// staleNS is how long a segment that nobody reads keeps its place in unreadables.last if there are others.
	staleNS = 60e9
)

// isLost notes that a read of a segment has failed, and reports whether the segment is lost. That takes so many reads
// of others.
func (u *unreadables) isLost(a *activeSeg, now int64, reads uint64) bool {
	e := u.place(a, now)
	if e == nil {
		u.transient += uint64(a.failed)
		return false
	}
	e.failed += uint64(a.failed)
	if e.tries == 0 || u.reads > e.lastReads {
		e.tries++
	}
	e.lastNS, e.lastReads = now, u.reads
	return e.tries >= maxTries && now-e.sinceNS >= unreadableNS && u.reads-e.reads >= reads &&
		u.chance(e) <= leastChance
}

// chance is the binary logarithm of the chance that a segment was read in vain so often if it is like others. The last
// try does not count: nothing may have been readable since.
func (u *unreadables) chance(e *unreadable) float64 {
	failed, read := float64(u.transient-e.transient), float64(u.reads-e.reads)
	return float64(e.tries-1) * math.Log2(failed/(failed+read))
}

// place returns the entry of a segment, which may be a new one, or nil if there is no room for that.
func (u *unreadables) place(a *activeSeg, now int64) *unreadable {
	oldest := &u.last[0]
	for i := range u.last {
		e := &u.last[i]
		if e.tries > 0 && e.number == a.number && e.entry == a.entry {
			return e
		}
		if oldest.tries > 0 && (e.tries == 0 || e.lastNS < oldest.lastNS) {
			oldest = e
		}
	}
	if oldest.tries > 0 {
		if now < oldest.lastNS+staleNS {
			return nil
		}
		u.transient += oldest.failed
	}
	*oldest = unreadable{number: a.number, entry: a.entry, sinceNS: now, reads: u.reads, transient: u.transient}
	u.any = true
	return oldest
}

// read notes that a segment was read.
func (u *unreadables) read(a *activeSeg) {
	u.reads++
	u.transient += uint64(a.failed)
	for i := range u.last {
		if e := &u.last[i]; u.any && e.tries > 0 && e.number == a.number && e.entry == a.entry {
			u.transient += e.failed
			u.drop(e)
		}
	}
}

// replaced notes that a segment has a new record.
func (u *unreadables) replaced(number uint32) {
	for i := range u.last {
		if e := &u.last[i]; u.any && e.tries > 0 && e.number == number {
			u.drop(e)
		}
	}
}

// drop frees a place in last.
func (u *unreadables) drop(e *unreadable) {
	*e = unreadable{}
	u.any = slices.ContainsFunc(u.last[:], func(e unreadable) bool { return e.tries > 0 })
}
