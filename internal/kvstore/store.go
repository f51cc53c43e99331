// Package kvstore is the key-value store of one partition of an SSD: a key log of
// segments, a value log, and in DRAM 5 bytes a segment (the SegTbl).
//
//	Submit ──> op ──> [value group ──> value log] ──> segment ──> key group ──> key log ──> Reply
//	            │                                      │   ^                      │
//	            │ GET, EXIST: read segment, read value  └read┘      SegTbl <── commit
//
// A Store is a machine: no I/O, clock, lock or goroutine. Its driver hands in requests
// (Submit) and completions (Complete), and then calls Turn, which appends the device I/Os that
// it asks for and the replies. One goroutine at a time; nothing is allocated while it serves.
//
// A PUT appends its value to the open group of the value log and, meanwhile, reads the
// segment of its key. When the value is durable all ready writers of the segment change it
// together, and it is written once, into the open group of the key log. The record of the
// segment is the commit: when it is durable the SegTbl is changed and the writers are
// answered. So whatever segment is found after a crash, its values are there.
//
// Moving a value or a segment in compaction is one more writer of its segment.
//
// Source: LEED (SIGCOMM'23), sections 3.2 to 3.4. Deviations: the logs are lists of chunks from one
// pool and not two circular buffers, so that a partition need not be divided beforehand and compaction may
// choose its victim; both logs are packed; the hash table grows. Reasons and figures are
// in docs/decisions/0007-kvstore-layout.md.
package kvstore

import (
	"errors"
	"fmt"
	"slices"

	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/budget"
	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/fifo"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/kvstore/segtbl"
	"jbofd/internal/kvstore/setup"
	"jbofd/internal/kvstore/walk"
	"jbofd/internal/pipeline"
)

// Op is what a Request asks for.
type Op uint8

// Operations.
const (
	// Get copies the value to Request.Value, as much as fits; Reply.ValueLen is its full length.
	Get Op = iota
	// Put stores Request.Value.
	Put
	// Delete removes the key.
	Delete
	// Exist looks for the key.
	Exist
	// List puts the keys from Request.Key on, it among them if it exists, into Request.Value, as an nvme.KVList of as
	// many as fit; Reply.ValueLen is its length. Without a key it begins at the first. They come in an order of
	// the store's own, in which a key that is there all the time is listed exactly once.
	List

	opMove   // copy a live value out of a chunk that is compacted
	opTouch  // write a live segment again, for the same reason
	opVerify // say whether a damaged value is live
)

// Condition restricts a Put.
type Condition uint8

// Conditions.
const (
	// Always is no condition.
	Always Condition = iota
	// IfAbsent: the key must not exist.
	IfAbsent
	// IfPresent: the key must exist.
	IfPresent
)

// Status is how a request ended.
type Status uint8

// Statuses.
const (
	// OK: done; what was written survives a loss of power.
	OK Status = iota
	// NotFound: there is no such key.
	NotFound
	// Exists: the key exists and the Put was IfAbsent.
	Exists
	// CapacityExceeded: there is no room for the value. Nothing has changed.
	CapacityExceeded
	// DeviceError: an I/O failed. A write that ends so may still be found done after a restart.
	DeviceError
	// Corrupt: what the device returned is not what was written.
	Corrupt
	// InvalidKey: the key is empty or longer than format.MaxKey.
	InvalidKey
	// InvalidValue: the value is longer than Store.MaxValueBytes, or a List has less than 4 bytes to go to.
	InvalidValue
)

// Request is one command. It is copied by Submit.
type Request struct {
	Op        Op
	Condition Condition
	// Tag comes back in the Reply.
	Tag uint64
	Key []byte
	// Value of a Put is copied by Submit; that of a Get belongs to the Store until the Reply.
	Value []byte
	// Room, if set, is asked for memory by a Get whose Value is too short, as soon as the value's length is known: it returns as much as
	// is wanted of it. With nil the Request ends, OK and without the value.
	Room func(length int) []byte
	// Tenant comes back in the I/Os.
	Tenant uint32
}

// Reply is the answer to a Request.
type Reply struct {
	Tag      uint64
	Status   Status
	ValueLen int
}

