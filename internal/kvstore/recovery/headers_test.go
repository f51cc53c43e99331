package recovery

import (
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// TestAnOpenChunkIsNotTakenForAnotherUseOfIt: the header of a chunk is lost that was open at the last checkpoint. A
// record that was written since has the epoch that the checkpoint knows, and a checksum that a later epoch makes right
// as well, by chance.
func TestAnOpenChunkIsNotTakenForAnotherUseOfIt(t *testing.T) {
	const block, chunk, at = 512, 3, 4096
	super := make(format.Superblock, format.SuperblockBytes)
	super.SetPartitionBytes(4 << 20)
	super.SetChunkBytes(format.MinChunkBytes)
	pool := space.New(super)
	seedOf := func(epoch uint64) uint32 { return pool.SeedOf(space.NewEpoch(epoch), pool.At(chunk, at)) }
	// Two epochs with the same seed of that record.
	var known, later uint64
	seen := map[uint32]uint64{}
	for later = 1; known == 0; later++ {
		known = seen[seedOf(later)]
		seen[seedOf(later)] = later
	}
	later--

	buf := make([]byte, format.MinChunkBytes)
	v := format.Value(buf[at:])
	v.SetValueLen(100)
	v.SetVersion(7)
	v.Seal(seedOf(known))
	open := func(epoch uint64) *Machine {
		m := New(Config{PartitionBytes: super.PartitionBytes(), BlockSize: block, Alloc: space.HeapAlloc})
		m.image.Pool, m.found = pool, make([]found, len(pool.Chunks))
		format.Summary(m.summary[:]).SetNextVersion(5)
		format.Summary(m.summary[:]).SetLastEpoch(later - 1)
		pool.LastEpoch, pool.Chunks[chunk].Epoch = later-1, space.NewEpoch(epoch)
		return m
	}
	if m := open(known); m.guess(chunk, buf) {
		t.Errorf("epoch %d is guessed, and the checkpoint knows epoch %d", m.found[chunk].epoch, known)
	}
	m := open(known - 1)
	if f := &m.found[chunk]; !m.guess(chunk, buf) || f.epoch != later || f.kind != format.ValueLog {
		t.Errorf("epoch %d and kind %v are guessed, want %d and values", f.epoch, f.kind, later)
	}
}
