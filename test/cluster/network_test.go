package cluster

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/testutil/etcdproc"
)

// What the test says to itself when it runs again in a network of its own.
const (
	insideEnv  = "TEST_CLUSTER_INSIDE"
	programEnv = "TEST_CLUSTER_JBOFD"
)

// The network of the process is that of its first thread, which no namespace may take for its own.
func init() {
	if os.Getenv(insideEnv) != "" {
		runtime.LockOSThread()
	}
}

// inside runs the test again, in a process that has a network and mounts of its own, and returns false; there, it
// returns true. Everything that is made there is gone with the process. It skips where the kernel does not allow it.
func inside(t *testing.T) bool {
	t.Helper()
	if os.Getenv(insideEnv) != "" {
		return true
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skipf("no networks for the nodes: %v (package iproute2)", err)
	}
	args := []string{"-test.v", "-test.run=^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$",
		"-test.timeout=" + flag.Lookup("test.timeout").Value.String()}
	flag.Visit(func(f *flag.Flag) {
		if !strings.HasPrefix(f.Name, "test.") {
			args = append(args, "-"+f.Name+"="+f.Value.String())
		}
	})
	out, err := runIsolated(t, args)
	if err != nil && len(out) == 0 {
		t.Skipf("no networks for the nodes: the kernel grants no network namespace: %v", err)
	}
	if bytes.Contains(out, []byte("--- SKIP: "+t.Name())) {
		t.Skipf("%s", out)
	}
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
	return false
}

// runIsolated runs this program with users, network and mounts of its own: nobody needs to be root for that.
func runIsolated(t *testing.T, args []string) ([]byte, error) {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), insideEnv+"=1", programEnv+"="+program, etcdproc.Environ+"="+etcdproc.Binary(t))
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL, Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	// The process is killed with the thread that has started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var out bytes.Buffer
	cmd.Stdout = &out
	if *opsFlag > 0 {
		cmd.Stdout = io.MultiWriter(&out, os.Stdout) // it takes hours
	}
	cmd.Stderr = cmd.Stdout
	err := cmd.Run()
	return out.Bytes(), err
}

// network is a router and the networks of nodes, of servers of etcd, and of this process, which are at its ends. What
// goes from one to another one passes the router, and may be dropped there, in one direction or in both.
type network struct {
	t      *testing.T
	router *namespace
	ends   []*namespace
	// cuts counts the rules that the router has had.
	cuts int
}

// hosts is the end of a network where this process is, with the clients.
const hosts = 0

// newNetwork makes a network with so many ends besides that of this process.
func newNetwork(t *testing.T, ends int) *network {
	t.Helper()
	n := &network{t: t, router: newNamespace(t)}
	n.ends = append(n.ends, nil)
	var links, rest strings.Builder
	for i := range ends + 1 {
		at := fmt.Sprintf("/proc/%d/ns/net", os.Getpid())
		if i != hosts {
			n.ends = append(n.ends, newNamespace(t))
			at = n.ends[i].path()
		}
		fmt.Fprintf(&links, "link add v%d type veth peer name eth0 netns %s\n", i, at)
		fmt.Fprintf(&rest, "addr add 10.77.%d.1/24 dev v%[1]d\nlink set v%[1]d up\n", i)
	}
	fail := func(err error) {
		t.Helper()
		if err != nil {
			t.Skipf("no networks for the nodes: %v", err)
		}
	}
	fail(n.router.ip("link set lo up\n" + links.String() + rest.String()))
	fail(n.router.do(func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
	}))
	for i, e := range n.ends {
		fail(e.ip(fmt.Sprintf("link set lo up\naddr add %s/24 dev eth0\nlink set eth0 up\nroute add default via "+
			"10.77.%d.1\n", address(i), i)))
	}
	t.Cleanup(func() {
		if err := n.ends[hosts].ip("link del eth0\n"); err != nil {
			t.Error(err)
		}
	})
	// Whether the router can drop anything is found out before a test relies on it.
	fail(n.router.ip("rule add pref 1 iif v0 to 10.77.0.0/24 blackhole\nrule del pref 1\n"))
	return n
}

// address is the one of an end.
func address(end int) string { return fmt.Sprintf("10.77.%d.2", end) }

// everybody is, as the other end of a cut, all.
const everybody = -1

