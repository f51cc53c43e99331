package kvstore

import (
	"fmt"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/pipeline"
)

type ckptStage uint8

const (
	ckptIdle ckptStage = iota
	// ckptBarrier: no new writes of the key log are started until those under way have ended, so that the SegTbl
	// contains everything before the end of the key log.
	ckptBarrier
	ckptNote   // what is live is being noted in the chunks
	ckptHeader // a chunk's header is being written
	ckptPage   // a page is being written
	ckptSuper  // the superblock is being written, or the cache flushed
	ckptEnd    // the checkpoint is durable, or was abandoned: chunks that were pending free are being freed, or not
)

// A store without writes writes a checkpoint, so that a crash leaves nothing to replay and no outcome indeterminate:
// after idleNS if that is cheap beside what was written before, else after longIdleNS, or later, so that it is no more
// than idleBytesPerSec. Otherwise a Put now and then would write the whole table each time.
const (
	idleNS          = 1e9
	longIdleNS      = 60e9
	idleBytesPerSec = 1 << 20
	// A checkpoint is cheap if it is at most 1/cheapPart of the key log that was written since the last one.
	cheapPart = 8
	// headParts is how much key log is written between checkpoints, in lengths of the part of an increment that does
	// not depend on what has changed. So opening reads a few hundred megabytes of the key log at 4 TiB.
	headParts = 64
)

// ckptState is the state of the checkpoint. A checkpoint is a copy of the chunk table and the SegTbl that is made while
// they change. Changes since its beginning are in the key log behind the end that the summary names. Replaying them
// over a newer entry of the SegTbl has the same result.
//
// A checkpoint is written in full, or as an increment: a copy of the chunk table, and of what has changed in the SegTbl
// since the stream of pages before, behind which it is written. When the increments are longer than the full checkpoint
// the next one is a full one, and the chunks of the one before are free.
type ckptState struct {
	stage  ckptStage
	wanted bool
	// busy: the I/O of the stage is under way. durable: the checkpoint has ended well. swept: this turn has gone
	// through as many chunks as it has time for.
	busy, durable, swept bool
	// chunks are those of the last checkpoint, next those of the one that is being written; an increment is in both.
	chunks, next []format.ChunkNumber
	// increment: an increment is being written, or would be. full: the next one must be a full one, because marks of
	// changed units of the SegTbl were lost, or because there is none before, or none that can have increments.
	increment, full bool
	// id is the id of the checkpoint, streamID that of its stream that is being written. stream is that stream.
	id, streamID uint64
	stream       recovery.CheckpointStream
	// page is the next page to be written, first the first one of the stream, and pages how many there will be, as far
	// as is known.
	pages, page, first uint32
	// copies is how many superblocks durably name the checkpoint, tried how many writes of one were started. Nothing of
	// the last checkpoint is given up before both name the new one: otherwise the copy that does not would count if the
	// other one became damaged.
	copies, tried int
	// On a volatile device the cache is flushed before each superblock and at the end. Before the first flush no write
	// of the key log may be under way (draining), so that no version before the flush can be lost.
	flushed, flushing, draining bool
	buf                         []byte // a page
	// filling: buf is filled in part.
	filling bool
	header  []byte
	summary [format.SummaryBytes]byte
	// keyBytes is how much key log was written since the last checkpoint began, writtenNS when the last of it was.
	keyBytes, writtenNS int64
	// covered is the number of failures before the last durable checkpoint began, covering the number before this one
	// began. An outcome that was indeterminate is known once a checkpoint covers it.
	covered, covering uint64
	retryNS           int64
	// failed counts the writes of checkpoints that have failed since the last durable one, the first at sinceNS.
	failed  int
	sinceNS int64
	// beforeStop is Stats.CheckpointBytes at the time of Stop.
	beforeStop int64
}

// checkpointDue reports whether it is time for a checkpoint. While the store stops there are, before the last one, only
// those that requests wait for.
func (s *Store) checkpointDue() bool {
	c := &s.ckpt
	short := s.pool.Free < s.budget.Reserve()+3
	if s.pool.Obsolete > 0 && (s.compact.blocked && s.dirty.N > 0 || s.logs[keyLog].starved ||
		s.logs[movedLog].starved || s.logs[userLog].starved || short && s.compact.nothing) {
		return true
	}
	if s.stopping {
		return s.lastCheckpointDue()
	}
	if c.keyBytes > 0 || len(s.drops.swept) > 0 {
		idleAt := max(c.writtenNS, s.drops.sweptNS) + s.idleFor()
		if s.now >= idleAt {
			return true
		}
		s.wake(idleAt)
	}
	interval := s.cfg.CheckpointBytes
	if interval == 0 {
		head := int64(format.SummaryBytes + len(s.pool.Chunks)*format.ChunkEntryBytes)
		interval = max(headParts*head, 8*s.cfg.ChunkBytes)
	}
	return c.wanted || c.keyBytes >= interval || s.openingsCrowded() || s.failures != c.covered ||
		short && s.pool.Obsolete >= 2*s.budget.CheckpointChunks
}

