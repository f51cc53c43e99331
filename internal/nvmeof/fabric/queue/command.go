package queue

import (
	"errors"
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
func (q *Queue) withSSD(i int) bool { return q.slots[i].startNS != 0 }

// abandon gives a command whose data will never come back to its SSD. mu is
// held.
func (q *Queue) abandon(i int) {
	if p := q.m.Pair(i); p >= 0 && q.m.Slot(i).SQE.Fuse() == nvme.FuseFirst {
		i = p
	}
	s := &q.slots[i]
	switch {
	case !s.fetching:
	case q.withPartition(i):
		q.endKV(i, nvme.TransientTransportError)
	default:
		q.lose(i)
	}
}

// lose gives a command whose data will not come to its SSD.
func (q *Queue) lose(i int) {
	s := &q.slots[i]
	s.fetching = false
	s.io.Err = fabric.ErrLost
	q.toSSD(i, true)
}

// toSSD adds slot's IO to the commands or, with its data fetched, to those that go on.
func (q *Queue) toSSD(i int, fetched bool) {
	b := q.cfg.Batches
	to := b.commands
	if fetched {
		to = b.fetched
	}
	b.add(to, q.ssdOf(i), &q.slots[i].io)
}

func (q *Queue) ssdOf(i int) int { return q.m.Slot(i).Plan.Namespace.SSD }

// Buffer implements qpair.Handler.
func (q *Queue) Buffer(i, n int) []byte {
	if q.ctrl == nil {
		if q.connBuf == nil {
			q.connBuf = make([]byte, nvme.ConnectDataSize)
		}
		return q.connBuf[:n]
	}
	s := &q.slots[i]
	if q.waiting && q.granted.Load() {
		q.waiting = false
		q.granted.Store(false)
		s.io.Buf, q.waiter.Buf = q.waiter.Buf, bufpool.Buf{}
		if len(s.io.Buf.B) >= n {
			return s.io.Buf.B[:n]
		}
		q.put(&s.io.Buf)
	}
	if !q.waiting {
		q.waiter.Size = n
		if q.fab.Pool().GetOrWait(q.tenant.Account, &q.waiter) {
			s.io.Buf, q.waiter.Buf = q.waiter.Buf, bufpool.Buf{}
			return s.io.Buf.B[:n]
		}
		q.waiting = true
	}
	return q.extraBuffer(s, n)
}

// extraBuffer takes a buffer beyond the pool's bound for a command on an I/O queue
// whose data is in its capsule; nil if one is out already. All that the host may
// have can be with commands whose data comes behind that capsule: whoever waited
// for it would wait for ever. One at a time is enough: its command needs nothing
// more from the host.
func (q *Queue) extraBuffer(s *Slot, n int) []byte {
	if q.qid == 0 || q.extra {
		return nil
	}
	q.extra = true
	b, ok := q.fab.Pool().Extra(n)
	if !ok {
		return nil // and none later
	}
	s.io.Buf = b
	if q.fab.Pool().Cancel(&q.waiter) {
		q.waiting = false
	} // else there is a buffer for the next command
	return b.B[:n]
}

// Unused implements qpair.Handler.
func (q *Queue) Unused(i int) { q.put(&q.slots[i].io.Buf) }

// Paired implements qpair.Handler.
func (q *Queue) Paired(first, second int) {
	f, s := &q.slots[first], &q.slots[second]
	if !f.io.Buf.IsZero() {
		s.io.Buf, f.io.Buf = f.io.Buf, bufpool.Buf{}
	}
}

// Paused implements qpair.Handler.
func (q *Queue) Paused() bool { return q.closing || q.t.Paused() }

// Admin implements qpair.Handler.
func (q *Queue) Admin(i int) {
	q.slots[i].noted = false
	q.admin = append(q.admin, i)
}

// Execute implements qpair.Handler.
//
// hot: 0 allocs
func (q *Queue) Execute(i int) {
	m, s := q.m.Slot(i), &q.slots[i]
	p := &m.Plan
	io := &s.io
	s.noted = false
	if p.KV {
		q.executeKV(i)
		return
	}
	io.Op, io.Offset, io.Len, io.Flags = p.Op, p.Offset, p.Len, 0
	if p.FUA {
		io.Flags |= ssd.FUA
	}
	if p.Unmap {
		io.Flags |= ssd.Unmap
	}
	io.Fetch = q.m.NeedsFetch(i)
	io.Account, io.Tenant, io.Credited = q.tenant.Account, q.tenant.Number, q.credits.On
	if p.Op == pipeline.DeallocateRanges {
		io.Len = int64(p.ToController)
		if !io.Fetch {
			if !q.setRanges(i) {
				return
			}
		}
	}
	s.startNS = q.seen.Load()
	q.inFlight.Add(1)
	q.toSSD(i, false)
}

// setRanges decodes a Dataset Management command's data; if that fails, or there
// is nothing to do, the command is responded to and false returned.
func (q *Queue) setRanges(i int) bool {
	m, s := q.m.Slot(i), &q.slots[i]
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
		q.put(&s.io.Buf)
		q.respond(i, status, 0)
	}
	return false
}

