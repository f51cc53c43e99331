package cluster

import (
	"errors"
	"math/rand/v2"
	"testing"

	"jbofd/internal/cluster/view"
	"jbofd/internal/lab"
	"jbofd/internal/uuid"
)

// healthyWorld returns a cluster in which all nodes serve.
func healthyWorld(t *testing.T, nodes, replicas int) *world {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	return healthyWorldOf(t, seed, nodes, replicas)
}

func healthyWorldOf(t *testing.T, seed uint64, nodes, replicas int) *world {
	t.Logf("-seed %d", seed)
	w := newWorld(t, seed, nodes, replicas)
	w.traceTo(t)
	w.settle(20 * lease)
	return w
}

func (w *world) leader() *node {
	for _, n := range w.nodes {
		if !n.proc.Dead() && n.n.Manages() {
			return n
		}
	}
	return nil
}

// steady runs for a time during which all nodes have authority and the view stays.
func (w *world) steady(ns int64) {
	w.t.Helper()
	epoch := w.epoch
	for end := w.sim.Now() + ns; w.sim.Now() < end; {
		w.run(5 * ms)
		for _, n := range w.nodes {
			if !n.authority() {
				w.t.Fatalf("node %d has no authority", n.id)
			}
		}
		if w.epoch != epoch {
			w.t.Fatalf("epoch %d after %d", w.epoch, epoch)
		}
	}
}

// TestAHiccupOfEtcdChangesNothing lets etcd stall for up to three leases and then revoke all leases: every node keeps
// its authority, and no view is written.
func TestAHiccupOfEtcdChangesNothing(t *testing.T) {
	w := healthyWorld(t, 3, 3)
	for range 5 {
		w.etcd.Stall(1 + w.rng.Int64N(3*lease))
		w.steady(w.rng.Int64N(3 * lease))
		w.etcd.Resume()
		w.etcd.RevokeAll()
		w.steady(3 * lease)
		w.settle(lease)
	}
}

// TestWithoutEtcdTheMapIsFrozenAndDataIsServed takes etcd away for a minute. Afterwards a node joins.
func TestWithoutEtcdTheMapIsFrozenAndDataIsServed(t *testing.T) {
	w := healthyWorld(t, 4, 3)
	w.etcd.Stall(1 << 60)
	w.steady(60 * lease)
	w.etcd.Resume()
	w.steady(3 * lease)
	w.addNode(4)
	w.settle(20 * lease)
}

// TestWithoutEtcdAndANodeNobodyServes takes etcd away, and a node with it. The others cannot know that it does not make
// a view: they stop, and go on when etcd is back.
func TestWithoutEtcdAndANodeNobodyServes(t *testing.T) {
	w := healthyWorld(t, 3, 3)
	w.etcd.Stall(1 << 60)
	w.run(2 * lease)
	w.nodes[w.rng.IntN(3)].kill()
	w.run(2 * lease)
	for _, n := range w.nodes {
		if n.authority() {
			t.Errorf("node %d has authority", n.id)
		}
	}
	w.etcd.Resume()
	w.run(4 * lease)
	for _, n := range w.nodes {
		if !n.proc.Dead() && !n.authority() {
			t.Errorf("node %d has no authority", n.id)
		}
	}
}

// TestOneNodeWithoutEtcdGoesOn cuts one node after the other off from etcd, the manager too.
func TestOneNodeWithoutEtcdGoesOn(t *testing.T) {
	w := healthyWorld(t, 3, 2)
	for _, n := range w.nodes {
		n.client.Cut(true)
		w.steady(10 * lease)
		if n.n.Manages() {
			t.Errorf("node %d is the manager without etcd", n.id)
		}
		n.client.Cut(false)
		w.steady(3 * lease)
	}
}

// TestALostNodeIsReplacedInTime kills, pauses or isolates a node, often the manager. The others act on a view without
// it within two leases, three if it was paused or isolated, and it has no authority from then on; nor when it goes on.
func TestALostNodeIsReplacedInTime(t *testing.T) {
	w := healthyWorld(t, 3, 3)
	for i := range 12 {
		n := w.nodes[w.rng.IntN(3)]
		if i%2 == 0 {
			n = w.leader()
		}
		kind := i / 2 % 3
		limit := 3 * lease
		if kind == 0 {
			limit = 2 * lease
		}
		w.lose(n, kind)
		begin := w.sim.Now()
		for !w.others(n) {
			w.run(5 * ms)
			if w.sim.Now()-begin > limit {
				t.Fatalf("fault %d of node %d: no view without it acts after %d ms", kind, n.id, limit/ms)
			}
		}
		t.Logf("fault %d: others serve after %d ms", kind, (w.sim.Now()-begin)/ms)
		if n.authority() {
			t.Fatalf("node %d has authority", n.id)
		}
		w.run(w.rng.Int64N(2 * lease))
		w.heal()
		w.settle(20 * lease)
	}
}

