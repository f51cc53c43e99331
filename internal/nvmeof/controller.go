package nvmeof

import (
	"maps"
	"math"
	"net/netip"
	"slices"

	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

const (
	// maxAERs is how many Asynchronous Event Requests a host may have outstanding (AERL + 1).
	maxAERs = 4
	// maxErrors is how many entries the Error Information log keeps (ELPE + 1).
	maxErrors = 64
	// katoUnitMS is the granularity of keep alive timers (KAS, in 100 ms).
	katoUnitMS = 100
	// katoGraceNS is granted beyond the keep alive timeout, for a Keep Alive that is on its way.
	katoGraceNS = 100e6
	// readyGraceMS is what CAP.TO grants beyond the bound of a drain: the host hears of CFS before it gives up.
	readyGraceMS = 1500
)

// event is a kind of asynchronous event.
type event uint8

const (
	eventNamespace event = iota
	eventANA
	eventDiscovery
	events
)

var eventInfo = [events]struct {
	aec uint32
	aer nvme.AER
}{
	eventNamespace: {nvme.AECNamespace, nvme.AERNamespaceChanged},
	eventANA:       {nvme.AECANA, nvme.AERANAChanged},
	eventDiscovery: {nvme.AECDiscovery, nvme.AERDiscoveryChanged},
}

// Controller is the controller of one association: of a host with a subsystem. Its exported fields do not change.
type Controller struct {
	// ID is the CNTLID.
	ID      uint16
	HostNQN string
	HostID  uuid.UUID
	SubNQN  string
	// Discovery: it belongs to the discovery subsystem.
	Discovery bool
	// Admin is the admin queue's connection.
	Admin ConnID

	t            *Target
	sub          *subsystem
	port         Port
	localAddress string
	from, peer   netip.Addr
	discovery    *discoveryView // nil before the first read of the discovery log
	// named: the configuration named the host when it connected. node: as another node of the cluster.
	named     bool
	node      bool
	createdNS int64
	gone      bool

	cc   nvme.CC
	csts nvme.CSTS
	// css is CC.CSS as it was when the controller was enabled: a later write to CC does not change it.
	css uint8
	// wasEnabled: the controller was enabled once.
	wasEnabled bool
	end        ending
	// overdueReported: it was logged that the drain of this ended association takes too long.
	overdueReported bool
	// katoMS is the keep alive timeout; 0: the host wants none.
	katoMS uint32
	// seenNS is when the host last sent a command, as far as the machine knows: it does not see I/O commands.
	seenNS int64
	// lastOpcode is the opcode of the last admin or fabrics command.
	lastOpcode uint8

	// queues are the connections of the queues, by QID. The admin queue is queue 0.
	queues   map[uint16]ConnID
	ioQueues int
	table    *NamespaceTable

	// aers are the slots of outstanding Asynchronous Event Requests.
	aers []int
	// pending events wait for an event request. masked events were reported; they are not reported again until the host
	// has read their log page.
	pending, masked [events]bool
	// changed is the Changed Namespace List.
	changed map[uint32]bool

	features features
	// creditVersion counts the changes of CreditState.On.
	creditVersion uint64

	errors     []nvme.ErrorLogEntry // newest last
	errorCount uint64
}

func newController(t *Target, sub *subsystem, a ConnectArgs, now int64) *Controller {
	c := &Controller{
		HostNQN: a.Data.HostNQN(), HostID: a.Data.HostID(), SubNQN: sub.NQN, Discovery: sub.discovery, Admin: a.Conn,
		t: t, sub: sub, port: a.Port, localAddress: a.LocalAddress, from: a.From, peer: a.Peer,
		createdNS: now, seenNS: now,
		lastOpcode: nvme.OpFabrics,
		queues:     map[uint16]ConnID{0: a.Conn}, ioQueues: t.cfg.MaxIOQueues, changed: map[uint32]bool{},
		end: ending{epoch: 1}, node: sub.node(a.Data.HostNQN()) != nil,
	}
	c.features.init()
	c.table = c.view()
	c.setKATO(a.SQE.Connect().KATO())
	return c
}

func (c *Controller) setKATO(ms uint32) {
	if ms != 0 {
		units := (uint64(max(ms, c.t.cfg.MinKATOMS)) + katoUnitMS - 1) / katoUnitMS
		ms = uint32(min(units, math.MaxUint32/katoUnitMS)) * katoUnitMS
		if c.Discovery {
			ms = min(ms, c.t.cfg.MaxDiscoveryKATOMS)
		}
	}
	c.katoMS = ms
}

// KATOMS is the keep alive timeout in force, in milliseconds.
func (c *Controller) KATOMS() uint32 { return c.katoMS }

// Queues returns the connections of all queues.
func (c *Controller) Queues() []ConnID {
	ids := make([]ConnID, 0, len(c.queues))
	for _, id := range c.queues {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// QueueConn returns the connection of queue qid; ok is false if there is no such queue.
func (c *Controller) QueueConn(qid uint16) (ConnID, bool) {
	id, ok := c.queues[qid]
	return id, ok
}

// ready reports whether the controller takes commands.
func (c *Controller) ready() bool { return c.cc.EN() && c.csts.RDY() && c.end.shutdown == shutdownNone }

// ExpiryNS is when the association ends if the host stays silent; 0: never.
func (c *Controller) ExpiryNS() int64 {
	ms := c.katoMS
	if !c.Discovery && !c.ready() && (c.wasEnabled || ms == 0) {
		return c.seenNS + disabledIdleNS
	}
	if ms == 0 && c.Discovery {
		ms = c.t.cfg.DiscoveryIdleMS
	}
	if ms == 0 {
		return 0
	}
	return c.seenNS + int64(ms)*1e6 + katoGraceNS
}

// forget takes the controller out of the target's tables.
func (c *Controller) forget() {
	t := c.t
	c.gone = true
	invariants.Check(t.ctrls[c.ID] == c, "nvmeof: controller not in its table")
	delete(t.ctrls, c.ID)
	i := slices.Index(c.sub.ctrls, c)
	c.sub.ctrls = slices.Delete(c.sub.ctrls, i, i+1)
	c.aers = nil
}

func (c *Controller) sortedQIDs() []uint16 { return slices.Sorted(maps.Keys(c.queues)) }

// closeQueues closes the connections of the I/O queues, and with admin set that of the admin queue, too.
func (c *Controller) closeQueues(reason string, admin bool) {
	for _, qid := range slices.Backward(c.sortedQIDs()) { // the admin queue last
		if qid == 0 && !admin {
			continue
		}
		c.t.act(Action{Kind: ActionClose, Conn: c.queues[qid], Reason: reason})
		delete(c.queues, qid)
	}
}

// update gives the controller the namespaces that its host sees now, and reports what has changed.
func (c *Controller) update() {
	t := c.view()
	old := c.table
	c.table = t
	attr, ana := false, false
	for nsid := uint32(1); int(nsid) <= max(len(t.byNSID), len(old.byNSID)); nsid++ {
		a, b := old.Get(nsid), t.Get(nsid)
		switch {
		case a == nil && b == nil:
			continue
		case a == nil || b == nil || !a.sameToHosts(b):
			attr = true
			c.changed[nsid] = true
			// Its ANA group has gained or lost a namespace. Linux asks for the group of a new namespace only when it
			// is told that ANA has changed.
			ana = true
		case a.ANAState != b.ANAState:
			ana = true
		}
	}
	if ana {
		c.sub.accessChanged(c.t.version)
		c.raise(eventANA)
	}
	if attr {
		c.raise(eventNamespace)
	}
	c.publishTable()
}

// publishTable gives the controller's table to its I/O queues.
func (c *Controller) publishTable() {
	for _, qid := range c.sortedQIDs() {
		if qid != 0 {
			c.t.act(Action{Kind: ActionTable, Conn: c.queues[qid], Table: c.table, Version: c.t.version})
		}
	}
}

// raise reports an event if the host has enabled it: now, or when the host sends an event request.
func (c *Controller) raise(e event) {
	if c.features.asyncEvents&eventInfo[e].aec == 0 || c.masked[e] {
		return
	}
	c.pending[e] = true
	c.deliver()
}

// deliver completes event requests with pending events.
func (c *Controller) deliver() {
	for e := range events {
		if !c.pending[e] || len(c.aers) == 0 {
			continue
		}
		slot := c.aers[0]
		c.aers = c.aers[1:]
		c.pending[e], c.masked[e] = false, true
		c.t.act(Action{Kind: ActionComplete, Conn: c.Admin, Slot: slot, Result: uint64(eventInfo[e].aer)})
	}
}

// clearEvent lets an event be reported again: the host has read its log page.
func (c *Controller) clearEvent(e event) { c.masked[e] = false }

// Failed is a failed command for the Error Information log.
type Failed struct {
	QID, CID uint16
	Opcode   uint8
	CSI      nvme.CSI
	NSID     uint32
	LBA      units.LBA // of blocks
	Status   nvme.Status
}

// RecordErrors adds failed commands to the Error Information log.
func (c *Controller) RecordErrors(failed []Failed) {
	for _, f := range failed {
		c.errorCount++
		var e nvme.ErrorLogEntry
		e.SetErrorCount(c.errorCount)
		e.SetSQID(f.QID)
		e.SetCID(f.CID)
		e.SetStatus(f.Status)
		e.SetParamLocation(nvme.NoParamLocation)
		e.SetNSID(f.NSID)
		e.SetLBA(f.LBA)
		e.SetOpcode(f.Opcode)
		e.SetCSI(uint8(f.CSI))
		e.SetTRTYPE(c.port.TRTYPE)
		if len(c.errors) == maxErrors {
			copy(c.errors, c.errors[1:])
			c.errors = c.errors[:maxErrors-1]
		}
		c.errors = append(c.errors, e)
	}
}
