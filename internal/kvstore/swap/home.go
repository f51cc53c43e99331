// Package swap lends PUTs of an overloaded SSD to another one of the box for a while.
//
//	           ┌──────────── Home, one a partition ───────────┐         ┌── Area, one an SSD ──┐
//	request ──>│ no entry, not overloaded ──> its own store   │         │                      │
//	           │ PUT, overloaded ──> entry ───── Append ──────┼────────>│ group ──> guest log  │
//	           │ entry: GET <──────── read ───────────────────┼─────────┼────────── guest log  │
//	           │ coming home: read, PUT at home, book, forget │ Release │ LogHead moves on     │
//	           └──────────────────────────────────────────────┘────────>└──────────────────────┘
//
// A swapped PUT is one record in the guest log of another SSD, written with others as a group, and an entry in the
// home's index. While a key has an entry, the entry is the truth: a GET reads the guest log, and writes of the key
// append newer records there. So a restart, which finds the newest record of each key, brings no older state back.
//
// Coming home goes in the order of the log. The oldest keys are taken together; their writes wait, and the home has
// none of them under way. Each record is read and put (or deleted) at home as an ordinary request. Then the home's
// book, two blocks in its own partition, says that what is before the oldest record that is not at home does not
// count any more; when that is durable the entries are dropped and the waiting writes go home. A crash
// between two of these steps finds the entry again, and nobody has written the key at home meanwhile: to bring it home
// once more changes nothing.
//
// While the home is busy and an area's log fills up, its oldest records that still count are written again at its end
// instead, which costs the home nothing.
//
// The book also says in which areas there may be guests at all: before the first swap to an area it gets a line,
// and loses it some time after the last key has come home. A home does not open without the areas in its book.
//
// Both are machines: no I/O, clock, lock or goroutine. Nothing is allocated while they serve.
//
// Source: LEED (SIGCOMM'23), section 3.6. Deviations: a log of its own and an index instead of an SSD number in each
// item, so that the stores know nothing of each other; why, in docs/decisions/0008-swapping.md.
package swap

import (
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/fifo"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/swap/guest"
)

const (
	nobody = fifo.Nobody
	// smallBytes is the buffer of an op that reads; what is longer waits for one of bigBuffers.
	smallBytes = 8 << 10
	bigBuffers = 2
	// batchKeys come home together, for one change of the book.
	batchKeys = 128
)

// HomeConfig describes a Home.
type HomeConfig struct {
	// Book is the home's, from LoadBook, and UUID its partition's.
	Book *Book
	UUID [16]byte
	// BlockSize is that of the home's device; FUA asks for writes of the book that survive a loss of power.
	BlockSize int
	FUA       bool
	// Areas are those on the other SSDs of the box.
	Areas []HomeArea
	// Keys is how many keys may be out; 0: 16384. An entry takes 80 bytes.
	Keys int
	// Requests is how many may be in progress here, beside those in the store; 0: 256.
	Requests int
	// MaxValueBytes is the longest value that is swapped; 0: MaxValueBytes. It is the areas', and not more than the store's.
	MaxValueBytes int
	// Background is the tenant in whose name keys come home.
	Background uint32
	// Policy says when; zero fields have their defaults.
	Policy Policy
	// Alloc returns n bytes for I/O, block-aligned; nil: make.
	Alloc func(n int) []byte
}

// HomeArea is an area as a home knows it.
type HomeArea struct {
	UUID      [16]byte
	Log       guest.Log
	BlockSize int
	Attachment
}

// Verdict is what is done with a request.
type Verdict uint8

// Verdicts.
const (
	// ToStore: it is the store's, as if there were no swapping.
	ToStore Verdict = iota
	// Taken: a Reply will follow.
	Taken
	// Full: it has to be brought again after a Turn with completions.
	Full
)

// AreaAppend is an Append for an area of the home.
type AreaAppend struct {
	Area int
	Append
}

// AreaRelease is a Release for an area of the home.
type AreaRelease struct {
	Area  int
	Home  int
	Place uint64
}

