// Package drr is deficit round robin over virtual slots. Tenants take turns. A turn lasts as long as the tenant's
// deficit pays for its I/Os and the tenant has an open slot. A slot is a group of consecutive I/Os of one tenant with a
// bounded weighted length. The slots of an SSD are divided among the active tenants, which bounds what each has at the
// device. A tenant whose slots are all full is deferred until one of them has completed.
//
//	            Enqueue            Head, Serve           Complete
//	idle ───────────────> active ───────────────> slot ───────────> free slot
//	  ^                   │    ^                   │ full, no other     │
//	  └── nothing queued ─┘    └───── deferred <───┘        <───────────┘
//
// A Scheduler is a state machine: it has no clock and no lock, and one goroutine at a time may call it. The caller
// gives the weight of an I/O when it is the I/O's turn.
//
// Source: Gimbal (SIGCOMM'21), virtual slots, and the released code. That code decides by queued bytes whether a queue
// is empty, which strands I/Os of length 0; this package decides by their number.
package drr

import (
	"math/bits"

	"jbofd/internal/invariants"
	"jbofd/internal/tenant"
)

// Tag identifies an I/O from Enqueue to Complete, Cancel or Remove. Tags index a slab, so they should be small.
type Tag uint32

const (
	noTenant = tenant.None
	noTag    = ^Tag(0)
	noSlot   = 0xff
)

// MaxSlots is how many slots a Scheduler may have.
const MaxSlots = 64

// Config of a Scheduler.
type Config struct {
	// Slots is how many the active tenants share, 1 to MaxSlots. Each has one at least.
	Slots int
	// SlotBytes is the weighted length at which a slot is full. The I/O that fills a slot belongs to it, whatever its
	// length.
	SlotBytes int64
	// QuantumBytes is what a turn adds to the deficit of a tenant of weight 1, at least 1.
	QuantumBytes int64
	// FirstIOs and FirstUnits are the assumed content of a slot until a tenant's first one has completed.
	FirstIOs   int
	FirstUnits int64
}

// Load is what one I/O puts into a slot.
type Load struct {
	// WeightedBytes counts against deficit and slot.
	WeightedBytes int64
	// Units are summed up per slot for SlotUnits, in whatever the caller counts.
	Units int64
}

// place is the state of a tenant in the round.
type place uint8

const (
	unknown  place = iota
	idle           // nothing queued, a slot is open
	active         // something queued, a slot is open; in the list of turns
	deferred       // no slot is open
)

type tenantState struct {
	place place
	// open is the slot that the next I/O goes into; noSlot if deferred.
	open uint8
	// generation distinguishes I/Os of a removed tenant from those of a later tenant with the same number.
	generation uint32
	// next and prev link the active tenants.
	next, prev tenant.ID
	// first and last are the ends of its queue.
	first, last      Tag
	queued, inflight int
	quantum          int64
	// deficit is the weighted length that the tenant may still serve in this turn.
	// Invariant: >= 0.
	deficit int64
	// free has a bit for each slot of the tenant that is not in use. The open slot is in use.
	free uint64
	// lastIOs and lastUnits are what its last completed slot held.
	lastIOs   int
	lastUnits int64
}

// slot is a group of I/Os. It has completed when it is not open and all its I/Os have completed.
type slot struct {
	submits, completions int
	weighted, units      int64
}

type state uint8

const (
	free state = iota
	queued
	inflight
)

type io struct {
	state      state
	slot       uint8
	tenant     tenant.ID
	generation uint32
	next, prev Tag // in the tenant's queue
}

// Scheduler is the machine.
type Scheduler struct {
	cfg     Config
	all     uint64 // every slot's bit
	tenants []tenantState
	slots   []slot // of tenant t: [t*cfg.Slots, (t+1)*cfg.Slots)
	ios     []io   // by tag
	// first and last are the ends of the list of turns; first has its turn.
	first, last tenant.ID
	// numActive counts tenants with an I/O queued or in flight.
	numActive int
	// maxSlots is how many each of them may use: slots by active tenants, at least 1.
	maxSlots int
}

// New makes a Scheduler without tenants.
func New(cfg Config) *Scheduler {
	invariants.Check(cfg.Slots >= 1 && cfg.Slots <= MaxSlots && cfg.SlotBytes >= 1 && cfg.QuantumBytes >= 1,
		"drr: config out of range")
	return &Scheduler{cfg: cfg, all: ^uint64(0) >> (64 - cfg.Slots), first: noTenant, last: noTenant,
		maxSlots: cfg.Slots}
}

