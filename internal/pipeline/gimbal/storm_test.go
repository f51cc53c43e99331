package gimbal

import (
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/congestion"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/tokenbucket"
)

// storm drives a Policy with random events and checks its invariants after each.
type storm struct {
	t                      *testing.T
	rng                    *rand.Rand
	p                      *Policy
	now                    int64
	owner                  map[pipeline.Tag]tenant.ID
	queued, device, paused []pipeline.Tag
	known                  map[tenant.ID]bool
	dst                    []pipeline.Tag
	maxTags, maxTenants    int
}

func pick[T any](rng *rand.Rand, from *[]T) T {
	i := rng.IntN(len(*from))
	x := (*from)[i]
	*from = slices.Delete(*from, i, i+1)
	return x
}

func (s *storm) enqueue() {
	t := tenant.ID(s.rng.IntN(s.maxTenants))
	tag := pipeline.Tag(s.rng.IntN(s.maxTags))
	if _, used := s.owner[tag]; used || !s.known[t] {
		return
	}
	s.owner[tag] = t
	s.queued = append(s.queued, tag)
	s.p.Enqueue(s.now, pipeline.IO{Tag: tag, Tenant: t, Op: pipeline.Op(s.rng.IntN(int(pipeline.Ops))),
		LenBytes: 512 << s.rng.IntN(12)})
}

func (s *storm) dispatch() {
	wake, ok := s.p.NextWake()
	full := s.p.atDevice >= s.p.depth
	s.dst = s.p.Dispatch(s.now, s.dst[:0])
	if len(s.dst) > 0 && (full || !ok || wake > s.now) {
		s.t.Fatalf("dispatched %d at %d with the device full %v, wake %d, %v", len(s.dst), s.now, full, wake, ok)
	}
	for _, tag := range s.dst {
		i := slices.Index(s.queued, tag)
		if i < 0 {
			s.t.Fatalf("dispatched %d, which is not queued", tag)
		}
		s.queued = slices.Delete(s.queued, i, i+1)
		s.device = append(s.device, tag)
	}
}

func (s *storm) complete(from *[]pipeline.Tag) {
	if len(*from) == 0 {
		return
	}
	tag := pick(s.rng, from)
	delete(s.owner, tag)
	res := pipeline.Result{LatencyNS: s.rng.Int64N(400_000), Failed: s.rng.IntN(10) == 0}
	if s.rng.IntN(50) == 0 {
		res.LatencyNS *= 20
	}
	s.p.Complete(s.now, tag, res)
}

func (s *storm) step() {
	s.now += s.rng.Int64N(20_000)
	switch k := s.rng.IntN(20); {
	case k < 7:
		s.enqueue()
	case k < 12:
		s.dispatch()
	case k < 15:
		s.complete(&s.device)
	case k == 15:
		s.complete(&s.paused)
	case k == 16 && len(s.device) > 0:
		tag := pick(s.rng, &s.device)
		s.p.Pause(s.now, tag)
		s.paused = append(s.paused, tag)
	case k == 17 && len(s.paused) > 0:
		tag := pick(s.rng, &s.paused)
		s.p.Resume(s.now, tag)
		s.device = append(s.device, tag)
	case k == 18 && len(s.queued) > 0:
		tag := pick(s.rng, &s.queued)
		delete(s.owner, tag)
		s.p.Cancel(s.now, tag)
	case k == 19:
		t := tenant.ID(s.rng.IntN(s.maxTenants))
		busy := false
		for _, o := range s.owner {
			busy = busy || o == t
		}
		if s.known[t] && !busy {
			s.p.RemoveTenant(s.now, t)
			delete(s.known, t)
		} else if !s.known[t] {
			s.p.SetTenant(s.now, t, 1)
			s.known[t] = true
		}
	}
	s.check()
}