// chooseCheckpoint decides whether the next checkpoint is an increment, and how long it will be.
func (s *Store) chooseCheckpoint() {
	c, sb := &s.ckpt, format.Superblock(s.super)
	s.sizeCheckpoint()
	c.increment = false
	if c.full {
		return
	}
	next := recovery.CheckpointStream{Pool: s.pool, Table: &s.tbl, Increment: true}
	pages, perChunk := next.Pages(), sb.PagesPerChunk()
	if int64(sb.FullPages())*format.PageBytes > 2*s.budget.CheckpointBytes {
		return // the table has become shorter
	}
	// The last chunk is filled, because another one would be taken as a whole.
	most := (2*sb.FullPages() + perChunk - 1) / perChunk * perChunk
	if most = min(most, format.MaxCheckpointChunks*perChunk); sb.Pages()+pages > most {
		return
	}
	if bytes := int64(pages) * format.PageBytes; bytes <= s.budget.CheckpointBytes {
		c.increment, s.budget.CheckpointBytes = true, bytes
	}
}

// idleFor is how long after the last write of the key log a checkpoint is due.
func (s *Store) idleFor() int64 {
	bytes := s.budget.CheckpointBytes
	if s.cfg.Volatile || s.ckpt.keyBytes >= cheapPart*bytes {
		return idleNS
	}
	return max(longIdleNS, bytes*1e9/idleBytesPerSec)
}

// lastCheckpointDue reports that the store is to stop and that nothing will be written to the logs any more.
func (s *Store) lastCheckpointDue() bool { return s.stopping && !s.stopped && s.logsIdle() }

// segments is how many segments the checkpoint has that is being written; 0: none is.
func (c *ckptState) segments() uint32 {
	if c.stage == ckptIdle {
		return 0
	}
	return format.Summary(c.summary[:]).Segments()
}

// LastCheckpoint returns how many bytes of checkpoints were written since Stop, and how many are left before the store
// has stopped, as far as is known: the rest of the checkpoint under way and, unless that is the last, another one. An
// I/O counts as written when it begins. Requests in progress may add to what is left.
func (s *Store) LastCheckpoint() (written, left int64) {
	if s.pool == nil {
		return 0, 0
	}
	c := &s.ckpt
	another := !s.stopped
	if c.stage >= ckptNote && c.stage <= ckptSuper {
		left = int64(c.pages-c.page) * format.PageBytes
		if c.stage == ckptPage && c.busy {
			left -= format.PageBytes
		}
		another = !s.stopping || c.keyBytes > 0 || !s.logsIdle()
	}
	if another {
		left += s.budget.CheckpointBytes
	}
	if s.stopping {
		written = s.stats.CheckpointBytes - c.beforeStop
	}
	return written, left
}

// checkpointStep starts a checkpoint if one is due, or starts the next I/O of the one under way.
func (s *Store) checkpointStep() {
	c := &s.ckpt
	if c.busy {
		return
	}
	if c.stage == ckptEnd && !s.sweep(s.freePending) {
		return
	}
	if c.retryNS > s.now {
		s.wake(c.retryNS)
		return
	}
	switch c.stage {
	case ckptIdle:
		s.chooseCheckpoint()
		if !s.checkpointDue() || s.pool.Free < s.budget.CheckpointChunks-1 {
			return
		}
		c.stage = ckptBarrier
		fallthrough
	case ckptBarrier:
		if s.logs[keyLog].inflight > 0 {
			return
		}
		s.beginCheckpoint()
		fallthrough
	case ckptNote:
		if !s.sweep(s.pool.NoteLive) {
			return
		}
		c.stage = ckptHeader
		fallthrough
	case ckptHeader, ckptPage:
		if s.failures != c.covering {
			// A write of the key log has failed since the checkpoint began. Recovery might find it, but it is not in
			// the counts of this checkpoint.
			s.abandonCheckpoint()
			return
		}
		s.nextPage()
	case ckptSuper:
		s.writeSuper()
	}
}

// sweep continues to go through all chunks, with as many as a turn has time for, and reports whether that is done.
func (s *Store) sweep(some func() (done bool)) bool {
	c := &s.ckpt
	if c.swept {
		return false
	}
	if some() {
		return true
	}
	c.swept = true
	s.wake(s.now + 1)
	return false
}

