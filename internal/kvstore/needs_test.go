package kvstore

import (
	"fmt"
	"testing"
)

// TestTombstonesAndIdentitiesNeedSegments: after a mass deletion that leaves tombstones or identities, which all
// Deletes of client/kv do, segments are no shorter than before, so that the table does not shrink under them. When they
// have expired it does. A restart changes nothing.
func TestTombstonesAndIdentitiesNeedSegments(t *testing.T) {
	const n, keep = 5000, 600
	for _, kind := range []string{"tombstones", "identities"} {
		cfg := Config{BlockSize: 512, PartitionBytes: 64 << 20, SegTbl: make([]byte, 5<<14)}
		r := newRanged(t, 1, cfg)
		key := func(i int) []byte { return fmt.Appendf(nil, "%016d", i) }
		put := func(i int) {
			t.Helper()
			if p := r.do(Request{Op: Put, Key: key(i), Value: make([]byte, 10)}); p.Status != OK {
				t.Fatalf("%s: Put %d: status %d", kind, i, p.Status)
			}
		}
		rest := func() {
			for range 12 {
				r.now += 1e9
				r.run()
			}
		}
		for i := range n {
			put(i)
		}
		before := r.s.Stats()
		if most := int64(n/13 + 1); before.Segments > most {
			t.Fatalf("%d segments for %d objects, want at most %d", before.Segments, n, most)
		}
		for i := range n {
			q := Request{Op: Delete, Key: key(i), Tombstone: kind == "tombstones"}
			if q.Expires = r.wall + keep; !q.Tombstone {
				q.ID, q.Expires = Identity{Client: 7, Seq: uint64(i + 1), KeepUntil: r.wall + keep}, 0
			}
			if p := r.do(q); p.Status != OK {
				t.Fatalf("%s: Delete %d: status %d", kind, i, p.Status)
			}
		}
		rest()
		deleted := r.s.Stats()
		perDelete := (deleted.KeyLogBytes - before.KeyLogBytes) / n
		again := func() {
			was := r.s.Stats().Segments
			if was < before.Segments/3 || was > 2*before.Segments {
				t.Errorf("%s: %d segments, %d before they were deleted", kind, was, before.Segments)
			}
			cfg := r.s.cfg
			cfg.Format = false
			s, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			r.s, r.act = s, Actions{}
			r.s.SetWall(r.wall)
			if r.run(); !s.Ready() {
				t.Fatal(s.Err())
			}
			rest()
			if now := r.s.Stats(); now.Segments != was || now.Splits+now.Merges > 0 {
				t.Errorf("%s: %d segments, %d after a restart, with %d splits and %d merges", kind, was, now.Segments,
					now.Splits, now.Merges)
			}
		}
		again()
		from := r.s.Stats().KeyLogBytes
		for i := range 200 {
			put(n + i)
		}
		if perPut := (r.s.Stats().KeyLogBytes - from) / 200; perDelete > 2048 || perPut > 2048 {
			t.Errorf("%s: %d bytes of key log a Delete, %d a Put", kind, perDelete, perPut)
		}
		r.wall += keep + 1
		r.s.SetWall(r.wall)
		for range 10 {
			rest()
		}
		if now := r.s.Stats().Segments; now > 3*200/13 {
			t.Errorf("%s: %d segments for 200 objects when all of that has expired", kind, now)
		}
	}
}

// TestATableOfTombstonesGrows: a replica that gets nothing else has room for them, at the cost of a usual Put each.
func TestATableOfTombstonesGrows(t *testing.T) {
	const n = 20_000
	r := newRanged(t, 1, Config{BlockSize: 512, PartitionBytes: 64 << 20})
	for i := range n {
		p := r.do(Request{Op: Delete, Tombstone: true, Condition: IfNewer, Version: uint64(i + 1),
			Key: fmt.Appendf(nil, "%d", i)})
		if st := r.s.Stats(); p.Status != OK || st.KeyLogBytes > int64(i+1)*2048 {
			t.Fatalf("tombstone %d: status %d, %d segments, %d bytes of key log", i, p.Status, st.Segments,
				st.KeyLogBytes)
		}
	}
	st := r.s.Stats()
	if least, most := int64(n/100), int64(n/13); st.Segments < least || st.Segments > most {
		t.Errorf("%d segments for %d tombstones, want %d to %d", st.Segments, n, least, most)
	}
}
