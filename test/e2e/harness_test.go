package e2e

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/buildtags"
	"jbofd/internal/testutil/loopback"
)

var (
	seed       = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")
	binaryPath = flag.String("daemon", "", "jbofd `binary` to test; default: built from this tree, like this test")
	rdmaIP     = flag.String("rdma", "", "IP address with an RDMA device: the daemon listens there by RDMA, for tests "+
		"that use no sockets of their own; it and this test need the tag rdma")
	daemonLog = flag.Bool("daemon-log", false, "show every daemon's log")
)

// wait is the time limit for an expected event on a busy machine.
const wait = 20 * time.Second

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = 1
	}
	os.Exit(code)
}

// programs is the directory of what is built.
var programs string

// run builds the daemon, unless one was given, and runs the tests.
func run(m *testing.M) (code int, err error) {
	if programs, err = os.MkdirTemp("", "jbofd-e2e-"); err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(programs) }()
	if *binaryPath == "" {
		*binaryPath = filepath.Join(programs, "jbofd")
		args := []string{"build", "-o", *binaryPath}
		if buildtags.Race {
			args = append(args, "-race")
		}
		if buildtags.Invariants {
			args = append(args, "-tags", "invariants")
		}
		if out, err := exec.Command("go", append(args, "jbofd/cmd/jbofd")...).CombinedOutput(); err != nil {
			return 0, fmt.Errorf("building the daemon: %w\n%s", err, out)
		}
	}
	if *binaryPath, err = filepath.Abs(*binaryPath); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// random returns a random number generator for a test and logs the seed that repeats it.
func random(t testing.TB) *rand.Rand {
	t.Helper()
	t.Logf("-seed %d", *seed)
	return rand.New(rand.NewPCG(*seed, 0x653265))
}

// eventually polls ok until it returns true, for at most wait.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	within(t, wait, what, ok)
}

func within(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(limit); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("after %v not yet: %s", limit, what)
		}
	}
}

// setup is the part of the daemon's configuration that a scenario varies: YAML of sections.
type setup struct {
	// ssds, subsystems and limits are bodies of the sections. @DIR@ stands for the daemon's directory.
	ssds, subsystems, limits string
	// tenants is the body of that section. The section is omitted if tenants is empty.
	tenants string
	// log is the body of the section. discovery and metrics are additional keys of their sections, after a comma.
	log, discovery, metrics string
}

// oneMem is one drive in memory with a namespace of 64 MiB for all hosts.
var oneMem = setup{ssds: memSSD, subsystems: openSubsystem}

const (
	memSSD        = "  - {name: ssd0, backend: mem, size: 128MiB}\n"
	fileSSD       = "  - {name: ssd0, backend: file, path: \"@DIR@/ssd0.img\", size: 128MiB, create: true}\n"
	nqnA          = "nqn.2026-11.example.jbofd:a"
	nqnB          = "nqn.2026-11.example.jbofd:b"
	hostA         = "nqn.2026-11.example.host:a"
	hostB         = "nqn.2026-11.example.host:b"
	openSubsystem = `  - nqn: nqn.2026-11.example.jbofd:a
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: ssd0, size: 64MiB, block_size: 512}
`
)

// daemon is a jbofd process. Only the test's goroutine may call its methods, unless a comment says otherwise.
type daemon struct {
	t    testing.TB
	dir  string
	file string // the configuration
	conf setup

	// addr, discovery and metrics are the addresses that the daemon listens on; restarts keep them. listen is the
	// configured address, which is any free port at the first start.
	addr, discovery, metrics string
	listen                   [3]string

	cmd    *exec.Cmd
	exited chan struct{}
	log    *logBuffer
	base   resources
	// laneBytes is scratch memory that drives keep after the first Compare or Verify.
	laneBytes int64
	// prefix is a command that runs the daemon.
	prefix []string
}

// resources counts the resources that a daemon holds. Workers of drives on files, which their requests start and which
// end with the drive, are not among the goroutines: how many there are depends on which requests came at one time.
type resources struct {
	connections, buffers, goroutines, workers, fds float64
}

// start runs a daemon until the test ends, and then checks that it has released all resources.
func start(t testing.TB, s setup) *daemon {
	t.Helper()
	d := newDaemon(t, s)
	d.launch()
	return d
}

// newDaemon prepares a daemon without running it.
func newDaemon(t testing.TB, s setup) *daemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "jbofd") // a short path, because it contains a unix socket
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{t: t, dir: dir, file: filepath.Join(dir, "jbofd.yaml"), conf: s,
		listen: [3]string{loopback.Address(), loopback.Address(), loopback.Address()}, log: &logBuffer{}}
	if *rdmaIP != "" {
		d.listen[0] = net.JoinHostPort(*rdmaIP, "0")
	}
	d.write(s)
	t.Cleanup(func() {
		if d.running() { // a test gave up
			_ = d.cmd.Process.Kill()
			<-d.exited
		}
		if t.Failed() || *daemonLog {
			t.Logf("the daemon's log:\n%s", d.log.tail(60000))
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		if d.running() {
			d.finish()
		}
	})
	return d
}