// freePending continues to free the chunks that were pending free, or makes them obsolete again, and reports whether
// the checkpoint has thereby ended.
func (s *Store) freePending() bool {
	done := s.pool.EndCheckpoint(s.ckpt.durable)
	if done {
		s.ckpt.stage = ckptIdle
	}
	return done
}

// beginCheckpoint begins a checkpoint: it fills in the summary and lets the pool note what is live now. No write of the
// key log is under way, so that the SegTbl contains everything before the tails that the summary names.
func (s *Store) beginCheckpoint() {
	c := &s.ckpt
	s.split.again = s.split.writing && s.split.ended > 0
	c.wanted, c.keyBytes, c.covering = false, 0, s.failures
	c.next, c.copies, c.tried, c.flushed = c.next[:0], 0, 0, false
	sb := format.Superblock(s.super)
	if c.increment {
		c.streamID = format.NextStream(sb.LastStream(), s.version, sb.Generation())
		c.first = sb.Pages()
	} else {
		// The id is made of an epoch, which is never used again, even after a crash. There may be pages of a checkpoint
		// that was not finished.
		c.id = s.pool.LastEpoch + 1
		c.streamID, c.first = c.id, 0
	}
	c.page = c.first
	s.beginOpenings()
	s.beginLeaving()
	sum := format.Summary(c.summary[:])
	clear(sum)
	sum.SetNextVersion(s.version)
	sum.SetObjects(s.objects)
	sum.SetSegments(s.tbl.Len())
	sum.SetChunks(len(s.pool.Chunks))
	sum.SetMerges()
	sum.SetLastEpoch(s.pool.LastEpoch)
	sum.SetClock(s.clock)
	sum.SetFirstExpiry(s.expiry.begin())
	for l := range s.logs {
		if log := &s.logs[l]; log.chunk != none {
			s.pad(log)
			sum.SetOpen(l, s.pool.Chunks[log.chunk].Epoch.N(), log.tail)
		}
	}
	c.stream = recovery.CheckpointStream{Summary: sum, Pool: s.pool, Table: &s.tbl, Increment: c.increment}
	c.pages = c.first + c.stream.Pages()
	s.pool.BeginCheckpoint()
	s.excludeUncommitted()
	c.stage = ckptNote
}

// nextPage writes the next page, or the header of the chunk for it.
func (s *Store) nextPage() {
	c := &s.ckpt
	if c.stream.Ended() && !c.filling {
		if s.drops.writing {
			return // the superblock has one writer at a time
		}
		c.pages, c.stage = c.page, ckptSuper
		s.writeSuper()
		return
	}
	index, offset := format.Superblock(s.super).PagePlace(c.page)
	if index == s.checkpointChunks() {
		if s.pool.Free == 0 {
			s.abandonCheckpoint()
			return
		}
		i := s.takeChunk(format.Checkpoint, c.header, c.id, uint32(index))
		c.next = append(c.next, i)
		c.stage, c.busy = ckptHeader, true
		s.writeHeader(ioCheckpoint, 0, i, c.header)
		return
	}
	p := format.Page(c.buf)
	c.filling = true
	if !s.sweep(func() bool { return c.stream.Fill(p.Payload()) }) {
		return
	}
	c.filling = false
	p.SetIndex(c.page)
	p.SetStream(c.streamID)
	p.Seal()
	c.stage, c.busy = ckptPage, true
	s.stats.CheckpointBytes += format.PageBytes
	s.io(ioCheckpoint, 0, pipeline.Write, s.pool.At(s.checkpointChunk(index), offset), p)
}

// checkpointChunks is the number of chunks that the checkpoint that is being written has so far.
func (s *Store) checkpointChunks() int {
	if s.ckpt.increment {
		return len(s.ckpt.chunks) + len(s.ckpt.next)
	}
	return len(s.ckpt.next)
}

// checkpointChunk is chunk number i of the checkpoint that is being written.
func (s *Store) checkpointChunk(i int) format.ChunkNumber {
	c := &s.ckpt
	switch {
	case !c.increment:
		return c.next[i]
	case i < len(c.chunks):
		return c.chunks[i]
	}
	return c.next[i-len(c.chunks)]
}

// excludeUncommitted excludes live bytes that are not committed from the counts of the checkpoint: values whose
// segments are not written yet, and new segments that are not part of the table. No write of the key log is under way.
func (s *Store) excludeUncommitted() {
	for i := range s.ops {
		for _, p := range s.ops[i].parts {
			if p.chunk != none {
				s.pool.Exclude(p.offset, int(p.bytes))
			}
		}
	}
	if s.split.made {
		for _, i := range s.split.dst[:s.split.n] {
			if a := &s.segs[i]; a.bytes > 0 {
				s.pool.Exclude(a.entry.Offset(), a.bytes)
			}
		}
	}
}

