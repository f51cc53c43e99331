// Command guestinit is PID 1 of the test guest: it mounts the file systems that Linux needs, loads the kernel modules
// of /modules in the order of their names, brings the network up, and then runs the commands of the test (package
// guestproto) until the machine is switched off.
//
// It never exits: when PID 1 ends the kernel panics, and the test reports that with the console.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/test/vm/guestproto"
)

// The guest's address in QEMU's user network; the machine that runs QEMU is 10.0.2.2.
const guestAddress = "10.0.2.15/24"

// path finds the tools of util-linux before busybox's, but only for what other programs start: busybox's shell takes
// its own applets first, so a scenario that needs the other blkdiscard or fstrim names it with its folder.
const path = "/usr/sbin:/usr/bin:/sbin:/bin:/busybox"

func main() {
	os.Setenv("PATH", path)
	os.Setenv("HOME", "/root")
	greeting := guestproto.Response{}
	if err := setUp(); err != nil {
		greeting.Problem = err.Error()
	}
	port, err := openPort()
	if err != nil {
		fmt.Fprintf(os.Stderr, "guestinit: %v; %s\n", err, greeting.Problem)
		hang()
	}
	a := &agent{port: port, running: make(map[uint64]int)}
	a.answer(greeting)
	if err := a.serve(port); err != nil {
		fmt.Fprintf(os.Stderr, "guestinit: the port: %v\n", err)
	}
	hang()
}

// hang keeps PID 1 alive, so that the test sees the console and not a panic caused by the exit of PID 1.
func hang() {
	for {
		time.Sleep(time.Hour)
	}
}

func setUp() error {
	for _, m := range []struct{ fstype, target string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}, {"tmpfs", "/run"},
		{"debugfs", "/sys/kernel/debug"},
	} {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fstype, m.target, m.fstype, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s on %s: %w", m.fstype, m.target, err)
		}
	}
	if err := run("/bin/busybox", "--install", "-s", "/busybox"); err != nil {
		return err
	}
	modules, err := filepath.Glob("/modules/*.ko")
	if err != nil {
		return err
	}
	for _, m := range modules {
		if err := loadModule(m); err != nil {
			return err
		}
	}
	// configfs is a module, or built in; nvmet is configured through it.
	if err := os.MkdirAll("/sys/kernel/config", 0o755); err == nil {
		if err := unix.Mount("configfs", "/sys/kernel/config", "configfs", 0, ""); err != nil &&
			!errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("mount configfs: %w", err)
		}
	}
	for _, args := range [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"ip", "link", "set", "eth0", "up"},
		{"ip", "addr", "add", guestAddress, "dev", "eth0"},
	} {
		if err := run("/bin/busybox", args...); err != nil {
			return err
		}
	}
	// Memory that an RDMA device reaches is pinned.
	unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unlimited); err != nil {
		return fmt.Errorf("limit of locked memory: %w", err)
	}
	for file, value := range map[string]string{
		"/proc/sys/kernel/printk":                 "7",  // the boot is quiet, the scenarios are not
		"/proc/sys/kernel/hung_task_timeout_secs": "60", // a task stuck for a minute is a finding
	} {
		if err := os.WriteFile(file, []byte(value), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func loadModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load %s: %w", filepath.Base(file), err)
	}
	return nil
}

func run(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// openPort finds the virtio-serial port by its name and opens it. The driver announces ports a moment after it is
// loaded.
func openPort() (*os.File, error) {
	deadline := time.Now().Add(30 * time.Second)
	for {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			b, err := os.ReadFile(n)
			if err == nil && strings.TrimSpace(string(b)) == guestproto.PortName {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_RDWR, 0)
			}
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("no virtio-serial port named %s", guestproto.PortName)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// agent runs requests and answers them.
type agent struct {
	mu      sync.Mutex // guards what is below
	port    *os.File
	running map[uint64]int // process group of each running request
}

func (a *agent) serve(port *os.File) error {
	lines := bufio.NewReaderSize(port, 1<<16)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return err
		}
		var req guestproto.Request
		if err := json.Unmarshal(line, &req); err != nil {
			return fmt.Errorf("request %q: %w", line, err)
		}
		if req.Kill != 0 {
			a.kill(req.Kill)
			a.answer(guestproto.Response{ID: req.ID})
			continue
		}
		go func() { a.answer(a.run(req)) }()
	}
}

func (a *agent) answer(resp guestproto.Response) {
	b, err := json.Marshal(resp)
	if err != nil {
		b = []byte(fmt.Sprintf(`{"id":%d,"problem":"answer cannot be encoded"}`, resp.ID))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, err := a.port.Write(append(b, '\n')); err != nil {
		fmt.Fprintf(os.Stderr, "guestinit: answer %d: %v\n", resp.ID, err)
	}
}

// stream sends what a command writes at once.
type stream struct {
	a  *agent
	id uint64
}

func (s *stream) Write(b []byte) (int, error) {
	s.a.answer(guestproto.Response{ID: s.id, More: true, Stdout: b})
	return len(b), nil
}

func (a *agent) kill(id uint64) {
	a.mu.Lock()
	pgid := a.running[id]
	a.mu.Unlock()
	if pgid != 0 {
		unix.Kill(-pgid, unix.SIGKILL)
	}
}

func (a *agent) run(req guestproto.Request) guestproto.Response {
	resp := guestproto.Response{ID: req.ID}
	var stdout, stderr bytes.Buffer
	cmd := exec.Command("/bin/busybox", "sh", "-c", req.Command)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if req.Stream {
		both := &stream{a: a, id: req.ID}
		cmd.Stdout, cmd.Stderr = both, both // one value for both makes one pipe
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// A grandchild that keeps the pipes open must not delay the response.
	cmd.WaitDelay = 2 * time.Second
	if err := cmd.Start(); err != nil {
		resp.Problem = err.Error()
		return resp
	}
	pgid := cmd.Process.Pid
	a.mu.Lock()
	a.running[req.ID] = pgid
	a.mu.Unlock()
	var timer *time.Timer
	if req.TimeoutMS > 0 {
		timer = time.AfterFunc(time.Duration(req.TimeoutMS)*time.Millisecond, func() { unix.Kill(-pgid, unix.SIGKILL) })
	}
	err := cmd.Wait()
	if timer != nil && !timer.Stop() {
		resp.TimedOut = true
	}
	a.mu.Lock()
	delete(a.running, req.ID)
	a.mu.Unlock()
	resp.Stdout, resp.Stderr = stdout.Bytes(), stderr.Bytes()
	var exit *exec.ExitError
	switch {
	case err == nil || errors.Is(err, exec.ErrWaitDelay):
	case errors.As(err, &exit):
		ws := exit.Sys().(syscall.WaitStatus)
		resp.Code = ws.ExitStatus()
		if ws.Signaled() {
			resp.Code = 128 + int(ws.Signal())
		}
	default:
		resp.Problem = err.Error()
	}
	return resp
}
