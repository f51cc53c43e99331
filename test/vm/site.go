package vm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// endpoints are the addresses that a daemon listens on. Its metrics are always reachable at 127.0.0.1 of this machine.
type endpoints struct {
	transport string // of the first listener for subsystems; the second is TCP
	ip        string // of all that hosts reach
	seen      string // the address at which the guest reaches ip
	metricsIP string // where the daemon listens for its metrics
	ip6       string // a third listener, of the first's transport and port, is there if not empty

	io, second         int // ports of the listeners for subsystems
	discovery, metrics int
}

// site is the place where a daemon runs: this machine or the guest.
type site interface {
	// prepare creates a directory for a daemon and returns the addresses to listen on.
	prepare() (dir string, e endpoints, err error)
	// write writes a file.
	write(file, content string) error
	// start runs the daemon and passes each line of its output to line.
	start(dir, config string, line func(string)) (running, error)
	// remove removes a directory that prepare created.
	remove(dir string)
}

// running is a process of a daemon.
type running interface {
	signal(syscall.Signal) error
	// kill sends SIGKILL and waits for the end.
	kill()
	exited() bool
	// ended is closed when the process has exited.
	ended() <-chan struct{}
	// outcome is nil for exit code 0. It is valid after the process has exited.
	outcome() error
	openFiles() (int, error)
}

// localSite is this machine; the guest reaches its loopback.
type localSite struct{ binary string }

func (s localSite) prepare() (string, endpoints, error) {
	e := endpoints{transport: "tcp", ip: "127.0.0.1", seen: HostAddress, metricsIP: "127.0.0.1"}
	for _, p := range []*int{&e.io, &e.second, &e.discovery, &e.metrics} {
		port, err := freePort()
		if err != nil {
			return "", e, err
		}
		*p = port
	}
	// The directory is not in the system's directory for temporary files, which may be a tmpfs, and tmpfs lacks
	// O_DIRECT in older kernels.
	dir, err := os.MkdirTemp(CacheDir(), "jbofd-")
	return dir, e, err
}

func (s localSite) write(file, content string) error {
	return os.WriteFile(file, []byte(content), 0o644)
}

func (s localSite) remove(dir string) { os.RemoveAll(dir) }

func (s localSite) start(dir, config string, line func(string)) (running, error) {
	cmd := exec.Command(s.binary, "--config", config)
	cmd.Dir = dir
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "JBOFD_") {
			cmd.Env = append(cmd.Env, e)
		}
	}
	w := &lineWriter{line: line}
	cmd.Stdout, cmd.Stderr = w, w
	return startProcess(cmd)
}

// guestSite is the guest. Host and daemon share its kernel and communicate over its virtual cable.
type guestSite struct {
	g         *Guest
	transport string
	metrics   []int // forwarded ports
	made      int   // folders so far
}

// The daemon in the guest, and the memory disk for its directories, whose file system supports O_DIRECT; the guest's
// root file system does not.
const (
	guestJbofd = "/usr/sbin/jbofd"
	guestData  = "/data"
)

func (s *guestSite) prepare() (string, endpoints, error) {
	s.made++
	dir := fmt.Sprintf("%s/%d", guestData, s.made)
	e := endpoints{
		transport: s.transport, ip: TargetAddress, seen: TargetAddress, ip6: TargetAddress6, metricsIP: GuestAddress,
		io: 4420 + 10*s.made, second: 4421 + 10*s.made, discovery: 4422 + 10*s.made,
		metrics: s.metrics[s.made%len(s.metrics)],
	}
	return dir, e, s.g.succeed(10*time.Second, "mkdir -p "+dir)
}

func (s *guestSite) write(file, content string) error { return s.g.put(file, content) }

func (s *guestSite) remove(dir string) {
	s.g.Do(30*time.Second, "rm -rf "+dir) // the next daemon's folder has another name
}

func (s *guestSite) start(dir, config string, line func(string)) (running, error) {
	p := &guestProcess{g: s.g, pid: dir + "/pid", done: make(chan struct{})}
	var err error
	p.job, err = s.g.Stream(time.Hour, fmt.Sprintf("cd %s && echo $$ > %s && exec %s --config %s", dir, p.pid,
		guestJbofd, config), line)
	if err != nil {
		return nil, err
	}
	go func() {
		defer close(p.done)
		r, err := p.job.Wait()
		if err == nil && r.Code != 0 {
			err = fmt.Errorf("exit code %d", r.Code)
		}
		p.err = err
	}()
	return p, nil
}

// guestProcess is a daemon in the guest.
type guestProcess struct {
	g    *Guest
	job  *Job
	pid  string // file with the process identifier
	done chan struct{}
	err  error // valid when done is closed
}

func (p *guestProcess) signal(sig syscall.Signal) error {
	return p.g.succeed(10*time.Second, fmt.Sprintf("kill -%d $(cat %s)", sig, p.pid))
}

func (p *guestProcess) kill() {
	p.job.Kill() // fails only when the guest is gone, which ends the job too
	<-p.done
}

func (p *guestProcess) exited() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *guestProcess) ended() <-chan struct{} { return p.done }
func (p *guestProcess) outcome() error         { return p.err }

func (p *guestProcess) openFiles() (int, error) {
	r, err := p.g.Do(10*time.Second, fmt.Sprintf("ls /proc/$(cat %s)/fd | wc -l", p.pid))
	if err != nil {
		return 0, err
	}
	var n int
	if _, err := fmt.Sscan(r.Stdout, &n); err != nil {
		return 0, errors.New(r.String())
	}
	return n, nil
}
