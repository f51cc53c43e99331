package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/list"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

const (
	// maxEarlyBytes is the length of the longest record that is moved early. A longer one costs so much more than its
	// segment that sharing the segment's write gains nothing.
	maxEarlyBytes = 4 << 10
	// maxEarly is how many values may be read at once to be moved early, and maxEarlyEach how many of one segment.
	maxEarly     = 64
	maxEarlyEach = 8
)

// earlyState is the state of early moves. A move also writes the segment of its value. So when compaction moves a
// value, it moves those values of the same segment along that lie in chunks it is about to empty anyway
// (space.Pool.Soon). Each of them costs a read of its own and saves a write of the segment. From then on they lie side
// by side, and share the writes of later moves as well.
//
// An early move is not tied to its chunk, which may be emptied and used again meanwhile. What was read counts only as
// long as the chunk has the epoch that it had before, and the segment refers to the value.
type earlyState struct {
	// bufs are the memory for the blocks around a record, one for each of the last maxEarly ops. free are those not in
	// use.
	bufs [][]byte
	free list.List
	// bytes is the length of the records that are being moved early.
	bytes int64
}

// moveEarly starts early moves of values of a segment, of which compaction moves one for a victim.
func (s *Store) moveEarly(a *activeSeg, slot uint8) {
	if s.stopping || s.budget.Scarce() || s.budget.Crowded() || s.compact.lastResort || s.compact.futile > maxFutile/8 {
		return
	}
	_, owed := s.liveInVictims()
	room := s.placeForMoved() - owed - s.early.bytes - s.budget.Fill
	seg, started := format.Segment(a.buf), 0
	for at := seg.First(); at < seg.LengthBytes() && started < maxEarlyEach && s.early.free.N > 0; {
		it := seg.Item(at)
		at += it.LengthBytes()
		n := it.RecordBytes()
		switch {
		case !it.HasKey() || it.ValueLen() == 0 || n > maxEarlyBytes || int64(n) > room:
		case !s.pool.Contains(it.ValueOffset()) || !s.pool.Soon(s.budget.Fill, s.pool.Of(it.ValueOffset())):
		case s.isMoving(a, it.ValueOffset()):
		default:
			room -= int64(n)
			started++
			s.readEarly(a, op{kind: opMove, hash: format.HashKey(s.hashSeed, it.Key()), old: it.ValueOffset(),
				valueLen: uint32(it.ValueLen())}, slot, n)
		}
	}
}

// isMoving reports whether the value at an offset is being moved already.
func (s *Store) isMoving(a *activeSeg, place units.ExtentOffset) bool {
	for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
		if r := &s.ops[o]; r.kind == opMove && r.old == place {
			return true
		}
	}
	return false
}

// readEarly starts an early move with a read of the value, whose record has n bytes. The slot is that of the move
// beside which it takes place: the victim is not done before it has ended.
func (s *Store) readEarly(a *activeSeg, m op, slot uint8, n int) {
	e := &s.early
	e.bytes += int64(n)
	m.early, m.fetching, m.epoch, m.earlyBytes = true, true, s.pool.Chunks[s.pool.Of(m.old)].Epoch, uint16(n)
	start, length := s.pool.Around(m.old, n, s.cfg.BlockSize)
	i := s.newMove(&s.early.free, &s.compact.slots[slot], m)
	s.opLinks.Push(&a.waiting, i)
	s.io(ioEarly, i, pipeline.Read, start, s.earlyBuf(i)[:length])
}

// earlyRead ends the read of an early move. If it has failed, or has returned anything but the value, the move ends and
// the value stays where it is. Damage is found when its chunk is emptied.
func (s *Store) earlyRead(i int32, ok bool) {
	o := &s.ops[i]
	o.fetching = false
	start, _ := s.pool.Around(o.old, int(o.earlyBytes), s.cfg.BlockSize)
	v := format.Value(s.earlyBuf(i)[o.old-start:])
	if ok && s.isFresh(o) && v.Check(s.pool.Seed(o.old)) == nil && v.ValueLen() == int(o.valueLen) {
		o.value = v.Data()
	} else {
		o.ready, o.failed = true, Corrupt
	}
	s.scheduleWriter(i)
}

// isFresh reports whether what a move has read, and what a segment may refer to at its place, are the same record.
func (s *Store) isFresh(o *op) bool {
	return !o.early || s.pool.Chunks[s.pool.Of(o.old)].Epoch == o.epoch
}

// earlyBuf is the memory of early move i.
func (s *Store) earlyBuf(i int32) []byte { return s.early.bufs[int(i)-(len(s.ops)-maxEarly)] }

// awaitsEarly reports whether a segment should not be written for the sake of moves only, because early moves will join
// them. They are not waited for while the moved values wait for a chunk, which may be that of the victim.
func (s *Store) awaitsEarly(a *activeSeg) bool {
	if s.logs[movedLog].starved {
		return false
	}
	for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
		if r := &s.ops[o]; r.kind == opMove && r.early && !r.ready {
			return true
		}
	}
	return false
}

// earlyAreGrouped reports that nothing will be appended to the open group of moved values before it is written, because
// the other moves in progress may wait for early ones that are in it.
func (s *Store) earlyAreGrouped() bool {
	log := &s.logs[movedLog]
	if s.early.bytes == 0 || log.inflight > 0 || log.sealed.N > 0 {
		return false
	}
	for i := s.cfg.Requests; i < len(s.ops); i++ {
		if o := &s.ops[i]; o.kind == opMove && !o.ready && !o.grouped() {
			return false
		}
	}
	return true
}

// releaseAwaiting considers the segments again that have waited for early moves.
func (s *Store) releaseAwaiting() {
	for i := s.cfg.Requests; i < len(s.ops); i++ {
		if o := &s.ops[i]; o.kind == opMove && !o.ready && o.early {
			s.scheduleWriter(int32(i))
		}
	}
}

// isUnstartedMove reports that the op is a move whose value has been read and is not in a group yet.
func (o *op) isUnstartedMove() bool {
	return o.kind == opMove && !o.ready && !o.fetching && !o.grouped()
}
