package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// SSD describes a drive of the daemon under test.
type SSD struct {
	Name string
	// Backend is mem or file. A file is created in the daemon's directory.
	Backend string
	Size    string
	// Fault is the YAML of the section fault; empty for none.
	Fault string
}

// Namespace describes a namespace of the daemon under test.
type Namespace struct {
	NSID      int
	SSD, Size string
	// BlockSize is 0 for a key-value namespace.
	BlockSize int
	// UUID is chosen by the daemon if it is empty.
	UUID string
	// Hosts lists the hosts that may see the namespace; empty stands for all hosts.
	Hosts []string
}

// Subsystem describes a subsystem of the daemon under test.
type Subsystem struct {
	NQN string
	// Hosts lists the hosts that may connect; nil stands for any host.
	Hosts      []string
	Namespaces []Namespace
}

// Setup is the part of the daemon's configuration that a scenario varies.
type Setup struct {
	SSDs       []SSD
	Subsystems []Subsystem
	// Limits is the YAML of the section limits; empty for the defaults.
	Limits string
}

func quoted(list []string) string {
	q := make([]string, len(list))
	for i, s := range list {
		q[i] = strconv.Quote(s)
	}
	return "[" + strings.Join(q, ", ") + "]"
}

// yaml returns the configuration file.
func (s Setup) yaml(dir string, e endpoints) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("node: {name: vm, data_dir: %q}", dir)
	line("log: {level: debug, format: text}")
	line("metrics: {address: \"%s:%d\"}", e.metricsIP, e.metrics)
	line("admin: {socket: \"\"}")
	line("discovery: {address: \"%s:%d\"}", e.ip, e.discovery)
	line("listeners:")
	line("  - {transport: %s, address: \"%s:%d\"}", e.transport, e.ip, e.io)
	line("  - {transport: tcp, address: \"%s:%d\"}", e.ip, e.second)
	if e.ip6 != "" {
		line("  - {transport: %s, address: \"[%s]:%d\"}", e.transport, e.ip6, e.io)
	}
	line("ssds:")
	for _, d := range s.SSDs {
		line("  - name: %s\n    backend: %s\n    size: %s", d.Name, d.Backend, d.Size)
		if d.Backend == "file" {
			line("    path: %q\n    create: true", filepath.Join(dir, d.Name+".img"))
		}
		if d.Fault != "" {
			line("    fault: %s", d.Fault)
		}
	}
	line("subsystems:")
	for _, sub := range s.Subsystems {
		line("  - nqn: %s", sub.NQN)
		if sub.Hosts == nil {
			line("    allow_any_host: true")
		} else {
			line("    hosts: %s", quoted(sub.Hosts))
		}
		line("    namespaces:")
		for _, n := range sub.Namespaces {
			extra := ""
			if n.UUID != "" {
				extra += ", uuid: " + n.UUID
			}
			if n.Hosts != nil {
				extra += ", hosts: " + quoted(n.Hosts)
			}
			kind := fmt.Sprintf("block_size: %d", n.BlockSize)
			if n.BlockSize == 0 {
				kind = "type: kv"
			}
			line("      - {nsid: %d, ssd: %s, size: %s, %s%s}", n.NSID, n.SSD, n.Size, kind, extra)
		}
	}
	if s.Limits != "" {
		line("limits: %s", s.Limits)
	}
	return b.String()
}

// Daemon is a jbofd on this machine's loopback or in the guest. One goroutine may call its methods.
type Daemon struct {
	site   site
	dir    string
	at     endpoints
	drives int // in the last configuration
	proc   running
	killed bool // by Kill or Stop, and not started since

	mu    sync.Mutex // guards the following fields
	lines []string
}

// givenPorts holds the ports that freePort has returned.
var givenPorts = struct {
	mu  sync.Mutex
	set map[int]bool
}{set: map[int]bool{}}

// freePort returns a port that nothing listens on and that it has not returned before. The port is below the range of
// ephemeral ports: while the daemon is down, QEMU's attempts to connect to it must not use the port themselves.
func freePort() (int, error) {
	givenPorts.mu.Lock()
	defer givenPorts.mu.Unlock()
	for range 1000 {
		port := 20000 + rand.IntN(10000)
		if givenPorts.set[port] {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			givenPorts.set[port] = true
			return port, l.Close()
		}
	}
	return 0, errors.New("no free port between 20000 and 30000")
}

// newDaemon prepares a daemon and its directory. Configure and Start must follow.
func newDaemon(at site) (*Daemon, error) {
	dir, e, err := at.prepare()
	if err != nil {
		return nil, err
	}
	return &Daemon{site: at, dir: dir, at: e}, nil
}

// Configure writes the configuration file. A running daemon applies it at Reload.
func (d *Daemon) Configure(s Setup) error {
	d.drives = len(s.SSDs)
	return d.site.write(d.configFile(), s.yaml(d.dir, d.at))
}

func (d *Daemon) configFile() string { return filepath.Join(d.dir, "jbofd.yaml") }

