// Package etcdproc runs servers of etcd for tests: jbofd built with the tag etcd, in processes that can be stopped,
// killed and started again.
package etcdproc

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// wait is for how long a server may take to start on a busy machine.
const wait = 2 * time.Minute

// Environ is the variable that names a jbofd with the tag etcd, if there is one already: several packages need it, and
// linking it takes seconds.
const Environ = "TEST_ETCD"

var build = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "jbofd-etcd-")
	if err != nil {
		return "", err
	}
	binary := filepath.Join(dir, "jbofd")
	cmd := exec.Command("go", "build", "-tags", "etcd", "-ldflags", "-s -w", "-o", binary, "jbofd/cmd/jbofd")
	// The same for tests with the race detector, which would slow the server down and be built once more.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return dir, fmt.Errorf("building jbofd: %w\n%s", err, out)
	}
	return dir, nil
})

// Main runs the tests of a package that uses servers, removes what was built for it, and exits.
func Main(m *testing.M) { os.Exit(Run(m)) }

// Run is Main for packages that have something to do themselves before they exit with its code.
func Run(m *testing.M) (code int) {
	code = m.Run()
	built.Lock()
	if built.dir != "" {
		if err := os.RemoveAll(built.dir); err != nil {
			fmt.Fprintln(os.Stderr, "etcdproc:", err)
			code = 1
		}
	}
	built.Unlock()
	return code
}

var built struct {
	sync.Mutex
	dir string
}

// Server is a cluster of one server.
type Server struct {
	// URL is for clients.
	URL string
	dir string
	t   testing.TB
	tls []string
	// host is an address of its own, so that nothing else has its ports, also while it is down.
	host string
	proc *process
}

// process is a process that has been started.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	log  strings.Builder // to be read when done is closed
}

// Options are those of Start.
type Options struct {
	// Host is a loopback address that nothing else uses.
	Host string
	// Cert, Key and CA are files, empty: none.
	Cert, Key, CA string
}

// Start starts a server with an empty directory, and waits until it serves clients. It ends with the test.
func Start(t testing.TB, o Options) *Server {
	t.Helper()
	host, _, err := net.SplitHostPort(o.Host)
	if err != nil {
		host = o.Host
	}
	s := &Server{t: t, dir: t.TempDir(), host: host}
	s.URL = "http://" + host + ":2379"
	if o.Cert != "" {
		s.URL = "https://" + host + ":2379"
		s.tls = []string{"--cert", o.Cert, "--key", o.Key, "--ca", o.CA}
	}
	t.Cleanup(s.Kill)
	s.Restart()
	return s
}

// Dir is the directory of the data.
func (s *Server) Dir() string { return filepath.Join(s.dir, "data") }

// Binary is jbofd with the tag etcd.
func Binary(t testing.TB) string {
	t.Helper()
	if path := os.Getenv(Environ); path != "" {
		return path
	}
	dir, err := build()
	built.Lock()
	built.dir = dir
	built.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "jbofd")
}

// Restart starts a server that was killed.
func (s *Server) Restart() {
	s.t.Helper()
	peer := strings.Replace(s.URL, ":2379", ":2380", 1)
	args := append([]string{"etcd", "--cluster", "test", "--name", "one", "--member", "one=" + peer, "--dir", s.Dir(),
		"--client-url", s.URL}, s.tls...)
	p := &process{cmd: exec.Command(Binary(s.t), args...), done: make(chan struct{})}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.cmd.Stderr = &p.log
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	started := make(chan error, 1)
	ready := make(chan bool, 1)
	go func() {
		// The process is killed with the thread that has started it: this one lasts as long as the process.
		runtime.LockOSThread()
		defer close(p.done)
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		line, err := bufio.NewReader(out).ReadString('\n')
		ready <- err == nil && line == "ready\n"
		_ = p.cmd.Wait() // it was killed
	}()
	if err := <-started; err != nil {
		s.t.Fatal(err)
	}
	s.proc = p
	limit := time.NewTimer(wait)
	defer limit.Stop()
	select {
	case ok := <-ready:
		if ok {
			return
		}
	case <-limit.C:
	}
	s.Kill()
	s.t.Fatalf("etcd at %s does not start: %s", s.URL, p.log.String())
}

// Kill ends the server at once, and waits for that. Idempotent.
func (s *Server) Kill() {
	if s.proc != nil {
		s.signal(syscall.SIGKILL)
		<-s.proc.done
		s.proc = nil
	}
}

// Pause stops the server's process, and Resume lets it go on.
func (s *Server) Pause() { s.signal(syscall.SIGSTOP) }

// Resume ends a Pause.
func (s *Server) Resume() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig os.Signal) {
	if err := s.proc.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		s.t.Errorf("signal %v to etcd: %v", sig, err)
	}
}

// Save copies the data of a server that was killed to a directory; Load puts it back.
func (s *Server) Save(to string) { s.copy(s.Dir(), to) }

// Load puts back what Save has copied.
func (s *Server) Load(from string) {
	if err := os.RemoveAll(s.Dir()); err != nil {
		s.t.Fatal(err)
	}
	s.copy(from, s.Dir())
}

func (s *Server) copy(from, to string) {
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		s.t.Fatal(err)
	}
}