// Actions is what a Home's Turn wants done. The driver keeps it and empties the slices.
type Actions struct {
	// IOs are reads in areas, and reads and writes of the home's own partition.
	IOs []IO
	// Appends are brought to their areas in order; their values are the requests' own.
	Appends  []AreaAppend
	Releases []AreaRelease
	Replies  []kvstore.Reply
	// WakeNS is when Turn is to be called at the latest even if nothing happens; 0: never.
	WakeNS int64
}

// Home is the machine that decides for one partition what goes where. Between the areas and the home's store it
// knows alone where the newest value of a key is.
type Home struct {
	cfg  HomeConfig
	out  Actions
	now  int64
	seed uint64

	// The index: chained by hash in table, by place in the list of its area.
	entries   []entry
	table     []int32
	freeEntry int32
	used      int
	// outBytes is what the values take that are out.
	outBytes int64
	areas    []areaOfHome

	ops []op
	// links are of the lists of ops.
	links   fifo.Links
	freeOps fifo.List
	// requests are the ops that are not the Home's own. Invariant: requests <= cfg.Requests, so that keys can
	// come home whatever waits for them.
	requests int
	// toStore are the ops that the home's store is to take, atStore how many it has.
	toStore fifo.List
	atStore int
	lists   fifo.List // Lists that wait until all keys are at home
	big     [][]byte
	bigFree []int32
	bigWait fifo.List
	// writes are the hashes of the keys of writes that are in the store, by the driver's tag; 0: none.
	writes []uint64

	load     loadState
	sweep    sweepState
	book     bookState
	draining bool
	leaving  bool // nothing comes home any more
	stats    Stats
}

// Stats count since the start, but for Keys, which are out now.
type Stats struct {
	Keys int64
	// Swapped were written to an area in place of the home; Reads were read there, Returned have come home.
	Swapped, Reads, Returned int64
	// Moved were written again to the same area, so that its log could go on. Refused found no room there. Failures of coming
	// home are tried again.
	Moved, Refused, Failures int64
}

// entry is a key that is out, or about to be. It has no pointers.
type entry struct {
	key [format.MaxKey]byte
	// place and at are those of its newest durable record, valueLen its value's length.
	place    uint64
	at       uint32
	valueLen uint32
	hash     uint32
	// chain links those of one place in the table, and the free ones; prev and next the durable ones of an area.
	chain, prev, next int32
	// waiting are writes that wait, in order.
	waiting fifo.List
	// appends are under way, doubts of them doubtful.
	appends, doubts uint16
	keyLen, area    uint8
	// durable: there is a record. deleted: it says that the key does not exist.
	durable, deleted bool
	// homing: it is coming home, its writes wait. wanted: one of them wants it to.
	homing, wanted bool
	// returned: the home has what its record says, durably; the book does not say so yet.
	returned bool
}

// areaOfHome is what a home knows of an area.
type areaOfHome struct {
	HomeArea
	// first and last are its durable entries, by place.
	first, last int32
	// appends are under way; entries have it as their area, wanted of them are.
	appends, entries, wanted int
	// acked is the place behind our newest record that is known to be durable: what is under way comes after it, be it in
	// the same group. group is where that group begins, end where it ends.
	acked, group, end uint64
	// listed: every copy of the book that counts has a line for it, with that floor; perhaps: one may have. wantListed is what
	// the book is to say, and writing what the one says that is being written.
	listed, perhaps, wantListed, writing bool
	floor                                uint64
	// released is what the area was told, if it was.
	released uint64
	told     bool
	// lastNS is when it was last of use.
	lastNS int64
	// failed: the last attempt to bring its oldest home has failed; not again before retryNS.
	failed  bool
	retryNS int64
}

// opKind is why an op is here.
type opKind uint8

const (
	opFree  opKind = iota
	opRead         // a Get or Exist
	opWrite        // a Put or Delete
	opList
	opHoming // a record on its way home
	opMoving // a record on its way to the end of its log
)

