package kvstore

import (
	"math/bits"

	"jbofd/internal/kvstore/format"
)

const (
	maxWidth = 8
	// maxItemBytes is the longest that the item of a key can be.
	maxItemBytes = format.ItemHeaderBytes + maxWidth + format.ExpiryBytes + format.MaxKey
)

// apply applies writer oi to the content of segment i and reports whether the segment must be written. It sets the
// writer's status.
func (s *Store) apply(i, oi int32) bool {
	a, o := &s.segs[i], &s.ops[oi]
	o.status, o.item = OK, -1
	seg := format.Segment(a.buf)
	switch o.kind {
	case opRewrite:
		if seg.Lossy() && a.bytes == 0 {
			// Compaction has read the record that could not be read before. It is tried again from there.
			o.status = Corrupt
			return false
		}
		return a.entry.Offset() == o.old && a.entry != 0
	case opVerify:
		if at := seg.FindValue(o.old); at != 0 && !s.unsettled(o.old, seg.Item(at).RecordBytes()) {
			s.damage(Damage{Offset: o.old, Segment: a.number, Hash: s.hashOf(seg, at)})
		}
		return false
	case opAudit:
		if !seg.Lossy() || !s.audit.Repairing {
			return seg.Lossy() && a.bytes == 0 && s.audit.forRoom
		}
		seg.Complete()
		o.used = true
		return true
	case opProbe:
		return false
	case Settle:
		return s.applySettle(a, o)
	case opMove:
		return s.applyMove(a, o)
	case opExpire:
		s.noteExpiry(seg.FirstExpiry()) // what has expired was dropped
		s.expiry.won += int64(a.won)
		return false
	case opClear:
		return s.applyClear(a, o)
	case opSweep:
		if seg.Lossy() && a.bytes == 0 {
			o.status = Corrupt // the record that could not be read has what is to be dropped
		}
		return seg.Vacant() && a.bytes > 0 // splits have taken all keys of the record, and nobody else may write it
	}
	at, number := seg.FindNumber(o.key[:o.keyLen])
	if o.sound != 0 && seg.Lossy() && (at == 0 || seg.Item(at).Version() <= o.sound) && !wasDone(seg, at, o) {
		s.damage(Damage{Offset: a.entry.Offset(), Segment: a.number})
		o.status = Corrupt
		return false
	}
	o.item = int16(number)
	if e := o.entry(); e != nil {
		return s.applyIdentified(a, at, o, e)
	}
	if o.given != 0 {
		return s.applyGiven(a, at, o)
	}
	if s.isRepetition(seg, at, o) || s.isRefused(a, at, o) {
		s.noteStored(seg, at, o)
		return false
	}
	if o.full && o.kind == Put {
		o.status, o.version = CapacityExceeded, 0
		return false
	}
	return s.applyWrite(a, at, o, nil)
}

// wasDone reports whether the segment says that a request was done before, which is so whatever else it has lost.
func wasDone(seg format.Segment, at int, o *op) bool {
	if at == 0 || o.id.Client == 0 {
		return false
	}
	_, found := seg.FindIdentity(at, o.id.Client, o.id.Seq)
	return found
}

// applyMove makes a segment refer to the copy of a value, if it has referred to the original.
func (s *Store) applyMove(a *activeSeg, o *op) bool {
	seg := format.Segment(a.buf)
	at := seg.FindValue(o.old)
	if at == 0 || !s.isFresh(o) {
		return false
	}
	// A value that was written with version 2 of the format may be longer than a piece.
	more := (s.pieces(int(o.valueLen)) - 1) * format.ItemHeaderBytes
	if o.status = s.makeRoom(a, seg.LengthBytes()+more, format.MaxSegmentBytes); o.status != OK {
		return false
	}
	seg = format.Segment(a.buf)
	o.oldOffset, o.oldBytes, o.used = o.old, uint32(seg.Item(at).RecordBytes()), true
	seg.Extend(at, more/format.ItemHeaderBytes)
	s.setValue(seg, at, o)
	return true
}

