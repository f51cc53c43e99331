package swap

import (
	"jbofd/internal/kvstore"
)

// sweepState is a batch of keys on their way home, the oldest of one area.
type sweepState struct {
	area int
	// moving: to the end of their log, not home.
	moving  bool
	members [batchKeys]member
	n       int
	// open members are not over yet.
	open int
	// floor is what the book is to say; stage how far it is.
	floor uint64
	stage sweepStage
}

type sweepStage uint8

const (
	sweepReturns sweepStage = iota // members are read and put
	sweepWants                     // the book is to be written
	sweepBook                      // it is being written
)

type member struct {
	entry  int32
	begun  bool
	over   bool
	status kvstore.Status
}

// due reports whether keys of an area are to come home now.
func (h *Home) due(i int) bool {
	a := &h.areas[i]
	if a.first == nobody || h.leaving {
		return false
	}
	if !h.comesHome(i) && h.load.used(i) < sweepUsed {
		return false
	}
	if h.now < a.retryNS {
		h.wake(a.retryNS)
		return false
	}
	return true
}

// comesHome reports whether somebody wants the keys of an area at home, or it has time for them.
func (h *Home) comesHome(i int) bool {
	return h.draining || h.lists.N > 0 || h.areas[i].wanted > 0 || h.calm()
}

// sweepStep brings keys home.
func (h *Home) sweepStep() {
	for h.used == 0 && h.lists.N > 0 {
		h.goHome(h.links.Pop(&h.lists))
	}
	s := &h.sweep
	if s.n == 0 {
		for k := range h.areas {
			i := (s.area + 1 + k) % len(h.areas)
			if h.due(i) {
				h.gather(i)
				break
			}
		}
	}
	if s.n == 0 || s.stage != sweepReturns {
		return
	}
	for i := range s.members[:s.n] {
		if m := &s.members[i]; !m.begun {
			h.bring(i)
		}
	}
	if s.open == 0 {
		h.settle()
	}
}

// gather takes the oldest keys of an area: their writes wait from now on.
func (h *Home) gather(area int) {
	s := &h.sweep
	*s = sweepState{area: area, moving: !h.comesHome(area) && h.load.used(area) < fullUsed}
	for ei := h.areas[area].first; ei != nobody && s.n < batchKeys; ei = h.entries[ei].next {
		h.entries[ei].homing = true
		s.members[s.n] = member{entry: ei}
		s.n++
	}
	s.open = s.n
}

// bring begins to bring a member home, when no write of its key is under way anywhere.
func (h *Home) bring(i int) {
	m := &h.sweep.members[i]
	e := &h.entries[m.entry]
	if e.doubts > 0 {
		m.begun = true
		h.over(i, kvstore.DeviceError)
		return
	}
	if e.appends > 0 || !h.sweep.moving && h.writing(e.hash) {
		return
	}
	oi := h.takeOp()
	if oi == nobody { // some are doubtful still
		return
	}
	m.begun = true
	o := &h.ops[oi]
	o.kind, o.do, o.cond, o.tenant, o.hash, o.key, o.keyLen = opHoming, kvstore.Put, kvstore.Always, h.cfg.Background, e.hash, e.key, e.keyLen
	o.entry, o.member = m.entry, uint8(i)
	if h.sweep.moving {
		o.kind = opMoving
	}
	if e.deleted {
		o.do = kvstore.Delete
	}
	if e.deleted || e.valueLen == 0 {
		h.forward(oi)
		return
	}
	h.readRecord(oi, m.entry)
}

// forward writes what a member's record says to where it goes.
func (h *Home) forward(oi int32) {
	if h.ops[oi].kind == opMoving {
		h.send(oi)
		return
	}
	h.links.Push(&h.toStore, oi)
}

// homed takes how the store, or reading, has ended for a member.
func (h *Home) homed(oi int32, st kvstore.Status) {
	o := &h.ops[oi]
	if o.do == kvstore.Delete && st == kvstore.NotFound {
		st = kvstore.OK
	}
	i := int(o.member)
	h.freeOpNow(oi)
	h.over(i, st)
}

