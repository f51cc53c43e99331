package kvstore

import (
	"math/bits"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/nvme"
	"jbofd/internal/tenant"
)

// Range is a range of positions, and where to begin in it. The position of a key is its hash with the order of the bits
// reversed, so that stores with the same Config.HashSeed have the same keys at the same positions.
type Range = lookup.Range

// MaxRanges is how many requests for ranges may be in progress: Scan, CopyOut, Count and Digest together. MaxCopyIns is
// the same for CopyIn.
const (
	MaxRanges  = lookup.MaxRanges
	MaxCopyIns = 4
)

// MaxRangeBytes is how much of its memory a request for a range uses, at most, and the longest CopyIn.
const MaxRangeBytes = lookup.MaxRangeBytes

// copyWrites is how many entries of CopyIns are written at once, by ops that are kept for that. Entries of the same
// segment are next to each other, and so are written together.
const copyWrites = 48

// IsRange reports whether an Op is about a range of positions.
func (o Op) IsRange() bool { return o >= Scan && o <= Drop }

// readsRange reports whether an Op returns an nvme.KVRange.
func (o Op) readsRange() bool { return o >= Scan && o <= Digest }

// submitRange takes a request for a range.
func (s *Store) submitRange(r *Request) bool {
	switch {
	case r.Op == Drop:
		return s.submitDrop(r)
	case r.Op == CopyIn:
		return s.submitCopyIn(r)
	}
	op := [...]lookup.Op{Scan: lookup.Scan, CopyOut: lookup.CopyOut, Count: lookup.Count, Digest: lookup.Digest}[r.Op]
	in := r.Range.At(s.hashSeed, r.Key)
	if !in.Valid(op, len(r.Value)) {
		s.answer(Reply{Tag: r.Tag, Status: InvalidValue})
		return true
	}
	return s.reads.Begin(&lookup.Request{Op: op, Tag: r.Tag, Tenant: r.Tenant, Key: r.Key, Value: r.Value,
		Range: in, Background: r.Background})
}

// EndEarly makes a request for a range end as soon as it can. A Scan, CopyOut, Count or Digest ends with what it has
// found until then, and a CopyIn with Aborted, unless it is done; a Drop takes its course.
func (s *Store) EndEarly(tag uint64) {
	s.reads.EndEarly(tag)
	for i := range s.copyIns {
		if c := &s.copyIns[i]; c.b != nil && c.tag == tag && (c.left > 0 || c.clearing.left > 0) {
			s.entryEnded(c, Aborted)
		}
	}
}

// copyIn is a CopyIn in progress: next is the offset of its next entry, left are not begun, running are in progress.
type copyIn struct {
	b             nvme.KVRange // nil: it is free
	tag           uint64
	pays          payer
	next          int
	left, running int
	// applied counts the entries that have changed something. status is the first that was not as it should be.
	applied int
	status  Status
	// restores is Request.Restore.
	restores bool
	// clearing is the first half of an exact one.
	clearing clearing
}

// payerOf is who pays for what a request does.
func payerOf(t tenant.ID, background bool) payer { return payer{tenant: t, background: background} }

// submitCopyIn takes a CopyIn. Its place is looked for first: one that has to wait is offered in each turn, and looking
// at 32,000 entries takes milliseconds.
func (s *Store) submitCopyIn(r *Request) bool {
	i := slices.IndexFunc(s.copyIns[:], func(c copyIn) bool { return c.b == nil })
	if i < 0 {
		return false
	}
	b := nvme.KVRange(r.Value)
	if st := s.copyInFault(b, r.Version); st != OK {
		s.answer(Reply{Tag: r.Tag, Status: st})
		return true
	}
	b = b[:b.LenBytes()]
	c := &s.copyIns[i]
	*c = copyIn{b: b, tag: r.Tag, pays: payerOf(r.Tenant, r.Background), next: nvme.KVRangeHeaderBytes, left: b.Items(),
		restores: r.Restore}
	if r.Version != 0 {
		c.clearing.begin(b, r.Version)
	}
	s.copying++
	return true
}

