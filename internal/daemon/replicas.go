package daemon

import (
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/member"
	"jbofd/internal/cluster/view"
	"jbofd/internal/config"
	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor/replicated"
	"jbofd/internal/partition"
	"jbofd/internal/peers"
	"jbofd/internal/replica"
	"jbofd/internal/replicas"
	"jbofd/internal/turn"
	"jbofd/internal/uuid"
)

// closeReplicasTimeout is how long the replicas may take to end what their stores have under way.
const closeReplicasTimeout = 200 * time.Millisecond

// patienceLeases is for how many leases a member of a chain waits for a neighbour that is out of reach while the
// manager hears it. A node that has failed is given up after 1.3 leases.
const patienceLeases = 2

// yieldLeases is for how many leases a chain must have been as it is before another member becomes its ChainHead, so
// that each node leads its share: nothing else is going on then.
const yieldLeases = 5

// silentAfter is how long a drive may complete nothing although it has requests. The longest that a sound one needs for
// anything is a second or two, and by default clients wait for 10 s.
const silentAfter = 7 * time.Second

// answerWithin is how long other nodes wait for a drive: half as long as peers.Config.Timeout.
const answerWithin = 2500 * time.Millisecond

// replicaNode runs the replicas of this node's partitions, with the connections to the other nodes.
type replicaNode struct {
	access   clusterAccess
	cfg      *config.Cluster // at the start: see clusterMember.cfg
	self     string          // the name of this node
	log      *slog.Logger
	limited  *slog.Logger // for what each of thousands of ranges may say
	executor *replicated.Executor
	peers    *peers.Peers

	// mu guards groups, which grow until the first setState.
	mu     sync.Mutex
	groups map[uuid.UUID]*replicas.Replicas
	// telling is for one report at a time, so that an older one never follows a newer one.
	telling sync.Mutex

	// viewing guards what peers and hosts were told: where hosts reach the nodes, and the newest view, nil: none.
	viewing sync.Mutex
	targets map[string]string
	last    *cluster.Map

	// until is the authority that setState has seen last.
	until int64
	// hosts are the nodes of views, and whether they are connected to this one as hosts. lookNS is when to look again.
	hosts  map[string]bool
	lookNS int64

	// reaching guards reached, the nodes of which peers has said that they can be reached.
	reaching sync.Mutex
	reached  map[string]bool
}

// newReplicaNode makes what runs the replicas; it connects to nobody before the first view.
func newReplicaNode(access clusterAccess) (*replicaNode, error) {
	n := access.Node
	cfg, self := n.cfg.Cluster, n.cfg.Node.Name
	r := &replicaNode{access: access, cfg: cfg, self: self, log: n.log, limited: n.fewLog(),
		executor: replicated.New(turn.Real, n.pool), groups: map[uuid.UUID]*replicas.Replicas{},
		targets: targets(cfg.Nodes), hosts: map[string]bool{}, reached: map[string]bool{}}
	pc := peers.Config{Name: self, HostNQN: cluster.HostNQN(cfg.Name, self),
		Nodes: peerNodes(cfg.Nodes, cfg.Subsystem), LocalAddress: hostAddress(n.cfg, false),
		LocalRDMA: hostAddress(n.cfg, true),
		Connected: r.connected, Disconnected: r.disconnected, KATO: time.Duration(cfg.Lease), RDMA: n.opts.RDMA,
		Log: n.log}
	var err error
	r.peers, err = peers.New(pc)
	return r, err
}

// settings are those of all partitions: what the configuration says, and the times of this file.
func (r *replicaNode) settings() replicas.Config {
	lease := time.Duration(r.cfg.Lease)
	return replicas.Config{Patience: patienceLeases * lease, SilentAfter: silentAfter, AnswerWithin: answerWithin,
		YieldAfter: yieldLeases * lease, LockKeys: r.cfg.LockKeys,
		RestoreShare: replica.Share(r.cfg.RestoreShare), FillShare: replica.Share(r.cfg.FillShare)}
}

