package kvstore

import (
	"bytes"
	"encoding/binary"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// TestADelayedGetOfAReusedPlaceIsNotTakenForDamage: while a Get's read is outstanding, the segment moves through all
// chunks and back to its place, in a chunk that has been reused. The data that the device finally returns is older, and
// must not be taken for damage.
func TestADelayedGetOfAReusedPlaceIsNotTakenForDamage(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 4 << 20, BlockSize: 4096, ChunkBytes: 128 << 10, GroupBytes: 4096})
	key := func(int) uint64 { return 1 }
	val := bytes.Repeat([]byte{7}, 100)
	d.put(0, 1, key, val, 1)
	var k [16]byte
	binary.LittleEndian.PutUint64(k[:], 1)
	buf := make([]byte, 100)
	d.s.Submit(&Request{Op: Get, Key: k[:], Value: buf})
	d.s.Turn(d.now, &d.act)
	if len(d.act.IOs) != 1 || d.act.IOs[0].Op != pipeline.Read {
		t.Fatalf("a Get asks for %+v", d.act.IOs)
	}
	held := d.act.IOs[0]
	d.act.IOs = d.act.IOs[:0]
	seen := bytes.Clone(d.disk[held.Offset:][:len(held.Buf)])
	segment := uint32(0)
	for d.s.tbl.Get(segment) == 0 {
		segment++
	}
	entry := d.s.tbl.Get(segment)
	chunk := &d.s.pool.Chunks[d.s.pool.Of(entry.Offset())]
	epoch := chunk.Epoch
	for n := 0; ; n++ {
		if n == 200_000 {
			t.Fatal("the segment does not come back to its place")
		}
		val[0] = byte(n)
		if d.put(0, 1, key, val, 1); d.s.tbl.Get(segment) == entry && chunk.Epoch != epoch {
			break
		}
	}
	copy(held.Buf, seen)
	d.s.Complete(held.Tag, nil)
	d.run()
	if d.last.Status != OK || d.last.ValueLen != len(val) || !bytes.Equal(buf, val) || d.s.Stats().Damaged != 0 {
		t.Errorf("the Get ends with %+v, %d records damaged", d.last, d.s.Stats().Damaged)
	}
}

// TestASegmentThatOutgrowsItsBufferKeepsItsKeys: all writers arrive while the segment is in memory, so that it is never
// read again.
func TestASegmentThatOutgrowsItsBufferKeepsItsKeys(t *testing.T) {
	t.Parallel()
	const keys = 16000
	d := newInstant(t, Config{PartitionBytes: 32 << 20, BlockSize: 512, ChunkBytes: 256 << 10, Requests: keys + 8,
		KeysPerSegment: 256})
	for first := 0; first < keys; first += keys {
		var k [16]byte
		for i := first; i < first+keys; i++ {
			binary.LittleEndian.PutUint64(k[:], uint64(i))
			if !d.s.Submit(&Request{Op: Put, Key: k[:]}) {
				t.Fatalf("no room for Put %d", i)
			}
		}
		d.run()
	}
	for i := range keys {
		var k [16]byte
		binary.LittleEndian.PutUint64(k[:], uint64(i))
		d.one(t, Request{Op: Exist, Key: k[:]}, OK)
	}
	if st := d.s.Stats(); st.Objects != keys {
		t.Errorf("%d objects, want %d", st.Objects, keys)
	}
}

// TestCompactionKeepsASegmentForWhichItHasNoMemory: the store opens with buffers for short segments only, and gets no
// others. Compaction comes to a chunk with a long segment, cannot move it, and must not take it for obsolete.
func TestCompactionKeepsASegmentForWhichItHasNoMemory(t *testing.T) {
	t.Parallel()
	cfg := Config{PartitionBytes: 4 << 20, BlockSize: 512, ChunkBytes: 128 << 10, KeysPerSegment: 256}
	refuse, refused := false, 0
	cfg.Alloc = func(n int) ([]byte, error) {
		if refuse {
			refused++
			return nil, errDevice
		}
		return make([]byte, n), nil
	}
	d := newInstant(t, cfg)
	// The first segment has many keys, the others a few.
	const many = 450
	var long, short [][16]byte
	for n := uint64(0); len(long) < many; n++ {
		var k [16]byte
		binary.LittleEndian.PutUint64(k[:], n)
		if d.s.tbl.Segment(format.HashKey(d.s.hashSeed, k[:])) == 0 {
			long = append(long, k)
		} else if len(short) < 1000 {
			short = append(short, k)
		}
	}
	for i := range long {
		d.one(t, Request{Op: Put, Key: long[i][:]}, OK)
	}
	// Values fill the partition, so that there is a need for compaction.
	filled := 0
	for d.last.Status == OK {
		d.s.Submit(&Request{Op: Put, Key: short[filled][:], Value: make([]byte, 20_000)})
		d.run()
		filled++
	}
	for i := range filled / 8 {
		d.one(t, Request{Op: Delete, Key: short[i][:]}, OK)
	}
	cfg = d.s.cfg
	cfg.Format = false
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.s = s
	if d.run(); !s.Ready() {
		t.Fatal(s.Err())
	}
	if n := s.tbl.Get(0).MaxBytes(); n <= len(s.segs[0].buf) {
		t.Fatalf("the long segment has at most %d bytes, which fit into a buffer", n)
	}
	refuse = true
	for i := 0; refused < 10 && i < 20_000; i++ {
		d.s.Submit(&Request{Op: Put, Key: short[filled/8+i*7%(filled*7/8)][:], Value: make([]byte, 20_000)})
		d.turns(1000)
	}
	if refused == 0 || s.Stats().Compactions == 0 {
		t.Errorf("%d chunks compacted, memory refused %d times: too little has happened", s.Stats().Compactions,
			refused)
	}
	refuse = false
	for i := range long {
		d.one(t, Request{Op: Exist, Key: long[i][:]}, OK)
	}
	if n := s.Stats().Damaged; n != 0 {
		t.Errorf("%d records are damaged", n)
	}
}

// TestAnUnreadableBlockBehindASegmentDoesNoHarm: the entry of a segment says only about how long it is, so that a block
// behind it is read along. That block cannot be read. The keys of the segment can, and take new values.
func TestAnUnreadableBlockBehindASegmentDoesNoHarm(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10})
	d.put(0, 2000, func(i int) uint64 { return uint64(i) }, make([]byte, 10), 64)
	s, tested := d.s, 0
	for n := range s.tbl.Len() {
		e := s.tbl.Get(n)
		if e == 0 {
			continue
		}
		seg := format.Segment(d.disk[e.Offset():])
		block := (e.Offset() + units.ExtentOffset(seg.ExtentBytes()) + 511) &^ 511
		start, length := s.pool.Around(e.Offset(), e.MaxBytes(), 512)
		if block >= start+units.ExtentOffset(length) {
			continue
		}
		tested++
		d.fail = func(q *IO) error {
			if q.Op == pipeline.Read && q.Offset <= block && block < q.Offset+units.ExtentOffset(len(q.Buf)) {
				return errDevice
			}
			return nil
		}
		key := bytes.Clone(seg.Item(seg.First()).Key())
		if s.tbl.Segment(format.HashKey(s.hashSeed, key)) != n {
			continue // a split has moved it
		}
		d.one(t, Request{Op: Exist, Key: key}, OK)
		d.one(t, Request{Op: Put, Key: key, Value: make([]byte, 10)}, OK)
		if tested == 20 {
			return
		}
	}
	t.Errorf("%d segments are read with a block behind them, want 20", tested)
}
