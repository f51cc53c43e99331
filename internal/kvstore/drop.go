package kvstore

import (
	"math/bits"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/pipeline"
)

// A Drop makes everything in a range of positions that has a version up to a clock cease to exist at once, however much
// that is. The clock is that of the store when the Drop was submitted, or one that the Drop names. The superblock has a
// list of them. As soon as both copies of the superblock have a Drop, it is in effect and answered: reads find nothing
// that it covers, and writes do not either, because they leave out what does not exist when they have read a segment
// (dropExpired). A sweep then goes through the segments of the range in the background and writes those that have
// something to leave out. The next checkpoint takes the Drop off the list.
//
// What is written to the range later has a version greater than the clock. A Put or Delete IfNewer with an older one is
// Superseded, as long as the Drop is on the list.

const (
	// maxAskedDrops is how many Drops may wait to be written.
	maxAskedDrops = 16
	// sweepLanes is how many parts of a range a sweep goes through at once, sweepSkips how many steps over empty
	// segments it takes in a turn.
	sweepLanes = 16
	sweepSkips = 1024
	// crowdedDrops is the length of the list at which a checkpoint is wanted when some of it can go.
	crowdedDrops = format.MaxDrops / 2
	// sweepAgainNS is the time after which the part of a sweep is repeated that has segments which cannot be read.
	sweepAgainNS = 60e9
	// sweepSoonNS is the same when somebody waits for the end of the Drop.
	sweepSoonNS = 1e9
)

// dropState has the Drops.
type dropState struct {
	// list are those in effect, those in lookup.Machine.Drops. swept are those whose sweep has ended, leaving those
	// that the checkpoint under way takes off the list.
	list           lookup.Drops
	swept, leaving []format.Drop
	// asked are requests that wait to be written, begun those of the superblock that is being written.
	asked, begun []askedDrop
	// writing: a superblock is to be written, copies are, tried is how many writes of one were started. busy: one is
	// under way, or a flush on a volatile device.
	writing, busy, flushing bool
	copies, tried           int
	retryNS                 int64
	sweep                   sweepState
	// later are Drops whose sweep has found segments that cannot be read. sweptNS is when the last sweep has ended
	// without.
	later   []laterSweep
	sweptNS int64
}

// laterSweep is what is left of the sweep of a Drop: a part of its range, which is swept again at atNS.
type laterSweep struct {
	drop        format.Drop
	first, last uint64
	atNS        int64
}

// askedDrop is the request for a Drop; answered: with DeviceError, because a write has failed and is repeated.
type askedDrop struct {
	tag uint64
	format.Drop
	answered bool
}

// sweepState is the sweep of a Drop.
type sweepState struct {
	running bool
	drop    format.Drop
	lanes   [sweepLanes]sweepLane
	// begun: no write is under way any more whose object the Drop covers.
	begun bool
	// failed: segments could not be read, so that the Drop stays on the list. They are all from the position first up
	// to last.
	failed      bool
	first, last uint64
	// repaired: segments were repaired meanwhile.
	repaired bool
	// skipping: this turn has passed as many empty segments as it has time for.
	skipping bool
}

// sweepLane is a part of the range of a sweep: at is the position from which on it was not looked at.
type sweepLane struct {
	at, last   uint64
	busy, done bool
}

// submitDrop takes a Drop.
func (s *Store) submitDrop(r *Request) bool {
	d := &s.drops
	clock := r.Version
	if clock == 0 {
		clock = s.clock
	}
	drop := format.Drop{First: r.Range.First, Last: r.Range.Last, Clock: clock}
	switch {
	case drop.First > drop.Last || clock > max(MaxVersion, s.clock):
		s.answer(r.Tag, InvalidValue)
	case clock == 0 || covered(d.list, drop): // there is nothing
		s.answer(r.Tag, OK).Version = clock
	case len(d.asked) == maxAskedDrops:
		return false
	default:
		s.clock = max(s.clock, clock)
		d.asked = append(d.asked, askedDrop{tag: r.Tag, Drop: drop})
	}
	return true
}