// attach gives it an open partition, before the first setState. The partition is open until close has returned. The
// longest value of the cluster has valueBytes, 0: it is this node's own.
func (r *replicaNode) attach(id uuid.UUID, p *partition.Partition, valueBytes int) error {
	name := r.cfg.Name
	series := r.access.Node.tel.Peers()
	observe := func(opcode uint8, bytes int, ns int64, lost bool) {
		if kind := slices.Index(peerOpcodes, opcode); kind >= 0 {
			series.Observe(kind, bytes, time.Duration(ns), lost)
		}
	}
	longest := nvmeof.MaxReplicatedValue(p.MaxValueBytes(), uint32(r.access.Node.cfg.Limits.MDTS))
	if valueBytes > 0 {
		longest = min(longest, valueBytes)
	}
	c := r.settings()
	c.Store, c.ID, c.Peers, c.Observe, c.MaxValueBytes = p, id, r.peers, observe, longest
	c.Repair = func(how crrs.RepairOutcome) { series.CountRepair(int(how)) }
	c.HostNQN = func(node string) string { return cluster.HostNQN(name, node) }
	c.Authority, c.Clock, c.Changed, c.Drive = r.access.Authority, member.Now, r.report, p.Drive().Stats()
	c.Full, c.TooFullToFill = p.NearlyFull, p.TooFullToFill
	c.Pool, c.Env, c.Log = r.access.Node.pool, turn.Real, r.limited
	g, err := replicas.New(c)
	if err != nil {
		return err
	}
	r.mu.Lock()
	r.groups[id] = g
	r.mu.Unlock()
	r.executor.Set(id, g)
	p.LookForLosses() // of an earlier process
	return nil
}

// damaged is told what the store of a partition has found damaged. What is found before attach is found again.
func (r *replicaNode) damaged(id uuid.UUID, d kvstore.Damage) {
	r.mu.Lock()
	g := r.groups[id]
	r.mu.Unlock()
	if g != nil {
		g.Damaged(d)
	}
}

// all returns the replicas of all partitions.
func (r *replicaNode) all() (all []*replicas.Replicas) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.groups {
		all = append(all, g)
	}
	return all
}

// dirty counts the writes of all partitions that are not known to be committed yet.
func (r *replicaNode) dirty() (n int64) {
	for _, g := range r.all() {
		n += g.Dirty()
	}
	return n
}

// silent counts the partitions whose drive takes requests and completes none.
func (r *replicaNode) silent() (n int) {
	for _, g := range r.all() {
		if g.Silent() {
			n++
		}
	}
	return n
}

// failing counts the partitions whose drive does not work: it fails writes, or is silent.
func (r *replicaNode) failing() (n int) {
	for _, g := range r.all() {
		n += len(g.Report().Failing)
	}
	return n
}

// dropped sums up what all partitions have dropped of ranges that are others' now.
func (r *replicaNode) dropped() (sum replica.DropStats) {
	for _, g := range r.all() {
		s := g.Dropped()
		sum.Left, sum.Ranges, sum.Bytes = sum.Left+s.Left, sum.Ranges+s.Ranges, sum.Bytes+s.Bytes
	}
	return sum
}

// losses sums up what the stores of all partitions are known to have lost, and have found.
func (r *replicaNode) losses() (known int, found uint64) {
	for _, g := range r.all() {
		k, f := g.Losses()
		known, found = known+k, found+f
	}
	return known, found
}

// lossesOf returns how many losses of a partition are known.
func (r *replicaNode) lossesOf(id uuid.UUID) (known int) {
	r.mu.Lock()
	g := r.groups[id]
	r.mu.Unlock()
	if g != nil {
		known, _ = g.Losses()
	}
	return known
}

// peerOpcodes has the opcodes of telemetry.PeerKinds.
var peerOpcodes = []uint8{nvme.CmdKVForward, nvme.CmdKVDurable, nvme.CmdKVSync, nvme.CmdKVShip, nvme.CmdKVCompare,
	nvme.CmdKVFetch}

// connected is told by peers that a node can be reached.
func (r *replicaNode) connected(node string) {
	r.setReached(node, true)
	for _, g := range r.all() {
		g.NodeReachable(node)
	}
}

// disconnected is told by peers that a node cannot be reached.
func (r *replicaNode) disconnected(node string, l peers.Loss) {
	r.setReached(node, false)
	for _, g := range r.all() {
		g.NodeUnreachable(node, l)
	}
}

// setState tells of a new state, and of each extension of the authority: see member.Config.Changed. What the state
// takes from the node is not served any more when it returns.
func (r *replicaNode) setState(s *member.State) {
	if now, until := member.Now(), r.access.Authority(); until > now {
		if r.until <= now {
			r.peers.Redial() // whatever has kept this node from the manager may have kept it from the others, too
		}
		r.until = until
	}
	for _, g := range r.all() {
		g.SetState(s.Active, s.Newest)
	}
	r.viewing.Lock()
	defer r.viewing.Unlock()
	if s.Newest != nil && s.Newest != r.last {
		// The newest view, not the active one: a node that is to be spoken to when that acts is connected before.
		r.last = s.Newest
		r.peers.SetView(s.Newest)
		r.publishLocked()
	}
	r.lookForHostsLocked()
	r.access.Connected(r.connectedInLocked(s))
}

