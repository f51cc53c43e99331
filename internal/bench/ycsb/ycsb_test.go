package ycsb

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/bench"
)

// small is a workload that ends soon.
func small() Workload {
	return Workload{RecordCount: 1000, InsertCount: 1000, OperationCount: 5000, Read: 0.4, Update: 0.3, Insert: 0.1,
		ReadModifyWrite: 0.2,
		Distribution:    "zipfian", Theta: 0.99, Fields: 10, MinField: 5, MaxField: 20, Threads: 3}
}

func open(t *testing.T, db DB, w Workload, cfg Config) *Bench {
	t.Helper()
	if cfg.Depth == 0 {
		cfg.Depth = 8
	}
	cfg.Seed = *seed
	b, err := Open(context.Background(), db, w, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// must fails the test if the phase did.
func must(t *testing.T, do func(context.Context) (*Phase, error)) *Phase {
	t.Helper()
	p, err := do(context.Background())
	if err != nil || !p.OK() {
		t.Fatalf("%v, %+v", err, p)
	}
	return p
}

func (p *Phase) count(name string) (n uint64) {
	for _, e := range p.Series {
		if e.Name == name {
			for _, k := range e.Results {
				n += k
			}
		}
	}
	return n
}

func TestEveryDistributionRunsAndEveryReadIsVerified(t *testing.T) {
	for _, d := range Distributions {
		t.Run(d, func(t *testing.T) {
			w := small()
			w.Distribution, w.HotData, w.HotOperations = d, 0.2, 0.8
			db := newMapDB()
			b := open(t, db, w, Config{})
			if p := must(t, b.Load); p.Operations != 1000 || p.count("INSERT") != 1000 || len(db.values) != 1000 {
				t.Errorf("load: %+v, %d values", p, len(db.values))
			}
			p := must(t, b.Run)
			if p.Operations != 5000 || p.Checked != p.count("READ") || p.count("READ") < p.count("READ-MODIFY-WRITE") ||
				p.count("UPDATE") < p.count("READ-MODIFY-WRITE") {
				t.Errorf("run: %+v", p)
			}
			if got, want := b.Records(), 1000+p.count("INSERT"); got != want || p.count("INSERT") < 300 {
				t.Errorf("%d records, must be %d", got, want)
			}
			if p := must(t, b.Verify); p.Checked != b.Records() {
				t.Errorf("verify: %d of %d records", p.Checked, b.Records())
			}
		})
	}
}

func TestARunWithoutLoadIsVerified(t *testing.T) {
	db := newMapDB()
	w := small()
	must(t, open(t, db, w, Config{}).Load)
	b := open(t, db, w, Config{})
	must(t, b.Run)
	must(t, b.Verify)
	// A lost value, or one of another record, is detected although its version is unknown.
	var key, other [KeyBytes]byte
	putKey(&key, 5, false)
	putKey(&other, 6, false)
	db.values[key] = db.values[other]
	delete(db.values, other)
	p, err := open(t, db, w, Config{}).Verify(context.Background())
	if err != nil || p.Wrong != 2 || !strings.Contains(strings.Join(p.Messages, "\n"), "another record: 6") ||
		!strings.Contains(strings.Join(p.Messages, "\n"), "missing") {
		t.Errorf("%v, %+v", err, p)
	}
}

// TestWrongValuesAreDetected: a single wrong result of any kind makes the run fail, and names the key.
func TestWrongValuesAreDetected(t *testing.T) {
	var old []byte
	lies := map[string]struct {
		lie  func(o *Op, d *Done) bool // reports whether it has returned a wrong result
		want string
	}{
		"a bit":  {func(o *Op, d *Done) bool { o.Value[d.ValueLen-1] ^= 4; return true }, "torn, corrupt"},
		"cut":    {func(_ *Op, d *Done) bool { d.ValueLen--; return true }, "torn, corrupt"},
		"empty":  {func(_ *Op, d *Done) bool { d.ValueLen = 0; return true }, "less than any value"},
		"longer": {func(o *Op, d *Done) bool { d.ValueLen = len(o.Value) + 1; return true }, "at most"},
		"lost":   {func(_ *Op, d *Done) bool { d.Result = NotFound; return true }, "missing"},
		"never written": {func(o *Op, d *Done) bool {
			s, err := checkValue(o.Value[:d.ValueLen], 0)
			if err == nil {
				s.version += 1000
				fillValue(o.Value[:d.ValueLen], s)
			}
			return err == nil
		}, "never written"},
		"stale": {func(o *Op, d *Done) bool {
			if old == nil {
				old = bytes.Clone(o.Value[:d.ValueLen])
				return false
			}
			d.ValueLen = copy(o.Value, old)
			return true
		}, "lost write"},
	}
	for name, c := range lies {
		t.Run(name, func(t *testing.T) {
			w := small()
			w.Threads, w.Insert, w.InsertStart, w.RecordCount, w.InsertCount, w.OperationCount = 1, 0, 0, 1, 1, 500
			db := newMapDB()
			b := open(t, db, w, Config{Depth: 1})
			must(t, b.Load)
			reads, lied := 0, false
			db.spoil = func(o *Op, d *Done) {
				if o.Put || lied && d.Result == OK {
					return
				}
				if reads++; reads == 1 || reads >= 50 {
					lied = c.lie(o, d) || lied
				}
			}
			p, err := b.Run(context.Background())
			if err != nil || p.Wrong != 1 || !strings.Contains(p.Messages[0], c.want) ||
				!strings.Contains(p.Messages[0], "key user000000000000") {
				t.Errorf("%v, %+v", err, p)
			}
		})
	}
}

// TestAStoreThatWasKilledIsVerifiedFromTheState: acknowledged writes must be there, those without a response may be,
// and values that were found must stay.
func TestAStoreThatWasKilledIsVerifiedFromTheState(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	db := newMapDB()
	w := small()
	life := func(do func(b *Bench)) {
		b, err := Open(context.Background(), db, w, Config{Depth: 8, Seed: *seed, StatePath: state})
		if err != nil {
			t.Fatal(err)
		}
		do(b)
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	life(func(b *Bench) { must(t, b.Load) })
	for range 3 {
		var ops atomic.Int32
		db.spoil = func(o *Op, d *Done) {
			if ops.Add(1) > 1000 {
				if o.Put && o.Tag%2 == 0 {
					db.do(o, d) // done, but not reported
				}
				d.Result, d.Err = Failed, errors.New("connection lost")
			}
		}
		life(func(b *Bench) {
			p, err := b.Run(context.Background())
			if err != nil || p.Failed == 0 || p.Wrong != 0 {
				t.Fatalf("%v, %+v", err, p)
			}
		})
		db.spoil = nil
		life(func(b *Bench) { must(t, b.Verify) })
	}
	life(func(b *Bench) { must(t, b.Run) })
	life(func(b *Bench) {
		p := must(t, b.Verify)
		if p.Checked < 1000 {
			t.Errorf("%d records", p.Checked)
		}
	})
	var key [KeyBytes]byte
	putKey(&key, 17, false)
	fillValue(db.values[key], stamp{record: 17, life: 1, version: 1})
	life(func(b *Bench) {
		p, err := b.Verify(context.Background())
		if err != nil || p.Wrong != 1 || !strings.Contains(p.Messages[0], string(key[:])) {
			t.Errorf("%v, %+v", err, p)
		}
	})
	w.RecordCount, w.InsertCount = 100_000, 100_000
	life(func(b *Bench) {
		if _, err := b.Run(context.Background()); !errors.Is(err, ErrWorkload) ||
			!strings.Contains(err.Error(), "load the others") {
			t.Errorf("a run of records that the state does not know: %v", err)
		}
	})
}

// TestAFailedOperationEndsThePhase, unless ContinueOnError is set.
func TestAFailedOperationEndsThePhase(t *testing.T) {
	for _, goOn := range []bool{false, true} {
		db := newMapDB()
		w := small()
		b := open(t, db, w, Config{ContinueOnError: goOn})
		must(t, b.Load)
		n := 0
		db.spoil = func(o *Op, d *Done) {
			db.mu.Lock()
			defer db.mu.Unlock()
			if n++; o.Put && n > 500 && n < 530 {
				d.Result, d.Err = Refused, errors.New("capacity exceeded")
			}
		}
		p, err := b.Run(context.Background())
		refused := uint64(0)
		for _, e := range p.Series {
			if e.Name != "READ-MODIFY-WRITE" { // its reads and writes are those of READ and UPDATE
				refused += e.Results["SERVICE_UNAVAILABLE"]
			}
		}
		if p.Failed != refused {
			t.Errorf("%d failed, %d were refused", p.Failed, refused)
		}
		var out bytes.Buffer
		r := b.NewReport()
		r.Run = p
		if err := r.WriteYCSB(&out); err != nil || !strings.Contains(out.String(), "-FAILED], Operations, ") {
			t.Errorf("%v, %s", err, out.String())
		}
		if err != nil || p.Failed == 0 || p.Wrong != 0 || p.OK() ||
			!strings.Contains(p.Messages[0], "capacity exceeded") || (p.Operations == 5000) != goOn {
			t.Errorf("go on %v: %v, %+v", goOn, err, p)
		}
	}
}

// TestAStallCountsForEveryOperationItDelayed: half of all operations are delayed, by up to 100 ms. The corrected
// latencies show it, whereas only a few raw latencies do.
func TestAStallCountsForEveryOperationItDelayed(t *testing.T) {
	db := newMapDB()
	w := small()
	w.Threads, w.Target, w.OperationCount, w.Read, w.Update, w.Insert, w.ReadModifyWrite = 1, 10_000, 2000, 1, 0, 0, 0
	b := open(t, db, w, Config{Depth: 1})
	must(t, b.Load)
	began := time.Time{}
	db.hold = func() bool {
		if began.IsZero() {
			began = time.Now()
		}
		d := time.Since(began)
		return d > 20*time.Millisecond && d < 120*time.Millisecond
	}
	p := must(t, b.Run)
	e := p.Series[0]
	if p.ElapsedSeconds < 0.19 || e.LatencyNS.P95 > 50e6 || e.IntendedLatencyNS.P90 < 10e6 ||
		e.IntendedLatencyNS.Max < 90e6 {
		t.Errorf("%.3f s, raw %+v, corrected %+v", p.ElapsedSeconds, e.LatencyNS, e.IntendedLatencyNS)
	}
	var out bytes.Buffer
	r := b.NewReport()
	r.Run = p
	if err := r.WriteYCSB(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"[OVERALL], RunTime(ms), ", "[OVERALL], Throughput(ops/sec), ",
		"[READ], Operations, 2000\n", "[READ], AverageLatency(us), ",
		"[READ], 95thPercentileLatency(us), ", "[READ], 99.9PercentileLatency(us), ", "[READ], Return=OK, 2000\n",
		"[Intended-READ], 99thPercentileLatency(us), ",
		"[VERIFY], Return=OK, 2000\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in:\n%s", want, out.String())
		}
	}
	var back Report
	if text, err := json.Marshal(r); err != nil || json.Unmarshal(text, &back) != nil || back.Run.Operations != 2000 {
		t.Errorf("JSON: %v, %+v", err, back)
	}
}

func TestTimeEndsARun(t *testing.T) {
	w := small()
	w.OperationCount, w.MaxExecution, w.Insert = 0, 50*time.Millisecond, 0.1
	var last Progress
	b := open(t, newMapDB(), w, Config{Progress: func(p Progress) { last = p }})
	must(t, b.Load)
	p := must(t, b.Run)
	if p.ElapsedSeconds < 0.05 || p.Operations == 0 || last.Phase != "run" || last.Ops != p.Operations {
		t.Errorf("%+v, %+v", p, last)
	}
	if share, ok := last.Share(); !ok || share < 0.99 {
		t.Errorf("share %v, %v", share, ok)
	}
	if line := last.StatusLine(time.Unix(0, 0)); !strings.Contains(line, "operations; ") ||
		!strings.Contains(line, "[READ: Count=") {
		t.Errorf("status line %q", line)
	}
}

// TestAStoreThatHangsEndsTheRunAfterTheTimeout instead of never.
func TestAStoreThatHangsEndsTheRunAfterTheTimeout(t *testing.T) {
	db := newMapDB()
	b := open(t, db, small(), Config{DrainTimeout: 20 * time.Millisecond})
	must(t, b.Load)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	db.hold = func() bool {
		cancel() // the run ends when there is something outstanding
		return true
	}
	if p, err := b.Run(ctx); !errors.Is(err, bench.ErrOutstanding) || !p.Interrupted {
		t.Errorf("%v, %+v", err, p)
	}
}

// TestPartOfTheRecordsIsLoadedRunAndVerified: other processes have the others.
func TestPartOfTheRecordsIsLoadedRunAndVerified(t *testing.T) {
	for _, state := range []string{"", filepath.Join(t.TempDir(), "state")} {
		for _, d := range Distributions {
			w := small()
			w.Read, w.Update, w.Insert, w.ReadModifyWrite = 0.5, 0.5, 0, 0
			w.Distribution, w.HotData, w.HotOperations, w.InsertStart, w.InsertCount, w.OperationCount = d, 0.2, 0.8,
				100, 200, 500
			db := newMapDB()
			b := open(t, db, w, Config{StatePath: state})
			must(t, b.Load)
			must(t, b.Run)
			if p := must(t, b.Verify); p.Checked != 200 || len(db.values) != 200 {
				t.Errorf("%s: %d records verified of %d, want 200", d, p.Checked, len(db.values))
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	w := small()
	w.InsertCount = 200
	if err := w.CheckRun(); !errors.Is(err, ErrWorkload) ||
		!strings.Contains(err.Error(), "insertcount is 200, must be") {
		t.Errorf("a run that inserts, of a part: %v", err)
	}
}

// TestOverdueOperationsAreReported: a store that stalls until the end of a run must not look fast because of the few
// operations that it has completed.
func TestOverdueOperationsAreReported(t *testing.T) {
	db := newMapDB()
	w := small()
	w.Target, w.OperationCount, w.MaxExecution = 10_000, 0, 100*time.Millisecond
	w.Read, w.Update, w.Insert, w.ReadModifyWrite = 1, 0, 0, 0
	b := open(t, db, w, Config{Depth: 4})
	must(t, b.Load)
	began := time.Now()
	db.hold = func() bool { return time.Since(began) < 150*time.Millisecond }
	p := must(t, b.Run)
	// Up to twelve can begin, because the clock is not exact.
	if p.Operations == 0 || p.Operations > 12 || p.Overdue < 900 {
		t.Errorf("%d have begun, %d were overdue, of 1000", p.Operations, p.Overdue)
	}
	var out bytes.Buffer
	r := b.NewReport()
	r.Run = p
	if err := r.WriteYCSB(&out); err != nil ||
		!strings.Contains(out.String(), fmt.Sprintf("[OVERALL], Overdue, %d\n", p.Overdue)) {
		t.Errorf("%v, %s", err, out.String())
	}
	w.OperationCount, w.MaxExecution, w.Threads = 500, 0, 1
	db.hold = nil
	b = open(t, db, w, Config{Depth: 4})
	if p := must(t, b.Run); p.Operations != 500 || p.Overdue != 0 {
		t.Errorf("a run that ends by itself: %+v", p)
	}
}

func TestTheSameSeedMakesTheSameOperations(t *testing.T) {
	trace := func() string {
		db := newMapDB()
		w := small()
		w.Threads = 1
		b := open(t, db, w, Config{Life: 9})
		must(t, b.Load)
		var s strings.Builder
		db.spoil = func(o *Op, _ *Done) { fmt.Fprintf(&s, "%v %s\n", o.Put, o.Key[:]) }
		must(t, b.Run)
		return s.String()
	}
	if trace() != trace() {
		t.Error("two runs differ")
	}
}

func TestBadConfigsAreRefused(t *testing.T) {
	w := small()
	if _, err := Open(context.Background(), newMapDB(), w, Config{}); !errors.Is(err, ErrConfig) ||
		!strings.Contains(err.Error(), "depth is 0") {
		t.Error(err)
	}
	w.OperationCount = 0
	b := open(t, newMapDB(), w, Config{})
	must(t, b.Load)
	if _, err := b.Run(context.Background()); !errors.Is(err, ErrWorkload) ||
		!strings.Contains(err.Error(), "operationcount") {
		t.Error(err)
	}
}

// TestNothingIsAllocatedPerOperation once the histograms exist.
func TestNothingIsAllocatedPerOperation(t *testing.T) {
	w := small()
	w.Insert, w.OperationCount, w.Threads = 0, 20_000, 1
	w.MinField = w.MaxField
	b := open(t, newMapDB(), w, Config{})
	must(t, b.Load)
	must(t, b.Run)
	if p := must(t, b.Run); p.AllocsPerOp > 0.05 || len(p.Timeline) > 0 {
		t.Errorf("%.3f allocations per operation, a timeline of %d", p.AllocsPerOp, len(p.Timeline))
	}
}

// BenchmarkRun measures the generator itself: the choice of keys, the values, their verification and the versions, on a
// map.
func BenchmarkRun(b *testing.B) {
	for _, v := range []int{256, 1000} {
		for _, mix := range []string{"A", "C"} {
			b.Run(fmt.Sprintf("%s/%d", mix, v), func(b *testing.B) {
				w := Workload{RecordCount: 10_000, InsertCount: 10_000, OperationCount: uint64(b.N), Read: 1,
					Distribution: "zipfian", Theta: 0.99,
					Fields: 1, MinField: v, MaxField: v, Threads: 1}
				if mix == "A" {
					w.Read, w.Update = 0.5, 0.5
				}
				y, err := Open(context.Background(), newMapDB(), w, Config{Depth: 128, Seed: 1})
				if err != nil {
					b.Fatal(err)
				}
				if _, err := y.Load(context.Background()); err != nil {
					b.Fatal(err)
				}
				b.ResetTimer()
				b.ReportAllocs()
				p, err := y.Run(context.Background())
				b.StopTimer()
				if err != nil || !p.OK() {
					b.Fatalf("%v, %+v", err, p)
				}
				// Processor time is more exact on a busy machine.
				b.ReportMetric(p.CPUPercent/100*p.ElapsedSeconds*1e9/float64(b.N), "cpu-ns/op")
				if err := y.Close(); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

// TestAStoreInThisProcessIsDrivenToItsLimit: refused operations change nothing, and all other data is there.
func TestAStoreInThisProcessIsDrivenToItsLimit(t *testing.T) {
	db, err := OpenEmbedded(EmbeddedConfig{Path: "mem:96m"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	w := small()
	w.Fields, w.MinField, w.MaxField, w.RecordCount, w.InsertCount = 1, 4000, 4000, 40_000, 40_000
	b := open(t, db, w, Config{Depth: 32})
	p, err := b.Load(context.Background())
	if err != nil || p.Failed == 0 || !strings.Contains(p.Messages[0], "capacity exceeded") ||
		p.Store["Objects"] < 10_000 {
		t.Fatalf("%v, %+v", err, p)
	}
	written := p.Operations - p.Failed
	if p, err = b.Verify(context.Background()); err != nil || p.Failed > 0 || p.Checked != 40_000 ||
		p.Wrong != 40_000-written {
		t.Errorf("%d were acknowledged: %v, %+v", written, err, p)
	}
}

func TestAnEmbeddedQueueCanBeInterrupted(t *testing.T) {
	db, err := OpenEmbedded(EmbeddedConfig{Path: "mem:96m"})
	if err != nil {
		t.Fatal(err)
	}
	q, err := db.OpenQueue(context.Background(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := q.Poll(make([]Done, 1), time.Microsecond); n != 0 || err != nil {
		t.Errorf("nothing outstanding: %d, %v", n, err)
	}
	go q.Interrupt()
	if n, err := q.Poll(make([]Done, 1), -1); n != 0 || err == nil {
		t.Errorf("interrupted: %d, %v", n, err)
	}
	q.Interrupt()
	if err := errors.Join(q.Close(), db.Close()); err != nil {
		t.Error(err)
	}
}

func TestInvalidEmbeddedConfigsAreReported(t *testing.T) {
	for _, c := range []struct {
		c    EmbeddedConfig
		bad  bool
		want string
	}{
		{EmbeddedConfig{Path: "mem:x"}, true, "suffix"},
		{EmbeddedConfig{Path: "mem:1m"}, true, "mem:1m"},
		{EmbeddedConfig{Path: filepath.Join(t.TempDir(), "none")}, false, "none"},
		{EmbeddedConfig{Path: filepath.Join(t.TempDir(), "odd"), SizeBytes: 64<<20 + 1}, true, "67108865"},
	} {
		if _, err := OpenEmbedded(c.c); err == nil || !strings.Contains(err.Error(), c.want) ||
			errors.Is(err, ErrConfig) != c.bad {
			t.Errorf("%+v: %v", c.c, err)
		}
	}
}
