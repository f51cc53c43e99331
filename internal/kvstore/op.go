package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// op is a writing request in progress, or a record that compaction moves.
type op struct {
	kind   Op
	cond   Condition
	status Status
	// ready: the value, if there is one, is durable, so that the segment may be changed.
	ready bool
	// failed is why the value could not be written.
	failed Status
	keyLen uint8
	key    [format.MaxKey]byte
	tag    uint64
	tenant tenant.ID
	slot   uint8 // of the victim that compaction is emptying
	hash   uint64
	// value is the value that is moved, in the memory of compaction.
	value    []byte
	valueLen uint32
	// nextValue is the next op of the same group of values.
	nextValue int32

	// group contains the value at groupOff. When the group has its place, offset is that of the value in the partition,
	// and chunk is the chunk that is pinned for it.
	group    int32
	groupOff uint32
	offset   units.ExtentOffset
	chunk    format.ChunkNumber
	// old is the offset of the value or segment that is moved, segment the number of that segment.
	old     units.ExtentOffset
	segment uint32

	// What the op has changed in its segment. It is counted when the segment is durable.
	oldOffset units.ExtentOffset
	oldLen    uint32
	objects   int8
	used      bool // the segment refers to the value
}

// pays says who pays for the op's I/Os.
func (o *op) pays() payer { return payer{tenant: o.tenant, background: o.kind >= opMove} }

// finish ends an op.
func (s *Store) finish(i int32, st Status) {
	o := &s.ops[i]
	if o.chunk != none {
		s.pool.Unpin(o.chunk)
		if !o.used || st != OK {
			s.pool.SubLive(o.offset, format.ValueBytes(int(o.valueLen)))
		}
	}
	o.chunk, o.value = none, nil
	if o.kind >= opMove {
		o.ready = true
		s.moved(o.slot, st)
		s.opLinks.Push(&s.freeInt, i)
		return
	}
	s.compact.fresh = true
	s.answer(o.tag, st, int(o.valueLen))
	s.opLinks.Push(&s.freeOps, i)
}

// reader is the Store as the lookup.Host of its reading side.
type reader struct{ *Store }

// ReadFor implements lookup.Host.
func (s reader) ReadFor(slot int32, tenant tenant.ID, offset units.ExtentOffset, buf []byte) {
	s.ioFor(ioLookup, slot, payer{tenant: tenant}, pipeline.Read, offset, buf)
}

// Done implements lookup.Host.
func (s reader) Done(tag uint64, r lookup.Result, length int) {
	s.answer(tag, [...]Status{lookup.Found: OK, lookup.NotFound: NotFound, lookup.DeviceError: DeviceError,
		lookup.Corrupt: Corrupt}[r], length)
}

// Damaged implements lookup.Host.
func (s reader) Damaged(offset units.ExtentOffset, segment uint32, hash uint64) {
	s.damage(Damage{Offset: offset, Segment: segment, Hash: hash})
}
