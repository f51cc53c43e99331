package crrs

import "math/bits"

// Filling.
//
// A filling member is the last of the chain: it stores every write of the epochs in which it is a member, and a write
// is committed when it is durable there, too. Older data it gets from the ChainTail, the copier, in one pass:
//
//	filling ─ Compare ─> copier      digests of 64 parts of a range; each part that differs is compared again,
//	filling <── Sums ─── copier      until it is cheaper to copy it
//	filling ── Fetch ──> copier      a part, from a cursor on
//	filling <── Batch ── copier      objects with versions, applied as an exact copy with the clock of the pass
//
// A batch is sent when all writes that the copier had when it read the batch have ended (Replica.Ended). So a batch has
// only committed writes, and the uncommitted writes that the filling member has are all in its window.
//
// The clock is a version and comes from the ChainHead: it is the last version before those of its epoch, once all
// writes up to it have ended. Items of the filling member with a version up to the clock are replaced by those of the
// copier. Items above the clock are live writes, and stay. So the member may have any data from an earlier membership.
//
// The pass belongs to the membership (Role.Since), not to the epoch: if a copier is lost, its predecessor becomes the
// copier, and has everything that the lost one had. The filling member has all state of the pass, and asks for each
// part; a copier has none. So a request that gets no answer, because one of the two was lost, is sent again, and no
// part is copied twice.

// Cursor is a point in the order of the objects of a range: after those up to Position and Key. The zero Cursor is
// before all.
type Cursor struct {
	Position uint64
	Key      Key
}

// Sum is the digest of a part of a range: how many objects and tombstones it has, and the sum of their hashes.
type Sum struct{ Count, Hash uint64 }

// Part is a part of the range: 2^Bits positions from First on, and the fields of messages and RangeOps about it.
type Part struct {
	First uint64
	Bits  uint8
	// From is the cursor after which a copy begins, To the one up to which it goes; Last: that is the end of the part.
	From, To Cursor
	Last     bool
	// Time is that of the Sums, in unix seconds: objects that have expired by then are left out. 0: now.
	Time uint32
	// Sums are the digests of 2^fanBits parts of equal length, or of each position if there are fewer.
	Sums []Sum
}

// Copies and tombstones.
//
// A batch has the objects of the time when it was read. If a key of it is deleted before the batch is stored, the
// tombstone keeps the old object from being stored. So no batch may be stored after the tombstones of objects that were
// deleted since it was read have expired:
//
//	read ── JoinNS ──> asked ── BatchNS ──> given to the store ── … ──> stored, LateNS later at most < MinTombstoneNS
//
// It may be read before it is asked for, because a copier whose drive is slow answers a Fetch with the batch that it
// has begun to read for an earlier one of the same epoch and round. The clock of the pass was known then, too, and
// nothing was lost since.
//
// A batch that was not given to the store in time is dropped, and asked for again. If the store takes longer, the
// replica is damaged, and is filled from the beginning. The same holds for the batch of a repair, which is dropped
// sooner. Writes, which are held back without a limit if there is no room, do not depend on this: see storeAgain.
//
// All are in nanoseconds of the clock of Advance.
const (
	JoinNS  = 60e9
	BatchNS = 60e9
	LateNS  = 300e9
	// MinTombstoneNS is how long a tombstone has to last at least, by the time of day of the node whose store has it.
	// Tombstones really last replicas.tombstoneSeconds; the time of day may be set forward by the difference.
	MinTombstoneNS = JoinNS + LateNS + 1e9
	// noRoomNS is the delay before a batch for which there was no room is asked for again.
	noRoomNS = 1e9
)

// fanBits is the base-2 logarithm of the number of sub-ranges that one Compare compares.
const fanBits = 6

// RangeKind is the kind of a RangeOp.
type RangeKind uint8