// IO is a request to the device. Offset is in the partition; Offset and length are
// whole blocks.
type IO struct {
	// Op is pipeline.Read, Write or Flush.
	Op pipeline.Op
	// FUA: complete only when durable.
	FUA bool
	// Background I/Os belong to compaction, checkpoint, scrub and recovery.
	Background bool
	// Tenant is that of the Request, for what is read for it. A group of records is written for all whose they are, in the
	// name of the first: in the long run a tenant is first as often as it has records.
	Tenant uint32
	Offset int64
	// Buf belongs to the device until Complete.
	Buf []byte
	// Tag is for Complete.
	Tag uint32
}

// Actions is what a Turn wants done. The driver keeps it and empties the slices.
type Actions struct {
	IOs     []IO
	Replies []Reply
	// Damage are the live records that were found damaged.
	Damage []Damage
	// WakeNS is when Turn is to be called at the latest even if nothing happens; 0: never.
	WakeNS int64
}

// Config of a Store.
type Config = setup.Config

// ErrConfig is wrapped by New for a Config out of its bounds.
var ErrConfig = setup.ErrConfig

// ErrPartition is wrapped by Err when the partition cannot be opened.
var ErrPartition = errors.New("kvstore: cannot open the partition")

const (
	nobody = -1
	// retryNS is how long to wait after a checkpoint has failed.
	retryNS = 100e6
)

// Stats count since New, but for Objects, Segments and LiveBytes, which are as of now.
type Stats struct {
	Objects, Segments, LiveBytes int64
	// UserBytes were put; KeyLogBytes, ValueLogBytes (by Puts), MovedBytes (by compaction) and
	// CheckpointBytes (with chunk headers and superblocks) were written for them.
	UserBytes, KeyLogBytes, ValueLogBytes, MovedBytes, CheckpointBytes int64
	// Reads, Writes are I/Os asked for in the name of requests; a group counts once.
	Reads, Writes int64
	// Compactions are chunks emptied, Checkpoints those completed, Splits segments added.
	Compactions, Checkpoints, Splits int64
	// Damaged counts the reports of damaged records, Scrubbed bytes that were looked at for them.
	Damaged, Scrubbed int64
	// FreeChunks and Chunks tell what is left, ChunkBytes how large they are.
	FreeChunks, Chunks, ChunkBytes int64
}

type phase uint8

const (
	unopened phase = iota
	ready
	failed
)

// Store is the machine.
type Store struct {
	cfg   Config
	phase phase
	err   error
	now   int64
	out   *Actions

	hashSeed uint64
	tbl      segtbl.Table
	// objects is how many keys there are. After a crash it may be off by what was in progress.
	objects int64
	// version is what the next segment gets. They ascend by one in the key log; values have that of the next segment.
	version uint64
	// unbroken is the version since which no write of the key log has failed or been cut off.
	unbroken uint64
	stats    Stats

	ops     []op
	opLinks fifo.Links
	freeOps fifo.List // for requests
	freeInt fifo.List // for compaction
	segs    []activeSeg
	freeSeg int32
	table   []int32 // heads of chains of active segments, by number
	// dirty are active segments to be written.
	dirty    fifo.List
	segLinks fifo.Links

	// reads are Get, Exist and List.
	reads *lookup.Machine

	ios    []ioRef
	freeIO []uint32

	pool   *chunks.Pool
	budget budget.Budget
	logs   [numLogs]logState
	// said is room for what a segment says of its changes.
	said       []byte
	groups     []group
	groupLinks fifo.Links

	// super is the superblock as it was last written or read.
	super   []byte
	split   splitState
	compact compactState
	ckpt    ckptState
	scrub   scrubState
	opening *openState
	// failures counts key groups whose fate is unknown.
	failures uint64
	// progress changes with what may let something else go on within a Turn, besides pool.Changes.
	progress uint64
	// stopping: no more requests come; stopped: the last checkpoint is done.
	stopping, stopped bool
	// settling: a checkpoint is written before the store is open, because of what it was or is to be on a volatile device.
	settling bool
}

