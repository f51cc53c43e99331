package replicas_test

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/crrs"
	"jbofd/internal/crrs/linear"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
	"jbofd/internal/peers"
	"jbofd/internal/replicas"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/turn"
	"jbofd/internal/uuid"
)

// rig is a cluster in one process: real stores on drives in memory, nodes that are connected by goroutines, and a
// manager that computes views as that of package cluster does.
type rig struct {
	t     testing.TB
	nodes []*node
	mu    sync.Mutex // guards view, and what the nodes are told of it
	view  *view.View
	stop  chan struct{}
	done  sync.WaitGroup
	moved atomic.Int64 // bytes of batches
	// frozen: the manager computes no views, and tells nobody of one. Authority goes on.
	frozen atomic.Bool
	// freezeAt freezes it with the first view that the function wants, of which the nodes are told.
	freezeAt func(v *view.View) bool
	// forwards has the first Forwards that nodes have got.
	forwards chan *delivery
	// cut are two nodes that do not reach each other.
	cut atomic.Pointer[[2]int]
	// lacks are two nodes of which the first one has no connection to the second one.
	lacks atomic.Pointer[[2]int]
	// apart: the nodes hear of a view one after the other, so that they do not all have the same one for a while.
	apart atomic.Bool
	// restless: there is a newer view all the time, of which the nodes hear before it acts.
	restless atomic.Bool
	// ahead: the nodes always know of a newer view than the one that acts.
	ahead atomic.Bool
	// carried counts the commands between nodes by opcode, completed those that were answered with success.
	carried, completed [256]atomic.Int64
	// repairs counts what Config.Repair was told of.
	repairs [4]atomic.Int64
	// observed counts what Config.Observe was told of, by opcode, and its bytes.
	observed, observedBytes [256]atomic.Int64
	// couriers carry the commands, if they are there.
	couriers atomic.Pointer[couriers]
}

// node is a node with one partition.
type node struct {
	rig   *rig
	id    int
	host  string // the name of its node
	dev   *fault.Device
	part  *partition.Partition
	r     *replicas.Replicas
	alive atomic.Bool
	until atomic.Int64
	inbox []chan *delivery // by sender
	// closed: r is closed already.
	closed bool
	close  []func()
}

// delivery is a command on its way.
type delivery struct {
	replicas.Request
	c        *peers.Command
	sqe      nvme.SQE
	rig      *rig
	answered atomic.Bool
}

const (
	testRanges = 16
	testSeed   = 0x1234_5678_9abc
)

func hostNQN(name string) string { return "nqn.2026-11.example.jbofd:node:test:" + name }

var clockStart = time.Now()

func clock() int64 { return int64(time.Since(clockStart)) + 1 }

func newRig(t testing.TB, nodes, copies int) *rig {
	return setup{nodes: nodes, copies: copies, ranges: testRanges}.rig(t)
}

// setup describes a rig.
type setup struct {
	nodes, copies, ranges int
	// frozen is that of the rig when it begins.
	frozen bool
	// small is the size of the last node's partition; 0: as that of the others.
	small int64
	// neverFull: the replicas are not told that a partition is nearly full.
	neverFull bool
	// atOnce: the drives end each request before they return.
	atOnce bool
	// store, clock and authority are in place of the partition, the clock, and what the manager gives, if they are set.
	store            func(*partition.Partition) replicas.Store
	clock, authority func() int64
	// patience is that of Config; 0: testPatience. dropAfter is also that of Config.
	patience, dropAfter time.Duration
	// silentAfter and answerWithin are also those of Config.
	silentAfter, answerWithin time.Duration
	// onNode is the node of each partition; nil: each has one of its own.
	onNode []int
	// yieldAfter is also that of Config.
	yieldAfter time.Duration
}

