package connection

import (
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/telemetry"
)

// Execute implements qpair.Handler: it begins an I/O command at its executor.
//
// hot: 0 allocs
func (c *Conn) Execute(i int) {
	s, p := &c.slots[i], &c.m.Slot(i).Plan
	cmd := &s.cmd
	s.noted = false
	cmd.Fetch = c.m.NeedsFetch(i)
	if cmd.Buf.IsExtra() && cmd.Fetch {
		// A fused pair of which one half came in its capsule when there was no memory. It would hold the one buffer
		// beyond the pool's bound until the host sends the other half, which may come behind a capsule that needs
		// that buffer.
		c.refuse(i, nvme.CommandInterrupted, nvme.CommandInterrupted)
		return
	}
	if s.kind != p.Kind || cmd.Context == nil { // most slots have commands of one kind only
		if s.kind, cmd.Context = p.Kind, c.context(p.Kind, cmd); cmd.Context == nil {
			status := nvme.InvalidOpcode | nvme.DNR
			if p.Kind == nvmeof.KindReplica { // the node does not take part in its cluster
				status = nvme.NamespaceNotReady
			}
			c.refuse(i, status, status)
			return
		}
	}
	if !c.begin() { // the association has ended, was reset or shut down since the queue was connected
		c.refuse(i, nvme.AbortedSQDeletion, nvme.AbortedSQDeletion)
		return
	}
	cmd.Pass = c.share.Pass()
	cmd.Payer = executor.Payer{Account: c.tenant.Account, Tenant: c.tenant.Number, Credited: c.credits.On}
	s.startNS = c.seen.Load()
	c.cfg.Batches.of(p.Kind).Begin(cmd)
}

// context returns the state that the executor of the kind has for a command; nil if there is no such executor. The
// first command of a kind makes it for all slots, so that a slot that is used for the first time under load costs
// nothing.
//
// hot: 0 allocs, but for the first command of the kind
func (c *Conn) context(k nvmeof.Kind, cmd *executor.Command) any {
	if c.contexts[k] == nil {
		e := c.service.Executor(k)
		if e == nil {
			return nil
		}
		c.contexts[k] = make([]any, len(c.slots))
		for i := range c.slots {
			c.slots[i].cmd.Host = c.ctrl.HostNQN
			c.contexts[k][i] = e.NewContext(&c.slots[i].cmd)
		}
	}
	return c.contexts[k][cmd.Slot]
}

// refuse answers a command that is not handed to an executor. If it is the second of a fused pair, the first is
// answered too, with firstStatus. mu is held.
func (c *Conn) refuse(i int, firstStatus, status nvme.Status) {
	c.put(&c.slots[i].cmd.Buf)
	if first := c.m.Pair(i); first >= 0 {
		c.respond(first, firstStatus, 0)
	}
	c.respond(i, status, 0)
}

// executing reports whether slot i's command has begun and is not finished. mu is held.
func (c *Conn) executing(i int) bool { return c.slots[i].startNS != 0 }

// abort asks the executor of slot i's command to take the command out, and reports whether it did: see
// executor.Executor.Abort. mu is held.
func (c *Conn) abort(i int) bool {
	return c.service.Executor(c.m.Slot(i).Plan.Kind).Abort(&c.slots[i].cmd)
}

// NeedData implements executor.Port.
func (c *Conn) NeedData(cmd *executor.Command) (kick bool) {
	return c.cfg.Outbox.push(&c.slots[cmd.Slot], eventNeedData)
}

// Done implements executor.Port.
func (c *Conn) Done(cmd *executor.Command) (kick bool) {
	return c.cfg.Outbox.push(&c.slots[cmd.Slot], eventDone)
}

// Kick implements executor.Port.
func (c *Conn) Kick() { c.t.Wake() }

// Deliver implements executor.Port.
func (c *Conn) Deliver() { c.t.Deliver() }

