package replicas_test

import (
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestADamagedReplicaHoldsUpNothing: a replica that has failed with its store does nothing more, so that it must not be
// filled. Without it writes go on.
func TestADamagedReplicaHoldsUpNothing(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	chain, h, key := g.chain([]byte("key")), newHost(), "key"
	h.put(key, string(make([]byte, 4000)))
	h.want(chain[0], nvme.Success, "")
	bad := chain[1]
	bad.dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Read}, Err: ssd.ErrMedia})
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		h.get(key)
		if h.ask(bad); !h.Status.OK() {
			break
		}
		if time.Now().After(end) {
			t.Fatal("a value is read that the drive does not read")
		}
	}
	bad.dev.SetRules()
	for end := time.Now().Add(20 * time.Second); len(g.chain([]byte(key))) != 2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the view keeps a replica that is damaged")
		}
	}
	time.Sleep(50 * time.Millisecond)                    // a few views
	for i := 0; i == 0 || i < 3 && !h.Status.OK(); i++ { // the view may change once more
		h.put(key, "value")
		h.Sink, h.Tenant = h, 3
		var b replicas.Batch
		b.Add(&h.Request)
		g.chain([]byte(key))[0].r.Submit(&b)
		select {
		case <-h.done:
		case <-time.After(20 * time.Second):
			t.Fatal("a write waits for a replica that is damaged")
		}
	}
	if !h.Status.OK() {
		t.Errorf("a write without the damaged replica: %v", h.Status)
	}
	g.same([]byte(key))
}
