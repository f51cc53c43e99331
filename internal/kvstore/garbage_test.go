package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestAFailedWriteThatLeavesGarbage: a write fails, and all its blocks hold anything, also the one that it shares with
// records that were acknowledged before. These are there again when the store has come to rest, and after a crash.
func TestAFailedWriteThatLeavesGarbage(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	shared := 0
	for seed := range kvstore.Seeds(t, times(4)) {
		r := newRig(t, seed, variant(seed, 34))
		m := newModel(r, 300, sizes(r.rng, 3000))
		m.random(500, 8)
		for range 30 {
			m.random(40, 1) // one at a time, so that groups share blocks
			left := 1 + r.rng.IntN(12)
			last, again := int64(-1), r.rng.IntN(3)
			r.dev.Fault = func(q *ssd.Request) lab.Outcome {
				first := left > 0
				if q.Op != ssd.Write || len(q.Buf) == format.SuperblockBytes && m.isSuper(q.Offset) {
					return lab.Good
				}
				if left--; left > 0 || !first && (again == 0 || q.Offset != last) {
					return lab.Good
				}
				if first {
					last = q.Offset
				} else {
					again--
				}
				if _, used := m.s.KindAt(q.Offset); used && (q.Offset-format.AreaStart)%m.cfg.ChunkBytes != 0 {
					shared++
				}
				garbage := make([]byte, q.Len)
				for i := range garbage {
					garbage[i] = byte(r.rng.Uint32())
				}
				m.dev.Store(q.Offset, garbage)
				return lab.FailUndone
			}
			m.random(20, 1+r.rng.IntN(3))
			for n := 0; left > 0 && n < 1000; n++ {
				m.random(1, 1)
			}
			m.settle()
			r.dev.Fault = nil
			m.compare(false)
			if r.rng.IntN(4) == 0 {
				m.crash()
				m.reopen()
			}
		}
		if m.failed == 0 {
			t.Error("no request has failed")
		}
	}
	t.Logf("%d writes have left garbage", shared)
}

func (m *model) isSuper(at int64) bool {
	return at == 0 || at == m.cfg.PartitionBytes-format.SuperblockBytes
}
