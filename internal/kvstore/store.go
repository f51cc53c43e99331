// Package kvstore is the key-value store of one partition of an SSD: a key log of segments, a value log, and a table of
// segments in DRAM (SegTbl), 5 bytes each.
//
//	Submit ──> op ──> [value group ──> value log] ──> segment ──> key group ──> key log ──> Reply
//	            │                                      │   ^                      │
//	            │ GET, EXIST: read segment, read value  └read┘      SegTbl <── commit
//
// A Store is a machine: it has no I/O, clock, lock or goroutine. Its driver passes requests (Submit) and completions
// (Complete) to it and then calls Turn, which appends the device I/Os that the store asks for and the replies. Only one
// goroutine at a time may use a Store.
//
// A Store allocates its memory while the partition is opened. While it serves it allocates only where something is
// larger than ever before: the table of I/Os under way, and as many longer buffers as segments of more than 4 KiB were
// in use at once. Both stay. TestServingAllocatesNothing and TestSplitsAllocateNothing measure it.
//
// A PUT appends its value to the open group of the value log and reads the segment of its key at the same time. When
// the value is durable, all writers of the segment whose values are durable change it together, and it is written once,
// into the open group of the key log. The record of the segment is the commit: when it is durable the SegTbl is changed
// and the writers are answered. Therefore the values of every segment that recovery finds are there.
//
// Compaction moves values and segments as one more writer of their segments.
//
// testdata/transcripts shows all this event by event.
//
// Source: LEED (SIGCOMM'23), sections 3.2 to 3.4. Deviations: the logs are lists of chunks from one pool instead of two
// circular buffers, so that nobody has to divide a partition beforehand and compaction can choose its victim; both logs
// are packed; the SegTbl grows. What LEED calls S parallel sub-compactions are the Config.Compactions victims that are
// emptied at once. Reasons and figures are in docs/decisions/0007-kvstore-layout.md.
package kvstore

import (
	"errors"
	"fmt"
	"slices"

	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/list"
)

// ErrNoMemory is wrapped by the errors of New and Err when Config.Alloc has no memory for a buffer of the store.
var ErrNoMemory = space.ErrNoMemory

// Loss and LossError are those of package recovery.
type (
	Loss      = recovery.Loss
	LossError = recovery.LossError
)

// ErrPartition is wrapped by Err when the partition cannot be opened.
var ErrPartition = errors.New("kvstore: cannot open the partition")

const (
	none = -1
	// retryNS is how long the store waits after a failed checkpoint, or a failed read of a victim, before it tries
	// again.
	retryNS = 100e6
)

// Stats are counters since New, except Objects, Segments, LiveBytes and the chunks, which are current values.
type Stats struct {
	Objects, Segments, LiveBytes int64
	// KeyBytes of LiveBytes are in segments: keys, tombstones and identities of writes. It is a current value.
	KeyBytes int64
	// UserBytes are the bytes of values that were put. The others were written for them: KeyLogBytes, ValueLogBytes (by
	// Puts), MovedBytes (by compaction), and CheckpointBytes (with chunk headers and superblocks).
	UserBytes, KeyLogBytes, ValueLogBytes, MovedBytes, CheckpointBytes int64
	// Reads and Writes are I/Os for requests. A group counts once.
	Reads, Writes int64
	// Compactions are chunks that were emptied, Checkpoints those that became durable, Splits segments that were added,
	// Merges those that were taken away because their keys went to others.
	Compactions, Checkpoints, Splits, Merges int64
	// Expired counts objects that have expired, or that a Drop has covered, and were left out for that reason.
	Expired int64
	// Damaged counts reports of damaged records. Scrubbed is the number of bytes that the scrub has read.
	Damaged, Scrubbed int64
	// LostHeaders is how many chunk headers could not be read, or were damaged, when the partition was opened. Nothing
	// is lost with them.
	LostHeaders int64
	// FreeChunks of Chunks are free. BadChunks are not used, because they could not be read. Each has ChunkBytes.
	FreeChunks, BadChunks, Chunks, ChunkBytes int64
}

type phase uint8

const (
	unopened phase = iota
	ready
	failed
)

