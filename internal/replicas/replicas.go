// Package replicas runs the replicas that one partition has of the ranges of a cluster: it takes the commands of hosts
// and of other nodes to the machines of package replica, their requests to the partition's store, and their commands to
// other nodes.
//
//	executor ── Request ──> inbox ────┐                      ┌──> partition.Partition
//	partition ── KVDone ──> stored ───┤   replica.Replica    │
//	peers ── PeerDone ────> answered ─┼──> one for each ─────┼──> peers.Peers
//	member ── SetState ───> (locks) ──┤    range             │
//	timer ────────────────────────────┘                      └──> Request.Sink
//
// One turn.Driver drives all of them, as it drives a partition: the goroutine that brings something runs those replicas
// that it concerns, if nobody else does.
//
// Views come in with SetState, and reports go out with Report (state.go); cuts.go looks for nodes that only the manager
// reaches, silence.go for a drive that completes nothing; request.go has the requests of hosts and nodes, store.go
// those to the store, peer.go the commands to other nodes.
//
// In each turn the clock is read after the mailboxes were emptied, and authority is checked against that time. So an
// answer leaves a replica only if the replica had authority after the value was fetched.
package replicas

import (
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/crrs"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
	"jbofd/internal/peers"
	"jbofd/internal/replica"
	"jbofd/internal/turn"
	"jbofd/internal/uuid"
)

// Store is the store of a partition: partition.Partition.
type Store interface {
	Submit(b *partition.Batch)
	// HashSeed is what positions come from.
	HashSeed() uint64
	// Dropping reports whether a Drop of something in a range of positions is not over: kvstore.Store.Dropping.
	Dropping(first, last uint64, hurry bool) bool
	MaxValueBytes() int
}

var _ Store = (*partition.Partition)(nil)

// Sender sends commands to partitions of other nodes: peers.Peers.
type Sender interface{ Send(b *peers.Batch) }

var _ Sender = (*peers.Peers)(nil)

// Config describes Replicas.
type Config struct {
	// Store is that of the partition, ID the partition's.
	Store Store
	ID    uuid.UUID
	// MaxValueBytes is the longest value that hosts may store, the same at all nodes; 0: that of the Store.
	MaxValueBytes int
	// Peers leads to the other nodes. HostNQN is the NQN under which a node connects as a host.
	Peers   Sender
	HostNQN func(node string) string
	// Clock is the clock of authority in nanoseconds: that of cluster.Node. Authority returns until when this node may
	// serve, by Clock. Both may be called from any goroutine.
	Authority, Clock func() int64
	// Full reports whether the partition is nearly full: then Puts of clients are refused, while there is room for
	// writes that other replicas have accepted already. Nil: never.
	Full func() bool
	// TooFullToFill reports whether the room that is left is needed for such writes: ranges are not filled meanwhile.
	// Nil: never.
	TooFullToFill func() bool
	// Changed is called when Report returns something else than before. It must not block.
	Changed func()
	// Patience is how long a neighbour in a chain may be out of reach although the manager admits it: see cuts.go. It
	// is longer than it takes until a view leaves out a node that has failed. 0: for ever.
	Patience time.Duration
	// Drive has the counters of the partition's drive. SilentAfter is how long the drive may complete nothing while it
	// has requests: see silence.go. It is longer than any request takes at a drive that works. Nil, or 0: for ever.
	Drive       *drive.Stats
	SilentAfter time.Duration
	// AnswerWithin is how long commands of other nodes wait for the drive at most: see overdue.go. 0: for ever.
	AnswerWithin time.Duration
	// Pool has the memory for values and batches, and the buffers for the values of other nodes.
	Pool *bufpool.Pool
	// Observe is called for each command to another node that has ended, with its opcode, the bytes of its data, its
	// duration in nanoseconds, and whether it was lost. A Forward lasts until its write is committed. One that is
	// answered before, as it cannot be kept any longer, is Untimed, as are commands that are lost or refused. May be
	// nil. hot: 0 allocs
	Observe func(opcode uint8, bytes int, ns int64, lost bool)
	// Repair is called at the beginning and the end of each repair. May be nil.
	Repair func(how crrs.RepairOutcome)
	// DropAfter is the delay before data of a range are dropped if the range has all its members without this
	// partition; 0: DefaultDropAfter.
	DropAfter time.Duration
	// YieldAfter is how long a chain must have been unchanged before its ChainHead is changed to spread the writes: see
	// yield.go. It is some leases. 0: that never happens.
	YieldAfter time.Duration
	// FillShare and RestoreShare are those of replica.Config.
	FillShare, RestoreShare replica.Share
	// LockKeys is crrs.Config's.
	LockKeys bool
	// MemoryBytes is for values of writes that are under way, for each place in a chain; 0: DefaultMemoryBytes.
	MemoryBytes int
	Env         turn.Env
	Log         *slog.Logger
}