func (h *Home) over(i int, st kvstore.Status) {
	m := &h.sweep.members[i]
	m.over, m.status = true, st
	h.entries[m.entry].returned = st == kvstore.OK && !h.sweep.moving
	h.sweep.open--
}

// settle asks for a book that says what has come home, if that are the oldest.
func (h *Home) settle() {
	s := &h.sweep
	a := &h.areas[s.area]
	if s.moving {
		h.conclude(false)
		return
	}
	s.floor = a.acked
	for ei := a.first; ei != nobody; ei = h.entries[ei].next {
		if e := &h.entries[ei]; !e.returned {
			s.floor = e.place
			break
		}
	}
	if s.floor <= a.floor {
		h.conclude(false)
		return
	}
	s.stage = sweepWants
	h.book.dirty = true
}

// conclude ends a batch: what is below the durable floor is forgotten, what is not goes on as before.
func (h *Home) conclude(written bool) {
	s := &h.sweep
	a := &h.areas[s.area]
	progress := false
	st := kvstore.DeviceError
	for i := range s.members[:s.n] {
		m := &s.members[i]
		e := &h.entries[m.entry]
		if written && e.returned && e.place < s.floor {
			h.stats.Returned++
			progress = true
			h.drop(m.entry)
			continue
		}
		if m.status == kvstore.OK {
			progress = progress || s.moving
		} else {
			st = m.status
			h.stats.Failures++
			if e.wanted && !s.moving {
				h.refuseWaiting(m.entry, st)
			}
		}
		e.homing, e.returned = false, false
		h.next(m.entry)
	}
	s.n = 0
	a.failed = !progress && !written
	if a.failed {
		a.retryNS = h.now + retryNS
		h.wake(a.retryNS)
		if !s.moving {
			h.giveUp(s.area, st)
		}
	}
	a.lastNS = h.now
	h.release(s.area)
	h.sweepStep()
}

// giveUp ends what waits for the oldest keys of an area to come home: they do not at the moment.
func (h *Home) giveUp(area int, st kvstore.Status) {
	for h.lists.N > 0 {
		h.finish(h.links.Pop(&h.lists), kvstore.DeviceError, 0)
	}
	for ei := h.areas[area].first; ei != nobody && h.areas[area].wanted > 0; ei = h.entries[ei].next {
		if h.entries[ei].wanted {
			h.refuseWaiting(ei, st)
		}
	}
}

// release tells an area what it need not keep.
func (h *Home) release(area int) {
	a := &h.areas[area]
	place := a.end
	switch {
	case a.first != nobody:
		e := &h.entries[a.first]
		place = e.place - uint64(e.at)
	case a.appends > 0:
		place = a.group
	}
	if place > a.released || !a.told {
		a.released, a.told = place, true
		h.out.Releases = append(h.out.Releases, AreaRelease{Area: area, Home: a.Home, Place: place})
	}
}

// Drain asks for all keys to come home and for a book without lines. No request may be submitted from then on.
func (h *Home) Drain() {
	h.draining = true
	h.load.to = nobody
}

// Drained reports that they have.
func (h *Home) Drained() bool {
	for i := range h.areas {
		if h.areas[i].perhaps || h.areas[i].appends > 0 {
			return false
		}
	}
	return h.used == 0 && h.sweep.n == 0 && h.toStore.N+h.atStore == 0 && !h.book.writing
}

// Stuck reports that some cannot come home at the moment, or are not to, and nothing is under way for them: a restart finds them.
func (h *Home) Stuck() bool {
	if h.sweep.n > 0 || h.book.writing || h.toStore.N+h.atStore > 0 {
		return false
	}
	for i := range h.areas {
		if h.areas[i].failed {
			return true
		}
	}
	return h.book.failed || h.leaving
}
