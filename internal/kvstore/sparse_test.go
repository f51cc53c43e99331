package kvstore_test

import (
	"math/bits"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestAFewRangesHaveShortSegments: a store has the keys of one range of sixteen, as a partition of a cluster with many
// drives has. Its segments are as long as those of a store that has all of them, so that a Get does not read more; and
// when the keys are deleted the table becomes short again.
func TestAFewRangesHaveShortSegments(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	const ranges, objects = 16, 5000
	seed := seeds(t)
	cfg := small(400)
	cfg.KeysPerSegment = 0
	r := newRig(t, seed, cfg)
	m := newModel(r, objects, func() int { return 100 })
	n := uint64(0)
	for k := range m.keys {
		for ; ; n++ {
			key := []byte{'k', byte(n), byte(n >> 8), byte(n >> 16), 'e', 'y', 0, 1, 2, 3, 4, 5, 6, 7, 8, 9}
			if bits.Reverse64(format.HashKey(r.cfg.HashSeed, key)) < 1<<63/(ranges/2) {
				m.keys[k].name = key
				n++
				break
			}
		}
		m.push(kvstore.Put, k, 100)
	}
	m.settle()
	m.rest()
	segments := m.s.Stats().Segments
	var read, most int64
	m.dev.Fault = func(q *ssd.Request) lab.Outcome {
		if q.Op == ssd.Read {
			read, most = read+q.Len, max(most, q.Len)
		}
		return lab.Good
	}
	for k := range m.keys {
		m.push(kvstore.Get, k, 0)
		m.finish()
	}
	mean := read / objects
	t.Logf("%d segments; %d bytes a Get, %d at most at once", segments, mean, most)
	if mean > 3<<10 || most > 4<<10+512 {
		t.Errorf("a Get reads %d bytes, and %d at once, want at most %d and %d", mean, most, 3<<10, 4<<10+512)
	}
	m.reopen()
	for k := range m.keys {
		m.push(kvstore.Delete, k, 0)
	}
	m.settle()
	m.rest()
	if left := m.s.Stats().Segments; left > segments/4 {
		t.Errorf("without the keys there are %d of %d segments", left, segments)
	}
}
