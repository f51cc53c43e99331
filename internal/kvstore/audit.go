package kvstore

import (
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// An audit reads every segment once, in the order of their numbers, while requests are served. It reports lost data,
// and counts the live bytes in the chunks that compaction has left as damaged. Such a chunk still counts live bytes
// that no segment refers to: those of segments and values that were lost, and of values whose keys were. A chunk to
// which no segment refers is freed.
//
// The count is exact although segments change meanwhile: nothing is added to a chunk that is sealed or damaged, what
// dies after its segment was counted is subtracted from the count as well, and so are keys that move to a segment that
// is still to be counted.
//
// An audit that an operator has asked for counts all sealed chunks, too.
//
// As long as something is lost, chunks stay damaged for the values of lost keys: their segment may be readable again.
// But when writes are stalled, the room is worth more. Such an audit replaces the records of lost segments, as any
// write of one of their keys does, and nothing is left that could refer to those values.

const (
	// auditWindow is how many segments an audit looks at at once.
	auditWindow = 16
	// auditSkips is how many empty segments an audit passes in a turn.
	auditSkips = 4096
	// auditChunks is how many chunks an audit goes through in a turn, to choose those that it counts or to make use of
	// the counts. One that it counts stands for auditCounted others, because of the map.
	auditChunks, auditCounted = 8192, 16
	// auditPauseNS is the time between two audits that the store begins of itself.
	auditPauseNS = 3600e9
	// auditBytesPerSec is how fast such an audit reads where there is no scrub.
	auditBytesPerSec = 1 << 20
)

// AuditState describes an audit.
type AuditState struct {
	// Running: it has not ended. Looked of Segments are done.
	Running          bool
	Looked, Segments uint32
	// Repairing: what is lost is given up.
	Repairing bool
	// Lossy segments have lost keys, and Unreadable ones could not be read. The audit has given up Repaired of them.
	Lossy, Unreadable, Repaired uint32
	// Known is the number of keys that exist in the lossy and repaired ones. Lost is how many keys fewer there are
	// than were counted before, if nothing that is lost is left.
	Known, Lost int64
	// FreedChunks were damaged and are used again. DamagedChunks still have live records that cannot be found.
	FreedChunks, DamagedChunks int
}

// auditState is the state of the audit that is running, or of the last one.
type auditState struct {
	AuditState
	// wanted: one is to begin. ofOperator: an operator waits for it. forRoom: writes are stalled, and what is lost may
	// give way.
	wanted, ofOperator, forRoom bool
	// again: another one is to begin at its end, because it may have passed something before somebody asked for it.
	// later: one is to follow in time, because of chunks that have become damaged since it began.
	again, later bool
	// ended counts those that have ended.
	ended int
	// hoards: chunks have become damaged since the last audit for room began.
	hoards bool
	// skipping: the audit passes empty segments, or goes through chunks, and goes on in the next turn. rested: this
	// turn has done as much of that as it has time for.
	skipping, rested bool
	// at is the chunk that is looked at next. chosen: those that are counted were chosen.
	at     format.ChunkNumber
	chosen bool
	// replaceable counts lost segments whose records can still be read again, because nothing has replaced them.
	replaceable int
	// next is what the next one is for, if it begins as soon as this one ends.
	next struct{ wanted, repair bool }
	// awaited are chunks with records that may be referred to once they are committed. The audit of an operator waits
	// for them before it begins to count.
	awaited []format.ChunkNumber
	// pending are the segments that are being looked at. All others below Looked have been counted.
	pending []uint32
	// counts are the live bytes that were found in each chunk that is counted, objects is the number of keys.
	counts  map[format.ChunkNumber]auditCount
	objects int64
	// dueNS is when the next segment may be read, or the next audit begin.
	dueNS int64
}

type auditCount struct {
	epoch space.Epoch
	live  int64
}

// Audit begins an audit, which gives up what is lost if repair says so: segments that have lost keys are complete
// again, and of the keys that they have lost none exists. It reports whether it has begun, which it does not while
// another one is running.
func (s *Store) Audit(repair bool) bool {
	a := &s.audit
	switch {
	case s.stopping || a.Running && a.ofOperator:
		return false
	case a.Running: // the audit that the store began itself ends first
		a.ofOperator, a.next.wanted, a.next.repair = true, true, repair
		return true
	}
	s.beginAudit(true, repair)
	return true
}

// LookForLosses begins an audit soon, at the rate of the scrub, unless there is none: losses that are known to the
// partition are reported again, to somebody who can repair them.
func (s *Store) LookForLosses() {
	switch a := &s.audit; {
	case s.cfg.ScrubBytesPerSec <= 0:
	case a.Running:
		a.again = true
	default:
		a.wanted, a.dueNS = true, 0
	}
}

// wantAudit asks for an audit because a chunk has become damaged. One that is running has passed some of what refers to
// the chunk, perhaps.
func (s *Store) wantAudit() {
	if s.audit.Running {
		s.audit.later = true
	} else {
		s.audit.wanted = true
	}
}

// AuditState returns how far the audit is that is running, or what the last one has found.
func (s *Store) AuditState() AuditState {
	a := s.audit.AuditState
	a.DamagedChunks = s.pool.Damaged
	return a
}

// beginAudit begins an audit. That of an operator is to count all chunks. Only those can be counted to which nothing is
// added, so that the logs go on in others.
func (s *Store) beginAudit(ofOperator, repair bool) {
	a := &s.audit
	*a = auditState{AuditState: AuditState{Running: true, Repairing: repair, Segments: s.tbl.Len()},
		ofOperator: ofOperator, hoards: a.hoards, ended: a.ended, rested: a.rested, awaited: a.awaited[:0],
		pending: a.pending[:0], counts: map[format.ChunkNumber]auditCount{}}
	if !ofOperator {
		return
	}
	for l := range s.logs {
		if !s.logs[l].opening {
			s.closeChunk(l)
		}
	}
}

// countable reports whether nothing is added to a chunk that belongs to a log.
func (s *Store) countable(i format.ChunkNumber) bool {
	st := s.pool.Chunks[i].State
	return st == space.Damaged || st == space.Sealed && s.audit.ofOperator
}

// uncommitted reports whether a chunk has records that are not committed.
func (s *Store) uncommitted(i format.ChunkNumber) bool {
	pins := int(s.pool.Chunks[i].Pins)
	if pins == 0 {
		return false
	}
	for k := range s.compact.slots {
		if sl := &s.compact.slots[k]; sl.scrub && s.scrub.pinned && sl.Chunk == i {
			pins--
		}
	}
	for k := range s.compact.avoided {
		if a := &s.compact.avoided[k]; a.pinned && a.chunk == i {
			pins--
		}
	}
	return pins > 0
}

// choose goes on to choose the chunks that are counted, and reports whether all were looked at. Until the first segment
// is counted it makes no difference when one is chosen, for nothing is added to it.
func (s *Store) choose() (done bool) {
	a := &s.audit
	for work := 0; int(a.at) < len(s.pool.Chunks); a.at++ {
		if work >= auditChunks {
			return false
		}
		switch work++; {
		case !s.countable(a.at):
		case s.uncommitted(a.at):
			if a.ofOperator {
				a.awaited = append(a.awaited, a.at)
			}
		default:
			work += auditCounted
			a.counts[a.at] = auditCount{epoch: s.pool.Chunks[a.at].Epoch}
		}
	}
	return true
}

// await chooses those of the awaited chunks that are committed now, and reports whether there are others.
func (s *Store) await() bool {
	a := &s.audit
	a.awaited = slices.DeleteFunc(a.awaited, func(i format.ChunkNumber) bool {
		countable := s.countable(i)
		if countable && s.uncommitted(i) {
			return false
		}
		if countable {
			a.counts[i] = auditCount{epoch: s.pool.Chunks[i].Epoch}
		}
		return true
	})
	return len(a.awaited) > 0
}

// restAudit lets an audit go on in the next turn.
func (s *Store) restAudit() {
	s.audit.skipping, s.audit.rested = true, true
	s.wake(s.now + 1)
}

// auditStep begins an audit that is wanted, or continues the one that is running.
func (s *Store) auditStep() {
	a := &s.audit
	switch {
	case s.stopping:
		return
	case !a.Running && s.mayAuditForRoom():
		s.beginAudit(false, false)
		a.forRoom, a.hoards = true, false
		s.progress++
	case !a.Running && !a.wanted:
		return
	case s.now < a.dueNS && !s.mayAuditForRoom():
		s.wake(a.dueNS)
		return
	case !a.Running:
		s.beginAudit(false, false)
	}
	if a.rested {
		return
	}
	a.skipping = false
	if !a.chosen {
		if a.chosen = s.choose(); !a.chosen {
			s.restAudit()
			return
		}
		a.at = 0
	}
	if s.await() {
		return
	}
	for skipped := 0; a.Looked < s.tbl.Len() && len(a.pending) < auditWindow && s.freeInt.N > maxMoves/4; a.Looked++ {
		n := a.Looked
		if s.tbl.Get(n) == 0 {
			// Keys that are being written to it are counted when they are committed.
			if skipped++; skipped == auditSkips {
				s.restAudit()
				return
			}
			continue
		}
		a.pending = append(a.pending, n)
		i := s.opLinks.Pop(&s.freeInt)
		s.ops[i] = op{kind: opAudit, ready: true, segment: n, parts: [2]part{noPart, noPart}}
		if !a.ofOperator && !a.forRoom {
			rate := max(s.cfg.ScrubBytesPerSec, auditBytesPerSec)
			a.dueNS = max(a.dueNS, s.now-1e9) + int64(s.tbl.Get(n).MaxBytes())*1e9/rate
		}
		s.dispatch(i)
		if s.now < a.dueNS && !s.mayAuditForRoom() {
			a.Looked++
			break
		}
	}
	if a.Looked < s.tbl.Len() || len(a.pending) > 0 {
		return
	}
	if !s.applyCounts() {
		s.restAudit()
		return
	}
	s.endAudit()
}

// mayAuditForRoom reports whether writes are stalled while chunks are kept for what is lost.
func (s *Store) mayAuditForRoom() bool { return s.audit.hoards && s.stalled() }

// makesRoom reports whether an audit may soon free damaged chunks for stalled writes.
func (s *Store) makesRoom() bool { return s.audit.Running && s.audit.forRoom || s.mayAuditForRoom() }

// audited ends the look at a segment, whose content is committed if st is OK.
func (s *Store) audited(o *op, st Status) {
	a, number := &s.audit, o.segment
	s.progress++
	a.pending = slices.DeleteFunc(a.pending, func(n uint32) bool { return n == number })
	if number >= s.tbl.Len() { // it was merged into another one
		return
	}
	if st != OK {
		a.Unreadable++
		s.damage(Damage{Segment: number, Unreadable: true})
		if e := s.tbl.Get(number); e != 0 {
			// It may be readable again, and how long it is is not known.
			delete(a.counts, s.pool.Of(e.Offset()))
		}
		return
	}
	i, _ := s.activate(number, payer{background: true}) // it is active: the op was a writer of it
	act := &s.segs[i]
	seg := format.Segment(act.buf)
	if act.entry != 0 {
		s.audit.count(s.pool.Of(act.entry.Offset()), int64(act.bytes))
	}
	keys := s.countSegment(seg, 1)
	s.lookForOrphans(act)
	switch {
	case seg.Lossy():
		if act.bytes > 0 { // otherwise it was found now, and reported
			s.damage(Damage{Offset: act.entry.Offset(), Segment: number})
		}
		a.Lossy++
		a.Known += keys
		if act.bytes == 0 {
			a.replaceable++
		}
	case o.used:
		a.Repaired++
		a.Known += keys
	}
}

// lookForOrphans reports the values of a segment that are in chunks which compaction has left as damaged: it has not
// found them there. Values that were not moved yet are in sealed ones.
func (s *Store) lookForOrphans(act *activeSeg) {
	if s.pool.Damaged == 0 {
		return
	}
	seg := format.Segment(act.buf)
	for at := seg.First(); at < seg.LengthBytes(); at += seg.Item(at).LengthBytes() {
		it := seg.Item(at)
		if it.Gone() || it.ValueLen() == 0 || !s.pool.Contains(it.ValueOffset()) ||
			s.pool.Chunks[s.pool.Of(it.ValueOffset())].State != space.Damaged {
			continue
		}
		s.damage(Damage{Offset: it.ValueOffset(), Segment: act.number, Hash: s.hashOf(seg, at)})
	}
}

// countSegment adds the keys and values of a segment to the counts, or subtracts them if sign is -1, and returns the
// number of keys.
func (s *Store) countSegment(seg format.Segment, sign int64) (keys int64) {
	for at := seg.First(); at < seg.LengthBytes(); {
		it := seg.Item(at)
		at += it.LengthBytes()
		if it.Gone() {
			continue
		}
		if it.HasKey() {
			keys++
		}
		if it.ValueLen() > 0 && s.pool.Contains(it.ValueOffset()) {
			s.audit.count(s.pool.Of(it.ValueOffset()), sign*int64(it.RecordBytes()))
		}
	}
	s.audit.objects += sign * keys
	return keys
}

// count adds n bytes to those that were found in a chunk, if the chunk is being counted.
func (a *auditState) count(i format.ChunkNumber, n int64) {
	if c, ok := a.counts[i]; ok {
		c.live += n
		a.counts[i] = c
	}
}

// counted reports whether a segment was counted by the audit that is running.
func (a *auditState) counted(number uint32) bool {
	return a.Running && number < a.Looked && !slices.Contains(a.pending, number)
}

// died subtracts n bytes, at an offset, that a segment has referred to, or the segment itself had, from those that are
// live.
func (s *Store) died(number uint32, offset units.ExtentOffset, n int) {
	if s.audit.counted(number) {
		s.audit.count(s.pool.Of(offset), -int64(n))
	}
	s.pool.SubLive(offset, n)
}

// applyCounts goes on to make use of the counts, and reports whether that is done. As long as something is lost, what
// is live in value logs stays counted: the values of lost keys are there. Segments that a split adds meanwhile are
// looked at before it goes on.
func (s *Store) applyCounts() (done bool) {
	a := &s.audit
	complete := a.Lossy == 0 && a.Unreadable == 0
	exact := complete || a.forRoom && a.replaceable == 0 && a.Unreadable == 0
	for work := 0; int(a.at) < len(s.pool.Chunks) && len(a.counts) > 0; a.at++ {
		if work >= auditChunks {
			return false
		}
		c := &s.pool.Chunks[a.at]
		if work++; c.State != space.Damaged && c.State != space.Sealed {
			continue
		}
		work += auditCounted
		n, ok := a.counts[a.at]
		delete(a.counts, a.at) // what dies from now on is subtracted from Live only
		if !ok || c.Epoch != n.epoch || !exact && c.Kind != format.KeyLog {
			continue
		}
		was := c.State
		s.pool.SetLive(a.at, n.live+s.addedIn(a.at))
		if was == space.Damaged && c.State != was {
			a.FreedChunks++
		}
	}
	return true
}

// addedIn is how many bytes of segments are in a chunk that a split has written, and that are not in the table yet.
func (s *Store) addedIn(chunk format.ChunkNumber) (n int64) {
	if !s.split.made {
		return 0
	}
	for _, i := range s.split.dst[:s.split.n] {
		if act := &s.segs[i]; act.bytes > 0 && s.pool.Of(act.entry.Offset()) == chunk {
			n += int64(act.bytes)
		}
	}
	return n
}

// endAudit ends an audit that has made use of the counts.
func (s *Store) endAudit() {
	a := &s.audit
	a.ended++
	a.Running, a.wanted, a.later, a.ofOperator, a.dueNS = false, a.later, false, false, s.now+auditPauseNS
	if a.again {
		a.again, a.wanted, a.dueNS = false, true, 0
	}
	a.Segments = s.tbl.Len()
	a.counts = nil
	if a.Lossy == 0 && a.Unreadable == 0 {
		a.Lost = max(0, s.objects-a.objects)
		s.objects = a.objects
	}
	if a.Repairing {
		s.sweepNow()
	}
	if a.next.wanted {
		s.beginAudit(true, a.next.repair)
	}
	s.progress++
}
