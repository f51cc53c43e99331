package peers_test

import (
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
	"jbofd/internal/peers"
	"jbofd/internal/testutil/loopback"
)

// TestMessagesArriveAndAreAnswered of each opcode, with data in the capsule, behind it, and to this node.
func TestMessagesArriveAndAreAnswered(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 2)
		r := w.rig(t, nil, b)
		r.see(b)
		r.awaitConnected(t, "b")
		for _, x := range []struct {
			op     uint8
			n      int
			result uint64
			got    int
		}{
			{nvme.CmdKVForward, nvme.KVForwardHeaderSize, 5, 0}, {nvme.CmdKVForward, 4096, 5, 0},
			{nvme.CmdKVForward, 100_000, 5, 0}, {nvme.CmdKVDurable, 0, 0, 0}, {nvme.CmdKVSync, 0, 0, 0},
			{nvme.CmdKVShip, 1000, 1000, 1000}, {nvme.CmdKVShip, 200_000, 200_000, 200_000},
			{nvme.CmdKVFetch, 4096, 4096, 4096},
		} {
			before := len(b.board.arrived())
			c := r.message(x.op, 1, 5, x.n)
			r.send(c)
			r.sink.await(t, 1)
			if c.Lost || !c.Status.OK() || c.Result != x.result || c.Received != x.got {
				t.Errorf("opcode %#x with %d bytes: lost %t, %v, result %d, %d bytes", x.op, x.n, c.Lost, c.Status,
					c.Result, c.Received)
			}
			for i := range x.got {
				if c.Data[i] != 7 {
					t.Fatalf("opcode %#x: byte %d is %d, want 7", x.op, i, c.Data[i])
				}
			}
			a := b.board.arrived()
			if len(a) != before+1 {
				t.Fatalf("%d messages have arrived, want %d", len(a), before+1)
			}
			if got := a[before]; got.opcode != x.op || got.nsid != 12 {
				t.Errorf("opcode %#x to namespace %d, want %#x to 12", got.opcode, got.nsid, x.op)
			} else if x.op == nvme.CmdKVForward && (got.data != x.n || got.sum != byte(5*x.n)) {
				t.Errorf("%d bytes of sum %d, want %d of sum %d", got.data, got.sum, x.n, byte(5*x.n))
			}
		}
	})
}

// TestOrderIsKept by many commands of several goroutines, each to a partition of its own, with less room in the queue.
func TestOrderIsKept(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		const senders, each = 4, 500
		b := w.box(t, "b", senders)
		r := w.rig(t, func(c *peers.Config) { c.QueueDepth = 16 }, b)
		r.see(b)
		r.awaitConnected(t, "b")
		var wg sync.WaitGroup
		for s := range senders {
			wg.Add(1)
			go func() {
				defer wg.Done()
				var batch peers.Batch
				for i := range each {
					size := nvme.KVForwardHeaderSize
					if i%50 == 0 {
						size = 20_000 // fetched by the target, while others come in capsules
					}
					batch.Add(r.forward(view.PartitionID(s), uint64(i+1), size))
					if i%7 == 0 {
						r.Send(&batch)
					}
				}
				r.Send(&batch)
			}()
		}
		wg.Wait()
		for _, c := range r.sink.await(t, senders*each) {
			if c.Lost || !c.Status.OK() || c.Result != uint64(c.Tag) {
				t.Fatalf("command %d: lost %t, %v, result %d", c.Tag, c.Lost, c.Status, c.Result)
			}
		}
		small, large := map[uint32]uint64{}, map[uint32]uint64{}
		for _, a := range b.board.arrived() {
			last := small
			if a.data > nvme.KVForwardHeaderSize {
				last = large // arrives when its data does
			}
			if a.seq <= last[a.nsid] {
				t.Fatalf("namespace %d: %d came behind %d", a.nsid, a.seq, last[a.nsid])
			}
			last[a.nsid] = a.seq
		}
	})
}

