package member

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/etcd"
	"jbofd/internal/cluster/link"
	"jbofd/internal/cluster/view"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
	"jbofd/internal/uuid"
)

func TestMain(m *testing.M) { etcdproc.Main(m) }

const (
	// wait is the time limit for what is expected on a busy machine.
	wait  = 2 * time.Minute
	lease = time.Second
)

// world is a cluster with a real etcd in a process of its own. The members are in this process and talk over TCP.
type world struct {
	t       *testing.T
	etcd    *etcdproc.Server
	uuid    uuid.UUID
	nodes   map[string]string // addresses
	members map[string]*node
}

// node is a member with its drives and its state directory, which stay when it is stopped.
type node struct {
	*Member
	w     *world
	name  string
	cfg   Config
	proxy *proxy
	log   *lines
	part  uuid.UUID

	// mu guards the store: the membership that each range belongs to.
	mu       sync.Mutex
	store    map[int]view.Epoch
	reported []cluster.RangeReport
}

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

// newWorld starts etcd, makes a cluster and configures nodes, which are not started.
func newWorld(t *testing.T, replicas int, names ...string) *world {
	t.Helper()
	w := &world{t: t, etcd: etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()}), uuid: uuid.UUID{7},
		nodes: map[string]string{}, members: map[string]*node{}}
	err := Create(t.Context(), etcd.Config{Endpoints: []string{w.etcd.URL}, Cluster: "test", Timeout: wait},
		cluster.Settings{Cluster: w.uuid, Replicas: replicas}, 1, 16)
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		w.nodes[name] = host() + ":7000"
		n := &node{w: w, name: name, part: uuid.UUID{9, byte(i)}, store: map[int]view.Epoch{}}
		n.proxy = newProxy(t, strings.TrimPrefix(w.etcd.URL, "http://"))
		w.members[name] = n
		n.cfg = Config{Dir: t.TempDir(), Changed: n.changed,
			Node: cluster.Config{Cluster: w.uuid, Name: name, LeaseNS: int64(lease),
				Partitions: []cluster.Partition{{ID: n.part, Weight: 1}}},
			Etcd: etcd.Config{Endpoints: []string{"http://" + n.proxy.address}, Cluster: "test"},
			Link: link.Config{Nodes: w.nodes}}
	}
	return w
}

func host() string {
	h, _, _ := net.SplitHostPort(loopback.Address())
	return h
}

// start starts a process of a node.
func (n *node) start() {
	n.w.t.Helper()
	if err := n.tryStart(); err != nil {
		n.w.t.Fatal(err)
	}
}

func (n *node) tryStart() error {
	n.log = &lines{}
	n.mu.Lock()
	n.reported = nil
	n.mu.Unlock()
	cfg := n.cfg
	cfg.Log = slog.New(slog.NewTextHandler(n.log, nil))
	var err error
	n.mu.Lock() // until Member is set
	n.Member, err = Start(cfg)
	n.mu.Unlock()
	if err == nil {
		n.w.t.Cleanup(n.Close)
	}
	return err
}

// startAll starts all nodes and waits until they serve.
func (w *world) startAll() {
	w.t.Helper()
	for _, n := range w.members {
		n.start()
	}
	w.serving(w.names()...)
}

func (w *world) names() (names []string) {
	for name := range w.members {
		names = append(names, name)
	}
	return names
}

// changed keeps the store as the views say, and reports what it has.
func (n *node) changed(s *State) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.Member == nil {
		return // it is just being started: nothing can have been acted on
	}
	var reports []cluster.RangeReport
	own := func(m *cluster.Map, r int) (view.PartitionID, *view.Member) {
		for i := range m.Chains[r] {
			if e := &m.Chains[r][i]; m.Partitions[e.Partition].ID == n.part {
				return e.Partition, e
			}
		}
		return 0, nil
	}
	if s.Active != nil {
		for r := range s.Active.Chains {
			if _, m := own(s.Active, r); m != nil && m.State != view.Waiting && m.State != view.LastCopy {
				n.store[r] = m.Since
			}
		}
	}
	if s.Newest != nil {
		for r := range s.Newest.Chains {
			// Nothing is reported of a new chain that the node does not act on yet.
			id, m := own(s.Newest, r)
			if m == nil || m.State <= view.Leaving && m.Since != n.store[r] {
				continue
			}
			e := cluster.RangeReport{Partition: id, Range: r, Report: view.Report{Local: view.Incomplete,
				Epoch: s.Newest.Epoch}}
			if n.store[r] == m.Since {
				e.Local = view.Complete
			}
			reports = append(reports, e)
		}
	}
	if !reflect.DeepEqual(reports, n.reported) {
		n.reported = reports
		n.SetReport(cluster.Holdings{Ranges: reports})
	}
}

// authority reports whether the node may serve.
func (n *node) authority() bool { return n.State().Active != nil && Now() < n.Authority() }

