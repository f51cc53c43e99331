// Package kv executes key-value commands: it translates each command to a partition.Request, and the outcome of the
// Request to an NVMe status.
//
//	Command ──> memory ──> Batch ──> partition.Partition ──> kvstore.Store
//	   ^                                     │
//	   └── NeedData, Done <── KVDone ────────┘
//
// A Store whose data is not in its capsule, and a List, get a buffer before they go to their partition. A Retrieve gets
// its buffer only when the store knows how long the value is: a host offers a buffer for the longest value that there
// may be, and most values are shorter. If no memory is free then, the Retrieve waits for memory and asks the store
// again.
//
// The data of an extended key-value command begins with a header (docs/wire-extensions.md). That of a Store or Delete
// is parsed before the Request is submitted; that of a Retrieve is written when the Request is done.
package kv

import (
	"jbofd/internal/bufpool"
	"jbofd/internal/credit"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/executor/memory"
	"jbofd/internal/partition"
	"jbofd/internal/turn"
)

// Executor executes commands on partitions.
type Executor struct {
	env        turn.Env
	pool       *bufpool.Pool
	partitions table
}

var _ executor.Executor = (*Executor)(nil)

// New makes an executor without partitions; buffers come from the pool.
func New(env turn.Env, pool *bufpool.Pool) *Executor { return &Executor{env: env, pool: pool} }

// ops are the names of kvstore.Op.
var ops = []string{kvstore.Get: "retrieve", kvstore.Put: "store", kvstore.Delete: "delete", kvstore.Exist: "exist",
	kvstore.List: "list", kvstore.Scan: "scan", kvstore.CopyOut: "copy_out", kvstore.Count: "count",
	kvstore.Digest: "digest", kvstore.CopyIn: "copy_in", kvstore.Drop: "drop"}

// Ops implements executor.Executor.
func (e *Executor) Ops() []string { return ops }

// command is the Request of a slot.
type command struct {
	partition.Request
	e    *Executor
	c    *executor.Command
	wait memory.Wait
	// wanted is how many bytes of the value a Retrieve may return at most. head is the size of the header in front of
	// the value, 0 if there is none.
	wanted, head int
	// extended: fields are set that only some commands use. Begin calls forgetHeader before the slot's next command.
	extended bool
	// room is makeRoom, for Request.Room.
	room func(length int) []byte
}

var _ partition.Sink = (*command)(nil)

// NewContext implements executor.Executor.
func (e *Executor) NewContext(c *executor.Command) any {
	k := &command{e: e, c: c}
	k.Sink, k.Slot = k, c.Slot
	k.wait.Init(e.env, e.pool, c)
	k.room = k.makeRoom
	return k
}

// Abort implements executor.Executor. It takes out a command that waits for memory, or in its partition for the store.
func (e *Executor) Abort(c *executor.Command) bool {
	k := c.Context.(*command)
	if k.wait.Stop() {
		return true
	}
	return k.Request.Abort()
}

// makeRoom implements partition.Request.Room. If no memory is free it returns a Value that is too short, so that the
// Request ends without the value and KVDone waits for memory.
func (k *command) makeRoom(length int) []byte {
	n := min(length, k.wanted)
	if n <= len(k.Value) {
		return k.Value
	}
	k.dropBuffer() // the value has become longer
	k.getBuffer(n)
	return k.Value
}

// getBuffer takes memory for n bytes of the value and the header, and reports false if there is none.
func (k *command) getBuffer(n int) (ok bool) {
	if k.c.Buf, ok = k.e.pool.Get(k.c.Account, k.head+n); ok {
		k.Value = k.c.Buf.B[k.head : k.head+n]
	}
	return ok
}

func (k *command) dropBuffer() {
	if k.Value = nil; !k.c.Buf.IsZero() {
		k.e.pool.Put(k.c.Buf)
		k.c.Buf = bufpool.Buf{}
	}
}

// KVDone implements partition.Sink.
//
// hot: 0 allocs
func (k *command) KVDone(*partition.Request) (kick bool) {
	c := k.c
	if k.Op.IsRange() {
		return k.rangeDone()
	}
	if n := min(k.ValueLen, k.wanted); k.Room != nil && k.Status == kvstore.OK && !k.fits(n) {
		k.dropBuffer()
		switch ok, stopped := k.wait.Get(k.head + n); {
		case ok:
			return c.Port.NeedData(c) // DataReady follows, and asks the store again if the command is still valid
		case !stopped:
			return false
		}
		k.Status, k.Aborted = kvstore.Aborted, true
	}
	c.Status, c.Access, c.Bytes, c.AnswerBytes, c.Result, c.CreditUnits = k.status(), executor.AccessOther, 0, 0, 0,
		k.CreditUnits
	if c.Status.OK() {
		switch k.Op {
		case kvstore.Put:
			c.Access, c.Bytes = executor.AccessWrite, int64(len(k.Value))
		case kvstore.Get:
			c.Result = uint64(k.ValueLen) // the whole value's length
			k.putHeader()
			fallthrough
		case kvstore.List:
			c.AnswerBytes = k.head + min(k.ValueLen, len(k.Value))
			c.Access, c.Bytes = executor.AccessRead, int64(c.AnswerBytes)
		}
	}
	if c.Plan.Wide {
		c.Result = k.versionResult()
	}
	k.Value = nil
	return c.Port.Done(c)
}

