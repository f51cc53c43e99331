package kvstore

import (
	"bytes"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
)

// A bad chunk could not be read when the partition was opened, where the newest segments might have been, and holds
// nothing. It must not be used before all of it can be read: an opening could not tell an unreadable block behind the
// end of the key log from lost segments. So a store tries its bad chunks from time to time, one after the other, at the
// pace of the scrub. A try writes zeroes to the whole chunk, which heals blocks that only could not be read, and then
// reads all of it. It ends with the first I/O that fails, or with bytes that are not zero:
//
//   - A write that fails says that the block cannot be used.
//   - A write that succeeds says little: the next read of the block may fail.
//   - A read that fails, or returns something else, says that what is written there would be lost.
//
// After a try that succeeds the chunk is obsolete, and free as soon as a checkpoint says so. A crash during a try, or
// behind it, leaves a chunk that the last checkpoint calls bad, and that stays bad at the next opening: that its header
// can be read by then says nothing of the rest.
//
// Compaction looks at a damaged chunk again once the scrub has come to it. Without a scrub, these rounds come to it.

const (
	// badNS is the time from the opening to the first round of tries. It is twice as long from each round to the next,
	// and mostBadNS at most. So a chunk that stays bad takes a few writes a day.
	badNS, mostBadNS int64 = 60e9, 86400e9
	// badPieceBytes is the length of an I/O of a try. badBytesPerSec is the pace without a scrub.
	badPieceBytes  = 64 << 10
	badBytesPerSec = 1 << 20
)

type badStage uint8

const (
	badNone  badStage = iota // no chunk is being tried
	badWrite                 // zeroes are being written
	badFlush                 // the cache is being flushed, so that the reads are not answered from it
	badRead                  // they are being read
)

// badState is the state of the tries.
type badState struct {
	stage badStage
	// chunk is the one that is being tried, or the next one to be looked at, at how far the stage has come in it.
	chunk format.ChunkNumber
	at    format.ChunkOffset
	// busy: an I/O is under way, of n bytes.
	busy bool
	n    int
	// dueNS is when the next I/O may begin; rounds is how often all chunks were looked at.
	dueNS  int64
	rounds int
	// healed: the next checkpoint frees chunks. damaged: there are damaged chunks.
	healed, damaged bool
	// buf is nil if there was no bad chunk when the partition was opened. Later there are no others.
	buf []byte
}

// openBad takes what was found when the partition was opened.
func (s *Store) openBad(mem *space.Buffers) {
	s.bad.damaged = s.pool.Damaged > 0
	if s.pool.Bad > 0 {
		s.bad.buf = mem.Take("trying bad chunks", badPieceBytes)
	}
}

// badStep tries bad chunks.
func (s *Store) badStep() {
	b := &s.bad
	switch {
	case b.busy:
		return
	case s.stopping || s.resize.stage != resizeNone: // a resize may take the chunk away
		b.stage = badNone
		return
	case b.stage == badNone && s.pool.Bad == 0 && !b.healed && !b.damaged:
		return
	case b.dueNS == 0:
		b.dueNS = s.now + badNS
	}
	if s.now < b.dueNS {
		s.wake(b.dueNS)
		return
	}
	if s.stats.Checkpoints == 0 {
		// The last checkpoint may be of a time when the chunk was in use, and an opening must find it unchanged.
		if s.ckpt.stage == ckptIdle && !s.ckpt.wanted {
			s.ckpt.wanted = true
			s.progress++
		}
		return
	}
	if b.stage == badNone && !s.nextBad() {
		return
	}
	b.busy, b.n = true, int(min(badPieceBytes, s.pool.End()-b.at))
	place, buf := s.pool.At(b.chunk, b.at), b.buf[:b.n]
	switch b.stage {
	case badWrite:
		clear(buf)
		s.io(ioBad, 0, pipeline.Write, place, buf)
	case badFlush:
		s.io(ioBad, 0, pipeline.Flush, 0, nil)
		return
	default:
		s.io(ioBad, 0, pipeline.Read, place, buf)
	}
	rate := s.cfg.ScrubBytesPerSec
	if rate <= 0 {
		rate = badBytesPerSec
	}
	b.dueNS = max(b.dueNS, s.now-1e9) + int64(b.n)*1e9/rate
}

// nextBad finds the next chunk to try. If there is none, the round has ended.
func (s *Store) nextBad() bool {
	b := &s.bad
	for range s.pool.Sweep {
		switch {
		case int(b.chunk) >= s.pool.Limit():
			b.chunk = 0
			b.rounds++
			b.dueNS = s.now + min(badNS<<min(b.rounds, 20), mostBadNS)
			s.ckpt.wanted = s.ckpt.wanted || b.healed
			b.healed, b.damaged = false, false
			s.progress++
			return false
		case s.pool.Chunks[b.chunk].State == space.Bad:
			b.stage, b.at = badWrite, 0
			return true
		case s.cfg.ScrubBytesPerSec <= 0 && s.pool.Chunks[b.chunk].State == space.Damaged &&
			s.pool.Chunks[b.chunk].Pins == 0:
			s.resealDamaged(b.chunk)
		}
		b.chunk++
	}
	s.wake(s.now + 1)
	return false
}

// badEnded ends an I/O of a try.
func (s *Store) badEnded(ok bool) {
	b := &s.bad
	b.busy = false
	s.progress++
	switch {
	case s.resize.stage != resizeNone: // the chunk may be one that is taken away
		b.stage = badNone
		return
	case b.stage == badRead && ok:
		ok = bytes.Count(b.buf[:b.n], []byte{0}) == b.n
	case b.stage == badNone:
		return
	}
	if !ok {
		b.stage = badNone
		b.chunk++
		return
	}
	if b.stage != badFlush {
		if b.at = b.at.Add(b.n); b.at < s.pool.End() {
			return
		}
	}
	switch b.at = 0; {
	case b.stage == badRead:
		s.pool.Heal(b.chunk)
		b.stage, b.healed = badNone, true
		b.chunk++
	case b.stage == badWrite && !s.cfg.Volatile:
		b.stage = badRead
	default:
		b.stage++
	}
}
