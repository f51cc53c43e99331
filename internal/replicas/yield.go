package replicas

import (
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
)

// yields is what Replicas know of the ranges that they are to lead no more.
//
// A member that was filled is the ChainTail, so that a node that was away leads nothing when it is back, and writes
// enter at the others. View.Leaders says who is to lead each range. A ChainHead that is not its leader yields to it
// (crrs.Replica.Yield), reports that when it has no writes under way, and the next view is the one it waits for.
//
// Only chains yield that are full, and have been as they are for a while, and a part of them at a time. While they
// yield, their writes wait: for as long as the writes take that are under way, a report, and a view. If that takes too
// long they go on, and it is tried again later.
type yields struct {
	// of is the view that leaders belong to.
	of      *cluster.Map
	leaders []view.PartitionID
	// nextNS is when to look next, 0: not with this view. failures counts the attempts that came to nothing, since the
	// last one that did not.
	nextNS   int64
	failures uint8
}

const (
	// yieldShare is the part of the ranges that a partition leads that yield at a time.
	yieldShare = 16
	// maxYieldFailures bounds by how often the time between two attempts doubles.
	maxYieldFailures = 6
)

// yieldNS is how long writes wait at most for another ChainHead, and how long it takes until others follow. Of that, a
// quarter is for writes under way, so that one that waits for room or for a slow member does not hold up the others.
func (g *Replicas) yieldNS() int64 { return max(int64(g.cfg.YieldAfter/5), int64(time.Millisecond)) }

// seeVersion notes since when the chain of a range is as it is.
func (g *Replicas) seeVersion(m *member) {
	if v := g.active.Versions[m.number]; v != m.version {
		if m.yielded && !g.leads(g.active, m.number) {
			g.yields.failures = 0
		}
		m.version, m.steadyNS, m.yielding, m.yielded = v, g.clock, false, false
	}
}

// leads reports whether a view has the partition as the ChainHead of a range.
func (g *Replicas) leads(m *cluster.Map, number int) bool {
	c := m.Chains[number]
	return g.joined && len(c) > 0 && c[0].Partition == g.self && isServing(c[0])
}

// foresee holds the writes of a range back of which a newer view says that another member leads it: what had not ended
// when that view acts would be lost to the chain, and the replica would have to be filled again.
func (g *Replicas) foresee(m *member) {
	if g.newest != nil && g.newest.Versions[m.number] != g.active.Versions[m.number] && g.leads(g.active, m.number) &&
		!g.leads(g.newest, m.number) {
		g.touch(m).Yield(g.clock + 5*g.yieldNS())
	}
}

// lookForYields begins to yield what others are to lead.
func (g *Replicas) lookForYields() {
	y := &g.yields
	if y.nextNS == 0 || g.clock < y.nextNS {
		return
	}
	y.nextNS = g.clock + g.yieldNS()
	if g.active == nil || g.active != g.newest || !g.joined || g.until <= g.clock || g.silence.silent || g.full ||
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
			return // one after the other
		}
		if !g.leads(g.active, m.number) {
			continue
		}
		led++
		switch at := m.steadyNS + int64(g.cfg.YieldAfter); {
		case y.leaders[m.number] == g.self || m.withdrawn:
		case at > g.clock:
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
		g.touch(m).Yield(g.clock + g.yieldNS()/4)
	}
}

// tendYield looks at a replica that yields, after its turn, and reports whether there is something to be reported.
func (g *Replicas) tendYield(m *member) (changed bool) {
	is := m.r.Yielded()
	switch {
	case is && !m.yielded:
		m.r.Yield(g.clock + g.yieldNS())
	case !m.r.Yields():
		m.yielding = false
		g.yields.failures = min(g.yields.failures+1, maxYieldFailures)
		g.yields.nextNS = g.clock + int64(g.cfg.YieldAfter)<<g.yields.failures
	}
	changed = is != m.yielded
	m.yielded = is
	return changed
}

// yieldOf is what is reported of a member that yields.
func (g *Replicas) yieldOf(m *member) (y view.Yield) {
	if m != nil && m.yielding && m.yielded {
		y = view.Yield{Version: m.version, To: m.yieldTo}
	}
	return y
}