// New makes a Store that opens the partition, or formats it: Turn asks for the I/Os, Ready
// and Err say how it went.
//
// Errors: ErrConfig naming the field.
func New(cfg Config) (*Store, error) {
	if err := cfg.Complete(); err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg, out: &Actions{}, opening: &openState{}}
	total := cfg.Requests + moves
	s.ops, s.opLinks = make([]op, total), make(fifo.Links, total)
	s.freeOps, s.freeInt, s.dirty = fifo.None, fifo.None, fifo.None
	for i := range s.ops {
		s.ops[i].chunk = nobody
		if i < cfg.Requests {
			s.opLinks.Push(&s.freeOps, int32(i))
		} else {
			s.opLinks.Push(&s.freeInt, int32(i))
		}
	}
	s.segs = make([]activeSeg, total+2*splitsMost)
	s.segLinks = make(fifo.Links, len(s.segs))
	s.freeSeg = nobody
	for i := range s.segs {
		s.segs[i].chain = s.freeSeg
		s.freeSeg = int32(i)
	}
	s.table = make([]int32, 1024)
	for i := range s.table {
		s.table[i] = nobody
	}
	s.super = cfg.Alloc(format.SuperblockBytes)
	s.said = make([]byte, 0, 2*format.MostChangesBytes)
	s.ckpt.buf = cfg.Alloc(format.PageBytes)
	if cfg.Format {
		if err := s.adopt(recovery.Fresh(s.super, &cfg)); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrConfig, err)
		}
	}
	return s, nil
}

// adopt takes what the partition holds and makes all that depends on it.
func (s *Store) adopt(image *recovery.Image) error {
	c, sb := &s.cfg, image.Super
	c.BlockSize, c.ChunkBytes, c.UUID = sb.BlockSize(), sb.ChunkBytes(), sb.UUID()
	copy(s.super, sb)
	s.hashSeed = sb.HashSeed()
	s.tbl, s.pool, s.objects, s.version, s.unbroken = image.Table, image.Pool, image.Objects, image.Version, image.Version
	s.ckpt.chunks = image.Checkpoint
	c.GroupBytes = min(c.GroupBytes, int(c.ChunkBytes/4))
	s.budget = budget.Of(s.pool, c.GroupBytes, c.BlockSize)
	s.settling = c.Volatile || sb.VolatileFrom() > 0
	s.ckpt.wanted, s.pool.Hold = s.settling, s.pool.Hold || c.Volatile
	s.setNeed()
	n, reserve := len(s.pool.Chunks), s.budget.Reserve()
	if n < 2*reserve || n < 24 {
		return fmt.Errorf("%w: a partition of %d bytes has %d chunks of %d, want at least %d", ErrPartition, c.PartitionBytes, n, c.ChunkBytes, max(24, 2*reserve))
	}
	// A group has room for a record that follows the one that fills it.
	valueGroup := format.RoundUp(c.GroupBytes+format.ValueBytes(s.MaxValueBytes())+c.BlockSize, format.SuperblockBytes)
	keyGroup := format.RoundUp(c.GroupBytes, format.SuperblockBytes) + 1<<16 + format.SuperblockBytes
	for l, count := range [numLogs]int{4, 4, 2} {
		log := &s.logs[l]
		*log = logState{chunk: image.Tails[l].Chunk, tail: image.Tails[l].End, open: nobody, sealed: fifo.None, free: fifo.None, header: c.Alloc(c.BlockSize), last: make([]byte, c.BlockSize)}
		for range count {
			size := valueGroup
			if l == keyLog {
				size = keyGroup
			}
			s.groups = append(s.groups, group{log: uint8(l), buf: c.Alloc(size)})
			s.groupLinks = append(s.groupLinks, nobody)
			s.groupLinks.Push(&log.free, int32(len(s.groups)-1))
		}
	}
	for i := range s.segs {
		s.segs[i].buf = c.Alloc(format.RoundUp(smallSegment+2*c.BlockSize, format.SuperblockBytes))
	}
	s.reads = lookup.New(lookup.Config{
		Host: reader{s}, Table: &s.tbl, Pool: s.pool, HashSeed: s.hashSeed, BlockSize: c.BlockSize,
		Requests: c.Requests, MaxValueBytes: s.MaxValueBytes(), Alloc: c.Alloc,
	})
	size := walk.BufBytes(int(c.ChunkBytes), s.MaxValueBytes())
	for i := range c.Compactions {
		if len(image.Buf) < size {
			image.Buf = c.Alloc(size)
		}
		s.compact.slots = append(s.compact.slots, slot{index: uint8(i), Walk: walk.New(s.pool, c.BlockSize, image.Buf[:size:size])})
		image.Buf = image.Buf[size:]
	}
	s.ckpt.header = c.Alloc(c.BlockSize)
	return nil
}

// setNeed tells the budget how long a checkpoint of the table as it is now will be.
func (s *Store) setNeed() { s.budget.SetNeed(len(s.tbl.Bytes())) }

