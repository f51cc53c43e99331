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

// brief returns a scenario of the Matrix with fewer records and less time.
func brief(t *testing.T, name string) Scenario {
	t.Helper()
	for _, sc := range Matrix(1) {
		if sc.String() == name {
			sc.Records, sc.AgeNS, sc.WarmNS, sc.MeasuredNS = 4000, 0, 1e8, 4e8
			if sc.Event != "" {
				sc.MeasuredNS, sc.BinNS, sc.AtNS = 8e8, 2e8, 2e8
			}
			return sc
		}
	}
	t.Fatalf("there is no scenario %s", name)
	return Scenario{}
}

// TestWhatMethodsGain: CRRS over reads at the ChainTail, and the chain that has many writes of a key under way over the
// one that is locked for each. With one seed they are the same each time; with others, 2.5 to 4.4 and 34 times.
func TestWhatMethodsGain(t *testing.T) {
	t.Parallel()
	l := newTestLab(t)
	for _, c := range []struct {
		name, base string
		least      float64
	}{
		{"crrs/C-zipf0.99-1-chain", "crrs/C-zipf0.99-1-chain-tail", 2.5},
		{"hot-key/writes", "hot-key/writes-locked", 5},
		{"overload/B", "overload/B-off", 1.2},
	} {
		a, b := l.mustRun(t, brief(t, c.name)), l.mustRun(t, brief(t, c.base))
		gain := a.OpsPerSec / b.OpsPerSec
		t.Logf("%s: %.2f times, %.0f instead of %.0f ops/s, reads' p99.9 %+.0f %%", c.name, gain, a.OpsPerSec,
			b.OpsPerSec, change(a.Reads.P999NS, b.Reads.P999NS))
		if gain < c.least {
			t.Errorf("%s: %.2f times %s, want %.1f", c.name, gain, c.base, c.least)
		}
	}
}

// TestAReadIsShortWithManyDrives: each of 24 boxes has an eighth of the ranges. A read costs its drive a segment and
// the value of 1 KB, as with three boxes, and not a segment with the keys of eight.
func TestAReadIsShortWithManyDrives(t *testing.T) {
	t.Parallel()
	l := newTestLab(t)
	for _, nodes := range []int{3, 24} {
		sc := brief(t, "overload/C")
		sc.Nodes, sc.Hosts, sc.Records, sc.Ranges, sc.MeasuredNS = nodes, 2, nodes*2000, 64, 1e8
		r := l.mustRun(t, sc)
		t.Logf("%d boxes: %.0f bytes", nodes, r.DriveReadBytes)
		if r.DriveReadBytes > 4<<10 {
			t.Errorf("%d boxes: a read costs %.0f bytes of a drive, want at most %d", nodes, r.DriveReadBytes, 4<<10)
		}
	}
}

// TestABoxJoinsLeavesAndDies under load: no operation fails, throughput stays, and all ranges get their copies soon.
// Where a box dies, one of four drives is lost at once.
func TestABoxJoinsLeavesAndDies(t *testing.T) {
	t.Parallel()
	l := newTestLab(t)
	for e, least := range map[Event]float64{Join: 0.75, Leave: 0.75, Die: 0.65} {
		t.Run(string(e), func(t *testing.T) {
			t.Parallel()
			r := l.mustRun(t, brief(t, "change/B-"+string(e)))
			k := r.kept()
			t.Logf("%.0f %% left, all copies after %.1f s, %d KiB copied", 100*k.leastBin, k.fullS, r.FilledBytes>>10)
			if k.leastBin < least || k.fullS <= 0 || k.fullS > 3 || len(r.Series) < 4 || r.FilledBytes < 2<<20 {
				t.Errorf("%.0f %% left, want %.0f; all copies after %.1f s; series %v, %d bytes copied",
					100*k.leastBin, 100*least, k.fullS, r.Series, r.FilledBytes)
			}
		})
	}
}

// TestABoxThatLeavesTakesAQuarter is the bar of Figure 9, YCSB-B, with logs that have wrapped: 75 % in the least
// second, of which 2 % are left to chance. While copies are made for the box that leaves, its drive is still there.
func TestABoxThatLeavesTakesAQuarter(t *testing.T) {
	t.Parallel()
	l := newTestLab(t)
	for _, sc := range Matrix(1) {
		if sc.String() != "change/B-leave" {
			continue
		}
		sc.MeasuredNS = 8e9
		r := l.mustRun(t, sc)
		k := r.kept()
		filling := mean(r.Series[4:4+int(k.fullS/0.5)]) / mean(r.Series[:4])
		t.Logf("%+v, %.2f while it leaves, of %.0f", k, filling, r.Series)
		if k.least < 0.73 || filling < 0.8 || k.fullS > 6 {
			t.Errorf("%.0f %% left, %.0f %% while it leaves, for %.1f s; want 73 %%, 80 %%, and 6 s", 100*k.least,
				100*filling, k.fullS)
		}
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
	overload := func(off bool, ops float64) *Result {
		r := token(off, ops)
		r.Scenario.Row, r.Scenario.Name, r.Scenario.FIFO = "overload", "B"+onOff(off, "-off"), off
		return r
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
		{"overload", []*Result{overload(false, 141), overload(true, 100)}, "+41 %, p99.9 -40 %", true},
		{"join", []*Result{event(90, 110, 80, 74)}, "77 % left (74 % in 0.0 s), 77 % when filled", true},
		{"join, a dip", []*Result{event(90, 110, 74, 74)}, "74 % left (74 % in 0.0 s), 74 % when filled", false},
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
