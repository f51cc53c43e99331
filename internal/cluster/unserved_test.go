package cluster

import (
	"slices"
	"testing"
)

// together runs until all nodes but some serve, by a view without those. It returns how long that took, and for how
// long one of them had no authority.
func (w *world) together(limit int64, gone ...*node) (took, without int64) {
	w.t.Helper()
	begin := w.sim.Now()
	for !w.serveWithout(gone) {
		before := w.sim.Now()
		w.run(5 * ms)
		for _, n := range w.nodes {
			if !contains(gone, n) && !n.authority() {
				without += w.sim.Now() - before
				break
			}
		}
		if w.sim.Now()-begin > limit {
			w.t.Fatalf("after %d ms epoch %d admits %v, and the manager is %v", limit/ms, w.epoch,
				w.views[w.epoch].Admitted, w.leader().name)
		}
	}
	return w.sim.Now() - begin, without
}

func (w *world) serveWithout(gone []*node) bool {
	for _, n := range w.nodes {
		a := n.n.Active()
		if contains(gone, n) {
			continue
		}
		if a == nil || !n.authority() || a.Epoch != w.epoch {
			return false
		}
		for _, o := range w.nodes {
			if a.admits(o.n.cfg.Incarnation) == contains(gone, o) {
				return false
			}
		}
	}
	return true
}

// TestAManagerThatMostNodesDoNotHearIsReplaced cuts the manager off from most of the other nodes, in one direction or
// both, while all reach etcd. The others lack authority for less than half a lease, act without it within three, and
// nothing changes after that.
func TestAManagerThatMostNodesDoNotHearIsReplaced(t *testing.T) {
	var longest, longestWithout int64
	for range 12 {
		w := healthyWorld(t, 3, 3)
		for range w.rng.IntN(4) {
			w.addNode(len(w.nodes))
		}
		w.settle(20 * lease)
		w.run(w.rng.Int64N(2 * lease))
		x, direction := w.leader(), w.rng.IntN(3)
		for _, l := range w.linksOf(x, len(w.nodes)-1, direction) {
			w.cut[l] = true
		}
		managers := w.takeover
		took, without := w.together(3*lease, x)
		longest, longestWithout = max(longest, took), max(longestWithout, without)
		t.Logf("%d nodes, direction %d: %d ms, %d without authority", len(w.nodes), direction, took/ms, without/ms)
		// It may not have seen the last stamp of the former manager.
		if l := w.leader().n.lead; l.unreportedNS < l.electedNS+outlast(lease) {
			t.Errorf("the new manager waits for %d ms", (l.unreportedNS-l.electedNS)/ms)
		}
		w.steadyOf(20*lease, x)
		if w.takeover != managers+1 {
			t.Errorf("%d managers have replaced the first one, want 1", w.takeover-managers)
		}
		w.heal()
		w.settle(20 * lease)
	}
	t.Logf("at most %d ms, %d without authority", longest/ms, longestWithout/ms)
	if longestWithout > lease/2 {
		t.Errorf("the others have no authority for %d ms", longestWithout/ms)
	}
}

// TestAManagerIsReplacedInALargeCluster: one of 40 nodes, more than an unserved one tells, is cut off from a majority,
// first from that which is behind it in the view, then from that which is before it, then from any. Those that it hears
// follow the one that has taken over.
func TestAManagerIsReplacedInALargeCluster(t *testing.T) {
	const nodes = 40
	w := healthyWorld(t, nodes, 3)
	for round := range 3 {
		x := w.leader()
		var behind []*node // in the view
		m := w.views[w.epoch]
		first := w.indexOf(x)
		for k := 1; k < nodes; k++ {
			i := slices.IndexFunc(w.nodes, func(n *node) bool { return n.name == m.Nodes[(first+k)%nodes].Name })
			behind = append(behind, w.nodes[i])
		}
		switch round {
		case 1:
			slices.Reverse(behind)
		case 2:
			w.rng.Shuffle(len(behind), func(i, k int) { behind[i], behind[k] = behind[k], behind[i] })
		}
		for _, n := range behind[:nodes/2+1] {
			w.cut[[2]int{n.id, x.id}], w.cut[[2]int{x.id, n.id}] = true, true
		}
		managers, epoch := w.takeover, w.epoch
		begin := w.sim.Now()
		for w.leader() == x || w.takeover == managers {
			if w.run(5 * ms); w.sim.Now()-begin > 2*lease {
				t.Fatalf("round %d: the manager is not replaced, and epoch %d follows %d", round, w.epoch, epoch)
			}
		}
		t.Logf("round %d: replaced after %d ms", round, (w.sim.Now()-begin)/ms)
		w.run(20 * lease)
		if w.takeover != managers+1 {
			t.Errorf("%d managers have replaced the first one, want 1", w.takeover-managers)
		}
		clear(w.cut)
		w.settle(40 * lease)
	}
}

// steadyOf runs for a time during which all nodes but one have authority and the view stays.
func (w *world) steadyOf(ns int64, but *node) {
	w.t.Helper()
	epoch := w.epoch
	for end := w.sim.Now() + ns; w.sim.Now() < end; {
		w.run(5 * ms)
		for _, n := range w.nodes {
			if n != but && !n.authority() {
				w.t.Fatalf("node %d has no authority", n.id)
			}
		}
		if w.epoch != epoch {
			w.t.Fatalf("epoch %d after %d", w.epoch, epoch)
		}
	}
}