// Store is the key-value store of one partition, as a state machine: see the package comment.
type Store struct {
	cfg   Config
	phase phase
	err   error
	now   int64
	out   *Actions

	hashSeed uint64
	// pieceBytes is the length of the longest value that is written in one piece, a multiple of ValueUnit.
	pieceBytes int
	tbl        lookup.SegTbl
	// objects is the number of keys. After a crash it may be off by the requests that were in progress.
	objects int64
	// version is the version of the next segment. Versions ascend by one in the key log. A value has the version that
	// the next segment had when the value was written.
	version uint64
	// clock is the greatest object version that was given. Versions of objects ascend by one in the order in which
	// segments are changed, except those that requests choose.
	clock uint64
	// wall is the time in unix seconds, as far as the driver has told.
	wall uint32
	// gapless is the version since which no write of the key log has failed or was cut off.
	gapless uint64
	stats   Stats

	ops     []op
	opLinks list.Links
	freeOps list.List // for requests
	freeInt list.List // for compaction
	// freeCopy are those for entries of CopyIns, of which there are copying.
	freeCopy list.List
	// unchecked are entries of CopyIns that wait for the check of the value that is stored.
	unchecked list.List
	copyIns   [MaxCopyIns]copyIn
	copying   int
	copyWork  int // what this Turn may still do for CopyIns: see copyWorkMost
	segs      []activeSeg
	freeSeg   int32
	// table is a hash table of the active segments, by segment number. Its entries are the heads of chains.
	table []int32
	long  longBuffers
	// dirty are active segments that have to be written.
	dirty list.List
	// unloaded are active segments for which there was no memory. Their writers end with NoMemory in the next Turn.
	unloaded list.List
	// segLinks are the links of dirty and unloaded.
	segLinks list.Links

	// reads handles Get, Exist and List.
	reads *lookup.Machine

	ios    []ioRef
	freeIO []uint32

	pool   *space.Pool
	budget space.Budget
	logs   [numLogs]logState
	// changesBuf is where the changes of a segment are encoded, identities where those of a key are merged.
	changesBuf []byte
	identities []format.Identity
	groups     []group
	groupLinks list.Links
	// restoring is the number of groups whose write has failed and whose first block is being written again, shared
	// that of groups with group.shares.
	restoring, shared int
	// restored are the blocks that were restored last.
	restored []restoredBlock

	// super is the superblock as it was last written or read.
	super    []byte
	openings openings
	split    splitState
	merge    mergeState
	bad      badState
	compact  compactState
	early    earlyState
	ckpt     ckptState
	scrub    scrubState
	audit    auditState
	expiry   expiryState
	resize   resizeState
	drops    dropState
	// unreadable are segments that could not be read.
	unreadable unreadables
	opening    *openState
	// failures counts writes of key groups that failed, so that their outcome is indeterminate: a restart may find them
	// or not.
	failures uint64
	// badWriteNS is when a write failed last; 0: none has. badWrite: one has since the last Turn.
	badWriteNS int64
	badWrite   bool
	// killed counts the bytes that requests have made obsolete, in both logs.
	killed int64
	// progress increases with everything that may let another part of the store continue within a Turn, besides
	// pool.Changes.
	progress uint64
	// stopping: no more requests come. stopped: the last checkpoint is durable.
	stopping, stopped bool
	// settling: a checkpoint is being written before requests are served, because the device has a volatile write
	// cache, or had one when the partition was last used, because something is lost, or because the superblocks are of
	// an older version, whose programs would take what is written from now on for damage.
	settling bool
	// loss is what was lost when the partition was opened, with Config.AcceptLoss; nil: nothing.
	loss *recovery.Loss
}

