package flash

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// mix is a load of all operations; what completes is recorded.
func mix(t *testing.T, name string, seed uint64) []Completion {
	cfg, err := Preset(name, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Seed = seed
	d, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.Precondition(Fragmented)
	r := newRandom(7)
	var all []Completion
	now := int64(0)
	for i := range uint64(20_000) {
		n := int64(r.below(64)+1) * 512
		d.Submit(now, Request{Op: Op(r.below(5)), OffsetBytes: int64(r.below(uint32(cfg.SizeBytes/512-64))) * 512,
			LenBytes: n, Tag: i})
		now += int64(r.below(20_000))
		all = d.Advance(now, all)
	}
	for at, ok := d.NextEvent(); ok; at, ok = d.NextEvent() {
		all = d.Advance(at, all)
	}
	return all
}

func TestSameSeedSameCompletions(t *testing.T) {
	for _, name := range Presets() {
		a, b := mix(t, name, 3), mix(t, name, 3)
		if len(a) != 20_000 || !slices.Equal(a, b) {
			t.Errorf("%s: two runs of one seed gave %d and %d completions that differ", name, len(a), len(b))
		}
		if slices.Equal(a, mix(t, name, 4)) {
			t.Errorf("%s: another seed gave the same completions", name)
		}
		if !slices.IsSortedFunc(a, func(x, y Completion) int { return int(x.AtNS - y.AtNS) }) {
			t.Errorf("%s: completions are not in order of time", name)
		}
	}
}

// Averages over 100 ms are within a few percent of each other: collection comes in small pieces.
func TestSteadyStateIsSmooth(t *testing.T) {
	r := &stream{op: Read, bytes: 4 << 10, depth: 32}
	w := &stream{op: Write, bytes: 4 << 10, depth: 32}
	d := dct983(t, Fragmented)
	run(t, d, 0, 400*ms, r, w) // fills the buffer
	var reads, writes []float64
	before := d.Stats()
	streams := []*stream{r, w}
	rnd := newRandom(5)
	var done []Completion
	for end := d.nowNS + 100*ms; len(reads) < 20; end += 100 * ms {
		for {
			at, _ := d.NextEvent()
			if at > end {
				break
			}
			done = d.Advance(at, done[:0])
			for _, c := range done {
				d.Submit(c.AtNS, streams[c.Tag].request(d, &rnd, c.Tag))
			}
		}
		s := d.Stats()
		reads = append(reads, float64(s.HostReadBytes-before.HostReadBytes))
		writes = append(writes, float64(s.HostWriteBytes-before.HostWriteBytes))
		before = s
	}
	for what, x := range map[string][]float64{"reads": reads, "writes": writes} {
		mean := 0.0
		for _, v := range x {
			mean += v / float64(len(x))
		}
		for i, v := range x {
			if v < 0.93*mean || v > 1.07*mean {
				t.Errorf("%s: 100 ms number %d is %.1f %% of the mean", what, i, 100*v/mean)
			}
		}
	}
}

func TestNeitherReadsNorWritesStarve(t *testing.T) {
	for _, c := range []Condition{Clean, Fragmented} {
		alone := func(op Op) float64 {
			s := &stream{op: op, bytes: 4 << 10, depth: 64}
			run(t, dct983(t, c), 200*ms, 200*ms, s)
			return s.mbps(200 * ms)
		}
		for _, depths := range [][2]int{{1, 256}, {256, 1}, {256, 256}} {
			r := &stream{op: Read, bytes: 4 << 10, depth: depths[0]}
			w := &stream{op: Write, bytes: 4 << 10, depth: depths[1]}
			run(t, dct983(t, c), 200*ms, 300*ms, r, w)
			t.Logf("condition %d, depths %v: reads %.0f MB/s and at most %d µs, writes %.0f MB/s and at most %d µs", c,
				depths, r.mbps(300*ms), r.quantile(1)/1000, w.mbps(300*ms), w.quantile(1)/1000)
			if q := r.quantile(1); q > 100*ms {
				t.Errorf("condition %d, depths %v: a read took %d ms", c, depths, q/ms)
			}
			if q := w.quantile(1); q > 100*ms {
				t.Errorf("condition %d, depths %v: a write took %d ms", c, depths, q/ms)
			}
			if depths == [2]int{256, 256} && (r.mbps(300*ms) < 0.1*alone(Read) || w.mbps(300*ms) < 0.1*alone(Write)) {
				t.Errorf("condition %d: %.0f MB/s of reads and %.0f of writes together: less than a tenth of what one "+
					"has alone", c, r.mbps(300*ms), w.mbps(300*ms))
			}
		}
	}
}

// For any load, each command completes once, not before its submission and in order of time, and then the drive is
// idle.
func TestEachCommandCompletesOnce(t *testing.T) {
	for _, name := range Presets() {
		for seed := uint64(1); seed <= 4; seed++ {
			cfg, err := Preset(name, 64<<20)
			if err != nil {
				t.Fatal(err)
			}
			cfg.Seed = seed
			d, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			d.Precondition(Condition(seed % 3))
			r := newRandom(seed)
			submitted := map[uint64]int64{}
			var done []Completion
			now, last := int64(0), int64(0)
			take := func() {
				for _, c := range done {
					at, ok := submitted[c.Tag]
					if !ok {
						t.Fatalf("%s, seed %d: tag %d completed twice or was never submitted", name, seed, c.Tag)
					}
					if c.AtNS < at || c.LatencyNS != c.AtNS-at || c.AtNS < last || c.AtNS > now {
						t.Fatalf("%s, seed %d: %+v for a command of %d, after a completion at %d, at %d", name, seed, c,
							at, last, now)
					}
					last = c.AtNS
					delete(submitted, c.Tag)
				}
				done = done[:0]
			}
			for tag := uint64(0); tag < 30_000; {
				for range r.below(40) * r.below(10) { // bursts
					op := Op(r.below(5))
					n := int64(r.below(1 << (r.below(18) + 1)))
					if op == Flush && r.below(2) == 0 {
						n = 0
					}
					d.Submit(now, Request{Op: op, OffsetBytes: int64(r.below(uint32(cfg.SizeBytes - n + 1))),
						LenBytes: n, Tag: tag})
					submitted[tag] = now
					tag++
				}
				now += int64(r.below(1 << (r.below(24) + 1)))
				done = d.Advance(now, done)
				take()
			}
			for at, ok := d.NextEvent(); ok; at, ok = d.NextEvent() {
				now = max(now, at)
				done = d.Advance(now, done)
				take()
			}
			if s := d.Stats(); len(submitted) != 0 || s.InFlight != 0 || s.WritesWaiting != 0 ||
				s.BufferUsedBytes > 64<<10 {
				t.Errorf("%s, seed %d: at rest %d commands have not completed; %+v", name, seed, len(submitted), s)
			}
			if d.ftl != nil {
				checkMap(t, d)
			}
		}
	}
}

func TestBufferedAndUnmappedUnitsAreReadWithoutFlash(t *testing.T) {
	d := preset(t, "dct983", 64<<20, Empty)
	one := func(r Request) int64 {
		d.Submit(d.nowNS, r)
		var done []Completion
		for len(done) == 0 {
			at, _ := d.NextEvent()
			done = d.Advance(at, nil)
		}
		return done[0].LatencyNS
	}
	if ns := one(Request{Op: Read, LenBytes: 4096}); ns > 30_000 {
		t.Errorf("a read of an unmapped unit took %d ns", ns)
	}
	one(Request{Op: Write, LenBytes: 4096})
	if ns := one(Request{Op: Read, LenBytes: 4096}); ns > 30_000 {
		t.Errorf("a read of a unit in the buffer took %d ns", ns)
	}
	d.Precondition(Clean)
	if ns := one(Request{Op: Read, LenBytes: 4096}); ns < 70_000 {
		t.Errorf("a read of a unit on flash took %d ns", ns)
	}
	one(Request{Op: WriteZeroes, LenBytes: 8192})
	if ns := one(Request{Op: Read, LenBytes: 4096}); ns > 30_000 {
		t.Errorf("a read after Write Zeroes took %d ns", ns)
	}
	if ns := one(Request{Op: Flush}); ns > 30_000 {
		t.Errorf("a flush took %d ns", ns)
	}
}

func TestConfigOutOfBoundsIsRefused(t *testing.T) {
	if _, err := Preset("floppy", 1<<30); !errors.Is(err, ErrConfig) ||
		!strings.Contains(err.Error(), "dct983, p4800x") {
		t.Errorf("unknown preset: %v", err)
	}
	good, err := Preset("dct983", 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	for what, spoil := range map[string]func(*Config){
		"SizeBytes":             func(c *Config) { c.SizeBytes = 1000 },
		"Slowdown":              func(c *Config) { c.Slowdown = MaxSlowdown + 1 },
		"Channels":              func(c *Config) { c.Channels = 65 },
		"PageBytes":             func(c *Config) { c.PageBytes = 12 << 10 },
		"Planes":                func(c *Config) { c.Planes = 0 },
		"BlockPrograms":         func(c *Config) { c.BlockPrograms = 3 },
		"rate":                  func(c *Config) { c.ReadBytesPerSec = 0 },
		"JitterPercent":         func(c *Config) { c.JitterPercent = 51 },
		"time":                  func(c *Config) { c.ReadNS = 0 },
		"Calm":                  func(c *Config) { c.Calm.SliceNS = 0 },
		"BufferBytes":           func(c *Config) { c.BufferBytes = 4096 },
		"OverProvisionPermille": func(c *Config) { c.OverProvisionPermille = 0 },
		"in all":                func(c *Config) { c.SizeBytes, c.OverProvisionPermille = 4<<40, 10_000 },
		"GCReserveBlocks":       func(c *Config) { c.GCReserveBlocks = 1 },
	} {
		c := good
		spoil(&c)
		if _, err := New(c); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s out of its bounds: %v", what, err)
		}
	}
	for _, name := range Presets() {
		for _, size := range []int64{16 << 20, 100 << 20, 960_197_124_096, 1 << 40} {
			if _, err := Preset(name, size); err != nil {
				t.Errorf("%s of %d bytes: %v", name, size, err)
			}
		}
	}
}

// A drive that is slower by a factor gives the same completions in the same order, later by that factor.
func TestASlowDriveDoesTheSame(t *testing.T) {
	for _, name := range Presets() {
		answers := func(slowdown int) (all []Completion) {
			cfg, err := Preset(name, 64<<20)
			if err != nil {
				t.Fatal(err)
			}
			cfg.Slowdown = slowdown
			d, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			d.Precondition(Fragmented)
			r := newRandom(3)
			now, n := int64(0), int64(max(slowdown, 1))
			for i := range uint64(5000) {
				d.Submit(now*n, Request{Op: Op(r.below(5)), OffsetBytes: int64(r.below(8<<10)) << 12,
					LenBytes: int64(r.below(8)+1) << 12, Tag: i})
				now += 20_000
				all = d.Advance(now*n, all)
			}
			for at, ok := d.NextEvent(); ok; at, ok = d.NextEvent() {
				if next, ok := d.NextCompletion(); ok && next < at {
					t.Errorf("%s: a completion at %d, the next event at %d", name, next, at)
				}
				all = d.Advance(at, all)
			}
			if busy := d.Stats().DieBusy; busy <= 0 || busy > 1 {
				t.Errorf("%s: the dies of a drive slower by %d are busy for %.3f of the time", name, slowdown, busy)
			}
			return all
		}
		want := answers(0)
		for _, n := range []int64{1, 7, MaxSlowdown} {
			got := answers(int(n))
			if len(got) != len(want) || len(got) != 5000 {
				t.Fatalf("%s: %d answers of a drive slower by %d, want %d", name, len(got), n, len(want))
			}
			for i, w := range want {
				if w.AtNS, w.LatencyNS = w.AtNS*n, w.LatencyNS*n; got[i] != w {
					t.Fatalf("%s: answer %d of a drive slower by %d is %+v, want %+v", name, i, n, got[i], w)
				}
			}
		}
	}
}

func TestIOAllocatesNothing(t *testing.T) {
	for _, name := range Presets() {
		d := preset(t, name, 64<<20, Fragmented)
		r := newRandom(1)
		done := make([]Completion, 0, 1024)
		now := int64(0)
		step := func() {
			for range 64 {
				op := Op(r.below(5))
				d.Submit(now, Request{Op: op, OffsetBytes: int64(r.below(8<<10)) << 12,
					LenBytes: int64(r.below(8)+1) << 12})
			}
			now += ms
			done = d.Advance(now, done[:0])
		}
		for range 1000 {
			step() // the slabs grow to what is outstanding at most
		}
		if n := testing.AllocsPerRun(500, step); n != 0 {
			t.Errorf("%s: %v allocs per 64 commands, want 0", name, n)
		}
	}
}

func benchmark(b *testing.B, c Condition, streams ...*stream) {
	d := dct983(b, c)
	rnd := newRandom(5)
	for i, s := range streams {
		for range s.depth {
			d.Submit(0, s.request(d, &rnd, uint64(i)))
		}
	}
	var done []Completion
	b.ResetTimer()
	b.ReportAllocs()
	for n := 0; n < b.N; {
		at, _ := d.NextEvent()
		done = d.Advance(at, done[:0])
		for _, c := range done {
			n++
			d.Submit(c.AtNS, streams[c.Tag].request(d, &rnd, c.Tag))
		}
	}
}

func BenchmarkRead4K(b *testing.B) {
	benchmark(b, Fragmented, &stream{op: Read, bytes: 4 << 10, depth: 128})
}

func BenchmarkWrite4KFragmented(b *testing.B) {
	benchmark(b, Fragmented, &stream{op: Write, bytes: 4 << 10, depth: 128})
}

func BenchmarkMixed4KFragmented(b *testing.B) {
	benchmark(b, Fragmented, &stream{bytes: 4 << 10, depth: 128, readPercent: 70})
}

func BenchmarkRead128KClean(b *testing.B) {
	benchmark(b, Clean, &stream{op: Read, bytes: 128 << 10, depth: 32})
}

func BenchmarkPreconditionFragmented(b *testing.B) {
	for range b.N {
		preset(b, "dct983", 4<<30, Fragmented)
	}
}

// Sequential reads of a part of a page each take the time of one: the page stays in the register.
func TestAPageIsReadOnceForWhatWaitsForIt(t *testing.T) {
	d := preset(t, "dct983", 64<<20, Clean)
	for i := range int64(4) {
		d.Submit(0, Request{Op: Read, OffsetBytes: i * 4096, LenBytes: 4096})
	}
	var done []Completion
	for len(done) < 4 {
		at, _ := d.NextEvent()
		done = d.Advance(at, done)
	}
	if last := done[3].LatencyNS; last > done[0].LatencyNS+d.cfg.ReadNS/2 {
		t.Errorf("the units of a page came after %d to %d ns: it was read more than once", done[0].LatencyNS, last)
	}
}