// fits reports whether there is memory for n bytes of the value, and for the header. If only the header lacks memory,
// because the value is empty, it takes some.
func (k *command) fits(n int) bool {
	if k.head > 0 && n == 0 && k.c.Buf.IsZero() {
		return k.getBuffer(0)
	}
	return len(k.Value) >= n
}

// putHeader writes the header in front of the value that a Retrieve returns, if there is to be one.
//
// hot: 0 allocs
func (k *command) putHeader() {
	if k.head == 0 {
		return
	}
	h := (*nvme.KVReadHeader)(k.c.Buf.B)
	*h = nvme.KVReadHeader{}
	h.SetVersion(k.ObjectVersion)
	h.SetExpires(k.ObjectExpires)
}

// versionResult is the result of an extended Store or Delete: the version of the object, or 0 if the outcome has none.
func (k *command) versionResult() uint64 {
	switch k.Status {
	case kvstore.OK, kvstore.Exists, kvstore.VersionMismatch, kvstore.Superseded:
		return k.ObjectVersion
	}
	return 0
}

// takeHeader parses the header at the beginning of the data of an extended Store or Delete (nvme.KVWriteHeader). It
// sets the fields of the Request that come from the header, and Value to the data behind it, which is the value. If a
// field is wrong, takeHeader fails the command with KVInvalidHeader, whose result is the offset of the field, and
// returns false.
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
	k.Value, k.extended = k.Value[nvme.KVWriteHeaderSize:], true
	k.Condition, k.Version, k.Expires = conditions[h.Condition()], h.Version(), h.Expires()
	f := h.Flags()
	k.Tombstone, k.ExpiresIn, k.KeepSeconds = f&nvme.KVTombstone != 0, f&nvme.KVRelative != 0, h.Keep()
	k.ID = kvstore.Identity{Client: h.Client(), Seq: h.Sequence(), Answered: h.Answered(), Retry: f&nvme.KVRetry != 0}
	return true
}

// forgetHeader resets what comes from the header of a command.
func (k *command) forgetHeader() {
	k.extended, k.head = false, 0
	k.Version, k.Expires, k.ExpiresIn, k.Tombstone, k.KeepSeconds, k.ID = 0, 0, false, false, 0, kvstore.Identity{}
}

// conditions translates nvme.KVCondition.
var conditions = [...]kvstore.Condition{nvme.KVAlways: kvstore.Always, nvme.KVIfAbsent: kvstore.IfAbsent,
	nvme.KVIfPresent: kvstore.IfPresent, nvme.KVIfVersion: kvstore.IfVersion, nvme.KVIfNewer: kvstore.IfNewer}

// Kick implements partition.Sink.
func (k *command) Kick() { k.c.Port.Kick() }

// status is the NVMe status of how the Request has ended.
//
// Source: KV Command Set 1.0, figure 4.
func (k *command) status() nvme.Status {
	switch k.Status {
	case kvstore.OK:
		return nvme.Success
	case kvstore.NotFound:
		if k.c.Plan.MissingOK {
			return nvme.Success
		}
		return nvme.KeyDoesNotExist | nvme.DNR
	case kvstore.Exists:
		return nvme.KeyExists | nvme.DNR
	case kvstore.VersionMismatch:
		return nvme.KVVersionMismatch | nvme.DNR
	case kvstore.Superseded:
		return nvme.KVSuperseded | nvme.DNR
	case kvstore.Indeterminate:
		return nvme.KVIndeterminate | nvme.DNR
	case kvstore.CapacityExceeded:
		return nvme.CapacityExceeded | nvme.DNR
	case kvstore.InvalidKey:
		return nvme.InvalidKeySize | nvme.DNR
	case kvstore.InvalidValue:
		return nvme.InvalidValueSize | nvme.DNR
	case kvstore.Aborted:
		switch {
		case k.Aborted:
			return nvme.AbortRequested
		case k.Extent.Stale():
			return nvme.InvalidNamespaceOrFormat | nvme.DNR // as if the command had come after the removal
		}
		return nvme.AbortedSQDeletion // its Pass is stale
	case kvstore.NoMemory:
		return nvme.InternalError // without DNR: memory may be free again by the next attempt
	case kvstore.Corrupt:
		return nvme.UnrecoveredReadError | nvme.DNR
	case kvstore.DeviceError:
		if k.Op == kvstore.Put || k.Op == kvstore.Delete {
			return nvme.WriteFault | nvme.DNR
		}
		return nvme.UnrecoveredReadError | nvme.DNR
	}
	return nvme.InternalError | nvme.DNR
}

