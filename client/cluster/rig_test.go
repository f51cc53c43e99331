package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/telemetry"
	"jbofd/internal/testutil/loopback"
	"jbofd/internal/uuid"
)

const (
	testNQN    = "nqn.2026-11.example.jbofd:cluster"
	testRanges = 16
	testSeed   = 0x1234_5678_9abc
	testValue  = 4096
)

// rig is a cluster of nodes with a partition each. The nodes are targets over TCP. Their partitions are one model of a
// store that never loses anything: each node judges by the map that it was told of, and does what its script says.
type rig struct {
	t     testing.TB
	nodes []*testNode

	mu     sync.Mutex
	epoch  uint64
	chains [][]int // nodes, from ChainHead to ChainTail, of each range
	epochs []uint32
	values map[string]object
	// done has the results of writes by their identity, applied how often each was carried out.
	done    map[[2]uint64]uint64
	applied map[[2]uint64]int
	// answered is what clients have said: no write with a lower sequence number comes.
	answered map[writer]uint64
	// kept are the identities that stores keep of a key: those that are not answered. mostKept is how many there were.
	kept     map[writer][]uint64
	mostKept int
	version  uint64
}

type object struct {
	value   string
	version uint64
}

// verdict is what a script says of a command.
type verdict uint8

const (
	carryOut verdict = iota
	// refuse: answer with the status; nothing is done.
	refuse
	// interrupt: carry out, and answer with the status.
	interrupt
	// hold: neither answer nor carry out. holdDone: carry out, and do not answer.
	hold
	holdDone
)

// script judges a command before it is carried out, with the rig's lock held.
type script func(opcode uint8) (verdict, nvme.Status)

// testNode is a node.
type testNode struct {
	g       *rig
	id      int
	nsid    uint32
	address string
	pool    *bufpool.Pool
	device  *mem.Device
	drive   *drive.Drive
	service *target.Service
	tel     *telemetry.Telemetry
	server  *serve.Server // nil: the node is down
	// What follows is guarded by rig.mu. chains and epochs are the view of the node.
	chains [][]int
	epochs []uint32
	script script
	held   []*executor.Command
	// damaged: the node says of each part of a range that something is lost.
	damaged bool
	seen    map[uint8]int
}

func newRig(t testing.TB, nodes, copies int) *rig {
	g := &rig{t: t, epoch: 1, values: map[string]object{}, done: map[[2]uint64]uint64{}, applied: map[[2]uint64]int{},
		answered: map[writer]uint64{}, kept: map[writer][]uint64{}}
	for r := range testRanges {
		var c []int
		for i := range copies {
			c = append(c, (r+i)%nodes)
		}
		g.chains, g.epochs = append(g.chains, c), append(g.epochs, 1)
	}
	for i := range nodes {
		g.nodes = append(g.nodes, g.newNode(i))
	}
	g.publish()
	t.Cleanup(g.end)
	return g
}

func (g *rig) newNode(id int) *testNode {
	n := &testNode{g: g, id: id, nsid: uint32(10 + id), seen: map[uint8]int{}}
	var err error
	if n.pool, err = bufpool.New(bufpool.Config{TotalBytes: 32 << 20}); err != nil {
		g.t.Fatal(err)
	}
	dev, err := mem.Open(mem.Config{Name: fmt.Sprint("m", id), SizeBytes: 1 << 20})
	if err != nil {
		g.t.Fatal(err)
	}
	if n.drive, err = drive.New(drive.Config{Device: dev, Pool: n.pool}); err != nil {
		g.t.Fatal(err)
	}
	n.device = dev
	machine := nvmeof.New(nvmeof.Config{Firmware: "test", Limits: testLimits, InCapsuleBytes: 8192, MaxEntries: 129,
		MaxIOQueues: 64, MaxControllers: 1024, MaxHosts: 1024, MinKATOMS: 100, DiscoveryIdleMS: 120000})
	n.service = target.New(target.Config{Target: machine, SSDs: []*drive.Drive{n.drive}, Pool: n.pool,
		Log: slog.New(slog.DiscardHandler)})
	n.service.Register(nvmeof.KindReplica, n)
	n.tel = telemetry.New(telemetry.Options{Version: "test", Node: "test"})
	n.start(loopback.Listen(g.t))
	return n
}