// copyInFault returns why a KVRange cannot be copied in, exactly if there is a clock, or OK. Superseded: a Drop on the
// list covers an entry. Such an entry would not exist, and after the Drop has left the list it would, so that what a
// CopyIn stores would depend on when it comes. The sender repeats it then.
func (s *Store) copyInFault(b nvme.KVRange, clock uint64) Status {
	if len(b) > MaxRangeBytes || b.Check() != nil || b.Kind() != nvme.KVCopy {
		return InvalidValue
	}
	st := OK
	for e := range b.Entries() {
		if e.Version() > max(MaxCopied, s.clock) || e.ValueLen() > s.MaxValueBytes() {
			return InvalidValue
		}
		if st == OK && s.isEntryDropped(e) {
			st = Superseded
		}
	}
	if clock != 0 {
		if fault := s.exactFault(b[:b.LenBytes()], clock); fault != OK {
			return fault
		}
	}
	if st == Superseded && len(s.drops.swept) > 0 {
		s.ckpt.wanted = true // it takes Drops off the list that are swept
	}
	return st
}

// isEntryDropped reports whether what an entry of a KVRange has of its key would not exist because of a Drop.
func (s *Store) isEntryDropped(e nvme.KVEntry) bool {
	return len(s.drops.list) > 0 && !e.Gone() &&
		s.drops.list.Covers(bits.Reverse64(format.HashKey(s.hashSeed, e.Key())), e.Version())
}

// copyInStep begins to write more entries of CopyIns, in turn, and ends those that are done.
func (s *Store) copyInStep() {
	s.checkStep()
	for n := s.copying; n > 0; {
		n = 0
		for i := range s.copyIns {
			c := &s.copyIns[i]
			switch {
			case c.b == nil:
			case c.status == OK && c.clearing.left > 0:
				if s.clearStep(int32(i)) {
					n++
				}
			case c.left > 0 && s.freeCopy.N > 0 && s.beginEntry(int32(i)):
				n++
			case c.left == 0 && c.running == 0:
				s.copying--
				s.answer(Reply{Tag: c.tag, Status: c.status, ValueLen: c.applied})
				*c = copyIn{}
				s.progress++
			}
		}
	}
}

// beginEntry begins to write the next entry of a CopyIn, and reports whether there was room for that.
func (s *Store) beginEntry(i int32) bool {
	c := &s.copyIns[i]
	e, next := c.b.EntryAt(c.next)
	r := Request{Op: Put, Condition: IfNewer, Tenant: c.pays.tenant, Key: e.Key(), Value: e.Value(),
		Version: e.Version(), Expires: e.Expires()}
	if !e.Exists() {
		r.Op, r.Tombstone = Delete, e.Tombstone()
	}
	st := OK
	if (r.Op == Put || e.Identities() > 0) && s.isFull(&r, e.Identities()) {
		st = CapacityExceeded
	}
	switch {
	case st != OK:
		s.entryEnded(c, st)
		return true
	case r.Op == Put && len(r.Value) > 0 && !s.roomFor(userLog, len(r.Value)):
		return false
	}
	c.next = next
	c.left--
	c.running++
	k := s.opLinks.Pop(&s.freeCopy)
	r.Background = c.pays.background
	s.beginWrite(k, &r, uint8(i)+1, false)
	if e.Identities() > 0 {
		s.ops[k].value = e
	}
	return true
}

// entryDone ends the op of an entry.
func (s *Store) entryDone(i int32, st Status) {
	c := &s.copyIns[s.ops[i].copyIn-1]
	c.running--
	s.entryEnded(c, st)
	s.opLinks.PushFront(&s.freeCopy, i)
	s.progress++
}

// entryEnded notes the outcome of an entry. After one that has failed no more are begun.
func (s *Store) entryEnded(c *copyIn, st Status) {
	switch st {
	case OK:
		c.applied++
	case Superseded:
	default:
		if c.status == OK {
			c.status = st
		}
		c.left = 0
	}
}
