package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestALossOfPowerOnAVolatileDevice: without FUA, a loss of power may undo the write of any block that was not flushed.
// The partition opens, and each key has the value that it had when the last checkpoint began, or a newer one. A process
// that dies loses nothing.
func TestALossOfPowerOnAVolatileDevice(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	lost, kept := 0, 0
	for s := range kvstore.Seeds(t, times(6)) {
		cfg := variant(s, 40)
		cfg.FUA, cfg.Volatile = false, true
		r := newRig(t, s, cfg)
		m := newModel(r, []int{60, 500, 900}[s%3], sizes(r.rng, 8000))
		m.random(1000, 32)
		for range 12 {
			m.settle()
			before := m.s.Stats().Checkpoints
			m.s.Checkpoint()
			m.settle()
			if m.s.Stats().Checkpoints == before {
				t.Fatal("there was no checkpoint")
			}
			m.mark()
			// Some runs reach the next checkpoint, or the one after it.
			m.crashIn, m.power = 1+r.rng.IntN(300), r.rng.IntN(4) > 0
			m.random(1e6, 1+r.rng.IntN(48))
			if !m.power {
				m.reopen()
				continue
			}
			if r.rng.IntN(3) == 0 {
				m.dieOpening()
			}
			acknowledged := make([]uint32, len(m.keys))
			for i := range m.keys {
				for _, e := range m.keys[i].events {
					if e.end < never && e.size != absent {
						acknowledged[i] = max(acknowledged[i], e.version)
					}
				}
			}
			m.rewound()
			for i := range m.keys {
				if e := m.keys[i].events[0]; e.version < acknowledged[i] {
					lost++
				} else {
					kept++
				}
			}
			m.random(300, 16)
		}
		m.settle()
		m.compare(false)
	}
	if t.Logf("%d keys lost writes, %d none", lost, kept); lost == 0 || kept == 0 {
		t.Error("too little has happened")
	}
}

// TestFromVolatileToDurableAndBack: recovery judges writes by whether the device was volatile when they were made.
func TestFromVolatileToDurableAndBack(t *testing.T) {
	seed := seeds(t)
	cfg := variant(seed, 40)
	cfg.FUA, cfg.Volatile = false, true
	r := newRig(t, seed, cfg)
	m := newModel(r, 300, sizes(r.rng, 4000))
	for n := range 8 {
		m.random(500, 32)
		m.settle()
		m.s.Checkpoint()
		m.settle()
		m.mark()
		m.crashIn, m.power = 20+r.rng.IntN(60), true
		m.random(1e6, 24)
		was := m.cfg.Volatile
		m.cfg.FUA, m.cfg.Volatile = n%2 == 0, n%2 == 1
		if was {
			m.rewound()
		} else {
			m.reopen()
		}
	}
}

// TestAFirstCheckpointThatCannotBeWritten: a store whose first checkpoint fails does not open.
func TestAFirstCheckpointThatCannotBeWritten(t *testing.T) {
	seed := seeds(t)
	cfg := small(32)
	cfg.FUA, cfg.Volatile = false, true
	r := newRig(t, seed, cfg)
	m := newModel(r, 100, sizes(r.rng, 1000))
	m.random(500, 16)
	m.stop()
	left := 0
	r.dev.Fault = func(q *ssd.Request) lab.Outcome {
		if left--; left == 0 && len(q.Buf) != format.SuperblockBytes {
			return lab.FailUndone
		}
		return lab.Good
	}
	refused := 0
	for n := 30; n < 60; n++ {
		left = n
		if err := m.open(); err != nil {
			refused++
		}
	}
	if refused == 0 {
		t.Error("the partition opens whatever fails")
	}
	r.dev.Fault = nil
	m.reopen()
}

// TestAVolatileDeviceThatFailsWritesOpensAgain: the drive says of all writes that they have failed, and has done them.
// So the logs open one chunk after the other in vain, and before requests are served there must be a checkpoint.
func TestAVolatileDeviceThatFailsWritesOpensAgain(t *testing.T) {
	for seed := range kvstore.Seeds(t, times(6)) {
		cfg := variant(seed, 26+int64(seed%16))
		cfg.FUA, cfg.Volatile = false, true
		r := newRig(t, seed, cfg)
		m := newModel(r, []int{20, 300}[seed%2], sizes(r.rng, 20000))
		for range 3 {
			m.random(1000, 32)
			r.dev.Fault = func(q *ssd.Request) lab.Outcome {
				if q.Op == ssd.Write {
					return lab.FailDone
				}
				return lab.Good
			}
			m.random(200, 1+r.rng.IntN(32))
			r.dev.Fault = nil
			m.crash()
			m.reopen()
		}
		m.stop()
		m.reopen()
	}
}
