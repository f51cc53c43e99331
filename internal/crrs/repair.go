package crrs

import "math"

// Repair.
//
// What the store of a member cannot read, another member that serves has. The member stays one meanwhile: its clients
// are answered by others (read.go), and its writes are stored.
//
//	store of the member:  Settle ─────────────────────────────> CopyIn ──> Settle
//	                         │ how far the loss reaches            ▲
//	another member:          └─ own writes have ended ─ Fetch ─> Batch
//
// The copies are stored if newer, so that live writes win, and deletes, which leave tombstones for longer than a repair
// takes. A loss of a segment is settled when everything has been copied in that the other one has of its positions:
// what is not known then does not exist. Nothing is missing, for two reasons.
//
//   - The member asks when all writes that it had when the loss was found have ended. They may have been in what was
//     lost, and the other one has them then. So it takes no answer that was begun for an earlier repair: each has a
//     round of its own. What comes later the store keeps: it has replaced the lost record, and refuses to settle if
//     something was lost again.
//   - The other one answers when all writes that it had when it read have ended (Replica.Ended). So a copy has nothing
//     that is not committed, and that the member, to which it is clean, would show to readers.
//
// A repair belongs to an epoch: in the next one it begins again, if the membership is the same.
//
// A member that is filled needs no copy: it accepts the loss, and begins its pass again. For that its own writes have
// to have ended as well: what of them was lost is copied by the pass then.

// Bounds of repairs.
const (
	// repairQueue is how many positions wait for a repair; what is beyond it is found again when it is read again.
	repairQueue = 8
	// repairAgainNS is when something is tried again that another member, or the store, could not do at the moment.
	// repairPauseNS is the time from a repair that was given up to the next one, repairNS how long one may take.
	repairAgainNS = 50e6
	repairPauseNS = 1e9
	repairNS      = 10e9
	// passRestarts is how often a pass begins again because of a loss that is not found, or that cannot be settled.
	passRestarts = 3
)

type repairState uint8

const (
	repairIdle    repairState = iota
	repairAsks                // the store is to be asked how far the loss reaches
	repairWaits               // for own writes to end
	repairWanted              // a batch is to be asked for
	repairAsked               // another member has been asked
	repairSettles             // the store is to be asked to settle the loss
	repairAtStore             // the store has been asked for one of these things, or stores a batch
)

// repair is the one under way.
type repair struct {
	state repairState
	// next is what follows repairAtStore; stale: the epoch has changed, so that it begins again, or not.
	next         repairState
	stale, again bool
	position     uint64
	// Part is what is copied, behind From. Its positions have width high bits in common. token is what the store
	// settles the loss with; 0: it is of a value.
	Part
	width uint8
	token uint64
	// segmentLast is the last position of the segment, as far as it is known.
	segmentLast uint64
	// bound is the version up to which own writes have to end.
	bound uint64
	// source is the one of Role.Others that is asked. lacks has a bit for each that cannot read what comes next.
	source, lacks uint8
	attempt       uint32
	// beginNS is when it has begun, dueNS when it goes on. askedNS is when the last batch was asked for.
	beginNS, dueNS, askedNS int64
	// queue are the positions that wait, queued how many.
	queue  [repairQueue]uint64
	queued int
	// restarts counts those of passes since the last loss that was settled.
	restarts int
}

// RepairOutcome is how a repair has ended.
type RepairOutcome uint8

// Outcomes of repairs.
const (
	// RepairBegun: something was found that cannot be read.
	RepairBegun RepairOutcome = iota
	// RepairDone: it was copied from another member.
	RepairDone
	// RepairNoSource: no other member that serves has it.
	RepairNoSource
	// RepairFailed: it was given up because of the store here, or because it took too long.
	RepairFailed
)

// RepairEvent says how the repair of the positions up to Last has gone on. Of a Segment that has lost keys, everything
// was lost.
type RepairEvent struct {
	Position, Last uint64
	// SegmentLast is the last position of the segment that Position is in, which has lost nothing any more if the
	// Outcome is RepairDone. A loss may reach further, because segments are split.
	SegmentLast uint64
	Outcome     RepairOutcome
	Segment     bool
}

