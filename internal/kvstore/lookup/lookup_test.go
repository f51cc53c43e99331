package lookup

import (
	"bytes"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/nvme"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// failing is a Host that notes what is read and how a request has ended.
type failing struct {
	slot  int32
	place units.ExtentOffset
	buf   []byte
	reads int
	done  bool
	with  Result
	bytes int
}

func (h *failing) ReadFor(slot int32, _ tenant.ID, _ bool, offset units.ExtentOffset, buf []byte) {
	h.slot, h.place, h.buf, h.reads = slot, offset, buf, h.reads+1
}
func (h *failing) Done(_ uint64, r Result, o Object) {
	h.done, h.with, h.bytes = true, r, o.Length
}
func (h *failing) Checked(_ uint64, r Result)                             { h.done, h.with = true, r }
func (h *failing) Damaged(units.ExtentOffset, int, uint32, uint64) Result { return Corrupt }

// newFailing returns a machine whose table is empty, and its Host.
func newFailing(t *testing.T) (*failing, *Machine) {
	tbl := NewSegTbl(make([]byte, FirstSegments*EntryBytes))
	tbl.Grow(FirstSegments)
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetPartitionBytes(64 << 20)
	sb.SetChunkBytes(1 << 20)
	h := &failing{}
	m, err := New(Config{Host: h, Table: &tbl, Pool: space.New(sb), BlockSize: 512, Requests: 1,
		MaxExtentBytes: 4096, Alloc: space.HeapAlloc})
	if err != nil {
		t.Fatal(err)
	}
	return h, m
}

// TestWhatWasReadOfAnOlderValueIsErased: of a value in two pieces one has been read when the value is replaced by an
// empty one and the second piece is overwritten. The reply has nothing of the first.
func TestWhatWasReadOfAnOlderValueIsErased(t *testing.T) {
	h, m := newFailing(t)
	key, buf := []byte("key"), make([]byte, 300)
	number := m.Table.Segment(format.HashKey(m.HashSeed, key))
	places := []units.ExtentOffset{format.AreaStart + 512*10, format.AreaStart + 512*20}
	// segmentWith is what a read returns of the segment if the value has so many pieces of 100 bytes.
	segmentWith := func(pieces int, at units.ExtentOffset) format.Segment {
		seg := format.Segment(make([]byte, 512))
		seg.Clear(number)
		seg.Recode(1, 0)
		item := seg.Insert(key)
		seg.Extend(item, max(0, pieces-1))
		for n := range pieces {
			it := seg.Item(item)
			it.SetValueLen(100)
			it.SetValueOffset(places[n])
			item += it.LengthBytes()
		}
		seg.Seal(m.Pool.Seed(at))
		m.Table.Set(number, NewEntry(at, seg.ExtentBytes()))
		return seg
	}
	long := segmentWith(2, format.AreaStart+512)
	m.Begin(&Request{Op: Get, Key: key, Value: buf})
	copy(h.buf, long)
	m.Read(h.slot, true)
	v := format.Value(h.buf[:format.ValueBytes(100)])
	v.SetValueLen(100)
	v.SetHash(format.HashKey(m.HashSeed, key))
	copy(v.Data(), bytes.Repeat([]byte("x"), 100))
	v.Seal(m.Pool.Seed(h.place))
	m.Read(h.slot, true)
	if h.place != places[1] || buf[0] != 'x' {
		t.Fatalf("the last read is at %d, %q was copied", h.place, buf[:1])
	}
	empty := segmentWith(0, format.AreaStart+1024)
	clear(h.buf)
	m.Read(h.slot, true) // the second piece
	copy(h.buf, empty)
	m.Read(h.slot, true)
	if !h.done || h.with != Found || h.bytes != 0 {
		t.Fatalf("ended %v with %d, %d bytes, want Found with none", h.done, h.with, h.bytes)
	}
	if n := bytes.IndexFunc(buf, func(r rune) bool { return r != 0 }); n >= 0 {
		t.Errorf("%q is left at %d", buf[n], n)
	}
}

// TestAReadThatFailsWhereASegmentWasSaysNothing: while a segment is read it is written to another place. The read
// fails. The request reads the new place. It only ends with DeviceError when that cannot be read either.
func TestAReadThatFailsWhereASegmentWasSaysNothing(t *testing.T) {
	const old, moved = format.AreaStart + 512, format.AreaStart + 512*9
	for _, r := range []Request{
		{Op: Get, Key: []byte("key"), Value: make([]byte, 100)},
		{Op: Exist, Key: []byte("key")},
		{Op: List, Value: make([]byte, len(nvme.NewKVList(make([]byte, 4096)))+64)},
	} {
		h, m := newFailing(t)
		tbl := m.Table
		for n := range uint32(FirstSegments) {
			tbl.Set(n, NewEntry(old, 100))
		}
		m.Begin(&r)
		if h.reads != 1 || h.place != old {
			t.Fatalf("op %d: %d reads, the last at %d, want one at %d", r.Op, h.reads, h.place, old)
		}
		for n := range uint32(FirstSegments) {
			tbl.Set(n, NewEntry(moved, 100))
		}
		m.Read(h.slot, false)
		if h.done || h.reads != 2 || h.place != moved {
			t.Fatalf("op %d: ended %v with %d, %d reads, the last at %d, want another at %d", r.Op, h.done, h.with,
				h.reads, h.place, moved)
		}
		for n := 0; !h.done && n < 10; n++ {
			m.Read(h.slot, false)
		}
		if !h.done || h.with != DeviceError {
			t.Errorf("op %d: ended %v with %d, want DeviceError", r.Op, h.done, h.with)
		}
	}
}
