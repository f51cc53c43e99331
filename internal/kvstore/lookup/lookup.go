// Package lookup is the reading side of a key-value store: a machine that finds values, and lists keys.
//
//	Begin ──> segment's place (SegTbl) ──> read segment ──> find the key ──> read value ──> Done
//
// It changes nothing. What it reads may be moved meanwhile, and its place written again: every record is checked,
// and one that is not what it should be is looked for again if the SegTbl says something else by then.
package lookup

import (
	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/fifo"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/segtbl"
)

// Op is what a Request asks for.
type Op uint8

// Operations.
const (
	// Get copies the value to Request.Value, as much as fits.
	Get Op = iota
	// Exist looks for the key.
	Exist
	// List fills Request.Value with keys.
	List
)

// Result is how a Request ended.
type Result uint8

// Results.
const (
	// Found: done.
	Found Result = iota
	// NotFound: there is no such key.
	NotFound
	// DeviceError: a read failed.
	DeviceError
	// Corrupt: what was read is not what was written.
	Corrupt
)

// Request is what to read. It is copied by Begin, but Value is the Machine's until Done.
type Request struct {
	Op     Op
	Tag    uint64
	Tenant uint32
	Key    []byte
	Value  []byte
	// Room, if set, is asked for the memory of a value that Value is too short for, when its length is known and
	// before it is read: a Get need not bring any. Without an answer the Request ends as Found, and nothing is copied.
	Room func(length int) []byte
}

// Host does for a Machine what it cannot do itself.
type Host interface {
	// ReadFor asks for a read, for a tenant; then Read is to be called with the slot.
	ReadFor(slot int32, tenant uint32, offset int64, buf []byte)
	// Done ends a Request. length is the whole length of the value, or of the list.
	Done(tag uint64, r Result, length int)
	// Damaged says that a live record, of a segment or (hash is that of the key) of a value, is not what was written.
	Damaged(offset int64, segment uint32, hash uint64)
}

// Config of a Machine. Table and Pool are the store's.
type Config struct {
	Host      Host
	Table     *segtbl.Table
	Pool      *chunks.Pool
	HashSeed  uint64
	BlockSize int
	// Requests is how many may be in progress, MaxValueBytes the length of the longest value.
	Requests, MaxValueBytes int
	// Alloc returns n bytes for I/O.
	Alloc func(n int) []byte
}

// Machine is the reading side of a store.
type Machine struct {
	Config
	ops []op
	// links are of free and of the lists of those that wait for memory.
	links fifo.Links
	free  fifo.List
	// listed is for a List to sort a segment's keys.
	listed   []listed
	borrowed borrowed
}

const nobody = fifo.Nobody

type op struct {
	kind   Op
	keyLen uint8
	key    [format.MaxKey]byte
	tag    uint64
	tenant uint32
	hash   uint64
	// value is where it goes, length its whole length.
	value  []byte
	room   func(length int) []byte
	length uint32
	// entry is what the SegTbl said when segment was asked for, life the epoch of its chunk then, epoch that of the
	// value's, and lead where in the buffer the record begins.
	entry   segtbl.Entry
	segment uint32
	life    uint32
	epoch   uint32
	lead    uint32
	place   int64 // of the value; 0: the segment is being read
	// position is how far a List is.
	position uint64
	buf      []byte
	big      int32 // the buffer that it has borrowed
}

// New makes a Machine.
func New(cfg Config) *Machine {
	m := &Machine{Config: cfg, ops: make([]op, cfg.Requests), links: make(fifo.Links, cfg.Requests), free: fifo.None, listed: make([]listed, 0, 256)}
	for i := range m.ops {
		m.ops[i].big = nobody
		m.links.Push(&m.free, int32(i))
	}
	m.makeBuffers()
	return m
}

// Busy is how many Requests are in progress.
func (m *Machine) Busy() int { return len(m.ops) - m.free.N }

// Begin takes a Request and reports whether there was room for it.
//
// hot: 0 allocs
func (m *Machine) Begin(r *Request) bool {
	if m.free.N == 0 {
		return false
	}
	i := m.links.Pop(&m.free)
	o := &m.ops[i]
	*o = op{
		kind: r.Op, tag: r.Tag, tenant: r.Tenant, keyLen: uint8(len(r.Key)), hash: format.HashKey(m.HashSeed, r.Key),
		value: r.Value, room: r.Room, buf: o.buf, big: nobody,
	}
	copy(o.key[:], r.Key)
	if o.kind == List {
		m.beginList(i)
	} else {
		m.lookup(i)
	}
	return true
}