// repairBit is in the tags of messages and RangeOps of repairs.
const repairBit = 1 << 31

// Repairs reports whether a CopyIn is of a repair: it replaces what there was.
func (op *RangeOp) Repairs() bool { return isRepair(op.tag) }

func isRepair(tag uint64) bool { return uint32(tag) == repairBit }

func (p *repair) tag() uint64 { return uint64(p.attempt)<<32 | repairBit }

// Repair has something copied from another member that the store cannot read: what there is at a position. It is for a
// member that serves.
func (r *Replica) Repair(position uint64, out *Actions) {
	if !r.role.Member || r.role.Filling || r.damaged {
		return
	}
	r.queueRepair(position, out)
}

func (r *Replica) queueRepair(position uint64, out *Actions) {
	p := &r.repair
	if p.state != repairIdle && !p.stale && p.covers(position) {
		return
	}
	for _, q := range p.queue[:p.queued] {
		if q == position {
			return
		}
	}
	if p.queued == repairQueue || p.state == repairIdle && r.now < p.dueNS && !r.role.Filling {
		return
	}
	p.queue[p.queued] = position
	p.queued++
}

// covers reports whether the repair under way is that of a position.
func (p *repair) covers(position uint64) bool {
	return position == p.position || p.token != 0 && position>>(64-p.width) == p.position>>(64-p.width)
}

// positions are what the repair under way is of.
func (p *repair) positions() (first, last uint64) {
	if p.token == 0 {
		return p.position, p.position
	}
	return p.First, p.First + (1<<p.Bits - 1)
}

// MayRepair reports whether a Repair would begin at once.
func (r *Replica) MayRepair() bool {
	p := &r.repair
	return r.role.Member && !r.role.Filling && !r.damaged && p.state == repairIdle && p.queued == 0 && r.now >= p.dueNS
}

// repairing reports whether there is a repair under way, or to be begun.
func (r *Replica) repairing() bool { return r.repair.state != repairIdle || r.repair.queued > 0 }

// Ended reports whether all writes with a version up to a bound have ended, and what was asked for in an epoch is of no
// use any more otherwise.
func (r *Replica) Ended(op *RangeOp, bound uint64) bool {
	return op.epoch != r.role.Epoch || !r.role.Member || r.damaged || r.ended(bound, false)
}

// ended reports whether all writes up to a version have ended. One that is gone, and that the store still has, has a
// version that is not known any more. The repair here does not wait for those of which the store decides: they are not
// stored before it tells, and may wait for the repair.
func (r *Replica) ended(upTo uint64, ordered bool) bool {
	for i := range r.writes.End() {
		if w := r.writes.At(i); (w.storing || w.version != 0) && w.version <= upTo && !(ordered && w.deciding) {
			return false
		}
	}
	return true
}

// continueRepair goes on with the repair, or begins the next one.
func (r *Replica) continueRepair(out *Actions) {
	p := &r.repair
	if p.state == repairIdle && p.queued == 0 && r.unjudged.N > 0 {
		r.queueRepair(r.writes.At(r.unjudged.First).Position, out) // not while it pauses
	}
	if p.state == repairIdle && p.queued > 0 && r.now >= p.dueNS {
		r.beginRepair(out)
	}
	if p.state == repairWaits && r.ended(p.bound, true) {
		if p.state = repairWanted; r.role.Filling {
			p.state = repairSettles
		}
	} else if p.state == repairWaits && !r.role.Filling && r.now-p.beginNS >= repairNS {
		r.endRepair(RepairFailed, out)
	}
	if r.now < p.dueNS {
		return
	}
	op := RangeOp{Part: p.Part, asker: NoPeer, tag: p.tag(), epoch: r.role.Epoch, Width: p.width}
	switch p.state {
	case repairAsks:
		op.Kind, op.First, op.Width = Settle, p.position, 64-r.bits
	case repairSettles:
		op.Kind, op.First, op.Clock = Settle, p.position, p.token
	case repairWanted:
		r.askSource(out)
		return
	default:
		return
	}
	p.state, p.next = repairAtStore, p.state
	out.Ranges = append(out.Ranges, op)
}

