package replicas

import (
	"bytes"
	"log/slog"
	"strconv"
	"strings"
	"testing"

	"jbofd/internal/crrs"
)

// TestTheLogSaysOnceAMinuteWhatCannotBeRepaired, because each read finds it again.
func TestTheLogSaysOnceAMinuteWhatCannotBeRepaired(t *testing.T) {
	var log bytes.Buffer
	told := 0
	g := &Replicas{cfg: Config{Log: slog.New(slog.NewTextHandler(&log, nil)),
		Repair: func(crrs.RepairOutcome) { told++ }}}
	m := &member{}
	for range 600 {
		g.clockNS += 1e9
		g.acts.Repairs = []crrs.RepairEvent{{}, {Outcome: crrs.RepairNoSource}}
		g.tellRepairs(m)
		g.tellRepaired()
	}
	if n := strings.Count(log.String(), "\n"); n != 10 || told != 1200 {
		t.Errorf("%d lines in ten minutes, and %d were counted", n, told)
	}
}

// TestTheLogSaysAtOnceWhatWasRepaired, and of many repairs how many there were, in few lines. None is left out.
func TestTheLogSaysAtOnceWhatWasRepaired(t *testing.T) {
	var log bytes.Buffer
	g := &Replicas{cfg: Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, clockNS: 1}
	m := &member{number: 7}
	done := func(segment bool) {
		g.acts.Repairs = []crrs.RepairEvent{{}, {Position: 0xab, Outcome: crrs.RepairDone, Segment: segment}}
		g.tellRepairs(m)
	}
	done(true)
	if due := g.tellRepaired(); due != 0 || !strings.Contains(log.String(), "values=0 segments=1 last_range=7 "+
		"last_position=00000000000000ab") {
		t.Fatalf("%d, %q", due, log.String())
	}
	log.Reset()
	for range 1000 {
		g.clockNS += 19e6
		done(false)
		g.tellRepaired()
	}
	due := g.tellRepaired()
	if due == 0 {
		t.Fatal("the last ones are not told")
	}
	g.clockNS = due
	g.tellRepaired()
	sum := 0
	for _, line := range strings.Split(strings.TrimSpace(log.String()), "\n") {
		_, line, _ = strings.Cut(line, "values=")
		n, err := strconv.Atoi(line[:strings.IndexByte(line, ' ')])
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	if got := log.String(); strings.Count(got, "\n") > 3 || sum != 1000 {
		t.Errorf("%s", got)
	}
}
