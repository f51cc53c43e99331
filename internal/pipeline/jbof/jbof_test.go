package jbof

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// TestBookkeepingUnderRandomEvents drives a policy with random events and compares its figures with a simple model.
func TestBookkeepingUnderRandomEvents(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 1))
	for range 60 {
		p := New(Config{Depth: 1 + rng.IntN(64)})
		const tenants = 9
		for i := range tenant.ID(tenants) {
			p.SetTenant(0, i, 1+rng.IntN(5))
		}
		type state uint8
		const (
			none state = iota
			queued
			flying
			paused
		)
		ios := make([]struct {
			state  state
			tenant tenant.ID
		}, 400)
		of := func(s state) (tags []pipeline.Tag) {
			for tag := range ios {
				if ios[tag].state == s {
					tags = append(tags, pipeline.Tag(tag))
				}
			}
			return tags
		}
		pick := func(s state) (pipeline.Tag, bool) {
			tags := of(s)
			if len(tags) == 0 {
				return 0, false
			}
			return tags[rng.IntN(len(tags))], true
		}
		var now int64
		for range 3000 {
			now += rng.Int64N(50_000)
			switch rng.IntN(7) {
			case 0, 1:
				if tag, ok := pick(none); ok {
					ios[tag].state, ios[tag].tenant = queued, tenant.ID(rng.IntN(tenants))
					op := pipeline.Op(rng.IntN(int(pipeline.Ops)))
					p.Enqueue(now, pipeline.IO{Tag: tag, Tenant: ios[tag].tenant, Op: op,
						LenBytes: rng.Int64N(1 << 18)})
				}
			case 2:
				for _, tag := range p.Dispatch(now, nil) {
					if ios[tag].state != queued {
						t.Fatal("dispatched what was not queued")
					}
					ios[tag].state = flying
				}
				if _, wait := p.NextWake(); !wait && len(of(flying)) == 0 && len(of(queued)) > 0 &&
					len(of(paused)) == 0 {
					t.Fatal("an idle drive gets nothing while I/Os are queued")
				}
			case 3, 4:
				if tag, ok := pick(flying); ok {
					ios[tag].state = none
					p.Complete(now, tag,
						pipeline.Result{LatencyNS: 1 + rng.Int64N(1_000_000), Failed: rng.IntN(10) == 0})
				}
			case 5:
				if tag, ok := pick(flying); ok && rng.IntN(2) == 0 {
					ios[tag].state = paused
					p.Pause(now, tag)
				} else if tag, ok := pick(paused); ok {
					if ios[tag].state = flying; rng.IntN(4) == 0 {
						ios[tag].state = none
						p.Complete(now, tag, pipeline.Result{Failed: true})
					} else {
						p.Resume(now, tag)
					}
				}
			case 6:
				if tag, ok := pick(queued); ok && rng.IntN(3) == 0 {
					ios[tag].state = none
					p.Cancel(now, tag)
				}
			}
			if got, want := p.windows[readLane].inflight+p.windows[writeLane].inflight, len(of(flying)); got != want {
				t.Fatalf("%d in flight, want %d", got, want)
			}
			if p.queued != len(of(queued)) {
				t.Fatalf("%d queued, want %d", p.queued, len(of(queued)))
			}
			p.check(t)
		}
		// After all I/Os have ended, nothing may be left.
		for len(of(none)) < len(ios) {
			now += 100_000
			for _, tag := range p.Dispatch(now, nil) {
				ios[tag].state = flying
			}
			for _, s := range []state{flying, paused} {
				for _, tag := range of(s) {
					ios[tag].state = none
					p.Complete(now, tag, pipeline.Result{LatencyNS: 1000})
				}
			}
		}
		for i := range tenant.ID(tenants) {
			if n := p.tenants[i].unitsAtDrive; n != 0 {
				t.Fatalf("tenant %d has nothing left, and %d units at the drive", i, n)
			}
			p.RemoveTenant(now, i)
		}
		if p.windows[0].inflight+p.windows[1].inflight != 0 || p.windows[0].inflightNS+p.windows[1].inflightNS != 0 ||
			p.windows[0].taken+p.windows[1].taken != 0 || p.activeWeight != [lanes]int64{} || p.held != [lanes]int{} ||
			len(p.heaps[0])+len(p.heaps[1]) != 0 {
			t.Fatalf("left over: windows %+v, active weights %d, heaps %v", p.windows, p.activeWeight, p.heaps)
		}
	}
}

