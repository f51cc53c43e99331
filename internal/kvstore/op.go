package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// op is a writing request in progress, or a record that compaction moves.
type op struct {
	kind   Op
	cond   Condition
	status Status
	// ready: the value, if there is one, is durable, so that the segment may be changed.
	ready bool
	// failed is why the value could not be written.
	failed Status
	keyLen uint8
	key    [format.MaxKey]byte
	tag    uint64
	tenant tenant.ID
	// background: the store's background work pays. copyIn is 1 more than the index of the CopyIn that the op belongs
	// to, or 0.
	background bool
	copyIn     uint8
	slot       uint8 // of the victim that compaction is emptying, or lane of a sweep
	// early: this is an early move. Its record has earlyBytes, and is in a chunk that has had that epoch. fetching: the
	// value is being read.
	early      bool
	fetching   bool
	earlyBytes uint16
	epoch      space.Epoch
	// check is how far an entry of a CopyIn is with what is stored of its key.
	check storedCheck
	hash  uint64
	// value is the value that is moved, in the memory of compaction, or the entry of a CopyIn if that has identities.
	value    []byte
	valueLen uint32
	// parts are those of the value, if there is one. writing is how many are in groups that have not ended.
	parts   [2]part
	writing uint8
	// old is the offset of the value or segment that is moved, segment the number of that segment. For an entry of a
	// CopyIn old is the offset of the value that is checked.
	old     units.ExtentOffset
	segment uint32
	// active is 1 more than the index of the active segment that a writer was handed to; 0: it was not.
	active int32

	// What the op has changed in its segment. It is counted when the segment is durable. If the old value is in several
	// pieces, activeSeg.dead has them.
	oldOffset units.ExtentOffset
	oldBytes  uint32
	objects   int8
	used      bool // the segment refers to the value
	// item is the number of the item that refers to the value, if no other writer has changed the segment since; -1: it
	// is not known.
	item int16

	// id, tombstone and expires are those of the request, want its version. version is that of the reply, if the op
	// ends with status.
	id            Identity
	tombstone     bool
	full          bool // there was no room for it
	expires       uint32
	sound         uint64 // Request.Sound
	want, version uint64
	// given is Request.Given. Such an op brings its identity as an entry of a CopyIn does.
	given uint64
}

// give sets the version that the op is to give.
func (o *op) give(version uint64) {
	if o.given = version; version != 0 && o.cond == Always {
		o.cond, o.want = IfNewer, version
	}
}

// wrongVersion reports whether the versions of a request are none that it may have.
func (s *Store) wrongVersion(r *Request) bool {
	most := max(MaxVersion, s.clock)
	return r.Condition == IfNewer && (r.Version == 0 || r.Version > most || r.Given != 0) || r.Given > most
}

// addsIdentity reports whether applyWrite adds the op's identity, as the newest one of the key.
func (o *op) addsIdentity() bool { return o.id.Client != 0 && o.given == 0 }

// keptForDeletes is how many ops Puts leave to Deletes. While Puts wait for room they may have all others, and a Delete
// may be what makes room.
func (s *Store) keptForDeletes() int { return min(s.cfg.Requests/8, 8) }

// pays says who pays for the op's I/Os.
func (o *op) pays() payer {
	return payerOf(o.tenant, o.background || o.kind >= opMove && o.kind != opClear)
}

// answer appends a Reply, which the caller may complete before the next one.
func (s *Store) answer(tag uint64, st Status) *Reply {
	s.out.Replies = append(s.out.Replies, Reply{})
	r := &s.out.Replies[len(s.out.Replies)-1] // in place: see beginWrite
	r.Tag, r.Status = tag, st
	return r
}