// MaxValueBytes is the longest value that the partition takes: 1 MiB, less only if its chunks
// have less than 2 MiB.
func (s *Store) MaxValueBytes() int { return int(min(format.MaxValue, s.cfg.ChunkBytes/2)) }

// Ready reports that the partition is open: requests are taken.
func (s *Store) Ready() bool { return s.phase == ready && !s.settling }

// Err says why the partition could not be opened; it has not been written to.
//
// Errors: ErrPartition, wrapping what the check of the format said.
func (s *Store) Err() error { return s.err }

// Idle reports that there is no request in progress and nothing going on in the background.
func (s *Store) Idle() bool {
	return len(s.ios) == len(s.freeIO) && s.freeOps.N == s.cfg.Requests && s.reads.Busy() == 0 && s.freeInt.N == moves && s.ckpt.stage == ckptIdle
}

// resting reports that no chunk is being emptied or looked at, not even with a pause.
func (s *Store) resting() bool {
	return !slices.ContainsFunc(s.compact.slots, func(sl slot) bool { return sl.busy })
}

// Checkpoint asks for a checkpoint.
func (s *Store) Checkpoint() { s.ckpt.wanted = true }

// Stop asks for a last checkpoint, so that a restart has nothing to replay, and for no more compaction. No
// request may be submitted from then on. If the device fails it is tried again without end: how long to wait is
// the driver's decision, and nothing is lost if it does not.
func (s *Store) Stop() { s.stopping = true }

// Stopped reports that the last checkpoint is done.
func (s *Store) Stopped() bool { return s.stopped && s.Idle() }

// quiet reports that nothing will be written to the logs.
func (s *Store) quiet() bool {
	return s.freeOps.N == s.cfg.Requests && s.reads.Busy() == 0 && s.freeInt.N == moves && s.resting() && s.dirty.N == 0 && s.logs[keyLog].inflight == 0 && s.split.idle()
}

// LiveBytes is Stats.LiveBytes.
func (s *Store) LiveBytes() int64 { return s.pool.Live }

// Stats returns the counters.
func (s *Store) Stats() Stats {
	st := s.stats
	st.Objects, st.Segments, st.LiveBytes = s.objects, int64(s.tbl.Len()), s.pool.Live
	st.Chunks, st.FreeChunks = int64(len(s.pool.Chunks)), int64(s.pool.Free)
	st.ChunkBytes = s.cfg.ChunkBytes
	return st
}

// Submit takes a request and reports whether there was room for it: if not, the driver submits it
// again after a Turn with completions.
//
// hot: 0 allocs
func (s *Store) Submit(r *Request) bool {
	invariants.Check(s.phase == ready && !s.stopping, "kvstore: a request to a store that is not ready")
	switch {
	case len(r.Key) < 1 && r.Op != List || len(r.Key) > format.MaxKey:
		s.answer(r.Tag, InvalidKey, 0)
		return true
	case r.Op == Put && len(r.Value) > s.MaxValueBytes() || r.Op == List && len(r.Value) < 4:
		s.answer(r.Tag, InvalidValue, 0)
		return true
	case r.Op != Put && r.Op != Delete:
		op := [...]lookup.Op{Get: lookup.Get, Exist: lookup.Exist, List: lookup.List}[r.Op]
		return s.reads.Begin(&lookup.Request{Op: op, Tag: r.Tag, Tenant: r.Tenant, Key: r.Key, Value: r.Value, Room: r.Room})
	case s.freeOps.N == 0:
		return false
	}
	if r.Op == Put {
		// What the value and its part of a segment will take, at most.
		need := int64(format.ValueBytes(len(r.Value)) + format.ItemHeaderBytes + len(r.Key))
		for l := range s.logs {
			need += s.logs[l].pending
		}
		if s.pool.Live+need+budget.Spare(s.objects, int64(s.tbl.Len())) > s.budget.Limit {
			s.answer(r.Tag, CapacityExceeded, 0)
			return true
		}
		if len(r.Value) > 0 && !s.room(userLog) {
			return false
		}
	}
	i := s.opLinks.Pop(&s.freeOps)
	o := &s.ops[i]
	*o = op{
		kind: r.Op, cond: r.Condition, tag: r.Tag, tenant: r.Tenant, keyLen: uint8(len(r.Key)), hash: format.HashKey(s.hashSeed, r.Key),
		group: nobody, chunk: nobody,
	}
	copy(o.key[:], r.Key)
	switch {
	case r.Op == Put && len(r.Value) > 0:
		o.valueLen = uint32(len(r.Value))
		s.stats.UserBytes += int64(len(r.Value))
		s.appendValue(userLog, i, r.Value)
	default:
		o.ready = true
	}
	s.dispatch(i)
	return true
}