// op is a request in progress.
type op struct {
	kind   opKind
	do     kvstore.Op
	cond   kvstore.Condition
	tag    uint64
	tenant uint32
	hash   uint32
	key    [format.MaxKey]byte
	keyLen uint8
	// value is the request's own, or of an opHoming what was read. room is the request's.
	value []byte
	room  func(length int) []byte
	entry int32
	// home: it waits for its key to be at home. told: it is answered already, but its record is doubtful.
	home, told bool
	// What is read: where, and where in the buffer it begins.
	area     uint8
	place    uint64
	at       uint32
	valueLen uint32
	member   uint8 // of the sweep
	lead     int
	buf      []byte
	big      int32
}

// NewHome makes a Home. Before Turn was called the first time it takes no requests.
//
// Errors: ErrBook naming the area that is missing or is not what the book says.
func NewHome(cfg HomeConfig) (*Home, error) {
	setDefault(&cfg.Keys, 16<<10)
	setDefault(&cfg.Requests, 256)
	setDefault(&cfg.MaxValueBytes, MaxValueBytes)
	if cfg.Alloc == nil {
		cfg.Alloc = func(n int) []byte { return make([]byte, n) }
	}
	cfg.Policy.setDefaults()
	h := &Home{cfg: cfg, freeEntry: nobody, freeOps: fifo.None, toStore: fifo.None, lists: fifo.None, bigWait: fifo.None, load: loadState{to: nobody}}
	if err := h.attach(); err != nil {
		return nil, err
	}
	if len(h.areas) == 0 {
		return h, nil
	}
	h.seed = uint64(h.areas[0].Log.Salt)*0x9E3779B97F4A7C15 ^ 0x6A626F66
	n := 2
	for n < 2*cfg.Keys {
		n *= 2
	}
	h.table = make([]int32, n)
	for i := range h.table {
		h.table[i] = nobody
	}
	guests := 0
	for i := range h.areas {
		guests += len(h.areas[i].Guests)
	}
	h.entries = make([]entry, max(cfg.Keys, guests))
	for i := range h.entries {
		h.entries[i].chain = h.freeEntry
		h.freeEntry = int32(i)
	}
	h.ops = make([]op, cfg.Requests+batchKeys)
	h.links = make(fifo.Links, len(h.ops))
	for i := range h.ops {
		h.ops[i] = op{big: nobody}
		h.links.Push(&h.freeOps, int32(i))
	}
	for i := range bigBuffers {
		h.big = append(h.big, cfg.Alloc(format.RoundUp(guest.RecordBytes(cfg.MaxValueBytes), 4096)+2*4096))
		h.bigFree = append(h.bigFree, int32(i))
	}
	h.writes = make([]uint64, 0, 1024)
	h.takeGuests()
	return h, nil
}

