package jbof

// probe is the state of the write measurement.
type probe struct {
	// left is the number of intervals until the current probe ends, 0 if there is none. wait is the number of intervals
	// until the next probe, waitedFrom the value from which wait counts down.
	left, wait, waitedFrom int
	// settling is the number of intervals from which nothing is learned, because the drive is still busy with what the
	// probe wrote.
	settling int
	// tilt multiplies the cost of reads during a probe.
	tilt int64
	// read is the reads' part of the time, written the bytes written per ns: the values before the probe, and the sums
	// during it.
	read, written       float64
	sumRead, sumWritten float64
	// known is set when the cost of writes was measured, and cleared when it is known to be wrong.
	known bool
	// average is a moving average of the sum of costs; a deviation shows that the drive's state has changed. deviating
	// sums consecutive intervals that deviate: 1 for each above the average, 5 for each below. A probe comes at
	// deviatesHigh.
	average   float64
	deviating int
	// measured is the cost of a written byte, in ns, that was measured last, 0 before the first probe. change is 1 if
	// the drive did more since then than this cost allows, or than it usually did, and -1 if it did less.
	measured float64
	change   int
}

const (
	// A probe lasts probeTicks intervals. The first probeSettle are not counted, because the drive's buffer fills. The
	// cost of reads is multiplied by probeTilt meanwhile, and by the ratio of what reads and writes have cost before,
	// so that writes get four fifths of the drive. Weights bound that ratio: a reader of much weight that reads little
	// must not make all other reads expensive. The first probe comes after probeFirst intervals of mixed
	// load; the wait then grows by the factor probeMore up to probeLast, five minutes: then reads are slow for less
	// than 0.05 % of the time.
	probeTicks, probeSettle  = 7, 4
	probeTilt, probeTiltMost = 4, 1000
	probeFirst, probeLast    = 5, 15000
	probeMore                = 64
	probeSettling            = 12
	// The estimate for writes is discarded after deviatesLow consecutive intervals whose sum of costs is below the
	// usual one by deviationPart, or after deviatesHigh in which it is above; an empty buffer has that effect, too.
	deviatesLow, deviatesHigh, deviationPart = 5, 25, 0.25
)

// learnMix learns from an interval in which the drive was busy, with reads for the part read of the time, and wrote
// written bytes per ns. readWeight is the weight of the reading tenants relative to that of the writing ones.
func (c *Costs) learnMix(read, written, readWeight float64) {
	p := &c.probe
	if p.settling > 0 {
		p.settling--
		return
	}
	if p.left > 0 {
		if p.left--; p.left < probeTicks-probeSettle {
			p.sumRead += read
			p.sumWritten += written
		}
		if p.left == 0 {
			c.probed(p.sumRead/(probeTicks-probeSettle), p.sumWritten/(probeTicks-probeSettle))
		}
		return
	}
	sum := read + written*c.writeByteNS
	if p.average == 0 {
		p.read, p.written, p.average = read, written, sum
	}
	switch {
	case sum < (1-deviationPart)*p.average:
		p.deviating += deviatesHigh / deviatesLow
	case sum > (1+deviationPart)*p.average:
		p.deviating++
	default:
		p.deviating = 0
	}
	c.average(&p.read, read, mixGain)
	c.average(&p.written, written, mixGain)
	c.average(&p.average, sum, mixGain/8)
	if p.deviating >= deviatesHigh {
		p.changed(sum > p.average)
		p.average, p.deviating, p.known = 0, 0, false
		p.soon()
	}
	if p.wait--; p.wait <= 0 {
		p.left, p.sumRead, p.sumWritten = probeTicks, 0, 0
		charged := p.read / max(p.written*c.writeByteNS, 1e-3)
		p.tilt = int64(min(max(probeTilt*min(readWeight, charged), probeTilt), probeTiltMost))
	}
}

// soon lets the next probe come soon, because the estimate is wrong.
func (p *probe) soon() { p.wait, p.waitedFrom = min(p.wait, probeFirst), probeFirst }

// probed ends a probe. The line through the point of the usual mix and that of the probe gives the write rate without
// reads.
func (c *Costs) probed(read, written float64) {
	p := &c.probe
	p.waitedFrom = min(probeMore*p.waitedFrom, probeLast)
	p.wait, p.settling = p.waitedFrom, probeSettling
	if written <= 0 {
		return
	}
	// If writes did not use what the probe offered, or reads did not slow down, the cost of a written byte is at most
	// what reads leave of the time.
	ns := (1 - read) / written
	if p.read-read >= 0.1*p.read {
		slope := max((written-p.written)/(p.read-read), 0)
		ns = 1 / (written + slope*read)
	}
	ns = c.bound(ns)
	if !c.checkSpeed(read, written, ns) && p.known {
		ns = (ns + c.writeByteNS) / 2
	}
	c.writeByteNS, p.measured, p.known = ns, ns, true
	p.average, p.deviating = 0, 0
}
