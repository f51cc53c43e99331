package flash

import (
	"math/bits"

	"jbofd/internal/invariants"
)

// Condition is the state in which a drive begins.
type Condition uint8

// The conditions.
const (
	// Empty: nothing was written.
	Empty Condition = iota
	// Clean: all was written once, in sequential writes.
	Clean
	// Fragmented: after that, 4 KiB random writes until write amplification is steady.
	Fragmented
)

// Precondition brings a drive on which nothing is in flight into a condition, in no virtual time, and
// resets its statistics. On an InPlace drive all conditions are the same.
func (d *Drive) Precondition(c Condition) {
	invariants.Check(d.inFlight == 0, "flash: nothing is in flight when the drive is preconditioned")
	d.reset()
	if d.ftl == nil || c == Empty {
		return
	}
	f := d.ftl
	units := uint32(len(f.l2p))
	for u := uint32(0); u < units; {
		n := min(f.programUnits, units-u)
		d.hostNow(func(k uint32) uint32 { return u + k }, n)
		u += n
	}
	if c == Fragmented {
		// Three times the capacity: amplification is steady after about two.
		for w := uint32(0); w < 3*units; w += f.programUnits {
			d.hostNow(func(uint32) uint32 { return d.rnd.below(units) }, f.programUnits)
		}
	}
	f.hostUnits, f.movedUnits, f.erases = 0, 0, 0
}

// hostNow programs n of the host's units on the next die, with the collection that it owes, in no time.
func (d *Drive) hostNow(unit func(uint32) uint32, n uint32) {
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

// collectNow does one step of a die's collection in no time; false if there is none to do.
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

// nextBit returns the first set bit of s at or after i, around the end.
func nextBit(s uint64, i int) int {
	if up := s >> (uint(i) % 64) << (uint(i) % 64); i < 64 && up != 0 {
		return bits.TrailingZeros64(up)
	}
	return bits.TrailingZeros64(s)
}