// eventually waits for something.
func (w *world) eventually(what string, ok func() error) {
	w.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(wait); ; <-tick.C {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			for name, n := range w.members {
				if n.Member != nil {
					w.t.Logf("%s: %+v\n%s", name, n.State(), n.log)
				}
			}
			w.t.Fatalf("%s: not yet: %v", what, err)
		}
	}
}

// serving waits until these nodes, and no others, are admitted by the view on which all of them act, with authority and
// full chains. It returns how long that took.
func (w *world) serving(names ...string) time.Duration {
	w.t.Helper()
	begin := time.Now()
	w.eventually(fmt.Sprint(names, " serve"), func() error {
		managers := 0
		var epoch view.Epoch
		for _, name := range names {
			n := w.members[name]
			s := n.State()
			if !n.authority() {
				return fmt.Errorf("%s has no authority", name)
			}
			if s.Manages {
				managers++
			}
			if epoch == 0 {
				epoch = s.Active.Epoch
			}
			if s.Active.Epoch != epoch {
				return fmt.Errorf("epochs %d and %d", epoch, s.Active.Epoch)
			}
			admitted := 0
			for _, i := range s.Active.Admitted {
				if i != 0 {
					admitted++
				}
			}
			if admitted != len(names) {
				return fmt.Errorf("%d are admitted", admitted)
			}
			for r, c := range s.Active.Chains {
				ok := len(c) > 0
				for _, m := range c {
					ok = ok && (m.State == view.Serving || len(c) > len(names) || admitted < s.Active.Replicas)
				}
				if !ok {
					return fmt.Errorf("chain %d is %+v", r, c)
				}
			}
		}
		if managers != 1 {
			return fmt.Errorf("%d managers", managers)
		}
		return nil
	})
	return time.Since(begin)
}

// manager returns the names of the manager and of the others.
func (w *world) manager() (name string, others []string) {
	w.t.Helper()
	for n, m := range w.members {
		if m.State().Manages {
			name = n
		} else {
			others = append(others, n)
		}
	}
	return name, others
}

// granted waits until each of these nodes has been granted authority until well after now.
func (w *world) granted(names ...string) {
	w.t.Helper()
	begin := Now()
	w.eventually("authority goes on", func() error {
		for _, name := range names {
			if n := w.members[name]; n.Authority() < begin+3*int64(lease) {
				return fmt.Errorf("%s has it until %d ms after the beginning", name, (n.Authority()-begin)/1e6)
			}
		}
		return nil
	})
}

// problem waits until a node has a problem.
func (w *world) problem(n *node, want error) {
	w.t.Helper()
	w.eventually(fmt.Sprint(n.name, " has the problem: ", want), func() error {
		if err := n.State().Problem; !is(err, want) {
			return fmt.Errorf("it is: %v", err)
		}
		return nil
	})
	w.t.Log(n.name, ": ", n.State().Problem)
}

// raw is a client of the library, past the proxies.
func (w *world) raw() *clientv3.Client {
	w.t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{w.etcd.URL}, Logger: zap.NewNop()})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	return c
}

// put writes a key of the cluster, and returns the revision.
func (w *world) put(c *clientv3.Client, key string, value []byte) int64 {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), wait)
	defer cancel()
	resp, err := c.Put(ctx, etcd.Prefix("test")+key, string(value))
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.Header.Revision
}

// proxy carries the connections of a node to etcd, and can be cut.
type proxy struct {
	t       testing.TB
	address string
	to      string
	wait    sync.WaitGroup
	// mu guards what follows.
	mu       sync.Mutex
	listener net.Listener
	open     map[net.Conn]bool
}

func newProxy(t testing.TB, to string) *proxy {
	t.Helper()
	p := &proxy{t: t, address: host() + ":2379", to: to, open: map[net.Conn]bool{}}
	p.heal()
	t.Cleanup(p.cut)
	return p
}

// heal lets connections through.
func (p *proxy) heal() {
	p.t.Helper()
	l, err := net.Listen("tcp", p.address)
	if err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	p.listener = l
	p.mu.Unlock()
	p.wait.Add(1)
	go func() {
		defer p.wait.Done()
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			d, err := net.Dial("tcp", p.to)
			if err != nil {
				_ = c.Close()
				continue
			}
			p.mu.Lock()
			p.open[c], p.open[d] = true, true
			over := p.listener != l
			p.mu.Unlock()
			if over {
				_, _ = c.Close(), d.Close()
			}
			p.wait.Add(2)
			for _, pair := range [][2]net.Conn{{c, d}, {d, c}} {
				go func() {
					defer p.wait.Done()
					_, _ = io.Copy(pair[0], pair[1])
					_, _ = pair[0].Close(), pair[1].Close()
				}()
			}
		}
	}()
}

// cut ends all connections, and lets none through. Idempotent.
func (p *proxy) cut() {
	p.mu.Lock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	for c := range p.open {
		_ = c.Close()
	}
	clear(p.open)
	p.mu.Unlock()
	p.wait.Wait()
}