// write writes the configuration, for a start or for a reload.
func (d *daemon) write(s setup) {
	d.t.Helper()
	d.conf = s
	var b strings.Builder
	level := s.log
	if level == "" {
		level = "level: info"
	}
	fmt.Fprintf(&b, "node: {name: e2e, data_dir: %q}\nlog: {%s}\n", d.dir, level)
	fmt.Fprintf(&b, "metrics: {address: %q, pprof: true%s}\nadmin: {socket: %q}\n", d.listen[2], s.metrics, d.socket())
	transport, address := "tcp", d.listen[0]
	if *rdmaIP != "" {
		transport = "rdma"
	}
	fmt.Fprintf(&b, "discovery: {address: %q%s}\nlisteners:\n  - {transport: %s, address: %q}\n", d.listen[1],
		s.discovery, transport, strings.TrimPrefix(address, "rdma://"))
	b.WriteString("ssds:\n" + s.ssds + "subsystems:\n" + s.subsystems)
	if s.tenants != "" {
		b.WriteString("tenants:\n" + s.tenants)
	}
	if s.limits != "" {
		b.WriteString("limits: {" + s.limits + "}\n")
	}
	if err := os.WriteFile(d.file, []byte(strings.ReplaceAll(b.String(), "@DIR@", d.dir)), 0o600); err != nil {
		d.t.Fatal(err)
	}
}

func (d *daemon) socket() string { return filepath.Join(d.dir, "admin.sock") }

// spawn starts the process and does not wait for it to be ready.
func (d *daemon) spawn() {
	d.t.Helper()
	if d.addr != "" {
		d.listen = [3]string{d.addr, d.discovery, d.metrics}
		d.write(d.conf)
	}
	args := append(append([]string(nil), d.prefix...), *binaryPath, "--config", d.file)
	d.cmd = exec.Command(args[0], args[1:]...)
	d.cmd.Env = append(os.Environ(), "GORACE=halt_on_error=0 exitcode=66 atexit_sleep_ms=0")
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	d.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan struct{}) {
		_ = cmd.Wait() // finish examines the state of the process
		close(exited)
	}(d.cmd, d.exited)
}

// launch starts the process and waits until it is ready.
func (d *daemon) launch() {
	d.t.Helper()
	d.spawn()
	d.await()
	if *rdmaIP != "" {
		d.meet()
	}
	d.base = d.resources()
	for range 2 { // repeated, because the previous requests may still be in progress
		r := d.resources()
		d.base.goroutines, d.base.fds = min(d.base.goroutines, r.goroutines), min(d.base.fds, r.fds)
	}
}

// meet connects enough hosts to make the daemon open its RDMA device and all completion queues of it, which it keeps.
func (d *daemon) meet() {
	d.t.Helper()
	for range runtime.GOMAXPROCS(0) {
		h, err := client.ConnectDiscovery(ctx(d.t), d.options(hostA, ""))
		if err != nil {
			d.t.Fatal(err)
		}
		defer func() { _ = h.Close() }()
	}
}

// await waits until hosts can connect, and determines the addresses. A daemon without one of its drives is not ready
// but serves.
func (d *daemon) await() {
	d.t.Helper()
	var last error // why the daemon was not taken for ready at the last look
	defer func() {
		if d.t.Failed() {
			d.t.Logf("the admin socket answered: %v", last)
		}
	}()
	// A file system that is busy takes its time to make the socket and to keep the labels of the drives.
	within(d.t, 3*wait, "the daemon answers on its admin socket", func() bool {
		select {
		case <-d.exited:
			d.t.Fatalf("the daemon has ended: %v", d.cmd.ProcessState)
		default:
		}
		var s status
		if last = d.admin("GET", "/v1/status", &s); last != nil {
			return false
		}
		if last = fmt.Errorf("%+v", s); len(s.Addresses.Listeners) == 0 {
			return false
		}
		d.addr, d.discovery, d.metrics = s.Addresses.Listeners[0], s.Addresses.Discovery, s.Addresses.Metrics
		for _, r := range s.Reasons {
			if r.Component == "daemon" {
				return false
			}
		}
		return true
	})
}

func (d *daemon) running() bool {
	if d.exited == nil {
		return false
	}
	select {
	case <-d.exited:
		return false
	default:
		return true
	}
}

func (d *daemon) signal(s syscall.Signal) {
	d.t.Helper()
	if err := d.cmd.Process.Signal(s); err != nil {
		d.t.Fatalf("%v: %v", s, err)
	}
}

// kill sends SIGKILL.
func (d *daemon) kill() {
	d.t.Helper()
	d.signal(syscall.SIGKILL)
	<-d.exited
}

// term stops the daemon with SIGTERM and returns how long that took. The daemon must exit without an error.
func (d *daemon) term() time.Duration {
	d.t.Helper()
	began := time.Now()
	d.signal(syscall.SIGTERM)
	select {
	case <-d.exited:
	case <-time.After(wait):
		d.signal(syscall.SIGQUIT) // for the stacks
		<-d.exited
		d.t.Fatalf("SIGTERM: not stopped after %v", wait)
	}
	took := time.Since(began)
	if !d.cmd.ProcessState.Success() {
		d.t.Errorf("SIGTERM: the daemon ended with %v", d.cmd.ProcessState)
	}
	d.clean()
	return took
}