// writeSuper starts the next of the I/Os that commit the checkpoint, whose pages are written: a superblock that names
// it, over the one with the older generation, and then another over the other one. On a volatile device the cache is
// flushed before each of them and at the end. checkpointWritten notes the outcome, after which writeSuper is called
// again. A superblock whose write has failed is written again with the same generation.
func (s *Store) writeSuper() {
	c := &s.ckpt
	sb := format.Superblock(s.super)
	if s.cfg.Volatile && !c.flushed {
		if c.draining = c.copies == 0 && s.logs[keyLog].inflight > 0; c.draining {
			return
		}
		if c.copies == 0 {
			sb.SetVolatileFrom(s.version)
		}
		c.busy, c.flushing = true, true
		s.io(ioCheckpoint, 0, pipeline.Flush, 0, nil)
		return
	}
	if c.tried == c.copies {
		if c.tried++; c.copies < 2 {
			if !s.cfg.Volatile {
				sb.SetVolatileFrom(0)
			}
			sb.SetDrops(s.remaining())
			s.sealSuper()
		}
	}
	c.busy = true
	s.stats.CheckpointBytes += format.SuperblockBytes
	s.io(ioCheckpoint, 0, pipeline.Write, s.superPlace(), sb)
}

// nameCheckpoint writes to the superblock where the checkpoint is.
func (s *Store) nameCheckpoint() {
	c, sb := &s.ckpt, format.Superblock(s.super)
	sb.SetCheckpoint(c.id)
	sb.SetPages(c.pages)
	sb.SetLastPages(c.pages - c.first)
	sb.SetLastStream(c.streamID)
	sb.SetOpenings(0)
	if s.openings.on {
		sb.SetOpenings(s.openings.next)
	}
	if c.increment {
		sb.SetChunks(c.chunks, c.next)
		return
	}
	sb.SetFullPages(0) // no increments
	if sb.SetChunks(c.next) {
		sb.SetFullPages(c.pages)
	}
}

// checkpointWritten ends an I/O of the checkpoint.
func (s *Store) checkpointWritten(ok bool) {
	c := &s.ckpt
	flushed := c.flushing
	c.busy, c.flushing = false, false
	if !ok {
		if c.failed++; c.failed == 1 {
			c.sinceNS = s.now
		}
	}
	if !ok && s.settling {
		s.failOpening(fmt.Errorf("%w: its first checkpoint could not be written", ErrPartition))
		return
	}
	switch {
	case !ok && c.stage == ckptSuper:
		// The outcome is indeterminate, so that nothing of either checkpoint may be given up. The superblock is written
		// again.
		c.retryNS = s.now + retryNS
	case !ok:
		if n := len(c.next); n > 0 {
			bad := c.next[n-1]
			c.next = c.next[:n-1]
			s.pool.ReturnBad(bad)
		}
		s.abandonCheckpoint()
	case c.stage == ckptPage:
		c.page++
	case flushed:
		if c.flushed = true; c.copies == s.superblocks() {
			s.endCheckpoint()
		}
	case c.stage == ckptSuper:
		c.flushed = false
		if c.copies++; c.copies == s.superblocks() && !s.cfg.Volatile {
			s.endCheckpoint()
		}
	}
}

// abandonCheckpoint gives up a checkpoint before its superblock is written.
func (s *Store) abandonCheckpoint() {
	c := &s.ckpt
	for _, i := range c.next {
		s.pool.Return(i)
	}
	c.next = c.next[:0]
	c.stage, c.wanted, c.durable, c.full, c.filling = ckptEnd, true, false, true, false
	s.sweep(s.freePending)
	c.retryNS = s.now + retryNS
	s.progress++
}

// endCheckpoint ends a checkpoint that both superblocks durably name: it frees what only the one before needed.
func (s *Store) endCheckpoint() {
	c := &s.ckpt
	if c.increment {
		c.chunks, c.next = append(c.chunks, c.next...), c.next[:0]
	} else {
		for _, i := range c.chunks {
			s.pool.Return(i)
		}
		c.chunks, c.next = c.next, c.chunks[:0]
	}
	s.endOpenings()
	s.merge.allowed = true
	c.stage, c.durable, c.full = ckptEnd, true, format.Superblock(s.super).FullPages() == 0
	s.sweep(s.freePending)
	s.pool.KeyEpoch = format.Summary(c.summary[:]).KeyEpoch()
	c.covered, c.failed = c.covering, 0
	s.endLeaving()
	s.pool.Hold = s.failures != c.covered || s.cfg.Volatile
	s.settling, s.resize.noteAfter = false, false
	s.stopped = s.stopping && s.logsIdle() && c.keyBytes == 0
	s.stats.Checkpoints++
}
