// Package replica carries out what a crrs.Port asks for: it is the machine between clients, the store of a partition
// and other nodes, for one replica of a range. It has no I/O: its driver gives it commands of clients and of other
// nodes, the replies of the store, and the completions of commands that it has sent, and carries out its Actions.
//
//	clients ── Write, Read ──> ┌─────────┐ ──── Requests ──> kvstore.Store of the partition
//	clients <─── Replies ───── │ Replica │ <─── Stored ──────
//	                           │  crrs   │
//	other nodes ── Receive ──> │  .Port  │ ──── Commands ──> other nodes
//	other nodes <─ Responses ─ └─────────┘ <─── Completed, Failed ───
//
// Values of writes are in memory of the replica (Memory), because the command that has brought one may end before the
// write does. Batches of a pass are in buffers of their own, as many as may be under way.
package replica

import (
	"math"

	"jbofd/internal/crrs"
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore"
	"jbofd/internal/list"
	"jbofd/internal/nvme"
	"jbofd/internal/slab"
)

// Config describes a Replica.
type Config struct {
	// PortConfig is that of the range.
	crrs.PortConfig
	// HashSeed is that of the stores of the cluster, by which keys have positions.
	HashSeed uint64
	// Tables are those of the partition's replicas; nil: some of its own.
	Tables *Tables
	// Memory is that of the partition's replicas.
	Memory *Memory
	// Batches are the partition's. RestoreShare is for passes of ranges that have fewer copies than they are to have,
	// FillShare for the others: the member is to take the place of one that still serves. 0: 100.
	Batches                 *Batches
	RestoreShare, FillShare Share
	// TombstoneSeconds is how long the tombstone of a Delete lasts at least, by the node's own time of day:
	// crrs.MinTombstoneNS or more.
	TombstoneSeconds uint32
	// Alloc returns memory for values that cannot wait for others to be released.
	Alloc func(n int) ([]byte, error)
}

// Replica is a replica of a range. Only one goroutine at a time may use it.
//
// Its driver calls methods in any order and then Turn. Before them it calls SetTime, with a time that was read after
// what it reports has happened: authority is looked at by that time.
type Replica struct {
	cfg  Config
	port *crrs.Port
	// work is what the next Turn is to do; nil: nothing yet.
	*work
	now  int64
	wall uint32
	// place is the number of members downstream of the replica. tooFull: its partition has no room for copies.
	place   int
	tooFull bool

	// clients are requests of clients that have no Reply, or whose Reply has not been returned, by their tag in crrs.
	clients slab.Table[client]
	// values is the memory of values, by Mem less 1. The Mems behind it are those of fetched.
	values slab.Table[value]
	// starved: a Forward was dropped for want of memory. It is asked for at starvedNS, or as soon as there is some.
	starved   bool
	starvedNS int64
	// ops are requests to the store. later are those that are to be tried again at laterNS.
	ops     slab.Table[storeOp]
	later   list.List
	laterNS int64
	// filled are the buffers of batches of Responses that the next Turn returns, sent those of the last one: they are
	// free in the next, which is soon, because other replicas may wait for them.
	filled, sent []int32
	// copying are CopyOuts that wait for a buffer.
	copying list.List
	// uncommitted are CopyOuts that have writes which are not committed yet.
	uncommitted list.List
	// asked are what was asked for by Commands under way, by their tags.
	asked slab.Table[asked]
	// repeats are the nodes to which to repeat what was lost, at repeatNS.
	repeats  []crrs.Peer
	repeatNS int64
	// short: the range has fewer copies than it is to have. bufferNS is when there may be a buffer for what is to be
	// fetched; 0: nothing waits for one.
	short    bool
	bufferNS int64
	damaged  bool
	revival  revival
	tables   *Tables
}

// client is a request of a client.
type client struct {
	tag  uint64
	cond kvstore.Condition
	// version is the one that the condition is about.
	version uint64
	retry   bool
	// idle: a Delete that is done, and has deleted nothing, if the key does not exist.
	idle bool
	scan *Scan
}

