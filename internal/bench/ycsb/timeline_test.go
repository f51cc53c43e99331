package ycsb

import (
	"context"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestTheTimelineShowsAStall: the operations are in the intervals in which they have ended, with their latency. Those
// of a phase do not count in the next one.
func TestTheTimelineShowsAStall(t *testing.T) {
	w := small()
	w.OperationCount, w.MaxExecution, w.Insert, w.Threads = 0, 300*time.Millisecond, 0, 2
	w.Read, w.Update, w.ReadModifyWrite = 0, 0, 1
	w.Granularity = 20 * time.Millisecond
	db := newMapDB()
	b := open(t, db, w, Config{ContinueOnError: true})
	must(t, b.Load)
	var began atomic.Int64
	const stall = 100 * time.Millisecond
	db.hold = func() bool {
		now := time.Now().UnixNano()
		began.CompareAndSwap(0, now)
		d := time.Duration(now - began.Load())
		return d > stall && d < 2*stall
	}
	db.spoil = func(_ *Op, d *Done) {
		if time.Duration(time.Now().UnixNano()-began.Load()) < stall/2 {
			d.Result, d.Err = Failed, errInterruptedQueue
		}
	}
	p, err := b.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	var ops, failed, most, sum, want float64
	longest, empty := int64(0), 0
	for i, v := range p.Timeline {
		length := min(w.Granularity.Seconds(), p.ElapsedSeconds-v.AtSeconds)
		ops, failed, longest = ops+v.OpsPerSec*length, failed+float64(v.Failed), max(longest, v.MaxNS)
		most, sum = max(most, v.MeanNS), sum+v.MeanNS*v.OpsPerSec*length
		if v.OpsPerSec == 0 && v.MeanNS == 0 {
			empty++
		}
		at := float64(i) * w.Granularity.Seconds()
		if math.Abs(v.AtSeconds-at) > 1e-9 || v.AtSeconds > p.ElapsedSeconds {
			t.Errorf("interval %d begins at %v of %v s", i, v.AtSeconds, p.ElapsedSeconds)
		}
	}
	if math.Abs(ops+failed-float64(p.Operations)) > 0.5 || failed == 0 || failed != float64(p.Failed) {
		t.Errorf("%.1f operations, %.0f failed; in all there were %d, %d failed", ops, failed, p.Operations, p.Failed)
	}
	if empty < 3 || longest < int64(stall)*9/10 || most >= float64(longest) && most > float64(2*stall) {
		t.Errorf("%d intervals without an operation, the longest one has taken %d ns, the greatest mean is %.0f", empty,
			longest, most)
	}
	for _, v := range p.Series {
		if v.Name == readModifyWrite.String() {
			want += v.LatencyNS.Mean * float64(v.Results[OK.String()])
		}
	}
	if math.Abs(sum/want-1) > 0.02 {
		t.Errorf("all latencies add up to %.0f ns, want %.0f", sum, want)
	}
	var text strings.Builder
	if err := (&Report{Run: p}).WriteYCSB(&text); err != nil ||
		strings.Count(text.String(), "[TIMELINE], ") != len(p.Timeline) {
		t.Errorf("%v: %s", err, text.String())
	}
	db.hold, db.spoil = nil, nil
	again := must(t, b.Run)
	ops = 0
	for _, v := range again.Timeline {
		ops += v.OpsPerSec * min(w.Granularity.Seconds(), again.ElapsedSeconds-v.AtSeconds)
	}
	if math.Abs(ops-float64(again.Operations)) > 0.5 {
		t.Errorf("the second run has %d operations, its timeline %.1f", again.Operations, ops)
	}
}
