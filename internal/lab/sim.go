// Package lab is the simulated environment: time, drives and a network that exist only in memory and whose every
// choice follows from one seed. Machines and their drivers run in it in virtual time, on one goroutine, so that a run
// that fails can be repeated exactly.
//
//	Sim ── timers, tasks ──> drivers (drive, partition, target service, connections)
//	 ├── Drive ── Device ──> ssd.Queue
//	 ├── Network ── End ───> transports and simulated hosts
//	 └── Clock ────────────> what a node believes the time to be
//
// Each file begins with its fault model: what may go wrong, and what may not.
package lab

import (
	"container/heap"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"time"

	"jbofd/internal/invariants"
	"jbofd/internal/turn"
)

// Fault model of Sim: tasks that are ready at the same instant run in any order, drawn from the seed. So a wake-up may
// overtake an earlier one, and a task may be delayed behind any amount of other work, but no task runs before its time
// and none is forgotten. A task runs to its end before another one begins: data races are not simulated (that is the
// race detector's work), only the order of turns is.

// Sim is virtual time and what happens in it. All of it belongs to one goroutine.
type Sim struct {
	seed   uint64
	rng    *rand.Rand
	nowNS  int64
	ready  []func()
	timers timerHeap
	order  uint64
	steps  uint64
	// trace, if set, is told of what happens.
	trace func(line string)
}

// NewSim returns virtual time that begins a second after its zero.
func NewSim(seed uint64) *Sim {
	return &Sim{seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), nowNS: int64(time.Second)}
}

// Seed is what NewSim was given.
func (s *Sim) Seed() uint64 { return s.seed }

// Rand returns a random stream of its own for the part of that name. A part that draws more or less than before does
// not change what the others draw.
func (s *Sim) Rand(name string) *rand.Rand {
	h := fnv.New64a()
	h.Write([]byte(name)) // a hash's Write does not fail
	return rand.New(rand.NewPCG(s.seed, h.Sum64()))
}

// Now is the virtual time in nanoseconds.
func (s *Sim) Now() int64 { return s.nowNS }

// Steps is how many tasks have run.
func (s *Sim) Steps() uint64 { return s.steps }

// Trace makes Tracef pass lines on; nil ends it.
func (s *Sim) Trace(f func(line string)) { s.trace = f }

// Tracing reports that Tracef does something: its arguments may be costly.
func (s *Sim) Tracing() bool { return s.trace != nil }

// Tracef notes what happens, with the time in front.
func (s *Sim) Tracef(format string, args ...any) {
	if s.trace != nil {
		s.trace(fmt.Sprintf("%12.3f µs  %s", float64(s.nowNS)/1e3, fmt.Sprintf(format, args...)))
	}
}

// Go runs f at the present instant, after the task that is running, in any order with other ready tasks.
func (s *Sim) Go(f func()) { s.ready = append(s.ready, f) }

// After runs f when afterNS have passed.
func (s *Sim) After(afterNS int64, f func()) *Timer {
	t := &Timer{sim: s, f: f, index: -1}
	t.Reset(afterNS)
	return t
}

// NewTimer implements turn.Env.
func (s *Sim) NewTimer(_ turn.Precision, f func()) (turn.Timer, error) {
	return &Timer{sim: s, f: f, index: -1}, nil
}

// Wait implements turn.Env: it runs other tasks until done is closed or has a value, or the time is over. Drivers call
// it where a real goroutine would block, so tasks may run within a task; never within a turn.
func (s *Sim) Wait(done <-chan struct{}, timeout time.Duration) bool {
	limit := int64(timeout)
	if timeout < 0 {
		limit = 1 << 50
	}
	over := s.Run(limit, func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	})
	invariants.Check(over || timeout >= 0, "lab: a driver waits for what will never happen")
	return over
}

var _ turn.Env = (*Sim)(nil)

// Timer runs a function once at a time. It is a turn.Timer.
type Timer struct {
	sim    *Sim
	f      func()
	atNS   int64
	order  uint64
	index  int // in the heap, or -1
	closed bool
}

// Close implements turn.Timer.
func (t *Timer) Close() {
	t.Stop()
	t.closed = true
}

// Reset sets the timer to afterNS from now, at least 0; an earlier setting is forgotten.
func (t *Timer) Reset(afterNS int64) {
	if t.closed {
		return
	}
	t.Stop()
	t.sim.order++
	t.atNS, t.order = t.sim.nowNS+max(afterNS, 0), t.sim.order
	heap.Push(&t.sim.timers, t)
}

// Stop forgets the setting and reports whether there was one.
func (t *Timer) Stop() bool {
	if t.index < 0 {
		return false
	}
	heap.Remove(&t.sim.timers, t.index)
	return true
}

// Step runs one task, and lets time pass to the next timer if none is ready. It returns false when there is nothing to
// run, now or later.
func (s *Sim) Step() bool {
	if len(s.ready) == 0 {
		if len(s.timers) == 0 {
			return false
		}
		s.nowNS = max(s.nowNS, s.timers[0].atNS)
	}
	for len(s.timers) > 0 && s.timers[0].atNS <= s.nowNS {
		s.ready = append(s.ready, heap.Pop(&s.timers).(*Timer).f)
	}
	i := 0
	if len(s.ready) > 1 {
		i = s.rng.IntN(len(s.ready))
	}
	f, last := s.ready[i], len(s.ready)-1
	s.ready[i], s.ready[last] = s.ready[last], nil
	s.ready = s.ready[:last]
	s.steps++
	f()
	return true
}

// Run takes steps until done returns true or the time is over, and reports which: false means that the time is over or
// that nothing is left to run.
func (s *Sim) Run(limitNS int64, done func() bool) bool {
	end := s.nowNS + limitNS
	for !done() {
		if len(s.ready) == 0 && len(s.timers) > 0 && s.timers[0].atNS > end {
			s.nowNS = end
			return false
		}
		if !s.Step() {
			return done()
		}
	}
	return true
}

// timerHeap orders timers by their time and, of one time, by when they were set.
type timerHeap []*Timer

func (h timerHeap) Len() int { return len(h) }

func (h timerHeap) Less(i, j int) bool {
	return h[i].atNS < h[j].atNS || h[i].atNS == h[j].atNS && h[i].order < h[j].order
}

func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *timerHeap) Push(x any) {
	t := x.(*Timer)
	t.index = len(*h)
	*h = append(*h, t)
}

// Pop implements heap.Interface.
func (h *timerHeap) Pop() any {
	old := *h
	t := old[len(old)-1]
	t.index, old[len(old)-1] = -1, nil
	*h = old[:len(old)-1]
	return t
}
