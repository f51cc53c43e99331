package peers_test

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/target/targettest"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/peers"
	"jbofd/internal/testutil/loopback"
	"jbofd/internal/uuid"
)

const (
	// hostNQN is that of node a, which sends.
	hostNQN  = "nqn.2026-11.example.jbofd:node-a"
	maxValue = 512 << 10
	wait     = 20 * time.Second
)

// ask is a command that came to a box.
type ask struct {
	e      *board
	c      *executor.Command
	waiter bufpool.Waiter
	kept   bool
}

// arrival is what a board remembers of a command.
type arrival struct {
	opcode uint8
	nsid   uint32
	seq    uint64
	data   int
	sum    byte
}

// board is the executor of a node: it answers messages, keeps them or loses them. The mark of a Forward is its
// sequence, and the value of a Ship is 7, 7, 7...
type board struct {
	pool *bufpool.Pool
	// quiet: what arrives is not remembered.
	quiet atomic.Bool

	mu       sync.Mutex
	arrivals []arrival
	// keep says which commands are not answered; nil: none.
	keep func(*nvme.SQE) bool
	kept []*ask
}

func (e *board) Ops() []string            { return []string{"message"} }
func (e *board) NewBatch() executor.Batch { return &boardBatch{e: e} }
func (e *board) NewContext(c *executor.Command) any {
	x := &ask{e: e, c: c}
	x.waiter.Wake = func() {
		if x.takeBuffer(); c.Port.NeedData(c) {
			go c.Port.Kick()
		}
	}
	return x
}

func (x *ask) takeBuffer() { x.c.Buf, x.waiter.Buf = x.waiter.Buf, bufpool.Buf{} }

func (e *board) Abort(c *executor.Command) bool {
	x := c.Context.(*ask)
	if !e.pool.Cancel(&x.waiter) {
		e.mu.Lock()
		kept := x.kept
		if kept {
			x.kept = false
			e.kept = slices.DeleteFunc(e.kept, func(o *ask) bool { return o == x })
		}
		e.mu.Unlock()
		if !kept {
			return false
		}
	}
	c.Fail(nvme.AbortRequested)
	if c.Port.Done(c) {
		go c.Port.Kick()
	}
	return true
}

type boardBatch struct {
	e       *board
	ready   []*ask
	notices executor.Notices
}

func (b *boardBatch) Begin(c *executor.Command) {
	x := c.Context.(*ask)
	n := max(c.Plan.ToController, c.Plan.AnswerBytes)
	if n == 0 || !c.Buf.IsZero() {
		b.ready = append(b.ready, x)
		return
	}
	x.waiter.Size = int(n)
	if !b.e.pool.GetOrWait(c.Account, &x.waiter) {
		return
	}
	if x.takeBuffer(); c.Fetch {
		b.notices.NeedData(c)
	} else {
		b.ready = append(b.ready, x)
	}
}

func (b *boardBatch) DataReady(c *executor.Command) {
	if !c.Status.OK() {
		c.Fail(c.Status)
		b.notices.Done(c)
		return
	}
	b.ready = append(b.ready, c.Context.(*ask))
}

func (b *boardBatch) Submit() {
	for i, x := range b.ready {
		b.ready[i] = nil
		b.e.arrive(x, &b.notices)
	}
	b.ready = b.ready[:0]
	b.notices.Send()
}

func (e *board) arrive(x *ask, n *executor.Notices) {
	c := x.c
	k := c.SQE.KVReplica()
	a := arrival{opcode: k[0], nsid: c.SQE.NSID(), seq: k.Sequence(), data: int(c.Plan.ToController)}
	for _, b := range c.Buf.B[:min(len(c.Buf.B), a.data)] {
		a.sum += b
	}
	e.mu.Lock()
	if !e.quiet.Load() {
		e.arrivals = append(e.arrivals, a)
	}
	if e.keep != nil && e.keep(c.SQE) && !c.Pass.Stale() {
		x.kept = true
		e.kept = append(e.kept, x)
		e.mu.Unlock()
		return
	}
	e.mu.Unlock()
	x.answer()
	n.Done(c)
}

func (x *ask) answer() {
	c := x.c
	if c.Pass.Stale() {
		c.Fail(nvme.AbortedSQDeletion)
		return
	}
	c.Fail(nvme.Success)
	switch c.SQE.Opcode() {
	case nvme.CmdKVForward:
		c.Result = c.SQE.KVReplica().Sequence()
	case nvme.CmdKVShip:
		c.AnswerBytes = int(c.Plan.AnswerBytes)
		for i := range c.Buf.B[:c.AnswerBytes] {
			c.Buf.B[i] = 7
		}
		c.Result = uint64(c.AnswerBytes)
	}
}

// keeps sets what is kept from now on.
func (e *board) keeps(keep func(*nvme.SQE) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.keep = keep
}

