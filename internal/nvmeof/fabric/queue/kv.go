package queue

import (
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/credit"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/partition"
)

// kvOps is how many operations partitions have.
const kvOps = int(kvstore.List) + 1

// kvNames are the operations' names in metrics.
var kvNames = [kvOps]string{kvstore.Get: "retrieve", kvstore.Put: "store", kvstore.Delete: "delete", kvstore.Exist: "exist", kvstore.List: "list"}

// kvSlot is what a slot has for commands for a partition.
type kvSlot struct {
	req    partition.Request
	waiter bufpool.Waiter
	// waiting: waiter is queued.
	waiting bool
	// room is for req.Room: memory of account for as much of a value as is wanted.
	room    func(length int) []byte
	wanted  int
	account *bufpool.Account
}

// makeKV makes the slots for commands for partitions; most queues never have any.
func (q *Queue) makeKV() {
	q.kv = make([]kvSlot, len(q.slots))
	for i := range q.kv {
		k, s := &q.kv[i], &q.slots[i]
		k.req.Sink, k.req.Slot = q, uint32(i)
		k.waiter.Wake = func() {
			if q.cfg.Outbox.push(s, kvMemory) {
				// Whoever has released the memory may hold locks that a turn takes: it runs on a
				// goroutine of its own. Buffers are short, not the processor.
				go q.t.Wake()
			}
		}
		k.room = func(length int) []byte { return q.room(s, k, length) }
	}
}

// room implements partition.Request.Room. A Retrieve has memory for its value once that is about to be read, and for no more than
// there is of it: hosts have buffers for the longest value, and many Retrieves under way.
func (q *Queue) room(s *Slot, k *kvSlot, length int) []byte {
	r, n := &k.req, min(length, k.wanted)
	if n <= len(r.Value) {
		return r.Value
	}
	if !s.io.Buf.IsZero() { // the value has become longer
		q.fab.Pool().Put(s.io.Buf)
	}
	var ok bool
	s.io.Buf, ok = q.fab.Pool().Get(k.account, n)
	r.Value = nil
	if ok {
		r.Value = s.io.Buf.B[:n]
	}
	return r.Value
}

// withPartition reports whether slot i's command is for a partition and in flight. mu is held.
func (q *Queue) withPartition(i int) bool { return q.slots[i].startNS != 0 && q.m.Slot(i).Plan.KV }

// executeKV begins a command for a partition. If it brings data it gets memory first, then the data is fetched, then it is handed
// over; a List gets its memory, too, and a Retrieve when it knows how much. A store admits its own I/Os; how much data
// waits for it is bounded by the tenant's share of the pool.
//
// hot: 0 allocs
func (q *Queue) executeKV(i int) {
	if q.kv == nil {
		q.makeKV()
	}
	m, s, k := q.m.Slot(i), &q.slots[i], &q.kv[i]
	r, sqe := &k.req, m.SQE.KV()
	r.Op, r.Condition = kvOp(m.SQE.Opcode(), sqe.Options())
	r.KeyLen = uint8(len(sqe.Key(&r.Key)))
	r.Value, r.Room = nil, nil
	s.startNS = q.seen.Load()
	q.inFlight.Add(1)
	switch n := int(max(m.Plan.ToController, m.Plan.AnswerBytes)); {
	case n == 0:
		q.toPartition(i)
	case r.Op == kvstore.Get:
		k.wanted, r.Room = n, k.room
		q.toPartition(i)
	case m.Plan.ToController > 0 && m.Inline():
		r.Value = m.Data
		q.toPartition(i)
	default:
		if q.askMemory(k, n) {
			q.hasMemory(i, s.startNS)
		}
	}
}

// askMemory reports whether n bytes are there for hasMemory; else they are waited for.
func (q *Queue) askMemory(k *kvSlot, n int) bool {
	k.waiter.Size = n
	k.waiting = !q.fab.Pool().GetOrWait(q.tenant.Account, &k.waiter)
	return !k.waiting
}

// kvOp is what a command asks of a partition.
func kvOp(opcode, options uint8) (kvstore.Op, kvstore.Condition) {
	switch opcode {
	case nvme.CmdKVStore:
		switch {
		case options&nvme.KVStoreMustExist != 0:
			return kvstore.Put, kvstore.IfPresent
		case options&nvme.KVStoreMustNotExist != 0:
			return kvstore.Put, kvstore.IfAbsent
		}
		return kvstore.Put, kvstore.Always
	case nvme.CmdKVDelete:
		return kvstore.Delete, kvstore.Always
	case nvme.CmdKVExist:
		return kvstore.Exist, kvstore.Always
	case nvme.CmdKVList:
		return kvstore.List, kvstore.Always
	}
	return kvstore.Get, kvstore.Always
}

// hasMemory goes on with a command whose memory is there. Handing and mu are held.
func (q *Queue) hasMemory(i int, now int64) {
	m, s, k := q.m.Slot(i), &q.slots[i], &q.kv[i]
	k.waiting = false
	s.io.Buf, k.waiter.Buf = k.waiter.Buf, bufpool.Buf{}
	switch {
	case q.closing || q.cfg.Closed():
		q.endKV(i, nvme.AbortRequested)
	case m.Plan.ToController > 0:
		s.fetching, s.askedNS = true, now
		q.m.RequestData(i, s.io.Buf.B[:m.Plan.ToController])
	default:
		k.req.Value = s.io.Buf.B[:k.waiter.Size]
		q.toPartition(i)
	}
}

