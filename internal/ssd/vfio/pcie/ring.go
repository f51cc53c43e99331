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

// Ring is a submission queue and its completion queue, of one length. A command has a slot (a place) in the ring from
// Next until Reap returns it. There is one slot less than there are entries. The CID is made of the slot and a counter,
// so that a completion that comes twice, or for a command that is not outstanding any more, is recognised.
//
// SQHD is not needed. At most entries-1 commands are outstanding. The entry that Next reuses was filled `entries`
// commands ago. Since a slot is free, that command or a later one has completed. The controller fetches entries in
// order, so it has fetched this one.
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
	tail    uint32   // of the submission queue
	rung    uint32   // the value of tail in the last doorbell write
	head    uint32   // of the completion queue
	seen    uint32   // the value of head in the last doorbell write
	phase   uint32   // that of new entries: 1 << 16 or 0
	places  []uint32 // by slot: busy and the CID of its command; 0: the slot is free
	free    []uint16 // the free slots
	counter uint16
}

// busy is set in Ring.places, beside the CID, for a slot that has a command.
const busy = 1 << 16

// phaseBit is P in the last word of a CQE.
const phaseBit = 1 << 16

// shadow are the doorbells that the host and the controller exchange in memory (NVMe Base 2.0, section 5.8): the host
// writes a doorbell to the register only if the controller has asked for that in its event index.
type shadow struct{ sq, cq, sqEvent, cqEvent *atomic.Uint32 }

// newRing makes a ring in memory of the length that ringBytes returns. stride is that of the doorbells in bytes.
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

// reset makes the ring empty, as the controller expects it when it creates the queues. All slots are free.
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

// Places is the number of slots: how many commands can be outstanding.
func (r *Ring) Places() int { return len(r.places) - 1 }

// Free is how many more commands the ring takes.
func (r *Ring) Free() int { return len(r.free) }

// Next takes a free slot, below Places, for a command. The entry is zero but for its CID. The caller fills it in before
// Submit. There must be a free slot.
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

// CID is that of the command in a slot.
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

// Reap returns the next completion, and frees its slot. ok is false if there is none.
//
// Errors: ErrInvalidResponse, if no command of that CID is outstanding. The completion is dropped.
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
		return 0, c, true, fmt.Errorf("%w: queue %d has a completion of CID %#x, which is not under way",
			ErrInvalidResponse, r.id, cid)
	}
	r.places[place] = 0
	r.free = append(r.free, uint16(place))
	return place, c, true, nil
}

// Seen tells the controller, through the doorbell of the completion queue, which completions were reaped.
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