// DefaultMemoryBytes has room for two hundred of the longest values that most hosts use, 64 KiB.
const DefaultMemoryBytes = 16 << 20

// PartitionBytes is how much memory New takes from the system with a longest value of so many bytes.
func PartitionBytes(valueBytes int) int64 {
	return (view.MaxReplicas+1)*DefaultMemoryBytes + (outs+fetched)*int64(valueBytes+nvme.KVEntryOverhead)
}

// Limits for one range, and for all ranges of a partition together. Memory is allocated for what is outstanding.
const (
	// window is the number of outstanding writes of a range.
	window = 64
	// readsPerRange is the number of outstanding reads of a range. It is high, because all reads may be of one hot key.
	readsPerRange = 256
	// writes and reads are the numbers of outstanding requests of clients of all ranges, more than a drive needs to be
	// busy.
	writes = 2048
	reads  = 4096
	// parts is how many parts of a range are compared or copied at once. leaf is how many objects are copied rather
	// than compared further: with more than one, a node that was away would be sent objects that it has.
	parts = 2
	leaf  = 1
	// requests is how many commands to other nodes, keep how many of their Forwards are kept until they are committed,
	// served how many commands of other nodes are answered later.
	requests = 2 * window
	keep     = 4
	served   = 2*keep + readsPerRange/4
	// outs and fetched are the batches of passes, of all ranges together.
	outs    = 2
	fetched = 4
	// tombstoneSeconds is how long tombstones last: longer than any batch, also when the time of day is set forward by
	// an hour meanwhile.
	tombstoneSeconds = 2 * 3600
)

// Untimed is the time of a command that says nothing of how long commands of its kind take.
const Untimed = -1

// Replicas are the replicas that a partition has. Their methods may be called from any goroutine.
type Replicas struct {
	cfg     Config
	driver  turn.Driver
	arena   *bufpool.Arena
	account *bufpool.Account
	memory  *replica.Memory
	batches *replica.Batches
	tables  *replica.Tables

	// inbox brings Requests, stored those of the store that have ended, answered commands of other nodes that have.
	inbox    turn.Mailbox[Request]
	stored   turn.Mailbox[storeRequest]
	answered turn.Mailbox[peerRequest]
	// aborts are Requests that are to end soon. links are nodes to which there is a connection again, or none any more.
	aborts turn.Messages[abort]
	links  turn.Messages[linkChange]
	// damages are what the store has found damaged.
	damages turn.Messages[kvstore.Damage]

	// mu guards report.
	mu     sync.Mutex
	report cluster.Holdings
	// dirty is what Dirty returns.
	dirty atomic.Int64
	// isSilent is what Silent returns.
	isSilent atomic.Bool

	// Everything below belongs to the driver's owner.
	closed bool
	// quiet is set by Close. atStore and atPeers count what the store and other nodes have.
	quiet            chan struct{}
	atStore, atPeers int
	// active and newest are the views that the node acts on and has seen; self is the partition in active, if joined.
	active, newest *cluster.Map
	self           view.PartitionID
	joined         bool
	nodes          map[string]uint16 // the number in active of the node with a host NQN
	// ranges has the replica of each range, nil where the partition was never a member; members are all there are,
	// touched those that take part in the turn, due those that want one at some time.
	ranges, members, touched []*member
	due                      dueHeap
	// trimNS is when memory that was not needed is freed, by envNS; 0: there is none.
	trimNS int64
	// refusals has until when no other line is logged about each: see noteRefusal.
	refusals map[refusal]int64
	// Each turn reads three clocks. clockNS is that of Config.Clock, for authority, replicas, and all fields named NS
	// but trimNS; untilNS is the end of authority by it. envNS is that of the Env, for timers and fences. wall is the
	// time of day in unix seconds, for expiry.
	clockNS, envNS, untilNS int64
	wall                    uint32
	// full and tooFull are the results of Config.Full and TooFullToFill.
	full, tooFull bool
	// requests are those that a replica has, by handle. again and changes are memory for aborts and links.
	requests     []*Request
	freeRequests []uint32
	// asks are the commands of other nodes that wait for the drive, by handle. asked counts those to be answered, late
	// those that were answered already. overdueNS is when they are checked next; 0: at no time.
	asks        []*ask
	freeAsk     *ask
	asked, late int
	overdueNS   int64
	freeStore   *storeRequest
	freePeer    *peerRequest
	// storeSpares, peerSpares and askSpares count those that are free.
	storeSpares, peerSpares, askSpares spares
	toStore                            partition.Batch
	toPeers                            peers.Batch
	acts                               replica.Actions
	again                              []abort
	changes                            []linkChange
	cuts                               cuts
	silence                            silence
	failing                            failing
	drops                              drops
	yields                             yields
	halted                             halted
	// reports has the damages from before the first view. losses are to be repaired by lossRequest, to the store.
	reports     []kvstore.Damage
	losses      replica.Losses
	lossRequest kvstore.Request
	// repaired counts repairs that are still to be logged.
	repaired repaired
}

