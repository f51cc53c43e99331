package lab

import (
	"time"

	"jbofd/internal/turn"
)

// Fault model of Process: it dies at any instant between two tasks. Nothing of it runs after that.

// Process is the environment of one life of a node: a turn.Env whose tasks end with it, and whose time is the node's
// clock.
type Process struct {
	sim   *Sim
	clock *Clock
	dead  bool
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

// alive is f as long as the process lives.
func (p *Process) alive(f func()) func() {
	return func() {
		if !p.dead {
			f()
		}
	}
}

// NewTimer implements turn.Env.
func (p *Process) NewTimer(_ turn.Precision, f func()) (turn.Timer, error) {
	return &processTimer{p, &Timer{sim: p.sim, f: p.alive(f), index: -1}}, nil
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
