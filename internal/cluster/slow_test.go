package cluster

import "testing"

// TestASlowEtcdIsNoReasonToReplaceTheManager: answers of etcd take 0.2 to 0.6 leases longer, for all nodes, for the
// manager, for the others, or for each node a different time. In peace no node takes over or lacks authority. When the
// manager is lost, one node takes over, once.
func TestASlowEtcdIsNoReasonToReplaceTheManager(t *testing.T) {
	for _, slow := range []string{"all", "the manager", "the others", "each differently"} {
		t.Run(slow, func(t *testing.T) {
			var longest int64
			for range 5 {
				longest = max(longest, slowEtcd(t, slow))
			}
			t.Logf("a lost manager is replaced after at most %d ms", longest/ms)
		})
	}
}

// slowEtcd returns how long a lost manager was part of the view.
func slowEtcd(t *testing.T, slow string) int64 {
	w := healthyWorld(t, 3, 3)
	manager, all := w.leader(), lease/10+w.rng.Int64N(lease/5)
	for _, n := range w.nodes {
		switch {
		case slow == "each differently":
			n.client.Slow(lease/10 + w.rng.Int64N(lease/5))
		case slow == "all" || (slow == "the manager") == (n == manager):
			n.client.Slow(all)
		}
	}
	w.run(3 * lease) // what was asked for before
	managers := w.takeover
	w.steady(20 * lease)
	if w.takeover != managers {
		t.Errorf("%d nodes have taken over in peace", w.takeover-managers)
	}
	manager.kill()
	begin := w.sim.Now()
	for !w.others(manager) && w.sim.Now()-begin < 5*lease {
		w.run(5 * ms)
	}
	took := w.sim.Now() - begin
	w.run(10 * lease)
	if got := w.takeover - managers; !w.others(manager) || got != 1 {
		t.Errorf("after %d ms %d nodes have taken over, want one", took/ms, got)
	}
	return took
}

// TestAManagerThatIsNotHeardIsReplacedThroughASlowEtcd: stamps come while a takeover is under way.
func TestAManagerThatIsNotHeardIsReplacedThroughASlowEtcd(t *testing.T) {
	for range 5 {
		w := healthyWorld(t, 4, 3)
		for _, n := range w.nodes {
			n.client.Slow(w.rng.Int64N(lease / 8))
		}
		w.run(3 * lease)
		x := w.leader()
		for _, l := range w.linksOf(x, 3, 0) {
			w.cut[l] = true
		}
		took, without := w.together(4*lease, x)
		t.Logf("%d ms, %d without authority", took/ms, without/ms)
		w.steadyOf(10*lease, x)
	}
}
