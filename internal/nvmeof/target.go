// Package nvmeof is the NVMe over Fabrics target as a machine: subsystems,
// controllers, queues and discovery, independent of any transport. It does no
// I/O, reads no clock and takes no lock. The target service (package target)
// calls it with the time, one call at a time, and carries out the actions that
// it asks for.
//
//	Apply(State) ──┐                       ┌──> Reply (one command)
//	Connect ───────┼──> Target ── Controller ──> Action (close, complete an
//	Admin ─────────┤                       │      event request, new namespaces)
//	Expire(now) ───┘                       └──> NextExpiry
//
// I/O commands do not come here: PlanIO validates them against an immutable
// NamespaceTable on the connection's own goroutine.
//
// Source: NVMe Base 2.0, NVM Command Set 1.0.
package nvmeof

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
	"jbofd/internal/uuid"
)

// Config are a target's constants.
type Config struct {
	// Firmware is the revision that Identify Controller reports, at most 8 bytes.
	Firmware string
	// NodeUUID identifies the node (FGUID).
	NodeUUID uuid.UUID
	// Limits bound commands.
	Limits Limits
	// InCapsuleBytes is the largest in-capsule data of I/O queues (IOCCSZ).
	InCapsuleBytes int
	// MaxEntries is the largest queue (MQES + 1), MaxIOQueues the number of I/O
	// queues a controller may have.
	MaxEntries, MaxIOQueues int
	// MaxControllers bounds the associations with subsystems, MaxHosts the hosts that have some. Discovery does not
	// count.
	MaxControllers, MaxHosts int
	// MaxDiscovery bounds the associations with the discovery subsystem (with MaxControllers they have at most 65519
	// identifiers), MaxDiscoveryPerPeer those of one address. One
	// more ends the idlest.
	MaxDiscovery, MaxDiscoveryPerPeer int
	// MinKATOMS is the least keep alive timeout granted, in milliseconds; shorter
	// ones are raised to it.
	MinKATOMS uint32
	// MaxDiscoveryKATOMS is the largest keep alive timeout granted to discovery associations, in milliseconds; longer
	// ones are lowered to it.
	MaxDiscoveryKATOMS uint32
	// DiscoveryIdleMS ends a discovery association without keep alive after that
	// long without a command.
	DiscoveryIdleMS uint32
	// QuiesceMS bounds how long a reset, or the next Connect after a lost connection, waits for commands that the
	// drives have (CQT in Identify Controller); a shutdown, which also flushes the drives, may take twice as long.
	// 0: 6000.
	QuiesceMS uint32
	// WallMS is the wall clock at time 0 of the monotonic clock, in milliseconds
	// since 1970.
	WallMS int64
}

// Port is one address that hosts connect to.
type Port struct {
	ID        uint16
	TRTYPE    uint8
	ADRFAM    uint8
	Address   string // TRADDR; a wildcard is replaced by what the host connected to
	Service   string // TRSVCID
	Wildcard  bool
	Discovery bool // serves the discovery subsystem only
	// NQN, of a referral: the discovery subsystem there.
	NQN string
}

// SubsystemState is what the configuration says of a subsystem.
type SubsystemState struct {
	NQN           string
	Serial, Model string
	AllowAnyHost  bool
	Hosts         []string
	// Nodes are the other nodes of a cluster, which connect as hosts. They may connect, see the namespaces that are
	// replicated (KindReplica), and are offered replication. Whether a host is a node is decided when it connects. Who
	// has the NQN of a node, and comes from elsewhere, is refused.
	Nodes      []Node
	Namespaces []*Namespace
}

// Node is another node of the cluster as a host: its NQN, and the addresses that it may connect from, without zones and
// not mapped to IPv6.
type Node struct {
	NQN  string
	From []netip.Addr
}

// State is all that a configuration says of the target.
type State struct {
	Subsystems []SubsystemState
	Ports      []Port
	Referrals  []Port
	// Hosts are hosts that the configuration names beside those of Subsystems and of their Namespaces.
	Hosts []string
}

// ConnID names a connection; the driver numbers them.
type ConnID uint64

// ActionKind says what the driver is to do.
type ActionKind uint8

