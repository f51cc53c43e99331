package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"jbofd/internal/cluster/view"
	"jbofd/internal/lab"
)

// change changes the settings, as a command of an operator does.
func (w *world) change(change func(r *Records) error) error {
	keys := []KeyValue{}
	for _, name := range append(w.etcd.Names(keyNodes), keyConfig, keyView) {
		k := w.etcd.Key(name)
		keys = append(keys, KeyValue{Key: name, Value: k.Value, Revision: k.Revision})
	}
	r, err := ReadRecords(keys)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := change(r); err != nil {
		return err
	}
	compare, put := r.Put()
	e := lab.EtcdRequest{Txn: true}
	for _, c := range compare {
		e.If = append(e.If, lab.EtcdKey{Key: c.Key, Revision: c.Revision})
	}
	for _, p := range put {
		e.Then = append(e.Then, lab.EtcdKey{Key: p.Key, Value: p.Value})
	}
	w.etcd.Apply(e)
	return nil
}

// until runs until something is so.
func (w *world) until(what string, is func() bool) {
	w.t.Helper()
	for begin := w.sim.Now(); !is(); {
		if w.run(5 * ms); w.sim.Now()-begin > 60*lease {
			w.t.Fatalf("after a minute: not yet: %s", what)
		}
	}
}

func (w *world) drain(n *node) {
	_ = w.change(func(r *Records) error {
		r.Settings.Out = append(r.Settings.Out, n.name)
		return nil
	})
}

func (w *world) indexOf(n *node) int {
	return slices.Index(nodeNamesInOrder(w.views[w.epoch]), n.name)
}

func nodeNamesInOrder(m *Map) (names []string) {
	for _, e := range m.Nodes {
		names = append(names, e.Name)
	}
	return names
}

// empty reports whether a node is no member of any range.
func (w *world) empty(n *node) bool {
	i := w.indexOf(n)
	return i >= 0 && w.views[w.epoch].Ranges(i) == 0
}

// forget has a node forgotten, as the command does.
func (w *world) forget(n *node) error {
	if err := w.change(func(r *Records) error { return r.Forget([]string{n.name}) }); err != nil {
		return err
	}
	var members []string
	w.until("it is forgotten", func() (done bool) {
		_ = w.change(func(r *Records) error { done, members = r.Forgot([]string{n.name}); return nil })
		return done
	})
	if len(members) > 0 {
		return fmt.Errorf("%v are members", members)
	}
	return nil
}

// forgettable returns a world of three nodes and one that was drained and has ended, or is paused for so long that it
// may be forgotten.
func forgettable(t *testing.T, paused bool) (*world, *node) {
	w := healthyWorld(t, 4, 2)
	n := w.nodes[w.rng.IntN(4)]
	refused := func(why string) {
		t.Helper()
		before := w.etcd.Key(keyConfig).Revision
		if err := w.forget(n); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("forget %s: %v, want %q", n.name, err, why)
		}
		if w.etcd.Key(keyConfig).Revision != before {
			t.Error("what was refused has changed the settings")
		}
	}
	refused("is up")
	if paused {
		n.proc.Stop()
	} else {
		n.kill()
	}
	w.until("it is away", func() bool { return w.views[w.epoch].Admitted[w.indexOf(n)] == 0 })
	refused("runs, or has ended a moment ago")
	w.until("it is registered no more", func() bool { return len(w.etcd.Names(keyNodes)) == 3 })
	refused("is a member of ")
	w.drain(n)
	w.until("it has no ranges", func() bool { return w.empty(n) })
	if err := w.forget(n); err != nil {
		t.Fatal(err)
	}
	m := w.views[w.epoch]
	if w.indexOf(n) >= 0 || len(m.Nodes) != 3 {
		t.Errorf("the map has %v", m.Nodes)
	}
	for _, p := range m.Partitions {
		if n.store[p.ID] != nil {
			t.Errorf("the map has partition %s", p.ID)
		}
	}
	w.nodes = slices.DeleteFunc(w.nodes, func(o *node) bool { return o == n })
	w.settle(5 * lease)
	return w, n
}

// TestAForgottenNodeIsRefused starts a process of a node that was forgotten, or lets one go on: it takes no part, and
// changes nothing for the others. When it may join again, it does, without what it had.
func TestAForgottenNodeIsRefused(t *testing.T) {
	for _, paused := range []bool{false, true} {
		t.Run(fmt.Sprint("paused ", paused), func(t *testing.T) {
			w, n := forgettable(t, paused)
			w.nodes = append(w.nodes, n)
			if paused {
				n.proc.Continue()
			} else {
				n.start()
			}
			w.until("it is refused", func() bool { return errors.Is(n.n.Problem(), ErrForgotten) })
			epoch := w.epoch
			for range 100 {
				w.run(lease / 5)
				if n.authority() || w.epoch != epoch || !errors.Is(n.n.Problem(), ErrForgotten) {
					t.Fatalf("the node: %v; epoch %d after %d", n.n.Problem(), w.epoch, epoch)
				}
			}
			if !paused {
				n.kill()
				n.start()
				w.run(10 * lease)
				if !errors.Is(n.n.Problem(), ErrForgotten) || w.epoch != epoch {
					t.Fatalf("its next process: %v", n.n.Problem())
				}
			}
			if err := w.change(func(r *Records) error { return r.Join(n.name) }); err != nil {
				t.Fatal(err)
			}
			w.settle(20 * lease)
		})
	}
}