// member is this partition as a member of the chain of one range: its replica, and what is known of the chain.
type member struct {
	r      *replica.Replica
	number int
	// touched: it is among those that take part in the turn.
	touched bool
	// withdrawn: the replica must not serve: the newest view takes the range away from the partition, or the partition
	// has given up its membership. Its authority is not extended.
	withdrawn bool
	// held: the replica is to be a member, but must wait until the partition's earlier data of the range are dropped.
	held bool
	// wakeNS is when the replica needs a turn; retryNS when lost messages are sent again to those in lost. 0: at no
	// time.
	wakeNS, retryNS int64
	lost            []crrs.Peer
	// dueNS is the earlier one of the two, and index that in Replicas.due; 0 and -1: none.
	dueNS int64
	index int
	// resigned is the Since of the membership that it gave up last.
	resigned uint64
	// before and behind are the Predecessor and the Successor in the newest view, if they serve.
	before, behind neighbour
	// complete, sufficient and damaged are what was reported last.
	complete, sufficient, damaged bool
	// chainEpoch is the epoch of the chain in the active view, since steadyNS. yielding: the replica yields to the
	// member yieldTo; yielded: it has no write outstanding any more, which was reported or is about to be.
	chainEpoch        uint32
	steadyNS          int64
	yielding, yielded bool
	yieldTo           view.PartitionID
	// repairsQuietNS is until when no other line is logged about what cannot be repaired.
	repairsQuietNS int64
}

// retryLostNS is the delay before a command whose node could not be reached is sent again.
const retryLostNS = 50e6

