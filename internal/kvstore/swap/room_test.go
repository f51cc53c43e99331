package swap

import (
	"bytes"
	"testing"

	"jbofd/internal/kvstore"
)

// TestBuffersForSwappedValuesAreAllocatedByLength: as in the store, a buffer for a value is allocated when its length
// is known. Without a buffer the value is not read.
func TestBuffersForSwappedValuesAreAllocatedByLength(t *testing.T) {
	w := newWorld(t, *seed, 1, 1, 1)
	h := w.sources[0]
	w.out(h, 1)
	for _, have := range []int{0, 20} {
		var got []byte
		asked, reads := 0, h.m.Stats().Reads
		v := h.m.Submit(&kvstore.Request{Op: kvstore.Get, Tag: 1, Key: keyOf(0), Room: func(length int) []byte {
			if asked++; length != 20 {
				t.Errorf("asked for %d bytes, the value has 20", length)
			}
			if have > 0 {
				got = make([]byte, have)
			}
			return got
		}})
		if v != Taken {
			t.Fatalf("verdict %d", v)
		}
		replies := w.quick(func() {})
		if len(replies) != 1 || replies[0].Status != kvstore.OK || replies[0].ValueLen != 20 || asked != 1 {
			t.Errorf("room for %d: %+v, asked %d times", have, replies, asked)
		}
		if n := h.m.Stats().Reads - reads; n != int64(have/20) || !bytes.Equal(got, value(0, 1, 20)[:have]) {
			t.Errorf("room for %d: read %d times, another value", have, n)
		}
	}
}
