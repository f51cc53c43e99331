package jbof

import "jbofd/internal/pipeline"

// Profile is what a drive does with reads while nothing else is asked of it.
type Profile struct {
	// ReadNS is the device time of a read whatever its length, ReadByteNS that of each
	// byte beside it.
	ReadNS, ReadByteNS float64
	// LatencyNS is how long a lone 4 KiB read takes.
	LatencyNS int64
	// Depth is how many 4 KiB reads must be outstanding to keep the drive busy, LargeDepth
	// how many of 128 KiB.
	Depth, LargeDepth int
	// Fixed: the drive answers within Submit. How long it takes says how busy the processor
	// is, and teaches nothing.
	Fixed bool
}

// defaultProfile is a common NVMe drive: 400 K reads a second of 4 KiB, 3.2 GB/s in
// large ones.
var defaultProfile = Profile{ReadNS: 1200, ReadByteNS: 0.31, LatencyNS: 90_000, Depth: 96, LargeDepth: 8}

// Costs is the estimate of what I/Os cost a drive, in ns of device time: what an I/O
// takes of a drive that does nothing else than such I/Os.
//
// Reads are measured by calibration, and corrected while only reads saturate the drive:
// then the costs of what completes add up to the time that passes. Writes cannot be
// tried out on a drive with data, and cost something else every minute, with
// garbage collection, buffers and all. So they are measured at work: when only writes
// saturate the drive, and now and then while reads and writes compete. Then writes get
// most of the drive for 0.14 s (see probe), which tells what they would do alone. No latency needs to be interpreted.
type Costs struct {
	fixed              bool
	readNS, readByteNS float64
	writeByteNS        float64
	// storm tells, from 0 to 1, whether writes come in such numbers that they cost what
	// was found; a few go into a drive's buffer and cost no more than reads.
	storm float64
	// otherNS is the least latency of operations that move no data. They are charged
	// otherPart of it: their latency is mostly not the drive's time, and what is, is what
	// reads and writes leave.
	otherNS   [pipeline.Ops]float64
	otherPart float64
	depth     float64
	baseNS    int64
	// place and placeByte are the part of the window that a read takes, whatever its
	// length and by the byte: one read of 128 KiB keeps more dies busy than one of 4 KiB,
	// but not by as much as it costs.
	place, placeByte float64
	// wide is how many times the window must be what reads alone need.
	wide float64

	probe probe

	// Of the current interval.
	waitedNS                     [lanes]int64 // I/Os of a lane waited
	saturatedNS                  int64        // some did
	reads, readBytes, writeBytes float64
	othersNS, readLatencyNS      float64
	// quiet counts intervals without writes: a drive flushes its buffer and collects
	// garbage for a while after them.
	quiet int

	// For Stats.
	latency              [pipeline.Classes]float64
	targetRate, doneRate float64
}

// probe is the state of the measurement of writes.
type probe struct {
	// left are the intervals until it is over, 0 if there is none; wait those until the next one;
	// waits is what wait began with.
	left, wait, waits int
	// rest are the intervals that teach nothing, for the drive still works on what the
	// probe wrote.
	rest int
	// tilt is how many times reads count.
	tilt int64
	// read is the reads' part of the time, written the bytes a ns: point before the
	// probe, and the sums during it.
	read, written       float64
	sumRead, sumWritten float64
	// known: there was one.
	known bool
	// usual averages the sum of costs, by which a change is noticed; strange counts the
	// intervals in a row that differ from it.
	usual   float64
	strange int
}

