package serve_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/buildtags"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/target/targettest"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/testutil/allocs"
	"jbofd/internal/testutil/ioload"
	"jbofd/internal/testutil/loopback"
)

const (
	testNQN    = targettest.NQN
	testBytes  = targettest.NamespaceBytes
	blockBytes = targettest.BlockBytes
	quiesceMS  = targettest.QuiesceMS
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
	*targettest.Target
	address string
	server  *serve.Server
}

func newRig(t testing.TB, change func(*serve.Config)) *rig {
	t.Helper()
	return newRigOf(t, change)
}

// newRigOf makes a rig with a namespace on each device.
func newRigOf(t testing.TB, change func(*serve.Config), devices ...ssd.Device) *rig {
	t.Helper()
	return newRigWith(t, change, nil, devices...)
}

// newRigWith makes a rig whose first drives have the policies given.
func newRigWith(t testing.TB, change func(*serve.Config), policies []pipeline.Policy, devices ...ssd.Device) *rig {
	t.Helper()
	const inCapsuleBytes = 8192
	tt := targettest.New(t, targettest.Config{Devices: devices, Policies: policies, PoolBytes: 64 << 20,
		InCapsuleBytes: inCapsuleBytes, MaxEntries: 129})
	cfg := serve.Config{
		Machine: tcp.Config{InCapsuleBytes: inCapsuleBytes, MaxH2CDataBytes: 1 << 20, Limits: targettest.Limits},
		Admission: connection.NewAdmission(connection.AdmissionLimits{Connections: 1024, PerHost: 512, Pending: 256,
			PendingPerAddress: 256}, tt.Telemetry), MaxSockets: 2048, ReceiveBytes: 128 << 10, BacklogBytes: 1 << 20,
		HandshakeTimeout: 10 * time.Second, StallTimeout: 10 * time.Second, SpinFor: 50 * time.Microsecond,
	}
	if change != nil {
		change(&cfg)
	}
	srv, err := serve.New(cfg, tt.Service, tt.Telemetry, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l := loopback.Listen(t)
	port := serve.PortFor(1, l, false)
	tt.Apply(port)
	srv.Serve(l, port)
	t.Cleanup(func() {
		srv.Close()
		tt.Close(t)
	})
	return &rig{Target: tt, address: l.Addr().String(), server: srv}
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

// newLoad makes a load of namespace 1.
func newLoad(q *client.QPair, opcode uint8, bytes, depth int) *ioload.Blocks {
	var bufs [][]byte
	for range depth {
		bufs = append(bufs, make([]byte, bytes))
	}
	cfg := ioload.BlocksConfig{Opcode: opcode, BlockBytes: blockBytes, SizeBytes: testBytes}
	return ioload.NewBlocks(q, cfg, bufs)
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
			allocs.None(t, l.Run)
		})
	}
}

// hostProcess is a host in a process of its own: "busy" keeps 128 writes outstanding until it is killed, "quiet" reads
// one block at a time and prints the 99th percentile of the processor time that the target's process, its parent, uses
// during a read.
func hostProcess(address, role string) error {
	depth := 1
	if role == "busy" {
		depth = 128
	}
	c, q, err := open(address, depth)
	if err != nil {
		return err
	}
	defer c.Close()
	if role == "busy" {
		l := newLoad(q, client.OpWrite, blockBytes, depth)
		fmt.Println("busy")
		return l.Run(1 << 40)
	}
	const n = 300
	l := newLoad(q, client.OpRead, blockBytes, depth)
	target, took := os.Getppid(), make([]time.Duration, 0, n)
	for range n {
		start, err := cpuTimeOf(target)
		if err != nil {
			return err
		}
		if err := l.Run(1); err != nil {
			return err
		}
		end, err := cpuTimeOf(target)
		if err != nil {
			return err
		}
		took = append(took, end-start)
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

// laborious is a drive that keeps the goroutine that submits to it busy for 20 µs with each write.
type laborious struct{ ssd.Device }

type laboriousQueue struct{ ssd.Queue }

func (d laborious) OpenQueue(depth int) (ssd.Queue, error) {
	q, err := d.Device.OpenQueue(depth)
	return laboriousQueue{q}, err
}

func (q laboriousQueue) Submit(reqs []ssd.Request) int {
	n := q.Queue.Submit(reqs)
	for i := range reqs[:n] {
		if reqs[i].Op == ssd.Write {
			for start := time.Now(); time.Since(start) < 20*time.Microsecond; {
			}
		}
	}
	return n
}

// TestABusyConnectionDoesNotStarveAQuietOne: with one processor, a connection that always has data keeps the runtime
// from looking at other sockets for 10 ms at a time. The writes are slow, so that there is always data, even when the
// busy hosts get little processor time. What counts is the target's own processor time, not the time that other
// processes take from it.
func TestABusyConnectionDoesNotStarveAQuietOne(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	dev, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	r := newRigOf(t, func(c *serve.Config) { c.ReceiveBytes = 16 << 10 }, laborious{dev})
	var busy []*exec.Cmd
	for range 4 {
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
	// The best of five runs takes 3.5 to 5 ms, about a turn of a busy connection: 128 writes of 30 µs. Without yielding
	// to other connections it takes 6.5 to 8 ms, seldom less.
	best := time.Hour
	for range 5 {
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
	limit := 6 * time.Millisecond
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
	if err := newLoad(q, client.OpRead, blockBytes, 1).Run(100); err != nil {
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
	// Memory that was never written is one page of zeros, which reads would find in the cache.
	if err := newLoad(q, client.OpWrite, 128<<10, depth).Run(testBytes / (128 << 10)); err != nil {
		b.Fatal(err)
	}
	l := newLoad(q, opcode, bytes, depth)
	if err := l.Run(1000); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(bytes))
	b.ReportAllocs()
	b.ResetTimer()
	if err := l.Run(b.N); err != nil {
		b.Fatal(err)
	}
}
