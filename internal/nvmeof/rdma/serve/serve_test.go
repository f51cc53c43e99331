package serve_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/nvmeof/rdma/serve"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/target/targettest"
	"jbofd/internal/ssd"
	"jbofd/internal/testutil/allocs"
	"jbofd/internal/testutil/ioload"
)

const (
	testNQN    = targettest.NQN
	testBytes  = targettest.NamespaceBytes
	blockBytes = targettest.BlockBytes
	quiesceMS  = targettest.QuiesceMS
)

var seed = flag.Uint64("seed", 1, "of the network between host and target")

var (
	targetAddr = netip.MustParseAddr("10.0.0.1")
	hostAddr   = netip.MustParseAddr("10.0.0.2")
	// wildcardAddr means every device.
	wildcardAddr = netip.MustParseAddrPort("0.0.0.0:4420")
)

// rig is a target and a machine for hosts on a network in memory.
type rig struct {
	net    *memverbs.Network
	target *memverbs.Provider
	host   *memverbs.Provider
	// address is what hosts connect to, with rdma://.
	address string
	*targettest.Target
	server *serve.Server
	log    *logBook
	device memverbs.DeviceConfig // the target's
}

// setup is what a test changes before the rig is built.
type setup struct {
	serve   serve.Config
	network memverbs.Config
	attr    verbs.Attr
	// hostAttr are the limits of the hosts' device.
	hostAttr verbs.Attr
	listen   netip.AddrPort
	buffers  int64
	perHost  int
	devices  []ssd.Device
	// wrap, if set, wraps the server's provider.
	wrap func(verbs.Provider) verbs.Provider
}

// logBook keeps what was logged.
type logBook struct {
	slog.Handler
	lines chan string
}

func (l *logBook) Enabled(context.Context, slog.Level) bool { return true }
func (l *logBook) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logBook) Handle(_ context.Context, r slog.Record) error {
	line := r.Message
	r.Attrs(func(a slog.Attr) bool { line += " " + a.String(); return true })
	select {
	case l.lines <- line:
	default:
	}
	return nil
}

func newRig(t testing.TB, change func(*setup)) *rig {
	t.Helper()
	s := setup{
		network: memverbs.Config{Seed: *seed, Live: true},
		listen:  netip.AddrPortFrom(targetAddr, 4420), buffers: 64 << 20, perHost: 512,
		serve: serve.Config{Limits: targettest.Limits, InCapsuleBytes: 8192, MaxEntries: 129, MaxIOQueues: 64,
			Receives: 1024, Pollers: 2, HandshakeTimeout: 10 * time.Second, StallTimeout: 10 * time.Second,
			SpinFor: 20 * time.Microsecond},
	}
	if change != nil {
		change(&s)
	}
	tt := targettest.New(t, targettest.Config{Devices: s.devices, PoolBytes: s.buffers,
		InCapsuleBytes: s.serve.InCapsuleBytes, MaxEntries: s.serve.MaxEntries})
	s.serve.Admission = connection.NewAdmission(connection.AdmissionLimits{Connections: 1024, PerHost: s.perHost,
		Pending: 1024, PendingPerAddress: 1024}, tt.Telemetry)
	n := memverbs.New(s.network)
	s.attr.Name = "mem0"
	device := memverbs.DeviceConfig{Addr: targetAddr, Attr: s.attr}
	r := &rig{Target: tt, net: n, device: device,
		log:    &logBook{lines: make(chan string, 4096)},
		target: n.NewProvider(device), host: n.NewProvider(memverbs.DeviceConfig{Addr: hostAddr, Attr: s.hostAttr})}
	var provider verbs.Provider = r.target
	if s.wrap != nil {
		provider = s.wrap(provider)
	}
	r.server = serve.New(s.serve, provider, tt.Service, tt.Telemetry, slog.New(r.log))
	l, err := r.server.Listen(s.listen)
	if err != nil {
		t.Fatal(err)
	}
	port := serve.PortFor(1, l.Addr())
	r.address = "rdma://" + netip.AddrPortFrom(targetAddr, l.Addr().Port()).String()
	tt.Apply(port)
	r.server.Serve(l, port)
	t.Cleanup(func() {
		r.server.Close()
		tt.Close(t)
		// Nothing is left over: no queue pair, memory region or connection identifier.
		if got := r.target.Counts(); got != (verbs.Counts{}) {
			t.Errorf("the target leaves %+v", got)
		}
		if got := r.host.Counts(); got != (verbs.Counts{}) {
			t.Errorf("the host leaves %+v", got)
		}
		if err := errors.Join(r.target.Close(), r.host.Close(), n.Faults()); err != nil {
			t.Error(err)
		}
		n.Close()
	})
	return r
}

// options are those of a host.
func (r *rig) options() client.Options {
	return client.Options{Address: r.address, RDMA: r.host, SubNQN: testNQN}
}

// connect connects a host; it is closed at the end of the test.
func (r *rig) connect(t testing.TB, o client.Options) *client.Controller {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c, err := client.Connect(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// openLoaded opens a queue pair, and allocates a buffer that needs no copy for each command that may be outstanding.
func openLoaded(t testing.TB, c *client.Controller, bytes, depth int) (*client.QPair, [][]byte) {
	t.Helper()
	q, err := c.OpenQPair(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	var bufs [][]byte
	for range depth {
		b, free, err := c.AllocBuffer(max(bytes, blockBytes))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = free() })
		bufs = append(bufs, b[:bytes])
	}
	t.Cleanup(func() { _ = q.Close() })
	return q, bufs
}

// newLoad makes a load of namespace 1.
func newLoad(t testing.TB, c *client.Controller, opcode uint8, bytes, depth int) *ioload.Blocks {
	t.Helper()
	q, bufs := openLoaded(t, c, bytes, depth)
	cfg := ioload.BlocksConfig{Opcode: opcode, BlockBytes: blockBytes, SizeBytes: testBytes}
	return ioload.NewBlocks(q, cfg, bufs)
}

func TestReadsReturnWhatWasWritten(t *testing.T) {
	for s := range uint64(4) {
		r := newRig(t, func(u *setup) { u.network.Seed += s })
		c := r.connect(t, r.options())
		ns, err := c.Namespace(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{4096, 8192, 12288, 65536, 1 << 20} {
			want := bytes.Repeat([]byte{byte(n >> 12), 1, 2, byte(s)}, n/4)
			if _, err := ns.WriteAt(t.Context(), want, 4096, 0); err != nil {
				t.Fatalf("write %d: %v", n, err)
			}
			got := make([]byte, n)
			if _, err := ns.ReadAt(t.Context(), got, 4096); err != nil {
				t.Fatalf("read %d: %v", n, err)
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("%d bytes come back different", n)
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSteadyStateAllocatesNothing counts host, target and network: all run in this process.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	r := newRig(t, nil)
	for _, tc := range []struct {
		name   string
		opcode uint8
		bytes  int
		depth  int
	}{{"read 4K", client.OpRead, 4096, 32}, {"write 4K in-capsule", client.OpWrite, 4096, 32},
		{"write 64K by READ", client.OpWrite, 65536, 8},
		{"read 128K", client.OpRead, 131072, 8}, {"read 4K, one at a time", client.OpRead, 4096, 1}} {
		t.Run(tc.name, func(t *testing.T) {
			o := r.options()
			o.QPairs, o.QueueDepth = 1, tc.depth
			l := newLoad(t, r.connect(t, o), tc.opcode, tc.bytes, tc.depth)
			allocs.None(t, l.Run)
		})
	}
}
