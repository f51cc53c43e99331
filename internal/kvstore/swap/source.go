// Package swap lends an overloaded drive the bandwidth of another one: PUTs of a partition go to a swap area on a less
// loaded drive of the same node for a while.
//
//	             ┌────────── Source, one a partition ──────────┐         ┌── Area, one a drive ─┐
//	request ────>│ no entry, not overloaded ──> its own store  │         │                      │
//	             │ PUT, overloaded ──> entry ───── Append ─────┼────────>│ group ──> swap log   │
//	             │ entry: GET <──────── read ──────────────────┼─────────┼────────── swap log   │
//	             │ return: read, put, manifest, drop entry     │ Release │ LogHead advances     │
//	             └─────────────────────────────────────────────┘────────>└──────────────────────┘
//
// A swapped PUT is one record in the swap log of another drive, written with others as a group, and an entry in the
// index of the source partition. While a key has an entry, the entry decides: a GET reads the swap log, and writes of
// the key append newer records there. A restart finds the newest record of each key, so that it never brings back an
// older value.
//
// Keys return in the order of the log, the oldest ones together as a batch. Their writes wait, and none is under way in
// the source's store. Each record is read and put into (or deleted from) the store like an ordinary request. Then the
// source's manifest, two blocks in its own partition, says that records before the oldest one that has not returned no
// longer count. When that is durable the entries are dropped, and the writes that have waited go to the store. After a
// crash between two of these steps the entry is found again, and nobody can have written the key in the store
// meanwhile, so that returning it once more changes nothing.
//
// While the source is busy and the log fills up, its oldest records that count are appended again at its end instead.
// This costs the source nothing.
//
// The manifest also says which areas may hold records at all. An area gets an entry before the first PUT is swapped
// there, and loses it some time after the last key has returned. A source does not open without the areas in its
// manifest.
//
// Both Source and Area are machines: they have no I/O, clock, lock or goroutine, and they allocate nothing while they
// serve, except a small buffer for each op that reads for the first time. testdata/transcripts shows them event by
// event.
//
// Source: LEED (SIGCOMM'23), section 3.6. Deviations: a log of its own and an index instead of the number of an SSD in
// each item, so that stores know nothing of each other. Reasons are in docs/decisions/0008-swapping.md.
package swap

import (
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/list"
	"jbofd/internal/tenant"
	"jbofd/internal/uuid"
)

const (
	none = list.NoRecord
	// smallBytes is the length of the buffer of an op that reads. Longer reads wait for one of bigBuffers.
	smallBytes = 8 << 10
	bigBuffers = 2
	// batchKeys is how many keys return together, for one change of the manifest.
	batchKeys = 128
)

// SourceConfig describes a Source.
type SourceConfig struct {
	// Manifest is the source's, from LoadManifest. UUID is that of its partition.
	Manifest *Manifest
	UUID     uuid.UUID
	// BlockSize is that of the source's device. FUA asks for writes of the manifest that survive a loss of power.
	BlockSize int
	FUA       bool
	// Areas are the areas on the other drives of the node.
	Areas []AreaRef
	// Keys is the maximum number of swapped keys; 0: 16384. An entry takes 88 bytes.
	Keys int
	// Requests is the maximum number of requests in progress in the Source, without those that the store has; 0: 256.
	Requests int
	// MaxValueBytes is the length of the longest value that is swapped; 0: the constant MaxValueBytes. It must be that
	// of the areas and at most that of the store.
	MaxValueBytes int
	// Versions gives versions to what is swapped; nil: there are none.
	Versions Versions
	// Background is the tenant that pays for the return of keys.
	Background tenant.ID
	// Policy says when PUTs are swapped. Zero fields have their defaults.
	Policy Policy
	// Alloc returns memory for I/O; nil: the heap's.
	Alloc space.Alloc
}

// AreaRef is what a source needs to know about an area.
type AreaRef struct {
	UUID      uuid.UUID
	Log       format.SwapLog
	BlockSize int
	Attachment
}

// Versions gives versions to objects: the source's store.
type Versions interface {
	// NextVersion returns a version that no object has had.
	NextVersion() uint64
	// NoteVersion says that a version was given, so that it is not given again.
	NoteVersion(version uint64)
}

