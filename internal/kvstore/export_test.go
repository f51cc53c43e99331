package kvstore

import (
	"flag"
	"fmt"
	"iter"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/buildtags"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// What the tests of this package and of kvstore_test share.

var seedFlag = flag.Uint64("seed", 0, "seed of the random tests; 0: fixed ones, and fresh ones beside them in the "+
	"heavy tests")

// LongFlag lets the heavy tests do all that they could.
var LongFlag = flag.Bool("long", false, "crash at every write, flip every bit: minutes instead of seconds")

// FixedSeed returns the seed given by -seed, or 1.
func FixedSeed(t testing.TB) uint64 {
	t.Helper()
	seed := max(1, *seedFlag)
	t.Logf("-seed %d", seed)
	return seed
}

// Seeds yields the n seeds of a heavy test: fixed ones and fresh ones in turn, or with -seed that one and those after
// it. Each is logged before it is used, so that the last one in the log of a failed test repeats the failure as -seed.
// The race detector gets the first one only: see PlainOnly.
func Seeds(t testing.TB, n int) iter.Seq[uint64] {
	// Tests derive variants from remainders of the seed, so a fresh seed has the same remainders as the fixed seed
	// before it.
	fixed, fresh := uint64(1), 1+rand.Uint64N(1<<40)*840
	if *seedFlag != 0 {
		fixed, fresh = *seedFlag, *seedFlag
	}
	if buildtags.Race {
		n = 1
	}
	return func(yield func(uint64) bool) {
		for i := range uint64(n) {
			seed := fixed + i
			if i%2 == 1 {
				seed = fresh + i
			}
			t.Logf("-seed %d", seed)
			if !yield(seed) {
				return
			}
		}
	}
}

// Sized returns full in builds that check invariants and in long runs, otherwise part: `make invariants` runs the heavy
// tests at their full size, `make test` at a smaller one.
func Sized[T any](full, part T) T {
	if buildtags.Invariants || *LongFlag {
		return full
	}
	return part
}

// PlainOnly skips a test under the race detector, which makes it ten times slower and finds nothing in a machine that
// one goroutine uses. The build without it runs the test, with -tags invariants as well.
func PlainOnly(t *testing.T) {
	t.Helper()
	if buildtags.Race {
		t.Skip("the plain build runs it")
	}
}

// Recount compares the counters with what the SegTbl refers to on the disk. exact says that nothing is in progress and
// no write has failed, so that the counters must match exactly; otherwise they may be too high.
func (s *Store) Recount(disk []byte, exact bool) error {
	live := make([]int64, len(s.pool.Chunks))
	objects := int64(0)
	for n := range s.tbl.Len() {
		e := s.tbl.Get(n)
		if e == 0 {
			continue
		}
		seg := format.Segment(disk[e.Offset():])
		if err := seg.Check(s.pool.Seed(e.Offset())); err != nil {
			return fmt.Errorf("segment %d: %w", n, err)
		}
		live[s.pool.Of(e.Offset())] += int64(seg.ExtentBytes())
		here := false
		for at := seg.First(); at < seg.LengthBytes(); {
			it := seg.Item(at)
			at += it.LengthBytes()
			if it.HasKey() {
				if here = s.tbl.Segment(format.HashKey(s.hashSeed, it.Key())) == n && !it.Gone(); here {
					objects++
				}
			}
			if !here || it.ValueLen() == 0 {
				continue
			}
			live[s.pool.Of(it.ValueOffset())] += int64(it.RecordBytes())
		}
	}
	total, free, usable := int64(0), 0, 0
	for i := range s.pool.Chunks {
		c := s.pool.Chunks[i]
		if c.State != space.Withdrawn && c.State != space.Bad && i < s.pool.Limit() {
			usable++
		}
		if c.State == space.Free && i < s.pool.Limit() {
			free++
		}
		if c.State == space.Free || c.State == space.Withdrawn {
			c.Live = 0
		}
		total += int64(c.Live)
		if int64(c.Live) < live[i] || exact && int64(c.Live) != live[i] {
			return fmt.Errorf("chunk %d (state %d, kind %d) counts %d bytes live, has %d", i, c.State, c.Kind, c.Live,
				live[i])
		}
	}
	if total != s.pool.Live || free != s.pool.Below() {
		return fmt.Errorf("%d bytes live in %d free chunks, want %d in %d", s.pool.Live, s.pool.Free, total, free)
	}
	if usable != s.pool.Usable() || s.resize.stage == resizeNone && usable != len(s.pool.Chunks)-s.pool.Bad {
		return fmt.Errorf("%d of %d chunks can be used, %d are bad, want %d", usable, len(s.pool.Chunks), s.pool.Bad,
			s.pool.Usable())
	}
	if s.pool.Wrong != 0 {
		return fmt.Errorf("more bytes have died than lived in a chunk, %d times", s.pool.Wrong)
	}
	if exact && objects != s.objects {
		return fmt.Errorf("%d objects, want %d", s.objects, objects)
	}
	return nil
}

// Hurts reports whether the segment or the value of a key has one of n bytes at an offset in the partition.
func (s *Store) Hurts(disk []byte, at, n int64, key []byte) bool {
	within := func(offset units.ExtentOffset, length int) bool {
		return at+n > int64(offset) && at < int64(offset)+int64(length)
	}
	e := s.tbl.Get(s.tbl.Segment(format.HashKey(s.hashSeed, key)))
	if e == 0 {
		return false
	}
	seg := format.Segment(disk[e.Offset():])
	if within(e.Offset(), seg.ExtentBytes()) {
		return true
	}
	i := seg.Find(key)
	if i == 0 {
		return false
	}
	for n, _ := seg.Pieces(i); n > 0; n-- {
		it := seg.Item(i)
		if it.ValueLen() > 0 && within(it.ValueOffset(), it.RecordBytes()) {
			return true
		}
		i += it.LengthBytes()
	}
	return false
}

// SegmentAt returns the sound segment that begins at an offset in the partition, or nil.
func (s *Store) SegmentAt(disk []byte, at int64) format.Segment {
	seg := format.Segment(disk[at:])
	if !seg.Begins() || seg.Check(s.pool.Seed(units.ExtentOffset(at))) != nil {
		return nil
	}
	return seg
}

// ValueAt is where the first byte of the value of a key is, or of its first piece.
func (s *Store) ValueAt(disk []byte, key []byte) int64 {
	seg := format.Segment(disk[s.tbl.Get(s.tbl.Segment(format.HashKey(s.hashSeed, key))).Offset():])
	return int64(seg.Item(seg.Find(key)).ValueOffset()) + format.ValueHeaderBytes
}

// KindAt is the kind of the chunk at an offset in the partition, and whether it is in use. What is in no chunk is not.
func (s *Store) KindAt(at int64) (kind format.Kind, used bool) {
	if !s.pool.Contains(units.ExtentOffset(at)) {
		return 0, false
	}
	c := &s.pool.Chunks[s.pool.Of(units.ExtentOffset(at))]
	return c.Kind, c.State != space.Free
}

// SegmentOf is the number of the segment of a key.
func (s *Store) SegmentOf(key []byte) uint32 { return s.tbl.Segment(format.HashKey(s.hashSeed, key)) }

// Place is where the segment of a key begins, and the epoch of its chunk. Both are 0 if it has no record.
func (s *Store) Place(key []byte) (offset int64, epoch uint64) {
	e := s.tbl.Get(s.tbl.Segment(format.HashKey(s.hashSeed, key)))
	if e == 0 {
		return 0, 0
	}
	return int64(e.Offset()), s.pool.Chunks[s.pool.Of(e.Offset())].Epoch.N()
}

// Extent is the number of pieces that a value of n bytes has, and the length of their records.
func (s *Store) Extent(n int) (pieces, bytes int) { return s.pieces(n), s.extentBytes(n) }

// Sweep sets how many chunks a checkpoint goes through in one turn.
func (s *Store) Sweep(chunks int) {
	if s.pool != nil {
		s.pool.Sweep = chunks
	}
}

// KeyLogChunks is how many chunks the key log has.
func (s *Store) KeyLogChunks() int64 { return int64(s.pool.KeyChunks) }

// State describes a store that is stuck.
func (s *Store) State() string {
	out := fmt.Sprintf("ios %d, free %d need %d reserve %d, ckpt %d busy %v spent %d retry %d, nothing %v futile %d "+
		"running %d failed %d, %d keys move, dirty %d", len(s.ios)-len(s.freeIO), s.pool.Free,
		s.budget.CheckpointChunks, s.budget.Reserve(), s.ckpt.stage, s.ckpt.busy, s.pool.Obsolete,
		s.ckpt.retryNS-s.now, s.compact.nothing, s.compact.futile, s.compact.running, s.compact.failed, s.split.n,
		s.dirty.N)
	for i := range s.compact.slots {
		sl := &s.compact.slots[i]
		out += fmt.Sprintf("\nslot %d: busy %v scrub %v chunk %d failed %v running %d", i, sl.busy, sl.scrub, sl.Chunk,
			sl.Failed, sl.running)
	}
	for i := range s.pool.Chunks {
		c := &s.pool.Chunks[i]
		out += fmt.Sprintf("\nchunk %d: state %d kind %d live %d pins %d", i, c.State, c.Kind, c.Live, c.Pins)
	}
	for l := range s.logs {
		log := &s.logs[l]
		out += fmt.Sprintf("\nlog %d: chunk %d tail %d opening %v starved %v open %d sealed %d free %d inflight %d", l,
			log.chunk, log.tail, log.opening, log.starved, log.open, log.sealed.N, log.free.N, log.inflight)
	}
	for i := range s.groups {
		if g := &s.groups[i]; g.tries > 0 {
			out += fmt.Sprintf("\ngroup %d of log %d: a block in chunk %d is restored, %d tries, the next in %d",
				i, g.log, g.chunk, g.tries, g.retryNS-s.now)
		}
	}
	for _, a := range s.compact.avoided {
		if a.pinned || s.isDamaged(&a) {
			out += fmt.Sprintf("\nchunk %d is avoided for %d, pinned %v", a.chunk, a.dueNS-s.now, a.pinned)
		}
	}
	for _, head := range s.table {
		for i := head; i != none; i = s.segs[i].chain {
			a := &s.segs[i]
			out += fmt.Sprintf("\nsegment %d (%d): state %d dirty %v held %v force %v waiting %d writing %d", a.number,
				i, a.state, a.dirty, a.held, a.force, a.waiting.N, a.writing.N)
			for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
				out += fmt.Sprintf("\n  op %d: kind %d ready %v group %d", o, s.ops[o].kind, s.ops[o].ready,
					s.ops[o].parts[0].group)
			}
		}
	}
	return out
}

