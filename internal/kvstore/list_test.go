package kvstore

import (
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// listAll lists all keys, in pieces of at most size bytes.
func (d *instant) listAll(tb testing.TB, size int, between func()) (keys []string) {
	tb.Helper()
	buf := make([]byte, size)
	var from []byte
	for {
		d.one(tb, Request{Op: List, Key: from, Value: buf}, OK)
		l := nvme.KVList(buf[:d.last.ValueLen])
		if err := l.Check(); err != nil {
			tb.Fatal(err)
		}
		n := 0
		for k := range l.All() {
			if n++; n == 1 && from != nil && string(k) == string(from) {
				continue
			}
			keys = append(keys, string(k))
		}
		if n < 2 {
			return keys
		}
		from = []byte(keys[len(keys)-1])
		between()
	}
}

func TestListYieldsEachKeyOnceThoughTheTableGrows(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 64 << 20, BlockSize: 512, ChunkBytes: 256 << 10})
	if keys := d.listAll(t, 100, func() {}); len(keys) != 0 {
		t.Errorf("an empty store lists %d keys", len(keys))
	}
	want := map[string]bool{}
	put := func(k string) { d.one(t, Request{Op: Put, Key: []byte(k), Value: []byte("v")}, OK) }
	for i := range 3000 {
		k := fmt.Sprintf("%x", i*i)
		want[k] = true
		put(k)
	}
	for _, size := range []int{200, 1000, 70000} {
		n := 0
		keys := d.listAll(t, size, func() {
			// Meanwhile other keys are added and deleted, and segments are split.
			for range 3 {
				n++
				put(fmt.Sprintf("other%d.%d", size, n))
			}
			d.one(t, Request{Op: Delete, Key: fmt.Appendf(nil, "other%d.%d", size, n)}, OK)
		})
		seen := map[string]bool{}
		for _, k := range keys {
			if seen[k] {
				t.Fatalf("%q is listed twice", k)
			}
			seen[k] = true
		}
		for k := range want {
			if !seen[k] {
				t.Fatalf("%q is not listed", k)
			}
		}
	}
	// A List that starts at a missing key begins with the key after it.
	keys := d.listAll(t, 70000, func() {})
	buf := make([]byte, 1000)
	d.one(t, Request{Op: Delete, Key: []byte(keys[7])}, OK)
	d.one(t, Request{Op: List, Key: []byte(keys[7]), Value: buf}, OK)
	for k := range nvme.KVList(buf[:d.last.ValueLen]).All() {
		if string(k) != keys[8] {
			t.Errorf("a list from a deleted key begins with %q, want %q", k, keys[8])
		}
		break
	}
	if i := slices.Index(keys, keys[8]); i != 8 {
		t.Errorf("%q is listed at %d", keys[8], i)
	}
	d.one(t, Request{Op: List, Value: buf[:3]}, InvalidValue)
	if n := testing.AllocsPerRun(100, func() {
		d.s.Submit(&Request{Op: List, Value: buf})
		d.run()
	}); n != 0 {
		t.Errorf("a List allocates %v times", n)
	}
}
