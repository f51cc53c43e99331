package crrs

import (
	"fmt"

	"jbofd/internal/list"
	"jbofd/internal/slab"
)

// Replica is the replica of a range in one partition: see the package comment. Only one goroutine at a time may use it.
type Replica struct {
	role  Role
	nowNS int64 // the time of the last Advance
	// untilNS is when the authority of the replica ends.
	untilNS int64
	// damaged: the store has failed; the replica does nothing until it revives. The role is that of the newest view all
	// the same.
	damaged bool
	// lacking: a view says that the replica serves in the membership lackingSince, but it does not have the data for
	// that. Until a view gives it another membership, it acts as if it were no member. surplus: it has all acknowledged
	// writes, and perhaps unacknowledged ones that no other member has.
	lacking, surplus bool
	lackingSince     uint64

	// version is the greatest version that the replica has seen.
	version uint64
	// These are seqs, numbers in the order of the epoch's writes; all restart at 0 in each epoch. seq is that of the
	// latest write, at the ChainHead. All writes up to applied are durable here. All writes up to above are durable at
	// every replica upstream: it is the durable mark of the Predecessor, and 0 at the ChainHead. All writes up to
	// committed are committed.
	//
	// Invariant: committed <= durable(), which is applied at the ChainHead and min(applied, above) elsewhere.
	seq, applied, above, committed uint64
	// toldDurable and toldCommitted are the marks that the Successor and the Predecessor were sent last.
	toldDurable, toldCommitted uint64
	// base is the last version before those of the epoch, at the ChainHead. clock is a version: base, as soon as the
	// replica knows that all writes up to base have ended at the ChainHead; before that 0. toldClock is the clock that
	// the Successor was sent last.
	base, clock, toldClock uint64
	// deciding is how many writes have deciding set.
	deciding uint64
	// full: the partition is nearly full; behindFull: that of a member downstream is. toldFull is what the Predecessor
	// was sent last. While behindFull is set, the Successor is asked at askNS whether it still is.
	full, behindFull, toldFull bool
	askNS                      int64
	// tooFull: the partition has no room for copies.
	tooFull bool
	// missed: there was no slot for a Forward. A Sync is sent when half of the slots are free.
	missed bool
	// soundAbove is the least that Sound returns. copied has a greater bound for each of 1<<soundBits parts of the
	// range, in which repairs have copied; nil: no repair has copied anything. Both are of the membership soundSince.
	soundAbove, soundSince uint64
	copied                 []uint64
	// yieldNS: queued writes are held back until then: see yield.go. 0: they are not.
	yieldNS int64

	tables *Tables
	writes slab.Table[write]
	// led is how many of the writes came from clients, to this replica as the ChainHead.
	led int
	// ring has the writes that have a seq in this epoch and are not committed, by seq modulo its length. unordered has
	// those that have begun and have no seq in it: the Predecessor has not forwarded them yet in this epoch, or the
	// store decides whether they are done. queued has those that have not begun.
	ring              []int32
	unordered, queued list.List
	// unjudged has the writes that wait for a repair, unrecoverable the positions that no member can supply: see
	// unjudged.go.
	unjudged      list.List
	unrecoverable unrecoverable
	// dirty has lists of the writes that have begun and not ended, by hash of the key; marks is how many these are.
	dirty []int32
	marks int

	reads slab.Table[read]
	// shipped counts the reads that were shipped, so that a late Answer is recognised.
	shipped uint32

	first    uint64
	bits     uint8
	leaf     uint64
	lockKeys bool
	pass     pass
	repair   repair
	// round counts the passes and the losses that were found, in this epoch and earlier ones. A batch that another
	// member has begun to read for an earlier round may lack writes that were stored since and then lost here.
	round uint16
}

