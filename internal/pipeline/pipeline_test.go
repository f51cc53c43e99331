package pipeline

import (
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/tenant"
)

const (
	sec  = int64(1_000_000_000)
	msec = int64(1_000_000)
)

func TestCancelTakesOutHeldAndQueuedIOs(t *testing.T) {
	p := New(NewFIFO(1))
	p.SetTenant(0, 1, Settings{Caps: Caps{RWIOsPerSec: 10}})
	for i := range Tag(4) {
		p.Enqueue(0, IO{Tag: i, Tenant: 1, Op: Read, LenBytes: 4096})
		p.Enqueue(0, IO{Tag: 10 + i, Tenant: 2, Op: Read, LenBytes: 4096})
	}
	if got := p.Dispatch(0, nil); len(got) != 1 || got[0] != 0 {
		t.Fatalf("dispatched %v", got)
	}
	for _, tag := range []Tag{1, 3, 2, 12} { // first, last and only held; queued in the middle
		if !p.Cancel(0, tag) {
			t.Errorf("I/O %d cannot be cancelled", tag)
		}
	}
	if p.Cancel(0, 0) || p.Cancel(0, 12) {
		t.Error("an I/O in flight, or cancelled before, is cancelled")
	}
	if _, ok := p.NextWake(0); ok {
		t.Error("wake-up for a held I/O that was cancelled")
	}
	var got []Tag
	for tag := Tag(0); p.Inflight() > 0; {
		p.Complete(sec, tag, Result{})
		if got = p.Dispatch(sec, got); len(got) > 0 {
			tag = got[len(got)-1]
		}
		if len(got) == 3 {
			p.Complete(sec, tag, Result{})
		}
	}
	if !slices.Equal(got, []Tag{10, 11, 13}) || p.Queued() != 0 {
		t.Errorf("after that %v were dispatched, %d are queued", got, p.Queued())
	}
	// The tag is free again, and the cap is as if the cancelled I/O had never existed.
	p.Enqueue(sec, IO{Tag: 2, Tenant: 1, Op: Read})
	if got := p.Dispatch(sec, nil); !slices.Equal(got, []Tag{2}) {
		t.Errorf("dispatched %v", got)
	}
}

func TestATenantIsRemovedWithItsLastIO(t *testing.T) {
	p := New(NewFIFO(1))
	p.SetTenant(0, 3, Settings{Weight: 7, Caps: Caps{RWIOsPerSec: 10}})
	for i := range Tag(3) {
		p.Enqueue(0, IO{Tag: i, Tenant: 3, Op: Read, LenBytes: 1})
	}
	p.Dispatch(0, nil)
	p.RemoveTenant(0, 3)
	p.RemoveTenant(0, 99) // unknown tag: no effect
	var s TenantStats
	if !p.TenantStats(3, &s) || s.Queued != 2 || s.Inflight != 1 || s.Weight != 7 {
		t.Fatalf("a tenant that leaves with I/Os: %+v", s)
	}
	// A tenant that is set again before it is removed stays.
	p.SetTenant(0, 3, Settings{Weight: 9})
	if got := p.Dispatch(0, nil); len(got) != 0 {
		t.Fatalf("dispatched %v at a depth of 1", got)
	}
	p.Complete(0, 0, Result{})
	for tag := Tag(1); tag < 3; tag++ {
		if got := p.Dispatch(0, nil); !slices.Equal(got, []Tag{tag}) {
			t.Fatalf("dispatched %v, want %d", got, tag)
		}
		p.Complete(0, tag, Result{})
	}
	if !p.TenantStats(3, &s) || s.Weight != 9 {
		t.Fatalf("a tenant that was announced again is gone: %+v", s)
	}
	p.RemoveTenant(0, 3)
	if p.Known(3) || len(p.Tenants(nil)) != 0 {
		t.Error("a tenant without I/Os does not leave at once")
	}
	// Cancelling its last I/O also removes it, and its number starts with a new state.
	p.SetTenant(0, 3, Settings{Caps: Caps{RWIOsPerSec: 1}})
	p.Enqueue(0, IO{Tag: 1, Tenant: 3, Op: Read, LenBytes: 1})
	p.Enqueue(0, IO{Tag: 2, Tenant: 3, Op: Read, LenBytes: 1})
	p.RemoveTenant(0, 3)
	p.Cancel(0, 1)
	p.Cancel(0, 2)
	if p.Known(3) || p.Queued() != 0 {
		t.Error("a tenant whose I/Os were cancelled does not leave")
	}
	p.Enqueue(0, IO{Tag: 1, Tenant: 3, Op: Read, LenBytes: 1})
	if p.TenantStats(3, &s); s.Weight != 1 || s.Queued != 1 || s.Wait.SumNS != 0 {
		t.Errorf("the next tenant of that number inherits %+v", s)
	}
}

