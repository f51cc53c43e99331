package kvstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// overwritten is a partition that is three quarters full, in steady uniform overwrites of 1 KB. It returns how many
// bytes of the key log are written for each value that is put or moved.
// early is called for each early read. What it sets flip to is where that read, and no other, finds a flipped bit.
func overwritten(t *testing.T, early func(d *instant, q *IO) error, flip ...*int64) (d *instant, n int, per float64) {
	const value = 1000
	cfg := Config{PartitionBytes: 14 << 20, BlockSize: 512, ChunkBytes: 128 << 10}
	d = newInstant(t, cfg)
	at := int64(0)
	d.fail = func(q *IO) (err error) {
		if at > 0 {
			d.disk[at] ^= 1
			at = 0
		}
		if d.s.ios[q.Tag].kind == ioEarly {
			err = early(d, q)
			for _, f := range flip {
				if at, *f = *f, 0; at > 0 {
					d.disk[at] ^= 1
				}
			}
		}
		return err
	}
	n = int(cfg.PartitionBytes) / 4 * 3 / (value + 24)
	rng := rand.New(rand.NewPCG(FixedSeed(t), 5))
	val := make([]byte, value)
	put := func(count int, key func(int) uint64) {
		for i := range count {
			k := key(i)
			binary.LittleEndian.PutUint64(val, k)
			if d.put(0, 1, func(int) uint64 { return k }, val, 1) < 1 {
				t.Fatalf("Put %d: status %d", i, d.last.Status)
			}
		}
	}
	put(n, func(i int) uint64 { return uint64(i) })
	put(n, func(int) uint64 { return rng.Uint64N(uint64(n)) })
	before := d.s.Stats()
	put(n/2, func(int) uint64 { return rng.Uint64N(uint64(n)) })
	st := d.s.Stats()
	writes := float64(n/2) + float64(st.MovedBytes-before.MovedBytes)/(value+24)
	return d, n, float64(st.KeyLogBytes-before.KeyLogBytes) / writes
}

// TestMovedValuesShareTheWriteOfTheirSegment: values of the same segment whose chunks are to be emptied soon are moved
// together. If such a value cannot be read, or what is read is not the value, it stays, and is moved with its chunk.
func TestMovedValuesShareTheWriteOfTheirSegment(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	reads, flipped := 0, int64(0)
	_, _, shared := overwritten(t, func(*instant, *IO) error { reads++; return nil })
	d, n, alone := overwritten(t, func(d *instant, q *IO) error {
		if reads++; reads%2 == 0 {
			return errors.New("a bad block")
		}
		flipped = int64(d.s.ops[d.s.ios[q.Tag].who].old) + 100
		return nil
	}, &flipped)
	t.Logf("%.0f bytes of key log for each value written, %.0f if no early move succeeds", shared, alone)
	if shared > 0.92*alone {
		t.Errorf("%.0f bytes of key log for each value written, want 8 %% less than %.0f", shared, alone)
	}
	if st := d.s.Stats(); st.Damaged > 0 {
		t.Errorf("%d damaged records, want none", st.Damaged)
	}
	want, buf := make([]byte, 1000), make([]byte, 1000)
	for i := range n {
		binary.LittleEndian.PutUint64(want, uint64(i))
		binary.LittleEndian.PutUint64(d.k[:], uint64(i))
		d.one(t, Request{Op: Get, Key: d.k[:], Value: buf}, OK)
		if !bytes.Equal(buf, want) {
			t.Fatalf("key %d has another value", i)
		}
	}
}

// TestAnEarlyMoveFromAnEarlierUseOfItsChunkDoesNotCount: the chunk was freed and used again after the value was read,
// and the segment refers to another value at the same place.
func TestAnEarlyMoveFromAnEarlierUseOfItsChunkDoesNotCount(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 4 << 20, BlockSize: 512, ChunkBytes: 128 << 10})
	s := d.s
	const chunk = 3
	place := s.pool.At(chunk, 1024)
	for before, want := range []bool{true, false} {
		seg := make(format.Segment, smallSegment)
		seg.Clear(0)
		it := seg.Item(seg.Insert([]byte("key")))
		it.SetValueLen(100)
		it.SetValueOffset(place)
		o := &op{kind: opMove, early: true, old: place, valueLen: 100, parts: [2]part{noPart, noPart},
			epoch: space.NewEpoch(s.pool.Chunks[chunk].Epoch.N() - uint64(before))}
		if got := s.applyMove(&activeSeg{buf: seg}, o); got != want {
			t.Errorf("of %d uses before, the move counts: %v, want %v", before, got, want)
		}
	}
}
