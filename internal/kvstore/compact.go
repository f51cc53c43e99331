package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/list"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

const (
	// maxMoves is how many records compaction may have in progress. They must fill a group, or compaction would write
	// more padding than it wins.
	maxMoves = 128
	// maxFutile is how many chunks in a row may be emptied without winning space before compaction pauses.
	maxFutile = 40
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
	// short: there is little headroom, or something waits for space.
	short bool
	// nothing: no chunk is being emptied, because none is worth it, compaction has given up for a while, or too many
	// victims have failed.
	nothing bool
	// futile counts chunks in a row that were emptied without an increase of the headroom beyond most, the greatest
	// since the count began, less what requests have written since. After maxFutile of them compaction pauses until
	// there is more headroom, or until requests have made an eighth of a chunk obsolete: killed is how much they had at
	// the beginning of the pause. Compaction can win space only when records become obsolete. disturbed: the drive has
	// failed writes meanwhile, which have used space. Then the count begins anew when writes succeed again.
	futile       int
	most, killed int64
	disturbed    bool
	// retryNS is when victims are chosen again after several could not be emptied. failed counts those in a row, from
	// sinceNS to failedNS.
	retryNS           int64
	failed            int
	sinceNS, failedNS int64
	// avoided are chunks that could not be emptied.
	avoided [16]avoided
	// lastResort: there was no room to empty any chunk of values, so that a chunk of the key log's is used for that.
	lastResort bool
	// suspect is a chunk in which the scrub has not found all that is live, or none. It is emptied, so that it is known
	// what is lost.
	suspect format.ChunkNumber
	// chosen: this turn has chosen a victim, which takes up to 40 µs.
	chosen bool
}

// headroom is how many bytes may be written to the logs: in free and obsolete chunks, in the rest of open ones, and in
// the parts of victims that have been walked through. The last one makes it change smoothly, so that what it paces does
// as well.
func (s *Store) headroom() int64 {
	n := int64(s.pool.Below()+s.pool.Obsolete) * s.cfg.ChunkBytes
	for l := range s.logs {
		n += s.freeInOpenChunk(l)
	}
	for i := range s.compact.slots {
		if sl := &s.compact.slots[i]; sl.busy && !sl.scrub && int(sl.Chunk) < s.pool.Limit() {
			n += int64(sl.Passed())
		}
	}
	return n
}

// stalled reports a write stall: Puts wait for compaction.
func (s *Store) stalled() bool {
	low, _ := s.budget.Watermarks()
	kept := int64(s.pool.Free-s.pool.Below()) * s.cfg.ChunkBytes
	return s.headroom()+kept <= low
}

