// Package etcd carries out the requests of the membership machine (internal/cluster) with a real etcd.
//
//	Node ── Request ──> Client.Do ────> goroutine with a deadline ──> Get, Txn, Grant, KeepAliveOnce
//	Node <── Response ── done <───────┘
//	Node ── Watch ────> Client.Watch ─> goroutine ──> events, in order, until the watch has ended
//
// Nothing waits for etcd but these goroutines. The machine has one request of each purpose under way, so there are a
// few. Connections are made when they are needed, and again for ever, with jitter.
//
// A watch whose connection is lost is resumed by the library, without a word. So that a node does not take old news for
// the newest, the watch asks for a sign of progress, and ends if none has come for some time. The machine then reads
// everything again, as it does when revisions that it has not seen were compacted.
package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"jbofd/internal/cluster"
)

// Config describes a Client.
type Config struct {
	// Endpoints are URLs of the servers, http or https.
	Endpoints []string
	// TLS is for https; nil: the system's certificate authorities.
	TLS *tls.Config
	// User and Password are for etcd's authentication; empty: none.
	User, Password string
	// Cluster is the name of the cluster, which the prefix of its keys has: 1 to 64 letters, digits, "-", "_" and ".".
	Cluster string
	// Timeout bounds each request; 0: two seconds. It is the longest time for which a watch is believed without a sign.
	Timeout time.Duration
	Log     *slog.Logger
}

// Prefix is that of the keys of a cluster.
func Prefix(name string) string { return "/jbofd/v1/" + name + "/" }

// CheckName returns an error if a cluster cannot have that name.
func CheckName(name string) error {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
	other := func(r rune) bool { return !strings.ContainsRune(allowed, r) }
	if name == "" || len(name) > 64 || strings.ContainsFunc(name, other) || strings.Trim(name, ".") == "" {
		return fmt.Errorf("name of the cluster is %q, must be 1 to 64 letters, digits, \"-\", \"_\" and \".\"", name)
	}
	return nil
}

// Client is a client of etcd for one cluster. All methods may be called from any goroutine.
type Client struct {
	cfg    Config
	prefix string
	ctx    context.Context
	cancel context.CancelFunc
	wait   sync.WaitGroup

	// connecting is held by whoever makes conn. It is a channel, so that others wait no longer than their deadline.
	connecting chan struct{}
	conn       *clientv3.Client

	// mu guards what follows.
	mu       sync.Mutex
	closed   bool
	endWatch context.CancelFunc // of the present watch
	// failed is why the last request has failed, which was logged; nil: it has not. since is when that has changed.
	failed error
	since  time.Time
}

// New returns a client. It connects when something is asked for.
//
// Errors: what is wrong with cfg.
func New(cfg Config) (*Client, error) {
	if err := CheckName(cfg.Cluster); err != nil {
		return nil, err
	}
	if len(cfg.Endpoints) == 0 {
		return nil, errors.New("etcd has no endpoints, must have one or more")
	}
	for _, e := range cfg.Endpoints {
		if !strings.HasPrefix(e, "http://") && !strings.HasPrefix(e, "https://") {
			return nil, fmt.Errorf("endpoint of etcd is %q, must begin with http:// or https://", e)
		}
	}
	if (cfg.User == "") != (cfg.Password == "") {
		return nil, errors.New("etcd has a user or a password, must have both or none")
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 2 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	c := &Client{cfg: cfg, prefix: Prefix(cfg.Cluster), connecting: make(chan struct{}, 1)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// Close ends everything that is under way, which is answered with errors, and waits for it. Idempotent.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	c.wait.Wait()
	c.connecting <- struct{}{}
	defer func() { <-c.connecting }()
	if c.conn != nil {
		c.conn.Close() // its error is that the context has ended
		c.conn = nil
	}
}

// begin counts a goroutine that Close is to wait for, unless the client is closed.
func (c *Client) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.wait.Add(1)
	return true
}

// connected returns the connection. The first caller makes it, and logs in if there is a user.
func (c *Client) connected(ctx context.Context) (*clientv3.Client, error) {
	select {
	case c.connecting <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-c.connecting }()
	if c.conn != nil {
		return c.conn, nil
	}
	conn, err := c.dial(c.cfg.Endpoints, c.cfg.User, c.cfg.Password)
	if err != nil {
		return nil, err
	}
	c.conn = conn
	return conn, nil
}

// dial makes a connection. It waits for nothing but the login of a user.
func (c *Client) dial(endpoints []string, user, password string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints: endpoints, TLS: c.cfg.TLS, Username: user, Password: password, Context: c.ctx,
		DialTimeout: c.cfg.Timeout, Logger: zap.NewNop(),
		// Servers end connections on which pings come more often than every five seconds.
		DialKeepAliveTime: 6 * time.Second, DialKeepAliveTimeout: c.cfg.Timeout,
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			// By default the time between two attempts grows to two minutes.
			Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.3,
				MaxDelay: time.Second},
			MinConnectTimeout: c.cfg.Timeout,
		})},
	})
}

