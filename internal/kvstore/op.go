package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/pipeline"
)

// op is a writing request in progress, or a record that compaction moves.
type op struct {
	kind   Op
	cond   Condition
	status Status
	// ready: its value, if it has one, is durable, so that its segment may be changed.
	ready bool
	// failed is why its value could not be written.
	failed Status
	keyLen uint8
	key    [format.MaxKey]byte
	tag    uint64
	tenant uint32
	slot   uint8 // of the compaction that it is for
	hash   uint64
	// value is the moved one in the memory of the compaction.
	value    []byte
	valueLen uint32
	// nextValue links it in its value group, or in the list of those at the gate.
	nextValue int32

	// group is the one of its value and groupOff where in it; offset is the value's place
	// in the partition since the group was bound, chunk the chunk pinned for it.
	group    int32
	groupOff uint32
	offset   int64
	chunk    int32
	// old is the place of a moved value or segment, segment the number of a touched one.
	old     int64
	segment uint32

	// What it did to its segment, to be counted when that is durable.
	oldOffset int64
	oldLen    uint32
	objects   int8
	used      bool // its value is in the segment
}

// pays is in whose name an op's I/Os are done.
func (o *op) pays() payer { return payer{tenant: o.tenant, background: o.kind >= opMove} }

// finish ends an op.
func (s *Store) finish(i int32, st Status) {
	o := &s.ops[i]
	if o.chunk != nobody {
		s.pool.Unpin(o.chunk)
		if !o.used || st != OK {
			s.pool.Died(o.offset, format.ValueBytes(int(o.valueLen)))
		}
	}
	o.chunk, o.value = nobody, nil
	if o.kind >= opMove {
		o.ready = true
		s.moved(o.slot, st)
		s.opLinks.Push(&s.freeInt, i)
		return
	}
	s.answer(o.tag, st, int(o.valueLen))
	s.opLinks.Push(&s.freeOps, i)
}

// reader is the Store as the host of its reading side.
type reader struct{ *Store }

// ReadFor implements lookup.Host.
func (s reader) ReadFor(slot int32, tenant uint32, offset int64, buf []byte) {
	s.ioFor(ioLookup, slot, payer{tenant: tenant}, pipeline.Read, offset, buf)
}

// Done implements lookup.Host.
func (s reader) Done(tag uint64, r lookup.Result, length int) {
	s.answer(tag, [...]Status{lookup.Found: OK, lookup.NotFound: NotFound, lookup.DeviceError: DeviceError, lookup.Corrupt: Corrupt}[r], length)
}

// Damaged implements lookup.Host.
func (s reader) Damaged(offset int64, segment uint32, hash uint64) {
	s.damage(Damage{Offset: offset, Segment: segment, Hash: hash})
}
