package executortest

import (
	"sync"
	"time"

	"jbofd/internal/ssd"
)

// Gate is a device that keeps requests from another one while it is shut. It has one queue.
type Gate struct {
	ssd.Device
	mu     sync.Mutex
	cond   *sync.Cond
	inner  ssd.Queue
	depth  int
	shut   bool
	woken  bool
	closed bool
	held   []ssd.Request
	done   []ssd.Completion
	one    [1]ssd.Completion
}

// NewGate makes an open gate before a device whose queues are synchronous. Closing it closes the device.
func NewGate(d ssd.Device) *Gate {
	g := &Gate{Device: d}
	g.cond = sync.NewCond(&g.mu)
	return g
}

// Shut keeps requests from the device until Open.
func (g *Gate) Shut() {
	g.mu.Lock()
	g.shut = true
	g.mu.Unlock()
}

// Open lets the requests through that were kept, and all that follow.
func (g *Gate) Open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = false
	held := g.held
	g.held = nil
	g.pass(held)
}

// Held is how many requests are kept.
func (g *Gate) Held() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.held)
}

// pass executes requests. mu is held.
func (g *Gate) pass(reqs []ssd.Request) {
	for i := range reqs {
		g.inner.Submit(reqs[i : i+1])
		g.inner.Poll(g.one[:])
		g.done = append(g.done, g.one[0])
	}
	g.cond.Broadcast()
}

// OpenQueue implements ssd.Device.
func (g *Gate) OpenQueue(depth int) (_ ssd.Queue, err error) {
	g.depth = depth
	g.inner, err = g.Device.OpenQueue(1)
	return gateQueue{g}, err
}

type gateQueue struct{ *Gate }

// Synchronous implements ssd.Queue.
func (g gateQueue) Synchronous() bool { return false }

// Submit implements ssd.Queue.
func (g gateQueue) Submit(reqs []ssd.Request) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := min(len(reqs), g.depth-len(g.held)-len(g.done))
	if g.shut {
		g.held = append(g.held, reqs[:n]...)
	} else {
		g.pass(reqs[:n])
	}
	return n
}

// Poll implements ssd.Queue.
func (g gateQueue) Poll(dst []ssd.Completion) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := copy(dst, g.done)
	g.done = append(g.done[:0], g.done[n:]...)
	return n
}

// Wait implements ssd.Queue. A limit other than 0 is none.
func (g gateQueue) Wait(limit time.Duration) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for limit != 0 && len(g.done) == 0 && !g.woken && !g.closed {
		g.cond.Wait()
	}
	ready := len(g.done) > 0 || g.woken || g.closed
	g.woken = false
	return ready
}

// Wake implements ssd.Queue.
func (g gateQueue) Wake() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.woken = true
	g.cond.Broadcast()
}

// Close implements ssd.Queue.
func (g gateQueue) Close() error {
	g.mu.Lock()
	g.closed = true
	g.cond.Broadcast()
	g.mu.Unlock()
	return g.inner.Close()
}
