package kvstore

import (
	"encoding/binary"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
)

// freshInstant is newInstant with a table as long as partition.segTblBytes has it.
func freshInstant(t *testing.T, cfg Config) *instant {
	cfg.SegTbl = make([]byte, lookup.TableBytes(cfg.PartitionBytes/32/13)+1<<16)
	cfg.Format, cfg.UUID, cfg.HashSeed = true, [16]byte{1}, 42
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d := &instant{s: s, disk: make([]byte, cfg.PartitionBytes)}
	if d.run(); !s.Ready() {
		t.Fatal(s.Err())
	}
	return d
}

// fewRanges is a store that has keys of one range of so many.
type fewRanges struct {
	*instant
	keys  []uint64
	next  uint64
	value []byte
}

func (f *fewRanges) key(ranges uint64) uint64 {
	for {
		f.next++
		var k [16]byte
		binary.LittleEndian.PutUint64(k[:], f.next)
		if format.HashKey(f.s.hashSeed, k[:])%ranges == 0 {
			return f.next
		}
	}
}

func (f *fewRanges) do(op Op, key uint64) Status {
	binary.LittleEndian.PutUint64(f.k[:], key)
	q := Request{Op: op, Key: f.k[:]}
	if op == Put {
		q.Value = f.value
	}
	for n := 0; !f.s.Submit(&q); n++ {
		if f.run(); n > 100 {
			panic("not taken: " + f.s.State())
		}
		f.now += 1e6
	}
	f.run()
	return f.last.Status
}

// fillRanges puts keys of one range of so many until one is refused.
func fillRanges(t *testing.T, cfg Config, ranges uint64, size int) *fewRanges {
	f := &fewRanges{instant: freshInstant(t, cfg), value: make([]byte, size)}
	for {
		k := f.key(ranges)
		if st := f.do(Put, k); st != OK {
			t.Logf("status %d after %d keys", st, len(f.keys))
			break
		}
		f.keys = append(f.keys, k)
	}
	used, most := f.s.Fullness()
	st := f.s.Stats()
	t.Logf("1 of %d ranges: %d objects, %d segments, %d not empty, live %d, used %d of %d, key log %d, "+
		"%d bytes written an object",
		ranges, st.Objects, st.Segments, f.s.tbl.Occupied(), f.s.pool.Live, used, most, st.KeyBytes,
		f.wbytes/int64(len(f.keys)))
	return f
}

func smallChunks() Config {
	return Config{PartitionBytes: 33 << 20, BlockSize: 512, ChunkBytes: 256 << 10, GroupBytes: 16 << 10}
}

// TestAFewRangesHaveAsMuchRoom: a partition has room for about as many objects of a few ranges as of all. Its longer
// table takes some of checkpoints, and of what is kept free for the key log.
func TestAFewRangesHaveAsMuchRoom(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	for _, size := range []int{100, 1000} {
		all := fillRanges(t, smallChunks(), 1, size)
		few := fillRanges(t, smallChunks(), 64, size)
		if a, b := len(all.keys), len(few.keys); b < a*96/100 {
			t.Errorf("values of %d bytes: %d objects of one range of 64, %d of all", size, b, a)
		}
		// The table has stopped to grow when the partition was 7/8 full.
		if n := few.s.Stats().Segments; size == 1000 && n > int64(len(few.keys))*maxSparse/13*15/16 {
			t.Errorf("%d segments for %d objects, although the partition is nearly full", n, len(few.keys))
		}
	}
}

// TestAFullPartitionOfAFewRangesTakesDeletes: none is refused, however full it is.
func TestAFullPartitionOfAFewRangesTakesDeletes(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	for _, size := range []int{100, 1000} {
		f := fillRanges(t, smallChunks(), 64, size)
		bad := 0
		for _, k := range f.keys {
			if f.do(Delete, k) != OK {
				bad++
			}
		}
		f.now += 100e9
		f.run()
		t.Logf("%+v", f.s.Stats().Segments)
		if bad > 0 {
			t.Errorf("%d of %d Deletes fail", bad, len(f.keys))
		}
	}
}

// TestATableOfAFewRangesComesToRest: with the same number of objects, or about that, the table does not grow and
// shrink in turn.
func TestATableOfAFewRangesComesToRest(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	for _, ranges := range []uint64{4, 64} {
		for _, eager := range []bool{false, true} {
			cfg := smallChunks()
			cfg.eager = eager
			f := &fewRanges{instant: freshInstant(t, cfg), value: make([]byte, 100)}
			const n = 20000
			for range n {
				k := f.key(ranges)
				f.do(Put, k)
				f.keys = append(f.keys, k)
			}
			rest := func() {
				for range 20 {
					f.now += 100e9
					f.run()
				}
			}
			for left := n; left > 0; left -= n / 10 {
				rest()
				was := f.s.Stats()
				for i := range 2000 {
					f.do(Delete, f.keys[i%left])
					f.do(Put, f.keys[i%left])
					if i%100 == 0 {
						rest()
					}
				}
				rest()
				now := f.s.Stats()
				t.Logf("%d ranges, eager %v, %d objects, %d segments: %d splits, %d merges", ranges, eager, now.Objects,
					now.Segments, now.Splits-was.Splits, now.Merges-was.Merges)
				if d := now.Splits + now.Merges - was.Splits - was.Merges; d > 200 {
					t.Errorf("%d splits and merges", d)
				}
				for _, k := range f.keys[left-n/10 : left] {
					f.do(Delete, k)
				}
			}
		}
	}
}

// TestNeedsOfALargeTable: 4 TiB of objects of 1 KB, as many segments as there may be.
func TestNeedsOfALargeTable(t *testing.T) {
	const objects = 3_200_000_000
	if n := sparseNeeds(objects, 1<<24, 1<<31, 13); n != objects*maxSparse/13 {
		t.Errorf("%d segments are needed, want %d", n, int64(objects*maxSparse/13))
	}
	if n := sparseNeeds(objects, 1<<30, 1<<31, 13); n < objects/13/2 || n > objects/13 {
		t.Errorf("%d segments are needed if half are empty, want up to %d", n, objects/13)
	}
}
