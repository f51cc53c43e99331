package jbof

import "jbofd/internal/pipeline"

// Profile describes how a drive performs reads while it does nothing else.
type Profile struct {
	// ReadNS is the fixed part of the device time of a read, ReadByteNS the part for each byte.
	ReadNS, ReadByteNS float64
	// LatencyNS is the latency of a 4 KiB read on an otherwise idle drive.
	LatencyNS int64
	// SmallPart is the cost of a read of 512 bytes as a part of that of a 4 KiB read, more than 0 and at most 1. Flash
	// is read in units of 4 KiB, and only the transfer is shorter. 0 stands for 1.
	SmallPart float64
	// Depth is how many 4 KiB reads must be outstanding to keep the drive busy, LargeDepth how many of 128 KiB.
	Depth, LargeDepth int
	// Fixed is set if the drive completes requests within Submit. Latency then shows only how busy the CPU is, so
	// nothing is learned from it.
	Fixed bool
}

// defaultProfile is a typical NVMe drive: 400,000 reads of 4 KiB a second, 3.2 GB/s with large reads.
var defaultProfile = Profile{ReadNS: 1200, ReadByteNS: 0.31, LatencyNS: 90_000, Depth: 96, LargeDepth: 8}

// Costs estimates what I/Os cost a drive, in ns of device time. The cost of an I/O is the time that it takes of a drive
// which does nothing but such I/Os.
//
// Calibration measures reads. Their cost is corrected in intervals in which only reads saturate the drive: the costs of
// the reads completed must then add up to the length of the interval. Writes cannot be calibrated, because the drive
// holds data, and their cost changes with garbage collection and with the drive's write buffer. They are measured while
// the drive serves: when only writes saturate it, and now and then while reads and writes compete. In the latter case a
// probe gives writes most of the drive for 0.14 s, and their cost is extrapolated from the rates before and during the
// probe. Neither measurement needs to interpret latencies. A drive that was not calibrated is learned in the same way,
// see blank.
//
// A drive or its host may stand still for some ms now and then: a virtual disk, a process that does not run. Reads and
// writes then both do little, and whatever is measured in such a time makes writes look expensive. So only what lasts
// counts as a load of writes alone, most reads and not their mean decide whether the drive is busy, and an estimate
// that the drive's own rate refutes is lowered, whatever the load.
type Costs struct {
	fixed              bool
	readNS, readByteNS float64
	smallPart          float64
	writeByteNS        float64
	// storm estimates, from 0 to 1, whether writes are frequent enough to cost what was measured. Rare writes fit the
	// drive's buffer and cost no more than reads.
	storm float64
	// otherNS is the lowest latency of each operation that moves no data. The operation is charged otherPart of it,
	// because such latency is mostly not device time. What is device time is what reads and writes leave unused.
	otherNS   [pipeline.Ops]float64
	otherPart float64
	// ranges is what the lengths of ranges cost.
	ranges [pipeline.Ops]rangeCost
	depth  float64
	baseNS int64
	// place and placeByte are the fixed and the per-byte part of the window that a read takes. A read of 128 KiB keeps
	// more dies busy than one of 4 KiB, but not in proportion to its cost.
	place, placeByte float64
	// width is the size of the window relative to the one that reads alone need.
	width float64

	probe probe

	// Sums of the current interval.
	waitedNS                     [lanes]int64 // time for which I/Os of the lane were queued
	saturatedNS                  int64        // time for which I/Os of any lane were queued
	reads, readBytes, writeBytes float64
	othersNS                     float64
	// chargedReads and chargedBytes are the reads and their bytes as they are charged: see charged.
	chargedReads, chargedBytes float64
	// large is the part of them that are large.
	large amount
	// slow counts the reads that took longer than a whole window of them should. readLatencyNS is the sum of the
	// reads' latencies; a slow read counts with what a window should take, because the drive may have stood still.
	slow, readLatencyNS float64
	// readOnly counts intervals without writes. After writes a drive flushes its buffer and collects garbage for a
	// while. writeOnly counts intervals in which reads cost next to nothing.
	readOnly, writeOnly int
	// wroteRate is a moving average of the bytes written per ns.
	wroteRate float64

	// Values for Stats.
	latency              [pipeline.Classes]float64
	targetRate, doneRate float64

	// blank is what is learned of a drive that was not calibrated. It is large and not used by each I/O, so it is last.
	blank blank
}

// rangeCost is what each byte of a range costs, at most mostNS, as far as that is known.
type rangeCost struct {
	known          bool
	byteNS, mostNS float64
}