// Kinds of RangeOps.
const (
	// Digest sets Sums.
	Digest RangeKind = iota
	// CopyOut sets To, Last and Data: the objects after From, as many as make a batch. It fails if one of them is lost.
	CopyOut
	// CopyIn makes the store have, after From and up to To, the objects of Data and its own with a version above Clock.
	// With a Clock of 0 it adds those objects of Data that are newer than its own.
	CopyIn
	// Settle with a Clock of 0 examines the segment of the store that has the position First. It sets Width to the
	// number of high bits that the positions of that segment have in common, and Clock to a token other than 0 if the
	// segment has lost keys; if the bits are fewer than Width was, the store splits the segment. Settle with that token
	// accepts the loss, unless the segment has more positions than those with the same Width high bits, or more was
	// lost since: then its status is Superseded.
	Settle
)

// RangeOp is an operation of the partition's store on a part of the range. It is background work. The driver sets the
// results and calls Ranged.
type RangeOp struct {
	Kind RangeKind
	Part
	Clock uint64
	// Room is the greatest length of the batch of a CopyOut in bytes.
	Room int
	// Data is a batch. That of a CopyIn came with a Batch, and belongs to the driver again when it calls Ranged. That
	// of a CopyOut is memory of the driver, and is sent in the turn of Ranged.
	Data []byte
	// Mem is that of the Batch.
	Mem uint32
	// Width is that of a Settle: bits of a position.
	Width uint8
	// Lost: LostAt is the last position of the data that the store could not read. It is for StoreUnreadable.
	Lost   bool
	LostAt uint64
	// askedNS is when the batch of a CopyIn was asked for.
	askedNS int64
	// repairs: it is for a repair of the asker.
	repairs bool
	// asker is the member that has asked, or NoPeer for the replica itself; tag and epoch are those of its message.
	asker      Peer
	tag, epoch uint64
}

// Progress has the counters of a pass.
type Progress struct {
	// Compared counts the parts that were compared, each by the digests of up to 64 sub-ranges in one answer. Batches
	// and Bytes count what was copied.
	Compared, Batches, Bytes uint64
}

type taskState uint8

const (
	taskIdle     taskState = iota
	taskWanted             // to be asked for
	taskAsked              // the copier has been asked
	taskDigested           // the copier has answered, the store here computes its digests
	taskStored             // a batch is being stored
	taskDraining           // a batch of an earlier pass is being stored
)

// task is the comparison or the copy of a part. There are Config.Parts tasks, each with one part after the other.
type task struct {
	Part
	state taskState
	// copied: the part is copied, not compared. lost: the request to the copier, or its answer, was lost.
	copied, lost bool
	// attempt counts the requests to the copier. It is in their tags, so that an answer to an earlier one is
	// recognised.
	attempt uint32
	// askedNS is when the copier was asked, dueNS when it may be asked again.
	askedNS, dueNS int64
	// again: the part is an open part (open.go), up to the position end, that was asked for tries times before.
	again bool
	end   uint64
	tries uint8
}

// differing has the sub-ranges of a part that were found to differ: one bit each in differ, and in copied if the
// sub-range is to be copied without comparing it further. Those in joined are copied together with the one before them:
// a power of two of adjacent sub-ranges, which form one Part.
type differing struct {
	first                  uint64
	bits                   uint8 // of each
	differ, copied, joined uint64
}

// pass is the state of a filling member.
type pass struct {
	// clock is the version up to which items are replaced; 0 until the pass begins.
	clock uint64
	// differing has the sub-ranges that no task has taken yet, as a stack.
	differing []differing
	tasks     []task
	// open has the parts that the copier cannot read.
	open     []openPart
	complete bool
	progress Progress
}

// Complete reports whether the replica has all data of its range, as a member since Role.Since. The node reports it to
// the manager for that membership.
func (r *Replica) Complete() bool {
	return r.role.Member && !r.damaged && (!r.role.Filling || r.pass.complete)
}

// Progress returns the counters of the present pass, or of the last one.
func (r *Replica) Progress() Progress { return r.pass.progress }