// fetchedKV goes on with a command whose data is there. Handing and mu are held.
func (q *Queue) fetchedKV(i int, ok bool) {
	q.slots[i].fetching = false
	if !ok {
		q.endKV(i, nvme.TransientTransportError)
		return
	}
	q.kv[i].req.Value = q.m.Slot(i).Data
	q.toPartition(i)
}

// toPartition adds a command to its partition's batch, if the host may still have it done. Handing and mu
// are held.
func (q *Queue) toPartition(i int) {
	if status := q.m.Recheck(i); !status.OK() {
		q.endKV(i, status)
		return
	}
	n := q.m.Slot(i).Plan.Namespace.Partition
	if q.fab.Partition(n) == nil {
		q.endKV(i, nvme.NamespaceNotReady)
		return
	}
	r := &q.kv[i].req
	p := &q.m.Slot(i).Plan
	r.Units = credit.Units(int(max(p.ToController, p.ToHost)))
	r.Tenant, r.Credited = q.tenant.Number, q.credits.On // of now: the number of before may be another's already
	q.kv[i].account = q.tenant.Account
	q.cfg.Batches.request(n, r)
}

// endKV answers a command that does not get as far as its partition. mu is held.
func (q *Queue) endKV(i int, status nvme.Status) {
	s := &q.slots[i]
	q.inFlight.Add(-1)
	s.startNS, s.fetching = 0, false
	q.put(&s.io.Buf)
	q.respond(i, status, 0)
}

// abortKV ends a command that waits for memory and reports whether it did; one that is further on takes its
// course. mu is held.
func (q *Queue) abortKV(i int) bool {
	k := &q.kv[i]
	if !k.waiting || !q.fab.Pool().Cancel(&k.waiter) {
		return false
	}
	k.waiting = false
	q.endKV(i, nvme.AbortRequested)
	return true
}

// KVDone implements partition.Sink.
func (q *Queue) KVDone(r *partition.Request) bool {
	return q.cfg.Outbox.push(&q.slots[r.Slot], kvDone)
}

// finishKV answers a command that its partition is done with, or reports that it is to be done again, because there is memory now for its
// value. mu is held.
//
// hot: 0 allocs
func (q *Queue) finishKV(i int, now int64) (again bool) {
	m, s, k := q.m.Slot(i), &q.slots[i], &q.kv[i]
	r := &k.req
	if n := min(r.ValueLen, k.wanted); r.Room != nil && r.Status == kvstore.OK && len(r.Value) < n && !q.closing {
		q.put(&s.io.Buf) // what there is of it is too short
		r.Value, s.news = nil, kvMemory
		return q.askMemory(k, n)
	}
	start := s.startNS
	q.inFlight.Add(-1)
	s.startNS = 0
	if q.m.Full() {
		q.t.Resume()
	}
	ns := m.Plan.Namespace
	var result uint64
	if q.credits.On {
		result = uint64(q.tenant.Windows.Credit(ns.SSD, r.CreditUnits)) << 32
	}
	status := fabric.KVStatus(r.Op, r.Status)
	if m.Plan.MissingOK && r.Status == kvstore.NotFound {
		status = nvme.Success
	}
	answer, moved := r.Value[:0], int64(0)
	switch {
	case !status.OK():
		if status.SCT() == nvme.SCTMedia {
			q.usage.mediaErrors.Add(1)
		}
	case r.Op == kvstore.Put:
		moved = int64(len(r.Value))
		q.usage.writes.Add(1)
		q.usage.writtenBytes.Add(uint64(moved))
	case r.Op == kvstore.Get || r.Op == kvstore.List:
		answer = r.Value[:min(r.ValueLen, len(r.Value))]
		moved = int64(len(answer))
		q.usage.reads.Add(1)
		q.usage.readBytes.Add(uint64(moved))
		if r.Op == kvstore.Get {
			result |= uint64(uint32(r.ValueLen)) // the whole value's
		}
	}
	q.observeKV(ns, r.Op, moved, now-start)
	r.Value = nil
	if len(answer) > 0 && !q.closing {
		if q.m.RespondData(i, answer, result) {
			q.t.Lend(s.io.Buf)
			s.io.Buf = bufpool.Buf{}
			return false
		}
		q.put(&s.io.Buf)
		return false
	}
	q.put(&s.io.Buf)
	q.respond(i, status, result)
	return false
}

// observeKV counts one completed command for a partition. mu is held.
//
// hot: 0 allocs
func (q *Queue) observeKV(ns *nvmeof.Namespace, op kvstore.Op, bytes, durationNS int64) {
	t := q.kvSeries[ns.SSD][op]
	if t == nil {
		t = q.tel.IO(q.tenant.Name, q.fab.SSD(ns.SSD).Device().Info().Name, kvNames[op])
		q.kvSeries[ns.SSD][op] = t
	}
	t.Observe(1, bytes, time.Duration(durationNS))
}