const (
	// saturatedPart is the part of an interval for which the drive must be saturated for anything to be learned.
	saturatedPart = 0.9
	// mixGain and readGain are the weights of an interval in the moving averages of a mix, which changes with the
	// drive's state within a second, and of the cost of reads.
	mixGain, readGain = 0.25, 0.05
	// minWrites is the part of an interval's cost that writes must have to be measured against reads.
	minWrites = 0.03
	// overpricedStep is by how much the estimated cost of writes is lowered after an interval in which it was refuted:
	// writes kept reads from a drive that was not busy, or writes did more than their cost allows.
	overpricedStep = 0.1
	// readOnlyIntervals is the number of intervals without writes after which an interval counts as reads only.
	readOnlyIntervals = 25
	// writeOnlyIntervals is the number of intervals with hardly any reads after which an interval counts as writes
	// only. While the drive stands still there are hardly any reads either, but not for so long.
	writeOnlyIntervals = 5
	// wroteGain is the weight of an interval in the average of the rate of writes. The estimate is refuted if writes
	// at this rate would cost wroteLimit of the time: more than all, because the drive's buffer takes some of them at
	// once.
	wroteGain, wroteLimit = 1.0 / 16, 1.25
	// maxWriteCost and minWriteCost bound the cost of a written byte relative to a byte read in 4 KiB reads.
	maxWriteCost, minWriteCost = 64, 0.25
	// minOtherCost is the least cost of an operation that moves no data, in 4 KiB reads. Their cost is measured in
	// intervals in which they make up at least minOthers of the total; above maxOthers nothing else is measured.
	minOtherCost, minOthers, maxOthers = 0.25, 0.05, 0.5
	// minRange is the least length of a range from which anything is learned about the cost of lengths.
	minRange = 64 << 10
	// otherMaxNS bounds the cost of an operation that moves no data.
	otherMaxNS = 2_000_000
	// mixedWidth is the width of the window while there are writes, because reads wait for programs in the drive.
	mixedWidth = 1.75
	// minMixed is the part of the cost that reads and writes each must have for the load to count as mixed.
	minMixed = 0.1

	// stormUp and stormDown are the weights of an interval in the average Costs.storm.
	stormUp, stormDown = 0.7, 0.04
)

// NewCosts returns the estimate for a profile. Zero fields take the values of a typical drive.
func NewCosts(pr Profile) Costs {
	d := defaultProfile
	uncalibrated := pr.ReadNS <= 0 && pr.ReadByteNS <= 0 && !pr.Fixed
	if pr.ReadNS <= 0 && pr.ReadByteNS <= 0 {
		pr.ReadNS, pr.ReadByteNS = d.ReadNS, d.ReadByteNS
	}
	if pr.LatencyNS <= 0 {
		pr.LatencyNS = d.LatencyNS
	}
	if pr.Depth <= 0 {
		pr.Depth = d.Depth
	}
	if pr.LargeDepth <= 0 {
		pr.LargeDepth = d.LargeDepth
	}
	if pr.SmallPart <= 0 || pr.SmallPart > 1 {
		pr.SmallPart = 1
	}
	c := Costs{fixed: pr.Fixed, readNS: pr.ReadNS, readByteNS: pr.ReadByteNS, smallPart: pr.SmallPart,
		depth:  float64(pr.Depth),
		baseNS: pr.LatencyNS, readOnly: readOnlyIntervals, width: 1, otherPart: 0.1}
	c.probe.wait, c.probe.waitedFrom = probeFirst, probeFirst
	c.blank.learning, c.blank.wait = uncalibrated, blankWait
	small, big := 1/float64(pr.Depth), 1/float64(pr.LargeDepth)
	c.placeByte = max(big-small, 0) / (large - unit)
	c.place = small - c.placeByte*unit
	c.writeByteNS = c.UnitNS() / unit
	return c
}

// UnitNS returns the cost of a 4 KiB read.
func (c *Costs) UnitNS() float64 { return c.readNS + c.readByteNS*unit }

// charged returns the number of reads and the bytes that a read is charged as. A read of less than 4 KiB is charged as
// a part of a read of 4 KiB.
func (c *Costs) charged(lenBytes int64) (reads, bytes float64) {
	if lenBytes >= unit {
		return 1, float64(lenBytes)
	}
	longer := float64(max(lenBytes-smallest, 0)) / (unit - smallest)
	part := c.smallPart + (1-c.smallPart)*longer
	return part, part * unit
}

// read returns the cost of a read in ns.
func (c *Costs) read(lenBytes int64) float64 {
	reads, bytes := c.charged(lenBytes)
	return reads*c.readNS + bytes*c.readByteNS
}