func (s setup) rig(t testing.TB) *rig {
	nodes := s.nodes
	g := &rig{t: t, stop: make(chan struct{}), forwards: make(chan *delivery, 100)}
	g.frozen.Store(s.frozen)
	g.view = &view.View{Cluster: uuid.UUID{1}, Epoch: 1, Replicas: s.copies, HashSeed: testSeed,
		Chains: make([]view.Chain, s.ranges), ChainEpochs: make([]uint32, s.ranges)}
	for i := range nodes {
		on := i
		if s.onNode != nil {
			on = s.onNode[i]
		}
		g.view.Nodes = append(g.view.Nodes, view.Node{Name: fmt.Sprint("n", i)})
		g.view.Partitions = append(g.view.Partitions, view.Partition{ID: uuid.UUID{2, byte(i)}, Node: uint16(on),
			Weight: 1})
		size := int64(256 << 20)
		if s.small > 0 && i == nodes-1 {
			size = s.small
		}
		g.nodes = append(g.nodes, g.newNode(s, i, size))
	}
	t.Cleanup(g.end)
	g.done.Go(g.manage)
	for _, n := range g.nodes {
		n.setAlive(true)
	}
	return g
}

func (g *rig) newNode(s setup, id int, size int64) *node {
	n := &node{rig: g, id: id, host: g.view.Nodes[g.view.Partitions[id].Node].Name}
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 64 << 20})
	must(g.t, err)
	dev, err := mem.Open(mem.Config{Name: fmt.Sprint("m", id), SizeBytes: size})
	must(g.t, err)
	n.dev, err = fault.New(dev, fault.Config{})
	must(g.t, err)
	device := ssd.Device(n.dev)
	if s.atOnce {
		device = dev
	}
	d, err := drive.New(drive.Config{Device: device, Pool: pool})
	must(g.t, err)
	var opened atomic.Bool
	n.part, err = partition.Open(partition.Config{Drive: d, Background: 9, Store: kvstore.Config{PartitionBytes: size,
		Format: true, HashSeed: testSeed, UUID: uuid.UUID{2, byte(id)}},
		Damaged: func(d kvstore.Damage) {
			if opened.Load() {
				n.r.Damaged(d)
			}
		}})
	must(g.t, err)
	full := n.part.NearlyFull
	if s.neverFull {
		full = nil
	}
	store := replicas.Store(n.part)
	if s.store != nil {
		store = s.store(n.part)
	}
	if s.clock == nil {
		s.clock = clock
	}
	if s.authority == nil {
		s.authority = n.until.Load
	}
	n.r, err = replicas.New(replicas.Config{Store: store, ID: uuid.UUID{2, byte(id)}, Peers: n, HostNQN: hostNQN,
		Authority: s.authority, Clock: s.clock, Changed: func() {}, Full: full, Pool: pool,
		Observe: func(opcode uint8, bytes int, ns int64, lost bool) {
			if ns < replicas.Untimed || lost && bytes > 0 {
				g.t.Errorf("command %#x took %d ns, with %d bytes; lost: %t", opcode, ns, bytes, lost)
			}
			g.observed[opcode].Add(1)
			g.observedBytes[opcode].Add(int64(bytes))
		},
		Repair:      func(how crrs.RepairOutcome) { g.repairs[how].Add(1) },
		MemoryBytes: 1 << 20, Env: turn.Real, Patience: cmp.Or(s.patience, testPatience),
		DropAfter: s.dropAfter, Drive: d.Stats(), SilentAfter: s.silentAfter, AnswerWithin: s.answerWithin,
		YieldAfter: s.yieldAfter})
	must(g.t, err)
	opened.Store(true)
	for range s.nodes {
		n.inbox = append(n.inbox, make(chan *delivery, 10_000))
	}
	n.close = []func(){
		func() { must(g.t, n.part.Close(30*time.Second)) },
		func() { must(g.t, d.Close()) },
		func() { must(g.t, n.dev.Close()) },
		func() { pool.CloseTest(g.t) },
	}
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (g *rig) end() {
	close(g.stop)
	for _, n := range g.nodes {
		if !n.closed {
			must(g.t, n.r.Close(30*time.Second))
		}
	}
	g.done.Wait()
	for _, n := range g.nodes {
		for _, f := range n.close {
			f()
		}
	}
}

