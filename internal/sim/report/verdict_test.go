package report

import (
	"bytes"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"jbofd/internal/sim"
)

func TestTheVerdictIsThatOfThePhases(t *testing.T) {
	phase := func(worst, util float64, p999, app int64) []sim.PhaseResult {
		return []sim.PhaseResult{{Name: "steady", FUtilMin: worst, Utilisation: util,
			Latency: sim.Latency{P999NS: p999}, AppLatency: sim.Latency{P999NS: app}}}
	}
	results := []*sim.Result{
		{Row: "size", Scenario: "a", Policy: "fifo", Phases: phase(0.1, 0.8, 1000, 1000)},
		{Row: "size", Scenario: "a", Policy: "jbof", Phases: phase(0.9, 1, 250, 2000)},
		{Row: "size", Scenario: "b", Policy: "fifo", Phases: phase(0.9, 1, 1000, 1000)},
		{Row: "size", Scenario: "b", Policy: "jbof", Phases: phase(0.85, 1, 1000, 4500), ViolationCount: 3},
	}
	got := Verdicts(results)
	if len(got) != 2 || got[0].Policy != "jbof" {
		t.Fatalf("%+v", got)
	}
	want := []Verdict{{Policy: "jbof", Phases: 2, FairPhases: 2, Worst: 0.85, WorstIn: "size/b", Utilisation: 1,
		Tail: 0.5, AppTail: 3, Broken: 3},
		{Policy: "fifo", Phases: 2, FairPhases: 1, Worst: 0.1, WorstIn: "size/a", Utilisation: 0.9, Tail: 1,
			AppTail: 1}}
	for i := range want {
		if math.Abs(got[i].Tail-want[i].Tail) > 1e-9 || math.Abs(got[i].AppTail-want[i].AppTail) > 1e-9 {
			t.Errorf("tails %v and %v, want %v and %v", got[i].Tail, got[i].AppTail, want[i].Tail, want[i].AppTail)
		}
		got[i].Tail, got[i].AppTail = want[i].Tail, want[i].AppTail
		if got[i] != want[i] {
			t.Errorf("%+v, want %+v", got[i], want[i])
		}
	}
	var out bytes.Buffer
	if err := WriteVerdicts(&out, got); err != nil || !strings.Contains(out.String(), "jbof    2 of 2       0.85") {
		t.Errorf("%v: %s", err, &out)
	}
}

func TestTheWholeMatrixIsEstimatedAtMinutes(t *testing.T) {
	if e := Estimate(sim.Matrix(), len(sim.Policies())); e < 5*time.Second || e > 20*time.Minute {
		t.Errorf("%v", e)
	}
}

// TestPlotsNeedNoNamedFont: if the font that a plot names is missing, a viewer uses a generic one.
func TestPlotsNeedNoNamedFont(t *testing.T) {
	dir := t.TempDir()
	if err := WriteFolder(dir, 1, small(t)); err != nil {
		t.Fatal(err)
	}
	plots, err := filepath.Glob(filepath.Join(dir, "*.svg"))
	if err != nil || len(plots) == 0 {
		t.Fatalf("%d plots, %v", len(plots), err)
	}
	for _, p := range plots {
		text, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(text), "font-family:"); n == 0 || n != strings.Count(string(text), "sans-serif;") {
			t.Errorf("%s: of %d texts only %d have a generic font", filepath.Base(p), n,
				strings.Count(string(text), "sans-serif;"))
		}
	}
}

func TestEachTenantHasAColourOfItsOwn(t *testing.T) {
	seen := map[color.Color]int{}
	for i := range 32 {
		if j, again := seen[tenantColour(i)]; again {
			t.Errorf("tenants %d and %d have the same colour", j, i)
		}
		seen[tenantColour(i)] = i
	}
}