// WindowNS returns the device time of as many 4 KiB reads as keep the drive busy.
func (c *Costs) WindowNS() int64 { return int64(c.depth * c.UnitNS()) }

// windowOne is a whole window, in the units of request.place.
const windowOne = 1 << 20

// Window returns how much may be outstanding, in the units of request.place. It is a number of reads and not a time: if
// the cost of reads were overestimated, a window of constant time would hold fewer of them, the drive would do less,
// and reads would seem to cost even more.
func (c *Costs) Window() int64 { return int64(c.width * windowOne) }

// Of returns the cost of an I/O and the place that it takes in the window.
//
// hot: 0 allocs
func (c *Costs) Of(op pipeline.Op, lenBytes int64) (costNS, place int64) {
	switch op.Class() {
	case pipeline.ReadClass:
		// A read longer than those that were calibrated keeps no more of the drive busy at once.
		return int64(c.read(lenBytes)), int64((c.place + c.placeByte*float64(min(lenBytes, large))) * windowOne)
	case pipeline.WriteClass:
		ns := c.written() * float64(units(lenBytes)*unit)
		return int64(ns), int64(ns / (c.depth * c.UnitNS()) * windowOne)
	}
	ns := c.other(op, lenBytes)
	return int64(ns), int64(ns / (c.depth * c.UnitNS()) * windowOne)
}

// written returns the current cost of a written byte.
func (c *Costs) written() float64 {
	calm := min(c.UnitNS()/unit, c.writeByteNS)
	return calm + c.storm*(c.writeByteNS-calm)
}

// Probing reports whether a probe is running.
func (c *Costs) Probing() bool { return c.probe.left > 0 || c.blank.left > 0 }

// favoured returns the lane that gets more of the drive in a probe.
func (c *Costs) favoured() int {
	if c.probe.left > 0 {
		return writeLane
	}
	return readLane
}

// other returns the cost of an operation that moves no data.
func (c *Costs) other(op pipeline.Op, lenBytes int64) float64 {
	return max(c.otherPart*c.otherNS[op], minOtherCost*c.UnitNS()) + c.ranges[op].byteNS*float64(lenBytes)
}

// Tilt returns the current factor on the cost of the I/Os of a lane that are lenBytes long.
func (c *Costs) Tilt(lane int, lenBytes int64) int64 {
	switch {
	case c.probe.left > 0 && lane == readLane:
		return c.probe.tilt
	case c.blank.left == 0:
	case c.blank.kind == probeSizes && lane == readLane && lenBytes >= largeFrom,
		c.blank.kind == probeReads && lane == writeLane:
		return c.blank.tilt
	}
	return 1
}

// Completed accounts for a completed I/O.
//
// hot: 0 allocs
func (c *Costs) Completed(op pipeline.Op, lenBytes, latencyNS int64) {
	class := op.Class()
	// An operation of several requests in sequence says nothing about the drive's load.
	single := op != pipeline.Compare && op != pipeline.CompareWrite && op != pipeline.Verify
	if single {
		c.latency[class] += (float64(latencyNS) - c.latency[class]) / 16
	}
	switch class {
	case pipeline.ReadClass:
		c.reads++
		c.readBytes += float64(lenBytes)
		reads, bytes := c.charged(lenBytes)
		c.chargedReads += reads
		c.chargedBytes += bytes
		if lenBytes >= largeFrom {
			c.large.add(reads, bytes)
		}
		ns := reads*c.readNS + bytes*c.readByteNS
		if single {
			c.readCompleted(ns, float64(latencyNS))
		} else {
			c.readLatencyNS += ns
		}
	case pipeline.WriteClass:
		c.writeBytes += float64(units(lenBytes) * unit)
	default:
		c.othersNS += c.other(op, lenBytes)
		c.rangeCompleted(op, lenBytes, latencyNS)
		most := int64(otherMaxNS)
		if lenBytes >= minRange {
			most = c.baseNS
		}
		if ns := float64(min(max(latencyNS, 1), most)); c.otherNS[op] == 0 || ns < c.otherNS[op] {
			c.otherNS[op] = ns
		} else {
			c.otherNS[op] += (ns - c.otherNS[op]) / 4096 // rises slowly, because the drive may have become slower
		}
	}
}

