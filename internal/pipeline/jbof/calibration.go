package jbof

import "slices"

// Calibration measures a drive with reads before it is put to work. It is a machine:
// whoever drives it keeps reads of random places outstanding as Next asks, and hands
// their completions back.
//
// The drive must be idle otherwise. What is read should hold data: a drive answers
// reads of blocks that were never written without touching its flash.
type Calibration struct {
	// phase is what is being measured, round how many times all of it was.
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

// calibrationPhase is one load.
type calibrationPhase struct {
	depth    int
	lenBytes int64
}

// What a calibration asks for.
const (
	// CalibrationDepth is the most reads outstanding, CalibrationBytes the largest of
	// them, CalibrationUnit the smallest and what places are multiples of.
	CalibrationDepth = 192
	CalibrationBytes = large
	CalibrationUnit  = unit
)

const (
	smalls, larges = 7, 5
	phases         = smalls + larges
	// Each load comes once a round, and the median of the rounds counts: what else the machine does for some milliseconds
	// is in one of them.
	rounds = 3
	// phaseNS is how long a load lasts; the first quarter is not counted. A drive for which that
	// is short has longer: until all that was outstanding at first is done, and then so many
	// times as much.
	phaseNS   = 7_000_000
	settleNS  = phaseNS / 4
	leastPart = 1
	// busyPart of the best rate keeps a drive busy.
	busyPart = 0.97
	large    = 128 << 10
)

var calibrationPhases = [phases]calibrationPhase{
	{1, unit}, {16, unit}, {32, unit}, {64, unit}, {96, unit}, {128, unit}, {192, unit},
	{4, large}, {6, large}, {8, large}, {12, large}, {24, large},
}

// Next returns the length of a read to submit now, and whether there is one.
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

// Complete takes a read's completion.
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
		c.draining = now-c.beganNS >= phaseNS && c.completed >= leastPart*depth
	}
	if c.draining && c.outstanding == 0 {
		c.end()
	}
}

// end closes a phase.
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

// Profile returns what was found, once Done or at least once round. Before that, and of a drive that hardly answered, it is
// the zero Profile.
func (c *Calibration) Profile() Profile {
	if c.round == 0 {
		return Profile{}
	}
	var rates [phases]float64
	for i := range rates {
		rates[i] = c.median(c.result[i])
	}
	small, big := rates[:smalls], rates[smalls:]
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
	// Two points make the line.
	smallNS, bigNS := 1e9/best, 1e9/bestBig
	p.ReadByteNS = max((bigNS-smallNS)/(large-unit), smallNS/unit/100)
	p.ReadNS = max(smallNS-p.ReadByteNS*unit, 0)
	if p.ReadNS == 0 {
		p.ReadByteNS = smallNS / unit
	}
	return p
}

// median is that of the rounds that there were.
func (c *Calibration) median(of [rounds]float64) float64 {
	slices.Sort(of[:c.round])
	return of[c.round/2]
}
