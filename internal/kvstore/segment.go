package kvstore

import (
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/list"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// smallSegment is the length of a segment for which every activeSeg has a buffer from the start.
const smallSegment = 4 << 10

type segState uint8

const (
	segLoading segState = iota
	segLoaded           // the content is what is committed
	segWriting          // the content is in a group of the key log
	segUnread           // reading it has failed, and is tried again when one of its writers is ready
)

// activeSeg is a segment that has writers. Its content is kept in memory, so that a writer that follows another one
// need not read it.
type activeSeg struct {
	state  segState
	number uint32
	// tries is how often the record was read in vain, failed how many reads have failed since the last load began.
	tries, failed uint8
	// pays is the payer of the first writer. It is charged for reading the segment.
	pays payer
	// chain links the segments of one place of the table, and the free activeSegs. next links the segments of a group.
	chain, next int32
	dirty       bool
	// held: a split or a merge is moving keys out of the segment or to it, so its writers wait. added: the segment is
	// the new one of a split and is not in the SegTbl yet. merging: the segment is being written with the keys of
	// another one.
	held, added, merging bool
	// stale: the committed record may have keys that a split has moved to another segment.
	stale bool
	// force: the segment is written even if no writer changes it.
	force bool
	// buf begins with the segment. While the segment is being read, buf holds the blocks around it, and it begins at
	// lead. It is small, the activeSeg's own, or a longer one.
	buf, small []byte
	lead       uint32
	// blocks is how many blocks are being read. shorter: a read of more has failed.
	blocks  int
	shorter bool
	// entry is the committed place of the segment, bytes the length of the committed record.
	entry lookup.Entry
	bytes int
	// groupOff is where the record that is being written begins in its group. When the group has its place, offset is
	// where it begins in the partition. length is the record's length.
	groupOff uint32
	offset   units.ExtentOffset
	length   int
	// waiting are writers that have not changed the segment yet. writing are those whose changes are being written.
	waiting, writing list.List
	// dead are the pieces of values that die when what is being written is durable: of values in several pieces, and of
	// objects that have expired, or that a Drop or an exact CopyIn has removed, of which there are dropped.
	dead    []deadPiece
	dropped int
	// won is how many bytes become obsolete by what dropExpired has dropped last.
	won int
}

// activate returns the active segment of that number. If it was not active yet, fresh is true and it has no content.
func (s *Store) activate(number uint32, pays payer) (i int32, fresh bool) {
	head := &s.table[int(number)&(len(s.table)-1)]
	for i := *head; i != none; i = s.segs[i].chain {
		if s.segs[i].number == number {
			return i, false
		}
	}
	i = s.freeSeg
	invariants.Check(i != none, "kvstore: more active segments than writers")
	a := &s.segs[i]
	s.freeSeg = a.chain
	small, dead := a.small, a.dead[:0]
	*a = activeSeg{} // in place, without a copy
	a.number, a.pays, a.chain, a.next, a.buf, a.small, a.dead = number, pays, *head, none, small, small, dead
	a.waiting, a.writing = list.None, list.None
	*head = i
	return i, true
}

// load reads a segment that was just made active.
func (s *Store) load(i int32) {
	a := &s.segs[i]
	a.state = segLoading
	a.entry = s.tbl.Get(a.number)
	if a.entry == 0 {
		s.blank(i)
		return
	}
	n := a.entry.MaxBytes()
	if !s.makeLen(a, n+2*s.cfg.BlockSize) {
		s.segLinks.Push(&s.unloaded, i)
		return
	}
	start, length := s.pool.Around(a.entry.Offset(), n, s.cfg.BlockSize)
	a.lead, a.blocks, a.failed = uint32(a.entry.Offset()-start), 0, 0
	s.read(i, length/s.cfg.BlockSize)
}

// read reads that many blocks of an active segment. If they are fewer than last time, the others could not be read.
func (s *Store) read(i int32, blocks int) {
	a := &s.segs[i]
	a.blocks, a.shorter = blocks, a.blocks > blocks
	start := a.entry.Offset() - units.ExtentOffset(a.lead)
	s.ioFor(ioSegment, i, a.pays, pipeline.Read, start, a.buf[:blocks*s.cfg.BlockSize])
}

// blank makes the content of an active segment empty.
func (s *Store) blank(i int32) {
	a := &s.segs[i]
	format.Segment(a.buf).Clear(a.number)
	format.Segment(a.buf).SetDecidedBy(s.tbl.Bits(a.number))
	a.state, a.bytes, a.stale = segLoaded, 0, false
}

// dispatch hands a writer to its segment.
func (s *Store) dispatch(i int32) {
	o := &s.ops[i]
	number := o.segment
	if o.kind != opRewrite && o.kind != opAudit && o.kind != opExpire && o.kind != opProbe { // others go by a position
		number = s.tbl.Segment(o.hash)
	}
	at, fresh := s.activate(number, o.pays())
	o.active = at + 1
	s.opLinks.Push(&s.segs[at].waiting, i)
	if s.merge.stage == mergeBroken && s.segs[at].held {
		s.progress++ // the merge goes on for it
	}
	if fresh {
		s.load(at)
	}
	s.schedule(at)
}

// segmentRead ends the read of an active segment.
func (s *Store) segmentRead(i int32, ok bool) {
	a := &s.segs[i]
	if !ok {
		a.failed++
	}
	if !ok && a.blocks > 1 {
		s.read(i, a.blocks-1) // the segment may end before the block that cannot be read
		return
	}
	seg := format.Segment(a.buf[a.lead:])
	sound := ok && seg.Check(s.pool.Seed(a.entry.Offset())) == nil && seg.Number() == a.number
	if ok = ok && (sound || !a.shorter); ok {
		s.unreadable.read(a)
	}
	switch {
	case !ok && !s.unreadable.isLost(a, s.now, s.mostReads(a)):
		s.failSegment(i, DeviceError)
		return
	case sound:
		copy(a.buf, seg[:seg.LengthBytes()])
		s.loaded(i)
	case a.tries < maxTries-1:
		a.tries++ // the drive may do better
		s.load(i)
	case s.unsettled(a.entry.Offset(), a.entry.MaxBytes()):
		s.failSegment(i, DeviceError)
		return
	default:
		s.damage(Damage{Offset: a.entry.Offset(), Segment: a.number})
		s.lose(i)
	}
	s.schedule(i)
}

// maxTries is how often a segment is read before it counts as lost.
const maxTries = 3

// lose makes an active segment lossy, because its record is damaged: what is written to it from now on is known, and
// the rest is lost. The record is replaced when a writer changes the segment. Its length is not known, so that it stays
// counted in its chunk.
func (s *Store) lose(i int32) {
	s.unreadable.losses++
	s.blank(i)
	format.Segment(s.segs[i].buf).SetLossy(true)
}

// loaded makes the committed record, which the buffer of an active segment now contains, the content of the segment.
// The buffer has room for format.UpgradeBytes more.
func (s *Store) loaded(i int32) {
	a := &s.segs[i]
	a.bytes = format.Segment(a.buf).ExtentBytes()
	a.state = segLoaded
	format.Segment(a.buf).Upgrade()
	// Keys that a split has moved to another segment stay in the record until the next write.
	s.dropMovedKeys(i)
}

// dropMovedKeys removes from an active segment the keys that a split has moved to another one.
func (s *Store) dropMovedKeys(i int32) {
	a := &s.segs[i]
	seg, bits := format.Segment(a.buf), s.tbl.Bits(a.number)
	if seg.DecidedBy(bits) {
		return // it was not split since then; hashing all of its keys would take an eighth of what a Put does
	}
	a.stale = true
	seg.Filter(func(key []byte) bool { return s.tbl.Segment(format.HashKey(s.hashSeed, key)) == a.number })
	seg.SetDecidedBy(bits)
}

// failSegment ends the writers of a segment with a status and forgets the segment's content.
func (s *Store) failSegment(i int32, st Status) {
	a := &s.segs[i]
	for a.writing.N > 0 {
		s.finish(s.opLinks.Pop(&a.writing), st)
	}
	s.failReady(i, st)
	s.failUnstartedMoves(i, st)
	a.force = false
	switch {
	case s.merge.holds(i):
		s.abandonMerge(i, retryNS)
	case a.held:
		s.abandonSplits(i)
	default:
		a.state = segUnread
		s.schedule(i)
	}
}

// failReady ends the ready writers of a segment with a status. Writers whose values are still being written end later,
// when that I/O completes.
func (s *Store) failReady(i int32, st Status) {
	a := &s.segs[i]
	for n := a.waiting.N; n > 0; n-- {
		o := s.opLinks.Pop(&a.waiting)
		if s.ops[o].ready {
			s.finish(o, st)
		} else {
			s.opLinks.Push(&a.waiting, o)
		}
	}
}

// failUnstartedMoves ends the moves whose values compaction has not begun to copy. That happens only when the segment
// has been read, which has failed or for which there is no memory.
func (s *Store) failUnstartedMoves(i int32, st Status) {
	a := &s.segs[i]
	for n := a.waiting.N; n > 0; n-- {
		o := s.opLinks.Pop(&a.waiting)
		if r := &s.ops[o]; r.isUnstartedMove() {
			s.finish(o, st)
		} else {
			s.opLinks.Push(&a.waiting, o)
		}
	}
}

func (s *Store) deactivate(i int32) {
	a := &s.segs[i]
	at := &s.table[int(a.number)&(len(s.table)-1)]
	for *at != i {
		at = &s.segs[*at].chain
	}
	*at = a.chain
	s.returnLong(a)
	a.chain = s.freeSeg
	s.freeSeg = i
}

// schedule decides what is next for an active segment. It becomes dirty, and so is written, if a writer is ready,
// except that moves alone wait for the early moves of the segment (awaitsEarly). Without writers it is deactivated. If
// it could not be read, it is read again first.
func (s *Store) schedule(i int32) {
	a := &s.segs[i]
	if a.state == segUnread && !a.held {
		switch {
		case a.waiting.N == 0:
			s.deactivate(i)
			return
		case s.needsContent(a):
			s.load(i)
		}
	}
	if a.state != segLoaded || a.dirty || a.held && !a.merging {
		return
	}
	if a.merging {
		s.setDirty(i)
		return
	}
	if a.waiting.N == 0 && !a.force {
		s.deactivate(i)
		return
	}
	want, moves := a.force, false
	for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
		r := &s.ops[o]
		moves = moves || r.kind == opMove
		want = want || r.ready
	}
	if moves {
		want = s.wantsToMove(a)
	}
	if want {
		s.setDirty(i)
	}
}

