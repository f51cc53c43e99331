package kvstore

import (
	"math"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// TestACopyKeepsWhatTheSourceKeepsForAsLong: the times of day of two stores differ. A copy that is told so keeps
// identities and tombstones for as long as the source, and objects until they expire. The same copy again changes
// nothing.
func TestACopyKeepsWhatTheSourceKeepsForAsLong(t *testing.T) {
	const keeps = 100
	for _, ahead := range []int64{-900, -60, 0, 60, 900} {
		for _, exact := range []bool{false, true} {
			from, to := twins(t, 3)
			from.wall = 10_000
			to.wall = uint32(int64(from.wall) + ahead)
			from.s.SetWall(from.wall)
			to.s.SetWall(to.wall)
			put := Request{Op: Put, Key: []byte("k"), Value: []byte("v"), Expires: to.wall + 1000,
				ID: Identity{Client: 1, Seq: 1, KeepUntil: from.wall + keeps}}
			ever := Request{Op: Put, Key: []byte("ever"), ID: Identity{Client: 1, Seq: 2}}
			gone := Request{Op: Delete, Key: []byte("gone"), Tombstone: true, Expires: from.wall + keeps}
			for _, q := range []Request{put, ever, {Op: Put, Key: gone.Key}, gone} {
				from.do(q)
			}
			version := from.s.clock
			var b nvme.KVRange
			from.walk(CopyOut, 0, math.MaxUint64, 1<<16, func(got nvme.KVRange, st Status) { b = slices.Clone(got) })
			if len(b) == 0 || b.Items() != 3 {
				t.Fatal("the source has not all of it")
			}
			in := Request{Op: CopyIn, Value: b, AheadSeconds: ahead}
			if exact {
				in.Version = MaxVersion
			}
			for _, want := range []int{3, 0} {
				if p := to.do(in); p.Status != OK || p.ValueLen != want {
					t.Errorf("ahead %d, exact %v: the copy says %+v, want %d changes", ahead, exact, p, want)
				}
			}
			to.wall += keeps - 1
			to.s.SetWall(to.wall)
			put.ID.Retry, ever.ID.Retry = true, true
			put.ID.KeepUntil = to.wall + 1
			for _, q := range []Request{put, ever} {
				if p := to.do(q); p.Status != OK || p.Version > version {
					t.Errorf("ahead %d, exact %v: a retry of %q ends with %+v", ahead, exact, q.Key, p)
				}
			}
			old := Request{Op: Put, Key: []byte("gone"), Condition: IfNewer, Version: 1}
			if p := to.do(old); p.Status != Superseded {
				t.Errorf("ahead %d, exact %v: a Put older than the Delete ends with %+v", ahead, exact, p)
			}
			to.wall += 2
			to.s.SetWall(to.wall)
			if p := to.do(put); p.Status != Indeterminate {
				t.Errorf("ahead %d, exact %v: a late retry ends with %+v", ahead, exact, p)
			}
			if p := to.do(old); p.Status != OK {
				t.Errorf("ahead %d, exact %v: the tombstone stays: %+v", ahead, exact, p)
			}
			p := to.do(Request{Op: Get, Key: put.Key, Value: make([]byte, 10)})
			if p.Status != OK || p.Expires != put.Expires {
				t.Errorf("ahead %d, exact %v: the object: %+v, want it to expire at %d", ahead, exact, p, put.Expires)
			}
		}
	}
}
