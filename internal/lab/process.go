package lab

import (
	"time"

	"jbofd/internal/turn"
)

// Fault model of Process: it dies at any instant between two tasks. Nothing of it runs after that. It may also be
// stopped, as by SIGSTOP: then nothing of it runs until it continues, while its clock, the network and its drives go
// on. What was due meanwhile then runs in any order.

// Process is the environment of one life of a node: a turn.Env whose tasks end with it, and whose time is the node's
// clock.
type Process struct {
	sim   *Sim
	clock *Clock
	dead  bool
	// stopped: the tasks that are ready are held.
	stopped bool
	held    []func()
}

var _ turn.Env = (*Process)(nil)

// NewProcess begins a process on a node with that clock.
func (s *Sim) NewProcess(c *Clock) *Process { return &Process{sim: s, clock: c} }

// Kill ends the process.
func (p *Process) Kill() { p.dead = true }

// Dead reports that Kill was called.
func (p *Process) Dead() bool { return p.dead }

// Now implements turn.Env.
func (p *Process) Now() int64 { return p.clock.Now() }

// Go implements turn.Env.
func (p *Process) Go(f func()) { p.sim.Go(p.alive(f)) }

// Stop stops the process, which runs. Continue follows, or Kill.
func (p *Process) Stop() { p.stopped = true }

// Continue lets a process go on that was stopped.
func (p *Process) Continue() {
	held := p.held
	p.stopped, p.held = false, nil
	for _, f := range held {
		p.Go(f)
	}
}

// Stopped reports that Stop was called, and not Continue.
func (p *Process) Stopped() bool { return p.stopped }

// Deliver runs f, which is something that the process is told from outside: at once, or when the process continues.
func (p *Process) Deliver(f func()) { p.alive(f)() }

// alive is f as long as the process lives, later if it is stopped.
func (p *Process) alive(f func()) func() {
	return func() {
		switch {
		case p.dead:
		case p.stopped:
			p.held = append(p.held, f)
		default:
			f()
		}
	}
}

// NewTimer implements turn.Env.
func (p *Process) NewTimer(_ turn.Precision, f func()) (turn.Timer, error) {
	t := &processTimer{p, &Timer{sim: p.sim, index: -1}}
	t.f = p.alive(func() {
		if !t.closed { // since it was held
			f()
		}
	})
	return t, nil
}

// Wait implements turn.Env.
func (p *Process) Wait(done <-chan struct{}, timeout time.Duration) bool {
	if timeout > 0 {
		timeout = time.Duration(p.clock.TrueNS(int64(timeout)))
	}
	return p.sim.Wait(done, timeout)
}

// processTimer measures time by the node's clock.
type processTimer struct {
	p *Process
	*Timer
}

// Reset implements turn.Timer.
func (t *processTimer) Reset(afterNS int64) { t.Timer.Reset(t.p.clock.TrueNS(afterNS)) }
