package daemon

import (
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// systemd is what listens at NOTIFY_SOCKET in place of systemd.
type systemd struct {
	t *testing.T
	c *net.UnixConn
}

func newSystemd(t *testing.T, w *world) *systemd {
	t.Helper()
	addr := &net.UnixAddr{Name: w.path("notify"), Net: "unixgram"}
	c, err := net.ListenUnixgram(addr.Net, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("NOTIFY_SOCKET", addr.Name)
	return &systemd{t: t, c: c}
}

// next returns the next message.
func (s *systemd) next() string {
	s.t.Helper()
	b := make([]byte, 1<<10)
	if err := s.c.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		s.t.Fatal(err)
	}
	n, err := s.c.Read(b)
	if err != nil {
		s.t.Fatal("no message: ", err)
	}
	return string(b[:n])
}

func (s *systemd) want(messages ...string) {
	s.t.Helper()
	for _, want := range messages {
		if got := s.next(); got != want {
			s.t.Fatalf("systemd is told %q, want %q", got, want)
		}
	}
}

// wantExtension expects that systemd is told to wait so long, or a little longer.
func (s *systemd) wantExtension(least time.Duration) {
	s.t.Helper()
	got := s.next()
	digits, ok := strings.CutPrefix(got, "EXTEND_TIMEOUT_USEC=")
	n, err := strconv.ParseInt(digits, 10, 64)
	if by := time.Duration(n) * time.Microsecond; !ok || err != nil || by < least || by > least+time.Second {
		s.t.Fatalf("systemd is told %q, want to wait %v", got, least)
	}
}

// TestSystemdIsToldWhatTheDaemonDoes: when it is ready, that it reloads, that it stops, and how long it is to
// be waited for.
func TestSystemdIsToldWhatTheDaemonDoes(t *testing.T) {
	w := newWorld(t)
	told := newSystemd(t, w)
	hangup := make(chan os.Signal, 1)
	w.reload = hangup
	w.configure([]string{memSSD}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}"}, "limits: {drain_timeout: 1m}")
	n := w.mustStart()
	told.want("READY=1")
	hangup <- syscall.SIGHUP
	told.want("RELOADING=1", "READY=1")
	loading, release := make(chan struct{}), make(chan struct{})
	w.onLoad = func() {
		close(loading)
		<-release
	}
	hangup <- syscall.SIGHUP
	told.want("RELOADING=1")
	<-loading
	stopped := make(chan error)
	go func() { stopped <- n.stop() }()
	told.want("STOPPING=1")
	told.wantExtension(time.Minute + closeTimeout + stoppingMargin)
	close(release)
	told.wantExtension(closeTimeout + stoppingMargin)
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if err := told.c.Close(); err != nil {
		t.Error(err)
	}
}

// TestSystemdIsToldOfAnOpeningThatGetsOn, and of no other: it ends a daemon that does not get on.
func TestSystemdIsToldOfAnOpeningThatGetsOn(t *testing.T) {
	w := newWorld(t)
	told, log := newSystemd(t, w), &lines{}
	report := opening(slog.New(slog.NewTextHandler(log, nil)), time.Now())
	for _, read := range []int{10, 10, 20, 20} {
		report("chunk headers", read, 100)
	}
	report("key log", 20, 40)
	notify("READY=1")
	const longer = "EXTEND_TIMEOUT_USEC=30000000"
	told.want(longer, longer, longer, "READY=1")
	if n := len(log.with("being opened")); n != 5 {
		t.Errorf("%d lines in the log, want 5", n)
	}
	if got := strings.Join(log.with("key log"), ""); !strings.Contains(got, "of=40") {
		t.Errorf("the log says %q", got)
	}
	if err := told.c.Close(); err != nil {
		t.Error(err)
	}
}
