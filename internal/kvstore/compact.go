package kvstore

import (
	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/walk"
	"jbofd/internal/pipeline"
)

const (
	// moves is how many records compaction may have in progress: enough to fill a group, or it would write
	// more padding than it wins.
	moves = 128
	// futileMost is how many chunks in a row are emptied without winning space before it is said that there is none.
	futileMost = 40
	// futileNS is for how long it is believed.
	futileNS = 1e9
)

// slot is a chunk that is being emptied: what a walk through it finds live is written elsewhere by ops of its own. Or it is
// only looked at (scrub).
type slot struct {
	walk.Walk
	index       uint8
	busy, scrub bool
	// running are the ops in progress.
	running int
}

// compactState is compaction: several chunks at once, of which at least one may always be of the key log,
// because moving values writes to that.
type compactState struct {
	slots []slot
	// keys and values are how many of the victims are of the key log and of others, running how many ops are in
	// progress.
	keys, values, running int
	// grouped are those whose values are in the open group of moved values.
	grouped int
	// noRoom: a live value waits for a group.
	noRoom bool
	// blocked: a segment waits for place in the key log.
	blocked bool
	// nothing: it stands still, because there is no chunk worth it. futile counts chunks in a row that were emptied without
	// space won; most is the most headroom since then.
	nothing bool
	// believed until resumeNS, or until enough has died.
	futile   int
	most     int64
	live     int64
	resumeNS int64
	retryNS  int64
}

// headroom is how much may be written to the logs, in bytes: the free chunks, the rest of the open ones, and what
// has been walked through of those that are being emptied. It moves smoothly, and so does what
// is paced by it.
func (s *Store) headroom() int64 {
	n := int64(s.pool.Free+s.pool.Spent) * s.cfg.ChunkBytes
	for l := range s.logs {
		n += s.rest(l)
	}
	for i := range s.compact.slots {
		if sl := &s.compact.slots[i]; sl.busy && !sl.scrub {
			n += int64(sl.Passed())
		}
	}
	return n
}

// outrun reports that Puts have to wait for compaction.
func (s *Store) outrun() bool {
	low, _ := s.budget.Marks()
	return s.headroom() <= low
}

// compactStep begins or continues.
func (s *Store) compactStep() {
	c := &s.compact
	low, high := s.budget.Marks()
	room := s.headroom()
	most, slots := 0, 0
	starved := c.blocked || s.budget.Scarce() || s.logs[keyLog].starved || s.logs[userLog].starved || s.logs[movedLog].starved
	switch {
	case s.stopping:
	case room < high:
		// As many chunks as the debt is large.
		most, slots = moves, 1+int(int64(len(c.slots))*(high-room)/max(1, high-low))
	case starved:
		// What there is lies in chunks that are not empty yet.
		most, slots = moves, 1
	default:
		s.hopeful()
	}
	s.startVictims(min(slots, len(c.slots)))
	if c.noRoom && s.room(movedLog) {
		c.noRoom = false
		for i := s.cfg.Requests; i < len(s.ops); i++ {
			if o := &s.ops[i]; o.kind == opMove && !o.ready && o.group == nobody {
				s.considerWriter(int32(i))
			}
		}
	}
	for i := range c.slots {
		if sl := &c.slots[i]; sl.busy && !sl.scrub {
			s.walk(sl, most)
		}
	}
}

