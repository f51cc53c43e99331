// Package congestion is the part of Gimbal that learns from completions what an SSD can bear. A Monitor for each class
// of I/O estimates load from latency, Rate computes a target rate from that, and WriteCost estimates the cost of a
// written byte in read bytes. All are state machines: times and latencies are arguments, in nanoseconds.
//
// The arithmetic is exactly that of the released code, in integers, with one repair: where that code means the average
// write latency, it divides a count by itself.
//
// Source: Gimbal (SIGCOMM'21) and its released code.
package congestion

import "math/bits"

// State is a congestion state, in order of load.
type State uint8

// States.
const (
	Underutilised State = iota
	Avoidance
	Congested
	Overloaded
)

// Weights of the moving averages, as shifts.
const (
	latencyShift   = 1 // a new latency counts one half
	thresholdShift = 4 // the threshold sinks by 1/16 of its distance to the latency
)

// Thresholds are the bounds of a Monitor's latency threshold.
type Thresholds struct {
	// Below MinNS the SSD is underutilised, above MaxNS overloaded.
	MinNS, MaxNS int64
}

// Monitor tracks the latency of a class. Its threshold sinks towards the averaged latency. When the latency crosses it,
// the threshold jumps half of the way up to its maximum.
type Monitor struct {
	bounds      Thresholds
	ewmaNS      int64
	thresholdNS int64
	rest        int64 // the part of the threshold's descent not yet applied, in sixteenths of a nanosecond
}

// NewMonitor returns a Monitor without samples.
func NewMonitor(t Thresholds) Monitor { return Monitor{bounds: t, thresholdNS: t.MaxNS} }

// Observe takes the latency of one completed I/O.
//
// hot: 0 allocs
func (m *Monitor) Observe(latencyNS int64) State {
	m.ewmaNS += latencyNS>>latencyShift - m.ewmaNS>>latencyShift
	if m.ewmaNS > m.thresholdNS || m.ewmaNS > m.bounds.MaxNS {
		m.thresholdNS = (m.thresholdNS + m.bounds.MaxNS) / 2
		m.rest = 0
		if m.ewmaNS > m.bounds.MaxNS {
			return Overloaded
		}
		return Congested
	}
	m.rest += m.thresholdNS - m.ewmaNS
	m.thresholdNS -= m.rest >> thresholdShift
	m.rest &= 1<<thresholdShift - 1
	if m.ewmaNS > m.bounds.MinNS {
		return Avoidance
	}
	return Underutilised
}

// LatencyNS is the averaged latency, 0 before the first sample.
func (m *Monitor) LatencyNS() int64 { return m.ewmaNS }

// ThresholdNS is the latency above which the SSD counts as congested.
func (m *Monitor) ThresholdNS() int64 { return m.thresholdNS }

// RateLimits are the bounds of a target rate.
type RateLimits struct {
	// StartBytesPerSec is the initial rate, between MinBytesPerSec and MaxBytesPerSec.
	StartBytesPerSec, MinBytesPerSec, MaxBytesPerSec int64
	// WindowBytes is the length of the window of the completion rate: more bytes must have completed for a new value.
	WindowBytes int64
}

// underutilisedGain is how much faster the rate grows while the SSD is underutilised.
const underutilisedGain = 8

// Rate computes the target rate and the completion rate of an SSD.
type Rate struct {
	limits    RateLimits
	target    int64
	completed int64
	// windowBytes is the number of bytes completed since windowNS.
	windowBytes, windowNS int64
	started               bool
}

// NewRate returns a Rate. The completion rate is 0 until the first window is complete.
func NewRate(l RateLimits) Rate { return Rate{limits: l, target: l.StartBytesPerSec} }

// Completed counts n completed bytes towards the completion rate. The first window begins
// with the first call.
//
// hot: 0 allocs
func (r *Rate) Completed(now, n int64) {
	if !r.started {
		r.started, r.windowNS = true, now
	}
	r.windowBytes += n
	if r.windowBytes <= r.limits.WindowBytes || now <= r.windowNS {
		return
	}
	r.completed = perSec(r.windowBytes, now-r.windowNS)
	r.windowBytes, r.windowNS = 0, now
}

