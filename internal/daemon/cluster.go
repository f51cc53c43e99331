package daemon

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/etcd"
	"jbofd/internal/cluster/etcdserver"
	"jbofd/internal/cluster/link"
	"jbofd/internal/cluster/member"
	"jbofd/internal/cluster/view"
	"jbofd/internal/config"
	"jbofd/internal/invariants"
	"jbofd/internal/nvmeof"
	"jbofd/internal/partition"
	"jbofd/internal/uuid"
)

// clusterComponent is what the cluster is called where the daemon says what is not ready.
const clusterComponent = "cluster"

// The times of a node that joins and leaves its cluster.
const (
	// lookAgain is the time between two attempts to read the records of the cluster, or to begin the membership.
	lookAgain = 500 * time.Millisecond
	// etcdStop is the time that the server of etcd gets at the end of a stop. After that it is killed; its data are
	// safe.
	etcdStop = 300 * time.Millisecond
)

// clusterAccess is what a replicaNode may use.
type clusterAccess struct {
	// Node is this daemon, whose configuration has a cluster.
	Node *Node
	// Report tells the manager what the node has in its partitions: see member.Member.SetReport.
	Report func(has cluster.Holdings)
	// Connected is member.Member.SetConnected.
	Connected func(epoch view.Epoch)
	// Authority is member.Member's: until when State.Serves may be relied on, by member.Now. 0 before the membership
	// has begun and after it has ended.
	Authority func() int64
}

// clusterMember is this node as a member of its cluster.
type clusterMember struct {
	n    *Node
	self string // the name of this node
	dir  string // of what the node remembers of its cluster
	// cfg is the configuration at the start, whose Nodes a reload may have changed since: see nodesChanged.
	cfg    *config.Cluster
	etcd   etcd.Config
	tls    *tls.Config       // between nodes; nil: none
	server *etcdserver.Child // the server of etcd that this node runs; nil: none
	host   *replicaNode

	ctx    context.Context
	cancel context.CancelFunc
	// joining is for the goroutine that begins the membership. begun is closed when there is one.
	joining sync.WaitGroup
	begun   chan struct{}
	ending  sync.Once
	// changingNodes is for one nodesChanged at a time, so that an older configuration never follows a newer one.
	changingNodes sync.Mutex

	// mu guards what follows.
	mu sync.Mutex
	// seed is the HashSeed of the cluster; it is known as soon as the node has seen the records.
	seed      uint64
	seedKnown bool
	// valueBytes is cluster.Settings.ValueBytes, known with the seed.
	valueBytes int
	// problem is why the membership has not begun.
	problem error
	// few is a logger with a limited rate, for problems that may change at each attempt.
	few *slog.Logger
	// refused are partitions that the cluster cannot have, and why.
	refused map[uuid.UUID]error
	// own are the partitions that the membership was told of.
	own    map[uuid.UUID]bool
	member *member.Member // nil: not begun
	// running is member, for the data path, which takes no lock.
	running atomic.Pointer[member.Member]
	// newest is the newest view, seenAt when it was seen first.
	newest *cluster.Map
	seenAt time.Time
	// holdings is what the host has reported last, and what this file has found unusable.
	holdings cluster.Holdings
}

// startCluster prepares the membership, and starts the server of etcd, if the configuration has them. join begins it.
func (n *Node) startCluster() (err error) {
	cfg := n.cfg.Cluster
	if cfg == nil {
		return nil
	}
	c := &clusterMember{n: n, self: n.cfg.Node.Name, dir: filepath.Join(n.cfg.Node.DataDir, "cluster"), cfg: cfg,
		begun: make(chan struct{}), refused: map[uuid.UUID]error{}, own: map[uuid.UUID]bool{},
		few: n.fewLog(), problem: errors.New("the node is starting")}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if c.tls, err = loadTLS(n.cfg, "cluster.tls", cfg.TLS); err != nil {
		return err
	}
	c.etcd = etcd.Config{Endpoints: cfg.EtcdEndpoints(), User: cfg.Etcd.Username, Cluster: cfg.Name}
	if c.etcd.TLS, err = loadTLS(n.cfg, "cluster.etcd.tls", cfg.Etcd.TLS); err != nil {
		return err
	}
	if file := cfg.Etcd.PasswordFile; file != "" {
		b, err := os.ReadFile(file)
		if err == nil && len(b) == 0 {
			err = fmt.Errorf("%s is empty", file)
		}
		if err != nil {
			return n.cfg.FieldProblem("cluster.etcd.password_file", err)
		}
		c.etcd.Password, _, _ = strings.Cut(string(b), "\n")
	}
	if cfg.Etcd.Embedded != nil {
		if c.server, err = etcdserver.StartChild(n.opts.EtcdBinary, c.etcdServer(), n.slowLog()); err != nil {
			return n.cfg.FieldProblem("cluster.etcd.embedded", err)
		}
		n.closing(func() { within(etcdStop, c.endServer()) })
	}
	c.host, err = newReplicaNode(clusterAccess{Node: n, Report: c.report, Connected: c.connected,
		Authority: c.authority})
	if err != nil {
		return err
	}
	n.service.Register(nvmeof.KindReplica, c.host.executor)
	n.cluster = c
	n.closing(c.end)
	n.tel.SetCluster(c.stats, c.ready)
	return nil
}

