package replicas

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"jbofd/internal/crrs"
)

// repairPause is how long after a line in the log about something of a range that cannot be repaired there may be
// another one: it is tried again with each read.
const repairPause = int64(time.Minute)

// tellRepairs logs and counts what has become of what the store could not read.
func (g *Replicas) tellRepairs(m *member) {
	for i := range g.acts.Repairs {
		g.losses.Ended(m.number, &g.acts.Repairs[i], g.clock)
	}
	for _, e := range g.acts.Repairs {
		if g.cfg.Repair != nil {
			g.cfg.Repair(e.Outcome)
		}
		if e.Outcome != crrs.RepairDone && g.clock < m.repairsQuietNS {
			continue
		}
		level, what := slog.LevelWarn, "cannot read a value or a segment, and asks another replica"
		switch e.Outcome {
		case crrs.RepairDone:
			level, what = slog.LevelInfo, "has repaired a value from another replica"
			if e.Segment {
				what = "has repaired a segment from another replica"
			}
		case crrs.RepairNoSource:
			level, what = slog.LevelError, "cannot read a value or a segment, and no other replica has it"
			m.repairsQuietNS = g.clock + repairPause
		case crrs.RepairFailed:
			level, what = slog.LevelError, "has not repaired a value or a segment"
			m.repairsQuietNS = g.clock + repairPause
		}
		g.cfg.Log.Log(context.Background(), level, "the store "+what, "partition", g.cfg.ID.String(), "range", m.number,
			"position", fmt.Sprintf("%016x", e.Position))
	}
	g.acts.Repairs = g.acts.Repairs[:0]
}