func TestManyTenantsComeAndGoUnderLoad(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 1))
	p := New(NewFIFO(16))
	now := int64(0)
	busy := map[Tag]tenant.ID{} // queued or in flight
	var device []Tag
	next := Tag(0)
	enqueue := func(ten tenant.ID) {
		p.Enqueue(now, IO{Tag: next, Tenant: ten, Op: Read, LenBytes: 4096})
		busy[next] = ten
		next++
	}
	for round := range 1000 {
		ten := tenant.ID(1 + round%50)
		p.SetTenant(now, ten, Settings{Weight: 1 + rng.IntN(9), Caps: Caps{RWIOsPerSec: int64(rng.IntN(3)) * 1000}})
		for range rng.IntN(8) {
			enqueue(ten)
		}
		enqueue(0)
		p.RemoveTenant(now, ten)
		for range rng.IntN(4) {
			now += rng.Int64N(msec)
			device = p.Dispatch(now, device)
			for len(device) > 0 && rng.IntN(3) > 0 {
				p.Complete(now, device[0], Result{LatencyNS: 1})
				delete(busy, device[0])
				device = device[1:]
			}
		}
		for tag := range busy {
			if rng.IntN(8) == 0 && p.Cancel(now, tag) {
				delete(busy, tag)
			}
		}
		if n := p.Queued() + p.Inflight(); n != len(busy) {
			t.Fatalf("%d I/Os in the pipeline, want %d", n, len(busy))
		}
	}
	for len(busy) > 0 {
		if at, ok := p.NextWake(now); ok {
			now = at
		}
		device = p.Dispatch(now, device)
		for _, tag := range device {
			p.Complete(now, tag, Result{})
			delete(busy, tag)
		}
		device = device[:0]
	}
	if left := p.Tenants(nil); !slices.Equal(left, []tenant.ID{0}) || p.Queued() != 0 || p.Inflight() != 0 ||
		len(p.capped) != 0 {
		t.Errorf("left: tenants %v, %d queued, %d in flight", left, p.Queued(), p.Inflight())
	}
}

func TestLimitedTimeIsWhatATenantWaited(t *testing.T) {
	p := New(NewFIFO(1))
	p.SetTenant(0, 1, Settings{Caps: Caps{RWIOsPerSec: 10}})
	p.SetTenant(0, 2, Settings{})
	limited := func(ten tenant.ID, l Limit) int64 {
		var s TenantStats
		p.TenantStats(ten, &s)
		return s.LimitedNS[l] / msec
	}
	// Ten seconds without I/O count as no tenant's wait.
	now := 10 * sec
	p.Enqueue(now, IO{Tag: 0, Tenant: 1, Op: Read, LenBytes: 4096})
	p.Enqueue(now, IO{Tag: 1, Tenant: 1, Op: Read, LenBytes: 4096})
	got := p.Dispatch(now, nil)
	p.Complete(now, got[0], Result{})
	if n := limited(1, LimitCap); n != 0 {
		t.Errorf("%d ms limited after a pause", n)
	}
	// 60 ms later another tenant comes: the wait for the cap is the first one's.
	now += 60 * msec
	p.Enqueue(now, IO{Tag: 2, Tenant: 2, Op: Read, LenBytes: 4096})
	p.Enqueue(now, IO{Tag: 3, Tenant: 2, Op: Read, LenBytes: 4096})
	p.Dispatch(now, nil)
	if a, b := limited(1, LimitCap), limited(2, LimitSSD); a != 60 || b != 0 {
		t.Errorf("limited %d ms by its cap (want 60), the other %d ms by the SSD (want 0)", a, b)
	}
	var s TenantStats
	if p.TenantStats(1, &s); s.Limit != LimitCap {
		t.Errorf("limited by %v now, want its cap", s.Limit)
	}
	// The device has one place and works for 40 ms: the second tenant's other I/O waits for that. The first tenant's
	// was admitted after 80 ms, because a fifth of its price was saved up, and waits there, too.
	for range 40 {
		now += msec
		p.Dispatch(now, nil)
	}
	if a, b := limited(1, LimitCap), limited(2, LimitSSD); a < 79 || a > 80 || b != 40 {
		t.Errorf("limited %d ms by its cap (want 80), the other %d ms by the SSD (want 40)", a, b)
	}
	if limited(2, LimitCap) != 0 {
		t.Error("a tenant without caps was limited by them")
	}
}

