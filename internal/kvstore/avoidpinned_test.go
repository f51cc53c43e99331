package kvstore

import (
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// TestADamagedChunkThatIsPinnedIsNotTriedAgain: something in it is not committed. It stays Damaged, and no write waits
// for its next try, because there is none before it is released.
func TestADamagedChunkThatIsPinnedIsNotTriedAgain(t *testing.T) {
	for _, pinned := range []bool{true, false} {
		s, full, keys := damagedStore(t)
		s.now += 2e9
		s.compact.blocked, s.compact.short = true, true
		if pinned {
			s.pool.Pin(full)
			s.pool.Pin(keys)
		}
		if s.retrying() == pinned {
			t.Errorf("pinned: %v, and writes wait: %v", pinned, !pinned)
		}
		if s.retryAvoided() == pinned {
			t.Errorf("pinned: %v, and tried again: %v", pinned, !pinned)
		}
		left := s.pool.Chunks[full].State == space.Damaged && s.pool.Chunks[keys].State == space.Damaged
		if left != pinned {
			t.Errorf("pinned: %v, and both stay damaged: %v", pinned, left)
		}
	}
}

// TestNoChunkIsLentWhileWritesFail: the key log lends one for moved values if room is lost otherwise, but not when
// writes have failed a moment ago, because they would use it up.
func TestNoChunkIsLentWhileWritesFail(t *testing.T) {
	for _, c := range []struct {
		badNS int64
		lends bool
	}{{0, true}, {10e9 - 1, false}, {9e9, true}} {
		s, _, _ := damagedStore(t)
		s.compact.avoided = [16]avoided{}
		log := &s.logs[keyLog]
		log.chunk, log.tail = s.pool.Take(format.KeyLog), 4096
		for s.budget.MovedChunks(false) > 0 {
			s.pool.Take(format.ValueLog)
		}
		if s.budget.MovedChunks(true) == 0 || s.placeForKeys() <= s.budget.Fill {
			t.Fatal("the key log has no chunk to lend")
		}
		s.now, s.badWriteNS, s.compact.short = 10e9, c.badNS, true
		if s.chooseVictim(); s.compact.lastResort != c.lends {
			t.Errorf("a write has failed at %d: a chunk is lent: %v, want %v", c.badNS, !c.lends, c.lends)
		}
		s.compact.lastResort = true
		if s.mayTakeChunk(movedLog) != c.lends {
			t.Errorf("a write has failed at %d: a lent chunk is taken: %v, want %v", c.badNS, !c.lends, c.lends)
		}
	}
}
