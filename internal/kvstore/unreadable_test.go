package kvstore

import (
	"errors"
	"testing"

	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// unreadable makes reads fail that touch a part of the partition.
func (d *instant) unreadable(from, to units.ExtentOffset) {
	d.fail = func(q *IO) error {
		if q.Op == pipeline.Read && q.Offset < to && q.Offset+units.ExtentOffset(len(q.Buf)) > from {
			return errors.New("unreadable")
		}
		return nil
	}
}

// TestAnUnreadableBlockHurtsOnlyWhatIsInIt: compaction moves everything else out of its chunk.
func TestAnUnreadableBlockHurtsOnlyWhatIsInIt(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10})
	d.put(0, 4000, func(i int) uint64 { return uint64(i) }, make([]byte, 1000), 64)
	s, all := d.s, d.liveValues()
	block := all[len(all)/2].offset &^ 511
	chunk := s.pool.Of(block)
	d.unreadable(block, block+512)
	lost, bytes := map[string]bool{}, 0
	for _, v := range all {
		if v.offset < block+512 && v.offset+units.ExtentOffset(v.bytes) > block {
			lost[string(v.key)] = true
			bytes += v.bytes
		}
	}
	s.compact.suspect = chunk
	d.run()
	if got := s.pool.Chunks[chunk]; got.State != space.Damaged || got.Live != uint32(bytes) {
		t.Errorf("the chunk is %+v, want state %d and %d bytes", got, space.Damaged, bytes)
	}
	for _, v := range all {
		want := OK
		if lost[string(v.key)] {
			want = DeviceError
		}
		d.one(t, Request{Op: Get, Key: v.key, Value: make([]byte, 1000)}, want)
	}
	for key := range lost {
		d.one(t, Request{Op: Delete, Key: []byte(key)}, OK)
	}
	if got := s.pool.Chunks[chunk].State; got == space.Damaged {
		t.Error("the chunk is never used again, although nothing in it is live")
	}
}

// TestAnUnreadableChunkIsNotInTheWay of compaction, however attractive it is.
func TestAnUnreadableChunkIsNotInTheWay(t *testing.T) {
	t.Parallel()
	d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10})
	const keys = 9000
	val := make([]byte, 1000)
	d.put(0, keys, func(i int) uint64 { return uint64(i) }, val, 64)
	s, all := d.s, d.liveValues()
	chunk := s.pool.Of(all[len(all)/2].offset)
	d.unreadable(s.pool.At(chunk, 0), s.pool.At(chunk, s.pool.End()))
	kept := 0
	for _, v := range all { // nearly nothing in it stays live
		if s.pool.Of(v.offset) == chunk {
			if kept++; kept > 2 {
				d.one(t, Request{Op: Delete, Key: v.key}, OK)
			}
		}
	}
	for round := range 4 {
		if n := d.put(0, keys, func(i int) uint64 { return uint64(1<<32 + i%3000) }, val, 64); n < keys {
			t.Fatalf("round %d: %d of %d Puts succeed: %s", round, n, keys, s.State())
		}
	}
	epoch := s.pool.Chunks[chunk].Epoch
	if got := s.pool.Chunks[chunk]; got.Live == 0 || got.State != space.Sealed {
		t.Errorf("the chunk was given up: %+v", got)
	}
	d.fail = nil
	d.now += avoidNS << 8
	d.put(0, keys, func(i int) uint64 { return uint64(1<<32 + i%3000) }, val, 64)
	if got := s.pool.Chunks[chunk]; got.Epoch == epoch && got.State == space.Sealed {
		t.Errorf("the chunk is not emptied when it can be read again: %+v", got)
	}
	if err := s.Recount(d.disk, true); err != nil {
		t.Error(err)
	}
}

// TestWhatCanBeReadAgainIsNotLost: the store comes back to chunks in which something could not be read, with or without
// a scrub.
func TestWhatCanBeReadAgainIsNotLost(t *testing.T) {
	t.Run("scrub", func(t *testing.T) { whatCanBeReadAgainIsNotLost(t, 64<<20) })
	t.Run("no scrub", func(t *testing.T) { whatCanBeReadAgainIsNotLost(t, 0) })
}

func whatCanBeReadAgainIsNotLost(t *testing.T, scrubRate int64) {
	d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10,
		ScrubBytesPerSec: scrubRate})
	d.put(0, 4000, func(i int) uint64 { return uint64(i) }, make([]byte, 1000), 64)
	s, all := d.s, d.liveValues()
	block := all[len(all)/2].offset &^ 511
	chunk := s.pool.Of(block)
	d.unreadable(block, block+512)
	s.compact.suspect = chunk
	d.run()
	if s.pool.Chunks[chunk].State != space.Damaged {
		t.Fatalf("the chunk is %+v", s.pool.Chunks[chunk])
	}
	d.fail = nil
	epoch := s.pool.Chunks[chunk].Epoch
	d.wait(t, "the chunk to be read again", func() bool {
		return s.pool.Chunks[chunk].State != space.Damaged && s.pool.Chunks[chunk].Pins == 0
	})
	s.compact.suspect = chunk
	d.run()
	if got := s.pool.Chunks[chunk]; got.Epoch == epoch && (got.State == space.Sealed || got.State == space.Damaged) {
		t.Errorf("the chunk cannot be emptied: %+v", got)
	}
	for _, v := range all {
		d.one(t, Request{Op: Get, Key: v.key, Value: make([]byte, 1000)}, OK)
	}
	if err := s.Recount(d.disk, true); err != nil {
		t.Error(err)
	}
}
