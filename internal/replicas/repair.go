package replicas

import (
	"fmt"
	"time"

	"jbofd/internal/crrs"
)

// repairPause is how long after a line in the log about something of a range that cannot be repaired there may be
// another one: it is tried again with each read. repairedEvery is the time between two lines about what was repaired.
const (
	repairPause   = int64(time.Minute)
	repairedEvery = int64(10 * time.Second)
)

// repaired is what the next line in the log says about what was repaired.
type repaired struct {
	values, segments int
	// number and position are of the last one.
	number   int
	position uint64
	// dueNS is when there may be a line.
	dueNS int64
}

// tellRepairs logs and counts what has become of what the store could not read.
func (g *Replicas) tellRepairs(m *member) {
	for i := range g.acts.Repairs {
		e := &g.acts.Repairs[i]
		g.losses.Ended(m.number, e, g.clockNS)
		if g.cfg.Repair != nil {
			g.cfg.Repair(e.Outcome)
		}
		why := "no other replica has it"
		switch e.Outcome {
		case crrs.RepairBegun:
			continue
		case crrs.RepairDone:
			if e.Segment {
				g.repaired.segments++
			} else {
				g.repaired.values++
			}
			g.repaired.number, g.repaired.position = m.number, e.Position
			continue
		case crrs.RepairFailed:
			why = "the store or the other replicas could not do it"
		}
		if g.clockNS < m.repairsQuietNS {
			continue
		}
		m.repairsQuietNS = g.clockNS + repairPause
		g.cfg.Log.Error("the store cannot read a value or a segment, and it is not repaired: "+why, "partition",
			g.cfg.ID.String(), "range", m.number, "position", fmt.Sprintf("%016x", e.Position))
	}
	g.acts.Repairs = g.acts.Repairs[:0]
}

// tellRepaired logs what was repaired since the last time, and returns when it is to be called again; 0: there is
// nothing to say.
func (g *Replicas) tellRepaired() (dueNS int64) {
	r := &g.repaired
	switch {
	case r.values+r.segments == 0:
		return 0
	case g.clockNS < r.dueNS:
		return r.dueNS
	}
	g.cfg.Log.Warn("what the store could not read was repaired from other replicas", "partition", g.cfg.ID.String(),
		"values", r.values, "segments", r.segments, "last_range", r.number, "last_position",
		fmt.Sprintf("%016x", r.position))
	*r = repaired{dueNS: g.clockNS + repairedEvery}
	return 0
}
