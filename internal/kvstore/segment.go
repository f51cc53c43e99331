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
)

// activeSeg is a segment that has writers. Its content is kept in memory, so that a writer that follows another one
// need not read it.
type activeSeg struct {
	state  segState
	number uint32
	// pays is the payer of the first writer. It is charged for reading the segment.
	pays payer
	// chain links the segments of one place of the table, and the free activeSegs. next links the segments of a group.
	chain, next int32
	dirty       bool
	// held: a split is moving keys out of the segment, so its writers wait. added: the segment is the new one of a
	// split and is not in the SegTbl yet.
	held, added bool
	// force: the segment is written even if no writer changes it.
	force bool
	// buf begins with the segment. While the segment is being read, buf holds the blocks around it, and it begins at
	// lead.
	buf  []byte
	lead uint32
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
	*a = activeSeg{number: number, pays: pays, chain: *head, next: none, buf: a.buf, waiting: list.None,
		writing: list.None}
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
	if !s.makeLen(&a.buf, n+2*s.cfg.BlockSize) {
		s.segLinks.Push(&s.unloaded, i)
		return
	}
	start, length := s.pool.Around(a.entry.Offset(), n, s.cfg.BlockSize)
	a.lead = uint32(a.entry.Offset() - start)
	s.ioFor(ioSegment, i, a.pays, pipeline.Read, start, a.buf[:length])
}

// blank makes the content of an active segment empty.
func (s *Store) blank(i int32) {
	a := &s.segs[i]
	format.Segment(a.buf).Clear(a.number)
	a.state, a.bytes = segLoaded, 0
}

// makeLen grows the buffer of a segment to at least n bytes, keeping its content, and reports whether there was memory
// for it. A segment that is longer than smallSegment is rare: with the default of 13 keys a segment it takes a table
// without room for more segments. The longer buffer stays with its activeSeg, so that a store stops allocating when it
// has seen its longest segments.
func (s *Store) makeLen(buf *[]byte, n int) bool {
	if len(*buf) >= n {
		return true
	}
	longer, err := s.cfg.Alloc(format.RoundUp(n, format.SuperblockBytes))
	if err != nil {
		return false
	}
	copy(longer, *buf)
	*buf = longer
	return true
}

// dispatch hands a writer to its segment.
func (s *Store) dispatch(i int32) {
	o := &s.ops[i]
	number := o.segment
	if o.kind != opRewrite {
		number = s.tbl.Segment(o.hash)
	}
	at, fresh := s.activate(number, o.pays())
	s.opLinks.Push(&s.segs[at].waiting, i)
	if fresh {
		s.load(at)
	}
	s.schedule(at)
}

// segmentRead ends the read of an active segment.
func (s *Store) segmentRead(i int32, ok bool) {
	a := &s.segs[i]
	seg := format.Segment(a.buf[a.lead:])
	status := OK
	if !ok {
		status = DeviceError
	} else if seg.Check(s.pool.Seed(a.entry.Offset())) != nil || seg.Number() != a.number {
		s.damage(Damage{Offset: a.entry.Offset(), Segment: a.number})
		status = Corrupt
	}
	if status != OK {
		s.failSegment(i, status)
		return
	}
	copy(a.buf, seg[:seg.LengthBytes()])
	s.loaded(i)
	s.schedule(i)
}

// loaded makes the committed record, which the buffer of an active segment now contains, the content of the segment.
func (s *Store) loaded(i int32) {
	a := &s.segs[i]
	a.bytes = format.Segment(a.buf).ExtentBytes()
	a.state = segLoaded
	// Keys that a split has moved to another segment stay in the record until the next write.
	s.dropMovedKeys(i)
}

// dropMovedKeys removes from an active segment the keys that a split has moved to another one.
func (s *Store) dropMovedKeys(i int32) {
	a := &s.segs[i]
	format.Segment(a.buf).Filter(func(key []byte) bool {
		return s.tbl.Segment(format.HashKey(s.hashSeed,
			key)) == a.number
	})
}

// failSegment ends the writers of a segment with a status and forgets the segment's content.
func (s *Store) failSegment(i int32, st Status) {
	a := &s.segs[i]
	for a.writing.N > 0 {
		s.finish(s.opLinks.Pop(&a.writing), st)
	}
	s.failReady(i, st)
	a.force = false
	switch {
	case a.held:
		s.abandonSplits(i)
	case a.waiting.N > 0:
		s.load(i)
		s.schedule(i)
	default:
		s.deactivate(i)
	}
}