// Send implements replicas.Sender: each command is carried by a goroutine of its own, so that they overtake each other.
func (n *node) Send(b *peers.Batch) {
	for c := b.Take(); c != nil; {
		next := c.Next // c is another one's when it is done
		if k := n.rig.couriers.Load(); k != nil {
			k.carry(n.id, c)
		} else {
			n.carry(c)
		}
		c = next
	}
}

func (n *node) carry(c *peers.Command) {
	to := n.rig.nodes[c.To]
	d := &delivery{c: c, sqe: c.SQE, rig: n.rig}
	d.Kind, d.SQE, d.Host, d.Sink = replicas.Node, &d.sqe, hostNQN(n.host), d
	d.Value = make([]byte, len(c.Data))
	if c.SQE.Opcode() == nvme.CmdKVForward {
		copy(d.Value, c.Data)
	}
	n.rig.carried[c.SQE.Opcode()].Add(1)
	n.rig.done.Go(func() {
		cut, lacks := n.rig.cut.Load(), n.rig.lacks.Load()
		if !n.alive.Load() || !to.alive.Load() || lacks != nil && *lacks == [2]int{n.id, to.id} ||
			cut != nil && (*cut == [2]int{n.id, to.id} || *cut == [2]int{to.id, n.id}) {
			d.lose()
			return
		}
		if d.sqe.Opcode() == nvme.CmdKVForward {
			select {
			case n.rig.forwards <- d:
			default:
			}
		}
		var b replicas.Batch
		b.Add(&d.Request)
		to.r.Submit(&b)
	})
}

func (d *delivery) lose() {
	d.c.Lost = true
	d.back()
}

func (d *delivery) back() {
	if d.c.Sink.PeerDone(d.c) {
		d.c.Sink.Kick()
	}
}

// ReplicaDone implements replicas.Sink.
func (d *delivery) ReplicaDone(q *replicas.Request) bool {
	d.answered.Store(true)
	if q.Status.OK() {
		d.rig.completed[d.sqe.Opcode()].Add(1)
	}
	d.rig.done.Go(func() {
		d.c.Lost, d.c.Status, d.c.Result = false, q.Status, q.Result
		switch d.sqe.Opcode() {
		case nvme.CmdKVFetch:
			d.rig.moved.Add(int64(q.Bytes))
			fallthrough
		case nvme.CmdKVShip, nvme.CmdKVCompare:
			d.c.Received = copy(d.c.Data, d.Value[:min(q.Bytes, len(d.Value))])
		}
		if d.sqe.Opcode() == nvme.CmdKVShip {
			d.c.Result = uint64(q.ValueLen)
		}
		d.back()
	})
	return false
}

func (d *delivery) Kick() {}

func (n *node) setAlive(alive bool) {
	n.rig.mu.Lock()
	defer n.rig.mu.Unlock()
	n.alive.Store(alive)
	if !alive {
		n.until.Store(0)
	}
}

// chain returns the nodes of the chain of a key.
func (g *rig) chain(key []byte) (nodes []*node) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.view.Chains[g.view.RangeOf(position(key))] {
		if e.State == view.Serving || e.State == view.Leaving {
			nodes = append(nodes, g.nodes[e.Partition])
		}
	}
	return nodes
}

