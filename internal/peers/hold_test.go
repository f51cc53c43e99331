package peers_test

import (
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
	"jbofd/internal/peers"
)

// withoutAnAnswer has connections to b end because a command gets no answer, some times in a row.
func (r *rig) withoutAnAnswer(t *testing.T, b *box, opcode uint8, times int) {
	t.Helper()
	n := 0
	if opcode != nvme.CmdKVSync {
		n = 4096
	}
	for i := range times {
		r.awaitConnected(t, "b")
		b.board.keeps(everything)
		r.send(r.message(opcode, 0, uint64(i+1), n))
		eventually(t, "the command is kept", func() bool { return b.board.keeping() == 1 })
		r.Advance("b", 5)
		if c := r.sink.await(t, 1)[0]; !c.Lost {
			t.Fatalf("command %d: %v", c.Tag, c.Status)
		}
		<-r.lost
		b.board.release()
	}
}

// holding makes a rig that leaves nodes alone for an hour.
func (w *world) holding(t *testing.T, b *box) *rig {
	t.Helper()
	return w.rig(t, func(c *peers.Config) { c.Timeout, c.KATO, c.Hold = time.Hour, time.Hour, time.Hour }, b)
}

// TestANodeThatAnswersNoCommandsIsLeftAlone, though it can be connected to, and whatever view comes, until one admits
// another process of it.
func TestANodeThatAnswersNoCommandsIsLeftAlone(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		r := w.holding(t, b)
		see := func(process cluster.Incarnation) {
			m := mapOf(place{b.name, b.ids[0]})
			m.Admitted = []cluster.Incarnation{1, process}
			r.SetView(m)
		}
		see(2)
		r.withoutAnAnswer(t, b, nvme.CmdKVSync, 3)
		eventually(t, "the log says why", func() bool { return r.log.count("counts as out of reach") == 1 })
		see(2)
		r.Redial()
		select {
		case <-r.connected:
			t.Fatal("connected again")
		case <-time.After(300 * time.Millisecond):
		}
		see(3)
		r.withoutAnAnswer(t, b, nvme.CmdKVSync, 2)
		r.awaitConnected(t, "b") // it has begun anew
	})
}

// TestASlowDriveCutsOffNoNode: Ships and Fetches wait for the drive of one partition, for longer than anything else may
// take. Commands for the others are answered meanwhile, and these in the end. If there is none for eight times as long
// the connection ends, which counts for nothing.
func TestASlowDriveCutsOffNoNode(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		for _, opcode := range []uint8{nvme.CmdKVShip, nvme.CmdKVFetch} {
			b := w.box(t, "b", 2)
			r := w.holding(t, b)
			r.see(b)
			r.awaitConnected(t, "b")
			b.board.keeps(ofDrive(b, 0))
			r.send(r.message(opcode, 0, 1, 4096), r.message(opcode, 0, 2, 4096))
			eventually(t, "the commands are kept", func() bool { return b.board.keeping() == 2 })
			for i := range uint64(6) {
				r.Advance("b", 5)
				r.send(r.message(opcode, 1, 10+i, 4096), r.message(nvme.CmdKVSync, 1, 20+i, 0))
				for _, c := range r.sink.await(t, 2) {
					if c.Lost || !c.Status.OK() {
						t.Fatalf("command %d of another drive: lost %t, %v", c.Tag, c.Lost, c.Status)
					}
				}
			}
			b.board.release()
			for _, c := range r.sink.await(t, 2) {
				if c.Lost || c.Received != 4096 && !w.rdma {
					t.Errorf("command %d of a slow drive: lost %t, %d bytes", c.Tag, c.Lost, c.Received)
				}
			}
			for i := range uint64(5) {
				b.board.keeps(everything)
				r.send(r.message(opcode, 0, 30+i, 4096))
				eventually(t, "the command is kept", func() bool { return b.board.keeping() == 1 })
				r.Advance("b", 33)
				if c := r.sink.await(t, 1)[0]; !c.Lost {
					t.Fatalf("command %d: %v", c.Tag, c.Status)
				}
				<-r.lost
				b.board.release()
				r.awaitConnected(t, "b")
			}
		}
	})
}

