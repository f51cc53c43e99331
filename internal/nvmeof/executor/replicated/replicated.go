// Package replicated executes commands for the keys and values of partitions that are replicated: it makes
// replicas.Requests of them. Those of clients are Store, Retrieve, Delete and Exist, plain and extended, and Scan;
// those of other nodes are the messages of replication (docs/wire-extensions.md).
//
//	Command ──> memory ──> Batch ──> replicas.Replicas ──> crrs, kvstore
//	   ^                                     │
//	   └── NeedData, Done <── ReplicaDone ───┘
//
// A Retrieve gets a buffer for what is probably the length of its value, for hosts have buffers for the longest one. If
// that is too short it reads the value again.
//
// Of the commands for ranges of the hash space there is Scan, for a part of one range of the cluster. The others, and
// List, are refused: a partition has only some of the ranges, and what it says of its keys is not what the cluster has.
package replicated

import (
	"maps"
	"sync"
	"sync/atomic"

	"jbofd/internal/bufpool"
	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/executor/memory"
	"jbofd/internal/replicas"
	"jbofd/internal/turn"
	"jbofd/internal/uuid"
)

// Partition serves replicated namespaces: replicas.Replicas.
type Partition interface {
	// Submit hands the batch over and empties it; on return the Requests may be done already.
	Submit(b *replicas.Batch)
	// Again submits a Request again, from within its ReplicaDone.
	Again(q *replicas.Request)
	// Abort lets a Request end soon.
	Abort(q *replicas.Request)
}

var _ Partition = (*replicas.Replicas)(nil)

// Executor executes commands on replicated partitions.
type Executor struct {
	env  turn.Env
	pool *bufpool.Pool
	mu   sync.Mutex // changes of partitions
	// partitions are by the UUID of their namespaces.
	partitions atomic.Pointer[map[uuid.UUID]Partition]
}

var _ executor.Executor = (*Executor)(nil)

// New makes an executor without partitions; buffers come from the pool.
func New(env turn.Env, pool *bufpool.Pool) *Executor { return &Executor{env: env, pool: pool} }

// Set sets the partition that serves namespaces with a UUID; nil removes it: further commands end with Namespace Not
// Ready.
func (e *Executor) Set(id uuid.UUID, p Partition) {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := map[uuid.UUID]Partition{}
	if old := e.partitions.Load(); old != nil {
		maps.Copy(all, *old)
	}
	if all[id] = p; p == nil {
		delete(all, id)
	}
	e.partitions.Store(&all)
}

// get returns the partition with a UUID; nil if there is none.
//
// hot: 0 allocs
func (e *Executor) get(id uuid.UUID) Partition {
	if p := e.partitions.Load(); p != nil {
		return (*p)[id]
	}
	return nil
}

// The operations in metrics.
const (
	opRetrieve = iota
	opStore
	opDelete
	opExist
	opForward
	opMark
	opShip
	opFill
	opScan
	opOther
)

var ops = []string{opRetrieve: "retrieve", opStore: "store", opDelete: "delete", opExist: "exist",
	opForward: "forward", opMark: "mark", opShip: "ship", opFill: "fill", opScan: "scan", opOther: "other"}

// Ops implements executor.Executor.
func (e *Executor) Ops() []string { return ops }

// firstRead is how much of a value a Retrieve reads at least, if its host wants as much.
const firstRead = 4 << 10

// scanLooks is how many segments a Scan reads at most, so that it is short whatever its range is. Its host continues.
const scanLooks = 1024

// command is the Request of a slot.
type command struct {
	replicas.Request
	e    *Executor
	c    *executor.Command
	wait memory.Wait
	// wanted is how much of the value a Retrieve is to return at most, head is the size of the header in front of it.
	wanted, head int
	// wide: the completion has the version of the write.
	wide bool
}

var _ replicas.Sink = (*command)(nil)