// New returns a Store that opens the partition, or formats it. The I/Os that this takes are among the actions of the
// next Turns. Ready and Err report the outcome.
//
// Errors: ErrConfig naming the field; ErrNoMemory.
func New(cfg Config) (*Store, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg, out: &Actions{}, opening: &openState{}}
	s.compact.suspect = none
	total := cfg.Requests + maxMoves + copyWrites + maxEarly
	s.ops, s.opLinks = make([]op, total), make(list.Links, total)
	s.freeOps, s.freeInt, s.freeCopy, s.early.free = list.None, list.None, list.None, list.None
	s.dirty, s.unloaded, s.unchecked = list.None, list.None, list.None
	for i := range s.ops {
		s.ops[i].parts = [2]part{noPart, noPart}
		free := &s.early.free
		switch {
		case i < cfg.Requests:
			free = &s.freeOps
		case i < cfg.Requests+maxMoves:
			free = &s.freeInt
		case i < cfg.Requests+maxMoves+copyWrites:
			free = &s.freeCopy
		}
		s.opLinks.Push(free, int32(i))
	}
	s.segs = make([]activeSeg, total+2*maxSplits)
	s.segLinks = make(list.Links, len(s.segs))
	s.freeSeg = none
	for i := range s.segs {
		s.segs[i].chain = s.freeSeg
		s.freeSeg = int32(i)
	}
	s.table = make([]int32, 1024)
	for i := range s.table {
		s.table[i] = none
	}
	mem := space.Buffers{Alloc: cfg.Alloc}
	s.super = mem.Take("the superblock", format.SuperblockBytes)
	s.changesBuf = make([]byte, 0, 2*format.MaxChangesBytes)
	s.identities = make([]format.Identity, 0, format.MaxIdentities+1)
	s.makeCopyIndexes()
	s.ckpt.buf = mem.Take("a checkpoint page", format.PageBytes)
	if mem.Err != nil {
		return nil, mem.Err
	}
	if cfg.Format {
		if err := s.adopt(recovery.Fresh(s.super, &recovery.FormatConfig{
			BlockSize: cfg.BlockSize, PartitionBytes: cfg.PartitionBytes, ChunkBytes: cfg.ChunkBytes,
			HashSeed: cfg.HashSeed, UUID: cfg.UUID, SegTbl: cfg.SegTbl,
		})); err != nil {
			if errors.Is(err, ErrNoMemory) {
				return nil, err
			}
			return nil, fmt.Errorf("%w: %w", ErrConfig, err)
		}
	}
	return s, nil
}