// ofDrive says which commands are for a partition of a box.
func ofDrive(b *box, partition uint32) func(*nvme.SQE) bool {
	return func(e *nvme.SQE) bool { return e.NSID() == 11+partition }
}

// TestASlowDriveLeavesRoomForOthers, whose commands pass those that wait for it. None of those is left behind, whether
// the drive answers or the connection ends.
func TestASlowDriveLeavesRoomForOthers(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		for _, opcode := range []uint8{nvme.CmdKVShip, nvme.CmdKVFetch} {
			const depth, many = 16, 100
			b := w.box(t, "b", 3)
			r := w.rig(t, func(c *peers.Config) {
				c.Timeout, c.KATO, c.QueueDepth = time.Hour, time.Hour, depth
			}, b)
			r.see(b)
			r.awaitConnected(t, "b")
			for round := range 2 {
				b.board.keeps(ofDrive(b, 0))
				for i := range uint64(many) {
					r.send(r.message(opcode, 0, i, 4096))
				}
				eventually(t, "the drive has its share", func() bool { return b.board.keeping() == depth*3/4 })
				for i := range uint64(many) {
					r.send(r.message(opcode, 1, many+i, 4096), r.message(opcode, 2, 2*many+i, 4096))
				}
				for _, c := range r.sink.await(t, 2*many) {
					if c.Lost || !c.Status.OK() || c.Tag < many {
						t.Fatalf("command %d: lost %t, %v", c.Tag, c.Lost, c.Status)
					}
				}
				if n := b.board.keeping(); n != depth*3/4 {
					t.Errorf("%d commands are at the slow drive, want %d", n, depth*3/4)
				}
				if round == 0 {
					b.board.release()
				} else {
					b.cut()
				}
				for _, c := range r.sink.await(t, many) {
					if c.Lost != (round == 1) {
						t.Fatalf("round %d: command %d: lost %t", round, c.Tag, c.Lost)
					}
				}
			}
			b.board.release()
			r.awaitConnected(t, "b")
			r.send(r.message(opcode, 0, 1, 4096))
			if c := r.sink.await(t, 1)[0]; c.Lost {
				t.Error("lost on the next connection")
			}
		}
	})
}

// TestAShareOfAQueueEndsWithTheConnection: what the drives had when the connection ended does not count for their
// shares in the next one. One of them has as many commands as leave a quarter of the queue, and that is for the other.
func TestAShareOfAQueueEndsWithTheConnection(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		const depth = 16
		for _, opcode := range []uint8{nvme.CmdKVShip, nvme.CmdKVFetch} {
			b := w.box(t, "b", 2)
			r := w.rig(t, func(c *peers.Config) {
				c.Timeout, c.KATO, c.QueueDepth = time.Hour, time.Hour, depth
			}, b)
			r.see(b)
			r.awaitConnected(t, "b")
			fill := func(to view.PartitionID, n, all int) {
				t.Helper()
				for i := range n {
					r.send(r.message(opcode, to, uint64(i), 4096))
				}
				eventually(t, "the drive has its share", func() bool { return b.board.keeping() == all })
			}
			b.board.keeps(everything)
			fill(1, depth/4, depth/4)
			fill(0, depth/2, depth*3/4)
			b.cut()
			r.sink.await(t, depth*3/4)
			b.board.release()
			r.awaitConnected(t, "b")
			b.board.keeps(ofDrive(b, 0))
			fill(0, depth*3/4, depth*3/4)
			for i := range uint64(depth / 4) {
				r.send(r.message(opcode, 1, i, 4096))
			}
			for _, c := range r.sink.await(t, depth/4) {
				if c.Lost || !c.Status.OK() {
					t.Errorf("command %d: lost %t, %v", c.Tag, c.Lost, c.Status)
				}
			}
			b.board.release()
			r.sink.await(t, depth*3/4)
		}
	})
}