// cut drops what goes from one end to another one, until the function that it returns is called.
func (n *network) cut(from, to int) (mend func()) {
	n.t.Helper()
	n.cuts++
	pref, what := n.cuts, ""
	if from != everybody {
		what += fmt.Sprintf(" iif v%d", from)
	}
	if to != everybody {
		what += fmt.Sprintf(" to 10.77.%d.0/24", to)
	}
	n.rule(fmt.Sprintf("rule add pref %d%s blackhole\n", pref, what))
	return func() {
		n.t.Helper()
		n.rule(fmt.Sprintf("rule del pref %d\n", pref))
	}
}

func (n *network) rule(text string) {
	n.t.Helper()
	if err := n.router.ip(text); err != nil {
		n.t.Fatalf("the router: %v", err)
	}
}

// namespace is a network of the kernel's: a thread that is in it, on which processes are started.
type namespace struct {
	calls chan func() error
	errs  chan error
	tid   int
}

func newNamespace(t *testing.T) *namespace {
	t.Helper()
	n := &namespace{calls: make(chan func() error), errs: make(chan error)}
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine
		for f := range n.calls {
			n.errs <- f()
		}
		close(n.errs)
	}()
	err := n.do(func() error {
		n.tid = unix.Gettid()
		return unix.Unshare(unix.CLONE_NEWNET)
	})
	if err != nil {
		t.Skipf("no networks for the nodes: %v", err)
	}
	t.Cleanup(func() {
		close(n.calls)
		<-n.errs
	})
	return n
}

// path names the namespace for other processes.
func (n *namespace) path() string { return fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), n.tid) }

// do runs f in the namespace, and what it starts is there too. A nil namespace is that of this process.
func (n *namespace) do(f func() error) error {
	if n == nil {
		return f()
	}
	n.calls <- f
	return <-n.errs
}

// ip has the tool do something, a line each.
func (n *namespace) ip(lines string) error {
	return n.do(func() error {
		cmd := exec.Command("ip", "-batch", "-")
		cmd.Stdin = strings.NewReader(lines)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("ip: %w: %s", err, out)
		}
		return nil
	})
}

// server is a server of etcd of some.
type server struct {
	t    *testing.T
	name string
	url  string
	at   *namespace
	args []string
	cmd  *exec.Cmd
	log  *os.File
}

// newServers starts servers of etcd at the ends of a network from the given one on.
func newServers(n *network, first, count int) (all []*server) {
	n.t.Helper()
	binary := etcdproc.Binary(n.t)
	var members []string
	for i := range count {
		members = append(members, "--member", fmt.Sprintf("e%d=http://%s:2380", i+1, address(first+i)))
	}
	for i := range count {
		s := &server{t: n.t, name: fmt.Sprint("e", i+1), at: n.ends[first+i],
			url: fmt.Sprintf("http://%s:2379", address(first+i))}
		dir := n.t.TempDir()
		s.args = append([]string{binary, "etcd", "--cluster", "test", "--name", s.name, "--dir", dir, "--client-url",
			s.url}, members...)
		var err error
		if s.log, err = os.CreateTemp(dir, "log"); err != nil {
			n.t.Fatal(err)
		}
		n.t.Cleanup(func() {
			s.kill()
			_ = s.log.Close()
		})
		s.start()
		all = append(all, s)
	}
	return all
}

func (s *server) start() {
	s.t.Helper()
	s.cmd = exec.Command(s.args[0], s.args[1:]...)
	s.cmd.Stderr = s.log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.at.do(s.cmd.Start); err != nil {
		s.t.Fatal(err)
	}
}

func (s *server) signal(sig syscall.Signal) {
	if err := s.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		s.t.Errorf("signal %v to %s: %v", sig, s.name, err)
	}
}

// kill ends the process at once. Idempotent.
func (s *server) kill() {
	if s.cmd.ProcessState == nil {
		s.signal(syscall.SIGKILL)
		_ = s.cmd.Wait() // says that it was killed
	}
}

// slow lets the process run for a part of the time only, until the function that it returns is called.
func (s *server) slow(run, rest time.Duration) (end func()) {
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			for _, step := range []struct {
				sig  syscall.Signal
				wait time.Duration
			}{{syscall.SIGSTOP, rest}, {syscall.SIGCONT, run}} {
				s.signal(step.sig)
				select {
				case <-time.After(step.wait):
				case <-stop:
					s.signal(syscall.SIGCONT)
					return
				}
			}
		}
	}()
	return func() {
		close(stop)
		<-done
	}
}
