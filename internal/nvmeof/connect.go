package nvmeof

import (
	"fmt"
	"net/netip"

	"jbofd/internal/nvme"
)

// ConnectArgs is a Connect command and where it came in.
type ConnectArgs struct {
	Conn ConnID
	// Port is the address it came to; LocalAddress replaces a wildcard in discovery.
	Port         Port
	LocalAddress string
	// From is the address that the connection comes from, Peer the one that budgets take it to come from.
	From, Peer netip.Addr
	SQE        *nvme.SQE
	Data       *nvme.ConnectData
	// Agreed is what the transport has agreed on with the host already; nil: nothing.
	Agreed *Agreed
	// Lost reports whether the driver can see that a connection has ended of which it has not told the machine yet;
	// nil: it sees none.
	Lost func(ConnID) bool
}

// Agreed is what a host has said of its queue before it connected it.
type Agreed struct {
	QID uint16
	// Entries is the largest queue that the connection was made for.
	Entries int
}

// ConnectReply is the outcome of a Connect.
type ConnectReply struct {
	// Held: nothing is decided yet, and the rest is not set. The driver must not answer the command; an
	// ActionConnected says how it ends, unless CancelConnect is called first.
	Held   bool
	Status nvme.Status
	Result uint64
	// Reason says why it failed, for the log and as a metric's label.
	Reason, Label string
	// The rest is set on success.

	// Note, unless empty, is what the command got wrong although it was accepted, for the log.
	Note       string
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

// refuseField makes a failed reply that names the parameter at fault.
func refuseField(label string, f *nvme.ConnectFault) ConnectReply {
	var e nvme.CQE
	e.SetConnectInvalid(f)
	return ConnectReply{Status: e.Status() | nvme.DNR, Result: e.Result64(), Label: label, Reason: f.What}
}

// refuseSQE names a parameter in the command, refuseData one in its data.
func refuseSQE(label string, offset uint16, format string, args ...any) ConnectReply {
	return refuseField(label, &nvme.ConnectFault{Offset: offset, What: fmt.Sprintf(format, args...)})
}

func refuseData(label string, offset uint16, format string, args ...any) ConnectReply {
	return refuseField(label, &nvme.ConnectFault{InData: true, Offset: offset, What: fmt.Sprintf(format, args...)})
}

// adminEntries is the least that the largest admin queue has. MQES bounds I/O queues only: Linux and SPDK ask for an
// admin queue of 32 entries however small I/O queues are, and SPDK's target takes up to 128.
const adminEntries = 128

// Connect makes a connection a queue of a new or an existing controller.
//
// Source: NVMe Base 2.0, section 6.3.
func (t *Target) Connect(now int64, a ConnectArgs) ConnectReply {
	q := a.SQE.Connect()
	if q.RECFMT() != 0 {
		return refuse(nvme.ConnectIncompatibleFormat, "format", "RECFMT %d, only 0 is known", q.RECFMT())
	}
	if f := a.Data.CheckLengths(); f != nil {
		return refuseField("nqn", f)
	}
	hostNQN, subNQN := a.Data.HostNQN(), a.Data.SubNQN()
	note := ""
	if err := nvme.CheckNQN(hostNQN); err != nil {
		// To refuse such a name would protect nobody, for no list of hosts can hold it. SPDK's tools send an empty NQN
		// unless told otherwise. SPDK's target and nvmet accept it where every host is allowed.
		note = "HOSTNQN: " + err.Error()
	}
	sub := t.subs[subNQN]
	if subNQN == nvme.DiscoveryNQN {
		sub = t.discovery
	} else if a.Port.Discovery {
		sub = nil
	}
	if sub == nil {
		return refuseData("subsystem", nvme.ConnectDataOffSUBNQN,
			"no subsystem %s at this address", subNQN)
	}
	if why := sub.refusal(hostNQN, a.From); why != "" {
		return refuse(nvme.ConnectInvalidHost, "host", "%s", why)
	}
	entries, limit := int(q.SQSIZE())+1, t.cfg.MaxEntries
	if q.QID() == 0 {
		limit = max(limit, adminEntries)
	}
	if q.SQSIZE() == 0 || entries > limit {
		return refuseSQE("sqsize", nvme.ConnectOffSQSIZE,
			"SQSIZE %d, must be 1 to %d", q.SQSIZE(), limit-1)
	}
	if g := a.Agreed; g != nil && q.QID() != g.QID {
		return refuseSQE("qid", nvme.ConnectOffQID,
			"QID %d, the connection was made for queue %d", q.QID(), g.QID)
	} else if g != nil && entries > g.Entries {
		return refuseSQE("sqsize", nvme.ConnectOffSQSIZE,
			"SQSIZE %d, the connection was made for at most %d", q.SQSIZE(), g.Entries-1)
	}
	r := ConnectReply{QID: q.QID(), Entries: entries, NoSQFlow: q.CATTR()&nvme.CATTRDisableSQFlow != 0, Note: note}
	if q.QID() == 0 {
		return t.connectAdmin(now, a, sub, r)
	}
	return t.connectIO(now, a, sub, hostNQN, r)
}

// connectAdmin is Connect of an admin queue: it makes a controller, with which an association begins. The Connect is
// held instead if commands of the host's earlier association are in flight. Connect has checked the NQNs and the
// queue's size, which r has already.
func (t *Target) connectAdmin(now int64, a ConnectArgs, sub *subsystem, r ConnectReply) ConnectReply {
	if id := a.Data.CNTLID(); id != nvme.CNTLIDDynamic {
		return refuseData("cntlid", nvme.ConnectDataOffCNTLID,
			"CNTLID %#x, controllers are dynamic: must be 0xffff", id)
	}
	if !sub.discovery {
		if t.stopped {
			return busy("stopping", "the target stops")
		}
		if held, ok := t.hold(now, a, hostKey{a.Data.HostNQN(), a.Data.HostID(), sub.NQN}); ok {
			return held
		}
	}
	c := newController(t, sub, a, now)
	if sub.discovery {
		t.makeRoomInDiscovery(c.peer)
	} else if label, reason := t.budgets.admit(c, &t.cfg); label != "" {
		return busy(label, "%s", reason)
	}
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
	sub.ctrls = append(sub.ctrls, c)
	r.Controller, r.Result = c, uint64(c.ID)
	return r
}

// connectIO is Connect of an I/O queue: the queue joins the controller that the host names by its CNTLID, and that must
// be of the same host, subsystem and transport, and enabled. Connect has checked the NQNs and the queue's size, which r
// has already.
func (t *Target) connectIO(now int64, a ConnectArgs, sub *subsystem, hostNQN string, r ConnectReply) ConnectReply {
	c := t.ctrls[a.Data.CNTLID()]
	switch {
	case c == nil || c.sub != sub:
		return refuseData("cntlid", nvme.ConnectDataOffCNTLID,
			"host %s has no controller %#x in %s", hostNQN, a.Data.CNTLID(), sub.NQN)
	case c.HostNQN != hostNQN:
		return refuseData("host", nvme.ConnectDataOffHOSTNQN,
			"controller %#x is not of host %s", c.ID, hostNQN)
	case c.port.TRTYPE != a.Port.TRTYPE:
		// Identify Controller has told the host the SGLs and the capsule size of the admin queue's transport.
		return refuseData("transport", nvme.ConnectDataOffCNTLID,
			"controller %#x has its admin queue on another transport", c.ID)
	case sub.discovery:
		return refuseSQE("qid", nvme.ConnectOffQID,
			"discovery controllers have no I/O queues")
	}
	if !c.ready() {
		return refuse(nvme.CommandSequenceError, "sequence", "controller %#x is not enabled", c.ID)
	}
	if int(r.QID) > c.ioQueues {
		return refuseSQE("qid", nvme.ConnectOffQID,
			"QID %d, must be at most %d", r.QID, c.ioQueues)
	}
	if _, taken := c.queues[r.QID]; taken {
		return refuse(nvme.CommandSequenceError, "sequence", "queue %d of controller %#x exists", r.QID, c.ID)
	}
	if id := a.Data.HostID(); id != c.HostID {
		// Only reservations would use the identifier, and there are none. SPDK and nvmet do not compare it either.
		r.Note = fmt.Sprintf("HOSTID %s differs from the admin queue's, %s, which counts", id, c.HostID)
	}
	c.queues[r.QID] = a.Conn
	c.end.joined = true
	c.seenNS = now
	r.Controller, r.Result, r.Table, r.Version, r.Credits = c, uint64(c.ID), c.table, t.version, c.CreditState()
	return r
}
