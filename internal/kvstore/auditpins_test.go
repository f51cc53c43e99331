package kvstore

import (
	"testing"

	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
)

// TestAnAuditKnowsWhoHasPinnedAChunk: a chunk that the scrub reads, or that compaction avoids, or both, has nothing
// uncommitted because of that, and is counted. Each other pin is that of something uncommitted.
func TestAnAuditKnowsWhoHasPinnedAChunk(t *testing.T) {
	for name, c := range map[string]struct {
		scrub, scrubPins, avoid bool
	}{
		"nobody":                    {},
		"the scrub":                 {scrub: true, scrubPins: true},
		"compaction":                {avoid: true},
		"both":                      {scrub: true, scrubPins: true, avoid: true},
		"a scrub that rests":        {scrub: true},
		"compaction beside a rest":  {scrub: true, avoid: true},
		"a scrub of another pinned": {scrubPins: true},
	} {
		s, full, keys := damagedStore(t)
		s.compact.avoided = [16]avoided{}
		sl := &s.compact.slots[len(s.compact.slots)-1]
		if sl.Begin(keys); c.scrub {
			sl.Begin(full)
		}
		sl.busy, sl.scrub = true, true
		if c.scrubPins {
			s.pinScrubbed(sl, true)
		}
		if c.avoid {
			s.avoid(full)
		}
		for pins := range 3 {
			if got, want := s.uncommitted(full), pins > 0; got != want {
				t.Errorf("%s and %d others have pinned a chunk: uncommitted %v", name, pins, got)
			}
			s.beginAudit(true, false)
			s.choose()
			if _, counted := s.audit.counts[full]; counted != (pins == 0) {
				t.Errorf("%s and %d others have pinned a chunk: counted %v", name, pins, counted)
			}
			s.pool.Pin(full)
		}
	}
}

// TestAScrubThatHasRestedGoesOnInASealedChunkOnly, in which what it has read of it still is.
func TestAScrubThatHasRestedGoesOnInASealedChunkOnly(t *testing.T) {
	for _, st := range []space.State{space.Free, space.Open, space.Sealed, space.Victim, space.Obsolete,
		space.PendingFree, space.Damaged, space.Withdrawn, space.Bad} {
		for _, used := range []bool{false, true} {
			s, full, _ := damagedStore(t)
			sl := &s.compact.slots[len(s.compact.slots)-1]
			sl.Begin(full)
			s.scrub.epoch = s.pool.Chunks[full].Epoch
			if s.pool.Chunks[full].State = st; used {
				s.pool.Chunks[full].Epoch = space.NewEpoch(77)
			}
			if got, want := s.isScrubbed(sl), st == space.Sealed && !used; got != want {
				t.Errorf("chunk in state %d, used again: %v: it goes on: %v", st, used, got)
			}
			if s.pool.Chunks = s.pool.Chunks[:full]; s.isScrubbed(sl) {
				t.Error("it goes on in a chunk that a resize has taken away")
			}
		}
	}
}

// TestEachReadOfASegmentThatFailsIsCounted: one that is made shorter afterwards, because the segment may end before the
// block that cannot be read, has failed as well.
func TestEachReadOfASegmentThatFailsIsCounted(t *testing.T) {
	s, _, keys := damagedStore(t)
	i, _ := s.activate(0, payer{background: true})
	a := &s.segs[i]
	a.entry = lookup.NewEntry(s.pool.At(keys, 4096), 12<<10)
	a.buf, a.state, a.blocks = make([]byte, 12<<10), segLoading, 3
	for n := range uint8(2) {
		if s.segmentRead(i, false); a.failed != n+1 || a.blocks != int(2-n) || !a.shorter {
			t.Errorf("after %d failed reads %d are counted, and %d blocks are read, fewer than before: %v", n+1,
				a.failed, a.blocks, a.shorter)
		}
	}
}