// resetPass forgets a pass: the membership is another one, or something was lost. Batches that are being stored are
// waited for.
func (r *Replica) resetPass() {
	p := &r.pass
	r.round++
	for i := range p.tasks {
		t := &p.tasks[i]
		state := taskIdle
		if t.state == taskStored || t.state == taskDraining {
			state = taskDraining
		}
		*t = task{state: state, attempt: t.attempt + 1}
	}
	r.pass = pass{tasks: p.tasks, differing: p.differing[:0]}
}

// askAgain has all requests that the copier has not answered sent again.
func (r *Replica) askAgain() {
	for i := range r.pass.tasks {
		if t := &r.pass.tasks[i]; t.state == taskAsked {
			t.state = taskWanted
		}
	}
	r.pass.askOpen()
}

// noteLost notes that the message with a tag will not be answered.
func (r *Replica) noteLost(tag uint64, out *Actions) {
	if isRepair(tag) {
		r.repairRefused(tag, false, out)
	}
	if t := r.pass.taskOf(tag, taskAsked); t != nil {
		t.lost = true
	}
}

// askLost has the requests that were lost sent again.
func (r *Replica) askLost() {
	for i := range r.pass.tasks {
		if t := &r.pass.tasks[i]; t.state == taskAsked && t.lost {
			t.state = taskWanted
		}
	}
}

// continuePass asks for parts, as many at once as there are tasks. It does so only when the clock of this epoch is
// known: then the copier has adopted the epoch.
func (r *Replica) continuePass(out *Actions) {
	p := &r.pass
	if !r.role.Filling || p.complete || r.clock == 0 || p.clock == 0 && !r.beginPass() {
		return
	}
	idle := 0
	for i := range p.tasks {
		t := &p.tasks[i]
		if t.state == taskIdle && !p.take(t) && !p.takeOpen(t, r.nowNS) {
			idle++
		}
		if t.state != taskWanted || t.copied && (r.tooFull || r.nowNS < t.dueNS) {
			continue
		}
		kind := Fetch
		if !t.copied {
			kind = Compare
		}
		t.state, t.lost, t.askedNS = taskAsked, false, r.nowNS
		t.attempt++
		r.send(r.role.Predecessor, Message{Kind: kind, Tag: t.tag(i), Round: r.round,
			Part: &Part{First: t.First, Bits: t.Bits, From: t.From}}, out)
	}
	if idle == len(p.tasks) && len(p.open) == 0 {
		p.complete, out.Complete = true, true
	}
}

// beginPass begins a pass, unless the store still has writes up to the clock, or batches of an earlier pass.
func (r *Replica) beginPass() bool {
	for i := range r.pass.tasks {
		if r.pass.tasks[i].state != taskIdle {
			return false
		}
	}
	for i := range r.writes.End() {
		if w := r.writes.At(i); w.storing && w.version <= r.clock {
			return false
		}
	}
	if r.repairing() {
		return false
	}
	r.pass.clock = r.clock
	t := &r.pass.tasks[0]
	*t = task{state: taskWanted, Part: Part{First: r.first, Bits: r.bits}, attempt: t.attempt}
	return true
}

// take gives a task the next part that differs, and reports whether there is one.
func (p *pass) take(t *task) bool {
	for len(p.differing) > 0 {
		d := &p.differing[len(p.differing)-1]
		if d.differ == 0 {
			p.differing = p.differing[:len(p.differing)-1]
			continue
		}
		n := bits.TrailingZeros64(d.differ)
		with := bits.TrailingZeros64(^(d.joined >> n >> 1)) // a power of two less 1
		d.differ &^= (2<<with - 1) << n
		*t = task{state: taskWanted, copied: d.copied>>n&1 != 0, attempt: t.attempt,
			Part: Part{First: d.first + uint64(n)<<d.bits, Bits: d.bits + uint8(bits.Len(uint(with)))}}
		return true
	}
	return false
}

// tag is the tag of the latest request of task i.
func (t *task) tag(i int) uint64 { return uint64(t.attempt)<<32 | uint64(i) }

// taskOf returns the task that an answer is for, or nil if the answer is late.
func (p *pass) taskOf(tag uint64, state taskState) *task {
	i := int(uint32(tag))
	if i >= len(p.tasks) || p.tasks[i].state != state || p.tasks[i].tag(i) != tag {
		return nil
	}
	return &p.tasks[i]
}

