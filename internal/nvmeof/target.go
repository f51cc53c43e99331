// Package nvmeof is the NVMe over Fabrics target as a machine: subsystems,
// controllers, queues and discovery, independent of any transport. It does no
// I/O, reads no clock and takes no lock; the fabric package drives it with the
// time, one call at a time, and carries out the actions that it asks for.
//
//	Apply(State) ──┐                       ┌──> Reply (one command)
//	Connect ───────┼──> Target ── Controller ──> Action (close, complete an
//	Admin ─────────┤                       │      event request, new namespaces)
//	Expire(now) ───┘                       └──> NextExpiry
//
// I/O commands do not come here: PlanIO judges them against an immutable
// NamespaceTable on the connection's own goroutine.
//
// Source: NVMe Base 2.0, NVM Command Set 1.0.
package nvmeof

import (
	"fmt"
	"maps"
	"slices"

	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
)

// Config are a target's constants.
type Config struct {
	// Firmware is the revision that Identify Controller reports, at most 8 bytes.
	Firmware string
	// NodeUUID identifies the node (FGUID).
	NodeUUID nvme.UUID
	// Limits bound commands.
	Limits Limits
	// InCapsuleBytes is the largest in-capsule data of I/O queues (IOCCSZ).
	InCapsuleBytes int
	// MaxEntries is the largest queue (MQES + 1), MaxIOQueues the number of I/O
	// queues a controller may have.
	MaxEntries, MaxIOQueues int
	// MaxControllers bounds the associations of all hosts, MaxHosts the hosts.
	MaxControllers, MaxHosts int
	// MinKATOMS is the least keep alive timeout granted, in milliseconds; shorter
	// ones are raised to it.
	MinKATOMS uint32
	// DiscoveryIdleMS ends a discovery association without keep alive after that
	// long without a command.
	DiscoveryIdleMS uint32
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
	Namespaces    []*Namespace
}

// State is all that a configuration says of the target.
type State struct {
	Subsystems []SubsystemState
	Ports      []Port
	Referrals  []Port
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
}

