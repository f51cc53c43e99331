package nvmeof

import (
	"maps"
	"math"
	"slices"

	"jbofd/internal/nvme"
)

const (
	// maxAERs is how many Asynchronous Event Requests a host may have outstanding
	// (AERL + 1).
	maxAERs = 4
	// maxErrors is how many entries the Error Information log keeps (ELPE + 1).
	maxErrors = 64
	// katoUnitMS is the granularity of keep alive timers (KAS, in 100 ms).
	katoUnitMS = 100
	// katoGraceNS is granted beyond the timeout for a Keep Alive under way.
	katoGraceNS = 100e6
	// readyTimeout is CAP.TO in 500 ms: controllers are ready at once.
	readyTimeout = 15
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

// Controller is one association of a host with a subsystem. Its exported fields
// do not change.
type Controller struct {
	// ID is the CNTLID.
	ID      uint16
	HostNQN string
	HostID  nvme.UUID
	SubNQN  string
	// Discovery: a controller of the discovery subsystem.
	Discovery bool
	// Admin is the admin queue's connection.
	Admin ConnID

	t            *Target
	sub          *subsystem
	port         Port
	localAddress string
	createdNS    int64
	gone         bool

	cc   nvme.CC
	csts nvme.CSTS
	// katoMS is the keep alive timeout; 0 is none.
	katoMS uint32
	// seenNS is when the host was last heard of, as far as the machine knows.
	seenNS int64
	// lastOpcode is that of the last admin or fabrics command.
	lastOpcode uint8

	// queues by QID, the admin queue among them.
	queues   map[uint16]ConnID
	ioQueues int
	table    *NamespaceTable

	// aers are the slots of outstanding Asynchronous Event Requests.
	aers []int
	// pending events wait for a request; masked ones were reported and wait for
	// their log page to be read.
	pending, masked [events]bool
	// changed are the namespaces of the Changed Namespace List.
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
		t: t, sub: sub, port: a.Port, localAddress: a.LocalAddress, createdNS: now, seenNS: now, lastOpcode: nvme.OpFabrics,
		queues: map[uint16]ConnID{0: a.Conn}, ioQueues: t.cfg.MaxIOQueues, changed: map[uint32]bool{},
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
	}
	c.katoMS = ms
}

// KATOMS is the keep alive timeout in force, in milliseconds.
func (c *Controller) KATOMS() uint32 { return c.katoMS }

// Queues returns the connections of all its queues.
func (c *Controller) Queues() []ConnID {
	ids := make([]ConnID, 0, len(c.queues))
	for _, id := range c.queues {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// QueueConn returns the connection of one queue.
func (c *Controller) QueueConn(qid uint16) (ConnID, bool) {
	id, ok := c.queues[qid]
	return id, ok
}

func (c *Controller) ready() bool { return c.csts.RDY() && c.csts.SHST() == 0 }

// expiry is when the association ends unless the host is heard of; 0: never.
func (c *Controller) expiry() int64 {
	ms := c.katoMS
	if ms == 0 && c.Discovery {
		ms = c.t.cfg.DiscoveryIdleMS
	}
	if ms == 0 {
		return 0
	}
	return c.seenNS + int64(ms)*1e6 + katoGraceNS
}

// closeQueues asks for all connections, or those of I/O queues, to be closed.
func (c *Controller) closeQueues(reason string, admin bool) {
	for _, qid := range slices.Backward(slices.Sorted(maps.Keys(c.queues))) { // the admin queue last
		if qid == 0 && !admin {
			continue
		}
		c.t.act(Action{Kind: ActionClose, Conn: c.queues[qid], Reason: reason})
		delete(c.queues, qid)
	}
}

// reset disables the controller. Event requests are completed as aborted: the
// admin queue lives on, and would otherwise fill up with them reset by reset.
func (c *Controller) reset(reason string) {
	for _, slot := range c.aers {
		c.t.act(Action{Kind: ActionComplete, Conn: c.Admin, Slot: slot, Status: nvme.AbortRequested})
	}
	c.csts, c.aers = 0, nil
	c.pending, c.masked = [events]bool{}, [events]bool{}
	credits := c.CreditState()
	c.features.init()
	c.ioQueues = c.t.cfg.MaxIOQueues
	c.closeQueues(reason, false)
	c.creditsChanged(credits)
}

// setCC is a write to Controller Configuration (NVMe Base 2.0, section 3.1.3.5).
func (c *Controller) setCC(cc nvme.CC) {
	was := c.cc
	c.cc = cc
	switch {
	case cc.EN() && !was.EN():
		if cc.MPS() != nvme.CCMPS4KiB || cc.AMS() != nvme.CCAMSRobin || cc.CSS() != nvme.CCCSSNVM && cc.CSS() != nvme.CCCSSIOCS ||
			!c.Discovery && (cc.IOSQES() != nvme.CCIOSQES64 || cc.IOCQES() != nvme.CCIOCQES16) {
			c.csts |= nvme.CSTSCFS
			return
		}
		c.csts = nvme.CSTSRDY
		c.table = c.view()
	case !cc.EN() && was.EN():
		c.reset("controller reset")
	}
	if cc.SHN() != nvme.SHNNone && was.SHN() == nvme.SHNNone {
		c.csts = c.csts.WithSHST(uint8(nvme.CSTSSHSTComplete >> 2))
	} else if cc.SHN() == nvme.SHNNone && was.SHN() != nvme.SHNNone {
		c.csts = c.csts.WithSHST(0)
	}
}

// update compares what the host sees now with what it saw.
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
			// A group that has gained or lost a namespace has changed too, or a Linux
			// host never asks for the group of a new one.
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
	c.tellTable()
}

// tellTable gives the I/O queues the controller's table.
func (c *Controller) tellTable() {
	for _, qid := range slices.Sorted(maps.Keys(c.queues)) {
		if qid != 0 {
			c.t.act(Action{Kind: ActionTable, Conn: c.queues[qid], Table: c.table, Version: c.t.version})
		}
	}
}

// raise reports an event, now or when the host asks, if it wants to know.
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

// clearEvent ends the mask of an event whose log page was read.
func (c *Controller) clearEvent(e event) { c.masked[e] = false }

// Failed is a command to be remembered in the Error Information log.
type Failed struct {
	QID, CID uint16
	Opcode   uint8
	CSI      nvme.CSI
	NSID     uint32
	LBA      uint64 // of blocks
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
