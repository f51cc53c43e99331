package peers_test

import (
	"testing"

	"jbofd/internal/peers"
)

// TestNodesAreAddedMovedAndRemoved while others are spoken to.
func TestNodesAreAddedMovedAndRemoved(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b, c, other := w.box(t, "b", 1), w.box(t, "c", 1), w.box(t, "c", 1)
		r := w.rig(t, nil, b)
		r.see(b, c)
		r.awaitConnected(t, "b")
		r.send(r.forward(1, 1, 64))
		if x := r.sink.await(t, 1)[0]; !x.Lost {
			t.Errorf("to a node that is not among the others: %v", x.Status)
		}
		set := func(boxes ...*box) {
			t.Helper()
			var nodes []peers.Node
			for _, b := range boxes {
				nodes = append(nodes, b.node())
			}
			if err := r.SetNodes(nodes); err != nil {
				t.Fatal(err)
			}
		}
		b.board.keeps(everything)
		r.send(r.forward(0, 2, 64))
		eventually(t, "the Forward has arrived", func() bool { return b.board.keeping() == 1 })

		set(b, c)
		r.awaitConnected(t, "c")
		r.send(r.forward(1, 3, 64))
		if x := r.sink.await(t, 1)[0]; x.Lost || len(c.board.arrived()) != 1 {
			t.Errorf("after the node was added: lost %t, %d messages have arrived", x.Lost, len(c.board.arrived()))
		}

		c.board.keeps(everything)
		r.send(r.forward(1, 4, 64))
		eventually(t, "the Forward has arrived", func() bool { return c.board.keeping() == 1 })
		set(b, other)
		if x := r.sink.await(t, 1)[0]; !x.Lost || x.Tag != 4 {
			t.Errorf("the node is elsewhere, and command %d is answered: lost %t", x.Tag, x.Lost)
		}
		r.awaitConnected(t, "c")
		r.send(r.forward(1, 5, 64))
		if x := r.sink.await(t, 1)[0]; x.Lost || len(other.board.arrived()) != 1 {
			t.Errorf("elsewhere: lost %t, %d messages have arrived", x.Lost, len(other.board.arrived()))
		}

		other.board.keeps(everything)
		r.send(r.forward(1, 6, 64))
		eventually(t, "the Forward has arrived", func() bool { return other.board.keeping() == 1 })
		set(b)
		if x := r.sink.await(t, 1)[0]; !x.Lost || x.Tag != 6 {
			t.Errorf("the node was removed, and command %d is answered: lost %t", x.Tag, x.Lost)
		}
		r.send(r.forward(1, 7, 64))
		if x := r.sink.await(t, 1)[0]; !x.Lost {
			t.Errorf("to a node that was removed: %v", x.Status)
		}
		if n := b.board.keeping(); n != 1 || r.sink.count() != 0 {
			t.Errorf("the node that stays keeps %d commands, want the one from before; %d have ended", n,
				r.sink.count())
		}
		if err := r.SetNodes([]peers.Node{b.node(), b.node()}); err == nil || !contains(err, "name of a node") {
			t.Errorf("two nodes of one name: %v", err)
		}
		r.Close()
		if err := r.SetNodes(nil); err != nil {
			t.Errorf("after Close: %v", err)
		}
	})
}

// TestPartitionsOfANodeReachEachOther: a node with several is connected to itself; one with a single one is not.
func TestPartitionsOfANodeReachEachOther(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		one := w.box(t, "a", 1)
		r := w.rig(t, nil, one)
		r.see(one)
		r.send(r.forward(0, 1, 64))
		if x := r.sink.await(t, 1)[0]; !x.Lost || one.board.keeping()+len(one.board.arrived()) > 0 {
			t.Errorf("to the only partition of this node: %v", x.Status)
		}
		two := w.box(t, "a", 2)
		r = w.rig(t, nil, two)
		r.see(two)
		r.awaitConnected(t, "a")
		r.send(r.forward(1, 1, 64))
		if x := r.sink.await(t, 1)[0]; x.Lost || len(two.board.arrived()) != 1 {
			t.Errorf("to another partition of this node: lost %t, %d messages have arrived", x.Lost,
				len(two.board.arrived()))
		}
	})
}
