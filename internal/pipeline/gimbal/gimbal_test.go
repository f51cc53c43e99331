package gimbal

import (
	"flag"
	"math"
	"slices"
	"testing"
	"time"

	"jbofd/internal/congestion"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/tokenbucket"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

func TestStatesAreThoseOfThePipeline(t *testing.T) {
	for c, p := range map[congestion.State]pipeline.State{
		congestion.Underutilised: pipeline.Underutilised, congestion.Avoidance: pipeline.Avoidance,
		congestion.Congested: pipeline.Congested, congestion.Overloaded: pipeline.Overloaded,
	} {
		if pipeline.State(c) != p {
			t.Errorf("%d is not %v", c, p)
		}
	}
}

func TestCostsHaveOneUnit(t *testing.T) {
	if congestion.CostOne != tokenbucket.CostOne {
		t.Errorf("a cost of 1.0 is %d and %d", congestion.CostOne, tokenbucket.CostOne)
	}
}

func TestOneTenantSteadyIOsCreditsAndSlots(t *testing.T) {
	for _, c := range []struct {
		op              pipeline.Op
		lenBytes, cost  int64
		flight, credits int
	}{
		{pipeline.Read, 4 << 10, 9, 256, 256},
		{pipeline.Read, 128 << 10, 9, 8, 256},
		{pipeline.Write, 4 << 10, 9, 32, 32},
		{pipeline.Write, 4 << 10, 1, 256, 256},
		{pipeline.Write, 128 << 10, 9, 8, 256},
		{pipeline.Read, 100 << 10, 9, 16, 400},
		{pipeline.Read, 127 << 10, 9, 16, 512},
		{pipeline.Read, 512, 9, 2048, 2048},
	} {
		r := rig{p: New(Config{Depth: 4096}), bytesPerSec: 3_200_000_000, ns: 200_000, rate: 1 << 40,
			cost:    c.cost * congestion.CostOne,
			streams: []stream{{"", c.op, c.lenBytes, 3000}}}
		most := 0
		r.after = func() { most = max(most, r.p.atDevice) }
		r.run(20e6)
		if most != c.flight || r.p.Credit(0) != c.credits {
			t.Errorf("%v of %d at %d: %d at the device with a credit of %d, want %d with %d", c.op, c.lenBytes, c.cost,
				most, r.p.Credit(0), c.flight, c.credits)
		}
	}
}

func TestCreditExistsBeforeTheFirstIO(t *testing.T) {
	p := New(Config{Depth: 64})
	p.SetTenant(0, 0, 1)
	if got := p.Credit(0); got != 256 {
		t.Errorf("credit %d, want 256: 8 slots of 32", got)
	}
}

// TestGimbalHasTheWeakPointsOfThePaper: the effects that the reference measured with the released code and that the
// default policy avoids.
func TestGimbalHasTheWeakPointsOfThePaper(t *testing.T) {
	light := stream{"light", pipeline.Read, 4 << 10, 1}
	heavy := stream{"heavy", pipeline.Read, 128 << 10, 64}
	sized := func(lenBytes int64) stream { return stream{"", pipeline.Read, lenBytes, 64} }
	small, large := stream{"", pipeline.Write, 4 << 10, 256}, stream{"", pipeline.Write, 128 << 10, 64}
	for _, c := range []struct {
		name    string
		device  int64
		streams []stream
		want    []float64 // MB/s
	}{
		{"a lone tenant has it all", 3_200_000_000, []stream{heavy}, []float64{3200}},
		{"odd sizes win", 2_000_000_000, []stream{sized(128 << 10), sized(255 << 9)}, []float64{668, 1332}},
		{"odd sizes win", 2_000_000_000, []stream{sized(128 << 10), sized(100 << 10)}, []float64{781, 1219}},
		{"large writes win", 2_000_000_000, []stream{large, small}, []float64{1778, 222}},
		{"a large write costs as much as a read", 2_000_000_000, []stream{large, heavy}, []float64{1000, 1000}},
	} {
		r := rig{p: New(Config{Depth: 4096}), bytesPerSec: c.device, ns: 50_000, rate: RateMaxBytesPerSec,
			cost: WriteCostWorst, streams: c.streams}
		got := r.run(1e9)
		t.Logf("%s: %.0f", c.name, got)
		for i, want := range c.want {
			if math.Abs(got[i]/want-1) > 0.05 {
				t.Errorf("%s: %.0f MB/s, want %.0f", c.name, got, c.want)
			}
		}
	}
	// Light tenants hold slots that they do not need.
	for n, want := range map[int]float64{2: 2002, 4: 1001, 6: 1001} {
		r := rig{p: New(Config{Depth: 4096}), bytesPerSec: 3_200_000_000, ns: 90_000, rate: RateMaxBytesPerSec,
			streams: []stream{heavy}}
		for range n {
			r.streams = append(r.streams, light)
		}
		got := r.run(1e9)
		t.Logf("%d light: %.0f", n, got)
		if math.Abs(got[0]/want-1) > 0.05 {
			t.Errorf("beside %d light tenants the heavy one has %.0f MB/s, want %.0f", n, got[0], want)
		}
	}
}

// bench is a Policy with tenants and helpers to drive it by hand.
type bench struct {
	*Policy
	t *testing.T
}

func newBench(t *testing.T, depth, tenants int) bench {
	b := bench{New(Config{Depth: depth}), t}
	for i := range tenants {
		b.SetTenant(0, tenant.ID(i), 1)
	}
	return b
}

func (b bench) read(now int64, tag pipeline.Tag, t tenant.ID, lenBytes int64) {
	b.Enqueue(now, pipeline.IO{Tag: tag, Tenant: t, Op: pipeline.Read, LenBytes: lenBytes})
}

func (b bench) want(now int64, tags ...pipeline.Tag) {
	b.t.Helper()
	if got := b.Dispatch(now, nil); !slices.Equal(got, tags) {
		b.t.Fatalf("at %d dispatched %v, want %v", now, got, tags)
	}
}

func TestTheParkedIOIsNotOvertakenAndGoesOnTime(t *testing.T) {
	b := newBench(t, 64, 2)
	b.cost.Advance(0)
	b.read(0, 0, 0, 128<<10)
	b.read(0, 1, 0, 128<<10)
	b.want(0, 0, 1) // the bucket is empty
	b.read(0, 2, 0, 128<<10)
	b.want(0)
	b.Enqueue(0, pipeline.IO{Tag: 3, Tenant: 1, Op: pipeline.Write, LenBytes: 4096}) // has tokens
	b.want(0)
	if b.drr.Queued(0) != 0 || b.drr.Queued(1) != 1 {
		t.Fatalf("%d and %d in the round, want one I/O parked and the write behind it", b.drr.Queued(0),
			b.drr.Queued(1))
	}
	if b.Limit(0) != pipeline.LimitSSD || b.Limit(1) != pipeline.LimitSSD {
		t.Errorf("limits %v, %v, want %v", b.Limit(0), b.Limit(1), pipeline.LimitSSD)
	}
	at, ok := b.NextWake()
	// The writes' bucket is nearly full, so that nearly all of the rate goes to the reads.
	if want := int64(128 << 10 * 1e9 / RateStartBytesPerSec); !ok || at < want || at > want+want/8 {
		t.Fatalf("wakes at %d, %v, want soon after %d", at, ok, want)
	}
	b.want(at - 1)
	// The tokens still missing are fewer than the smallest refill, which gives the writes a byte.
	if again, _ := b.NextWake(); again < at || again > at+10 {
		t.Errorf("asked in between it says %d, said %d", again, at)
	}
	at, _ = b.NextWake()
	b.want(at, 2, 3)
	if _, ok := b.NextWake(); ok {
		t.Error("it waits for a time with nothing queued")
	}
}

func TestCancellingTheParkedIOFreesItsSlotAndTheWay(t *testing.T) {
	b := newBench(t, 64, 2)
	b.read(0, 0, 0, 256<<10)
	b.read(0, 1, 0, 128<<10)
	b.want(0, 0)
	b.Enqueue(0, pipeline.IO{Tag: 2, Tenant: 1, Op: pipeline.Write, LenBytes: 4096})
	b.Cancel(0, 1)
	if at, ok := b.NextWake(); at != 0 || !ok {
		t.Fatalf("wakes at %d, %v; the write may go now", at, ok)
	}
	b.want(0, 2)
	b.Complete(1000, 0, pipeline.Result{LatencyNS: 1000})
	b.Complete(1000, 2, pipeline.Result{LatencyNS: 1000})
	if b.drr.NumActive() != 0 || b.drr.SlotsInUse(0) != 1 || b.drr.SlotsInUse(1) != 1 {
		t.Errorf("%d active, %d and %d slots in use", b.drr.NumActive(), b.drr.SlotsInUse(0), b.drr.SlotsInUse(1))
	}
	// A tenant whose only I/O is cancelled leaves the round.
	b.read(2000, 3, 0, 4096)
	b.Cancel(2000, 3)
	b.want(2000)
	if b.drr.NumActive() != 0 {
		t.Errorf("%d active", b.drr.NumActive())
	}
}

func TestPausedIOFreesItsPlaceAtTheDevice(t *testing.T) {
	b := newBench(t, 1, 1)
	b.read(0, 0, 0, 4096)
	b.read(0, 1, 0, 4096)
	b.want(0, 0)
	if _, ok := b.NextWake(); ok || b.Limit(0) != pipeline.LimitSSD {
		t.Error("with the device full only a completion helps")
	}
	b.Pause(0, 0)
	b.want(0, 1)
	b.Resume(0, 0)
	if b.atDevice != 2 {
		t.Errorf("%d at the device, want 2", b.atDevice)
	}
	b.Complete(5, 1, pipeline.Result{LatencyNS: 5})
	b.Pause(5, 0)
	b.Complete(5, 0, pipeline.Result{Failed: true}) // its host has disconnected
	if b.atDevice != 0 || b.drr.NumActive() != 0 {
		t.Errorf("%d at the device, %d active, want none", b.atDevice, b.drr.NumActive())
	}
}

func TestFlushesAreReadsOfLengthZeroAndNeverStranded(t *testing.T) {
	b := newBench(t, 64, 2)
	for i := range pipeline.Tag(8) { // all slots of tenant 0
		b.bucket = tokenbucket.NewDual(0, BucketBytes)
		b.read(0, i, 0, 128<<10)
		b.want(0, i)
	}
	for i, op := range []pipeline.Op{pipeline.Flush, pipeline.Deallocate, pipeline.WriteZeroes,
		pipeline.DeallocateRanges} {
		b.Enqueue(0, pipeline.IO{Tag: 8 + pipeline.Tag(i), Op: op, LenBytes: 1 << 40})
	}
	b.want(0)
	if b.Limit(0) != pipeline.LimitSSD {
		t.Errorf("limit %v of a tenant that has all slots, want %v", b.Limit(0), pipeline.LimitSSD)
	}
	b.read(0, 20, 1, 4096)
	if b.Limit(0) != pipeline.LimitShare {
		t.Errorf("limit %v, want %v", b.Limit(0), pipeline.LimitShare)
	}
	b.Cancel(0, 20)
	b.Complete(1000, 0, pipeline.Result{LatencyNS: 1000})
	b.want(1000, 8, 9, 10, 11)
	before := b.CostNS(0)
	for i := pipeline.Tag(1); i < 12; i++ {
		b.Complete(2000, i, pipeline.Result{LatencyNS: 1000})
	}
	if b.drr.NumActive() != 0 || before != 8*128<<10 {
		t.Errorf("%d active and %d bytes charged, want 0 and those of the reads", b.drr.NumActive(), before)
	}
}

func TestLongIOPasses(t *testing.T) {
	b := newBench(t, 64, 1)
	now := int64(0)
	for i := range pipeline.Tag(20) {
		op := pipeline.Read
		if i%2 == 1 {
			op = pipeline.Write
		}
		b.Enqueue(now, pipeline.IO{Tag: i, Op: op, LenBytes: 1 << 20})
		for len(b.Dispatch(now, nil)) == 0 {
			at, ok := b.NextWake()
			if !ok || at <= now {
				t.Fatalf("I/O %d: at %d it wakes at %d, %v", i, now, at, ok)
			}
			now = at
		}
		b.Complete(now, i, pipeline.Result{LatencyNS: 100_000})
	}
	if now < 15e6 || now > 25e6 { // 20 MiB at 1000 MiB/s and more
		t.Errorf("20 MiB took %d ns", now)
	}
}

func TestFailedIOsDoNotChangeEstimates(t *testing.T) {
	b := newBench(t, 64, 1)
	var want, got pipeline.Stats
	b.Stats(&want)
	want.ActiveTenants = 0
	for i := range pipeline.Tag(40) {
		b.Enqueue(0, pipeline.IO{Tag: i, Op: pipeline.Write, LenBytes: 512})
		b.want(0, i)
		b.Complete(0, i, pipeline.Result{LatencyNS: 5_000_000, Failed: true})
	}
	if b.Stats(&got); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestStatsTellWhatIsLearned(t *testing.T) {
	b := newBench(t, 64, 1)
	b.read(0, 0, 0, 4096)
	b.Enqueue(0, pipeline.IO{Tag: 1, Op: pipeline.Write, LenBytes: 8192})
	b.want(0, 0, 1)
	b.Complete(80_000, 0, pipeline.Result{LatencyNS: 80_000})
	var got pipeline.Stats
	b.Complete(80_000, 1, pipeline.Result{LatencyNS: 3_200_000})
	b.Stats(&got)
	want := pipeline.Stats{WriteCost: 9, TargetBytesPerSec: RateMinBytesPerSec}
	want.Class[pipeline.ReadClass] = pipeline.ClassStats{LatencyNS: 40000, ThresholdNS: 1408750,
		State: pipeline.Underutilised}
	want.Class[pipeline.WriteClass] = pipeline.ClassStats{LatencyNS: 1600000, ThresholdNS: 1500000,
		State: pipeline.Overloaded}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if b.bucket.Tokens(tokenbucket.ReadSide) != 0 || b.bucket.Tokens(tokenbucket.WriteSide) != 0 {
		t.Error("an overload leaves tokens")
	}
}

func TestWriteCostFollowsTheDrive(t *testing.T) {
	r := rig{p: New(Config{Depth: 4096}), bytesPerSec: 3_200_000_000, ns: 20_000,
		streams: []stream{{"", pipeline.Write, 4096, 1}, {"", pipeline.Read, 4096, 1}}}
	var reached int64
	r.after = func() {
		if r.p.cost.Cost() == congestion.CostOne && reached == 0 {
			reached = r.now
		}
	}
	r.run(2e9)
	if reached < 1_600_000_000 || reached > 1_601_000_000 {
		t.Errorf("a cost of 1 after %d ns, want 1.6 s", reached)
	}
}

func TestReadsBesideSlowWritesKeepTheWriteCostUp(t *testing.T) {
	for _, c := range []struct {
		reads bool
		want  int64
	}{{true, WriteCostWorst}, {false, WriteCostWorst - congestion.CostOne/2}} {
		b := newBench(t, 64, 1)
		b.Enqueue(0, pipeline.IO{Tag: 0, Op: pipeline.Write, LenBytes: 4096})
		b.want(0, 0)
		b.Complete(300_000, 0, pipeline.Result{LatencyNS: 300_000})
		if c.reads {
			b.read(300_000, 1, 0, 4096)
			b.want(300_000, 1)
			b.Complete(400_000, 1, pipeline.Result{LatencyNS: 100_000})
		}
		b.Dispatch(WriteCostPeriodNS, nil)
		if got := b.cost.Cost(); got != c.want {
			t.Errorf("reads %v: cost %d, want %d", c.reads, got, c.want)
		}
	}
}

func TestWakesWhenTheWriteCostChangesTheSplit(t *testing.T) {
	b := newBench(t, 64, 1)
	const start = WriteCostPeriodNS - 1_000_000 // the period began at 0
	b.cost.Advance(0)
	b.bucket.Refill(start)
	b.bucket.Take(tokenbucket.ReadSide, BucketBytes)
	b.bucket.Take(tokenbucket.WriteSide, BucketBytes)
	b.rate = congestion.NewRate(congestion.RateLimits{StartBytesPerSec: RateMinBytesPerSec,
		MinBytesPerSec: RateMinBytesPerSec, MaxBytesPerSec: RateMinBytesPerSec, WindowBytes: 1 << 40})
	b.bucket.SetRate(RateMinBytesPerSec)
	b.Enqueue(start, pipeline.IO{Tag: 0, Op: pipeline.Write, LenBytes: 16 << 10}) // 3 ms at one tenth of 50 MiB/s
	b.want(start)
	if at, ok := b.NextWake(); !ok || at != WriteCostPeriodNS {
		t.Fatalf("wakes at %d, %v, want %d, when the write cost falls", at, ok, int64(WriteCostPeriodNS))
	}
	worst := b.bucket
	b.want(WriteCostPeriodNS)
	at, _ := b.NextWake()
	if before := worst.NextToken(tokenbucket.WriteSide, 16<<10); at >= before {
		t.Errorf("wakes at %d with the lower cost, at %d without", at, before)
	}
	b.want(at, 0)
}

func TestChargesWeightedBytesUntilTheTenantLeaves(t *testing.T) {
	b := newBench(t, 64, 1)
	b.read(0, 0, 0, 4096)
	b.Enqueue(0, pipeline.IO{Tag: 1, Op: pipeline.Write, LenBytes: 4096})
	b.want(0, 0, 1)
	if got := b.CostNS(0); got != 4096+9*4096 {
		t.Errorf("charged %d, want %d", got, 10*4096)
	}
	b.Complete(0, 0, pipeline.Result{LatencyNS: 1})
	b.Complete(0, 1, pipeline.Result{LatencyNS: 1})
	b.RemoveTenant(0, 0)
	b.SetTenant(0, 0, 1)
	if got := b.CostNS(0); got != 0 {
		t.Errorf("a new tenant is charged %d", got)
	}
}

func TestCompletionRateIsWhatTheDeviceDoes(t *testing.T) {
	r := rig{p: New(Config{Depth: 64}), bytesPerSec: 800_000_000, ns: 20_000,
		streams: []stream{{"", pipeline.Read, 128 << 10, 8}}}
	r.run(1e9)
	var s pipeline.Stats
	if r.p.Stats(&s); math.Abs(s.CompletedBytesPerSec/800e6-1) > 0.02 {
		t.Errorf("completes %.0f bytes a second, want 800000000", s.CompletedBytesPerSec)
	}
}

// crowd keeps 64 tenants with 4 reads of 4 KiB each going.
type crowd struct {
	p   *Policy
	now int64
	dst []pipeline.Tag
}

func newCrowd() *crowd {
	c := &crowd{p: New(Config{Depth: 128}), dst: make([]pipeline.Tag, 0, 256)}
	for t := range tenant.ID(64) {
		c.p.SetTenant(0, t, 1)
		for i := range pipeline.Tag(4) {
			c.p.Enqueue(0, c.io(pipeline.Tag(t)*4+i))
		}
	}
	return c
}

func (c *crowd) io(tag pipeline.Tag) pipeline.IO {
	return pipeline.IO{Tag: tag, Tenant: tenant.ID(tag / 4), Op: pipeline.Op(tag & 1), LenBytes: 4096}
}

// turn dispatches what the policy allows, completes those I/Os and enqueues them again. It returns their number.
func (c *crowd) turn() int {
	c.dst = c.p.Dispatch(c.now, c.dst[:0])
	for _, tag := range c.dst {
		c.p.Complete(c.now, tag, pipeline.Result{LatencyNS: 80_000})
		c.p.Enqueue(c.now, c.io(tag))
	}
	if at, ok := c.p.NextWake(); ok {
		c.now = max(c.now, at)
	}
	return len(c.dst)
}

func TestAllocatesNothing(t *testing.T) {
	c := newCrowd()
	if n := testing.AllocsPerRun(1000, func() { c.turn() }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// BenchmarkIO is one I/O from Enqueue to Complete.
func BenchmarkIO(b *testing.B) {
	c := newCrowd()
	b.ReportAllocs()
	for n := 0; n < b.N; {
		n += c.turn()
	}
}