// check compares the heaps with the tenants.
func (p *Policy) check(t *testing.T) {
	t.Helper()
	for lane := range p.heaps {
		for i, ten := range p.heaps[lane] {
			q := &p.tenants[ten].queues[lane]
			if int(q.pos) != i || q.n == 0 {
				t.Fatalf("lane %d: tenant %d at %d of the heap believes to be at %d with %d queued", lane, ten, i,
					q.pos, q.n)
			}
			if i > 0 && p.before(lane, ten, p.heaps[lane][(i-1)/2]) {
				t.Fatalf("lane %d: the heap is out of order at %d", lane, i)
			}
		}
		held := 0
		for i := range p.tenants {
			ten := &p.tenants[i]
			q := &ten.queues[lane]
			if q.held {
				held++
				if q.n == 0 || q.pos >= 0 {
					t.Fatalf("lane %d: tenant %d is held with %d queued, at %d of the heap", lane, i, q.n, q.pos)
				}
			}
			if q.n > 0 && q.pos < 0 && ten.paused < pausedIOs && !p.exhausted(ten) {
				t.Fatalf("lane %d: tenant %d has %d queued and is not in the heap", lane, i, q.n)
			}
		}
		if held != p.held[lane] {
			t.Fatalf("lane %d: %d tenants are held, %d are counted", lane, held, p.held[lane])
		}
	}
}

// server is a drive that serves one I/O after the other at known costs.
type server struct {
	p         *Policy
	now       int64
	free      int64
	due       []int64
	tags      []pipeline.Tag
	sizes     map[pipeline.Tag]pipeline.IO
	served    map[tenant.ID]float64 // ns of device time
	cost      func(pipeline.IO) float64
	submitted map[pipeline.Tag]int64
}

func newServer(p *Policy, cost func(pipeline.IO) float64) *server {
	return &server{p: p, cost: cost, sizes: map[pipeline.Tag]pipeline.IO{}, served: map[tenant.ID]float64{},
		submitted: map[pipeline.Tag]int64{}}
}

// run keeps every I/O of ios outstanding for ns.
func (s *server) run(ns int64, ios ...pipeline.IO) {
	end := s.now + ns
	for i, io := range ios {
		io.Tag = pipeline.Tag(i)
		if _, there := s.sizes[io.Tag]; there {
			continue
		}
		s.sizes[io.Tag] = io
		s.p.Enqueue(s.now, io)
	}
	for s.now < end {
		for _, tag := range s.p.Dispatch(s.now, nil) {
			s.free = max(s.free, s.now) + int64(s.cost(s.sizes[tag]))
			s.due, s.tags = append(s.due, s.free), append(s.tags, tag)
			s.submitted[tag] = s.now
		}
		if len(s.due) == 0 {
			panic("an idle drive")
		}
		s.now = s.due[0]
		tag := s.tags[0]
		s.due, s.tags = s.due[1:], s.tags[1:]
		io := s.sizes[tag]
		s.served[io.Tenant] += s.cost(io)
		s.p.Complete(s.now, tag, pipeline.Result{LatencyNS: s.now - s.submitted[tag]})
		s.p.Enqueue(s.now, io)
	}
}

func repeat(n int, io pipeline.IO) []pipeline.IO { return slices.Repeat([]pipeline.IO{io}, n) }