func (r *Replica) beginRepair(out *Actions) {
	p := &r.repair
	position := p.queue[0]
	copy(p.queue[:], p.queue[1:p.queued])
	p.queued--
	*p = repair{state: repairAsks, position: position, attempt: p.attempt + 1, beginNS: r.now, queue: p.queue,
		queued: p.queued, restarts: p.restarts}
	out.Repairs = append(out.Repairs, RepairEvent{Position: position, Last: position})
	if r.role.NumOthers == 0 && !r.role.Filling {
		r.endRepair(RepairNoSource, out)
	}
}

// endRepair ends the repair.
func (r *Replica) endRepair(how RepairOutcome, out *Actions) {
	p := &r.repair
	first, last := p.positions()
	out.Repairs = append(out.Repairs, RepairEvent{Position: first, Last: last, Outcome: how, Segment: p.token != 0,
		SegmentLast: max(last, p.segmentLast)})
	if p.state, p.dueNS = repairIdle, r.now; how != RepairDone {
		p.dueNS = r.now + repairPauseNS
	}
	p.attempt++
	r.judge(how, out)
	if how == RepairDone || !r.role.Filling {
		return
	}
	if p.restarts++; p.restarts > passRestarts || p.queued == repairQueue {
		r.fail(out) // it cannot be filled
		return
	}
	p.queue[p.queued] = p.position
	p.queued++
}

// repairLater has a step taken again after some time, unless the repair has taken too long.
func (r *Replica) repairLater(next repairState, out *Actions) {
	p := &r.repair
	if r.now-p.beginNS >= repairNS {
		r.endRepair(RepairFailed, out)
		return
	}
	p.state, p.dueNS = next, r.now+repairAgainNS
}

// askSource asks another member for a batch.
func (r *Replica) askSource(out *Actions) {
	p := &r.repair
	if p.source >= r.role.NumOthers {
		r.endRepair(RepairNoSource, out)
		return
	}
	p.state, p.askedNS = repairAsked, r.now
	p.attempt++
	r.send(r.role.Others[p.source], Message{Kind: Fetch, Tag: p.tag(), Round: r.round,
		Part: &Part{First: p.First, Bits: p.Bits, From: p.From}}, out)
}

// repairRefused notes that a batch was not got. lacks: the other member cannot read it either. The next one is asked,
// and after some time when all were.
func (r *Replica) repairRefused(tag uint64, lacks bool, out *Actions) {
	p, n := &r.repair, r.role.NumOthers
	if p.state != repairAsked || tag != p.tag() {
		return
	}
	if lacks {
		p.lacks |= 1 << p.source
	}
	if p.lacks == 1<<n-1 {
		r.endRepair(RepairNoSource, out)
		return
	}
	p.state = repairWanted
	for again := true; again; again = p.lacks>>p.source&1 != 0 {
		if p.source++; p.source == n {
			p.source = 0
			r.repairLater(repairWanted, out)
		}
	}
}

// receiveRepair takes a batch.
func (r *Replica) receiveRepair(m *Message, out *Actions) {
	p := &r.repair
	if p.state != repairAsked || m.Tag != p.tag() {
		r.releaseValue(m, out)
		return
	}
	p.state, p.next = repairAtStore, repairAsked
	p.To, p.Last = m.Part.To, m.Part.Last
	r.noteCopy(&p.Part)
	out.Ranges = append(out.Ranges, RangeOp{Kind: CopyIn, Part: p.Part, Data: m.Value, Mem: m.Mem, asker: NoPeer,
		tag: p.tag(), epoch: r.role.Epoch, askedNS: p.askedNS})
}

// wantsRepair reports whether an operation is that for which the repair waits, and it has not taken too long.
func (r *Replica) wantsRepair(op *RangeOp) bool {
	p := &r.repair
	return p.state == repairAtStore && !p.stale && op.tag == p.tag() && r.now-p.beginNS < repairNS
}

