package cluster

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/buildtags"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/images"
	"jbofd/internal/testutil/loopback"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if program = os.Getenv(programEnv); program != "" {
		os.Exit(m.Run()) // in a network of its own
	}
	dir, err := build()
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
	program = filepath.Join(dir, "jbofd")
	code := etcdproc.Run(m)
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// program is the daemon, built as this test is built.
var program string

// wait is the time limit for what is expected of a cluster on a busy machine.
const wait = 2 * time.Minute

const (
	subNQN    = "nqn.2026-11.example.jbofd:cluster"
	partition = 2 // its namespace at each node
)

func build() (dir string, err error) {
	dir, err = os.MkdirTemp("", "jbofd-cluster-")
	if err != nil {
		return "", err
	}
	args := []string{"build", "-o", filepath.Join(dir, "jbofd")}
	if buildtags.Race {
		args = append(args, "-race")
	}
	if buildtags.Invariants {
		args = append(args, "-tags", "invariants")
	}
	if out, err := exec.Command("go", append(args, "jbofd/cmd/jbofd")...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the daemon: %w\n%s", err, out)
	}
	return dir, nil
}

// box is a node.
type box struct {
	t     testing.TB
	name  string
	dir   string
	host  string // its address, without a port
	admin *admin.Client
	cmd   *exec.Cmd
	log   *os.File
	// at is the network that the node is in, nil: that of the test. etcd and members are for its configuration.
	at            *namespace
	etcd, members string
	// shift is by how much its clocks are ahead of the machine's.
	shift time.Duration
	// drive is what its drive does wrong, as the configuration says it; empty: nothing.
	drive string
	// memory: its drive is in memory.
	memory bool
	// second: it has another drive, with another partition.
	second bool
	// away is layout.away.
	away time.Duration
	// images has its drives, nil: they are in dir.
	images *images.Images
	// paths are those of its drives.
	paths [2]string
}

// boxes are the nodes of a cluster.
type boxes []*box

// layout says what the nodes of a cluster run in.
type layout struct {
	// nodes and copies of each key.
	nodes, copies int
	// ranges of the cluster; 0: 16.
	ranges int
	// memory: drives are in memory, not files. second: each node has two, with a partition each.
	memory, second bool
	// images: the drives can be made silent or slow, or fail. Those of the first block nodes are block devices, to
	// which I/O is done with io_uring; the others are files, which have threads.
	images bool
	block  int
	// away is cluster.away; 0: the default.
	away time.Duration
	// hosts are the addresses of the nodes, and at their networks; nil: addresses and network of the test.
	hosts []string
	at    []*namespace
	// etcd are the URLs of the servers; nil: one is started.
	etcd []string
	// shift is by how much the clocks of the nodes are ahead; nil: not at all.
	shift []time.Duration
}

// newBoxes starts a cluster of so many nodes with so many copies of each key, and waits until it serves all ranges.
func newBoxes(t testing.TB, nodes, copies int) boxes {
	t.Helper()
	return startBoxes(t, layout{nodes: nodes, copies: copies})
}

// startBoxes starts a cluster and waits until it serves all ranges.
func startBoxes(t testing.TB, l layout) boxes {
	t.Helper()
	if l.ranges == 0 {
		l.ranges = 16
	}
	if l.etcd == nil {
		l.etcd = []string{etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()}).URL}
	}
	var all boxes
	members := ""
	for i := range l.nodes {
		b := &box{t: t, name: fmt.Sprint("n", i+1), memory: l.memory, second: l.second, away: l.away}
		if l.hosts == nil {
			b.host, _, _ = net.SplitHostPort(loopback.Address())
		} else {
			b.host, b.at = l.hosts[i], l.at[i]
		}
		if l.shift != nil {
			b.shift = l.shift[i]
		}
		var err error
		if b.dir, err = os.MkdirTemp("", "jbofd"); err != nil { // a short path, because it contains a unix socket
			t.Fatal(err)
		}
		if b.log, err = os.Create(filepath.Join(b.dir, "log")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.end)
		b.paths = [2]string{filepath.Join(b.dir, "ssd0.img"), filepath.Join(b.dir, "ssd1.img")}
		if l.images {
			b.makeImages(i < l.block)
		}
		members += fmt.Sprintf("    - {name: %s, address: \"%s:4430\", target: \"tcp://%[2]s:4420\"}\n", b.name, b.host)
		all = append(all, b)
	}
	for _, b := range all {
		b.etcd, b.members = `"`+strings.Join(l.etcd, `", "`)+`"`, members
		b.admin = admin.NewClient(filepath.Join(b.dir, "admin.sock"))
		b.start()
	}
	all.eventually("the cluster is made", func() error {
		_, err := all[0].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: l.copies, Ranges: l.ranges})
		if err != nil && strings.Contains(err.Error(), "there is a cluster of this name") {
			return nil // etcd has carried out an earlier attempt without an answer, while it had no leader yet
		}
		return err
	})
	all.full()
	return all
}

