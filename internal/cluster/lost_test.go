package cluster

import (
	"testing"

	"jbofd/internal/lab"
)

// TestAllNodesThatWereUpAreLost: a node that was away makes no view without them, until an operator says that they have
// ended for good. What only they have is halted then, and there again when they come back after all.
func TestAllNodesThatWereUpAreLost(t *testing.T) {
	w := healthyWorld(t, 3, 2)
	away := w.nodes[w.rng.IntN(3)]
	away.kill()
	others := func() (all []*node) {
		for _, n := range w.nodes {
			if n != away {
				all = append(all, n)
			}
		}
		return all
	}()
	for begin := w.sim.Now(); !w.others(away); {
		if w.run(5 * ms); w.sim.Now()-begin > 20*lease {
			t.Fatal("the others do not go on")
		}
	}
	w.run(2 * lease) // some writes that the node lacks
	for _, n := range others {
		n.kill()
	}
	away.revive()
	var lost []Incarnation
	say := func(names ...Incarnation) {
		s := Settings{Cluster: w.uuid, Protocol: Protocol, Replicas: 2, Lost: names}
		w.etcd.Apply(lab.EtcdRequest{Txn: true, Then: []lab.EtcdKey{{Key: keyConfig, Value: s.Encode()}}})
	}
	for i, n := range others {
		w.run(10 * lease)
		if away.n.Manages() || away.authority() {
			t.Fatalf("the node goes on when %d of 2 nodes are said to be lost", i)
		}
		lost = append(lost, n.n.cfg.Incarnation)
		say(lost...)
	}
	without := func() bool {
		a := away.n.Active()
		return away.authority() && !a.admits(lost[0]) && !a.admits(lost[1])
	}
	for begin := w.sim.Now(); !without(); {
		if w.run(5 * ms); w.sim.Now()-begin > 10*lease {
			t.Fatal("the node does not go on without those that are lost")
		}
	}
	for r, c := range away.n.Active().Chains {
		if !c.Halted() {
			t.Errorf("range %d is served with %v, which lacks what was written since", r, c)
		}
	}
	for _, n := range others {
		n.revive()
	}
	w.settle(20 * lease)
}
