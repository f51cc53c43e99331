package cluster

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"jbofd/internal/buildtags"
	"jbofd/internal/flowctl"
)

// small is a scenario that takes a fraction of a second.
func small() Scenario {
	return Scenario{Row: "test", Name: "small", Nodes: 3, Replicas: 3, Ranges: 4, Records: 1000, ValueBytes: 1024,
		Reads: 0.5, Theta: 0.99, Hosts: 4, Depth: 16, NetworkNS: 10_000, WarmNS: 2e7, MeasuredNS: 5e7, Seed: 7}
}

func newTestLab(t *testing.T) *Lab {
	t.Helper()
	if buildtags.Race && t.Name() != "TestReports" {
		t.Skip("one goroutine, of which TestReports runs enough")
	}
	l, err := NewLab(Preset, 64<<20, Slowdown, 1)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *Lab) mustRun(t *testing.T, sc Scenario) *Result {
	t.Helper()
	r, err := l.Run(sc)
	if err != nil {
		t.Fatal(err)
	}
	if r.Failed > 0 || r.OpsPerSec == 0 {
		t.Fatalf("%d operations have failed (%v), %.0f ops/s", r.Failed, r.Failure, r.OpsPerSec)
	}
	return r
}

func TestTheSameSeedGivesTheSameResult(t *testing.T) {
	l := newTestLab(t)
	a, b := l.mustRun(t, small()), l.mustRun(t, small())
	if !reflect.DeepEqual(a, b) {
		t.Errorf("%+v\n%+v", a, b)
	}
	other := small()
	other.Seed++
	if c := l.mustRun(t, other); c.OpsPerSec == a.OpsPerSec && c.Reads == a.Reads {
		t.Errorf("another seed gives the same: %+v", c)
	}
}

// TestAWriteCostsAForwardForEachOtherReplica, besides those under way at both ends of the measured time.
func TestAWriteCostsAForwardForEachOtherReplica(t *testing.T) {
	l := newTestLab(t)
	for replicas := 1; replicas <= 3; replicas++ {
		sc := small()
		sc.Replicas, sc.Reads, sc.Theta = replicas, 0, 0
		r, want := l.mustRun(t, sc), float64(replicas-1)
		if n := r.ForwardsPerWrite; n < want*0.95 || n > want*1.05 {
			t.Errorf("%d replicas: %.2f forwards a write", replicas, n)
		}
	}
}

// TestReadsOfAllReplicasScale with one chain, of which otherwise only one drive is read.
func TestReadsOfAllReplicasScale(t *testing.T) {
	l := newTestLab(t)
	all := small()
	all.Reads, all.Ranges, all.Depth, all.MeasuredNS = 1, 1, 48, 2e8
	tail := all
	tail.ReadTail = true
	a, b := l.mustRun(t, all), l.mustRun(t, tail)
	if gain := a.OpsPerSec / b.OpsPerSec; gain < 2 {
		t.Errorf("%.2f times as many reads of three replicas as of the ChainTail: %.0f, %.0f ops/s", gain, a.OpsPerSec,
			b.OpsPerSec)
	}
}

// TestWritesOfOneKeyOverlap, unless its chain is locked for each.
func TestWritesOfOneKeyOverlap(t *testing.T) {
	l := newTestLab(t)
	piped := small()
	piped.OneKey, piped.Reads = true, 0
	locked := piped
	locked.Locked = true
	a, b := l.mustRun(t, piped), l.mustRun(t, locked)
	if gain := a.OpsPerSec / b.OpsPerSec; gain < 3 {
		t.Errorf("%.1f times as many writes of a key as with a lock: %.0f, %.0f ops/s", gain, a.OpsPerSec, b.OpsPerSec)
	}
}

// TestABoxJoinsLeavesAndDies under load: no operation fails, and all ranges get all their copies.
func TestABoxJoinsLeavesAndDies(t *testing.T) {
	l := newTestLab(t)
	for _, e := range []Event{Join, Leave, Die} {
		t.Run(string(e), func(t *testing.T) {
			sc := small()
			sc.Nodes, sc.Event, sc.AtNS, sc.MeasuredNS, sc.BinNS, sc.Hosts = 4, e, 1e8, 4e8, 1e8, 1
			r := l.mustRun(t, sc)
			if len(r.Series) < 4 || r.FullNS <= 0 || r.FilledBytes < 500<<10 {
				t.Errorf("series %v, full after %d ns, %d bytes copied", r.Series, r.FullNS, r.FilledBytes)
			}
		})
	}
}

