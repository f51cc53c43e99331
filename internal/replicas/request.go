package replicas

import (
	"sync/atomic"

	"jbofd/internal/crrs"
	"jbofd/internal/fence"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replica"
	"jbofd/internal/tenant"
	"jbofd/internal/turn"
)

// Kind is what a Request is.
type Kind uint8

// Kinds of Requests.
const (
	// Write and Read are a client's.
	Write Kind = iota
	Read
	// Node is a command of another node.
	Node
	// Scan is a client's, of a part of one range.
	Scan
)

// Sink is told when a Request is done. Its methods are called by whichever goroutine drives the Replicas: they hand the
// Request on and return.
type Sink interface {
	// ReplicaDone: the Request is over. It reports whether the sink must be kicked once the batch is over.
	ReplicaDone(q *Request) (kick bool)
	// Kick follows a batch of calls of which one asked for it.
	Kick()
}

// Request is a command to the replicas of a partition. Its submitter uses it again and again; between Submit and
// ReplicaDone it belongs to the Replicas, as does the memory of Value.
type Request struct {
	Kind Kind
	// Key is that of a Write or a Read, or the one behind which a Scan of Range begins.
	Key   crrs.Key
	Range kvstore.Range
	// Op, Condition, Version, ID, Expires and Tombstone are those of a Write, as replica.Write has them, but for
	// ExpiresIn: Expires is in seconds from now on; KeepSeconds is for how long the ID is kept.
	Op          kvstore.Op
	Condition   kvstore.Condition
	Version     uint64
	ID          kvstore.Identity
	Expires     uint32
	ExpiresIn   bool
	KeepSeconds uint32
	Tombstone   bool
	// Value is the value of a Write, which is copied; memory for that of a Read, or for what a Scan finds; or the data
	// of a Node's command, in the direction of its opcode.
	Value []byte
	// SQE is the command of a Node, which is valid (nvme.KVReplicaSQE.Valid), Host the NQN under which it has come.
	SQE  *nvme.SQE
	Host string
	// Tenant pays.
	Tenant tenant.ID
	// Pass says in whose name the Request is made, Extent is the right of the namespace: if one is stale the Request is
	// not begun.
	Pass, Extent fence.Pass
	Sink         Sink

	// Status is how it ended. Result is that of the completion of a Node's command; of a Write the version; with
	// nvme.KVWrongView the epoch of the chain here.
	Status nvme.Status
	Result uint64
	// ObjectVersion, ObjectExpires and ValueLen are those of a Read that is OK, or of a Ship: the length is that of the
	// whole value. Bytes is how much of Value goes to the host.
	ObjectVersion uint64
	ObjectExpires uint32
	ValueLen      int
	Bytes         int

	node turn.Node[Request]
	scan replica.Scan
	// use counts the times that it was submitted, so that a late Abort does not concern the next use.
	use atomic.Uint32
	// m is the replica that has it, handle its place among the requests.
	m      *member
	handle uint32
}

// Batch collects Requests for one Submit. The zero Batch is empty.
type Batch struct{ chain turn.Chain[Request] }

// Add appends a Request.
//
// hot: 0 allocs
func (b *Batch) Add(q *Request) {
	q.node.Item = q
	q.use.Add(1)
	b.chain.Add(&q.node)
}

// Empty reports whether there is nothing in the Batch.
func (b *Batch) Empty() bool { return b.chain.Empty() }

// Take empties the Batch and calls f with each Request, in order.
func (b *Batch) Take(f func(q *Request)) {
	for n := b.chain.Take(); n != nil; {
		q := n.Item
		n = n.Detach()
		f(q)
	}
}

// Again submits a Request again from within its ReplicaDone.
func (g *Replicas) Again(q *Request) {
	q.use.Add(1)
	g.inbox.Push(&q.node) // the driver's owner looks into its mailboxes again
}

// abort is a Request that is to end soon.
type abort struct {
	q   *Request
	use uint32
}

// Abort lets a Request end soon, because its host has aborted it or is gone: a Forward that is kept until its write is
// committed, a client's write, which ends with Command Interrupted, and what another node has asked for. What they have
// begun runs to completion: a write may be committed later. Reads of clients end soon anyway, and their memory is in
// use. From any goroutine, also with locks held that Sinks take.
func (g *Replicas) Abort(q *Request) {
	if q.Kind == Write || q.Kind == Node {
		g.aborts.Put(abort{q, q.use.Load()})
		g.driver.RunLater()
	}
}

// takeAbort ends a Request that has not ended meanwhile.
func (g *Replicas) takeAbort(a abort) {
	q := a.q
	if q.use.Load() != a.use || q.m == nil || g.closed {
		return
	}
	switch {
	case q.Kind == Write:
		g.abandon(q.handle, nvme.CommandInterrupted)
	case q.SQE.Opcode() == nvme.CmdKVForward:
		g.touch(q.m).Abort(uint64(q.handle))
	case asks(q.SQE.Opcode()):
		g.giveUpAsk(q.handle, nvme.AbortRequested)
	}
}