// Read ends a read that was asked for.
//
// hot: 0 allocs
func (m *Machine) Read(slot int32, ok bool) {
	switch o := &m.ops[slot]; {
	case !ok:
		m.finish(slot, DeviceError)
	case o.kind == List:
		m.listRead(slot)
	case o.place == 0:
		m.lookupRead(slot)
	default:
		m.valueRead(slot)
	}
}

// lookup begins a Get or Exist, or begins it again.
func (m *Machine) lookup(i int32) {
	o := &m.ops[i]
	o.segment = m.Table.Segment(o.hash)
	if o.entry = m.Table.Get(o.segment); o.entry == 0 {
		m.finish(i, NotFound)
		return
	}
	m.readSegment(i)
}

// readSegment reads the segment at entry.
func (m *Machine) readSegment(i int32) {
	o := &m.ops[i]
	o.place = 0
	o.life = m.lifeOf(o.entry)
	m.read(i, o.entry.Offset(), o.entry.MaxBytes())
}

// read reads the blocks around n bytes, as soon as there is memory for them.
func (m *Machine) read(i int32, offset int64, n int) {
	if buf := m.memory(i, n); buf != nil {
		o := &m.ops[i]
		start, length := m.Pool.Around(offset, n, m.BlockSize)
		o.lead = uint32(offset - start)
		m.Host.ReadFor(i, o.tenant, start, buf[:length])
	}
}

// lifeOf is the epoch of the chunk of a segment.
func (m *Machine) lifeOf(e segtbl.Entry) uint32 { return m.Pool.Chunks[m.Pool.Of(e.Offset())].Epoch }

// elsewhere reports that the segment is not any more where it was when it was asked for: in another place, or in the same one of a
// chunk that has been used again since.
func (m *Machine) elsewhere(o *op) bool {
	e := m.Table.Get(o.segment)
	return e != o.entry || m.lifeOf(e) != o.life
}

// check returns the segment that was read, or nil: then the op has ended.
func (m *Machine) check(i int32) format.Segment {
	o := &m.ops[i]
	seg := format.Segment(m.bytesOf(o))
	if seg.Check(m.Pool.Seed(o.entry.Offset())) != nil || seg.Number() != o.segment {
		m.Host.Damaged(o.entry.Offset(), o.segment, 0)
		m.finish(i, Corrupt)
		return nil
	}
	return seg
}

// lookupRead takes the segment that was read. If it is elsewhere by now, what was read may be anything.
func (m *Machine) lookupRead(i int32) {
	o := &m.ops[i]
	if m.Table.Segment(o.hash) != o.segment || m.elsewhere(o) {
		m.lookup(i)
		return
	}
	seg := m.check(i)
	if seg == nil {
		return
	}
	at := seg.Find(o.key[:o.keyLen])
	if at == 0 {
		m.finish(i, NotFound)
		return
	}
	it := seg.Item(at)
	o.length = uint32(it.ValueLen())
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
	o.place = it.ValueOffset()
	if !m.Pool.Contains(o.place) {
		m.Host.Damaged(o.entry.Offset(), o.segment, 0)
		m.finish(i, Corrupt)
		return
	}
	o.epoch = m.Pool.Chunks[m.Pool.Of(o.place)].Epoch
	m.readValue(i)
}

func (m *Machine) readValue(i int32) {
	m.read(i, m.ops[i].place, format.ValueBytes(int(m.ops[i].length)))
}

func (m *Machine) valueRead(i int32) {
	o := &m.ops[i]
	v := format.Value(m.bytesOf(o))
	switch {
	case v.Check(m.Pool.SeedOf(o.epoch, o.place)) == nil && v.Hash() == o.hash && v.ValueLen() == int(o.length):
		copy(o.value, v.Data())
		m.finish(i, Found)
	case m.Table.Segment(o.hash) != o.segment || m.elsewhere(o):
		// It was moved or replaced, and its chunk written again.
		m.lookup(i)
	default:
		m.Host.Damaged(o.place, o.segment, o.hash)
		m.finish(i, Corrupt)
	}
}

// finish ends an op.
func (m *Machine) finish(i int32, r Result) {
	o := &m.ops[i]
	o.value, o.room = nil, nil
	m.giveBack(i)
	m.Host.Done(o.tag, r, int(o.length))
	m.links.PushFront(&m.free, i) // its buffer is in the cache
}