// Complete takes the completion of an I/O.
//
// hot: 0 allocs
func (s *Store) Complete(tag uint32, err error) {
	r := s.ios[tag]
	invariants.Check(r.kind != ioNone, "kvstore: a completion of no I/O")
	s.ios[tag] = ioRef{}
	s.freeIO = append(s.freeIO, tag)
	ok := err == nil
	switch r.kind {
	case ioLookup:
		s.reads.Read(r.who, ok)
	case ioSegment:
		s.segmentRead(r.who, ok)
	case ioGroup:
		s.groupWritten(r.who, ok)
	case ioHeader:
		s.headerWritten(int(r.who), ok)
	case ioCompact:
		s.compact.slots[r.who].Read(ok)
	case ioCheckpoint:
		s.checkpointWritten(ok)
	case ioRecover:
		s.recovered(r.who, err)
	}
}

// Turn does what became possible and appends what it wants done to out. The driver calls it after a batch
// of Submit and Complete and when WakeNS has come.
//
// hot: 0 allocs
func (s *Store) Turn(nowNS int64, out *Actions) {
	s.now = nowNS
	// What Submit and Complete have said since the last Turn.
	out.IOs = append(out.IOs, s.out.IOs...)
	out.Replies = append(out.Replies, s.out.Replies...)
	out.Damage = append(out.Damage, s.out.Damage...)
	s.out.IOs, s.out.Replies, s.out.Damage = s.out.IOs[:0], s.out.Replies[:0], s.out.Damage[:0]
	own := s.out
	s.out = out
	out.WakeNS = 0
	if s.phase == unopened {
		s.open()
	}
	switch {
	case s.phase == ready && s.settling:
		s.checkpointStep()
	case s.phase == ready:
		for again := true; again; {
			before := s.progress + s.pool.Changes
			s.grow()
			s.checkpointStep()
			s.compactStep()
			s.scrubStep()
			s.writeSegments()
			for l := range s.logs {
				s.pump(l)
			}
			s.unstick(before)
			again = s.progress+s.pool.Changes != before
		}
	}
	s.out = own
}

// wake makes sure that Turn is called by then.
func (s *Store) wake(atNS int64) {
	if s.out.WakeNS == 0 || atNS < s.out.WakeNS {
		s.out.WakeNS = atNS
	}
}

func (s *Store) answer(tag uint64, st Status, valueLen int) {
	s.out.Replies = append(s.out.Replies, Reply{Tag: tag, Status: st, ValueLen: valueLen})
}

type ioKind uint8

const (
	ioNone ioKind = iota
	ioLookup
	ioSegment
	ioGroup
	ioHeader
	ioCompact
	ioCheckpoint
	ioRecover
)

// ioRef says whose an I/O is.
type ioRef struct {
	kind ioKind
	who  int32
}

// io asks for an I/O of the store's own.
func (s *Store) io(kind ioKind, who int32, op pipeline.Op, offset int64, buf []byte) {
	s.ioFor(kind, who, payer{background: true}, op, offset, buf)
}

// ioFor asks for an I/O.
func (s *Store) ioFor(kind ioKind, who int32, pays payer, op pipeline.Op, offset int64, buf []byte) {
	var tag uint32
	if n := len(s.freeIO); n > 0 {
		tag, s.freeIO = s.freeIO[n-1], s.freeIO[:n-1]
	} else {
		tag = uint32(len(s.ios))
		s.ios = append(s.ios, ioRef{})
		if cap(s.freeIO) < cap(s.ios) {
			s.freeIO = make([]uint32, 0, cap(s.ios))
		}
	}
	s.ios[tag] = ioRef{kind: kind, who: who}
	switch kind {
	case ioLookup, ioSegment:
		s.stats.Reads++
	case ioGroup:
		s.stats.Writes++
	}
	s.out.IOs = append(s.out.IOs, IO{
		Op: op, FUA: op == pipeline.Write && s.cfg.FUA, Background: pays.background, Tenant: pays.tenant,
		Offset: offset, Buf: buf, Tag: tag,
	})
}

// payer is in whose name an I/O is done: a tenant's, or the store's own.
type payer struct {
	tenant     uint32
	background bool
}
