package vm

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/test/vm/guestproto"
)

// HostAddress is the address under which the guest reaches this machine's loopback.
const HostAddress = "10.0.2.2"

// GuestAddress is the guest's address in QEMU's user network.
const GuestAddress = "10.0.2.15"

// BootOptions say what to boot.
type BootOptions struct {
	Kernel *Kernel
	// Modules are loaded at start; hostModules when empty, which are PC's.
	Modules []string
	// Files are in the guest beside the tools that every guest has.
	Files []File
	// Forward are TCP ports of this machine's loopback that lead to the same ports of the guest at GuestAddress.
	Forward []int
	// Dir is a folder for the initramfs; the caller removes it after Close.
	Dir string
	// CPUs is the number of virtual processors, each a thread of QEMU.
	CPUs int
	// MemoryMiB is the guest's memory.
	MemoryMiB int
	// Machine are QEMU's options of the platform's machine, as ",kernel-irqchip=split", and Devices arguments for
	// devices.
	Machine string
	Devices []string
	// CommandLine is added to the kernel's.
	CommandLine string
	// Timeout is how long the guest may take to answer.
	Timeout time.Duration
}

// Guest is a running virtual machine. Its methods may be called from any goroutine.
type Guest struct {
	// BootTime is the time from the start of QEMU to the guest's greeting.
	BootTime time.Duration

	qemu *process
	port net.Conn

	mu       sync.Mutex // guards what is below
	nextID   uint64
	pending  map[uint64]chan guestproto.Response
	streams  map[uint64]*lineWriter // of pending requests
	gone     error                  // why no answer will come any more
	console  []string
	problems []string
	waiters  chan struct{} // closed and replaced when a line is added to console
}

// Result is the outcome of a command in the guest.
type Result struct {
	Command        string
	Code           int
	Stdout, Stderr string
	TimedOut       bool
	Took           time.Duration
}

// String is the command with its outcome, for messages.
func (r Result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "guest# %s\n[exit %d", r.Command, r.Code)
	if r.TimedOut {
		b.WriteString(", killed: timeout")
	}
	fmt.Fprintf(&b, ", %v]\n%s", r.Took.Round(time.Millisecond), r.Stdout)
	if r.Stderr != "" {
		fmt.Fprintf(&b, "stderr: %s", r.Stderr)
	}
	return strings.TrimRight(b.String(), "\n")
}

// kernelProblem matches a line of the kernel's log that no scenario may cause. Soft lockups and RCU stalls are left
// out: with software emulation on a busy machine they are caused by the machine.
var kernelProblem = regexp.MustCompile(
	`Kernel panic|Oops|general protection fault|` +
		`BUG: (?:unable|KASAN|scheduling|sleeping|kernel|Bad|workqueue)|kernel BUG at|WARNING: CPU|` +
		`blocked for more than|refcount_t:|Call Trace:|Attempted to kill init`)

// Boot builds guestinit and the initramfs, starts QEMU and waits for the guest's greeting.
func Boot(o BootOptions) (_ *Guest, err error) {
	if len(o.Modules) == 0 {
		o.Modules = hostModules
	}
	p := o.Kernel.Platform
	initBinary := filepath.Join(o.Dir, "guestinit")
	if err := p.build(initBinary, "./test/vm/guestinit"); err != nil {
		return nil, err
	}
	initramfs := filepath.Join(o.Dir, "initramfs.cpio")
	f, err := os.Create(initramfs)
	if err != nil {
		return nil, err
	}
	err = WriteInitramfs(f, InitramfsOptions{Kernel: o.Kernel, Modules: o.Modules, Init: initBinary, Files: o.Files})
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("initramfs: %w", err)
	}

	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	qemu, err := lookup(p.qemu)
	if err != nil {
		return nil, err
	}
	network := "user,id=net,ipv6=off"
	for _, port := range o.Forward {
		network += fmt.Sprintf(",hostfwd=tcp:127.0.0.1:%d-%s:%[1]d", port, GuestAddress)
	}
	cmd := exec.Command(qemu,
		"-accel", "tcg,thread=multi,tb-size=256", "-machine", p.machine+o.Machine, "-cpu", p.cpu,
		"-smp", fmt.Sprint(o.CPUs), "-m", fmt.Sprint(o.MemoryMiB),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", o.Kernel.Vmlinux, "-initrd", initramfs,
		"-append", p.commandLine+" quiet panic=-1 oops=panic mitigations=off nokaslr net.ifnames=0 "+o.CommandLine,
		"-serial", "stdio",
		"-device", "virtio-serial-pci",
		"-chardev", "socket,id=agent,fd=3", "-device", "virtserialport,chardev=agent,name="+guestproto.PortName,
		"-netdev", network, "-device", "virtio-net-pci,netdev=net,romfile=",
	)
	cmd.Args = append(cmd.Args, o.Devices...)
	cmd.ExtraFiles = []*os.File{theirs}
	g := &Guest{port: ours, pending: map[uint64]chan guestproto.Response{}, streams: map[uint64]*lineWriter{},
		waiters: make(chan struct{})}
	cmd.Stdout = &lineWriter{line: g.consoleLine}
	cmd.Stderr = &lineWriter{line: func(s string) { g.consoleLine("qemu: " + s) }}
	greeting := make(chan guestproto.Response, 1)
	g.pending[0] = greeting
	begin := time.Now()
	g.qemu, err = startProcess(cmd)
	if err != nil {
		ours.Close()
		return nil, err
	}
	go g.readAnswers()
	go func() {
		<-g.qemu.done
		g.fail(fmt.Errorf("QEMU ended: %v", g.qemu.err))
	}()
	timer := time.NewTimer(o.Timeout)
	defer timer.Stop()
	select {
	case r, ok := <-greeting:
		if ok && r.Problem == "" {
			g.BootTime = time.Since(begin)
			return g, nil
		}
		if !ok {
			err = g.reason()
		} else {
			err = errors.New(r.Problem)
		}
	case <-timer.C:
		err = fmt.Errorf("no greeting within %v", o.Timeout)
	}
	g.Close()
	return nil, fmt.Errorf("boot: %w\n%s", err, g.Console())
}

