package replicas

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"jbofd/internal/crrs"
)

// TestTheLogSaysOnceAMinuteWhatCannotBeRepaired, because each read finds it again; and at once what was repaired.
func TestTheLogSaysOnceAMinuteWhatCannotBeRepaired(t *testing.T) {
	var log bytes.Buffer
	told := 0
	g := &Replicas{cfg: Config{Log: slog.New(slog.NewTextHandler(&log, nil)),
		Repair: func(crrs.RepairOutcome) { told++ }}}
	m := &member{}
	for range 600 {
		g.clock += 1e9
		g.acts.Repairs = []crrs.RepairEvent{{}, {Outcome: crrs.RepairNoSource}}
		g.tellRepairs(m)
	}
	if n := strings.Count(log.String(), "\n"); n != 20 || told != 1200 {
		t.Errorf("%d lines in ten minutes, and %d were counted", n, told)
	}
	log.Reset()
	g.acts.Repairs = []crrs.RepairEvent{{}, {Outcome: crrs.RepairDone}}
	g.tellRepairs(m)
	if !strings.Contains(log.String(), "has repaired") {
		t.Errorf("%q", log.String())
	}
}
