package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
)

// TestAStoreStopsAfterItsLastRequest, whatever the request is and however it ends: the last checkpoint needs no further
// event.
func TestAStoreStopsAfterItsLastRequest(t *testing.T) {
	seed := seeds(t)
	for i := range uint64(times(100)) {
		r := newRig(t, seed+i, variant(seed+i, 24))
		m := newModel(r, 12, sizes(r.rng, 3000))
		m.random(100, 24)
		for range 1 + r.rng.IntN(6) {
			op, cond := mixed[r.rng.IntN(len(mixed))], kvstore.Always
			if op == kvstore.Put && r.rng.IntN(2) == 0 {
				cond = []kvstore.Condition{kvstore.IfAbsent, kvstore.IfPresent}[r.rng.IntN(2)]
			}
			m.submit(op, cond, r.rng.IntN(len(m.keys)), m.size())
		}
		m.stop()
	}
}
