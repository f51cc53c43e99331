package drive

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/turn"
)

func TestAbortDoesNotWaitForTheDevice(t *testing.T) {
	g, dev := newGate(t)
	h := newRig(t, rigConfig{depth: 1}, dev).host("a")
	a, b, c := h.io(1, pipeline.Read, 0, 512), h.io(2, pipeline.Read, 0, 512), h.io(3, pipeline.Read, 0, 512)
	h.submit(a, b, c)
	g.exactly(t, 1)
	if !h.r.o.Abort(b) || !h.r.o.Abort(c) {
		t.Fatal("could not abort what is queued")
	}
	for _, io := range h.finish(2) { // the device has completed nothing yet
		if io == a || !errors.Is(io.Err, ErrAborted) || !io.Buf.IsZero() {
			t.Errorf("slot %d is done with %v", io.Slot, io.Err)
		}
	}
	g.let(0, nil)
	h.finish(1)
	h.put(a)
}

func TestAbortDoesNotWaitForABuffer(t *testing.T) {
	r := newRig(t, rigConfig{depth: 8, poolBytes: 4 << 20}, memory)
	h := r.host("a")
	const n = 64
	var ios []*IO
	for i := range n {
		ios = append(ios, h.io(uint32(i), pipeline.Read, 0, 128<<10))
	}
	h.submit(ios...)
	aborted := 0
	for _, io := range ios {
		if r.o.Abort(io) {
			aborted++
		}
	}
	if aborted == 0 {
		t.Fatal("nothing waits for a buffer: the test tests nothing")
	}
	// All end although those that were served return no buffers.
	done := h.finish(n)
	for _, io := range done {
		if errors.Is(io.Err, ErrAborted) {
			aborted--
		}
	}
	if aborted != 0 {
		t.Errorf("%d more were aborted than ended so", aborted)
	}
	h.put(done...)
}

func TestTheTimerReleasesIOsHeldByACap(t *testing.T) {
	r := newRig(t, rigConfig{}, memory)
	h, other := r.host("capped"), r.host("other")
	h.tenant, other.tenant = 1, 2
	const rate, n = 200, 30
	r.o.SetTenant(1, pipeline.Settings{Weight: 1, Caps: pipeline.Caps{RWIOsPerSec: rate}})
	began := time.Now()
	var ios []*IO
	for i := range n {
		ios = append(ios, h.io(uint32(i), pipeline.Read, 0, 128<<10))
	}
	h.submit(ios...)
	_, first := h.take()
	if held := n - len(first); held < n-rate/50-2 {
		t.Errorf("%d of %d are held back by a cap of %d a second", held, n, rate)
	}
	if got, want := r.pool.Stats().InUseBytes, int64(len(first)+1)*(128<<10); got > want { // and a scratch buffer
		t.Errorf("%d bytes of buffers with %d IOs done, want at most %d", got, len(first), want)
	}
	if err := other.run(other.io(0, pipeline.Read, 0, 4096)); err != nil {
		t.Error(err)
	}
	rest := h.finish(n - len(first)) // nothing else causes a turn of the drive
	if took := time.Since(began); took < (n-rate/50-2)*time.Second/rate {
		t.Errorf("%d IOs took %v, the cap is %d a second", n, took, rate)
	}
	h.put(append(first, rest...)...)
	r.o.driver.Lock()
	defer r.o.driver.Unlock()
	if at, ok := r.o.pipe.NextWake(r.o.driver.Now()); ok {
		t.Errorf("with nothing to do the pipeline wants to be woken at %d", at)
	}
}

// timerless is an Env that counts how often timers are set, and never lets one run.
type timerless struct {
	turn.Env
	resets atomic.Int64
}

func (t *timerless) NewTimer(turn.Precision, func()) (turn.Timer, error) { return t, nil }
func (t *timerless) Reset(int64)                                         { t.resets.Add(1) }
func (t *timerless) Close()                                              {}

func TestWithoutCapsNoTimerIsSet(t *testing.T) {
	env := &timerless{Env: turn.Real}
	r := newRig(t, rigConfig{env: env}, memory)
	h := r.host("a")
	for range 100 {
		if err := h.run(h.io(0, pipeline.Read, 0, 4096)); err != nil {
			t.Fatal(err)
		}
	}
	if env.resets.Load() != 0 {
		t.Error("a drive that waits for nothing has set its timer")
	}
}

