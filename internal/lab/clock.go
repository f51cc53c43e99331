package lab

import "math/rand/v2"

// Fault model of Clock: a node's monotonic clock runs faster or slower than true time by at most Skew (a fraction), and
// jumps forward by at most JumpNS in all: the node was paused, or its virtual machine was. It never runs backwards,
// which the kernel promises of CLOCK_MONOTONIC.

// Clock is what a node believes the time to be.
type Clock struct {
	sim    *Sim
	skew   float64
	baseNS int64 // true time at the last change
	atNS   int64 // the clock's time then
	leftNS int64 // of what it may still jump
	rng    *rand.Rand
}

// ClockConfig bounds how wrong a Clock is.
type ClockConfig struct {
	// Skew is the largest fraction by which the clock runs too fast or too slow.
	Skew float64
	// JumpNS is how far all its jumps lead together.
	JumpNS int64
}

// NewClock returns a clock of the node of that name.
func (s *Sim) NewClock(name string, cfg ClockConfig) *Clock {
	rng := s.Rand("clock " + name)
	return &Clock{sim: s, skew: cfg.Skew * (2*rng.Float64() - 1), baseNS: s.nowNS, atNS: s.nowNS, leftNS: cfg.JumpNS,
		rng: rng}
}

// Now is the clock's time in nanoseconds.
func (c *Clock) Now() int64 {
	passed := c.sim.nowNS - c.baseNS
	return c.atNS + passed + int64(float64(passed)*c.skew)
}

// TrueNS is how much true time passes while the clock advances by ns.
func (c *Clock) TrueNS(ns int64) int64 { return int64(float64(ns)/(1+c.skew)) + 1 }

// Jump moves the clock forward by a part of what is left of its bound.
func (c *Clock) Jump() (ns int64) {
	if c.leftNS <= 0 {
		return 0
	}
	ns = c.rng.Int64N(c.leftNS) + 1
	c.leftNS -= ns
	c.atNS, c.baseNS = c.Now()+ns, c.sim.nowNS
	return ns
}
