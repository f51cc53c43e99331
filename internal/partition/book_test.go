package partition

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap/guest"
	"jbofd/internal/pipeline"
)

// TestAPartitionWithoutAreasMendsItsBook: a crash has left an older copy, which names an area. It is gone when the partition has been
// open once, so that a newer copy that becomes damaged does no harm.
func TestAPartitionWithoutAreasMendsItsBook(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	cfg := Config{Owner: r.o, OffsetBytes: offset, Background: 9, Store: kvstore.Config{PartitionBytes: r.size, Format: true, UUID: [16]byte{7}, HashSeed: 99, ChunkBytes: 256 << 10}}
	reopen := func() {
		t.Helper()
		p, err := Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		r.close(p)
		cfg.Store.Format = false
	}
	copies := func(op pipeline.Op, books [2]guest.Book) {
		t.Helper()
		for i, at := range guest.BookOffsets {
			if err := doAndWait(r.o, 1, op, 0, offset+at, books[i]); err != nil {
				t.Fatal(err)
			}
		}
	}
	reopen()
	books := [2]guest.Book{make(guest.Book, guest.BookBytes), make(guest.Book, guest.BookBytes)}
	for i, b := range books {
		b.SetHome(cfg.Store.UUID)
		b.SetGeneration(uint64(5 + i))
	}
	books[0].AddLine([16]byte{1}, 100)
	books[0].Seal()
	books[1].Seal()
	copies(pipeline.Write, books)
	reopen()
	copies(pipeline.Read, books)
	for i, b := range books {
		if err := b.Check(); err != nil || b.Lines() != 0 {
			t.Errorf("copy %d: %v, %d lines, want 0", i, err, b.Lines())
		}
	}
	books[1][100] ^= 1
	copies(pipeline.Write, books)
	reopen()
}
