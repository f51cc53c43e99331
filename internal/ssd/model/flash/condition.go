package flash

import (
	"math"
	"math/bits"

	"jbofd/internal/invariants"
)

// Condition is the initial state of a drive.
type Condition uint8

// The conditions.
const (
	// Empty: no unit was written.
	Empty Condition = iota
	// Clean: every unit was written once, sequentially.
	Clean
	// Fragmented: after the state Clean, random 4 KiB writes continued until the write amplification was steady.
	Fragmented
)

// Precondition brings an idle drive into a condition and resets its statistics. It takes no virtual time. On an InPlace
// drive all conditions are the same.
func (d *Drive) Precondition(c Condition) {
	invariants.Check(d.inFlight == 0, "flash: nothing is in flight when the drive is preconditioned")
	d.reset()
	if d.ftl == nil || c == Empty {
		return
	}
	f := d.ftl
	units := uint32(len(f.l2p))
	if c == Clean {
		for u := uint32(0); u < units; {
			n := min(f.programUnits, units-u)
			d.programNow(func(k uint32) uint32 { return u + k }, n)
			u += n
		}
	} else {
		d.scatter()
		// Real random writes complete the state, because scatter does not model everything, such as the spread of valid
		// units among victims.
		for w := uint32(0); w < units/2; w += f.programUnits {
			d.programNow(func(uint32) uint32 { return d.rnd.below(units) }, f.programUnits)
		}
	}
	f.hostUnits, f.movedUnits, f.erases = 0, 0, 0
}

// scatter fills an erased drive with the state that a long sequence of uniform random writes leaves. Units lie in
// random order. The number of valid units per block decreases exponentially from the newest block of a die to the
// oldest, because each write invalidates any unit with the same probability. The oldest block is the next victim.
func (d *Drive) scatter() {
	f := d.ftl
	order := make([]uint32, len(f.l2p))
	for i := range order {
		order[i] = uint32(i)
		k := d.rnd.below(uint32(i + 1))
		order[i], order[k] = order[k], order[i]
	}
	blockUnits := uint32(1) << f.blockShift
	for i := range f.dies {
		mine := order[len(order)*i/len(f.dies) : len(order)*(i+1)/len(f.dies)]
		n := int(f.blocksPerDie) - f.start - 1 // without the blocks that collection keeps erased and the frontiers
		// Find the decay over all blocks that gives this number of valid units: fill = (1 - e^-decay) / decay.
		fill := float64(len(mine)) / (float64(n) * float64(blockUnits))
		low, high := 1e-9, 50.0
		for range 60 {
			if mid := (low + high) / 2; -math.Expm1(-mid)/mid > fill {
				low = mid
			} else {
				high = mid
			}
		}
		upTo := func(block int) int { // number of valid units in the oldest blocks
			return int(float64(len(mine)) * math.Expm1(low*float64(block)/float64(n)) / math.Expm1(low))
		}
		for block := range n {
			valid := mine[upTo(block):]
			if block < n-1 {
				valid = mine[upTo(block):upTo(block+1)]
			}
			d.fillBlock(i, valid)
		}
	}
}

// fillBlock programs the die's next block with the units at random positions.
func (d *Drive) fillBlock(i int, units []uint32) {
	f := d.ftl
	p := f.allocate(i, hostFrontier)
	left := uint32(1) << f.blockShift
	invariants.Check(len(units) <= int(left), "flash: a block holds its valid units")
	for ; left > 0; left-- {
		if d.rnd.below(left) < uint32(len(units)) {
			f.place(units[0], p)
			units = units[1:]
		}
		p++
		if left > 1 && (left-1)%f.programUnits == 0 {
			f.allocate(i, hostFrontier)
		}
	}
}

// programNow programs n host units on the next die, and performs the garbage collection that they require, in no
// virtual time.
func (d *Drive) programNow(unit func(uint32) uint32, n uint32) {
	f := d.ftl
	i := d.nextDie % len(d.dies)
	for f.dies[i].valid+int64(f.programUnits) > f.maxValid {
		i = (i + 1) % len(d.dies)
	}
	d.nextDie = i + 1
	for f.mustCollect(i) {
		if !d.collectNow(i) {
			break
		}
	}
	f.charge(i)
	p := f.allocate(i, hostFrontier)
	for k := range n {
		u := unit(k)
		if at := f.l2p[u]; at != none {
			f.invalidate(at)
		}
		f.place(u, p+k)
	}
	f.hostUnits += uint64(n)
}

// collectNow performs one step of a die's garbage collection in no virtual time. It returns false if there is nothing
// to collect.
func (d *Drive) collectNow(i int) bool {
	f := d.ftl
	if f.dies[i].erase != none {
		f.erased(i)
		return true
	}
	var j job
	n, _ := f.gather(i, &j.from)
	if n == 0 {
		return f.dies[i].erase != none
	}
	for k := range n {
		j.units[k] = f.p2l[j.from[k]]
	}
	f.moved(j.from[:n], j.units[:n], f.allocate(i, gcFrontier))
	return true
}

// nextBit returns the index of the first set bit of s at or after i, wrapping around.
func nextBit(s uint64, i int) int {
	if up := s >> (uint(i) % 64) << (uint(i) % 64); i < 64 && up != 0 {
		return bits.TrailingZeros64(up)
	}
	return bits.TrailingZeros64(s)
}
