package pcie

import (
	"fmt"
	"math/bits"
	"sync/atomic"

	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
)

// MinEntries and MaxEntries bound the entries of a Ring, which are a power of two.
const MinEntries, MaxEntries = 2, 4096

// Ring is a submission queue and its completion queue, of one length. A command has a place in the ring from Next until
// Reap returns it; there are as many as entries, less one. Its CID is the place and a counter, so that a completion
// that comes twice, or for a command that was given up, is known.
//
// SQHD is not used: of the last so many commands that were submitted at least one has completed if there is a free
// place, and a controller fetches commands in order, so that it has fetched the entry that is next.
//
// One goroutine at a time calls the methods.
type Ring struct {
	id      uint16
	mask    uint32
	sq, cq  []byte
	regs    Registers
	sqBell  int
	cqBell  int
	shadow  *shadow
	tail    uint32 // of the submission queue
	rung    uint32 // what the controller was told of it
	head    uint32 // of the completion queue
	seen    uint32 // what the controller was told of it
	phase   uint32 // that of new entries: 1 << 16 or 0
	places  []uint32
	free    []uint16
	counter uint16
}

// busy is set in a place that has a command, beside its CID.
const busy = 1 << 16

// phaseBit is P in the last word of a CQE.
const phaseBit = 1 << 16

// shadow are the doorbells that the host and the controller exchange in memory (NVMe Base 2.0, section 5.8): the host
// writes a doorbell to the register only if the controller has asked for that in its event index.
type shadow struct{ sq, cq, sqEvent, cqEvent *atomic.Uint32 }

// newRing makes a ring in zeroed memory of sqBytes + cqBytes. stride is that of the doorbells in bytes.
func newRing(id uint16, entries int, memory []byte, regs Registers, stride int) *Ring {
	invariants.Check(entries >= MinEntries && entries <= MaxEntries && bits.OnesCount(uint(entries)) == 1,
		"pcie: a ring whose length is no power of two")
	sqBytes, cqBytes := ringBytes(entries)
	r := &Ring{id: id, mask: uint32(entries - 1), sq: memory[:entries*nvme.SQESize],
		cq: memory[sqBytes:][:entries*nvme.CQESize], regs: regs, places: make([]uint32, entries),
		free: make([]uint16, 0, entries)}
	invariants.Check(len(memory) >= sqBytes+cqBytes, "pcie: a ring with too little memory")
	r.sqBell = nvme.PropDoorbells + 2*int(id)*stride
	r.cqBell = r.sqBell + stride
	r.reset()
	return r
}

// ringBytes returns the memory of both queues, in whole pages.
func ringBytes(entries int) (sq, cq int) {
	return pages(entries * nvme.SQESize), pages(entries * nvme.CQESize)
}

// reset makes the ring empty, as the controller expects it when it creates the queues. All places are free.
func (r *Ring) reset() {
	clear(r.sq)
	clear(r.cq)
	r.tail, r.rung, r.head, r.seen, r.phase = 0, 0, 0, 0, phaseBit
	r.free = r.free[:0]
	for i := len(r.places) - 2; i >= 0; i-- {
		r.places[i] = 0
		r.free = append(r.free, uint16(i))
	}
}

// Places is how many commands there can be.
func (r *Ring) Places() int { return len(r.places) - 1 }

// Free is how many more commands the ring takes.
func (r *Ring) Free() int { return len(r.free) }

// Next takes a place, below Places, for a command. The entry is zero but for its CID. The caller fills it before Ring.
// There must be a free place.
//
// hot: 0 allocs
func (r *Ring) Next() (e *nvme.SQE, place int) {
	place = int(r.free[len(r.free)-1])
	r.free = r.free[:len(r.free)-1]
	r.counter++
	cid := uint16(place) | r.counter<<bits.Len32(r.mask)
	r.places[place] = busy | uint32(cid)
	at := r.tail * nvme.SQESize
	e = (*nvme.SQE)(r.sq[at : at+nvme.SQESize])
	*e = nvme.SQE{}
	e.SetCID(cid)
	r.tail = (r.tail + 1) & r.mask
	return e, place
}

// CID is that of the command in a place.
func (r *Ring) CID(place int) uint16 { return uint16(r.places[place]) }

// Submit tells the controller of new commands, with one write to its register at most.
//
// hot: 0 allocs
func (r *Ring) Submit() {
	if r.rung == r.tail {
		return
	}
	if r.shadow == nil || r.shadow.must(r.shadow.sq, r.shadow.sqEvent, r.tail) {
		r.regs.Store32(r.sqBell, r.tail)
	}
	r.rung = r.tail
}

// must writes a shadow doorbell, and returns whether the register must be written as well: the new value has passed the
// controller's event index. The order of the store and the load is that of sync/atomic.
func (s *shadow) must(bell, event *atomic.Uint32, v uint32) bool {
	old := bell.Swap(v)
	return uint16(v-event.Load()-1) < uint16(v-old)
}

// Ready reports whether there is a completion.
//
// hot: 0 allocs
func (r *Ring) Ready() bool {
	return word(r.cq, int(r.head*nvme.CQESize)+12).Load()&phaseBit == r.phase
}

// Reap returns the next completion, and frees its place. ok is false if there is none.
//
// Errors: ErrLies, if no command of that CID is under way. The completion is gone.
//
// hot: 0 allocs
func (r *Ring) Reap() (place int, c nvme.CQE, ok bool, err error) {
	if !r.Ready() {
		return 0, c, false, nil
	}
	readBarrier()
	at := r.head * nvme.CQESize
	c = nvme.CQE(r.cq[at : at+nvme.CQESize])
	if r.head = (r.head + 1) & r.mask; r.head == 0 {
		r.phase ^= phaseBit
	}
	cid := c.CID()
	place = int(uint32(cid) & r.mask)
	if r.places[place] != busy|uint32(cid) {
		return 0, c, true, fmt.Errorf("%w: queue %d has a completion of CID %#x, which is not under way", ErrLies, r.id,
			cid)
	}
	r.places[place] = 0
	r.free = append(r.free, uint16(place))
	return place, c, true, nil
}

// Seen tells the controller that the completions are taken.
//
// hot: 0 allocs
func (r *Ring) Seen() {
	if r.seen == r.head {
		return
	}
	if r.shadow == nil || r.shadow.must(r.shadow.cq, r.shadow.cqEvent, r.head) {
		r.regs.Store32(r.cqBell, r.head)
	}
	r.seen = r.head
}
