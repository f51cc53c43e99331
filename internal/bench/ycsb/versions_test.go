package ycsb

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func newTable(t *testing.T, path string, n uint64) *versions {
	t.Helper()
	v, err := newVersions(path, n, false, 77)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := v.close(); err != nil {
			t.Error(err)
		}
	})
	return v
}

// TestCorrectHistoriesPassVerification simulates overlapping reads and writes of a store in which each takes effect at
// one moment between its beginning and its end. Some writes have an unknown outcome.
func TestCorrectHistoriesPassVerification(t *testing.T) {
	type op struct {
		put, applied bool
		w            write
		record       uint64
		floor        uint32
		found        stamp
	}
	const records = 3
	for round := range uint64(300) {
		rng := testRNG()
		for range round {
			rng.Uint64()
		}
		v := newTable(t, "", records)
		v.begin(0, 0)
		store := map[uint64]stamp{}
		var ops, ghosts []*op
		apply := func(o *op) {
			if o.applied = true; o.put {
				store[o.record] = o.w.stamp
			} else {
				o.found = store[o.record]
			}
		}
		depth := 1 + rng.IntN(8)
		for range 400 {
			switch i := rng.IntN(depth + 1); {
			case i >= len(ops):
				o := &op{record: rng.Uint64N(records), put: rng.IntN(2) == 0}
				if o.put {
					o.w = v.issue(o.record)
				} else {
					o.floor = v.floor(o.record)
				}
				ops = append(ops, o)
			case !ops[i].applied && rng.IntN(2) == 0:
				apply(ops[i])
			default:
				o := ops[i]
				ops = append(ops[:i], ops[i+1:]...)
				switch how := rng.IntN(20); {
				case o.put && how == 0:
					v.settle(o.w, unknown)
					if !o.applied {
						ghosts = append(ghosts, o) // it may take effect much later
					}
					continue
				case o.put && how == 1 && !o.applied:
					v.settle(o.w, refused)
					continue
				case !o.applied:
					apply(o)
				}
				var err error
				switch {
				case o.put:
					v.settle(o.w, done)
				case o.found.version == 0:
					err = v.missing(o.record, o.floor)
				default:
					err = v.check(o.found, o.floor)
				}
				if err != nil {
					t.Fatalf("round %d: a correct store is blamed: %v", round, err)
				}
			}
			if len(ghosts) > 0 && rng.IntN(50) == 0 {
				apply(ghosts[0])
				ghosts = ghosts[1:]
			}
		}
	}
}

func TestIncorrectReadsAreDetected(t *testing.T) {
	v := newTable(t, "", 4)
	v.begin(0, 0)
	say := func(what string, err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, must say %q", what, err, want)
		}
	}
	if err := v.missing(1, v.floor(1)); err != nil {
		t.Errorf("a record that was never written is missing: %v", err)
	}
	one := v.issue(1)
	v.settle(one, done)
	say("missing after the acknowledgment", v.missing(1, v.floor(1)), "version 1")
	two := v.issue(1)
	for _, s := range []stamp{one.stamp, two.stamp} {
		if err := v.check(s, v.floor(1)); err != nil {
			t.Errorf("version %d of two that overlap: %v", s.version, err)
		}
	}
	before := v.floor(1)
	v.settle(two, done)
	if err := v.check(one.stamp, before); err != nil {
		t.Errorf("a read that began before version 2 was acknowledged finds version 1: %v", err)
	}
	say("stale", v.check(one.stamp, v.floor(1)), "lost write")
	say("from the future", v.check(stamp{record: 1, life: v.life, version: 3}, v.floor(1)), "never written")
	say("of an earlier run", v.check(stamp{record: 1, life: 5, version: 9}, v.floor(1)), "earlier run")
	if err := v.check(stamp{record: 2, life: 5, version: 9}, v.floor(2)); err != nil {
		t.Errorf("a value of an earlier run where none was written since: %v", err)
	}
}

