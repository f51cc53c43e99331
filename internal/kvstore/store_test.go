package kvstore

import (
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
)

func small() Config {
	return Config{PartitionBytes: 40*(128<<10) + 128<<10, BlockSize: 512, ChunkBytes: 128 << 10, GroupBytes: 8 << 10, KeysPerSegment: 6, FUA: true, Requests: 64}
}

func sizes(r *rig, most int) func() int {
	return func() int {
		s := [...]int{0, 1, 304, 528, 1008, 256, 1024, 100, 2000, 4096, r.rng.IntN(3000)}
		if r.rng.IntN(100) == 0 {
			return r.rng.IntN(most + 1)
		}
		return s[r.rng.IntN(len(s))]
	}
}

func TestRandomHistoriesAgainstAMap(t *testing.T) {
	t.Logf("-seed %d", *seed)
	for round := range uint64(5) {
		r := newRig(t, *seed+round, small())
		m := newModel(r, []int{50, 800, 1500}[round%3], sizes(r, format.MinChunkBytes/2))
		m.random(30000, 1+int(round)*12)
		r.idle()
		m.audit(true)
		st := r.s.Stats()
		t.Logf("%+v, full %d", st, m.full)
		if round%3 > 0 && (st.Compactions < 20 || st.Checkpoints < 3) {
			t.Errorf("%d compactions and %d checkpoints: the history is too short", st.Compactions, st.Checkpoints)
		}
		r.stop()
		m.reopen()
		m.audit(true)
		m.random(2000, 16)
		m.audit(false)
	}
}

func TestCrashAtAnyWrite(t *testing.T) {
	t.Logf("-seed %d", *seed)
	var recovered int
	for round := range uint64(3) {
		r := newRig(t, *seed+round, small())
		m := newModel(r, []int{60, 900, 1300}[round%3], sizes(r, 20000))
		m.random(8000, 32)
		crashes := 40
		for range crashes {
			m.crashIn = 1 + r.rng.IntN(60)
			m.random(100000, 1+r.rng.IntN(40))
			m.reopen()
			recovered++
		}
		m.random(1000, 16)
		r.idle()
		m.audit(false)
	}
	t.Logf("%d crashes", recovered)
}

func TestCrashAtEveryWriteOfAHistory(t *testing.T) {
	plainOnly(t)
	t.Logf("-seed %d", *seed)
	// The same history each time, with a crash one write later. It begins where compaction does.
	base := newRig(t, *seed, small())
	m := newModel(base, 800, sizes(base, 8000))
	for base.s.Stats().Compactions < 3 {
		m.random(200, 16)
	}
	base.idle()
	for at := 1; at <= 60; at++ {
		r := *base
		r.rng = rand.New(rand.NewPCG(*seed, 99))
		r.disk = slices.Clone(base.disk)
		c := &model{rig: &r, keys: slices.Clone(m.keys), reqs: map[uint64]*request{}, size: sizes(&r, 8000)}
		for i := range c.keys {
			c.keys[i].may = slices.Clone(c.keys[i].may)
		}
		c.reply = c.check
		c.reopen()
		c.crashIn = at
		c.random(100000, 24)
		// And once more, while it recovers from that.
		c.reopen()
		c.crashIn = 1 + at%7
		c.random(100000, 24)
		c.reopen()
	}
}

func TestAnyIOMayFail(t *testing.T) {
	plainOnly(t)
	t.Logf("-seed %d", *seed)
	for round := range uint64(6) {
		r := newRig(t, *seed+round, small())
		m := newModel(r, []int{60, 900, 1300}[round%3], sizes(r, 20000))
		m.random(5000, 32)
		for range 6 {
			m.fail = []float64{0.01, 0.1, 0.5}[r.rng.IntN(3)]
			m.random(2000, 32)
			if r.rng.IntN(2) == 0 {
				m.crashIn = 1 + r.rng.IntN(60)
				m.random(100000, 32)
				m.reopen()
			}
			m.fail = 0
			// All keys are served again, and nobody got lost.
			m.random(1000, 32)
			r.idle()
			m.audit(false)
		}
		m.reopen()
	}
}

func TestLargestValue(t *testing.T) {
	r := newRig(t, *seed, Config{PartitionBytes: 64 << 20, BlockSize: 4096, FUA: true})
	m := newModel(r, 20, func() int { return []int{1 << 20, 1<<20 - 1, 1000, 0}[r.rng.IntN(4)] })
	m.random(300, 8)
	r.idle()
	m.audit(true)
	m.reopen()
}