// processEvent processes a command that its executor has put into the outbox. It answers a command that is done, and
// requests the host's data for one whose executor has called NeedData. If there is no data to request, it returns true,
// and the caller must call returnToExecutor. mu is held.
//
// hot: 0 allocs
func (c *Conn) processEvent(s *Slot, now int64) (nothingToFetch bool) {
	i := int(s.cmd.Slot)
	if s.event == eventNeedData {
		return !c.fetch(i, now)
	}
	c.finish(i, now)
	return false
}

// returnToExecutor returns a command to its executor after processEvent has reported that there is no data to request:
// either all data has been received, or the command is fenced or its connection is closing, which its Status then says.
// The caller holds mu, and also Batches.Handing unless mu guards the Batches. It must call Batches.HandOver afterwards.
func (c *Conn) returnToExecutor(s *Slot) {
	status := nvme.Success
	switch {
	case c.share.Pass().Stale(): // the drive would refuse the command even with its data
		status = nvme.AbortedSQDeletion
	case s.cmd.Fetch || c.closing:
		status = nvme.TransientTransportError
	}
	c.dataReady(int(s.cmd.Slot), status)
}

// dataReady returns a command to its executor with the host's data, or with the reason why there is none. The command
// is validated again, because its namespace may have gone while it waited for memory and data. It stays charged to the
// tenant at which it began, whose number is not used again before the connection is closed. mu and Handing are held.
//
// hot: 0 allocs
func (c *Conn) dataReady(i int, status nvme.Status) {
	cmd := &c.slots[i].cmd
	if status.OK() {
		status = c.m.Recheck(i)
	}
	cmd.Status = status
	c.cfg.Batches.of(cmd.Plan.Kind).DataReady(cmd)
}

// fetch asks the host for a command's data; false: the host has sent all of it, or cannot be asked. mu is held.
func (c *Conn) fetch(i int, now int64) bool {
	s := &c.slots[i]
	if !s.cmd.Fetch || c.closing || c.cfg.Closed() || c.share.Pass().Stale() {
		return false
	}
	s.fetching, s.requestedNS, s.lost = true, now, false
	if p := c.m.Pair(i); p >= 0 {
		c.slots[p].requestedNS = now
		c.m.FetchPair(i, s.cmd.Buf.B)
	} else {
		c.m.RequestData(i, s.cmd.Buf.B[:s.cmd.Plan.ToController])
	}
	return true
}

// Fetched implements qpair.Handler.
//
// hot: 0 allocs
func (c *Conn) Fetched(i int, ok bool) {
	if c.qid == 0 || c.m.Slot(i).SQE.Opcode() == nvme.OpFabrics {
		if !ok {
			c.put(&c.slots[i].cmd.Buf)
			c.respond(i, nvme.TransientTransportError, 0)
			return
		}
		c.Admin(i)
		return
	}
	if c.m.Pair(i) >= 0 {
		second, complete := c.m.PairFetched(i)
		s := &c.slots[second]
		s.lost = s.lost || !ok
		if !complete {
			return
		}
		i, ok = second, !s.lost
	}
	c.slots[i].fetching = false
	if ok {
		c.dataReady(i, nvme.Success)
	} else {
		c.dataReady(i, nvme.TransientTransportError)
	}
}

// abandon ends a command's wait for the host's data: the connection is lost, so the command goes back to its executor
// with an error. mu is held.
func (c *Conn) abandon(i int) {
	if p := c.m.Pair(i); p >= 0 && c.m.Slot(i).SQE.Fuse() == nvme.FuseFirst {
		i = p
	}
	if s := &c.slots[i]; s.fetching {
		s.fetching = false
		c.dataReady(i, nvme.TransientTransportError)
	}
}

