package swap

import "jbofd/internal/kvstore/format"

// Policy determines when PUTs are swapped. The load of a drive is the number of requests that are queued or in flight
// there, that is, ahead of a new request. As in the paper, swapping depends on the difference of load between two
// drives and not on the load of one: if all drives are equally loaded, swapping gains nothing.
type Policy struct {
	// BeginGap is the difference between the loads of the source drive and a lender from which on PUTs are swapped, in
	// requests; 0: 64. About 32 requests keep a drive busy. With 64 more than the lender has, a new PUT would wait
	// longer at the source drive than a swapped PUT takes.
	BeginGap int
	// EndGap is the difference below which swapping ends; 0: 16. It is well below BeginGap, so that single PUTs do not
	// turn swapping on and off. It is also the load up to which the source drive is idle enough to return keys.
	EndGap int
	// CalmNS is how long the load of the source drive must have been at most EndGap before keys return; 0: 20 ms. That
	// is longer than the pauses within a burst, and short compared with the time that returning a full index takes.
	CalmNS int64
	// UnlistNS is how long an area stays in the manifest after its last key has returned; 0: 2 s. Removing the area
	// early has a price: the next burst must write the manifest again before PUTs can be swapped. Keeping it costs
	// nothing except that the source cannot be opened without the area.
	UnlistNS int64
}

func (p *Policy) setDefaults() {
	setDefault(&p.BeginGap, 64)
	setDefault(&p.EndGap, 16)
	setDefault(&p.CalmNS, 20e6)
	setDefault(&p.UnlistNS, 2e9)
}

// Thresholds of the used part of a swap log, in thousandths. From moveUsed on, the oldest records are moved to the end
// of the log. From halfUsed on, no further keys are swapped to the log: the rest is for newer values of the keys that
// are in it already. From fullUsed on, keys are returned however busy the source drive is.
const (
	moveUsed = 375
	halfUsed = 500
	fullUsed = 750
	// liveParts limits the live records of one source to 1/liveParts of the log. Then most records that LogHead passes
	// are obsolete, and moving the few live ones frees much space.
	liveParts = 4
)

// Load is the load of an area's drive.
type Load struct {
	// Waiting is the number of requests that are queued or in flight there.
	Waiting int
	// Used is the used part of the log, in thousandths.
	Used int
	// Failing: the area takes no records.
	Failing bool
}

type loadState struct {
	// to is the area that PUTs go to, or none.
	to int
	// room is the number of bytes of returned values for which the source's store has space.
	room int64
	// busyNS is when the load of the source drive was last above EndGap.
	busyNS int64
	areas  [format.MaxSwapAreas]Load
}

// used is the used part of an area's log.
func (l *loadState) used(i int) int { return l.areas[i].Used }

// Observe takes the load of the source drive (waiting), the number of bytes for which the source's store has space
// (room) and the load of each area's drive. It chooses the area that PUTs are swapped to, if any.
//
// hot: 0 allocs
func (src *Source) Observe(nowNS int64, waiting int, room int64, areas []Load) {
	l, p := &src.load, &src.cfg.Policy
	src.now = nowNS
	l.room = room
	best := none
	for i := range areas {
		l.areas[i] = areas[i]
		if a := &areas[i]; !a.Failing && a.Used < halfUsed && (best == none || a.Waiting < areas[best].Waiting) {
			best = i
		}
	}
	if l.to != none {
		if a := &areas[l.to]; a.Failing || a.Used >= halfUsed || waiting-a.Waiting < p.EndGap {
			l.to = none
		} else if best != none && a.Waiting-areas[best].Waiting >= p.BeginGap {
			l.to = best
		}
	}
	if l.to == none && best != none && waiting-areas[best].Waiting >= p.BeginGap && !src.draining {
		l.to = best
	}
	if l.to != none {
		a := &src.areas[l.to]
		a.lastNS = nowNS
		if !a.wantListed {
			a.wantListed = true
			src.manifest.dirty = true
		}
	}
	if waiting > p.EndGap {
		l.busyNS = nowNS
	}
}

// driveIdle reports whether the source drive has been idle enough for CalmNS to return keys. If not yet, it asks for a
// Turn at the time when that may become true.
func (src *Source) driveIdle() bool {
	if src.load.to != none {
		return false
	}
	at := src.load.busyNS + src.cfg.Policy.CalmNS
	if src.now < at {
		src.wake(at)
		return false
	}
	return true
}

// maySwap reports whether a PUT of a key that has no entry in the index may be swapped.
func (src *Source) maySwap(valueLen int) bool {
	l := &src.load
	if l.to == none || src.draining || src.held || src.lists.N > 0 || valueLen > src.cfg.MaxValueBytes ||
		src.freeEntry == none {
		return false
	}
	a := &src.areas[l.to]
	live := uint64(src.outBytes) + uint64(valueLen) + uint64(src.used)*2*format.SwapRecordHeaderBytes
	return a.listed && a.wantListed && src.outBytes+int64(valueLen) < l.room && live < a.Log.LenBytes/liveParts
}