// wantsToMove reports whether a segment with moves among its writers is to be written, and begins moves.
func (s *Store) wantsToMove(a *activeSeg) bool {
	for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
		if s.ops[o].isUnstartedMove() {
			s.examine(a, o)
		}
	}
	want, early := a.force, s.awaitsEarly(a)
	for o := a.waiting.First; o != none && !want; o = s.opLinks.Next(o) {
		r := &s.ops[o]
		want = r.ready && !(early && r.kind == opMove)
	}
	return want
}

// needsContent reports whether a writer of a segment has use for its content now.
func (s *Store) needsContent(a *activeSeg) bool {
	for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
		if r := &s.ops[o]; r.ready || r.isUnstartedMove() {
			return true
		}
	}
	return false
}

// writeSegments writes the dirty segments: it applies the changes of their ready writers and appends each segment to a
// group of the key log. It stops when no group is free. A segment for which the key log has no space stays dirty until
// compaction has freed some. Segments that compaction waits for skip that check, because a compaction that waited for
// space could never free any. These are the segments of victims, for which placeForKeys keeps space back, and the new
// ones of a split, whose sources compaction cannot move before the split ends, and that of a merge. They take from the
// chunk and a half that placeForKeys keeps back besides; if that does not suffice, failOutOfSpace ends the round of
// splits, or the merge, with an error.
func (s *Store) writeSegments() {
	was := s.compact.blocked
	s.compact.blocked = false
	for n := s.dirty.N; n > 0 && s.room(keyLog); n-- {
		i := s.segLinks.Pop(&s.dirty)
		a := &s.segs[i]
		a.dirty = false
		switch {
		case a.held && !a.merging:
			// A split or merge has held the segment since it was put on the list, and considers it again at its end.
		case a.added || a.merging || s.placeForKeys() >= s.maxLenAfter(a) || s.awaitedByRewrite(a):
			s.change(i)
		default:
			s.compact.blocked = true
			s.setDirty(i)
		}
	}
	if s.compact.blocked && !was {
		s.progress++ // a checkpoint may be due
	}
}