// rangeCompleted learns from the latency of a command for a range. Such a command has the device to itself for a time
// that grows with the length. What it takes longer than a lone read bounds that time. The least that was seen counts,
// because more than that is time in which the command waited.
func (c *Costs) rangeCompleted(op pipeline.Op, lenBytes, latencyNS int64) {
	if lenBytes < minRange {
		return
	}
	r := &c.ranges[op]
	ns := float64(max(latencyNS-c.baseNS, 0)) / float64(lenBytes)
	switch {
	case !r.known:
		r.known, r.byteNS, r.mostNS = true, ns, ns
	case ns < r.mostNS:
		r.mostNS = ns
	default:
		r.mostNS += (ns - r.mostNS) / 256
	}
	r.byteNS = min(max(r.byteNS, r.mostNS/100), r.mostNS)
}

// learnOthers corrects the costs of operations that move no data by what reads and writes have left of a busy interval.
func (c *Costs) learnOthers(leftNS float64) {
	change := 1 + mixGain*(min(max(leftNS/c.othersNS, 0.25), 2)-1)
	c.otherPart = min(max(c.otherPart*change, 1e-3), 1)
	for op := range c.ranges {
		r := &c.ranges[op]
		r.byteNS = min(r.byteNS*change, r.mostNS)
	}
}

// readCompleted accounts for the latency of a read whose own cost is costNS.
func (c *Costs) readCompleted(costNS, latencyNS float64) {
	full := costNS + float64(c.baseNS+c.WindowNS())*c.width
	if latencyNS > full {
		c.slow++
	}
	c.readLatencyNS += min(latencyNS, full)
}

// Waited adds ns to the time in the current interval for which I/Os of these lanes were queued although the drive had
// all I/Os that the window allows.
//
// hot: 0 allocs
func (c *Costs) Waited(waiting [lanes]bool, ns int64) {
	if waiting[readLane] {
		c.waitedNS[readLane] += ns
	}
	if waiting[writeLane] {
		c.waitedNS[writeLane] += ns
	}
	if waiting[readLane] || waiting[writeLane] {
		c.saturatedNS += ns
	}
}

// laneNS returns the cost of the lane's I/Os of the current interval.
func (c *Costs) laneNS(lane int) float64 {
	if lane == readLane {
		return c.chargedReads*c.readNS + c.chargedBytes*c.readByteNS
	}
	return c.writeBytes * c.writeByteNS
}

// Learn ends an interval of ns. weights are the sums of the weights of the tenants active in each lane.
func (c *Costs) Learn(weights [lanes]int64, ns int64) {
	if c.writeBytes > 0 {
		c.readOnly = 0
	} else {
		c.readOnly++
	}
	dt := float64(max(ns, 1))
	c.refuteWriteCost(dt)
	readsNS, writesNS := c.laneNS(readLane), c.laneNS(writeLane)
	if readsNS < minWrites*dt && writesNS >= minMixed*dt {
		c.writeOnly++
	} else {
		c.writeOnly = 0
	}
	mixed := false
	if cost := readsNS + writesNS + c.othersNS; cost > 0 {
		mixed = min(writesNS, readsNS) > minMixed*cost
		c.adaptWidth(mixed && min(c.waitedNS[readLane], c.waitedNS[writeLane]) > ns/2)
		c.targetRate = (c.readBytes + c.writeBytes) * 1e9 / cost * max(1, c.probe.average)
	}
	c.doneRate = (c.readBytes + c.writeBytes) * 1e9 / dt
	if writesNS >= minMixed*dt {
		c.average(&c.storm, 1, stormUp)
	} else {
		c.average(&c.storm, 0, stormDown)
	}
	saturated := !c.fixed && c.saturated(dt)
	if saturated && !c.Probing() && c.writesOverpriced(dt) {
		c.writeByteNS = max(c.writeByteNS*(1-overpricedStep), min(c.writeByteNS, c.UnitNS()/unit))
	}
	if saturated && c.othersNS > minOthers*dt {
		c.learnOthers(dt - readsNS - writesNS)
	}
	saturated = saturated && c.othersNS < maxOthers*dt
	readWeight := float64(weights[readLane]) / float64(max(weights[writeLane], 1))
	switch {
	case c.blank.learning && c.learnBlank(dt, readWeight, saturated):
	case saturated && c.writeBytes == 0 && c.readOnly >= readOnlyIntervals && c.reads > 0:
		c.learnReads(dt / readsNS)
	case saturated && c.writeOnly >= writeOnlyIntervals:
		c.average(&c.writeByteNS, c.bound((dt-readsNS-c.othersNS)/c.writeBytes), mixGain)
		c.probe.known, c.probe.left = true, 0
		if c.probe.measured > 0 {
			c.probe.measured = c.writeByteNS
		}
	case saturated && (c.probe.left > 0 || writesNS >= minWrites*dt && readsNS >= minWrites*dt):
		c.learnMix(readsNS/dt, c.writeBytes/dt, readWeight)
	default:
		c.probe.left = 0
	}
	c.waitedNS = [lanes]int64{}
	c.chargedReads, c.chargedBytes, c.large = 0, 0, amount{}
	c.saturatedNS, c.reads, c.readBytes, c.writeBytes, c.othersNS, c.slow, c.readLatencyNS = 0, 0, 0, 0, 0, 0, 0
}