// TestAFullQueueHoldsUpNoOther: kept Forwards have what they may have of their queue, and all else goes on. The
// Forwards that wait are sent in order when there is room.
func TestAFullQueueHoldsUpNoOther(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		b.board.keeps(isForward)
		const depth, extra = 8, 5
		r := w.rig(t, func(c *peers.Config) { c.QueueDepth = depth }, b)
		r.see(b)
		r.awaitConnected(t, "b")
		for i := range depth + extra {
			r.send(r.forward(0, uint64(i+1), nvme.KVForwardHeaderSize))
		}
		eventually(t, "the queue is full", func() bool { return b.board.keeping() == forwards(depth) })
		r.send(r.message(nvme.CmdKVShip, 0, 100, 64), r.message(nvme.CmdKVFetch, 0, 101, 4096),
			r.message(nvme.CmdKVDurable, 0, 102, 0), r.message(nvme.CmdKVSync, 0, 103, 0))
		for _, c := range r.sink.await(t, 4) {
			if c.Lost || !c.Status.OK() || c.Tag < 100 {
				t.Errorf("command %d: lost %t, %v", c.Tag, c.Lost, c.Status)
			}
		}
		b.board.release()
		r.sink.await(t, depth+extra)
		seq := uint64(0)
		for _, a := range b.board.arrived() {
			if a.opcode == nvme.CmdKVForward {
				if seq++; a.seq != seq {
					t.Errorf("Forward %d came in the place of %d", a.seq, seq)
				}
			}
		}
	})
}

// TestASlowNetwork: a socket that is full is written to again when it takes more, although nothing is received.
func TestASlowNetwork(t *testing.T) {
	t.Parallel()
	w := newWorld(t, false)
	w.slow = true
	b := w.box(t, "b", 1)
	r := w.rig(t, nil, b)
	r.see(b)
	r.awaitConnected(t, "b")
	for range 3 {
		r.send(r.forward(0, 5, maxValue))
		if c := r.sink.await(t, 1)[0]; c.Lost || !c.Status.OK() {
			t.Fatalf("lost %t, %v", c.Lost, c.Status)
		}
	}
	for _, a := range b.board.arrived() {
		if a.sum != byte(5*maxValue&0xff) {
			t.Error("other data has arrived than was sent")
		}
	}
}

// TestALostConnectionEndsAllCommandsAtOnce: those that are kept, and those that wait. Then the node is connected again.
func TestALostConnectionEndsAllCommandsAtOnce(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 2)
		const depth, n = 16, 40
		r := w.rig(t, func(c *peers.Config) { c.QueueDepth = depth }, b)
		r.see(b)
		r.awaitConnected(t, "b")
		for round := range 3 {
			b.board.keeps(everything)
			for i := range n {
				r.send(r.forward(view.PartitionID(i%2), uint64(i+1), nvme.KVForwardHeaderSize+100*i))
			}
			r.send(r.message(nvme.CmdKVShip, 0, n+1, 64), r.message(nvme.CmdKVFetch, 1, n+2, 4096))
			eventually(t, "all queues have commands", func() bool { return b.board.keeping() == forwards(depth)+2 })
			b.cut()
			for _, c := range r.sink.await(t, n+2) {
				if !c.Lost {
					t.Errorf("round %d: command %d ends with %v", round, c.Tag, c.Status)
				}
			}
			if l := <-r.lost; l.Silent > wait {
				t.Errorf("round %d: a node that has closed the connection was silent for %v", round, l.Silent)
			}
			b.board.release()
			r.awaitConnected(t, "b")
			r.send(r.forward(0, 1, 64))
			if c := r.sink.await(t, 1)[0]; c.Lost || !c.Status.OK() {
				t.Fatalf("round %d: after the loss: lost %t, %v", round, c.Lost, c.Status)
			}
		}
	})
}

// TestANodeThatRefusesIsAskedAgain: this node is not among its nodes. That is logged once.
func TestANodeThatRefusesIsAskedAgain(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		b.State.Subsystems[0].AllowAnyHost, b.State.Subsystems[0].Nodes = true, nil
		b.reload()
		r := w.rig(t, nil, b)
		r.see(b)
		eventually(t, "the refusal is logged", func() bool { return r.log.count("does not offer replication to") == 1 })
		r.send(r.forward(0, 1, 64))
		if c := r.sink.await(t, 1)[0]; !c.Lost {
			t.Errorf("a command without a connection: %v", c.Status)
		}
		b.State.Subsystems[0].AllowAnyHost = false // now it does not even connect
		b.reload()
		eventually(t, "the other refusal is logged", func() bool { return r.log.count("Connect Invalid Host") == 1 })
		b.State.Subsystems[0].Nodes = nodeA
		b.reload()
		r.awaitConnected(t, "b")
		for _, what := range []string{"does not offer replication to", "Connect Invalid Host"} {
			if n := r.log.count(what); n != 1 {
				t.Errorf("%d lines say %q, want 1", n, what)
			}
		}
		r.send(r.forward(0, 1, 64))
		if c := r.sink.await(t, 1)[0]; c.Lost {
			t.Error("lost on a connection that is there")
		}
	})
}

