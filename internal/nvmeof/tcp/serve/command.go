package serve

import (
	"errors"
	"slices"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/owner"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// withSSD reports whether slot i's IO is with an SSD. mu is held.
func (c *conn) withSSD(i int) bool { return c.slots[i].startNS != 0 }

// abandon gives a command whose data will never come back to its SSD. mu is
// held.
func (c *conn) abandon(i int) {
	if p := c.m.Pair(i); p >= 0 && c.m.Slot(i).SQE.Fuse() == nvme.FuseFirst {
		i = p
	}
	s := &c.slots[i]
	if s.fetching {
		s.fetching = false
		s.io.Err = fabric.ErrLost
		c.toSSD(&c.fetched[c.ssdOf(i)], i)
	}
}

// handOver submits the batches to their SSDs.
func (c *conn) handOver() {
	for _, i := range c.touched {
		o := c.srv.fabric.SSD(i)
		o.Fetched(&c.fetched[i])
		o.Submit(&c.batches[i])
	}
	c.touched = c.touched[:0]
}

// toSSD adds slot's IO to one of the batches.
func (c *conn) toSSD(b *owner.Batch, i int) {
	ssd := c.ssdOf(i)
	if c.batches[ssd].Empty() && c.fetched[ssd].Empty() {
		c.touched = append(c.touched, ssd)
	}
	b.Add(&c.slots[i].io)
}

func (c *conn) ssdOf(i int) int { return c.m.Slot(i).Plan.Namespace.SSD }

// Buffer implements qpair.Handler.
func (c *conn) Buffer(i, n int) []byte {
	if c.ctrl == nil {
		if c.connBuf == nil {
			c.connBuf = make([]byte, nvme.ConnectDataSize)
		}
		return c.connBuf[:n]
	}
	s := &c.slots[i]
	if c.waiting && c.granted.Load() {
		c.waiting = false
		c.granted.Store(false)
		s.io.Buf, c.waiter.Buf = c.waiter.Buf, bufpool.Buf{}
		if len(s.io.Buf.B) >= n {
			return s.io.Buf.B[:n]
		}
		c.put(&s.io.Buf)
	}
	if !c.waiting {
		c.waiter.Size = n
		if c.srv.fabric.Pool().GetOrWait(c.tenant.Account, &c.waiter) {
			s.io.Buf, c.waiter.Buf = c.waiter.Buf, bufpool.Buf{}
			return s.io.Buf.B[:n]
		}
		c.waiting = true
	}
	return c.extraBuffer(s, n)
}

// extraBuffer takes a buffer beyond the pool's bound for a command on an I/O queue
// whose data is in its capsule; nil if one is out already. All that the host may
// have can be with commands whose data comes behind that capsule: whoever waited
// for it would wait for ever. One at a time is enough: its command needs nothing
// more from the host.
func (c *conn) extraBuffer(s *slot, n int) []byte {
	if c.qid == 0 || c.extra {
		return nil
	}
	c.extra = true
	b, ok := c.srv.fabric.Pool().Extra(n)
	if !ok {
		return nil // and none later
	}
	s.io.Buf = b
	if c.srv.fabric.Pool().Cancel(&c.waiter) {
		c.waiting = false
	} // else there is a buffer for the next command
	return b.B[:n]
}

// Unused implements qpair.Handler.
func (c *conn) Unused(i int) { c.put(&c.slots[i].io.Buf) }

// Paired implements qpair.Handler.
func (c *conn) Paired(first, second int) {
	f, s := &c.slots[first], &c.slots[second]
	if !f.io.Buf.IsZero() {
		s.io.Buf, f.io.Buf = f.io.Buf, bufpool.Buf{}
	}
}

// Paused implements qpair.Handler.
func (c *conn) Paused() bool { return c.closing || c.paused() }

func (c *conn) paused() bool {
	return c.sending && c.m.Pending() > c.srv.cfg.BacklogBytes
}

// Admin implements qpair.Handler.
func (c *conn) Admin(i int) { c.admin = append(c.admin, i) }

// Execute implements qpair.Handler.
//
// hot: 0 allocs
func (c *conn) Execute(i int) {
	m, s := c.m.Slot(i), &c.slots[i]
	p := &m.Plan
	io := &s.io
	io.Op, io.Offset, io.Len, io.Flags = p.Op, p.Offset, p.Len, 0
	if p.FUA {
		io.Flags |= ssd.FUA
	}
	if p.Unmap {
		io.Flags |= ssd.Unmap
	}
	io.Fetch = c.m.NeedsFetch(i)
	io.Account, io.Tenant, io.Credited = c.tenant.Account, c.tenant.Number, c.credits.On
	if p.Op == pipeline.DeallocateRanges {
		io.Len = int64(p.ToController)
		if !io.Fetch {
			if !c.setRanges(i) {
				return
			}
		}
	}
	s.startNS = c.seen.Load()
	c.inFlight.Add(1)
	c.toSSD(&c.batches[p.Namespace.SSD], i)
}

// setRanges decodes a Dataset Management command's data; if that fails, or there
// is nothing to do, the command is responded to and false returned.
func (c *conn) setRanges(i int) bool {
	m, s := c.m.Slot(i), &c.slots[i]
	if s.ranges == nil {
		s.ranges = make([]pipeline.Range, 0, nvme.MaxDSMRanges)
	}
	ranges, status := m.Plan.AppendRanges(s.io.Buf.B, s.ranges[:0])
	if m.Plan.NoOp {
		ranges = nil
	}
	s.ranges = ranges
	s.io.Ranges = ranges
	if status.OK() && len(ranges) > 0 {
		return true
	}
	if s.startNS == 0 { // not with the SSD yet
		c.put(&s.io.Buf)
		c.respond(i, status, 0)
	}
	return false
}

// Fetched implements qpair.Handler.
func (c *conn) Fetched(i int, ok bool) {
	m := c.m.Slot(i)
	if c.qid == 0 || m.SQE.Opcode() == nvme.OpFabrics {
		if !ok {
			c.put(&c.slots[i].io.Buf)
			c.respond(i, nvme.TransientTransportError, 0)
			return
		}
		c.Admin(i)
		return
	}
	if c.m.Pair(i) >= 0 {
		second, complete := c.m.PairFetched(i)
		if !ok {
			c.slots[second].io.Err = fabric.ErrLost
		}
		if !complete {
			return
		}
		i, ok = second, c.slots[second].io.Err == nil
		m = c.m.Slot(i)
	}
	s := &c.slots[i]
	s.fetching = false
	s.io.Err = nil
	if !ok {
		s.io.Err = fabric.ErrLost
	} else if m.Plan.Op == pipeline.DeallocateRanges && !c.setRanges(i) {
		s.io.Err = errRanges
	}
	c.toSSD(&c.fetched[m.Plan.Namespace.SSD], i)
}

// errRanges: a Dataset Management command's ranges are wrong or empty; finish
// decodes them again for the status.
var errRanges = errors.New("no ranges to deallocate")

// Admitted implements owner.Sink.
func (c *conn) Admitted(io *owner.IO) bool {
	c.slots[io.Slot].admitted = true
	return c.outbox.push(io)
}

// Done implements owner.Sink.
func (c *conn) Done(io *owner.IO) bool {
	c.slots[io.Slot].admitted = false
	return c.outbox.push(io)
}

// Kick implements owner.Sink.
func (c *conn) Kick() { signal(c.wake) }

// empty takes what the SSDs left in the outbox.
func (c *conn) empty() {
	for {
		if first := c.outbox.take(); first != nil {
			now := c.srv.fabric.Clock()
			var lost []*owner.IO // the connection is closing: their data will not come
			c.mu.Lock()
			for io := first; io != nil; {
				next := io.Next
				if c.slots[io.Slot].admitted {
					if !c.fetch(int(io.Slot), now) {
						lost = append(lost, io)
					}
				} else {
					c.finish(int(io.Slot), now)
				}
				io = next
			}
			c.mu.Unlock()
			for _, io := range lost {
				io.Return(fabric.ErrLost)
			}
		}
		if c.outbox.leave() {
			return
		}
	}
}

// fetch asks the host for an admitted IO's data; false: it cannot be had any
// more. mu is held.
func (c *conn) fetch(i int, now int64) bool {
	s := &c.slots[i]
	if c.closing || c.m.Closed() {
		return false
	}
	s.fetching, s.askedNS = true, now
	s.io.Err = nil
	if p := c.m.Pair(i); p >= 0 {
		c.slots[p].askedNS = now
		c.m.FetchPair(i, s.io.Buf.B)
	} else {
		c.m.RequestData(i, s.io.Buf.B[:c.m.Slot(i).Plan.ToController])
	}
	return true
}

// finish answers a command whose IO is done. mu is held.
//
// hot: 0 allocs
func (c *conn) finish(i int, now int64) {
	m, s := c.m.Slot(i), &c.slots[i]
	p := &m.Plan
	io := &s.io
	op, bytes, start := io.Op, p.Len, s.startNS
	c.inFlight.Add(-1)
	s.startNS = 0
	if c.m.Full() {
		signal(c.resume)
	}
	ssdNumber := p.Namespace.SSD
	var result uint64
	if c.credits.On {
		result = uint64(c.tenant.Windows.Credit(ssdNumber, io.CreditUnits)) << 32
	}

	if io.Err == nil && op == pipeline.Read {
		c.usage.reads.Add(1)
		c.usage.readBytes.Add(uint64(bytes))
		c.observe(ssdNumber, op, bytes, now-start)
		if !c.closing && c.m.RespondData(i, io.Buf.B, result) {
			c.pending = append(c.pending, io.Buf)
			io.Buf = bufpool.Buf{}
			return
		}
		if c.closing {
			c.m.Respond(i, nvme.Success, 0)
		}
		c.put(&io.Buf)
		return
	}
	status := fabric.Status(op, io.Err)
	if io.Err == errRanges {
		_, status = p.AppendRanges(io.Buf.B, s.ranges[:0])
	}
	c.put(&io.Buf)
	switch {
	case op == pipeline.CompareWrite:
		c.finishPair(i, status, io, result)
	case io.Err == owner.ErrAborted: // Abort has answered already
		c.m.Respond(i, status, 0)
	default:
		c.respond(i, status, result)
	}
	if !status.OK() {
		bytes = 0
	}
	c.observe(ssdNumber, op, bytes, now-start)
	if status.OK() {
		if op == pipeline.Write || op == pipeline.CompareWrite {
			c.usage.writes.Add(1)
			c.usage.writtenBytes.Add(uint64(bytes))
		}
	} else if status.SCT() == nvme.SCTMedia && status.Code() != nvme.CompareFailure {
		c.usage.mediaErrors.Add(1)
	}
}

// finishPair answers both commands of a fused pair. mu is held.
func (c *conn) finishPair(second int, status nvme.Status, io *owner.IO, result uint64) {
	first := c.m.Pair(second)
	if first < 0 {
		c.respond(second, status, result)
		return
	}
	a, b := status, nvme.AbortedFailedFused|nvme.DNR
	if status.OK() {
		a, b = nvme.Success, nvme.Success
	} else if io.Writing() { // the compare held, the write failed
		a, b = nvme.Success, status
	} else if io.Err == owner.ErrAborted {
		b = status
	}
	c.respond(first, a, result)
	c.respond(second, b, result)
}

// respond answers a command without data and remembers a failure. mu is held.
func (c *conn) respond(i int, status nvme.Status, result uint64) {
	if !status.OK() {
		c.noteFailure(i, status)
	}
	c.m.Respond(i, status, result)
}

// noteFailure counts a failed command and remembers it for the Error Information
// log. mu is held.
func (c *conn) noteFailure(i int, status nvme.Status) {
	if c.errors == nil {
		return // not connected yet
	}
	c.errors.Inc(status.SCT(), status.SC())
	if len(c.failures) == cap(c.failures) {
		return // more at once than the log could hold
	}
	m := c.m.Slot(i)
	f := nvmeof.Failed{QID: c.qid, CID: m.SQE.CID(), Opcode: m.SQE.Opcode(), NSID: m.SQE.NSID(), Status: status}
	if m.Plan.Namespace != nil {
		f.LBA = m.SQE.SLBA()
	}
	c.failures = append(c.failures, f)
}

// Failed implements qpair.Handler.
func (c *conn) Failed(i int, status nvme.Status) { c.noteFailure(i, status) }

// maxFailures is how many failed commands are remembered between two looks.
const maxFailures = 64

// recordFailures hands failed commands to the controller's log.
func (c *conn) recordFailures() {
	c.mu.Lock()
	if len(c.failures) == 0 {
		c.mu.Unlock()
		return
	}
	failed := slices.Clone(c.failures)
	c.failures = c.failures[:0]
	c.mu.Unlock()
	c.srv.fabric.RecordErrors(c.ctrl, failed)
}

// observe counts one completed I/O. mu is held.
//
// hot: 0 allocs
func (c *conn) observe(ssdNumber int, op pipeline.Op, bytes, durationNS int64) {
	t := c.series[ssdNumber][op]
	if t == nil {
		name := c.srv.fabric.SSD(ssdNumber).Device().Info().Name
		t = c.srv.tel.IO(c.tenant.Name, name, op.String())
		c.series[ssdNumber][op] = t
	}
	if op == pipeline.Flush || op == pipeline.DeallocateRanges {
		bytes = 0
	}
	t.Observe(1, bytes, time.Duration(durationNS))
}

// put returns a buffer to the pool. mu is held.
func (c *conn) put(b *bufpool.Buf) {
	if !b.IsZero() {
		if b.IsExtra() {
			c.extra = false
			signal(c.resume)
		}
		c.srv.fabric.Pool().Put(*b)
		*b = bufpool.Buf{}
	}
}