// TestWhatAViewTakesIsNotServed: a view that does not act yet takes the ranges from a node. When SetState has returned,
// that answers no more reads, and it does again when a view says so.
func TestWhatAViewTakesIsNotServed(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	g.frozen.Store(true)
	chain, h := g.chain([]byte("key")), newHost()
	h.put("key", "value")
	h.want(chain[0], nvme.Success, "")
	for _, n := range chain {
		h.get("key")
		h.want(n, nvme.Success, "value")
	}
	without := *g.view
	without.Epoch++
	without.Chains = make([]view.Chain, testRanges)
	gone := view.PartitionID(chain[1].id)
	for r, c := range g.view.Chains {
		for _, e := range c {
			if e.Partition != gone {
				without.Chains[r] = append(without.Chains[r], e)
			}
		}
	}
	active, newest := &cluster.Map{View: g.view}, &cluster.Map{View: &without}
	for _, n := range chain {
		n.r.SetState(active, newest)
		h.get("key")
		if n.id == int(gone) {
			h.want(n, nvme.NamespaceNotReady, "")
		} else {
			h.want(n, nvme.Success, "value")
		}
	}
	chain[1].r.SetState(active, active)
	h.get("key")
	h.want(chain[1], nvme.Success, "value")
	// What does not come from the nodes of the chain does nothing, nor what is for a range that is not there, nor what
	// is said in the name of another node's partition.
	number := uint16(g.view.RangeOf(position([]byte("key"))))
	sync := func(host string, number uint16, sender int, want nvme.Status) {
		sqe := nvme.SQE{}
		sqe.SetOpcode(nvme.CmdKVSync)
		k := sqe.KVReplica()
		k.SetEpoch(active.ChainEpochs[min(number, testRanges-1)])
		k.SetRange(number)
		k.SetSender(uint16(sender))
		h.Request = replicas.Request{Kind: replicas.Node, SQE: &sqe, Host: host}
		h.want(chain[0], want, "")
	}
	sync("nqn.2014-08.org.nvmexpress:uuid:stranger", number, chain[1].id, nvme.KVWrongView)
	sync(hostNQN("n0"), testRanges, 0, nvme.KVWrongView)
	sync(hostNQN(chain[2].host), number, chain[1].id, nvme.KVWrongView)
	sync(hostNQN(chain[1].host), number, chain[1].id, nvme.Success)
}

// TestWhatWaitsForOthersCanBeAborted: a write, and a Forward that is kept, wait for a node that is away. They end when
// they are aborted, and the write is there when the node is back.
func TestWhatWaitsForOthersCanBeAborted(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	g.frozen.Store(true)
	chain, h := g.chain([]byte("key")), newHost()
	tail := chain[2]
	tail.alive.Store(false)
	h.put("key", "value")
	h.Sink, h.Tenant = h, 3
	var b replicas.Batch
	b.Add(&h.Request)
	chain[0].r.Submit(&b)
	forward := <-g.forwards
	select {
	case <-h.done:
		t.Fatal("a write is done that the ChainTail does not have")
	case <-time.After(50 * time.Millisecond):
	}
	for i, n := range chain {
		if d := n.r.Dirty(); d != int64(min(1, 2-i)) {
			t.Errorf("%d writes are dirty at member %d of a chain whose ChainTail has none", d, i)
		}
	}
	chain[0].r.Abort(&h.Request)
	if <-h.done; h.Status != nvme.CommandInterrupted {
		t.Errorf("the write ends with %v", h.Status)
	}
	chain[1].r.Abort(&forward.Request)
	for end := time.Now().Add(20 * time.Second); !forward.answered.Load(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a Forward that is kept does not end")
		}
	}
	// As often as it is sent again and lost, there is room for it.
	for range 3 * 128 {
		chain[1].r.NodeReachable(fmt.Sprint("n", tail.id))
		time.Sleep(time.Millisecond / 2)
	}
	tail.alive.Store(true)
	chain[1].r.NodeReachable(fmt.Sprint("n", tail.id))
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if h.get("key"); time.Now().After(end) {
			t.Fatal("the write is never committed")
		}
		if h.ask(tail); h.Status.OK() && string(h.Value[:h.Bytes]) == "value" {
			break
		}
	}
	g.same([]byte("key"))
}

// TestCloseTellsNoWriteThatItWasNotDone: it waits for the ChainTail, and others have it.
func TestCloseTellsNoWriteThatItWasNotDone(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	g.frozen.Store(true)
	chain, h := g.chain([]byte("key")), newHost()
	chain[2].alive.Store(false)
	h.put("key", "value")
	h.Sink, h.Tenant = h, 3
	var b replicas.Batch
	b.Add(&h.Request)
	chain[0].r.Submit(&b)
	kept := []*delivery{<-g.forwards}
	chain[0].closed = true
	closed := make(chan error, 1)
	go func() { closed <- chain[0].r.Close(30 * time.Second) }()
	if <-h.done; h.Status != nvme.CommandInterrupted {
		t.Errorf("the write ends with %v", h.Status)
	}
	// The Forward is lost, as if its connection was closed, as soon as it is kept. It may have been sent a second time,
	// for a Sync from the time when the chain was made.
	for {
		select {
		case err := <-closed:
			must(t, err)
			return
		case d := <-g.forwards:
			kept = append(kept, d)
		case <-time.After(time.Millisecond):
			for _, d := range kept {
				chain[1].r.Abort(&d.Request)
			}
		}
	}
}

