package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// failVictims lets one in n reads of victims fail, and returns how many have. If all fail, so do those of segments.
func (m *model) failVictims(n int) *int {
	failed := new(int)
	m.dev.Fault = func(q *ssd.Request) lab.Outcome {
		if q.Op == ssd.Read && m.ios[q.Tag].Background && (q.Len > 4096 || n == 1) && m.rng.IntN(n) == 0 {
			*failed++
			return lab.FailUndone
		}
		return lab.Good
	}
	return failed
}

// TestAFailedReadOfAVictimRefusesNoPut: while compaction pauses after a failed read, Puts wait for it. If all reads
// fail they do not wait for ever.
func TestAFailedReadOfAVictimRefusesNoPut(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	const keysUnreadable = 18 // compaction needs the key log then, and it cannot be read
	for seed := range kvstore.Seeds(t, 3) {
		if seed == 3 {
			seed = keysUnreadable
		}
		r := newRig(t, seed, small(64))
		const size = 2000
		m := newModel(r, int(r.cfg.PartitionBytes*7/10/size), func() int { return size })
		for k := range m.keys {
			m.push(kvstore.Put, k, size)
		}
		m.finish()
		m.ops = updates
		failed := m.failVictims(10)
		m.random(4000, 48)
		m.finish()
		if *failed < 2 || m.full+m.failed > 0 {
			t.Errorf("%d reads of victims have failed, want more; %d Puts were refused, and there is space: %+v",
				*failed, m.full+m.failed, m.s.Stats())
		}
		m.failVictims(1)
		m.random(4000, 48)
		if m.finish(); m.failed == 0 {
			t.Errorf("no Put was refused, and compaction is not possible: %+v", m.s.Stats())
		}
		m.dev.Fault = nil
		m.settle()
		m.compare(false)
	}
}