var testLimits = nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 64 << 10}

// start serves the node at a listener.
func (n *testNode) start(l net.Listener) {
	srv, err := serve.New(serve.Config{
		Machine: tcp.Config{InCapsuleBytes: 8192, MaxH2CDataBytes: 1 << 20, Limits: testLimits},
		Admission: connection.NewAdmission(connection.AdmissionLimits{Connections: 1024, PerHost: 512, Pending: 256,
			PendingPerAddress: 256}, n.tel), MaxSockets: 2048, ReceiveBytes: 128 << 10, BacklogBytes: 1 << 20,
		HandshakeTimeout: 10 * time.Second, StallTimeout: 10 * time.Second, SpinFor: 50 * time.Microsecond,
	}, n.service, n.tel, slog.New(slog.DiscardHandler))
	if err != nil {
		n.g.t.Fatal(err)
	}
	port := serve.PortFor(1, l, false)
	n.service.Apply(nvmeof.State{Ports: []nvmeof.Port{port}, Subsystems: []nvmeof.SubsystemState{{NQN: testNQN,
		Serial: "1", Model: "test", AllowAnyHost: true, Namespaces: []*nvmeof.Namespace{{NSID: n.nsid, CSI: nvme.CSIKV,
			Executor: nvmeof.KindReplica, SizeBytes: 1 << 30, MaxValueBytes: testValue, UUID: partitionID(n.id),
			ANAGroup: 1, ANAState: nvme.ANAStateOptimized}}}}})
	srv.Serve(l, port)
	n.server, n.address = srv, l.Addr().String()
}

func partitionID(node int) uuid.UUID { return uuid.UUID{7, byte(node)} }

// stop ends the node: its connections break.
func (n *testNode) stop() {
	if n.server == nil {
		return
	}
	n.release(nvme.AbortedSQDeletion)
	n.server.Close()
	n.server = nil
}

// restart serves a node that was stopped at its address.
func (n *testNode) restart() {
	l, err := net.Listen("tcp", n.address)
	if err != nil {
		n.g.t.Fatal(err)
	}
	n.start(l)
}

// release answers all commands that are held.
func (n *testNode) release(st nvme.Status) {
	n.g.mu.Lock()
	held := n.held
	n.held, n.script = nil, nil
	n.g.mu.Unlock()
	for _, c := range held {
		c.Fail(st)
		if p := c.Port; p.Done(c) {
			p.Kick()
		}
	}
}

func (g *rig) end() {
	for _, n := range g.nodes {
		n.stop()
		n.service.Close()
		if err := errors.Join(n.drive.Close(), n.device.Close()); err != nil {
			g.t.Error(err)
		}
		n.pool.CloseTest(g.t)
	}
}

// setScript sets the script of a node; nil: carry out everything.
func (n *testNode) setScript(s script) {
	n.g.mu.Lock()
	defer n.g.mu.Unlock()
	n.script = s
}

// heldCommands is how many commands are held.
func (n *testNode) heldCommands() int {
	n.g.mu.Lock()
	defer n.g.mu.Unlock()
	return len(n.held)
}

func (n *testNode) count(opcode uint8) int {
	n.g.mu.Lock()
	defer n.g.mu.Unlock()
	return n.seen[opcode]
}

// change makes a new view, of which publish tells the nodes.
func (g *rig) change(f func(r int, chain []int) []int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.epoch++
	g.epochs, g.chains = append([]uint32(nil), g.epochs...), append([][]int(nil), g.chains...)
	for r, c := range g.chains {
		g.chains[r] = f(r, append([]int(nil), c...))
		g.epochs[r]++
	}
}

