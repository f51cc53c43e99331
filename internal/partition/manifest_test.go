package partition

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
)

// TestAPartitionWithoutAreasRepairsItsManifest: a crash has left an older copy, which names an area. Opening the
// partition replaces that copy, so that later damage of the newer one does no harm.
func TestAPartitionWithoutAreasRepairsItsManifest(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	cfg := Config{Drive: r.o, OffsetBytes: offset, Background: 9, Store: kvstore.Config{PartitionBytes: r.size,
		Format: true, UUID: [16]byte{7}, HashSeed: 99, ChunkBytes: 256 << 10}}
	reopen := func() {
		t.Helper()
		p, err := Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		r.close(p)
		cfg.Store.Format = false
	}
	copies := func(op pipeline.Op, manifests [2]format.SwapManifest) {
		t.Helper()
		for i, at := range format.SwapManifestOffsets {
			if err := doAndWait(r.o, 1, op, 0, at.On(offset), manifests[i]); err != nil {
				t.Fatal(err)
			}
		}
	}
	reopen()
	manifests := [2]format.SwapManifest{make(format.SwapManifest, format.SwapManifestBytes),
		make(format.SwapManifest, format.SwapManifestBytes)}
	for i, b := range manifests {
		b.SetSource(cfg.Store.UUID)
		b.SetGeneration(uint64(5 + i))
	}
	manifests[0].AddArea([16]byte{1}, 100)
	manifests[0].Seal()
	manifests[1].Seal()
	copies(pipeline.Write, manifests)
	reopen()
	copies(pipeline.Read, manifests)
	for i, b := range manifests {
		if err := b.Check(); err != nil || b.Areas() != 0 {
			t.Errorf("copy %d: %v, %d lines, want 0", i, err, b.Areas())
		}
	}
	manifests[1][100] ^= 1
	copies(pipeline.Write, manifests)
	reopen()
}