// NewContext implements executor.Executor.
func (e *Executor) NewContext(c *executor.Command) any {
	k := &command{e: e, c: c}
	k.Sink = k
	k.wait.Init(e.env, e.pool, c)
	return k
}

// Abort implements executor.Executor. It takes out a command that waits for memory. One that its replica has may end
// soon, with what it has begun taking its course.
func (e *Executor) Abort(c *executor.Command) bool {
	k := c.Context.(*command)
	if k.wait.Stop() {
		return true
	}
	if p := e.get(c.Plan.Namespace.UUID); p != nil {
		p.Abort(&k.Request)
	}
	return false
}

// Kick implements replicas.Sink.
//
// The goroutine that drives the replicas sends their commands to other nodes. It also answers the host: to wake another
// goroutine for each few answers costs more than to send them.
func (k *command) Kick() { k.c.Port.Deliver() }

// ReplicaDone implements replicas.Sink.
//
// hot: 0 allocs
func (k *command) ReplicaDone(*replicas.Request) (kick bool) {
	c := k.c
	c.Fail(k.Status)
	c.Result = k.Result
	switch {
	case !k.Status.OK():
		if !k.wide && k.Kind != replicas.Node && k.Status.Code() != nvme.KVWrongView {
			c.Result = 0
		}
	case k.Kind == replicas.Node:
		c.AnswerBytes = k.Bytes
		if k.SQE.Opcode() == nvme.CmdKVShip {
			c.Result = uint64(k.ValueLen)
		}
		c.Bytes = int64(len(k.Value))
	case k.Kind == replicas.Write:
		c.Access, c.Bytes = executor.AccessWrite, int64(len(k.Value))
		if !k.wide {
			c.Result = 0
		}
	case k.Exists():
		c.Result = 0
	case k.Kind == replicas.Scan:
		c.Result, c.AnswerBytes = uint64(k.ValueLen), k.Bytes
		c.Access, c.Bytes = executor.AccessRead, int64(k.Bytes)
	default:
		return k.retrieved()
	}
	if k.Status.Code() == nvme.KeyDoesNotExist && c.Plan.MissingOK {
		c.Status = nvme.Success
	}
	k.Value = nil
	return c.Port.Done(c)
}

// Exists reports whether the command asks only whether a key exists.
func (k *command) Exists() bool { return k.c.Op == opExist }

// retrieved ends a Retrieve whose value was read, or reads it again if the buffer was too short.
func (k *command) retrieved() (kick bool) {
	c := k.c
	if n := min(k.ValueLen, k.wanted); n > len(k.Value) {
		k.Value = nil
		k.e.pool.Put(c.Buf)
		c.Buf = bufpool.Buf{}
		p := k.e.get(c.Plan.Namespace.UUID) // before Get: a command that waits is not this goroutine's any more
		ok, stopped := k.wait.Get(k.head + n)
		switch {
		case ok && p != nil:
			k.Value = c.Buf.B[k.head : k.head+n]
			p.Again(&k.Request)
			return false
		case ok:
			c.Fail(nvme.NamespaceNotReady)
		case stopped:
			c.Fail(nvme.AbortRequested)
		default:
			return false
		}
		return c.Port.Done(c)
	}
	c.Result = uint64(k.ValueLen)
	c.AnswerBytes = k.head + k.Bytes
	c.Access, c.Bytes = executor.AccessRead, int64(c.AnswerBytes)
	if k.head > 0 {
		h := (*nvme.KVReadHeader)(c.Buf.B)
		*h = nvme.KVReadHeader{}
		h.SetVersion(k.ObjectVersion)
		h.SetExpires(k.ObjectExpires)
	}
	k.Value = nil
	return c.Port.Done(c)
}

// batch collects Requests, a replicas.Batch for each partition.
type batch struct {
	e        *Executor
	requests []requests // by nvmeof.Namespace.Partition
	touched  []int      // those with something in it
	notices  executor.Notices
}

// requests are those for a partition.
type requests struct {
	replicas.Batch
	id uuid.UUID
}