// Verdict says who handles a request.
type Verdict uint8

// Verdicts.
const (
	// ToStore: the store does, as if there were no swapping.
	ToStore Verdict = iota
	// Taken: the Source does, and a Reply will follow.
	Taken
	// Full: the Source would, but has no room. The request must be submitted again after a Turn with completions.
	Full
)

// AreaAppend is an Append for an area of the source.
type AreaAppend struct {
	Area int
	Append
}

// AreaRelease is a Release for an area of the source. The Source emits it only after the manifest that no longer needs
// the released records is durable.
type AreaRelease struct {
	Area   int
	Source int
	Place  format.LogOffset
}

// Actions are what a Source's Turn wants done. The driver keeps the value and empties the slices.
type Actions struct {
	// IOs are reads in areas, and writes of the manifest in the source's own partition. A write of the manifest must be
	// durable when it completes, because the Source then drops entries or begins to swap PUTs.
	IOs []IO
	// Appends must be submitted to their areas in this order, so that a newer record of a key follows the older one.
	// Their keys and values must not change before Source.Outcome has been called with the result.
	Appends  []AreaAppend
	Releases []AreaRelease
	Replies  []kvstore.Reply
	// WakeNS is when Turn must be called at the latest, even if nothing happens before; 0: never.
	WakeNS int64
}

// Source is the machine that decides where the requests of one partition go. It alone knows whether the newest value of
// a key is in the partition's store or in an area.
type Source struct {
	cfg  SourceConfig
	out  Actions
	now  int64
	seed uint64

	// entries are the index. They are chained by hash in table, and by place in the list of their area.
	entries   []entry
	table     []int32
	freeEntry int32
	used      int
	// outBytes is the sum of the lengths of the values that are swapped out.
	outBytes int64
	areas    []areaState

	ops []op
	// links are those of all lists of ops.
	links   list.Links
	freeOps list.List
	// requests are the ops in use for requests. Invariant: requests <= cfg.Requests, so that there are ops for
	// returning keys however many requests wait for them.
	requests int
	// toStore are the ops that the source's store has to take, atStore how many it has taken.
	toStore list.List
	atStore int
	lists   list.List // Lists, and requests for ranges, that wait until all keys have returned
	big     [][]byte
	bigFree []int32
	bigWait list.List
	// writes are the hashes of the keys of writes in the store, by the driver's tag; 0: none.
	writes []uint64

	load      loadState
	batch     returnState
	manifest  manifestState
	draining  bool
	held      bool // no more keys are swapped out
	abandoned bool // no more keys are returned
	stats     Stats
}

// Stats are counters since the start, except Keys, the current number of swapped keys.
type Stats struct {
	Keys int64
	// Swapped counts PUTs and Deletes that were written to an area, Reads the values that were read from an area for a
	// request, Returned the keys that were returned to the source's store.
	Swapped, Reads, Returned int64
	// Moved counts records that were appended again to their log, so that LogHead could advance; Refused, records that
	// an area has refused because it had no space or its device failed; Failures, failed attempts to return a key, each
	// of which is repeated.
	Moved, Refused, Failures int64
}

// entry is a swapped key, or one that is about to be. It has no pointers, so that the garbage collector skips the
// index.
type entry struct {
	key [format.MaxKey]byte
	// place is the position of the newest durable record in the swap log, at its offset within its group, valueLen the
	// length of its value, and version that of the object.
	place    format.LogOffset
	at       uint32
	valueLen uint32
	version  uint64
	hash     uint32
	// chain links the entries of one slot of the hash table, and the free entries. prev and next link the durable
	// entries of an area, ordered by place.
	chain, prev, next int32
	// waiting are the writes of the key that wait for earlier ones or for the key to return, oldest first.
	waiting list.List
	// appends is the number of Appends in flight. indeterminate of them have failed, with an unknown outcome, and are
	// being repeated.
	appends, indeterminate uint16
	keyLen, area           uint8
	// durable: the key has a durable record. deleted: that record is a Delete.
	durable, deleted bool
	// returning: the key is being returned, so its writes wait. wanted: a request cannot proceed before the key has
	// returned.
	returning, wanted bool
	// returned: the record's value is durable in the store, but the manifest still refers to the record.
	returned bool
}

