package kvstore_test

import (
	"slices"
	"testing"

	"jbofd/internal/kvstore"
)

// TestAnIncrementHasWhatIsCutOffMeanwhile: many segments at the end of the table are empty when an increment begins,
// and are taken off the table while it is being written. None of their keys is there after a crash behind it.
func TestAnIncrementHasWhatIsCutOffMeanwhile(t *testing.T) {
	kvstore.PlainOnly(t)
	const keys, each = 120_000, 12
	cfg := small(260)
	cfg.KeysPerSegment, cfg.CheckpointBytes = each, 1<<30
	m := newModel(newRig(t, 5*seeds(t)+4, cfg), keys, func() int { return 30 }) // not eager
	for i := range m.keys {
		m.push(kvstore.Put, i, 30)
	}
	m.rest()
	byNumber := make([]int, keys)
	for i := range byNumber {
		byNumber[i] = i
	}
	slices.SortFunc(byNumber, func(a, b int) int {
		return int(m.s.SegmentOf(m.keys[a].name)) - int(m.s.SegmentOf(m.keys[b].name))
	})
	checkpoint := func(cut bool) {
		before := m.s.Stats().Checkpoints
		for m.s.Checkpoint(); m.s.Stats().Checkpoints == before; {
			m.step()
			if stage, _ := m.s.States(); stage == "writes pages" && cut {
				m.s.HoldMerges(m.now, 3000)
			}
		}
	}
	m.s.HoldMerges(1<<62, 3000) // as after one that was refused, and Settles
	remove := func(from, to int) {
		for _, k := range byNumber[from:to] {
			m.push(kvstore.Delete, k, absent)
		}
		m.finish()
	}
	remove(0, keys/2)
	m.s.FullCheckpoint()
	checkpoint(false)
	remove(keys/2+10, keys)
	segments := m.s.Stats().Segments
	checkpoint(true)
	m.finish()
	if _, increment := m.s.Table(); !increment || m.s.Stats().Segments > segments-100 {
		t.Fatalf("%d segments of %d are left; increment: %v", m.s.Stats().Segments, segments, increment)
	}
	occupied := m.s.Occupied()
	m.crash()
	m.reopen0()
	if n := m.s.Occupied(); n > occupied {
		t.Errorf("%d segments are not empty after a crash, and were %d before it", n, occupied)
	}
	clear(m.reqs)
	m.compare(true)
}
