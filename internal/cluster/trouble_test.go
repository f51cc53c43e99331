package cluster

import (
	"testing"

	"jbofd/internal/cluster/view"
)

// drives are those of a node, which may fail the writes of the ranges with even numbers: the others have no writes.
type drives struct {
	failing bool
	// damaged are the members that could not write. They are until the node acts on a view that has them as members no
	// more, and the drives work.
	damaged map[rangeOf]bool
}

// holdings are what the node has.
func (n *node) holdings() Holdings {
	newest := n.n.Newest()
	has := Holdings{Ranges: n.rangeReports(), Unusable: n.unusable()}
	n.own(newest, func(id view.PartitionID, _ *[ranges]copyOf) {
		if n.drives.failing {
			has.Failing = append(has.Failing, id)
		}
	})
	for i := range has.Ranges {
		e := &has.Ranges[i]
		key := rangeOf{e.Partition, e.Range}
		if n.drives.failing && e.Range%2 == 0 && takesWrites(newest, key) {
			n.drives.damaged[key] = true
		} else if a := n.n.Active(); !n.drives.failing && a != nil && !takesWrites(a, key) {
			delete(n.drives.damaged, key)
		}
		if n.drives.damaged[key] {
			e.Local = view.Damaged
		}
	}
	return has
}

func takesWrites(m *Map, of rangeOf) bool {
	e := memberOf(m.Chains[of.number], of.partition)
	return e != nil && (e.State == view.Serving || e.State == view.Leaving || e.State == view.Filling)
}

// failsWrites reports whether the drive of a member fails the writes of a range.
func (w *world) failsWrites(m *Map, e view.Member, r int) bool {
	for _, n := range w.nodes {
		if n.store[m.Partitions[e.Partition].ID] != nil {
			return n.drives.failing && r%2 == 0 || n.drives.damaged[rangeOf{e.Partition, r}]
		}
	}
	return false
}

// setFailing has the drives of a node fail writes, or work again.
func (n *node) setFailing(failing bool) {
	n.w.trace("the drives of node %d fail writes: %t", n.id, failing)
	if n.drives.failing = failing; n.drives.damaged == nil {
		n.drives.damaged = map[rangeOf]bool{}
	}
	if life := n.proc; !life.Dead() && !life.Stopped() && n.n.Newest() != nil {
		n.report(life)
	}
}

// failDrives has the drives of a node fail writes for a while.
func (w *world) failDrives(n *node, ns int64) {
	n.setFailing(true)
	w.sim.After(ns, func() { n.setFailing(false) })
}

// troubledWorld is a cluster of so many nodes with three copies, in which a node that does not lead has failing drives.
func troubledWorld(t *testing.T, nodes int, away int64) (w *world, failing *node) {
	w = healthyWorld(t, nodes, 3)
	for _, n := range w.nodes {
		n.n.t.awayNS = away
		if !n.n.Manages() {
			failing = n
		}
	}
	failing.setFailing(true)
	return w, failing
}

// TestASpareNodeTakesThePlaceOfADriveThatHasFailed: its node is up. Its ranges are the others' after the time for which
// a node may be away, and not before. When the drive works again they come back.
func TestASpareNodeTakesThePlaceOfADriveThatHasFailed(t *testing.T) {
	const away = 10 * lease
	w, failing := troubledWorld(t, 4, away)
	began := w.sim.Now()
	for w.sim.Now()-began < away {
		if w.run(5 * ms); !w.holdsAny(failing) {
			t.Fatalf("the drive has lost its ranges after %d ms, want %d", (w.sim.Now()-began)/ms, away/ms)
		}
	}
	for w.holdsAny(failing) || w.full() < ranges {
		if w.run(5 * ms); w.sim.Now()-began > 2*away {
			t.Fatalf("after %d ms %d of %d ranges are full", (w.sim.Now()-began)/ms, w.full(), ranges)
		}
	}
	failing.setFailing(false)
	w.run(2 * lease)
	w.settle(20 * lease)
	if !w.holdsAny(failing) {
		t.Error("the drive works and gets no ranges")
	}
}

// TestADriveThatFailsNowAndThenKeepsItsRanges, if it works for a tenth of the time in between, and one that fails in
// vain does not get them back.
func TestADriveThatFailsNowAndThenKeepsItsRanges(t *testing.T) {
	const away = 10 * lease
	for _, c := range []struct {
		worksNS int64
		keeps   bool
	}{{2 * lease, true}, {lease / 2, false}} {
		w, failing := troubledWorld(t, 4, away)
		keeps := true
		for began := w.sim.Now(); w.sim.Now()-began < 3*away; {
			w.run(2 * lease)
			failing.setFailing(false)
			w.run(c.worksNS)
			failing.setFailing(true)
			keeps = keeps && w.holdsAny(failing)
		}
		if keeps != c.keeps {
			t.Errorf("a drive that works for %d ms now and then keeps its ranges: %t", c.worksNS/ms, keeps)
		}
	}
}

// TestADriveThatHasFailedKeepsItsRangesWithoutASpareNode: what has no writes is served by it, and the others have two
// copies, which would be all that there is without it.
func TestADriveThatHasFailedKeepsItsRangesWithoutASpareNode(t *testing.T) {
	const away = 5 * lease
	for range 8 { // with one partition and with two
		w, failing := troubledWorld(t, 3, away)
		w.run(4 * away)
		if n := w.full(); n != ranges/2 {
			t.Errorf("%d ranges have three copies, want those without writes", n)
		}
		failing.setFailing(false)
		w.settle(20 * lease)
	}
}

// TestADriveThatFailsAsSoonAsItHasRangesGetsThemLessOften: it works while it has none, so that it looks calm. Each time
// that it is out, it is so for longer, until there are too few others.
func TestADriveThatFailsAsSoonAsItHasRangesGetsThemLessOften(t *testing.T) {
	const away = 10 * lease
	w, failing := troubledWorld(t, 4, away)
	for n := range 5 {
		for end := w.sim.Now() + 4*away; w.holdsAny(failing); {
			if w.run(5 * ms); w.sim.Now() > end {
				t.Fatalf("the drive fails for %d ms, and is not out for the time number %d", 4*away/ms, n+1)
			}
		}
		failing.setFailing(false)
		began := w.sim.Now()
		for !w.holdsAny(failing) {
			if w.run(5 * ms); w.sim.Now()-began > 20*lease {
				t.Fatalf("after being out %d times the drive gets no ranges", n+1)
			}
		}
		failing.setFailing(true)
		took := w.sim.Now() - began
		// The manager's clock may run at another rate than the world's.
		if want := int64(lease) << n; took < want-want/50 || took > want+lease {
			t.Fatalf("after being out %d times it is tried again after %d ms, want %d", n+1, took/ms, want/ms)
		}
	}
	for w.holdsAny(failing) {
		w.run(5 * ms)
	}
	failing.setFailing(false)
	w.run(2 * lease)
	for _, n := range w.nodes {
		if n != failing && !n.n.Manages() {
			n.proc.Stop()
			break
		}
	}
	began := w.sim.Now()
	for !w.holdsAny(failing) {
		if w.run(5 * ms); w.sim.Now()-began > away+5*lease {
			t.Fatal("a node is lost for good, and the drive that works is not used in its place")
		}
	}
}