// New returns the replicas of a partition that is in no view yet.
//
// Errors: those of bufpool.Arena.Alloc and turn.Driver.Init.
func New(cfg Config) (*Replicas, error) {
	if cfg.MemoryBytes == 0 {
		cfg.MemoryBytes = DefaultMemoryBytes
	}
	if cfg.DropAfter == 0 {
		cfg.DropAfter = DefaultDropAfter
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.MaxValueBytes == 0 {
		cfg.MaxValueBytes = cfg.Store.MaxValueBytes()
	}
	g := &Replicas{cfg: cfg, tables: replica.NewTables(writes, reads),
		arena: cfg.Pool.Arena(fmt.Sprintf("replicas of partition %s", cfg.ID))}
	longest := cfg.MaxValueBytes + nvme.KVEntryOverhead
	var err error
	if g.memory, err = replica.NewMemory(view.MaxReplicas+1, cfg.MemoryBytes, g.arena.Alloc); err == nil {
		g.batches, err = replica.NewBatches(outs, fetched, longest, g.arena.Alloc)
	}
	if err == nil {
		err = g.driver.Init(turn.Config{Env: cfg.Env, Machine: (*machine)(g), MaxTurns: maxTurns})
	}
	if err != nil {
		g.arena.Free()
		return nil, err
	}
	g.account = cfg.Pool.Account("replicas")
	return g, nil
}

// Dirty returns how many writes of the partition's ranges are not known to be committed yet: their keys are dirty.
func (g *Replicas) Dirty() int64 { return g.dirty.Load() }

// maxTurns is how many turns a submitter takes in a row before it gets on with its own work.
const maxTurns = 16

// newMember makes the replica of a range.
func (g *Replicas) newMember(number int) *member {
	first, _ := g.active.Range(number)
	m := &member{number: number, index: -1}
	m.r = replica.New(replica.Config{HashSeed: g.cfg.Store.HashSeed(), Memory: g.memory, Batches: g.batches,
		FillShare: g.cfg.FillShare, RestoreShare: g.cfg.RestoreShare, Tables: g.tables,
		TombstoneSeconds: tombstoneSeconds, Alloc: g.arena.Alloc,
		PortConfig: crrs.PortConfig{Range: uint16(number), Keep: keep, Requests: requests, Served: served,
			Config: crrs.Config{Window: window, Reads: readsPerRange, First: first, Bits: rangeBits(g.active),
				Parts: parts, Leaf: leaf, LockKeys: g.cfg.LockKeys}}})
	return m
}

// Submit hands a batch of Requests over and empties it. On return they may be done already. From any goroutine, but
// not from within a Sink's methods.
//
// hot: 0 allocs
func (g *Replicas) Submit(b *Batch) {
	g.inbox.PushChain(&b.chain)
	g.driver.Run()
}

// Close ends the replicas: Requests are refused from now on, no read is answered any more, and writes that are under
// way end with Command Interrupted, because other members may have them. It waits for what the store and other nodes
// have, and gives the memory back. If that takes longer than patience, the memory stays taken, because a device may
// still use it. The store must be open, and the connections to other nodes closed or about to be: their commands end
// then.
//
// Errors: one that says what has not ended.
func (g *Replicas) Close(patience time.Duration) error {
	quiet := make(chan struct{})
	g.driver.Lock()
	g.closed, g.quiet = true, quiet
	for _, m := range g.members {
		m.r.Withdraw()
	}
	g.abandonAll(func(q *Request) bool { return q.Kind == Write || q.Kind == Node && len(q.Value) == 0 })
	g.lookQuiet()
	g.driver.Unlock()
	ended := g.driver.Env().Wait(quiet, patience)
	g.driver.Lock()
	atStore, atPeers := g.atStore, g.atPeers
	if ended {
		g.abandonAll(func(*Request) bool { return true })
		for h := range g.asks {
			g.askEnded(uint32(h))
		}
	}
	g.driver.Unlock()
	g.driver.Close()
	if !ended {
		g.arena.Abandon()
		return fmt.Errorf("replicas of partition %s: %d requests to its store and %d commands to other nodes have not "+
			"ended within %v", g.cfg.ID, atStore, atPeers, patience)
	}
	g.arena.Free()
	g.account.Close()
	return nil
}

// later is the time of day of an instant that is so many seconds from now.
func (g *Replicas) later(seconds uint32) uint32 {
	return uint32(min(uint64(g.wall)+uint64(seconds), 1<<32-1))
}

// machine is Replicas as its driver sees it.
type machine Replicas

// Pending implements turn.Machine.
func (m *machine) Pending() bool {
	return m.inbox.Pending() || m.stored.Pending() || m.answered.Pending() || m.aborts.Pending() ||
		m.links.Pending() || m.damages.Pending()
}

// Turn implements turn.Machine.
func (m *machine) Turn() { (*Replicas)(m).turn() }

// turn does all that has become possible. Needs ownership.
//
// hot: 0 allocs
func (g *Replicas) turn() {
	// Aborts before the inbox: that has whatever was submitted before it was aborted.
	g.again = g.aborts.Take(g.again[:0])
	stored, answered, inbox := g.stored.Take(), g.answered.Take(), g.inbox.Take()
	g.changes = g.links.Take(g.changes[:0])
	// After what was taken has happened: see the package comment.
	g.readTime()
	for n := stored; n != nil; {
		s := n.Item
		n = n.Detach()
		g.takeStored(s)
	}
	for n := answered; n != nil; {
		p := n.Item
		n = n.Detach()
		g.takeAnswer(p)
	}
	for n := inbox; n != nil; {
		q := n.Item
		n = n.Detach()
		g.begin(q)
	}
	for _, a := range g.again {
		g.takeAbort(a)
	}
	clear(g.again)
	for i := range g.changes {
		g.linkChanged(&g.changes[i])
	}
	if g.closed {
		g.reports = g.damages.Take(g.reports[:0]) // or there would be something to do for ever
		g.lookQuiet()
		return
	}
	g.start()
	g.lookForCuts()
	g.lookForSilence()
	g.lookForOverdue()
	g.lookForYields()
	g.touchDue()
	g.takeDamages()
	g.repairLosses()
	g.countHalted()
	g.finish()
}

// start hands to the store what replicas want of it so far, and takes what it answers at once, as a drive in memory
// does: then neither a write nor a read needs another turn, nor a write a Durable.
//
// hot: 0 allocs
func (g *Replicas) start() {
	for _, m := range g.touched {
		m.r.Start(&g.acts)
		for i := range g.acts.Requests {
			g.store(m, &g.acts.Requests[i])
		}
		g.acts.Requests = g.acts.Requests[:0]
	}
	g.cfg.Store.Submit(&g.toStore)
	stored := g.stored.Take()
	if stored == nil {
		return
	}
	g.readTime() // after values were fetched: see the package comment
	for _, m := range g.touched {
		g.tellTime(m)
	}
	for n := stored; n != nil; {
		s := n.Item
		n = n.Detach()
		g.takeStored(s)
	}
}

func (g *Replicas) readTime() {
	last := g.untilNS
	g.clockNS, g.untilNS, g.wall = g.cfg.Clock(), g.cfg.Authority(), uint32(time.Now().Unix())
	if last <= g.clockNS {
		g.cuts.heldNS = g.clockNS
	}
	g.envNS = g.driver.Now()
	g.full = g.cfg.Full != nil && g.cfg.Full()
	g.tooFull = g.cfg.TooFullToFill != nil && g.cfg.TooFullToFill()
}

// touch lets a replica take part in the turn.
func (g *Replicas) touch(m *member) *replica.Replica {
	if !m.touched {
		m.touched = true
		g.touched = append(g.touched, m)
		g.tellTime(m)
	}
	return m.r
}

// tellTime tells a replica what readTime has read.
func (g *Replicas) tellTime(m *member) {
	m.r.SetTime(g.clockNS, g.wall)
	m.r.SetFull(g.full, g.tooFull)
	if !m.withdrawn {
		m.r.Extend(g.untilNS)
	}
}

// touchDue lets those take part that have asked for it.
func (g *Replicas) touchDue() {
	for len(g.due) > 0 && g.due[0].dueNS <= g.clockNS {
		m := g.due[0]
		g.touch(m)
		m.wakeNS = 0 // its Turn says when it wants the next one
		if m.retryNS != 0 && m.retryNS <= g.clockNS {
			m.retryNS = 0
			for _, to := range m.lost {
				m.r.Reconnected(to)
			}
			m.lost = m.lost[:0]
		}
		g.due.set(m)
	}
}

// finish ends a turn: it lets the replicas act that take part, and carries out what they want.
//
// hot: 0 allocs
func (g *Replicas) finish() {
	changed, dropNS := g.turnDrops()
	idle := len(g.touched) == 0
	for len(g.touched) > 0 {
		n := len(g.touched) - 1
		m := g.touched[n]
		g.touched = g.touched[:n]
		m.touched = false
		m.r.Turn(&g.acts)
		changed = m.yielding && g.tendYield(m) || changed
		g.carryOut(m)
		if s := m.r.Sufficient(); s != m.sufficient {
			m.sufficient, changed = s, true
		}
		if c, d := m.r.Complete(), m.r.Damaged(); c != m.complete || d != m.damaged {
			failed := m.damaged
			m.complete, m.damaged, changed = c, d, true
			if d {
				g.failing.failed(g.clockNS)
				g.cfg.Log.Error("a replica has failed with its store", "partition", g.cfg.ID.String(), "range",
					m.number)
			} else if failed {
				g.cfg.Log.Info("the store of a replica that has failed works again", "partition", g.cfg.ID.String(),
					"range", m.number)
			}
		}
	}
	if changed || g.failing.ended {
		g.failing.ended = false
		g.makeReport()
	}
	if n := int64(g.tables.Dirty()); n != g.dirty.Load() {
		g.dirty.Store(n)
	}
	next := g.cuts.nextNS()
	if len(g.due) > 0 && (next == 0 || g.due[0].dueNS < next) {
		next = g.due[0].dueNS
	}
	for _, at := range [...]int64{dropNS, g.losses.NextNS(), g.tellRepaired(), g.nextLookNS(),
		g.nextOverdueNS(), g.yields.nextNS, g.nextCountNS()} {
		if at != 0 && (next == 0 || at < next) {
			next = at
		}
	}
	if next != 0 {
		g.driver.WakeAt(g.envNS + max(next-g.clockNS, 1))
	}
	if !idle || g.trimNS != 0 {
		g.trim()
	}
	g.cfg.Store.Submit(&g.toStore)
	if !g.toPeers.Empty() {
		g.cfg.Peers.Send(&g.toPeers)
	}
}

// carryOut does what a replica wants done.
//
// hot: 0 allocs
func (g *Replicas) carryOut(m *member) {
	a := &g.acts
	m.wakeNS = a.WakeNS
	g.due.set(m)
	for i := range a.Requests {
		g.store(m, &a.Requests[i])
	}
	for i := range a.Commands {
		g.send(m, &a.Commands[i])
	}
	for i := range a.Responses {
		g.respond(&a.Responses[i])
	}
	for i := range a.Replies {
		g.reply(m, &a.Replies[i])
	}
	if len(a.Repairs) > 0 {
		g.tellRepairs(m)
	}
	a.Requests, a.Commands, a.Responses, a.Replies = a.Requests[:0], a.Commands[:0], a.Responses[:0], a.Replies[:0]
	a.Epoch = 0
}