// goBuild builds a static binary from this module.
func goBuild(to, pkg string, flags ...string) error {
	return PC.build(to, pkg, flags...)
}

// goCommand runs go in this module, with more variables in the environment.
func goCommand(env []string, args ...string) error {
	cmd := exec.Command("go", args...)
	cmd.Dir = filepath.Join(sourceDir(), "../..")
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	ours := os.NewFile(uintptr(fds[0]), "agent")
	defer ours.Close()
	theirs := os.NewFile(uintptr(fds[1]), "agent")
	conn, err := net.FileConn(ours)
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return conn, theirs, nil
}

// lineWriter passes on whole lines.
type lineWriter struct {
	line func(string)
	rest []byte
}

func (w *lineWriter) Write(b []byte) (int, error) {
	w.rest = append(w.rest, b...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		if i < 0 {
			return len(b), nil
		}
		w.line(strings.TrimRight(string(w.rest[:i]), "\r"))
		w.rest = w.rest[i+1:]
	}
}

func (g *Guest) consoleLine(s string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.console = append(g.console, s)
	if kernelProblem.MatchString(s) {
		g.problems = append(g.problems, s)
	}
	close(g.waiters)
	g.waiters = make(chan struct{})
}

func (g *Guest) readAnswers() {
	r := bufio.NewReaderSize(g.port, 1<<16)
	for {
		line, err := r.ReadBytes('\n')
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("QEMU closed the channel")
			}
			g.fail(err)
			return
		}
		var resp guestproto.Response
		if err := json.Unmarshal(line, &resp); err != nil {
			g.fail(fmt.Errorf("answer %q: %w", line, err))
			return
		}
		g.mu.Lock()
		ch, lines := g.pending[resp.ID], g.streams[resp.ID]
		if !resp.More {
			delete(g.pending, resp.ID)
			delete(g.streams, resp.ID)
		}
		g.mu.Unlock()
		if resp.More {
			if lines != nil {
				lines.Write(resp.Stdout)
			}
			continue
		}
		if ch != nil {
			ch <- resp
		}
	}
}

// fail ends all waiting.
func (g *Guest) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gone == nil {
		g.gone = err
	}
	for id, ch := range g.pending {
		delete(g.pending, id)
		close(ch)
	}
}

func (g *Guest) reason() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.gone
}

// Job is a command that runs in the guest.
type Job struct {
	g       *Guest
	id      uint64
	command string
	begin   time.Time
	timeout time.Duration
	answer  chan guestproto.Response
}

// Start runs a shell command in the guest and returns at once. The guest kills it after timeout.
func (g *Guest) Start(timeout time.Duration, command string) (*Job, error) {
	return g.send(timeout, guestproto.Request{Command: command, TimeoutMS: timeout.Milliseconds()}, nil)
}