// etcdServer is the configuration of the server of etcd that the daemon runs.
func (c *clusterMember) etcdServer() etcdserver.Config {
	e, self := c.cfg.Etcd.Embedded, c.self
	s := etcdserver.Config{Cluster: c.cfg.Name, Name: self, Dir: e.Dir, Members: map[string]string{}}
	if s.Dir == "" {
		s.Dir = filepath.Join(c.n.cfg.Node.DataDir, "etcd")
	}
	for _, m := range e.Members {
		s.Members[m.Name] = m.PeerURL
		if m.Name == self {
			s.ClientURL = m.ClientURL
		}
	}
	if t := c.cfg.Etcd.TLS; t != nil {
		s.CAFile, s.CertFile, s.KeyFile = t.CA, t.Cert, t.Key
	}
	return s
}

// loadTLS reads the files of a section; nil: there is none.
func loadTLS(cfg *config.Config, field string, t *config.TLS) (*tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	pem, err := os.ReadFile(t.CA)
	if err != nil {
		return nil, cfg.FieldProblem(field+".ca", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, cfg.FieldProblem(field+".ca", fmt.Errorf("%s has no certificate in PEM", t.CA))
	}
	cert, err := tls.LoadX509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, cfg.FieldProblem(field+".cert", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: pool, ClientCAs: pool,
		MinVersion: tls.VersionTLS13}, nil
}

// hashSeed is the seed of the cluster's partitions, if it is known already. Without it no partition can be made.
func (c *clusterMember) hashSeed() (seed uint64, known bool) {
	if c == nil {
		return 0, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seed, c.seedKnown
}

// join begins the membership: it waits for the records of the cluster, has new partitions made, and starts the member.
// What fails it tries again. It ends early with c.ctx, or when the daemon stops.
func (c *clusterMember) join() {
	r := c.await()
	if r == nil {
		return
	}
	c.mu.Lock()
	c.seed, c.seedKnown, c.valueBytes = r.Map.HashSeed, true, int(r.Settings.ValueBytes)
	c.mu.Unlock()
	for {
		err := c.n.makePartitions()
		if err == nil {
			break
		}
		c.setProblem(fmt.Errorf("the new partitions of the cluster cannot be made: %w", err))
		if errors.Is(err, errStopping) || !c.pause() {
			return
		}
	}
	cfg := c.memberConfig(r.Settings.Cluster)
	for {
		m, err := member.Start(cfg)
		if err == nil {
			c.mu.Lock()
			c.member, c.problem = m, nil
			c.running.Store(m)
			c.mu.Unlock()
			close(c.begun)
			if err := c.nodesChanged(); err != nil { // a reload may have changed them meanwhile
				c.n.log.Error("the nodes of the cluster cannot be changed", "error", err)
			}
			return
		}
		c.setProblem(err)
		if !c.pause() {
			return
		}
	}
}

// pause waits a while. It returns false if the node is to stop.
func (c *clusterMember) pause() bool {
	select {
	case <-time.After(lookAgain):
		return true
	case <-c.ctx.Done():
		return false
	}
}

// setProblem notes why the membership has not begun.
func (c *clusterMember) setProblem(err error) {
	c.mu.Lock()
	same := c.problem != nil && c.problem.Error() == err.Error()
	c.problem = err
	c.mu.Unlock()
	if !same && c.ctx.Err() == nil {
		c.few.Warn("the node does not take part in its cluster yet", "cluster", c.cfg.Name, "reason", err)
	}
}

// await waits for the records of the cluster; nil: the node is to stop.
func (c *clusterMember) await() *cluster.Records {
	for {
		r, err := member.Load(c.ctx, c.etcd)
		if err == nil {
			err = c.belong(r.Settings.Cluster)
		}
		if err == nil {
			err = c.takes(int(r.Settings.ValueBytes))
		}
		if err == nil {
			return r
		}
		c.setProblem(c.explain(err))
		if !c.pause() {
			return nil
		}
	}
}

// belongs returns the UUID of the cluster that the node belongs to, empty if it has none yet or that cannot be read.
func (c *clusterMember) belongs() string {
	b, _ := os.ReadFile(filepath.Join(c.dir, "uuid"))
	return strings.TrimSpace(string(b))
}

// belong notes which cluster the node belongs to, and refuses another one.
//
// Errors: cluster.ErrForeign.
func (c *clusterMember) belong(id uuid.UUID) error {
	path := filepath.Join(c.dir, "uuid")
	b, err := os.ReadFile(path)
	switch {
	case err == nil && strings.TrimSpace(string(b)) == id.String():
		return nil
	case err == nil:
		return fmt.Errorf("%w: etcd has the cluster %s, this node belongs to %q; if it is to be a new node of another "+
			"cluster, delete its partitions and %s", cluster.ErrForeign, id, strings.TrimSpace(string(b)), path)
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	f, err := os.Create(path + ".new")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, id)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// replicated calls f with each partition of this node that the configuration has; s is nil if it is not open.
func (n *Node) replicated(f func(nc config.Namespace, id uuid.UUID, p *partition.Partition)) {
	for _, sc := range n.config().Subsystems {
		for _, nc := range sc.Namespaces {
			for _, d := range n.drives() {
				if !nc.Replicated || d.name != nc.SSD || d.label == nil {
					continue
				}
				lab := d.label.Label()
				i := lab.FindNamespace(sc.NQN, nc.NSID)
				if i < 0 {
					f(nc, uuid.UUID{}, nil)
				} else if s := n.publisher.Store(lab.Extents[i].UUID); s != nil {
					f(nc, lab.Extents[i].UUID, s.Partition)
				} else {
					f(nc, lab.Extents[i].UUID, nil)
				}
			}
		}
	}
}

// makePartitions makes the partitions that have waited for the seed of the cluster.
func (n *Node) makePartitions() error {
	missing := 0
	n.replicated(func(_ config.Namespace, id uuid.UUID, _ *partition.Partition) {
		if id.IsZero() {
			missing++
		}
	})
	if missing == 0 {
		return nil
	}
	if err := n.beginChange("the making of new partitions of the cluster"); err != nil {
		return err
	}
	defer n.endChange()
	if err := n.apply(n.cfg, lenient); err != nil {
		return err
	}
	n.log.Info("new partitions of the cluster were made", "partitions", missing)
	return nil
}

// memberConfig is the configuration of the membership. Partitions that the cluster can have are attached to the host.
func (c *clusterMember) memberConfig(id uuid.UUID) member.Config {
	self := c.n.config().Self()
	m := member.Config{Dir: c.dir, Etcd: c.etcd, Changed: c.changed, Log: c.n.log,
		Node: cluster.Config{Cluster: id, Name: self.Name, Domain: self.Domain, LeaseNS: int64(c.cfg.Lease),
			AwayNS: int64(c.cfg.Away), Nodes: len(c.n.config().Cluster.Nodes)},
		Link: link.Config{Nodes: addresses(c.n.config().Cluster.Nodes), Listen: c.cfg.Listen, TLS: c.tls,
			Log: c.n.peerLog()}}
	seed, _ := c.hashSeed()
	c.n.replicated(func(nc config.Namespace, id uuid.UUID, p *partition.Partition) {
		if p == nil { // its drive or its store has failed, which the log has
			return
		}
		var err error
		if p.HashSeed() == seed {
			err = c.host.attach(id, p, c.valueBytes)
		} else {
			err = fmt.Errorf("namespace %s was not made for this cluster, its keys are at other positions: %w", id,
				errReplicated)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if err != nil {
			c.refused[id] = err
			c.n.tel.Health().Block(fmt.Sprintf("namespace %s %d", c.cfg.Subsystem, nc.NSID), err.Error())
			c.n.log.Error("partition left out", "subsystem", c.cfg.Subsystem, "nsid", nc.NSID, "error", err)
			return
		}
		c.own[id] = true
		m.Node.Partitions = append(m.Node.Partitions, cluster.Partition{ID: id, Weight: weight(nc.Size)})
	})
	return m
}

// hostNodes returns how the nodes of the cluster connect as hosts: from the address at which they listen for hosts, or
// for nodes. This one is among them (peers.Config.Nodes).
func hostNodes(cfg *config.Config) (all []nvmeof.Node) {
	for _, node := range cfg.Cluster.Nodes {
		n := nvmeof.Node{NQN: cluster.HostNQN(cfg.Cluster.Name, node.Name)}
		for _, address := range []string{node.Target, node.Address} {
			if a := addressOf(address).Unmap().WithZone(""); !slices.Contains(n.From, a) {
				n.From = append(n.From, a)
			}
		}
		all = append(all, n)
	}
	return all
}

// addressOf returns the IP address of a node's address or target.
func addressOf(address string) netip.Addr {
	_, rest, found := strings.Cut(address, "://")
	if !found {
		rest = address
	}
	a, err := netip.ParseAddrPort(rest)
	invariants.Check(err == nil, "daemon: an address that the configuration has refused")
	return a.Addr()
}

// hostAddress returns the address that this node connects to the others from, as a host: that of its target, if it has
// a listener there; otherwise the zero Addr, that of the route. Over RDMA, an RDMA device must have the address, as
// that of an RDMA listener is.
func hostAddress(cfg *config.Config, rdma bool) netip.Addr {
	own := addressOf(cfg.Self().Target)
	for _, l := range cfg.Listeners {
		if addressOf(l.Address) == own && (!rdma || l.Transport == "rdma") {
			return own
		}
	}
	return netip.Addr{}
}

// weight is how much a partition of that size is to hold, in proportion to others.
func weight(size config.Bytes) uint32 { return uint32(max(1, size>>30)) }

// changed is told by the membership of its states.
func (c *clusterMember) changed(s *member.State) {
	<-c.begun // Start is about to return
	if c.look(s) {
		c.tell()
	}
	c.host.setState(s)
}

// look takes a state, and reports whether it changes which partitions are unusable: those that the view has of this
// node and that the node does not have any more.
func (c *clusterMember) look(s *member.State) (differs bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.Newest == nil || s.Newest == c.newest {
		return false
	}
	c.newest, c.seenAt = s.Newest, time.Now()
	var unusable []view.PartitionID
	for i, p := range s.Newest.Partitions {
		if !p.ID.IsZero() && s.Newest.Nodes[p.Node].Name == c.self && !c.own[p.ID] {
			unusable = append(unusable, view.PartitionID(i))
		}
	}
	differs = !slices.Equal(unusable, c.holdings.Unusable)
	c.holdings.Unusable = unusable
	return differs
}

// report takes what the host has in its partitions.
func (c *clusterMember) report(has cluster.Holdings) {
	c.mu.Lock()
	c.holdings.Ranges, c.holdings.Failing = has.Ranges, has.Failing
	c.mu.Unlock()
	c.tell()
}

// connected takes of which view this node is connected to all nodes.
func (c *clusterMember) connected(epoch view.Epoch) {
	if m := c.running.Load(); m != nil {
		m.SetConnected(epoch)
	}
}

// tell tells the manager what the node has.
func (c *clusterMember) tell() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.member != nil {
		c.member.SetReport(c.holdings)
	}
}

// state returns the membership and its state, nil before it has begun, and why it has not.
func (c *clusterMember) state() (*member.Member, *member.State, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.member == nil {
		return nil, nil, c.problem
	}
	return c.member, c.member.State(), nil
}

func (c *clusterMember) authority() int64 {
	if m := c.running.Load(); m != nil {
		return m.Authority()
	}
	return 0
}

// refusal returns why a partition is left out of the cluster, or "".
func (c *clusterMember) refusal(id uuid.UUID) string {
	if c == nil {
		return ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.refused[id]; err != nil {
		return err.Error()
	}
	return ""
}

// endServer ends the server of etcd, if the node runs one. The result is closed when it has ended.
func (c *clusterMember) endServer() <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if c.server != nil {
			c.server.Close()
		}
	}()
	return done
}

// isReplicated reports whether a namespace is a partition of the cluster.
func (n *Node) isReplicated(id uuid.UUID) (is bool) {
	n.replicated(func(_ config.Namespace, own uuid.UUID, _ *partition.Partition) { is = is || own == id })
	return is
}

// errReplicated refuses what would make a partition differ from the copies of its keys at other nodes.
var errReplicated = errors.New("its keys are changed by the cluster only; to give up what it has, take it out of the " +
	"configuration, restart, delete it with jbofctl namespace delete, and add it again: the cluster fills it")

// end ends the membership: first the authority, then what the replicas have under way. Idempotent.
func (c *clusterMember) end() {
	c.ending.Do(func() {
		c.cancel()
		c.joining.Wait()
		if c.member != nil {
			c.member.Close()
		}
		c.host.close()
	})
}
