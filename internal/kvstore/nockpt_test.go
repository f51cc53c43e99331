package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// withoutCheckpoint are drives that write no checkpoint, and all else.
var withoutCheckpoint = []struct {
	name  string
	fails func(cfg *kvstore.Config, q *ssd.Request) bool
}{
	{"no chunk for it", func(_ *kvstore.Config, q *ssd.Request) bool {
		h := format.ChunkHeader(q.Buf[:min(len(q.Buf), format.ChunkHeaderBytes)])
		return len(h) == format.ChunkHeaderBytes && h.Check() == nil && h.Kind() == format.Checkpoint
	}},
	// Behind it is the list of the chunks that are opened.
	{"no superblock", func(_ *kvstore.Config, q *ssd.Request) bool { return q.Offset < format.SuperblockBytes }},
	{"one superblock", func(cfg *kvstore.Config, q *ssd.Request) bool {
		return q.Offset >= cfg.PartitionBytes-format.SuperblockBytes
	}},
}

// TestRequestsEndWhileNoCheckpointCanBeWritten: sooner or later the chunks are used up that only a checkpoint frees.
// Requests wait for it for a while, and then they fail. When the drive works again, so does the store.
func TestRequestsEndWhileNoCheckpointCanBeWritten(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for _, c := range withoutCheckpoint {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for seed := range kvstore.Seeds(t, times(2)) {
				cfg := variant(seed, 32)
				cfg.ScrubBytesPerSec = 1 << 20 // there is always something to do
				r := newRig(t, seed, cfg)
				m := newModel(r, 300, sizes(r.rng, 4000))
				m.random(2000, 32)
				first := int64(0)
				r.dev.Fault = func(q *ssd.Request) lab.Outcome {
					if q.Op == ssd.Write && c.fails(&r.cfg, q) {
						if first == 0 {
							first = r.now
						}
						return lab.FailUndone + lab.Outcome(r.rng.IntN(3))
					}
					return lab.Good
				}
				ended, at := m.done, r.now
				for n := 0; n < 60_000 && m.failed < 200; {
					op := m.ops[r.rng.IntN(len(m.ops))]
					if len(m.reqs) < 24 && m.submit(op, kvstore.Always, r.rng.IntN(300), m.size()) {
						n++
					} else if m.step(); m.done > ended {
						// The store learns what time it is once a turn.
						if ended, at = m.done, r.now; m.failed > 0 && r.now < first+kvstore.PatienceNS-20e6 {
							t.Fatalf("a request fails %d ns after a write of a checkpoint", r.now-first)
						}
					} else if r.now > at+20e9 {
						t.Fatalf("%d requests have no answer: %+v\n%s", len(m.reqs), m.s.Stats(), m.s.State())
					}
				}
				m.finish()
				r.dev.Fault = nil
				if m.failed == 0 {
					t.Errorf("no request has failed, and %d of %d find no room: %+v", m.full, m.done, m.s.Stats())
				}
				m.worksAgain(t)
				if m.s.LacksCheckpoint() {
					t.Error("writes would not wait for the next checkpoint")
				}
				m.stop()
				m.reopen()
			}
		})
	}
}