func (s *storm) check() {
	has := map[tenant.ID]bool{}
	for _, t := range s.owner {
		has[t] = true
	}
	p := s.p
	if p.drr.NumActive() != len(has) {
		s.t.Fatalf("%d active, %d have something", p.drr.NumActive(), len(has))
	}
	if p.atDevice != len(s.device) {
		s.t.Fatalf("%d at the device, want %d", p.atDevice, len(s.device))
	}
	if want := max(1, Slots/max(1, len(has))); p.drr.MaxSlots() != want {
		s.t.Fatalf("%d slots each, want %d", p.drr.MaxSlots(), want)
	}
	for side := range tokenbucket.Side(2) {
		if n := p.bucket.Tokens(side); n > BucketBytes || n < -1<<20 {
			s.t.Fatalf("%d tokens", n)
		}
	}
	if r := p.rate.TargetBytesPerSec(); r < RateMinBytesPerSec || r > RateMaxBytesPerSec {
		s.t.Fatalf("target rate %d", r)
	}
	if c := p.cost.Cost(); c < congestion.CostOne || c > WriteCostWorst {
		s.t.Fatalf("write cost %d", c)
	}
	queued, flight := 0, 0
	if p.parked != noTag {
		queued, flight = 1, -1
	}
	for t := range s.known {
		queued += p.drr.Queued(tenant.ID(t))
		flight += p.drr.Inflight(tenant.ID(t))
		if c := p.Credit(t); c < 1 || c > CreditMax {
			s.t.Fatalf("credit %d", c)
		}
		if u := p.drr.SlotsInUse(tenant.ID(t)); u > Slots || !has[t] && u != 1 {
			s.t.Fatalf("tenant %d uses %d slots with %v I/Os", t, u, has[t])
		}
	}
	if queued != len(s.queued) || flight != len(s.device)+len(s.paused) {
		s.t.Fatalf("%d queued, %d in flight, want %d, %d", queued, flight, len(s.queued), len(s.device)+len(s.paused))
	}
}

// drain ends all I/Os, using only completions and the wake-up times that the policy requests.
func (s *storm) drain() {
	for len(s.owner) > 0 {
		s.dispatch()
		if len(s.device)+len(s.paused) > 0 {
			s.complete(&s.device)
			s.complete(&s.paused)
			continue
		}
		if len(s.queued) == 0 {
			continue
		}
		at, ok := s.p.NextWake()
		if !ok {
			s.t.Fatalf("%d I/Os are stranded", len(s.queued))
		}
		s.now = max(s.now, at)
	}
	s.check()
}

func newStorm(t *testing.T, rng *rand.Rand, depth, tenants, tags int) *storm {
	return &storm{t: t, rng: rng, p: New(Config{Depth: depth}), maxTenants: tenants, maxTags: tags,
		owner: map[pipeline.Tag]tenant.ID{}, known: map[tenant.ID]bool{}}
}

func TestNothingIsLostOrStranded(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	for range 30 {
		s := newStorm(t, rng, 1+rng.IntN(100), 1+rng.IntN(12), 150)
		for range 2000 {
			s.step()
		}
		s.drain()
	}
}

func TestTenantsComingAndGoingUnderLoadLeaveNothingBehind(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 1))
	s := newStorm(t, rng, 64, 4, 100)
	for t := range tenant.ID(4) { // the load
		s.p.SetTenant(0, t, 1)
		s.known[t] = true
	}
	tag := pipeline.Tag(1000)
	for i := range 1000 {
		guest := tenant.ID(4 + i%7)
		s.p.SetTenant(s.now, guest, 1)
		s.known[guest] = true
		mine := 1 + rng.IntN(20)
		for range mine {
			s.owner[tag], s.queued = guest, append(s.queued, tag)
			s.p.Enqueue(s.now, pipeline.IO{Tag: tag, Tenant: guest, Op: pipeline.Op(rng.IntN(3)),
				LenBytes: 4096 << rng.IntN(6)})
			tag = 1000 + (tag-999)%64
		}
		s.check()
		for range 20 {
			s.enqueue()
			s.now += rng.Int64N(10_000)
			s.dispatch()
			s.complete(&s.device)
			s.check()
		}
		// The tenant is removed: its queued I/Os are cancelled, and those in flight complete.
		for _, list := range []*[]pipeline.Tag{&s.queued, &s.device} {
			*list = slices.DeleteFunc(*list, func(x pipeline.Tag) bool {
				if s.owner[x] != guest {
					return false
				}
				delete(s.owner, x)
				if list == &s.queued {
					s.p.Cancel(s.now, x)
				} else {
					s.p.Complete(s.now, x, pipeline.Result{Failed: true})
				}
				return true
			})
		}
		s.p.RemoveTenant(s.now, guest)
		delete(s.known, guest)
		s.check()
	}
	s.drain()
	if s.p.drr.NumActive() != 0 || s.p.drr.MaxSlots() != Slots {
		t.Errorf("%d active with %d slots each", s.p.drr.NumActive(), s.p.drr.MaxSlots())
	}
}