// adopt makes the image, which recovery or formatting has produced, the state of the store. It allocates the buffers
// here and not in New, because their sizes depend on what the superblock says.
//
// Errors: ErrPartition if the partition has too few chunks; ErrNoMemory.
func (s *Store) adopt(image *recovery.Image) error {
	c, sb := &s.cfg, image.Super
	c.BlockSize, c.ChunkBytes, c.UUID, c.PartitionBytes = sb.BlockSize(), sb.ChunkBytes(), sb.UUID(),
		sb.PartitionBytes()
	copy(s.super, sb)
	s.hashSeed = sb.HashSeed()
	s.tbl, s.pool, s.objects, s.version, s.gapless = image.Table, image.Pool, image.Objects, image.Version,
		image.Version
	s.clock, s.expiry.first, s.merge.allowed = image.Clock, image.FirstExpiry, image.Merges
	s.expiry.identities = !c.Format
	s.ckpt.chunks, s.ckpt.id = image.Checkpoint, sb.Checkpoint()
	s.ckpt.full = len(sb.Chunks(nil)) == 0 || image.Loss != nil || image.LostHeaders > 0
	c.GroupBytes = min(c.GroupBytes, int(c.ChunkBytes/4))
	s.budget = space.NewBudget(s.pool, c.GroupBytes, c.BlockSize)
	s.pieceBytes = int(c.ChunkBytes / chunkPieces)
	s.loss, s.stats.LostHeaders = image.Loss, int64(image.LostHeaders)
	old := sb.Version() != 0 && sb.Version() < format.Version
	s.settling = c.Volatile || sb.VolatileFrom() > 0 || s.loss != nil || old
	s.ckpt.wanted, s.pool.Hold = s.settling, s.pool.Hold || c.Volatile
	s.sizeCheckpoint()
	n, reserve := len(s.pool.Chunks), s.budget.Reserve()
	if n < 2*reserve || n < 24 {
		return fmt.Errorf("%w: a partition of %d bytes has %d chunks of %d, want at least %d", ErrPartition,
			c.PartitionBytes, n, c.ChunkBytes, max(24, 2*reserve))
	}
	mem := space.Buffers{Alloc: c.Alloc}
	// The record that brings a group to GroupBytes is still part of the group. So a group just below that limit must
	// have room for the longest value and for padding to whole blocks.
	longest := s.extentBytes(s.MaxValueBytes())
	valueGroup := format.RoundUp(c.GroupBytes+longest+c.BlockSize, format.SuperblockBytes)
	keyGroup := format.RoundUp(c.GroupBytes, format.SuperblockBytes) + 1<<16 + format.SuperblockBytes
	for l, count := range [numLogs]int{4, 4, 2} {
		log := &s.logs[l]
		*log = logState{chunk: image.Tails[l].Chunk, tail: image.Tails[l].End, open: none, sealed: list.None,
			free: list.None, header: mem.Take("a chunk header", c.BlockSize), last: make([]byte, c.BlockSize)}
		for range count {
			size := valueGroup
			if l == keyLog {
				size = keyGroup
			}
			s.groups = append(s.groups, group{log: uint8(l), buf: mem.Take("a group of records", size)})
			s.groupLinks = append(s.groupLinks, none)
			s.groupLinks.Push(&log.free, int32(len(s.groups)-1))
		}
	}
	s.makeSegments(&mem)
	var err error
	s.reads, err = lookup.New(lookup.Config{
		Host: reader{s}, Table: &s.tbl, Pool: s.pool, HashSeed: s.hashSeed, BlockSize: c.BlockSize,
		Requests: c.Requests, MaxExtentBytes: longest, Alloc: c.Alloc,
	})
	s.restoreWall(sb.Wall())
	s.loadDrops(sb)
	if mem.Err == nil {
		mem.Err = err
	}
	size := recovery.WalkBytes(int(c.ChunkBytes), s.MaxValueBytes())
	for i := range c.Compactions {
		if len(image.Buf) < size {
			image.Buf = mem.Take("compaction", size)
		}
		if mem.Err != nil {
			return mem.Err
		}
		s.compact.slots = append(s.compact.slots,
			slot{index: uint8(i), Walk: recovery.NewWalk(s.pool, c.BlockSize, image.Buf[:size:size])})
		image.Buf = image.Buf[size:]
	}
	for range maxEarly {
		s.early.bufs = append(s.early.bufs, mem.Take("moving values early",
			format.RoundUp(maxEarlyBytes+2*c.BlockSize, format.SuperblockBytes)))
	}
	s.ckpt.header = mem.Take("a chunk header", c.BlockSize)
	s.openBad(&mem)
	s.openings = openings{buf: mem.Take("a list of chunks", c.BlockSize), first: sb.Openings(),
		pending: make([]opening, 0, numLogs+1), on: n > c.many && !c.Volatile}
	if mem.Err == nil {
		s.openings.buf.Begin(image.NextOpenings, c.UUID)
		s.openings.room = s.openings.buf.Room()
	}
	if s.openings.first == 0 {
		s.openings.first = image.NextOpenings
	}
	return mem.Err
}

// sizeCheckpoint tells the budget how long a checkpoint of the table in its current size is.
func (s *Store) sizeCheckpoint() { s.budget.SetTable(len(s.tbl.Bytes())) }

// MaxValueBytes is the length of the longest value that the partition takes: 1 MiB, or less if its chunks have less
// than 2 MiB.
func (s *Store) MaxValueBytes() int { return int(min(format.MaxValue, s.cfg.ChunkBytes/2)) }

// Ready reports that the partition is open, so that requests may be submitted.
func (s *Store) Ready() bool { return s.phase == ready && !s.settling }

// Err returns why the partition could not be opened. In that case nothing was written to it, unless what failed is the
// first checkpoint.
//
// Errors: ErrPartition, wrapping the error of the format's check or of the device, or a LossError; ErrNoMemory.
func (s *Store) Err() error { return s.err }

// Lost returns what was lost when the partition was opened with Config.AcceptLoss, or nil.
func (s *Store) Lost() *Loss { return s.loss }

