package replicas

import (
	"context"
	"fmt"
	"log/slog"

	"jbofd/internal/crrs"
)

// tellRepairs logs and counts what has become of what the store could not read.
func (g *Replicas) tellRepairs(m *member) {
	for _, e := range g.acts.Repairs {
		level, what := slog.LevelWarn, "cannot read a value or a segment, and asks another replica"
		switch e.Outcome {
		case crrs.RepairDone:
			level, what = slog.LevelInfo, "has repaired a value from another replica"
			if e.Segment {
				what = "has repaired a segment from another replica"
			}
		case crrs.RepairNoSource:
			level, what = slog.LevelError, "cannot read a value or a segment, and no other replica has it"
		case crrs.RepairFailed:
			level, what = slog.LevelError, "has not repaired a value or a segment"
		}
		g.cfg.Log.Log(context.Background(), level, "the store "+what, "partition", g.cfg.ID.String(), "range", m.number,
			"position", fmt.Sprintf("%016x", e.Position))
		if g.cfg.Repair != nil {
			g.cfg.Repair(e.Outcome)
		}
	}
	g.acts.Repairs = g.acts.Repairs[:0]
}