// release answers what is kept, and keeps nothing from then on.
func (e *board) release() {
	e.mu.Lock()
	kept := e.kept
	e.kept, e.keep = nil, nil
	for _, x := range kept {
		x.kept = false
	}
	e.mu.Unlock()
	for _, x := range kept {
		if x.answer(); x.c.Port.Done(x.c) {
			x.c.Port.Kick()
		}
	}
}

func (e *board) keeping() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.kept)
}

func (e *board) arrived() []arrival {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.arrivals)
}

func forwards(e *nvme.SQE) bool { return e.Opcode() == nvme.CmdKVForward }
func everything(*nvme.SQE) bool { return true }

// box is another node: a target over TCP, with partitions that a board serves.
type box struct {
	*targettest.Target
	name  string
	board *board
	proxy *proxy
	// ids are the partitions, of namespaces 11, 12...
	ids []uuid.UUID
}

// partitionID makes the UUID of the partition n of a node.
func partitionID(node string, n int) (u uuid.UUID) {
	copy(u[:], node)
	u[15] = byte(n + 1)
	return u
}

func newBox(t testing.TB, name string, partitions int) *box {
	t.Helper()
	const inCapsuleBytes = 8192
	tt := targettest.New(t, targettest.Config{PoolBytes: 64 << 20, InCapsuleBytes: inCapsuleBytes, MaxEntries: 129})
	b := &box{Target: tt, name: name, board: &board{pool: tt.Pool}}
	tt.Service.Register(nvmeof.KindReplica, b.board)
	srv, err := serve.New(serve.Config{
		Machine: tcp.Config{InCapsuleBytes: inCapsuleBytes, MaxH2CDataBytes: 1 << 20, Limits: targettest.Limits},
		Admission: connection.NewAdmission(connection.AdmissionLimits{Connections: 64, PerHost: 64, Pending: 64,
			PendingPerAddress: 64}, tt.Telemetry), MaxSockets: 128, ReceiveBytes: 128 << 10, BacklogBytes: 1 << 20,
		HandshakeTimeout: 10 * time.Second, StallTimeout: 10 * time.Second, SpinFor: 50 * time.Microsecond,
	}, tt.Service, tt.Telemetry, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	sub := &tt.State.Subsystems[0]
	sub.AllowAnyHost, sub.Nodes, sub.Namespaces = false, []string{hostNQN}, nil
	for i := range partitions {
		b.ids = append(b.ids, partitionID(name, i))
	}
	b.publish(b.ids...)
	l := loopback.Listen(t)
	port := serve.PortFor(1, l, false)
	tt.Apply(port)
	srv.Serve(l, port)
	b.proxy = newProxy(t, l.Addr().String())
	t.Cleanup(func() {
		b.board.release()
		srv.Close()
		tt.Close(t)
	})
	return b
}

// publish sets the partitions of the box. It takes effect with Apply.
func (b *box) publish(ids ...uuid.UUID) {
	sub := &b.State.Subsystems[0]
	sub.Namespaces = nil
	for i, id := range ids {
		sub.Namespaces = append(sub.Namespaces, &nvmeof.Namespace{NSID: uint32(11 + i), CSI: nvme.CSIKV,
			Executor: nvmeof.KindReplica, SizeBytes: targettest.NamespaceBytes, MaxValueBytes: maxValue, UUID: id,
			ANAGroup: 1, ANAState: nvme.ANAStateOptimized})
	}
}

// reload applies State.
func (b *box) reload() { b.Service.Apply(b.State) }

func (b *box) node() peers.Node {
	return peers.Node{Name: b.name, Address: "tcp://" + b.proxy.address, SubNQN: targettest.NQN}
}

// proxy is the network in front of a box.
type proxy struct {
	address, to string
	l           net.Listener
	wg          sync.WaitGroup

	mu     sync.Mutex
	conns  []net.Conn
	frozen bool
	thaw   sync.Cond
	closed bool
}

func newProxy(t testing.TB, to string) *proxy {
	l := loopback.Listen(t)
	p := &proxy{address: l.Addr().String(), to: to, l: l}
	p.thaw.L = &p.mu
	p.wg.Add(1)
	go func() {
		defer p.wg.Done()
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			d, err := net.Dial("tcp", p.to)
			p.mu.Lock()
			if err != nil || p.closed {
				p.mu.Unlock()
				c.Close()
				if d != nil {
					d.Close()
				}
				continue
			}
			p.conns = append(p.conns, c, d)
			p.wg.Add(2)
			p.mu.Unlock()
			go p.copy(c, d)
			go p.copy(d, c)
		}
	}()
	t.Cleanup(func() {
		l.Close()
		p.mu.Lock()
		p.closed = true
		p.mu.Unlock()
		p.freeze(false)
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) copy(from, to net.Conn) {
	defer p.wg.Done()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		for p.frozen {
			p.thaw.Wait()
		}
		p.mu.Unlock()
		if _, werr := to.Write(buf[:n]); err != nil || werr != nil {
			from.Close()
			to.Close()
			return
		}
	}
}

// cut ends all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
}

