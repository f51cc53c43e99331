package kvstore

import (
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/list"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// The logs. Puts and compaction write values to different chunks. A value that was moved once is likely to live on, and
// should not be moved again together with younger ones.
const (
	keyLog   = recovery.KeyLog
	userLog  = recovery.UserLog
	movedLog = recovery.MovedLog
	numLogs  = recovery.NumLogs
)

// logState is the state of one log.
type logState struct {
	// chunk is the open chunk, and tail the end of the log in it. If tail is within a block, last is a copy of the
	// block. The next group then begins within it and writes it again, unless a write of it is under way. So small
	// groups need no padding.
	chunk format.ChunkNumber
	tail  format.ChunkOffset
	last  []byte
	// opening: the header of chunk is being written. badHeaders is how many such writes have failed since the last that
	// did not.
	opening    bool
	badHeaders uint8
	// starved: sealed groups wait because the log needs a chunk and may not take one, or because writes are stalled.
	starved bool
	header  []byte
	// open is the group to which records are appended. sealed are the groups that are complete but not placed: they
	// have no offset in the log yet. free are those not in use. inflight counts those that are being written.
	open         int32
	sealed, free list.List
	inflight     int
	// pending is the number of bytes of the records in open and sealed.
	pending int64
}

// group is a batch of records that are written together.
type group struct {
	log      uint8
	buf      []byte
	used     int
	openedNS int64
	chunk    format.ChunkNumber
	// pays is charged for the write: the payer of the group's first record. In the long run a tenant is first in
	// proportion to its records.
	pays payer
	// version is the first version in a group of the key log that is being written, otherwise 0.
	version uint64
	// at is where the write begins, lead how many bytes of its first block belong to earlier groups.
	at   units.ExtentOffset
	lead int
	// shares: a write of the first block is under way, or has failed, and lead > 0.
	shares bool
	// tries is how often the first block was to be restored, retryNS when it is next tried; 0: not waiting.
	tries   int
	retryNS int64
	// first and last are the parts of a group of values (partRef), or the active segments of a key group, linked by
	// next.
	first, last int32
}

// room reports whether openGroup may be called for log l: a group is open, or one is free.
func (s *Store) room(l int) bool {
	return s.logs[l].open != none || s.logs[l].free.N > 0
}

// roomFor reports whether a value of n bytes may be appended to log l. If it is in pieces, a chunk may end within it.
func (s *Store) roomFor(l, n int) bool {
	log := &s.logs[l]
	groups := log.free.N
	if log.open != none {
		groups++
	}
	return groups >= min(2, s.pieces(n))
}

// openGroup returns the open group of log l, for a record of n bytes. If the record would not fit into the rest of the
// chunk together with the group, the group is sealed before, so that chunks are filled.
func (s *Store) openGroup(l, n int, pays payer) (int32, *group) {
	log := &s.logs[l]
	if log.open != none && log.free.N > 0 {
		used, rest := s.groups[log.open].used, s.roomForOpenGroup(l)
		if used <= rest && used+n > rest {
			s.sealGroup(l)
		}
	}
	if log.open == none {
		log.open = s.groupLinks.Pop(&log.free)
		g := &s.groups[log.open]
		*g = group{log: g.log, pays: pays, buf: g.buf, openedNS: s.now, chunk: none, first: none, last: none}
	}
	return log.open, &s.groups[log.open]
}

// roomForOpenGroup is the room in the chunk of log l behind the sealed groups, if each begins at a block. If the open
// group is longer it will begin a chunk.
func (s *Store) roomForOpenGroup(l int) int {
	log, begin := &s.logs[l], format.ChunkOffset(s.cfg.BlockSize)
	tail := s.pool.End()
	if log.chunk != none {
		tail = log.tail
	}
	for i := log.sealed.First; i != none; i = s.groupLinks.Next(i) {
		used := s.groups[i].used
		if tail = tail.RoundUp(s.cfg.BlockSize); tail.Add(used) > s.pool.End() {
			tail = begin
		}
		tail = tail.Add(used)
	}
	if tail = tail.RoundUp(s.cfg.BlockSize); log.open != none && tail.Add(s.groups[log.open].used) > s.pool.End() {
		tail = begin
	}
	return int(s.pool.End() - tail)
}

// sealGroup ends the open group of log l: nothing is appended to it any more.
func (s *Store) sealGroup(l int) {
	log := &s.logs[l]
	s.groupLinks.Push(&log.sealed, log.open)
	log.open = none
	if l == movedLog {
		s.compact.grouped = 0
	}
}

// appendValue appends the value of op i, in pieces, to the open group of log l. If a chunk ends within the value, the
// rest of it goes to another group.
func (s *Store) appendValue(l int, i int32, data []byte) {
	o := &s.ops[i]
	at := -1 // the part
	for len(data) > 0 {
		piece := data[:min(len(data), s.pieceBytes)]
		data = data[len(piece):]
		n := format.ValueBytes(len(piece))
		if at < len(o.parts)-1 {
			if gi, _ := s.openGroup(l, n, o.pays()); at < 0 || o.parts[at].group != gi {
				at++
				s.beginPart(refOf(i, at), gi)
			}
		}
		p := &o.parts[at]
		g := &s.groups[p.group]
		v := format.Value(g.buf[g.used : g.used+n])
		clear(v[:format.ValueHeaderBytes])
		clear(v[n-format.ValueUnit:])
		v.SetValueLen(len(piece))
		v.SetHash(o.hash)
		copy(v.Data(), piece)
		p.pieces++
		p.bytes += uint32(n)
		g.used += n
		s.logs[l].pending += int64(n)
	}
	if s.full(s.groups[o.parts[at].group].used) {
		s.sealGroup(l)
	}
}

// beginPart begins a part of a value in a group.
func (s *Store) beginPart(r partRef, gi int32) {
	p, g := s.partAt(r), &s.groups[gi]
	*p = part{group: gi, groupOff: uint32(g.used), chunk: none, next: none}
	s.ops[r.op()].writing++
	if g.first == none {
		g.first = int32(r)
	} else {
		s.partAt(partRef(g.last)).next = r
	}
	g.last = int32(r)
}

// full reports that a group with used bytes should be sealed: it is long enough, or nearly so and needs little padding.
func (s *Store) full(used int) bool {
	block := s.cfg.BlockSize
	return used >= s.cfg.GroupBytes || used >= s.cfg.GroupBytes/8*5 && format.RoundUp(used, block)-used < block/8
}

// appendSegment appends an active segment to the open group of the key log.
func (s *Store) appendSegment(i int32) {
	a := &s.segs[i]
	seg := format.Segment(a.buf)
	changes := seg.SetChanges(s.changes(a))
	seg, a.length = seg[:seg.LengthBytes()], seg.ExtentBytes()
	n := a.length
	pays := a.pays
	if o := a.writing.First; a.writing.N > 0 {
		pays = s.ops[o].pays()
	}
	_, g := s.openGroup(keyLog, n, pays)
	copy(g.buf[g.used:], seg)
	clear(g.buf[g.used+len(seg)+copy(g.buf[g.used+len(seg):], changes) : g.used+n])
	a.groupOff, a.next = uint32(g.used), none
	if g.first == none {
		g.first = i
	} else {
		s.segs[g.last].next = i
	}
	g.last = i
	g.used += n
	s.logs[keyLog].pending += int64(n)
	if s.full(g.used) {
		s.sealGroup(keyLog)
	}
}

// changes encodes what the writers of a segment have changed, so that recovery can count live bytes. It returns nil if
// that is longer than format.MaxChangesBytes, and while a restart might find a failed write of the key log, because
// then it is not known which record precedes this one. Recovery then counts everything.
func (s *Store) changes(a *activeSeg) []byte {
	if s.failures != s.ckpt.covered {
		return nil
	}
	said := format.BeginChanges(s.changesBuf[:0], a.bytes, s.pool.Of(a.entry.Offset()))
	seg := format.Segment(a.buf)
	for i, n := a.writing.First, a.writing.N; n > 0; i, n = s.opLinks.Next(i), n-1 {
		if len(said) > format.MaxChangesBytes {
			return nil
		}
		o := &s.ops[i]
		c := format.Change{Item: -1, Keys: int(o.objects)}
		if o.used {
			if c.Item = int(o.item); c.Item < 0 || a.writing.N > 1 {
				c.Item = seg.NumberOf(o.parts[0].offset)
			}
			if c.Item >= 0 { // otherwise a later writer has replaced it
				if invariants.Enabled { // a walk over all items
					invariants.Check(seg.NumberOf(o.parts[0].offset) == c.Item, "kvstore: the number of another item")
				}
				c.More, c.Born = s.pieces(int(o.valueLen))-1, s.extentBytes(int(o.valueLen))
			}
		}
		// A value that one of the writers has put and a later one replaced is counted for neither.
		if o.oldBytes > 0 && !s.isPutByWriter(a, o.oldOffset) {
			c.Chunk, c.Died = s.pool.Of(o.oldOffset), int(o.oldBytes)
		}
		said = format.AppendChange(said, c)
	}
	if a.merging {
		if last := &s.segs[s.merge.last]; last.bytes > 0 {
			said = format.AppendChange(said, format.Change{Item: -1, Merged: true, Died: last.bytes,
				Chunk: s.pool.Of(last.entry.Offset())})
		}
	}
	for range a.dropped { // each is a key that has expired, or that a Drop or an exact CopyIn has removed
		said = format.AppendChange(said, format.Change{Item: -1, Keys: -1})
	}
	return s.deaths(said, a)
}

// isPutByWriter reports whether the value at an offset was put by one of the writers of the segment.
func (s *Store) isPutByWriter(a *activeSeg, place units.ExtentOffset) bool {
	for i, n := a.writing.First, a.writing.N; n > 1; i, n = s.opLinks.Next(i), n-1 {
		if o := &s.ops[i]; o.used && o.has(place) {
			return true
		}
	}
	return false
}

// pump seals the open group of log l if it is due, and writes the sealed groups for which the log has space. A group of
// the key log or of user values is due after GroupDelayNS, or at once if no write of the log is under way: then waiting
// for more records would only add latency.
func (s *Store) pump(l int) {
	log := &s.logs[l]
	switch {
	case log.open == none:
	case l == movedLog:
		// Nobody but compaction waits for moved values, so the group is written only when all running moves are in it.
		if s.compact.grouped == s.compact.running || s.earlyAreGrouped() {
			s.sealGroup(l)
		}
	default:
		g := &s.groups[log.open]
		switch due := g.openedNS + s.cfg.GroupDelayNS; {
		case log.inflight == 0 && log.sealed.N == 0 || s.now >= due:
			s.sealGroup(l)
		default:
			s.wake(due)
		}
	}
	was := log.starved
	log.starved = false
	s.placeSealed(l)
	if log.starved && !was {
		s.progress++ // compaction and checkpoints do more for a log that is starved
		if l == movedLog {
			s.releaseAwaiting()
		}
	}
}

// placeSealed writes the sealed groups of log l, in order, until the open chunk is full. Then it opens another chunk,
// and is called again when that chunk's header is durable. If the log may not take a chunk, or writes are stalled, the
// log is starved.
func (s *Store) placeSealed(l int) {
	log := &s.logs[l]
	for log.sealed.N > 0 && !log.opening {
		// On a volatile device one group of the key log is written at a time. So all versions before a segment were
		// written when it was, the segment says so, and recovery knows if one of them was lost.
		if l == keyLog && (s.ckpt.stage == ckptBarrier || s.ckpt.draining || s.cfg.Volatile && log.inflight > 0) {
			return
		}
		if l == userLog && s.stalled() {
			log.starved = true
			return
		}
		if block := format.ChunkOffset(s.cfg.BlockSize); log.inflight > 0 || log.tail%block > block/8*7 {
			s.pad(log)
		}
		g := &s.groups[log.sealed.First]
		if log.chunk == none || log.tail.Add(g.used) > s.pool.End() {
			s.openChunk(l)
			return
		}
		gi := s.groupLinks.Pop(&log.sealed)
		s.place(gi, g, log)
	}
}

// pad advances the tail of a log to the next block, so that the next group does not write the tail's block again.
func (s *Store) pad(log *logState) { log.tail = log.tail.RoundUp(s.cfg.BlockSize) }

// place gives a group the next place in its log and writes it. Segments get their versions here, so that versions
// ascend in the log.
func (s *Store) place(gi int32, g *group, log *logState) {
	block := s.cfg.BlockSize
	lead := int(log.tail) % block
	if lead > 0 {
		copy(g.buf[lead:], g.buf[:g.used])
		copy(g.buf, log.last[:lead])
		g.shares = true
		s.shared++
	}
	end := lead + g.used
	size := format.RoundUp(end, block)
	clear(g.buf[end:size])
	base, records := s.pool.At(log.chunk, log.tail), g.buf[lead:]
	g.chunk, g.lead, g.at = log.chunk, lead, base-units.ExtentOffset(lead)
	s.pool.Pin(g.chunk)
	s.pool.AddLive(g.chunk, g.used)
	log.pending -= int64(g.used)
	if g.log == keyLog {
		g.version = s.version
		durable := s.durable()
		for i := g.first; i != none; i = s.segs[i].next {
			a := &s.segs[i]
			seg := format.Segment(records[a.groupOff:])
			a.offset = base + units.ExtentOffset(a.groupOff)
			seg.SetVersion(s.version)
			seg.SetDurable(s.gapless, durable)
			seg.Seal(s.pool.Seed(a.offset))
			s.version++
		}
		s.stats.KeyLogBytes += int64(size)
		s.ckpt.keyBytes, s.ckpt.writtenNS = s.ckpt.keyBytes+int64(size), s.now
	} else {
		for r := partRef(g.first); r != none; r = s.partAt(r).next {
			p := s.partAt(r)
			p.offset = base + units.ExtentOffset(p.groupOff)
			p.chunk = log.chunk
			s.pool.Pin(g.chunk)
			for at, rest := p.offset, records[p.groupOff:][:p.bytes]; len(rest) > 0; {
				v := format.Value(rest)
				v.SetVersion(s.version)
				v.Seal(s.pool.Seed(at))
				n := v.RecordBytes()
				at, rest = at+units.ExtentOffset(n), rest[n:]
			}
		}
		if g.log == userLog {
			s.stats.ValueLogBytes += int64(size)
		} else {
			s.stats.MovedBytes += int64(size)
		}
	}
	copy(log.last, g.buf[size-block:size])
	free := s.freeInOpenChunk(int(g.log))
	log.tail = log.tail.Add(g.used)
	log.inflight++
	if !g.pays.background {
		s.compact.most -= free - s.freeInOpenChunk(int(g.log))
	}
	s.ioFor(ioGroup, gi, g.pays, pipeline.Write, g.at, g.buf[:size])
}

// durable returns the highest version such that the writes of all versions up to it have ended.
func (s *Store) durable() uint64 {
	v := s.version
	for i := range s.groups {
		if g := &s.groups[i]; g.version != 0 {
			v = min(v, g.version)
		}
	}
	return v - 1
}

// groupWritten ends the write of a group.
func (s *Store) groupWritten(gi int32, ok bool) {
	g := &s.groups[gi]
	s.logs[g.log].inflight--
	st := OK
	if !ok {
		st = DeviceError
		s.pad(&s.logs[g.log])
		if g.log == keyLog {
			s.failures++
			s.gapless = s.version
			s.pool.Hold = true
		}
	}
	g.version = 0
	s.endRecords(gi, st)
	if !ok && g.lead > 0 {
		s.restoring++
		s.restore(gi)
		return
	}
	s.settle(g)
	s.freeGroup(gi)
}

// endRecords ends the records of a group with a status. It is CapacityExceeded for a group that was never written.
func (s *Store) endRecords(gi int32, st Status) {
	g := &s.groups[gi]
	if g.chunk == none {
		s.logs[g.log].pending -= int64(g.used)
	}
	if g.log == keyLog {
		for i := g.first; i != none; {
			next := s.segs[i].next
			s.segmentWritten(i, g.chunk != none, st)
			i = next
		}
	} else {
		for r := partRef(g.first); r != none; {
			o, next := &s.ops[r.op()], s.partAt(r).next
			if st != OK {
				o.failed = st
			}
			if o.writing--; o.writing == 0 {
				o.ready = true
				s.scheduleWriter(r.op())
			}
			r = next
		}
	}
}

// freeGroup frees a group.
func (s *Store) freeGroup(gi int32) {
	g := &s.groups[gi]
	if g.chunk != none {
		s.pool.Unpin(g.chunk)
	}
	s.groupLinks.PushFront(&s.logs[g.log].free, gi) // its buffer is in the CPU's cache
	s.progress++
}

// scheduleWriter considers the segment of a writer that has become ready.
func (s *Store) scheduleWriter(i int32) {
	o := &s.ops[i]
	if o.active > 0 {
		invariants.Check(s.segs[o.active-1].number == s.tbl.Segment(o.hash), "kvstore: a writer is at another segment")
		s.schedule(o.active - 1)
		return
	}
	at, fresh := s.activate(s.tbl.Segment(o.hash), payer{})
	invariants.Check(!fresh, "kvstore: a writer's segment is not active")
	s.schedule(at)
}

// freeInOpenChunk is the free space in the open chunk of log l.
func (s *Store) freeInOpenChunk(l int) int64 {
	if log := &s.logs[l]; log.chunk != none {
		return int64(s.pool.End()-log.tail) &^ int64(s.cfg.BlockSize-1)
	}
	return 0
}

// placeForMoved is for how many bytes of moved values there is space.
func (s *Store) placeForMoved() int64 {
	return s.freeInOpenChunk(movedLog) + int64(s.budget.MovedChunks(s.compact.lastResort))*s.budget.Fill
}

// placeForKeys is for how many more bytes of segments of user writes the key log has space. Not counted are the space
// for the groups that are not placed, for the live bytes of victims, which compaction is about to move, and a chunk and
// a half, because groups do not fill chunks to their ends.
func (s *Store) placeForKeys() int64 {
	keys, _ := s.liveInVictims()
	return s.freeInOpenChunk(keyLog) +
		int64(s.budget.KeyChunks())*s.budget.Fill - s.logs[keyLog].pending - keys - s.budget.Fill*3/2
}

// mayTakeChunk reports whether log l may take a chunk. Segments in groups of the key log were granted their place
// before, by placeForKeys.
func (s *Store) mayTakeChunk(l int) bool {
	switch l {
	case keyLog:
		// Failed writes may have used up what a victim of the key log needs. A checkpoint gets by with a chunk less as
		// long as the SegTbl does not grow, which it does not without Puts. But while writes fail, they would use up
		// this chunk as well.
		return s.budget.KeyChunks() > 0 ||
			s.compact.keys > 0 && s.pool.Free == s.budget.CheckpointChunks && !s.failsWrites()
	case movedLog: // a chunk that the key log lends would be used up as well
		return s.budget.MovedChunks(s.compact.lastResort && !s.failsWrites()) > 0
	}
	_, values := s.liveInVictims()
	return s.budget.MovedChunks(false) > 1 && !s.budget.Crowded() &&
		s.placeForMoved()-s.budget.Fill-s.early.bytes >= values
}

// openChunk takes a free chunk for log l and writes its header. The header must be durable before anything is written
// behind it: recovery does not know a chunk without a header.
func (s *Store) openChunk(l int) {
	log := &s.logs[l]
	if !s.mayTakeChunk(l) {
		log.starved = true
		return
	}
	if l == userLog {
		s.compact.most -= s.freeInOpenChunk(l) + int64(s.cfg.BlockSize)
	}
	s.closeChunk(l)
	kind := format.ValueLog
	if l == keyLog {
		kind = format.KeyLog
	}
	log.chunk = s.takeChunk(kind, log.header, 0, 0)
	log.tail, log.opening = format.ChunkOffset(s.cfg.BlockSize), true
	s.writeHeader(ioHeader, int32(l), log.chunk, log.header)
}

// closeChunk seals the open chunk of log l.
func (s *Store) closeChunk(l int) {
	log := &s.logs[l]
	if log.chunk == none {
		return
	}
	s.pool.Seal(log.chunk)
	log.chunk = none
}

// takeChunk takes a free chunk and fills in its header.
func (s *Store) takeChunk(kind format.Kind, header []byte, checkpoint uint64, index uint32) format.ChunkNumber {
	i := s.pool.Take(kind)
	clear(header)
	h := format.ChunkHeader(header[:format.ChunkHeaderBytes])
	h.SetKind(kind)
	h.SetEpoch(s.pool.LastEpoch)
	h.SetIndex(index)
	h.SetUUID(s.cfg.UUID)
	h.SetCheckpoint(checkpoint)
	h.Seal()
	s.stats.CheckpointBytes += int64(len(header))
	return i
}

// maxBadHeaders is how many chunks in succession a log tries before the device is what has failed.
const maxBadHeaders = 3

// headerWritten ends the write of the header of log l's open chunk. If it has failed, the chunk is returned, and the
// groups that waited for it wait for another chunk, or fail after a few.
func (s *Store) headerWritten(l int, ok bool) {
	log := &s.logs[l]
	log.opening = false
	if ok {
		log.badHeaders = 0
		return
	}
	s.pool.ReturnBad(log.chunk)
	log.chunk = none
	if log.badHeaders++; log.badHeaders < maxBadHeaders {
		return // the log takes another chunk
	}
	log.badHeaders = 0
	s.failSealed(l, DeviceError)
}

// failSealed ends the sealed groups of log l, which were never written, with a status.
func (s *Store) failSealed(l int, st Status) {
	log := &s.logs[l]
	for n := log.sealed.N; n > 0; n-- {
		gi := s.groupLinks.Pop(&log.sealed)
		s.endRecords(gi, st)
		s.freeGroup(gi)
	}
}
