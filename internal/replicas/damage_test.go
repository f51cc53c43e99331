package replicas_test

import (
	"slices"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
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
	bad.dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Err: ssd.ErrMedia})
	h.put(key, "not stored there")
	h.ask(chain[0]) // it ends with the view that goes on without that member
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

// TestAMemberThatHasMissedViewsIsFilledAgain: the next view that it sees says that it serves, and others have taken
// writes without it. It answers nothing until it has been filled, without a restart.
func TestAMemberThatHasMissedViewsIsFilledAgain(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	g.frozen.Store(true)
	chain, h, key := g.chain([]byte("key")), newHost(), "key"
	h.put(key, "old")
	h.want(chain[0], nvme.Success, "")
	late := chain[1]
	g.mu.Lock()
	before := g.view
	number := before.RangeOf(position([]byte(key)))
	// views, one after the other: without the member, and one that says that it serves in another membership.
	next := func(c view.Chain) *cluster.Map {
		v := *g.view
		v.Epoch++
		v.Chains, v.ChainEpochs = slices.Clone(v.Chains), slices.Clone(v.ChainEpochs)
		v.Chains[number] = c
		v.ChainEpochs[number]++
		g.view = &v
		return &cluster.Map{View: &v}
	}
	c := before.Chains[number]
	without := next(view.Chain{c[0], c[2]})
	g.mu.Unlock()
	for _, n := range g.nodes {
		if n != late {
			n.r.SetState(without, without)
		}
	}
	h.put(key, "new")
	h.want(chain[0], nvme.Success, "")
	g.mu.Lock()
	back := c[1]
	back.Since = without.Epoch + 1
	m := next(view.Chain{c[0], c[2], back})
	g.mu.Unlock()
	for _, n := range g.nodes {
		n.r.SetState(m, m)
	}
	h.get(key)
	h.want(late, nvme.KVWrongView, "")
	g.frozen.Store(false)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		g.mu.Lock()
		at := slices.IndexFunc(g.view.Chains[number], func(e view.Member) bool {
			return int(e.Partition) == late.id && e.Since > back.Since
		})
		g.mu.Unlock()
		if at >= 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the member has no other membership")
		}
	}
	g.full(20 * time.Second)
	h.get(key)
	h.want(late, nvme.Success, "new")
	g.same([]byte(key))
}

// TestAnAcceptedLossIsSeenAlsoByWhoHasMissedTheHalt: the member that is filled is given the range, and has not seen
// that the one that served has gone.
func TestAnAcceptedLossIsSeenAlsoByWhoHasMissedTheHalt(t *testing.T) {
	g := setup{nodes: 2, copies: 2, ranges: testRanges, frozen: true}.rig(t)
	n, h := g.nodes[1], newHost()
	n.until.Store(clock() + int64(time.Hour))
	maps := make([]*cluster.Map, 2)
	for i := range maps {
		v := *g.view
		v.Epoch = view.Epoch(10 * (i + 1))
		v.Chains, v.ChainEpochs = make([]view.Chain, testRanges), make([]uint32, testRanges)
		for r := range v.Chains {
			v.ChainEpochs[r] = uint32(i + 1)
			if v.Chains[r] = (view.Chain{{Since: 2}, {Partition: 1, State: view.Filling, Since: 5}}); i > 0 {
				v.Chains[r] = view.Chain{{Partition: 1, Since: v.Epoch}}
			}
		}
		maps[i] = &cluster.Map{View: &v}
	}
	n.r.SetState(maps[0], maps[0])
	h.get("key")
	h.want(n, nvme.KVWrongView, "")
	n.r.SetState(maps[1], maps[1])
	h.put("key", "value")
	h.want(n, nvme.Success, "")
	h.get("key")
	h.want(n, nvme.Success, "value")
	for _, r := range n.r.Report().Ranges {
		if r.Local != view.Complete {
			t.Errorf("range %d is reported as %v", r.Range, r.Local)
		}
	}
}