// NewBatch implements executor.Executor.
func (e *Executor) NewBatch() executor.Batch { return &batch{e: e} }

// Begin implements executor.Batch.
//
// hot: 0 allocs
func (b *batch) Begin(c *executor.Command) {
	k := c.Context.(*command)
	k.forget()
	n, known := k.take()
	if !known {
		c.Op = opOther
		c.Fail(nvme.InvalidOpcode | nvme.DNR)
		b.notices.Done(c)
		return
	}
	switch p := c.Plan; {
	case n == 0:
		b.begin(k)
	case p.ToController > 0 && !c.Fetch:
		b.begin(k)
	default:
		ok, stopped := k.wait.Get(n)
		switch {
		case stopped:
			c.Fail(nvme.AbortRequested)
			b.notices.Done(c)
		case ok && c.Fetch:
			b.notices.NeedData(c)
		case ok:
			b.begin(k)
		}
	}
}

// forget resets what a command before has left.
func (k *command) forget() {
	k.Value, k.wanted, k.head, k.wide = nil, 0, 0, false
	k.Op, k.Condition, k.Version, k.ID = kvstore.Put, kvstore.Always, 0, kvstore.Identity{}
	k.Range = kvstore.Range{}
	k.Expires, k.ExpiresIn, k.KeepSeconds, k.Tombstone = 0, false, 0, false
	k.wait.Begin()
}

// take reads the command, and returns how long a buffer it needs.
func (k *command) take() (bytes int, known bool) {
	c, p, sqe := k.c, k.c.Plan, k.c.SQE.KV()
	k.SQE, k.Host, k.Tenant, k.Pass, k.Extent = c.SQE, c.Host, c.Tenant, c.Pass, p.Namespace.Extent
	k.Key = crrs.Key{}
	switch c.SQE.Opcode() {
	case nvme.CmdKVStore, nvme.CmdKVXStore, nvme.CmdKVDelete, nvme.CmdKVXDelete:
		k.Kind, c.Op = replicas.Write, opStore
		if op := c.SQE.Opcode(); op == nvme.CmdKVDelete || op == nvme.CmdKVXDelete {
			k.Op, c.Op = kvstore.Delete, opDelete
		}
		k.wide = p.Wide
		if c.SQE.Opcode() == nvme.CmdKVStore {
			switch o := sqe.Options(); {
			case o&nvme.KVStoreMustExist != 0:
				k.Condition = kvstore.IfPresent
			case o&nvme.KVStoreMustNotExist != 0:
				k.Condition = kvstore.IfAbsent
			}
		}
	case nvme.CmdKVRetrieve, nvme.CmdKVXRetrieve:
		k.Kind, c.Op = replicas.Read, opRetrieve
		if c.SQE.Opcode() == nvme.CmdKVXRetrieve {
			k.head = nvme.KVReadHeaderSize
		}
		k.wanted = int(p.AnswerBytes) - k.head
		bytes = k.head + min(k.wanted, firstRead-nvme.KVReadHeaderSize)
	case nvme.CmdKVExist:
		k.Kind, c.Op = replicas.Read, opExist
	case nvme.CmdKVScan:
		k.Kind, c.Op = replicas.Scan, opScan
		q := c.SQE.KVRange()
		k.Range = kvstore.Range{First: q.First(), From: q.First(), Last: q.Last(), Looks: scanLooks,
			FromKey: q.KeyLen() > 0}
		if q.KeyLen() == 0 {
			k.Range.Unix = q.Time()
		}
		bytes = int(p.AnswerBytes)
	case nvme.CmdKVForward, nvme.CmdKVDurable, nvme.CmdKVSync, nvme.CmdKVShip, nvme.CmdKVCompare, nvme.CmdKVFetch:
		k.Kind, c.Op = replicas.Node, nodeOp(c.SQE.Opcode())
		return int(max(p.ToController, p.AnswerBytes)), true
	default:
		return 0, false
	}
	k.Key.Len = uint8(len(sqe.Key(&k.Key.Bytes)))
	return max(bytes, int(p.ToController)), true
}

