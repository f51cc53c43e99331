package crrs

import "math/bits"

// Filling.
//
// A member that is filled is the last of the chain: it takes every write of the epochs in which it is a member, and a
// write is committed when it is durable there, too. What is older it gets from the ChainTail, the copier, in one pass:
//
//	filling ─ Compare ─> copier      digests of 64 parts of a range; each part that differs is compared again,
//	filling <── Sums ─── copier      until it is cheaper to copy it
//	filling ── Fetch ──> copier      a part, from a cursor on
//	filling <── Batch ── copier      objects with versions, applied as an exact copy with the clock of the pass
//
// A batch is sent when all writes that the copier had when it read have ended (Replica.Ended). So it has nothing that
// is not committed, and whatever the member has that is not, is in its window.
//
// The clock comes from the ChainHead: it is the last version before those of its epoch, once all writes up to it are
// committed. What the member has with a version up to the clock is replaced by what the copier has; what is above it is
// a live write, and stays. So it may have anything from an earlier life.
//
// The pass belongs to the membership (Role.Since), not to the epoch: the predecessor of a copier that is lost takes its
// place, and holds everything that the copier had. The member that is filled has all state of the pass, and asks for
// each part; a copier has none. So what has no answer, because the request or the answer was lost, is asked for again,
// and what was copied is not copied twice.

// Cursor is a place in the order of the objects of a range: those up to Position and Key are before it. The zero Cursor
// is before all.
type Cursor struct {
	Position uint64
	Key      Key
}

// Sum is the digest of a part of a range: how many objects and tombstones it has, and the sum of their hashes.
type Sum struct{ Count, Hash uint64 }

// Part is a part of the range: 2^Bits positions from First on, and what a message or a RangeOp says of it.
type Part struct {
	First uint64
	Bits  uint8
	// From is the cursor behind which a copy begins, To the one up to which it goes; Last: that is the end of the part.
	From, To Cursor
	Last     bool
	// Time is that of the Sums, in unix seconds: what expires until then is left out. 0: now.
	Time uint32
	// Sums are the digests of 2^fanBits parts of equal length, or of each position if there are fewer.
	Sums []Sum
}

// Copies and tombstones.
//
// A batch has what was there when it was read. If a key of it is deleted before the batch is stored, the tombstone
// keeps the old object away. So no batch may be stored when the tombstones of what was deleted since it was asked for
// are over:
//
//	read ── JoinNS ──> asked ── BatchNS ──> given to the store ── … ──> stored, LateNS later at most < MinTombstoneNS
//
// It may be read before it is asked for, because a copier whose drive is slow gives a Fetch what an earlier one of the
// same epoch and round has begun for it. The clock of the pass had come then, too, and nothing was lost since.
//
// One that was not given to the store in time is given up, and asked for again; when the store took longer, the replica
// is damaged, and is filled from the beginning. So it is with the batch of a repair, which is given up sooner. Writes,
// which are held back for any time if there is no room, do not depend on it: see storeAgain.
const (
	JoinNS  = 60e9
	BatchNS = 60e9
	LateNS  = 300e9
	// MinTombstoneNS is how long a tombstone has to last at least, by the time of day of the node whose store has it.
	// That may be set forward by the difference to how long it does last.
	MinTombstoneNS = JoinNS + LateNS + 1e9
	// noRoomNS is when a batch is asked for again for which there was no room.
	noRoomNS = 1e9
)

// fanBits is the logarithm of the number of parts that are compared at once.
const fanBits = 6

// RangeKind is the kind of a RangeOp.
type RangeKind uint8

// Kinds of RangeOps.
const (
	// Digest sets Sums.
	Digest RangeKind = iota
	// CopyOut sets To, Last and Data: the objects behind From, as many as make a batch. What is lost makes it fail.
	CopyOut
	// CopyIn makes the store have, behind From and up to To, what is in Data and what has a version above Clock. With a
	// Clock of 0 it adds what is newer than what the store has.
	CopyIn
	// Settle looks at the segment of the store that First is in. It sets Width to how many high bits of a position say
	// that it is in that segment, and Clock to other than 0 if the segment has lost something; if these bits are fewer
	// than Width was, the store splits the segment. With that Clock, it accepts the loss, unless the segment has more
	// positions than those with the same Width high bits, or more was lost since: then its status is Superseded.
	Settle
)

// RangeOp is an operation of the partition's store on a part of the range. It is background work. The driver sets the
// results and calls Ranged.
type RangeOp struct {
	Kind RangeKind
	Part
	Clock uint64
	// Room is how long the batch of a CopyOut may be.
	Room int
	// Data is a batch. That of a CopyIn came with a Batch, and is the driver's again when it calls Ranged. That of a
	// CopyOut is memory of the driver's, and is sent in the turn of Ranged.
	Data []byte
	// Mem is that of the Batch.
	Mem uint32
	// Width is that of a Settle: bits of a position.
	Width uint8
	// Lost: LostAt is the last position of what the store could not read. It is for StoreUnreadable.
	Lost   bool
	LostAt uint64
	// askedNS is when the batch of a CopyIn was asked for.
	askedNS int64
	// repairs: the asker repairs what it cannot read.
	repairs bool
	// asker is the member that has asked, or NoPeer for the replica itself; tag and epoch are those of its message.
	asker      Peer
	tag, epoch uint64
}

// Progress counts what has been done in the present pass.
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
	taskDigested           // the copier has answered, the own store digests
	taskStored             // a batch is being stored
	taskDraining           // a batch of an earlier pass is being stored
)

