package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
)

// TestEpochsGrowBeyond32Bits: chunks that were opened before and after are in order, and are found after crashes,
// losses of power and stops at any time around it.
func TestEpochsGrowBeyond32Bits(t *testing.T) {
	t.Parallel()
	const most = 1<<32 - 1
	before := 0
	for s := range kvstore.Seeds(t, times(6)) {
		cfg := variant(s, 28)
		if s%2 == 1 {
			cfg.FUA, cfg.Volatile = false, true
		}
		r := newRig(t, s, cfg)
		m := newModel(r, []int{60, 300, 600}[s%3], sizes(r.rng, 8000))
		m.random(600, 24)
		m.s.NearEpoch(30 + s/4%40)
		m.settle()
		for n := 0; n < 12 || m.s.LastEpoch() <= most+20; n++ {
			if m.s.LastEpoch() <= most {
				before++
			}
			m.s.Checkpoint()
			m.settle()
			m.mark()
			m.crashIn, m.power = 1+r.rng.IntN(500), r.rng.IntN(2) == 0
			m.random(1e6, 1+r.rng.IntN(40))
			if m.power && m.cfg.Volatile {
				m.rewound()
			} else {
				m.reopen()
			}
			if n > 200 {
				t.Fatalf("the last epoch is still %d", m.s.LastEpoch())
			}
		}
		m.settle()
		m.compare(false)
		m.stop()
		m.reopen()
		m.random(300, 16)
		m.settle()
		m.compare(false)
	}
	if t.Logf("%d crashes before", before); before < 3 {
		t.Error("too few crashes before")
	}
}

// TestStartsDoNotUseUpEpochs: a start of the largest partition with a volatile cache, of which no chunk is listed, uses
// few enough of them.
func TestStartsDoNotUseUpEpochs(t *testing.T) {
	seed := seeds(t)
	cfg := small(32)
	cfg.FUA, cfg.Volatile = false, true
	r := newRig(t, seed, cfg)
	m := newModel(r, 100, sizes(r.rng, 1000))
	m.random(300, 16)
	before := m.s.LastEpoch()
	for range 10 {
		m.crash()
		m.reopen()
	}
	// Everything but the number of chunks is the same at 4 TiB.
	each := (m.s.LastEpoch()-before)/10 + kvstore.MaxChunks
	if left := kvstore.MaxEpoch / each; left < 500_000 {
		t.Errorf("%d epochs for a start, so that there are %d starts, want half a million", each, left)
	}
}