// perSec is bytes in ns as bytes a second.
func perSec(bytes, ns int64) int64 {
	hi, lo := bits.Mul64(uint64(bytes), 1_000_000_000)
	if hi >= uint64(ns) {
		return 1 << 62
	}
	q, _ := bits.Div64(hi, lo, uint64(ns))
	return int64(min(q, 1<<62))
}

// Observe moves the target rate after a successful completion of n bytes that put its class into
// state s. If it reports true, the tokens of all are to be discarded.
//
// hot: 0 allocs
func (r *Rate) Observe(s State, n int64) (discard bool) {
	switch s {
	case Overloaded:
		r.target = min(r.target, r.completed) - n
		discard = true
	case Congested:
		r.target -= n
	case Avoidance:
		r.target += n
	case Underutilised:
		r.target += underutilisedGain * n
	}
	r.target = min(max(r.target, r.limits.MinBytesPerSec), r.limits.MaxBytesPerSec)
	return discard
}

// TargetBytesPerSec is the rate that is to be let through.
func (r *Rate) TargetBytesPerSec() int64 { return r.target }

// CompletedBytesPerSec is the rate of the last window.
func (r *Rate) CompletedBytesPerSec() int64 { return r.completed }

// CostOne is a write cost of 1.0: write costs are fixed-point numbers in units of
// 1/CostOne.
const (
	costShift = 10
	CostOne   = 1 << costShift
)

// costStep is by how much the write cost falls, once a period.
const costStep = CostOne / 2

// CostLimits of a WriteCost.
type CostLimits struct {
	// Worst is the write cost of an SSD at its worst, in units of 1/CostOne; the cost begins there.
	Worst int64
	// PeriodNS is how often it is estimated.
	PeriodNS int64
	// BusyNS is the average write latency above which writes are expensive if there were reads too, AloneNS if there
	// were not.
	BusyNS, AloneNS int64
}

// WriteCost estimates what a written byte costs: halfway up to the worst in a period in which
// writes were slow, half of 1.0 down in any other.
type WriteCost struct {
	limits        CostLimits
	cost          int64 // Invariant: CostOne <= cost <= limits.Worst
	nextNS        int64 // end of the period
	started       bool
	reads, writes int64
	writeSumNS    int64
}

// NewWriteCost makes a WriteCost at its worst. Its first period begins with the first
// Advance.
func NewWriteCost(l CostLimits) WriteCost { return WriteCost{limits: l, cost: l.Worst} }

// Read counts a completed read.
//
// hot: 0 allocs
func (w *WriteCost) Read() { w.reads++ }

// Write counts a completed write.
//
// hot: 0 allocs
func (w *WriteCost) Write(latencyNS int64) {
	w.writes++
	w.writeSumNS += latencyNS
}

// Advance ends the periods that are over by now and reports whether any was.
//
// hot: 0 allocs
func (w *WriteCost) Advance(now int64) bool {
	if !w.started {
		w.started, w.nextNS = true, now+w.limits.PeriodNS
	}
	if now < w.nextNS {
		return false
	}
	w.estimate()
	w.nextNS += w.limits.PeriodNS
	if over := now - w.nextNS; over >= 0 { // periods without any I/O
		periods := over/w.limits.PeriodNS + 1
		w.nextNS += periods * w.limits.PeriodNS
		w.cost = max(CostOne, w.cost-min(periods, w.limits.Worst)*costStep)
	}
	return true
}

func (w *WriteCost) estimate() {
	var latencyNS int64
	if w.writes > 0 {
		latencyNS = w.writeSumNS / w.writes
	}
	if latencyNS > w.limits.AloneNS || w.reads > 0 && latencyNS > w.limits.BusyNS {
		w.cost = (w.cost + w.limits.Worst) / 2
	} else {
		w.cost = max(w.cost-costStep, CostOne)
	}
	w.reads, w.writes, w.writeSumNS = 0, 0, 0
}

// Cost is the write cost in units of 1/CostOne.
func (w *WriteCost) Cost() int64 { return w.cost }

// Weigh is what n written bytes cost in read bytes, rounded down.
//
// hot: 0 allocs
func (w *WriteCost) Weigh(n int64) int64 { return w.cost * n >> costShift }

// NextNS is the end of the present period; 0 before the first Advance.
func (w *WriteCost) NextNS() int64 { return w.nextNS }
