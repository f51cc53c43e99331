package jbof

import "math"

// A drive may become slower or faster while it serves: it is hot, a host of virtual disks gives it less. Reads and
// writes then change alike, and with them the sum of costs. A probe of writes follows, and finds what a written byte
// costs now. If the cost of reads stayed as it was, reads would get twice the share of writes on a drive of half the
// speed. So the probe of writes also tells whether the cost of reads is wrong. It is corrected at once by as much as
// that of writes has changed, or by what the line below says, if that is more. A probe of reads follows, which is more
// exact.
//
// What a drive can do of reads and writes at the same time is a convex region: it can do one for a part of the time and
// the other for the rest. So the line through two mixes, extended to reads alone, is an upper bound of what it can
// read.
const (
	// If the line leaves reads less than aloneLeast of the time, they cost more than is known.
	aloneLeast = 0.9
	// Reads and writes use partly different parts of a drive, so that their costs can add up to more than all the time.
	// If they add up to sumMost after they became more, both have become cheaper.
	sumMost = 1.6
	// If writes have become more expensive by the factor grownMost after all became less, reads may have as well, and
	// only a probe of reads tells. Less than that is garbage collection, or pauses of the drive.
	grownMost = 1.5
	// speedMost bounds the factor by which a probe changes the cost of reads.
	speedMost = 4
	// speedNear is the tolerance of the comparison in speedFactor.
	speedNear = 1.05
)

// changed notes that the drive does more than its costs allow or than it usually does, or less. Nothing is usual before
// the first probe.
func (p *probe) changed(more bool) {
	switch {
	case p.measured == 0:
	case more:
		p.change = 1
	default:
		p.change = -1
	}
}

// checkSpeed looks, after a probe of writes, whether the cost of reads is still right, and reports whether it may be
// wrong. If the line tells by how much, it is corrected at once. In each case in which checkSpeed returns true, a probe
// of reads begins (blank). In the probe of writes reads had the part read of the time, written bytes were written per
// ns, and one cost byteNS.
func (c *Costs) checkSpeed(read, written, byteNS float64) bool {
	p := &c.probe
	change, grown := p.change, 1.0
	p.change = 0
	if p.measured > 0 {
		grown = byteNS / p.measured
	}
	less, more := p.read-read, written-p.written
	conclusive := less > 0 && more > 0
	alone := read + written*less/more
	factor := 1.0
	switch {
	case change > 0 && p.read+p.written*p.measured >= sumMost:
		factor = min(grown, 1)
	case conclusive && alone < aloneLeast:
		factor = max(grown, 1/alone)
	case change < 0 && (!conclusive || grown >= grownMost):
	default:
		return false
	}
	factor = min(max(factor, 1.0/speedMost), speedMost)
	c.readNS *= factor
	c.readByteNS *= factor
	c.blank = blank{learning: true, again: true, known: [probes]bool{probeSizes: true}, search: search{known: true}}
	return true
}

// speedFactor returns the factor by which a probe of reads corrects their cost. Reads took the part most of the time in
// it, and would take the part alone without writes by the line through both mixes. The true part is between the two. If
// 1 is there, too, within speedNear, the cost is right; otherwise their geometric mean corrects it.
func speedFactor(most, alone float64) float64 {
	if most <= speedNear && alone >= 1/speedNear {
		return 1
	}
	return 1 / math.Sqrt(most*alone)
}