func nodeOp(opcode uint8) uint8 {
	switch opcode {
	case nvme.CmdKVForward:
		return opForward
	case nvme.CmdKVShip:
		return opShip
	case nvme.CmdKVCompare, nvme.CmdKVFetch:
		return opFill
	}
	return opMark
}

// begin adds a command that has its memory, and its data if the host brings any.
//
// hot: 0 allocs
func (b *batch) begin(k *command) {
	c, p := k.c, k.c.Plan
	switch {
	case k.Kind == replicas.Read:
		if !c.Buf.IsZero() {
			k.Value = c.Buf.B[k.head:min(len(c.Buf.B), k.head+k.wanted)]
		}
	case k.Kind == replicas.Node, k.Kind == replicas.Scan:
		k.Value = c.Buf.B[:max(p.ToController, p.AnswerBytes)]
	default:
		k.Value = c.Buf.B[:p.ToController]
		if p.Wide && !k.takeHeader() {
			b.notices.Done(c)
			return
		}
	}
	number := p.Namespace.Partition
	for len(b.requests) <= number {
		b.requests = append(b.requests, requests{})
	}
	to := &b.requests[number]
	if to.Empty() {
		b.touched = append(b.touched, number)
		to.id = p.Namespace.UUID
	}
	to.Add(&k.Request)
}

// takeHeader reads the header of an extended Store or Delete and leaves the value in Value. It returns false if the
// header is wrong; then the command has failed. KVIfNewer is: versions are given by the ChainHead alone.
//
// hot: 0 allocs
func (k *command) takeHeader() bool {
	c := k.c
	h := (*nvme.KVWriteHeader)(k.Value)
	if at, ok := h.Fault(c.SQE.Opcode()); !ok {
		c.Fail(nvme.KVInvalidHeader | nvme.DNR)
		c.Result = uint64(at)
		k.Value = nil
		return false
	}
	if h.Condition() == nvme.KVIfNewer {
		c.Fail(nvme.InvalidField | nvme.DNR)
		k.Value = nil
		return false
	}
	k.Value = k.Value[nvme.KVWriteHeaderSize:]
	k.Condition, k.Version, k.Expires = conditions[h.Condition()], h.Version(), h.Expires()
	f := h.Flags()
	k.Tombstone, k.ExpiresIn, k.KeepSeconds = f&nvme.KVTombstone != 0, f&nvme.KVRelative != 0, h.Keep()
	k.ID = kvstore.Identity{Client: h.Client(), Seq: h.Sequence(), Answered: h.Answered(), Retry: f&nvme.KVRetry != 0}
	return true
}

// conditions translates nvme.KVCondition.
var conditions = [...]kvstore.Condition{nvme.KVAlways: kvstore.Always, nvme.KVIfAbsent: kvstore.IfAbsent,
	nvme.KVIfPresent: kvstore.IfPresent, nvme.KVIfVersion: kvstore.IfVersion}

// DataReady implements executor.Batch.
//
// hot: 0 allocs
func (b *batch) DataReady(c *executor.Command) {
	if k := c.Context.(*command); c.Status.OK() {
		b.begin(k)
		return
	}
	c.Fail(c.Status)
	b.notices.Done(c)
}

// Submit implements executor.Batch.
//
// hot: 0 allocs
func (b *batch) Submit() {
	for _, n := range b.touched {
		to := &b.requests[n]
		if p := b.e.get(to.id); p != nil {
			p.Submit(&to.Batch)
		} else {
			to.Take(b.refuse)
		}
	}
	b.touched = b.touched[:0]
	b.notices.Send()
}

func (b *batch) refuse(q *replicas.Request) {
	c := q.Sink.(*command).c
	c.Fail(nvme.NamespaceNotReady)
	b.notices.Done(c)
}
