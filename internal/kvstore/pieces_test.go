package kvstore

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"testing"

	"jbofd/internal/kvstore/format"
)

// numbered is a value of n bytes that belongs to a key.
func numbered(key, n int) []byte {
	b := make([]byte, n+8)
	x := uint64(key)*0x9E3779B97F4A7C15 | 1
	for at := 0; at < n; at += 8 {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b[at:], x)
	}
	return b[:n]
}

// TestALongValueIsReadAtOnce: its pieces lie one behind the other, except where a chunk ends.
func TestALongValueIsReadAtOnce(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 65 << 20, BlockSize: 512, ChunkBytes: 2 << 20})
	const keys = 20
	buf, crossed := make([]byte, 1<<20), 0
	for i := range keys {
		val := numbered(i, 1<<20-i*5000)
		d.one(t, Request{Op: Put, Key: numberedKey(i), Value: val}, OK)
		reads, _ := d.one(t, Request{Op: Get, Key: numberedKey(i), Value: buf}, OK)
		if d.last.ValueLen != len(val) || !bytes.Equal(buf[:len(val)], val) {
			t.Fatalf("the value of key %d is not what was put", i)
		}
		if reads == 3 {
			crossed++
		} else if reads != 2 {
			t.Errorf("a Get takes %d reads, want 2, or 3 if a chunk ends within the value", reads)
		}
		reads, _ = d.one(t, Request{Op: Get, Key: numberedKey(i), Value: buf[:100:100]}, OK)
		if d.last.ValueLen != len(val) || !bytes.Equal(buf[:100], val[:100]) || reads > 3 {
			t.Errorf("a Get of 100 bytes takes %d reads and returns %+v", reads, d.last)
		}
		if r, _ := d.one(t, Request{Op: Exist, Key: numberedKey(i)}, OK); r != 1 || d.last.ValueLen != len(val) {
			t.Errorf("an Exist takes %d reads and returns %+v", r, d.last)
		}
	}
	// 20 values fill 9 chunks.
	if crossed < 5 || crossed > 9 {
		t.Errorf("%d values lie in two chunks, want 5 to 9", crossed)
	}
}

// TestAPartitionOfAnOlderVersionIsReadAndFillsUp: values of up to 1 MiB were written in one piece there. They are read,
// an older program finds a newer version before anything else is written, and compaction moves them in pieces.
func TestAPartitionOfAnOlderVersionIsReadAndFillsUp(t *testing.T) {
	t.Parallel()
	cfg := Config{PartitionBytes: 97 << 20, BlockSize: 512, ChunkBytes: 2 << 20}
	d := newInstant(t, cfg)
	d.s.pieceBytes = format.MaxValue
	lengths := []int{1 << 20, 700 << 10, 1000, 40_000, 1<<20 - 1}
	put := func(i int) Status {
		for !d.s.Submit(&Request{Op: Put, Key: numberedKey(i), Value: numbered(i, lengths[i%len(lengths)])}) {
			d.run()
		}
		d.run()
		return d.last.Status
	}
	before := 0
	for ; before < 60; before++ {
		if put(before) != OK {
			t.Fatalf("Put %d ends with %+v", before, d.last)
		}
	}
	d.s.Stop()
	d.run()
	supers := []format.Superblock{d.disk[:format.SuperblockBytes], d.disk[cfg.PartitionBytes-format.SuperblockBytes:]}
	for _, sb := range supers {
		sb[8] = 2
		table := crc32.MakeTable(crc32.Castagnoli)
		binary.LittleEndian.PutUint32(sb[12:], crc32.Update(crc32.Update(0, table, sb[:12]), table, sb[16:]))
	}

	cfg.SegTbl = make([]byte, 5<<18)
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.s = s
	for !s.Ready() && s.Err() == nil {
		d.turns(1)
	}
	for i, sb := range supers {
		if err := sb.Check(cfg.PartitionBytes); err != nil || sb.Version() != format.Version {
			t.Fatalf("superblock %d: version %d, %v, when the partition is ready", i, sb.Version(), err)
		}
	}
	buf := make([]byte, format.MaxValue)
	check := func(n int) {
		t.Helper()
		for i := range n {
			d.one(t, Request{Op: Get, Key: numberedKey(i), Value: buf}, OK)
			if want := numbered(i, lengths[i%len(lengths)]); d.last.ValueLen != len(want) ||
				!bytes.Equal(buf[:len(want)], want) {
				t.Fatalf("key %d has another value", i)
			}
		}
	}
	check(before)
	n := before
	for put(n) == OK {
		n++
	}
	if got := float64(s.pool.Live) / float64(cfg.PartitionBytes); got < 0.72 {
		t.Errorf("%.1f %% of the partition is usable", 100*got)
	} else {
		t.Logf("%.1f %% of the partition is usable", 100*got)
	}
	check(n)
	if err := s.Recount(d.disk, false); err != nil {
		t.Error(err)
	}
	// A crash, and a recovery that counts.
	s, err = New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.s = s
	d.run()
	check(n)
	if err := s.Recount(d.disk, true); err != nil {
		t.Error(err)
	}
}
