package partition

import (
	"testing"
	"time"

	"jbofd/internal/fence"
	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
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

// TestRequestsEndWhenTheirStoreIsGivenUp: Close has no patience for a drive that does not answer. The requests that the
// store has end nevertheless, and nothing more of the store reaches the drive.
func TestRequestsEndWhenTheirStoreIsGivenUp(t *testing.T) {
	r := newRig(t, partitionBytes, nil, failing(partitionBytes, fault.Config{Seed: 1}))
	p := r.mustOpen(true)
	h := newHost(p, 1, 8, 4096)
	dev := r.dev.(*fault.Device)
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Hold: true})
	for key := range uint64(8) {
		h.add(kvstore.Put, key, 4096)
	}
	p.Submit(&h.batch)
	if err := p.Close(time.Millisecond); err == nil {
		t.Error("Close says nothing of a store that has not stopped")
	}
	for ended := 0; ended < 8; {
		for _, q := range h.wait() {
			if q.Status != kvstore.DeviceError {
				t.Errorf("a Put that the store had ends with status %d, want DeviceError", q.Status)
			}
			ended++
		}
	}
	dev.SetRules()
	dev.Release()
	<-r.o.Quiesce()
	wrote := r.o.Stats().Requests[ssd.Write].Load()
	<-r.o.Quiesce()
	if n := r.o.Stats().Requests[ssd.Write].Load() - wrote; n != 0 {
		t.Errorf("a store that was given up has sent %d writes more", n)
	}
}