// adaptWidth adapts the width of the window. In a mix, reads wait for programs in the drive, and more of them must be
// outstanding to keep it busy. But if all I/Os of a lane fit the window, the drive decides who is served, and the
// window is too wide.
func (c *Costs) adaptWidth(bothWait bool) {
	if bothWait {
		c.width = min(c.width*1.1, mixedWidth)
	} else {
		c.width = max(c.width*0.95, 1)
	}
}

// refuteWriteCost lowers the cost of a written byte if the drive has written more than this cost allows. It does not
// matter how busy the drive is: what it did it can do. The next probe comes soon.
func (c *Costs) refuteWriteCost(dt float64) {
	c.average(&c.wroteRate, c.writeBytes/dt, wroteGain)
	lower := c.bound(c.writeByteNS * (1 - overpricedStep))
	if c.Probing() || lower >= c.writeByteNS || c.wroteRate*c.writeByteNS <= wroteLimit {
		return
	}
	c.writeByteNS = lower
	c.probe.changed(true)
	c.probe.known, c.probe.average = false, 0
	c.probe.soon()
}

// saturated reports whether the drive was busy for the whole interval of dt ns: I/Os were queued all the time, or most
// reads took longer than a whole window of them would. The second condition detects that writes cost more than
// estimated and that none is therefore queued.
func (c *Costs) saturated(dt float64) bool {
	return float64(c.saturatedNS) >= saturatedPart*dt || c.slow > c.reads/2
}

// writesOverpriced reports whether reads were queued all the time although those in the drive took hardly longer than a
// lone read. The drive is then not busy, and the reads wait because the cost of writes is overestimated: a few writes
// fill the window and keep reads out, and their measured cost is then whatever time the reads leave. A probe does not
// detect this where the number of writes follows that of reads, as in a key-value store.
func (c *Costs) writesOverpriced(dt float64) bool {
	hardly := c.baseNS + c.WindowNS()/4
	if float64(c.waitedNS[writeLane]) <= (1-saturatedPart)*dt { // writes have all they ask for
		hardly = c.baseNS + c.WindowNS()/2
	}
	return c.reads > 0 && float64(c.waitedNS[readLane]) >= saturatedPart*dt && c.readLatencyNS < c.reads*float64(hardly)
}

// learnReads corrects the two parts of a read's cost. ratio is how much longer than estimated the reads of an interval
// took; each part is corrected in proportion to its share of the cost.
func (c *Costs) learnReads(ratio float64) {
	ratio = min(max(ratio, 0.5), 2)
	fixed, length := c.chargedReads*c.readNS, c.chargedBytes*c.readByteNS
	total := fixed + length
	fixed, length = fixed/total, length/total
	scale := readGain * (ratio - 1) / (fixed*fixed + length*length)
	c.readNS *= 1 + scale*fixed
	c.readByteNS *= 1 + scale*length
}

func (c *Costs) average(v *float64, sample, weight float64) { *v += weight * (sample - *v) }

// bound limits the cost of a written byte to a plausible range.
func (c *Costs) bound(byteNS float64) float64 {
	one := c.UnitNS() / unit
	return min(max(byteNS, minWriteCost*one), maxWriteCost*one)
}

// stats stores what is known of the drive in s.
func (c *Costs) stats(s *pipeline.Stats) {
	s.WriteCost = c.written() * unit / c.UnitNS()
	s.TargetBytesPerSec, s.CompletedBytesPerSec = c.targetRate, c.doneRate
	s.WindowNS = int64(c.width * float64(c.WindowNS()))
	full := c.baseNS + s.WindowNS
	for class := range s.Class {
		l := &s.Class[class]
		l.LatencyNS, l.ThresholdNS = int64(c.latency[class]), full
		switch {
		case l.LatencyNS > 2*full:
			l.State = pipeline.Overloaded
		case l.LatencyNS > full:
			l.State = pipeline.Congested
		case l.LatencyNS > c.baseNS+s.WindowNS/4:
			l.State = pipeline.Avoidance
		}
	}
}
