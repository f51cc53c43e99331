package partition

import (
	"testing"

	"jbofd/internal/fence"
	"jbofd/internal/kvstore"
)

// TestAStalePutNeverStarts: a Put that waits in the partition when its holder's epoch is raised does not reach the
// store, and Puts of the next epoch are kept.
func TestAStalePutNeverStarts(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	h := newHost(p, 1, 2, 4096)
	holder := fence.NewHolder(func() {})
	var old, young fence.Share
	holder.Join(&old)

	p.driver.Lock() // nobody runs the store meanwhile
	put := h.add(kvstore.Put, 7, 4096)
	put.Pass = old.Pass()
	fill(put.Value, 7, 1)
	p.Submit(&h.batch)
	holder.Raise()
	holder.Join(&young)
	p.driver.Unlock()
	if got := h.wait()[0]; got != put || got.Status != kvstore.Aborted {
		t.Fatalf("the stale Put ends with %v, want Aborted", got.Status)
	}
	if got := h.do(kvstore.Exist, 7, 0); got.Status != kvstore.Aborted {
		t.Errorf("a request with a stale pass ends with %v, want Aborted", got.Status)
	}
	revoked := fence.NewHolder(func() {})
	for _, r := range h.free {
		r.Pass, r.Extent = young.Pass(), revoked.Pass()
	}
	revoked.Raise()
	if got := h.do(kvstore.Put, 7, 4096); got.Status != kvstore.Aborted {
		t.Errorf("a Put whose extent was revoked ends with %v, want Aborted", got.Status)
	}
	for _, r := range h.free {
		r.Extent = fence.Pass{}
	}
	if got := h.do(kvstore.Exist, 7, 0); got.Status != kvstore.NotFound {
		t.Errorf("Exist of the next epoch: %v, want NotFound", got.Status)
	}
	if got := h.do(kvstore.Put, 7, 4096); got.Status != kvstore.OK {
		t.Errorf("Put of the next epoch: %v", got.Status)
	}
	r.close(p)
}
