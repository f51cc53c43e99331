package baseline

import (
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// stream is a tenant that keeps a number of equal I/Os outstanding.
type stream struct {
	op       pipeline.Op
	lenBytes int64
	depth    int
	weight   int
	thinkNS  int64 // from a completion to the next I/O
}

// rig drives a policy over a device that serves its I/Os one after the other, each in a time given by service, and
// completes each a fixed time later.
type rig struct {
	p       pipeline.Policy
	service func(pipeline.Op, int64) int64
	ns      int64
	streams []stream

	now, busyUntil int64
	events         []event
	ios            []int64 // completed, by stream
	owner          []int   // by tag
}

type event struct {
	at   int64
	tag  pipeline.Tag
	done bool // completion, not arrival
}

func (r *rig) at(e event) {
	i, _ := slices.BinarySearchFunc(r.events, e, func(a, b event) int {
		if a.at <= b.at {
			return -1
		}
		return 1
	})
	r.events = slices.Insert(r.events, i, e)
}

// run drives the policy until a time and returns the I/Os completed, by stream.
func (r *rig) run(until int64) []int64 {
	r.ios = make([]int64, len(r.streams))
	for i, s := range r.streams {
		r.p.SetTenant(0, tenant.ID(i), max(s.weight, 1))
		for range s.depth {
			r.at(event{at: 0, tag: pipeline.Tag(len(r.owner))})
			r.owner = append(r.owner, i)
		}
	}
	var dst []pipeline.Tag
	for {
		wake, ok := r.p.NextWake()
		if len(r.events) > 0 && (!ok || r.events[0].at <= wake) {
			e := r.events[0]
			r.events = r.events[1:]
			r.now = e.at
			i := r.owner[e.tag]
			if e.done {
				r.p.Complete(r.now, e.tag, pipeline.Result{LatencyNS: 1})
				r.ios[i]++
				r.at(event{at: r.now + r.streams[i].thinkNS, tag: e.tag})
			} else {
				r.p.Enqueue(r.now, pipeline.IO{Tag: e.tag, Tenant: tenant.ID(i), Op: r.streams[i].op,
					LenBytes: r.streams[i].lenBytes})
			}
		} else if ok {
			r.now = max(r.now, wake)
		} else {
			panic("stranded")
		}
		if r.now > until {
			return r.ios
		}
		dst = r.p.Dispatch(r.now, dst[:0])
		for _, tag := range dst {
			s := r.streams[r.owner[tag]]
			r.busyUntil = max(r.busyUntil, r.now) + r.service(s.op, s.lenBytes)
			r.at(event{at: r.busyUntil + r.ns, tag: tag, done: true})
		}
	}
}

func within(t *testing.T, what string, got, want, percent float64) {
	t.Helper()
	if got < want*(1-percent/100) || got > want*(1+percent/100) {
		t.Errorf("%s: %.1f, want %.1f within %v %%", what, got, want, percent)
	}
}

// each runs a test for each policy.
func each(t *testing.T, depth int, f func(*testing.T, pipeline.Policy)) {
	t.Run("reflex", func(t *testing.T) { f(t, NewReFlex(ReFlexConfig{Depth: depth})) })
	t.Run("flashfq", func(t *testing.T) { f(t, NewFlashFQ(FlashFQConfig{Depth: depth})) })
	t.Run("iocost", func(t *testing.T) { f(t, NewIOCost(IOCostConfig{Depth: depth})) })
}

// TestNothingIsLostOrStranded drives each policy with random events and compares its counts.
func TestNothingIsLostOrStranded(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	const depth, tenants, tags = 7, 6, 80
	each(t, depth, func(t *testing.T, p pipeline.Policy) {
		var now int64
		owner := map[pipeline.Tag]tenant.ID{}
		known := map[tenant.ID]bool{}
		var queued, device, paused, dst []pipeline.Tag
		pick := func(from *[]pipeline.Tag) pipeline.Tag {
			i := rng.IntN(len(*from))
			tag := (*from)[i]
			*from = slices.Delete(*from, i, i+1)
			return tag
		}
		dispatch := func() {
			wake, ok := p.NextWake()
			before := len(device)
			dst = p.Dispatch(now, append(dst[:0], 4711))
			if dst[0] != 4711 {
				t.Fatal("dispatch does not append")
			}
			if len(dst) > 1 && (!ok || wake > now) {
				t.Fatalf("dispatched %d at %d, but wakes at %d, %v", len(dst)-1, now, wake, ok)
			}
			for _, tag := range dst[1:] {
				i := slices.Index(queued, tag)
				if i < 0 {
					t.Fatalf("%d is not queued", tag)
				}
				// I/Os of one tenant keep their order.
				if slices.ContainsFunc(queued[:i], func(x pipeline.Tag) bool { return owner[x] == owner[tag] }) {
					t.Fatalf("%d overtakes one of its tenant's", tag)
				}
				queued = slices.Delete(queued, i, i+1)
				device = append(device, tag)
			}
			if len(dst) > 1 && len(device) > depth {
				t.Fatalf("%d at the device after %d, at most %d", len(device), before, depth)
			}
		}
		complete := func(from *[]pipeline.Tag) {
			if len(*from) > 0 {
				tag := pick(from)
				delete(owner, tag)
				p.Complete(now, tag, pipeline.Result{LatencyNS: 1})
			}
		}
		check := func() {
			has := map[tenant.ID]bool{}
			for _, o := range owner {
				has[o] = true
			}
			var s pipeline.Stats
			if p.Stats(&s); s.ActiveTenants != len(has) {
				t.Fatalf("%d active, want %d", s.ActiveTenants, len(has))
			}
		}
		for range 20_000 {
			now += rng.Int64N(60_000)
			switch k := rng.IntN(20); {
			case k < 7:
				ten, tag := tenant.ID(rng.IntN(tenants)), pipeline.Tag(rng.IntN(tags))
				if _, used := owner[tag]; !used && known[ten] {
					owner[tag] = ten
					queued = append(queued, tag)
					p.Enqueue(now, pipeline.IO{Tag: tag, Tenant: ten, Op: pipeline.Op(rng.IntN(int(pipeline.Ops))),
						LenBytes: 512 << rng.IntN(10)})
				}
			case k < 12:
				dispatch()
			case k < 15:
				complete(&device)
			case k == 15:
				complete(&paused)
			case k == 16 && len(device) > 0:
				tag := pick(&device)
				p.Pause(now, tag)
				paused = append(paused, tag)
			case k == 17 && len(paused) > 0:
				tag := pick(&paused)
				p.Resume(now, tag)
				device = append(device, tag)
			case k == 18 && len(queued) > 0:
				i := rng.IntN(len(queued)) // the order of the others stays
				tag := queued[i]
				queued = slices.Delete(queued, i, i+1)
				delete(owner, tag)
				p.Cancel(now, tag)
			case k == 19:
				ten := tenant.ID(rng.IntN(tenants))
				busy := false
				for _, o := range owner {
					busy = busy || o == ten
				}
				if !known[ten] || rng.IntN(2) == 0 {
					p.SetTenant(now, ten, 1+rng.IntN(4))
					known[ten] = true
					if f, ok := p.(*ReFlex); ok && rng.IntN(3) == 0 {
						if err := f.Reserve(ten, rng.Int64N(2)*rng.Int64N(200_000)); err != nil &&
							!errors.Is(err, ErrOverbooked) {
							t.Fatal(err)
						}
					}
				} else if !busy {
					p.RemoveTenant(now, ten)
					delete(known, ten)
				}
			}
			check()
		}
		for len(owner) > 0 {
			dispatch()
			if len(device)+len(paused) > 0 {
				complete(&device)
				complete(&paused)
				continue
			}
			if len(queued) > 0 {
				at, ok := p.NextWake()
				if !ok {
					t.Fatalf("%d I/Os are stranded", len(queued))
				}
				now = max(now, at)
			}
		}
		check()
	})
}

func TestLimitsAndCredit(t *testing.T) {
	each(t, 1, func(t *testing.T, p pipeline.Policy) {
		for i := range tenant.ID(2) {
			p.SetTenant(0, i, 1)
			p.Enqueue(0, pipeline.IO{Tag: pipeline.Tag(i), Tenant: i, LenBytes: 4096})
		}
		if got := p.Dispatch(1e9, nil); len(got) != 1 {
			t.Fatalf("dispatched %v of a depth of 1", got)
		}
		var limits [2]pipeline.Limit
		for i := range limits {
			limits[i] = p.Limit(tenant.ID(i))
		}
		if !slices.Contains(limits[:], pipeline.Unlimited) || !slices.Contains(limits[:], pipeline.LimitSSD) {
			t.Errorf("limits %v, want one without and one that waits for the SSD", limits)
		}
		if p.Credit(0) != 0 {
			t.Error("it grants credit")
		}
	})
}

func TestPauseWithoutDispatchPanics(t *testing.T) {
	each(t, 1, func(t *testing.T, p pipeline.Policy) {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		p.SetTenant(0, 0, 1)
		p.Enqueue(0, pipeline.IO{})
		p.Pause(0, 0)
	})
}

// crowd keeps 64 tenants with 4 I/Os of 4 KiB each going.
type crowd struct {
	p   pipeline.Policy
	now int64
	dst []pipeline.Tag
}

func newCrowd(p pipeline.Policy) *crowd {
	c := &crowd{p: p, dst: make([]pipeline.Tag, 0, 256)}
	for t := range tenant.ID(64) {
		p.SetTenant(0, t, 1)
		for i := range pipeline.Tag(4) {
			p.Enqueue(0, c.io(pipeline.Tag(t)*4+i))
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
	each(t, 128, func(t *testing.T, p pipeline.Policy) {
		c := newCrowd(p)
		if n := testing.AllocsPerRun(1000, func() { c.turn() }); n != 0 {
			t.Errorf("%v allocations, want 0", n)
		}
	})
}

// BenchmarkIO is one I/O from Enqueue to Complete.
func BenchmarkIO(b *testing.B) {
	for _, p := range []pipeline.Policy{NewReFlex(ReFlexConfig{Depth: 128}), NewFlashFQ(FlashFQConfig{Depth: 128}),
		NewIOCost(IOCostConfig{Depth: 128})} {
		b.Run(p.Name(), func(b *testing.B) {
			c := newCrowd(p)
			b.ReportAllocs()
			for n := 0; n < b.N; {
				n += c.turn()
			}
		})
	}
}
