package peers_test

import (
	"slices"
	"testing"

	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
	"jbofd/internal/peers"
)

// chained sets a view in which n ranges have chains from a to the first partition of b, m from there to a, and one is
// to be filled there later.
func (r *rig) chained(b *box, n, m int) {
	v := mapOf(place{"a", partitionID("a", 0)}, place{"b", b.ids[0]})
	down := view.Chain{{Partition: 0, State: view.Serving}, {Partition: 1, State: view.Filling}}
	up := view.Chain{{Partition: 1, State: view.Serving}, {Partition: 0, State: view.Serving}}
	v.Chains = append(slices.Repeat([]view.Chain{down}, n), slices.Repeat([]view.Chain{up}, m)...)
	v.Chains = append(v.Chains, view.Chain{{Partition: 0, State: view.Serving}, {Partition: 1, State: view.Waiting}})
	r.SetView(v)
}

// TestForwardsThatAreKeptLeaveRoom: each range keeps its share of half a queue, at least one and no more than the
// Forward says. With many ranges there are more queues, so that all ranges together have room for what they may keep.
func TestForwardsThatAreKeptLeaveRoom(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		const depth = 16
		r := w.rig(t, func(c *peers.Config) { c.QueueDepth = depth }, b)
		// sends sends two Forwards of each of n ranges, and a Durable, and returns the keep that arrives.
		sends := func(n int) (keep uint8) {
			t.Helper()
			before := len(b.board.arrived())
			b.board.keeps(isForward)
			durable := r.message(nvme.CmdKVDurable, 1, 1, 0)
			for i := range 2 * n {
				c := r.forward(1, uint64(i+1), 64)
				c.SQE.KVReplica().SetRange(uint16(i % n))
				c.SQE.KVReplica().SetKeep(6)
				r.batch.Add(c)
			}
			r.send(durable)
			if got := r.sink.await(t, 1)[0]; got != durable || got.Lost {
				t.Errorf("command %d has ended, lost %t", got.Tag, got.Lost)
			}
			eventually(t, "all Forwards are kept", func() bool { return b.board.keeping() == 2*n })
			b.board.release()
			for _, c := range r.sink.await(t, 2*n) {
				if c.Lost {
					t.Fatalf("Forward %d is lost", c.Tag)
				}
			}
			for _, a := range b.board.arrived()[before:] {
				if a.opcode == nvme.CmdKVForward {
					if keep != 0 && keep != a.keep {
						t.Errorf("a Forward may keep %d, another one %d", keep, a.keep)
					}
					keep = a.keep
				}
			}
			return keep
		}
		for _, x := range []struct {
			ranges int
			again  bool // there are more queues
			keep   uint8
		}{
			{1, true, 6}, {2, false, 4}, {4, false, 2}, {6, false, 1}, // one queue
			{24, true, 2}, // six queues of four ranges each
			{36, false, 1}, {5, false, 6},
		} {
			r.chained(b, x.ranges, 100)
			if x.again {
				r.awaitConnected(t, "b")
			}
			if got := sends(x.ranges); got != x.keep {
				t.Errorf("%d ranges: each may keep %d, want %d", x.ranges, got, x.keep)
			}
		}
		// Beyond that each range keeps one all the same, and the log says that this is too much.
		r.chained(b, 200, 0)
		r.awaitConnected(t, "b")
		eventually(t, "the log says so", func() bool { return r.log.count("too few commands may be outstanding") == 1 })
	})
}