// NearEpoch says that n epochs are left of those that have 32 bits, or fewer.
func (s *Store) NearEpoch(n uint64) { s.pool.LastEpoch = max(s.pool.LastEpoch, 1<<32-1-n) }

// MaxChunks is the number of chunks of the largest partition, MaxEpoch the greatest epoch.
const (
	MaxChunks = format.MaxPartitionBytes / (4 << 20)
	MaxEpoch  = space.MaxEpoch
)

// LastEpoch is the epoch of the chunk that was opened last.
func (s *Store) LastEpoch() uint64 { return s.pool.LastEpoch }

// UseOf says what a chunk is used for, seen from the last checkpoint.
func (s *Store) UseOf(i format.ChunkNumber) string {
	c := &s.pool.Chunks[i]
	last := format.Summary(s.ckpt.summary[:]).LastEpoch()
	kind := map[format.Kind]string{format.KeyLog: "keys", format.ValueLog: "values", format.Checkpoint: "checkpoint"}
	switch {
	case c.Epoch.N() == 0:
		return "never used"
	case c.State == space.Free && c.Epoch.N() > last:
		return "freed since"
	case c.State == space.Free:
		return "free"
	case c.Kind == format.Checkpoint:
		return "checkpoint"
	case c.State == space.Obsolete:
		return kind[c.Kind] + ", obsolete"
	case c.Epoch.N() > last:
		return kind[c.Kind] + ", opened since"
	case s.wasOpen(c.Epoch.N()):
		return kind[c.Kind] + ", open then"
	}
	return kind[c.Kind] + ", sealed"
}

