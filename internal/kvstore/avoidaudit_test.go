package kvstore

import (
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// TestADamagedChunkIsLeftToAnAudit, which reports what is lost of it only while it is Damaged: compaction and the scrub
// do not try it again, unless something waits for space.
func TestADamagedChunkIsLeftToAnAudit(t *testing.T) {
	for name, again := range map[string]func(s *Store){
		"compaction": func(s *Store) { s.startVictims(1) },
		"scrub":      func(s *Store) { s.cfg.ScrubBytesPerSec = 1 << 20; s.nextToScrub() },
	} {
		for _, runs := range []bool{true, false} {
			s, full, keys := damagedStore(t)
			if runs {
				s.beginAudit(false, false)
			}
			s.now += 2e9
			s.compact.short = true
			again(s)
			tried := s.pool.Chunks[full].State != space.Damaged || s.pool.Chunks[keys].State != space.Damaged
			if tried == runs {
				t.Errorf("%s, an audit runs: %v: a damaged chunk is tried again: %v", name, runs, tried)
			}
		}
	}
	s, full, keys := damagedStore(t)
	s.beginAudit(false, false)
	s.now += 2e9
	s.compact.short, s.compact.blocked = true, true
	if s.startVictims(1); s.pool.Chunks[full].State == space.Damaged && s.pool.Chunks[keys].State == space.Damaged {
		t.Error("a segment waits for space, and no damaged chunk is tried again while an audit runs")
	}
}

// TestAChunkThatBecomesDamagedBesideAnAuditAsksForAnother: an audit that runs, or has run, while a chunk is tried again
// does not see what it has lost. One that has ended before does.
func TestAChunkThatBecomesDamagedBesideAnAuditAsksForAnother(t *testing.T) {
	retry := func(s *Store, keys format.ChunkNumber) { s.resealDamaged(keys) }
	sweep := func(s *Store, _ format.ChunkNumber) { // that of a store without a scrub
		s.pool.Sweep = len(s.pool.Chunks)
		s.nextBad()
	}
	scrub := func(s *Store, keys format.ChunkNumber) {
		s.cfg.ScrubBytesPerSec, s.scrub.next = 1<<20, keys
		s.nextToScrub()
	}
	again := func(s *Store, keys format.ChunkNumber) { emptied(s, keys, aBlockFails) }
	begin := func(s *Store, _ format.ChunkNumber) { s.beginAudit(false, false) }
	end := func(s *Store, _ format.ChunkNumber) { s.endAudit() }
	first := func(s *Store, keys format.ChunkNumber) {
		s.compact.avoided = [16]avoided{}
		emptied(s, keys, aBlockFails)
	}
	holes := func(s *Store, keys format.ChunkNumber) {
		s.compact.avoided = [16]avoided{}
		emptied(s, keys, allIsRead)
	}
	type steps []func(s *Store, keys format.ChunkNumber)
	for name, c := range map[string]struct {
		steps  steps
		wanted bool
	}{
		"before it is tried":         {steps{begin, end, retry, again}, false},
		"none":                       {steps{retry, again}, false},
		"while it is tried":          {steps{retry, begin, end, again}, true},
		"begun before":               {steps{begin, retry, end, again}, true},
		"ends later":                 {steps{retry, begin, again, end}, true},
		"all the time":               {steps{begin, retry, again, end}, true},
		"while it was swept":         {steps{begin, sweep, end, again}, true},
		"before it is scrubbed":      {steps{begin, end, scrub, again}, false},
		"before it is swept":         {steps{begin, end, sweep, again}, false},
		"and the next one":           {steps{begin, retry, again, end, begin, end}, false},
		"damaged first":              {steps{first}, true},
		"damaged first in an audit":  {steps{begin, first, end}, true},
		"damaged values in an audit": {steps{begin, holes, end}, true},
		"damaged values":             {steps{holes}, true},
	} {
		s, _, keys := damagedStore(t)
		s.audit.wanted, s.audit.hoards = false, false
		for _, step := range c.steps {
			step(s, keys)
		}
		if s.pool.Chunks[keys].State != space.Damaged {
			t.Fatalf("%s: the chunk is not damaged", name)
		}
		if s.audit.wanted != c.wanted || s.audit.Running {
			t.Errorf("%s: another audit is wanted: %v, want %v", name, s.audit.wanted, c.wanted)
		}
	}
}
