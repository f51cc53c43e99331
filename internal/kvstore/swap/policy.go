package swap

import "jbofd/internal/kvstore/swap/guest"

// Policy says when PUTs go elsewhere. Loads are requests that wait at an SSD or are under way there: what a new one
// has before it. As in the paper it is the gap between two SSDs that counts, not the load of one.
type Policy struct {
	// BeginGap is how much more the home's SSD must have before it than the other one for swapping to begin; 0: 64. A drive
	// is busy with 32 requests; with twice as many waiting the last one waits for longer than a swapped PUT takes.
	BeginGap int
	// EndGap is when it ends; 0: 16, so that a PUT here and there does not turn it on and off. It is also the load below which
	// the home has time for what is out.
	EndGap int
	// CalmNS is for how long the home must have had time before keys come home; 0: 20 ms, which is longer than a burst's
	// pauses and short beside the time that a full index takes to come home.
	CalmNS int64
	// UnlistNS is how long after its last key has come home an area stays in the book; 0: 2 s. A line costs nothing but the
	// area's being needed at the next start; writing one delays the beginning of the next burst's swapping.
	UnlistNS int64
}

func (p *Policy) setDefaults() {
	setDefault(&p.BeginGap, 64)
	setDefault(&p.EndGap, 16)
	setDefault(&p.CalmNS, 20e6)
	setDefault(&p.UnlistNS, 2e9)
}

// In thousandths of a log in use: from sweepUsed on its oldest records are moved to its end; from halfUsed on it takes no
// new keys, because those that are out must find room there; from fullUsed on they come home, however busy that is.
const (
	sweepUsed = 375
	halfUsed  = 500
	fullUsed  = 750
	// liveParts is the part of a log that what counts of one home may take: then moving frees most of what it passes.
	liveParts = 4
)

// Load is what is known of an area's SSD.
type Load struct {
	// Waiting is what waits or is under way there.
	Waiting int
	// Used is the part of the log in use, in thousandths.
	Used int
	// Failing: it takes nothing.
	Failing bool
}

type loadState struct {
	// to is the area that PUTs go to, or nobody.
	to int
	// room is how many bytes of values may be out: what the home's store has room for.
	room int64
	// busyNS is when the home had no time last.
	busyNS int64
	areas  [guest.MaxAreas]Load
}

// used is the part of an area's log in use.
func (l *loadState) used(i int) int { return l.areas[i].Used }

// Observe takes what waits at the home's SSD, for how many bytes its store has room, and the load of each area.
//
// hot: 0 allocs
func (h *Home) Observe(nowNS int64, waiting int, room int64, areas []Load) {
	l, p := &h.load, &h.cfg.Policy
	h.now = nowNS
	l.room = room
	best := nobody
	for i := range areas {
		l.areas[i] = areas[i]
		if a := &areas[i]; !a.Failing && a.Used < halfUsed && (best == nobody || a.Waiting < areas[best].Waiting) {
			best = i
		}
	}
	if l.to != nobody {
		if a := &areas[l.to]; a.Failing || a.Used >= halfUsed || waiting-a.Waiting < p.EndGap {
			l.to = nobody
		} else if best != nobody && a.Waiting-areas[best].Waiting >= p.BeginGap {
			l.to = best
		}
	}
	if l.to == nobody && best != nobody && waiting-areas[best].Waiting >= p.BeginGap && !h.draining {
		l.to = best
	}
	if l.to != nobody {
		a := &h.areas[l.to]
		a.lastNS = nowNS
		if !a.wantListed {
			a.wantListed = true
			h.book.dirty = true
		}
	}
	if waiting > p.EndGap {
		l.busyNS = nowNS
	}
}

// calm reports that the home has time for what is out.
func (h *Home) calm() bool {
	if h.load.to != nobody {
		return false
	}
	at := h.load.busyNS + h.cfg.Policy.CalmNS
	if h.now < at {
		h.wake(at)
		return false
	}
	return true
}

// mayLend reports whether a PUT of a key without an entry goes elsewhere.
func (h *Home) mayLend(valueLen int) bool {
	l := &h.load
	if l.to == nobody || h.draining || h.lists.N > 0 || valueLen > h.cfg.MaxValueBytes || h.freeEntry == nobody {
		return false
	}
	a := &h.areas[l.to]
	live := uint64(h.outBytes) + uint64(valueLen) + uint64(h.used)*2*guest.RecordHeaderBytes
	return a.listed && a.wantListed && h.outBytes+int64(valueLen) < l.room && live < a.Log.LenBytes/liveParts
}
