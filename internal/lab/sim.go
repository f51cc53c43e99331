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
	t.sim.timers.push(t)
}

// Stop forgets the setting and reports whether there was one.
func (t *Timer) Stop() bool {
	if t.index < 0 {
		return false
	}
	t.sim.timers.remove(t.index)
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
		s.ready = append(s.ready, s.timers[0].f)
		s.timers.remove(0)
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

// timerHeap orders timers by their time and, of one time, by when they were set. It is a heap of four children, because
// a run spends more time here than anywhere else.
type timerHeap []*Timer

func (t *Timer) before(o *Timer) bool {
	return t.atNS < o.atNS || t.atNS == o.atNS && t.order < o.order
}

func (h *timerHeap) push(t *Timer) {
	*h = append(*h, t)
	h.up(len(*h)-1, t)
}

func (h *timerHeap) remove(i int) {
	last := len(*h) - 1
	t := (*h)[last]
	(*h)[i].index, (*h)[last] = -1, nil
	*h = (*h)[:last]
	if i < last {
		h.up(h.down(i, t), t)
	}
}

// up puts t at index i, or above as far as it comes before what is there.
func (h timerHeap) up(i int, t *Timer) {
	for i > 0 {
		parent := (i - 1) / 4
		if !t.before(h[parent]) {
			break
		}
		h[i] = h[parent]
		h[i].index = i
		i = parent
	}
	h[i], t.index = t, i
}

// down moves what comes before t up into the hole at index i, and returns where the hole is then.
func (h timerHeap) down(i int, t *Timer) int {
	for {
		first := 4*i + 1
		if first >= len(h) {
			return i
		}
		least := first
		for c := first + 1; c < min(first+4, len(h)); c++ {
			if h[c].before(h[least]) {
				least = c
			}
		}
		if !h[least].before(t) {
			return i
		}
		h[i] = h[least]
		h[i].index = i
		i = least
	}
}
