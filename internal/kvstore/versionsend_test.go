package kvstore

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// TestNoRequestTakesTheLastVersions: after one with the greatest version or clock that a request may give, a store goes
// on to give versions, and what it has given can be put, deleted, dropped, and copied to an empty store.
func TestNoRequestTakesTheLastVersions(t *testing.T) {
	all := Range{Last: math.MaxUint64}
	for _, kind := range []string{"IfNewer", "Drop"} {
		a, b := twins(t, FixedSeed(t))
		greatest := func(version uint64) Status {
			if kind == "Drop" {
				return a.do(Request{Op: Drop, Range: all, Version: version}).Status
			}
			return a.do(Request{Op: Put, Condition: IfNewer, Version: version, Key: []byte("key")}).Status
		}
		if st := greatest(MaxVersion + 1); st != InvalidValue {
			t.Errorf("%s with a version above the greatest: status %d", kind, st)
		}
		if st := greatest(MaxVersion); st != OK {
			t.Errorf("%s with the greatest version: status %d", kind, st)
		}
		var last Reply
		for i := range 50 {
			last = a.do(Request{Op: Put, Key: fmt.Appendf(nil, "%d", i)})
		}
		if last.Status != OK || last.Version <= MaxVersion {
			t.Fatalf("%s: a Put afterwards: %+v", kind, last)
		}
		if st := greatest(last.Version + 1); st != InvalidValue {
			t.Errorf("%s with a version that the store has not given yet: status %d", kind, st)
		}
		copied := 0
		a.walk(CopyOut, 0, math.MaxUint64, 2000, func(r nvme.KVRange, _ Status) {
			p := b.do(Request{Op: CopyIn, Value: slices.Clone(r), Version: last.Version})
			if copied += p.ValueLen; p.Status != OK {
				t.Fatalf("%s: a CopyIn: status %d", kind, p.Status)
			}
		})
		if n := int(a.s.Stats().Objects); copied != n {
			t.Errorf("%s: %d of %d objects are copied", kind, copied, n)
		}
		for _, clock := range []uint64{last.Version, 0} {
			a.do(Request{Op: Put, Key: []byte("new")})
			if p := a.do(Request{Op: Drop, Range: all, Version: clock}); p.Status != OK {
				t.Errorf("%s: a Drop with clock %#x: %+v", kind, clock, p)
			}
			if n := a.s.Stats().Objects; n != int64(min(clock, 1)) {
				t.Errorf("%s: %d objects are left", kind, n)
			}
		}
	}
}

// TestTheLastVersion: what would need a greater one is refused, and changes nothing. No request leads there.
func TestTheLastVersion(t *testing.T) {
	a := newRanged(t, FixedSeed(t), rangedConfigs[0])
	a.do(Request{Op: Put, Key: []byte("old")})
	a.s.clock = maxOwn - 1
	key := []byte("key")
	if p := a.do(Request{Op: Put, Key: key}); p.Status != OK || p.Version != maxOwn {
		t.Fatalf("%+v", p)
	}
	for _, q := range []Request{{Op: Put, Key: key, Value: []byte("v")}, {Op: Put, Key: []byte("other")},
		{Op: Delete, Key: key}, {Op: Delete, Key: key, Tombstone: true}} {
		if p := a.do(q); p.Status != CapacityExceeded || p.Version != 0 {
			t.Errorf("%+v of %+v", p, q)
		}
	}
	if p := a.do(Request{Op: Get, Key: key, Value: make([]byte, 8)}); p.Version != maxOwn || p.ValueLen != 0 {
		t.Errorf("%+v", p)
	}
	if err := a.s.Recount(a.disk, true); err != nil {
		t.Error(err)
	}
	if p := a.do(Request{Op: Drop, Range: Range{Last: math.MaxUint64}}); p.Status != OK || a.s.Stats().Objects != 0 {
		t.Errorf("a Drop: %+v, %d objects are left", p, a.s.Stats().Objects)
	}
}
