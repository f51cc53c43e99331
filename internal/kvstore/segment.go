package kvstore

import (
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/fifo"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/segtbl"
	"jbofd/internal/pipeline"
)

// smallSegment is the length of a segment for which there is memory beforehand.
const smallSegment = 4 << 10

type segState uint8

const (
	segLoading segState = iota
	segLoaded           // content is what is committed
	segWriting          // content is in a group of the key log
)

// activeSeg is a segment that has writers. While it has, its content is in memory, so that a writer
// that follows another one need not read it.
type activeSeg struct {
	state  segState
	number uint32
	// pays is in whose name it is read: its first writer's.
	pays payer
	// chain links those of one place in the table, and the free ones; next the dirty ones.
	chain, next int32
	dirty       bool
	// held: a split takes keys from it; its writers wait. newborn: a split has made it, and it is not in the table yet.
	held, newborn bool
	// force: write it though nobody changes it.
	force bool
	// buf holds a segment, from its start; while loading, the blocks around it.
	buf  []byte
	lead uint32
	// entry is its place as committed, bytes its length there.
	entry segtbl.Entry
	bytes int
	// offset is its place in the group that is being written, length what it takes there.
	offset int64
	length int
	// waiting are its writers, writing those that the content in the group has changed.
	waiting, writing fifo.List
}

// activate returns the active segment of that number; a fresh one was none and has no content yet.
func (s *Store) activate(number uint32, pays payer) (i int32, fresh bool) {
	head := &s.table[int(number)&(len(s.table)-1)]
	for i := *head; i != nobody; i = s.segs[i].chain {
		if s.segs[i].number == number {
			return i, false
		}
	}
	i = s.freeSeg
	invariants.Check(i != nobody, "kvstore: more active segments than writers")
	a := &s.segs[i]
	s.freeSeg = a.chain
	*a = activeSeg{number: number, pays: pays, chain: *head, next: nobody, buf: a.buf, waiting: fifo.None, writing: fifo.None}
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
	a.buf = s.enough(a.buf, n+2*s.cfg.BlockSize)
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

// enough returns buf or, if it is too short, a longer one.
func (s *Store) enough(buf []byte, n int) []byte {
	if len(buf) >= n {
		return buf
	}
	longer := s.cfg.Alloc(format.RoundUp(n, 4096))
	copy(longer, buf)
	return longer
}

// dispatch gives a writer to its segment.
func (s *Store) dispatch(i int32) {
	o := &s.ops[i]
	number := o.segment
	if o.kind != opTouch {
		number = s.tbl.Segment(o.hash)
	}
	at, fresh := s.activate(number, o.pays())
	s.opLinks.Push(&s.segs[at].waiting, i)
	if fresh {
		s.load(at)
	}
	s.consider(at)
}

// segmentRead takes the content of an active segment.
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
		s.drop(i, status)
		return
	}
	copy(a.buf, seg[:seg.LengthBytes()])
	s.loaded(i)
	s.consider(i)
}

// loaded takes what is in the buffer of an active segment, which is what was committed, as its content.
func (s *Store) loaded(i int32) {
	a := &s.segs[i]
	a.bytes = format.Segment(a.buf).ExtentBytes()
	a.state = segLoaded
	// Keys that were taken to another segment by a split are still there until the next write.
	s.own(i)
}

// own leaves out of an active segment the keys that were taken to another one by a split.
func (s *Store) own(i int32) {
	a := &s.segs[i]
	format.Segment(a.buf).Filter(func(key []byte) bool { return s.tbl.Segment(format.HashKey(s.hashSeed, key)) == a.number })
}

// drop fails all writers of a segment and forgets its content.
func (s *Store) drop(i int32, st Status) {
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
		s.consider(i)
	default:
		s.deactivate(i)
	}
}

// failReady ends the writers of a segment but those whose values are under way, which cannot be ended before.
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

// consider puts a segment on the list of those to write if a writer is ready, and lets go of it
// if it has none.
func (s *Store) consider(i int32) {
	a := &s.segs[i]
	if a.state != segLoaded || a.dirty || a.held {
		return
	}
	if a.waiting.N == 0 && !a.force {
		s.deactivate(i)
		return
	}
	for o := a.waiting.First; o != nobody; o = s.opLinks.Next(o) {
		if r := &s.ops[o]; r.kind == opMove && !r.ready && r.group == nobody {
			s.examine(format.Segment(a.buf), o)
		}
	}
	want := a.force
	for o := a.waiting.First; o != nobody && !want; o = s.opLinks.Next(o) {
		want = s.ops[o].ready
	}
	if want {
		s.setDirty(i)
	}
}

