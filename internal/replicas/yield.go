package replicas

import (
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
)

// yields is the state of the ranges that this partition leads and another member is to lead.
//
// A member that has been filled becomes the ChainTail. So a node that was away leads no range when it is back, and
// writes enter at the others. View.Leaders tells which member is to lead each range. A ChainHead that is not its leader
// yields to it (crrs.Replica.Yield), and reports that when it has no outstanding writes; then the next view has the
// leader as ChainHead.
//
// Only chains with all their members yield, when they have been unchanged for YieldAfter, and only a part of them at a
// time. While they yield, new writes wait: until the outstanding ones have ended, a report has gone out, and a view has
// come. If that takes too long, the writes proceed, and it is tried again later.
type yields struct {
	// of is the view that leaders belong to.
	of      *cluster.Map
	leaders []view.PartitionID
	// nextNS is when lookForYields checks next, 0: not with this view. failures counts the failed attempts since the
	// last successful one.
	nextNS   int64
	failures uint8
}

const (
	// 1/yieldShare of the ranges that a partition leads yield at a time.
	yieldShare = 16
	// maxYieldFailures is how often the time between two attempts doubles at most.
	maxYieldFailures = 6
)

// yieldNS is YieldAfter/5, at least 1 ms: how long writes are held back, once none is outstanding, until the view with
// the new ChainHead comes. Before that they are held back for up to a quarter of it, while outstanding writes end: a
// quarter, so that one write that waits for room or for a slow member does not hold up the others for long. It is also
// the pause between two groups of ranges. (foresee holds writes back for five times yieldNS.)
func (g *Replicas) yieldNS() int64 { return max(int64(g.cfg.YieldAfter/5), int64(time.Millisecond)) }

// seeVersion notes since when the chain of a range has been unchanged.
func (g *Replicas) seeVersion(m *member) {
	if v := g.active.ChainEpochs[m.number]; v != m.chainEpoch {
		if m.yielded && !g.leads(g.active, m.number) {
			g.yields.failures = 0
		}
		m.chainEpoch, m.steadyNS, m.yielding, m.yielded = v, g.clockNS, false, false
	}
}

// leads reports whether a view has the partition as the ChainHead of a range.
func (g *Replicas) leads(m *cluster.Map, number int) bool {
	c := m.Chains[number]
	return g.joined && len(c) > 0 && c[0].Partition == g.self && isServing(c[0])
}

// foresee holds back the writes of a range if a newer view, which does not act yet, has another member as its
// ChainHead: writes that had not ended when that view acts would be unknown to the new ChainHead, and this replica
// would have to be filled again.
func (g *Replicas) foresee(m *member) {
	if g.newest != nil && g.newest.ChainEpochs[m.number] != g.active.ChainEpochs[m.number] &&
		g.leads(g.active, m.number) && !g.leads(g.newest, m.number) {
		g.touch(m).Yield(g.clockNS + 5*g.yieldNS())
	}
}

// lookForYields begins to yield some of the ranges that other members are to lead.
func (g *Replicas) lookForYields() {
	y := &g.yields
	if y.nextNS == 0 || g.clockNS < y.nextNS {
		return
	}
	y.nextNS = g.clockNS + g.yieldNS()
	if g.active == nil || g.active != g.newest || !g.joined || g.untilNS <= g.clockNS || g.silence.silent || g.full ||
		len(g.cuts.cut) > 0 {
		return
	}
	if y.of != g.active {
		y.of, y.leaders = g.active, g.active.Leaders()
	}
	var due []*member
	led, later := 0, int64(0)
	for _, m := range g.members {
		if m.yielding {
			return // one group after the other
		}
		if !g.leads(g.active, m.number) {
			continue
		}
		led++
		switch at := m.steadyNS + int64(g.cfg.YieldAfter); {
		case y.leaders[m.number] == g.self || m.withdrawn:
		case at > g.clockNS:
			if later == 0 || at < later {
				later = at
			}
		default:
			due = append(due, m)
		}
	}
	if len(due) == 0 {
		y.nextNS = later
		return
	}
	for _, m := range due[:min(len(due), max(1, led/yieldShare))] {
		m.yielding, m.yieldTo = true, y.leaders[m.number]
		g.touch(m).Yield(g.clockNS + g.yieldNS()/4)
	}
}

// tendYield checks a replica that yields, after its turn, and returns whether the report has changed.
func (g *Replicas) tendYield(m *member) (changed bool) {
	is := m.r.Yielded()
	switch {
	case is && !m.yielded:
		m.r.Yield(g.clockNS + g.yieldNS())
	case !m.r.Yields():
		m.yielding = false
		g.yields.failures = min(g.yields.failures+1, maxYieldFailures)
		g.yields.nextNS = g.clockNS + int64(g.cfg.YieldAfter)<<g.yields.failures
	}
	changed = is != m.yielded
	m.yielded = is
	return changed
}

// yieldOf returns the report of a member that yields; the zero Yield if it does not, or has outstanding writes.
func (g *Replicas) yieldOf(m *member) (y view.Yield) {
	if m != nil && m.yielding && m.yielded {
		y = view.Yield{ChainEpoch: m.chainEpoch, To: m.yieldTo}
	}
	return y
}