// TestTheFloorFollowsWritersThatNeverPause: a popular record always has a write in flight.
func TestTheFloorFollowsWritersThatNeverPause(t *testing.T) {
	const depth = 8
	v := newTable(t, "", 1)
	rng := testRNG()
	var out []write
	for n := range 10_000 {
		for len(out) < depth {
			out = append(out, v.issue(0))
		}
		// The oldest write ends before many others have begun.
		i := rng.IntN(len(out))
		if n%depth == 0 {
			i = 0
		}
		v.settle(out[i], done)
		out = append(out[:i], out[i+1:]...)
		if floor, issued := v.floor(0), v.entries[0].issued.Load(); n > 100 && issued-floor > 500 {
			t.Fatalf("write %d: floor %d, issued %d", n, floor, issued)
		}
	}
}

func TestRecordsAppearWithoutAGap(t *testing.T) {
	v := newTable(t, "", 10)
	if n := v.begin(2, 5); n != 5 {
		t.Errorf("%d records, must be 5", n)
	}
	a, b, c := v.issue(5), v.issue(6), v.issue(8)
	v.settle(b, done)
	v.settle(c, done)
	if n := v.limit.Load(); n != 5 {
		t.Errorf("with record 5 on its way there are %d", n)
	}
	v.settle(a, done)
	if n := v.limit.Load(); n != 7 {
		t.Errorf("with 5, 6 and 8 there are %d, must be 7", n)
	}
	if err := v.missing(4, 0); err == nil {
		t.Error("a record that is taken for loaded may be missing")
	}
}

func TestStateOutlivesTheProcessAndGrows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	v, err := newVersions(path, 100, false, 77)
	if err != nil {
		t.Fatal(err)
	}
	v.begin(0, 0)
	for n := range uint64(60) {
		v.settle(v.issue(n), done)
	}
	v.issue(3) // never acknowledged
	v.issue(60)
	if _, err := newVersions(path, 100, false, 78); !errors.Is(err, ErrState) ||
		!strings.Contains(err.Error(), "in use") {
		t.Errorf("a second user: %v", err)
	}
	if err := v.close(); err != nil {
		t.Fatal(err)
	}
	if v, err = newVersions(path, 200, false, 78); err != nil {
		t.Fatal(err)
	}
	if n := v.begin(0, 0); n != 60 || v.life != 77 || len(v.entries) < 200 {
		t.Errorf("%d records of life %d, room for %d", n, v.life, len(v.entries))
	}
	for _, version := range []uint32{1, 2} {
		if err := v.check(stamp{record: 3, life: 77, version: version}, v.floor(3)); err != nil {
			t.Errorf("version %d after an end without an answer: %v", version, err)
		}
	}
	v.found(stamp{record: 3, life: 77, version: 2})
	if err := v.check(stamp{record: 3, life: 77, version: 1}, v.floor(3)); err == nil {
		t.Error("version 1 may come back after version 2 was found at rest")
	}
	if err := v.missing(60, v.floor(60)); err != nil {
		t.Errorf("an insert that was never acknowledged: %v", err)
	}
	if err := v.close(); err != nil {
		t.Fatal(err)
	}
}

func TestAnInvalidStateFileIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	for what, c := range map[string]struct {
		spoil   func(b []byte) []byte
		ordered bool
		want    string
	}{
		"foreign":     {func([]byte) []byte { return make([]byte, 8192) }, false, "not one"},
		"short":       {func(b []byte) []byte { return b[:100] }, false, "header"},
		"version":     {func(b []byte) []byte { b[8] = 2; return b }, false, "version 2, this program knows 1"},
		"damaged":     {func(b []byte) []byte { b[17] ^= 1; return b }, false, "damaged"},
		"insertorder": {func(b []byte) []byte { return b }, true, "insertorder"},
	} {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		v, err := newVersions(path, 10, false, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := v.close(); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b = c.spoil(b)
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := newVersions(path, 10, c.ordered, 1); !errors.Is(err, ErrState) ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, must say %q", what, err, c.want)
		}
		if after, err := os.ReadFile(path); err != nil || string(after) != string(b) {
			t.Errorf("%s: the file was changed: %v", what, err)
		}
	}
}
