package kvstore

import (
	"errors"
	"fmt"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// A resize changes the length of the partition while requests are served.
//
//	shrink   narrow ──> empty ──> commit ──> done    commit: a checkpoint without the chunks that are taken away
//	grow     note ──> commit ──> widen ──> done              or with the new ones, the superblocks for the new
//	                                                         size, and a note at the end of the extent
//
// Every superblock that counts names the size that its checkpoint is for. The copies of the old size and of the new one
// lie at different places, except the first. The one at the end of the new size is written first, so that at each
// moment either the old or the new pair can be found: see recovery.Supers. The note is a superblock that does not count
// but says where the partition ends, as long as that is not where its extent ends. Without it the second copy could not
// be found when the first is damaged.
//
// Until the checkpoint has ended nothing is given up that the old one needs, and no new chunk is used.

// ErrResize is wrapped by the errors of Resize and ResizeState that say why a partition cannot have a size.
var ErrResize = errors.New("kvstore: cannot change the size of the partition")

// ResizeOptions describe what a partition is to become.
type ResizeOptions struct {
	// PartitionBytes is the new length, a multiple of 4096.
	PartitionBytes int64
	// ExtentBytes is how much there is for the partition on the device, at least as much as it has now and as it will
	// have.
	ExtentBytes int64
	// SegTbl is the memory of the table. If it is to grow, it begins with what was in the memory before. When the
	// resize has ended the store uses it alone, or, if the resize has failed, the one from before.
	SegTbl []byte
}

// ResizeState describes the resize that is under way, or the last one.
type ResizeState struct {
	Running bool
	// ToBytes is the length that the partition is to have.
	ToBytes int64
	// Of TotalBytes of chunks that are taken away, DoneBytes are empty.
	DoneBytes, TotalBytes int64
	// Err says why the last one has failed.
	Err error
}

type resizeStage uint8

const (
	resizeNone   resizeStage = iota
	resizeNarrow             // the limit is being moved down
	resizeEmpty              // the chunks from the limit on are being emptied
	resizeNote               // a note at the end of the extent is being written
	resizeCommit             // a checkpoint for the new size is being written
	resizeWiden              // the limit is being moved up: chunks were added, or the resize has failed
)

// maxEmptyTries is how often the same chunk may fail to be emptied before the resize fails.
const maxEmptyTries = 6

// stuckNS is how long there may be no progress.
const stuckNS = 60e9

// emptyRestNS is the time between two searches for a chunk to empty that have found none.
const emptyRestNS = 1e6

type resizeState struct {
	stage resizeStage
	o     ResizeOptions
	// from is the length before, before the memory of the table.
	from   int64
	before []byte
	// noteAfter: the next checkpoint ends with a note. retryNS is when to write again the one that comes first.
	noteAfter bool
	retryNS   int64
	// next is the chunk at which the search for one to empty goes on, left what the search has found in this round.
	// clean: the last round has found only what the next checkpoint frees.
	next  format.ChunkNumber
	left  space.Left
	clean bool
	// restNS is when the next round may begin.
	restNS int64
	// empty is how many chunks were empty at sinceNS, and ever since.
	empty   int
	sinceNS int64
	err     error
}

// PartitionBytes is the length of the partition. It may be less than Config.PartitionBytes was when it was opened.
func (s *Store) PartitionBytes() int64 { return s.cfg.PartitionBytes }

// chunksIn is the number of chunks in a partition of that length.
func (s *Store) chunksIn(bytes int64) int64 {
	return max(0, bytes-format.AreaStart-format.SuperblockBytes) / s.cfg.ChunkBytes
}

// CheckResize reports whether the partition can have that length, as far as is known now, with a SegTbl of that many
// bytes.
//
// Errors: ErrResize saying what is in the way, and how much room there is.
func (s *Store) CheckResize(bytes int64, tableBytes int) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("%w to %s: %s", ErrResize, inMiB(bytes), fmt.Sprintf(format, args...))
	}
	switch n := s.chunksIn(bytes); {
	case s.phase != ready || s.settling || s.stopping:
		return refuse("it is being opened or closed")
	case s.resize.stage != resizeNone:
		return refuse("its size is still being changed, to %s; try again when that has ended",
			inMiB(s.resize.o.PartitionBytes))
	case bytes%format.SuperblockBytes != 0 || bytes > format.MaxPartitionBytes:
		return refuse("want a multiple of 4096, at most 4 TiB")
	case lookup.Capacity(tableBytes) < int(max(s.tbl.Len(), s.ckpt.segments()))+maxSplits:
		return refuse("its table has %d segments, and a partition of that size has room for %d", s.tbl.Len(),
			lookup.Capacity(tableBytes))
	case bytes < s.cfg.PartitionBytes:
		b := s.budget.For(int(n), len(s.tbl.Bytes()))
		if least := max(24, 2*int64(b.Reserve())); n < least {
			return refuse("it would have %d chunks, must have at least %d; allowed: %s or more", n, least,
				inMiB(s.bytesOf(least)))
		}
		if used := s.pool.Live + s.spare(); used > b.MaxLive {
			return refuse("%s are in use, and %s have room in that size; allowed: about %s or more", inMiB(used),
				inMiB(b.MaxLive), inMiB(s.leastBytes(used)))
		}
		if damaged := s.damagedFrom(format.ChunkNumber(n)); damaged > 0 {
			return refuse("%d chunks behind that end hold what is left of damaged records, which cannot be moved: "+
				"see jbofctl kv check and kv repair", damaged)
		}
	}
	return nil
}

