package recovery

import (
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
)

// TestALossOfPowerSparesKeysWithoutValues: a segment that a loss of power may have taken does not record what it has
// changed, so that the values of all its items are looked for. The value of one item is empty and has no place, and the
// place of another one is outside of all chunks.
func TestALossOfPowerSparesKeysWithoutValues(t *testing.T) {
	const size, block = 4 << 20, 512
	disk := make([]byte, size)
	sb := format.Superblock(disk[:format.SuperblockBytes])
	sb.SetBlockSize(block)
	sb.SetGeneration(1)
	sb.SetPartitionBytes(size)
	sb.SetChunkBytes(format.MinChunkBytes)
	sb.SetVolatileFrom(1)
	sb.Seal()
	pool := space.New(sb)
	i := pool.Take(format.KeyLog)
	h := format.ChunkHeader(disk[pool.At(i, 0):][:format.ChunkHeaderBytes])
	h.SetKind(format.KeyLog)
	h.SetEpoch(pool.Chunks[i].Epoch.N())
	h.Seal()
	at := pool.At(i, block)
	seg := format.Segment(disk[at:])
	const number = 3
	seg.Clear(number)
	seg.Recode(1, 0)
	for k := byte(0); seg.Items() < 2; k++ {
		if format.HashKey(sb.HashSeed(), []byte{k})%lookup.FirstSegments == number {
			seg.Insert([]byte{k})
		}
	}
	far := seg.Item(seg.First())
	far.SetValueLen(100)
	far.SetValueOffset(size)
	seg.SetVersion(1)
	seg.Seal(pool.Seed(at))

	m := New(Config{PartitionBytes: size, BlockSize: block, SegTbl: make([]byte, lookup.EntryBytes*64),
		Alloc: space.HeapAlloc})
	for reads := m.Next(nil); len(reads) > 0; reads = m.Next(nil) {
		for _, r := range reads {
			copy(r.Buf, disk[r.Offset:])
			m.Done(r.Slot, nil)
		}
	}
	switch image := m.Image(); {
	case image == nil:
		t.Fatal(m.Err())
	case image.Objects != 2 || image.Table.Get(number).Offset() != at:
		t.Errorf("%d keys, the segment is at %d, want 2 keys, at %d", image.Objects,
			image.Table.Get(number).Offset(), at)
	}
}