// write is a write that has not ended, or that has ended while the store has it. Its states:
//
//	state      list       version  seq  flags              what ends the state
//	queued     queued     0        0                       the write begins: deciding or storing
//	unjudged   unjudged   0        0                       the repair ends: queued
//	deciding   unordered  set      0    deciding, storing  the store decides: durable, unjudged, or the end
//	storing    ring       set      set  storing            the store is done: durable
//	durable    ring       set      set  durable            the write is committed: the end, with OK
//	unordered  unordered  set      0    storing or durable it gets a seq in this epoch: storing or durable
//	gone       none       0        0    storing            the store is done: the slot is freed
//
// The ChainHead alone has the first three. A write with a version has its key dirty. One that ends frees its slot, or
// is gone while the store has it.
//
// In a new epoch of the same membership, storing and durable writes become unordered. A replica that is the ChainHead
// gives them new seqs at once, others wait for the Forwards. Deciding and gone ones stay. Unjudged ones are queued, and
// queued ones stay if the replica stays the ChainHead; otherwise they end with WrongView. When the replica loses its
// membership, or its store fails, all writes that have begun end with Unknown.
type write struct {
	Write
	version, seq uint64
	// storing: the store has the write. durable: the store has done it.
	storing, durable bool
	// deciding: the store decides whether the write is done, because it is conditional or a retry; it has no seq yet.
	deciding bool
	// waited: a client waits for the Reply. led: it came from a client, and counts in Replica.led until its slot is
	// freed.
	waited, led bool
	// waitedNS is when the write began to wait for a repair the first time; 0: it has not waited. tries is how often it
	// has waited.
	waitedNS int64
	tries    uint8
	// last: no other member has the data that the decision depends on, so that it depends on the store here alone.
	last bool
	// held are reads of the write's value, which wait for the write to be committed.
	held list.List
	// next is the next write in a list of dirty.
	next int32
}

const none = list.NoRecord

// New returns a replica that is not a member of its chain yet.
func New(cfg Config) *Replica {
	if cfg.Window < 1 || cfg.Window&(cfg.Window-1) != 0 || cfg.Reads < 1 || cfg.Parts < 1 {
		panic(fmt.Sprintf("crrs: a window of %d writes, %d reads and %d parts", cfg.Window, cfg.Reads, cfg.Parts))
	}
	if cfg.Tables == nil {
		cfg.Tables = NewTables(4*cfg.Window, 2*cfg.Reads)
	}
	r := &Replica{
		version: cfg.Version, tables: cfg.Tables,
		ring: make([]int32, cfg.Window), dirty: make([]int32, 2*cfg.Window),
		unordered: list.None, queued: list.None, unjudged: list.None,
		first: cfg.First, bits: cfg.Bits, leaf: cfg.Leaf, lockKeys: cfg.LockKeys,
		pass: pass{tasks: make([]task, cfg.Parts)},
	}
	r.writes.Init(r.tables.writes, 2*cfg.Window)
	r.reads.Init(r.tables.reads, cfg.Reads)
	fill(r.ring)
	fill(r.dirty)
	return r
}

func fill(s []int32) {
	for i := range s {
		s[i] = none
	}
}

// Advance sets the time, in nanoseconds of the driver's clock. An earlier time than the last one is ignored.
func (r *Replica) Advance(nowNS int64) { r.nowNS = max(r.nowNS, nowNS) }

// Extend extends the authority until a time, in nanoseconds of the clock of Advance. An earlier time than before is
// ignored.
func (r *Replica) Extend(untilNS int64) { r.untilNS = max(r.untilNS, untilNS) }

// Withdraw ends the authority, before a view takes the range away from the replica: from now on it answers no reads.
func (r *Replica) Withdraw() { r.untilNS = 0 }

func (r *Replica) authority() bool {
	return r.role.Member && !r.role.Filling && !r.damaged && r.nowNS < r.untilNS
}

// Role returns the position of the replica in its chain.
func (r *Replica) Role() Role { return r.role }

// Version returns the greatest version that the replica has seen.
func (r *Replica) Version() uint64 { return r.version }

// Committed returns the committed mark of the epoch.
func (r *Replica) Committed() uint64 { return r.committed }

// underWay reports whether the replica has the write with a seq, and it is not committed.
func (r *Replica) underWay(seq uint64) bool {
	return seq > r.committed && seq <= r.committed+uint64(len(r.ring)) && r.at(seq) != none
}

// Writes returns how many writes the replica has: those that have not ended, and those that have ended while the store
// still has them.
func (r *Replica) Writes() int { return r.writes.N() }

