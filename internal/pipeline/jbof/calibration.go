package jbof

import "slices"

// Calibration measures a drive with reads before the drive serves. It is a state machine: its driver keeps reads at
// random offsets outstanding as Next asks, and passes their completions to Complete.
//
// The drive must be idle otherwise. The blocks read should hold data, because drives answer reads of unwritten blocks
// without accessing flash.
type Calibration struct {
	// phase is the index of the current load, round the number of completed rounds over all loads.
	phase, round int
	beganNS      int64 // 0: the phase has not begun
	outstanding  int
	settling     int   // completions before measuringNS
	measuringNS  int64 // 0: not yet
	completed    int   // since measuringNS
	lastNS       int64 // the last completion
	latencySum   int64
	draining     bool
	result       [phases][rounds]float64 // reads a second
	latencyNS    [rounds]float64         // of a lone read
}

// calibrationPhase is one load of the measurement.
type calibrationPhase struct {
	depth    int
	lenBytes int64
}

// Bounds of what a calibration asks for.
const (
	// CalibrationDepth is the maximum number of outstanding reads, CalibrationBytes the maximum length of a read.
	// CalibrationUnit is what offsets should be multiples of. Reads are at least 512 bytes long; a drive with longer
	// blocks reads a block instead.
	CalibrationDepth = 192
	CalibrationBytes = large
	CalibrationUnit  = unit
)

const (
	smalls, larges = 7, 5
	phases         = smalls + larges + 1
	// Each load runs once a round, and the median of the rounds counts, so that a disturbance of some milliseconds
	// affects one of them only.
	rounds = 3
	// phaseNS is how long a load runs; the first quarter is not counted. On a slow drive a load runs longer: until all
	// reads that were outstanding at first have completed, and then in proportion.
	phaseNS  = 7_000_000
	settleNS = phaseNS / 4
	minPart  = 1
	// busyPart is the part of the best rate above which a drive counts as busy.
	busyPart = 0.97
	large    = 128 << 10
	smallest = 512
)

var calibrationPhases = [phases]calibrationPhase{
	{1, unit}, {16, unit}, {32, unit}, {64, unit}, {96, unit}, {128, unit}, {192, unit},
	{4, large}, {6, large}, {8, large}, {12, large}, {24, large},
	{192, smallest},
}

// Next reports whether a read is to be submitted now, and its length.
func (c *Calibration) Next(now int64) (lenBytes int64, ok bool) {
	if c.Done() || c.draining {
		return 0, false
	}
	if c.beganNS == 0 {
		c.beganNS = max(now, 1)
	}
	ph := calibrationPhases[c.phase]
	if c.outstanding >= ph.depth {
		return 0, false
	}
	c.outstanding++
	return ph.lenBytes, true
}

// Complete accounts for the completion of a read.
func (c *Calibration) Complete(now, latencyNS int64) {
	c.outstanding--
	switch depth := calibrationPhases[c.phase].depth; {
	case c.draining:
	case c.measuringNS == 0 && c.settling < depth:
		if c.settling++; c.settling == depth {
			c.measuringNS = max(now, c.beganNS+settleNS)
		}
	case now >= c.measuringNS:
		c.completed++
		c.latencySum += latencyNS
		c.lastNS = now
		c.draining = now-c.beganNS >= phaseNS && c.completed >= minPart*depth
	}
	if c.draining && c.outstanding == 0 {
		c.end()
	}
}

// end ends a phase.
func (c *Calibration) end() {
	c.result[c.phase][c.round] = float64(c.completed) * 1e9 / float64(c.lastNS-c.measuringNS+1)
	if c.phase == 0 {
		c.latencyNS[c.round] = float64(c.latencySum) / float64(max(c.completed, 1))
	}
	if c.phase++; c.phase == phases {
		c.phase = 0
		c.round++
	}
	c.beganNS, c.settling, c.measuringNS, c.completed, c.latencySum, c.draining = 0, 0, 0, 0, 0, false
}

// Done reports whether the measurement is over.
func (c *Calibration) Done() bool { return c.round == rounds }

// Profile returns the result when Done, or the preliminary result after at least one round. It is the zero Profile
// before, and for a drive that hardly answered.
func (c *Calibration) Profile() Profile {
	if c.round == 0 {
		return Profile{}
	}
	var rates [phases]float64
	for i := range rates {
		rates[i] = c.median(c.result[i])
	}
	small, big := rates[:smalls], rates[smalls:smalls+larges]
	best, bestBig := slices.Max(small), slices.Max(big)
	if best <= 0 || bestBig <= 0 {
		return Profile{}
	}
	p := Profile{LatencyNS: int64(c.median(c.latencyNS))}
	busy := func(rate float64, of []float64, phases []calibrationPhase) int {
		return phases[slices.IndexFunc(of, func(r float64) bool { return r >= busyPart*rate })].depth
	}
	p.Depth = busy(best, small, calibrationPhases[:smalls])
	p.LargeDepth = busy(bestBig, big, calibrationPhases[smalls:])
	if tiny := rates[phases-1]; tiny > 0 {
		p.SmallPart = min(best/tiny, 1)
	}
	// Two points determine the line of cost over length.
	smallNS, bigNS := 1e9/best, 1e9/bestBig
	p.ReadByteNS = max((bigNS-smallNS)/(large-unit), smallNS/unit/100)
	p.ReadNS = max(smallNS-p.ReadByteNS*unit, 0)
	if p.ReadNS == 0 {
		p.ReadByteNS = smallNS / unit
	}
	return p
}

// median returns the median over the rounds measured so far.
func (c *Calibration) median(of [rounds]float64) float64 {
	slices.Sort(of[:c.round])
	return of[c.round/2]
}