// spare is what is to be kept free beside the live bytes. Identities and tombstones may be most of the key log.
func (s *Store) spare() int64 {
	n := max(space.Spare(s.objects, int64(s.tbl.Len())), s.pool.KeyLive*3/10)
	for l := range s.logs {
		n += s.logs[l].pending
	}
	return n
}

// Fullness returns how many bytes are live, with what is to be kept free beside them, and how many may be: Puts beyond
// that are refused.
//
// hot: 0 allocs
func (s *Store) Fullness() (used, most int64) { return s.pool.Live + s.spare(), s.budget.MaxLive }

// leastBytes is about the least length of a partition that has room for so many bytes.
func (s *Store) leastBytes(used int64) int64 {
	n := max(24, 2*int64(s.budget.Reserve()))
	for s.budget.For(int(n), len(s.tbl.Bytes())).MaxLive < used {
		n += max(1, n/64)
	}
	return s.bytesOf(n)
}

// bytesOf is the least length in whole MiB of a partition with so many chunks.
func (s *Store) bytesOf(chunks int64) int64 {
	const mib = 1 << 20
	return (chunks*s.cfg.ChunkBytes + format.AreaStart + format.SuperblockBytes + mib - 1) / mib * mib
}

// inMiB writes a number of bytes as sizes are written in configurations, with a decimal if it is not whole.
func inMiB(bytes int64) string {
	const mib = 1 << 20
	if bytes%mib == 0 {
		return fmt.Sprintf("%dMiB", bytes/mib)
	}
	return fmt.Sprintf("%.1fMiB", float64(bytes)/mib)
}

// damagedFrom counts the damaged chunks from a number on.
func (s *Store) damagedFrom(first format.ChunkNumber) (n int) {
	for i := int(first); i < len(s.pool.Chunks); i++ {
		if s.pool.Chunks[i].State == space.Damaged {
			n++
		}
	}
	return n
}

// Resize begins to change the length of the partition. ResizeState says when that has ended. If the process dies
// before, the partition has either length, or that of a step (nextBytes).
//
// Errors: those of CheckResize.
func (s *Store) Resize(o ResizeOptions) error {
	if err := s.CheckResize(o.PartitionBytes, len(o.SegTbl)); err != nil {
		return err
	}
	if most := max(o.PartitionBytes, s.cfg.PartitionBytes); o.ExtentBytes < most {
		return fmt.Errorf("%w to %d bytes: the extent has %d, want at least %d", ErrResize, o.PartitionBytes,
			o.ExtentBytes, most)
	}
	r := &s.resize
	*r = resizeState{o: o, from: s.cfg.PartitionBytes, before: s.tbl.Memory()}
	switch n := s.chunksIn(o.PartitionBytes); {
	case o.PartitionBytes > r.from:
		r.stage = resizeCommit
		if o.ExtentBytes != r.from {
			r.stage = resizeNote
		}
	case int(n) == len(s.pool.Chunks):
		r.stage = resizeCommit
	default:
		r.stage, r.next = resizeNarrow, format.ChunkNumber(n)
	}
	s.tbl.SetMemory(o.SegTbl)
	return nil
}

// ResizeState returns how far a resize is.
func (s *Store) ResizeState() ResizeState {
	r := &s.resize
	st := ResizeState{Running: r.stage != resizeNone, ToBytes: r.o.PartitionBytes, Err: r.err}
	if r.stage == resizeNarrow || r.stage == resizeEmpty {
		n := int64(len(s.pool.Chunks)) - s.chunksIn(r.o.PartitionBytes)
		st.DoneBytes, st.TotalBytes = int64(s.pool.Beyond())*s.cfg.ChunkBytes, n*s.cfg.ChunkBytes
	}
	return st
}