// group is the place of the group that contains the newest durable record.
func (e *entry) group() format.LogOffset { return e.place - format.LogOffset(e.at) }

// areaState is what a source knows about an area.
type areaState struct {
	AreaRef
	// first and last are the durable entries, by place.
	first, last int32
	// appends is the number of Appends in flight, entries that of keys in the area, wanted that of keys that must
	// return.
	appends, entries, wanted int
	// acked is the place after the newest record that is known to be durable. Records in flight come after it, perhaps
	// in the same group. That group begins at place group and ends at place end.
	acked, group, end format.LogOffset
	// listed: the durable manifest names the area, with this floor. mayBeListed: one of the two copies of the manifest
	// may name it. wantListed: the next manifest must name it. writing: the manifest that is being written names it.
	listed, mayBeListed, wantListed, writing bool
	floor                                    format.LogOffset
	// released is the place of the last AreaRelease for the area, if told is set.
	released format.LogOffset
	told     bool
	// lastNS is when the area was last used.
	lastNS int64
	// failed: the last attempt to return the oldest keys has failed. The next one follows at retryNS.
	failed  bool
	retryNS int64
}

// opKind says what an op is used for.
type opKind uint8

const (
	opFree  opKind = iota
	opRead         // a Get or Exist
	opWrite        // a Put or Delete
	opList
	opReturning // a record that is being returned to the source's store
	opMoving    // a record that is being moved to the end of its log
)

// op is a request in progress, or a member of a batch.
type op struct {
	kind   opKind
	do     kvstore.Op
	cond   kvstore.Condition
	tag    uint64
	tenant tenant.ID
	hash   uint32
	key    [format.MaxKey]byte
	keyLen uint8
	// value is the request's, or the value that was read for an opReturning. room is the request's.
	value []byte
	room  func(length int) []byte
	// version, given, expires, tombstone and id are those of the request. Of a write that was swapped, version is the
	// one that it was given, and of a read that of the object.
	version   uint64
	given     uint64
	expires   uint32
	tombstone bool
	id        kvstore.Identity
	// ranged, background and restore are those of a request for a range.
	ranged              kvstore.Range
	background, restore bool
	entry               int32
	// awaitsReturn: the op cannot go on before its key has returned. answered: the request was answered with
	// DeviceError, while the outcome of its record is indeterminate.
	awaitsReturn, answered bool
	// area, place, at and valueLen say which record is read. lead is the offset at which it begins in the buffer.
	area     uint8
	place    format.LogOffset
	at       uint32
	valueLen uint32
	member   uint8 // index in the batch
	lead     int
	buf      []byte
	big      int32
}

// NewSource makes a Source. It takes no requests before the first Turn.
//
// Errors: ErrManifest naming the area that is missing or differs from the manifest; ErrConfig; space.ErrNoMemory.
func NewSource(cfg SourceConfig) (*Source, error) {
	setDefault(&cfg.Keys, 16<<10)
	setDefault(&cfg.Requests, 256)
	setDefault(&cfg.MaxValueBytes, MaxValueBytes)
	if cfg.Alloc == nil {
		cfg.Alloc = space.HeapAlloc
	}
	cfg.Policy.setDefaults()
	src := &Source{cfg: cfg, freeEntry: none, freeOps: list.None, toStore: list.None, lists: list.None,
		bigWait: list.None, load: loadState{to: none}}
	if err := src.attach(); err != nil {
		return nil, err
	}
	if len(src.areas) == 0 {
		return src, nil
	}
	src.seed = uint64(src.areas[0].Log.Salt)*0x9E3779B97F4A7C15 ^ 0x6A626F66
	n := 2
	for n < 2*cfg.Keys {
		n *= 2
	}
	src.table = make([]int32, n)
	for i := range src.table {
		src.table[i] = none
	}
	records := 0
	for i := range src.areas {
		records += len(src.areas[i].Records)
	}
	src.entries = make([]entry, max(cfg.Keys, records))
	for i := range src.entries {
		src.entries[i].chain = src.freeEntry
		src.freeEntry = int32(i)
	}
	src.ops = make([]op, cfg.Requests+batchKeys)
	src.links = make(list.Links, len(src.ops))
	for i := range src.ops {
		src.ops[i] = op{big: none}
		src.links.Push(&src.freeOps, int32(i))
	}
	mem := space.Buffers{Alloc: cfg.Alloc}
	for i := range bigBuffers {
		src.big = append(src.big, mem.Take("reads of swapped values",
			format.RoundUp(format.SwapRecordBytes(cfg.MaxValueBytes), 4096)+2*4096))
		src.bigFree = append(src.bigFree, int32(i))
	}
	if mem.Err != nil {
		return nil, mem.Err
	}
	src.writes = make([]uint64, 0, 1024)
	src.takeRecords()
	return src, nil
}