// Kinds of Action.
const (
	// ActionClose: close the connection; Reason says why.
	ActionClose ActionKind = iota
	// ActionComplete: complete the command in Slot with Status and Result.
	ActionComplete
	// ActionTable: I/O commands are to be judged by Table from now on.
	ActionTable
	// ActionCredits: completions are to carry credits, or no longer, as Credits says.
	ActionCredits
	// ActionExpired: for the log: the keep alive timer of Controller expired.
	ActionExpired
	// ActionFence: no command starts any more that came from an I/O queue that was connected before Controller entered
	// Epoch. It must be carried out before the reply that the machine has just returned is sent, before the actions
	// that follow, and before the machine is used again. When no such command is in flight, Drained must be called.
	ActionFence
	// ActionStop: the I/O queue takes no more commands; those that the drives do not have are to be aborted. Its
	// connection stays.
	ActionStop
	// ActionFlush: the drives SSDs are to be flushed; then Flushed must be called with Flush.
	ActionFlush
	// ActionConnected: Connect is the outcome of a Connect that was held. If its connection is gone and Connect names a
	// controller, Disconnected must be called for that.
	ActionConnected
	// ActionOverdue: for the log: the bound of a reset, shutdown or end of Controller has passed; Reason says of which.
	ActionOverdue
)

// Action is something that the driver is to do to a connection. Actions on one
// connection keep their order.
type Action struct {
	Kind       ActionKind
	Conn       ConnID
	Reason     string
	Slot       int
	Status     nvme.Status
	Result     uint64
	Table      *NamespaceTable
	Version    uint64 // of Table: an older one than the connection has is stale
	Credits    CreditState
	Controller *Controller
	IdleNS     int64
	Epoch      uint64
	SSDs       []int
	Flush      uint64
	Connect    *ConnectReply
}

// Target is the state of all subsystems, controllers and associations of a node: the machine of the package comment.
// One goroutine at a time may call its methods; the target service holds its lock.
type Target struct {
	cfg       Config
	state     State
	subs      map[string]*subsystem
	discovery *subsystem
	// maps has the map of the cluster by the NQN of a subsystem that belongs to one. The bytes are not changed.
	maps map[string]nvme.ClusterMap
	// mapGeneration is the last generation that a map has been given.
	mapGeneration uint32
	// ctrls by CNTLID; identifiers are not reused before the others are.
	ctrls      map[uint16]*Controller
	lastCNTLID uint16
	budgets    budgets
	genctr     uint64
	version    uint64 // of namespace tables
	// ended are associations that have ended while commands of theirs were in flight.
	ended []*Controller
	// held are Connects that wait for them, oldest first.
	held []*heldConnect
	// stopped: no associations begin any more.
	stopped bool
	actions []Action
}

// subsystem is one subsystem and its controllers.
type subsystem struct {
	SubsystemState
	discovery bool
	ctrls     []*Controller
	// changeCount counts changes of asymmetric access, changeVersion is the target's
	// version at the last of them.
	changeCount, changeVersion uint64
}

// accessChanged counts a change of asymmetric access, once for each Apply however
// many controllers see it.
func (s *subsystem) accessChanged(version uint64) {
	if s.changeVersion != version {
		s.changeVersion = version
		s.changeCount++
	}
}

// refusal is why a host may not connect from an address; empty: it may.
func (s *subsystem) refusal(hostNQN string, from netip.Addr) string {
	switch n := s.node(hostNQN); {
	case n != nil && !slices.Contains(n.From, from.Unmap().WithZone("")):
		return fmt.Sprintf("host %s is a node of the cluster, and comes from %s, not from %v", hostNQN, from, n.From)
	case n != nil || s.discovery || s.AllowAnyHost || slices.Contains(s.Hosts, hostNQN):
		return ""
	}
	return fmt.Sprintf("host %s is not allowed in %s", hostNQN, s.NQN)
}

// node returns the other node of the cluster that has an NQN, or nil.
func (s *subsystem) node(hostNQN string) *Node {
	i := slices.IndexFunc(s.Nodes, func(n Node) bool { return n.NQN == hostNQN })
	if i < 0 {
		return nil
	}
	return &s.Nodes[i]
}

// New makes a target without subsystems.
func New(cfg Config) *Target {
	mdts := cfg.Limits.MDTSBytes
	if cfg.QuiesceMS == 0 {
		cfg.QuiesceMS = defaultQuiesceMS
	}
	invariants.Check(mdts >= MinMDTSBytes && mdts&(mdts-1) == 0, "nvmeof: a largest transfer that MDTS cannot say")
	return &Target{
		cfg: cfg, subs: map[string]*subsystem{}, maps: map[string]nvme.ClusterMap{},
		ctrls: map[uint16]*Controller{}, budgets: newBudgets(),
		discovery: &subsystem{discovery: true, SubsystemState: SubsystemState{NQN: nvme.DiscoveryNQN,
			Serial: cfg.NodeUUID.String()[:20], Model: "jbofd discovery"}},
	}
}

// TakeActions returns what is to be done and forgets it.
func (t *Target) TakeActions() []Action {
	a := t.actions
	t.actions = nil
	return a
}

func (t *Target) act(a Action) { t.actions = append(t.actions, a) }

