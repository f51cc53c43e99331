package cluster

import (
	"fmt"
	"testing"

	"jbofd/internal/cluster/view"
)

// connected has a node say of which view it is connected to all nodes.
func (n *node) connected(epoch view.Epoch) {
	n.on(n.proc, func(now int64, out *Actions) { n.n.SetConnected(now, epoch, out) })
}

// ready counts the nodes that know that all are connected.
func (w *world) ready() (count int) {
	for _, n := range w.nodes {
		if n.n.Ready() {
			count++
		}
	}
	return count
}

// TestReadyIsWhatAllNodesSay: as long as one of them is not connected, or is so by an earlier view only, nobody says
// that the cluster is ready; and soon after it is, everybody does.
func TestReadyIsWhatAllNodesSay(t *testing.T) {
	w := healthyWorld(t, 4, 2)
	for round := range 3 {
		for _, last := range w.rng.Perm(4) {
			for i, n := range w.nodes {
				n.connected(w.epoch)
				if i == last {
					n.connected([]view.Epoch{0, w.epoch - 1}[w.rng.IntN(2)])
				}
			}
			w.run(lease)
			if got := w.ready(); got != 0 {
				t.Fatalf("%d nodes say ready while node %d is not connected", got, last)
			}
			w.nodes[last].connected(w.epoch)
			w.run(lease / 2)
			if got := w.ready(); got != 4 {
				t.Fatalf("%d of 4 nodes say ready when all are connected", got)
			}
		}
		n := w.nodes[w.rng.IntN(4)]
		late := &Answer{Term: n.n.term, Manager: n.n.manager, To: n.n.cfg.Incarnation, Seq: n.n.seq - 5, Epoch: w.epoch}
		n.on(n.proc, func(now int64, out *Actions) { n.n.Receive(now, &Message{Answer: late}, out) })
		if !n.n.Ready() {
			t.Fatal("an answer to an earlier report counts")
		}
		// One that says nothing may be gone, and the view of before may be the newest one still.
		for n.n.Manages() {
			n = w.nodes[w.rng.IntN(4)]
		}
		epoch := w.epoch
		n.kill()
		w.until("it has been silent for a while", func() bool { // a message may come late
			m := w.leader().n
			return w.epoch != epoch || m.now-m.lead.processes[n.n.cfg.Incarnation].heardNS > lease*8/10
		})
		if got := w.ready(); w.epoch == epoch && got > 1 { // it says so itself
			t.Fatalf("%d nodes say ready, and node %d is silent", got, n.id)
		}
		// Another view: connections are looked for anew.
		n.start()
		w.until("the manager has noticed", func() bool { return w.ready() == 0 })
		w.settle(20 * lease)
		if got := w.ready(); got != 0 {
			t.Fatalf("round %d: %d nodes say ready by an earlier view", round, got)
		}
	}
}

// healthy says what is missing until all nodes serve in a view that has all of them; "": nothing.
func (w *world) healthy() string {
	m, err := DecodeMap(w.etcd.Key(keyView).Value)
	if err != nil {
		return err.Error()
	}
	for _, n := range w.nodes {
		switch {
		case !m.admits(n.n.cfg.Incarnation):
			return fmt.Sprintf("node %d is not admitted by epoch %d", n.id, m.Epoch)
		case n.n.Problem() != nil:
			return fmt.Sprintf("node %d: %v", n.id, n.n.Problem())
		case n.n.Active() == nil || n.n.Active().Epoch != m.Epoch:
			return fmt.Sprintf("node %d does not act on epoch %d", n.id, m.Epoch)
		case !n.authority():
			return fmt.Sprintf("node %d has no authority", n.id)
		}
	}
	for r, c := range m.Chains {
		serving := 0
		for _, e := range c {
			if e.State == view.Serving {
				serving++
			}
		}
		if serving != min(m.Replicas, len(w.nodes)) || serving != len(c) {
			return fmt.Sprintf("range %d has the chain %v", r, c)
		}
	}
	if n := len(w.etcd.Names(keyNodes)); n != len(w.nodes) {
		return fmt.Sprintf("%d nodes are registered", n)
	}
	return ""
}

// settle runs until the cluster is healthy, for at most so long.
func (w *world) settle(ns int64) {
	end := w.sim.Now() + ns
	for w.healthy() != "" && w.sim.Now() < end && !w.t.Failed() {
		w.run(20 * ms)
	}
	if missing := w.healthy(); missing != "" {
		w.t.Fatalf("after %d ms: %s", ns/ms, missing)
	}
}