func TestRemovingACapReleasesHeldIOs(t *testing.T) {
	r := newRig(t, rigConfig{}, memory)
	h := r.host("a")
	h.tenant = 1
	r.o.SetTenant(1, pipeline.Settings{Weight: 1, Caps: pipeline.Caps{RWIOsPerSec: 1}})
	var ios []*IO
	for i := range 50 {
		ios = append(ios, h.io(uint32(i), pipeline.Read, 0, 4096))
	}
	h.submit(ios...)
	if _, done := h.take(); len(done) != 1 {
		t.Fatalf("%d IOs done at a cap of 1 a second", len(done))
	}
	r.o.SetTenant(1, pipeline.Settings{Weight: 1})
	h.finish(49)
	h.put(ios...)
}

func TestARemovedTenantIsForgottenWithItsLastIO(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{depth: 1}, dev)
	h := r.host("a")
	h.tenant = 5
	r.o.SetTenant(5, pipeline.Settings{Weight: 3})
	io := h.io(0, pipeline.Read, 0, 4096)
	h.submit(io)
	g.exactly(t, 1)
	if r.o.RemoveTenant(5) {
		t.Error("forgotten with an IO at the device")
	}
	var s Snapshot
	r.o.Snapshot(&s)
	if s.Policy != "fifo" || len(s.Tenants) != 1 || s.Tenants[0].Tenant != 5 || s.Tenants[0].Inflight != 1 ||
		s.Tenants[0].Weight != 3 {
		t.Errorf("snapshot %+v", s)
	}
	g.let(0, nil)
	h.finish(1)
	h.put(io)
	if !r.o.RemoveTenant(5) || !r.o.RemoveTenant(99) {
		t.Error("not forgotten without an IO")
	}
	if r.o.Snapshot(&s); len(s.Tenants) != 0 {
		t.Errorf("%d tenants left", len(s.Tenants))
	}
}

func TestAClosedDriveHasSnapshots(t *testing.T) {
	r := newRig(t, rigConfig{}, memory)
	h := r.host("a")
	if err := h.run(h.io(0, pipeline.Read, 0, 4096)); err != nil {
		t.Fatal(err)
	}
	if err := r.o.Close(); err != nil {
		t.Fatal(err)
	}
	var s Snapshot
	if r.o.Snapshot(&s); len(s.Tenants) != 1 {
		t.Errorf("snapshot %+v", s)
	}
	r.o.SetTenant(7, pipeline.Settings{Weight: 2})
	if !r.o.RemoveTenant(7) {
		t.Error("a tenant without IOs is not forgotten")
	}
}

func TestTenantsAndSnapshotsFromAnywhereUnderLoad(t *testing.T) {
	r := newRig(t, rigConfig{}, memory)
	const hosts, rounds = 4, 300
	var all sync.WaitGroup
	for i := range hosts {
		h := r.host(string(rune('a' + i)))
		h.tenant = tenant.ID(i)
		all.Go(func() {
			for n := range rounds {
				io := h.io(0, pipeline.Read, 0, 4096)
				h.submit(io)
				if n%7 == 0 {
					r.o.Abort(io)
				}
				h.finish(1)
				h.put(io)
			}
		})
		all.Go(func() {
			for n := range rounds {
				r.o.SetTenant(tenant.ID(i),
					pipeline.Settings{Weight: 1 + n, Caps: pipeline.Caps{RWIOsPerSec: int64(n%3) * 100_000}})
			}
		})
	}
	all.Go(func() {
		var s Snapshot
		for n := range rounds {
			r.o.Snapshot(&s)
			t := tenant.ID(100 + n%100)
			r.o.SetTenant(t, pipeline.Settings{Weight: 2})
			r.o.RemoveTenant(t)
		}
	})
	all.Wait()
	var s Snapshot
	r.o.Snapshot(&s)
	var left []tenant.ID
	for _, ten := range s.Tenants {
		left = append(left, ten.Tenant)
		if ten.Queued != 0 || ten.Inflight != 0 {
			t.Errorf("tenant %d has %d queued and %d in flight with nothing under way", ten.Tenant, ten.Queued,
				ten.Inflight)
		}
	}
	if !slices.Equal(left, []tenant.ID{0, 1, 2, 3}) {
		t.Errorf("tenants %v are left", left)
	}
}