// TestVerdicts compares made-up results.
func TestVerdicts(t *testing.T) {
	made := func(change func(r *Result)) *Result {
		r := &Result{OpsPerSec: 100}
		r.Reads.P999NS = 100
		change(r)
		return r
	}
	crrs := func(tail bool, ops float64, p999 int64) *Result {
		return made(func(r *Result) {
			r.Scenario = Scenario{Row: "crrs", Name: "C" + onOff(tail, "-tail"), Theta: 0.9, ReadTail: tail}
			r.OpsPerSec, r.Reads.P999NS = ops, p999
		})
	}
	event := func(series ...float64) *Result {
		return made(func(r *Result) {
			r.Scenario = Scenario{Row: "change", Name: "A-join", Event: Join, AtNS: 2, BinNS: 1, MeasuredNS: 4}
			r.Series = series
		})
	}
	token := func(inTurn bool, ops float64) *Result {
		return made(func(r *Result) {
			r.Scenario, r.OpsPerSec = Scenario{Row: "tokens", Name: "B" + onOff(inTurn, "-in-turn")}, ops
			if r.Reads.P999NS = 60; inTurn {
				r.Scenario.Choice, r.Reads.P999NS = flowctl.InTurn, 100
			}
		})
	}
	for _, c := range []struct {
		name     string
		results  []*Result
		measured string
		met      bool
	}{
		{"CRRS", []*Result{crrs(true, 100, 100), crrs(false, 260, 40)}, "2.60 times, p99.9 -60 %", true},
		{"CRRS, too slow", []*Result{crrs(true, 100, 100), crrs(false, 240, 40)}, "2.40 times, p99.9 -60 %", false},
		{"CRRS, a long tail", []*Result{crrs(true, 100, 100), crrs(false, 260, 60)}, "2.60 times, p99.9 -40 %", false},
		{"tokens", []*Result{token(false, 141), token(true, 100)}, "+41 %, p99.9 -40 %", true},
		{"tokens, too slow", []*Result{token(false, 139), token(true, 100)}, "+39 %, p99.9 -40 %", false},
		{"join", []*Result{event(90, 110, 80, 76)}, "76 % left", true},
		{"join, a dip", []*Result{event(90, 110, 74, 120)}, "74 % left", false},
	} {
		v := Verdicts(c.results)
		if len(v) != 1 || !strings.HasPrefix(v[0].Measured, c.measured) || v[0].Met != c.met || v[0].Paper == "" {
			t.Errorf("%s: %+v", c.name, v)
		}
	}
	if v := Verdicts([]*Result{crrs(false, 260, 40)}); len(v) != 0 {
		t.Errorf("a verdict without what is compared: %+v", v)
	}
}

// TestTheMatrixHasWhatItCompares, and names each scenario once.
func TestTheMatrixHasWhatItCompares(t *testing.T) {
	names := map[string]bool{}
	for _, sc := range Matrix(1) {
		if names[sc.String()] {
			t.Errorf("%s is there twice", &sc)
		}
		names[sc.String()] = true
	}
	for _, sc := range Matrix(1) {
		if b := sc.baseline(); b != "" && !names[sc.Row+"/"+b] {
			t.Errorf("%s is to be compared with %s, which is not there", &sc, b)
		}
	}
}

func TestReports(t *testing.T) {
	l := newTestLab(t)
	sc := small()
	sc.Row, sc.Name, sc.Nodes, sc.Event, sc.AtNS, sc.MeasuredNS, sc.BinNS = "change", "A-join", 4, Join, 1e8, 2e8, 1e8
	results := []*Result{l.mustRun(t, sc)}
	var table, doc strings.Builder
	if err := WriteTable(&table, results); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"change/A-join", "were copied", "█", "75 % left", "51 %"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, table.String())
		}
	}
	if err := WriteJSON(&doc, 7, results); err != nil {
		t.Fatal(err)
	}
	var got struct {
		APIVersion, Kind string
		Results          []struct {
			OpsPerSec float64 `json:"ops_per_s"`
		}
		Verdicts []Verdict
	}
	if err := json.Unmarshal([]byte(doc.String()), &got); err != nil || got.Kind != "ClusterSimReport" ||
		len(got.Results) != 1 || got.Results[0].OpsPerSec != results[0].OpsPerSec || len(got.Verdicts) != 1 {
		t.Errorf("%v: %s", err, doc.String())
	}
}
