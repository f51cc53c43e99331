package flash

import (
	"math/bits"

	"jbofd/internal/invariants"
)

const (
	// none stands for no address: an unmapped unit, a physical unit that holds nothing.
	none = ^uint32(0)
	// inBuffer marks an entry of the map that is a slot of the write buffer.
	inBuffer = uint32(1) << 31
	// maxProgramUnits bounds the units that one program fills.
	maxProgramUnits = 16
)

// The states of a block.
const (
	blockFree     = iota // erased
	blockOpen            // being filled
	blockClosed          // full: can become a victim
	blockVictim          // its valid units are being looked for
	blockEmptying        // all found, the last ones are on their way elsewhere
	blockErase           // holds nothing valid, waits for its erase
)

// frontier is where a die's next program goes: left units from next on.
type frontier struct {
	next, left uint32
}

// Each die has a frontier for what hosts wrote and one for what collection moved.
const (
	hostFrontier = iota
	gcFrontier
	frontiers
)

// dieMap is the part of the translation layer that one die has for itself.
type dieMap struct {
	front [frontiers]frontier
	// free and erase are stacks of blocks, linked by ftl.next.
	free, erase uint32
	nFree       int
	// victim is the block whose units are collected, from scan on; none if there is none.
	victim, scan uint32
	// owed is how many units collection must move before the next host program, in 1/256; each host
	// program adds share (for a whole program): so collection keeps pace and comes in small pieces.
	owed, share int64
	// valid counts the units on this die that the map points at. Invariant: the sum of valid of its blocks.
	valid int64
}

// ftl is a page-mapped translation layer: where each unit of the host lies. It knows no time.
//
// Physical units are numbered die by die, block by block, in the order in which they are programmed.
type ftl struct {
	// l2p maps a host's unit to a physical unit, a slot of the buffer (inBuffer set), or none.
	l2p []uint32
	// p2l maps back. Invariant: p2l[p] == u != none if and only if l2p[u] == p.
	p2l []uint32
	// Per block: how many units are valid, its state, and the link of the stack it is in.
	valid []uint32
	state []uint8
	next  []uint32
	// dieOf is the die of each block.
	dieOf []uint8

	dies         []dieMap
	blocksPerDie uint32
	blockShift   uint
	programUnits uint32
	pageShift    uint
	reserve      int
	start        int
	// maxValid is what a die may hold at most so that its collection always gains something.
	maxValid int64

	// Counters, in units: programmed for hosts and by collection, padding included in neither; erases.
	hostUnits, movedUnits, erases uint64
}

func newFTL(c *Config) *ftl {
	pu := c.programUnits()
	perDie := uint32(c.blocksPerDie())
	blocks := perDie * uint32(c.dies())
	f := &ftl{
		l2p:   make([]uint32, c.SizeBytes/unitBytes),
		valid: make([]uint32, blocks), state: make([]uint8, blocks), next: make([]uint32, blocks), dieOf: make([]uint8, blocks),
		dies: make([]dieMap, c.dies()), blocksPerDie: perDie,
		blockShift:   uint(bits.TrailingZeros32(pu * uint32(c.BlockPrograms))),
		programUnits: pu, pageShift: uint(bits.TrailingZeros(uint(c.PageBytes / unitBytes))),
		reserve: c.GCReserveBlocks, start: c.GCStartBlocks,
	}
	f.p2l = make([]uint32, int(blocks)<<f.blockShift)
	f.maxValid = int64(perDie-uint32(c.GCReserveBlocks)-2) << f.blockShift
	f.maxValid -= f.maxValid / 64
	f.reset()
	return f
}

// reset erases everything.
func (f *ftl) reset() {
	fill(f.l2p, none)
	fill(f.p2l, none)
	clear(f.valid)
	clear(f.state)
	f.hostUnits, f.movedUnits, f.erases = 0, 0, 0
	for d := range f.dies {
		f.dies[d] = dieMap{free: none, erase: none, victim: none}
		first := uint32(d) * f.blocksPerDie
		for b := first + f.blocksPerDie; b > first; b-- { // the lowest is on top
			f.dieOf[b-1] = uint8(d)
			f.next[b-1] = f.dies[d].free
			f.dies[d].free = b - 1
		}
		f.dies[d].nFree = int(f.blocksPerDie)
	}
}

func fill(s []uint32, v uint32) {
	for i := range s {
		s[i] = v
	}
}

// invalidate forgets what the physical unit holds.
func (f *ftl) invalidate(p uint32) {
	f.p2l[p] = none
	b := p >> f.blockShift
	f.valid[b]--
	d := &f.dies[f.dieOf[b]]
	d.valid--
	if f.valid[b] == 0 && f.state[b] == blockEmptying {
		f.toErase(d, b)
	}
}

