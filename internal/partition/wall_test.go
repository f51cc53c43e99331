package partition

import (
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/kvstore"
)

// TestRelativeTimesCountFromTheRequest: ExpiresIn and KeepSeconds are added to the time of day at which the store gets
// the Request.
func TestRelativeTimesCountFromTheRequest(t *testing.T) {
	const start = 1_800_000_000
	var wall atomic.Int64
	wall.Store(start)
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p, err := Open(Config{Drive: r.o, OffsetBytes: offset, Background: 9, Wall: func() time.Time {
		return time.Unix(wall.Load(), 0)
	}, Store: kvstore.Config{PartitionBytes: r.size, Format: true, UUID: [16]byte{7}, HashSeed: 99,
		ChunkBytes: 256 << 10}})
	if err != nil {
		t.Fatal(err)
	}
	defer r.close(p)
	h := newHost(p, 1, 1, 100)
	q := h.free[0]
	put := func(key uint64, edit func()) uint64 {
		t.Helper()
		q.Expires, q.ExpiresIn, q.KeepSeconds, q.ID = 0, false, 0, kvstore.Identity{}
		if edit != nil {
			edit()
		}
		if h.do(kvstore.Put, key, 100); q.Status != kvstore.OK {
			t.Fatalf("put: status %d", q.Status)
		}
		return q.ObjectVersion
	}
	get := func(key uint64) kvstore.Status {
		h.do(kvstore.Get, key, 100)
		return q.Status
	}
	retry := func() uint64 {
		return put(2, func() { q.KeepSeconds, q.ID = 60, kvstore.Identity{Client: 5, Seq: 6, Retry: true} })
	}
	put(1, func() { q.Expires, q.ExpiresIn = 50, true })
	if get(1) != kvstore.OK || q.ObjectExpires != start+50 {
		t.Errorf("status %d, it expires %d s after its put, want 50", q.Status, int64(q.ObjectExpires)-start)
	}
	put(3, func() { q.Expires = start + 50 })
	if get(3) != kvstore.OK || q.ObjectExpires != start+50 {
		t.Errorf("status %d, it expires %d s after the start, want 50", q.Status, int64(q.ObjectExpires)-start)
	}
	first := put(2, func() { q.KeepSeconds, q.ID = 60, kvstore.Identity{Client: 5, Seq: 6} })
	if v := retry(); v != first {
		t.Errorf("a retry gives version %d, the first try has given %d", v, first)
	}
	wall.Store(start + 61)
	for end := time.Now().Add(testTimeout); get(1) == kvstore.OK; { // until the store is told the time
		if time.Now().After(end) {
			t.Fatal("the object does not expire")
		}
	}
	put(2, nil) // the identity goes when its segment is written
	if v := retry(); v == first {
		t.Error("the identity is kept for longer than was asked for")
	}
}
