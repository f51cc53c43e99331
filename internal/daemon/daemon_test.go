package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/admin"
	"jbofd/internal/config"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/label"
	"jbofd/internal/testutil/loopback"
)

const nqn = "nqn.2026-11.example.jbofd:blocks"

// world is a folder with a daemon's drives. It also has what the process had open before the test.
type world struct {
	t   *testing.T
	dir string
	// address is what the daemon's listeners ask for.
	address string

	mu sync.Mutex
	// text is the configuration file.
	text string
	// log receives what the daemon logs, if not nil.
	log io.Writer
	// rdma is the provider of the daemon's RDMA devices; nil: the machine's.
	rdma verbs.Provider
	// reload is Options.Reload, onLoad is called when the configuration is read again.
	reload <-chan os.Signal
	onLoad func()
	// closeTimeout is Options.CloseTimeout. It is long by default: the next daemon of a test runs in the same process
	// and needs the drives of the one before, however long a loaded machine takes to close them.
	closeTimeout time.Duration
	// etcdBinary is Options.EtcdBinary.
	etcdBinary string
}

// newWorld makes an empty world. At the end of the test it checks that no goroutine and no file descriptor is left.
func newWorld(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") // short: a unix socket's path must be
	if err != nil {
		t.Fatal(err)
	}
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	t.Cleanup(func() {
		// Goroutines that have ended may take a moment to disappear.
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		late := time.After(10 * time.Second)
		for runtime.NumGoroutine() > goroutines || len(openFiles(t)) > len(files) {
			select {
			case <-tick.C:
			case <-late:
				stacks := make([]byte, 1<<20)
				t.Errorf("%d goroutines, before %d; open files %v, before %v\n%s", runtime.NumGoroutine(), goroutines,
					openFiles(t), files, stacks[:runtime.Stack(stacks, true)])
				return
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return &world{t: t, dir: dir, address: loopback.Address(), closeTimeout: time.Minute}
}

// openFiles lists the open files of this process, without those of the runtime and of the test framework.
func openFiles(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skipf("cannot count open files: %v", err)
	}
	for _, e := range entries {
		name, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || strings.Contains(name, "/proc/") || strings.Contains(name, "eventpoll") ||
			strings.Contains(name, "eventfd") && len(entries) < 3 {
			continue
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// configure sets the configuration: drives and namespaces are YAML list items.
func (w *world) configure(ssds []string, namespaces []string, more ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := fmt.Sprintf("node: {name: test, data_dir: %s}\nmetrics: {address: %q}\nadmin: {socket: %s}\n"+
		"discovery: {address: %q}\nlisteners: [{address: %q}]\nssds:\n",
		w.dir, w.address, w.path("admin.sock"), w.address, w.address)
	for _, s := range ssds {
		text += "  - " + strings.ReplaceAll(s, "DIR", w.dir) + "\n"
	}
	text += "subsystems:\n  - nqn: " + nqn + "\n    allow_any_host: true\n    namespaces:\n"
	for _, n := range namespaces {
		text += "      - " + n + "\n"
	}
	if len(namespaces) == 0 {
		text += "      []\n"
	}
	for _, m := range more {
		key, _, _ := strings.Cut(m, ":")
		var kept []string
		for _, line := range strings.Split(text, "\n") {
			if !strings.HasPrefix(line, key+":") {
				kept = append(kept, line)
			}
		}
		text = strings.Join(kept, "\n") + strings.ReplaceAll(m, "DIR", w.dir) + "\n"
	}
	w.text = text
}

func (w *world) path(name string) string { return filepath.Join(w.dir, name) }

func (w *world) load() (*config.Config, error) {
	if w.onLoad != nil {
		w.onLoad()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return config.Parse("test", []byte(w.text))
}

// node is a running daemon.
type node struct {
	w     *world
	addrs Addresses
	admin *admin.Client
	stop  func() error
}

// start runs a daemon until the test's end, or until stop.
func (w *world) start() (*node, error) {
	w.t.Helper()
	cfg, err := w.load()
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan Addresses, 1), make(chan error, 1)
	go func() {
		ended <- Run(ctx, Options{Config: cfg, Load: w.load, Reload: w.reload, RDMA: w.rdma, Stderr: w.stderr(),
			Version: "test", ConfigFile: "test.yaml", CloseTimeout: w.closeTimeout, EtcdBinary: w.etcdBinary,
			Ready: func(a Addresses, _ []admin.Reason) { ready <- a }})
	}()
	n := &node{w: w, admin: admin.NewClient(w.path("admin.sock"))}
	n.stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	select {
	case n.addrs = <-ready:
		w.t.Cleanup(func() {
			if err := n.stop(); err != nil {
				w.t.Error(err)
			}
		})
		return n, nil
	case err := <-ended:
		cancel()
		return nil, err
	}
}

func (w *world) stderr() io.Writer {
	if w.log != nil {
		return w.log
	}
	return io.Discard
}

func (w *world) mustStart() *node {
	w.t.Helper()
	n, err := w.start()
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// connect connects a host until the test's end.
func (n *node) connect() *client.Controller {
	n.w.t.Helper()
	c, err := client.Connect(n.w.t.Context(), client.Options{Address: n.addrs.Listeners[0], SubNQN: nqn,
		HostNQN: "nqn.2026-11.example.jbofd:host"})
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.w.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			n.w.t.Error(err)
		}
	})
	return c
}

// namespaces returns size by NSID as a host sees it.
func (n *node) namespaces(c *client.Controller) map[uint32]int64 {
	n.w.t.Helper()
	ids, err := c.NamespaceIDs(n.w.t.Context())
	if err != nil {
		n.w.t.Fatal(err)
	}
	out := map[uint32]int64{}
	for _, id := range ids {
		ns, err := c.Namespace(n.w.t.Context(), id)
		if err != nil {
			n.w.t.Fatal(err)
		}
		out[id] = ns.Size()
	}
	return out
}

// extents returns every drive's extents as the label says.
func (n *node) extents() (all []string) {
	n.w.t.Helper()
	l, err := n.admin.SSDs(n.w.t.Context())
	if err != nil {
		n.w.t.Fatal(err)
	}
	for _, d := range l.Items {
		for _, e := range d.Extents {
			all = append(all, fmt.Sprintf("%s %s %d+%d nsid %d", d.Name, e.UUID, e.StartBytes, e.LengthBytes, e.NSID))
		}
	}
	return all
}

const (
	memSSD  = "{name: ssd0, backend: mem, size: 64MiB}"
	fileSSD = "{name: ssd1, backend: file, path: DIR/ssd1.img, size: 64MiB, create: true}"
)

func TestNodeThatStopsLeavesNothingBehind(t *testing.T) {
	for _, engine := range []string{"auto", "threads"} {
		t.Run(engine, func(t *testing.T) {
			w := newWorld(t)
			w.configure([]string{memSSD, strings.Replace(fileSSD, "create", "engine: "+engine+", create", 1)},
				[]string{"{nsid: 1, ssd: ssd0, size: 16MiB}", "{nsid: 2, ssd: ssd1, size: 16MiB}"})
			data := bytes.Repeat([]byte("jbofd..."), 64<<10/8)
			for round := range 2 {
				n := w.mustStart()
				c := n.connect()
				ns, err := c.Namespace(t.Context(), 2)
				if err != nil {
					t.Fatal(err)
				}
				got := make([]byte, len(data))
				if _, err := ns.ReadAt(t.Context(), got, 4096); err != nil {
					t.Fatal(err)
				}
				if bytes.Equal(got, data) != (round == 1) {
					t.Errorf("round %d: the data of the first round are there: %v", round, round != 1)
				}
				if _, err := ns.WriteAt(t.Context(), data, 4096, 0); err != nil {
					t.Fatal(err)
				}
				if err := ns.Compare(t.Context(), data[:4096], 4096); err != nil {
					t.Error(err)
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
				if err := n.stop(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestNodeWithoutRoomForANamespaceDoesNotStartAndMakesNone(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{fileSSD}, []string{"{nsid: 5, ssd: ssd1, size: 40MiB}"})
	if err := w.mustStart().stop(); err != nil {
		t.Fatal(err)
	}
	// they would fit without the existing extents
	w.configure([]string{fileSSD}, []string{"{nsid: 2, ssd: ssd1, size: 8MiB}", "{nsid: 3, ssd: ssd1, size: 30MiB}"})
	if _, err := w.start(); !errors.Is(err, label.ErrNoRoom) || !strings.Contains(err.Error(), "namespace 3") {
		t.Errorf("got %v, want ErrNoRoom for namespace 3", err)
	}
	dev, err := file.Open(file.Config{Name: "after", Path: w.path("ssd1.img")})
	if err != nil {
		t.Fatalf("the drive is not free: %v", err)
	}
	defer dev.Close()
	if lab, err := label.Inspect(dev); err != nil || len(lab.Extents) != 1 {
		t.Errorf("the failed start left %v on the drive (%v)", lab, err)
	}
}

func TestSecondDaemonOnTheSameAdminSocketIsRefused(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{memSSD}, nil)
	n := w.mustStart()
	if _, err := w.start(); err == nil || !strings.Contains(err.Error(), "another daemon") {
		t.Errorf("got %v", err)
	}
	if _, err := n.admin.Status(t.Context()); err != nil {
		t.Errorf("the first one lost its socket: %v", err)
	}
}

func TestForeignDriveIsLeftOutAndFreeToBeFormatted(t *testing.T) {
	w := newWorld(t)
	foreign := make([]byte, 8<<20)
	copy(foreign, "XFSB")
	if err := os.WriteFile(w.path("foreign.img"), foreign, 0o600); err != nil {
		t.Fatal(err)
	}
	w.configure([]string{"{name: bad, backend: file, path: DIR/foreign.img}", memSSD},
		[]string{"{nsid: 1, ssd: ssd0, size: 1MiB}", "{nsid: 2, ssd: bad, size: 1MiB}"})
	n := w.mustStart()
	st, err := n.admin.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if st.Ready || len(st.Reasons) != 1 || st.Reasons[0].Component != "ssd bad" ||
		!strings.Contains(st.Reasons[0].Reason, "XFS") {
		t.Errorf("ready %v, reasons %v", st.Ready, st.Reasons)
	}
	if got := n.namespaces(n.connect()); len(got) != 1 || got[1] != 1<<20 {
		t.Errorf("a host sees %v, want namespace 1 only", got)
	}
	dev, err := file.Open(file.Config{Name: "format", Path: w.path("foreign.img")})
	if err != nil {
		t.Fatalf("while the daemon runs: %v", err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(w.path("foreign.img")); err != nil || !bytes.Equal(data, foreign) {
		t.Errorf("the foreign drive was changed (%v)", err)
	}
}

// TestAForeignFileIsNotMadeLarger: with create, a file grows to the configured size only if it is blank or has a label.
func TestAForeignFileIsNotMadeLarger(t *testing.T) {
	for _, length := range []int{7066, 3<<20 + 300} {
		w := newWorld(t)
		foreign := bytes.Repeat([]byte("text "), length/5+1)[:length]
		if err := os.WriteFile(w.path("README.md"), foreign, 0o600); err != nil {
			t.Fatal(err)
		}
		w.configure([]string{"{name: bad, backend: file, path: DIR/README.md, size: 64MiB, create: true}"}, nil)
		if _, err := w.start(); !errors.Is(err, label.ErrForeign) || !strings.Contains(err.Error(), "README.md") {
			t.Errorf("%d bytes: %v, want ErrForeign", length, err)
		}
		if got, err := os.ReadFile(w.path("README.md")); err != nil || !bytes.Equal(got, foreign) {
			t.Errorf("%d bytes: the file has changed, %v", length, err)
		}
	}
}

func TestRefusedReloadChangesNothing(t *testing.T) {
	w := newWorld(t)
	drives := []string{memSSD, fileSSD}
	good := []string{"{nsid: 1, ssd: ssd0, size: 16MiB}", "{nsid: 2, ssd: ssd1, size: 16MiB}"}
	w.configure(drives, append(slices.Clone(good), "{nsid: 9, ssd: ssd0, size: 40MiB}"))
	n := w.mustStart()
	c := n.connect()
	w.configure(drives, good)
	if _, err := n.admin.Reload(t.Context()); err != nil { // the extent of nsid 9 stays occupied
		t.Fatal(err)
	}
	seen, extents := n.namespaces(c), n.extents()
	for name, bad := range map[string]func(){
		"grows, adds, and has no room at last": func() {
			w.configure(drives, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}", "{nsid: 2, ssd: ssd1, size: 20MiB}",
				"{nsid: 3, ssd: ssd1, size: 8MiB}", "{nsid: 4, ssd: ssd0, size: 30MiB}"})
		},
		"removes one and has no room for another": func() {
			w.configure(drives, []string{"{nsid: 2, ssd: ssd1, size: 16MiB}", "{nsid: 4, ssd: ssd0, size: 30MiB}"})
		},
		"shrinks": func() {
			w.configure(drives, []string{"{nsid: 1, ssd: ssd0, size: 20MiB}", "{nsid: 2, ssd: ssd1, size: 8MiB}"})
		},
		"other drive": func() { w.configure([]string{memSSD}, good[:1]) },
		"other block size": func() {
			w.configure(drives, []string{"{nsid: 3, ssd: ssd0, size: 1MiB}",
				"{nsid: 2, ssd: ssd1, size: 16MiB, block_size: 512}"})
		},
		"not valid": func() { w.configure(drives, []string{"{nsid: 1, ssd: nosuch, size: 16MiB}"}) },
	} {
		bad()
		if _, err := n.admin.Reload(t.Context()); !errors.Is(err, admin.ErrRefused) {
			t.Errorf("%s: %v, want a refusal", name, err)
		} else if strings.Contains(name, "no room") != strings.Contains(err.Error(), label.ErrNoRoom.Error()) {
			t.Errorf("%s: refused for another reason: %v", name, err)
		}
		if got := n.namespaces(c); fmt.Sprint(got) != fmt.Sprint(seen) {
			t.Errorf("%s: hosts see %v, before %v", name, got, seen)
		}
		if got := n.extents(); !slices.Equal(got, extents) {
			t.Errorf("%s: extents\n%s\nbefore\n%s", name, strings.Join(got, "\n"), strings.Join(extents, "\n"))
		}
	}
	w.configure(drives, good)
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Errorf("the old configuration is refused afterwards: %v", err)
	}
}

func TestReloadAddsGrowsAndRemovesAndARestartFindsTheSame(t *testing.T) {
	w := newWorld(t)
	drives := []string{fileSSD}
	w.configure(drives, []string{"{nsid: 1, ssd: ssd1, size: 8MiB}", "{nsid: 2, ssd: ssd1, size: 8MiB}"})
	n := w.mustStart()
	c := n.connect()
	w.configure(drives, []string{"{nsid: 2, ssd: ssd1, size: 24MiB}", "{nsid: 3, ssd: ssd1, size: 4MiB}"})
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := map[uint32]int64{2: 24 << 20, 3: 4 << 20}
	if got := n.namespaces(c); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("after the reload a host sees %v, want %v", got, want)
	}
	extents := n.extents()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	n = w.mustStart()
	if got := n.namespaces(n.connect()); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("after the restart a host sees %v, want %v", got, want)
	}
	if got := n.extents(); !slices.Equal(got, extents) || len(got) != 3 {
		t.Errorf("extents after the restart %v, before %v", got, extents)
	}
}

func TestDeletedNamespaceIsErasedAndItsSpaceFree(t *testing.T) {
	for _, drive := range []string{memSSD, strings.Replace(fileSSD, "ssd1,", "ssd0,", 1)} {
		w := newWorld(t)
		w.configure([]string{drive}, []string{"{nsid: 1, ssd: ssd0, size: 40MiB}"})
		n := w.mustStart()
		c := n.connect()
		ns, err := c.Namespace(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ns.WriteAt(t.Context(), bytes.Repeat([]byte("secret.."), 1<<17), 36<<20, 0); err != nil {
			t.Fatal(err)
		}
		subs, err := n.admin.Subsystems(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		uuid := subs.Items[0].Namespaces[0].UUID
		if _, err := n.admin.DeleteNamespace(t.Context(), uuid); !errors.Is(err, admin.ErrRefused) ||
			!strings.Contains(err.Error(), "is configured") {
			t.Errorf("while configured: %v", err)
		}
		w.configure([]string{drive}, nil)
		if _, err := n.admin.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := n.extents(); len(got) != 1 {
			t.Errorf("extents after the reload: %v", got)
		}
		if _, err := n.admin.DeleteNamespace(t.Context(), uuid); err != nil {
			t.Fatal(err)
		}
		if got := n.extents(); len(got) != 0 {
			t.Errorf("extents after the deletion: %v", got)
		}
		for _, what := range []string{uuid, "no-uuid", ""} {
			if _, err := n.admin.DeleteNamespace(t.Context(), what); !errors.Is(err, admin.ErrRefused) {
				t.Errorf("delete %q: %v", what, err)
			}
		}
		w.configure([]string{drive}, []string{"{nsid: 7, ssd: ssd0, size: 60MiB}"})
		if _, err := n.admin.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		ns, err = c.Namespace(t.Context(), 7)
		if err != nil {
			t.Fatal(err)
		}
		all := make([]byte, ns.Size())
		if _, err := ns.ReadAt(t.Context(), all, 0); err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(all, []byte("secret")) {
			t.Error("the new namespace shows the old one's data")
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if err := n.stop(); err != nil {
			t.Error(err)
		}
	}
}

func TestAdminAPIAnswersWhileConfigurationsChange(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{memSSD}, []string{"{nsid: 1, ssd: ssd0, size: 1MiB}"})
	n := w.mustStart()
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for range 20 {
				if _, err := n.admin.Reload(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range 20 {
				_, err1 := n.admin.Status(t.Context())
				_, err2 := n.admin.Subsystems(t.Context())
				_, err3 := n.admin.SSDs(t.Context())
				_, err4 := n.admin.Connections(t.Context())
				if err := errors.Join(err1, err2, err3, err4); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestNodeStopsInTheMiddleOfADeletion(t *testing.T) {
	w := newWorld(t)
	// Each request of the erasure takes a second: it would last far longer than the test.
	slow := strings.Replace(memSSD, "64MiB", "2GiB, fault: {delay: 1s, delay_probability: 1}", 1)
	w.configure([]string{slow}, []string{"{nsid: 1, ssd: ssd0, size: 2000MiB}"})
	n := w.mustStart()
	subs, err := n.admin.Subsystems(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.configure([]string{slow}, nil)
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	deleted := make(chan error)
	go func() {
		_, err := n.admin.DeleteNamespace(t.Context(), subs.Items[0].Namespaces[0].UUID)
		deleted <- err
	}()
	n.awaitDrive("ssd0") // then the erasure is in progress
	if _, err := n.admin.Status(t.Context()); err != nil {
		t.Errorf("status during the erasure: %v", err)
	}
	begin := time.Now()
	if err := n.stop(); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("stopping took %v", took)
	}
	if err := <-deleted; err == nil {
		t.Error("the deletion says that it was done")
	}
}

// awaitDrive waits until a drive has one request.
func (n *node) awaitDrive(ssd string) {
	n.w.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for busy := false; !busy; <-tick.C {
		busy = strings.Contains(n.metrics(), "jbof_ssd_io_now{ssd=\""+ssd+"\"} 1")
	}
}