func (f *ftl) toErase(d *dieMap, b uint32) {
	f.state[b] = blockErase
	f.next[b] = d.erase
	d.erase = b
}

// place makes p the unit's place.
func (f *ftl) place(u, p uint32) {
	f.l2p[u], f.p2l[p] = p, u
	b := p >> f.blockShift
	f.valid[b]++
	f.dies[f.dieOf[b]].valid++
}

// canProgram reports whether a frontier of the die has room or may open a block.
func (f *ftl) canProgram(die int, which int) bool {
	d := &f.dies[die]
	return d.front[which].left > 0 || d.nFree > f.reserve || which == gcFrontier && d.nFree > 0
}

// allocate returns the first physical unit of the next program at a frontier that canProgram.
func (f *ftl) allocate(die int, which int) uint32 {
	d := &f.dies[die]
	w := &d.front[which]
	if w.left == 0 {
		b := d.free
		invariants.Check(b != none, "flash: a die has an erased block for its frontier")
		d.free = f.next[b]
		d.nFree--
		f.state[b] = blockOpen
		w.next, w.left = b<<f.blockShift, 1<<f.blockShift
	}
	p := w.next
	w.next += f.programUnits
	w.left -= f.programUnits
	if w.left == 0 {
		f.state[p>>f.blockShift] = blockClosed
	}
	return p
}

// collecting reports whether the die is short of erased blocks.
func (f *ftl) collecting(die int) bool { return f.dies[die].nFree <= f.start }

// mustCollect reports whether collection comes before the next host program.
func (f *ftl) mustCollect(die int) bool {
	d := &f.dies[die]
	if d.nFree > f.start {
		d.owed = 0
		return false
	}
	return d.owed >= int64(f.programUnits)<<8 || !f.canProgram(die, hostFrontier)
}

// charge notes a host program of a whole program's units: so much more must be collected.
func (f *ftl) charge(die int) {
	d := &f.dies[die]
	if d.nFree > f.start {
		return
	}
	if d.victim == none {
		f.choose(die)
	}
	d.owed += d.share
}

// choose makes the closed block with the fewest valid units the victim (greedy). It reports
// whether there is one whose collection gains anything.
func (f *ftl) choose(die int) bool {
	d := &f.dies[die]
	first := uint32(die) * f.blocksPerDie
	best, least := none, uint32(1)<<f.blockShift
	valid, state := f.valid[first:first+f.blocksPerDie], f.state[first:first+f.blocksPerDie]
	for i, v := range valid {
		if v < least && state[i] == blockClosed {
			best, least = first+uint32(i), v
		}
	}
	if best == none {
		return false
	}
	d.victim, d.scan = best, best<<f.blockShift
	f.state[best] = blockVictim
	// least units move for every block-least units of hosts.
	d.share = int64(f.programUnits) * int64(least) << 8 / int64(1<<f.blockShift-least)
	return true
}

// gather finds up to a program's worth of valid units in victims of the die and writes their physical
// addresses to src. It also counts the pages that must be read for them. Blocks in which
// nothing is left go to the stack of those to erase.
func (f *ftl) gather(die int, src *[maxProgramUnits]uint32) (n, pages int) {
	d := &f.dies[die]
	lastPage := none
	for n < int(f.programUnits) {
		if d.victim == none {
			// A program that is partly filled waits for no second victim unless one is needed anyway.
			if !f.collecting(die) || !f.choose(die) {
				break
			}
		}
		end := (d.victim + 1) << f.blockShift
		p := d.scan
		for ; p < end && n < int(f.programUnits); p++ {
			if f.p2l[p] == none {
				continue
			}
			src[n] = p
			n++
			if p>>f.pageShift != lastPage {
				lastPage = p >> f.pageShift
				pages++
			}
		}
		d.scan = p
		if p < end {
			break
		}
		if f.valid[d.victim] == 0 {
			f.toErase(d, d.victim)
		} else {
			f.state[d.victim] = blockEmptying
		}
		d.victim = none
	}
	return n, pages
}

// moved ends a collection's program: units that still are where they were gathered are now at p and on.
func (f *ftl) moved(src []uint32, units []uint32, p uint32) {
	for i, from := range src {
		u := units[i]
		if f.l2p[u] == from {
			f.invalidate(from)
			f.place(u, p+uint32(i))
		}
	}
	f.movedUnits += uint64(len(src))
	d := &f.dies[f.dieOf[p>>f.blockShift]]
	d.owed = max(0, d.owed-int64(len(src))<<8)
}

// erased returns the top of the die's stack of blocks to erase to the erased ones.
func (f *ftl) erased(die int) {
	d := &f.dies[die]
	b := d.erase
	d.erase = f.next[b]
	f.state[b] = blockFree
	f.next[b] = d.free
	d.free = b
	d.nFree++
	f.erases++
}