// creditor is a FIFO that gives credit.
type creditor struct {
	*FIFO
	units int
}

func (c creditor) Credit(tenant.ID) int { return c.units }

func TestAnExhaustedCreditLimits(t *testing.T) {
	p := New(creditor{NewFIFO(64), 10})
	now := int64(0)
	limit := func(ten tenant.ID) Limit {
		var s TenantStats
		p.TenantStats(ten, &s)
		return s.Limit
	}
	enqueue := func(tag Tag, ten tenant.ID, op Op, length int64, credited bool) {
		p.Enqueue(now, IO{Tag: tag, Tenant: ten, Op: op, LenBytes: length})
		p.KeepsCredit(ten, credited)
		p.Dispatch(now, nil)
	}
	// A standard host is not limited by a credit that it does not know.
	enqueue(0, 1, Read, 64<<10, false)
	if l := limit(1); l != Unlimited {
		t.Errorf("a standard host is limited by %v", l)
	}
	// A host that observes the credit is limited as soon as its next command would exceed it.
	enqueue(1, 2, Read, 16<<10, true)
	if l := limit(2); l != Unlimited {
		t.Errorf("with 4 of 10 units limited by %v", l)
	}
	enqueue(2, 2, Write, 16<<10-1, true)
	if l := limit(2); l != LimitCredit {
		t.Errorf("with 8 of 10 units, and commands of 4, limited by %v", l)
	}
	// A deallocation moves no data.
	enqueue(3, 3, Deallocate, 1<<30, true)
	if l := limit(3); l != Unlimited {
		t.Errorf("after a deallocation limited by %v", l)
	}
	for range 40 {
		now += msec
		p.Dispatch(now, nil)
	}
	var s TenantStats
	if p.TenantStats(2, &s); s.LimitedNS[LimitCredit] != 40*msec {
		t.Errorf("%d ms limited by the credit, want 40", s.LimitedNS[LimitCredit]/msec)
	}
	p.Complete(now, 1, Result{})
	if l := limit(2); l != Unlimited {
		t.Errorf("with room for one more limited by %v", l)
	}
	for _, tag := range []Tag{0, 2, 3} {
		p.Complete(now, tag, Result{})
	}
	for _, ten := range p.Tenants(nil) {
		if u := p.tenants[ten].units; u != 0 {
			t.Errorf("tenant %d has %d units outstanding without an I/O", ten, u)
		}
	}
}

func TestShareIsThePartOfWhatAllUsed(t *testing.T) {
	p := New(NewFIFO(64))
	share := func(ten tenant.ID) float64 {
		var s TenantStats
		p.TenantStats(ten, &s)
		return s.Share
	}
	tag := Tag(0)
	one := func(now int64, ten tenant.ID, bytes int64) {
		p.Enqueue(now, IO{Tag: tag, Tenant: ten, Op: Read, LenBytes: bytes})
		for _, d := range p.Dispatch(now, nil) {
			p.Complete(now, d, Result{LatencyNS: 1})
		}
	}
	for i := range int64(300) {
		one(i*msec, 1, 3<<12)
		one(i*msec, 2, 1<<12)
	}
	if a, b := share(1), share(2); a < 0.74 || a > 0.76 || b < 0.24 || b > 0.26 {
		t.Errorf("shares %.3f and %.3f, want 0.75 and 0.25", a, b)
	}
	for i := range int64(300) {
		one((300+i)*msec, 2, 1<<12)
	}
	if a, b := share(1), share(2); a != 0 || b != 1 {
		t.Errorf("shares %.3f and %.3f, want 0 and 1", a, b)
	}
	p.Dispatch(900*msec, nil) // looks after a pause
	p.Dispatch(1100*msec, nil)
	if b := share(2); b != 0 {
		t.Errorf("the share of one who has used nothing since is %.3f", b)
	}
}

