package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

const (
	// maxMoves is how many records compaction may have in progress. They must fill a group, or compaction would write
	// more padding than it wins.
	maxMoves = 128
	// maxFutile is how many chunks in a row may be emptied without winning space before compaction pauses.
	maxFutile = 40
	// futileNS is how long that pause lasts.
	futileNS = 1e9
)

// slot is a chunk that is being emptied: live records that a Walk finds are written elsewhere by ops. Or, for the
// scrub, it is only read.
type slot struct {
	recovery.Walk
	index       uint8
	busy, scrub bool
	// running is the number of ops in progress.
	running int
}

// compactState is the state of compaction. Several victims are emptied at once (LEED's S parallel sub-compactions). At
// least one of them may always be of the key log, because moving values writes to that.
type compactState struct {
	slots []slot
	// keys and values count the victims of the key log and of value logs. running is the number of ops in progress.
	keys, values, running int
	// grouped counts the ops whose values are in the open group of moved values.
	grouped int
	// noRoom: a live value waits for a group.
	noRoom bool
	// blocked: a segment waits for space in the key log.
	blocked bool
	// nothing: no chunk is being emptied, because none is worth it.
	nothing bool
	// futile counts chunks in a row that were emptied without an increase of the headroom beyond most, the greatest
	// since the count began. After maxFutile of them compaction pauses until resumeNS, or until an eighth of a chunk
	// has died, seen from live, the live bytes at the beginning of the pause.
	futile int
	// fresh: a write of a host has ended since the count began.
	fresh    bool
	most     int64
	live     int64
	resumeNS int64
	// retryNS is when victims are chosen again after a read has failed.
	retryNS int64
}

// headroom is how many bytes may be written to the logs: in free and obsolete chunks, in the rest of open ones, and in
// the parts of victims that have been walked through. The last one makes it change smoothly, so that what it paces does
// as well.
func (s *Store) headroom() int64 {
	n := int64(s.pool.Free+s.pool.Obsolete) * s.cfg.ChunkBytes
	for l := range s.logs {
		n += s.freeInOpenChunk(l)
	}
	for i := range s.compact.slots {
		if sl := &s.compact.slots[i]; sl.busy && !sl.scrub {
			n += int64(sl.Passed())
		}
	}
	return n
}

// stalled reports a write stall: Puts wait for compaction.
func (s *Store) stalled() bool {
	low, _ := s.budget.Watermarks()
	return s.headroom() <= low
}

// compactStep starts compaction or continues it.
func (s *Store) compactStep() {
	c := &s.compact
	low, high := s.budget.Watermarks()
	room := s.headroom()
	most, slots := 0, 0
	starved := c.blocked || s.budget.Scarce() || s.logs[keyLog].starved || s.logs[userLog].starved ||
		s.logs[movedLog].starved
	switch {
	case s.stopping:
	case room < high:
		// The less headroom, the more victims.
		most, slots = maxMoves, 1+int(int64(len(c.slots))*(high-room)/max(1, high-low))
	case starved:
		// There is headroom, but it lies in chunks that are not empty yet.
		most, slots = maxMoves, 1
	case c.fresh || c.keys+c.values == 0:
		// While a victim is being emptied the headroom may be high for a moment, without a gain. If nothing but
		// compaction writes, it would go on for ever if that ended the count.
		s.resetFutile()
	}
	s.startVictims(min(slots, len(c.slots)))
	if c.noRoom && s.room(movedLog) {
		c.noRoom = false
		for i := s.cfg.Requests; i < len(s.ops); i++ {
			if o := &s.ops[i]; o.kind == opMove && !o.ready && o.group == none {
				s.scheduleWriter(int32(i))
			}
		}
	}
	for i := range c.slots {
		if sl := &c.slots[i]; sl.busy && !sl.scrub {
			s.walkVictim(sl, most)
		}
	}
}

