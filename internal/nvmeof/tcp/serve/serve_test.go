package serve_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/bufpool"
	"jbofd/internal/buildtags"
	"jbofd/internal/drive"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/telemetry"
	"jbofd/internal/testutil/allocs"
)

const (
	testNQN    = "nqn.2026-11.example.jbofd:test"
	testBytes  = 64 << 20
	blockBytes = 4096
	// quiesceMS is how long the target waits for commands that a drive has.
	quiesceMS = 3000
)

// TestMain turns the test binary into a host process when asked (see
// hostProcess).
func TestMain(m *testing.M) {
	if address := os.Getenv("JBOFD_TEST_HOST"); address != "" {
		if err := hostProcess(address, os.Getenv("JBOFD_TEST_ROLE")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// rig is a target on a loopback listener, by default with one namespace in memory.
type rig struct {
	address string
	pool    *bufpool.Pool
	server  *serve.Server
	service *target.Service
	state   nvmeof.State
}

func newRig(t testing.TB, change func(*serve.Config)) *rig {
	t.Helper()
	dev, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	return newRigOf(t, change, dev)
}

// newRigOf makes a rig with a namespace on each device.
func newRigOf(t testing.TB, change func(*serve.Config), devices ...ssd.Device) *rig {
	t.Helper()
	return newRigWith(t, change, nil, devices...)
}

// newRigWith makes a rig whose first drives have the policies given.
func newRigWith(t testing.TB, change func(*serve.Config), policies []pipeline.Policy, devices ...ssd.Device) *rig {
	t.Helper()
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	var owners []*drive.Drive
	var namespaces []*nvmeof.Namespace
	for i, dev := range devices {
		cfg := drive.Config{Device: dev, Pool: pool}
		if i < len(policies) {
			cfg.Policy = policies[i]
		}
		own, err := drive.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		owners = append(owners, own)
		namespaces = append(namespaces, &nvmeof.Namespace{NSID: uint32(i + 1), SSD: i, SizeBytes: testBytes,
			BlockShift: 12, ANAGroup: 1, ANAState: nvme.ANAStateOptimized})
	}
	limits := nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 64 << 10}
	machine := nvmeof.New(nvmeof.Config{Firmware: "test", Limits: limits, InCapsuleBytes: 8192, MaxEntries: 129,
		MaxIOQueues:    64,
		MaxControllers: 1024, MaxHosts: 1024, MaxDiscovery: 500, MaxDiscoveryPerPeer: 500, MaxDiscoveryKATOMS: 300_000,
		MinKATOMS: 1000, QuiesceMS: quiesceMS, DiscoveryIdleMS: 120000})
	start := time.Now()
	service := target.New(target.Config{Target: machine, SSDs: owners, Pool: pool, Log: slog.New(slog.DiscardHandler),
		Clock:  func() int64 { return int64(time.Since(start)) },
		Events: target.Events{KeepAliveExpired: func(*nvmeof.Controller, time.Duration) {}}})
	tel := telemetry.New(telemetry.Options{Version: "test", Node: "test"})
	cfg := serve.Config{
		Machine: tcp.Config{InCapsuleBytes: 8192, MaxH2CDataBytes: 1 << 20, Limits: limits},
		Admission: connection.NewAdmission(connection.AdmissionLimits{Connections: 1024, PerHost: 512, Pending: 256,
			PendingPerAddress: 256}, tel), MaxSockets: 2048, ReceiveBytes: 128 << 10, BacklogBytes: 1 << 20,
		HandshakeTimeout: 10 * time.Second, StallTimeout: 10 * time.Second, SpinFor: 50 * time.Microsecond,
	}
	if change != nil {
		change(&cfg)
	}
	srv, err := serve.New(cfg, service, tel, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := serve.PortFor(1, l, false)
	r := &rig{address: l.Addr().String(), pool: pool, server: srv, service: service,
		state: nvmeof.State{Ports: []nvmeof.Port{port},
			Subsystems: []nvmeof.SubsystemState{{NQN: testNQN, Serial: "1", Model: "test", AllowAnyHost: true,
				Namespaces: namespaces}}}}
	service.Apply(r.state)
	srv.Serve(l, port)
	t.Cleanup(func() {
		srv.Close()
		service.Close()
		for i, own := range owners {
			if err := errors.Join(own.Close(), devices[i].Close()); err != nil {
				t.Error(err)
			}
		}
		pool.CloseTest(t)
	})
	return r
}

// open connects a host with one queue pair.
func open(address string, depth int) (*client.Controller, *client.QPair, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := client.Connect(ctx, client.Options{Address: address, SubNQN: testNQN, QPairs: 1, QueueDepth: depth,
		CtrlLossTimeout: -1})
	if err != nil {
		return nil, nil, err
	}
	q, err := c.OpenQPair(ctx)
	if err != nil {
		_ = c.Close()
		return nil, nil, err
	}
	return c, q, nil
}

// load keeps depth commands outstanding until n have completed or stop returns true.
type load struct {
	q      *client.QPair
	opcode uint8
	bytes  int
	bufs   [][]byte
	cmds   []client.Command
	comps  []client.Completion
	lba    uint64
}

func newLoad(q *client.QPair, opcode uint8, bytes, depth int) *load {
	l := &load{q: q, opcode: opcode, bytes: bytes, cmds: make([]client.Command, 0, depth),
		comps: make([]client.Completion, depth)}
	for range depth {
		l.bufs = append(l.bufs, make([]byte, bytes))
	}
	return l
}

func (l *load) add(tag int) {
	l.cmds = l.cmds[:len(l.cmds)+1]
	c := &l.cmds[len(l.cmds)-1]
	*c = client.Command{Data: l.bufs[tag], Tag: uint64(tag)}
	nlb := uint64(l.bytes / blockBytes)
	client.SetRW(c, l.opcode, 1, l.lba*nlb, uint32(nlb))
	l.lba = (l.lba + 1) % (testBytes / uint64(l.bytes))
}

func (l *load) run(n int) error {
	issued, done := 0, 0
	for tag := range l.bufs {
		if issued < n {
			l.add(tag)
			issued++
		}
	}
	for done < n {
		if len(l.cmds) > 0 {
			if _, err := l.q.Submit(l.cmds); err != nil {
				return err
			}
			l.cmds = l.cmds[:0]
		}
		k, err := l.q.Poll(l.comps, -1)
		if err != nil {
			return err
		}
		for _, c := range l.comps[:k] {
			if !c.Status.OK() {
				return fmt.Errorf("I/O failed: %v", c.Status)
			}
			done++
			if issued < n {
				l.add(int(c.Tag))
				issued++
			}
		}
	}
	return nil
}

func TestReadsReturnWhatWasWritten(t *testing.T) {
	r := newRig(t, nil)
	for _, o := range []client.Options{{}, {HeaderDigest: true}, {DataDigest: true},
		{HeaderDigest: true, DataDigest: true}} {
		o.Address, o.SubNQN = r.address, testNQN
		c, err := client.Connect(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		ns, err := c.Namespace(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{4096, 8192, 12288, 65536, 1 << 20} {
			want := bytes.Repeat([]byte{byte(n >> 12), 1, 2, 3}, n/4)
			if _, err := ns.WriteAt(t.Context(), want, 4096, 0); err != nil {
				t.Fatalf("write %d: %v", n, err)
			}
			got := make([]byte, n)
			if _, err := ns.ReadAt(t.Context(), got, 4096); err != nil {
				t.Fatalf("read %d: %v", n, err)
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("%d bytes with header digest %t, data digest %t come back different", n, o.HeaderDigest,
					o.DataDigest)
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSteadyStateAllocatesNothing counts both ends: host and target run in this
// process.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	r := newRig(t, nil)
	for _, tc := range []struct {
		name   string
		opcode uint8
		bytes  int
		depth  int
	}{{"read 4K", client.OpRead, 4096, 32}, {"write 4K in-capsule", client.OpWrite, 4096, 32},
		{"write 64K by R2T", client.OpWrite, 65536, 8}, {"read 128K", client.OpRead, 131072, 8},
		{"read 4K, one at a time", client.OpRead, 4096, 1}} {
		t.Run(tc.name, func(t *testing.T) {
			c, q, err := open(r.address, tc.depth)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			l := newLoad(q, tc.opcode, tc.bytes, tc.depth)
			allocs.None(t, l.run)
		})
	}
}

// hostProcess is a host in a process of its own: "busy" keeps 64 reads
// outstanding until it is killed, "quiet" reads one at a time and prints the 99th
// percentile of its latency.
func hostProcess(address, role string) error {
	depth := 1
	if role == "busy" {
		depth = 64
	}
	c, q, err := open(address, depth)
	if err != nil {
		return err
	}
	defer c.Close()
	l := newLoad(q, client.OpRead, blockBytes, depth)
	if role == "busy" {
		fmt.Println("busy")
		return l.run(1 << 40)
	}
	const n = 500
	took := make([]time.Duration, 0, n)
	for range n {
		start := time.Now()
		if err := l.run(1); err != nil {
			return err
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	fmt.Println(took[n*99/100])
	return nil
}

func host(t *testing.T, r *rig, role string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "JBOFD_TEST_HOST="+r.address, "JBOFD_TEST_ROLE="+role)
	cmd.Stderr = os.Stderr
	return cmd
}

// TestABusyConnectionDoesNotStarveAQuietOne: with one processor, a connection
// that always has data keeps the runtime from looking at other sockets for 10 ms
// at a time.
func TestABusyConnectionDoesNotStarveAQuietOne(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	r := newRig(t, nil)
	var busy []*exec.Cmd
	for range 6 {
		cmd := host(t, r, "busy")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		busy = append(busy, cmd)
		defer func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}()
		if _, err := out.Read(make([]byte, 16)); err != nil {
			t.Fatal(err)
		}
	}
	// Other processes can only slow the test down, so the best of three runs counts. Without yielding to other
	// connections it is 5 to 30 ms.
	best := time.Hour
	for range 3 {
		out, err := host(t, r, "quiet").Output()
		if err != nil {
			t.Fatal(err)
		}
		p99, err := time.ParseDuration(strings.TrimSpace(string(out)))
		if err != nil {
			t.Fatal(err)
		}
		best = min(best, p99)
	}
	t.Logf("99th percentile of the quiet host beside %d busy ones: %v", len(busy), best)
	limit := 8 * time.Millisecond
	if buildtags.Race { // everything is ten times slower then
		limit = 200 * time.Millisecond
	}
	if best > limit {
		t.Errorf("99th percentile %v: the quiet host waits for the runtime's 10 ms monitor", best)
	}
}

// TestASpinningReaderSleepsAfterAWhile: a connection without commands costs
// nothing.
func TestASpinningReaderSleepsAfterAWhile(t *testing.T) {
	r := newRig(t, nil)
	c, q, err := open(r.address, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := newLoad(q, client.OpRead, blockBytes, 1).run(100); err != nil {
		t.Fatal(err)
	}
	start, used := time.Now(), cpuTime(t)
	<-time.After(time.Second)
	share := float64(cpuTime(t)-used) / float64(time.Since(start))
	t.Logf("idle: %.2f %% of a processor", 100*share)
	if share > 0.05 { // other goroutines of the test binary count too
		t.Errorf("an idle connection uses %.1f %% of a processor", 100*share)
	}
}

// TestAReaderSpinsWhileDataIsOnItsWay: the host sends what an R2T asks for at once, so that a reader that slept would
// be woken for each command, and with congestion control like BBR for each part of its data.
func TestAReaderSpinsWhileDataIsOnItsWay(t *testing.T) {
	r := newRig(t, func(c *serve.Config) { c.SpinFor = time.Minute })
	q := r.raw(t).queue(1)
	var e nvme.SQE
	e.SetOpcode(nvme.CmdWrite)
	e.SetNSID(1)
	e.SetNLB(4)
	ask := func() (cid uint16) {
		cid = q.sendToFetch(e, 4*blockBytes)
		for len(q.r2ts) == 0 {
			if err := q.receive(); err != nil {
				t.Fatal(err)
			}
		}
		return cid
	}
	answer := func(cid uint16) {
		q.answer(1)
		if c := q.wait(cid); !c.Status().OK() {
			t.Fatal(c.Status())
		}
	}
	for range 200 { // until it has found out that spinning pays
		answer(ask())
	}
	cid := ask()
	// Asleep, the whole process uses a hundredth of a processor; spinning, what a busy machine leaves it.
	const enough, most = 200 * time.Millisecond, 5 * time.Second
	used := cpuTime(t)
	for start := time.Now(); cpuTime(t)-used < enough; {
		if time.Since(start) > most {
			t.Fatalf("the reader sleeps: the process used %v of a processor in %v", cpuTime(t)-used, most)
		}
		<-time.After(10 * time.Millisecond)
	}
	answer(cid)
}

func BenchmarkRead4K(b *testing.B) {
	for _, depth := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("QD%d", depth), func(b *testing.B) { benchmark(b, client.OpRead, 4096, depth) })
	}
}

func BenchmarkWrite4K(b *testing.B) {
	for _, depth := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("QD%d", depth), func(b *testing.B) { benchmark(b, client.OpWrite, 4096, depth) })
	}
}

func BenchmarkRead128K(b *testing.B)  { benchmark(b, client.OpRead, 128<<10, 16) }
func BenchmarkWrite128K(b *testing.B) { benchmark(b, client.OpWrite, 128<<10, 16) }

// benchmark runs host and target in one process over loopback.
func benchmark(b *testing.B, opcode uint8, bytes, depth int) {
	r := newRig(b, nil)
	c, q, err := open(r.address, depth)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	l := newLoad(q, opcode, bytes, depth)
	if err := l.run(1000); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(bytes))
	b.ReportAllocs()
	b.ResetTimer()
	if err := l.run(b.N); err != nil {
		b.Fatal(err)
	}
}
