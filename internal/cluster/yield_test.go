package cluster

import (
	"cmp"
	"slices"

	"jbofd/internal/cluster/view"
)

// yield lets a ChainHead yield now and then, for a while, to any member of its chain.
func (w *world) yield() {
	n := w.nodes[w.rng.IntN(len(w.nodes))]
	a := n.n.Active()
	if !w.yields || w.healed || w.rng.IntN(4) > 0 || a == nil || n.proc.Dead() || n.proc.Stopped() {
		return
	}
	r := w.rng.IntN(ranges)
	c := a.Chains[r]
	if len(c) < 2 || n.store[a.Partitions[c[0].Partition].ID] == nil {
		return
	}
	if n.yields == nil {
		n.yields = map[int]view.Yield{}
	}
	n.yields[r] = view.Yield{ChainEpoch: a.ChainEpochs[r], To: c[1+w.rng.IntN(len(c)-1)].Partition}
	n.report(n.proc)
	w.sim.After(w.rng.Int64N(lease), func() {
		delete(n.yields, r)
		if !n.proc.Dead() && n.n.Newest() != nil {
			n.report(n.proc)
		}
	})
}

// lookForYields verifies that a chain with the same members has another ChainHead only if the last one has yielded to
// it, and that the others keep their order.
func (w *world) lookForYields(m *Map) {
	last := w.views[w.epoch]
	if last == nil {
		return
	}
	for r, c := range m.Chains {
		was := last.Chains[r]
		if len(c) == 0 || len(was) != len(c) || c[0] == was[0] {
			continue
		}
		byPartition := func(a, b view.Member) int { return cmp.Compare(a.Partition, b.Partition) }
		if !slices.Equal(slices.SortedFunc(slices.Values(c), byPartition),
			slices.SortedFunc(slices.Values(was), byPartition)) {
			continue
		}
		rest := slices.DeleteFunc(slices.Clone(was), func(e view.Member) bool { return e == c[0] })
		if !c.Full() || !slices.Equal(rest, c[1:]) || m.ChainEpochs[r] != last.ChainEpochs[r]+1 {
			w.t.Fatalf("epoch %d: range %d has the chain %v, epoch %d, after %v", m.Epoch, r, c, m.ChainEpochs[r],
				was)
		}
		w.handed++
	}
}
