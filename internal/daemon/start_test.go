package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/internal/ssd/file"
	"jbofd/internal/testutil/loopback"
)

// TestCreateMakesTheFileAndNoDirectory: a path with a typing error would otherwise be a new, empty drive.
func TestCreateMakesTheFileAndNoDirectory(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{memSSD, strings.Replace(fileSSD, "DIR/", "DIR/typo/", 1)},
		[]string{"{nsid: 1, ssd: ssd0, size: 16MiB}"})
	n := w.mustStart()
	if _, err := os.Stat(w.path("typo")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory: %v", err)
	}
	st, err := n.admin.Status(t.Context())
	if err != nil || len(st.Reasons) != 1 ||
		!strings.Contains(st.Reasons[0].Reason, "directory "+w.path("typo")+" does not exist") {
		t.Errorf("status %+v, %v", st, err)
	}
}

// TestAdminSocketIsClosedBeforeRunReturns even if a drive does not answer and closing takes too long.
func TestAdminSocketIsClosedBeforeRunReturns(t *testing.T) {
	w := newWorld(t)
	w.closeTimeout = time.Millisecond
	w.configure([]string{"{name: ssd0, backend: mem, size: 64MiB, fault: {delay: 2s, delay_probability: 1}}"},
		[]string{"{nsid: 1, ssd: ssd0, size: 16MiB}"}, "limits: {drain_timeout: 0s}")
	n := w.mustStart()
	ns, err := n.connect().Namespace(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	read := make(chan error, 1)
	go func() {
		_, err := ns.ReadAt(ctx, make([]byte, 4096), 0)
		read <- err
	}()
	n.awaitDrive("ssd0")
	n.mustStop()
	if c, err := net.Dial("unix", w.path("admin.sock")); err == nil {
		t.Error("the admin socket of a daemon that has stopped answers")
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	cancel() // the host would connect again
	if err := <-read; err == nil {
		t.Error("the drive answered before the daemon stopped")
	}
}

// TestDrivesThatHaveExchangedTheirPathsAreNoticed: hosts must not find new, empty namespaces in place of theirs.
func TestDrivesThatHaveExchangedTheirPathsAreNoticed(t *testing.T) {
	w := newWorld(t)
	ssds := func(a, b string) []string {
		return []string{"{name: ssd0, path: DIR/" + a + ", size: 128MiB, create: true}",
			"{name: ssd1, path: DIR/" + b + ", size: 128MiB, create: true}"}
	}
	for _, namespaces := range [][]string{
		{"{nsid: 1, ssd: ssd0, size: 16MiB}"},
		{"{nsid: 2, ssd: ssd1, size: 64MiB, type: kv}"},
		{"{nsid: 1, ssd: ssd0, size: 16MiB}", "{nsid: 2, ssd: ssd1, size: 64MiB, type: kv}"},
	} {
		w.configure(ssds("a", "b"), namespaces)
		n := w.mustStart()
		want := n.extents()
		n.mustStop()
		w.configure(ssds("b", "a"), namespaces)
		if n, err := w.start(); err == nil {
			n.mustStop()
			t.Fatalf("%q: the daemon serves new namespaces", namespaces)
		} else if !strings.Contains(err.Error(), "subsystems[0].namespaces[0]") ||
			!strings.Contains(err.Error(), "have the drives' paths been exchanged?") {
			t.Fatal(err)
		}
		w.configure(ssds("a", "b"), namespaces)
		n = w.mustStart()
		if got := n.extents(); !slices.Equal(got, want) {
			t.Fatalf("%q: extents %q, before %q", namespaces, got, want)
		}
		n.mustStop()
	}
}

// TestANamespaceMovesByTwoReloads, and the new one has another UUID than the one that stays on its drive.
func TestANamespaceMovesByTwoReloads(t *testing.T) {
	w := newWorld(t)
	ssds := []string{fileSSD, memSSD}
	const id = "0425d6c3-77cf-4e62-873e-0484d7ac5274"
	w.configure(ssds, []string{"{nsid: 1, ssd: ssd1, size: 16MiB, uuid: " + id + "}"})
	n := w.mustStart()
	w.configure(ssds, nil)
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.configure(ssds, []string{"{nsid: 1, ssd: ssd0, size: 16MiB, uuid: " + id + "}"})
	if _, err := n.admin.Reload(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "ssd ssd1 has a namespace with that uuid") {
		t.Errorf("two namespaces with one uuid: %v", err)
	}
	w.configure(ssds, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}"})
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Error(err)
	}
	// The drive in memory is new after a restart, the extent on the other drive still there.
	for range 2 {
		if all := n.extents(); len(all) != 2 {
			t.Errorf("extents %q", all)
		}
		n.mustStop()
		n = w.mustStart()
	}
}

func TestNodeThatCannotStartLeavesNothingBehind(t *testing.T) {
	taken := loopback.Listen(t)
	defer taken.Close()
	address := taken.Addr().String()
	for name, c := range map[string]struct {
		ssds, namespaces, more []string
		want                   string
	}{
		"metrics address taken": {more: []string{fmt.Sprintf("metrics: {address: %q}", address)}, want: address},
		"listener taken": {more: []string{fmt.Sprintf("listeners: [{address: \"127.0.0.1:0\"}, "+
			"{address: %q}]", address)}, want: address},
		"discovery taken": {more: []string{fmt.Sprintf("discovery: {address: %q}", address)}, want: address},
		"no drive can be opened": {ssds: []string{"{name: ssd0, backend: file, path: DIR/none}",
			"{name: ssd1, backend: file, path: DIR/nor-this}"}, want: "nor-this"},
		"admin socket not to make": {more: []string{"admin: {socket: DIR/file/admin.sock}"}, want: "admin.socket"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if err := os.WriteFile(w.path("file"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if c.ssds == nil {
				c.ssds = []string{memSSD, fileSSD}
			}
			if c.namespaces == nil {
				c.namespaces = []string{"{nsid: 1, ssd: ssd0, size: 16MiB}"}
			}
			w.configure(c.ssds, c.namespaces, c.more...)
			if _, err := w.start(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error about %s", err, c.want)
			}
			if _, err := os.Stat(w.path("ssd1.img")); err == nil {
				dev, err := file.Open(file.Config{Name: "after", Path: w.path("ssd1.img")})
				if err != nil {
					t.Fatalf("the drive is not free: %v", err)
				}
				if err := dev.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestNothingIsLabelledBeforeAddressesAndSocketAreBound: a daemon that cannot serve leaves a blank drive blank, and
// makes no file.
func TestNothingIsLabelledBeforeAddressesAndSocketAreBound(t *testing.T) {
	taken := loopback.Listen(t)
	defer taken.Close()
	for name, more := range map[string]string{
		"metrics":      fmt.Sprintf("metrics: {address: %q}", taken.Addr()),
		"listener":     fmt.Sprintf("listeners: [{address: %q}]", taken.Addr()),
		"discovery":    fmt.Sprintf("discovery: {address: %q}", taken.Addr()),
		"admin socket": "admin: {socket: DIR/taken.sock}",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			other, err := net.Listen("unix", w.path("taken.sock"))
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			blank := make([]byte, 64<<20)
			if err := os.WriteFile(w.path("blank.img"), blank, 0o600); err != nil {
				t.Fatal(err)
			}
			w.configure([]string{fileSSD, "{name: ssd2, path: DIR/blank.img}"},
				[]string{"{nsid: 1, ssd: ssd1, size: 16MiB}"}, more)
			if _, err := w.start(); err == nil {
				t.Fatal("started")
			}
			if _, err := os.Stat(w.path("ssd1.img")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the file of a drive was made: %v", err)
			}
			if got, err := os.ReadFile(w.path("blank.img")); err != nil || !bytes.Equal(got, blank) {
				t.Errorf("a blank drive was labelled, %v", err)
			}
		})
	}
}

// TestTheLogBeginsWithWhatIsStarted: which jbofd, from which file, and the drives that it is about to open. Opening may
// take long, and without this line the log is empty until the first drive is open.
func TestTheLogBeginsWithWhatIsStarted(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{memSSD, "{name: broken, backend: file, path: DIR/none}"},
		[]string{"{nsid: 1, ssd: ssd0, size: 16MiB}"})
	log := &lines{}
	w.log = log
	w.mustStart()
	first := log.with("")[0]
	for _, want := range []string{"msg=starting", "version=test", "config=test.yaml", `ssds="ssd0, broken"`} {
		if !strings.Contains(first, want) {
			t.Errorf("no %s in the first line of the log: %s", want, first)
		}
	}
}

// TestOnlyASocketThatADaemonHasLeftBehindIsRemoved: not that of a live daemon, and no other file, which admin.socket
// may name by mistake.
func TestOnlyASocketThatADaemonHasLeftBehindIsRemoved(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	if err := os.WriteFile(path("file"), []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	live, err := net.Listen("unix", path("live"))
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	stale, err := net.Listen("unix", path("stale"))
	if err != nil {
		t.Fatal(err)
	}
	stale.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, says string
		stays      bool
	}{{"file", "is no socket", true}, {"live", "another daemon answers", true}, {"stale", "", false},
		{"none", "", false}} {
		err := removeStale(path(c.name))
		if (err != nil) != (c.says != "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want an error that says %q", c.name, err, c.says)
		}
		if _, err := os.Lstat(path(c.name)); (err == nil) != c.stays {
			t.Errorf("%s: afterwards %v", c.name, err)
		}
	}
}

// TestASecondDaemonOfOneConfigurationIsToldThatItIsOne, not that one of its addresses is taken.
func TestASecondDaemonOfOneConfigurationIsToldThatItIsOne(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{"{name: ssd0, backend: mem, size: 64MiB}"}, nil)
	n := w.mustStart()
	cfg, err := w.load()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Metrics.Address = n.addrs.Metrics // the first one has chosen its port
	second, err := start(Options{Config: cfg, Load: w.load, Stderr: &lines{}, Version: "test"})
	if err == nil {
		second.close()
		t.Fatal("it starts")
	}
	if !strings.Contains(err.Error(), "admin.socket: "+w.path("admin.sock")+": another daemon answers there") {
		t.Error(err)
	}
	if _, err := n.admin.Status(t.Context()); err != nil {
		t.Errorf("the first one: %v", err)
	}
}