// failReady ends the ready writers of a segment with a status. Writers whose values are still being written end later,
// when that I/O completes. With NoMemory it also ends the moves whose values compaction has not begun to copy:
// that would happen only after the segment was read, for which there is no memory.
func (s *Store) failReady(i int32, st Status) {
	a := &s.segs[i]
	for n := a.waiting.N; n > 0; n-- {
		o := s.opLinks.Pop(&a.waiting)
		if r := &s.ops[o]; r.ready || st == NoMemory && r.kind == opMove && r.group == none {
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
	a.chain = s.freeSeg
	s.freeSeg = i
}

// schedule puts a segment on the list of those to be written if one of its writers is ready, and deactivates it if it
// has no writers.
func (s *Store) schedule(i int32) {
	a := &s.segs[i]
	if a.state != segLoaded || a.dirty || a.held {
		return
	}
	if a.waiting.N == 0 && !a.force {
		s.deactivate(i)
		return
	}
	for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
		if r := &s.ops[o]; r.kind == opMove && !r.ready && r.group == none {
			s.examine(format.Segment(a.buf), o)
		}
	}
	want := a.force
	for o := a.waiting.First; o != none && !want; o = s.opLinks.Next(o) {
		want = s.ops[o].ready
	}
	if want {
		s.setDirty(i)
	}
}

// writeSegments writes the dirty segments: it applies the changes of their ready writers and appends each segment to a
// group of the key log. It stops when no group is free. A segment for which the key log has no space stays dirty until
// compaction has freed some. Segments that compaction waits for skip that check, because a compaction that waited for
// space could never free any. These are the segments of victims, for which placeForKeys keeps space back, and the new
// ones of a split, whose sources compaction cannot move before the split ends. The new ones take from the chunk and a
// half that placeForKeys keeps back besides; if that does not suffice, failOutOfSpace ends the split's round with an
// error.
func (s *Store) writeSegments() {
	s.compact.blocked = false
	for n := s.dirty.N; n > 0 && s.room(keyLog); n-- {
		i := s.segLinks.Pop(&s.dirty)
		a := &s.segs[i]
		a.dirty = false
		switch {
		case a.held:
			// A split has held the segment since it was put on the list. The split considers it again at its end.
		case a.added || s.placeForKeys() >= s.maxLenAfter(a) || s.awaitedByRewrite(a):
			s.change(i)
		default:
			s.compact.blocked = true
			s.setDirty(i)
		}
	}
}

// maxLenAfter returns an upper bound of the length of a segment after its writers have changed it.
func (s *Store) maxLenAfter(a *activeSeg) int64 {
	return int64(format.Segment(a.buf).LengthBytes() + a.waiting.N*(format.ItemHeaderBytes+format.MaxKey) +
		format.MaxChangesBytes)
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
	for n := a.waiting.N; n > 0; n-- {
		o := s.opLinks.Pop(&a.waiting)
		r := &s.ops[o]
		if !r.ready {
			s.opLinks.Push(&a.waiting, o)
			continue
		}
		if r.failed != OK {
			s.finish(o, r.failed)
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

// apply applies writer oi to the content of segment i and reports whether the segment must be written. It sets the
// writer's status.
func (s *Store) apply(i, oi int32) bool {
	a, o := &s.segs[i], &s.ops[oi]
	o.status = OK
	seg := format.Segment(a.buf)
	switch o.kind {
	case opRewrite:
		return a.entry.Offset() == o.old && a.entry != 0
	case opVerify:
		if seg.FindValue(o.old) != 0 {
			s.damage(Damage{Offset: o.old, Segment: a.number, Hash: o.hash})
		}
		return false
	case opMove:
		at := seg.FindValue(o.old)
		if at == 0 {
			return false
		}
		seg.Item(at).SetValueOffset(o.offset)
		o.oldOffset, o.oldLen, o.used = o.old, o.valueLen, true
		return true
	case Delete:
		at := seg.Find(o.key[:o.keyLen])
		if at == 0 {
			o.status = NotFound
			return false
		}
		s.replaces(o, seg.Item(at))
		o.objects = -1
		seg.Remove(at)
		return true
	}
	at := seg.Find(o.key[:o.keyLen])
	switch {
	case at == 0 && o.cond == IfPresent:
		o.status = NotFound
		return false
	case at != 0 && o.cond == IfAbsent:
		o.status = Exists
		return false
	case at != 0:
		s.replaces(o, seg.Item(at))
	default:
		at = seg.LengthBytes()
		n := format.ItemHeaderBytes + int(o.keyLen)
		if at+n > format.MaxSegmentBytes {
			o.status = CapacityExceeded
			return false
		}
		if !s.makeLen(&a.buf, at+n) {
			o.status = NoMemory
			return false
		}
		seg = format.Segment(a.buf)
		seg.Insert(o.key[:o.keyLen])
		o.objects = 1
	}
	it := seg.Item(at)
	it.SetValueLen(int(o.valueLen))
	it.SetValueOffset(o.offset)
	o.used = o.valueLen > 0
	return true
}

// replaces notes that the value of an item dies with a writer. What a damaged item names as a value's place may lie in
// no chunk; then no live bytes are counted for it.
func (s *Store) replaces(o *op, it format.Item) {
	if s.pool.Contains(it.ValueOffset()) {
		o.oldOffset, o.oldLen = it.ValueOffset(), uint32(it.ValueLen())
	}
}

// segmentWritten ends the write of a segment. placed says that the segment's group had a place in the log, so that it
// may have reached the device: after an error the outcome is then indeterminate. Without a place nothing was written.
func (s *Store) segmentWritten(i int32, placed bool, st Status) {
	a := &s.segs[i]
	if st != OK {
		if placed {
			s.pool.SubLive(a.offset, a.length)
		}
		if a.added {
			a.state, s.split.failed = segLoaded, st
			s.addedWritten()
			return
		}
		s.failSegment(i, st)
		return
	}
	if a.bytes > 0 {
		s.pool.SubLive(a.entry.Offset(), a.bytes)
	}
	a.entry, a.bytes = lookup.NewEntry(a.offset, a.length), a.length
	if format.Segment(a.buf).Items() == 0 {
		// Only recovery needs the record of an empty segment, and only until the next checkpoint.
		s.pool.SubLive(a.offset, a.bytes)
		a.entry, a.bytes = 0, 0
	}
	a.state = segLoaded
	if a.added {
		s.addedWritten()
		return
	}
	s.tbl.Set(a.number, a.entry)
	for a.writing.N > 0 {
		oi := s.opLinks.Pop(&a.writing)
		o := &s.ops[oi]
		if o.oldLen > 0 {
			s.pool.SubLive(o.oldOffset, format.ValueBytes(int(o.oldLen)))
		}
		s.objects += int64(o.objects)
		s.finish(oi, o.status)
	}
	s.schedule(i)
}
