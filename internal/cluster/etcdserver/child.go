package etcdserver

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Args are the arguments of jbofd that run this server.
func (c *Config) Args() []string {
	args := []string{"etcd", "--cluster", c.Cluster, "--name", c.Name, "--dir", c.Dir, "--client-url", c.ClientURL}
	for _, name := range slices.Sorted(maps.Keys(c.Members)) {
		args = append(args, "--member", name+"="+c.Members[name])
	}
	if c.CertFile != "" {
		args = append(args, "--cert", c.CertFile, "--key", c.KeyFile, "--ca", c.CAFile)
	}
	return args
}

// Child is a server in a process of its own, which is started again for ever when it ends.
type Child struct {
	binary string
	cfg    Config
	log    *slog.Logger
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{}
	lock   *os.File // of the directory; nil: none could be made

	// mu guards what follows.
	mu  sync.Mutex
	pid int
	// starts counts the processes.
	starts int
	ready  bool
}

// The time between two starts grows between these, with jitter, and begins anew when a server has served for long.
const (
	minRestart, maxRestart = 200 * time.Millisecond, 10 * time.Second
	servedLong             = time.Minute
	// stopTime is what a server has to end before it is killed.
	stopTime = 5 * time.Second
)

// ErrInUse is wrapped by the error for a directory that another daemon's server has.
var ErrInUse = errors.New("another jbofd runs its server of etcd there; each needs a node.data_dir, or an " +
	"etcd.embedded.dir, of its own")

// lockDir locks a file beside the directory of a server, because two servers of one directory wait for each other
// without a word. Where no such file can be made nobody is kept out: the server itself says what is wrong.
func lockDir(dir string) (*os.File, error) {
	_ = os.MkdirAll(filepath.Dir(dir), 0o750)
	f, err := os.OpenFile(filepath.Clean(dir)+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, nil
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errors.Join(fmt.Errorf("%s: %w", dir, ErrInUse), f.Close())
	}
	return f, nil
}

// StartChild starts a server. binary is jbofd; empty: the one that is running.
//
// Errors: what is wrong with cfg; ErrInUse.
func StartChild(binary string, cfg Config, log *slog.Logger) (*Child, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	if binary == "" {
		if !Built {
			return nil, ErrNotBuilt
		}
		binary = "/proc/self/exe" // also when the file was replaced by a newer one
	}
	lock, err := lockDir(cfg.Dir)
	if err != nil {
		return nil, err
	}
	c := &Child{binary: binary, cfg: cfg, log: log, done: make(chan struct{}), lock: lock}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	go c.run()
	return c, nil
}

// Close ends the server and waits for that. Idempotent.
func (c *Child) Close() {
	c.cancel()
	<-c.done
	_ = c.lock.Close() // it fails if there is none, and the second time
}

// State says whether the server serves, its process, and how many there have been.
func (c *Child) State() (ready bool, pid, starts int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ready, c.pid, c.starts
}

func (c *Child) run() {
	// The kernel kills a process with the thread that has started it, so that no server outlives the daemon. This one
	// ends with the goroutine.
	runtime.LockOSThread()
	defer close(c.done)
	for restart := minRestart; ; {
		began := time.Now()
		err := c.serve()
		if c.ctx.Err() != nil {
			return
		}
		if time.Since(began) > servedLong {
			restart = minRestart
		}
		c.log.Error("the server of etcd has ended", "error", err, "next_start_in", restart)
		select {
		case <-time.After(restart/2 + rand.N(restart)):
		case <-c.ctx.Done():
			return
		}
		restart = min(2*restart, maxRestart)
	}
}

// serve runs one process.
func (c *Child) serve() error {
	cmd := exec.CommandContext(c.ctx, c.binary, c.cfg.Args()...)
	cmd.Args[0] = "jbofd" // not /proc/self/exe, by which nobody finds it
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopTime
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, outW, err := os.Pipe()
	if err != nil {
		return err
	}
	logR, logW, err := os.Pipe()
	if err != nil {
		return errors.Join(err, out.Close(), outW.Close())
	}
	cmd.Stdout, cmd.Stderr = outW, logW
	err = cmd.Start()
	err = errors.Join(err, outW.Close(), logW.Close())
	var readers sync.WaitGroup
	readers.Go(func() { c.lines(out, func(string) { c.set(true, cmd.Process.Pid) }) })
	readers.Go(func() { c.lines(logR, func(line string) { relay(c.log, line, c.ctx.Err() != nil) }) })
	if err == nil {
		c.mu.Lock()
		c.pid, c.starts = cmd.Process.Pid, c.starts+1
		c.mu.Unlock()
		err = cmd.Wait()
	}
	readers.Wait()
	c.set(false, 0)
	return err
}

func (c *Child) set(ready bool, pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready, c.pid = ready, pid
}

// expected are lines of the server that are about how it is run, and that no operator can do anything about.
var expected = map[string]bool{
	"Running http and grpc server on single port. This is not recommended for production.": true,
	"simple token is not cryptographically signed":                                         true,
}

// newServer is what a server says that has no data yet.
const newServer = "missing term information"

// tolerable is by how much a heartbeat of the server may be late: two of its intervals. maxValue is how many bytes of a
// value of its log are passed on; it writes whole transactions.
const (
	tolerable = 100 * time.Millisecond
	maxValue  = 200
)

// relay logs a line of the server, which is a JSON object unless the server has panicked. The message of the record is
// the server's, so that a limit on equal messages holds for each kind of line. What it says while it is being stopped
// is for debugging: it calls the ends of its own connections errors.
func relay(log *slog.Logger, line string, stopping bool) {
	var said map[string]any
	if json.Unmarshal([]byte(line), &said) != nil {
		log.Warn("etcd says something", "line", line)
		return
	}
	msg, _ := said["msg"].(string)
	if why, _ := said["error"].(string); expected[msg] || strings.HasSuffix(why, newServer) {
		return
	}
	level := slog.LevelWarn
	if late, _ := said["exceeded-duration"].(string); late != "" {
		// A heartbeat that is late by less than that elects nobody.
		if d, err := time.ParseDuration(late); err == nil && d < tolerable {
			level = slog.LevelDebug
		}
	}
	switch said["level"] {
	case "error", "dpanic", "panic", "fatal":
		level = slog.LevelError
	}
	if stopping {
		level = slog.LevelDebug
	}
	var rest []any
	for _, name := range slices.Sorted(maps.Keys(said)) {
		switch name {
		case "level", "ts", "caller", "msg", "stacktrace":
		default:
			if text, ok := said[name].(string); ok && len(text) > maxValue {
				said[name] = strings.ToValidUTF8(text[:maxValue], "") + " …"
			}
			rest = append(rest, name, said[name])
		}
	}
	log.Log(context.Background(), level, "etcd: "+msg, rest...)
}

// lines calls f with each line of a pipe until its end, and closes it. What is too long for a line is left out.
func (c *Child) lines(r *os.File, f func(string)) {
	defer r.Close()
	b := bufio.NewReaderSize(r, 4096)
	for {
		line, tooLong, err := b.ReadLine()
		if err != nil {
			return
		}
		f(string(line))
		for tooLong && err == nil {
			_, tooLong, err = b.ReadLine()
		}
	}
}