// startVictims chooses victims until want are being emptied, as far as that many are worth it.
func (s *Store) startVictims(want int) {
	c := &s.compact
	c.nothing = false
	if s.budget.Scarce() && want > 0 {
		// There is space to empty one chunk of the key log, and for no more.
		want = c.values + 1
	}
	if c.keys+c.values >= want {
		return
	}
	if s.now < c.retryNS {
		s.wake(c.retryNS)
		c.nothing = c.keys+c.values == 0
		return
	}
	if c.futile > maxFutile && (c.blocked || s.now >= c.resumeNS || s.pool.Live+s.cfg.ChunkBytes/8 < c.live) {
		s.resetFutile()
	}
	for i := range c.slots {
		sl := &c.slots[i]
		if c.keys+c.values >= want || c.futile > maxFutile {
			break
		}
		if sl.scrub {
			s.endScrub(sl)
		}
		if sl.busy {
			continue
		}
		v := s.chooseVictim()
		if v == none {
			break
		}
		sl.busy = true
		sl.Begin(v, false)
		if sl.Key {
			c.keys++
		} else {
			c.values++
		}
	}
	c.nothing = c.keys+c.values == 0
}

// chooseVictim returns the next chunk to empty, or none.
func (s *Store) chooseVictim() format.ChunkNumber {
	c, w := &s.compact, s.budget.Weights(s.cfg.KeysPerSegment)
	_, owed := s.liveInVictims()
	keys := c.keys == 0 || s.placeForKeys() > 0
	values := c.values == 0 || c.values < len(c.slots)-1 && owed+s.budget.Fill <= s.placeForMoved()
	switch {
	case s.budget.Scarce():
		if v := s.pool.Choose(w, space.Kinds{Keys: keys}); v != none || c.keys > 0 {
			return v
		}
		keys = false
	case s.budget.Crowded():
		if v := s.pool.Choose(w, space.Kinds{Values: values}); v != none || c.values > 0 {
			return v
		}
		values = false
	}
	return s.pool.Choose(w, space.Kinds{Keys: keys, Values: values})
}

// liveInVictims is how many bytes of keys and values are still live in the victims.
func (s *Store) liveInVictims() (keys, values int64) {
	for i := range s.compact.slots {
		sl := &s.compact.slots[i]
		switch {
		case !sl.busy || sl.scrub:
		case sl.Key:
			keys += int64(s.pool.Chunks[sl.Chunk].Live)
		default:
			values += int64(s.pool.Chunks[sl.Chunk].Live)
		}
	}
	return keys, values
}

// walkVictim continues a victim, with at most most records in progress.
func (s *Store) walkVictim(sl *slot, most int) {
	c := &s.compact
	for !sl.Failed && c.running < most && s.freeInt.N > 0 {
		// Moving a value writes to the key log, which may have to be emptied before.
		if !sl.Key && (s.freeInt.N <= maxMoves/4 || s.placeForKeys() <= 0) {
			break
		}
		rec, offset, sound := sl.Next()
		switch {
		case rec == nil:
		case !sound:
			s.checkLive(sl, rec, offset)
			continue
		case sl.Key:
			seg := format.Segment(rec)
			if n := seg.Number(); n < s.tbl.Len() && s.tbl.Get(n).Offset() == offset {
				s.startRewrite(sl, seg, offset)
			}
			continue
		default:
			v := format.Value(rec)
			s.startMove(sl, op{kind: opMove, hash: v.Hash(), old: offset, valueLen: uint32(v.ValueLen()),
				value: v.Data()})
			continue
		}
		break
	}
	s.readPiece(sl)
	if sl.running == 0 && !sl.Reading && (sl.Failed || s.stopping || sl.Ended()) {
		s.victimDone(sl)
	}
}

// readPiece reads the next piece of a chunk, if there is memory for it, and returns its length.
func (s *Store) readPiece(sl *slot) int64 {
	offset, buf := sl.Piece(sl.running == 0)
	if buf != nil {
		s.io(ioCompact, int32(sl.index), pipeline.Read, offset, buf)
	}
	return int64(len(buf))
}

