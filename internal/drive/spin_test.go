package drive

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// polledGate is a gate that says that it is polled, and counts how it is waited for.
type polledGate struct {
	*gate
	mu sync.Mutex
	// looks are Waits that do not block, bursts those of them that followed another call; asleep: the last call blocks.
	looks, bursts, sleeps int
	looking, asleep       bool
}

func (g *polledGate) Info() ssd.Info {
	i := g.gate.Info()
	i.Polled = true
	return i
}

func (g *polledGate) OpenQueue(depth int) (ssd.Queue, error) {
	_, err := g.gate.OpenQueue(depth)
	return g, err
}

func (g *polledGate) Close() error { return g.gate.Close() }

func (g *polledGate) Wait(limit time.Duration) bool {
	g.mu.Lock()
	if limit == 0 {
		g.looks++
		if !g.looking {
			g.bursts++
		}
	} else {
		g.sleeps++
	}
	g.looking, g.asleep = limit == 0, limit != 0
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		g.asleep = false
		g.mu.Unlock()
	}()
	return g.gate.Wait(limit)
}

// awaitSleep waits until the poll goroutine sleeps for the n-th time.
func (g *polledGate) awaitSleep(t *testing.T, n int) {
	t.Helper()
	for begin := time.Now(); ; runtime.Gosched() {
		g.mu.Lock()
		ok := g.asleep && g.sleeps >= n
		g.mu.Unlock()
		if ok {
			return
		}
		if time.Since(begin) > testTimeout {
			t.Fatalf("the poll goroutine does not sleep")
		}
	}
}

// A polled device is looked at before a wait while it has requests, and seldom if that is in vain; an idle one is never
// looked at.
func TestLooksOfAPolledDevice(t *testing.T) {
	inner, open := newGate(t)
	g := &polledGate{gate: inner}
	h := newRig(t, rigConfig{}, func(p *bufpool.Pool) (ssd.Device, error) {
		_, err := open(p)
		return g, err
	}).host("a")
	g.awaitSleep(t, 1)
	for i := range 100 {
		g.Wake()
		g.awaitSleep(t, i+2)
	}
	if g.looks > 0 {
		t.Errorf("%d looks at an idle device", g.looks)
	}
	io := h.io(1, pipeline.Read, 0, 4096)
	h.submit(io)
	inner.here(t, 1)
	const waits = 100
	for i, sleeps := 0, g.sleeps; i < waits; i++ {
		g.Wake()
		g.awaitSleep(t, sleeps+i+1)
	}
	if g.bursts == 0 || g.bursts > waits/8 { // 4 in 64 waits
		t.Errorf("%d looks in %d waits for a device that does not answer", g.bursts, waits)
	}
	inner.let(0, nil)
	h.finish(1)
	h.put(io)
}