// finish ends an op.
func (s *Store) finish(i int32, st Status) {
	o := &s.ops[i]
	if o.check == checkDue && (st == Superseded || st == OK) {
		s.awaitCheck(i)
		return
	}
	for p := range o.parts {
		p := &o.parts[p]
		if p.chunk != none {
			s.pool.Unpin(p.chunk)
			if !o.used || st != OK {
				s.pool.SubLive(p.offset, int(p.bytes))
				if o.kind < opMove {
					s.killed += int64(p.bytes)
				}
			}
		}
		p.chunk = none
	}
	o.value = nil
	if o.kind == opAudit {
		o.ready = true
		s.audited(o, st)
		s.opLinks.PushFront(&s.freeInt, i)
		return
	}
	if o.kind == opExpire {
		o.ready = true
		s.lookedForExpired(st)
		s.opLinks.PushFront(&s.freeInt, i)
		return
	}
	if o.kind == opProbe {
		s.opLinks.PushFront(&s.freeInt, i)
		return
	}
	if o.kind == opSweep {
		o.ready = true
		s.sweptSegment(o, st)
		s.opLinks.PushFront(&s.freeInt, i)
		return
	}
	if o.copyIn > 0 {
		if o.kind == opClear {
			s.cleared(i, st)
			return
		}
		s.entryDone(i, st)
		return
	}
	if o.kind >= opMove {
		o.ready = true
		if o.early {
			s.early.bytes -= int64(o.earlyBytes)
			s.moved(o.slot, OK) // the victim does not depend on it
			s.opLinks.PushFront(&s.early.free, i)
			return
		}
		s.moved(o.slot, st)
		s.opLinks.PushFront(&s.freeInt, i)
		return
	}
	r := s.answer(o.tag, st)
	if r.ValueLen = int(o.valueLen); st == o.status {
		r.Version = o.version
	}
	s.opLinks.PushFront(&s.freeOps, i) // as in lookup: it is in the CPU's cache
}

// countDead counts what the writers of a segment, which is durable now, have made obsolete. before is the length of the
// segment's previous record.
func (s *Store) countDead(a *activeSeg, before int) {
	for i := a.writing.First; i != none; i = s.opLinks.Next(i) {
		o := &s.ops[i]
		old := int(o.oldBytes)
		if old > 0 {
			s.died(a.number, o.oldOffset, old)
		}
		if o.kind < opMove {
			s.killed += int64(before + old)
			before = 0
		}
		s.objects += int64(o.objects)
		if s.audit.counted(a.number) {
			s.audit.objects += int64(o.objects)
		}
	}
	for _, d := range a.dead {
		s.died(a.number, d.place, int(d.bytes))
		s.killed += int64(d.bytes)
	}
	s.objects -= int64(a.dropped)
	s.stats.Expired += int64(a.dropped)
	if s.audit.counted(a.number) {
		s.audit.objects -= int64(a.dropped)
	}
	a.dead, a.dropped = a.dead[:0], 0
}

// reader is the Store as the lookup.Host of its reading side.
type reader struct{ *Store }

// ReadFor implements lookup.Host.
func (s reader) ReadFor(slot int32, tenant tenant.ID, background bool, offset units.ExtentOffset, buf []byte) {
	s.ioFor(ioLookup, slot, payerOf(tenant, background), pipeline.Read, offset, buf)
}

// Done implements lookup.Host.
func (s reader) Done(tag uint64, r lookup.Result, o lookup.Object) {
	a := s.answer(tag, statuses[r])
	if a.ValueLen = o.Length; r == lookup.Found {
		a.Version, a.Expires = o.Version, o.Expires
	}
}

// statuses are those of the results of lookups.
var statuses = [...]Status{lookup.Found: OK, lookup.NotFound: NotFound, lookup.DeviceError: DeviceError,
	lookup.Corrupt: Corrupt, lookup.TooShort: InvalidValue}

// lookups are the ops of lookups that carry out a Get, Exist or List.
var lookups = [...]lookup.Op{Get: lookup.Get, Exist: lookup.Exist, List: lookup.List}

// Damaged implements lookup.Host.
func (s reader) Damaged(offset units.ExtentOffset, n int, segment uint32, hash uint64) lookup.Result {
	if s.unsettled(offset, n) {
		return lookup.DeviceError
	}
	s.damage(Damage{Offset: offset, Segment: segment, Hash: hash})
	return lookup.Corrupt
}