// Fetched implements qpair.Handler.
func (q *Queue) Fetched(i int, ok bool) {
	m := q.m.Slot(i)
	if q.qid == 0 || m.SQE.Opcode() == nvme.OpFabrics {
		if !ok {
			q.put(&q.slots[i].io.Buf)
			q.respond(i, nvme.TransientTransportError, 0)
			return
		}
		q.Admin(i)
		return
	}
	if m.Plan.KV {
		q.fetchedKV(i, ok)
		return
	}
	if q.m.Pair(i) >= 0 {
		second, complete := q.m.PairFetched(i)
		if !ok {
			q.slots[second].io.Err = fabric.ErrLost
		}
		if !complete {
			return
		}
		i, ok = second, q.slots[second].io.Err == nil
		m = q.m.Slot(i)
	}
	s := &q.slots[i]
	s.fetching = false
	s.io.Err = nil
	if !ok {
		s.io.Err = fabric.ErrLost
	} else if m.Plan.Op == pipeline.DeallocateRanges && !q.setRanges(i) {
		s.io.Err = errRanges
	}
	q.toSSD(i, true)
}

// errRanges: a Dataset Management command's ranges are wrong or empty; finish
// decodes them again for the status.
var errRanges = errors.New("no ranges to deallocate")

// Admitted implements owner.Sink.
func (q *Queue) Admitted(io *owner.IO) bool {
	return q.cfg.Outbox.push(&q.slots[io.Slot], ioAdmitted)
}

// Done implements owner.Sink.
func (q *Queue) Done(io *owner.IO) bool {
	return q.cfg.Outbox.push(&q.slots[io.Slot], ioDone)
}

// Kick implements owner.Sink and partition.Sink.
func (q *Queue) Kick() { q.t.Wake() }

// Finish goes on with a command that was in the outbox: its data is asked for, or it is answered. later:
// it is to be given to Later. The lock is held.
//
// hot: 0 allocs
func (q *Queue) Finish(s *Slot, now int64) (later bool) {
	i := int(s.io.Slot)
	switch s.news {
	case ioAdmitted:
		return !q.fetch(i, now)
	case kvMemory:
		return true
	case kvDone:
		return q.finishKV(i, now)
	default:
		q.finish(i, now)
	}
	return false
}

// Later goes on with a command that is now to be handed to its partition, or back to its SSD for its data
// cannot be had any more. The lock is held, Batches.Handing too unless that lock guards the Batches, and
// Batches.HandOver follows.
func (q *Queue) Later(s *Slot, now int64) {
	if i := int(s.io.Slot); s.news == kvMemory {
		q.hasMemory(i, now)
	} else {
		q.lose(i)
	}
}

// fetch asks the host for an admitted IO's data; false: it cannot be had any
// more. mu is held.
func (q *Queue) fetch(i int, now int64) bool {
	s := &q.slots[i]
	if q.closing || q.cfg.Closed() {
		return false
	}
	s.fetching, s.askedNS = true, now
	s.io.Err = nil
	if p := q.m.Pair(i); p >= 0 {
		q.slots[p].askedNS = now
		q.m.FetchPair(i, s.io.Buf.B)
	} else {
		q.m.RequestData(i, s.io.Buf.B[:q.m.Slot(i).Plan.ToController])
	}
	return true
}