// compactStep starts compaction or continues it.
func (s *Store) compactStep() {
	c := &s.compact
	s.forgive()
	low, high := s.budget.Watermarks()
	room := s.headroom()
	most, slots := 0, 0
	starved := s.budget.Scarce() || s.starved()
	switch {
	case s.ending():
	case room < high:
		// The less headroom, the more victims.
		most, slots = maxMoves, 1+int(int64(len(c.slots))*(high-room)/max(1, high-low))
	case starved:
		// There is headroom, but it lies in chunks that are not empty yet.
		most, slots = maxMoves, 1
	case c.keys+c.values == 0:
		// While a victim is being emptied the headroom may be high for a moment, without a gain. Compaction would go on
		// for ever if that ended the count.
		s.resetFutile()
	}
	c.short = slots > 0
	if (c.suspect != none || s.resize.emptying()) && !s.stopping {
		most, slots = maxMoves, max(slots, 1)
	}
	s.startVictims(min(slots, len(c.slots)))
	if c.noRoom && s.room(movedLog) {
		c.noRoom = false
		for i := s.cfg.Requests; i < len(s.ops); i++ {
			if o := &s.ops[i]; o.isUnstartedMove() {
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

// starved reports that a segment or a log waits for space.
func (s *Store) starved() bool {
	return s.compact.blocked || s.logs[keyLog].starved || s.logs[userLog].starved || s.logs[movedLog].starved
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
		c.nothing = c.keys+c.values == 0 && !s.retrying() && !s.makesRoom()
		return
	}
	if c.futile > maxFutile && (c.blocked || s.killed-c.killed >= s.cfg.ChunkBytes/8 || s.headroom() > c.most ||
		c.disturbed && !s.failsWrites()) {
		s.resetFutile()
	}
	for i := range c.slots {
		sl := &c.slots[i]
		if c.keys+c.values >= want || c.futile > maxFutile && !s.resize.emptying() {
			break
		}
		if sl.scrub {
			s.endScrub(sl)
		}
		if sl.busy {
			continue
		}
		if c.chosen {
			s.wake(s.now + 1) // the next one is chosen in the next turn
			break
		}
		v := s.nextVictim()
		for v == none && s.nothingMoves() && s.retryAvoided() {
			v = s.nextVictim()
		}
		if v == none {
			break
		}
		sl.busy, c.chosen = true, true
		sl.Begin(v)
		if sl.Key {
			c.keys++
		} else {
			c.values++
		}
	}
	c.nothing = c.keys+c.values == 0 && !s.retrying() && !s.makesRoom()
}

// nothingMoves reports that no victim wins any space: there is none, or only victims of values, which wait for room in
// the key log. While writes fail, another one of the key log would use up what is left of that.
func (s *Store) nothingMoves() bool {
	return s.compact.keys == 0 && (s.compact.values == 0 || s.placeForKeys() <= 0 && !s.failsWrites())
}

// nextVictim returns the next chunk to empty, or none: one that is worth it if there is little headroom, else one that
// a resize takes away.
func (s *Store) nextVictim() format.ChunkNumber {
	c := &s.compact
	if c.futile <= maxFutile && (c.short || c.suspect != none || !s.resize.emptying()) {
		if v := s.chooseVictim(); v != none {
			return v
		}
	}
	return s.resizeVictim()
}

// chooseVictim returns the next chunk to empty, or none. When the last chunk for moved values is in use, only chunks
// are chosen that fit into the rest of it: a victim that cannot be read to its end has used room without winning any,
// but what is left of it still fits. If room is lost otherwise and nothing fits, the key log lends a chunk, after its
// own open chunk was emptied if that is what takes its room, and if it may take another one for that (mayTakeChunk). It
// lends none while writes fail, which would use it up.
func (s *Store) chooseVictim() format.ChunkNumber {
	c := &s.compact
	if c.lastResort && s.budget.MovedChunks(false) > 0 {
		c.lastResort = false
	}
	v := s.bestVictim()
	if v != none || c.keys > 0 || s.budget.MovedChunks(false) > 0 {
		return v
	}
	place, log := s.placeForKeys(), &s.logs[keyLog]
	short := place <= 0 || c.blocked
	switch lends := c.values == 0 && !c.lastResort; {
	case lends && s.budget.MovedChunks(true) > 0 && place > s.budget.Fill && !s.failsWrites():
		c.lastResort = true
	case (lends || short) && log.chunk != none && !log.opening && s.pool.Free >= s.budget.CheckpointChunks &&
		int(s.pool.Chunks[log.chunk].Live) < int(log.tail)/2:
		s.closeChunk(keyLog)
	default:
		return none
	}
	return s.bestVictim()
}

// bestVictim returns the chunk that is best to empty next, as far as there is room for what is live in it, or none.
func (s *Store) bestVictim() format.ChunkNumber {
	c, w := &s.compact, s.budget.Weights(s.cfg.KeysPerSegment)
	_, owed := s.liveInVictims()
	keys := c.keys == 0 || s.placeForKeys() > 0
	values := c.values == 0 || c.values < len(c.slots)-1 && owed+s.budget.Fill <= s.placeForMoved()
	// Moving values takes room, and if their chunk stays damaged it wins none.
	values = values && !s.makesRoom()
	most := int64(0)
	if s.budget.MovedChunks(c.lastResort) == 0 {
		most = s.placeForMoved()*s.budget.Fill/s.pool.Bytes() - owed - int64(s.cfg.BlockSize)
		values = values && most > 0
	}
	if v := c.suspect; v != none && !s.budget.Scarce() && !s.budget.Crowded() {
		if isKey := s.pool.Chunks[v].Kind == format.KeyLog; isKey && keys || !isKey && values {
			if s.pool.ChooseThis(v) {
				return v
			}
			if s.pool.Chunks[v].State != space.Victim {
				c.suspect = none // nothing is left in it, or the scrub will come again
			}
		}
	}
	switch {
	case s.budget.Scarce():
		if v := s.pool.Choose(w, space.Kinds{Keys: keys}); v != none || c.keys > 0 {
			return v
		}
		keys = false
	case s.budget.Crowded():
		if v := s.pool.Choose(w, space.Kinds{Values: values, MostLive: most}); v != none || c.values > 0 {
			return v
		}
		values = false
	}
	return s.pool.Choose(w, space.Kinds{Keys: keys, Values: values, MostLive: most})
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
		case rec == nil && sl.Searching:
			s.wake(s.now + 1)
		case rec == nil:
		case !sound:
			s.checkLive(sl, rec, offset)
			continue
		case sl.Key:
			seg := format.Segment(rec)
			if n := seg.Number(); n < s.tbl.Len() && s.tbl.Get(n).Offset() == offset {
				s.startRewrite(sl, seg, offset)
			} else if n >= s.tbl.Len() && !s.forgetAdded(offset) {
				sl.Failed = true
			}
			continue
		default:
			v := format.Value(rec)
			s.startMove(sl, op{kind: opMove, hash: uint64(v.Hash()), old: offset, valueLen: uint32(v.ValueLen()),
				value: v.Data()})
			continue
		}
		break
	}
	s.readPiece(sl)
	if sl.running == 0 && !sl.Reading && (sl.Failed || s.ending() || sl.Ended()) {
		s.victimDone(sl)
	}
}

// readPiece reads the next piece of a chunk, if there is memory for it, and returns its length.
func (s *Store) readPiece(sl *slot) int64 {
	if s.ending() {
		return 0
	}
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
	if sl.Chunk == c.suspect {
		c.suspect = none
	}
	if sl.Key {
		c.keys--
	} else {
		c.values--
	}
	switch {
	case sl.Failed:
		s.pool.Reseal(sl.Chunk)
		s.avoid(sl.Chunk)
		return
	case !sl.Ended():
		// The store stops.
		s.pool.Reseal(sl.Chunk)
		return
	case v.Live > 0:
		// Some of what is live was not found, so that it is damaged. The rest of the chunk is left as it is.
		s.pool.SetDamaged(sl.Chunk)
		s.bad.damaged = true
		if sl.Unreadable > 0 {
			first, unaudited := s.avoidDamaged(sl.Chunk)
			if !first {
				if unaudited || s.audit.Running {
					s.wantAudit()
				}
				return // its losses were reported the first time
			}
		}
		s.wantAudit()
		s.audit.hoards = true
		s.damage(Damage{Offset: s.pool.At(sl.Chunk, 0), LostBytes: int64(v.Live)})
		return
	}
	s.stats.Compactions++
	c.failed = 0
	s.pool.Release(sl.Chunk)
	switch now := s.headroom(); {
	case int(sl.Chunk) >= s.pool.Limit(): // it was not emptied for its space
	case now > c.most:
		s.resetFutile()
		c.most = now
	case s.ckpt.stage >= ckptHeader:
		// The checkpoint will give back the chunks that it takes, and obsolete ones.
	default:
		c.futile++
		c.killed, c.disturbed = s.killed, c.disturbed || s.failsWrites()
	}
}

// resetFutile ends a pause of compaction.
func (s *Store) resetFutile() { s.compact.futile, s.compact.most, s.compact.disturbed = 0, 0, false }

// startMove starts an op of compaction.
func (s *Store) startMove(sl *slot, m op) {
	s.dispatch(s.newMove(&s.freeInt, sl, m))
}

// newMove makes an op of compaction from a list of free ones, without handing it to its segment.
func (s *Store) newMove(free *list.List, sl *slot, m op) int32 {
	i := s.opLinks.Pop(free)
	m.parts = [2]part{noPart, noPart}
	m.slot = sl.index
	s.ops[i] = m
	sl.running++
	s.compact.running++
	return i
}

// startRewrite starts to move a live segment. The record in the victim is its content.
func (s *Store) startRewrite(sl *slot, seg format.Segment, offset units.ExtentOffset) {
	number := seg.Number()
	i, fresh := s.activate(number, payer{background: true})
	if fresh {
		a := &s.segs[i]
		a.entry = s.tbl.Get(number)
		if !s.makeLen(a, len(seg)+format.UpgradeBytes) {
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
func (s *Store) examine(a *activeSeg, i int32) {
	o, seg := &s.ops[i], format.Segment(a.buf)
	switch at := seg.FindValue(o.old); {
	case at == 0 || s.expires(seg, at) || !s.isFresh(o):
		o.ready = true
	case s.room(movedLog):
		s.appendValue(movedLog, i, o.value)
		if s.logs[movedLog].open != none {
			s.compact.grouped++
		}
		if !o.early {
			s.moveEarly(a, o.slot)
		}
	default:
		s.compact.noRoom = true
	}
}
