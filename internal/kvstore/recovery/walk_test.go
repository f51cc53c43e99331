package recovery

import (
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// TestAPausedWalkReadsNoMoreThanItsBuffer: Piece is called repeatedly, and no records are taken.
func TestAPausedWalkReadsNoMoreThanItsBuffer(t *testing.T) {
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetBlockSize(512)
	sb.SetChunkBytes(2 << 20)
	sb.SetPartitionBytes(64 << 20)
	pool := space.New(sb)
	i := pool.Take(format.ValueLog)
	w := NewWalk(pool, 512, make([]byte, WalkBytes(2<<20, 1<<20)))
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

// TestAWalkFindsSegmentsPastDamage: the beginning of a group did not reach the SSD. In the rest, a segment begins in
// the middle of a block, behind bytes that look like a segment.
func TestAWalkFindsSegmentsPastDamage(t *testing.T) {
	const block = 512
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetBlockSize(block)
	sb.SetChunkBytes(128 << 10)
	sb.SetPartitionBytes(64 << 20)
	pool := space.New(sb)
	i := pool.Take(format.KeyLog)
	chunk := make([]byte, 128<<10)
	places := []int{block, block + 64, 3*block + 320, 3*block + 384, 7 * block}
	for n, at := range places {
		seg := format.Segment(chunk[at:])
		seg.Clear(uint32(n))
		seg.Insert([]byte("a key"))
		seg.Seal(pool.Seed(pool.At(i, format.ChunkOffset(at))))
	}
	// The end of a segment whose beginning is lost, with a key that looks like a segment.
	copy(chunk[3*block+256:], chunk[block:block+64])
	w := NewWalk(pool, block, make([]byte, WalkBytes(len(chunk), 1<<20)))
	w.Begin(i, false)
	var found []int
	for !w.Ended() {
		if at, buf := w.Piece(true); buf != nil {
			copy(buf, chunk[pool.Within(at):])
			w.Read(true)
		}
		for {
			rec, offset, sound := w.Next()
			if rec == nil {
				break
			}
			if !sound {
				t.Errorf("at %d there is said to be a damaged segment", pool.Within(offset))
				continue
			}
			found = append(found, int(pool.Within(offset)))
		}
	}
	if !slices.Equal(found, places) || w.Damaged != 0 {
		t.Errorf("segments are found at %v, want %v", found, places)
	}
}