// asked is what a command to another node asks for.
type asked struct {
	opcode uint8
	buffer int32 // of a Fetch
	part   crrs.Part
	header nvme.KVForwardHeader // of a Forward without a value
}

// value is the memory of a value: a block, or memory beyond that of the partition.
type value struct {
	block
	spare []byte
}

const (
	noBuffer = -1
	// retryNS is the delay before a store request that failed for lack of memory, or a message that was lost, is
	// repeated; retryFullNS that before a store request that failed for lack of room is.
	retryNS     = 10e6
	retryFullNS = 100e6
)

// Reply answers a Write, a Read or a Scan.
type Reply struct {
	Tag    uint64
	Status crrs.Status
	// Refusal is why the store has refused a write, with crrs.Refused, or a Scan, with crrs.NotFound.
	Refusal kvstore.Status
	// Version is that of the write or of the value. With a Refusal it is the one that the store has told.
	Version uint64
	// ValueLen is the length of the value that a Read has found; as much as there was memory for is there. Of a Scan it
	// is that of the KVRange.
	ValueLen int
	// Expires is when that value expires, in unix seconds; 0: never.
	Expires uint32
}

// Command is a command for another node.
type Command struct {
	crrs.Command
	// Data is what a Forward sends: its header and value. Buf is memory for the data of the completion of a Fetch. They
	// belong to the driver until Completed or Failed.
	Data, Buf []byte
}

// Response answers a command of another node. Its data does not change before the next Turn.
type Response struct {
	Handle uint64
	Status nvme.Status
	// Result is DW0 and DW1.
	Result uint64
	// Version, Expires and ValueLen are those of a Ship, whose value is in the memory that came with it.
	Version  uint64
	Expires  uint32
	ValueLen int
	// Data is that of a Compare or a Fetch.
	Data []byte
}

// Actions are what a Turn wants done. The driver empties the slices.
type Actions struct {
	// Requests are for the partition's store, in any order. Each must be answered by Stored exactly once.
	Requests []kvstore.Request
	// Commands are for other nodes. Completed or Failed must be called exactly once for each.
	Commands  []Command
	Responses []Response
	// Replies may be passed on at once.
	Replies []Reply
	// Repairs are what has become of things that the store could not read.
	Repairs []crrs.RepairEvent
	// Epoch is the greatest one that another node has told of, if it is newer than that of the role.
	Epoch uint64
	// WakeNS is when Turn must be called at the latest; 0: never.
	WakeNS int64
}

// New returns a Replica that is no member of its chain yet.
func New(cfg Config) *Replica {
	if cfg.RestoreShare == 0 {
		cfg.RestoreShare = 100
	}
	if cfg.FillShare == 0 {
		cfg.FillShare = 100
	}
	t := cfg.Tables
	if t == nil {
		t = NewTables(4*cfg.Window, 2*cfg.Reads)
	}
	invariants.Check(int64(cfg.TombstoneSeconds)*1e9 >= crrs.MinTombstoneNS,
		"replica: tombstones that may be over before a batch is stored")
	cfg.PortConfig.Tables = t.crrs
	r := &Replica{cfg: cfg, port: crrs.NewPort(cfg.PortConfig), tables: t, later: list.None, copying: list.None,
		uncommitted: list.None}
	r.clients.Init(t.clients, math.MaxInt32)
	r.values.Init(t.values, 2*cfg.Window+cfg.Requests)
	r.ops.Init(t.ops, 2*cfg.Window+cfg.Reads+2*cfg.Parts+cfg.Served+1)
	r.asked.Init(t.asked, cfg.Requests)
	return r
}

// SetTime tells the time of the node's clock, and the time of day in unix seconds.
func (r *Replica) SetTime(now int64, wall uint32) {
	r.now, r.wall = now, wall
	r.port.Replica().Advance(now)
}

// Extend sets the time until which the replica may serve.
func (r *Replica) Extend(until int64) { r.port.Replica().Extend(until) }