// finish answers a command that its executor is done with, and the first of its pair if it is fused. Its buffer goes
// back to the pool, or to the transport, which returns it when the data for the host is sent. The slot is then free for
// another command. mu is held.
//
// hot: 0 allocs
func (c *Conn) finish(i int, now int64) {
	s := &c.slots[i]
	cmd := &s.cmd
	c.end(s)
	c.count(cmd, now-s.startNS)
	if cmd.Status.Code() == nvme.WriteFault && (c.closing || c.t.Lost()) {
		c.noteUnreported(i)
	}
	s.startNS = 0
	if c.m.Full() {
		c.t.Resume()
	}
	result := cmd.Result
	if c.credits.On {
		credit := c.tenant.Windows.Credit(cmd.Plan.Namespace.SSD, cmd.CreditUnits)
		if cmd.Plan.Wide {
			c.m.SetSQID(i, uint16(credit.Units()))
		} else {
			result |= uint64(credit) << 32
		}
	}
	if cmd.Status.OK() && cmd.AnswerBytes > 0 && !c.closing {
		if c.m.RespondData(i, cmd.Buf.B[:cmd.AnswerBytes], result) {
			c.t.HoldUntilSent(cmd.Buf)
			cmd.Buf = bufpool.Buf{}
			return
		}
		c.put(&cmd.Buf)
		return
	}
	c.put(&cmd.Buf)
	if first := c.m.Pair(i); first >= 0 {
		c.respond(first, cmd.FirstStatus, result)
	}
	c.respond(i, cmd.Status, result)
}

// count adds a command that is done to the metrics and to the SMART log's usage, where flushCounts lets it appear. mu
// is held.
//
// hot: 0 allocs
func (c *Conn) count(cmd *executor.Command, durationNS int64) {
	c.done.series.Observe(c.seriesOf(cmd), cmd.Bytes, time.Duration(durationNS))
	switch {
	case !cmd.Status.OK():
		if cmd.Status.SCT() == nvme.SCTMedia && cmd.Status.Code() != nvme.CompareFailure {
			c.usage.mediaErrors.Add(1)
		}
	case cmd.Access == executor.AccessRead:
		c.done.reads++
		c.done.readBytes += uint64(cmd.Bytes)
	case cmd.Access == executor.AccessWrite:
		c.done.writes++
		c.done.writtenBytes += uint64(cmd.Bytes)
	}
}

// done are commands that count has seen since flushCounts. They end together: an atomic addition for each figure of
// each would be a good part of what an answer costs.
type done struct {
	series                                 telemetry.Tally
	reads, writes, readBytes, writtenBytes uint64
}

// flushCounts adds up what count has seen. It follows before the host can have the answers, which it may then find in
// the counters. mu is held.
//
// hot: 0 allocs
func (c *Conn) flushCounts() {
	d := &c.done
	d.series.Flush()
	if d.reads > 0 {
		c.usage.reads.Add(d.reads)
		c.usage.readBytes.Add(d.readBytes)
	}
	if d.writes > 0 {
		c.usage.writes.Add(d.writes)
		c.usage.writtenBytes.Add(d.writtenBytes)
	}
	d.reads, d.writes, d.readBytes, d.writtenBytes = 0, 0, 0, 0
}

// seriesOf returns the metrics of the command's operation at its SSD.
//
// hot: 0 allocs, but for the first command of an operation
func (c *Conn) seriesOf(cmd *executor.Command) *telemetry.IOSeries {
	have, i := c.series[cmd.Plan.Kind], cmd.Plan.Namespace.SSD*executor.MaxOps+int(cmd.Op)
	if i < len(have) && have[i] != nil {
		return have[i]
	}
	return c.openSeries(cmd, i)
}

// openSeries makes the series with index i.
func (c *Conn) openSeries(cmd *executor.Command, i int) *telemetry.IOSeries {
	k := cmd.Plan.Kind
	for len(c.series[k]) <= i {
		c.series[k] = append(c.series[k], nil)
	}
	t := c.counts.IO(c.service.SSDName(cmd.Plan.Namespace.SSD), c.service.Executor(k).Ops()[cmd.Op])
	c.series[k][i] = t
	return t
}

// respond answers a command without data and remembers a failure. mu is held.
func (c *Conn) respond(i int, status nvme.Status, result uint64) {
	if !status.OK() && !c.slots[i].noted {
		c.noteFailure(i, status)
	}
	c.m.Respond(i, status, result)
}
