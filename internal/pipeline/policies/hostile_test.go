package policies

import (
	"flag"
	"math"
	"math/bits"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random test")

// hostile drives a Pipeline only by its events, as a drive does: hosts, tenants and the drive do random things, and
// between events only the wake-ups that NextWake requests happen.
type hostile struct {
	t      *testing.T
	rng    *rand.Rand
	pipe   *pipeline.Pipeline
	now    int64
	events []event
	queued map[pipeline.Tag]bool
	// free is when the drive will have served all its I/Os, unit is roughly the time of one I/O.
	free, unit int64
	maxLen     int64
	tenants    int
	left       int // I/Os to come
}

type event struct {
	at  int64
	tag pipeline.Tag
	do  func(h *hostile, tag pipeline.Tag)
}

// log returns a number below most, with all orders of magnitude equally likely.
func (h *hostile) log(most int64) int64 {
	return h.rng.Int64N(1 << h.rng.IntN(bits.Len64(uint64(most))))
}

func (h *hostile) later(ns int64, tag pipeline.Tag, do func(*hostile, pipeline.Tag)) {
	h.events = append(h.events, event{h.now + ns, tag, do})
}

func (h *hostile) settings() pipeline.Settings {
	s := pipeline.Settings{Weight: 1 + int(h.log(10_000))}
	if h.rng.IntN(3) == 0 {
		s.Caps = pipeline.Caps{RWIOsPerSec: h.rng.Int64N(2) * (10 + h.log(1<<20)),
			RWBytesPerSec:    h.rng.Int64N(2) * (1<<20 + h.log(1<<40)),
			ReadBytesPerSec:  h.rng.Int64N(2) * (1<<20 + h.log(1<<40)),
			WriteBytesPerSec: h.rng.Int64N(2) * (1<<20 + h.log(1<<40))}
	}
	return s
}

func (h *hostile) enqueue(tag pipeline.Tag) {
	if h.left == 0 {
		return
	}
	h.left--
	t := tenant.ID(h.rng.IntN(h.tenants))
	switch h.rng.IntN(60) {
	case 0:
		h.pipe.RemoveTenant(h.now, t)
	case 1, 2:
		h.pipe.SetTenant(h.now, t, h.settings())
	}
	if !h.pipe.Known(t) {
		h.pipe.SetTenant(h.now, t, h.settings())
	}
	h.pipe.Enqueue(h.now, pipeline.IO{Tag: tag, Tenant: t, Op: pipeline.Op(h.rng.IntN(int(pipeline.Ops))),
		LenBytes: 512 + h.log(h.maxLen)})
	h.queued[tag] = true
	if h.rng.IntN(40) == 0 {
		h.later(h.log(1<<22), tag, func(h *hostile, tag pipeline.Tag) {
			if h.queued[tag] {
				if !h.pipe.Cancel(h.now, tag) {
					h.t.Fatalf("%d is queued and cannot be cancelled", tag)
				}
				delete(h.queued, tag)
				h.later(h.log(1<<22), tag, (*hostile).enqueue)
			}
		})
	}
}

func (h *hostile) complete(tag pipeline.Tag) {
	h.pipe.Complete(h.now, tag, pipeline.Result{LatencyNS: h.log(1 << 40), Failed: h.rng.IntN(8) == 0})
	pause := int64(0)
	if h.rng.IntN(100) == 0 {
		pause = h.log(1 << 43)
	}
	h.later(pause, tag, (*hostile).enqueue)
}

// serve gives an I/O to the drive.
func (h *hostile) serve(tag pipeline.Tag) {
	h.free = max(h.free, h.now) + h.log(h.unit)
	h.later(h.free-h.now+h.log(h.unit), tag, (*hostile).complete)
}

func (h *hostile) dispatch(dst []pipeline.Tag) []pipeline.Tag {
	dst = h.pipe.Dispatch(h.now, dst[:0])
	for _, tag := range dst {
		if !h.queued[tag] {
			h.t.Fatalf("%d is dispatched and was not queued", tag)
		}
		delete(h.queued, tag)
		switch h.rng.IntN(6) {
		case 0:
			h.pipe.Pause(h.now, tag)
			h.later(h.log(1<<30), tag, func(h *hostile, tag pipeline.Tag) {
				h.pipe.Resume(h.now, tag)
				h.serve(tag)
			})
		case 1: // its host goes away
			h.pipe.Pause(h.now, tag)
			h.later(h.log(1<<30), tag, (*hostile).complete)
		default:
			h.serve(tag)
		}
	}
	return dst
}

// next processes the next event and reports whether there was one.
func (h *hostile) next() bool {
	first, at := -1, int64(math.MaxInt64)
	for i := range h.events {
		if h.events[i].at < at {
			first, at = i, h.events[i].at
		}
	}
	if wake, ok := h.pipe.NextWake(h.now); ok && wake < at {
		first, at = -1, wake
	}
	if at == math.MaxInt64 {
		return false
	}
	h.now = max(h.now, at)
	if first >= 0 {
		e := h.events[first]
		h.events[first] = h.events[len(h.events)-1]
		h.events = h.events[:len(h.events)-1]
		e.do(h, e.tag)
	}
	return true
}

// TestEveryPolicyDispatchesEveryIO: whatever hosts, tenants, caps and the drive do, every I/O is dispatched, nothing is
// counted twice, and a removed tenant leaves no state.
func TestEveryPolicyDispatchesEveryIO(t *testing.T) {
	t.Logf("-seed %d", *seed)
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(*seed, 0))
			for range 60 {
				p, err := New(name, Config{Depth: 1 + rng.IntN(1<<rng.IntN(9))})
				if err != nil {
					t.Fatal(err)
				}
				h := &hostile{t: t, rng: rng, pipe: pipeline.New(p), queued: map[pipeline.Tag]bool{}, left: 3000,
					tenants: 1 + rng.IntN(9)}
				h.unit, h.maxLen = 1+h.log(1<<31), 1<<(10+rng.IntN(15))
				for tag := range pipeline.Tag(1 + rng.IntN(200)) {
					h.later(h.log(1<<30), tag, (*hostile).enqueue)
				}
				var dst []pipeline.Tag
				steps := 0
				for h.next() {
					dst = h.dispatch(dst)
					if steps++; steps > 1_000_000 {
						t.Fatalf("it is busy with nothing: %d I/Os wait at %d", len(h.queued), h.now)
					}
					if h.pipe.Queued() != len(h.queued) {
						t.Fatalf("%d are queued, it says %d", len(h.queued), h.pipe.Queued())
					}
				}
				if len(h.queued) > 0 || h.left > 0 {
					t.Fatalf("%d I/Os wait, and nothing happens any more", len(h.queued))
				}
				for i := range h.tenants {
					var s pipeline.TenantStats
					if h.pipe.TenantStats(tenant.ID(i), &s) && (s.Queued != 0 || s.Inflight != 0 || s.CostNS < 0 ||
						!(s.Share >= 0 && s.Share <= 1) || s.Credit < 0 || s.Credit > math.MaxUint16) {
						t.Fatalf("tenant %d: %+v", i, s)
					}
					h.pipe.RemoveTenant(h.now, tenant.ID(i))
				}
				var s pipeline.Stats
				if h.pipe.Stats(&s); s.InflightNS != 0 || s.ActiveTenants != 0 || math.IsNaN(s.WriteCost) ||
					len(h.pipe.Tenants(nil)) != 0 {
					t.Fatalf("left over: %+v, tenants %v", s, h.pipe.Tenants(nil))
				}
				for i := range h.tenants { // numbers are used again
					h.pipe.SetTenant(h.now, tenant.ID(i), pipeline.Settings{Weight: 1})
					if h.pipe.TenantStats(tenant.ID(i), new(pipeline.TenantStats)); p.CostNS(tenant.ID(i)) != 0 {
						t.Fatalf("a new tenant has %d ns on its account", p.CostNS(tenant.ID(i)))
					}
				}
			}
		})
	}
}
