package flash

import (
	"math/bits"

	"jbofd/internal/invariants"
)

const (
	// none is the absent address: that of an unmapped unit, or the content of an unused physical unit.
	none = ^uint32(0)
	// inBuffer marks a map entry that refers to a slot of the write buffer.
	inBuffer = uint32(1) << 31
	// maxProgramUnits is the maximum number of units that one program writes.
	maxProgramUnits = 16
)

// The states of a block.
const (
	blockFree     = iota // erased
	blockOpen            // being filled
	blockClosed          // full: can become a victim
	blockVictim          // its valid units are being gathered
	blockEmptying        // all valid units were gathered, the last ones are being programmed elsewhere
	blockErase           // holds no valid unit and waits for its erase
)

// frontier is the position of a die's next program: the remaining left units, starting at next.
type frontier struct {
	next, left uint32
}

// Each die has one frontier for host writes and one for units that collection moves.
const (
	hostFrontier = iota
	gcFrontier
	frontiers
)

// dieMap is the state of the translation layer for one die.
type dieMap struct {
	front [frontiers]frontier
	// free and erase are stacks of blocks, linked through ftl.next.
	free, erase uint32
	nFree       int
	// victim is the block whose valid units are being gathered, or none. scan is the next unit to look at.
	victim, scan uint32
	// owed is the number of units that collection must move before the next host program, in 1/256 units. Each full
	// host program adds share to it. Collection therefore keeps pace with host writes in small steps.
	owed, share int64
	// valid is the number of units on this die that the map refers to. Invariant: the sum of valid over its blocks.
	valid int64
}

// ftl is a page-mapped translation layer: it records the location of each host unit. It has no notion of time.
//
// Physical units are numbered die by die, block by block, in the order in which they are programmed.
type ftl struct {
	// l2p maps a host's unit to a physical unit, a slot of the buffer (inBuffer set), or none.
	l2p []uint32
	// p2l is the inverse map. Invariant: p2l[p] == u != none if and only if l2p[u] == p.
	p2l []uint32
	// Per block: the number of valid units, the state, and the link of the stack that holds the block.
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
	// maxValid is the maximum number of valid units on a die for which every collection frees space.
	maxValid int64

	// Counters of units programmed for hosts and by collection, both without padding, and of erases.
	hostUnits, movedUnits, erases uint64
}

func newFTL(c *Config) *ftl {
	pu := c.programUnits()
	perDie := uint32(c.blocksPerDie())
	blocks := perDie * uint32(c.dies())
	f := &ftl{
		l2p:   make([]uint32, c.SizeBytes/unitBytes),
		valid: make([]uint32, blocks), state: make([]uint8, blocks), next: make([]uint32, blocks),
		dieOf: make([]uint8, blocks),
		dies:  make([]dieMap, c.dies()), blocksPerDie: perDie,
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

// reset erases all blocks.
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

// invalidate removes the mapping of the physical unit.
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

// place maps the host unit u to the physical unit p.
func (f *ftl) place(u, p uint32) {
	f.l2p[u], f.p2l[p] = p, u
	b := p >> f.blockShift
	f.valid[b]++
	f.dies[f.dieOf[b]].valid++
}

// canProgram reports whether a frontier of the die has space or can open another block.
func (f *ftl) canProgram(die int, which int) bool {
	d := &f.dies[die]
	return d.front[which].left > 0 || d.nFree > f.reserve || which == gcFrontier && d.nFree > 0
}

// allocate returns the first physical unit of the next program at a frontier for which canProgram is true.
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

// collecting reports whether the die has so few erased blocks that it collects garbage.
func (f *ftl) collecting(die int) bool { return f.dies[die].nFree <= f.start }

// mustCollect reports whether the die must collect before the next host program.
func (f *ftl) mustCollect(die int) bool {
	d := &f.dies[die]
	if d.nFree > f.start {
		d.owed = 0
		return false
	}
	return d.owed >= int64(f.programUnits)<<8 || !f.canProgram(die, hostFrontier)
}

// charge adds the collection that a full host program requires.
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

// choose makes the closed block with the fewest valid units the victim (greedy). It reports whether there is a block
// whose collection frees space.
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
	// Collecting the block moves least units and frees space for (units per block - least) host units.
	d.share = int64(f.programUnits) * int64(least) << 8 / int64(1<<f.blockShift-least)
	return true
}

// gather finds up to one program of valid units in the victims of the die and writes their physical addresses to src.
// It also counts the pages to read for them. Blocks without remaining units go to the stack of blocks to erase.
func (f *ftl) gather(die int, src *[maxProgramUnits]uint32) (n, pages int) {
	d := &f.dies[die]
	lastPage := none
	for n < int(f.programUnits) {
		if d.victim == none {
			// A partly filled program does not wait for a second victim, unless collection needs one anyway.
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

// moved ends a program of collection. Units that are still mapped to their gathered addresses are now mapped to p and
// following.
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

// erased moves the top of the die's stack of blocks to erase to the stack of erased blocks.
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