const (
	// saturatedPart of an interval must be, for it to teach anything.
	saturatedPart = 0.9
	// mixGain, readGain are the weights of an interval in averages: of a mix, which
	// changes with the drive's state within a second, and of what reads cost.
	mixGain, readGain = 0.25, 0.05
	// leastWrites is the part of an interval's cost that writes must have to be
	// measured against reads.
	leastWrites = 0.03
	// tooDear is by how much less writes are thought to cost after an interval in which they kept reads from a drive
	// that was not busy.
	tooDear = 0.1
	// quietIntervals without writes make an interval one of reads only.
	quietIntervals = 25
	// dearestWrite and cheapestWrite bound the cost of a written byte against that of
	// a read byte in 4 KiB reads.
	dearestWrite, cheapestWrite = 64, 0.25
	// cheapestOther is the least that an operation that moves no data costs, in 4 KiB
	// reads. An interval in which they cost at least leastOthers measures them, one with more than
	// mostOthers nothing else.
	cheapestOther, leastOthers, mostOthers = 0.25, 0.05, 0.5
	// otherMaxNS bounds the charge for an operation that moves no data.
	otherMaxNS = 2_000_000
	// mixedWidth is the width of the window beside writes, whose programs reads wait for.
	mixedWidth = 1.75
	// leastMixed is the part of the cost that both reads and writes must have to make a mix.
	leastMixed = 0.1

	// stormUp and stormDown are the weights of an interval in whether writes are many.
	stormUp, stormDown = 0.7, 0.04

	// A probe lasts probeTicks, of which the first probeSettle are not counted: buffers
	// fill. Reads count probeTilt times meanwhile, times their weight against that of
	// writes, so that writes have four fifths of the drive. Probes come after probeFirst intervals
	// of a mix, then after probeMore times as many each time up to probeLast, five minutes:
	// then reads are slow for less than 0.05 % of the time.
	probeTicks, probeSettle = 7, 4
	probeTilt               = 4
	probeFirst, probeLast   = 5, 15000
	probeMore               = 64
	probeRest               = 12
	// strangeLow intervals whose sum of costs is less by strangePart than usual, or
	// strangeMost in which it is more (an empty buffer does that, too), make what was known
	// of writes obsolete.
	strangeLow, strangeMost, strangePart = 5, 25, 0.25
)

// NewCosts starts from a profile; zero fields are filled from a common drive's.
func NewCosts(pr Profile) Costs {
	d := defaultProfile
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
	c := Costs{fixed: pr.Fixed, readNS: pr.ReadNS, readByteNS: pr.ReadByteNS, depth: float64(pr.Depth), baseNS: pr.LatencyNS, quiet: quietIntervals, wide: 1, otherPart: 0.1}
	c.probe.wait, c.probe.waits = probeFirst, probeFirst
	small, big := 1/float64(pr.Depth), 1/float64(pr.LargeDepth)
	c.placeByte = max(big-small, 0) / (large - unit)
	c.place = small - c.placeByte*unit
	c.writeByteNS = c.UnitNS() / unit
	return c
}

// UnitNS is what a 4 KiB read costs.
func (c *Costs) UnitNS() float64 { return c.readNS + c.readByteNS*unit }

// WindowNS is the device time of as many 4 KiB reads as keep the drive busy.
func (c *Costs) WindowNS() int64 { return int64(c.depth * c.UnitNS()) }

// windowOne is a whole window, in the units of Place.
const windowOne = 1 << 20

// Window is how much may be outstanding, in the units of Place. It is a number of reads,
// not a time: if reads were thought too dear, a window of constant time would hold
// fewer of them, the drive would do less, and they would seem dearer still.
func (c *Costs) Window() int64 { return int64(c.wide * windowOne) }

// Of returns what an I/O costs and the place that it takes in the window.
//
// hot: 0 allocs
func (c *Costs) Of(op pipeline.Op, lenBytes int64) (costNS, place int64) {
	switch op.Class() {
	case pipeline.ReadClass:
		atOnce := lenBytes
		if op == pipeline.Verify {
			atOnce = min(lenBytes, large) // however large: it reads piece by piece
		}
		return int64(c.readNS + c.readByteNS*float64(lenBytes)), int64((c.place + c.placeByte*float64(atOnce)) * windowOne)
	case pipeline.WriteClass:
		ns := c.written() * float64(units(lenBytes)*unit)
		return int64(ns), int64(ns / (c.depth * c.UnitNS()) * windowOne)
	}
	ns := c.other(op)
	return int64(ns), int64(ns / (c.depth * c.UnitNS()) * windowOne)
}

// written is what a written byte costs at the moment.
func (c *Costs) written() float64 {
	calm := min(c.UnitNS()/unit, c.writeByteNS)
	return calm + c.storm*(c.writeByteNS-calm)
}

// Probing reports whether writes are asked to show what they can do.
func (c *Costs) Probing() bool { return c.probe.left > 0 }

// other is what an operation costs that moves no data.
func (c *Costs) other(op pipeline.Op) float64 {
	return max(c.otherPart*c.otherNS[op], cheapestOther*c.UnitNS())
}

// Tilt is how many times a read's cost counts at the moment.
func (c *Costs) Tilt() int64 {
	if c.probe.left > 0 {
		return c.probe.tilt
	}
	return 1
}