// TestAPartitionThatANodeDoesNotHaveIsLost until the node has it.
func TestAPartitionThatANodeDoesNotHaveIsLost(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		r := w.rig(t, nil, b)
		late := partitionID("b", 7)
		r.SetView(mapOf(place{"b", b.ids[0]}, place{"b", late}, place{"a", partitionID("a", 0)}))
		r.awaitConnected(t, "b")
		// Partition 2 is this node's own, and 3 is none of the view.
		r.send(r.forward(0, 1, 64), r.forward(1, 2, 64), r.forward(2, 3, 64), r.forward(3, 4, 64))
		for _, c := range r.sink.await(t, 4) {
			if c.Lost != (c.Tag != 1) {
				t.Errorf("command %d: lost %t", c.Tag, c.Lost)
			}
		}
		b.publish(b.ids[0], late)
		b.reload()
		r.awaitConnected(t, "b")
		r.send(r.forward(1, 5, 64))
		if c := r.sink.await(t, 1)[0]; c.Lost || !c.Status.OK() {
			t.Errorf("to the new partition: lost %t, %v", c.Lost, c.Status)
		}
		if a := b.board.arrived(); a[len(a)-1].nsid != 12 {
			t.Errorf("it came to namespace %d, want 12", a[len(a)-1].nsid)
		}
		// The namespaces change their numbers: a command with an old one is lost.
		b.publish(late)
		b.reload()
		for c := r.forward(1, 6, 64); ; {
			r.send(c)
			if r.sink.await(t, 1); !c.Lost {
				if !c.Status.OK() {
					t.Errorf("to the partition with another number: %v", c.Status)
				}
				break
			}
			r.awaitConnected(t, "b")
		}
	})
}

// TestAPartitionMovesWithTheView to another node. A node that has none any more is disconnected.
func TestAPartitionMovesWithTheView(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b, c := w.box(t, "b", 1), w.box(t, "c", 1)
		r := w.rig(t, nil, b, c)
		r.SetView(mapOf(place{"b", b.ids[0]}))
		r.awaitConnected(t, "b")
		b.board.keeps(everything)
		r.send(r.forward(0, 1, 64))
		eventually(t, "the Forward has arrived", func() bool { return b.board.keeping() == 1 })
		r.SetView(mapOf(place{"c", c.ids[0]}))
		if x := r.sink.await(t, 1)[0]; !x.Lost {
			t.Errorf("a command to a node that is not in the view: %v", x.Status)
		}
		r.awaitConnected(t, "c")
		r.send(r.forward(0, 2, 64))
		if x := r.sink.await(t, 1)[0]; x.Lost || len(c.board.arrived()) != 1 {
			t.Errorf("lost %t; %d messages have arrived at the other node", x.Lost, len(c.board.arrived()))
		}
		// A second partition of a node that is connected.
		c.publish(c.ids[0], partitionID("c", 1))
		c.reload()
		r.SetView(mapOf(place{"c", c.ids[0]}, place{"c", partitionID("c", 1)}))
		r.awaitConnected(t, "c")
		r.send(r.forward(1, 3, 64))
		if x := r.sink.await(t, 1)[0]; x.Lost {
			t.Error("lost to the second partition")
		}
	})
}

// TestConnectedIsCalledForAPartitionThatTheViewAdds, also if its namespace is known already: what was sent to it before
// is lost.
func TestConnectedIsCalledForAPartitionThatTheViewAdds(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 2)
		r := w.rig(t, nil, b)
		r.SetView(mapOf(place{"b", b.ids[0]}))
		r.awaitConnected(t, "b")
		r.send(r.forward(1, 1, 64))
		if c := r.sink.await(t, 1)[0]; !c.Lost {
			t.Errorf("to a partition that is not in the view: %v", c.Status)
		}
		r.see(b)
		r.awaitConnected(t, "b")
		r.send(r.forward(1, 2, 64))
		if c := r.sink.await(t, 1)[0]; c.Lost || !c.Status.OK() {
			t.Errorf("lost %t, %v", c.Lost, c.Status)
		}
	})
}