func (r *replicaNode) setReached(node string, is bool) {
	r.reaching.Lock()
	defer r.reaching.Unlock()
	r.reached[node] = is
}

// connectedInLocked returns the epoch of the view on which this node acts, if it is the newest one and this node is
// connected to all that it admits and that have partitions, in both directions; otherwise 0. The caller holds viewing.
func (r *replicaNode) connectedInLocked(s *member.State) view.Epoch {
	m := s.Active
	if m == nil || m != s.Newest {
		return 0
	}
	has := make([]bool, len(m.Nodes))
	for i := range m.Partitions {
		if !m.Partitions[i].ID.IsZero() {
			has[m.Partitions[i].Node] = true
		}
	}
	r.reaching.Lock()
	defer r.reaching.Unlock()
	for i := range m.Nodes {
		name := m.Nodes[i].Name
		if m.Admitted[i] != 0 && has[i] && name != r.self && !(r.reached[name] && r.hosts[name]) {
			return 0
		}
	}
	return m.Epoch
}

// checkNodes finds what is wrong with nodes.
func (r *replicaNode) checkNodes(nodes []config.ClusterNode) error {
	return r.peers.CheckNodes(peerNodes(nodes, r.cfg.Subsystem))
}

// setNodes changes which nodes there are.
func (r *replicaNode) setNodes(nodes []config.ClusterNode) error {
	r.viewing.Lock()
	defer r.viewing.Unlock()
	if err := r.peers.SetNodes(peerNodes(nodes, r.cfg.Subsystem)); err != nil {
		return err
	}
	if now := targets(nodes); !maps.Equal(now, r.targets) {
		r.targets = now
		r.publishLocked()
	}
	return nil
}

// publishLocked gives hosts the map. The caller holds viewing.
func (r *replicaNode) publishLocked() {
	if r.last != nil {
		r.access.Node.service.SetClusterMap(r.cfg.Subsystem, EncodeClusterMap(r.last, r.targets, r.cfg.Subsystem))
	}
}

// lookForHostsLocked tells which of the other nodes are connected to this one as hosts. A chain needs the connections
// of both directions, and a node cannot see by its own that the other one is missing. The caller holds viewing.
func (r *replicaNode) lookForHostsLocked() {
	now := member.Now()
	if r.last == nil || now < r.lookNS {
		return
	}
	r.lookNS = now + int64(r.cfg.Lease)/8
	joined := r.access.Node.service.Joined(r.cfg.Subsystem)
	for i := range r.last.Nodes {
		name := r.last.Nodes[i].Name
		is := joined[cluster.HostNQN(r.cfg.Name, name)]
		if was, known := r.hosts[name]; known && was == is || name == r.self {
			continue
		}
		if r.hosts[name] = is; is {
			r.peers.Redial() // the other direction works, so that this one most likely does, too
		}
		for _, g := range r.all() {
			if is {
				g.HostConnected(name)
			} else {
				g.HostDisconnected(name)
			}
		}
	}
}

// report tells the manager what the partitions have.
func (r *replicaNode) report() { go r.tell() }

func (r *replicaNode) tell() {
	r.telling.Lock()
	defer r.telling.Unlock()
	var has cluster.Holdings
	for _, g := range r.all() {
		h := g.Report()
		has.Ranges, has.Failing = append(has.Ranges, h.Ranges...), append(has.Failing, h.Failing...)
	}
	slices.SortFunc(has.Ranges, func(a, b cluster.RangeReport) int { return a.Range - b.Range })
	r.access.Report(has)
}

// close ends all replicas, and waits for what they have asked of partitions and other nodes. There is no authority any
// more, and no connection of a host.
func (r *replicaNode) close() {
	var ends sync.WaitGroup
	errs := make(chan error, len(r.groups))
	for id, g := range r.groups {
		r.executor.Set(id, nil)
		ends.Go(func() { errs <- g.Close(closeReplicasTimeout) })
	}
	r.peers.Close() // ends what the replicas wait for
	ends.Wait()
	close(errs)
	var all error
	for err := range errs {
		all = errors.Join(all, err)
	}
	if all != nil {
		r.log.Error("replicas not closed as they should be; nothing acknowledged is lost", "error", all)
	}
}