// maxLenAfter returns an upper bound of the length of a segment after its writers have changed it.
func (s *Store) maxLenAfter(a *activeSeg) int64 {
	seg := format.Segment(a.buf)
	n := seg.LengthBytes() + format.MaxChangesBytes + seg.Items()*(maxWidth-seg.Width())
	for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
		n += s.pieces(int(s.ops[o].valueLen))*format.ItemHeaderBytes + maxItemBytes + format.IdentityBytes
		if e := s.ops[o].entry(); e != nil {
			n += e.Identities() * format.IdentityBytes
		}
	}
	return int64(n)
}

// awaitedByRewrite reports whether compaction waits for the segment to be written, because its record is in a victim.
func (s *Store) awaitedByRewrite(a *activeSeg) bool {
	for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
		if s.ops[o].kind == opRewrite {
			return true
		}
	}
	return false
}

// setDirty puts a segment on the list of those to be written.
func (s *Store) setDirty(i int32) {
	s.segs[i].dirty = true
	s.segLinks.Push(&s.dirty, i)
}

// change applies the ready writers of a segment in order. If any of them has changed the segment, it appends the
// segment to a group of the key log; otherwise it answers the writers at once.
func (s *Store) change(i int32) {
	a := &s.segs[i]
	// While the outcome of a write of the key log is indeterminate, a restart may find the segment that failed. Then
	// even a writer that changes nothing is answered only after a newer version of the segment is durable.
	changed := a.force || s.failures != s.ckpt.covered
	a.force = false
	if a.merging {
		a.state = segWriting
		s.appendSegment(i)
		return
	}
	if !a.added && s.dropExpired(a) {
		changed = true
	}
	for n := a.waiting.N; n > 0; n-- {
		o := s.opLinks.Pop(&a.waiting)
		r := &s.ops[o]
		if !r.ready {
			s.opLinks.Push(&a.waiting, o)
			continue
		}
		if r.failed != OK {
			s.finish(o, s.outcomeOfFailed(format.Segment(a.buf), r))
			continue
		}
		did := s.apply(i, o)
		changed = changed || did
		if changed {
			s.opLinks.Push(&a.writing, o)
		} else {
			s.finish(o, r.status)
		}
	}
	if !changed {
		s.schedule(i)
		return
	}
	a.state = segWriting
	s.appendSegment(i)
}

