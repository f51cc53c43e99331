package congestion

import (
	"math"
	"testing"
)

var bounds = Thresholds{MinNS: 250_000, MaxNS: 1_500_000}

func TestMonitorVectors(t *testing.T) {
	m := NewMonitor(bounds)
	for i, c := range []struct {
		sample, ewma, threshold, rest int64
		state                         State
	}{
		{80000, 40000, 1408750, 0, Underutilised},
		{80000, 60000, 1324454, 14, Underutilised},
		{120000, 90000, 1247300, 4, Underutilised},
		{400000, 245000, 1184656, 0, Underutilised},
		{900000, 572500, 1146397, 12, Avoidance},
		{900000, 736250, 1120763, 15, Avoidance},
		{200000, 468125, 1079973, 13, Avoidance},
		{200000, 334063, 1033353, 3, Avoidance},
		{3000000, 1667032, 1266676, 0, Overloaded},
		{3000000, 2333516, 1383338, 0, Overloaded},
		{3000000, 2666758, 1441669, 0, Overloaded},
		{100000, 1383379, 1438026, 2, Avoidance},
		{100000, 741690, 1394505, 2, Avoidance},
		{100000, 420845, 1333652, 14, Avoidance},
	} {
		state := m.Observe(c.sample)
		if m.LatencyNS() != c.ewma || m.ThresholdNS() != c.threshold || m.rest != c.rest || state != c.state {
			t.Fatalf("%d: %d, %d, %d, state %d; want %+v", i, m.ewmaNS, m.thresholdNS, m.rest, state, c)
		}
	}
}

func TestMonitorSignalsWhenLatencyCrossesTheThreshold(t *testing.T) {
	m := NewMonitor(bounds)
	for range 500 {
		m.Observe(300_000)
	}
	if th := m.ThresholdNS(); th < 299_999 || th > 300_016 {
		t.Fatalf("the threshold sank to %d, want 300000", th)
	}
	if s := m.Observe(320_000); s != Congested {
		t.Errorf("state %d above the threshold, want %d", s, Congested)
	}
	if th := m.ThresholdNS(); th < 899_000 || th > 901_000 {
		t.Errorf("the threshold jumped to %d, want halfway to 1500000", th)
	}
}

var limits = RateLimits{StartBytesPerSec: 1048576000, MinBytesPerSec: 52428800, MaxBytesPerSec: 4294967296,
	WindowBytes: 16777216}

func TestTargetRateMovesByTheBytesCompleted(t *testing.T) {
	r := NewRate(limits)
	for _, c := range []struct {
		state   State
		n, want int64
	}{
		{Underutilised, 131072, 1048576000 + 8*131072},
		{Avoidance, 4096, 1048576000 + 8*131072 + 4096},
		{Congested, 131072, 1048576000 + 7*131072 + 4096},
		{Avoidance, 1 << 40, 4294967296},
		{Congested, 1 << 40, 52428800},
	} {
		if r.Observe(c.state, c.n) {
			t.Errorf("%+v: tokens are discarded", c)
		}
		if r.TargetBytesPerSec() != c.want {
			t.Errorf("%+v: %d", c, r.TargetBytesPerSec())
		}
	}
}

func TestOverloadCutsTheTargetToWhatCompletes(t *testing.T) {
	r := NewRate(limits)
	for i := range int64(129) { // 129 * 128 KiB in 20 ms and 7 s after a start far from 0
		r.Completed(7e9+i*20_000_000/128, 131072)
	}
	want := int64(129 * 131072 * 50)
	if r.CompletedBytesPerSec() != want {
		t.Fatalf("completes %d, want %d", r.CompletedBytesPerSec(), want)
	}
	if !r.Observe(Overloaded, 4096) {
		t.Error("tokens are kept")
	}
	if r.TargetBytesPerSec() != want-4096 {
		t.Errorf("target %d, want %d", r.TargetBytesPerSec(), want-4096)
	}
	cold := NewRate(limits)
	cold.Observe(Overloaded, 4096)
	if cold.TargetBytesPerSec() != limits.MinBytesPerSec {
		t.Errorf("target %d without a completion rate, want the floor", cold.TargetBytesPerSec())
	}
}