// covered reports whether a Drop has no effect besides those of a list.
func covered(list []format.Drop, d format.Drop) bool {
	return slices.ContainsFunc(list, func(o format.Drop) bool {
		return o.First <= d.First && o.Last >= d.Last && o.Clock >= d.Clock
	})
}

// withDrop adds a Drop to a list, in place of those that have no effect besides it.
func withDrop(list []format.Drop, d format.Drop) []format.Drop {
	if covered(list, d) {
		return list
	}
	list = slices.DeleteFunc(list, func(o format.Drop) bool { return covered([]format.Drop{d}, o) })
	return append(list, d)
}

// loadDrops takes the Drops of a superblock that was read.
func (s *Store) loadDrops(sb format.Superblock) {
	s.setDrops(sb.Drops(make([]format.Drop, 0, format.MaxDrops)))
	for _, d := range s.drops.list {
		s.clock = max(s.clock, d.Clock)
	}
}

// isDropped reports whether an object or tombstone does not exist because of a Drop.
func (s *Store) isDropped(it format.Item) bool {
	return len(s.drops.list) > 0 && (!it.Gone() || it.HasExpiry()) &&
		s.drops.list.Covers(bits.Reverse64(format.HashKey(s.hashSeed, it.Key())), it.Version())
}

// Dropping reports whether a Drop of something in a range of positions was submitted, or begun before a restart, and is
// not over: it may take effect later, or is on the list. With hurry, one that was swept leaves the list with a
// checkpoint that begins with the next turn, and what could not be read is swept again within a second.
func (s *Store) Dropping(first, last uint64, hurry bool) (dropping bool) {
	d := &s.drops
	in := func(o format.Drop) bool { return o.First <= last && o.Last >= first }
	for _, list := range [][]askedDrop{d.asked, d.begun} {
		dropping = dropping || slices.ContainsFunc(list, func(a askedDrop) bool { return in(a.Drop) })
	}
	for i := range d.later {
		if l := &d.later[i]; hurry && in(l.drop) {
			l.atNS = min(l.atNS, s.now+sweepSoonNS)
		}
	}
	s.ckpt.wanted = s.ckpt.wanted || hurry && slices.ContainsFunc(d.swept, in)
	return dropping || slices.ContainsFunc(d.list, in)
}

// dropsIdle reports that no Drop waits to be written and none is being swept.
func (s *Store) dropsIdle() bool {
	d := &s.drops
	return len(d.asked)+len(d.begun) == 0 && !d.writing && (!d.sweep.running || s.stopping)
}

// dropStep writes Drops that were asked for to the superblocks, and sweeps.
func (s *Store) dropStep() {
	d := &s.drops
	// The superblock has one writer at a time: a checkpoint, a resize, or this.
	switch c := &s.ckpt; {
	case d.busy || c.stage == ckptSuper || c.stage == ckptIdle && c.busy:
	case !d.writing && len(d.asked) > 0:
		s.beginDrops()
	case d.writing && s.now < d.retryNS:
		s.wake(d.retryNS)
	case d.writing:
		s.writeDrops()
	}
	s.sweepStep()
}

// beginDrops begins to write those Drops that were asked for, as far as the list has room for them.
func (s *Store) beginDrops() {
	d := &s.drops
	list := append(make([]format.Drop, 0, format.MaxDrops+1), d.list...)
	for _, a := range d.asked {
		if list = withDrop(list, a.Drop); len(list) > format.MaxDrops {
			list = list[:format.MaxDrops]
			s.answer(a.tag, NoMemory)
			s.progress++
			continue
		}
		d.begun = append(d.begun, a)
	}
	d.asked = d.asked[:0]
	if len(d.begun) == 0 {
		return
	}
	format.Superblock(s.super).SetDrops(list)
	d.writing, d.copies, d.tried = true, 0, 0
	s.writeDrops()
}