// TestAForgottenNodeThatHearsOnlyTheManagerIsRefused: it cannot read in etcd that it was forgotten.
func TestAForgottenNodeThatHearsOnlyTheManagerIsRefused(t *testing.T) {
	w, n := forgettable(t, true)
	w.nodes = append(w.nodes, n)
	n.client.Cut(true)
	n.proc.Continue()
	w.until("it is refused", func() bool { return errors.Is(n.n.Problem(), ErrForgotten) })
	w.run(10 * lease)
	if n.authority() || n.n.Newest() != nil && n.n.Newest().Epoch >= w.epoch {
		t.Errorf("it goes on: %v", n.n.Newest())
	}
	n.client.Cut(false)
	w.run(10 * lease)
	if !errors.Is(n.n.Problem(), ErrForgotten) || w.indexOf(n) >= 0 {
		t.Errorf("it is there again: %v", n.n.Problem())
	}
}

// TestANodeOfTheNameOfAForgottenOneJoins, with what was in its drives, which counts for nothing.
func TestANodeOfTheNameOfAForgottenOneJoins(t *testing.T) {
	w, n := forgettable(t, false)
	n.number, n.lives, n.seen = 77, 0, 0
	w.nodes = append(w.nodes, n)
	n.start()
	w.settle(20 * lease)
	if w.empty(n) {
		t.Error("it has no ranges")
	}
	if got := w.views[w.epoch]; len(got.Partitions) > 8 || slices.ContainsFunc(got.Partitions,
		func(p view.Partition) bool { return p.ID.IsZero() }) {
		t.Errorf("entries are not used again: %v", got.Partitions)
	}
	// It is a node as any other, and is forgotten again only by another command.
	n.kill()
	w.drain(n)
	w.until("it has no ranges", func() bool { return w.empty(n) })
	w.run(20 * lease)
	if w.indexOf(n) < 0 {
		t.Fatal("it is forgotten without a command")
	}
	if err := w.forget(n); err != nil {
		t.Fatal(err)
	}
	n.start()
	w.until("it is refused", func() bool { return errors.Is(n.n.Problem(), ErrForgotten) })
}

// TestANodeThatComesBackIsNotForgotten: the process is admitted between the look at the records and the change of the
// settings. The command says so, and nothing happens to the node.
func TestANodeThatComesBackIsNotForgotten(t *testing.T) {
	w := healthyWorld(t, 4, 2)
	n := w.nodes[2]
	w.drain(n)
	w.until("it has no ranges", func() bool { return w.empty(n) })
	w.settle(20 * lease)
	_ = w.change(func(r *Records) error {
		r.Settings.Forgotten = []Forgotten{{Name: n.name}}
		return nil
	})
	w.run(lease)
	w.steady(10 * lease)
	if err := w.change(func(r *Records) error {
		done, members := r.Forgot([]string{n.name})
		if !done || !slices.Equal(members, []string{n.name}) || len(r.Settings.Forgotten) > 0 {
			t.Errorf("%v, %v, %v", done, members, r.Settings.Forgotten)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := w.change(func(r *Records) error { return r.Join(n.name) }); err != nil {
		t.Fatal(err)
	}
	w.settle(20 * lease)
}

// TestALostPartitionLeavesTheMap: a node comes back without one of its drives, and with another one. Of those that are
// away nothing is known, so that theirs stay.
func TestALostPartitionLeavesTheMap(t *testing.T) {
	w := healthyWorld(t, 4, 2)
	n := w.nodes[1]
	n.kill()
	w.until("it is away", func() bool { return w.views[w.epoch].Admitted[w.indexOf(n)] == 0 })
	lost := n.parts[0].ID
	has := func() bool {
		return slices.ContainsFunc(w.views[w.epoch].Partitions, func(p view.Partition) bool { return p.ID == lost })
	}
	w.run(10 * lease)
	if !has() {
		t.Fatal("a partition of a node that is away is forgotten")
	}
	delete(n.store, lost)
	n.parts[0].ID[5] = 1
	n.store[n.parts[0].ID] = &[ranges]copyOf{}
	n.start()
	w.until("the partition is forgotten", func() bool { return !has() })
	w.settle(20 * lease)
	for _, p := range w.views[w.epoch].Partitions {
		if p.ID.IsZero() {
			continue
		}
		if !slices.ContainsFunc(w.nodes, func(o *node) bool { return o.store[p.ID] != nil }) {
			t.Errorf("the map has partition %s, which nobody has", p.ID)
		}
	}
}

// unusable are the partitions that the newest view has of the node, and that it has lost.
func (n *node) unusable() (out []view.PartitionID) {
	m := n.n.Newest()
	for i, p := range m.Partitions {
		if !p.ID.IsZero() && m.Nodes[p.Node].Name == n.name && n.store[p.ID] == nil {
			out = append(out, view.PartitionID(i))
		}
	}
	return out
}