func setDefault[T int | int64](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// takeGuests puts what was found into the index.
func (h *Home) takeGuests() {
	for i := range h.areas {
		a := &h.areas[i]
		for _, g := range a.Guests {
			if g.Place < a.floor {
				continue
			}
			ei := h.addEntry(i, g.Key, g.KeyLen)
			e := &h.entries[ei]
			e.durable, e.deleted, e.valueLen, e.place, e.at = true, g.Deleted, g.ValueLen, g.Place, g.At
			h.outBytes += int64(e.valueLen)
			h.append(ei)
		}
		a.Guests = nil
		h.release(i)
	}
}

// Empty reports that no key is out and nothing asks for one to be.
func (h *Home) Empty() bool { return h.used == 0 && h.load.to == nobody && h.lists.N == 0 }

// Stats returns the counters.
func (h *Home) Stats() Stats {
	s := h.stats
	s.Keys = int64(h.used)
	return s
}

// Began says that the store has taken a write of that key with the driver's tag, and Ended that it is over. A key does
// not come home before the writes that were there when it went.
//
// hot: 0 allocs
func (h *Home) Began(tag uint32, key []byte) {
	for int(tag) >= len(h.writes) {
		h.writes = append(h.writes, 0)
	}
	h.writes[tag] = h.hash(key) | 1<<32
}

// Ended says that the request with that tag is over.
//
// hot: 0 allocs
func (h *Home) Ended(tag uint32) {
	if int(tag) < len(h.writes) { // else it was no write
		h.writes[tag] = 0
	}
}

func (h *Home) hash(key []byte) uint64 {
	x := format.HashKey(h.seed, key)
	return uint64(uint32(x ^ x>>32))
}

// Submit says whose a request is.
//
// hot: 0 allocs
func (h *Home) Submit(r *kvstore.Request) Verdict {
	if h.Empty() || len(r.Key) > format.MaxKey || len(r.Key) == 0 && r.Op != kvstore.List {
		return ToStore
	}
	if r.Op == kvstore.List {
		return h.takeList(r)
	}
	hash := uint32(h.hash(r.Key))
	ei := h.find(hash, r.Key)
	if ei == nobody && (r.Op != kvstore.Put || r.Condition != kvstore.Always || !h.mayLend(len(r.Value))) {
		return ToStore
	}
	read := r.Op == kvstore.Get || r.Op == kvstore.Exist
	if read && !h.entries[ei].durable && h.entries[ei].doubts == 0 {
		return ToStore // nothing of it was acknowledged yet
	}
	oi := h.takeRequest()
	if oi == nobody {
		if ei == nobody {
			return ToStore
		}
		return Full
	}
	o := &h.ops[oi]
	o.kind, o.do, o.cond, o.tag, o.tenant, o.hash = opWrite, r.Op, r.Condition, r.Tag, r.Tenant, hash
	o.keyLen, o.value, o.room = uint8(len(r.Key)), r.Value, r.Room
	copy(o.key[:], r.Key)
	if read {
		o.kind = opRead
		h.read(oi, ei)
		return Taken
	}
	if ei == nobody {
		ei = h.addEntry(h.load.to, o.key, o.keyLen)
	}
	h.write(oi, ei)
	return Taken
}

// takeList makes a List wait for all keys to be at home.
func (h *Home) takeList(r *kvstore.Request) Verdict {
	if h.used == 0 {
		return ToStore
	}
	oi := h.takeRequest()
	if oi == nobody {
		return Full
	}
	o := &h.ops[oi]
	o.kind, o.do, o.tag, o.tenant, o.keyLen, o.value = opList, r.Op, r.Tag, r.Tenant, uint8(len(r.Key)), r.Value
	copy(o.key[:], r.Key)
	h.links.Push(&h.lists, oi)
	return Taken
}

// write does a write of a key with an entry, or lets it wait behind others.
func (h *Home) write(oi, ei int32) {
	o, e := &h.ops[oi], &h.entries[ei]
	o.entry = ei
	switch {
	case e.doubts > 0:
		h.finish(oi, kvstore.DeviceError, 0)
	case e.homing || e.waiting.N > 0 || !h.begin(oi):
		h.links.Push(&e.waiting, oi)
	}
}

// begin begins a write, or reports that it must wait: a condition for the appends before it, and what cannot
// be appended until the key has come home.
func (h *Home) begin(oi int32) bool {
	o := &h.ops[oi]
	e := &h.entries[o.entry]
	if o.do == kvstore.Delete || o.cond != kvstore.Always {
		if e.appends > 0 {
			return false
		}
		switch {
		case o.do == kvstore.Delete && e.deleted, o.cond == kvstore.IfPresent && e.deleted:
			h.finish(oi, kvstore.NotFound, 0)
			return true
		case o.cond == kvstore.IfAbsent && !e.deleted:
			h.finish(oi, kvstore.Exists, 0)
			return true
		}
	}
	if o.home || o.do == kvstore.Put && len(o.value) > h.cfg.MaxValueBytes {
		if h.leaving {
			h.finish(oi, kvstore.DeviceError, 0)
			return true
		}
		h.want(o.entry)
		return false
	}
	h.send(oi)
	return true
}

// send appends what an op says to the area of its entry.
func (h *Home) send(oi int32) {
	o := &h.ops[oi]
	e := &h.entries[o.entry]
	kind, value := guest.Put, o.value
	if o.do == kvstore.Delete {
		kind, value = guest.Delete, nil
	}
	a := &h.areas[e.area]
	o.valueLen = uint32(len(value))
	e.appends++
	a.appends++
	a.lastNS = h.now
	h.out.Appends = append(h.out.Appends, AreaAppend{Area: int(e.area), Append: Append{
		Home: a.Home, Kind: kind, Key: o.key[:o.keyLen], Value: value, Tag: uint32(oi), Tenant: o.tenant,
	}})
}

// want asks for a key to come home.
func (h *Home) want(ei int32) {
	if e := &h.entries[ei]; !e.wanted {
		e.wanted = true
		h.areas[e.area].wanted++
	}
}

// next goes on with the writes that wait.
func (h *Home) next(ei int32) {
	e := &h.entries[ei]
	for e.waiting.N > 0 && !e.homing && e.doubts == 0 {
		oi := h.links.Pop(&e.waiting)
		if !h.begin(oi) {
			h.links.PushFront(&e.waiting, oi)
			return
		}
	}
}

// refuseWaiting ends the writes that wait.
func (h *Home) refuseWaiting(ei int32, st kvstore.Status) {
	e := &h.entries[ei]
	for e.waiting.N > 0 {
		h.finish(h.links.Pop(&e.waiting), st, 0)
	}
	if e.wanted {
		e.wanted = false
		h.areas[e.area].wanted--
	}
}

// Outcome takes an area's answer to an Append.
//
// hot: 0 allocs
func (h *Home) Outcome(r *Outcome) {
	oi := int32(r.Tag)
	o := &h.ops[oi]
	ei := o.entry
	e := &h.entries[ei]
	a := &h.areas[e.area]
	if r.Result == Doubtful {
		// What waits began before this failed: its fate must not be better known than the failed one's.
		e.doubts++
		o.told = true
		o.value = nil
		if o.kind == opMoving {
			h.over(int(o.member), kvstore.DeviceError)
		} else {
			h.answer(o, kvstore.DeviceError, 0)
		}
		h.refuseWaiting(ei, kvstore.DeviceError)
		return
	}
	e.appends--
	a.appends--
	if o.told {
		e.doubts--
	}
	if r.Result == Refused {
		h.stats.Refused++
		if o.kind == opMoving {
			i := int(o.member)
			h.freeOpNow(oi)
			h.over(i, kvstore.DeviceError)
			return
		}
		if e.doubts > 0 {
			h.finish(oi, kvstore.DeviceError, 0)
			return
		}
		if e.durable || e.appends > 0 {
			o.home = true
			h.links.PushFront(&e.waiting, oi)
			h.next(ei)
			return
		}
		h.links.PushFront(&e.waiting, oi)
		h.drop(ei)
		return
	}
	h.outBytes -= int64(e.valueLen)
	e.durable, e.deleted, e.valueLen = true, o.do == kvstore.Delete, o.valueLen
	h.outBytes += int64(e.valueLen)
	h.unlink(ei)
	e.place, e.at = r.Place, r.At
	h.append(ei)
	a.acked, a.group, a.end = r.Place+1, r.Place-uint64(r.At), r.End
	switch {
	case o.kind == opMoving:
		h.stats.Moved++
		if !o.told {
			h.over(int(o.member), kvstore.OK)
		}
	default:
		h.stats.Swapped++
		if !o.told {
			h.answer(o, kvstore.OK, 0)
		}
	}
	h.freeOpNow(oi)
	h.next(ei)
}

// drop forgets an entry: the home has the truth. What waits goes there.
func (h *Home) drop(ei int32) {
	e := &h.entries[ei]
	invariants.Check(e.appends == 0, "swap: a key goes home with appends under way")
	for e.waiting.N > 0 {
		h.goHome(h.links.Pop(&e.waiting))
	}
	if e.wanted {
		h.areas[e.area].wanted--
	}
	h.outBytes -= int64(e.valueLen)
	h.unlink(ei)
	h.areas[e.area].entries--
	at := &h.table[e.hash&uint32(len(h.table)-1)]
	for *at != ei {
		at = &h.entries[*at].chain
	}
	*at = e.chain
	*e = entry{chain: h.freeEntry}
	h.freeEntry = ei
	h.used--
}

// goHome gives an op to the home's store.
func (h *Home) goHome(oi int32) {
	h.ops[oi].entry = nobody
	h.links.Push(&h.toStore, oi)
}

// NextForStore returns the request that the store is to take next, whose tag is for Stored, or false. If the store
// has room for it TakenByStore follows.
//
// hot: 0 allocs
func (h *Home) NextForStore(r *kvstore.Request) bool {
	if h.toStore.N == 0 {
		return false
	}
	oi := h.toStore.First
	o := &h.ops[oi]
	*r = kvstore.Request{Op: o.do, Condition: o.cond, Tag: uint64(oi), Tenant: o.tenant, Key: o.key[:o.keyLen], Value: o.value, Room: o.room}
	return true
}

// TakenByStore: the store has taken what NextForStore has returned.
func (h *Home) TakenByStore() {
	h.links.Pop(&h.toStore)
	h.atStore++
}

// Stored takes the store's answer to a request of NextForStore.
func (h *Home) Stored(tag uint64, st kvstore.Status, valueLen int) {
	oi := int32(tag)
	h.atStore--
	if h.ops[oi].kind == opHoming {
		h.homed(oi, st)
		return
	}
	h.finish(oi, st, valueLen)
}

// writing reports whether a write of a key with that hash is in the home's store or on its way there.
func (h *Home) writing(hash uint32) bool {
	for _, w := range h.writes {
		if w == uint64(hash)|1<<32 {
			return true
		}
	}
	if h.atStore+h.toStore.N == 0 {
		return false
	}
	for i := range h.ops {
		if o := &h.ops[i]; o.kind == opWrite && o.entry == nobody && o.hash == hash {
			return true
		}
	}
	return false
}

// Turn does what became possible and appends what it wants done to out. The driver calls it after a batch of
// Submit, Complete, Outcome, Stored and Observe and when WakeNS has come.
//
// hot: 0 allocs
func (h *Home) Turn(nowNS int64, out *Actions) {
	h.now = nowNS
	h.out.WakeNS = 0
	if len(h.areas) > 0 {
		h.sweepStep()
		h.bookStep()
	}
	out.IOs = append(out.IOs, h.out.IOs...)
	out.Appends = append(out.Appends, h.out.Appends...)
	out.Releases = append(out.Releases, h.out.Releases...)
	out.Replies = append(out.Replies, h.out.Replies...)
	out.WakeNS = h.out.WakeNS
	h.out.IOs, h.out.Appends, h.out.Releases, h.out.Replies = h.out.IOs[:0], h.out.Appends[:0], h.out.Releases[:0], h.out.Replies[:0]
}

// wake makes sure that Turn is called by then.
func (h *Home) wake(atNS int64) {
	if h.out.WakeNS == 0 || atNS < h.out.WakeNS {
		h.out.WakeNS = atNS
	}
}

// Complete takes the completion of an I/O.
//
// hot: 0 allocs
func (h *Home) Complete(tag uint32, err error) {
	if int(tag) == len(h.ops) {
		h.bookWritten(err == nil)
		return
	}
	h.recordRead(int32(tag), err == nil)
}

// Tags is how many tags I/Os have at most, from 0.
func (h *Home) Tags() int { return len(h.ops) + 1 }

func (h *Home) answer(o *op, st kvstore.Status, valueLen int) {
	h.out.Replies = append(h.out.Replies, kvstore.Reply{Tag: o.tag, Status: st, ValueLen: valueLen})
}

// finish answers an op and frees it.
func (h *Home) finish(oi int32, st kvstore.Status, valueLen int) {
	h.answer(&h.ops[oi], st, valueLen)
	h.freeOpNow(oi)
}