// Withdraw ends the authority, before a view takes the range from the replica.
func (r *Replica) Withdraw() { r.port.Replica().Withdraw() }

// Yield, Yields and Yielded are those of crrs.Replica. Turn takes a Yield into account.
func (r *Replica) Yield(until int64) { r.port.Replica().Yield(until) }

// Yields reports whether writes that have not begun are held back.
func (r *Replica) Yields() bool { return r.port.Replica().Yields() }

// Yielded reports whether they are, and no other ones are under way.
func (r *Replica) Yielded() bool { return r.port.Replica().Yielded() }

// SetFull sets whether the partition is nearly full: then the ChainHead refuses Puts of clients. A replica downstream
// of it stores all writes that have begun, so that its partition needs some room then. tooFull: there is room for these
// writes alone, and none for copies.
func (r *Replica) SetFull(full, tooFull bool) {
	r.tooFull = tooFull
	r.port.Replica().SetFull(full, tooFull)
}

// Adopt adopts a view. place is the number of members downstream of the replica.
func (r *Replica) Adopt(role crrs.Role, place int) {
	if role.Epoch > r.port.Replica().Role().Epoch {
		r.place = place
	}
	r.begin()
	r.port.SetRole(role, &r.acts, &r.traffic)
}

// SetShort says whether the range has fewer copies than it is to have.
func (r *Replica) SetShort(short bool) { r.short = short }

// Role returns the place of the replica in its chain.
func (r *Replica) Role() crrs.Role { return r.port.Replica().Role() }

// Complete reports whether the replica has all data of the range, as a member since Role.Since.
func (r *Replica) Complete() bool { return r.port.Replica().Complete() }

// Lacks reports whether the replica does not have the data of its membership since that epoch, although a view said
// that it served.
func (r *Replica) Lacks(since uint64) bool { return r.port.Replica().Lacks(since) }

// Sufficient reports whether it has all the same what was acknowledged, and can serve alone: see crrs.Replica.
func (r *Replica) Sufficient() bool { return r.port.Replica().Sufficient() }

// Damaged reports that the store has failed: the replica does nothing until that works again.
func (r *Replica) Damaged() bool { return r.damaged }

// Writes returns how many writes there is a record of, as crrs.Replica.Writes does.
func (r *Replica) Writes() int { return r.port.Replica().Writes() }

// Quiet reports whether the replica is no member of its chain, and has nothing under way in its store any more.
func (r *Replica) Quiet() bool { return !r.Role().Member && !r.damaged && r.ops.N() == 0 }

// Start appends to out.Requests what the store is asked for so far. A driver whose store may answer at once calls it
// before Turn, hands the requests over, and calls Stored with the answers: the outcome of a write is then part of the
// same Turn, and goes with the write's Forward.
//
// hot: 0 allocs
func (r *Replica) Start(out *Actions) {
	if r.work != nil && len(r.acts.Stores) > 0 {
		r.beginStores(out)
	}
}