// TestSharesFollowWeightsNotSizesDepthsOrKinds: device time is shared by weight, whatever the load.
func TestSharesFollowWeightsNotSizesDepthsOrKinds(t *testing.T) {
	p := New(Config{})
	weights := []int{1, 2, 4, 1, 1}
	for i, w := range weights {
		p.SetTenant(0, tenant.ID(i), w)
	}
	cost := func(io pipeline.IO) float64 {
		if io.Op == pipeline.Write {
			return 5 * float64(io.LenBytes) / 4096 * 2500
		}
		return 1200 + 0.31*float64(io.LenBytes)
	}
	var ios []pipeline.IO
	ios = append(ios, repeat(128, pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: 4096})...)
	ios = append(ios, repeat(32, pipeline.IO{Tenant: 1, Op: pipeline.Read, LenBytes: 131072})...)
	ios = append(ios, repeat(64, pipeline.IO{Tenant: 2, Op: pipeline.Write, LenBytes: 4096})...)
	ios = append(ios, repeat(16, pipeline.IO{Tenant: 3, Op: pipeline.Write, LenBytes: 131072})...)
	ios = append(ios, repeat(40, pipeline.IO{Tenant: 4, Op: pipeline.Read, LenBytes: 130560})...)
	s := newServer(p, cost)
	s.run(3e9, ios...) // learns what writes cost
	before := map[tenant.ID]float64{}
	for k, v := range s.served {
		before[k] = v
	}
	began := s.now
	s.run(3e9, ios...)
	total := float64(s.now - began)
	for i, w := range weights {
		got, want := (s.served[tenant.ID(i)]-before[tenant.ID(i)])/total, float64(w)/9
		if got < 0.95*want || got > 1.05*want {
			t.Errorf("tenant %d of weight %d has %.3f of the drive, want %.3f", i, w, got, want)
		}
	}
}

// TestWriteCostIsLearned: it rises within half a second and falls within two.
func TestWriteCostIsLearned(t *testing.T) {
	p := New(Config{})
	p.SetTenant(0, 0, 1)
	p.SetTenant(0, 1, 1)
	writeCost, read := 9.0, p.costs.UnitNS()
	s := newServer(p, func(io pipeline.IO) float64 {
		if io.Op == pipeline.Write {
			return writeCost * read
		}
		return read
	})
	ios := append(repeat(64, pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: 4096}),
		repeat(64, pipeline.IO{Tenant: 1, Op: pipeline.Write, LenBytes: 4096})...)
	cost := func() float64 {
		var st pipeline.Stats
		p.Stats(&st)
		return st.WriteCost
	}
	s.run(500e6, ios...)
	if got := cost(); got < 8.5 || got > 9.5 {
		t.Errorf("write cost after 0.5 s is %.2f, want 9", got)
	}
	writeCost = 1
	s.run(2e9, ios...)
	if got := cost(); got < 0.95 || got > 1.1 {
		t.Errorf("write cost 2 s after writes became cheap is %.2f, want 1", got)
	}
}

// TestCalibrationFindsTheDrive: its parameters and the depth at which it is busy.
func TestCalibrationFindsTheDrive(t *testing.T) {
	var c Calibration
	var now, free int64
	type read struct{ at, done int64 }
	var reads []read
	for !c.Done() {
		for {
			n, ok := c.Next(now)
			if !ok {
				break
			}
			free = max(free, now) + 1200 + n*31/100
			reads = append(reads, read{now, free + 85_000})
		}
		now = reads[0].done
		c.Complete(now, now-reads[0].at)
		reads = reads[1:]
	}
	got := c.Profile()
	if got.ReadNS < 1150 || got.ReadNS > 1250 || got.ReadByteNS < 0.30 || got.ReadByteNS > 0.32 {
		t.Errorf("a read costs %.0f ns and %.3f ns a byte, want 1200 and 0.31", got.ReadNS, got.ReadByteNS)
	}
	if got.Depth != 64 || got.LatencyNS < 87_000 || got.LatencyNS > 88_000 {
		t.Errorf("busy at depth %d with a lone latency of %d ns, want 64 and 87469", got.Depth, got.LatencyNS)
	}
	if now > 500e6 {
		t.Errorf("it took %v", time.Duration(now))
	}
}