// writeSegments lets the ready writers change their segments and puts these into groups of the
// key log, as far as there are groups and there is place. Compaction and splits, which others wait for, always have some.
func (s *Store) writeSegments() {
	s.compact.blocked = false
	for n := s.dirty.N; n > 0 && s.room(keyLog); n-- {
		i := s.segLinks.Pop(&s.dirty)
		a := &s.segs[i]
		a.dirty = false
		switch {
		case a.held:
			// The split got hold of it meanwhile.
		case a.newborn || s.placeForKeys() >= s.mayBecome(a) || s.touched(a):
			s.change(i)
		default:
			s.compact.blocked = true
			s.setDirty(i)
		}
	}
}

// mayBecome is how long a segment may be when its writers have changed it.
func (s *Store) mayBecome(a *activeSeg) int64 {
	return int64(format.Segment(a.buf).LengthBytes() + a.waiting.N*(format.ItemHeaderBytes+format.MaxKey) + format.MostChangesBytes)
}

// touched reports that compaction waits for a segment to be written.
func (s *Store) touched(a *activeSeg) bool {
	for o := a.waiting.First; o != nobody; o = s.opLinks.Next(o) {
		if s.ops[o].kind == opTouch {
			return true
		}
	}
	return false
}

// setDirty puts a segment on the list of those to write.
func (s *Store) setDirty(i int32) {
	s.segs[i].dirty = true
	s.segLinks.Push(&s.dirty, i)
}

// change applies the ready writers of a segment, in order, and writes it.
func (s *Store) change(i int32) {
	a := &s.segs[i]
	// While a restart might find a segment whose write failed, every writer's answer is made true by a newer one.
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
		s.consider(i)
		return
	}
	a.state = segWriting
	s.appendSegment(i)
}

// apply lets one writer change the content and reports whether it did.
func (s *Store) apply(i, oi int32) bool {
	a, o := &s.segs[i], &s.ops[oi]
	o.status = OK
	seg := format.Segment(a.buf)
	switch o.kind {
	case opTouch:
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
		it := seg.Item(at)
		o.oldOffset, o.oldLen, o.objects = it.ValueOffset(), uint32(it.ValueLen()), -1
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
		it := seg.Item(at)
		o.oldOffset, o.oldLen = it.ValueOffset(), uint32(it.ValueLen())
	default:
		at = seg.LengthBytes()
		n := format.ItemHeaderBytes + int(o.keyLen)
		if at+n > format.MaxSegmentBytes {
			o.status = CapacityExceeded
			return false
		}
		a.buf = s.enough(a.buf, at+n)
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

// segmentWritten ends the write of a segment: it is durable; or nobody knows, if it was placed; or it
// was not written.
func (s *Store) segmentWritten(i int32, placed bool, st Status) {
	a := &s.segs[i]
	if st != OK {
		if placed {
			s.pool.Died(a.offset, a.length)
		}
		if a.newborn {
			a.state, s.split.failed = segLoaded, st
			s.newbornEnded()
			return
		}
		s.drop(i, st)
		return
	}
	if a.bytes > 0 {
		s.pool.Died(a.entry.Offset(), a.bytes)
	}
	a.entry, a.bytes = segtbl.NewEntry(a.offset, a.length), a.length
	if format.Segment(a.buf).Items() == 0 {
		// It is empty: the record counts for recovery only, until the next checkpoint.
		s.pool.Died(a.offset, a.bytes)
		a.entry, a.bytes = 0, 0
	}
	a.state = segLoaded
	if a.newborn {
		s.newbornEnded()
		return
	}
	s.tbl.Set(a.number, a.entry)
	for a.writing.N > 0 {
		oi := s.opLinks.Pop(&a.writing)
		o := &s.ops[oi]
		if o.oldLen > 0 {
			s.pool.Died(o.oldOffset, format.ValueBytes(int(o.oldLen)))
		}
		s.objects += int64(o.objects)
		s.finish(oi, o.status)
	}
	s.consider(i)
}