// finish checks that the daemon has released all resources, and stops it.
func (d *daemon) finish() {
	d.t.Helper()
	d.quiet()
	if took := d.term(); took > stopLimit {
		d.t.Errorf("SIGTERM: stopped after %v, the limit is %v", took, stopLimit)
	}
}

// stopLimit is the time limit for a stop after SIGTERM.
const stopLimit = 5 * time.Second

// quiet waits until the daemon holds no more resources than after its start.
func (d *daemon) quiet() {
	d.t.Helper()
	var r resources
	ok := func() bool {
		r = d.resources()
		return r.connections == 0 && r.buffers <= d.base.buffers+float64(d.laneBytes) &&
			r.goroutines <= d.base.goroutines && r.workers <= d.mostWorkers() && r.fds <= d.base.fds
	}
	deadline := time.Now().Add(wait)
	for tick := time.NewTicker(20 * time.Millisecond); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			_, _, stacks := d.goroutines()
			d.t.Errorf("with all hosts gone the daemon holds %+v, at its start %+v (and %d bytes of scratch memory): "+
				"a leak\n%s", r, d.base, d.laneBytes, stacks)
			return
		}
	}
}

var badLog = regexp.MustCompile(`(?m)^.*(panic:|DATA RACE|fatal error:|goroutine \d+ \[|leaked).*$`)

// clean checks that the log contains no panics, races or leaks.
func (d *daemon) clean() {
	d.t.Helper()
	if bad := badLog.FindString(d.log.String()); bad != "" {
		d.t.Errorf("in the daemon's log: %s", bad)
	}
}

// reload sends SIGHUP and waits for the outcome of the reload.
func (d *daemon) reload(s setup) (ok bool) {
	d.t.Helper()
	good, bad := d.metric("jbof_config_reloads_total", "result", "success"),
		d.metric("jbof_config_reloads_total", "result", "failure")
	d.write(s)
	d.signal(syscall.SIGHUP)
	eventually(d.t, "the reload is counted", func() bool {
		ok = d.metric("jbof_config_reloads_total", "result", "success") > good
		return ok || d.metric("jbof_config_reloads_total", "result", "failure") > bad
	})
	return ok
}

func (d *daemon) resources() resources {
	d.t.Helper()
	f := d.scrape()
	n, workers, _ := d.goroutines()
	return resources{sum(f["jbof_connections"]), sum(f["jbof_buffer_pool_bytes"], "state", "used"), n, workers,
		sum(f["process_open_fds"])}
}

// mostWorkers is how many workers the drives on files have at most.
func (d *daemon) mostWorkers() float64 {
	f := d.scrape()["jbof_ssd_info"]
	return 4*sum(f, "engine", "io_uring") + 16*sum(f, "engine", "threads")
}

// options returns the options with which the Go host connects to the daemon's listener.
func (d *daemon) options(hostNQN, subNQN string) client.Options {
	return client.Options{Address: d.addr, SubNQN: subNQN, HostNQN: hostNQN, ReconnectDelay: 50 * time.Millisecond,
		ConnectTimeout: wait, CtrlLossTimeout: time.Minute}
}

// connect connects a host until the test ends.
func (d *daemon) connect(o client.Options) *client.Controller {
	d.t.Helper()
	c, err := client.Connect(ctx(d.t), o)
	if err != nil {
		d.t.Fatal(err)
	}
	// Cleanups run in reverse order, so this one runs before the daemon's, which checks that all hosts are gone.
	d.t.Cleanup(func() {
		if err := c.Close(); err != nil && d.running() {
			d.t.Logf("closing %s: %v", o.HostNQN, err)
		}
	})
	return c
}

// namespace connects a host and opens a namespace.
func (d *daemon) namespace(o client.Options, nsid uint32) *client.Namespace {
	d.t.Helper()
	return open(d.t, d.connect(o), nsid)
}

func open(t testing.TB, c *client.Controller, nsid uint32) *client.Namespace {
	t.Helper()
	n, err := c.Namespace(ctx(t), nsid)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// ctx returns the context for one step of a test.
func ctx(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

// fill writes a pattern that identifies the position of every sector and a generation.
func fill(p []byte, off int64, generation uint64) {
	for i := 0; i < len(p); i += 512 {
		// SplitMix64 in a register: the race detector records each access to the state of a generator, and each byte.
		x := (uint64(off+int64(i))*0xBF58476D1CE4E5B9 ^ generation) * 0x94D049BB133111EB
		for k := i; k < i+512; k += 8 {
			x += 0x9E3779B97F4A7C15
			z := (x ^ x>>30) * 0xBF58476D1CE4E5B9
			z = (z ^ z>>27) * 0x94D049BB133111EB
			binary.LittleEndian.PutUint64(p[k:], z^z>>31)
		}
	}
}