// Completed says that an I/O is done.
//
// hot: 0 allocs
func (c *Costs) Completed(op pipeline.Op, lenBytes, latencyNS int64) {
	class := op.Class()
	// What is done in several requests, one after the other, says nothing of the drive's load.
	single := op != pipeline.Compare && op != pipeline.CompareWrite && op != pipeline.Verify
	if single {
		c.latency[class] += (float64(latencyNS) - c.latency[class]) / 16
	}
	switch class {
	case pipeline.ReadClass:
		c.reads++
		c.readBytes += float64(lenBytes)
		if single {
			c.readLatencyNS += float64(latencyNS)
		} else {
			c.readLatencyNS += c.readNS + c.readByteNS*float64(lenBytes)
		}
	case pipeline.WriteClass:
		c.writeBytes += float64(units(lenBytes) * unit)
	default:
		c.othersNS += c.other(op)
		if ns := float64(min(max(latencyNS, 1), otherMaxNS)); c.otherNS[op] == 0 || ns < c.otherNS[op] {
			c.otherNS[op] = ns
		} else {
			c.otherNS[op] += (ns - c.otherNS[op]) / 4096 // it may have become slower
		}
	}
}

// Waited says that for ns of the current interval I/Os of these lanes waited while the
// drive had all that it was to have.
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

// laneNS is what a lane's I/Os of the current interval cost.
func (c *Costs) laneNS(lane int) float64 {
	if lane == readLane {
		return c.reads*c.readNS + c.readBytes*c.readByteNS
	}
	return c.writeBytes * c.writeByteNS
}

// Learn ends an interval of ns. weights are those of the tenants active in each lane.
func (c *Costs) Learn(weights [lanes]int64, ns int64) {
	if c.writeBytes > 0 {
		c.quiet = 0
	} else {
		c.quiet++
	}
	dt := float64(max(ns, 1))
	readsNS, writesNS := c.laneNS(readLane), c.laneNS(writeLane)
	mixed := false
	if cost := readsNS + writesNS + c.othersNS; cost > 0 {
		mixed = min(writesNS, readsNS) > leastMixed*cost
		c.widen(mixed && min(c.waitedNS[readLane], c.waitedNS[writeLane]) > ns/2)
		c.targetRate = (c.readBytes + c.writeBytes) * 1e9 / cost * max(1, c.probe.usual)
	}
	c.doneRate = (c.readBytes + c.writeBytes) * 1e9 / dt
	if writesNS >= leastMixed*dt {
		c.average(&c.storm, 1, stormUp)
	} else {
		c.average(&c.storm, 0, stormDown)
	}
	saturated := !c.fixed && c.saturated(readsNS, dt)
	if saturated && c.probe.left == 0 && c.readsMeetNobody(dt) {
		c.writeByteNS = max(c.writeByteNS*(1-tooDear), min(c.writeByteNS, c.UnitNS()/unit))
	}
	if saturated && c.othersNS > leastOthers*dt {
		want := (dt - readsNS - writesNS) / c.othersNS
		c.otherPart *= 1 + mixGain*(min(max(want, 0.25), 2)-1)
		c.otherPart = min(max(c.otherPart, 1e-3), 1)
	}
	saturated = saturated && c.othersNS < mostOthers*dt
	switch {
	case saturated && c.writeBytes == 0 && c.quiet >= quietIntervals && c.reads > 0:
		c.learnReads(dt / readsNS)
	case saturated && readsNS < leastWrites*dt && writesNS >= leastMixed*dt:
		c.average(&c.writeByteNS, c.bound((dt-readsNS-c.othersNS)/c.writeBytes), mixGain)
		c.probe.known, c.probe.left = true, 0
	case saturated && (c.probe.left > 0 || writesNS >= leastWrites*dt && readsNS >= leastWrites*dt):
		c.learnMix(readsNS/dt, c.writeBytes/dt, float64(weights[readLane])/float64(max(weights[writeLane], 1)))
	default:
		c.probe.left = 0
	}
	c.waitedNS = [lanes]int64{}
	c.saturatedNS, c.reads, c.readBytes, c.writeBytes, c.othersNS, c.readLatencyNS = 0, 0, 0, 0, 0, 0
}

// widen sets how wide the window is. In a mix reads wait for programs in the drive, and more of
// them are needed to keep it busy; but if either lane has all that it asks for in
// the drive, the drive decides who is served, and the window is too wide.
func (c *Costs) widen(bothWait bool) {
	if bothWait {
		c.wide = min(c.wide*1.1, mixedWidth)
	} else {
		c.wide = max(c.wide*0.95, 1)
	}
}

