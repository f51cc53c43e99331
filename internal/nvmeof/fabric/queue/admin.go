package queue

import (
	"context"
	"math"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/pipeline"
	"jbofd/internal/telemetry"
)

// Shut implements fabric.Conn.
func (q *Queue) Shut(reason string) {
	q.t.Shut(reason)
	q.SetTable(noNamespaces, math.MaxUint64) // for what has been received already
}

// noNamespaces is what a host sees that has lost access.
var noNamespaces = nvmeof.NewNamespaceTable(nil, "")

// AdminPending reports that there is something for ExecuteAdmin. The lock is held, or the caller is
// the only one who gives the machine commands.
func (q *Queue) AdminPending() bool { return len(q.admin) > 0 }

// nextAdmin takes the next command for ExecuteAdmin; ctrl is nil for a Connect.
func (q *Queue) nextAdmin() (slot int, ctrl *nvmeof.Controller, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.admin) > 0 {
		slot = q.admin[0]
		q.admin = append(q.admin[:0], q.admin[1:]...)
		if q.ctrl != nil || !q.cfg.Closed() { // else what came behind Connect has ended the connection
			return slot, q.ctrl, true
		}
	}
	return 0, nil, false
}

// ExecuteAdmin runs the admin and fabrics commands that the machine has brought. By one
// goroutine at a time, without the lock.
func (q *Queue) ExecuteAdmin() {
	for {
		i, ctrl, ok := q.nextAdmin()
		if !ok {
			return
		}
		if ctrl == nil {
			q.connect(i)
			continue
		}
		s := &q.slots[i]
		args := nvmeof.AdminArgs{Controller: ctrl, QID: q.qid, Slot: i, SQE: &q.m.Slot(i).SQE, Data: s.io.Buf.B}
		r := q.fab.Admin(args)
		if r.Credit {
			q.mu.Lock()
			tenant := q.tenant
			q.mu.Unlock()
			r.Result |= uint64(q.fab.FirstCredit(tenant, r.CreditSSD)) << 32
		}
		q.mu.Lock()
		switch {
		case r.Pending:
		case r.Status.OK() && r.Len > 0:
			if q.m.RespondData(i, s.io.Buf.B[:r.Len], r.Result) {
				q.t.Lend(s.io.Buf)
				s.io.Buf = bufpool.Buf{}
			} else {
				q.put(&s.io.Buf)
			}
		default:
			q.put(&s.io.Buf)
			q.respond(i, r.Status, r.Result)
		}
		q.mu.Unlock()
		if r.Disconnect {
			q.t.Bye()
			q.t.Shut("disconnected by the host")
		}
	}
}

// connect executes the Connect command in slot i.
func (q *Queue) connect(i int) {
	sqe := q.m.Slot(i).SQE
	data := (*nvme.ConnectData)(q.connBuf)
	args := nvmeof.ConnectArgs{Conn: q.id, Port: q.cfg.Port, LocalAddress: q.t.LocalAddress(), SQE: &sqe, Data: data, Agreed: q.cfg.Agreed}
	r := nvmeof.ConnectReply{Status: nvme.ConnectControllerBusy, Label: "host_connections", Reason: "too many connections of this host"}
	if q.cfg.Admission.enterHost(data.HostNQN()) {
		r = q.fab.Connect(args)
		if !r.Status.OK() {
			q.cfg.Admission.leaveHost(data.HostNQN())
		}
	}
	if !r.Status.OK() {
		q.tel.ConnectFailed(r.Label)
		q.log.Warn("connect refused", "transport", q.cfg.Name, "remote", q.cfg.Remote, "host", data.HostNQN(), "subsystem", data.SubNQN(),
			"status", r.Status.String(), "reason", r.Reason)
		q.mu.Lock()
		q.m.Respond(i, r.Status, r.Result)
		q.mu.Unlock()
		return
	}
	q.fab.OpenTenant(q.id, q, r.Controller.HostNQN, r.QID == 0) // calls SetTenant
	q.mu.Lock()
	n := q.m.Attach(qpair.Attachment{QID: r.QID, Entries: r.Entries, NoSQFlow: r.NoSQFlow, Table: r.Table})
	slots := make([]Slot, n)
	for k := range slots {
		slots[k].io.Init(q, uint32(k))
	}
	q.slots = slots
	q.ctrl, q.qid, q.version = r.Controller, r.QID, max(q.version, r.Version)
	q.failures = make([]nvmeof.Failed, 0, maxFailures)
	q.connBuf = nil
	q.m.Respond(i, nvme.Success, r.Result)
	q.setCredits(r.Credits)
	q.mu.Unlock()
	q.tel.ConnectionEstablished(q.cfg.Name)
	q.log.Log(context.Background(), connLevel(r.QID), "connected", "transport", q.cfg.Name, "remote", q.cfg.Remote, "host", r.Controller.HostNQN,
		"subsystem", r.Controller.SubNQN, "cntlid", r.Controller.ID, "qid", r.QID, "queue_size", r.Entries)
}

