package jbof

import "jbofd/internal/pipeline"

// Kinds of I/Os whose costs are measured.
const (
	smallReads = iota
	largeReads
	writes
	kinds
)

// largeFrom is the length from which a read is large.
const largeFrom = 32 << 10

// kindOf returns the kind of an I/O, kinds for one that moves no data.
func kindOf(op pipeline.Op, lenBytes int64) int {
	switch {
	case op.Class() == pipeline.WriteClass:
		return writes
	case op.Class() != pipeline.ReadClass:
		return kinds
	case lenBytes < largeFrom:
		return smallReads
	}
	return largeReads
}

// amount is a number of I/Os and their bytes, as they are charged.
type amount struct{ ios, bytes float64 }

func (a *amount) add(ios, bytes float64) {
	a.ios += ios
	a.bytes += bytes
}

// timeOf returns what an amount of a kind costs, in ns.
func (c *Costs) timeOf(kind int, a amount) float64 {
	if kind == writes {
		return a.bytes * c.writeByteNS
	}
	return a.ios*c.readNS + a.bytes*c.readByteNS
}

// rates are amounts per ns.
type rates [kinds]amount

// add adds a part of other rates.
func (r *rates) add(other *rates, part float64) {
	for k, a := range other {
		r[k].add(part*a.ios, part*a.bytes)
	}
}

// Probes measure costs while several kinds compete. For some intervals some kinds are dearer, so that others get most
// of the drive. The line through the rates before and during a probe tells what those would do without the others,
// whatever these cost.
const (
	probeWrites = iota // reads are dearer
	probeSizes         // small reads are dearer
	probeReads         // writes are dearer
	probes
)

const (
	// A probe multiplies the cost of the dearer kinds by probeTilt, and by the ratio of what they and the others have
	// cost before, so that the others get four fifths of the drive. Weights bound that ratio: a reader of much weight
	// that reads little must not make all other reads expensive. probeTiltMost bounds the product, sizesRatio the ratio
	// of small reads to large ones.
	probeTilt, probeTiltMost, sizesRatio = 4, 1000, 8
	// The first probe comes after probeFirst intervals of several kinds, and so does one for each cost that is not
	// known. The wait then grows by the factor probeMore up to probeLast, five minutes: then some are slow for less
	// than 0.05 % of the time.
	probeFirst, probeMore, probeLast = 5, 64, 15000
	// probeSettling intervals after a probe are not counted, because the drive is still busy with what it brought.
	probeSettling = 4
	// A probe changes a cost of reads by the factor probeMost at most. The mean lengths of small and large reads must
	// be apart by the factor sizesApart.
	probeMost, sizesApart = 4, 4
	// The cost of writes is discarded after deviatesLow consecutive intervals whose sum of costs is below the usual one
	// by deviationPart, or after deviatesHigh in which it is above; an empty buffer has that effect, too.
	deviatesLow, deviatesHigh, deviationPart = 5, 25, 0.25
)

// probeTicks is how many intervals each probe lasts. The first probeSettle are not counted, because the drive's buffer
// fills or empties.
var probeTicks, probeSettle = [probes]int{7, 5, 12}, [probes]int{4, 2, 8}

// probe is the state of the probes.
type probe struct {
	kind int
	// passed is the number of intervals since the current probe began, of in all.
	passed, in int
	// wait is the number of intervals until the next probe, waitedFrom the value from which wait counted down.
	wait, waitedFrom int
	// tilt multiplies the cost of the dearer kinds, more than 1 during a probe.
	tilt int64
	// usual are the rates without a probe, during those in it.
	usual, during rates
	// known is set for what was measured.
	known [probes]bool
	// average is a moving average of the sum of costs; a deviation shows that the drive's state has changed. deviating
	// counts consecutive intervals that deviate.
	average   float64
	deviating int
}

// Probing reports whether a probe is running.
func (c *Costs) Probing() bool { return c.probe.tilt > 1 }

// Tilt returns the current factor on the cost of a kind.
func (c *Costs) Tilt(kind int) int64 {
	p := &c.probe
	if p.kind == probeWrites && kind < writes || p.kind == probeSizes && kind == smallReads ||
		p.kind == probeReads && kind == writes {
		return max(p.tilt, 1)
	}
	return 1
}

// lane returns the lane that gets more of the drive in a probe.
func (p *probe) lane() int {
	if p.kind == probeWrites {
		return writeLane
	}
	return readLane
}

// soon lets the next probe come soon, because an estimate is wrong.
func (p *probe) soon() { p.wait, p.waitedFrom = min(p.wait, probeFirst), probeFirst }

// end ends a probe, with a result or without.
func (p *probe) end() { p.passed, p.in, p.tilt = 0, 0, 1 }

// times returns the parts of the time that the kinds take.
func (c *Costs) times(r *rates) (t [kinds]float64, sum float64) {
	for k, a := range r {
		t[k] = c.timeOf(k, a)
		sum += t[k]
	}
	return t, sum
}

// sides returns the parts of the time of those that a probe favours and of those that it makes dearer.
func (c *Costs) sides(probe int, r *rates) (own, others float64) {
	t, _ := c.times(r)
	switch probe {
	case probeWrites:
		return t[writes], t[smallReads] + t[largeReads]
	case probeSizes:
		return t[largeReads], t[smallReads]
	}
	return t[smallReads] + t[largeReads], t[writes]
}

