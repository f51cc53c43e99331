package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
)

// TestLongHistoriesAgainstAMap runs 700 thousand requests (300 thousand in `make test`), in histories that reuse all
// chunks many times; with -long, twenty times as many.
func TestLongHistoriesAgainstAMap(t *testing.T) {
	t.Parallel()
	const most = format.MinChunkBytes / 2
	for seed := range kvstore.Seeds(t, times(kvstore.Sized(20, 8))) {
		r := newRig(t, seed, variant(seed, 40))
		m := newModel(r, []int{50, 800, 1500}[seed%3], sizes(r.rng, most))
		enough := func() bool { // of what 50 keys need little
			st := m.s.Stats()
			return seed%3 == 0 || st.Compactions >= 20 && st.Checkpoints >= 3
		}
		m.random(30000, 1+int(seed%5)*12)
		for n := 0; n < 3 && !enough(); n++ {
			m.random(30000, 1+int(seed%5)*12)
		}
		m.settle()
		m.compare(false)
		if st := m.s.Stats(); !enough() {
			t.Errorf("%d compactions and %d checkpoints: the history is too short", st.Compactions, st.Checkpoints)
		}
		m.recount()
		m.stop()
		m.reopen()
		m.random(2000, 16)
		m.compare(false)
	}
}

// TestCrashesDuringRecovery: only a few writes separate two crashes.
func TestCrashesDuringRecovery(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, 3) {
		r := newRig(t, seed, small(40))
		m := newModel(r, []int{60, 900, 1300}[seed%3], sizes(r.rng, 20000))
		m.random(8000, 32)
		for range 40 {
			m.crashIn, m.power = 1+r.rng.IntN(60), true
			m.random(100000, 1+r.rng.IntN(40))
			m.reopen()
		}
		m.random(1000, 16)
		m.settle()
		m.compare(false)
	}
}

func TestLargestValue(t *testing.T) {
	t.Parallel()
	r := newRig(t, seeds(t), kvstore.Config{PartitionBytes: 64 << 20, BlockSize: 4096, FUA: true})
	m := newModel(r, 20, func() int { return []int{1 << 20, 1<<20 - 1, 1000, 0}[r.rng.IntN(4)] })
	m.random(300, 8)
	m.settle()
	m.compare(false)
	m.recount()
	m.reopen()
}
