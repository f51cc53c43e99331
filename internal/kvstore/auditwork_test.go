package kvstore

import (
	"fmt"
	"testing"

	"jbofd/internal/kvstore/format"
)

// TestAnAuditOfManyChunksTakesShortTurns: it chooses the chunks that it counts, and makes use of the counts, a few in a
// turn. What is live in a thousand chunks belongs to nothing; they are free in the end, and the rest is exact, although
// segments are added and values replaced meanwhile.
func TestAnAuditOfManyChunksTakesShortTurns(t *testing.T) {
	const chunks, orphans = 1900, 1500
	d := newInstant(t, Config{PartitionBytes: chunks * (128 << 10), BlockSize: 512, ChunkBytes: 128 << 10,
		KeysPerSegment: 6})
	value := make([]byte, 500)
	for key := range 500 {
		d.one(t, Request{Op: Put, Key: fmt.Appendf(nil, "%d", key), Value: value}, OK)
	}
	free := d.s.Stats().FreeChunks
	for range orphans {
		i := d.s.pool.Take(format.ValueLog)
		d.s.pool.AddLive(i, 800)
		d.s.pool.Seal(i)
	}
	if !d.s.Audit(false) {
		t.Fatal("it does not begin")
	}
	turns, choosing, applying := 0, 0, 0
	for a := &d.s.audit; a.Running; turns++ {
		at, counts, chosen := a.at, len(a.counts), a.chosen
		d.turns(1)
		looked, changed := int(a.at-at), len(a.counts)-counts
		if changed < 0 {
			changed = -changed
		}
		switch {
		case !a.Running || chosen != a.chosen:
		case looked > auditChunks || changed > auditChunks/auditCounted:
			t.Fatalf("a turn looks at %d chunks, and %d more or fewer are counted", looked, changed)
		case !chosen:
			choosing++
		case looked > 0:
			applying++
		}
		// Some are new, so that the table grows.
		d.s.Submit(&Request{Op: Put, Key: fmt.Appendf(nil, "%d", turns*7%2000), Value: value})
		if turns > 100_000 {
			t.Fatal("it does not end")
		}
	}
	least := orphans * auditCounted / auditChunks
	if choosing < least || applying < least {
		t.Errorf("of %d turns %d choose chunks, %d use the counts, want %d", turns, choosing, applying, least)
	}
	d.run()
	if got := d.s.Stats().FreeChunks; got < free-int64(turns*1000/(128<<10))-8 {
		t.Errorf("%d chunks are free, %d were before %d were lost", got, free, orphans)
	}
	if err := d.s.Recount(d.disk, true); err != nil {
		t.Error(err)
	}
	t.Logf("%d turns, %d choose chunks, %d use the counts", turns, choosing, applying)
}
