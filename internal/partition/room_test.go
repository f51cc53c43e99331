package partition

import (
	"bytes"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
)

// TestBuffersAreAllocatedWhenTheLengthIsKnown, and not before. Without a buffer the value is not read.
func TestBuffersAreAllocatedWhenTheLengthIsKnown(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	defer r.close(p)
	h := newHost(p, 1, 1, 5000)
	fill(h.free[0].Value, 1, 1)
	value := bytes.Clone(h.free[0].Value)
	if q := h.do(kvstore.Put, 1, len(value)); q.Status != kvstore.OK {
		t.Fatalf("put: status %d", q.Status)
	}
	q, mine := h.free[0], make([]byte, 3000)
	for _, c := range []struct {
		name       string
		have, room int // length of Value before, and the room that is granted
		want       int // its length after
		asked      bool
		reads      int64
	}{
		{"no memory", 0, 0, 0, true, 1},
		{"as much as the host wants", 0, 3000, 3000, true, 2},
		{"too little at first", 100, 3000, 3000, true, 2},
		{"enough", 5000, 0, 5000, false, 2},
	} {
		asked := 0
		q.Room = func(length int) []byte {
			if asked++; length != len(value) {
				t.Errorf("%s: asked for %d bytes, the value has %d", c.name, length, len(value))
			}
			q.Value = nil
			if c.room > 0 {
				q.Value = mine[:c.room]
			}
			return q.Value
		}
		before := r.o.Stats().Requests[ssd.Read].Load()
		q.Value = make([]byte, 5000)
		h.do(kvstore.Get, 1, c.have)
		if q.Status != kvstore.OK || q.ValueLen != len(value) || !bytes.Equal(q.Value, value[:len(q.Value)]) ||
			len(q.Value) != c.want {
			t.Errorf("%s: status %d, %d of %d bytes", c.name, q.Status, len(q.Value), q.ValueLen)
		}
		if reads := r.o.Stats().Requests[ssd.Read].Load() - before; reads != c.reads || asked > 0 != c.asked {
			t.Errorf("%s: %d reads, want %d; asked %d times", c.name, reads, c.reads, asked)
		}
	}
	q.Room = nil
	if h.do(kvstore.Get, 2, 0); q.Status != kvstore.NotFound {
		t.Errorf("a key that is not there: status %d", q.Status)
	}
	q.Value = mine
	if h.do(kvstore.Exist, 1, 0); q.Status != kvstore.OK {
		t.Errorf("Exist: status %d", q.Status)
	}
}