// saturated reports whether the drive was busy for the whole interval of dt ns: I/Os
// waited for it, or reads took longer than a whole window of them would. The latter
// tells when writes are dearer than thought and therefore none wait.
func (c *Costs) saturated(readsNS, dt float64) bool {
	if float64(c.saturatedNS) >= saturatedPart*dt {
		return true
	}
	return c.reads > 0 && c.readLatencyNS-readsNS > c.reads*c.wide*float64(c.baseNS+c.WindowNS())
}

// readsMeetNobody reports whether reads waited here all the time, and those in the drive took hardly longer than a lone one. Then
// the drive is not busy, and what they waited for are writes that are thought too dear: a few of those fill the window, keep
// reads out, and would be found to cost what the reads then leave of the time. A probe does not tell where writes cannot
// become more because they follow reads, as those of a key-value store do.
func (c *Costs) readsMeetNobody(dt float64) bool {
	hardly := c.baseNS + c.WindowNS()/4
	if float64(c.waitedNS[writeLane]) <= (1-saturatedPart)*dt { // writes have all they ask for
		hardly = c.baseNS + c.WindowNS()/2
	}
	return c.reads > 0 && float64(c.waitedNS[readLane]) >= saturatedPart*dt && c.readLatencyNS < c.reads*float64(hardly)
}

// learnReads corrects the two parts of a read's cost by how much longer than
// thought the reads of an interval took, each by its part in it.
func (c *Costs) learnReads(ratio float64) {
	ratio = min(max(ratio, 0.5), 2)
	fixed, length := c.reads*c.readNS, c.readBytes*c.readByteNS
	total := fixed + length
	fixed, length = fixed/total, length/total
	scale := readGain * (ratio - 1) / (fixed*fixed + length*length)
	c.readNS *= 1 + scale*fixed
	c.readByteNS *= 1 + scale*length
}

// learnMix takes an interval in which the drive was busy with reads for read of its
// time, and wrote so many bytes a ns. readWeight is the weight of the tenants that read
// against those that write.
func (c *Costs) learnMix(read, written, readWeight float64) {
	p := &c.probe
	if p.rest > 0 {
		p.rest--
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
	if p.usual == 0 {
		p.read, p.written, p.usual = read, written, sum
	}
	switch {
	case sum < (1-strangePart)*p.usual:
		p.strange += strangeMost / strangeLow
	case sum > (1+strangePart)*p.usual:
		p.strange++
	default:
		p.strange = 0
	}
	c.average(&p.read, read, mixGain)
	c.average(&p.written, written, mixGain)
	c.average(&p.usual, sum, mixGain/8)
	if p.strange >= strangeMost {
		p.usual, p.strange, p.known = 0, 0, false
		p.wait, p.waits = min(p.wait, probeFirst), probeFirst
	}
	if p.wait--; p.wait <= 0 {
		p.left, p.sumRead, p.sumWritten = probeTicks, 0, 0
		p.tilt = int64(min(max(probeTilt*readWeight, probeTilt), 1000))
	}
}

// probed ends a probe: the line through the points of the usual mix and of the
// probe's leads to what writes would do alone.
func (c *Costs) probed(read, written float64) {
	p := &c.probe
	p.waits = min(probeMore*p.waits, probeLast)
	p.wait, p.rest = p.waits, probeRest
	if written <= 0 {
		return
	}
	// Writes that do not ask for more although they may, or reads that do not mind, cost at
	// most what reads leave of the time.
	ns := (1 - read) / written
	if p.read-read >= 0.1*p.read {
		slope := max((written-p.written)/(p.read-read), 0)
		ns = 1 / (written + slope*read)
	}
	ns = c.bound(ns)
	if p.known {
		ns = (ns + c.writeByteNS) / 2
	}
	c.writeByteNS, p.known = ns, true
	p.usual, p.strange = 0, 0
}

func (c *Costs) average(v *float64, sample, weight float64) { *v += weight * (sample - *v) }

// bound keeps the cost of a written byte plausible.
func (c *Costs) bound(byteNS float64) float64 {
	one := c.UnitNS() / unit
	return min(max(byteNS, cheapestWrite*one), dearestWrite*one)
}

// stats writes what is known of the drive.
func (c *Costs) stats(s *pipeline.Stats) {
	s.WriteCost = c.written() * unit / c.UnitNS()
	s.TargetBytesPerSec, s.CompletedBytesPerSec = c.targetRate, c.doneRate
	s.WindowNS = int64(c.wide * float64(c.WindowNS()))
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