// Idle reports that no request is in progress and nothing is under way in the background.
func (s *Store) Idle() bool {
	return len(s.ios) == len(s.freeIO) && s.noRequests() && s.freeInt.N == maxMoves && s.dropsIdle() &&
		s.ckpt.stage == ckptIdle && s.restoring == 0 && s.resize.stage == resizeNone
}

// slotsIdle reports whether no chunk is being compacted or scrubbed. A slot that waits between two steps counts as
// busy.
func (s *Store) slotsIdle() bool {
	return !slices.ContainsFunc(s.compact.slots, func(sl slot) bool { return sl.busy })
}

// noRequests reports that no request is in progress, but for Drops.
func (s *Store) noRequests() bool { return s.noWrites() && s.reads.Busy() == 0 }

// noWrites reports that no Put, Delete or CopyIn is in progress.
func (s *Store) noWrites() bool { return s.freeOps.N == s.cfg.Requests && s.copying == 0 }

// Checkpoint asks for a checkpoint.
func (s *Store) Checkpoint() { s.ckpt.wanted = true }

// Stop ends the scrub and asks for a last checkpoint, so that a restart has nothing to replay. No request may be
// submitted afterwards. Those in progress are answered as ever; compaction goes on while there are any, for they may
// wait for the room that it makes. If the device fails, the store retries the checkpoint until the driver gives up.
// Giving up loses nothing: the next start replays the key log.
func (s *Store) Stop() {
	if !s.stopping {
		s.stopping, s.ckpt.beforeStop = true, s.stats.CheckpointBytes
		s.reads.Stopping = true
	}
}

// Stopped reports that the last checkpoint is durable.
func (s *Store) Stopped() bool { return s.stopped && s.Idle() }

// ending reports that the store is to stop and that no writing request is left, so that nobody needs compaction.
func (s *Store) ending() bool { return s.stopping && s.noWrites() }

// logsIdle reports that nothing will be written to the logs.
func (s *Store) logsIdle() bool {
	return s.noRequests() && s.freeInt.N == maxMoves && s.slotsIdle() &&
		s.dirty.N == 0 && s.logs[keyLog].inflight == 0 && s.restoring == 0 && s.split.idle() && s.merge.idle()
}

// LiveBytes is Stats.LiveBytes.
func (s *Store) LiveBytes() int64 { return s.pool.Live }

// Stats returns the counters.
func (s *Store) Stats() Stats {
	st := s.stats
	st.Objects, st.Segments, st.LiveBytes, st.KeyBytes = s.objects, int64(s.tbl.Len()), s.pool.Live, s.pool.KeyLive
	st.Chunks, st.FreeChunks, st.BadChunks = int64(len(s.pool.Chunks)), int64(s.pool.Free), int64(s.pool.Bad)
	st.ChunkBytes = s.cfg.ChunkBytes
	return st
}

// Submit takes a request and reports whether there was room for it. If not, the driver submits it again after a Turn
// with completions.
//
// hot: 0 allocs
func (s *Store) Submit(r *Request) bool {
	invariants.Check(s.phase == ready && !s.stopping, "kvstore: a request to a store that is not ready")
	switch {
	case len(r.Key) < 1 && r.Op != List && !r.Op.IsRange() || len(r.Key) > format.MaxKey:
		s.answer(r.Tag, InvalidKey)
		return true
	case r.Op == Put && len(r.Value) > s.MaxValueBytes() || r.Op == List && len(r.Value) < 4, s.wrongVersion(r):
		s.answer(r.Tag, InvalidValue)
		return true
	case r.Op.IsRange():
		return s.submitRange(r)
	case r.Op != Put && r.Op != Delete:
		return s.reads.Begin(&lookup.Request{Op: lookups[r.Op], Tag: r.Tag, Tenant: r.Tenant, Key: r.Key,
			Value: r.Value, Room: r.Room, Sound: r.Sound})
	case s.freeOps.N == 0 || r.Op == Put && s.freeOps.N <= s.keptForDeletes():
		return false
	}
	identities := 0
	if r.ID.Client != 0 {
		identities = 1
	}
	full := s.isFull(r, identities)
	if r.Op == Put {
		if full && !r.ID.Retry {
			s.answer(r.Tag, CapacityExceeded)
			return true
		}
		if len(r.Value) > 0 && !full && !s.roomFor(userLog, len(r.Value)) {
			return false
		}
	}
	i := s.opLinks.Pop(&s.freeOps)
	s.beginWrite(i, r, 0, full)
	return true
}

