package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestADriveThatFailsSlowly: a drive gets slower and slower, up to a second for each I/O, then some of its I/Os fail,
// then more, and in the end it is gone, in the middle of requests. All requests are answered as long as there is an
// answer to them, and what was acknowledged is there when the drive comes back.
func TestADriveThatFailsSlowly(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(4)) {
		r := newRig(t, seed, variant(seed, 32))
		m := newModel(r, []int{60, 700}[seed%2], sizes(r.rng, 20000))
		m.random(1500, 32)
		for life := range 2 {
			slow, fails := int64(50e3), 0.0
			r.dev.Hold = func(*ssd.Request) int64 { return slow/2 + r.rng.Int64N(slow) }
			r.dev.Fault = func(*ssd.Request) lab.Outcome {
				if r.rng.Float64() >= fails {
					return lab.Good
				}
				return lab.FailUndone + lab.Outcome(r.rng.IntN(3))
			}
			failed := m.failed
			for slow < 1e9 {
				m.random(60, 1+r.rng.IntN(32))
				slow *= 4
			}
			if m.failed != failed {
				t.Fatalf("%d requests fail on a drive that is only slow", m.failed-failed)
			}
			for fails = 0.01; fails < 0.5; fails *= 3 {
				m.random(60, 1+r.rng.IntN(32))
			}
			for range 20 {
				m.submit(kvstore.Put, kvstore.Always, r.rng.IntN(len(m.keys)), m.size())
			}
			for range r.rng.IntN(40) {
				r.step()
			}
			r.dev.Vanish()
			m.finish()
			m.random(20, 8)
			m.power = life == 1
			m.crash()
			r.dev.Return()
			r.dev.Hold, r.dev.Fault = nil, nil
			m.reopen()
			failed = m.failed
			m.random(500, 32)
			m.settle()
			if m.failed != failed {
				t.Fatalf("%d requests fail on a drive that works again", m.failed-failed)
			}
			m.compare(false)
		}
		m.stop()
		m.reopen()
	}
}