// SetRole adopts a view. One of an older epoch, or of the same, is ignored.
//
// Outstanding reads end with WrongView. If the replica stays in its membership, writes that are not committed stay: a
// ChainHead gives them new seqs in the new epoch and forwards them, other members ask their Predecessor for that
// (Sync). Otherwise writes that have begun end with Unknown. Those that have not begun end with WrongView, unless the
// replica stays ChainHead.
func (r *Replica) SetRole(role Role, out *Actions) {
	if role.Epoch <= r.role.Epoch {
		return
	}
	r.yieldNS = 0
	if r.damaged {
		r.role = role
		return
	}
	r.abandonReads(out)
	was := r.role
	wasHead := was.Member && was.head()
	stayed := was.Member && role.Member && was.Since == role.Since && (was.Filling || !role.Filling)
	lacks := role.Member && r.Lacks(role.Since) && !(role.alone() && r.Sufficient())
	surplus := stayed && wasHead && !role.head() && r.begun() > 0
	if lacks || surplus || was.Member && role.Member && !role.Filling && !(stayed && r.Complete()) &&
		(stayed || !role.alone()) {
		// No rule leads from the last view to this one, or views were missed. The three cases, in their order:
		//   - The replica has been here before, and it is still the same membership.
		//   - A ChainHead that has begun writes stops being ChainHead: the new ChainHead does not know of them.
		//   - The replica is to serve and is not complete, or is to serve beside others in another membership. If it is
		//     to serve alone in another one, an operator has accepted a loss: then it serves what it has.
		// It acts as if it were no member, and the node reports that data are missing (Lacks), so that the manager has
		// it filled again.
		if !lacks {
			r.surplus = surplus
		}
		r.lacking, r.lackingSince, stayed = true, role.Since, false
		role = Role{Epoch: role.Epoch, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}
	} else if role.Member && role.Since == r.lackingSince {
		r.lacking = false
	}
	r.become(role, was, stayed, out)
}

// become changes the role from was to that of a new epoch. stayed: the replica has the data and the writes of the
// membership.
func (r *Replica) become(role, was Role, stayed bool, out *Actions) {
	pending := r.takePending()
	r.role = role
	r.seq, r.applied, r.above, r.committed, r.toldDurable, r.toldCommitted = 0, 0, 0, 0, 0, 0
	r.missed = false // a Sync follows, or this is the ChainHead, which gets no Forwards
	r.base, r.clock, r.toldClock = 0, 0, 0
	r.behindFull, r.toldFull = false, false
	r.resetRepair(stayed)
	r.judgeAll()
	if !stayed {
		r.resetPass()
		for pending.N > 0 {
			r.end(r.writes.Links.Pop(&pending), Unknown, out)
		}
		r.deciding = 0
	}
	for !(stayed && role.head()) && r.queued.N > 0 {
		r.end(r.writes.Links.Pop(&r.queued), WrongView, out)
	}
	if !role.Member {
		return
	}
	r.askAgain()
	r.unordered = pending
	if !role.head() {
		r.adoptSound(was, stayed)
		r.send(role.Predecessor, Message{Kind: Sync}, out)
		return
	}
	// Also if it was the ChainHead in the last view that it has seen: another one may have led in a view that it
	// missed.
	r.version = max(r.version+versionGap, firstVersion(role.Epoch))
	r.base = r.version
	r.adoptSound(was, stayed)
	for n := r.unordered.N; n > 0; n-- {
		switch i := r.writes.Links.Pop(&r.unordered); {
		case r.writes.At(i).deciding:
			r.writes.Links.Push(&r.unordered, i)
		case !r.mayOrder():
			r.fail(out) // more than Window writes, which no ChainHead can have begun
			return
		default:
			r.order(i)
		}
	}
	for s := uint64(1); s <= r.seq; s++ {
		r.forward(r.at(s), out)
	}
	r.progress(out)
	r.startQueued(out)
}

// Lacks reports whether the replica lacks data of the membership that began at epoch since of the view, although a view
// says that it serves in it. The node reports the range as incomplete then.
func (r *Replica) Lacks(since uint64) bool { return r.lacking && since == r.lackingSince }

// Sufficient reports whether a replica that Lacks data has all acknowledged writes nevertheless, and no outstanding
// ones: it differs from the other members only by writes that were not acknowledged. If the others are gone, it can
// serve alone.
func (r *Replica) Sufficient() bool { return r.lacking && r.surplus && r.Writes() == 0 }