// startVictims sees to it that so many chunks are being emptied, if there are that many worth it.
func (s *Store) startVictims(want int) {
	c := &s.compact
	c.nothing = false
	if s.budget.Scarce() && want > 0 {
		// One of the key log, for which there is room, and no more.
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
	if c.futile > futileMost && (c.blocked || s.now >= c.resumeNS || s.pool.Live+s.cfg.ChunkBytes/8 < c.live) {
		s.hopeful()
	}
	for i := range c.slots {
		sl := &c.slots[i]
		if c.keys+c.values >= want || c.futile > futileMost {
			break
		}
		if sl.scrub {
			s.endScrub(sl)
		}
		if sl.busy {
			continue
		}
		v := s.chooseVictim()
		if v == nobody {
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

// chooseVictim returns the next chunk to empty, or nobody.
func (s *Store) chooseVictim() int32 {
	c, w := &s.compact, s.budget.Weights(s.cfg.KeysPerSegment)
	_, owed := s.owed()
	keys := c.keys == 0 || s.placeForKeys() > 0
	values := c.values == 0 || c.values < len(c.slots)-1 && owed+s.budget.Fill <= s.placeForMoved()
	switch {
	case s.budget.Scarce():
		if v := s.pool.Choose(w, chunks.Kinds{Keys: keys}); v != nobody || c.keys > 0 {
			return v
		}
		keys = false
	case s.budget.Crowded():
		if v := s.pool.Choose(w, chunks.Kinds{Values: values}); v != nobody || c.values > 0 {
			return v
		}
		values = false
	}
	return s.pool.Choose(w, chunks.Kinds{Keys: keys, Values: values})
}

// owed is what is still to be moved of the chunks that are being emptied.
func (s *Store) owed() (keys, values int64) {
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

// walk goes on with a victim; not more than most records are to be in progress.
func (s *Store) walk(sl *slot, most int) {
	c := &s.compact
	for !sl.Failed && c.running < most && s.freeInt.N > 0 {
		// What moves a value writes to the key log, and that may have to be emptied before.
		if !sl.Key && (s.freeInt.N <= moves/4 || s.placeForKeys() <= 0) {
			break
		}
		rec, offset, sound := sl.Next()
		switch {
		case rec == nil:
		case !sound:
			s.suspect(sl, rec, offset)
			continue
		case sl.Key:
			seg := format.Segment(rec)
			if n := seg.Number(); n < s.tbl.Len() && s.tbl.Get(n).Offset() == offset {
				s.startTouch(sl, seg, offset)
			}
			continue
		default:
			v := format.Value(rec)
			s.startMove(sl, op{kind: opMove, hash: v.Hash(), old: offset, valueLen: uint32(v.ValueLen()), value: v.Data()})
			continue
		}
		break
	}
	s.readOn(sl)
	if sl.running == 0 && !sl.Reading && (sl.Failed || s.stopping || sl.Ended()) {
		s.emptied(sl)
	}
}

// readOn reads more of a chunk.
func (s *Store) readOn(sl *slot) int64 {
	offset, buf := sl.Piece(sl.running == 0)
	if buf != nil {
		s.io(ioCompact, int32(sl.index), pipeline.Read, offset, buf)
	}
	return int64(len(buf))
}

// emptied ends the walk through a victim.
func (s *Store) emptied(sl *slot) {
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
		v.State = chunks.Sealed
		c.retryNS = s.now + retryNS
		s.wake(c.retryNS)
		return
	case !sl.Ended():
		// The store stops.
		v.State = chunks.Sealed
		return
	case sl.Damaged > 0 && v.Live > 0:
		v.State = chunks.Bad
		return
	}
	s.stats.Compactions++
	s.pool.Release(sl.Chunk)
	if now := s.headroom(); now > c.most {
		s.hopeful()
		c.most = now
	} else if c.futile++; c.futile > futileMost {
		c.live, c.resumeNS = s.pool.Live, s.now+futileNS
	}
}

// hopeful forgets that compaction did not win space.
func (s *Store) hopeful() { s.compact.futile, s.compact.most = 0, 0 }

// startMove begins an op of compaction.
func (s *Store) startMove(sl *slot, m op) {
	i := s.opLinks.Pop(&s.freeInt)
	m.group, m.chunk = nobody, nobody
	m.slot = sl.index
	s.ops[i] = m
	sl.running++
	s.compact.running++
	s.dispatch(i)
}

// startTouch begins to move a live segment. What was read of the victim is its content.
func (s *Store) startTouch(sl *slot, seg format.Segment, offset int64) {
	number := seg.Number()
	i, fresh := s.activate(number, payer{background: true})
	if fresh {
		a := &s.segs[i]
		a.entry = s.tbl.Get(number)
		a.buf = s.enough(a.buf, len(seg))
		copy(a.buf, seg)
		s.loaded(i)
	}
	s.startMove(sl, op{kind: opTouch, ready: true, old: offset, segment: number})
}

// moved ends one.
func (s *Store) moved(slot uint8, st Status) {
	sl := &s.compact.slots[slot]
	sl.running--
	s.compact.running--
	s.progress++
	if st != OK {
		sl.Failed = true
	}
}

// examine looks whether a value that compaction came upon is live in the committed segment: then it is copied.
func (s *Store) examine(seg format.Segment, i int32) {
	o := &s.ops[i]
	switch {
	case seg.FindValue(o.old) == 0:
		o.ready = true
	case s.room(movedLog):
		s.appendValue(movedLog, i, o.value)
		if s.logs[movedLog].open != nobody {
			s.compact.grouped++
		}
	default:
		s.compact.noRoom = true
	}
}

// unstick ends writes that would wait for ever, for chunks that nobody can win. before is what progress was.
func (s *Store) unstick(before uint64) {
	if s.compact.nothing && s.logs[userLog].starved {
		s.failSealed(userLog, CapacityExceeded)
	}
	if s.now < s.compact.retryNS {
		s.wake(s.compact.retryNS)
		return
	}
	if len(s.ios) != len(s.freeIO) || s.progress+s.pool.Changes != before || s.pool.Spent > 0 || s.ckpt.stage != ckptIdle {
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
		s.consider(i)
		s.progress++
	}
}