// CancelResize ends a shrink that is still emptying chunks. The partition keeps its size.
func (s *Store) CancelResize() {
	if r := &s.resize; r.stage == resizeNarrow || r.stage == resizeEmpty {
		s.failResize("it was cancelled")
	}
}

// failResize ends a resize that has not been committed.
func (s *Store) failResize(format string, args ...any) {
	r := &s.resize
	r.err = fmt.Errorf("%w to %s: %s", ErrResize, inMiB(r.o.PartitionBytes), fmt.Sprintf(format, args...))
	s.tbl.SetMemory(r.before)
	r.stage = resizeWiden
	s.progress++
}

// emptying reports that chunks are to be emptied for a resize.
func (r *resizeState) emptying() bool { return r.stage == resizeEmpty && !r.clean }

// resizeStep continues a resize.
func (s *Store) resizeStep() {
	r := &s.resize
	switch r.stage {
	case resizeNone:
		return
	case resizeNarrow, resizeEmpty:
		s.emptyStep()
	case resizeNote:
		s.writeNote()
	case resizeWiden:
		if s.sweep(s.pool.Widen) {
			r.stage = resizeNone
			s.progress++
		}
	}
	if r.stage == resizeCommit && s.ckpt.stage == ckptIdle {
		s.commitStep()
	}
}

// emptyStep continues to empty the chunks from the limit on. Victims are chosen by nextVictim.
func (s *Store) emptyStep() {
	r := &s.resize
	if s.stopping {
		s.failResize("the store is being closed")
		return
	}
	_, high := s.budget.Watermarks()
	s.pool.Keep(int(high/s.cfg.ChunkBytes) + 2)
	for l := range s.logs {
		if log := &s.logs[l]; int(log.chunk) >= s.pool.Limit() && !log.opening && s.pool.Below() > 0 {
			s.closeChunk(l)
		}
	}
	n := s.pool.Beyond()
	all := n == len(s.pool.Chunks)-s.pool.Limit()
	// When all are empty, what is awaited is an I/O or a checkpoint. They end in time, however slow the drive is.
	if n != r.empty || r.sinceNS == 0 || all {
		r.empty, r.sinceNS = n, s.now
	} else if s.now-r.sinceNS > stuckNS && s.compact.nothing {
		s.failResize("no room was won for a minute: %d of %d chunks behind that end are empty", n,
			len(s.pool.Chunks)-s.pool.Limit())
		return
	}
	s.wake(r.sinceNS + stuckNS + 1)
	switch {
	case r.stage == resizeNarrow:
		if s.pool.Narrow(int(s.chunksIn(r.o.PartitionBytes))) {
			r.stage = resizeEmpty
		}
		s.wake(s.now + 1)
		s.progress++
	case all:
		if s.ckpt.stage == ckptIdle && !(s.bad.busy && int(s.bad.chunk) >= s.pool.Limit()) {
			s.takeAway()
		}
	case r.clean && s.ckpt.stage == ckptIdle && !s.ckpt.wanted:
		r.clean = false // a checkpoint has ended since, or none was needed
		s.wake(s.now + 1)
	}
}

// takeAway removes the chunks from the limit on, which hold nothing: for the store they are gone from now on, and with
// the next checkpoint for recovery as well.
func (s *Store) takeAway() {
	first := format.ChunkNumber(s.pool.Limit())
	awaited := s.audit.awaited[:0]
	for _, i := range s.audit.awaited {
		if i < first {
			awaited = append(awaited, i)
		}
	}
	s.audit.awaited = awaited
	if s.compact.suspect >= first {
		s.compact.suspect = none
	}
	s.pool.Truncate()
	s.resize.stage = resizeCommit
}

// resizeVictim returns the next chunk to empty for a resize, or none.
func (s *Store) resizeVictim() format.ChunkNumber {
	r := &s.resize
	low, _ := s.budget.Watermarks()
	switch {
	case !r.emptying() || s.headroom() <= low || s.budget.Scarce():
		return none
	case s.now < r.restNS:
		s.wake(r.restNS)
		return none
	}
	if int(r.next) < s.pool.Limit() || int(r.next) >= len(s.pool.Chunks) {
		r.next, r.left = format.ChunkNumber(s.pool.Limit()), space.Left{}
	}
	keys, values := s.liveInVictims()
	mostKeys, mostValues := s.placeForKeys()-keys, s.placeForMoved()*s.budget.Fill/s.pool.Bytes()-values
	v, next := s.pool.EmptyNext(r.next, mostKeys, mostValues, &r.left)
	if r.next = next; v != none {
		return v
	}
	if int(next) < len(s.pool.Chunks) {
		s.wake(s.now + 1)
		return none
	}
	r.restNS = s.now + emptyRestNS
	s.wake(r.restNS)
	switch left := r.left; {
	case left.Used > 0: // it is not ready to be emptied, or there is no room at the moment
	case left.Damaged > 0:
		s.failResize("%d chunks behind that end hold what is left of damaged records, which cannot be moved: "+
			"see jbofctl kv check and kv repair", left.Damaged)
	case left.Held > 0:
		r.clean, s.ckpt.wanted, s.ckpt.full = true, true, true
		s.progress++
	}
	return none
}

