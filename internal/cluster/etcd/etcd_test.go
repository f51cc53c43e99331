package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"jbofd/internal/cluster"
	"jbofd/internal/testutil/certs"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

func TestMain(m *testing.M) { etcdproc.Main(m) }

// wait is the time limit for what is expected on a busy machine.
const wait = time.Minute

func startServer(t *testing.T) *etcdproc.Server {
	return etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
}

func newClient(t *testing.T, cfg Config) *Client {
	t.Helper()
	if cfg.Cluster == "" {
		cfg.Cluster = "test"
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 20 * time.Second
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// rawClient is a client of the library, for what the machine never does.
func rawClient(t *testing.T, url string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{url}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// try carries out a request, which may fail.
func (c *Client) try(t *testing.T, r cluster.Request) *cluster.Response {
	t.Helper()
	answers := make(chan *cluster.Response, 1)
	c.Do(&r, func(resp *cluster.Response) { answers <- resp })
	select {
	case resp := <-answers:
		if resp.Tag != r.Tag {
			t.Fatalf("tag %d, want %d", resp.Tag, r.Tag)
		}
		return resp
	case <-time.After(wait):
		t.Fatal("no answer")
		return nil
	}
}

// fails tries until a request fails with an error that says so. On a busy machine it may take several: the first may be
// answered before a server stops, or the reason may not be found in time.
func (c *Client) fails(t *testing.T, says string) {
	t.Helper()
	for end := time.Now().Add(wait); ; {
		resp := c.try(t, cluster.Request{Kind: cluster.Read})
		if resp.Err != nil && strings.Contains(resp.Err.Error(), says) {
			t.Log(resp.Err)
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%v, want %s", resp.Err, says)
		}
	}
}

func (c *Client) must(t *testing.T, r cluster.Request) *cluster.Response {
	t.Helper()
	resp := c.try(t, r)
	if resp.Err != nil {
		t.Fatal(resp.Err)
	}
	return resp
}

func put(key, value string, revision int64) cluster.Request {
	return cluster.Request{Tag: 7, Kind: cluster.Txn, If: []cluster.Compare{{Key: key, Revision: revision}},
		Then: []cluster.Put{{Key: key, Value: []byte(value)}}}
}

// TestRequestsHaveTheirOutcomes compares what etcd does with what the machine expects of its requests.
func TestRequestsHaveTheirOutcomes(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, other := newClient(t, Config{Endpoints: []string{s.URL}}), newClient(t, Config{Endpoints: []string{s.URL},
		Cluster: "test2"})
	first := c.must(t, put("a", "1", 0))
	if !first.Done || first.Revision == 0 {
		t.Fatalf("a key that is not there: %+v", first)
	}
	if resp := c.must(t, put("a", "2", 0)); resp.Done || resp.Revision < first.Revision {
		t.Errorf("a key that is there: %+v", resp)
	}
	second := c.must(t, put("a", "2", first.Revision))
	if !second.Done || second.Revision <= first.Revision {
		t.Errorf("the right revision: %+v after %+v", second, first)
	}
	if resp := c.must(t, put("a", "3", first.Revision)); resp.Done {
		t.Errorf("an older revision: %+v", resp)
	}
	if resp := other.must(t, put("a", "x", 0)); !resp.Done {
		t.Errorf("another cluster: %+v", resp)
	}
	got := c.must(t, cluster.Request{Kind: cluster.Read})
	if len(got.Keys) != 1 || got.Keys[0].Key != "a" || string(got.Keys[0].Value) != "2" ||
		got.Keys[0].Revision != second.Revision || got.Revision <= second.Revision {
		t.Errorf("what is read: %+v", got)
	}

	lease := c.must(t, cluster.Request{Kind: cluster.Lease, TTLNS: 50e9 + 1})
	if lease.Lease == 0 || !lease.Done {
		t.Fatalf("a lease: %+v", lease)
	}
	withLease := put("nodes/b", "3", 0)
	withLease.Then[0].Lease = lease.Lease
	registered := c.must(t, withLease)
	alive := c.must(t, cluster.Request{Kind: cluster.KeepAlive, Lease: lease.Lease})
	if !registered.Done || !alive.Done {
		t.Errorf("registered %+v, alive %+v", registered, alive)
	}
	if _, err := rawClient(t, s.URL).Revoke(t.Context(), clientv3.LeaseID(lease.Lease)); err != nil {
		t.Fatal(err)
	}
	if got := c.must(t, cluster.Request{Kind: cluster.Read}); len(got.Keys) != 1 {
		t.Errorf("after the lease has ended: %+v", got)
	}
	if resp := c.must(t, cluster.Request{Kind: cluster.KeepAlive, Lease: lease.Lease}); resp.Done {
		t.Errorf("renewing a lease that has ended: %+v", resp)
	}
	if resp := c.must(t, withLease); resp.Done || resp.Revision <= registered.Revision {
		t.Errorf("a put with a lease that has ended: %+v", resp)
	}
}

type watched struct {
	id     uint64
	events []cluster.KeyValue
	ended  bool
}

// watchAll begins a watch whose events come from the channel.
func (c *Client) watchAll(id uint64, from int64) <-chan watched {
	out := make(chan watched, 100)
	c.Watch(cluster.Watch{ID: id, From: from}, func(id uint64, events []cluster.KeyValue, ended bool) {
		out <- watched{id, events, ended}
	})
	return out
}

func next(t *testing.T, w <-chan watched) watched {
	t.Helper()
	select {
	case e := <-w:
		return e
	case <-time.After(wait):
		t.Fatal("no event")
		return watched{}
	}
}

// TestAWatchTellsAllChangesInTheirOrder changes keys before and during a watch. What one transaction has changed comes
// together, and other clusters are not told of. A second watch ends the first one.
func TestAWatchTellsAllChangesInTheirOrder(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := newClient(t, Config{Endpoints: []string{s.URL}})
	raw := rawClient(t, s.URL)
	begin := c.must(t, put("a", "1", 0)).Revision
	both := put("a", "2", begin)
	both.Then = append(both.Then, cluster.Put{Key: "b", Value: []byte("x")})
	at := c.must(t, both).Revision
	w := c.watchAll(3, begin)
	var got []cluster.KeyValue
	for len(got) < 3 {
		e := next(t, w)
		if e.id != 3 || e.ended {
			t.Fatalf("%+v", e)
		}
		for i, kv := range e.events {
			if kv.Key == "b" && (i == 0 || e.events[i-1].Revision != kv.Revision) {
				t.Errorf("a transaction in two parts: %+v", e.events)
			}
		}
		got = append(got, e.events...)
	}
	if s := fmt.Sprint(got); s != fmt.Sprint([]cluster.KeyValue{{Key: "a", Value: []byte("1"), Revision: begin},
		{Key: "a", Value: []byte("2"), Revision: at}, {Key: "b", Value: []byte("x"), Revision: at}}) {
		t.Errorf("events %v", s)
	}
	if _, err := raw.Put(t.Context(), Prefix("test2")+"c", ""); err != nil {
		t.Fatal(err)
	}
	del, err := raw.Delete(t.Context(), Prefix("test")+"a")
	if err != nil {
		t.Fatal(err)
	}
	if e := next(t, w); len(e.events) != 1 || e.events[0].Key != "a" || !e.events[0].Deleted ||
		e.events[0].Revision != del.Header.Revision {
		t.Errorf("a deletion: %+v", e)
	}
	second := c.watchAll(4, at)
	if e := next(t, w); !e.ended || e.id != 3 {
		t.Errorf("the first watch after the second has begun: %+v", e)
	}
	if e := next(t, second); e.id != 4 || len(e.events) == 0 {
		t.Errorf("the second watch: %+v", e)
	}
}

// TestACompactedWatchEnds asks for changes that etcd has forgotten.
func TestACompactedWatchEnds(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := newClient(t, Config{Endpoints: []string{s.URL}})
	first := c.must(t, put("a", "1", 0)).Revision
	last := first
	for range 5 {
		last = c.must(t, put("a", "2", last)).Revision
	}
	if _, err := rawClient(t, s.URL).Compact(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	if e := next(t, c.watchAll(1, first)); !e.ended {
		t.Errorf("%+v", e)
	}
	w := c.watchAll(2, last)
	if e := next(t, w); e.ended || len(e.events) != 1 {
		t.Errorf("a watch from the last revision: %+v", e)
	}
}

// TestASilentServerEndsRequestsAndWatches pauses the server's process, which leaves the connection as it is. Requests
// and the watch end soon. When the process goes on they do, too; and the same when it was killed and comes back.
func TestASilentServerEndsRequestsAndWatches(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := newClient(t, Config{Endpoints: []string{s.URL}, Timeout: 2 * time.Second})
	retried := func(what string) int64 {
		t.Helper()
		for end := time.Now().Add(wait); ; {
			resp := c.try(t, cluster.Request{Kind: cluster.Read})
			if resp.Err == nil {
				return resp.Revision
			}
			if time.Now().After(end) {
				t.Fatalf("%s: %v", what, resp.Err)
			}
		}
	}
	raw := rawClient(t, s.URL)
	id := uint64(0)
	for _, fault := range []struct {
		name       string
		begin, end func()
		says       string
	}{{"paused", s.Pause, s.Resume, "no answer within 2s"}, {"killed", s.Kill, s.Restart, "connection refused"}} {
		var w <-chan watched
		for { // on a busy machine the watch may end before it has begun
			id++
			w = c.watchAll(id, retried("before")+1)
			if _, err := raw.Put(t.Context(), Prefix("test")+"k", fmt.Sprint(id)); err != nil {
				t.Fatal(err)
			}
			if e := next(t, w); !e.ended {
				break
			}
		}
		fault.begin()
		c.fails(t, fault.says)
		for e := next(t, w); !e.ended; {
			e = next(t, w)
		}
		fault.end()
		retried(fault.name)
	}
}

// TestOnlyWhoHasTheCertificateAndThePasswordIsServed has a server with TLS and authentication.
func TestOnlyWhoHasTheCertificateAndThePasswordIsServed(t *testing.T) {
	t.Parallel()
	ca := certs.New(t)
	host := loopback.Address()
	ip, _, _ := net.SplitHostPort(host)
	cert, key := ca.Issue(ip)
	s := etcdproc.Start(t, etcdproc.Options{Host: host, Cert: cert, Key: key, CA: ca.File})
	good := Config{Endpoints: []string{s.URL}, TLS: ca.Config("client"), User: "root", Password: "secret"}
	// Without authentication, a user is of no importance.
	c := newClient(t, good)
	if resp := c.must(t, put("a", "1", 0)); !resp.Done {
		t.Errorf("%+v", resp)
	}
	raw, err := c.connected(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, do := range []func() error{
		func() error { _, err := raw.UserAdd(t.Context(), "root", "secret"); return err },
		func() error { _, err := raw.UserGrantRole(t.Context(), "root", "root"); return err },
		func() error { _, err := raw.AuthEnable(t.Context()); return err },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	c = newClient(t, good)
	if got := c.must(t, cluster.Request{Kind: cluster.Read}); len(got.Keys) != 1 {
		t.Errorf("%+v", got)
	}
	if e := next(t, c.watchAll(1, 1)); len(e.events) != 1 {
		t.Errorf("%+v", e)
	}
	for want, change := range map[string]func(c *Config){
		"authentication failed": func(c *Config) { c.Password = "wrong" },
		"permission denied":     func(c *Config) { c.User, c.Password = "", "" },
		"unknown authority":     func(c *Config) { c.TLS = certs.New(t).Config("client") },
		"certificate required": func(c *Config) {
			c.TLS = &tls.Config{RootCAs: c.TLS.RootCAs, MinVersion: tls.VersionTLS13}
		},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			cfg := good
			cfg.Timeout = 2 * time.Second
			change(&cfg)
			c := newClient(t, cfg)
			c.fails(t, want)
		})
	}
}

// TestNobodyToTalkToIsAnError names endpoints at which nothing, or something else, listens.
func TestNobodyToTalkToIsAnError(t *testing.T) {
	t.Parallel()
	l := loopback.Listen(t)
	web := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: wait}
	go func() { _ = web.Serve(l) }()
	t.Cleanup(func() { _ = web.Close() })
	silent := loopback.Listen(t)
	t.Cleanup(func() { _ = silent.Close() })
	for name, e := range map[string]struct{ address, says string }{
		"nothing":        {"127.1.2.3:1", "connection refused"},
		"a web server":   {l.Addr().String(), "error reading server preface"},
		"nothing to say": {silent.Addr().String(), "no answer within 1s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newClient(t, Config{Endpoints: []string{"http://" + e.address}, Timeout: time.Second})
			c.fails(t, e.says)
			w := c.watchAll(1, 1)
			if e := next(t, w); !e.ended {
				t.Errorf("%+v", e)
			}
		})
	}
}

// TestServersThatAreAwayAreSaidOnce, with what is wrong with them.
func TestServersThatAreAwayAreSaidOnce(t *testing.T) {
	t.Parallel()
	silent := loopback.Listen(t)
	t.Cleanup(func() { _ = silent.Close() })
	c := newClient(t, Config{Endpoints: []string{"http://127.1.2.3:1", "http://" + silent.Addr().String(),
		"http://127.1.2.3:2"}, Timeout: time.Second})
	c.fails(t, fmt.Sprintf("most of its servers do not, within 1s (http://127.1.2.3:1, http://127.1.2.3:2: connection "+
		"refused; http://%s: no answer)", silent.Addr()))
	if resp := c.try(t, cluster.Request{Kind: cluster.Read}); !errors.Is(resp.Err, context.DeadlineExceeded) {
		t.Errorf("%v is no time that is over", resp.Err)
	}
}

// TestCloseEndsWhatIsUnderWay closes a client whose requests and watch wait for a server that is not there.
func TestCloseEndsWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	c, err := New(Config{Endpoints: []string{"http://127.1.2.3:1"}, Cluster: "test", Timeout: wait})
	if err != nil {
		t.Fatal(err)
	}
	answers := make(chan *cluster.Response, 10)
	for range 5 {
		r := put("a", "1", 0)
		c.Do(&r, func(resp *cluster.Response) { answers <- resp })
	}
	c.watchAll(1, 1)
	c.Close()
	if len(answers) != 5 { // Close has waited for them
		t.Errorf("%d of 5 requests are answered", len(answers))
	}
	for range len(answers) {
		if resp := <-answers; resp.Err == nil {
			t.Errorf("%+v", resp)
		}
	}
	r := put("a", "1", 0)
	c.Do(&r, func(*cluster.Response) { t.Error("a request after Close was answered") })
	c.watchAll(2, 1)
	c.Close()
}

// TestAConfigurationThatCannotBeIsRefused tries names, endpoints and users.
func TestAConfigurationThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	good := Config{Endpoints: []string{"http://a:1"}, Cluster: "a-b_c.9"}
	if c, err := New(good); err != nil {
		t.Error(err)
	} else {
		c.Close()
	}
	for want, change := range map[string]func(c *Config){
		"name of the cluster is \"\"":         func(c *Config) { c.Cluster = "" },
		"name of the cluster is \"a/b\"":      func(c *Config) { c.Cluster = "a/b" },
		"name of the cluster is \"..\"":       func(c *Config) { c.Cluster = ".." },
		"1 to 64 letters":                     func(c *Config) { c.Cluster = strings.Repeat("a", 65) },
		"has no endpoints":                    func(c *Config) { c.Endpoints = nil },
		"must begin with http:// or https://": func(c *Config) { c.Endpoints = []string{"a:1"} },
		"a user or a password":                func(c *Config) { c.User = "x" },
	} {
		cfg := good
		change(&cfg)
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