// TestCloseEndsWhatIsOutstanding, also that to a node that does not answer, within a bound.
func TestCloseEndsWhatIsOutstanding(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		for _, frozen := range []bool{false, true} {
			t.Run(fmt.Sprintf("frozen=%t", frozen), func(t *testing.T) {
				b := w.box(t, "b", 1)
				b.board.keeps(everything)
				r := w.rig(t, func(c *peers.Config) {
					c.QueueDepth = 8
					c.Timeout, c.KATO = time.Hour, time.Hour
				}, b)
				r.see(b)
				r.awaitConnected(t, "b")
				for i := range 20 {
					r.send(r.forward(0, uint64(i+1), 64))
				}
				eventually(t, "the queue is full", func() bool { return b.board.keeping() == forwards(8) })
				b.freeze(frozen)
				closed := make(chan struct{})
				go func() {
					r.Close()
					close(closed)
				}()
				select {
				case <-closed:
				case <-time.After(wait):
					t.Fatal("Close does not return")
				}
				if n := r.sink.count(); n != 20 {
					t.Errorf("%d of 20 commands have ended when Close returns", n)
				}
				r.sink.await(t, 20)
				r.send(r.forward(0, 1, 64))
				if c := r.sink.await(t, 1)[0]; !c.Lost {
					t.Errorf("after Close: %v", c.Status)
				}
			})
		}
	})
}

// TestANodeThatDoesNotAnswerIsGivenUp: it is there, and keeps what it should answer.
func TestANodeThatDoesNotAnswerIsGivenUp(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		r := w.rig(t, func(c *peers.Config) { c.Timeout = 1500 * time.Millisecond }, b)
		r.see(b)
		r.awaitConnected(t, "b")
		b.board.keeps(everything)
		r.send(r.forward(0, 1, 64), r.message(nvme.CmdKVDurable, 0, 2, 0))
		for _, c := range r.sink.await(t, 2) {
			if !c.Lost {
				t.Errorf("command %d: %v", c.Tag, c.Status)
			}
		}
		b.board.release()
		r.awaitConnected(t, "b")
		if r.log.count("got no answer") != 1 {
			t.Error("the log does not say that there was no answer")
		}
	})
}

// TestHowLongCommandsMayBeKept: Forwards for any time, but not all of a queue, others for Timeout, and what waits for a
// drive for eight times as long.
func TestHowLongCommandsMayBeKept(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		const depth = 4
		r := w.rig(t, func(c *peers.Config) {
			c.Timeout, c.KATO, c.QueueDepth, c.Hold = time.Hour, time.Hour, depth, time.Millisecond
		}, b)
		r.see(b)
		r.awaitConnected(t, "b")
		send := func(kept int, cmds ...*peers.Command) {
			t.Helper()
			r.send(cmds...)
			eventually(t, "the commands are kept", func() bool { return b.board.keeping() == kept })
		}
		given := func(n int) {
			t.Helper()
			for _, c := range r.sink.await(t, n) {
				if !c.Lost {
					t.Errorf("command %d: %v", c.Tag, c.Status)
				}
			}
			b.board.release()
			r.awaitConnected(t, "b")
			b.board.keeps(everything)
		}
		nothing := func(when string) {
			t.Helper()
			if n := r.sink.count(); n != 0 {
				t.Fatalf("%d commands have ended %s", n, when)
			}
		}
		b.board.keeps(everything)
		for i, op := range []uint8{nvme.CmdKVDurable, nvme.CmdKVSync, nvme.CmdKVShip, nvme.CmdKVCompare,
			nvme.CmdKVFetch} {
			size, limit := 0, uint32(4)
			if i > 1 {
				size, limit = 4096, 32
			}
			send(1, r.message(op, 0, 1, size))
			r.Advance("b", limit)
			nothing("in time")
			r.Advance("b", 1)
			given(1)
		}
		var full []*peers.Command
		for i := range forwards(depth) {
			full = append(full, r.forward(0, uint64(i+1), 64))
		}
		send(forwards(depth), full...)
		r.Advance("b", 100)
		nothing("although only Forwards are outstanding")
		send(forwards(depth), r.forward(0, depth, 64))
		r.Advance("b", 4)
		nothing("in time")
		r.Advance("b", 1)
		given(depth)
	})
}

