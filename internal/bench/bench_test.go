package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"jbofd/internal/ssd/mem"
)

// scripted is a Target on a byte slice. Its queue executes operations in Poll, so that tests can inject faults between
// Submit and Poll.
type scripted struct {
	disk []byte
	bs   int
	// spoil, if set, is called with each write before it takes place and with each read after it; it may change offset
	// and data, or fail the operation.
	spoil func(o *Op) error
	// hold, if set, delays operations while it returns true.
	hold func() bool
	// first is the offset of the first write.
	first int64
}

func (s *scripted) Info() TargetInfo {
	return TargetInfo{Name: "scripted", SizeBytes: int64(len(s.disk)), BlockSize: s.bs}
}
func (s *scripted) Close() error { return nil }
func (s *scripted) Buffer(size int) ([]byte, func() error, error) {
	return make([]byte, size), func() error { return nil }, nil
}
func (s *scripted) OpenQueue(context.Context, int) (Queue, error) {
	return &scriptedQueue{t: s, wake: make(chan struct{})}, nil
}

type scriptedQueue struct {
	t    *scripted
	ops  []Op
	wake chan struct{}
}

func (q *scriptedQueue) Submit(ops []Op) (int, error) {
	q.ops = append(q.ops, ops...)
	return len(ops), nil
}

func (q *scriptedQueue) Poll(dst []Done, wait time.Duration) (int, error) {
	for q.t.hold != nil && q.t.hold() {
		if wait == 0 {
			return 0, nil
		}
		select {
		case <-q.wake:
			return 0, nil
		case <-time.After(time.Millisecond):
		}
	}
	n := min(len(dst), len(q.ops))
	for i := range q.ops[:n] {
		o := &q.ops[i]
		var err error
		if q.t.spoil != nil && o.Kind == Write {
			err = q.t.spoil(o)
		}
		if err == nil && o.Kind == Write {
			copy(q.t.disk[o.Offset:], o.Buf)
		}
		if o.Kind == Read {
			copy(o.Buf, q.t.disk[o.Offset:])
			if q.t.spoil != nil {
				err = q.t.spoil(o)
			}
		}
		dst[i] = Done{Tag: o.Tag, Err: err}
	}
	q.ops = q.ops[:copy(q.ops, q.ops[n:])]
	return n, nil
}

func (q *scriptedQueue) Interrupt()   { close(q.wake) }
func (q *scriptedQueue) Close() error { return nil }

func config(pattern string) Config {
	return Config{Pattern: pattern, ReadPercent: 50, BlockBytes: 4096, IODepth: 8, Jobs: 2, Seed: 7}
}

// TestEveryPatternCoversItsRegionOnce: without a runtime, all jobs together access each block exactly once.
func TestEveryPatternCoversItsRegionOnce(t *testing.T) {
	for _, pattern := range Patterns {
		t.Run(pattern, func(t *testing.T) {
			const region = 1 << 20
			seen := map[int64]int{}
			target := &scripted{disk: make([]byte, 2<<20), bs: 512}
			cfg := config(pattern)
			cfg.Jobs = 1 // spoil is called by the job's goroutine
			cfg.OffsetBytes, cfg.SizeBytes = 512<<10, region
			target.spoil = func(o *Op) error { seen[o.Offset]++; return nil }
			rep, err := Run(context.Background(), target, cfg)
			if err != nil || !rep.OK() {
				t.Fatalf("%v, %+v", err, rep.Errors)
			}
			total := int64(0)
			for _, d := range []*Direction{rep.Read, rep.Write} {
				if d != nil {
					total += d.IOs
				}
			}
			if total != region/4096 {
				t.Errorf("%d I/Os, want %d", total, region/4096)
			}
			for off, k := range seen {
				if off < 512<<10 || off >= 512<<10+region || off%4096 != 0 {
					t.Errorf("offset %d is outside the region", off)
				}
				if k != 1 && pattern != "rw" { // rw has separate positions for reads and writes
					t.Errorf("offset %d was visited %d times", off, k)
				}
			}
			if (pattern == "read" || pattern == "randread") != (rep.Write == nil) {
				t.Errorf("writes: %+v", rep.Write)
			}
		})
	}
}

func TestPermutationIsABijection(t *testing.T) {
	for _, n := range []uint64{1, 2, 3, 5, 64, 65, 1000, 4096, 10007} {
		p := newPermutation(n, mix(n))
		seen := make([]bool, n)
		for i := range n {
			k := p.at(i)
			if k >= n || seen[k] {
				t.Fatalf("n %d: %d leads to %d, which is taken or outside", n, i, k)
			}
			seen[k] = true
		}
	}
}

