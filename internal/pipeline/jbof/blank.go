package jbof

// blank learns what reads cost on a drive that was not calibrated, while it serves. Each cost is learned once, when the
// load shows it; from then on the drive is treated as one that was calibrated. The cost of reads is learned again if
// the drive changes its speed.
//
// A probe makes I/Os of one kind dearer for some intervals, so that the others get more of the drive. What that kind
// does less and the others do more costs the same.
type blank struct {
	// learning is set until all is known.
	learning bool
	// known is set for what was measured.
	known [probes]bool
	// kind is that of the last probe. left is the number of intervals until the current one ends, 0 if there is none.
	kind, left int
	// settling is the number of intervals from which nothing is learned, because the drive is still busy with what a
	// probe brought. wait is the number of intervals until the next probe, waits what it is after a probe without a
	// result.
	settling, wait, waits int
	// again is set if the cost of reads was known before the drive changed, see checkSpeed.
	again bool
	// rounds counts the probes by kind.
	rounds [probes]int
	// tilt multiplies the cost of the dearer kind during a probe.
	tilt int64
	// usual are the mean rates of the last n intervals without a probe, during those in it.
	usual, during rates
	n             float64
	search        search
}

// Kinds of I/Os whose costs are compared.
const (
	smallReads = iota
	largeReads
	writes
	kinds
)

// largeFrom is the length from which a read is large.
const largeFrom = 32 << 10

// amount is a number of I/Os and their bytes, as they are charged.
type amount struct{ ios, bytes float64 }

func (a *amount) add(ios, bytes float64) {
	a.ios += ios
	a.bytes += bytes
}

// rates are amounts per ns, by kind.
type rates [kinds]amount

const (
	probeSizes = iota // large reads are dearer
	probeReads        // writes are dearer
	probes
)

const (
	// A probe begins after blankWait intervals without one. blankSettling intervals after it are not counted. If it had
	// no effect, or the load ended, the next one comes after blankRetry intervals, and then after twice as many.
	blankWait, blankSettling, blankRetry = 5, 4, 50
	// Probes last so many intervals: of sizes, of sizes beside writes, of reads beside writes. The first ones are not
	// counted, because the drive's buffer empties.
	sizesTicks, sizesMixedTicks, readsTicks = 6, 10, 12
	sizesSettle, readsSettle                = 2, 8
	// One probe changes a cost by the factor readsMost or sizesMost at most. It is repeated if it changed it by more
	// than blankNear, and soon if by more than blankFar, but there are at most blankRounds.
	readsMost, sizesMost, blankNear, blankFar, blankRounds = 4, 2, 1.25, 2, 3
	// sizesApart is the factor by which the mean lengths of small and large reads must be apart.
	sizesApart = 4
)

// ticks returns how many intervals the current probe lasts, and how many of them are not counted.
func (b *blank) ticks() (all, settle int) {
	switch {
	case b.kind == probeReads:
		return readsTicks, readsSettle
	case b.usual[writes].bytes > 0:
		return sizesMixedTicks, sizesSettle
	}
	return sizesTicks, sizesSettle
}

// timeOf returns what an amount of a kind costs, in ns.
func (c *Costs) timeOf(kind int, a amount) float64 {
	if kind == writes {
		return a.bytes * c.writeByteNS
	}
	return a.ios*c.readNS + a.bytes*c.readByteNS
}

// sides returns the parts of the time of the kind that a probe makes dearer, and of the others.
func (c *Costs) sides(probe int, r *rates) (dearer, others float64) {
	small, large := c.timeOf(smallReads, r[smallReads]), c.timeOf(largeReads, r[largeReads])
	written := c.timeOf(writes, r[writes])
	if probe == probeSizes {
		return large, small + written
	}
	return written, small + large
}

// learnBlank learns from an interval of dt ns. It reports whether nothing else may be learned from it, because of a
// probe or a trial.
func (c *Costs) learnBlank(dt, readWeight float64, saturated bool) bool {
	b := &c.blank
	now := rates{smallReads: {(c.chargedReads - c.large.ios) / dt, (c.chargedBytes - c.large.bytes) / dt},
		largeReads: {c.large.ios / dt, c.large.bytes / dt}, writes: {0, c.writeBytes / dt}}
	if c.searchWindow(&now, dt) {
		return true
	}
	b.learning = !b.search.known || b.known != [probes]bool{true, true}
	mixed := c.writeBytes > 0
	// The probe of writes comes first. What reads and writes do beside others that move no data is not known.
	if !saturated || c.othersNS > minOthers*dt || mixed && (!c.probe.known || c.probe.left > 0 ||
		c.probe.settling > probeSettling-blankSettling) {
		if b.left > 0 {
			b.retry()
		}
		b.n = 0
		return false
	}
	if b.settling > 0 {
		b.settling--
		return true
	}
	if b.left > 0 {
		c.probing(&now)
		return true
	}
	if b.n == 0 {
		b.usual, b.wait = now, max(b.wait, blankWait)
	}
	b.n++
	for k, a := range now {
		c.average(&b.usual[k].ios, a.ios, max(1/b.n, mixGain/4))
		c.average(&b.usual[k].bytes, a.bytes, max(1/b.n, mixGain/4))
	}
	if b.wait--; b.wait <= 0 {
		c.begin(readWeight)
	}
	return b.left > 0
}