// Apply makes the target what state says: subsystems and namespaces appear,
// change and vanish, hosts gain and lose access, and every host concerned is
// told as it has asked to be.
func (t *Target) Apply(state State) {
	t.version++
	t.budgets.setNamed(&state)
	old := t.subs
	t.subs = map[string]*subsystem{}
	discoveryChanged := !slices.EqualFunc(t.state.Ports, state.Ports, func(a, b Port) bool { return a == b }) ||
		!slices.EqualFunc(t.state.Referrals, state.Referrals, func(a, b Port) bool { return a == b })
	for _, st := range state.Subsystems {
		s := old[st.NQN]
		if s == nil {
			t.subs[st.NQN] = &subsystem{SubsystemState: st}
			discoveryChanged = true
			continue
		}
		delete(old, st.NQN)
		t.subs[st.NQN] = s
		if s.AllowAnyHost != st.AllowAnyHost || !slices.Equal(s.Hosts, st.Hosts) ||
			!slices.EqualFunc(s.Nodes, st.Nodes, func(a, b Node) bool { return a.NQN == b.NQN }) {
			discoveryChanged = true
		}
		s.SubsystemState = st
		for _, c := range slices.Clone(s.ctrls) {
			switch {
			case s.refusal(c.HostNQN, c.from) != "":
				t.drop(c, "host "+c.HostNQN+" is no longer allowed")
			case c.node && s.node(c.HostNQN) == nil:
				t.drop(c, "host "+c.HostNQN+" is no longer a node of the cluster")
			default:
				c.update()
			}
		}
	}
	for _, nqn := range slices.Sorted(maps.Keys(old)) {
		s := old[nqn]
		discoveryChanged = true
		for _, c := range slices.Clone(s.ctrls) {
			t.drop(c, "subsystem "+s.NQN+" was removed")
		}
	}
	t.state = state
	if discoveryChanged {
		t.genctr++
		for _, c := range t.discovery.ctrls {
			c.raise(eventDiscovery)
		}
	}
}

// Disconnected says that a queue is disconnected, or its connection gone, and none of its commands in flight. An admin
// queue takes its controller with it.
func (t *Target) Disconnected(now int64, c *Controller, qid uint16, conn ConnID) {
	if c.queues[qid] != conn || c.gone {
		return
	}
	delete(c.queues, qid)
	if qid == 0 {
		t.drop(c, "the admin queue was disconnected")
	} else {
		t.lostEnded(now, c)
	}
}

// NextExpiry returns when Expire has something to do: when the earliest keep alive timer runs out or bound passes.
func (t *Target) NextExpiry() (at int64, ok bool) {
	for _, c := range t.ctrls {
		if e := c.ExpiryNS(); e != 0 && (!ok || e < at) {
			at, ok = e, true
		}
	}
	if b, bound := t.nextBound(); bound && (!ok || b < at) {
		at, ok = b, true
	}
	return at, ok
}

// Expire ends the associations whose hosts have not been heard of for their keep
// alive timeout. seen returns the time of the last command on any of the
// controller's queues: I/O counts as a sign of life (traffic based keep alive).
//
// It also does what is to be done when a bound passes: of a reset, a shutdown, or a Connect that is held.
func (t *Target) Expire(now int64, seen func(*Controller) int64) {
	t.passBounds(now)
	for _, c := range t.Controllers() {
		t.ExpireOne(now, c, seen)
	}
}

// ExpireOne ends c's association if its host has not been heard of for the keep alive timeout. The driver calls it
// before it lets the host do anything after that time: Expire may be late, since a process that was stopped may get to
// the host's commands before it gets to its timers.
func (t *Target) ExpireOne(now int64, c *Controller, seen func(*Controller) int64) {
	if e := c.ExpiryNS(); e == 0 || e > now || c.gone {
		return
	}
	c.seenNS = max(c.seenNS, seen(c))
	if c.ExpiryNS() > now {
		return
	}
	t.act(Action{Kind: ActionExpired, Controller: c, IdleNS: now - c.seenNS})
	t.drop(c, "keep alive timeout")
}

// Joined calls f with the host of each association with a subsystem that has an I/O queue.
func (t *Target) Joined(subNQN string, f func(hostNQN string)) {
	for _, c := range t.subControllers(subNQN) {
		if len(c.queues) > 1 {
			f(c.HostNQN)
		}
	}
}

// Controllers returns every controller, by CNTLID.
func (t *Target) Controllers() []*Controller {
	all := make([]*Controller, 0, len(t.ctrls))
	for _, id := range slices.Sorted(maps.Keys(t.ctrls)) {
		all = append(all, t.ctrls[id])
	}
	return all
}