func TestWaitsAreCounted(t *testing.T) {
	p := New(NewFIFO(64))
	p.SetTenant(0, 1, Settings{Caps: Caps{RWIOsPerSec: 1000}})
	for i := range Tag(3) {
		p.Enqueue(0, IO{Tag: i, Tenant: 1, Op: Read})
	}
	for now := int64(0); p.Queued() > 0; now, _ = p.NextWake(now) {
		p.Dispatch(now, nil)
	}
	var s TenantStats
	p.TenantStats(1, &s)
	// A bucket of a thousand a second saves up 20 tokens, so all are admitted at once.
	if s.Wait.Count[0] != 3 || s.Wait.SumNS != 0 {
		t.Errorf("waits %v", s.Wait)
	}
	p.SetTenant(0, 2, Settings{Caps: Caps{RWIOsPerSec: 10}})
	for i := range Tag(3) {
		p.Enqueue(sec, IO{Tag: 10 + i, Tenant: 2, Op: Read})
	}
	for now := sec; p.Queued() > 0; now, _ = p.NextWake(now) {
		p.Dispatch(now, nil)
	}
	p.TenantStats(2, &s)
	// The first is admitted with a fifth of its price paid, the others 80 ms and 180 ms later, which is below 2^17 and
	// 2^18 µs.
	if s.Wait.Count[0] != 1 || s.Wait.Count[17] != 1 || s.Wait.Count[18] != 1 || s.Wait.SumNS/msec != 260 {
		t.Errorf("waits %v", s.Wait)
	}
	for i := range WaitBuckets - 1 {
		var h WaitHistogram
		h.observe(1000<<i - 1)
		h.observe(1000 << i)
		if h.Count[i] != 1 || h.Count[i+1] != 1 {
			t.Errorf("a wait of %d µs is not on the border of bucket %d: %v", 1<<i, i, h.Count)
		}
	}
}

// rounds makes a pipeline of tenants and returns a function that enqueues, dispatches and completes one I/O.
func rounds(policy Policy, tenants int, caps Caps) func() {
	p := New(policy)
	for i := range tenants {
		p.SetTenant(0, tenant.ID(i), Settings{Weight: 1, Caps: caps})
	}
	const deep = 4
	dst := make([]Tag, 0, tenants*deep)
	device := make([]Tag, 0, 2*tenants*deep)
	now := int64(0)
	for i := range Tag(tenants * deep) {
		p.Enqueue(now, IO{Tag: i, Tenant: tenant.ID(int(i) % tenants), Op: Read, LenBytes: 4096})
	}
	return func() {
		now += 2000
		dst = p.Dispatch(now, dst[:0])
		device = append(device, dst...)
		p.NextWake(now)
		if len(device) == 0 {
			return
		}
		tag := device[0]
		device = append(device[:0], device[1:]...)
		p.Complete(now, tag, Result{LatencyNS: 80_000})
		p.Enqueue(now, IO{Tag: tag, Tenant: tenant.ID(int(tag) % tenants), Op: Read, LenBytes: 4096})
	}
}

func TestAnIOAllocatesNothing(t *testing.T) {
	for _, caps := range []Caps{{}, {RWIOsPerSec: 5000, RWBytesPerSec: 30 << 20}} {
		step := rounds(NewFIFO(32), 64, caps)
		for range 10_000 {
			step()
		}
		if n := testing.AllocsPerRun(10_000, step); n != 0 {
			t.Errorf("caps %+v: %v allocations an I/O, want 0", caps, n)
		}
	}
}

func BenchmarkEnqueueDispatchComplete(b *testing.B) {
	for _, bench := range []struct {
		name string
		caps Caps
	}{{"uncapped", Caps{}}, {"capped", Caps{RWIOsPerSec: 5000, RWBytesPerSec: 30 << 20}}} {
		b.Run("fifo/64tenants/"+bench.name, func(b *testing.B) {
			step := rounds(NewFIFO(32), 64, bench.caps)
			b.ReportAllocs()
			for b.Loop() {
				step()
			}
		})
	}
}