// Stream is Start for a command whose output is wanted line by line while it runs. line is called by one goroutine of
// the guest and must not wait.
func (g *Guest) Stream(timeout time.Duration, command string, line func(string)) (*Job, error) {
	return g.send(timeout, guestproto.Request{Command: command, TimeoutMS: timeout.Milliseconds(), Stream: true},
		&lineWriter{line: line})
}

func (g *Guest) send(timeout time.Duration, req guestproto.Request, lines *lineWriter) (*Job, error) {
	ch := make(chan guestproto.Response, 1)
	g.mu.Lock()
	if g.gone != nil {
		defer g.mu.Unlock()
		return nil, g.gone
	}
	g.nextID++
	req.ID = g.nextID
	g.pending[req.ID] = ch
	if lines != nil {
		g.streams[req.ID] = lines
	}
	g.mu.Unlock()
	line, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	if _, err := g.port.Write(append(line, '\n')); err != nil {
		return nil, err
	}
	return &Job{g: g, id: req.ID, command: req.Command, begin: time.Now(), timeout: timeout, answer: ch}, nil
}

// Wait returns the outcome of the command.
//
// Errors: the guest is gone, or does not answer although the command's time is over.
func (j *Job) Wait() (Result, error) {
	// The guest ends the command itself; the margin is for a guest that is slow, or stuck in the kernel.
	timer := time.NewTimer(j.timeout + 60*time.Second)
	defer timer.Stop()
	r := Result{Command: j.command}
	select {
	case resp, ok := <-j.answer:
		r.Took = time.Since(j.begin)
		if !ok {
			return r, fmt.Errorf("guest# %s: %w", j.command, j.g.reason())
		}
		if resp.Problem != "" {
			return r, fmt.Errorf("guest# %s: %s", j.command, resp.Problem)
		}
		r.Code, r.Stdout, r.Stderr, r.TimedOut = resp.Code, string(resp.Stdout), string(resp.Stderr), resp.TimedOut
		return r, nil
	case <-timer.C:
		return r, fmt.Errorf("guest# %s: not even killed a minute after its timeout of %v; stuck in the kernel?",
			j.command, j.timeout)
	}
}

// Running says whether no answer has come yet.
func (j *Job) Running() bool { return len(j.answer) == 0 && j.g.reason() == nil }

// Kill sends SIGKILL to the command's process group.
func (j *Job) Kill() error {
	_, err := j.g.send(10*time.Second, guestproto.Request{Kill: j.id}, nil)
	return err
}

// Do runs a shell command in the guest to its end.
func (g *Guest) Do(timeout time.Duration, command string) (Result, error) {
	j, err := g.Start(timeout, command)
	if err != nil {
		return Result{Command: command}, err
	}
	return j.Wait()
}

// succeed runs a shell command that must not fail.
func (g *Guest) succeed(timeout time.Duration, command string) error {
	r, err := g.Do(timeout, command)
	if err == nil && r.Code != 0 {
		err = errors.New(r.String())
	}
	return err
}

// put writes a file in the guest.
func (g *Guest) put(path, content string) error {
	return g.succeed(30*time.Second, fmt.Sprintf("echo %s | base64 -d > %s",
		base64.StdEncoding.EncodeToString([]byte(content)), path))
}

// Mark is a position in the console, for ConsoleSince and WaitConsole.
func (g *Guest) Mark() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.console)
}

// ConsoleSince is what the kernel and guestinit wrote since the mark.
func (g *Guest) ConsoleSince(mark int) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return strings.Join(g.console[mark:], "\n")
}

// Console is all that the kernel and guestinit wrote.
func (g *Guest) Console() string { return g.ConsoleSince(0) }

// WaitConsole waits until a line after the mark matches, and returns it.
//
// Errors: no such line within timeout, or the guest is gone.
func (g *Guest) WaitConsole(mark int, timeout time.Duration, want *regexp.Regexp) (string, error) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		g.mu.Lock()
		lines, more, gone := g.console[mark:], g.waiters, g.gone
		g.mu.Unlock()
		for _, l := range lines {
			if want.MatchString(l) {
				return l, nil
			}
		}
		mark += len(lines)
		if gone != nil {
			return "", gone
		}
		select {
		case <-more:
		case <-timer.C:
			return "", fmt.Errorf("no line like %q in the guest's log within %v", want, timeout)
		}
	}
}

// TakeProblems returns the lines of the kernel's log since the last call that report a fault in the kernel.
func (g *Guest) TakeProblems() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	p := g.problems
	g.problems = nil
	return p
}

// Close ends the machine. Idempotent.
func (g *Guest) Close() {
	g.qemu.kill()
	g.port.Close()
}
