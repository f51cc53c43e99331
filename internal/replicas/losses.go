package replicas

import (
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
			first, last := g.active.Range(number)
			g.losses.Found(number, max(first, d.First), min(last, d.Last), g.clock)
		}
	}
	g.reports = g.reports[:0]
}

// repairLosses begins repairs of what is known to be lost.
func (g *Replicas) repairLosses() {
	if g.active == nil {
		return
	}
	g.losses.Next(g.clock, func(number int, position uint64) (begun, gone bool) {
		for _, e := range g.active.Chains[number] {
			if g.joined && e.Partition == g.self {
				m := g.ranges[number]
				return m == nil || g.touch(m).Repair(position), false
			}
		}
		return false, true
	})
}

// Losses returns how many things are known to be lost or damaged in the store, and were not repaired yet, and how many
// were found since New. Those that are found again count again.
func (g *Replicas) Losses() (known int, found uint64) {
	g.driver.Lock()
	defer g.driver.Unlock()
	g.takeDamages()
	return g.losses.Known(), g.losses.Reported()
}
