package connection

import (
	"context"
	"math"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/target"
)

// Shut implements target.Conn.
func (c *Conn) Shut(reason string) {
	c.t.Shut(reason)
	// Commands that have been received already may not have been validated yet.
	c.SetTable(nvmeof.EndedTable, math.MaxUint64)
}

// Admin implements qpair.Handler.
func (c *Conn) Admin(i int) {
	c.slots[i].noted = false
	c.admin = append(c.admin, i)
}

// AdminPending reports that there are commands for ExecuteAdmin. The lock is held, or the caller is the only goroutine
// that gives the machine commands.
func (c *Conn) AdminPending() bool { return len(c.admin) > 0 }

// nextAdmin takes the next command for ExecuteAdmin; ctrl is nil for a Connect.
func (c *Conn) nextAdmin() (slot int, ctrl *nvmeof.Controller, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.admin) > 0 {
		slot = c.admin[0]
		c.admin = append(c.admin[:0], c.admin[1:]...)
		if c.ctrl != nil || !c.cfg.Closed() { // otherwise the connection has ended before its Connect is executed
			return slot, c.ctrl, true
		}
	}
	return 0, nil, false
}

// ExecuteAdmin executes the admin and fabrics commands that have arrived. By one goroutine at a time, without the lock.
func (c *Conn) ExecuteAdmin() {
	for {
		i, ctrl, ok := c.nextAdmin()
		if !ok {
			return
		}
		if ctrl == nil {
			c.connect(i)
			continue
		}
		s := &c.slots[i]
		args := nvmeof.AdminArgs{Controller: ctrl, QID: c.qid, Slot: i, SQE: &c.m.Slot(i).SQE, Data: s.cmd.Buf.B}
		r := c.service.Admin(args)
		if r.Disconnect {
			if c.disconnect(i) {
				c.t.Linger()
				c.t.Shut("disconnected by the host")
			}
			continue
		}
		if r.Credit {
			c.mu.Lock()
			tenant := c.tenant
			c.mu.Unlock()
			r.Result |= uint64(c.service.FirstCredit(tenant, r.CreditSSD)) << 32
		}
		c.mu.Lock()
		switch {
		case r.Pending:
		case r.Status.OK() && r.Len > 0:
			if c.m.RespondData(i, s.cmd.Buf.B[:r.Len], r.Result) {
				c.t.HoldUntilSent(s.cmd.Buf)
				s.cmd.Buf = bufpool.Buf{}
			} else {
				c.put(&s.cmd.Buf)
			}
		default:
			c.put(&s.cmd.Buf)
			c.respond(i, r.Status, r.Result)
		}
		c.mu.Unlock()
	}
}

// Refused is the message of the record in the log about a Connect that was refused.
const Refused = "connect refused"

// connect executes the Connect command in slot i. If it is held, Connected goes on with it.
func (c *Conn) connect(i int) {
	sqe := c.m.Slot(i).SQE
	data := (*nvme.ConnectData)(c.connBuf)
	args := nvmeof.ConnectArgs{Conn: c.id, Port: c.cfg.Port, LocalAddress: c.t.LocalAddress(), From: c.cfg.Peer,
		Peer: PeerOf(c.cfg.Peer), SQE: &sqe, Data: data, Agreed: c.cfg.Agreed}
	c.mu.Lock()
	if c.teardown.answered { // a Connect before was held and has failed; the connection is about to be closed
		c.m.Respond(i, nvme.ConnectControllerBusy, 0)
		c.mu.Unlock()
		return
	}
	c.teardown.connecting, c.teardown.hostNQN, c.teardown.subNQN = true, data.HostNQN(), data.SubNQN()
	c.mu.Unlock()
	r := nvmeof.ConnectReply{Status: nvme.ConnectControllerBusy}
	if data.SubNQN() != nvme.DiscoveryNQN {
		named, nobody := c.service.Named(data.HostNQN())
		r.Label, r.Reason = c.cfg.Ticket.admit(data.HostNQN(), named, nobody)
	}
	if r.Label == "" {
		r = c.service.Connect(args)
	}
	if !r.Held {
		c.connected(i, r)
	}
}