// victimDone ends the walk through a victim.
func (s *Store) victimDone(sl *slot) {
	c := &s.compact
	v := &s.pool.Chunks[sl.Chunk]
	sl.busy = false
	s.progress++
	if sl.Key {
		c.keys--
	} else {
		c.values--
	}
	switch {
	case sl.Failed:
		v.State = space.Sealed
		c.retryNS = s.now + retryNS
		s.wake(c.retryNS)
		return
	case !sl.Ended():
		// The store stops.
		v.State = space.Sealed
		return
	case sl.Damaged > 0 && v.Live > 0:
		v.State = space.Damaged
		return
	}
	s.stats.Compactions++
	s.pool.Release(sl.Chunk)
	if now := s.headroom(); now > c.most {
		s.resetFutile()
		c.most = now
	} else if c.futile++; c.futile > maxFutile {
		c.live, c.resumeNS = s.pool.Live, s.now+futileNS
	}
}

// resetFutile ends a pause of compaction.
func (s *Store) resetFutile() { s.compact.futile, s.compact.most, s.compact.fresh = 0, 0, false }

// startMove starts an op of compaction.
func (s *Store) startMove(sl *slot, m op) {
	i := s.opLinks.Pop(&s.freeInt)
	m.group, m.chunk = none, none
	m.slot = sl.index
	s.ops[i] = m
	sl.running++
	s.compact.running++
	s.dispatch(i)
}

// startRewrite starts to move a live segment. The record in the victim is its content.
func (s *Store) startRewrite(sl *slot, seg format.Segment, offset units.ExtentOffset) {
	number := seg.Number()
	i, fresh := s.activate(number, payer{background: true})
	if fresh {
		a := &s.segs[i]
		a.entry = s.tbl.Get(number)
		if !s.makeLen(&a.buf, len(seg)) {
			s.deactivate(i)
			sl.Failed = true
			return
		}
		copy(a.buf, seg)
		s.loaded(i)
	}
	s.startMove(sl, op{kind: opRewrite, ready: true, old: offset, segment: number})
}

// moved ends an op of compaction.
func (s *Store) moved(slot uint8, st Status) {
	sl := &s.compact.slots[slot]
	sl.running--
	s.compact.running--
	s.progress++
	if st != OK {
		sl.Failed = true
	}
}

// examine copies a value that compaction has found to the moved values, if the committed segment refers to it.
func (s *Store) examine(seg format.Segment, i int32) {
	o := &s.ops[i]
	switch {
	case seg.FindValue(o.old) == 0:
		o.ready = true
	case s.room(movedLog):
		s.appendValue(movedLog, i, o.value)
		if s.logs[movedLog].open != none {
			s.compact.grouped++
		}
	default:
		s.compact.noRoom = true
	}
}

// failOutOfSpace ends writes that would wait for ever because no space can be won. The argument is progress before this
// turn.
func (s *Store) failOutOfSpace(before uint64) {
	if s.compact.nothing && s.logs[userLog].starved {
		s.failSealed(userLog, CapacityExceeded)
	}
	if s.now < s.compact.retryNS {
		s.wake(s.compact.retryNS)
		return
	}
	if len(s.ios) != len(s.freeIO) || s.progress+s.pool.Changes != before || s.pool.Obsolete > 0 ||
		s.ckpt.stage != ckptIdle {
		return
	}
	for l := range s.logs {
		if s.logs[l].starved {
			s.failSealed(l, CapacityExceeded)
		}
	}
	for n := s.dirty.N; s.compact.blocked && n > 0; n-- {
		i := s.segLinks.Pop(&s.dirty)
		s.segs[i].dirty = false
		s.failReady(i, CapacityExceeded)
		s.schedule(i)
		s.progress++
	}
}