// wasOpen reports whether the chunk of that epoch was open when the last checkpoint began.
func (s *Store) wasOpen(epoch uint64) bool {
	for l := range numLogs {
		if e, _ := format.Summary(s.ckpt.summary[:]).Open(l); e == epoch {
			return true
		}
	}
	return false
}

// KeyLogSince returns the offsets in the partition where the parts of the key log begin and end that were written since
// the last checkpoint, in order.
func (s *Store) KeyLogSince() (parts [][2]int64) {
	sum := format.Summary(s.ckpt.summary[:])
	first, from := sum.Open(keyLog)
	if first == 0 {
		first = sum.LastEpoch() + 1
	}
	for epoch := first; epoch <= s.pool.LastEpoch; epoch++ {
		for i := range s.pool.Chunks {
			c := &s.pool.Chunks[i]
			if c.Epoch.N() != epoch || c.Kind != format.KeyLog || c.State == space.Free {
				continue
			}
			begin, end := format.ChunkOffset(s.cfg.BlockSize), s.pool.End()
			if first == epoch && from > 0 {
				begin = from
			}
			if s.logs[keyLog].chunk == format.ChunkNumber(i) {
				end = s.logs[keyLog].tail
			}
			parts = append(parts, [2]int64{int64(s.pool.At(format.ChunkNumber(i), begin)),
				int64(s.pool.At(format.ChunkNumber(i), end))})
		}
	}
	return parts
}

// CheckpointPages returns the offsets in the partition of the pages of the last checkpoint.
func (s *Store) CheckpointPages() (pages []int64) {
	sb := format.Superblock(s.super)
	for p := range sb.Pages() {
		c, at := sb.PagePlace(p)
		pages = append(pages, int64(s.pool.At(s.ckpt.chunks[c], at)))
	}
	return pages
}

