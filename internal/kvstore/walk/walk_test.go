package walk

import (
	"slices"
	"testing"

	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/format"
)

// TestAWalkThatIsNotGoneOnWithReadsNoMoreThanItHasRoomFor: who asks for pieces again and again, and takes no records between.
func TestAWalkThatIsNotGoneOnWithReadsNoMoreThanItHasRoomFor(t *testing.T) {
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetBlockSize(512)
	sb.SetChunkBytes(2 << 20)
	sb.SetPartitionBytes(64 << 20)
	pool := chunks.New(sb)
	i := pool.Take(format.ValueLog)
	w := New(pool, 512, make([]byte, BufBytes(2<<20, 1<<20)))
	w.Begin(i, false)
	if rec, _, _ := w.Next(); rec != nil {
		t.Fatal("a record of nothing")
	}
	for range 100 {
		_, buf := w.Piece(true)
		if buf == nil {
			return
		}
		w.Read(true)
	}
	t.Error("there is no end of pieces")
}

// TestAWalkFindsSegmentsBehindWhatIsLost: the beginning of a group did not reach the SSD, and in what did of it a segment begins in the
// middle of a block, behind something that looks like one.
func TestAWalkFindsSegmentsBehindWhatIsLost(t *testing.T) {
	const block = 512
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetBlockSize(block)
	sb.SetChunkBytes(128 << 10)
	sb.SetPartitionBytes(64 << 20)
	pool := chunks.New(sb)
	i := pool.Take(format.KeyLog)
	chunk := make([]byte, 128<<10)
	places := []int{block, block + 64, 3*block + 320, 3*block + 384, 7 * block}
	for n, at := range places {
		seg := format.Segment(chunk[at:])
		seg.Clear(uint32(n))
		seg.Insert([]byte("a key"))
		seg.Seal(pool.Seed(pool.Start(i) + int64(at)))
	}
	// The end of a segment of which the beginning is lost, with a key that looks like a segment.
	copy(chunk[3*block+256:], chunk[block:block+64])
	w := New(pool, block, make([]byte, BufBytes(len(chunk), 1<<20)))
	w.Begin(i, false)
	var found []int
	for !w.Ended() {
		if at, buf := w.Piece(true); buf != nil {
			copy(buf, chunk[at-pool.Start(i):])
			w.Read(true)
		}
		for {
			rec, offset, sound := w.Next()
			if rec == nil {
				break
			}
			if !sound {
				t.Errorf("at %d there is said to be a damaged segment", offset-pool.Start(i))
				continue
			}
			found = append(found, int(offset-pool.Start(i)))
		}
	}
	if !slices.Equal(found, places) || w.Damaged != 0 {
		t.Errorf("segments are found at %v, want %v", found, places)
	}
}
