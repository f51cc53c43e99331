package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// Copies carry the identities of each key, so that a repetition of a write is recognized at the copy, too. A CopyIn
// merges those of an entry with those of the key, whichever of both has the newer object: afterwards the key has the
// newest of both, as many as a key may have. An exact one has first removed those of requests up to the clock that the
// entry does not have.

// entry is the entry that the op of a CopyIn stores, if that has identities.
func (o *op) entry() nvme.KVEntry {
	if o.copyIn == 0 {
		return nil
	}
	return nvme.KVEntry(o.value)
}

// applyIdentified stores an entry that has identities. The key's item is at offset at, or there is none if that is 0.
func (s *Store) applyIdentified(a *activeSeg, at int, o *op, e nvme.KVEntry) bool {
	ids, evicted := s.mergeIdentities(format.Segment(a.buf), at, &s.copyIns[o.copyIn-1], e)
	return s.applyMerged(a, at, o, ids, evicted, e.Gone())
}

// applyMerged does what an op wants that is IfNewer, and gives its key these identities, whether it was newer or not.
// Evicted says that others were dropped before their time, gone that the op is there only for the identities.
func (s *Store) applyMerged(a *activeSeg, at int, o *op, ids []format.Identity, evicted, gone bool) bool {
	seg := format.Segment(a.buf)
	known, exists := uint64(0), false
	if at != 0 {
		known, exists = seg.Item(at).Version(), !seg.Item(at).Gone()
	}
	refused, superseded := s.isRefused(a, at, o), false
	if refused {
		s.noteStored(seg, at, o)
	}
	switch {
	case refused && known >= o.want:
		// The key has something newer, or the same.
		if hasIdentities(seg, at, ids, evicted) {
			return false
		}
		superseded = o.given != 0
		n := seg.LengthBytes() + moreIdentities(seg, at, ids)
		if n > seg.LengthBytes() {
			n += seg.Keys() * (maxWidth - seg.Width())
		}
		if o.status = s.makeRoom(a, n, max(format.MaxSegmentBytes, seg.LengthBytes())); o.status != OK {
			o.version = 0
			return false
		}
	case refused && len(ids) == 0 || gone && len(ids) == 0 && !exists && !seg.Lossy():
		o.status, o.version = Superseded, known
		return false
	default:
		if refused { // a Drop covers the object, but not the identities
			o.kind, o.tombstone, o.valueLen, o.status = Delete, false, 0, OK
			superseded = o.given != 0
		}
		if !s.applyWrite(a, at, o, ids) {
			return false
		}
	}
	seg = format.Segment(a.buf)
	if at = seg.Find(o.key[:o.keyLen]); at != 0 {
		seg.SetIdentities(at, ids, evicted)
		seg.Settle(at)
	}
	for i := range ids {
		s.noteIdentity(ids[i].KeepUntil)
	}
	if superseded {
		o.status, o.version = Superseded, known
	}
	return true
}

// applyGiven does what a request with a version that was Given wants. The key's item is at offset at, or there is none
// if that is 0.
func (s *Store) applyGiven(a *activeSeg, at int, o *op) bool {
	seg := format.Segment(a.buf)
	switch {
	case o.id.Retry && s.isRepetition(seg, at, o), o.cond != IfNewer && s.isRefused(a, at, o):
		return false
	case o.full && o.kind == Put:
		o.status, o.version = CapacityExceeded, 0
		return false
	case o.id.Client == 0 || o.full: // a full partition remembers no Deletes
		return !s.isRefused(a, at, o) && s.applyWrite(a, at, o, nil)
	}
	ids, evicted := s.identities[:0], false
	if at != 0 {
		ids, evicted = seg.AppendIdentities(ids, at, s.wall), seg.Evicted(at, s.wall)
	}
	if o.id.KeepUntil == 0 || o.id.KeepUntil > s.wall {
		id := format.Identity{Client: o.id.Client, Seq: o.id.Seq, Outcome: uint8(OK), Version: o.given,
			KeepUntil: o.id.KeepUntil}
		ids = format.DropAnswered(ids, o.id.Client, o.id.Answered, evicted)
		ids, evicted = format.MergeIdentities(ids, id, evicted)
	}
	return s.applyMerged(a, at, o, ids, evicted, false)
}