// writeDrops starts the next I/O that makes Drops durable. It is as with the superblocks of a checkpoint: first the one
// with the older generation is written, then the other. On a volatile device the cache is flushed after each.
func (s *Store) writeDrops() {
	d := &s.drops
	d.busy = true
	if d.flushing {
		s.io(ioDrop, 0, pipeline.Flush, 0, nil)
		return
	}
	sb := format.Superblock(s.super)
	if d.tried == d.copies {
		d.tried++
		sb.SetGeneration(sb.Generation() + 1)
		sb.Seal()
	}
	s.stats.CheckpointBytes += format.SuperblockBytes
	s.io(ioDrop, 0, pipeline.Write, format.SuperblockOffset(sb.Generation(), sb.PartitionBytes()), sb)
}

// dropsWritten ends an I/O that makes Drops durable. If it has failed, the requests end with DeviceError, and it is
// repeated: the outcome is not known, and what is written to the superblock next must not depend on it.
func (s *Store) dropsWritten(ok bool) {
	d := &s.drops
	d.busy = false
	s.progress++
	switch {
	case !ok:
		d.retryNS = s.now + retryNS
		for i := range d.begun {
			if a := &d.begun[i]; !a.answered {
				a.answered = true
				s.answer(a.tag, DeviceError).Version = a.Clock
			}
		}
		return
	case s.cfg.Volatile && !d.flushing:
		d.flushing = true
		return
	}
	d.flushing = false
	if d.copies++; d.copies == 2 {
		s.dropsDone()
	}
}

// dropsDone puts Drops into effect, which both superblocks have.
func (s *Store) dropsDone() {
	d := &s.drops
	d.writing = false
	s.setDrops(format.Superblock(s.super).Drops(make([]format.Drop, 0, format.MaxDrops)))
	for _, a := range d.begun {
		if !a.answered {
			s.answer(a.tag, OK).Version = a.Clock
		}
	}
	d.begun = d.begun[:0]
}

// setDrops changes the list.
func (s *Store) setDrops(list lookup.Drops) {
	d := &s.drops
	d.list = list
	if s.reads != nil {
		s.reads.Drops = list
	}
	d.swept = slices.DeleteFunc(d.swept, func(o format.Drop) bool { return !slices.Contains(list, o) })
	d.later = slices.DeleteFunc(d.later, func(o laterSweep) bool { return !slices.Contains(list, o.drop) })
	if d.sweep.running && !slices.Contains(list, d.sweep.drop) {
		d.sweep.running = false // the lanes that are busy end by themselves
	}
}

// beginLeaving says that the checkpoint that begins now takes the Drops off the list that were swept.
func (s *Store) beginLeaving() { s.drops.leaving = append(s.drops.leaving[:0], s.drops.swept...) }

// remaining is the list without those that the checkpoint takes off.
func (s *Store) remaining() []format.Drop {
	d := &s.drops
	list := append(make([]format.Drop, 0, format.MaxDrops), d.list...)
	return slices.DeleteFunc(list, func(o format.Drop) bool { return slices.Contains(d.leaving, o) })
}

// endLeaving takes the Drops off the list that the superblocks do not have any more.
func (s *Store) endLeaving() {
	if len(s.drops.leaving) > 0 {
		s.setDrops(s.remaining())
		s.drops.leaving = s.drops.leaving[:0]
	}
}

// sweepStep begins a sweep or continues it.
func (s *Store) sweepStep() {
	d := &s.drops
	w := &d.sweep
	w.skipping = false
	if s.stopping || len(d.list) == 0 || !w.running && !s.beginSweep() {
		return
	}
	if !w.begun && s.writesCoveredBy(&w.drop) {
		return // the end of these writes is followed by a turn
	}
	w.begun = true
	skips, done := 0, true
	for i := range w.lanes {
		l := &w.lanes[i]
		for !l.busy && !l.done && s.freeInt.N > maxMoves/4 && skips < sweepSkips {
			hash := bits.Reverse64(l.at)
			number := s.tbl.Segment(hash)
			if n := s.tbl.Empty(number); n > 0 {
				skips++
				l.pass(n)
				continue
			}
			l.busy = true
			k := s.opLinks.Pop(&s.freeInt)
			s.ops[k] = op{kind: opSweep, ready: true, hash: hash, slot: uint8(i), parts: [2]part{noPart, noPart}}
			s.dispatch(k)
		}
		done = done && l.done
	}
	if skips == sweepSkips {
		w.skipping = true
		s.wake(s.now + 1)
	}
	if done {
		s.endSweep()
	}
}