// TestVerifyNamesTheKindOfFault plants each fault a device can have.
func TestVerifyNamesTheKindOfFault(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(t *scripted, o *Op, n int) error // n counts writes, from 1
		want  string
	}{
		"none": {func(*scripted, *Op, int) error { return nil }, ""},
		"lost": {func(_ *scripted, o *Op, n int) error { return skipIf(o, n == 5) }, "the write is lost"},
		"misplaced": {func(t *scripted, o *Op, n int) error {
			switch n {
			case 1:
				t.first = o.Offset
			case 5:
				o.Offset = t.first
			}
			return nil
		}, "misplaced"},
		"torn": {func(t *scripted, o *Op, n int) error {
			if n == 5 {
				o.Buf = append([]byte(nil), o.Buf[:300]...) // less than a block
			}
			return nil
		}, "torn or corrupt"},
		"corrupt": {func(_ *scripted, o *Op, n int) error {
			if n == 5 {
				o.Buf = append([]byte(nil), o.Buf...)
				o.Buf[2000] ^= 1
			}
			return nil
		}, "torn or corrupt"},
		"foreign": {func(_ *scripted, o *Op, n int) error {
			if n == 5 {
				o.Buf = []byte(strings.Repeat("something else", 400)[:4096])
			}
			return nil
		}, "foreign data"},
		"other run": {func(_ *scripted, o *Op, n int) error {
			if n == 5 {
				o.Buf = append([]byte(nil), o.Buf...)
				fillVerify(o.Buf, 512, 8, o.Offset, 1)
			}
			return nil
		}, "another run"},
	} {
		t.Run(name, func(t *testing.T) {
			target := &scripted{disk: make([]byte, 1<<20), bs: 512}
			n := 0
			target.spoil = func(o *Op) error {
				if o.Kind != Write {
					return nil
				}
				n++
				return c.spoil(target, o, n)
			}
			cfg := config("randwrite")
			cfg.Jobs, cfg.Verify = 1, true
			rep, err := Run(context.Background(), target, cfg)
			if err != nil {
				t.Fatal(err)
			}
			if c.want == "" {
				if !rep.OK() || rep.Verify.CheckedBytes != 1<<20 {
					t.Errorf("%+v, %+v", rep.Errors, rep.Verify)
				}
				return
			}
			if rep.Errors.Verify == 0 || !strings.Contains(strings.Join(rep.Errors.Messages, "\n"), c.want) {
				t.Errorf("%d failures: %q, want one with %q", rep.Errors.Verify, rep.Errors.Messages, c.want)
			}
		})
	}
}

func skipIf(o *Op, yes bool) error {
	if yes {
		o.Buf = nil
	}
	return nil
}