// Target is the machine.
type Target struct {
	cfg       Config
	state     State
	subs      map[string]*subsystem
	discovery *subsystem
	// ctrls by CNTLID; identifiers are not reused before the others are.
	ctrls      map[uint16]*Controller
	lastCNTLID uint16
	hosts      map[string]int // controllers per host NQN
	genctr     uint64
	version    uint64 // of namespace tables
	actions    []Action
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

func (s *subsystem) allows(hostNQN string) bool {
	return s.discovery || s.AllowAnyHost || slices.Contains(s.Hosts, hostNQN)
}

// New makes a target without subsystems.
func New(cfg Config) *Target {
	return &Target{
		cfg: cfg, subs: map[string]*subsystem{}, ctrls: map[uint16]*Controller{}, hosts: map[string]int{},
		discovery: &subsystem{discovery: true, SubsystemState: SubsystemState{NQN: nvme.DiscoveryNQN, Serial: cfg.NodeUUID.String()[:20], Model: "jbofd discovery"}},
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
		if s.AllowAnyHost != st.AllowAnyHost || !slices.Equal(s.Hosts, st.Hosts) {
			discoveryChanged = true
		}
		s.SubsystemState = st
		for _, c := range slices.Clone(s.ctrls) {
			if !s.allows(c.HostNQN) {
				t.drop(c, "host "+c.HostNQN+" is no longer allowed")
				continue
			}
			c.update()
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

// ConnectArgs is a Connect command and where it came in.
type ConnectArgs struct {
	Conn ConnID
	// Port is the address it came to; LocalAddress replaces a wildcard in discovery.
	Port         Port
	LocalAddress string
	SQE          *nvme.SQE
	Data         *nvme.ConnectData
	// Agreed is what the transport has agreed on with the host already; nil: nothing.
	Agreed *Agreed
}

// Agreed is what a host has said of its queue before it connected it.
type Agreed struct {
	QID uint16
	// Entries is the largest queue that the connection was made for.
	Entries int
}

// ConnectReply is the outcome of a Connect.
type ConnectReply struct {
	Status nvme.Status
	Result uint64
	// Reason says why it failed, for the log and as a metric's label.
	Reason, Label string
	// The rest is set on success.
	Controller *Controller
	QID        uint16
	Entries    int
	NoSQFlow   bool
	Table      *NamespaceTable
	Version    uint64
	Credits    CreditState
}

// refuse makes a failed reply that a retry cannot change.
func refuse(s nvme.Status, label, format string, args ...any) ConnectReply {
	return ConnectReply{Status: s | nvme.DNR, Label: label, Reason: fmt.Sprintf(format, args...)}
}

// busy makes a failed reply that a retry may change: without DNR, or a host that
// reconnects while its old association still counts would give up for good.
func busy(label, format string, args ...any) ConnectReply {
	return ConnectReply{Status: nvme.ConnectControllerBusy, Label: label, Reason: fmt.Sprintf(format, args...)}
}

// refuseField makes a reply that names the parameter at fault.
func refuseField(label string, f *nvme.ConnectFault) ConnectReply {
	var e nvme.CQE
	e.SetConnectInvalid(f)
	return ConnectReply{Status: e.Status() | nvme.DNR, Result: e.Result64(), Label: label, Reason: f.What}
}

// Connect makes a connection a queue of a new or an existing controller.
//
// Source: NVMe Base 2.0, section 6.3.
func (t *Target) Connect(now int64, a ConnectArgs) ConnectReply {
	q := a.SQE.Connect()
	if q.RECFMT() != 0 {
		return refuse(nvme.ConnectIncompatibleFormat, "format", "RECFMT %d, only 0 is known", q.RECFMT())
	}
	if f := a.Data.Check(); f != nil {
		return refuseField("nqn", f)
	}
	hostNQN, subNQN := a.Data.HostNQN(), a.Data.SubNQN()
	sub := t.subs[subNQN]
	if subNQN == nvme.DiscoveryNQN {
		sub = t.discovery
	} else if a.Port.Discovery {
		sub = nil
	}
	if sub == nil {
		return refuseField("subsystem", &nvme.ConnectFault{InData: true, Offset: nvme.ConnectDataOffSUBNQN, What: "no subsystem " + subNQN + " at this address"})
	}
	if !sub.allows(hostNQN) {
		return refuse(nvme.ConnectInvalidHost, "host", "host %s is not allowed in %s", hostNQN, subNQN)
	}
	entries := int(q.SQSIZE()) + 1
	if q.SQSIZE() == 0 || entries > t.cfg.MaxEntries {
		return refuseField("sqsize", &nvme.ConnectFault{Offset: nvme.ConnectOffSQSIZE, What: fmt.Sprintf("SQSIZE %d, must be 1 to %d", q.SQSIZE(), t.cfg.MaxEntries-1)})
	}
	if g := a.Agreed; g != nil && q.QID() != g.QID {
		return refuseField("qid", &nvme.ConnectFault{Offset: nvme.ConnectOffQID, What: fmt.Sprintf("QID %d, the connection was made for queue %d", q.QID(), g.QID)})
	} else if g != nil && entries > g.Entries {
		return refuseField("sqsize", &nvme.ConnectFault{Offset: nvme.ConnectOffSQSIZE, What: fmt.Sprintf("SQSIZE %d, the connection was made for at most %d", q.SQSIZE(), g.Entries-1)})
	}
	r := ConnectReply{QID: q.QID(), Entries: entries, NoSQFlow: q.CATTR()&nvme.CATTRDisableSQFlow != 0}
	if q.QID() == 0 {
		return t.connectAdmin(now, a, sub, hostNQN, r)
	}
	return t.connectIO(now, a, sub, hostNQN, r)
}

func (t *Target) connectAdmin(now int64, a ConnectArgs, sub *subsystem, hostNQN string, r ConnectReply) ConnectReply {
	if id := a.Data.CNTLID(); id != nvme.CNTLIDDynamic {
		return refuseField("cntlid", &nvme.ConnectFault{InData: true, Offset: nvme.ConnectDataOffCNTLID, What: fmt.Sprintf("CNTLID %#x, controllers are dynamic: must be 0xffff", id)})
	}
	if len(t.ctrls) >= t.cfg.MaxControllers {
		return busy("controllers", "%d controllers exist, the limit", len(t.ctrls))
	}
	if t.hosts[hostNQN] == 0 && len(t.hosts) >= t.cfg.MaxHosts {
		return busy("hosts", "%d hosts are connected, the limit", len(t.hosts))
	}
	c := newController(t, sub, a, now)
	for {
		t.lastCNTLID++
		if t.lastCNTLID == 0 || t.lastCNTLID >= 0xFFF0 {
			t.lastCNTLID = 1
		}
		if t.ctrls[t.lastCNTLID] == nil {
			break
		}
	}
	c.ID = t.lastCNTLID
	t.ctrls[c.ID] = c
	t.hosts[hostNQN]++
	sub.ctrls = append(sub.ctrls, c)
	r.Controller, r.Result = c, uint64(c.ID)
	return r
}

func (t *Target) connectIO(now int64, a ConnectArgs, sub *subsystem, hostNQN string, r ConnectReply) ConnectReply {
	c := t.ctrls[a.Data.CNTLID()]
	switch {
	case c == nil || c.sub != sub:
		return refuseField("cntlid", &nvme.ConnectFault{InData: true, Offset: nvme.ConnectDataOffCNTLID, What: fmt.Sprintf("host %s has no controller %#x in %s", hostNQN, a.Data.CNTLID(), sub.NQN)})
	case c.HostNQN != hostNQN:
		return refuseField("host", &nvme.ConnectFault{InData: true, Offset: nvme.ConnectDataOffHOSTNQN, What: fmt.Sprintf("controller %#x is not of host %s", c.ID, hostNQN)})
	case c.HostID != a.Data.HostID():
		return refuseField("host", &nvme.ConnectFault{InData: true, Offset: nvme.ConnectDataOffHOSTID, What: fmt.Sprintf("controller %#x is of another host identifier than %s", c.ID, a.Data.HostID())})
	case sub.discovery:
		return refuseField("qid", &nvme.ConnectFault{Offset: nvme.ConnectOffQID, What: "discovery controllers have no I/O queues"})
	}
	if !c.ready() {
		return refuse(nvme.CommandSequenceError, "sequence", "controller %#x is not enabled", c.ID)
	}
	if int(r.QID) > c.ioQueues {
		return refuseField("qid", &nvme.ConnectFault{Offset: nvme.ConnectOffQID, What: fmt.Sprintf("QID %d, must be at most %d", r.QID, c.ioQueues)})
	}
	if _, taken := c.queues[r.QID]; taken {
		return refuse(nvme.CommandSequenceError, "sequence", "queue %d of controller %#x exists", r.QID, c.ID)
	}
	c.queues[r.QID] = a.Conn
	c.seenNS = now
	r.Controller, r.Result, r.Table, r.Version, r.Credits = c, uint64(c.ID), c.table, t.version, c.CreditState()
	return r
}

// Disconnected says that a queue's connection is gone. An admin queue takes its
// controller with it.
func (t *Target) Disconnected(c *Controller, qid uint16, conn ConnID) {
	if c.queues[qid] != conn || c.gone {
		return
	}
	delete(c.queues, qid)
	if qid == 0 {
		t.drop(c, "the admin queue was disconnected")
	}
}

// drop ends an association.
func (t *Target) drop(c *Controller, reason string) {
	if c.gone {
		return
	}
	c.gone = true
	invariants.Check(t.ctrls[c.ID] == c, "nvmeof: controller not in its table")
	delete(t.ctrls, c.ID)
	if t.hosts[c.HostNQN]--; t.hosts[c.HostNQN] == 0 {
		delete(t.hosts, c.HostNQN)
	}
	i := slices.Index(c.sub.ctrls, c)
	c.sub.ctrls = slices.Delete(c.sub.ctrls, i, i+1)
	c.aers = nil
	c.closeQueues(reason, true)
}

// NextExpiry returns when the earliest keep alive timer runs out.
func (t *Target) NextExpiry() (at int64, ok bool) {
	for _, c := range t.ctrls {
		if e := c.expiry(); e != 0 && (!ok || e < at) {
			at, ok = e, true
		}
	}
	return at, ok
}

// Expire ends the associations whose hosts have not been heard of for their keep
// alive timeout. seen returns the time of the last command on any of the
// controller's queues: I/O counts as a sign of life (traffic based keep alive).
func (t *Target) Expire(now int64, seen func(*Controller) int64) {
	for _, c := range t.Controllers() {
		e := c.expiry()
		if e == 0 || e > now {
			continue
		}
		c.seenNS = max(c.seenNS, seen(c))
		if c.expiry() > now {
			continue
		}
		t.act(Action{Kind: ActionExpired, Controller: c, IdleNS: now - c.seenNS})
		t.drop(c, "keep alive timeout")
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
