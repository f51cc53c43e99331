package drive

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
)

// gate is an asynchronous device that does nothing until the test lets a request through: it shows what the drive has
// outstanding at the device.
type gate struct {
	ssd.Device // DRAM, for the content
	depth      int

	mu      sync.Mutex
	cond    *sync.Cond
	inner   ssd.Queue
	waiting []ssd.Request
	comps   []ssd.Completion
	woken   bool
	closed  bool
	// most is the largest number of requests that were outstanding.
	most int
}

// newGate returns the device's maker and, once that was called, the device.
func newGate(t testing.TB) (*gate, func(*bufpool.Pool) (ssd.Device, error)) {
	g := &gate{}
	g.cond = sync.NewCond(&g.mu)
	return g, func(p *bufpool.Pool) (_ ssd.Device, err error) {
		if g.Device, err = memory(p); err != nil {
			return nil, err
		}
		g.inner, err = g.Device.OpenQueue(1)
		return g, err
	}
}

func (g *gate) OpenQueue(depth int) (ssd.Queue, error) {
	g.depth = depth
	return g, nil
}

func (g *gate) Synchronous() bool { return false }

func (g *gate) Submit(reqs []ssd.Request) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := min(len(reqs), g.depth-len(g.waiting)-len(g.comps))
	g.waiting = append(g.waiting, reqs[:n]...)
	g.most = max(g.most, len(g.waiting)+len(g.comps))
	g.cond.Broadcast()
	return n
}

func (g *gate) Poll(dst []ssd.Completion) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := copy(dst, g.comps)
	g.comps = g.comps[n:]
	return n
}

func (g *gate) Wait(limit time.Duration) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for limit != 0 && len(g.comps) == 0 && !g.woken && !g.closed {
		g.cond.Wait()
	}
	ready := len(g.comps) > 0 || g.woken || g.closed
	g.woken = false
	return ready
}

func (g *gate) Wake() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.woken = true
	g.cond.Broadcast()
}

func (g *gate) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.cond.Broadcast()
	return nil
}

// here waits until n requests are at the device and returns them.
func (g *gate) here(t testing.TB, n int) []ssd.Request {
	t.Helper()
	late := time.AfterFunc(testTimeout, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.cond.Broadcast()
	})
	defer late.Stop()
	begin := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.waiting) < n {
		if time.Since(begin) >= testTimeout {
			t.Fatalf("%d requests at the device after %v, want %d", len(g.waiting), testTimeout, n)
		}
		g.cond.Wait()
	}
	return append([]ssd.Request(nil), g.waiting...)
}

// exactly checks that n requests are at the device. The drive's turn that follows an event ends before Submit returns,
// so no more can come.
func (g *gate) exactly(t testing.TB, n int) []ssd.Request {
	t.Helper()
	reqs := g.here(t, n)
	if len(reqs) != n {
		t.Fatalf("%d requests at the device, want %d: %s", len(reqs), n, describe(reqs))
	}
	return reqs
}

func describe(reqs []ssd.Request) (s string) {
	for _, r := range reqs {
		s += fmt.Sprintf("[%v %d+%d] ", r.Op, r.Offset, r.Len)
	}
	return s
}

// let carries out the i-th waiting request, or fails it with an error.
func (g *gate) let(i int, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.waiting[i]
	g.waiting = append(g.waiting[:i:i], g.waiting[i+1:]...)
	if err == nil {
		g.inner.Submit([]ssd.Request{r})
		var c [1]ssd.Completion
		g.inner.Poll(c[:])
		err = c[0].Err
	}
	g.comps = append(g.comps, ssd.Completion{Tag: r.Tag, Err: err, LatencyNS: 1})
	g.cond.Broadcast()
}

// all lets everything through until stop is closed.
func (g *gate) all(stop <-chan struct{}) {
	go func() {
		<-stop
		g.mu.Lock()
		defer g.mu.Unlock()
		g.cond.Broadcast()
	}()
	for {
		g.mu.Lock()
		for len(g.waiting) == 0 {
			select {
			case <-stop:
				g.mu.Unlock()
				return
			default:
			}
			g.cond.Wait()
		}
		g.mu.Unlock()
		g.let(0, nil)
	}
}