// freeze holds back everything, in both directions; connections are accepted.
func (p *proxy) freeze(frozen bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.frozen = frozen
	p.thaw.Broadcast()
}

// sink gathers commands that have ended.
type sink struct {
	mu    sync.Mutex
	done  []*peers.Command
	kicks chan struct{}
}

func newSink() *sink { return &sink{kicks: make(chan struct{}, 1)} }

func (s *sink) PeerDone(c *peers.Command) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done = append(s.done, c)
	return len(s.done) == 1
}

func (s *sink) Kick() {
	select {
	case s.kicks <- struct{}{}:
	default:
	}
}

func (s *sink) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.done)
}

// await waits until n commands have ended, and takes them.
func (s *sink) await(t testing.TB, n int) []*peers.Command {
	t.Helper()
	var all []*peers.Command
	late := time.After(wait)
	for {
		s.mu.Lock()
		all = append(all, s.done...)
		s.done = s.done[:0]
		s.mu.Unlock()
		if len(all) >= n {
			if len(all) > n {
				t.Fatalf("%d commands have ended, want %d", len(all), n)
			}
			return all
		}
		select {
		case <-s.kicks:
		case <-late:
			t.Fatalf("%d of %d commands have ended after %s", len(all), n, wait)
		}
	}
}

// rig is node a with other nodes.
type rig struct {
	*peers.Peers
	sink      *sink
	connected chan string
	log       *logged
	batch     peers.Batch
}

// logged is what was logged.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logged) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), what)
}

func newRig(t testing.TB, change func(*peers.Config), nodes ...peers.Node) *rig {
	t.Helper()
	r := &rig{sink: newSink(), connected: make(chan string, 1000), log: &logged{}}
	cfg := peers.Config{Name: "a", HostNQN: hostNQN, Nodes: nodes, MinPause: 10 * time.Millisecond,
		MaxPause:  100 * time.Millisecond,
		Connected: func(node string) { r.connected <- node },
		Log:       slog.New(slog.NewTextHandler(io.MultiWriter(r.log, t.Output()), nil))}
	if change != nil {
		change(&cfg)
	}
	var err error
	if r.Peers, err = peers.New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// place says where partitions are.
type place struct {
	node string
	id   uuid.UUID
}

// mapOf makes a map of partitions, numbered from 0. It has the nodes a, b and c.
func mapOf(places ...place) *cluster.Map {
	v := &view.View{Nodes: []view.Node{{Name: "a"}, {Name: "b"}, {Name: "c"}}}
	for _, p := range places {
		i := slices.IndexFunc(v.Nodes, func(n view.Node) bool { return n.Name == p.node })
		v.Partitions = append(v.Partitions, view.Partition{ID: p.id, Node: uint16(i)})
	}
	return &cluster.Map{View: v}
}

// see sets a view of the partitions of boxes, numbered from 0.
func (r *rig) see(boxes ...*box) {
	var places []place
	for _, b := range boxes {
		for _, id := range b.ids {
			places = append(places, place{b.name, id})
		}
	}
	r.SetView(mapOf(places...))
}

// awaitConnected waits until Connected was called for the node.
func (r *rig) awaitConnected(t testing.TB, node string) {
	t.Helper()
	select {
	case got := <-r.connected:
		if got != node {
			t.Fatalf("connected to %s, want %s", got, node)
		}
	case <-time.After(wait):
		t.Fatalf("not connected to %s after %s", node, wait)
	}
}

// send sends commands.
func (r *rig) send(cmds ...*peers.Command) {
	for _, c := range cmds {
		r.batch.Add(c)
	}
	r.Send(&r.batch)
}

// message makes a command with n bytes of data.
func (r *rig) message(op uint8, to view.PartitionID, seq uint64, n int) *peers.Command {
	c := &peers.Command{To: to, Sink: r.sink, Tag: uint32(seq)}
	c.SQE.SetOpcode(op)
	k := c.SQE.KVReplica()
	k.SetEpoch(1)
	k.SetLenBytes(uint32(n))
	switch op {
	case nvme.CmdKVForward:
		k.SetSequence(seq)
		k.SetKeyLen(1)
	case nvme.CmdKVShip:
		k.SetKey([]byte("k"))
	case nvme.CmdKVFetch:
		k.SetBits(48)
	}
	if n > 0 {
		c.Data = bytes.Repeat([]byte{byte(seq)}, n)
	}
	return c
}

func (r *rig) forward(to view.PartitionID, seq uint64, n int) *peers.Command {
	return r.message(nvme.CmdKVForward, to, seq, n)
}

// eventually polls for what cannot be waited for otherwise.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(wait)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not within %s: %s", wait, what)
		}
	}
}

func contains(err error, what string) bool { return strings.Contains(err.Error(), what) }
