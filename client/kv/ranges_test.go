package kv

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// TestErrorsOfRangesNameWhatIsAllowed, and nothing is sent.
func TestErrorsOfRangesNameWhatIsAllowed(t *testing.T) {
	s := newTarget(t)
	s.with(func() { s.extended = true })
	n, ctx := open(t, s, Options{}), testContext(t)
	reversed, after := Range{First: 2, Last: 1}, Range{Last: 9, After: []byte("key")}
	scan := func(r Range) error {
		next, stop := iter.Pull2(n.Scan(ctx, r))
		defer stop()
		_, err, _ := next()
		return err
	}
	count := func(r Range) error {
		_, err := n.Count(ctx, r)
		return err
	}
	digest := func(r Range, parts int, at time.Time) error {
		_, err := n.Digest(ctx, r, parts, at)
		return err
	}
	drop := func(r Range, clock uint64) error {
		_, err := n.DropRange(ctx, r, clock)
		return err
	}
	copyIn := func(clock uint64) error {
		b := nvme.NewKVRange(make([]byte, nvme.KVRangeHeaderBytes), nvme.KVCopy, 0, 1, nvme.KVCursor{})
		b.SetTo(nvme.KVLastOf(1))
		b.Seal()
		_, err := n.CopyIn(ctx, Batch(b), clock)
		return err
	}
	const order, key, clock = "First is 0x2, must be at most Last, which is 0x1",
		"After is a key of 3 bytes, must be nil", "clock is 9223372036854775808, must be at most 9223372036854775807"
	for _, c := range []struct {
		err  error
		want string
	}{
		{scan(reversed), order},
		{scan(Range{After: make([]byte, 17)}), "After has 17 bytes, must have at most 16"},
		{count(reversed), order},
		{count(after), "Count: Range." + key},
		{digest(reversed, 1, time.Time{}), order},
		{digest(after, 1, time.Time{}), "Digest: Range." + key},
		{digest(All(), 0, time.Time{}), "parts is 0, must be 1 to 65536"},
		{digest(All(), 65537, time.Time{}), "parts is 65537, must be 1 to 65536"},
		{digest(All(), 1, time.Unix(-1, 0)), "must be 1970-01-01 00:00:00 +0000 UTC to 2106-02-07 06:28:15 +0000 UTC"},
		{drop(reversed, 0), order},
		{drop(after, 0), "DropRange: Range." + key},
		{drop(All(), math.MaxInt64+1), "DropRange: " + clock},
		{copyIn(math.MaxInt64 + 1), "CopyIn: " + clock},
	} {
		if !errors.Is(c.err, client.ErrInvalid) || !strings.Contains(c.err.Error(), c.want) {
			t.Errorf("%v, want ErrInvalid with %q", c.err, c.want)
		}
	}
	for op := range 256 {
		if c := s.count(uint8(op)); nvme.KVRangeCommand(uint8(op)) && c != 0 {
			t.Errorf("%d commands %#x were sent", c, op)
		}
	}
}

// TestABatchYieldsObjectsAndTombstones, and not keys of which it has only identities. A copy goes on behind its last
// key.
func TestABatchYieldsObjectsAndTombstones(t *testing.T) {
	b := nvme.NewKVRange(make([]byte, 1000), nvme.KVCopy, 1, 100, nvme.KVCursorAt(1, nil))
	for i, key := range []string{"object", "gone", "tombstone"} {
		var e nvme.KVEntry
		e, b, _ = b.Append([]byte(key), 0, 1)
		e.SetPosition(uint64(10 + i))
		e.SetVersion(uint64(20 + i))
		e.SetIdentity(0, nvme.KVIdentity{Client: 1, Seq: 2, Version: 3})
		switch key {
		case "gone":
			e.SetGone()
		case "tombstone":
			e.SetTombstone()
		}
	}
	b.SetTo(nvme.KVCursorAt(12, []byte("tombstone")))
	b.Seal()
	got := ""
	for e := range Batch(b).Entries() {
		got += fmt.Sprintf("%s %d %d %v\n", e.Key, e.Position, e.Version, e.Tombstone)
	}
	if want := "object 10 20 false\ntombstone 12 22 true\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if r, ok := Batch(b).Resume(); !ok || r.First != 12 || r.Last != 100 || string(r.After) != "tombstone" {
		t.Errorf("%+v, %v", r, ok)
	}
}