// SetTenant announces a tenant or changes its weight, at least 1, from its next turn on.
func (s *Scheduler) SetTenant(t tenant.ID, weight int) {
	for int(t) >= len(s.tenants) {
		s.tenants = append(s.tenants, tenantState{})
		s.slots = append(s.slots, make([]slot, s.cfg.Slots)...)
	}
	ten := &s.tenants[t]
	quantum := int64(max(weight, 1)) * s.cfg.QuantumBytes
	if ten.place != unknown {
		ten.quantum = quantum
		return
	}
	*ten = tenantState{
		place: idle, generation: ten.generation, first: noTag, last: noTag,
		quantum: quantum, deficit: quantum, free: s.all,
		lastIOs: s.cfg.FirstIOs, lastUnits: s.cfg.FirstUnits,
	}
	s.openSlot(t)
}

// Remove removes a tenant with its slots, its place in the round and its queued I/Os, whose tags it frees and appends
// to dst. I/Os in flight still end with Complete but count for no tenant.
func (s *Scheduler) Remove(t tenant.ID, dst []Tag) []Tag {
	ten := s.known(t)
	if ten.place == active {
		s.unlink(t)
	}
	for tag := ten.first; tag != noTag; tag = s.ios[tag].next {
		s.ios[tag].state = free
		dst = append(dst, tag)
	}
	if ten.queued+ten.inflight > 0 {
		s.setActive(s.numActive - 1)
	}
	clear(s.slots[int(t)*s.cfg.Slots:][:s.cfg.Slots])
	*ten = tenantState{generation: ten.generation + 1}
	return dst
}

func (s *Scheduler) known(t tenant.ID) *tenantState {
	ten := &s.tenants[t]
	if ten.place == unknown {
		panic("drr: a tenant was not announced")
	}
	return ten
}

// setActive sets the number of active tenants, and with it how many slots each may use.
func (s *Scheduler) setActive(n int) {
	s.numActive = n
	s.maxSlots = s.cfg.Slots
	if n > 0 {
		s.maxSlots = max(1, s.cfg.Slots/n)
	}
}

// Enqueue queues an I/O of a known tenant.
//
// hot: 0 allocs
func (s *Scheduler) Enqueue(t tenant.ID, tag Tag) {
	for int(tag) >= len(s.ios) {
		s.ios = append(s.ios, io{})
	}
	ten, r := s.known(t), &s.ios[tag]
	if r.state != free {
		panic("drr: a tag is used twice")
	}
	*r = io{state: queued, slot: noSlot, tenant: t, generation: ten.generation, next: noTag, prev: ten.last}
	if ten.last == noTag {
		ten.first = tag
	} else {
		s.ios[ten.last].next = tag
	}
	ten.last = tag
	ten.queued++
	if ten.place == idle {
		s.link(t)
	}
	if ten.queued+ten.inflight == 1 {
		s.setActive(s.numActive + 1)
		ten.deficit += ten.quantum
	}
}

// Cancel removes an I/O that Serve has not taken and frees its tag.
func (s *Scheduler) Cancel(tag Tag) {
	r := &s.ios[tag]
	if r.state != queued {
		panic("drr: an I/O is cancelled that is not queued")
	}
	t := r.tenant
	ten := &s.tenants[t]
	s.dequeue(ten, tag)
	r.state = free
	if ten.queued == 0 && ten.place == active {
		s.leaveRound(t)
	}
	s.deactivateIfIdle(ten)
}

// dequeue removes an I/O from its tenant's queue.
func (s *Scheduler) dequeue(ten *tenantState, tag Tag) {
	r := &s.ios[tag]
	if r.prev == noTag {
		ten.first = r.next
	} else {
		s.ios[r.prev].next = r.next
	}
	if r.next == noTag {
		ten.last = r.prev
	} else {
		s.ios[r.next].prev = r.prev
	}
	ten.queued--
}

// leaveRound removes a tenant that has nothing queued from the round.
func (s *Scheduler) leaveRound(t tenant.ID) {
	s.unlink(t)
	s.tenants[t].place = idle
	s.tenants[t].deficit = 0
}

// deactivateIfIdle updates the number of active tenants when a tenant has no I/O left.
func (s *Scheduler) deactivateIfIdle(ten *tenantState) {
	if ten.queued+ten.inflight == 0 {
		s.setActive(s.numActive - 1)
	}
}

// Head returns the I/O whose turn it is. ok is false if no tenant with something queued has an open slot. The caller
// must call Serve next, with the load of that I/O.
//
// hot: 0 allocs
func (s *Scheduler) Head() (tag Tag, ok bool) {
	if s.first == noTenant {
		return 0, false
	}
	return s.tenants[s.first].first, true
}