// FullCheckpoint asks for a checkpoint that is no increment.
func (s *Store) FullCheckpoint() { s.ckpt.wanted, s.ckpt.full = true, true }

// ListChunks lets a store list the chunks that it opens, however few it has.
func (c *Config) ListChunks() { c.many = 1 }

// Eager lets the table become shorter as soon as it has two segments more than it needs.
func (c *Config) Eager() { c.eager = true }

// GrowInSteps lets a partition that grows get there in steps of three chunks.
func (c *Config) GrowInSteps() { c.growMost = 3 }

// MergeState says how far a merge is.
func (s *Store) MergeState() string {
	return [...]string{mergeNone: "none", mergeReads: "reads segments", mergeWrites: "is being written",
		mergeBroken: "broken"}[s.merge.stage]
}

// ListFew lets a block list so many chunks at most.
func (s *Store) ListFew(chunks int) { s.openings.room = chunks }

// Openings returns where the blocks are that list the chunks opened since the last checkpoint, and whether the last one
// says that it may be any chunk.
func (s *Store) Openings() (offsets []int64, any bool) {
	for n := s.openings.first; n <= s.openings.buf.Sequence(); n++ {
		at, _ := format.OpeningsOffset(n, s.cfg.BlockSize)
		offsets = append(offsets, int64(at))
	}
	return offsets, s.openings.any
}

// Unlisted returns the chunks opened since the last checkpoint that may be used, and that no block on the disk lists
// which the next opening would take for a part of the list. Before the first checkpoint it does not know them.
func (s *Store) Unlisted(disk []byte) (unlisted []format.ChunkNumber) {
	o := &s.openings
	if s.ckpt.stage != ckptIdle || o.any || s.stats.Checkpoints == 0 {
		return nil
	}
	listed := map[format.ChunkNumber]bool{}
	for n := o.first; ; n++ {
		at, _ := format.OpeningsOffset(n, s.cfg.BlockSize)
		b := format.Openings(disk[at:][:s.cfg.BlockSize])
		if b.Check() != nil || b.Sequence() != n {
			break
		}
		for i := range b.Len() {
			listed[b.Chunk(i)] = true
		}
	}
	for i := range s.pool.Chunks {
		c, n := &s.pool.Chunks[i], format.ChunkNumber(i)
		opening := slices.ContainsFunc(o.pending, func(p opening) bool { return p.chunk == n })
		last := format.Summary(s.ckpt.summary[:]).LastEpoch()
		if c.Epoch.N() > last && c.State != space.Free && !opening && !listed[n] {
			unlisted = append(unlisted, n)
		}
	}
	return unlisted
}

// States says how far the checkpoint and the split are.
func (s *Store) States() (checkpoint, split string) {
	checkpoint = [...]string{ckptIdle: "none", ckptBarrier: "waits for the key log", ckptNote: "notes what is live",
		ckptHeader: "opens a chunk", ckptPage: "writes pages", ckptSuper: "writes superblocks",
		ckptEnd: "frees chunks"}[s.ckpt.stage]
	switch sp := &s.split; {
	case sp.n == 0:
		split = "none"
	case sp.writing && sp.again:
		split = "will be repeated"
	case sp.writing && sp.ended > 0:
		split = "written in part"
	case sp.writing:
		split = "is being written"
	case sp.broken:
		split = "broken"
	case sp.made:
		split = "waits to be repeated"
	default:
		split = "reads sources"
	}
	return checkpoint, split
}

// Table returns the entries of the SegTbl, and whether the last checkpoint is an increment.
func (s *Store) Table() (entries []byte, increment bool) {
	sb := format.Superblock(s.super)
	return s.tbl.Bytes(), sb.Pages() > sb.FullPages() && sb.FullPages() > 0
}

// Position is the position of a key.
func (s *Store) Position(key []byte) uint64 { return bits.Reverse64(format.HashKey(s.hashSeed, key)) }

// LacksCheckpoint reports that writes wait for no checkpoint, because none could be written for so long.
func (s *Store) LacksCheckpoint() bool { return s.lacksCheckpoint() }

// PatienceNS is how long writes wait for what fails.
const PatienceNS = patienceNS

// DropsLeft is how many Drops are on the list.
func (s *Store) DropsLeft() int { return len(s.drops.list) }

// HoldMerges lets no merge begin before a time, and none when the table has as many segments as it needs, or least.
func (s *Store) HoldMerges(untilNS, least int64) { s.merge.retryNS, s.merge.least = untilNS, least }

// Occupied is the number of segments that are not empty.
func (s *Store) Occupied() int { return s.tbl.Occupied() }
