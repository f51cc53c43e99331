package partition

import (
	"testing"

	"jbofd/internal/kvstore"
)

// TestAbortRemovesRequestsBeforeTheStoreTakesThem: an aborted Put changes nothing and ends once, and those before and
// behind it complete.
func TestAbortRemovesRequestsBeforeTheStoreTakesThem(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	h := newHost(p, 1, 3, 4096)

	p.driver.Lock() // nobody runs the store meanwhile
	var puts []*Request
	for key := range uint64(3) {
		puts = append(puts, h.add(kvstore.Put, key, 4096))
	}
	p.Submit(&h.batch)
	if !puts[1].Abort() {
		t.Error("a Request that only waits is not taken out")
	}
	if puts[1].Abort() {
		t.Error("it is taken out twice")
	}
	p.driver.Unlock()
	ended := map[*Request]int{}
	for n := 0; n < len(puts); {
		for _, q := range h.wait() {
			ended[q]++
			n++
		}
	}
	for i, q := range puts {
		want := kvstore.OK
		if i == 1 {
			want = kvstore.Aborted
		}
		if ended[q] != 1 || q.Status != want || q.Aborted != (i == 1) {
			t.Errorf("Put %d ended %d times, status %d, aborted %v", i, ended[q], q.Status, q.Aborted)
		}
		if q.Abort() {
			t.Errorf("Put %d is taken out after its end", i)
		}
	}
	for key := range uint64(3) {
		want := kvstore.OK
		if key == 1 {
			want = kvstore.NotFound
		}
		if q := h.do(kvstore.Exist, key, 0); q.Status != want || q.Aborted {
			t.Errorf("key %d: status %d, want %d", key, q.Status, want)
		}
	}
	r.close(p)
}

// TestAbortedRequestsLeaveTheQueuesOfTheirTenants, from any position; the others keep their order.
func TestAbortedRequestsLeaveTheQueuesOfTheirTenants(t *testing.T) {
	for pattern := range 1 << 6 {
		var w waiting
		var all [6]Request
		left := 0
		for i := range all {
			r := &all[i]
			r.Tenant, r.Slot = 1, uint32(i)
			if i >= 3 {
				r.Tenant = 2
			}
			r.state.Store(requestQueued)
			w.push(r)
			if pattern>>i&1 != 0 {
				r.state.Store(requestAborted)
			} else {
				left++
			}
		}
		taken := map[uint32]bool{}
		for r := w.takeAborted(); r != nil; r = r.next {
			taken[r.Slot] = true
		}
		if w.n != left {
			t.Fatalf("pattern %06b: %d are said to be left, want %d", pattern, w.n, left)
		}
		last := map[uint32]uint32{}
		for r := w.popAny(); r != nil; r = w.popAny() {
			if taken[r.Slot] || pattern>>r.Slot&1 != 0 || r.Slot < last[uint32(r.Tenant)] {
				t.Fatalf("pattern %06b: Request %d comes out of its queue, which it has left or out of order", pattern,
					r.Slot)
			}
			last[uint32(r.Tenant)] = r.Slot
			left--
		}
		if left != 0 {
			t.Fatalf("pattern %06b: %d are lost", pattern, left)
		}
	}
}
