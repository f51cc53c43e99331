package replicas_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/buildtags"
	"jbofd/internal/nvme"
	"jbofd/internal/peers"
	"jbofd/internal/replicas"
)

// couriers carry the commands between the nodes of a rig in order, and allocate nothing.
type couriers struct {
	g *rig
	// going has what is on its way to each node, back what has been done, free what can be used.
	going      []chan *parcel
	back, free chan *parcel
	// hosts are the NQNs of the nodes.
	hosts []string
	// holds: Forwards do not arrive, but are held.
	holds atomic.Bool
	held  chan *parcel
}

// parcel is a command on its way.
type parcel struct {
	replicas.Request
	c   *peers.Command
	sqe nvme.SQE
	of  *couriers
	buf []byte
}

const parcels = 1024

// hire makes couriers, which begin to carry at once. Nothing may be under way.
func (g *rig) hire() *couriers {
	k := &couriers{g: g, back: make(chan *parcel, parcels), free: make(chan *parcel, parcels),
		held: make(chan *parcel, parcels)}
	for range parcels {
		k.free <- &parcel{of: k, buf: make([]byte, 8<<10)}
	}
	for _, n := range g.nodes {
		k.hosts = append(k.hosts, hostNQN(fmt.Sprint("n", n.id)))
		going := make(chan *parcel, parcels)
		k.going = append(k.going, going)
		g.done.Go(func() {
			var b replicas.Batch
			for p := range going {
				b.Add(&p.Request)
				n.r.Submit(&b)
			}
		})
	}
	g.done.Go(func() {
		for p := range k.back {
			c := p.c
			c.Lost, c.Status, c.Result, c.Received = false, p.Status, p.Result, 0
			if p.sqe.Opcode() == nvme.CmdKVShip {
				c.Received, c.Result = copy(c.Data, p.Value[:p.Bytes]), uint64(p.ValueLen)
			}
			k.free <- p
			if c.Sink.PeerDone(c) {
				c.Sink.Kick()
			}
		}
	})
	g.couriers.Store(k)
	return k
}

// dismiss ends the couriers when nothing is under way.
func (k *couriers) dismiss() {
	for range parcels {
		<-k.free
	}
	k.g.couriers.Store(nil)
	for _, going := range k.going {
		close(going)
	}
	close(k.back)
}

// carry takes a command of a node.
func (k *couriers) carry(from int, c *peers.Command) {
	p := <-k.free
	p.c, p.sqe = c, c.SQE
	p.Kind, p.SQE, p.Host, p.Sink, p.Value = replicas.Node, &p.sqe, k.hosts[from], p, p.buf[:len(c.Data)]
	k.g.carried[p.sqe.Opcode()].Add(1)
	if p.sqe.Opcode() == nvme.CmdKVForward {
		copy(p.Value, c.Data)
		if k.holds.Load() {
			k.held <- p
			return
		}
	}
	k.going[c.To] <- p
}

// ReplicaDone implements replicas.Sink.
func (p *parcel) ReplicaDone(*replicas.Request) bool {
	p.of.back <- p
	return false
}

// Kick implements replicas.Sink.
func (p *parcel) Kick() {}

// TestReplicatedWritesAndShippedReadsAllocateNothing at any of three nodes with real stores.
func TestReplicatedWritesAndShippedReadsAllocateNothing(t *testing.T) {
	if buildtags.Race {
		t.Skip("the race detector allocates")
	}
	g := setup{nodes: 3, copies: 3, ranges: 1, atOnce: true}.rig(t)
	g.full(time.Minute)
	g.frozen.Store(true)
	h, value := newHost(), make([]byte, 4096)
	chain := g.chain([]byte("key"))
	h.put("key", "value")
	h.want(chain[0], nvme.Success, "")
	k := g.hire()
	const ops = 200
	// least is the least that some rounds allocate: what else the process does differs.
	least := func(what string, opcode uint8, commands int64, op func()) {
		t.Helper()
		round := func() {
			for range ops {
				op()
			}
		}
		round()
		n := float64(ops)
		before, rounds := g.carried[opcode].Load(), int64(0)
		for range 5 {
			n = min(n, testing.AllocsPerRun(1, round))
			rounds += 2
		}
		if sent := g.carried[opcode].Load() - before; sent != rounds*ops*commands {
			t.Errorf("%s: %d commands for %d", what, sent, rounds*ops)
		}
		if n > ops/10 {
			t.Errorf("%s: %v allocations for %d", what, n, ops)
		}
		t.Logf("%s: %v allocations for %d", what, n, ops)
	}
	ask := func() {
		if h.ask(chain[0]); !h.Status.OK() {
			t.Fatalf("the request ends with %v", h.Status)
		}
	}
	least("writes", nvme.CmdKVForward, 2, func() {
		h.put("key", "")
		h.Value = value
		ask()
	})
	k.holds.Store(true)
	under := newHost()
	under.put("key", "later")
	under.Sink = under
	var b replicas.Batch
	b.Add(&under.Request)
	chain[0].r.Submit(&b)
	forward := <-k.held // so the key is dirty
	key, buf := crrsKey("key"), make([]byte, len(value))
	least("shipped reads", nvme.CmdKVShip, 1, func() {
		h.Request = replicas.Request{Kind: replicas.Read, Key: key, Value: buf}
		if ask(); h.Bytes != len(value) {
			t.Fatalf("%d bytes are read", h.Bytes)
		}
	})
	k.holds.Store(false)
	k.going[forward.c.To] <- forward
	if <-under.done; !under.Status.OK() {
		t.Errorf("the write under way ends with %v", under.Status)
	}
	k.dismiss()
}
