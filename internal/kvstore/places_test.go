package kvstore

import (
	"bytes"
	"encoding/binary"
	"testing"

	"jbofd/internal/pipeline"
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
	const keys = 16000
	d := newInstant(t, Config{PartitionBytes: 32 << 20, BlockSize: 512, ChunkBytes: 256 << 10, Requests: keys,
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
