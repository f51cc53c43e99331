package kvstore

import (
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// An audit looks at every segment once, in the order of their numbers, while requests are served. It says what is lost,
// and counts what is live in the chunks that compaction has left as damaged, because live bytes stay counted there of
// which nothing is known: of segments and values that were lost, and of values whose keys were. A chunk to which
// nothing refers any more is free then.
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
	// auditSkips is how many empty segments an audit passes in one go.
	auditSkips = 4096
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
	// hoards: chunks have become damaged since the last audit for room began.
	hoards bool
	// skipping: the audit passes empty segments, and goes on in the next turn.
	skipping bool
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
	case a.Running: // the store's own comes to its end before
		a.ofOperator, a.next.wanted, a.next.repair = true, true, repair
		return true
	}
	s.beginAudit(true, repair)
	return true
}

// AuditState returns how far the audit is that is running, or what the last one has found.
func (s *Store) AuditState() AuditState {
	a := s.audit.AuditState
	a.DamagedChunks = 0
	for i := range s.pool.Chunks {
		if s.pool.Chunks[i].State == space.Damaged {
			a.DamagedChunks++
		}
	}
	return a
}

// beginAudit begins an audit. That of an operator is to count all chunks. Only those can be counted to which nothing is
// added, so that the logs go on in others.
func (s *Store) beginAudit(ofOperator, repair bool) {
	a := &s.audit
	*a = auditState{AuditState: AuditState{Running: true, Repairing: repair, Segments: s.tbl.Len()},
		ofOperator: ofOperator, hoards: a.hoards, awaited: a.awaited[:0], pending: a.pending[:0]}
	if !ofOperator {
		return
	}
	for l := range s.logs {
		if !s.logs[l].opening {
			s.closeChunk(l)
		}
	}
	for i := range s.pool.Chunks {
		if n := format.ChunkNumber(i); s.countable(n) && s.uncommitted(n) {
			a.awaited = append(a.awaited, n)
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
	for k := range s.compact.slots {
		if sl := &s.compact.slots[k]; sl.scrub && sl.Chunk == i {
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

// beginCounting chooses the chunks that are counted.
func (s *Store) beginCounting() {
	a := &s.audit
	a.counts = map[format.ChunkNumber]auditCount{}
	for i := range s.pool.Chunks {
		if n := format.ChunkNumber(i); s.countable(n) && !s.uncommitted(n) {
			a.counts[n] = auditCount{epoch: s.pool.Chunks[i].Epoch}
		}
	}
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
	a.awaited = slices.DeleteFunc(a.awaited, func(i format.ChunkNumber) bool { return !s.uncommitted(i) })
	if len(a.awaited) > 0 {
		return
	}
	if a.counts == nil {
		s.beginCounting()
	}
	a.skipping = false
	for skipped := 0; a.Looked < s.tbl.Len() && len(a.pending) < auditWindow && s.freeInt.N > maxMoves/4; a.Looked++ {
		n := a.Looked
		if s.tbl.Get(n) == 0 {
			// Keys that are being written to it are counted when they are committed.
			if skipped++; skipped == auditSkips {
				a.skipping = true
				s.wake(s.now + 1)
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
	if a.Looked == s.tbl.Len() && len(a.pending) == 0 {
		s.endAudit()
	}
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
	switch {
	case seg.Lossy():
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

// endAudit makes use of the counts. As long as something is lost, what is live in value logs stays counted: the values
// of lost keys are there.
func (s *Store) endAudit() {
	a := &s.audit
	a.Running, a.wanted, a.ofOperator, a.dueNS = false, false, false, s.now+auditPauseNS
	a.Segments = s.tbl.Len()
	if s.split.made {
		for _, i := range s.split.dst[:s.split.n] {
			if act := &s.segs[i]; act.bytes > 0 { // it is not in the table yet
				a.count(s.pool.Of(act.entry.Offset()), int64(act.bytes))
			}
		}
	}
	complete := a.Lossy == 0 && a.Unreadable == 0
	exact := complete || a.forRoom && a.replaceable == 0 && a.Unreadable == 0
	for i, n := range a.counts {
		c := &s.pool.Chunks[i]
		if c.State != space.Damaged && c.State != space.Sealed || c.Epoch != n.epoch ||
			!exact && c.Kind != format.KeyLog {
			continue
		}
		was := c.State
		s.pool.SetLive(i, n.live)
		if was == space.Damaged && c.State != was {
			a.FreedChunks++
		}
	}
	a.counts = nil
	if complete {
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