// Complete implements fabric.Conn.
func (q *Queue) Complete(i int, status nvme.Status, result uint64) {
	q.mu.Lock()
	q.m.Respond(i, status, result)
	q.mu.Unlock()
	q.t.Wake()
}

// SetTable implements fabric.Conn. When it returns, the SSDs have every command
// that was judged by an older table: they can be waited for there. So have the partitions, or
// the command will be judged again before it goes to one.
func (q *Queue) SetTable(t *nvmeof.NamespaceTable, version uint64) {
	q.cfg.Batches.Handing.Lock()
	defer q.cfg.Batches.Handing.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	if version > q.version {
		q.version = version
		q.m.SetTable(t)
	}
}

// SetTenant implements fabric.Conn. What completes from now on is counted under the
// tenant's name.
func (q *Queue) SetTenant(t fabric.Tenant) {
	q.cfg.Batches.Handing.Lock()
	defer q.cfg.Batches.Handing.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ctrl != nil && q.qid == 0 && q.credits.On {
		q.tenant.Windows.Close()
		t.Windows.Open()
	}
	q.tenant = t
	q.series = make([][pipeline.Ops]*telemetry.IOSeries, len(q.fab.SSDs()))
	q.kvSeries = make([][kvOps]*telemetry.IOSeries, len(q.fab.SSDs()))
	q.errors = q.tel.Errors(t.Name)
}

// SetCredits implements fabric.Conn.
func (q *Queue) SetCredits(s nvmeof.CreditState) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.setCredits(s)
}

// setCredits is SetCredits with mu held.
func (q *Queue) setCredits(s nvmeof.CreditState) {
	if s.Version <= q.credits.Version {
		return
	}
	if q.ctrl != nil && q.qid == 0 && s.On != q.credits.On {
		if s.On {
			q.tenant.Windows.Open()
		} else {
			q.tenant.Windows.Close()
		}
	}
	q.credits = s
	q.m.SetCredits(s.On && q.qid != 0)
}

// Abort implements fabric.Conn.
func (q *Queue) Abort(cid uint16) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	i, ok := q.m.Find(cid)
	if ok && q.withPartition(i) {
		aborted := q.abortKV(i)
		q.t.Wake()
		return aborted
	}
	if !ok || !q.withSSD(i) || q.m.Pair(i) >= 0 {
		return false
	}
	s := &q.slots[i]
	if !q.fab.SSD(q.ssdOf(i)).Abort(&s.io) {
		return false
	}
	q.noteFailure(i, nvme.AbortRequested)
	q.m.Abort(i, nvme.AbortRequested)
	q.t.Wake()
	return true
}

// EventSlot implements fabric.Conn.
func (q *Queue) EventSlot(cid uint16) (int, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.m.Find(cid)
}

// SeenNS implements fabric.Conn.
func (q *Queue) SeenNS() int64 { return q.seen.Load() }

// Usage implements fabric.Conn.
func (q *Queue) Usage() nvmeof.Usage {
	u := &q.usage
	return nvmeof.Usage{Reads: u.reads.Load(), Writes: u.writes.Load(), ReadBytes: u.readBytes.Load(),
		WrittenBytes: u.writtenBytes.Load(), MediaErrors: u.mediaErrors.Load()}
}

// Describe implements fabric.Conn.
func (q *Queue) Describe() fabric.ConnInfo {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := fabric.ConnInfo{ID: uint64(q.id), Transport: q.cfg.Name, Local: q.cfg.Local, Remote: q.cfg.Remote, Since: q.since,
		Outstanding: q.m.Outstanding(), QID: q.qid}
	if q.ctrl != nil {
		i.HostNQN, i.SubNQN, i.CNTLID, i.Entries = q.ctrl.HostNQN, q.ctrl.SubNQN, q.ctrl.ID, len(q.slots)
	}
	return i
}
