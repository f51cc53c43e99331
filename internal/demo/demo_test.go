package demo

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

// buildDaemon builds jbofd once for all tests of the package.
var buildDaemon = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "jbofd-demo")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "jbofd")
	out, err := exec.Command("go", "build", "-o", path, "jbofd/cmd/jbofd").CombinedOutput()
	if err != nil {
		return "", errors.Join(err, errors.New(string(out)))
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := etcdproc.Run(m)
	if path, err := buildDaemon(); err == nil {
		_ = os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// shortDemo returns a short demonstration in a folder of its own. The folder's name is
// short because a unix socket's path must be.
func shortDemo(t *testing.T, out io.Writer) Config {
	t.Helper()
	path, err := buildDaemon()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "demo")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return Config{Daemon: path, Dir: dir, FreePorts: true, Runtime: 200 * time.Millisecond, SizeBytes: 4 << 20,
		Environ: os.Environ(), Out: out}
}

// drivesAreFree fails the test if a daemon still has the drives of dir.
func drivesAreFree(t *testing.T, dir string) {
	t.Helper()
	c, err := net.Dial("unix", filepath.Join(dir, "data", "admin.sock"))
	if err == nil {
		_ = c.Close()
		t.Error("a daemon still answers on the admin socket")
	}
}

func TestDemoShowsBothHostsVerifiedBytesAndMetrics(t *testing.T) {
	var out bytes.Buffer
	cfg := shortDemo(t, &out)
	for range 2 { // the second time the drives are there already
		out.Reset()
		if err := Run(t.Context(), cfg); err != nil {
			t.Fatalf("%v\n%s", err, &out)
		}
		for _, want := range []string{
			`(?m)^host +load +IOPS +MB/s +mean +p50 +p99 +p99\.9$`,
			`(?m)^anna +sequential write +\d`, `(?m)^anna +sequential read +\d`, `(?m)^anna +random mixed read +\d`,
			`(?m)^anna +random mixed write +\d`,
			`(?m)^bert +sequential write +\d`, `(?m)^bert +sequential read +\d`, `(?m)^bert +random mixed read +\d`,
			`(?m)^bert +random mixed write +\d`,
			`verified: \d{7,} bytes`,
			`http://127\.0\.0\.1:\d+/metrics`,
			`jbof_io_completed_total\{op="read",ssd="ssd0",tenant="nqn\.2026-11\.example\.jbofd:host-anna"\} \d`,
			`jbof_io_bytes_total\{op="read",ssd="ssd1",tenant="nqn\.2026-11\.example\.jbofd:host-bert"\} \d`,
			`stopped cleanly`,
		} {
			if !regexp.MustCompile(want).MatchString(out.String()) {
				t.Errorf("output does not match %s", want)
			}
		}
		if t.Failed() {
			t.Fatal(out.String())
		}
		drivesAreFree(t, cfg.Dir)
	}
}

func TestTakenPortIsNamedBeforeAnythingStarts(t *testing.T) {
	cfg := shortDemo(t, io.Discard)
	l := loopback.Listen(t)
	defer l.Close()
	cfg.FreePorts = false
	cfg.Environ = append(cfg.Environ, "JBOFD_METRICS_ADDRESS="+l.Addr().String())
	err := Run(t.Context(), cfg)
	if !errors.Is(err, ErrPortTaken) || !strings.Contains(err.Error(), "--free-ports") {
		t.Fatalf("got %v, want ErrPortTaken and how to choose others", err)
	}
	if _, err := os.Stat(filepath.Join(cfg.Dir, "data")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("data was made: %v", err)
	}
}

func TestADaemonThatExitsIsReportedWithItsLog(t *testing.T) {
	cfg := shortDemo(t, io.Discard)
	cfg.Daemon = filepath.Join(cfg.Dir, "jbofd")
	if err := os.WriteFile(cfg.Daemon, []byte("#!/bin/sh\necho the sky is falling >&2\nexit 3\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	err := Run(t.Context(), cfg)
	if err == nil || !strings.Contains(err.Error(), "the sky is falling") {
		t.Fatalf("got %v, want the daemon's last words", err)
	}
}

func TestMissingDaemonIsAnError(t *testing.T) {
	cfg := shortDemo(t, io.Discard)
	cfg.Daemon = filepath.Join(cfg.Dir, "nothing")
	if err := Run(t.Context(), cfg); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("got %v, want os.ErrNotExist", err)
	}
}

// cancelWriter cancels a context when a line with a given text comes.
type cancelWriter struct {
	text   string
	cancel context.CancelFunc
}

func (w *cancelWriter) Write(p []byte) (int, error) {
	if strings.Contains(string(p), w.text) {
		w.cancel()
	}
	return len(p), nil
}

func TestCancelledDemoFailsAndStopsTheDaemon(t *testing.T) {
	for _, at := range []string{"starting", "1/3", "3/3"} {
		ctx, cancel := context.WithCancel(t.Context())
		cfg := shortDemo(t, &cancelWriter{at, cancel})
		cfg.Runtime = time.Minute
		if err := Run(ctx, cfg); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled at %q: got %v, want context.Canceled", at, err)
		}
		drivesAreFree(t, cfg.Dir)
		cancel()
	}
}
