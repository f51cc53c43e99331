package kvstore

import (
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// damagedStore is a store with two damaged chunks, of which blocks could not be read: in one there is nothing to win,
// and that was tried first. The other is one of the key log.
func damagedStore(t *testing.T) (s *Store, full, keys format.ChunkNumber) {
	s, err := New(Config{PartitionBytes: 4 << 20, BlockSize: 4096, ChunkBytes: 128 << 10, Format: true,
		SegTbl: make([]byte, 5*1000)})
	if err != nil {
		t.Fatal(err)
	}
	damaged := func(kind format.Kind, live int) format.ChunkNumber {
		i := s.pool.Take(kind)
		s.pool.AddLive(i, live)
		s.pool.Seal(i)
		s.pool.Chunks[i].State = space.Victim
		s.pool.SetDamaged(i)
		return i
	}
	s.now = 1e9
	full, keys = damaged(format.ValueLog, 126<<10), damaged(format.KeyLog, 1000)
	s.avoidDamaged(full)
	s.avoidDamaged(keys)
	return s, full, keys
}

// TestDamagedChunksAreTriedAgainWhenNothingElseIsLeft: when they are due, or a second after the last failure if
// something waits for space. One in which there is nothing to win is not in the way of others.
func TestDamagedChunksAreTriedAgainWhenNothingElseIsLeft(t *testing.T) {
	for name, c := range map[string]struct {
		tries   int
		after   int64
		waits   bool
		changes func(s *Store, keys format.ChunkNumber)
		chosen  bool
	}{
		"due":                      {tries: 1, after: 1e9, chosen: true},
		"a moment ago":             {tries: 1, after: 5e8, waits: true},
		"often, and nothing waits": {tries: 12, after: 2e9},
		"often":                    {tries: 12, after: 2e9, waits: true, chosen: true},
		"is another chunk by now": {tries: 1, after: 2e9, waits: true, changes: func(s *Store, k format.ChunkNumber) {
			s.pool.Chunks[k].Epoch = space.NewEpoch(77)
		}},
		"pinned": {tries: 1, after: 2e9, waits: true, changes: func(s *Store, k format.ChunkNumber) { s.pool.Pin(k) }},
		"gone with a resize": {tries: 1, after: 2e9, waits: true, changes: func(s *Store, _ format.ChunkNumber) {
			s.compact.avoided[0].chunk, s.compact.avoided[1].chunk = 1000, 1001
		}},
	} {
		s, full, keys := damagedStore(t)
		for range c.tries - 1 {
			s.avoidDamaged(keys)
		}
		if c.changes != nil {
			c.changes(s, keys)
		}
		s.now += c.after
		s.compact.blocked, s.compact.short = c.waits, true
		s.startVictims(1)
		busy := s.compact.slots[0].busy
		if busy != c.chosen || busy && s.compact.slots[0].Chunk != keys {
			t.Errorf("%s: chosen %v, chunk %d, want %v, %d and not %d", name, busy, s.compact.slots[0].Chunk, c.chosen,
				keys, full)
		}
	}
}

// TestWhatWritesWithoutSpaceWaitFor, and how they end if there is nothing more to wait for.
func TestWhatWritesWithoutSpaceWaitFor(t *testing.T) {
	nothing := func(s *Store) { s.compact.avoided = [16]avoided{} }
	restore := func(tries int) func(s *Store) {
		return func(s *Store) {
			s.compact.avoided = [16]avoided{}
			s.restoring, s.groups[2].tries = 1, tries
		}
	}
	for name, c := range map[string]struct {
		set   func(s *Store)
		waits bool
		end   Status
	}{
		"nothing":                         {nothing, false, CapacityExceeded},
		"the next try of a damaged chunk": {func(*Store) {}, true, DeviceError},
		"one that was tried often": {func(s *Store) {
			for i := range s.compact.avoided {
				s.compact.avoided[i].tries = maxAwaited + 1
			}
		}, false, DeviceError},
		"a damaged chunk that is whole again": {func(s *Store) {
			for i := range s.pool.Chunks {
				if s.pool.Chunks[i].State == space.Damaged {
					s.pool.Reseal(format.ChunkNumber(i))
				}
			}
		}, false, CapacityExceeded},
		"a block that is restored":          {restore(1), true, DeviceError},
		"one that is not for three seconds": {restore(31), false, DeviceError},
		"a stop waits for less":             {func(s *Store) { restore(4)(s); s.stopping = true }, false, DeviceError},
		"a write that has failed": {func(s *Store) {
			s.compact.avoided = [16]avoided{}
			s.badWriteNS = s.now - 5e8
		}, false, DeviceError},
		"one that failed long ago": {func(s *Store) {
			s.compact.avoided = [16]avoided{}
			s.badWriteNS = s.now - 5e9
		}, false, CapacityExceeded},
	} {
		s, _, _ := damagedStore(t)
		s.now = 10e9
		c.set(s)
		if s.retrying() != c.waits || s.noSpace() != c.end {
			t.Errorf("%s: waits %v, ends with %v, want %v, %v", name, s.retrying(), s.noSpace(), c.waits, c.end)
		}
	}
}

// TestTheLastChunkIsNotForFailedWrites: the key log takes it to empty a victim, when writes have not failed lately.
func TestTheLastChunkIsNotForFailedWrites(t *testing.T) {
	s, _, _ := damagedStore(t)
	for s.pool.Free > s.budget.CheckpointChunks {
		s.pool.Take(format.ValueLog)
	}
	s.now = 10e9
	for _, c := range []struct {
		keys int
		bad  int64
		may  bool
	}{{0, 0, false}, {1, 0, true}, {1, 10e9 - 1, false}, {1, 9e9, true}} {
		s.compact.keys, s.badWriteNS = c.keys, c.bad
		if s.mayTakeChunk(keyLog) != c.may {
			t.Errorf("with %d victims, and a write that failed at %d: %v, want %v", c.keys, c.bad, !c.may, c.may)
		}
	}
}

// TestAnOpenChunkThatIsTooShortIsEmptied: what is left of it is enough for some segments, but not for the one that
// waits, and there is no other chunk to empty. Most of it is dead.
func TestAnOpenChunkThatIsTooShortIsEmptied(t *testing.T) {
	for _, waits := range []bool{true, false} {
		s, _, _ := damagedStore(t)
		s.compact.avoided = [16]avoided{}
		open := s.pool.Take(format.KeyLog)
		s.pool.AddLive(open, 1000)
		s.logs[keyLog].chunk, s.logs[keyLog].tail = open, 48<<10
		for s.pool.Free > s.budget.CheckpointChunks+1 {
			s.pool.Take(format.ValueLog)
		}
		s.compact.lastResort, s.compact.short, s.compact.blocked = true, true, waits
		if place := s.placeForKeys(); place <= 0 {
			t.Fatalf("there is room for %d bytes, want some", place)
		}
		if v := s.nextVictim(); (v == open) != waits {
			t.Errorf("chunk %d is emptied, the open one is %d, and a segment waits: %v", v, open, waits)
		}
	}
}

// emptied has a chunk of the key log been walked through, in a way.
func emptied(s *Store, chunk format.ChunkNumber, end func(sl *slot)) {
	sl := &s.compact.slots[0]
	s.pool.Chunks[chunk].State = space.Victim
	sl.Begin(chunk)
	sl.busy = true
	s.compact.keys++
	end(sl)
	s.victimDone(sl)
}

// aBlockFails is such a way: a block could not be read.
func aBlockFails(sl *slot) {
	allIsRead(sl)
	sl.Unreadable = 1
}

// allIsRead is another one: all could be read, and nothing was found.
func allIsRead(sl *slot) {
	for !sl.Ended() {
		if _, buf := sl.Piece(true); buf != nil {
			sl.Read(true)
		}
		for {
			if rec, _, _ := sl.Next(); rec == nil && !sl.Searching {
				break
			}
		}
	}
}

// TestAChunkThatWasAvoidedFirstIsReportedWhenItIsDamaged: at the first try more blocks than a walk takes could not be
// read, so that it was avoided and nothing was reported. At the second one just one cannot be read.
func TestAChunkThatWasAvoidedFirstIsReportedWhenItIsDamaged(t *testing.T) {
	s, _, keys := damagedStore(t)
	s.compact.avoided = [16]avoided{}
	s.pool.Reseal(keys)
	s.audit.wanted, s.audit.hoards, s.out.Damage = false, false, nil
	emptied(s, keys, func(sl *slot) { sl.Failed = true })
	s.now += 1e9
	s.forgive()
	emptied(s, keys, aBlockFails)
	if s.pool.Chunks[keys].State != space.Damaged {
		t.Fatal("the chunk is not damaged")
	}
	if len(s.out.Damage) == 0 || !s.audit.wanted || !s.audit.hoards {
		t.Errorf("a chunk is damaged, and %d damages were reported; an audit is wanted: %v, and hoards: %v",
			len(s.out.Damage), s.audit.wanted, s.audit.hoards)
	}
}
