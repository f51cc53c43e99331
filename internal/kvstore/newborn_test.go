package kvstore

import (
	"errors"
	"testing"

	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
)

// TestCompactionKnowsNewSegmentsOfABrokenSplit: some of the segments that a split adds are durable, others are not. The
// chunk of the durable ones is emptied, and the round is repeated afterwards.
func TestCompactionKnowsNewSegmentsOfABrokenSplit(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10, GroupBytes: 512})
	s := d.s
	writes := 0
	d.fail = func(q *IO) error {
		if q.Op == pipeline.Write && s.split.writing {
			if writes++; writes%2 == 0 {
				return errors.New("unwritable")
			}
		}
		return nil
	}
	s.split.retryNS = 1 << 62
	for i := range 500 {
		d.one(t, Request{Op: Put, Key: numberedKey(i), Value: make([]byte, 100)}, OK)
	}
	s.closeChunk(keyLog)
	s.split.retryNS = 0 // so that many segments are added at once
	d.run()
	if !s.split.broken {
		t.Fatalf("%+v", s.split)
	}
	born := none
	for _, i := range s.split.dst[:s.split.n] {
		if s.segs[i].bytes > 0 {
			born = int(i)
		}
	}
	if born == none {
		t.Fatal("no new segment is durable")
	}
	chunk := s.pool.Of(s.segs[born].entry.Offset())
	s.closeChunk(keyLog)
	s.compact.suspect = chunk
	d.act.Damage = d.act.Damage[:0]
	d.run()
	if st := s.pool.Chunks[chunk].State; st == space.Damaged {
		t.Error("the chunk counts as damaged")
	}
	d.fail = nil
	for i := range 1000 {
		d.one(t, Request{Op: Put, Key: numberedKey(1_000_000 + i), Value: make([]byte, 100)}, OK)
	}
	if s.split.broken {
		t.Error("the split was not repeated")
	}
	if len(d.act.Damage) > 0 {
		t.Errorf("damage is reported: %+v", d.act.Damage)
	}
	d.s.Checkpoint()
	d.run()
	if err := s.Recount(d.disk, true); err != nil {
		t.Error(err)
	}
}
