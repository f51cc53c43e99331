package etcdserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/etcd"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

func TestMain(m *testing.M) { etcdproc.Main(m) }

// wait is the time limit for what is expected on a busy machine.
const wait = 2 * time.Minute

// lines is a log.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// with returns the lines that have a text.
func (l *lines) with(text string) (out []string) {
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, text) {
			out = append(out, line)
		}
	}
	return out
}

// leaderless waits until a client says that the last of the servers has no leader, and that the others are away.
func leaderless(t *testing.T, all []Config) {
	t.Helper()
	urls := []string{all[0].ClientURL, all[1].ClientURL, all[2].ClientURL}
	client, err := etcd.New(etcd.Config{Endpoints: urls, Cluster: "test", Timeout: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	says := fmt.Sprintf("(%s, %s: connection refused; %s: no leader)", urls[0], urls[1], urls[2])
	eventually(t, "an error that says "+says, func() bool {
		answer := make(chan *cluster.Response, 1)
		client.Do(&cluster.Request{Kind: cluster.Read}, func(resp *cluster.Response) { answer <- resp })
		resp := <-answer
		t.Log(resp.Err)
		return errors.Is(resp.Err, etcd.ErrNoLeader) && strings.Contains(resp.Err.Error(), says)
	})
	if _, err := client.Failing(); !errors.Is(err, etcd.ErrNoLeader) {
		t.Errorf("it fails with %v", err)
	}
}

func threeMembers(t *testing.T) (all []Config) {
	members := map[string]string{}
	for _, name := range []string{"a", "b", "c"} {
		host, _, err := net.SplitHostPort(loopback.Address())
		if err != nil {
			t.Fatal(err)
		}
		members[name] = "http://" + host + ":2380"
		all = append(all, Config{Cluster: "test", Name: name, Members: members, Dir: filepath.Join(t.TempDir(), "etcd"),
			ClientURL: "http://" + host + ":2379"})
	}
	return all
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(wait); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("not yet: %s", what)
		}
	}
}

// TestThreeServersServeWhileOneIsKilled runs three servers in processes of their own. One is killed, and started again;
// requests succeed meanwhile. Without two of them, an error says that there is no leader and who is away. What was
// written is there when all have ended and begun again. A clean stop is no error.
func TestThreeServersServeWhileOneIsKilled(t *testing.T) {
	t.Parallel()
	binary := etcdproc.Binary(t)
	all := threeMembers(t)
	log := &lines{}
	var children []*Child
	startAll := func() {
		t.Helper()
		children = nil
		for _, cfg := range all {
			c, err := StartChild(binary, cfg, slog.New(slog.NewTextHandler(log, nil)))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(c.Close)
			children = append(children, c)
		}
		for i, c := range children {
			eventually(t, all[i].Name+" serves; "+log.String(), func() bool { ready, _, _ := c.State(); return ready })
		}
	}
	startAll()
	var endpoints []string
	for _, cfg := range all {
		endpoints = append(endpoints, cfg.ClientURL)
	}
	client, err := etcd.New(etcd.Config{Endpoints: endpoints, Cluster: "test", Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	// do repeats a request whose outcome is unknown, as that of one may be whose server was killed.
	do := func(r cluster.Request) (resp *cluster.Response) {
		t.Helper()
		answer := make(chan *cluster.Response, 1)
		eventually(t, "an answer; "+log.String(), func() bool {
			client.Do(&r, func(resp *cluster.Response) { answer <- resp })
			resp = <-answer
			return resp.Err == nil
		})
		return resp
	}
	first := do(cluster.Request{Kind: cluster.Txn, Then: []cluster.Put{{Key: "k", Value: []byte("v")}}})
	_, pid, starts := children[0].State()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	second := do(cluster.Request{Kind: cluster.Txn, Then: []cluster.Put{{Key: "l"}}})
	if second.Revision <= first.Revision {
		t.Errorf("revision %d after %d", second.Revision, first.Revision)
	}
	eventually(t, "the one that was killed serves again", func() bool {
		ready, now, count := children[0].State()
		return ready && now != pid && count > starts
	})
	if !strings.Contains(log.String(), "signal: killed") {
		t.Errorf("the log does not say that it was killed: %s", log)
	}
	before := len(log.with("level=ERROR"))
	for i, c := range children {
		if i == 2 {
			leaderless(t, all)
		}
		_, pid, _ := c.State()
		c.Close()
		c.Close()
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("process %d after Close: %v", pid, err)
		}
	}
	if errors := log.with("level=ERROR")[before:]; len(errors) > 0 {
		t.Errorf("a clean stop logs %q", errors)
	}
	startAll()
	if got := do(cluster.Request{Kind: cluster.Read}); len(got.Keys) != 2 {
		t.Errorf("%+v", got)
	}
}

// TestLinesOfTheServerAreLogged with their own message and level, and those that nobody can act on are not.
func TestLinesOfTheServerAreLogged(t *testing.T) {
	var out bytes.Buffer
	withoutTime := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: withoutTime}))
	for _, line := range []string{
		`{"level":"warn","ts":"2026","caller":"a.go:1","msg":"simple token is not cryptographically signed"}`,
		`{"level":"warn","ts":"2026","msg":"prober detected unhealthy status","caller":"a","rtt":"0s","error":"x y"}`,
		`{"level":"fatal","msg":"failed to write","stacktrace":"main.main"}`,
		`{"level":"warn","msg":"leader is late","exceeded-duration":"99.9ms"}`,
		`{"level":"error","msg":"failed to update storage version","error":"x: missing term information"}`,
		`{"level":"warn","msg":"leader is late","exceeded-duration":"1.2s"}`,
		`{"level":"warn","msg":"apply request took too long","request":"` + strings.Repeat("q", 2*maxValue) + `"}`,
		"panic: no space",
	} {
		relay(log, line, false)
	}
	relay(log, `{"level":"error","msg":"mux: server closed"}`, true)
	want := `level=WARN msg="etcd: prober detected unhealthy status" error="x y" rtt=0s
level=ERROR msg="etcd: failed to write"
level=WARN msg="etcd: leader is late" exceeded-duration=1.2s
level=WARN msg="etcd: apply request took too long" request="` + strings.Repeat("q", maxValue) + ` …"
level=WARN msg="etcd says something" line="panic: no space"
`
	if out.String() != want {
		t.Errorf("%s\nwant\n%s", &out, want)
	}
}