// operation is what a command asks of a partition.
func operation(opcode, options uint8) (kvstore.Op, kvstore.Condition) {
	switch opcode {
	case nvme.CmdKVStore:
		switch {
		case options&nvme.KVStoreMustExist != 0:
			return kvstore.Put, kvstore.IfPresent
		case options&nvme.KVStoreMustNotExist != 0:
			return kvstore.Put, kvstore.IfAbsent
		}
		return kvstore.Put, kvstore.Always
	case nvme.CmdKVXStore: // its header has the condition
		return kvstore.Put, kvstore.Always
	case nvme.CmdKVDelete, nvme.CmdKVXDelete:
		return kvstore.Delete, kvstore.Always
	case nvme.CmdKVExist:
		return kvstore.Exist, kvstore.Always
	case nvme.CmdKVList:
		return kvstore.List, kvstore.Always
	case nvme.CmdKVScan, nvme.CmdKVCopyOut, nvme.CmdKVCount, nvme.CmdKVDigest, nvme.CmdKVCopyIn, nvme.CmdKVDrop:
		return rangeOperation(opcode), kvstore.Always
	}
	return kvstore.Get, kvstore.Always
}

// batch collects Requests, a partition.Batch for each partition.
type batch struct {
	e        *Executor
	requests []partition.Batch // by partition
	touched  []int             // partitions with something in requests
	notices  executor.Notices
}

// NewBatch implements executor.Executor.
func (e *Executor) NewBatch() executor.Batch { return &batch{e: e} }

// Begin implements executor.Batch.
//
// hot: 0 allocs
func (b *batch) Begin(c *executor.Command) {
	k, p, sqe := c.Context.(*command), c.Plan, c.SQE.KV()
	k.Op, k.Condition = operation(c.SQE.Opcode(), sqe.Options())
	k.KeyLen = uint8(len(sqe.Key(&k.Key)))
	k.Value, k.Room, k.Pass, k.Extent = nil, nil, c.Pass, c.Plan.Namespace.Extent
	k.wait.Begin()
	if k.extended { // by the previous command of this slot
		k.forgetHeader()
	}
	if k.Op.IsRange() {
		k.takeRange()
	}
	c.Op = uint8(k.Op)
	switch n := needs(p); {
	case n == 0:
		b.add(k)
	case k.Op == kvstore.Get:
		if c.SQE.Opcode() == nvme.CmdKVXRetrieve {
			k.head, k.extended = nvme.KVReadHeaderSize, true
		}
		k.wanted, k.Room = n-k.head, k.room
		b.add(k)
	case p.ToController > 0 && !c.Fetch:
		b.begin(k, n)
	default:
		ok, stopped := k.wait.Get(n)
		switch {
		case stopped:
			c.Fail(nvme.AbortRequested)
			b.notices.Done(c)
		case ok && c.Fetch:
			b.notices.NeedData(c)
		case ok:
			b.begin(k, n)
		}
	}
}

// begin adds a command that has a buffer of n bytes to the batch of its partition. If the host sends data, the buffer
// has it. Wide commands with data are extended Stores and Deletes: they end here if their header is wrong.
//
// hot: 0 allocs
func (b *batch) begin(k *command, n int) {
	k.Value = k.c.Buf.B[k.head:n]
	if k.c.Plan.Wide && !k.takeHeader() {
		b.notices.Done(k.c)
		return
	}
	b.add(k)
}

// needs is the length of the buffer that a command needs, 0 if none. It is the most that a Retrieve may need.
func needs(p *nvmeof.Plan) int { return int(max(p.ToController, p.AnswerBytes)) }

// DataReady implements executor.Batch.
//
// hot: 0 allocs
func (b *batch) DataReady(c *executor.Command) {
	if k := c.Context.(*command); c.Status.OK() {
		b.begin(k, k.wait.Size())
		return
	}
	c.Fail(c.Status)
	b.notices.Done(c)
}

// add puts a command into the batch of its partition. It allocates when there are more partitions than before.
//
// hot: 0 allocs
func (b *batch) add(k *command) {
	p := k.c.Plan
	k.Units = credit.Units(int(max(p.ToController, p.ToHost)))
	k.Tenant, k.Credited = k.c.Tenant, k.c.Credited
	for len(b.requests) <= p.Namespace.Partition {
		b.requests = append(b.requests, partition.Batch{})
	}
	to := &b.requests[p.Namespace.Partition]
	if to.Empty() {
		b.touched = append(b.touched, p.Namespace.Partition)
	}
	to.Add(&k.Request)
}

// Submit implements executor.Batch.
//
// hot: 0 allocs
func (b *batch) Submit() {
	for _, n := range b.touched {
		if p := b.e.partitions.get(n); p != nil {
			p.Submit(&b.requests[n])
			continue
		}
		for r := b.requests[n].Take(); r != nil; r = r.Next {
			k := r.Sink.(*command)
			k.c.Fail(nvme.NamespaceNotReady)
			b.notices.Done(k.c)
		}
	}
	b.touched = b.touched[:0]
	b.notices.Send()
}