// pass moves a lane behind all positions whose hashes have the same low n bits.
func (l *sweepLane) pass(n int) {
	end := l.at | (uint64(1)<<(64-n) - 1)
	if l.done = end >= l.last; !l.done {
		l.at = end + 1
	}
}

// beginSweep begins the next sweep, if there is one. No op of the last one is in progress.
func (s *Store) beginSweep() bool {
	d := &s.drops
	w := &d.sweep
	if slices.ContainsFunc(w.lanes[:], func(l sweepLane) bool { return l.busy }) {
		return false
	}
	next, ok := s.nextSweep()
	if !ok {
		return false
	}
	*w = sweepState{running: true, drop: next.drop}
	part := (next.last - next.first) / sweepLanes
	first := next.first
	for i := range w.lanes {
		l := &w.lanes[i]
		l.at, l.last = first, first+part
		if i == sweepLanes-1 {
			l.last = next.last
		}
		// A range of few positions may not have enough for all lanes.
		l.done = first > next.last || first < next.first
		first = l.last + 1
	}
	return true
}

// nextSweep returns the next sweep, if there is one: that of a Drop which was not swept yet, else what is left of one
// and due.
func (s *Store) nextSweep() (next laterSweep, ok bool) {
	d := &s.drops
	for _, o := range d.list {
		isLater := func(l laterSweep) bool { return l.drop == o }
		if !slices.Contains(d.swept, o) && !slices.ContainsFunc(d.later, isLater) {
			return laterSweep{drop: o, first: o.First, last: o.Last}, true
		}
	}
	for _, l := range d.later {
		if s.now >= l.atNS {
			return l, true
		}
		s.wake(l.atNS)
	}
	return next, false
}

// sweepNow makes what is left of sweeps due, because segments that could not be read were repaired.
func (s *Store) sweepNow() {
	s.drops.sweep.repaired = true
	for i := range s.drops.later {
		s.drops.later[i].atNS = s.now
	}
}

// writesCoveredBy reports whether a write is under way whose object a Drop covers. It has begun before the Drop was in
// effect.
func (s *Store) writesCoveredBy(d *format.Drop) bool {
	for _, head := range s.table {
		for i := head; i != none; i = s.segs[i].chain {
			for o := s.segs[i].writing.First; o != none; o = s.opLinks.Next(o) {
				if w := &s.ops[o]; w.kind < opMove && w.version != 0 && w.version <= d.Clock {
					return true
				}
			}
		}
	}
	return false
}

// sweptSegment ends the look of a sweep at a segment.
func (s *Store) sweptSegment(o *op, st Status) {
	w := &s.drops.sweep
	l := &w.lanes[o.slot]
	l.busy = false
	s.progress++
	first := l.at
	l.pass(s.tbl.Bits(s.tbl.Segment(o.hash)))
	if st == OK {
		return
	}
	last := l.last
	if !l.done {
		last = l.at - 1
	}
	if !w.failed {
		w.failed, w.first, w.last = true, first, last
	}
	w.first, w.last = min(w.first, first), max(w.last, last)
}

// endSweep ends a sweep.
func (s *Store) endSweep() {
	d := &s.drops
	w := &d.sweep
	w.running = false
	s.progress++
	d.later = slices.DeleteFunc(d.later, func(l laterSweep) bool { return l.drop == w.drop })
	if w.failed {
		l := laterSweep{drop: w.drop, first: w.first, last: w.last, atNS: s.now + sweepAgainNS}
		if w.repaired {
			l.atNS = s.now
		}
		d.later = append(d.later, l)
		return
	}
	d.swept, d.sweptNS = append(d.swept, w.drop), s.now
	if len(d.list) > crowdedDrops {
		s.ckpt.wanted = true
	}
}