// notEmptied notes that a victim could not be emptied, after so many tries.
func (s *Store) notEmptied(i format.ChunkNumber, tries int) {
	if s.resize.emptying() && int(i) >= s.pool.Limit() && tries >= maxEmptyTries {
		s.failResize("chunk %d behind that end cannot be read: see the log for errors of the drive", i)
	}
}

// commitStep makes the new size that of the next checkpoint, or ends the resize when that is durable.
func (s *Store) commitStep() {
	r := &s.resize
	switch {
	case format.Superblock(s.super).PartitionBytes() != s.cfg.PartitionBytes:
		s.ckpt.wanted = true // the checkpoint was abandoned
	case !s.sweep(s.pool.Widen): // not all chunks that were added with that size can be used yet
	case s.cfg.PartitionBytes == r.o.PartitionBytes:
		r.stage = resizeNone
		s.progress++
	case s.stopping: // the size that it has by now counts: the last checkpoint may have been written
		r.err = fmt.Errorf("%w to %s: the store is being closed", ErrResize, inMiB(r.o.PartitionBytes))
		r.stage = resizeNone
		s.progress++
	default:
		to := s.nextBytes()
		if n := int(s.chunksIn(to)); n > len(s.pool.Chunks) {
			s.pool.Extend(n)
		}
		s.cfg.PartitionBytes, r.noteAfter = to, to != r.o.ExtentBytes
		s.ckpt.wanted, s.ckpt.full = true, true
		s.sizeCheckpoint()
	}
}

// nextBytes is the length that the partition gets with the next checkpoint. One that is to grow much gets there in
// steps: a checkpoint describes all chunks, and has to find room in those that there are.
func (s *Store) nextBytes() int64 {
	r := &s.resize
	to := r.o.PartitionBytes
	if to <= s.cfg.PartitionBytes {
		return to
	}
	n := s.budget.ChunksFor(max(s.budget.CheckpointChunks, s.pool.Free), len(s.tbl.Bytes()))
	if s.cfg.growMost > 0 {
		n = min(n, int64(len(s.pool.Chunks))+s.cfg.growMost)
	}
	most := format.AreaStart + format.SuperblockBytes + n*s.cfg.ChunkBytes
	return min(to, max(most, s.cfg.PartitionBytes+s.cfg.ChunkBytes))
}

// sealSuper completes the next superblock of a checkpoint. The first one for a new size has an even generation, so that
// it is the one at the end.
func (s *Store) sealSuper() {
	sb := format.Superblock(s.super)
	generation := sb.Generation() + 1
	if sb.PartitionBytes() != s.cfg.PartitionBytes {
		generation += generation & 1
	}
	sb.SetPartitionBytes(s.cfg.PartitionBytes)
	sb.SetGeneration(generation)
	sb.SetWall(s.wall)
	s.nameCheckpoint()
	sb.Seal()
}

// superblocks is how many superblocks end a checkpoint: two, and a note if the partition is to end somewhere else than
// its extent.
func (s *Store) superblocks() int {
	if s.resize.noteAfter {
		return 3
	}
	return 2
}

// superPlace is where the next superblock of a checkpoint is written.
func (s *Store) superPlace() units.ExtentOffset {
	if s.ckpt.copies == 2 {
		return s.resize.end()
	}
	return format.SuperblockOffset(format.Superblock(s.super).Generation(), s.cfg.PartitionBytes)
}

// end is the place at the end of the extent.
func (r *resizeState) end() units.ExtentOffset { return format.SuperblockOffset(2, r.o.ExtentBytes) }

// writeNote writes a note at the end of the extent, which was extended, that the partition does not end there. No
// checkpoint begins meanwhile.
func (s *Store) writeNote() {
	switch r, c := &s.resize, &s.ckpt; {
	case c.stage != ckptIdle || c.busy || s.drops.writing:
	case s.now < r.retryNS:
		s.wake(r.retryNS)
	default:
		format.Superblock(s.super).Seal()
		c.busy = true
		s.io(ioNote, 0, pipeline.Write, r.end(), s.super)
	}
}

// noteWritten ends the write of a note.
func (s *Store) noteWritten(ok bool) {
	s.ckpt.busy = false
	if !ok {
		s.resize.retryNS = s.now + retryNS
		return
	}
	s.resize.stage = resizeCommit
}
