package baseline

import (
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// host keeps tenants' I/Os going at a drive that takes a given latency for each, whatever the load.
type host struct {
	t       *testing.T
	c       *IOCost
	now     int64
	latency int64
	ends    []int64 // by tag; 0: not at the device
	owner   []tenant.ID
	done    []int
}

func newHost(t *testing.T, cfg IOCostConfig, weights ...int) *host {
	h := &host{t: t, c: NewIOCost(cfg), latency: 100_000, done: make([]int, len(weights))}
	for i, w := range weights {
		h.c.SetTenant(0, tenant.ID(i), w)
	}
	return h
}

// send has a tenant send n reads of 4 KiB.
func (h *host) send(t tenant.ID, n int) {
	for range n {
		tag := pipeline.Tag(len(h.owner))
		h.owner, h.ends = append(h.owner, t), append(h.ends, 0)
		h.c.Enqueue(h.now, pipeline.IO{Tag: tag, Tenant: t, LenBytes: 4096})
	}
}

// run goes on for a time; I/Os of the tenants in again are sent again when they end.
func (h *host) run(ns int64, again ...bool) {
	h.t.Helper()
	for until := h.now + ns; h.now < until; {
		for _, tag := range h.c.Dispatch(h.now, nil) {
			h.ends[tag] = h.now + h.latency
		}
		next, ok := h.c.NextWake()
		if !ok {
			next = until
		}
		for _, e := range h.ends {
			if e > 0 {
				next = min(next, e)
			}
		}
		if next < h.now {
			h.t.Fatalf("wakes at %d, it is %d", next, h.now)
		}
		h.now = min(next, until)
		for tag, e := range h.ends {
			if e == 0 || e > h.now {
				continue
			}
			t := h.owner[tag]
			h.ends[tag] = 0
			h.done[t]++
			h.c.Complete(h.now, pipeline.Tag(tag), pipeline.Result{LatencyNS: h.latency})
			if again[t] {
				h.c.Enqueue(h.now, pipeline.IO{Tag: pipeline.Tag(tag), Tenant: t, LenBytes: 4096})
			}
		}
	}
}

// slow is a drive of 10,000 I/Os a second, whose rate does not change.
func slow() IOCostConfig {
	return IOCostConfig{Depth: 1000, Read: LinearCost{FixedNS: 100_000}, LeastRate: 1, MostRate: 1}
}

func TestIOCostSharesByWeight(t *testing.T) {
	h := newHost(t, slow(), 1, 3)
	h.send(0, 32)
	h.send(1, 32)
	h.run(1e9, true, true)
	within(t, "weight 1", float64(h.done[0]), 2500, 3)
	within(t, "weight 3", float64(h.done[1]), 7500, 3)
}

// TestIOCostLendsWhatIsNotUsed: a tenant that sends little leaves the rest of its share to others, and has all of it at
// once when it sends more.
func TestIOCostLendsWhatIsNotUsed(t *testing.T) {
	h := newHost(t, slow(), 1, 1)
	h.latency = 10e6 // the first tenant has one I/O at a time: at most 100 a second
	h.send(0, 1)
	h.send(1, 300)
	h.run(1e9, true, true)
	h.done = make([]int, 2)
	h.run(1e9, true, true)
	within(t, "the other one", float64(h.done[1]), 9900, 3)
	h.send(0, 300)
	h.done = make([]int, 2)
	h.run(50e6, true, true) // five periods
	within(t, "its share is back", float64(h.done[0]), 250, 25)
}

// TestIOCostDoesNotSaveUp: a tenant that was idle has half a period's budget at first, which is what others lose by it.
func TestIOCostDoesNotSaveUp(t *testing.T) {
	h := newHost(t, slow(), 1, 1)
	h.send(1, 64)
	h.run(1e9, false, true)
	h.send(0, 400)
	h.done = make([]int, 2)
	h.run(20e6, true, true) // two periods: 200 I/Os, and the budget
	if h.done[0] > 100+50+10 {
		t.Errorf("%d I/Os after it was idle, want half of 200 and at most 50 more", h.done[0])
	}
}

// TestIOCostFollowsTheDrive: the rate rises while tenants wait and latency is as wanted, and falls while it is not.
func TestIOCostFollowsTheDrive(t *testing.T) {
	cfg := slow()
	cfg.LeastRate, cfg.MostRate = 0, 0
	h := newHost(t, cfg, 1)
	h.send(0, 4)
	h.latency = 1e6 // four at a time: 4,000 a second, and nobody waits
	h.run(1e9, true)
	if h.c.base != 1 || h.c.level != 0 {
		t.Errorf("the rate is %.2f, level %d, although nobody waits", h.c.base, h.c.level)
	}
	h.send(0, 96)
	h.run(1e9, true) // 100,000 a second are possible
	if h.c.base < 3 {
		t.Errorf("the rate is %.2f after 100 periods in which tenants waited", h.c.base)
	}
	high := h.c.base
	h.latency = 6e6
	h.run(1e9, true)
	if h.c.base > high/3 {
		t.Errorf("the rate is %.2f after 100 periods of I/Os that took too long, was %.2f", h.c.base, high)
	}
}

// TestIOCostSlowsDownWhenTheQueueIsFull: an I/O that could be paid waits for a place at the device.
func TestIOCostSlowsDownWhenTheQueueIsFull(t *testing.T) {
	cfg := slow()
	cfg.LeastRate, cfg.MostRate, cfg.Depth = 0, 0, 8
	h := newHost(t, cfg, 1)
	h.send(0, 64)
	h.latency = 2e6 // eight at a time: 4,000 a second of the 10,000 that the model says
	h.run(5e8, true)
	if h.c.base > 0.7 {
		t.Errorf("the rate is %.2f, want what the device does: 0.4", h.c.base)
	}
}

// TestIOCostChargesNothingForOthers: the kernel has no cost for other operations than reads and writes.
func TestIOCostChargesNothingForOthers(t *testing.T) {
	c := NewIOCost(IOCostConfig{Depth: 100})
	c.SetTenant(0, 0, 1)
	for tag := range pipeline.Tag(50) {
		c.Enqueue(0, pipeline.IO{Tag: tag, Op: pipeline.Deallocate, LenBytes: 1 << 30})
	}
	if n := len(c.Dispatch(0, nil)); n != 50 || c.CostNS(0) != 0 {
		t.Errorf("%d dispatched for %d ns, want all for nothing", n, c.CostNS(0))
	}
}

// TestIOCostForgetsIdleTenants: an idle tenant counts for one more period, and then nothing wakes the policy.
func TestIOCostForgetsIdleTenants(t *testing.T) {
	h := newHost(t, slow(), 1, 1)
	h.send(0, 1)
	h.send(1, 1)
	h.run(35e6, false, true)
	if n := len(h.c.active); n != 1 || h.c.weights != 1 {
		t.Errorf("%d tenants of weight %.1f count, one sends", n, h.c.weights)
	}
	h.run(35e6, false, false)
	if at, ok := h.c.NextWake(); ok || len(h.c.active) != 0 {
		t.Errorf("wakes at %d with %d tenants that count, although nobody sends", at, len(h.c.active))
	}
}

// TestIOCostWaitsInFull: whoever waits has taken back all that it had lent, whatever its margin was.
func TestIOCostWaitsInFull(t *testing.T) {
	h := newHost(t, slow(), 4, 4)
	h.now = 1e9
	h.send(1, 1)
	h.send(0, 1)
	h.c.Dispatch(h.now, nil)
	p := &h.c.payers[0]
	h.c.share(p, 0.1)
	p.margin = -1e12
	h.send(0, 100)
	h.c.Dispatch(h.now, nil)
	if p.queue.n == 0 || p.inUse != p.weight {
		t.Errorf("%d wait, %.1f of a weight of %.1f count", p.queue.n, p.inUse, p.weight)
	}
}

// TestIOCostDoesNotHurryALateDrive: while I/Os of earlier periods are at the device the rate does not rise.
func TestIOCostDoesNotHurryALateDrive(t *testing.T) {
	cfg := slow()
	cfg.LeastRate, cfg.MostRate = 0, 0
	h := newHost(t, cfg, 1, 1)
	h.latency = 80e6 // eight periods, in which no I/O ends that would miss the target
	h.send(0, 20)
	h.send(1, 900)
	h.run(75e6, true, true)
	if h.c.base != 1 || h.c.level < -1 { // at the end of the first period nothing was late
		t.Errorf("the rate is %.2f, level %d; I/Os have been at the drive since the beginning", h.c.base, h.c.level)
	}
}

// TestIOCostCountsWhatIsAtTheDrive: a tenant whose I/Os take longer than a period does not lend what they use.
func TestIOCostCountsWhatIsAtTheDrive(t *testing.T) {
	h := newHost(t, slow(), 1, 1)
	h.send(0, 40)
	h.send(1, 900)
	h.latency = 25e6
	h.run(19e6, false, true) // in the second period it has sent nothing
	h.run(2e6, false, true)
	if p := &h.c.payers[0]; p.inUse < 0.15 {
		t.Errorf("%.2f of its weight count, 4 ms of each 10 are at the drive for it", p.inUse)
	}
}

// TestIOCostKeepsTheOrderOfShares: a change of one share changes when the I/Os of all others are due.
func TestIOCostKeepsTheOrderOfShares(t *testing.T) {
	h := newHost(t, slow(), 1, 1, 8)
	h.send(0, 40)
	h.send(1, 40)
	h.run(20e6, true, true, true)
	h.send(2, 40)
	for i := range tenant.ID(3) {
		if p := &h.c.payers[i]; p.queue.n > 0 {
			within(t, "due", h.c.due.key(i), p.spent+h.c.price(p), 0.0001)
		}
	}
}

// TestIOCostDoesNotJudgeByFailures: the latency of an I/O that failed says nothing about the load.
func TestIOCostDoesNotJudgeByFailures(t *testing.T) {
	c := NewIOCost(IOCostConfig{Depth: 8})
	c.SetTenant(0, 0, 1)
	c.Enqueue(0, pipeline.IO{LenBytes: 4096})
	c.Dispatch(0, nil)
	c.Complete(1e6, 0, pipeline.Result{LatencyNS: 1e9, Failed: true})
	if c.missed[pipeline.ReadClass] != 0 {
		t.Error("a failure counts as a read that took too long")
	}
}

func TestOrderIsByKeyThenTenant(t *testing.T) {
	var o order
	o.grow(5)
	for _, i := range []tenant.ID{3, 1, 4, 2, 0} {
		o.add(i, 7)
	}
	o.set(4, 1)
	for _, want := range []tenant.ID{4, 0, 1, 2, 3} {
		if got := o.first(); got != want {
			t.Fatalf("%d is first, want %d", got, want)
		}
		o.remove(want)
	}
}