// without returns a chain without a node.
func without(chain []int, node int) (out []int) {
	for _, n := range chain {
		if n != node {
			out = append(out, n)
		}
	}
	return out
}

// publish tells nodes of the present view, all of them if none is named.
func (g *rig) publish(nodes ...int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(nodes) == 0 {
		for i := range g.nodes {
			nodes = append(nodes, i)
		}
	}
	for _, i := range nodes {
		n := g.nodes[i]
		n.chains, n.epochs = g.chains, g.epochs
		n.service.SetClusterMap(testNQN, g.encode())
	}
}

func (g *rig) encode() nvme.ClusterMap {
	b := nvme.NewClusterMap(nvme.ClusterMapHeader{Cluster: uuid.UUID{9}, Epoch: g.epoch, HashSeed: testSeed,
		Ranges: testRanges, Partitions: len(g.nodes), Members: len(g.nodes)})
	for r, c := range g.chains {
		var members []uint16
		for _, n := range c {
			members = append(members, uint16(n))
		}
		b.SetRange(r, g.epochs[r], members)
	}
	for i, n := range g.nodes {
		b.SetPartition(i, partitionID(i), uint16(i))
		b = b.AppendNode(nvme.ClusterMapNode{Name: fmt.Sprint("n", i), Address: "tcp://" + n.address, SubNQN: testNQN})
	}
	return b.Seal()
}

// rangeOf is the number of the range of a key.
func rangeOf(key []byte) int { return int(nvme.KVPosition(testSeed, key) >> 60) }

// keyOf returns a key whose ChainHead is a node.
func (g *rig) keyOf(head int, number int) []byte {
	for i := 0; ; i++ {
		key := fmt.Appendf(nil, "key %d %d", number, i)
		g.mu.Lock()
		c := g.chains[rangeOf(key)]
		g.mu.Unlock()
		if len(c) > 0 && c[0] == head {
			return key
		}
	}
}

// most is how often the identity of a write that was carried out most often was.
func (g *rig) most() (times int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, n := range g.applied {
		times = max(times, n)
	}
	return times
}

// open opens a Store of all nodes.
func (g *rig) open(change ...func(*Options)) *Store {
	g.t.Helper()
	o := Options{SubNQN: testNQN, Timeout: 30 * time.Second, MaxTries: 10_000, MapInterval: time.Hour,
		Connection: client.Options{ReconnectDelay: 5 * time.Millisecond, ConnectTimeout: 20 * time.Second}}
	for _, n := range g.nodes {
		o.Addresses = append(o.Addresses, n.address)
	}
	for _, f := range change {
		f(&o)
	}
	s, err := Open(g.t.Context(), o)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() {
		for _, n := range g.nodes {
			n.release(nvme.AbortedSQDeletion) // so that Close need not wait
		}
		if err := s.Close(); err != nil && !strings.Contains(err.Error(), "connection") {
			g.t.Error(err)
		}
	})
	return s
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// until waits until f is true.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// testNode is an executor.Executor.

// Ops implements executor.Executor.
func (n *testNode) Ops() []string { return []string{"op"} }

// NewContext implements executor.Executor.
func (n *testNode) NewContext(*executor.Command) any { return &bufpool.Waiter{} }

// Abort implements executor.Executor.
func (n *testNode) Abort(c *executor.Command) bool { return false }

// NewBatch implements executor.Executor.
func (n *testNode) NewBatch() executor.Batch { return &testBatch{n: n} }

type testBatch struct {
	n       *testNode
	notices executor.Notices
}