// hold gives a Request a handle.
func (g *Replicas) hold(q *Request, m *member) uint32 {
	n := len(g.freeRequests) - 1
	if n < 0 {
		g.requests, g.asks = append(g.requests, nil), append(g.asks, nil)
		g.freeRequests = append(g.freeRequests, uint32(len(g.requests)-1))
		n++
	}
	h := g.freeRequests[n]
	g.freeRequests = g.freeRequests[:n]
	g.requests[h] = q
	q.m, q.handle = m, h
	return h
}

// begin takes a Request to its replica.
//
// hot: 0 allocs
func (g *Replicas) begin(q *Request) {
	q.m, q.Result, q.Bytes, q.ValueLen, q.ObjectVersion, q.ObjectExpires = nil, 0, 0, 0, 0, 0
	m, from := g.find(q)
	switch {
	case q.Extent.Stale():
		q.Status = nvme.InvalidNamespaceOrFormat | nvme.DNR // as if it had come after the removal
	case q.Pass.StaleAt(g.envNS):
		q.Status = nvme.AbortedSQDeletion
	case g.closed:
		q.Status = nvme.NamespaceNotReady
	case q.Kind == Scan && g.active != nil && g.active.RangeOf(g.scanFrom(q)) != g.active.RangeOf(q.Range.Last):
		q.Status = nvme.InvalidField | nvme.DNR
	case q.Kind == Write && len(q.Value) > g.cfg.MaxValueBytes: // this node would take it, others might not
		q.Status = nvme.InvalidValueSize | nvme.DNR
	case m == nil:
		q.Status = nvme.KVWrongView
	default:
		q.Status = nvme.Success
	}
	if !q.Status.OK() {
		g.done(q)
		return
	}
	if q.Kind == Node && asks(q.SQE.Opcode()) {
		g.beginAsk(q, m, from)
		return
	}
	h := g.hold(q, m)
	r := g.touch(m)
	switch q.Kind {
	case Write:
		w := replica.Write{Op: q.Op, Condition: q.Condition, Version: q.Version, Key: q.Key, Value: q.Value, ID: q.ID,
			Expires: q.Expires, Tombstone: q.Tombstone, Tenant: q.Tenant, Tag: uint64(h)}
		if q.ExpiresIn {
			w.Expires = g.later(q.Expires)
		}
		if w.ID.Client != 0 {
			w.ID.KeepUntil = g.later(q.KeepSeconds)
		}
		r.Write(&w)
	case Read:
		r.Read(q.Key, q.Value, q.Tenant, uint64(h))
	case Scan:
		q.scan = replica.Scan{Range: q.Range, Key: q.Key, Value: q.Value, Tenant: q.Tenant, Tag: uint64(h)}
		r.Scan(&q.scan)
	default:
		r.Receive(from, uint64(h), q.SQE, q.Value, q.Tenant)
	}
}

// find returns the replica that a Request is for, nil if there is none, and whom the command of a node is from.
func (g *Replicas) find(q *Request) (m *member, from crrs.Peer) {
	if g.active == nil {
		return nil, crrs.NoPeer
	}
	if q.Kind == Scan {
		return g.ranges[g.active.RangeOf(g.scanFrom(q))], crrs.NoPeer
	}
	if q.Kind != Node {
		key := q.Key.Bytes[:q.Key.Len]
		return g.ranges[g.active.RangeOf(replica.Position(g.cfg.Store.HashSeed(), key))], crrs.NoPeer
	}
	k := q.SQE.KVReplica()
	if int(k.Range()) >= len(g.ranges) {
		return nil, crrs.NoPeer
	}
	return g.ranges[k.Range()], g.peerOf(q.Host, k)
}

// scanFrom is the position at which a Scan begins.
func (g *Replicas) scanFrom(q *Request) uint64 {
	if q.Range.FromKey {
		return replica.Position(g.cfg.Store.HashSeed(), q.Key.Bytes[:q.Key.Len])
	}
	return q.Range.From
}

// respond ends the command of another node.
//
// hot: 0 allocs
func (g *Replicas) respond(a *replica.Response) {
	h := uint32(a.Handle)
	q, value := g.requests[h], g.takeAsk(h)
	if q == nil { // it was answered before
		g.askEnded(h)
		g.freeRequests = append(g.freeRequests, h)
		return
	}
	if a.Status.OK() {
		q.ObjectVersion, q.ObjectExpires, q.ValueLen = a.Version, a.Expires, a.ValueLen
		switch q.SQE.Opcode() {
		case nvme.CmdKVShip:
			h := (*nvme.KVReadHeader)(q.Value)
			*h = nvme.KVReadHeader{}
			h.SetVersion(a.Version)
			h.SetExpires(a.Expires)
			copy(q.Value[nvme.KVReadHeaderSize:], value[nvme.KVReadHeaderSize:][:min(a.ValueLen,
				len(q.Value)-nvme.KVReadHeaderSize)])
			q.Bytes = nvme.KVReadHeaderSize + a.ValueLen
		case nvme.CmdKVCompare, nvme.CmdKVFetch:
			q.Bytes = copy(q.Value, a.Data)
		}
	}
	g.askEnded(h)
	g.end(h, a.Status, a.Result)
}