// Turn does everything that has become possible, and appends what is to be done to out. The driver calls it after each
// batch of calls, and at WakeNS.
//
// hot: 0 allocs
func (r *Replica) Turn(out *Actions) {
	r.begin()
	for _, i := range r.sent {
		r.cfg.Batches.outs.put(i)
	}
	r.sent = r.sent[:0]
	r.continueLater(out)
	r.continueRevival(out)
	r.answerCopies()
	r.repeat()
	if r.bufferNS != 0 && r.now >= r.bufferNS {
		r.bufferNS = 0
		r.port.Resume()
	}
	if r.starved && (r.now >= r.starvedNS || r.cfg.Memory.isHalfFree(r.place)) {
		r.starved = false
		r.port.Replica().Missed(&r.acts)
	}
	for again := true; again; {
		r.port.Flush(&r.acts, &r.traffic)
		r.beginStores(out)
		r.beginRanges(out)
		r.release(r.acts.Released)
		r.acts.Released = r.acts.Released[:0]
		r.takeReplies(kvstore.OK, 0)
		r.respond(out)
		again = r.send(out)
	}
	r.filled, r.sent = r.sent, r.filled
	out.Replies = append(out.Replies, r.replies...)
	for _, i := range r.ended {
		r.clients.Put(int32(i))
	}
	r.replies, r.ended = r.replies[:0], r.ended[:0]
	if r.acts.Damaged {
		r.becameDamaged()
	}
	out.Repairs = append(out.Repairs, r.acts.Repairs...)
	r.acts.Repairs = r.acts.Repairs[:0]
	r.acts.Damaged, r.acts.Complete = false, false
	if e := r.traffic.Epoch; e > r.Role().Epoch {
		out.Epoch = max(out.Epoch, e)
	}
	r.traffic.Epoch = 0
	out.WakeNS = 0
	if r.later.N > 0 {
		r.wake(out, r.laterNS)
	}
	if len(r.repeats) > 0 {
		r.wake(out, r.repeatNS)
	}
	if r.starved {
		r.wake(out, r.starvedNS)
	}
	if r.bufferNS != 0 {
		r.wake(out, r.bufferNS)
	}
	if r.uncommitted.N > 0 {
		r.wake(out, r.ops.At(r.uncommitted.First).failingNS+uncommittedNS)
	}
	if at := r.port.Replica().DueNS(); at != 0 {
		r.wake(out, at)
	}
	if r.mayRevive() {
		r.wake(out, max(r.revival.dueNS, 1))
	}
	if r.copying.N > 0 {
		r.wake(out, r.now+retryNS) // other replicas have all buffers
	}
	if len(r.sent) > 0 {
		r.wake(out, r.now+1)
	}
	r.tables.putWork(r.work)
	r.work = nil
}

func (r *Replica) wake(out *Actions, at int64) {
	if out.WakeNS == 0 || at < out.WakeNS {
		out.WakeNS = at
	}
}

// release gives back memory that is not needed any more.
func (r *Replica) release(mems []uint32) {
	for _, mem := range mems {
		if i := int32(mem - 1); int(i) < r.values.Max() {
			if v := r.values.At(i); v.taken {
				r.cfg.Memory.put(v.block)
			} else {
				r.tables.putSpare(v.spare)
			}
			r.values.Put(i)
		} else {
			r.cfg.Batches.putFetched(i-int32(r.values.Max()), r.now)
		}
	}
}

// frame is the room in front of a value for the header with which it is forwarded.
const frame = nvme.KVForwardHeaderSize

// hold copies a value to memory of the replica, which there must be if it is needed. It returns ok false if there is
// none.
//
// hot: 0 allocs
func (r *Replica) hold(value []byte, needed bool) (held []byte, mem uint32, ok bool) {
	if len(value) == 0 {
		return nil, 0, true
	}
	if r.values.Room() == 0 {
		return nil, 0, false
	}
	b, ok := r.cfg.Memory.take(r.place, frame+len(value))
	var spare []byte
	if !ok && needed {
		spare = r.takeSpare(frame + len(value))
	}
	if !ok && spare == nil {
		return nil, 0, false
	}
	i := r.values.Take()
	v := r.values.At(i)
	v.block, v.spare = b, spare
	held = r.framed(v, len(value))[frame:]
	copy(held, value)
	return held, uint32(i) + 1, true
}

// framed returns the memory of a value of n bytes, with the room in front of it.
func (r *Replica) framed(v *value, n int) []byte {
	if v.taken {
		return r.cfg.Memory.bytes(v.block, frame+n)
	}
	return v.spare[:frame+n]
}

// takeSpare takes memory for n bytes beyond that of the partition, nil if there is none. In the order of a range only
// one write is needed at a time, so that there is seldom more than one value there.
func (r *Replica) takeSpare(n int) []byte {
	if buf := r.tables.takeSpare(n); buf != nil {
		return buf
	}
	buf, err := r.cfg.Alloc(min(1<<(spareShift+spareClass(n)), r.cfg.Batches.bytes))
	if err != nil {
		return nil
	}
	return buf
}