// TestHistoriesOfNodesAreLinearizable: clients write and read while nodes are lost and come back.
func TestHistoriesOfNodesAreLinearizable(t *testing.T) {
	g := setup{nodes: 4, copies: 3, ranges: testRanges, yieldAfter: 20 * time.Millisecond}.rig(t)
	g.full(20 * time.Second)
	const clients, keys = 8, 12
	var (
		values  atomic.Uint64
		mu      sync.Mutex
		history = map[int][]linear.Operation{}
		acked   atomic.Int64
		load    sync.WaitGroup
		over    atomic.Bool
	)
	for c := range clients {
		load.Go(func() {
			h := newHost()
			rng := rand.New(rand.NewPCG(rand.Uint64(), uint64(c)))
			seq := uint64(0)
			for !over.Load() {
				k := rng.IntN(keys)
				key := fmt.Appendf(nil, "key%d", k)
				o := linear.Operation{Begin: clock(), End: math.MaxInt64}
				chain := g.chain(key)
				if len(chain) == 0 {
					continue
				}
				h.Request = replicas.Request{Key: crrsKey(string(key))}
				if rng.IntN(2) == 0 {
					n := chain[rng.IntN(len(chain))]
					if !n.alive.Load() {
						continue
					}
					h.Kind, h.Value = replicas.Read, make([]byte, 64)
					h.ask(n)
					switch h.Status.Code() {
					case nvme.Success:
						o.Value = binary.LittleEndian.Uint64(h.Value)
					case nvme.KeyDoesNotExist:
					default:
						continue
					}
				} else {
					seq++
					o.Write, o.Value = true, values.Add(1)
					value := make([]byte, 8+rng.IntN(2000))
					binary.LittleEndian.PutUint64(value, o.Value)
					h.Op, h.Value, h.KeepSeconds = kvstore.Put, value, 600
					h.ID = kvstore.Identity{Client: uint64(c + 1), Seq: seq}
					for tries := 0; tries < 200; tries++ {
						chain = g.chain(key)
						if len(chain) == 0 || !chain[0].alive.Load() {
							time.Sleep(5 * time.Millisecond)
							continue
						}
						h.ask(chain[0])
						if h.Status.OK() {
							acked.Add(1)
							break
						}
						h.ID.Retry = h.ID.Retry || h.Status.Code() == nvme.CommandInterrupted
						time.Sleep(time.Millisecond)
					}
					if !h.Status.OK() {
						mu.Lock()
						history[k] = append(history[k], o)
						mu.Unlock()
						continue
					}
				}
				o.End = clock()
				mu.Lock()
				history[k] = append(history[k], o)
				mu.Unlock()
			}
		})
	}
	for round := range 3 {
		time.Sleep(100 * time.Millisecond)
		n := g.nodes[(round*2+1)%len(g.nodes)]
		n.setAlive(false)
		time.Sleep(100 * time.Millisecond)
		n.setAlive(true)
		for i := range g.nodes {
			g.nodes[i].r.NodeReachable(fmt.Sprint("n", n.id))
			n.r.NodeReachable(fmt.Sprint("n", i))
		}
		g.full(20 * time.Second)
	}
	over.Store(true)
	load.Wait()
	if acked.Load() < 100 {
		t.Errorf("only %d writes were acknowledged", acked.Load())
	}
	for k, ops := range history {
		if err := linear.Check(ops); err != nil {
			t.Errorf("key %d: %v", k, err)
		}
	}
	for k := range keys {
		g.same(fmt.Appendf(nil, "key%d", k))
	}
	t.Logf("%d writes acknowledged, %d bytes moved to members that were filled", acked.Load(), g.moved.Load())
}