// isRepetition reports whether a request was done before, or may have been. Its status is what it was then, or
// Indeterminate. The identity of a first try is looked for as well: a retry may have overtaken it.
func (s *Store) isRepetition(seg format.Segment, at int, o *op) bool {
	if o.id.Client == 0 {
		return false
	}
	if at != 0 {
		if id, ok := seg.FindIdentity(at, o.id.Client, o.id.Seq); ok {
			o.status, o.version = Status(id.Outcome), id.Version
			return true
		}
	}
	dropped := seg.Lossy() || at != 0 && seg.Evicted(at, s.wall) || o.id.KeepUntil != 0 && o.id.KeepUntil <= s.wall
	if o.id.Retry && dropped {
		o.status = Indeterminate
		return true
	}
	return false
}

// outcomeOfFailed is the outcome of a Put whose value could not be written: what it was if it is a repetition.
func (s *Store) outcomeOfFailed(seg format.Segment, o *op) Status {
	if o.kind == Put && o.id.Retry && s.isRepetition(seg, seg.Find(o.key[:o.keyLen]), o) {
		return o.status
	}
	return o.failed
}

// isRefused reports whether the condition of a writer forbids what it wants to do with the key, whose item is at offset
// at, or 0 if there is none.
func (s *Store) isRefused(a *activeSeg, at int, o *op) bool {
	if o.version = 0; o.cond == Always && o.kind == Put && o.given == 0 {
		return false
	}
	seg := format.Segment(a.buf)
	exists, restores, known := false, false, uint64(0)
	if at != 0 {
		it := seg.Item(at)
		exists, restores, known = !it.Gone(), o.restores(it) || s.comesBack(o, it), it.Version()
	}
	if exists {
		o.version = known
	}
	switch unknown := at == 0 && seg.Lossy(); {
	case unknown && o.cond != Always && o.cond != IfNewer:
		s.damage(Damage{Offset: a.entry.Offset(), Segment: a.number})
		o.status = Corrupt
	case o.cond == IfVersion && o.version != o.want:
		o.status = VersionMismatch
	case o.cond == IfNewer && (known >= o.want && !restores || s.covers(o, o.want)):
		o.status, o.version = Superseded, known
	case o.given != 0 && o.cond != IfNewer && (known >= o.given || s.covers(o, o.given)):
		o.status, o.version = Superseded, known
	case restores && known > o.want:
		o.cond = Always // it gets a new version
	case !exists && (o.kind == Delete && o.cond != IfNewer && !unknown || o.cond == IfPresent):
		o.status = NotFound
	case exists && o.cond == IfAbsent:
		o.status = Exists
	}
	return o.status != OK
}

// covers reports whether a Drop covers the op's key at a version.
func (s *Store) covers(o *op, version uint64) bool {
	return s.drops.list.Covers(bits.Reverse64(o.hash), version)
}