// finish answers a command whose IO is done. mu is held.
//
// hot: 0 allocs
func (q *Queue) finish(i int, now int64) {
	m, s := q.m.Slot(i), &q.slots[i]
	p := &m.Plan
	io := &s.io
	op, bytes, start := io.Op, p.Len, s.startNS
	q.inFlight.Add(-1)
	s.startNS = 0
	if q.m.Full() {
		q.t.Resume()
	}
	ssdNumber := p.Namespace.SSD
	var result uint64
	if q.credits.On {
		result = uint64(q.tenant.Windows.Credit(ssdNumber, io.CreditUnits)) << 32
	}

	if io.Err == nil && op == pipeline.Read {
		q.usage.reads.Add(1)
		q.usage.readBytes.Add(uint64(bytes))
		q.observe(ssdNumber, op, bytes, now-start)
		if !q.closing && q.m.RespondData(i, io.Buf.B, result) {
			q.t.Lend(io.Buf)
			io.Buf = bufpool.Buf{}
			return
		}
		if q.closing {
			q.m.Respond(i, nvme.Success, 0)
		}
		q.put(&io.Buf)
		return
	}
	status := fabric.Status(op, io.Err)
	if io.Err == errRanges {
		_, status = p.AppendRanges(io.Buf.B, s.ranges[:0])
	}
	q.put(&io.Buf)
	switch {
	case op == pipeline.CompareWrite:
		q.finishPair(i, status, io, result)
	case io.Err == owner.ErrAborted: // Abort has answered already
		q.m.Respond(i, status, 0)
	default:
		q.respond(i, status, result)
	}
	if !status.OK() {
		bytes = 0
	}
	q.observe(ssdNumber, op, bytes, now-start)
	if status.OK() {
		if op == pipeline.Write || op == pipeline.CompareWrite {
			q.usage.writes.Add(1)
			q.usage.writtenBytes.Add(uint64(bytes))
		}
	} else if status.SCT() == nvme.SCTMedia && status.Code() != nvme.CompareFailure {
		q.usage.mediaErrors.Add(1)
	}
}

// finishPair answers both commands of a fused pair. mu is held.
func (q *Queue) finishPair(second int, status nvme.Status, io *owner.IO, result uint64) {
	first := q.m.Pair(second)
	if first < 0 {
		q.respond(second, status, result)
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
	q.respond(first, a, result)
	q.respond(second, b, result)
}

// respond answers a command without data and remembers a failure. mu is held.
func (q *Queue) respond(i int, status nvme.Status, result uint64) {
	if !status.OK() && !q.slots[i].noted {
		q.noteFailure(i, status)
	}
	q.m.Respond(i, status, result)
}

// noteFailure counts a failed command and remembers it for the Error Information
// log. mu is held.
func (q *Queue) noteFailure(i int, status nvme.Status) {
	if q.errors == nil {
		return // not connected yet
	}
	q.errors.Inc(status.SCT(), status.SC())
	if c := status.Code(); c == nvme.KeyDoesNotExist || c == nvme.KeyExists {
		return // what the host wanted to know; the log is for what has gone wrong
	}
	if len(q.failures) == cap(q.failures) {
		return // more at once than the log could hold
	}
	m := q.m.Slot(i)
	f := nvmeof.Failed{QID: q.qid, CID: m.SQE.CID(), Opcode: m.SQE.Opcode(), NSID: m.SQE.NSID(), Status: status}
	if ns := m.Plan.Namespace; ns != nil && ns.CSI == nvme.CSIKV {
		f.CSI = nvme.CSIKV
	} else if ns != nil {
		f.LBA = m.SQE.SLBA()
	}
	q.failures = append(q.failures, f)
}

// Failed implements qpair.Handler.
func (q *Queue) Failed(i int, status nvme.Status) {
	q.noteFailure(i, status)
	q.slots[i].noted = true // what becomes of it now is a consequence
}

// maxFailures is how many failed commands are remembered between two looks.
const maxFailures = 64

// RecordFailures hands failed commands to the controller's log, before the host can know and
// ask.
func (q *Queue) RecordFailures() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.RecordFailuresLocked()
}

// RecordFailuresLocked is RecordFailures with the lock held.
func (q *Queue) RecordFailuresLocked() {
	if len(q.failures) > 0 {
		q.fab.RecordErrors(q.ctrl, q.failures)
		q.failures = q.failures[:0]
	}
}

// observe counts one completed I/O. mu is held.
//
// hot: 0 allocs
func (q *Queue) observe(ssdNumber int, op pipeline.Op, bytes, durationNS int64) {
	t := q.series[ssdNumber][op]
	if t == nil {
		name := q.fab.SSD(ssdNumber).Device().Info().Name
		t = q.tel.IO(q.tenant.Name, name, op.String())
		q.series[ssdNumber][op] = t
	}
	if op == pipeline.Flush || op == pipeline.DeallocateRanges {
		bytes = 0
	}
	t.Observe(1, bytes, time.Duration(durationNS))
}

// put returns a buffer to the pool. mu is held.
func (q *Queue) put(b *bufpool.Buf) {
	if !b.IsZero() {
		if b.IsExtra() {
			q.extra = false
			q.t.Resume()
		}
		q.fab.Pool().Put(*b)
		*b = bufpool.Buf{}
	}
}
