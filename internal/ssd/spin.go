package ssd

// Spin decides how long to look for completions before a Queue.Wait, so that a busy polled device takes no interrupts,
// and an idle one no time of the processor. It is a state machine of the goroutine that waits:
//
//	window := s.WindowNS(under way)
//	look for a completion with Queue.Wait(0) during window, if that is not 0: s.Looked(found)
//	if there was none: Queue.Wait, and s.Slept()
//
// A look that finds nothing is wasted. If more of them are wasted than not, the device is slower than a window is long,
// or has too little to do: then the next restWaits waits are without a look. So a device that is never found in time
// costs mostMisses windows in restWaits waits, and nothing at all while no request is under way.
//
// The zero value is ready for use.
type Spin struct {
	// misses counts looks in vain, less those that have found something. Invariant: 0 <= misses < mostMisses.
	misses int
	// rest is how many waits are still without a look. Invariant: 0 <= rest <= restWaits.
	rest int
}

const (
	// SpinNS is how long a look takes at most: about what it costs to fall asleep and to be woken.
	SpinNS = 20_000
	// mostMisses is after how many looks in vain there are no more for restWaits waits.
	mostMisses = 4
	restWaits  = 64
)

// WindowNS is how long to look; 0: not at all. underWay: requests are.
//
// hot: 0 allocs
func (s *Spin) WindowNS(underWay bool) int64 {
	if !underWay || s.rest > 0 {
		return 0
	}
	return SpinNS
}

// Looked takes whether a look has found something.
//
// hot: 0 allocs
func (s *Spin) Looked(found bool) {
	if found {
		s.misses = max(s.misses-1, 0)
		return
	}
	if s.misses++; s.misses == mostMisses {
		s.misses, s.rest = 0, restWaits
	}
}

// Slept takes that a wait has ended.
//
// hot: 0 allocs
func (s *Spin) Slept() { s.rest = max(s.rest-1, 0) }
