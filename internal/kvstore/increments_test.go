package kvstore_test

import (
	"bytes"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestIncrementsLeaveNothingOut: checkpoints follow each other while the table grows and a few of its segments change
// between two of them, and during each of them. Now and then one fails. After a crash behind each of them the table is
// what it was, and so is every key at the end.
func TestIncrementsLeaveNothingOut(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(3)) {
		cfg := variant(seed, 60)
		cfg.KeysPerSegment, cfg.CheckpointBytes = 1, 1<<30
		r := newRig(t, seed, cfg)
		m := newModel(r, 6000, func() int { return 8 * r.rng.IntN(40) })
		checkpoints, increments := 0, 0
		for round := range 60 {
			if round < 30 { // keys that are new, so that segments are added
				for k := round * 200; k < round*200+150; k++ {
					m.push(kvstore.Put, k, m.size())
				}
			}
			m.random(1+m.rng.IntN(80), 1+m.rng.IntN(16))
			m.settle()
			if m.rng.IntN(8) == 0 {
				fails := m.rng.IntN(4)
				m.dev.Fault = func(q *ssd.Request) lab.Outcome {
					if q.Op != ssd.Write || !m.ios[q.Tag].Background {
						return lab.Good
					}
					if fails--; fails == 0 {
						return lab.FailTorn
					}
					return lab.Good
				}
			}
			before := m.s.Stats().Checkpoints
			m.s.Checkpoint()
			for n := 0; m.s.Stats().Checkpoints == before; n++ {
				if k := m.rng.IntN(len(m.keys)); n < 200 {
					if round < 30 && n < 50 { // new keys during the checkpoint
						k = round*200 + 150 + n
					}
					m.submit(kvstore.Put, kvstore.Always, k, m.size())
				}
				if m.step(); n > 1e5 {
					t.Fatalf("no checkpoint is written: %s", m.s.State())
				}
			}
			m.dev.Fault = nil
			m.settle()
			checkpoints++
			table, increment := m.s.Table()
			if table = slices.Clone(table); increment {
				increments++
			}
			if m.rng.IntN(3) > 0 {
				continue
			}
			m.power = m.rng.IntN(2) == 0
			m.crash()
			clear(m.reqs)
			m.reopen0()
			// Segments of a split that was not done may be there.
			if got, _ := m.s.Table(); !bytes.HasPrefix(got, table) {
				t.Fatalf("round %d: after a crash the table of %d bytes differs and has %d", round, len(table),
					len(got))
			}
			if err := m.s.Recount(m.dev.Visible, true); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		m.compare(false)
		if increments < checkpoints/4 || increments == checkpoints {
			t.Errorf("%d of %d checkpoints were increments, want some and not all", increments, checkpoints)
		}
	}
}