func setDefault[T int | int64](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// takeRecords adds the records that the areas have found at their start to the index.
func (src *Source) takeRecords() {
	for i := range src.areas {
		a := &src.areas[i]
		for _, g := range a.Records {
			if g.Place < a.floor {
				continue
			}
			ei := src.addEntry(i, g.Key, g.KeyLen)
			e := &src.entries[ei]
			e.durable, e.deleted, e.valueLen, e.place, e.at = true, g.Deleted, g.ValueLen, g.Place, g.At
			e.version = src.versionOf(&g)
			src.outBytes += int64(e.valueLen)
			src.append(ei)
		}
		a.Records = nil
		src.release(i)
	}
}

// versionOf returns the version of the object of a record that was found.
func (src *Source) versionOf(g *FoundRecord) uint64 {
	switch v := src.cfg.Versions; {
	case v == nil:
	case g.Version > 0:
		v.NoteVersion(g.Version)
	default:
		return v.NextVersion()
	}
	return g.Version
}

// Hold says whether no more keys may be swapped out.
func (src *Source) Hold(held bool) { src.held = held }

// Empty reports whether no key is swapped, no PUT will be swapped before the next Observe, and no List waits for keys
// to return.
func (src *Source) Empty() bool { return src.used == 0 && src.load.to == none && src.lists.N == 0 }

// Stats returns the counters.
func (src *Source) Stats() Stats {
	s := src.stats
	s.Keys = int64(src.used)
	return s
}

func (src *Source) hash(key []byte) uint64 {
	x := format.HashKey(src.seed, key)
	return uint64(uint32(x ^ x>>32))
}

// Turn does everything that has become possible and appends what it wants done to out. The driver calls it after each
// batch of Submit, Complete, Outcome, Stored and Observe, and at WakeNS.
//
// hot: 0 allocs
func (src *Source) Turn(nowNS int64, out *Actions) {
	src.now = nowNS
	src.out.WakeNS = 0
	if len(src.areas) > 0 {
		src.returnStep()
		src.manifestStep()
	}
	out.IOs = append(out.IOs, src.out.IOs...)
	out.Appends = append(out.Appends, src.out.Appends...)
	out.Releases = append(out.Releases, src.out.Releases...)
	out.Replies = append(out.Replies, src.out.Replies...)
	out.WakeNS = src.out.WakeNS
	src.out.IOs, src.out.Appends, src.out.Releases, src.out.Replies = src.out.IOs[:0], src.out.Appends[:0],
		src.out.Releases[:0], src.out.Replies[:0]
}

// wake asks for a call of Turn no later than atNS.
func (src *Source) wake(atNS int64) {
	if src.out.WakeNS == 0 || atNS < src.out.WakeNS {
		src.out.WakeNS = atNS
	}
}

// Complete ends an I/O.
//
// hot: 0 allocs
func (src *Source) Complete(tag uint32, err error) {
	if int(tag) == len(src.ops) {
		src.manifestWritten(err == nil)
		return
	}
	src.recordRead(int32(tag), err == nil)
}

// Tags is the number of tags of I/Os, which start at 0.
func (src *Source) Tags() int { return len(src.ops) + 1 }

func (src *Source) answer(o *op, st kvstore.Status, valueLen int) {
	r := kvstore.Reply{Tag: o.tag, Status: st, ValueLen: valueLen}
	if st == kvstore.OK || st == kvstore.Exists {
		r.Version = o.version
	}
	src.out.Replies = append(src.out.Replies, r)
}

// finish answers an op and frees it.
func (src *Source) finish(oi int32, st kvstore.Status, valueLen int) {
	src.answer(&src.ops[oi], st, valueLen)
	src.freeOpNow(oi)
}
