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
	if h.c.base != 1 {
		t.Errorf("the rate is %.2f although nobody waits", h.c.base)
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