// retry ends a probe without a result.
func (b *blank) retry() {
	b.left = 0
	b.waits = min(max(2*b.waits, blankRetry), probeLast)
	b.wait = b.waits
}

// begin begins a probe of what is not known, if there is what it compares: not the kind of the last one first. The cost
// of writes is multiplied by the ratio of what reads and writes have cost before, so that reads get four fifths of the
// drive. Weights bound that ratio.
func (c *Costs) begin(readWeight float64) {
	b := &c.blank
	for i := range probes {
		k := (b.kind + 1 + i) % probes
		dearer, others := c.sides(k, &b.usual)
		ratio := 1.0
		switch {
		case b.known[k] || min(dearer, others) < minWrites:
			continue
		case k == probeReads:
			ratio = min(dearer/others, 1/readWeight)
		case b.usual[largeReads].bytes*b.usual[smallReads].ios <
			sizesApart*b.usual[smallReads].bytes*b.usual[largeReads].ios || b.usual[smallReads].ios == 0:
			continue
		}
		b.kind, b.during = k, rates{}
		b.left, _ = b.ticks()
		b.tilt = int64(min(max(probeTilt*ratio, probeTilt), probeTiltMost))
		return
	}
}

// probing accounts for an interval of a probe.
func (c *Costs) probing(now *rates) {
	b := &c.blank
	n, settle := b.ticks()
	if n -= settle; b.left <= n {
		for k, a := range now {
			b.during[k].add(a.ios/float64(n), a.bytes/float64(n))
		}
	}
	if b.left--; b.left > 0 {
		return
	}
	b.settling, b.n = blankSettling, 0
	dearer, others := c.sides(b.kind, &b.usual)
	less, more := c.sides(b.kind, &b.during)
	less = dearer - less
	if less < 0.1*dearer {
		b.retry()
		return
	}
	factor := 0.0
	if b.kind == probeReads {
		// What reads would seem to take of the time if writes did nothing.
		alone := more + max(more-others, 0)/less*(dearer-less)
		if factor = 1 / alone; b.again {
			factor = speedFactor(more, alone)
		}
		factor = min(max(factor, 1.0/readsMost), readsMost)
		c.readNS *= factor
		c.readByteNS *= factor
	} else {
		factor = c.learnSizes(less)
	}
	b.rounds[b.kind]++
	near := factor > 1/blankNear && factor < blankNear
	switch {
	case near || b.rounds[b.kind] >= blankRounds:
		b.known[b.kind] = true
		b.search.n = max(b.search.n, 0) // what a larger window brings is seen better now
	case b.usual[writes].bytes > 0 && factor > 1.0/blankFar && factor < blankFar:
		b.wait = blankRetry // the next one is not urgent
	}
	if b.kind == probeReads && (b.again || b.rounds[b.kind] > 1) && !near {
		// The drive has changed, which may affect writes.
		c.probe.known = false
		c.probe.soon()
	}
	if p := &c.probe; b.usual[writes].bytes > 0 { // the sum of costs is another one now
		written, read := c.sides(probeReads, &b.usual)
		p.read, p.written, p.average, p.deviating = read, b.usual[writes].bytes, read+written, 0
	}
}

// learnSizes corrects the ratio of the costs of large and small reads after a probe in which large ones took less of
// the time. The sum of their costs stays, so that two equations determine both: that sum, and what small reads and
// writes did more is what large reads did less. It returns the factor by which the ratio has changed.
func (c *Costs) learnSizes(less float64) float64 {
	b := &c.blank
	small, large := b.usual[smallReads], b.usual[largeReads]
	smallSum, largeSum := c.timeOf(smallReads, small), c.timeOf(largeReads, large)
	moreSmall := c.timeOf(smallReads, b.during[smallReads]) - smallSum
	moreWrites := c.timeOf(writes, b.during[writes]) - c.timeOf(writes, b.usual[writes])
	dearer := (moreSmall*(1+largeSum/smallSum) + moreWrites) / (less + moreSmall*largeSum/smallSum)
	cheaper := 1 + (1-dearer)*largeSum/smallSum
	factor := min(max(dearer/max(cheaper, 0.1), 1.0/sizesMost), sizesMost)
	// As far as a line of cost over length allows.
	smallNS, smallBytes := smallSum/small.ios, small.bytes/small.ios
	largeNS, largeBytes := largeSum/large.ios, large.bytes/large.ios
	longer := largeBytes / smallBytes
	ratio := min(max(factor*largeNS/smallNS, 1+(longer-1)/100), longer)
	factor = ratio * smallNS / largeNS
	smallNS *= (smallSum + largeSum) / (smallSum + factor*largeSum)
	c.readByteNS = smallNS * (ratio - 1) / (largeBytes - smallBytes)
	c.readNS = max(smallNS-c.readByteNS*smallBytes, 0)
	return factor
}