// TestCalibrationFindsASlowDrive: it lasts until enough reads are done, and not for a fixed time.
func TestCalibrationFindsASlowDrive(t *testing.T) {
	for _, slower := range []int64{10, 50, 200} {
		var c Calibration
		var now, free int64
		type read struct{ at, done int64 }
		var reads []read
		for !c.Done() {
			for n, ok := c.Next(now); ok; n, ok = c.Next(now) {
				free = max(free, now) + slower*(1200+n*31/100)
				reads = append(reads, read{now, free + slower*85_000})
			}
			now = reads[0].done
			c.Complete(now, now-reads[0].at)
			reads = reads[1:]
		}
		f := float64(slower)
		if got := c.Profile(); math.Abs(got.ReadNS/f-1200) > 50 || math.Abs(got.ReadByteNS/f-0.31) > 0.01 {
			t.Errorf("slower by %d a read costs %.0f ns and %.3f ns a byte, want 1200 and 0.31 times as much", slower,
				got.ReadNS, got.ReadByteNS)
		}
	}
}

// TestCalibrationIsNotMisledByOtherWork: another load occupies the drive for a while, and the result is still right. A
// window of too few reads would cost most of the drive's rate.
func TestCalibrationIsNotMisledByOtherWork(t *testing.T) {
	for from := int64(0); from < 300e6; from += 10e6 {
		var c Calibration
		var now, free int64
		type read struct{ at, done int64 }
		var reads []read
		for !c.Done() {
			for n, ok := c.Next(now); ok; n, ok = c.Next(now) {
				ns := 1200 + n*31/100
				if free = max(free, now); free >= from && free < from+50e6 {
					ns *= 4
				}
				free += ns
				reads = append(reads, read{now, free + 85_000})
			}
			now = reads[0].done
			c.Complete(now, now-reads[0].at)
			reads = reads[1:]
		}
		got := c.Profile()
		if got.ReadNS < 1140 || got.ReadNS > 1260 || got.ReadByteNS < 0.30 || got.ReadByteNS > 0.32 ||
			got.Depth != 64 || got.LatencyNS < 87_000 || got.LatencyNS > 88_000 {
			t.Errorf("other work from %v on: %+v, want reads of 1200 ns and 0.31 ns a byte, 87469 ns, depth 64",
				time.Duration(from), got)
		}
	}
}

func TestNothingIsAllocated(t *testing.T) {
	h := newHot(64)
	if n := testing.AllocsPerRun(100, func() { h.run(1000) }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// hot keeps the tenants' I/Os in motion as fast as the policy allows.
type hot struct {
	p        *Policy
	now      int64
	dst      []pipeline.Tag
	ios      []pipeline.IO
	inflight []pipeline.Tag
}

func newHot(tenants int) *hot {
	h := &hot{p: New(Config{}), dst: make([]pipeline.Tag, 0, 256)}
	for i := range tenants {
		h.p.SetTenant(0, tenant.ID(i), 1)
		for range 8 {
			io := pipeline.IO{Tag: pipeline.Tag(len(h.ios)), Tenant: tenant.ID(i), Op: pipeline.Op(i % 4 / 3),
				LenBytes: 4096 << (i % 3)}
			h.ios = append(h.ios, io)
			h.p.Enqueue(0, io)
		}
	}
	h.inflight = make([]pipeline.Tag, 0, 1024)
	return h
}

func (h *hot) run(n int) {
	for range n {
		h.now += 500
		h.dst = h.p.Dispatch(h.now, h.dst[:0])
		h.inflight = append(h.inflight, h.dst...)
		tag := h.inflight[0]
		copy(h.inflight, h.inflight[1:])
		h.inflight = h.inflight[:len(h.inflight)-1]
		h.p.Complete(h.now, tag, pipeline.Result{LatencyNS: 100_000})
		h.p.Enqueue(h.now, h.ios[tag])
	}
}

func BenchmarkRound(b *testing.B) {
	for _, tenants := range []int{1, 16, 64, 1024} {
		b.Run(fmt.Sprintf("tenants=%d", tenants), func(b *testing.B) {
			h := newHot(tenants)
			b.ReportAllocs()
			b.ResetTimer()
			h.run(b.N)
		})
	}
}
