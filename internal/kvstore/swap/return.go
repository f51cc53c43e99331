package swap

import (
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
)

// returnState is a batch of keys, the oldest ones of an area, that return to the source, or move to the end of their
// log.
type returnState struct {
	area int
	// moving: the records are appended to the same log again, and the keys do not return.
	moving  bool
	members [batchKeys]member
	n       int
	// open is the number of members that have not ended.
	open int
	// floor is the place that the manifest is to name for the area.
	floor format.LogOffset
	stage returnStage
}

type returnStage uint8

const (
	returnMembers         returnStage = iota // members are read and put
	returnManifestDue                        // the manifest has to be written
	returnManifestWriting                    // the manifest is being written
)

type member struct {
	entry  int32
	begun  bool
	over   bool
	status kvstore.Status
}

// due reports whether keys of an area should return, or move, now.
func (src *Source) due(i int) bool {
	a := &src.areas[i]
	if a.first == none || src.abandoned {
		return false
	}
	if !src.shouldReturn(i) && src.load.used(i) < moveUsed {
		return false
	}
	if src.now < a.retryNS {
		src.wake(a.retryNS)
		return false
	}
	return true
}

// shouldReturn reports whether a request needs the keys of an area in the source's store, or the source has time for
// them.
func (src *Source) shouldReturn(i int) bool {
	return src.draining || src.lists.N > 0 || src.areas[i].wanted > 0 || src.driveIdle()
}

// returnStep starts a batch or continues it.
func (src *Source) returnStep() {
	for src.used == 0 && src.lists.N > 0 {
		src.passToStore(src.links.Pop(&src.lists))
	}
	s := &src.batch
	if s.n == 0 {
		for k := range src.areas {
			i := (s.area + 1 + k) % len(src.areas)
			if src.due(i) {
				src.beginBatch(i)
				break
			}
		}
	}
	if s.n == 0 || s.stage != returnMembers {
		return
	}
	for i := range s.members[:s.n] {
		if m := &s.members[i]; !m.begun {
			src.startMember(i)
		}
	}
	if s.open == 0 {
		src.requestManifest()
	}
}

// beginBatch starts a batch with the oldest keys of an area. From now on writes of these keys wait.
func (src *Source) beginBatch(area int) {
	s := &src.batch
	*s = returnState{area: area, moving: !src.shouldReturn(area) && src.load.used(area) < fullUsed}
	for ei := src.areas[area].first; ei != none && s.n < batchKeys; ei = src.entries[ei].next {
		src.entries[ei].returning = true
		s.members[s.n] = member{entry: ei}
		s.n++
	}
	s.open = s.n
}

// startMember starts to return a member as soon as no write of its key is under way, neither in the area nor in the
// store.
func (src *Source) startMember(i int) {
	m := &src.batch.members[i]
	e := &src.entries[m.entry]
	if e.indeterminate > 0 {
		m.begun = true
		src.memberEnded(i, kvstore.DeviceError)
		return
	}
	if e.appends > 0 || !src.batch.moving && src.writing(e.hash) {
		return
	}
	oi := src.takeOp()
	if oi == none { // ops whose outcome is indeterminate are still in use
		return
	}
	m.begun = true
	o := &src.ops[oi]
	o.kind, o.do, o.cond, o.tenant, o.hash, o.key, o.keyLen = opReturning, kvstore.Put, kvstore.Always,
		src.cfg.Background, e.hash, e.key, e.keyLen
	o.entry, o.member = m.entry, uint8(i)
	if o.version = e.version; src.batch.moving {
		o.kind = opMoving
	} else if e.version > 0 {
		o.cond = kvstore.IfNewer
	}
	if e.deleted {
		o.do = kvstore.Delete
	}
	if e.deleted || e.valueLen == 0 {
		src.writeMember(oi)
		return
	}
	src.readRecord(oi, m.entry)
}

// writeMember writes a member's record to its destination.
func (src *Source) writeMember(oi int32) {
	if src.ops[oi].kind == opMoving {
		src.send(oi)
		return
	}
	src.links.Push(&src.toStore, oi)
}