// receiveFill handles a message of a pass or a repair.
func (r *Replica) receiveFill(from Peer, m *Message, out *Actions) {
	asked := r.role.tail() && from == r.role.Successor
	answered := r.role.Filling && from == r.role.Predecessor
	repairs := !r.role.Filling && r.role.isOther(from)
	op := RangeOp{Part: *m.Part, Room: m.Len, asker: NoPeer, tag: m.Tag, epoch: m.Epoch}
	switch {
	case m.Kind == Compare && asked:
		op.Kind, op.asker = Digest, from
	case m.Kind == Fetch && (asked || repairs):
		op.Kind, op.asker, op.repairs = CopyOut, from, repairs
	case m.Kind == Batch && isRepair(m.Tag):
		r.receiveRepair(m, out)
		return
	case m.Kind == Sums && answered:
		t := r.pass.taskOf(m.Tag, taskAsked)
		switch {
		case t == nil || t.copied:
			return
		case len(m.Part.Sums) != 1<<min(t.Bits, fanBits):
			// They cannot be compared, and the copier would answer the same again. A copy needs no digests.
			t.state, t.copied = taskWanted, true
			return
		}
		t.state, t.Sums = taskDigested, m.Part.Sums
		op.Kind, op.Part = Digest, Part{First: t.First, Bits: t.Bits, Time: m.Part.Time}
	case m.Kind == Batch && answered:
		t := r.pass.taskOf(m.Tag, taskAsked)
		if t == nil || !t.copied {
			r.releaseValue(m, out)
			return
		}
		if r.nowNS-t.askedNS >= BatchNS {
			t.state = taskWanted
			r.releaseValue(m, out)
			return
		}
		t.state = taskStored
		r.pass.progress.Batches++
		r.pass.progress.Bytes += uint64(len(m.Value))
		op.Kind, op.Clock, op.Data, op.Mem = CopyIn, r.pass.clock, m.Value, m.Mem
		op.First, op.Bits, op.From, op.askedNS = t.First, t.Bits, t.From, t.askedNS
	default:
		r.releaseValue(m, out)
		return
	}
	out.Ranges = append(out.Ranges, op)
}

// Ranged handles the outcome of a RangeOp, which has its results.
func (r *Replica) Ranged(op *RangeOp, st StoreStatus, out *Actions) {
	switch {
	case r.damaged:
	case op.asker == NoPeer && op.Kind == CopyIn && r.nowNS-op.askedNS >= LateNS:
		r.fail(out)
	case op.asker == NoPeer && isRepair(op.tag):
		r.repaired(op, st, out)
	case op.asker == NoPeer && st == StoreUnreadable:
		r.passLost(op, out)
	case op.asker == NoPeer && st == GivenUp:
		r.drained(op)
	case st == GivenUp:
	case st == StoreUnreadable:
		if op.Lost {
			r.Repair(op.LostAt, out)
		}
	case st != Done:
		r.fail(out)
	case op.asker != NoPeer:
		// Another view may have come meanwhile: then the member asks again.
		if op.epoch == r.role.Epoch && (op.repairs || r.role.tail() && op.asker == r.role.Successor) {
			kind := Sums
			if op.Kind == CopyOut {
				kind = Batch
			}
			r.send(op.asker, Message{Kind: kind, Tag: op.tag, Value: op.Data, Part: &op.Part}, out)
		}
	case op.Kind == Digest:
		if t := r.pass.taskOf(op.tag, taskDigested); t != nil {
			r.compare(t, op.Sums)
		}
	default:
		r.copiedIn(op)
	}
}

// Wants reports whether a batch that is to be stored is of the present pass or repair, and not too old. If not, the
// CopyIn ends as GivenUp.
func (r *Replica) Wants(op *RangeOp) bool {
	return !r.damaged && (r.pass.taskOf(op.tag, taskStored) != nil && r.nowNS-op.askedNS < BatchNS || r.wantsRepair(op))
}

