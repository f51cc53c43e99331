package cluster

import (
	"math/rand/v2"
	"testing"
)

// TestTheFirstViewHasAllNodes of a new cluster, which find it within a lease: its ranges have all their copies at once,
// and each node is the ChainHead of its share. One that is away is waited for no longer than for two leases.
func TestTheFirstViewHasAllNodes(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	for _, present := range []int{3, 2} {
		w := newWorld(t, seed, 0, 2)
		w.configured = 3
		began := w.sim.Now()
		for i := range present {
			w.addNode(i)
			w.run(w.rng.Int64N(lease / 2))
		}
		for w.epoch < 2 && w.sim.Now() < began+10*lease && !t.Failed() {
			w.run(5 * ms)
		}
		first := w.views[2] // 1 is that of Init
		if first == nil || len(first.Nodes) != present {
			t.Fatalf("%d nodes of 3: the first view is %+v", present, first)
		}
		waited := w.sim.Now() - began
		if early := waited < 2*lease; early != (present == 3) || waited > 4*lease {
			t.Errorf("%d nodes of 3: it took %d ms", present, waited/ms)
		}
		for r, c := range first.Chains {
			if len(c) != 2 || !c.Full() {
				t.Errorf("range %d has %v", r, c)
			}
		}
		for r, leader := range first.Leaders() {
			if head := first.Chains[r][0].Partition; head != leader {
				t.Errorf("range %d is led by partition %d, and is to be led by %d", r, head, leader)
			}
		}
		if t.Failed() {
			return
		}
		w.settle(20 * lease)
	}
}
