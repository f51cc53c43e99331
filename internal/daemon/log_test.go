package daemon

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"jbofd/client"
	"jbofd/internal/kvstore"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// lines collects what a daemon logs, for any goroutine.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

// with returns the lines that have a text.
func (l *lines) with(text string) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.buf.String()) {
		if strings.Contains(line, text) {
			out = append(out, line)
		}
	}
	return out
}

// metrics returns the answer to a scrape.
func (n *node) metrics() string {
	n.w.t.Helper()
	defer http.DefaultClient.CloseIdleConnections()
	resp, err := http.Get("http://" + n.addrs.Metrics + "/metrics")
	if err != nil {
		n.w.t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		n.w.t.Fatal(err)
	}
	return string(text)
}

func TestReadyIsLoggedOnlyWhenTheNodeIs(t *testing.T) {
	for _, c := range []struct {
		name, ssd   string
		ready, warn int
	}{
		{"all drives", fileSSD, 1, 0},
		{"a drive is missing", "{name: ssd1, backend: file, path: DIR/none}", 0, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, log := newWorld(t), &lines{}
			w.log = log
			w.configure([]string{memSSD, c.ssd}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}"})
			n := w.mustStart()
			if m, up := n.metrics(), fmt.Sprintf("jbof_ssd_up{ssd=\"ssd1\"} %d\n", c.ready); !strings.Contains(m, up) {
				t.Errorf("the metrics do not have %q", up)
			}
			if got := log.with("msg=ready"); len(got) != c.ready {
				t.Errorf("ready is logged %d times: %q", len(got), got)
			}
			if got := log.with("hosts can connect, but the node is not ready"); len(got) != c.warn || c.warn > 0 &&
				!strings.Contains(got[0], "ssd1") {
				t.Errorf("%q", got)
			}
		})
	}
}

// TestALogInJSONIsAllJSON: also the lines of a failed start, a refused reload, a refused host and invalid HTTP.
func TestALogInJSONIsAllJSON(t *testing.T) {
	w, log := newWorld(t), &lines{}
	w.log = log
	w.configure([]string{memSSD, "{name: ssd1, backend: file, path: DIR/none}"},
		[]string{"{nsid: 1, ssd: ssd0, size: 16MiB}"}, "log: {format: json}")
	n := w.mustStart()
	w.configure([]string{memSSD}, nil, "log: {format: json}")
	if _, err := n.admin.Reload(t.Context()); err == nil {
		t.Error("a reload without a drive is accepted")
	}
	if c, err := client.Connect(t.Context(),
		client.Options{Address: n.addrs.Listeners[0], SubNQN: "nqn.2026-11.example.jbofd:none"}); err == nil {
		t.Error("connected to nothing", c.Close())
	}
	if err := n.stop(); err != nil {
		t.Error(err)
	}
	all := log.with("")
	for _, line := range all {
		if !json.Valid([]byte(line)) {
			t.Errorf("not JSON: %s", line)
		}
	}
	if len(all) < 6 {
		t.Errorf("only %d lines", len(all))
	}
}