// TestAManagerThatMostNodesHearStays: it is cut off from fewer than half of the others, which are given up.
func TestAManagerThatMostNodesHearStays(t *testing.T) {
	for nodes := 2; nodes <= 6; nodes++ {
		w := healthyWorld(t, nodes, 2)
		x := w.leader()
		var gone []*node
		for _, n := range w.nodes {
			if n != x && len(gone) < nodes/2 {
				gone = append(gone, n)
			}
		}
		for _, a := range gone {
			for _, b := range w.nodes {
				if inside := b == a || contains(gone, b); !inside {
					w.cut[[2]int{a.id, b.id}], w.cut[[2]int{b.id, a.id}] = true, true
				}
			}
		}
		managers := w.takeover
		took, _ := w.together(2*lease, gone...)
		t.Logf("%d of %d nodes are given up after %d ms", len(gone), nodes, took/ms)
		w.run(20 * lease)
		if w.leader() != x || w.takeover != managers {
			t.Errorf("of %d nodes, %d are cut off, and the manager is replaced", nodes, len(gone))
		}
		if !w.serveWithout(gone) {
			t.Error("the others do not serve")
		}
	}
}

func contains(all []*node, n *node) bool {
	for _, o := range all {
		if o == n {
			return true
		}
	}
	return false
}

// TestWhereNoNodeHearsAnotherTheManagerStays, and goes on with the copies that it has.
func TestWhereNoNodeHearsAnotherTheManagerStays(t *testing.T) {
	for nodes := 2; nodes <= 5; nodes++ {
		w := healthyWorld(t, nodes, 2)
		x := w.leader()
		var gone []*node
		for _, n := range w.nodes {
			if n != x {
				gone = append(gone, n)
			}
			for _, l := range w.linksOf(n, nodes, 0) {
				w.cut[l] = true
			}
		}
		managers := w.takeover
		w.together(3*lease, gone...)
		w.run(20 * lease)
		if w.leader() != x || w.takeover != managers || !w.serveWithout(gone) {
			t.Errorf("%d nodes: %d managers have replaced the first one", nodes, w.takeover-managers)
		}
	}
}

// TestManagersOfNoUseDoNotReplaceEachOtherForEver: each node hears just one other one, so that each manager is heard by
// one node and hears another one.
func TestManagersOfNoUseDoNotReplaceEachOtherForEver(t *testing.T) {
	for nodes := 3; nodes <= 5; nodes++ {
		w := healthyWorld(t, nodes, 2)
		for _, n := range w.nodes {
			for _, l := range w.linksOf(n, nodes, 1) {
				w.cut[l] = l[1] != (l[0]+1)%nodes
			}
		}
		managers := w.takeover
		w.run(10 * lease)
		middle := w.takeover
		w.run(60 * lease)
		if w.takeover != middle || w.takeover-managers > 3 {
			t.Errorf("%d nodes: %d managers in 10 leases, %d later", nodes, middle-managers, w.takeover-middle)
		}
		w.heal()
		w.settle(20 * lease)
	}
}

// TestANewManagerThatOthersDoNotHearIsReplaced: the manager is lost, and the next one is one that the others do not
// hear, as if it was not in their configuration.
func TestANewManagerThatOthersDoNotHearIsReplaced(t *testing.T) {
	for range 6 {
		w := healthyWorld(t, 5, 3)
		x, y := w.leader(), w.leader()
		for y == x {
			y = w.nodes[w.rng.IntN(5)]
		}
		for _, n := range w.nodes {
			if n != x && n != y {
				n.n.t.takeoverNS += 100 * ms // y is the first to take over
			}
		}
		for _, l := range w.linksOf(y, 4, 0) {
			w.cut[l] = true
		}
		x.kill()
		took, _ := w.together(3*lease, x, y)
		t.Logf("%d ms", took/ms)
		w.steadyOfAll(10*lease, x, y)
	}
}

func (w *world) steadyOfAll(ns int64, gone ...*node) {
	w.t.Helper()
	for end := w.sim.Now() + ns; w.sim.Now() < end; {
		if w.run(5 * ms); !w.serveWithout(gone) {
			w.t.Fatal("the others do not serve")
		}
	}
}

// TestNodesThatAreCutOffOneAfterTheOther from the manager replace it, although it has given up the first one before.
func TestNodesThatAreCutOffOneAfterTheOther(t *testing.T) {
	for range 10 {
		w := healthyWorld(t, 4, 3)
		x := w.leader()
		for _, o := range w.nodes {
			if o != x {
				w.cut[[2]int{x.id, o.id}], w.cut[[2]int{o.id, x.id}] = true, true
				w.run(45 * lease / 100)
			}
		}
		w.together(4*lease, x)
		w.run(5 * lease) // what was missing is filled
		w.steadyOf(10*lease, x)
	}
}

// TestMostNodesAreLost at once: the last one acts alone.
func TestMostNodesAreLost(t *testing.T) {
	for i := range 10 {
		w := healthyWorld(t, 3, 3)
		w.run(3 * lease)
		last := w.leader()
		if i%2 == 0 {
			last = w.nodes[(last.id+1)%3]
		}
		var gone []*node
		for _, n := range w.nodes {
			if n != last {
				gone = append(gone, n)
				n.kill()
			}
		}
		took, _ := w.together(21*lease/10, gone...)
		t.Logf("the last node acts alone after %d ms", took/ms)
	}
}

// TestANodeThatHearsNoAnswersIsGivenUp: its reports arrive.
func TestANodeThatHearsNoAnswersIsGivenUp(t *testing.T) {
	w := healthyWorld(t, 4, 3)
	x := w.leader()
	n := w.nodes[(x.id+1)%4]
	w.cut[[2]int{x.id, n.id}] = true
	w.together(3*lease, n)
	w.steadyOfAll(10*lease, n)
	w.heal()
	w.settle(20 * lease)
}