// Serve takes the I/O that Head returned and reports true: the I/O is in flight, in the open slot of its tenant. If the
// tenant's deficit does not pay for the I/O, Serve ends the tenant's turn, adds its quantum and reports false; Head
// then returns the next tenant's I/O.
//
// hot: 0 allocs
func (s *Scheduler) Serve(l Load) bool {
	t := s.first
	ten := &s.tenants[t]
	if ten.deficit < l.WeightedBytes {
		ten.deficit += ten.quantum
		if t != s.last {
			s.unlink(t)
			s.link(t)
		}
		return false
	}
	r := &s.ios[ten.first]
	s.dequeue(ten, ten.first)
	r.state, r.slot = inflight, ten.open
	ten.inflight++
	ten.deficit -= l.WeightedBytes
	sl := s.slot(t, ten.open)
	sl.submits++
	sl.weighted += l.WeightedBytes
	sl.units += l.Units
	if sl.weighted >= s.cfg.SlotBytes {
		if s.inUse(ten) >= s.maxSlots {
			s.unlink(t)
			ten.place, ten.open, ten.deficit = deferred, noSlot, 0
			return true
		}
		s.openSlot(t)
	}
	if ten.queued == 0 {
		s.leaveRound(t)
	}
	return true
}

// openSlot gives a tenant a free slot to fill.
func (s *Scheduler) openSlot(t tenant.ID) {
	ten := &s.tenants[t]
	i := uint8(bits.TrailingZeros64(ten.free))
	ten.free &^= 1 << i
	ten.open = i
	*s.slot(t, i) = slot{}
}

func (s *Scheduler) slot(t tenant.ID, i uint8) *slot { return &s.slots[int(t)*s.cfg.Slots+int(i)] }

func (s *Scheduler) inUse(ten *tenantState) int { return bits.OnesCount64(s.all &^ ten.free) }

// Complete ends an I/O that Serve has taken. Its tag is free.
//
// hot: 0 allocs
func (s *Scheduler) Complete(tag Tag) {
	r := &s.ios[tag]
	if r.state != inflight {
		panic("drr: completion of an I/O that is not in flight")
	}
	r.state = free
	t := r.tenant
	ten := &s.tenants[t]
	if r.generation != ten.generation {
		return // its tenant was removed
	}
	sl := s.slot(t, r.slot)
	sl.completions++
	if r.slot != ten.open && sl.completions == sl.submits {
		ten.free |= 1 << r.slot
		ten.lastIOs, ten.lastUnits = sl.submits, sl.units
		if ten.place == deferred && s.inUse(ten) < s.maxSlots {
			s.openSlot(t)
			ten.place = idle
			if ten.queued > 0 {
				s.link(t)
			}
		}
	}
	ten.inflight--
	s.deactivateIfIdle(ten)
}

// link puts a tenant at the end of the round.
func (s *Scheduler) link(t tenant.ID) {
	ten := &s.tenants[t]
	ten.place, ten.next, ten.prev = active, noTenant, s.last
	if s.last == noTenant {
		s.first = t
	} else {
		s.tenants[s.last].next = t
	}
	s.last = t
}

func (s *Scheduler) unlink(t tenant.ID) {
	ten := &s.tenants[t]
	if ten.prev == noTenant {
		s.first = ten.next
	} else {
		s.tenants[ten.prev].next = ten.next
	}
	if ten.next == noTenant {
		s.last = ten.prev
	} else {
		s.tenants[ten.next].prev = ten.prev
	}
}

// NumActive is how many tenants have an I/O queued or in flight.
func (s *Scheduler) NumActive() int { return s.numActive }

// MaxSlots is how many slots each active tenant may use.
func (s *Scheduler) MaxSlots() int { return s.maxSlots }

// SlotsInUse returns how many slots a known tenant uses, including the open one. It can exceed MaxSlots after other
// tenants have become active, because slots in use are not taken back.
func (s *Scheduler) SlotsInUse(t tenant.ID) int { return s.inUse(s.known(t)) }

// SlotIOs is how many I/Os the tenant's last completed slot held.
func (s *Scheduler) SlotIOs(t tenant.ID) int { return s.known(t).lastIOs }

// SlotUnits is the sum of Load.Units in the tenant's last completed slot.
func (s *Scheduler) SlotUnits(t tenant.ID) int64 { return s.known(t).lastUnits }

// Queued is how many I/Os of the tenant wait for their turn.
func (s *Scheduler) Queued(t tenant.ID) int { return s.known(t).queued }

// Inflight is how many I/Os of the tenant are in its slots.
func (s *Scheduler) Inflight(t tenant.ID) int { return s.known(t).inflight }

// Deferred reports whether all slots that the tenant may use are full.
func (s *Scheduler) Deferred(t tenant.ID) bool { return s.known(t).place == deferred }