// repaired goes on when the store has answered.
func (r *Replica) repaired(op *RangeOp, st StoreStatus, out *Actions) {
	p := &r.repair
	if p.stale {
		p.stale, p.state = false, repairIdle
		if p.attempt++; p.again {
			r.queueRepair(p.position, out)
		}
		return
	}
	switch did := p.next; {
	case st == StoreUnreadable, st == Superseded && did == repairSettles: // more was lost meanwhile
		r.repairLater(repairAsks, out)
	case st != Done:
		r.endRepair(RepairFailed, out)
	case did == repairAsks:
		r.foundLoss(op, out)
	case did == repairSettles:
		r.settled(op, out)
	case !p.Last:
		p.state, p.From, p.lacks = repairWanted, p.To, 0
	case p.token != 0:
		p.state = repairSettles
	default:
		r.endRepair(RepairDone, out)
	}
}

// foundLoss goes on when the store has said what there is at the position.
func (r *Replica) foundLoss(op *RangeOp, out *Actions) {
	p := &r.repair
	r.round++
	p.token, p.width, p.bound = op.Clock, op.Width, r.version
	p.Part, p.source, p.lacks = Part{First: p.position}, 0, 0
	p.segmentLast = p.position | math.MaxUint64>>p.width
	switch {
	case p.token == 0 && r.role.Filling: // the loss is not there any more
		r.endRepair(RepairDone, out)
		return
	case p.token != 0 && 64-p.width > r.bits:
		// The segment has positions of other ranges, of which others may be members. The store splits it soon.
		p.token = 0
		r.repairLater(repairAsks, out)
		return
	case p.token != 0:
		p.Bits = 64 - p.width
		p.First &^= 1<<p.Bits - 1
		p.position = p.First
	}
	p.state = repairWaits
}

// settled goes on behind a segment of the part. There are several if it was split meanwhile.
func (r *Replica) settled(op *RangeOp, out *Actions) {
	p := &r.repair
	r.repair.restarts = 0
	last := p.First + 1<<p.Bits - 1
	if end := p.position | (1<<(64-op.Width) - 1); end < last {
		p.state, p.position = repairSettles, end+1
		return
	}
	p.position = p.First
	r.endRepair(RepairDone, out)
}

// resetRepair ends the repair with its epoch. If the membership is the same it begins again.
func (r *Replica) resetRepair(stayed bool) {
	p := &r.repair
	if !stayed {
		p.queued, p.restarts = 0, 0
	}
	switch {
	case p.state == repairAtStore:
		p.stale, p.again = true, stayed
	case p.state != repairIdle && stayed:
		*p = repair{state: repairAsks, position: p.position, attempt: p.attempt + 1, beginNS: r.now, queue: p.queue,
			queued: p.queued, restarts: p.restarts}
	default:
		p.state, p.dueNS = repairIdle, 0
		p.attempt++
	}
}

// passLost begins the pass again because something of the own store was lost: at a position, if that is known.
func (r *Replica) passLost(op *RangeOp, out *Actions) {
	if op.Kind == CopyIn {
		r.copiedIn(op)
	} else if t := r.pass.taskOf(op.tag, taskDigested); t != nil {
		t.state, t.Sums = taskIdle, nil
	} else {
		return
	}
	p := &r.repair
	if !r.role.Filling {
		return
	}
	if p.restarts++; p.restarts > passRestarts {
		r.fail(out)
		return
	}
	r.resetPass()
	if op.Lost {
		r.queueRepair(op.LostAt, out)
	}
}

// repairDueNS is when the repair goes on; 0: by itself.
func (r *Replica) repairDueNS() int64 {
	p := &r.repair
	if p.state == repairWaits && !r.role.Filling {
		return p.beginNS + repairNS
	}
	if p.dueNS <= r.now || p.state == repairAsked || p.state == repairAtStore || !r.repairing() && r.unjudged.N == 0 {
		return 0
	}
	return p.dueNS
}
