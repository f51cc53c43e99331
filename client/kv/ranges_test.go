package kv

import (
	"fmt"
	"testing"

	"jbofd/internal/nvme"
)

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