// TestAServerIsFoundByItsName, whatever the file is called that it was started from.
func TestAServerIsFoundByItsName(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "exe")
	if err := os.Symlink(etcdproc.Binary(t), file); err != nil {
		t.Fatal(err)
	}
	cfg := threeMembers(t)[0]
	cfg.Members = map[string]string{cfg.Name: cfg.Members[cfg.Name]}
	c, err := StartChild(file, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	eventually(t, "it serves", func() bool { ready, _, _ := c.State(); return ready })
	_, pid, _ := c.State()
	for file, want := range map[string]string{"comm": "jbofd\n", "cmdline": "jbofd\x00etcd\x00"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
		if err != nil || !strings.HasPrefix(string(b), want) {
			t.Errorf("%s is %q, %v; want %q", file, b, err, want)
		}
	}
}

// TestAServerThatCannotRunIsTriedAgain has a directory that cannot be made.
func TestAServerThatCannotRunIsTriedAgain(t *testing.T) {
	t.Parallel()
	cfg := threeMembers(t)[0]
	cfg.Dir = "/dev/null/etcd"
	log := &lines{}
	c, err := StartChild(etcdproc.Binary(t), cfg, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second start", func() bool { _, _, starts := c.State(); return starts > 1 })
	c.Close()
	if !strings.Contains(log.String(), "/dev/null") {
		t.Errorf("the log does not say why: %s", log)
	}
	if ready, pid, _ := c.State(); ready || pid != 0 {
		t.Errorf("after Close: ready %v, process %d", ready, pid)
	}
}

// TestAConfigurationThatCannotBeIsRefused tries each field.
func TestAConfigurationThatCannotBeIsRefused(t *testing.T) {
	good := threeMembers(t)[0]
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	secure := good
	secure.CertFile, secure.KeyFile, secure.CAFile = "c", "k", "a"
	for _, c := range []struct {
		want   string
		cfg    Config
		change func(c *Config)
	}{
		{"name of the cluster", good, func(c *Config) { c.Cluster = "a/b" }},
		{"name of the member", good, func(c *Config) { c.Name = "" }},
		{"name of the member", good, func(c *Config) { c.Name = "a=b" }},
		{"must include d itself", good, func(c *Config) { c.Name = "d" }},
		{"directory of the data", good, func(c *Config) { c.Dir = "" }},
		{"all or none", good, func(c *Config) { c.KeyFile = "x" }},
		{"host and port", good, func(c *Config) { c.ClientURL = "http://a" }},
		{"host and port", good, func(c *Config) { c.ClientURL = "http://:1" }},
		{"host and port", good, func(c *Config) { c.ClientURL = "http://a:1/x" }},
		{"must be https if there is a certificate, else http", good, func(c *Config) { c.ClientURL = "https://a:1" }},
		{"must be https if there is a certificate, else http", good, func(c *Config) { c.ClientURL = "ftp://a:1" }},
		{"must be https if there is a certificate, else http", secure, func(*Config) {}},
	} {
		cfg := c.cfg
		c.change(&cfg)
		if err := cfg.Check(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
		if _, err := StartChild("x", cfg, slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("%s: it is started", c.want)
		}
	}
	if !Built {
		if err := Run(context.Background(), good, nil); !errors.Is(err, ErrNotBuilt) {
			t.Errorf("without the tag: %v", err)
		}
		if _, err := StartChild("", good, slog.New(slog.DiscardHandler)); !errors.Is(err, ErrNotBuilt) {
			t.Errorf("without the tag: %v", err)
		}
	}
}
