package partition

import (
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/tenant"
)

// TestAPutThatWaitsForRoomKeepsNoGetWaiting: while the drive completes no write, the store takes a few Puts and no
// more. Gets that come behind those that wait are served, of the same tenant and of others.
func TestAPutThatWaitsForRoomKeepsNoGetWaiting(t *testing.T) {
	const keys, puts, value = 10, 20, 60 << 10
	r := newRig(t, partitionBytes, nil, failing(partitionBytes, fault.Config{}))
	dev := r.dev.(*fault.Device)
	p := r.mustOpen(true)
	defer r.close(p)
	hosts := map[tenant.ID]*host{}
	for id := range tenant.ID(3) {
		hosts[id] = newHost(p, id, 2*keys, 1000)
	}
	for key := range uint64(keys) {
		if q := hosts[0].do(kvstore.Put, key, 1000); q.Status != kvstore.OK {
			t.Fatalf("put: status %d", q.Status)
		}
	}
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Hold: true})
	defer dev.Release()
	writer := newHost(p, 1, puts, value)
	for key := range uint64(puts) {
		writer.add(kvstore.Put, 100+key, value)
	}
	p.Submit(&writer.batch)
	if n := p.Stats().Waiting; n < puts/2 {
		t.Fatalf("%d of %d Puts wait", n, puts)
	}
	for id, h := range hosts {
		for key := range uint64(keys) {
			h.add([]kvstore.Op{kvstore.Get, kvstore.Exist}[key%2], key, 1000)
		}
		p.Submit(&h.batch)
		for n := 0; n < keys; {
			h.mu.Lock()
			done := len(h.done) > 0
			h.mu.Unlock()
			if !done {
				select {
				case <-h.kicked:
				case <-time.After(testTimeout):
					t.Fatalf("tenant %d: %d of %d Gets are served while Puts wait", id, n, keys)
				}
				continue
			}
			for _, q := range h.wait() {
				if n++; q.Status != kvstore.OK || q.Op == kvstore.Get && q.ValueLen != 1000 {
					t.Errorf("tenant %d: status %d, %d bytes", id, q.Status, q.ValueLen)
				}
			}
		}
	}
	if n := p.Stats().Waiting; n < puts/2 {
		t.Errorf("%d of %d Puts wait after the Gets", n, puts)
	}
	dev.SetRules()
	dev.Release()
	for n := 0; n < puts; {
		for _, q := range writer.wait() {
			if n++; q.Status != kvstore.OK {
				t.Errorf("a Put that has waited: status %d", q.Status)
			}
		}
	}
}