// Do carries out a request and calls done once, on a goroutine of its own, after one and a half timeouts at the
// latest. After Close it does nothing.
func (c *Client) Do(r *cluster.Request, done func(*cluster.Response)) {
	if !c.begin() {
		return
	}
	go func() {
		defer c.wait.Done()
		ctx, cancel := context.WithTimeout(c.ctx, c.cfg.Timeout)
		resp, err := c.do(ctx, r)
		cancel()
		if err != nil {
			err = c.explain(err)
			resp = &cluster.Response{Err: err}
		}
		resp.Tag = r.Tag
		c.note(err)
		done(resp)
	}()
}

func (c *Client) do(ctx context.Context, r *cluster.Request) (*cluster.Response, error) {
	conn, err := c.connected(ctx)
	if err != nil {
		return nil, err
	}
	switch r.Kind {
	case cluster.Read:
		got, err := conn.Get(ctx, c.prefix, clientv3.WithPrefix())
		if err != nil {
			return nil, err
		}
		resp := &cluster.Response{Revision: got.Header.Revision, Done: true}
		for _, kv := range got.Kvs {
			resp.Keys = append(resp.Keys, cluster.KeyValue{Key: strings.TrimPrefix(string(kv.Key), c.prefix),
				Value: kv.Value, Revision: kv.ModRevision})
		}
		return resp, nil
	case cluster.Txn:
		return c.txn(ctx, conn, r)
	case cluster.Lease:
		got, err := conn.Grant(ctx, max((r.TTLNS+1e9-1)/1e9, 1))
		if err != nil {
			return nil, err
		}
		return &cluster.Response{Revision: got.Revision, Done: true, Lease: int64(got.ID)}, nil
	case cluster.KeepAlive:
		got, err := conn.KeepAliveOnce(ctx, clientv3.LeaseID(r.Lease))
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return &cluster.Response{}, nil
		}
		if err != nil {
			return nil, err
		}
		return &cluster.Response{Revision: got.Revision, Done: true}, nil
	}
	return nil, fmt.Errorf("request of kind %d", r.Kind)
}

func (c *Client) txn(ctx context.Context, conn *clientv3.Client, r *cluster.Request) (*cluster.Response, error) {
	ifs := make([]clientv3.Cmp, len(r.If))
	for i, e := range r.If {
		ifs[i] = clientv3.Compare(clientv3.ModRevision(c.prefix+e.Key), "=", e.Revision)
	}
	then := make([]clientv3.Op, len(r.Then))
	for i, p := range r.Then {
		then[i] = clientv3.OpPut(c.prefix+p.Key, string(p.Value), clientv3.WithLease(clientv3.LeaseID(p.Lease)))
	}
	got, err := conn.Txn(ctx).If(ifs...).Then(then...).Commit()
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		// Nothing was written, for certain. The error does not tell etcd's revision, so that it is asked for.
		at, err := conn.Get(ctx, c.prefix, clientv3.WithCountOnly())
		if err != nil {
			return nil, err
		}
		return &cluster.Response{Revision: at.Header.Revision}, nil
	}
	if err != nil {
		return nil, err
	}
	return &cluster.Response{Revision: got.Header.Revision, Done: got.Succeeded}, nil
}

// note notes and logs when etcd stops to answer, and when it answers again.
func (c *Client) note(err error) {
	c.mu.Lock()
	same := (err != nil) == (c.failed != nil) || c.closed
	if !same {
		c.since = time.Now()
	}
	c.failed = err
	c.mu.Unlock()
	switch { // without the lock: a log may be slow
	case same:
	case err != nil:
		c.cfg.Log.Warn("etcd does not answer", "cluster", c.cfg.Cluster, "endpoints", c.cfg.Endpoints, "error", err)
	default:
		c.cfg.Log.Info("etcd answers again", "cluster", c.cfg.Cluster)
	}
}

// Failing returns why the last request has failed, and since when all have; nil: it has not.
func (c *Client) Failing() (since time.Time, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.since, c.failed
}
