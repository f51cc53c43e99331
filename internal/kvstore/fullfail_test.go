package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// fullFailures are those of a drive whose partition is nearly full. A Delete may fail with them, but never for want of
// room (model.check), and when the drive works again nothing fails.
var fullFailures = []struct {
	name string
	fail func(m *model, q *ssd.Request) bool
}{
	{"half of all", func(m *model, q *ssd.Request) bool { return m.rng.IntN(2) == 1 }},
	{"half of the writes", func(m *model, q *ssd.Request) bool { return q.Op == ssd.Write && m.rng.IntN(2) == 1 }},
}

// TestADeleteFindsRoomWhateverTheDriveFails: see fullFailures. Some of the seeds are of Deletes that did not. With the
// last one compaction paused for good, because writes that failed had used up what it won, and Puts failed.
func TestADeleteFindsRoomWhateverTheDriveFails(t *testing.T) {
	t.Parallel()
	for _, f := range fullFailures {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			for s := range kvstore.Seeds(t, times(kvstore.Sized(8, 4))) {
				failInAFullPartition(t, s, f.fail)
			}
		})
	}
	for _, s := range []uint64{18676142780924, 19302372627194, 583312971045006, 644762125550502} {
		failInAFullPartition(t, s, fullFailures[0].fail)
	}
}

func failInAFullPartition(t *testing.T, s uint64, fail func(m *model, q *ssd.Request) bool) {
	cfg := small(32)
	if s%2 == 0 {
		cfg.BlockSize, cfg.GroupBytes = 4096, 16<<10
	}
	r := newRig(t, s, cfg)
	m := newModel(r, 500, sizes(r.rng, 20000))
	m.random(3000, 32)
	for range 4 {
		r.dev.Fault = func(q *ssd.Request) lab.Outcome {
			if fail(m, q) {
				return lab.FailUndone + lab.Outcome(r.rng.IntN(3))
			}
			return lab.Good
		}
		m.random(1500, 1+r.rng.IntN(48))
		r.dev.Fault = nil
		m.finish()
		m.worksAgain(t)
	}
	m.stop()
	m.reopen()
}

// worksAgain tests that no request fails a while after the drive works again: what could not be read is tried again.
func (m *model) worksAgain(t *testing.T) {
	t.Helper()
	r := m.rig
	until := r.now + 5e9
	for r.now < until && r.step() {
	}
	r.now = max(r.now, until)
	before := m.failed
	m.random(600, 32)
	m.settle()
	if m.failed != before {
		t.Fatalf("%d requests failed, and no I/O", m.failed-before)
	}
	m.compare(false)
}