// learnMix learns from an interval of dt ns in which the drive was busy with several kinds. readWeight is the weight of
// the reading tenants relative to that of the writing ones.
func (c *Costs) learnMix(dt, readWeight float64) {
	p := &c.probe
	var now rates
	for k, d := range c.done {
		now[k] = amount{d.ios / dt, d.bytes / dt}
	}
	if p.in > 0 {
		c.probed(&now)
		return
	}
	_, sum := c.times(&now)
	if p.average == 0 {
		p.usual, p.average = now, sum
	}
	switch {
	case sum < (1-deviationPart)*p.average:
		p.deviating += deviatesHigh / deviatesLow
	case sum > (1+deviationPart)*p.average:
		p.deviating++
	default:
		p.deviating = 0
	}
	c.average(&p.average, sum, mixGain/8)
	for k, a := range now {
		c.average(&p.usual[k].ios, a.ios, mixGain)
		c.average(&p.usual[k].bytes, a.bytes, mixGain)
	}
	if p.deviating >= deviatesHigh {
		p.average, p.deviating, p.known[probeWrites] = 0, 0, false
		p.soon()
	}
	if p.wait--; p.wait <= 0 {
		c.begin(readWeight, c.othersNS > minOthers*dt)
	}
}

// next returns the next probe: one for something unknown, else the one after the last one; probes if none is possible.
func (c *Costs) next() (kind int, known bool) {
	p := &c.probe
	kind, known = probes, true
	for i := range probes {
		k := (p.kind + 1 + i) % probes
		if own, others := c.sides(k, &p.usual); min(own, others) < minWrites {
			continue
		}
		if !p.known[k] {
			return k, false
		}
		if kind == probes {
			kind = k
		}
	}
	return kind, known
}

// begin begins a probe. Beside others that move no data, what reads would do alone is not known.
func (c *Costs) begin(readWeight float64, others bool) {
	p := &c.probe
	kind, known := c.next()
	if kind == probes || kind == probeReads && others {
		return
	}
	if known && p.waitedFrom == probeFirst {
		p.waitedFrom *= probeMore
		p.wait = p.waitedFrom
		return
	}
	own, dearer := c.sides(kind, &p.usual)
	ratio := dearer / max(own, 1e-3)
	switch kind {
	case probeWrites:
		ratio = min(ratio, readWeight)
	case probeReads:
		ratio = min(ratio, 1/readWeight)
	case probeSizes:
		ratio = min(ratio, sizesRatio)
	}
	p.kind, p.during = kind, rates{}
	p.passed, p.in = 0, probeTicks[kind]+probeSettling
	p.tilt = int64(min(max(probeTilt*ratio, probeTilt), probeTiltMost))
}

// probed accounts for an interval of a probe.
func (c *Costs) probed(now *rates) {
	p := &c.probe
	p.passed++
	ticks, settle := probeTicks[p.kind], probeSettle[p.kind]
	if p.passed > settle && p.passed <= ticks {
		p.during.add(now, 1/float64(ticks-settle))
	}
	if p.passed == ticks {
		p.tilt = 1
		known := p.known[p.kind]
		c.learnProbe(known)
		p.average, p.deviating = 0, 0
		if known || p.kind != probeWrites { // before the first probe the drive's buffer may have taken all writes
			_, p.average = c.times(&p.usual)
		}
		p.wait = probeFirst
		if _, all := c.next(); all {
			p.waitedFrom = min(probeMore*p.waitedFrom, probeLast)
			p.wait = p.waitedFrom
		}
	}
	if p.passed == p.in {
		p.end()
	}
}

// learnProbe learns from the rates before and during a probe. What is known changes by half.
func (c *Costs) learnProbe(known bool) {
	p := &c.probe
	p.known[p.kind] = true
	own, others := c.sides(p.kind, &p.usual)
	now, left := c.sides(p.kind, &p.during)
	slower := others-left >= 0.1*others
	var factor float64
	switch {
	case now <= 0:
		return
	case p.kind == probeSizes && slower && now > own:
		t, _ := c.times(&p.usual)
		during, _ := c.times(&p.during)
		factor = (others - left + t[writes] - during[writes]) / (now - own)
	case p.kind != probeSizes && slower:
		// What they would seem to take of the time without others.
		factor = 1 / (now + max((now-own)/(others-left), 0)*left)
	case p.kind == probeWrites:
		// They did not use what the probe offered, or others did not slow down: they cost at most what these leave.
		factor = (1 - left) / now
	default:
		return
	}
	if known {
		factor = (factor + 1) / 2
	}
	if p.kind == probeWrites {
		c.writeByteNS = c.bound(c.writeByteNS * factor)
		return
	}
	factor = min(max(factor, 1.0/probeMost), probeMost)
	if p.kind == probeSizes {
		c.learnSizes(factor)
		return
	}
	c.readNS *= factor
	c.readByteNS *= factor
}

// learnSizes corrects the ratio of the costs of large and small reads by a factor. Their sum stays.
func (c *Costs) learnSizes(factor float64) {
	u := &c.probe.usual
	t, _ := c.times(u)
	scale := (t[smallReads] + t[largeReads]) / (t[smallReads] + factor*t[largeReads])
	if u[largeReads].bytes/u[largeReads].ios < sizesApart*u[smallReads].bytes/u[smallReads].ios {
		return
	}
	smallNS, smallBytes := scale*t[smallReads]/u[smallReads].ios, u[smallReads].bytes/u[smallReads].ios
	largeNS, largeBytes := factor*scale*t[largeReads]/u[largeReads].ios, u[largeReads].bytes/u[largeReads].ios
	// Two points determine the line of cost over length.
	least, most := smallNS/smallBytes/100, smallNS/smallBytes
	c.readByteNS = min(max((largeNS-smallNS)/(largeBytes-smallBytes), least), most)
	c.readNS = smallNS - c.readByteNS*smallBytes
}