// task is the comparison or the copy of a part. There are Config.Parts of them, which take one part after the other.
type task struct {
	Part
	state taskState
	// copied: the part is copied, not compared. lost: what was asked, or its answer, was lost.
	copied, lost bool
	// attempt counts the requests to the copier. It is in their tags, so that an answer to an earlier one is
	// recognized.
	attempt uint32
	// askedNS is when it was asked for, dueNS when it may be again.
	askedNS, dueNS int64
	// again: it takes up something that was open, up to the position end, and that was asked for so many times before.
	again bool
	end   uint64
	tries uint8
}

// differing are the sub-ranges of a part that were found to differ: one bit each in differ, and in copied if it is to
// be copied without comparing it further. Those in joined are copied together with the one before them: 2^n of them,
// which are a part.
type differing struct {
	first                  uint64
	bits                   uint8 // of each
	differ, copied, joined uint64
}

// pass is the state of a member that is filled.
type pass struct {
	// clock is 0 until the pass begins.
	clock uint64
	// differing are those that no task has taken yet, as a stack.
	differing []differing
	tasks     []task
	// open is what the copier cannot read.
	open     []openPart
	complete bool
	progress Progress
}

// Complete reports whether the replica has all data of its range, as a member since Role.Since. The node reports it to
// the manager for that membership.
func (r *Replica) Complete() bool {
	return r.role.Member && !r.damaged && (!r.role.Filling || r.pass.complete)
}

// Progress returns what the present pass, or the last one, has done.
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

// askAgain asks again for what the copier has not answered.
func (r *Replica) askAgain() {
	for i := range r.pass.tasks {
		if t := &r.pass.tasks[i]; t.state == taskAsked {
			t.state = taskWanted
		}
	}
	r.pass.askOpen()
}

// noteLost notes that what was asked for, by the tag of the message, will not be answered.
func (r *Replica) noteLost(tag uint64, out *Actions) {
	if isRepair(tag) {
		r.repairRefused(tag, false, out)
	}
	if t := r.pass.taskOf(tag, taskAsked); t != nil {
		t.lost = true
	}
}

// askLost asks again for what was lost.
func (r *Replica) askLost() {
	for i := range r.pass.tasks {
		if t := &r.pass.tasks[i]; t.state == taskAsked && t.lost {
			t.state = taskWanted
		}
	}
}

// continuePass asks for as many parts as may be under way. It does so only when the clock has come in this epoch: then
// the copier has adopted the epoch.
func (r *Replica) continuePass(out *Actions) {
	p := &r.pass
	if !r.role.Filling || p.complete || r.clock == 0 || p.clock == 0 && !r.beginPass() {
		return
	}
	idle := 0
	for i := range p.tasks {
		t := &p.tasks[i]
		if t.state == taskIdle && !p.take(t) && !p.takeOpen(t, r.now) {
			idle++
		}
		if t.state != taskWanted || t.copied && (r.tooFull || r.now < t.dueNS) {
			continue
		}
		kind := Fetch
		if !t.copied {
			kind = Compare
		}
		t.state, t.lost, t.askedNS = taskAsked, false, r.now
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

// receiveFill takes a message of a pass.
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
		if r.now-t.askedNS >= BatchNS {
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

// Ranged takes a RangeOp back, with its results.
func (r *Replica) Ranged(op *RangeOp, st StoreStatus, out *Actions) {
	switch {
	case r.damaged:
	case op.asker == NoPeer && op.Kind == CopyIn && r.now-op.askedNS >= LateNS:
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

// Wants reports whether a batch that the store is asked to take is of the present pass, or of the repair under way, and
// not too old. If not, it ends as GivenUp.
func (r *Replica) Wants(op *RangeOp) bool {
	return !r.damaged && (r.pass.taskOf(op.tag, taskStored) != nil && r.now-op.askedNS < BatchNS || r.wantsRepair(op))
}

// drained notes that the store does not have a batch any more, which was given up. It is asked for again, unless it was
// of an earlier pass.
func (r *Replica) drained(op *RangeOp) {
	if t := r.pass.taskOf(op.tag, taskStored); t != nil {
		t.state, t.dueNS = taskWanted, r.now+noRoomNS
		return
	}
	if t := &r.pass.tasks[uint32(op.tag)]; t.state == taskDraining {
		t.state = taskIdle
	}
}

// roomDueNS is when a task may be taken up that waits for room; 0: none does.
func (r *Replica) roomDueNS() (at int64) {
	for i := range r.pass.tasks {
		if t := &r.pass.tasks[i]; r.role.Filling && t.state == taskWanted && t.copied {
			due := t.dueNS
			if r.tooFull {
				due = max(due, r.now+noRoomNS)
			}
			if due > r.now && (at == 0 || due < at) {
				at = due
			}
		}
	}
	return at
}

// copiedIn goes on behind a batch that has been stored.
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

// compare finds the sub-ranges of a part in which the own digests differ from those of the copier.
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
	// spared is the part of the objects that comparing further has to spare: then at most 1.1 times of what differs is
	// copied. Of fewSpared objects or less it has to spare a quarter: an answer takes longer than to copy so few.
	spared, fewSpared = 11, 4
	// joinedMost is how many objects sub-ranges have together that are copied as one part. A batch that is asked for
	// takes much longer than what is in it if that is a few objects; parts with more than that have batches enough.
	joinedMost = 256
)

// lacksMost reports whether comparing further would spare so few objects that it is not worth it, because the member
// has hardly any of them: live writes of one that had nothing before.
func lacksMost(own, theirs uint64) bool { return own <= max(theirs/spared, min(theirs/4, fewSpared)) }

// join joins sub-ranges that are copied, and those between them in which there is nothing, as far as they are parts of
// few objects.
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

// mayJoin reports whether the sub-ranges from first on, of which these are the digests, are to be copied together.
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