// beginWrite begins a Put or Delete with an op: that of a CopyIn, or of a request whose tag it has. Full is op.full.
func (s *Store) beginWrite(i int32, r *Request, copyIn uint8, full bool) {
	o := &s.ops[i]
	*o = op{} // in place: a literal with fields would be made elsewhere and copied, and that waits for it to be written
	o.kind, o.cond, o.tag, o.tenant, o.background = r.Op, r.Condition, r.Tag, r.Tenant, r.Background
	o.copyIn, o.full, o.sound, o.parts[0], o.parts[1] = copyIn, full, r.Sound, noPart, noPart
	o.keyLen, o.hash = uint8(len(r.Key)), format.HashKey(s.hashSeed, r.Key)
	o.id, o.tombstone, o.expires, o.want = r.ID, r.Tombstone && r.Op == Delete, r.Expires, r.Version
	o.give(r.Given)
	copy(o.key[:], r.Key)
	switch {
	case r.Op == Put && len(r.Value) > 0 && !o.full:
		o.valueLen = uint32(len(r.Value))
		s.stats.UserBytes += int64(len(r.Value))
		s.appendValue(userLog, i, r.Value)
	default:
		o.ready = true
	}
	s.dispatch(i)
}

// isFull reports whether there is no room for what a request adds, at most, with that number of identities.
func (s *Store) isFull(r *Request, identities int) bool {
	need := maxItemBytes + identities*format.IdentityBytes
	if r.Op == Put {
		need += s.extentBytes(len(r.Value)) + s.pieces(len(r.Value))*format.ItemHeaderBytes
	}
	return s.pool.Live+int64(need)+s.spare() > s.budget.MaxLive
}

// Turn does everything that has become possible and appends what it wants done to out. The driver calls it after each
// batch of Submit and Complete, and at WakeNS.
//
// hot: 0 allocs
func (s *Store) Turn(nowNS int64, out *Actions) {
	s.now = nowNS
	if s.badWrite {
		s.badWriteNS, s.badWrite = nowNS, false
	}
	// The actions that Submit and Complete have produced since the last Turn.
	moveTo(&out.IOs, &s.out.IOs)
	moveTo(&out.Replies, &s.out.Replies)
	moveTo(&out.Damage, &s.out.Damage)
	own := s.out
	s.out = out
	out.WakeNS = 0
	s.ckpt.swept, s.scrub.resting, s.audit.rested, s.compact.chosen = false, false, false, false
	s.merge.emptied, s.copyWork = 0, copyWorkMost
	if s.phase == unopened {
		s.open()
	}
	switch {
	case s.phase == ready && s.settling:
		s.checkpointStep()
	case s.phase == ready:
		for n := s.unloaded.N; n > 0; n-- {
			s.failSegment(s.segLinks.Pop(&s.unloaded), NoMemory)
		}
		s.reads.Continue()
		for again := true; again; {
			before := s.progress + s.pool.Changes
			s.grow()
			s.shrink()
			s.resizeStep()
			last := s.lastCheckpointDue()
			s.checkpointStep()
			s.compactStep()
			s.scrubStep()
			s.auditStep()
			s.expiryStep()
			s.copyInStep()
			s.dropStep()
			s.badStep()
			s.writeSegments()
			s.restoreStep()
			for l := range s.logs {
				s.pump(l)
			}
			s.failOutOfSpace(before)
			// A request that ends without a write, as the last one, may be what the last checkpoint has waited for.
			again = s.progress+s.pool.Changes != before || !last && s.lastCheckpointDue()
		}
		if s.reads.Waits() {
			s.wake(s.now + 1)
		}
	}
	s.out = own
}

// wake makes sure that Turn is called at that time at the latest.
func (s *Store) wake(atNS int64) {
	if s.out.WakeNS == 0 || atNS < s.out.WakeNS {
		s.out.WakeNS = atNS
	}
}