func TestCompletionRateWaitsForItsWindow(t *testing.T) {
	r := NewRate(limits)
	r.Completed(0, limits.WindowBytes)
	r.Completed(1e9, 0)
	if r.CompletedBytesPerSec() != 0 {
		t.Errorf("%d after a window less one byte", r.CompletedBytesPerSec())
	}
	r.Completed(2e9, 1)
	if want := limits.WindowBytes / 2; r.CompletedBytesPerSec() != want {
		t.Errorf("%d, want %d", r.CompletedBytesPerSec(), want)
	}
	// Neither an interval of length 0 nor one whose product overflows 64 bits.
	r.Completed(2e9, 1<<40)
	r.Completed(3e9, 0)
	if r.CompletedBytesPerSec() != 1<<40 {
		t.Errorf("%d, want %d", r.CompletedBytesPerSec(), int64(1)<<40)
	}
	r.Completed(3e9+1, math.MaxInt64/2)
	if r.CompletedBytesPerSec() != 1<<62 {
		t.Errorf("%d, want %d", r.CompletedBytesPerSec(), int64(1)<<62)
	}
}

var costs = CostLimits{Worst: 9 * CostOne, PeriodNS: 100_000_000, BusyNS: 250_000, AloneNS: 1_500_000}

func TestWriteCostFallsByHalvesAndRisesHalfway(t *testing.T) {
	w := NewWriteCost(costs)
	now := int64(12345)
	w.Advance(now)
	for i := range 20 {
		for range 10 {
			w.Write(80_000)
			w.Read()
		}
		now += 100_000_000
		if w.Advance(now-1) || !w.Advance(now) || w.NextNS() != now+100_000_000 {
			t.Fatal("a period ends at the wrong time")
		}
		if want := max(9*CostOne-int64(i+1)*CostOne/2, CostOne); w.Cost() != want {
			t.Fatalf("period %d: cost %d, want %d", i, w.Cost(), want)
		}
	}
	for i, want := range []int64{5 * CostOne, 7 * CostOne, 8 * CostOne, 8.5 * CostOne, 8.75 * CostOne,
		8.875 * CostOne} {
		w.Read()
		w.Write(100_000)
		w.Write(500_000) // 300 µs on average
		now += 100_000_000
		w.Advance(now)
		if w.Cost() != want {
			t.Fatalf("period %d: cost %d, want %d", i, w.Cost(), want)
		}
	}
	if got := w.Weigh(4096); got != 36352 {
		t.Errorf("4096 bytes weigh %d, want 36352", got)
	}
}

func TestWriteCostAloneRisesOnlyAboveTheHigherLatency(t *testing.T) {
	for _, c := range []struct {
		reads     int
		latencyNS int64
		up        bool
	}{
		{0, 300_000, false}, {0, 1_500_000, false}, {0, 1_500_001, true},
		{1, 250_000, false}, {1, 250_001, true}, {1, 0, false},
	} {
		w := NewWriteCost(costs)
		w.cost = 4 * CostOne
		w.Advance(0)
		for range c.reads {
			w.Read()
		}
		if c.latencyNS > 0 {
			w.Write(c.latencyNS)
		}
		w.Advance(100_000_000)
		if up := w.Cost() > 4*CostOne; up != c.up {
			t.Errorf("%+v: cost %d", c, w.Cost())
		}
	}
}

func TestWriteCostCatchesUpOverIdlePeriods(t *testing.T) {
	for periods := int64(1); periods < 25; periods++ {
		for _, into := range []int64{0, 1, 99_999_999} {
			at, each := NewWriteCost(costs), NewWriteCost(costs)
			at.Advance(5)
			each.Advance(5)
			for i := range periods {
				each.Advance(5 + (i+1)*100_000_000)
			}
			at.Advance(5 + periods*100_000_000 + into)
			if at != each {
				t.Errorf("%d periods and %d ns: %+v, want %+v", periods, into, at, each)
			}
		}
	}
	w := NewWriteCost(costs)
	w.Advance(0)
	w.Advance(1 << 61)
	if w.Cost() != CostOne || w.NextNS() <= 1<<61 {
		t.Errorf("after ages: %+v", w)
	}
}

func TestAllocatesNothing(t *testing.T) {
	m, r, w := NewMonitor(bounds), NewRate(limits), NewWriteCost(costs)
	var now int64
	if n := testing.AllocsPerRun(1000, func() {
		now += 1_000_000
		r.Completed(now, 131072)
		r.Observe(m.Observe(now%2_000_000), 131072)
		w.Read()
		w.Write(now % 700_000)
		w.Advance(now)
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}
