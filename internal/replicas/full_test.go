package replicas_test

import (
	"fmt"
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
)

// fullRig is a rig of three replicas, of which that of the last node has a small partition.
func fullRig(t *testing.T, neverTold bool) (g *rig, keys func(n int) string) {
	g = setup{nodes: 3, copies: 3, ranges: testRanges, small: 64 << 20, neverFull: neverTold}.rig(t)
	g.full(20 * time.Second)
	// Keys of ranges whose ChainHead has a large partition.
	var names []string
	for i := 0; len(names) < 1000; i++ {
		if key := fmt.Sprint("k", i); g.chain([]byte(key))[0] != g.nodes[2] {
			names = append(names, key)
		}
	}
	return g, func(n int) string { return names[n] }
}

const fullValue = 128 << 10

// stays tests that all ranges have all their members.
func (g *rig) stays() {
	g.t.Helper()
	time.Sleep(50 * time.Millisecond) // a few views
	g.full(0)
}

// TestAFullMemberMakesTheChainRefusePuts: with Capacity Exceeded, before its partition is full. Deletes are taken, and
// when there is room again, Puts are.
func TestAFullMemberMakesTheChainRefusePuts(t *testing.T) {
	g, key := fullRig(t, false)
	h := newHost()
	head := func(n int) *node { return g.chain([]byte(key(n)))[0] }
	value := string(make([]byte, fullValue))
	n := 0
	for ; n < 500; n++ {
		h.put(key(n), value)
		if h.ask(head(n)); !h.Status.OK() {
			break
		}
	}
	if h.Status.Code() != nvme.CapacityExceeded || n < 50 {
		t.Fatalf("Put %d of %d bytes: %v", n, fullValue, h.Status)
	}
	g.stays()
	for i := range n {
		h.Request = replicas.Request{Key: crrsKey(key(i)), Op: kvstore.Delete}
		h.want(head(i), nvme.Success, "")
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		h.put(key(n), value)
		if h.ask(head(n)); h.Status.OK() {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("a Put when there is room again: %v", h.Status)
		}
	}
	g.stays()
	g.same([]byte(key(n)))
}

// TestAWriteThatAMemberHasNoRoomForIsHeldBack: its ChainHead has not heard in time that the partition is full. The
// chain stays as it is, and the write is done when there is room.
func TestAWriteThatAMemberHasNoRoomForIsHeldBack(t *testing.T) {
	g, key := fullRig(t, true)
	value := string(make([]byte, fullValue))
	begin := func(n int, op kvstore.Op) *host {
		h := newHost()
		h.put(key(n), value)
		if h.Op = op; op == kvstore.Delete {
			h.Value = nil
		}
		h.Sink, h.Tenant = h, 3
		var b replicas.Batch
		b.Add(&h.Request)
		g.chain([]byte(key(n)))[0].r.Submit(&b)
		return h
	}
	wait := func(h *host, within time.Duration) bool {
		select {
		case <-h.done:
			if !h.Status.OK() {
				t.Fatalf("a write ends with %v", h.Status)
			}
			return true
		case <-time.After(within):
			return false
		}
	}
	var held *host
	n := 0
	for ; held == nil && n < 500; n++ {
		switch h := begin(n, kvstore.Put); {
		case wait(h, 1500*time.Millisecond):
		case g.nodes[2].part.TooFullToFill():
			held = h
		case !wait(h, time.Minute): // the machine may be slow
			t.Fatalf("write %d does not end, and there is room", n)
		}
	}
	if held == nil || n < 50 {
		t.Fatalf("no write was held back, of %d", n)
	}
	g.stays()
	var deletes []*host
	for i := range n / 2 {
		deletes = append(deletes, begin(i, kvstore.Delete))
	}
	for i, h := range append(deletes, held) {
		if !wait(h, time.Minute) {
			t.Fatalf("write %d of %d that were held back does not end, though there is room", i, n/2+1)
		}
	}
	g.stays()
	g.same([]byte(key(n - 1)))
}