// drained notes that a CopyIn has ended as GivenUp. The batch is asked for again, unless it was of an earlier pass.
func (r *Replica) drained(op *RangeOp) {
	if t := r.pass.taskOf(op.tag, taskStored); t != nil {
		t.state, t.dueNS = taskWanted, r.nowNS+noRoomNS
		return
	}
	if t := &r.pass.tasks[uint32(op.tag)]; t.state == taskDraining {
		t.state = taskIdle
	}
}

// roomDueNS is when a task that waits for room may ask again; 0: none waits.
func (r *Replica) roomDueNS() (at int64) {
	for i := range r.pass.tasks {
		if t := &r.pass.tasks[i]; r.role.Filling && t.state == taskWanted && t.copied {
			due := t.dueNS
			if r.tooFull {
				due = max(due, r.nowNS+noRoomNS)
			}
			if due > r.nowNS && (at == 0 || due < at) {
				at = due
			}
		}
	}
	return at
}

// copiedIn continues after a batch that has been stored.
func (r *Replica) copiedIn(op *RangeOp) {
	t := r.pass.taskOf(op.tag, taskStored)
	switch {
	case t == nil:
		r.drained(op)
	case op.Last || t.again && op.To.Position > t.end:
		t.state = taskIdle
	default:
		t.state, t.From = taskWanted, op.To
	}
}

// compare notes the sub-ranges of a part in which the digests of the store here differ from those of the copier.
func (r *Replica) compare(t *task, own []Sum) {
	r.pass.progress.Compared++
	d := differing{first: t.First, bits: t.Bits - min(t.Bits, fanBits)}
	for i, theirs := range t.Sums {
		if own[i] == theirs {
			continue
		}
		d.differ |= 1 << i
		if more := max(own[i].Count, theirs.Count); d.bits == 0 || more <= r.leaf || theirs.Count == 0 ||
			lacksMost(own[i].Count, theirs.Count) {
			d.copied |= 1 << i
		}
	}
	d.join(t.Sums)
	t.state, t.Sums = taskIdle, nil
	if d.differ != 0 {
		r.pass.differing = append(r.pass.differing, d)
	}
}

const (
	// A sub-range is compared further only if that avoids copying at least 1/spared of its objects. So at most 1.1
	// times the differing objects are copied. If 1/spared is less than fewSpared objects, it must avoid a quarter of
	// the objects, or fewSpared of them: an answer takes longer than to copy so few.
	spared, fewSpared = 11, 4
	// Adjacent sub-ranges with at most joinedMost objects together are copied as one part. For a few objects the round
	// trip of a batch takes much longer than its data; larger parts have batches enough.
	joinedMost = 256
)

// lacksMost reports whether comparing further would avoid copying too few objects, because the member has hardly any of
// them: only live writes, if it had nothing before.
func lacksMost(own, theirs uint64) bool { return own <= max(theirs/spared, min(theirs/4, fewSpared)) }

// join joins adjacent sub-ranges that are copied or empty, if they form a Part of few objects (mayJoin).
func (d *differing) join(theirs []Sum) {
	for size := len(theirs); size > 1; size /= 2 {
		for first := 0; first < len(theirs); first += size {
			all := (uint64(1)<<(size-1)<<1 - 1) << first
			if d.joined&all == 0 && d.differ&all != 0 && d.mayJoin(theirs[first:first+size], first) {
				d.differ, d.copied, d.joined = d.differ|all, d.copied|all, d.joined|all&^(1<<first)
			}
		}
	}
}

// mayJoin reports whether the sub-ranges from first on, with the digests theirs of the copier, are to be copied
// together.
func (d *differing) mayJoin(theirs []Sum, first int) bool {
	objects := uint64(0)
	for i, sum := range theirs {
		differs, copied := d.differ>>(first+i)&1 != 0, d.copied>>(first+i)&1 != 0
		if differs && !copied || !differs && sum.Count > 0 || sum.Count > joinedMost {
			return false
		}
		objects += sum.Count
	}
	return objects <= joinedMost
}