// returnEnded ends a member when the store has answered, or the read has failed.
func (src *Source) returnEnded(oi int32, st kvstore.Status) {
	o := &src.ops[oi]
	if o.do == kvstore.Delete && st == kvstore.NotFound || st == kvstore.Superseded {
		st = kvstore.OK
	}
	i := int(o.member)
	src.freeOpNow(oi)
	src.memberEnded(i, st)
}

func (src *Source) memberEnded(i int, st kvstore.Status) {
	m := &src.batch.members[i]
	m.over, m.status = true, st
	src.entries[m.entry].returned = st == kvstore.OK && !src.batch.moving
	src.batch.open--
}

// requestManifest asks for a manifest without the records that have returned, if these are the oldest.
func (src *Source) requestManifest() {
	s := &src.batch
	a := &src.areas[s.area]
	if s.moving {
		src.endBatch(false)
		return
	}
	s.floor = a.acked
	for ei := a.first; ei != none; ei = src.entries[ei].next {
		if e := &src.entries[ei]; !e.returned {
			s.floor = e.place
			break
		}
	}
	if s.floor <= a.floor {
		src.endBatch(false)
		return
	}
	s.stage = returnManifestDue
	src.manifest.dirty = true
}

// endBatch ends a batch. Entries below the durable floor are dropped, the others stay as they were.
func (src *Source) endBatch(written bool) {
	s := &src.batch
	a := &src.areas[s.area]
	progress := false
	st := kvstore.DeviceError
	for i := range s.members[:s.n] {
		m := &s.members[i]
		e := &src.entries[m.entry]
		if written && e.returned && e.place < s.floor {
			src.stats.Returned++
			progress = true
			src.drop(m.entry)
			continue
		}
		if m.status == kvstore.OK {
			progress = progress || s.moving
		} else {
			st = m.status
			src.stats.Failures++
			if e.wanted && !s.moving {
				src.refuseWaiting(m.entry, st)
			}
		}
		e.returning, e.returned = false, false
		src.next(m.entry)
	}
	s.n = 0
	a.failed = !progress && !written
	if a.failed {
		a.retryNS = src.now + retryNS
		src.wake(a.retryNS)
		if !s.moving {
			src.failWaiters(s.area, st)
		}
	}
	a.lastNS = src.now
	src.release(s.area)
	src.returnStep()
}

// failWaiters ends requests that wait for the oldest keys of an area to return, which they cannot do at the moment.
func (src *Source) failWaiters(area int, st kvstore.Status) {
	for src.lists.N > 0 {
		src.finish(src.links.Pop(&src.lists), kvstore.DeviceError, 0)
	}
	for ei := src.areas[area].first; ei != none && src.areas[area].wanted > 0; ei = src.entries[ei].next {
		if src.entries[ei].wanted {
			src.refuseWaiting(ei, st)
		}
	}
}

// release tells an area which records it need not keep.
func (src *Source) release(area int) {
	a := &src.areas[area]
	place := a.end
	switch {
	case a.first != none:
		e := &src.entries[a.first]
		place = e.group()
	case a.appends > 0:
		place = a.group
	}
	if place > a.released || !a.told {
		a.released, a.told = place, true
		src.out.Releases = append(src.out.Releases, AreaRelease{Area: area, Source: a.Source, Place: place})
	}
}

// Drain asks for all keys to return and for a manifest without areas. No request may be submitted afterwards.
func (src *Source) Drain() {
	src.draining = true
	src.load.to = none
}

// Drained reports that all keys have returned.
func (src *Source) Drained() bool {
	for i := range src.areas {
		if src.areas[i].mayBeListed || src.areas[i].appends > 0 {
			return false
		}
	}
	return src.used == 0 && src.batch.n == 0 && src.toStore.N+src.atStore == 0 && !src.manifest.writing
}

// ReturnBlocked reports that some keys cannot return at the moment, or must not, and nothing is under way for them. A
// restart finds them.
func (src *Source) ReturnBlocked() bool {
	if src.batch.n > 0 || src.manifest.writing || src.toStore.N+src.atStore > 0 {
		return false
	}
	for i := range src.areas {
		if src.areas[i].failed {
			return true
		}
	}
	return src.manifest.failed || src.abandoned
}