// connected goes on with the Connect command in slot i, whose outcome is known.
func (c *Conn) connected(i int, r nvmeof.ConnectReply) {
	if !r.Status.OK() {
		c.cfg.Ticket.refused()
		c.tel.ConnectFailed(r.Label)
		c.log.Warn(Refused, "transport", c.cfg.Name, "remote", c.cfg.Remote, "host", c.teardown.hostNQN,
			"subsystem", c.teardown.subNQN,
			"status", r.Status.String(), "reason", r.Reason)
		c.mu.Lock()
		c.teardown.connecting = false
		c.m.Respond(i, r.Status, r.Result)
		c.mu.Unlock()
		return
	}
	c.cfg.Ticket.accepted()
	c.holder.Store(c.service.Holder(r.Controller))
	if r.Controller.Discovery {
		c.service.OpenDiscovery(c.id, c, PeerOf(c.cfg.Peer)) // calls SetTenant
	} else {
		c.service.OpenTenant(c.id, c, r.Controller.HostNQN, PeerOf(c.cfg.Peer), r.QID == 0) // so does this
	}
	c.mu.Lock()
	c.teardown.connecting = false
	n := c.m.Attach(qpair.Attachment{QID: r.QID, Entries: r.Entries, NoSQFlow: r.NoSQFlow, Table: r.Table})
	c.setSlots(n)
	c.ctrl, c.qid, c.version = r.Controller, r.QID, max(c.version, r.Version)
	c.failures = make([]nvmeof.Failed, 0, maxFailures)
	c.connBuf = nil
	c.m.Respond(i, nvme.Success, r.Result)
	c.setCredits(r.Credits)
	c.mu.Unlock()
	c.tel.ConnectionEstablished(c.cfg.Name)
	if r.Note != "" {
		c.log.Warn("connect accepted with a fault", "transport", c.cfg.Name, "remote", c.cfg.Remote, "host",
			r.Controller.HostNQN,
			"subsystem", r.Controller.SubNQN, "cntlid", r.Controller.ID, "qid", r.QID, "fault", r.Note)
	}
	c.log.Log(context.Background(), connLevel(r.QID), "connected", "transport", c.cfg.Name, "remote", c.cfg.Remote,
		"host", r.Controller.HostNQN,
		"subsystem", r.Controller.SubNQN, "cntlid", r.Controller.ID, "qid", r.QID, "queue_size", r.Entries)
}

// Complete implements target.Conn.
func (c *Conn) Complete(i int, status nvme.Status, result uint64) {
	c.mu.Lock()
	c.m.Respond(i, status, result)
	c.mu.Unlock()
	c.t.Wake()
}

// SetTable implements target.Conn. When it returns, the executors have every command that was judged by an older
// table. Those that wait for memory or for the host's data are judged again before they go on.
func (c *Conn) SetTable(t *nvmeof.NamespaceTable, version uint64) {
	c.cfg.Batches.Handing.Lock()
	defer c.cfg.Batches.Handing.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if version > c.version {
		c.version = version
		c.m.SetTable(t)
	}
}

// SetTenant implements target.Conn. Commands that end from now on are counted under the tenant's name.
func (c *Conn) SetTenant(t target.Tenant) {
	c.cfg.Batches.Handing.Lock()
	defer c.cfg.Batches.Handing.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctrl != nil && c.qid == 0 && c.credits.On {
		c.tenant.Windows.Close()
		t.Windows.Open()
	}
	c.tenant = t
	clear(c.series[:])
	if c.counts != nil {
		c.counts.Close()
		c.counts, c.errors = nil, nil
	}
	if t.Name != "" {
		c.counts = c.tel.Tenant(t.Name)
		c.errors = c.counts.Errors()
	}
}

// SetCredits implements target.Conn.
func (c *Conn) SetCredits(s nvmeof.CreditState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setCredits(s)
}

// setCredits is SetCredits with mu held.
func (c *Conn) setCredits(s nvmeof.CreditState) {
	if s.Version <= c.credits.Version {
		return
	}
	if c.ctrl != nil && c.qid == 0 && s.On != c.credits.On {
		if s.On {
			c.tenant.Windows.Open()
		} else {
			c.tenant.Windows.Close()
		}
	}
	c.credits = s
	c.m.SetCredits(s.On && c.qid != 0)
}

// Abort implements target.Conn. A fused pair is taken out as a whole, whichever of its commands has the identifier.
func (c *Conn) Abort(cid uint16) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, ok := c.m.Find(cid)
	if !ok {
		return false
	}
	first := c.m.Pair(i)
	if first >= 0 && c.m.Slot(i).SQE.Fuse() == nvme.FuseFirst {
		first, i = i, first
	}
	if !c.executing(i) || !c.abort(i) {
		return false
	}
	if first >= 0 {
		c.abortedSlot(first)
	}
	c.abortedSlot(i)
	c.t.Wake()
	return true
}

// abortedSlot answers a command that was taken out. mu is held.
func (c *Conn) abortedSlot(i int) {
	c.noteFailure(i, nvme.AbortRequested)
	c.slots[i].noted = true
	c.m.Abort(i, nvme.AbortRequested)
}

// EventSlot implements target.Conn.
func (c *Conn) EventSlot(cid uint16) (int, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.m.Find(cid)
}

// SeenNS implements target.Conn.
func (c *Conn) SeenNS() int64 { return c.seen.Load() }

// Usage implements target.Conn.
func (c *Conn) Usage() nvmeof.Usage {
	u := &c.usage
	return nvmeof.Usage{Reads: u.reads.Load(), Writes: u.writes.Load(), ReadBytes: u.readBytes.Load(),
		WrittenBytes: u.writtenBytes.Load(), MediaErrors: u.mediaErrors.Load()}
}

// Describe implements target.Conn.
func (c *Conn) Describe() target.ConnInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := target.ConnInfo{ID: uint64(c.id), Transport: c.cfg.Name, Local: c.cfg.Local, Remote: c.cfg.Remote,
		Since:       c.since,
		Outstanding: c.m.Outstanding(), QID: c.qid}
	if c.ctrl != nil {
		i.HostNQN, i.SubNQN, i.CNTLID, i.Entries = c.ctrl.HostNQN, c.ctrl.SubNQN, c.ctrl.ID, len(c.slots)
	}
	return i
}
