// Package lookup is the reading side of a key-value store: the table of segments (SegTbl), and a machine that finds
// values, lists keys, and returns or sums up what a range of positions has.
//
//	Begin ──> entry in the SegTbl ──> read segment ──> find the key ──> read value ──> Done
//
// Pieces of a value that lie one behind the other are read at once.
//
// The machine changes nothing. While it reads, a segment or value may be moved and its place be written again.
// Therefore every record is checked, and if one is not valid the lookup starts again in case the SegTbl has changed.
package lookup

import (
	"math/bits"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/list"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// Op is what a Request asks for.
type Op uint8

// Operations.
const (
	// Get copies the value to Request.Value, as much as fits.
	Get Op = iota
	// Exist reports whether the key exists.
	Exist
	// List fills Request.Value with keys.
	List
	// Scan, CopyOut, Count and Digest fill Request.Value with an nvme.KVRange of Request.Range.
	Scan
	CopyOut
	Count
	Digest
)

// Result is the outcome of a Request.
type Result uint8

// Results.
const (
	// Found: done.
	Found Result = iota
	// NotFound: the key does not exist.
	NotFound
	// DeviceError: a read failed.
	DeviceError
	// Corrupt: a record is damaged.
	Corrupt
	// TooShort: the memory of a Scan or CopyOut has no room for the first entry. Object.Length is how much it needs.
	TooShort

	results
)

// Request is copied by Begin, but the memory of Value belongs to the Machine until Done.
type Request struct {
	Op     Op
	Tag    uint64
	Tenant tenant.ID
	Key    []byte
	Value  []byte
	// Room, if set, is called when a Get has found that its value is longer than Value, before the value is read. It
	// returns memory for it. If it returns nil, the Request ends as Found and nothing is copied.
	Room func(length int) []byte
	// Sound: of a segment that has lost keys only what has a greater version counts; 0: everything.
	Sound uint64
	// Range is for Scan, CopyOut, Count and Digest.
	Range Range
	// Background: the store's background work pays, not the tenant.
	Background bool
}

// Object describes an object that was found.
type Object struct {
	// Length is that of the whole value, or of the list that a List has made.
	Length int
	// Version is the object's version. Expires is when it does not exist any more, in unix seconds; 0: never.
	Version uint64
	Expires uint32
}

// Host is what a Machine needs of the store.
type Host interface {
	// ReadFor starts a read in the name of a tenant, or of the store's background work. Machine.Read must be called
	// with the slot when it has ended.
	ReadFor(slot int32, tenant tenant.ID, background bool, offset units.ExtentOffset, buf []byte)
	// Done ends a Request. The Object is what a Get or an Exist has found.
	Done(tag uint64, r Result, o Object)
	// Checked ends a Check: the value was Found, or it is NotFound, or could not be read.
	Checked(tag uint64, r Result)
	// Damaged reports a live record of at most n bytes that is damaged: a segment, or a value if hash is the hash of
	// its key. It returns Corrupt, or DeviceError if the record may be read later.
	Damaged(offset units.ExtentOffset, n int, segment uint32, hash uint64) Result
}

// Config describes a Machine. Table and Pool belong to the store.
type Config struct {
	Host      Host
	Table     *SegTbl
	Pool      *space.Pool
	HashSeed  uint64
	BlockSize int
	// Requests is how many may be in progress. MaxExtentBytes is the length of the records of the longest value.
	Requests, MaxExtentBytes int
	// Alloc returns memory for I/O.
	Alloc space.Alloc
}

// Machine finds values and lists keys.
type Machine struct {
	Config
	// Wall is the time in unix seconds. Objects that have expired by then are not found.
	Wall uint32
	// Drops are the ranges that were dropped. They belong to the store.
	Drops Drops
	// Stopping: range ops end as soon as they can.
	Stopping bool

	ops []op
	// links are those of free, skipping, chores and the lists of ops that wait for memory.
	links list.Links
	free  list.List
	// skipping are Lists that are to skip more empty segments. skips counts those that were skipped since Continue.
	skipping list.List
	skips    int
	// listed is where the keys of a segment are sorted.
	listed   []listed
	borrowed borrowed
	// ranges are the range ops, of which busyRanges are in use, freeRange the first that is free. parked are CopyOuts
	// that wait to read values, of which copies are being read, longCopies of them long ones. checks of those are
	// checks. awaited is AwaitCheck's n. checkedLast: a check has begun after the last read of a CopyOut.
	ranges             []rangeOp
	busyRanges         int
	freeRange          int32
	parked             list.List
	copies, longCopies int
	checks, awaited    int
	checkedLast        bool
	// chores are range ops that have something to do with their results. choresDone is what was done of that since
	// Continue, in bytes. inChores: it is being done.
	chores     list.List
	choresDone int
	inChores   bool
}

const none = list.NoRecord

type op struct {
	kind   Op
	keyLen uint8
	key    [format.MaxKey]byte
	tag    uint64
	tenant tenant.ID
	// background: the store's background work pays. sound is Request.Sound.
	background  bool
	sound, hash uint64
	// value is the request's memory, length the length of the whole value.
	value  []byte
	room   func(length int) []byte
	length uint32
	// version and expires are those of the object that was found.
	version uint64
	expires uint32
	// entry is the SegTbl's entry of segment when its read was started, and life the epoch of its chunk at that time.
	// lead is the offset of the record in the buffer.
	entry   Entry
	segment uint32
	life    space.Epoch
	lead    uint32
	// want is how many bytes of the segment are being read, if a read of as many as it may have has failed; else 0.
	want int
	// again: a damaged record has been read again.
	again bool
	// pieces are those of the value, from the first one that has not been read; empty: the segment is being read. run
	// of them are being read. at is where in the value they begin.
	pieces []piece
	run    int
	at     uint32
	// position is how far a List or range op has come. ranged is the rangeOp.
	position uint64
	ranged   int32
	// sought is the version that a checkValue is about, soughtLen the length of its value.
	sought    uint64
	soughtLen uint32
	// parent is the CopyOut that a copyValue belongs to, target the offset of its entry in the result.
	parent int32
	target uint32
	buf    []byte
	big    int32 // the larger buffer that the op has taken, or none
}

// piece is a piece of a value, or all of it. epoch is that of its chunk when the segment was read.
type piece struct {
	place  units.ExtentOffset
	length uint32
	// record is the length of its record.
	record uint32
	epoch  space.Epoch
}

func (p *piece) end() units.ExtentOffset {
	return p.place + units.ExtentOffset(p.record)
}

// New makes a Machine.
//
// Errors: space.ErrNoMemory.
func New(cfg Config) (*Machine, error) {
	n := cfg.Requests + MaxRanges + maxCopies
	m := &Machine{Config: cfg, ops: make([]op, n), links: make(list.Links, n), free: list.None, skipping: list.None,
		parked: list.None, chores: list.None, listed: make([]listed, 0, 256)}
	m.makeRanges()
	for i := range m.ops {
		m.ops[i].big = none
		m.ops[i].pieces = make([]piece, 0, 1)
		m.links.Push(&m.free, int32(i))
	}
	return m, m.makeBuffers()
}

// Busy is the number of Requests in progress.
func (m *Machine) Busy() int { return len(m.ops) - m.free.N }

// Begin starts a Request and reports whether there was room for it.
//
// hot: 0 allocs
func (m *Machine) Begin(r *Request) bool {
	if r.Op > List && m.freeRange == none || r.Op <= List && m.free.N <= maxCopies-m.copies+MaxRanges-m.busyRanges {
		return false
	}
	i := m.links.Pop(&m.free)
	o := &m.ops[i]
	buf, pieces := o.buf, o.pieces[:0]
	*o = op{} // in place: a literal with fields would be made elsewhere and copied
	o.kind, o.tag, o.tenant, o.background, o.big = r.Op, r.Tag, r.Tenant, r.Background, none
	o.value, o.room, o.buf, o.pieces, o.sound = r.Value, r.Room, buf, pieces, r.Sound
	o.keyLen, o.hash = uint8(copy(o.key[:], r.Key)), format.HashKey(m.HashSeed, r.Key)
	switch {
	case o.kind == List:
		m.beginList(i)
	case o.isRange():
		m.beginRange(i, &r.Range)
	default:
		m.lookup(i)
	}
	return true
}

// Read ends a read that was started by Host.ReadFor.
//
// hot: 0 allocs
func (m *Machine) Read(slot int32, ok bool) {
	switch o := &m.ops[slot]; {
	case !ok && m.moved(o):
		m.restart(slot)
	case !ok && (len(o.pieces) > 0 || !m.readShorter(slot)):
		m.fail(slot, DeviceError)
	case !ok:
	case o.kind == List:
		m.listRead(slot)
	case o.isRange():
		m.rangeRead(slot)
	case len(o.pieces) == 0:
		m.lookupRead(slot)
	default:
		m.valueRead(slot)
	}
	m.unpark()
}

// lookup starts a Get or Exist, or starts it again.
func (m *Machine) lookup(i int32) {
	o := &m.ops[i]
	clear(o.value[:min(int(o.at), len(o.value))]) // pieces of an older value may be there
	o.at, o.version, o.expires = 0, 0, 0
	o.segment = m.Table.Segment(o.hash)
	if o.entry = m.Table.Get(o.segment); o.entry == 0 {
		m.finish(i, NotFound)
		return
	}
	m.readSegment(i)
}

// readSegment reads the segment at the op's entry.
func (m *Machine) readSegment(i int32) {
	o := &m.ops[i]
	o.pieces = o.pieces[:0]
	o.life, o.want = m.lifeOf(o.entry), 0
	m.read(i, o.entry.Offset(), o.entry.MaxBytes())
}

// readShorter reads a segment again without the last block that could not be read with it, and reports whether there is
// one. The segment may end before that block.
func (m *Machine) readShorter(i int32) bool {
	o := &m.ops[i]
	n := o.want
	if n == 0 {
		n = o.entry.MaxBytes()
	}
	start, length := m.Pool.Around(o.entry.Offset(), n, m.BlockSize)
	if length <= m.BlockSize {
		return false
	}
	o.want = length - m.BlockSize - int(o.entry.Offset()-start)
	m.read(i, o.entry.Offset(), o.want)
	return true
}

// read reads the blocks that contain n bytes, as soon as there is a buffer for them.
func (m *Machine) read(i int32, offset units.ExtentOffset, n int) {
	if buf := m.memory(i, n); buf != nil {
		o := &m.ops[i]
		start, length := m.Pool.Around(offset, n, m.BlockSize)
		o.lead = uint32(offset - start)
		m.Host.ReadFor(i, o.tenant, o.background, start, buf[:length])
	}
}

// lifeOf is the epoch of the chunk that contains a segment.
func (m *Machine) lifeOf(e Entry) space.Epoch { return m.Pool.Chunks[m.Pool.Of(e.Offset())].Epoch }

// elsewhere reports that the segment has moved since its read was started: to another place, or back to the same place
// of a chunk that has been used again since.
func (m *Machine) elsewhere(o *op) bool {
	e := m.Table.Get(o.segment)
	return e != o.entry || m.lifeOf(e) != o.life
}

// moved reports that what was read, or was not, says nothing about the key that the op looks for: its segment has moved
// since the read was started, or the key belongs to another segment now.
func (m *Machine) moved(o *op) bool {
	hash := o.hash
	if o.lists() {
		hash = bits.Reverse64(o.position)
	}
	return m.Table.Segment(hash) != o.segment || m.elsewhere(o)
}

// restart looks for the segment of an op again.
func (m *Machine) restart(i int32) {
	if m.ops[i].lists() {
		m.list(i)
	} else {
		m.lookup(i)
	}
}

// check returns the segment that was read, and the offset of the item of a key, or 0 if it has none. If the segment is
// damaged check reads it again, once, or ends the op, and returns nil. What was read may be what a failed write has
// left, which was put right since.
func (m *Machine) check(i int32, key []byte) (seg format.Segment, at int) {
	o := &m.ops[i]
	seg = format.Segment(m.bytesOf(o))
	at, err := seg.CheckFor(m.Pool.Seed(o.entry.Offset()), key)
	switch {
	case err == nil && seg.Number() == o.segment:
		return seg, at
	case o.want > 0:
		m.fail(i, DeviceError) // the rest of it cannot be read
	case !o.again:
		o.again = true
		m.readSegment(i)
	default:
		m.lost(i)
	}
	return nil, 0
}

// lost ends an op that needs keys which the segment has lost.
func (m *Machine) lost(i int32) {
	m.fail(i, m.lossOf(&m.ops[i]))
}

// lossOf reports that an op needs keys which its segment has lost, and returns the result that says so.
func (m *Machine) lossOf(o *op) Result {
	return m.Host.Damaged(o.entry.Offset(), o.entry.MaxBytes(), o.segment, 0)
}

// lookupRead handles the end of the read of a segment. If the segment has moved the bytes may be anything.
func (m *Machine) lookupRead(i int32) {
	o := &m.ops[i]
	if m.moved(o) {
		m.restart(i)
		return
	}
	seg, at := m.check(i, o.key[:o.keyLen])
	if seg == nil {
		return
	}
	if seg.Lossy() && (at == 0 || o.sound != 0 && seg.Item(at).Version() <= o.sound) {
		m.lost(i)
		return
	}
	if at == 0 {
		m.finish(i, NotFound)
		return
	}
	it := seg.Item(at)
	if !m.exists(it, o.hash) {
		m.finish(i, NotFound)
		return
	}
	o.version, o.expires = it.Version(), it.Expiry()
	pieces, length := seg.Pieces(at)
	if o.kind == copyValue && !m.refreshes(o, seg, at, length) {
		m.finish(i, NotFound)
		return
	}
	if o.kind == checkValue && (o.version != o.sought || length != int(o.soughtLen)) {
		m.finish(i, NotFound)
		return
	}
	o.length = uint32(length)
	if o.kind == Exist || o.length == 0 {
		m.finish(i, Found)
		return
	}
	if o.room != nil && len(o.value) < int(o.length) {
		if o.value = o.room(int(o.length)); o.value == nil {
			m.finish(i, Found)
			return
		}
	}
	if pieces > 1 {
		m.readPieces(i, seg, at, pieces)
		return
	}
	if m.addPiece(i, it.ValueOffset(), length, it.RecordBytes()) {
		m.readValue(i)
	}
}

// exists reports whether an item is that of an object that exists. The hash is that of its key.
func (m *Machine) exists(it format.Item, hash uint64) bool {
	return it.Exists(m.Wall) && (len(m.Drops) == 0 || !m.Drops.Covers(bits.Reverse64(hash), it.Version()))
}

// readPieces starts to read the value, of so many pieces, of the key whose item is at an offset of a segment.
func (m *Machine) readPieces(i int32, seg format.Segment, at, pieces int) {
	for range pieces {
		it := seg.Item(at)
		at += it.LengthBytes()
		if !m.addPiece(i, it.ValueOffset(), it.ValueLen(), it.RecordBytes()) {
			return
		}
	}
	m.readValue(i)
}

// addPiece adds a piece to those that are to be read. If there is no such place, the op ends, and addPiece returns
// false.
func (m *Machine) addPiece(i int32, place units.ExtentOffset, length, record int) bool {
	if !m.Pool.Contains(place) {
		m.lost(i)
		return false
	}
	o := &m.ops[i]
	o.pieces = append(o.pieces, piece{})
	p := &o.pieces[len(o.pieces)-1] // in place, without a copy
	p.place, p.length, p.record = place, uint32(length), uint32(record)
	p.epoch = m.Pool.Chunks[m.Pool.Of(place)].Epoch
	return true
}

// readValue reads the next piece of a value, and those that lie behind it in the partition.
func (m *Machine) readValue(i int32) {
	o := &m.ops[i]
	first, last := &o.pieces[0], &o.pieces[0]
	for o.run = 1; o.run < len(o.pieces); o.run++ {
		p := &o.pieces[o.run]
		if p.place != last.end() || int(p.end()-first.place) > m.MaxExtentBytes {
			break
		}
		last = p
	}
	m.read(i, first.place, int(last.end()-first.place))
}

// valueRead handles the end of the read of one piece of a value or more.
func (m *Machine) valueRead(i int32) {
	o := &m.ops[i]
	records := m.bytesOf(o)
	for j := range o.pieces[:o.run] {
		p, v := &o.pieces[j], format.Value(records)
		if v.Check(m.Pool.SeedOf(p.epoch, p.place)) != nil || !v.HasHash(o.hash) || v.ValueLen() != int(p.length) {
			m.valueDamaged(i, p)
			return
		}
		if int(o.at) < len(o.value) {
			copy(o.value[o.at:], v.Data())
		}
		o.at += p.length
		records = records[p.record:]
	}
	if o.run == len(o.pieces) {
		m.finish(i, Found)
		return
	}
	o.pieces = o.pieces[:copy(o.pieces, o.pieces[o.run:])]
	m.readValue(i)
}

// valueDamaged handles a record of a value that is not what it should be.
func (m *Machine) valueDamaged(i int32, p *piece) {
	o := &m.ops[i]
	if m.moved(o) || !o.again {
		// The value was moved or replaced, and its chunk has been written again. Or a second read does better.
		o.again = true
		m.lookup(i)
		return
	}
	m.fail(i, m.Host.Damaged(p.place, int(p.record), o.segment, o.hash))
}

// fail ends an op that has not found what it needs to know. A range op may still have a result.
func (m *Machine) fail(i int32, r Result) {
	if m.ops[i].isRange() {
		m.rangeFails(i, r)
		return
	}
	m.finish(i, r)
}

// finish ends an op.
func (m *Machine) finish(i int32, r Result) {
	o := &m.ops[i]
	switch o.kind {
	case copyValue:
		m.copied(i, r)
		return
	case checkValue:
		m.checked(i, r)
		return
	}
	o.value, o.room = nil, nil
	m.returnBuffer(i)
	m.Host.Done(o.tag, r, Object{Length: int(o.length), Version: o.version, Expires: o.expires})
	m.links.PushFront(&m.free, i) // the op that was used last is used next: its buffer is in the CPU's cache
}
