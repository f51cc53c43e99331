package partition

import (
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/tenant"
)

// TestAPutThatWaitsForRoomKeepsNothingElseWaiting: while the drive completes no write, the store takes as many Puts as
// it has room for, and no more. Gets and Deletes that come behind those that wait are served, of the same tenant and of
// others. Long Puts take all groups of values, and short ones all requests that may be in progress.
func TestAPutThatWaitsForRoomKeepsNothingElseWaiting(t *testing.T) {
	t.Run("long", func(t *testing.T) { putsWait(t, 20, 60<<10) })
	t.Run("short", func(t *testing.T) { putsWait(t, 600, 10) })
}

// putsWait lets so many Puts wait.
func putsWait(t *testing.T, puts, value int) {
	const keys, missing = 12, 1000
	r := newRig(t, partitionBytes, nil, failing(partitionBytes, fault.Config{}))
	dev := r.dev.(*fault.Device)
	p := r.mustOpen(true)
	defer r.close(p)
	hosts := map[tenant.ID]*host{}
	for id := range tenant.ID(3) { // a Delete of a key that is not there writes nothing
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
			if op := [...]kvstore.Op{kvstore.Get, kvstore.Exist, kvstore.Delete}[key%3]; op == kvstore.Delete {
				h.add(op, key+missing, 0)
			} else {
				h.add(op, key, 1000)
			}
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
					t.Fatalf("tenant %d: %d of %d requests are served while Puts wait", id, n, keys)
				}
				continue
			}
			for _, q := range h.wait() {
				want := kvstore.OK
				if q.Op == kvstore.Delete {
					want = kvstore.NotFound
				}
				if n++; q.Status != want || q.Op == kvstore.Get && q.ValueLen != 1000 {
					t.Errorf("tenant %d: op %d: status %d, %d bytes", id, q.Op, q.Status, q.ValueLen)
				}
			}
		}
	}
	if n := p.Stats().Waiting; n < puts/2 {
		t.Errorf("%d of %d Puts wait after the other requests", n, puts)
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
