// Package lookup is the reading side of a key-value store: the table of segments (SegTbl), and a machine that finds
// values and lists keys.
//
//	Begin ──> entry in the SegTbl ──> read segment ──> find the key ──> read value ──> Done
//
// The machine changes nothing. While it reads, a segment or value may be moved and its place be written again.
// Therefore every record is checked, and if one is not valid the lookup starts again in case the SegTbl has changed.
package lookup

import (
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
}

// Host is what a Machine needs of the store.
type Host interface {
	// ReadFor starts a read in the name of a tenant. Machine.Read must be called with the slot when it has ended.
	ReadFor(slot int32, tenant tenant.ID, offset units.ExtentOffset, buf []byte)
	// Done ends a Request. The length is that of the whole value, or of the list.
	Done(tag uint64, r Result, length int)
	// Damaged reports a live record that is damaged: a segment, or a value if hash is the hash of its key.
	Damaged(offset units.ExtentOffset, segment uint32, hash uint64)
}

// Config describes a Machine. Table and Pool belong to the store.
type Config struct {
	Host      Host
	Table     *SegTbl
	Pool      *space.Pool
	HashSeed  uint64
	BlockSize int
	// Requests is how many may be in progress. MaxValueBytes is the length of the longest value.
	Requests, MaxValueBytes int
	// Alloc returns memory for I/O.
	Alloc space.Alloc
}

// Machine finds values and lists keys.
type Machine struct {
	Config
	ops []op
	// links are those of free and of the lists of ops that wait for memory.
	links list.Links
	free  list.List
	// listed is where a List sorts the keys of a segment.
	listed   []listed
	borrowed borrowed
}

const none = list.NoRecord

type op struct {
	kind   Op
	keyLen uint8
	key    [format.MaxKey]byte
	tag    uint64
	tenant tenant.ID
	hash   uint64
	// value is the request's memory, length the length of the whole value.
	value  []byte
	room   func(length int) []byte
	length uint32
	// entry is the SegTbl's entry of segment when its read was started, life the epoch of its chunk at that time, and
	// epoch that of the value's chunk. lead is the offset of the record in the buffer.
	entry   Entry
	segment uint32
	life    uint32
	epoch   uint32
	lead    uint32
	place   units.ExtentOffset // offset of the value in the partition; 0: the segment is being read
	// position is how far a List has come.
	position uint64
	buf      []byte
	big      int32 // the larger buffer that the op has taken, or none
}

// New makes a Machine.
//
// Errors: space.ErrNoMemory.
func New(cfg Config) (*Machine, error) {
	m := &Machine{Config: cfg, ops: make([]op, cfg.Requests), links: make(list.Links, cfg.Requests), free: list.None,
		listed: make([]listed, 0, 256)}
	for i := range m.ops {
		m.ops[i].big = none
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
	if m.free.N == 0 {
		return false
	}
	i := m.links.Pop(&m.free)
	o := &m.ops[i]
	*o = op{
		kind: r.Op, tag: r.Tag, tenant: r.Tenant, keyLen: uint8(len(r.Key)), hash: format.HashKey(m.HashSeed, r.Key),
		value: r.Value, room: r.Room, buf: o.buf, big: none,
	}
	copy(o.key[:], r.Key)
	if o.kind == List {
		m.beginList(i)
	} else {
		m.lookup(i)
	}
	return true
}

// Read ends a read that was started by Host.ReadFor.
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

// lookup starts a Get or Exist, or starts it again.
func (m *Machine) lookup(i int32) {
	o := &m.ops[i]
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
	o.place = 0
	o.life = m.lifeOf(o.entry)
	m.read(i, o.entry.Offset(), o.entry.MaxBytes())
}

// read reads the blocks that contain n bytes, as soon as there is a buffer for them.
func (m *Machine) read(i int32, offset units.ExtentOffset, n int) {
	if buf := m.memory(i, n); buf != nil {
		o := &m.ops[i]
		start, length := m.Pool.Around(offset, n, m.BlockSize)
		o.lead = uint32(offset - start)
		m.Host.ReadFor(i, o.tenant, start, buf[:length])
	}
}

// lifeOf is the epoch of the chunk that contains a segment.
func (m *Machine) lifeOf(e Entry) uint32 { return m.Pool.Chunks[m.Pool.Of(e.Offset())].Epoch }

// elsewhere reports that the segment has moved since its read was started: to another place, or back to the same place
// of a chunk that has been used again since.
func (m *Machine) elsewhere(o *op) bool {
	e := m.Table.Get(o.segment)
	return e != o.entry || m.lifeOf(e) != o.life
}

// check returns the segment that was read. If it is damaged check ends the op and returns nil.
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

// lookupRead handles the end of the read of a segment. If the segment has moved the bytes may be anything.
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
		// The value was moved or replaced, and its chunk has been written again.
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
	m.returnBuffer(i)
	m.Host.Done(o.tag, r, int(o.length))
	m.links.PushFront(&m.free, i) // the op that was used last is used next: its buffer is in the CPU's cache
}
