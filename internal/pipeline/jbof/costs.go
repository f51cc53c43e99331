package jbof

import "jbofd/internal/pipeline"

// Profile is what a drive does with reads while nothing else is asked of it.
type Profile struct {
	// ReadNS is the device time of a read whatever its length, ReadByteNS that of each
	// byte beside it.
	ReadNS, ReadByteNS float64
	// LatencyNS is how long a lone 4 KiB read takes.
	LatencyNS int64
	// Depth is how many 4 KiB reads must be outstanding to keep the drive busy.
	Depth int
}

// defaultProfile is a common NVMe drive: 400 K reads a second of 4 KiB, 3.2 GB/s in
// large ones.
var defaultProfile = Profile{ReadNS: 1200, ReadByteNS: 0.31, LatencyNS: 90_000, Depth: 96}

// Costs is the estimate of what I/Os cost a drive, in ns of device time.
//
// While a drive is saturated, the costs of what it completes add up to the time
// that passes. In intervals with reads only, that corrects the cost of reads. In
// intervals with both, reads are taken to cost what they did alone, and the rest of the
// time is what the written bytes cost: with garbage collection, buffers and all, whatever
// the drive does because of writes is in it, and no latency needs to be interpreted.
type Costs struct {
	readNS, readByteNS float64
	writeByteNS        float64
	// otherNS averages the latency of operations that move no data: they are charged as
	// if they had the drive to themselves.
	otherNS [pipeline.Ops]float64
	depth   float64
	baseNS  int64

	// Of the current interval.
	saturatedNS                  int64
	reads, readBytes, writeBytes float64
	othersNS, readLatencyNS      float64
	// quiet counts intervals without writes: a drive flushes its buffer and collects
	// garbage for a while after them.
	quiet int

	// For Stats.
	latency              [pipeline.Classes]float64
	targetRate, doneRate float64
}

const (
	// saturatedPart of an interval must be, for it to teach anything.
	saturatedPart = 0.9
	// writeGain, readGain are the weights of an interval in the averages of what writes
	// and reads cost. Writes change with the drive's state within a second, reads over
	// hours.
	writeGain, readGain = 0.25, 0.05
	// leastWrites is the part of an interval's cost that writes must have to be
	// measured against reads.
	leastWrites = 0.03
	// quietIntervals without writes make an interval one of reads only.
	quietIntervals = 25
	// dearestWrite and cheapestWrite bound the cost of a written byte against that of
	// a read byte in 4 KiB reads.
	dearestWrite, cheapestWrite = 64, 0.25
	// otherMaxNS bounds the charge for an operation that moves no data.
	otherMaxNS = 2_000_000
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
	c := Costs{readNS: pr.ReadNS, readByteNS: pr.ReadByteNS, depth: float64(pr.Depth), baseNS: pr.LatencyNS, quiet: quietIntervals}
	c.writeByteNS = c.UnitNS() / unit
	return c
}

// UnitNS is what a 4 KiB read costs.
func (c *Costs) UnitNS() float64 { return c.readNS + c.readByteNS*unit }

// WindowNS is the device time that must be outstanding to keep the drive busy. It is
// bound to a number of reads, not to a time: if reads were thought too dear, a window of
// constant time would hold fewer of them, the drive would do less, and they would
// seem dearer still.
func (c *Costs) WindowNS() int64 { return int64(c.depth * c.UnitNS()) }

// Of returns what an I/O costs.
//
// hot: 0 allocs
func (c *Costs) Of(op pipeline.Op, lenBytes int64) int64 {
	switch op.Class() {
	case pipeline.ReadClass:
		return int64(c.readNS + c.readByteNS*float64(lenBytes))
	case pipeline.WriteClass:
		return int64(c.writeByteNS * float64(units(lenBytes)*unit))
	}
	return int64(max(c.otherNS[op], c.UnitNS()))
}

// Completed says that an I/O is done.
//
// hot: 0 allocs
func (c *Costs) Completed(op pipeline.Op, lenBytes, latencyNS int64) {
	class := op.Class()
	c.latency[class] += (float64(latencyNS) - c.latency[class]) / 16
	switch class {
	case pipeline.ReadClass:
		c.reads++
		c.readBytes += float64(lenBytes)
		c.readLatencyNS += float64(latencyNS)
	case pipeline.WriteClass:
		c.writeBytes += float64(units(lenBytes) * unit)
	default:
		c.othersNS += max(c.otherNS[op], c.UnitNS())
		c.otherNS[op] += (float64(min(latencyNS, otherMaxNS)) - c.otherNS[op]) / 16
	}
}

// Saturated says that for ns of the current interval I/Os waited while the drive had
// all that it was to have.
func (c *Costs) Saturated(ns int64) { c.saturatedNS += ns }

// Learn ends an interval of ns.
func (c *Costs) Learn(_, ns int64) {
	if c.writeBytes > 0 {
		c.quiet = 0
	} else {
		c.quiet++
	}
	readsNS := c.reads*c.readNS + c.readBytes*c.readByteNS
	writesNS := c.writeBytes * c.writeByteNS
	dt := float64(ns)
	if c.saturated(readsNS, dt) && c.othersNS < 0.2*dt {
		switch {
		case c.writeBytes == 0 && c.quiet >= quietIntervals && c.reads > 0:
			c.learnReads(dt / readsNS)
		case writesNS >= leastWrites*dt:
			c.learnWrites((dt - readsNS - c.othersNS) / c.writeBytes)
		}
	}
	if ns > 0 {
		c.doneRate = (c.readBytes + c.writeBytes) * 1e9 / dt
		if cost := readsNS + writesNS + c.othersNS; cost > 0 {
			c.targetRate = (c.readBytes + c.writeBytes) * 1e9 / cost
		}
	}
	c.saturatedNS, c.reads, c.readBytes, c.writeBytes, c.othersNS, c.readLatencyNS = 0, 0, 0, 0, 0, 0
}

// saturated reports whether the drive was busy for the whole interval of dt ns: I/Os
// waited for it, or reads took longer than a whole window of them would. The latter
// tells when writes are dearer than thought and therefore none wait.
func (c *Costs) saturated(readsNS, dt float64) bool {
	if float64(c.saturatedNS) >= saturatedPart*dt {
		return true
	}
	return c.reads > 0 && c.readLatencyNS-readsNS > c.reads*float64(c.baseNS+c.WindowNS())
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

// learnWrites averages the cost of a written byte.
func (c *Costs) learnWrites(byteNS float64) {
	one := c.UnitNS() / unit
	byteNS = min(max(byteNS, cheapestWrite*one), dearestWrite*one)
	c.writeByteNS += writeGain * (byteNS - c.writeByteNS)
}

// stats writes what is known of the drive.
func (c *Costs) stats(s *pipeline.Stats) {
	s.WriteCost = c.writeByteNS * unit / c.UnitNS()
	s.TargetBytesPerSec, s.CompletedBytesPerSec = c.targetRate, c.doneRate
	full := c.baseNS + c.WindowNS()
	for class := range s.Class {
		l := &s.Class[class]
		l.LatencyNS, l.ThresholdNS = int64(c.latency[class]), full
		switch {
		case l.LatencyNS > 2*full:
			l.State = pipeline.Overloaded
		case l.LatencyNS > full:
			l.State = pipeline.Congested
		case l.LatencyNS > c.baseNS+c.WindowNS()/4:
			l.State = pipeline.Avoidance
		}
	}
}
