package lab

import (
	"errors"
	"iter"
)

// Fault model of Proc: none of its own. A process runs until it waits; what happens meanwhile is the Sim's choice.

// Proc is sequential code in a Sim, such as a host's: it waits for virtual time and for events, and runs on the Sim's
// goroutine otherwise.
type Proc struct {
	sim   *Sim
	yield func(struct{}) bool
	next  func() (struct{}, bool)
	stop  func()
	over  bool
	waits uint64 // how often it has waited; tells a late wake-up from one for the present wait
}

// errStopped unwinds a process that is stopped.
var errStopped = errors.New("process stopped")

// Spawn begins a process as a task of the Sim. It must be stopped if it has not ended.
func (s *Sim) Spawn(f func(p *Proc)) *Proc {
	p := &Proc{sim: s}
	p.next, p.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			p.over = true
			if r := recover(); r != nil && r != errStopped {
				panic(r)
			}
		}()
		p.yield = yield
		f(p)
	})
	s.Go(func() { p.next() })
	return p
}

// Stop ends a process where it waits. Not from within it.
func (p *Proc) Stop() {
	p.over = true
	p.stop()
}

// Wait runs begin with a function that wakes the process, and waits until that is called; more calls do nothing. From
// within the process.
func (p *Proc) Wait(begin func(wake func())) {
	p.waits++
	number, woken := p.waits, false
	begin(func() {
		if woken || p.over {
			return
		}
		woken = true
		p.sim.Go(func() {
			if !p.over && p.waits == number {
				p.next()
			}
		})
	})
	if !p.yield(struct{}{}) {
		panic(errStopped)
	}
}

// Sleep waits for virtual time.
func (p *Proc) Sleep(ns int64) {
	p.Wait(func(wake func()) { p.sim.After(ns, wake) })
}