// lose kills a node (0), pauses it (1) or isolates it (2).
func (w *world) lose(n *node, kind int) {
	switch kind {
	case 0:
		n.kill()
	case 1:
		n.proc.Stop()
	case 2:
		n.client.Cut(true)
		for _, o := range w.nodes {
			w.cut[[2]int{n.id, o.id}], w.cut[[2]int{o.id, n.id}] = true, true
		}
	}
}

// TestTheOthersServeWhileTheirManagerIsReplaced kills, pauses or isolates the manager of a cluster that is in peace.
// The others hardly ever lose authority before the next manager gives it to them.
func TestTheOthersServeWhileTheirManagerIsReplaced(t *testing.T) {
	w, longest, sum := healthyWorld(t, 3, 3), int64(0), int64(0)
	const faults = 12
	for i := range faults {
		w.run(3 * lease) // what etcd was asked for, and has not answered, ends
		gone, without := w.leader(), int64(0)
		w.lose(gone, i%3)
		for begin := w.sim.Now(); w.sim.Now()-begin < 3*lease; {
			w.sim.Run(ms, func() bool { return false })
			for _, n := range w.nodes {
				if n != gone && !n.authority() {
					without += ms
					break
				}
			}
		}
		longest, sum = max(longest, without), sum+without
		w.heal()
		w.settle(20 * lease)
	}
	t.Logf("another node has no authority for %d ms, at most %d", sum/faults/ms, longest/ms)
	if sum > faults*60*ms {
		t.Errorf("another node has no authority for %d ms each time", sum/faults/ms)
	}
}

// others reports whether all nodes but one act on a view without it.
func (w *world) others(gone *node) bool {
	for _, n := range w.nodes {
		if n == gone {
			continue
		}
		a := n.n.Active()
		if a == nil || !n.authority() || a.admits(gone.n.cfg.Incarnation) {
			return false
		}
		for _, o := range w.nodes {
			if o != gone && !a.admits(o.n.cfg.Incarnation) {
				return false
			}
		}
	}
	return true
}

// TestANodeThatLeavesIsReplacedWithoutAGap sets a node out while the cluster is written to: its ranges move, and
// nobody loses authority meanwhile.
func TestANodeThatLeavesIsReplacedWithoutAGap(t *testing.T) {
	w := healthyWorld(t, 4, 2)
	set := func(out ...string) {
		s := Settings{Cluster: w.uuid, Protocol: Protocol, Replicas: 2, Out: out}
		w.etcd.Apply(lab.EtcdRequest{Txn: true, Then: []lab.EtcdKey{{Key: keyConfig, Value: s.Encode()}}})
	}
	set("node-2")
	for begin := w.sim.Now(); w.holdsAny(w.nodes[2]); {
		w.run(5 * ms)
		for _, n := range w.nodes {
			if !n.authority() {
				t.Fatalf("node %d has no authority", n.id)
			}
		}
		if w.sim.Now()-begin > 20*lease {
			t.Fatal("the node still has ranges")
		}
	}
	set()
	w.settle(20 * lease)
}

// TestANodeThatIsAwayForLongIsReplaced by others, which get copies of its ranges, and not before its time is over. When
// it is back, it gets its share again.
func TestANodeThatIsAwayForLongIsReplaced(t *testing.T) {
	w := healthyWorld(t, 4, 3)
	const away = 10 * lease
	for _, n := range w.nodes {
		n.n.t.awayNS = away
	}
	gone := w.nodes[w.rng.IntN(4)]
	for gone.n.Manages() { // another manager counts from when it became one
		gone = w.nodes[w.rng.IntN(4)]
	}
	began := w.sim.Now()
	gone.kill()
	for w.sim.Now()-began < away {
		if w.run(5 * ms); !w.holdsAny(gone) {
			t.Fatalf("the node has lost its ranges after %d ms, want %d", (w.sim.Now()-began)/ms, away/ms)
		}
	}
	for w.holdsAny(gone) || w.full() < ranges {
		if w.run(5 * ms); w.sim.Now()-began > 2*away {
			t.Fatalf("after %d ms %d of %d ranges are full", (w.sim.Now()-began)/ms, w.full(), ranges)
		}
	}
	gone.revive()
	w.settle(20 * lease)
	if !w.holdsAny(gone) {
		t.Error("the node is back and gets no ranges")
	}
}

// full counts the ranges that have all copies.
func (w *world) full() (n int) {
	m := w.views[w.epoch]
	for _, c := range m.Chains {
		serving := 0
		for _, e := range c {
			if e.State == view.Serving {
				serving++
			}
		}
		if serving == m.Replicas {
			n++
		}
	}
	return n
}

func (w *world) holdsAny(n *node) (any bool) {
	m := w.views[w.epoch]
	n.own(m, func(id view.PartitionID, _ *[ranges]copyOf) {
		for _, c := range m.Chains {
			any = any || memberOf(c, id) != nil
		}
	})
	return any
}

