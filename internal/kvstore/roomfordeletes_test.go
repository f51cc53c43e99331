package kvstore_test

import (
	"fmt"
	"testing"

	"jbofd/internal/kvstore"
)

// TestDeletesOfAllKeysFindRoomInAFullPartition: that is what a ChainHead relies on, which takes Deletes of keys that
// exist while it refuses Puts. Each adds a tombstone, and what is known of the request, and the values were empty, so
// that nothing becomes free. Afterwards there is room for the Deletes of keys that do not exist which a ChainHead may
// have ordered before it heard that the partition is nearly full.
func TestDeletesOfAllKeysFindRoomInAFullPartition(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	const wall = 1 << 30
	for _, chunks := range []int64{30, 100} {
		r := newRig(t, seeds(t), small(chunks))
		m := newModel(r, 1, func() int { return 0 })
		if err := m.open(); err != nil {
			t.Fatal(err)
		}
		r.s.SetWall(wall)
		key := func(i int) []byte { return fmt.Appendf(nil, "k%014x", i) }
		full := func(part int64) bool {
			used, most := r.s.Fullness()
			return used > most/100*part
		}
		n, version := 0, uint64(1000)
		do := func(q kvstore.Request) {
			t.Helper()
			version++
			q.Given = version
			if p := m.do(q); p.Status != kvstore.OK {
				used, most := r.s.Fullness()
				t.Fatalf("%d chunks: request %d of %d ends with %v, with %d %% in use", chunks, version, n, p.Status,
					used*100/most)
			}
		}
		for ; !full(80); n++ {
			do(kvstore.Request{Op: kvstore.Put, Key: key(n)})
		}
		tombstone := kvstore.Request{Op: kvstore.Delete, Tombstone: true, Expires: wall + 7200}
		for i := range n {
			q := tombstone
			q.Key, q.Condition = key(i), kvstore.IfPresent
			q.ID = kvstore.Identity{Client: 1 + uint64(i), Seq: 1, KeepUntil: wall + 150}
			do(q)
		}
		if full(115) {
			t.Errorf("%d chunks: %+v", chunks, r.s.Stats())
		}
		for i := range n / 20 {
			q := tombstone
			q.Key = key(n + i)
			do(q)
		}
		if st := r.s.Stats(); st.Objects != 0 || st.KeyBytes < int64(n)*30 || st.KeyBytes > st.LiveBytes {
			t.Errorf("%d chunks: after %d Deletes: %+v", chunks, n, st)
		}
	}
}