// takePending removes all writes that have begun and not ended from ring and unordered, and returns them in the order
// of their versions.
func (r *Replica) takePending() list.List {
	pending := list.None
	for s := r.committed + 1; s <= r.committed+uint64(len(r.ring)); s++ {
		if i := r.at(s); i != none && r.writes.At(i).seq == s {
			r.writes.At(i).seq = 0
			r.writes.Links.Push(&pending, i)
		}
	}
	fill(r.ring)
	for r.unordered.N > 0 {
		r.writes.Links.Push(&pending, r.writes.Links.Pop(&r.unordered))
	}
	return r.sorted(pending)
}

// sorted sorts a list of writes by version. It is nearly sorted, and short.
func (r *Replica) sorted(l list.List) list.List {
	out := list.None
	for l.N > 0 {
		i := r.writes.Links.Pop(&l)
		after := list.None
		for out.N > 0 {
			// Those with a greater version come after it.
			j := r.writes.Links.Pop(&out)
			if r.writes.At(j).version <= r.writes.At(i).version {
				r.writes.Links.Push(&after, j)
				continue
			}
			r.writes.Links.PushFront(&out, j)
			break
		}
		r.writes.Links.Push(&after, i)
		for out.N > 0 {
			r.writes.Links.Push(&after, r.writes.Links.Pop(&out))
		}
		out = after
	}
	return out
}

// Reconnected notes that messages to a replica, or from it, may have been lost.
func (r *Replica) Reconnected(p Peer, out *Actions) {
	if !r.role.Member || r.damaged {
		return
	}
	r.abandonShips(p, out)
	if p == r.role.Successor {
		r.resend(out)
	}
	if p == r.role.Predecessor {
		r.toldCommitted = 0
		r.send(p, Message{Kind: Sync}, out)
		r.askAgain()
	}
}

// resend forwards all writes that are not committed.
func (r *Replica) resend(out *Actions) {
	for s := r.committed + 1; s <= r.committed+uint64(len(r.ring)); s++ {
		if i := r.at(s); i != none {
			r.forward(i, out)
		}
	}
	r.tellDurable(out)
}

// tellDurable sends the durable mark to the Successor.
func (r *Replica) tellDurable(out *Actions) {
	r.askNS = r.nowNS + askFullNS
	r.toldDurable, r.toldClock = r.durable(), r.clock
	r.send(r.role.Successor, Message{Kind: Durable, Seq: r.toldDurable, Clock: r.clock}, out)
}

// markForward puts the durable mark into the last Forward of this turn, which has not been sent yet, and reports
// whether there is one. So a write that the store has done before the turn ends needs no Durable.
func (r *Replica) markForward(out *Actions) bool {
	for i := len(out.Sends) - 1; i >= 0; i-- {
		if m := &out.Sends[i]; m.Kind == Forward && m.To == r.role.Successor && m.Epoch == r.role.Epoch {
			r.toldDurable, m.Mark = r.durable(), r.durable()
			return true
		}
	}
	return false
}

// setClock sets the clock at the ChainHead to base, when all writes with a version up to base have ended.
func (r *Replica) setClock() {
	if !r.role.head() || r.clock != 0 {
		return
	}
	if r.ended(r.base, false) {
		r.clock = r.base
	}
}

// at returns the write in the slot of ring for a seq, or none. Only for seqs in the window is it the one with that seq.
func (r *Replica) at(seq uint64) int32 { return r.ring[seq&uint64(len(r.ring)-1)] }

// send sends a message of this epoch.
func (r *Replica) send(to Peer, m Message, out *Actions) {
	m.Epoch = r.role.Epoch
	out.Sends = append(out.Sends, Send{To: to, Message: m})
}

// Flush sends the marks that have moved to the Predecessor and the Successor. The driver calls it at the end of each
// turn, so that one message has the marks of many writes.
func (r *Replica) Flush(out *Actions) {
	if !r.role.Member || r.damaged {
		return
	}
	r.setClock()
	r.endYield(out)
	if !r.role.last() && (r.clock > r.toldClock || r.behindFull && r.nowNS >= r.askNS ||
		r.durable() > r.toldDurable && !r.markForward(out)) {
		r.tellDurable(out)
	}
	if c := r.committed; !r.role.head() && (c > r.toldCommitted || r.Full() != r.toldFull) {
		r.toldCommitted, r.toldFull = c, r.Full()
		r.send(r.role.Predecessor, Message{Kind: Ack, Seq: c, Full: r.toldFull}, out)
	}
	if r.missed && r.writes.Room() >= r.writes.Max()/2 {
		r.missed = false
		r.send(r.role.Predecessor, Message{Kind: Sync}, out)
	}
	r.endUnjudged(out)
	if r.continueRepair(out); !r.damaged {
		r.continuePass(out)
	}
}