// mergeIdentities returns the identities that a key will have with those of an entry of a CopyIn, and whether others
// were dropped before their time. They are valid until the next call.
func (s *Store) mergeIdentities(seg format.Segment, at int, c *copyIn, e nvme.KVEntry) (ids []format.Identity,
	evicted bool) {
	ids = s.identities[:0]
	if at != 0 {
		ids, evicted = seg.AppendIdentities(ids, at, s.wall), seg.Evicted(at, s.wall)
	}
	for i := range e.Identities() {
		if id := c.identity(e, i); id.KeepUntil == 0 || id.KeepUntil > s.wall {
			ids, evicted = format.MergeIdentities(ids, id, evicted)
		}
	}
	if e.Evicted() {
		// Its oldest one says until when that is so.
		if oldest := c.identity(e, 0); oldest.KeepUntil == 0 || oldest.KeepUntil > s.wall {
			evicted = true
			ids[0].KeepUntil = format.LaterOf(ids[0].KeepUntil, oldest.KeepUntil)
		}
	}
	return ids, evicted
}

// identity is identity i of an entry of a CopyIn.
func (c *copyIn) identity(e nvme.KVEntry, i int) format.Identity {
	id := e.Identity(i)
	return format.Identity{Client: id.Client, Seq: id.Seq, Outcome: uint8(OK), Version: id.Version,
		KeepUntil: c.until(id.KeepUntil)}
}

// moreIdentities is how much longer a segment becomes by identities in place of those that a key has.
func moreIdentities(seg format.Segment, at int, ids []format.Identity) int {
	n := len(ids)
	if at != 0 && n > 0 {
		n -= seg.Identities(at)
	}
	return max(0, n) * format.IdentityBytes
}

// hasIdentities reports whether a key has exactly these identities.
func hasIdentities(seg format.Segment, at int, ids []format.Identity, evicted bool) bool {
	var buf [format.MaxIdentities]format.Identity
	has := seg.AppendIdentities(buf[:0], at, 0)
	if len(has) != len(ids) || seg.Item(at).Evicted() != evicted {
		return false
	}
	for i := range has {
		if !has[i].Equal(&ids[i]) {
			return false
		}
	}
	return true
}

// says reports whether an entry, or nil, says of its key what an item says.
func says(e nvme.KVEntry, it format.Item) bool {
	return e != nil && e.Version() == it.Version() && e.Exists() == !it.Gone() && e.Tombstone() == it.Tombstone()
}

// clearIdentities removes from a key the identities of requests up to the clock of an exact CopyIn that its entry, or
// nil, does not have, and reports whether that changes anything.
//
// Whether others were dropped before their time is what the entry says, as long as the key has an identity up to the
// clock: then none above it was dropped, as the oldest go first. Otherwise it stays as it is.
func (c *copyIn) clearIdentities(seg format.Segment, at int, e nvme.KVEntry) bool {
	clock := c.clearing.clock
	var buf, kept [format.MaxIdentities]format.Identity
	has := seg.AppendIdentities(buf[:0], at, 0)
	if len(has) == 0 {
		return false
	}
	keeps := kept[:0]
	for i := range has {
		if has[i].Version > clock || c.names(e, &has[i]) {
			keeps = append(keeps, has[i])
		}
	}
	was := seg.Item(at).Evicted()
	evicted := was
	if has[0].Version <= clock {
		evicted = e != nil && e.Evicted()
	}
	if len(keeps) == len(has) && evicted == was {
		return false
	}
	seg.SetIdentities(at, keeps, evicted)
	return true
}

// names reports whether an entry of a CopyIn, or nil, has an identity.
func (c *copyIn) names(e nvme.KVEntry, id *format.Identity) bool {
	if e == nil {
		return false
	}
	for i := range e.Identities() {
		if o := c.identity(e, i); id.Equal(&o) {
			return true
		}
	}
	return false
}
