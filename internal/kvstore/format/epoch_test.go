package format

import "testing"

// TestEpochsHave40Bits, wherever they are, and leave alone what is beside them. Epochs of 32 bits are as they were in
// older programs, which refuse a checkpoint long before there are others.
func TestEpochsHave40Bits(t *testing.T) {
	for _, epoch := range []uint64{3, 1<<31 - 1, 1 << 31, 1<<32 - 1, 1 << 32, 0xA1_B2C3D4E5, 1<<40 - 1} {
		h := make(ChunkHeader, ChunkHeaderBytes)
		h.SetKind(KeyLog)
		h.SetEpoch(epoch)
		if h.Seal(); h.Epoch() != epoch || h.Kind() != KeyLog || h.Check() != nil {
			t.Errorf("header: epoch %#x, want %#x; %v", h.Epoch(), epoch, h.Check())
		}
		e := make(ChunkEntry, ChunkEntryBytes)
		e.SetLive(MaxChunkBytes)
		e.SetKind(Bad)
		e.SetEpoch(epoch)
		if e.Epoch() != epoch || e.Live() != MaxChunkBytes || e.Kind() != Bad {
			t.Errorf("entry: epoch %#x, %d bytes live, kind %d, want %#x", e.Epoch(), e.Live(), e.Kind(), epoch)
		}
		s := make(Summary, SummaryBytes)
		const objects, chunks = 1<<55 - 3, MaxPartitionBytes / MinChunkBytes
		s.SetChunks(chunks)
		s.SetMerges()
		s.SetLastEpoch(epoch)
		s.SetObjects(objects)
		ends := [3]ChunkOffset{512, MaxChunkBytes, 4096}
		for l, end := range ends {
			s.SetOpen(l, epoch-uint64(l), end)
		}
		if s.LastEpoch() != epoch || s.Objects() != objects || s.Chunks() != chunks || !s.Merges() {
			t.Errorf("summary: epoch %#x, %d objects, %d chunks, want %#x, %d, %d", s.LastEpoch(), s.Objects(),
				s.Chunks(), epoch, objects, chunks)
		}
		for l, want := range ends {
			if got, end := s.Open(l); got != epoch-uint64(l) || end != want {
				t.Errorf("summary: log %d has epoch %#x and ends at %d, want %#x and %d", l, got, end,
					epoch-uint64(l), want)
			}
		}
		if s.SetObjects(-2); s.Objects() != -2 || s.LastEpoch() != epoch {
			t.Errorf("summary: %d objects and epoch %#x, want -2 and %#x", s.Objects(), s.LastEpoch(), epoch)
		}
		if old := le.Uint32(s[20:])&^summaryMerges == chunks; old != (epoch < 1<<31) {
			t.Errorf("older programs open a partition with epoch %#x: %v", epoch, old)
		}
		if Seed(7, epoch, 1<<20) == Seed(7, epoch^1<<35, 1<<20) || Seed(7, epoch, 0) == Seed(7^8, epoch, 0) {
			t.Errorf("checksums of epoch %#x begin with those of another", epoch)
		}
	}
}