// configure writes the configuration.
func (b *box) configure() {
	b.t.Helper()
	drive := "path: " + b.paths[0] + b.drive
	if !strings.HasPrefix(b.paths[0], "/dev/") {
		drive += ", size: 256MiB, create: true"
	}
	if b.memory {
		drive = "backend: mem, size: 1GiB"
	}
	space := fmt.Sprintf("{nsid: %d, ssd: ssd0, size: 128MiB, type: kv, replicated: true}", partition)
	drive = "{name: ssd0, " + drive + "}"
	if b.second {
		space += strings.NewReplacer("nsid: 2", "nsid: 3", "ssd0", "ssd1").Replace(", " + space)
		drive += strings.NewReplacer(b.paths[0], b.paths[1], "ssd0", "ssd1").Replace(", " + drive)
	}
	away := ""
	if b.away > 0 {
		away = fmt.Sprintf("  away: %v\n", b.away)
	}
	text := fmt.Sprintf(`node: {name: %s, data_dir: %s}
log: {level: debug}
metrics: {address: "%[3]s:9420"}
admin: {socket: %[2]s/admin.sock}
discovery: {address: "%[3]s:8009"}
listeners: [{address: "%[3]s:4420"}]
ssds: [%[8]s]
subsystems:
  - nqn: %[4]s
    allow_any_host: true
    namespaces: [%[5]s]
cluster:
  name: test
  subsystem: %[4]s
  etcd: {endpoints: [%[6]s]}
%[9]s  nodes:
%[7]s`, b.name, b.dir, b.host, subNQN, space, b.etcd, b.members, drive, away)
	if err := os.WriteFile(filepath.Join(b.dir, "jbofd.yaml"), []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// start starts a process; an earlier one has ended.
func (b *box) start() {
	b.t.Helper()
	b.configure()
	args := []string{program, "--config", filepath.Join(b.dir, "jbofd.yaml")}
	if b.shift != 0 {
		s := fmt.Sprint(int64(b.shift.Seconds()))
		args = append([]string{"unshare", "--time", "--monotonic", s, "--boottime", s}, args...)
	}
	b.cmd = exec.Command(args[0], args[1:]...)
	b.cmd.Stdout, b.cmd.Stderr = b.log, b.log
	if b.at != nil { // its thread lasts until the node has ended, and the kernel kills the node with it
		b.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	}
	if err := b.at.do(b.cmd.Start); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) signal(s syscall.Signal) {
	if err := b.cmd.Process.Signal(s); err != nil {
		b.t.Error(err)
	}
}

// kill ends the process at once.
func (b *box) kill() {
	b.signal(syscall.SIGKILL)
	_ = b.cmd.Wait() // says that it was killed
}

// end ends the process and shows its log if the test has failed.
func (b *box) end() {
	if b.cmd != nil && b.cmd.Process != nil && b.cmd.ProcessState == nil {
		_ = b.cmd.Process.Kill()
		_ = b.cmd.Wait()
	}
	_ = b.log.Close()
	if b.t.Failed() {
		text, _ := os.ReadFile(b.log.Name())
		lines := strings.Split(string(text), "\n")
		b.t.Logf("the log of %s:\n%s", b.name, strings.Join(lines[max(0, len(lines)-60):], "\n"))
	}
	_ = os.RemoveAll(b.dir)
}

func (all boxes) eventually(what string, f func() error) {
	t := all[0].t
	t.Helper()
	for end := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not yet: %v", what, err)
		}
	}
}

// full waits until all nodes say that all ranges have all of their copies.
func (all boxes) full() {
	all[0].t.Helper()
	all.eventually("all copies are there", all.missing)
}

// missing returns what a node says is missing.
func (all boxes) missing() error {
	for _, b := range all {
		ctx, cancel := context.WithTimeout(b.t.Context(), time.Second)
		a, err := b.admin.Cluster(ctx)
		cancel()
		if err != nil {
			return err
		}
		if a.Problem != "" || a.Epoch != a.ActiveEpoch || a.Ranges.Total == 0 || a.Ranges.Full != a.Ranges.Total {
			return fmt.Errorf("%s: %q, epochs %d and %d, %+v", b.name, a.Problem, a.Epoch, a.ActiveEpoch, a.Ranges)
		}
	}
	return nil
}
