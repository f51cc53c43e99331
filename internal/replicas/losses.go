package replicas

import (
	"slices"

	"jbofd/internal/cluster/view"
	"jbofd/internal/kvstore"
	"jbofd/internal/replica"
)

// Damaged notes what the store has found damaged, so that it is repaired from other members. It returns at once, and
// may be called with any lock held.
func (g *Replicas) Damaged(d kvstore.Damage) {
	if d.First <= d.Last {
		g.damages.Put(d)
		g.driver.RunLater()
	}
}

// takeDamages notes what Damaged was told of, as soon as there is a view.
func (g *Replicas) takeDamages() {
	g.reports = g.damages.Take(g.reports)
	if g.active == nil {
		g.reports = g.reports[:min(len(g.reports), replica.MaxLosses)]
		return
	}
	for _, d := range g.reports {
		for number := g.active.RangeOf(d.First); number <= g.active.RangeOf(d.Last); number++ {
			if first, last := g.active.Range(number); g.isMember(number) {
				g.losses.Found(number, max(first, d.First), min(last, d.Last), g.clockNS)
			}
		}
	}
	g.reports = g.reports[:0]
}

// isMember reports whether the partition is a member of a range's chain in the active view, in whatever state.
func (g *Replicas) isMember(number int) bool {
	return g.joined && slices.ContainsFunc(g.active.Chains[number], func(e view.Member) bool {
		return e.Partition == g.self
	})
}

// repairLosses begins repairs of what is known to be lost.
func (g *Replicas) repairLosses() {
	if g.active == nil {
		return
	}
	g.losses.Next(g.clockNS, func(number int, position uint64) replica.LossStep {
		m := g.ranges[number]
		switch {
		case !g.isMember(number):
			return replica.LossGone
		case m == nil:
			return replica.LossBegun
		}
		return g.touch(m).Repair(position)
	})
	if g.losses.Ask(&g.lossRequest) {
		g.store(nil, &g.lossRequest).of = knownLosses
	}
}

// Losses returns how many things are known to be lost or damaged in the store, and were not repaired yet, and how many
// were found since New. Those that are found again count again.
func (g *Replicas) Losses() (known int, found uint64) {
	g.driver.Lock()
	defer g.driver.Unlock()
	g.takeDamages()
	return g.losses.Known(), g.losses.Reported()
}
