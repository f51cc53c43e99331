package cluster

import (
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
		// Another view: connections are looked for anew.
		n := w.nodes[w.rng.IntN(4)]
		n.kill()
		n.start()
		w.until("the manager has noticed", func() bool { return w.ready() == 0 })
		w.settle(20 * lease)
		if got := w.ready(); got != 0 {
			t.Fatalf("round %d: %d nodes say ready by an earlier view", round, got)
		}
	}
}