// segmentWritten ends the write of a segment. placed says that the segment's group had a place in the log, so that it
// may have reached the device: after an error the outcome is then indeterminate. Without a place nothing was written.
func (s *Store) segmentWritten(i int32, placed bool, st Status) {
	a := &s.segs[i]
	if st != OK {
		a.dead, a.dropped = a.dead[:0], 0
		if placed {
			s.pool.SubLive(a.offset, a.length)
		}
		if a.added {
			a.state, s.split.failed = segLoaded, st
			s.addedWritten()
			return
		}
		if a.merging {
			s.mergeFailed(st)
			return
		}
		s.failSegment(i, st)
		return
	}
	before := a.bytes
	if before > 0 {
		s.died(a.number, a.entry.Offset(), before)
	}
	a.entry, a.bytes = lookup.NewEntry(a.offset, a.length), a.length
	if format.Segment(a.buf).Vacant() {
		// Only recovery needs the record of an empty segment, and only until the next checkpoint.
		s.pool.SubLive(a.offset, a.bytes)
		a.entry, a.bytes = 0, 0
	}
	a.state, a.stale = segLoaded, false
	if a.added {
		s.addedWritten()
		return
	}
	s.tbl.Set(a.number, a.entry)
	s.unreadable.replaced(a.number)
	s.countDead(a, before)
	if a.merging {
		s.mergeDone()
		return
	}
	for a.writing.N > 0 {
		oi := s.opLinks.Pop(&a.writing)
		s.finish(oi, s.ops[oi].status)
	}
	s.schedule(i)
}