func TestARepairedLabelLeavesALine(t *testing.T) {
	w, log := newWorld(t), &lines{}
	w.log = log
	w.configure([]string{memSSD, fileSSD}, []string{"{nsid: 1, ssd: ssd1, size: 16MiB}"})
	if err := w.mustStart().stop(); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(w.path("ssd1.img"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(bytes.Repeat([]byte{0xff}, 512), 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	const message = "drive label repaired"
	if got := log.with(message); len(got) != 0 {
		t.Fatalf("a sound label is repaired: %q", got)
	}
	for range 2 { // the second finds it sound
		if err := w.mustStart().stop(); err != nil {
			t.Fatal(err)
		}
	}
	if got := log.with(message); len(got) != 1 || !strings.Contains(got[0], "ssd=ssd1 copy=first") {
		t.Errorf("%q", got)
	}
}

// TestRefusedHostsLeaveLinesAtABoundedRate: a host that tries again and again, from one port after the other, leaves
// one line, and another one leaves one of its own.
func TestRefusedHostsLeaveLinesAtABoundedRate(t *testing.T) {
	w, log := newWorld(t), &lines{}
	w.log = log
	w.configure([]string{memSSD}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}"}, "log: {peer_lines_per_sec: 50}")
	n := w.mustStart()
	const attempts = 60
	for i := range attempts {
		host := fmt.Sprint("nqn.2026-11.example.host:x", i/(attempts-1)) // the last one is another one
		c, err := client.Connect(t.Context(), client.Options{Address: n.addrs.Listeners[0],
			SubNQN: "nqn.2026-11.example.jbofd:none", HostNQN: host})
		if err == nil {
			t.Fatal("connected to nothing", c.Close())
		}
	}
	got := log.with("connect refused")
	if len(got) != 2 || !strings.Contains(got[0], "host=nqn.2026-11.example.host:x0") ||
		!strings.Contains(got[0], "reason=") || !strings.Contains(got[1], "host=nqn.2026-11.example.host:x1") {
		t.Errorf("%d attempts left %d lines: %q", attempts, len(got), got)
	}
}

// TestAFailingDriveLeavesLinesAtABoundedRate: every read fails, and each kind of failure is logged once in ten seconds.
func TestAFailingDriveLeavesLinesAtABoundedRate(t *testing.T) {
	w, log := newWorld(t), &lines{}
	w.log = log
	w.configure([]string{"{name: ssd0, backend: mem, size: 64MiB, fault: {read_error_probability: 1}}"},
		[]string{"{nsid: 1, ssd: ssd0, size: 16MiB}"})
	n := w.mustStart()
	ns, err := n.connect().Namespace(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, err := ns.ReadAt(t.Context(), make([]byte, 4096), 0); err == nil {
			t.Fatal("a read succeeds")
		}
	}
	if err := n.stop(); err != nil {
		t.Error(err)
	}
	if got := log.with("the drive failed a request"); len(got) < 1 || len(got) > 3 ||
		!strings.Contains(got[0], "ssd=ssd0 op=read") {
		t.Errorf("%q", got)
	}
}

func TestAFullDriveLeavesALineAndNeverHoldsTheDriveUp(t *testing.T) {
	out, dropped := &blocked{release: make(chan struct{})}, 0
	var mu sync.Mutex
	l := newTurnLog(slog.New(slog.NewTextHandler(out, nil)), 1, func(n int) {
		mu.Lock()
		defer mu.Unlock()
		dropped += n
	})
	const failures = 1000
	for range failures { // standard error is blocked: this must not wait
		l.deviceFailed("ssd7", pipeline.Write, errors.Join(errors.New("pwrite"), ssd.ErrNoSpace))
	}
	close(out.release)
	l.close()
	got := out.with("no space left for the file of the drive")
	if len(got) != 1 || !strings.Contains(got[0], "ssd=ssd7") || !strings.Contains(got[0], "op=write") {
		t.Errorf("%q", got)
	}
	if dropped != failures-1 {
		t.Errorf("%d of %d are counted as dropped", dropped, failures)
	}
}

func TestDamageLeavesFewLinesAndNeverHoldsTheStoreUp(t *testing.T) {
	out, dropped := &blocked{release: make(chan struct{})}, 0
	var mu sync.Mutex
	l := newTurnLog(slog.New(slog.NewTextHandler(out, nil)), 10, func(n int) {
		mu.Lock()
		defer mu.Unlock()
		dropped += n
	})
	l.damaged("nqn", 3, "ssd0", kvstore.Damage{Offset: 77, LostBytes: 100})
	l.damaged("nqn", 3, "ssd0", kvstore.Damage{Offset: 78, Segment: 5})
	const reads = 1000
	for range reads { // of one damaged value, by a host; standard error is blocked: this must not wait
		l.damaged("nqn", 3, "ssd0", kvstore.Damage{Offset: 79, Segment: 5, Hash: 0xabc})
	}
	close(out.release)
	l.close()
	chunk, segment, value := out.with("damaged chunk"), out.with("damaged segment"), out.with("damaged value")
	if len(chunk) != 1 || len(segment) != 1 || len(value) != 1 || dropped != reads-1 {
		t.Errorf("%d, %d, %d lines and %d dropped", len(chunk), len(segment), len(value), dropped)
	}
	for what, line := range map[string]string{"lost_bytes=100": chunk[0], "segment=5": segment[0],
		"key_hash=0000000000000abc": value[0]} {
		if !strings.Contains(line, what) || !strings.Contains(line, "nsid=3") {
			t.Errorf("%q lacks %s", line, what)
		}
	}
}

// blocked is standard error that takes nothing until release is closed.
type blocked struct {
	lines
	release chan struct{}
}

func (b *blocked) Write(p []byte) (int, error) {
	<-b.release
	return b.lines.Write(p)
}
