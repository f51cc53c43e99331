package serve

import (
	"math"
	"net"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/pipeline"
	"jbofd/internal/telemetry"
)

// Shut implements fabric.Conn.
func (c *conn) Shut(reason string) {
	c.shut(reason)
	c.SetTable(noNamespaces, math.MaxUint64) // for what has been received already
}

// noNamespaces is what a host sees that has lost access.
var noNamespaces = nvmeof.NewNamespaceTable(nil, "")

// executeAdmin runs the admin and fabrics commands that Receive brought.
func (c *conn) executeAdmin() {
	for k := 0; k < len(c.admin); k++ {
		i := c.admin[k]
		c.mu.Lock()
		m := c.m.Slot(i)
		ctrl, closed := c.ctrl, c.m.Closed()
		c.mu.Unlock()
		if ctrl == nil {
			if !closed { // else what came behind Connect has ended the connection
				c.connect(i)
			}
			continue
		}
		s := &c.slots[i]
		args := nvmeof.AdminArgs{Controller: ctrl, QID: c.qid, Slot: i, SQE: &m.SQE, Data: s.io.Buf.B}
		r := c.srv.fabric.Admin(args)
		if r.Credit {
			c.mu.Lock()
			tenant := c.tenant
			c.mu.Unlock()
			r.Result |= uint64(c.srv.fabric.FirstCredit(tenant, r.CreditSSD)) << 32
		}
		c.mu.Lock()
		switch {
		case r.Pending:
		case r.Status.OK() && r.Len > 0:
			if c.m.RespondData(i, s.io.Buf.B[:r.Len], r.Result) {
				c.pending = append(c.pending, s.io.Buf)
				s.io.Buf = bufpool.Buf{}
			} else {
				c.put(&s.io.Buf)
			}
		default:
			c.put(&s.io.Buf)
			c.respond(i, r.Status, r.Result)
		}
		c.mu.Unlock()
		if r.Disconnect {
			c.flush()
			c.finishSending()
			c.shut("disconnected by the host")
		}
	}
	c.admin = c.admin[:0]
}

// connect executes the Connect command in slot i.
func (c *conn) connect(i int) {
	local := c.nc.LocalAddr().(*net.TCPAddr)
	sqe := c.m.Slot(i).SQE
	data := (*nvme.ConnectData)(c.connBuf)
	args := nvmeof.ConnectArgs{Conn: c.id, Port: c.port, LocalAddress: local.IP.String(), SQE: &sqe, Data: data}
	r := nvmeof.ConnectReply{Status: nvme.ConnectControllerBusy, Label: "host_connections", Reason: "too many connections of this host"}
	if c.srv.admit(data.HostNQN()) {
		r = c.srv.fabric.Connect(args)
		if !r.Status.OK() {
			c.srv.leave(data.HostNQN())
		}
	}
	if !r.Status.OK() {
		c.srv.tel.ConnectFailed(r.Label)
		c.srv.log.Warn("connect refused", "remote", c.remote, "host", data.HostNQN(), "subsystem", data.SubNQN(),
			"status", r.Status.String(), "reason", r.Reason)
		c.mu.Lock()
		c.m.Respond(i, r.Status, r.Result)
		c.mu.Unlock()
		return
	}
	c.srv.fabric.OpenTenant(c.id, c, r.Controller.HostNQN, r.QID == 0) // calls SetTenant
	c.mu.Lock()
	n := c.m.Attach(qpair.Attachment{QID: r.QID, Entries: r.Entries, NoSQFlow: r.NoSQFlow, Table: r.Table})
	slots := make([]slot, n)
	for k := range slots {
		slots[k].io.Init(c, uint32(k))
	}
	c.slots = slots
	c.ctrl, c.qid, c.version = r.Controller, r.QID, max(c.version, r.Version)
	c.failures = make([]nvmeof.Failed, 0, maxFailures)
	c.pending = make([]bufpool.Buf, 0, n)
	c.txBufs = make([]bufpool.Buf, 0, n)
	c.connBuf = nil
	c.m.Respond(i, nvme.Success, r.Result)
	c.setCredits(r.Credits)
	c.mu.Unlock()
	c.srv.tel.ConnectionEstablished("tcp")
	c.srv.log.Log(c.srv.ctx, connLevel(r.QID), "connected", "remote", c.remote, "host", r.Controller.HostNQN,
		"subsystem", r.Controller.SubNQN, "cntlid", r.Controller.ID, "qid", r.QID, "queue_size", r.Entries)
}

// Complete implements fabric.Conn.
func (c *conn) Complete(i int, status nvme.Status, result uint64) {
	c.mu.Lock()
	c.m.Respond(i, status, result)
	c.mu.Unlock()
	signal(c.wake)
}

// SetTable implements fabric.Conn. When it returns, the SSDs have every command
// that was judged by an older table: they can be waited for there.
func (c *conn) SetTable(t *nvmeof.NamespaceTable, version uint64) {
	c.handing.Lock()
	defer c.handing.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if version > c.version {
		c.version = version
		c.m.SetTable(t)
	}
}

// SetTenant implements fabric.Conn. What completes from now on is counted under the
// tenant's name.
func (c *conn) SetTenant(t fabric.Tenant) {
	c.handing.Lock()
	defer c.handing.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctrl != nil && c.qid == 0 && c.credits.On {
		c.tenant.Windows.Close()
		t.Windows.Open()
	}
	c.tenant = t
	c.series = make([][pipeline.Ops]*telemetry.IOSeries, len(c.srv.fabric.SSDs()))
	c.errors = c.srv.tel.Errors(t.Name)
}

// SetCredits implements fabric.Conn.
func (c *conn) SetCredits(s nvmeof.CreditState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setCredits(s)
}

// setCredits is SetCredits with mu held.
func (c *conn) setCredits(s nvmeof.CreditState) {
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

// Abort implements fabric.Conn.
func (c *conn) Abort(cid uint16) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, ok := c.m.Find(cid)
	if !ok || !c.withSSD(i) || c.m.Pair(i) >= 0 {
		return false
	}
	s := &c.slots[i]
	if !c.srv.fabric.SSD(c.ssdOf(i)).Abort(&s.io) {
		return false
	}
	c.noteFailure(i, nvme.AbortRequested)
	c.m.Abort(i, nvme.AbortRequested)
	signal(c.wake)
	return true
}

// EventSlot implements fabric.Conn.
func (c *conn) EventSlot(cid uint16) (int, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.m.Find(cid)
}

// SeenNS implements fabric.Conn.
func (c *conn) SeenNS() int64 { return c.seen.Load() }

// Usage implements fabric.Conn.
func (c *conn) Usage() nvmeof.Usage {
	u := &c.usage
	return nvmeof.Usage{Reads: u.reads.Load(), Writes: u.writes.Load(), ReadBytes: u.readBytes.Load(),
		WrittenBytes: u.writtenBytes.Load(), MediaErrors: u.mediaErrors.Load()}
}

// Describe implements fabric.Conn.
func (c *conn) Describe() fabric.ConnInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := fabric.ConnInfo{ID: uint64(c.id), Transport: "tcp", Local: c.nc.LocalAddr().String(), Remote: c.remote, Since: c.since,
		Outstanding: c.m.Outstanding(), QID: c.qid}
	if c.ctrl != nil {
		i.HostNQN, i.SubNQN, i.CNTLID, i.Entries = c.ctrl.HostNQN, c.ctrl.SubNQN, c.ctrl.ID, len(c.slots)
	}
	return i
}