// applyWrite does what a Put or Delete wants, if there is room for that. The key's item is at offset at, or there is
// none if that is 0. With ids these will be the key's identities, and there is room for them.
func (s *Store) applyWrite(a *activeSeg, at int, o *op, ids []format.Identity) bool {
	seg := format.Segment(a.buf)
	exists, pieces := at != 0 && !seg.Item(at).Gone(), 0
	if at != 0 {
		pieces, _ = seg.Pieces(at)
	}
	// A Delete finds room in a full partition, but its identity does not. While Puts are refused, few keys that a
	// repetition could delete come back.
	if o.full && o.kind == Delete {
		o.id = Identity{}
	}
	// A key that does not exist has an item if something has to be known about it.
	keeps := o.kind == Put || o.tombstone || o.addsIdentity() && exists || seg.Lossy() ||
		at != 0 && seg.Identities(at) > 0 || len(ids) > 0
	version := s.clock + 1
	switch {
	case o.given != 0:
		version = o.given
	case o.cond == IfNewer:
		version = o.want
	}
	if version > maxOwn {
		o.status, o.version = CapacityExceeded, 0
		return false
	}
	clock := max(seg.Clock(), version)
	width := widthFor(seg, clock, version)
	length, full := s.lengthAfter(seg, at, pieces, o, keeps, width)
	length += moreIdentities(seg, at, ids)
	most := format.LongestSegment
	if o.kind == Put || len(ids) > 0 && o.given == 0 {
		// So that versions can always be made wider.
		length, most = length+full, format.MaxSegmentBytes
	}
	if length <= seg.LengthBytes() {
		most = length
	}
	if o.status = s.makeRoom(a, length, most); o.status != OK {
		o.version = 0
		return false
	}
	seg = format.Segment(a.buf)
	// It becomes shorter before it becomes longer, so that it is never longer than before or afterwards.
	if exists {
		if s.replaces(a, o, at, pieces); pieces > 1 {
			seg.Truncate(at)
		}
	}
	if at != 0 && !keeps {
		seg.Remove(at)
	}
	moves := width != seg.Width()
	seg.Recode(clock, width)
	s.clock = max(s.clock, version)
	o.version = version
	s.countKey(o, exists)
	if !keeps {
		if !exists { // the segment is written because of its clock
			o.status = NotFound
		}
		return true
	}
	if at != 0 && moves {
		at = seg.Find(o.key[:o.keyLen])
	}
	if at == 0 {
		o.item = int16(seg.Items())
		at = seg.Insert(o.key[:o.keyLen])
	}
	it := seg.Item(at)
	it.SetVersion(version)
	if expires := o.tombstone || o.kind == Put && o.expires != 0; expires || it.HasExpiry() {
		seg.SetExpiry(at, expires, o.expires)
		s.noteExpiry(o.expires)
	}
	switch o.used = o.valueLen > 0; {
	case o.kind == Delete:
		it.SetGone()
	case o.used:
		if more := s.pieces(int(o.valueLen)) - 1; more > 0 {
			seg.Extend(at, more)
		}
		s.setValue(seg, at, o)
	default:
		it.SetValueLen(0)
		it.SetValueOffset(0)
	}
	if o.addsIdentity() {
		seg.AddIdentity(at, &format.Identity{Client: o.id.Client, Seq: o.id.Seq, Outcome: uint8(o.status),
			Version: version, KeepUntil: o.id.KeepUntil}, o.id.Answered)
		s.noteIdentity(o.id.KeepUntil)
	}
	return true
}

// widthFor is the version width that a segment gets with a clock, for what it has and another version. Below 2^32 it is
// that of the clock, so that the versions of all items need not be looked at for each Put.
func widthFor(seg format.Segment, clock, version uint64) int {
	width := seg.Width()
	switch {
	case clock < 1<<16:
		return max(2, width)
	case clock < 1<<24:
		return max(3, width)
	case clock < 1<<32:
		return max(4, width)
	}
	if w := seg.WidthFor(clock, version); w > width || w+2 <= width {
		return w
	}
	return width
}

// countKey notes whether a Put or Delete changes the number of keys.
func (s *Store) countKey(o *op, exists bool) {
	switch {
	case o.kind == Delete && exists:
		o.objects = -1
	case o.kind == Put && !exists:
		o.objects = 1
	}
}

// lengthAfter is the length of a segment after applyWrite, and how much longer it is if its versions are as wide as
// possible. The value of the key whose item is at offset at has so many pieces.
func (s *Store) lengthAfter(seg format.Segment, at, pieces int, o *op, keeps bool, width int) (length, wider int) {
	length = seg.LengthBytes()
	// All items may be those of keys. It matters only if the width changes, or the segment is long.
	keys := seg.Items()
	if width != seg.Width() || length+keys*maxWidth > format.MaxSegmentBytes/2 {
		keys = seg.Keys()
	}
	if at != 0 {
		length -= seg.Item(at).LengthBytes() + (pieces-1)*format.ItemHeaderBytes
		keys--
	}
	if keeps {
		length += s.pieces(int(o.valueLen))*format.ItemHeaderBytes + int(o.keyLen) + seg.Width()
		keys++
		if o.tombstone || o.kind == Put && o.expires != 0 {
			length += format.ExpiryBytes
		}
		if o.addsIdentity() {
			length += format.IdentityBytes
			if at != 0 {
				n := seg.Answered(at, o.id.Client, o.id.Answered)
				if n == 0 && seg.Identities(at) == format.MaxIdentities {
					n = 1
				}
				length -= n * format.IdentityBytes
			}
		}
	}
	return length + keys*(width-seg.Width()), keys * (maxWidth - width)
}

// makeRoom makes room for n bytes in the buffer of an active segment. It returns CapacityExceeded if that is more than
// most, or NoMemory.
func (s *Store) makeRoom(a *activeSeg, n, most int) Status {
	switch {
	case n > most:
		return CapacityExceeded
	case !s.makeLen(a, n):
		return NoMemory
	}
	return OK
}
