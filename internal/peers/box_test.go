package peers_test

import (
	"errors"
	"flag"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/rdma/memverbs"
	rdmaserve "jbofd/internal/nvmeof/rdma/serve"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/target/targettest"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/peers"
	"jbofd/internal/testutil/loopback"
	"jbofd/internal/uuid"
)

// nodeA is node a to the others: where it connects from over TCP, and over RDMA.
var nodeA = []nvmeof.Node{{NQN: hostNQN, From: []netip.Addr{netip.MustParseAddr("127.0.0.1"), hostAddr}}}

var hostAddr = netip.MustParseAddr("10.0.1.1")

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the RDMA networks")

const (
	inCapsuleBytes = 8192
	maxEntries     = 129
)

// world is a network, and over RDMA the device of node a.
type world struct {
	rdma bool
	// slow, over TCP: sockets of node a hold little, so that they are full.
	slow bool
	net  *memverbs.Network
	host *memverbs.Provider
	// boxes counts those over RDMA, for their addresses.
	boxes byte
}

func newWorld(t testing.TB, rdma bool) *world {
	w := &world{rdma: rdma}
	if !rdma {
		return w
	}
	t.Logf("-seed %d", *seed)
	w.net = memverbs.New(memverbs.Config{Seed: *seed, Live: true})
	w.host = w.net.NewProvider(memverbs.DeviceConfig{Addr: hostAddr})
	t.Cleanup(func() {
		if got := w.host.Counts(); got != (verbs.Counts{}) {
			t.Errorf("node a leaves %+v", got)
		}
		if err := errors.Join(w.host.Close(), w.net.Faults()); err != nil {
			t.Error(err)
		}
		w.net.Close()
	})
	return w
}

// overEach runs a test over each transport, in parallel with others.
func overEach(t *testing.T, test func(*testing.T, *world)) {
	t.Parallel()
	for _, rdma := range []bool{false, true} {
		t.Run(map[bool]string{false: "tcp", true: "rdma"}[rdma], func(t *testing.T) {
			t.Parallel()
			test(t, newWorld(t, rdma))
		})
	}
}

// box is another node: a target with partitions that a board serves.
type box struct {
	*targettest.Target
	name    string
	address string
	board   *board
	// ids are the partitions, of namespaces 11, 12...
	ids []uuid.UUID
	// cut ends the connections. freeze(true) holds back everything, in both directions, until freeze(false).
	cut    func()
	freeze func(bool)
}

// partitionID makes the UUID of the partition n of a node.
func partitionID(node string, n int) (u uuid.UUID) {
	copy(u[:], node)
	u[15] = byte(n + 1)
	return u
}

func (w *world) box(t testing.TB, name string, partitions int) *box {
	t.Helper()
	tt := targettest.New(t, targettest.Config{PoolBytes: 64 << 20, InCapsuleBytes: inCapsuleBytes,
		MaxEntries: maxEntries})
	b := &box{Target: tt, name: name, board: &board{pool: tt.Pool}}
	tt.Service.Register(nvmeof.KindReplica, b.board)
	sub := &tt.State.Subsystems[0]
	sub.AllowAnyHost, sub.Nodes, sub.Namespaces = false, nodeA, nil
	for i := range partitions {
		b.ids = append(b.ids, partitionID(name, i))
	}
	b.publish(b.ids...)
	if w.rdma {
		w.serveRDMA(t, b)
	} else {
		w.serveTCP(t, b)
	}
	return b
}

func (w *world) serveTCP(t testing.TB, b *box) {
	tt := b.Target
	srv, err := serve.New(serve.Config{
		Machine:   tcp.Config{InCapsuleBytes: inCapsuleBytes, MaxH2CDataBytes: 1 << 20, Limits: targettest.Limits},
		Admission: admission(tt), MaxSockets: 128, ReceiveBytes: 128 << 10, BacklogBytes: 1 << 20,
		HandshakeTimeout: 10 * time.Second, StallTimeout: 10 * time.Second, SpinFor: 50 * time.Microsecond,
	}, tt.Service, tt.Telemetry, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l := loopback.Listen(t)
	port := serve.PortFor(1, l, false)
	tt.Apply(port)
	srv.Serve(l, port)
	p := newProxy(t, l.Addr().String(), w.slow)
	b.address, b.cut, b.freeze = "tcp://"+p.address, p.cut, p.freeze
	t.Cleanup(func() {
		b.board.release()
		srv.Close()
		tt.Close(t)
	})
}

func (w *world) serveRDMA(t testing.TB, b *box) {
	tt := b.Target
	w.boxes++
	addr := netip.AddrFrom4([4]byte{10, 0, 0, w.boxes})
	provider := w.net.NewProvider(memverbs.DeviceConfig{Addr: addr})
	srv := rdmaserve.New(rdmaserve.Config{Limits: targettest.Limits, InCapsuleBytes: inCapsuleBytes,
		MaxEntries: maxEntries, MaxIOQueues: 64, Receives: 1024, Pollers: 2, HandshakeTimeout: 10 * time.Second,
		StallTimeout: 10 * time.Second, SpinFor: 20 * time.Microsecond, Admission: admission(tt)}, provider,
		tt.Service, tt.Telemetry, slog.New(slog.DiscardHandler))
	l, err := srv.Listen(netip.AddrPortFrom(addr, 4420))
	if err != nil {
		t.Fatal(err)
	}
	port := rdmaserve.PortFor(1, l.Addr())
	tt.Apply(port)
	srv.Serve(l, port)
	b.address = "rdma://" + l.Addr().String()
	b.cut = func() {
		for _, e := range w.net.Endpoints() {
			if e.Remote().Addr() == addr {
				e.Break()
			}
		}
	}
	b.freeze = func(frozen bool) {
		if frozen {
			w.net.Pause()
		} else {
			w.net.Resume()
		}
	}
	t.Cleanup(func() {
		b.board.release()
		srv.Close()
		tt.Close(t)
		if err := provider.Close(); err != nil {
			t.Error(err)
		}
	})
}

func admission(tt *targettest.Target) *connection.Admission {
	return connection.NewAdmission(connection.AdmissionLimits{Connections: 64, PerHost: 64, Pending: 64,
		PendingPerAddress: 64}, tt.Telemetry)
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
	return peers.Node{Name: b.name, Address: b.address, SubNQN: targettest.NQN}
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

func newProxy(t testing.TB, to string, slow bool) *proxy {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if !slow {
			return nil
		}
		// The kernel gives a sender at least as much memory as some segments need.
		return errors.Join(c.Control(func(fd uintptr) {
			err = errors.Join(unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, 1400),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 16<<10))
		}), err)
	}}
	l, err := lc.Listen(t.Context(), "tcp", loopback.Address())
	if err != nil {
		t.Fatal(err)
	}
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