// TestVerifyFindsStaleData: one write of a second round is lost.
func TestVerifyFindsStaleData(t *testing.T) {
	target := &scripted{disk: make([]byte, 256<<10), bs: 4096}
	writes := map[int64]int{}
	target.spoil = func(o *Op) error {
		if o.Kind == Write {
			if writes[o.Offset]++; writes[o.Offset] >= 2 && o.Offset == 8192 {
				o.Buf = nil
			}
		}
		return nil
	}
	cfg := config("randrw")
	cfg.Jobs, cfg.Verify, cfg.Runtime = 1, true, 300*time.Millisecond
	rep, err := Run(context.Background(), target, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if writes[8192] < 2 {
		t.Fatalf("%d writes at 8192 in 300 ms: no second round", writes[8192])
	}
	if !strings.Contains(strings.Join(rep.Errors.Messages, "\n"), "offset 8192: stale: generation 1") {
		t.Errorf("%q", rep.Errors.Messages)
	}
}

func TestVerifyOnlyChecksAnEarlierRun(t *testing.T) {
	target := &scripted{disk: make([]byte, 1<<20), bs: 512}
	cfg := config("write")
	cfg.Verify, cfg.NoReadBack = true, true
	if rep, err := Run(context.Background(), target, cfg); err != nil || !rep.OK() || rep.Verify.CheckedBytes != 0 {
		t.Fatalf("%v %+v", err, rep)
	}
	cfg.VerifyOnly = true
	rep, err := Run(context.Background(), target, cfg)
	if err != nil || !rep.OK() || rep.Verify.CheckedBytes != 1<<20 || rep.Read == nil || rep.Write != nil {
		t.Fatalf("%v %+v", err, rep)
	}
	target.disk[70000] ^= 4
	rep, err = Run(context.Background(), target, cfg)
	if err != nil || rep.Errors.Verify != 1 {
		t.Errorf("%v %+v", err, rep.Errors)
	}
}

// TestLatencyCountsFromWhenAnIOWasDue: a target that stalls for 100 ms under a rate of 1000/s delays some
// hundred I/Os, and all of them show it.
func TestLatencyCountsFromWhenAnIOWasDue(t *testing.T) {
	target := &scripted{disk: make([]byte, 1<<20), bs: 512}
	begin := time.Now()
	target.hold = func() bool {
		d := time.Since(begin)
		return d > 100*time.Millisecond && d < 200*time.Millisecond
	}
	cfg := config("randread")
	cfg.Jobs, cfg.IODepth, cfg.RateIOPS, cfg.Runtime = 1, 1, 1000, 400*time.Millisecond
	rep, err := Run(context.Background(), target, cfg)
	if err != nil {
		t.Fatal(err)
	}
	l := rep.Read.LatencyNS
	// Of 400 I/Os a hundred were due during the stall, evenly spread. So a tenth or more of all waited 50 ms or longer,
	// although only one was outstanding.
	if l.P90 < int64(40*time.Millisecond) || l.Max < int64(90*time.Millisecond) {
		t.Errorf("p90 %s, max %s", time.Duration(l.P90), time.Duration(l.Max))
	}
	if rep.Read.IOs > 420 {
		t.Errorf("%d I/Os in 0.4 s at 1000/s", rep.Read.IOs)
	}
}

func TestFailedIOsAreCountedAndEndTheRun(t *testing.T) {
	for _, goOn := range []bool{false, true} {
		target := &scripted{disk: make([]byte, 1<<20), bs: 512}
		n := 0
		target.spoil = func(o *Op) error {
			if n++; n%10 == 0 {
				return errors.New("media on fire")
			}
			return nil
		}
		cfg := config("randwrite")
		cfg.Jobs, cfg.ContinueOnError = 1, goOn
		rep, err := Run(context.Background(), target, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if rep.OK() || goOn && (rep.Errors.IO != 25 || rep.Write.IOs != 231) || !goOn && rep.Errors.IO > 2 ||
			!strings.Contains(rep.Errors.Messages[0], "media on fire") {
			t.Errorf("continue %t: %+v, %d good writes", goOn, rep.Errors, rep.Write.IOs)
		}
	}
}

func TestATargetThatNeverAnswersEndsInAnError(t *testing.T) {
	target := &scripted{disk: make([]byte, 1<<20), bs: 512, hold: func() bool { return true }}
	cfg := config("read")
	cfg.Runtime, cfg.DrainTimeout = 10*time.Millisecond, 20*time.Millisecond
	if _, err := Run(context.Background(), target, cfg); !errors.Is(err, ErrOutstanding) {
		t.Errorf("%v", err)
	}
}

func TestBadWorkloadsNameTheFlag(t *testing.T) {
	target := &scripted{disk: make([]byte, 1<<20), bs: 512}
	for flag, change := range map[string]func(*Config){
		"--rw":          func(c *Config) { c.Pattern = "wr" },
		"--rwmixread":   func(c *Config) { c.ReadPercent = 101 },
		"--iodepth":     func(c *Config) { c.IODepth = 0 },
		"--numjobs":     func(c *Config) { c.Jobs = 0 },
		"--bs":          func(c *Config) { c.BlockBytes = 1000 },
		"--offset":      func(c *Config) { c.OffsetBytes = 1 << 20 },
		"--size":        func(c *Config) { c.SizeBytes = 1<<20 + 1 },
		"--verify_only": func(c *Config) { c.VerifyOnly = true },
		"--ramp_time":   func(c *Config) { c.RampTime = 1 },
	} {
		cfg := config("randrw")
		change(&cfg)
		if _, err := Run(context.Background(), target, cfg); !errors.Is(err, ErrConfig) ||
			!strings.Contains(err.Error(), flag) {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

// TestReportKeepsItsKeys: scripts read them.
func TestReportKeepsItsKeys(t *testing.T) {
	dev, err := mem.Open(mem.Config{Name: "m", SizeBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	raw := NewRaw(dev)
	defer raw.Close()
	cfg := config("randrw")
	cfg.FlushEvery, cfg.Verify = 4, true
	rep, err := Run(context.Background(), raw, cfg)
	if err != nil || !rep.OK() {
		t.Fatalf("%v %+v", err, rep.Errors)
	}
	b, err := json.Marshal(rep)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"apiVersion", "kind", "target.name", "workload.rw", "workload.bsBytes", "read.iops",
		"read.bytesPerSec",
		"write.latencyNS.mean", "write.latencyNS.p50", "write.latencyNS.p99", "write.latencyNS.p99_9", "flush.ios",
		"verify.failures",
		"errors.io", "errors.verify", "self.gcCycles", "self.allocsPerIO", "elapsedSeconds"} {
		var v any = m
		for k := range strings.SplitSeq(path, ".") {
			o, _ := v.(map[string]any)
			v = o[k]
		}
		if v == nil {
			t.Errorf("%s is missing", path)
		}
	}
	var s strings.Builder
	if err := rep.WriteTable(&s); err != nil || !strings.Contains(s.String(), "p99.9") {
		t.Errorf("%v\n%s", err, s.String())
	}
}

// TestASparseFileIsReported: its reads look faster than the drive is.
func TestASparseFileIsReported(t *testing.T) {
	path := filepath.Join(t.TempDir(), "raw.img")
	const mib = 1 << 20
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 8*mib)); err != nil {
		t.Fatal(err)
	}
	run := func(pattern string, offset, size int64) (*Report, string) {
		t.Helper()
		raw, err := OpenRaw(RawConfig{Path: path})
		if err != nil {
			t.Fatal(err)
		}
		rep, err := Run(context.Background(), raw, Config{Pattern: pattern, BlockBytes: 65536, IODepth: 1, Jobs: 1,
			OffsetBytes: offset, SizeBytes: size})
		var b strings.Builder
		if err = errors.Join(err, rep.WriteTable(&b), raw.Close()); err != nil {
			t.Fatal(err)
		}
		return rep, b.String()
	}
	if rep, text := run("write", mib, 2*mib); rep.Target.UnwrittenBytes != 2*mib ||
		strings.Contains(text, "not written") {
		t.Errorf("writing: %d bytes\n%s", rep.Target.UnwrittenBytes, text)
	}
	for _, c := range []struct {
		offset, size, unwritten int64
		says                    string
	}{{0, 8 * mib, 6 * mib, "75 %"}, {0, 2 * mib, mib, "50 %"}, {2 * mib, 4 * mib, 3 * mib, "75 %"},
		{mib, 2 * mib, 0, ""}, {4 * mib, mib, mib, "100 %"}} {
		rep, text := run("read", c.offset, c.size)
		if rep.Target.UnwrittenBytes != c.unwritten || (c.says == "") == strings.Contains(text, "not written") ||
			!strings.Contains(text, c.says) {
			t.Errorf("%d bytes from %d on: %d unwritten, want %d\n%s", c.size, c.offset, rep.Target.UnwrittenBytes,
				c.unwritten, text)
		}
	}
}

func TestLoadDoesNotAllocate(t *testing.T) {
	dev, err := mem.Open(mem.Config{Name: "m", SizeBytes: 4 << 20, BlockSize: 4096})
	if err != nil {
		t.Fatal(err)
	}
	raw := NewRaw(dev)
	defer raw.Close()
	cfg := config("randrw")
	cfg.Runtime, cfg.Verify, cfg.NoReadBack = 300*time.Millisecond, true, true
	rep, err := Run(context.Background(), raw, cfg)
	if err != nil {
		t.Fatal(err)
	}
	// The remaining allocations belong to the run, not to its I/Os.
	if n := rep.Self.AllocsPerIO * float64(rep.Read.IOs+rep.Write.IOs); n > 200 {
		t.Errorf("%.0f allocations in %d I/Os", n, rep.Read.IOs+rep.Write.IOs)
	}
}

func TestSizesParseAsInFio(t *testing.T) {
	for s, want := range map[string]int64{"4096": 4096, "4k": 4096, "4K": 4096, "4kb": 4096, "4KiB": 4096,
		"1m": 1 << 20, "1.5g": 3 << 29, "2TiB": 2 << 40, "0": 0} {
		if n, err := ParseSize(s); err != nil || n != want {
			t.Errorf("%s: %d, %v", s, n, err)
		}
	}
	for _, s := range []string{"", "k", "4x", "-1", "1e30", "9999999t"} {
		if n, err := ParseSize(s); err == nil {
			t.Errorf("%q: %d", s, n)
		}
	}
	for n, want := range map[int64]string{4096: "4KiB", 1 << 30: "1GiB", 1000: "1000B", 0: "0B"} {
		if s := FormatSize(n); s != want {
			t.Errorf("%d: %s", n, s)
		}
	}
	if s := fmt.Sprintln(FormatNS(999), FormatNS(12345), FormatNS(2.5e9)); s != "999ns 12.3µs 2.50s\n" {
		t.Error(s)
	}
}