// Begin implements executor.Batch.
func (b *testBatch) Begin(c *executor.Command) {
	n, g := b.n, b.n.g
	if need := int(max(c.Plan.AnswerBytes, c.Plan.ToController)); c.Buf.IsZero() && need > 0 {
		w := c.Context.(*bufpool.Waiter)
		w.Size = need
		if !n.pool.GetOrWait(c.Account, w) {
			panic("no memory")
		}
		c.Buf, w.Buf = w.Buf, bufpool.Buf{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	n.seen[c.SQE.Opcode()]++
	v, st := carryOut, nvme.Success
	if n.script != nil {
		v, st = n.script(c.SQE.Opcode())
	}
	c.Fail(st)
	if v != refuse && v != hold {
		n.carryOut(c)
		if v == interrupt {
			c.Fail(st)
		}
	}
	if v == hold || v == holdDone {
		n.held = append(n.held, c)
		return
	}
	b.notices.Done(c)
}

// DataReady implements executor.Batch: all data comes in capsules.
func (b *testBatch) DataReady(*executor.Command) { panic("data that was not fetched") }

// Submit implements executor.Batch.
func (b *testBatch) Submit() { b.notices.Send() }

// carryOut carries out a command. rig.mu is held.
func (n *testNode) carryOut(c *executor.Command) {
	if c.SQE.Opcode() == nvme.CmdKVScan {
		n.scan(c)
		return
	}
	g, k := n.g, c.SQE.KV()
	var buf [nvme.MaxKVKey]byte
	key := k.Key(&buf)
	r := rangeOf(key)
	write := nvme.KVVersioned(c.SQE.Opcode())
	serves := false
	for i, m := range n.chains[r] {
		serves = serves || m == n.id && (i == 0 || !write)
	}
	o, exists := g.values[string(key)]
	switch {
	case !serves:
		c.Fail(nvme.KVWrongView)
		c.Result = uint64(n.epochs[r])
	case write:
		n.write(c, string(key), o, exists)
	case !exists:
		c.Fail(nvme.KeyDoesNotExist | nvme.DNR)
	default:
		data := c.Buf.B[:c.Plan.AnswerBytes]
		if c.SQE.Opcode() == nvme.CmdKVXRetrieve {
			h := (*nvme.KVReadHeader)(data)
			*h = nvme.KVReadHeader{}
			h.SetVersion(o.version)
			data = data[nvme.KVReadHeaderSize:]
			c.AnswerBytes = nvme.KVReadHeaderSize
		}
		c.Result = uint64(len(o.value))
		if c.SQE.Opcode() != nvme.CmdKVExist {
			c.AnswerBytes += copy(data, o.value)
		}
	}
}

// writer is a client that writes a key.
type writer struct {
	client uint64
	key    string
}

// write carries out an extended Store or Delete.
func (n *testNode) write(c *executor.Command, key string, o object, exists bool) {
	g, data := n.g, c.Buf.B[:c.Plan.ToController]
	h := (*nvme.KVWriteHeader)(data)
	id, w := [2]uint64{h.Client(), h.Sequence()}, writer{h.Client(), key}
	if id[1] < g.answered[w] {
		g.t.Errorf("write %d of %q comes when those before %d are answered", id[1], key, g.answered[w])
	}
	g.answered[w] = max(g.answered[w], h.Answered())
	if v, ok := g.done[id]; ok && h.Flags()&nvme.KVRetry != 0 {
		c.Result = v
		return
	}
	refused := nvme.Success
	switch cond := h.Condition(); {
	case cond == nvme.KVIfAbsent && exists:
		refused = nvme.KeyExists
	case cond == nvme.KVIfPresent && !exists:
		refused = nvme.KeyDoesNotExist
	case cond == nvme.KVIfVersion && h.Version() != o.version:
		refused = nvme.KVVersionMismatch
	}
	if refused != nvme.Success {
		c.Fail(refused | nvme.DNR)
		c.Result = o.version
		return
	}
	g.version++
	g.applied[id]++
	g.kept[w] = append(slices.DeleteFunc(g.kept[w], func(seq uint64) bool { return seq < g.answered[w] }), id[1])
	g.mostKept = max(g.mostKept, len(g.kept[w]))
	g.done[id] = g.version
	c.Result = g.version
	if c.SQE.Opcode() == nvme.CmdKVXStore {
		g.values[key] = object{string(data[nvme.KVWriteHeaderSize:]), g.version}
	} else {
		delete(g.values, key)
	}
}
