package walk

import (
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