// reply ends a client's Write, Read or Scan.
//
// hot: 0 allocs
func (g *Replicas) reply(m *member, p *replica.Reply) {
	q := g.requests[p.Tag]
	if q == nil { // it was aborted
		g.freeRequests = append(g.freeRequests, uint32(p.Tag))
		return
	}
	st, result := status(p)
	if q.Kind == Scan && p.Status == crrs.NotFound {
		if st = nvme.NamespaceNotReady; p.Refusal == kvstore.InvalidValue {
			st = nvme.InvalidField | nvme.DNR
		}
	}
	if st.OK() && q.Kind != Write {
		q.ObjectVersion, q.ObjectExpires, q.ValueLen = p.Version, p.Expires, p.ValueLen
		q.Bytes = min(p.ValueLen, len(q.Value))
	}
	if st.Code() == nvme.KVWrongView {
		result = m.r.Role().Epoch
	}
	g.end(uint32(p.Tag), st, result)
}

// end ends a Request and frees its handle.
func (g *Replicas) end(handle uint32, st nvme.Status, result uint64) {
	q := g.requests[handle]
	g.requests[handle] = nil
	g.freeRequests = append(g.freeRequests, handle)
	q.Status, q.Result = st, result
	g.done(q)
}

// abandon ends a Request early. Its handle stays reserved until the replica has answered it.
func (g *Replicas) abandon(handle uint32, st nvme.Status) {
	q := g.requests[handle]
	g.requests[handle] = nil
	q.Status, q.Result = st, 0
	g.done(q)
}

// abandonAll abandons those Requests for which f returns true.
func (g *Replicas) abandonAll(f func(q *Request) bool) {
	for handle, q := range g.requests {
		if q == nil || !f(q) {
			continue
		}
		st := nvme.NamespaceNotReady
		if q.Kind == Write {
			st = nvme.CommandInterrupted // it may be committed
		}
		g.abandon(uint32(handle), st)
	}
}

// lookQuiet wakes Close when the store and other nodes have no requests of the Replicas any more.
func (g *Replicas) lookQuiet() {
	if g.quiet != nil && g.atStore == 0 && g.atPeers == 0 {
		close(g.quiet)
		g.quiet = nil
	}
}

func (g *Replicas) done(q *Request) {
	q.m = nil
	q.use.Add(1)
	if s := q.Sink; s.ReplicaDone(q) {
		g.driver.Kick(s)
	}
}

// status is the NVMe status of a reply, and the result of the completion.
//
// An unknown outcome is Command Interrupted without DNR. If the host repeats the command with its identity, it learns
// the outcome; without an identity the write may be done twice.
func status(p *replica.Reply) (st nvme.Status, result uint64) {
	switch p.Status {
	case crrs.OK:
		return nvme.Success, p.Version
	case crrs.NotFound:
		return nvme.KeyDoesNotExist | nvme.DNR, 0
	case crrs.WrongView:
		return nvme.KVWrongView, 0
	case crrs.Unavailable:
		return nvme.NamespaceNotReady, 0
	case crrs.Unknown:
		return nvme.CommandInterrupted, 0
	case crrs.Unreadable:
		return nvme.UnrecoveredReadError | nvme.DNR, 0
	case crrs.Failing:
		return nvme.UnrecoveredReadError, 0
	}
	switch p.Refusal {
	case kvstore.NotFound:
		return nvme.KeyDoesNotExist | nvme.DNR, 0
	case kvstore.Exists:
		return nvme.KeyExists | nvme.DNR, p.Version
	case kvstore.VersionMismatch:
		return nvme.KVVersionMismatch | nvme.DNR, p.Version
	case kvstore.Superseded:
		return nvme.KVSuperseded | nvme.DNR, p.Version
	case kvstore.Indeterminate:
		return nvme.KVIndeterminate | nvme.DNR, 0
	case kvstore.CapacityExceeded:
		return nvme.CapacityExceeded | nvme.DNR, 0
	case kvstore.InvalidValue:
		return nvme.InvalidValueSize | nvme.DNR, 0
	case kvstore.Corrupt:
		return nvme.UnrecoveredReadError | nvme.DNR, 0
	}
	return nvme.InternalError | nvme.DNR, 0
}