// askFullNS is the interval at which a replica asks whether the partition of a member downstream is still nearly full,
// by a Durable. Otherwise it learns that from the completions of Forwards, but there are no Forwards while the
// ChainHead refuses Puts.
const askFullNS = 500e6

// SetFull sets whether the partition is nearly full. tooFull: it has no room for copies, so that a pass asks for none.
func (r *Replica) SetFull(full, tooFull bool) { r.full, r.tooFull = full, tooFull }

// Full reports whether the partition of the replica, or of a member downstream, is nearly full. The driver of a
// ChainHead refuses Puts then.
func (r *Replica) Full() bool { return r.full || r.behindFull }

// DueNS is when the next turn must be taken at the latest, in nanoseconds of the clock of Advance; 0: at no time.
func (r *Replica) DueNS() int64 {
	at := r.repairDueNS()
	if due := r.pass.openDueNS(); due > r.nowNS && (at == 0 || due < at) {
		at = due // one that is due already waits for a task
	}
	if due := r.roomDueNS(); due != 0 && (at == 0 || due < at) {
		at = due
	}
	if due := r.unjudgedDueNS(); due != 0 && (at == 0 || due < at) {
		at = due
	}
	if r.yieldNS != 0 && (at == 0 || r.yieldNS < at) {
		at = r.yieldNS
	}
	switch {
	case !r.role.Member || r.damaged:
		return 0
	case r.behindFull && (at == 0 || r.askNS < at):
		return r.askNS
	}
	return at
}

// Missed notes that a Forward was dropped for lack of memory, and asks for it again.
func (r *Replica) Missed(out *Actions) {
	if r.role.Member && !r.role.head() && !r.damaged {
		r.send(r.role.Predecessor, Message{Kind: Sync}, out)
	}
}

// Needs reports whether the write with a seq is the first one that is missing. Later writes, which may hold all memory,
// end only after it, so that there must always be memory for its value.
func (r *Replica) Needs(epoch, seq uint64) bool {
	if epoch != r.role.Epoch || !r.role.Member || seq <= r.committed || seq > r.committed+uint64(len(r.ring)) {
		return false
	}
	for s := r.committed + 1; s < seq; s++ {
		if r.at(s) == none {
			return false
		}
	}
	return r.at(seq) == none
}

// Receive handles a message. One of another epoch is ignored: the replica that still has the older view adopts the
// newer one in time, and then asks for what it has missed.
func (r *Replica) Receive(from Peer, m *Message, out *Actions) {
	if r.damaged || !r.role.Member || m.Epoch != r.role.Epoch {
		r.releaseValue(m, out)
		if m.Kind == Ship {
			out.Sends = append(out.Sends, Send{To: from, Message: Message{Kind: Answer, Epoch: m.Epoch, Tag: m.Tag,
				Status: WrongView}})
		}
		return
	}
	switch {
	case m.Kind == Forward && from == r.role.Predecessor:
		r.receiveForward(m, out)
	case m.Kind == Forward:
		r.releaseValue(m, out)
	case m.Kind == Durable && from == r.role.Predecessor && r.isOrphaned(m.Clock):
		r.lack(out)
	case m.Kind == Durable && from == r.role.Predecessor:
		r.version, r.clock = max(r.version, m.Clock), max(r.clock, m.Clock)
		r.above = max(r.above, m.Seq)
		r.toldFull = !r.Full() // so that Flush sends it in any case: the sender may have asked for that
		r.progress(out)
	case m.Kind == Ack && from == r.role.Successor:
		r.behindFull = m.Full
		r.commit(m.Seq, out)
	case m.Kind == Sync && from == r.role.Successor:
		r.resend(out)
	case m.Kind == Ship:
		r.receiveShip(from, m, out)
	case m.Kind == Answer:
		r.receiveAnswer(m, out)
	case m.Part != nil:
		r.receiveFill(from, m, out)
	}
}

func (r *Replica) releaseValue(m *Message, out *Actions) {
	if m.Kind == Forward || m.Kind == Batch {
		out.free(m.Mem)
	}
}

// free releases the memory of a value.
func (a *Actions) free(mem uint32) {
	if mem != 0 {
		a.Released = append(a.Released, mem)
	}
}