// Start starts the daemon, for the first time or again on the same ports, and waits until it is ready.
func (d *Daemon) Start() error {
	d.logLine("--- start ---")
	p, err := d.site.start(d.dir, d.configFile(), d.logLine)
	if err != nil {
		return err
	}
	d.proc, d.killed = p, false
	deadline := time.Now().Add(30 * time.Second)
	for {
		if p.exited() {
			return fmt.Errorf("jbofd ended at start: %v\n%s", p.outcome(), d.Log())
		}
		if err = d.get("/readyz", io.Discard); err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			p.kill()
			return fmt.Errorf("jbofd is not ready: %w\n%s", err, d.Log())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (d *Daemon) get(path string, w io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		fmt.Sprintf("http://127.0.0.1:%d%s", d.at.metrics, path), nil)
	if err != nil {
		return err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(resp.Body)
		return fmt.Errorf("%s: %s: %s", path, resp.Status, strings.TrimSpace(string(b)))
	}
	_, err = io.Copy(w, resp.Body)
	return err
}

// Metrics are the samples of /metrics: name with labels as written, to value.
type Metrics map[string]float64

// Sum returns the sum of all samples of a metric whose labels contain every given string, for example `op="read"`.
func (m Metrics) Sum(name string, labels ...string) float64 {
	var sum float64
	for sample, v := range m {
		n, l, _ := strings.Cut(sample, "{")
		if n != name {
			continue
		}
		match := true
		for _, want := range labels {
			match = match && strings.Contains(l, want)
		}
		if match {
			sum += v
		}
	}
	return sum
}

// Has reports whether there is any sample of a metric.
func (m Metrics) Has(name string) bool {
	for sample := range m {
		if n, _, _ := strings.Cut(sample, "{"); n == name {
			return true
		}
	}
	return false
}

// Metrics reads /metrics.
func (d *Daemon) Metrics() (Metrics, error) {
	var b strings.Builder
	if err := d.get("/metrics", &b); err != nil {
		return nil, err
	}
	return parseMetrics(b.String())
}

func parseMetrics(text string) (Metrics, error) {
	m := Metrics{}
	lines := bufio.NewScanner(strings.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		l := lines.Text()
		if l == "" || strings.HasPrefix(l, "#") {
			continue
		}
		// A value follows the last space outside of the labels, because jbofd exports no timestamps.
		i := strings.LastIndexByte(l, ' ')
		if i < 0 {
			return nil, fmt.Errorf("metrics: no value in %q", l)
		}
		v, err := strconv.ParseFloat(l[i+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("metrics: %q: %w", l, err)
		}
		m[l[:i]] = v
	}
	return m, lines.Err()
}

// Reload makes the daemon reload its configuration.
func (d *Daemon) Reload() error { return d.proc.signal(syscall.SIGHUP) }

// Freeze suspends the process. Thaw resumes it.
func (d *Daemon) Freeze() error { return d.proc.signal(syscall.SIGSTOP) }

// Thaw ends a Freeze.
func (d *Daemon) Thaw() error { return d.proc.signal(syscall.SIGCONT) }

// Kill kills the process, which to the process is like a power failure.
func (d *Daemon) Kill() {
	d.killed = true
	d.proc.kill()
}

// Running reports whether the process is running.
func (d *Daemon) Running() bool { return d.proc != nil && !d.proc.exited() }

// Stop stops the daemon and returns how long that took.
//
// Errors: a nonzero exit code; the daemon has not exited within 10 s.
func (d *Daemon) Stop() (time.Duration, error) {
	d.killed = true
	begin := time.Now()
	if err := d.proc.signal(syscall.SIGTERM); err != nil {
		return 0, err
	}
	timer := time.NewTimer(10 * time.Second)
	defer timer.Stop()
	select {
	case <-d.proc.ended():
		return time.Since(begin), d.proc.outcome()
	case <-timer.C:
		d.proc.kill()
		return time.Since(begin), errors.New("jbofd did not end within 10 s of SIGTERM")
	}
}

// OpenFiles is the number of file descriptors of the daemon.
func (d *Daemon) OpenFiles() (int, error) { return d.proc.openFiles() }

func (d *Daemon) logLine(s string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = append(d.lines, s)
}

// Log returns everything that the daemon has written since its first start.
func (d *Daemon) Log() string { return strings.Join(d.logSince(0), "\n") }

// LogMark is a position in the log, for LogMatches.
func (d *Daemon) LogMark() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.lines)
}

func (d *Daemon) logSince(mark int) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]string(nil), d.lines[mark:]...)
}

// LogMatches returns the first line since the mark that matches all patterns; empty when there is none.
func (d *Daemon) LogMatches(mark int, patterns ...*regexp.Regexp) string {
next:
	for _, l := range d.logSince(mark) {
		for _, p := range patterns {
			if !p.MatchString(l) {
				continue next
			}
		}
		return l
	}
	return ""
}