// TestASilentNodeIsGivenUp by its keep-alive, though only Forwards are outstanding; and it is connected again when it
// is back.
func TestASilentNodeIsGivenUp(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		r := w.rig(t, func(c *peers.Config) { c.KATO = 2 * time.Second }, b)
		r.see(b)
		r.awaitConnected(t, "b")
		b.board.keeps(everything)
		r.send(r.forward(0, 1, 64))
		eventually(t, "the Forward is kept", func() bool { return b.board.keeping() == 1 })
		b.freeze(true)
		if c := r.sink.await(t, 1)[0]; !c.Lost {
			t.Errorf("a command to a silent node: %v", c.Status)
		}
		if l := <-r.lost; l.Silent < 2*time.Second || l.Silent > 3*time.Second {
			t.Errorf("the node was silent for %v, want KATO, or half of that longer", l.Silent)
		} else if l.Certain != 2*time.Second {
			t.Errorf("the node was certainly out of reach for %v, want KATO", l.Certain)
		}
		b.board.release()
		b.freeze(false)
		r.awaitConnected(t, "b")
	})
}

// TestAPeerThatAcceptsAndIsSilentCostsLittle: attempts to connect end after Timeout.
func TestAPeerThatAcceptsAndIsSilentCostsLittle(t *testing.T) {
	t.Parallel()
	l := loopback.Listen(t)
	var mu sync.Mutex
	var conns []net.Conn
	defer func() {
		l.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, c := range conns {
			c.Close()
		}
	}()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
		}
	}()
	r := newRig(t, func(c *peers.Config) { c.Timeout = 100 * time.Millisecond },
		peers.Node{Name: "b", Address: l.Addr().String(), SubNQN: "nqn.2026-11.example.jbofd:test"})
	r.SetView(mapOf(place{"b", partitionID("b", 0)}))
	eventually(t, "it was tried again", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(conns) >= 3
	})
	if n := r.log.count("cannot be reached"); n != 1 {
		t.Errorf("%d lines say that the node cannot be reached, want 1", n)
	}
	r.send(r.forward(0, 1, 64))
	if c := r.sink.await(t, 1)[0]; !c.Lost {
		t.Errorf("a command to it: %v", c.Status)
	}
}

// TestACommandThatCannotBeSentIsRefused: its data does not fit its opcode. Those around it are sent.
func TestACommandThatCannotBeSentIsRefused(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		r := w.rig(t, nil, b)
		r.see(b)
		r.awaitConnected(t, "b")
		bad := r.message(nvme.CmdKVSync, 0, 2, 0)
		bad.Data = make([]byte, 64)
		r.send(r.forward(0, 1, 64), bad, r.forward(0, 3, 64))
		for _, c := range r.sink.await(t, 3) {
			want := nvme.Success
			if c == bad {
				want = nvme.InvalidField | nvme.DNR
			}
			if c.Lost || c.Status != want {
				t.Errorf("command %d: lost %t, %v", c.Tag, c.Lost, c.Status)
			}
		}
	})
}

// TestConfigurationsThatAreRefused name what is wrong.
func TestConfigurationsThatAreRefused(t *testing.T) {
	good := peers.Node{Name: "b", Address: "127.0.0.1:4420", SubNQN: "nqn.2026-11.example.jbofd:test"}
	for what, change := range map[string]func(*peers.Config){
		"host NQN":          func(c *peers.Config) { c.HostNQN = "" },
		"name of a node":    func(c *peers.Config) { c.Nodes = append(c.Nodes, good) },
		"subsystem of node": func(c *peers.Config) { c.Nodes[0].SubNQN = "" },
		"address of node":   func(c *peers.Config) { c.Nodes[0].Address = "" },
		"a time is":         func(c *peers.Config) { c.KATO = -1 },
		"at most MaxPause":  func(c *peers.Config) { c.MinPause = time.Hour },
	} {
		cfg := peers.Config{Name: "a", HostNQN: hostNQN, Nodes: []peers.Node{good}}
		change(&cfg)
		if p, err := peers.New(cfg); err == nil {
			p.Close()
			t.Errorf("%s: accepted", what)
		} else if !contains(err, what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