// TestWhatDoesNotBelongIsRefused starts a node against an etcd that it must not use, and looks at what it says.
func TestWhatDoesNotBelongIsRefused(t *testing.T) {
	settings := func(s Settings) []byte {
		if s.Protocol == 0 {
			s.Protocol = Protocol
		}
		return s.Encode()
	}
	for _, c := range []struct {
		name string
		do   func(w *world, n *node)
		want error
	}{
		{"no cluster of that name", func(w *world, _ *node) { w.etcd.Restore(lab.EtcdBackup{}) }, ErrNoCluster},
		{"another cluster of that name", func(_ *world, n *node) { n.cluster = uuid.UUID{8} }, ErrForeign},
		{"another protocol", func(w *world, _ *node) {
			w.put(keyConfig, settings(Settings{Cluster: w.uuid, Replicas: 3, Protocol: Protocol + 1}))
		}, ErrProtocol},
		{"another layout", func(w *world, _ *node) {
			b := settings(Settings{Cluster: w.uuid, Replicas: 3})
			b[versionAt]++
			w.put(keyConfig, b)
		}, ErrProtocol},
		{"a foreign prefix", func(w *world, _ *node) { w.put("registry/pods/1", []byte("{}")) }, ErrForeign},
		{"a foreign record", func(w *world, _ *node) { w.put(keyView, []byte("{}")) }, ErrForeign},
		{"a damaged view", func(w *world, _ *node) {
			b := append([]byte(nil), w.etcd.Key(keyView).Value...)
			b[len(b)-1] ^= 1
			w.put(keyView, b)
		}, ErrForeign},
		{"an epoch that goes back", func(w *world, n *node) { n.seen = w.epoch + 1 }, ErrWentBack},
		{"etcd is away", func(w *world, _ *node) { w.etcd.Stall(1 << 60) }, ErrUnreachable},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := healthyWorld(t, 1, 1)
			w.t = t
			w.etcd.Changed = nil
			w.nodes[0].kill()
			n := w.nodes[0]
			c.do(w, n)
			n.start()
			w.sim.Run(10*lease, func() bool { return false })
			if err := n.n.Problem(); !errors.Is(err, c.want) {
				t.Errorf("the problem is %v, want %v", err, c.want)
			} else {
				t.Log(err)
			}
			if n.authority() || n.n.Manages() {
				t.Error("the node takes part")
			}
		})
	}
}

func (w *world) put(key string, value []byte) {
	w.etcd.Apply(lab.EtcdRequest{Txn: true, Then: []lab.EtcdKey{{Key: key, Value: value}}})
}

// TestTheSecondNodeOfANameIsRefused starts another node with a name that is in use: the second one says so, and the
// first one goes on. When the first one is gone the second one takes its place.
func TestTheSecondNodeOfANameIsRefused(t *testing.T) {
	theSecondNodeIsRefused(t, healthyWorld(t, 3, 2))
	// The first node repeats its registration, because its watch is late.
	theSecondNodeIsRefused(t, healthyWorldOf(t, 12461745627170005939, 3, 2))
}

func theSecondNodeIsRefused(t *testing.T, w *world) {
	second := w.addNode(3)
	second.kill()
	first := w.nodes[1]
	w.nodes = w.nodes[:3]
	second.name = first.name
	second.address = "elsewhere"
	second.start()
	w.nodes = append(w.nodes, second)
	w.run(20 * lease)
	if err := second.n.Problem(); !errors.Is(err, ErrDuplicateName) || second.authority() {
		t.Fatalf("the second node: %v", err)
	}
	if !first.authority() || first.n.Problem() != nil {
		t.Fatalf("the first node: %v", first.n.Problem())
	}
	first.kill()
	w.nodes = append(w.nodes[:1:1], w.nodes[2:]...)
	w.run(30 * lease)
	if second.n.Problem() != nil || !second.authority() {
		t.Fatalf("the second node, after the first one has gone: %v", second.n.Problem())
	}
}

// TestABackupThatIsRestoredFreezesTheMap sets etcd back under a running cluster: the nodes say so and go on with the
// map that they have; nothing is written. What was right is put back, and a node that was killed meanwhile returns.
func TestABackupThatIsRestoredFreezesTheMap(t *testing.T) {
	w := healthyWorld(t, 3, 3)
	old := w.etcd.Backup()
	w.nodes[2].kill()
	w.run(4 * lease)
	w.nodes[2].start()
	w.settle(20 * lease)
	now := w.etcd.Backup()
	w.etcd.Restore(old)
	w.wentBack = true
	w.steady(10 * lease)
	for _, n := range w.nodes {
		if !errors.Is(n.n.Problem(), ErrWentBack) {
			t.Errorf("node %d: %v", n.id, n.n.Problem())
		}
	}
	w.nodes[0].kill()
	w.nodes[0].start()
	w.run(10 * lease)
	w.wentBack = false
	w.etcd.Restore(now)
	w.settle(20 * lease)
}

func TestNodesHaveNamesAsHosts(t *testing.T) {
	if got := HostNQN("demo", "n1"); got != "nqn.2026-11.example.jbofd:node:demo:n1" {
		t.Errorf("host NQN is %s", got)
	}
}
