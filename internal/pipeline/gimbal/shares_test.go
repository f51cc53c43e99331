package gimbal

import (
	"fmt"
	"math"
	"testing"

	"jbofd/internal/congestion"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// stream is a tenant that keeps a number of equal I/Os outstanding.
type stream struct {
	name     string
	op       pipeline.Op
	lenBytes int64
	depth    int
}

func read(lenBytes int64) stream {
	return stream{fmt.Sprintf("%dK read", lenBytes>>10), pipeline.Read, lenBytes, int(8 << 20 / lenBytes)}
}

func write(lenBytes int64) stream {
	s := read(lenBytes)
	s.name, s.op = fmt.Sprintf("%dK write", lenBytes>>10), pipeline.Write
	return s
}

// rig drives a Policy over a device that transfers at a fixed bandwidth, one I/O after the other, and
// completes each a fixed time later.
type rig struct {
	p               *Policy
	bytesPerSec, ns int64
	// rate and cost, if not 0, are kept fixed.
	rate, cost int64
	// pollNS, if not 0, is the interval of a poller that dispatches only if few bytes are outstanding, and replaces the
	// policy's own wake-up.
	pollNS  int64
	streams []stream
	// after, if set, is called after each event.
	after func()

	now, busyUntil int64
	pollAt         int64
	flight         []arrival
	owner          []int   // by tag
	done           []int64 // bytes completed, by stream
	outstanding    int64
	dst            []pipeline.Tag
}

type arrival struct {
	at, latencyNS int64
	tag           pipeline.Tag
}

func (r *rig) pin() {
	if r.rate != 0 {
		r.p.rate = congestion.NewRate(congestion.RateLimits{StartBytesPerSec: r.rate, MinBytesPerSec: r.rate,
			MaxBytesPerSec: r.rate, WindowBytes: 1 << 40})
		r.p.bucket.SetRate(r.rate)
	}
	if r.cost != 0 {
		r.p.cost = congestion.NewWriteCost(congestion.CostLimits{Worst: r.cost, PeriodNS: 1 << 60})
		r.p.estimate(r.now)
		r.p.bucket.SetWriteCost(r.cost)
	}
}

func (r *rig) start() {
	r.pin()
	r.done = make([]int64, len(r.streams))
	for i, s := range r.streams {
		r.p.SetTenant(0, tenant.ID(i), 1)
		for range s.depth {
			tag := pipeline.Tag(len(r.owner))
			r.owner = append(r.owner, i)
			r.enqueue(tag)
		}
	}
}

func (r *rig) enqueue(tag pipeline.Tag) {
	s := r.streams[r.owner[tag]]
	r.p.Enqueue(r.now, pipeline.IO{Tag: tag, Tenant: tenant.ID(r.owner[tag]), Op: s.op, LenBytes: s.lenBytes})
	r.dispatch()
}

func (r *rig) dispatch() {
	r.dst = r.p.Dispatch(r.now, r.dst[:0])
	for _, tag := range r.dst {
		n := r.streams[r.owner[tag]].lenBytes
		r.outstanding += n
		r.busyUntil = max(r.busyUntil, r.now) + n*1e9/r.bytesPerSec
		r.flight = append(r.flight, arrival{at: r.busyUntil + r.ns, latencyNS: r.busyUntil + r.ns - r.now, tag: tag})
	}
	if r.after != nil {
		r.after()
	}
}

// run drives the policy until a time and returns the MB/s of the second half, by stream.
func (r *rig) run(until int64) []float64 {
	r.start()
	half := make([]int64, len(r.streams))
	for r.now < until {
		wake, ok := r.p.NextWake()
		if r.pollNS != 0 {
			wake, ok = r.pollAt, true
		}
		if len(r.flight) > 0 && (!ok || r.flight[0].at <= wake) {
			a := r.flight[0]
			r.flight = r.flight[1:]
			r.now = a.at
			n := r.streams[r.owner[a.tag]].lenBytes
			r.outstanding -= n
			r.p.Complete(r.now, a.tag, pipeline.Result{LatencyNS: a.latencyNS})
			r.pin()
			r.dispatch()
			r.done[r.owner[a.tag]] += n
			if r.now < until/2 {
				half[r.owner[a.tag]] += n
			}
			r.enqueue(a.tag)
			continue
		}
		if !ok {
			panic("nothing in flight and no time to wake up: stranded")
		}
		r.now = max(r.now, wake)
		if r.pollNS != 0 {
			r.pollAt += r.pollNS
			if r.outstanding > 128<<10 {
				continue
			}
		}
		r.dispatch()
	}
	mbs := make([]float64, len(r.streams))
	for i := range mbs {
		mbs[i] = float64(r.done[i]-half[i]) / float64(until-until/2) * 1e3
	}
	return mbs
}

// TestSharesWhenTokensBind: the rate is pinned to 500 MB/s over a fast device; the shares are those of a strict head of
// line. With a poller instead of the exact wake-up, the rate is limited to one bucket per period.
func TestSharesWhenTokensBind(t *testing.T) {
	for _, c := range []struct {
		a, b         stream
		cost         int64
		exact, timer [2]float64
	}{
		{read(128 << 10), read(4 << 10), 9, [2]float64{250, 250}, [2]float64{131, 131}},
		{read(128 << 10), read(128 << 10), 9, [2]float64{250, 250}, [2]float64{131, 131}},
		{write(128 << 10), read(4 << 10), 9, [2]float64{50, 450}, [2]float64{50, 450}},
		{write(128 << 10), read(4 << 10), 4, [2]float64{100, 400}, [2]float64{100, 400}},
		{write(128 << 10), read(128 << 10), 9, [2]float64{50, 450}, [2]float64{29, 262}},
		{write(4 << 10), read(4 << 10), 9, [2]float64{50, 450}, [2]float64{50, 450}},
		{write(4 << 10), read(4 << 10), 1, [2]float64{250, 250}, [2]float64{250, 250}},
		{write(128 << 10), write(4 << 10), 9, [2]float64{250, 250}, [2]float64{131, 66}},
	} {
		run := func(pollNS int64) []float64 {
			r := rig{p: New(Config{Depth: 4096}), bytesPerSec: 3_200_000_000, ns: 20_000, rate: 500_000_000,
				cost: c.cost * congestion.CostOne, pollNS: pollNS, streams: []stream{c.a, c.b}}
			return r.run(1e9)
		}
		exact, timer := run(0), run(1_000_000)
		t.Logf("%s, %s at %d: %.0f, polled %.0f", c.a.name, c.b.name, c.cost, exact, timer)
		for i := range exact {
			if math.Abs(exact[i]/c.exact[i]-1) > 0.05 {
				t.Errorf("%s, %s at %d: %.0f MB/s, want %.0f", c.a.name, c.b.name, c.cost, exact, c.exact)
			}
			if math.Abs(timer[i]/c.timer[i]-1) > 0.05 {
				t.Errorf("%s, %s at %d, polled: %.0f MB/s, want %.0f", c.a.name, c.b.name, c.cost, timer, c.timer)
			}
		}
	}
}
