package crrs

import "math"

// Repair.
//
// Data that the store of a member cannot read are copied from another member that serves. Meanwhile the member stays a
// member: other members answer its reads of these data (read.go), and its writes are stored.
//
//	store of the member:  Settle ─────────────────────────────> CopyIn ──> Settle
//	                         │ how far the loss reaches            ▲
//	another member:          └─ own writes have ended ─ Fetch ─> Batch
//
// A copy is stored only if it is newer than the store's own item, so that live writes win, and deletes, whose
// tombstones last longer than a repair. The loss of a segment is settled when all objects that the other member has at
// its positions have been copied: a key that the store does not have then does not exist. Nothing is missing, for two
// reasons.
//
//   - The member asks only when all writes that it had when the loss was found have ended. They may be among the lost
//     data, and the other member has them then. So it accepts no answer that was begun for an earlier repair: each
//     repair has its own round. Later writes are kept by the store: it has replaced the lost record, and refuses to
//     settle if data were lost again.
//   - The other member answers when all writes that it had when it read have ended (Replica.Ended). So a copy has only
//     committed writes. The member needs that, because it would show a copied key, which is clean here, to readers.
//
// A repair belongs to an epoch: in the next one it begins again, if the membership is the same.
//
// A filling member needs no copy: it accepts the loss, and begins its pass again. For that its own writes must have
// ended as well: those of them that were lost are copied by the pass.

// Bounds of repairs.
const (
	// repairQueue is how many positions wait for a repair; further ones are found again by the next reads of them.
	repairQueue = 8
	// repairAgainNS is the delay before a step is repeated that another member, or the store, could not do at the
	// moment. repairPauseNS is the time from a repair that has failed to the next one, repairNS how long one may take.
	repairAgainNS = 50e6
	repairPauseNS = 1e9
	repairNS      = 10e9
	// passRestarts is how often a pass begins again because of a loss that is not found, or cannot be settled.
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

// repair is the state of the present repair, of which there is one at a time.
type repair struct {
	state repairState
	// next, in repairAtStore, is the step that the store carries out. stale: the epoch has changed meanwhile; again:
	// the repair begins again then.
	next         repairState
	stale, again bool
	position     uint64
	// Part is copied, after From. Its positions have width high bits in common. token is that of Settle; 0: a value was
	// lost, and no keys.
	Part
	width uint8
	token uint64
	// segmentLast is the last position of the segment, as far as it is known.
	segmentLast uint64
	// bound is the version up to which own writes have to end.
	bound uint64
	// source is the index in Role.Others of the member that is asked. lacks has a bit for each of them that cannot read
	// the next batch.
	source, lacks uint8
	attempt       uint32
	// beginNS is when it has begun, dueNS when its next step is due. askedNS is when the last batch was asked for.
	beginNS, dueNS, askedNS int64
	// queue are the positions that wait, queued how many.
	queue  [repairQueue]uint64
	queued int
	// restarts counts the restarts of passes since the last loss that was settled.
	restarts int
}

// RepairOutcome is how a repair has ended.
type RepairOutcome uint8

// Outcomes of repairs.
const (
	// RepairBegun: data were found that cannot be read.
	RepairBegun RepairOutcome = iota
	// RepairDone: they were copied from another member.
	RepairDone
	// RepairNoSource: no other member that serves has them.
	RepairNoSource
	// RepairFailed: the store here has failed a step, or the repair took too long.
	RepairFailed
)

// RepairEvent is a step of the repair of the positions from Position through Last. Segment: the keys of a segment were
// lost; otherwise it is a value.
type RepairEvent struct {
	Position, Last uint64
	// SegmentLast is the last position of the segment that Position is in. After RepairDone the segment has no lost
	// keys. A loss may reach further than Last, because segments are split.
	SegmentLast uint64
	Outcome     RepairOutcome
	Segment     bool
}

// repairBit is in the tags of messages and RangeOps of repairs.
const repairBit = 1 << 31

// Repairs reports whether a CopyIn is of a repair, not of a pass.
func (op *RangeOp) Repairs() bool { return isRepair(op.tag) }

func isRepair(tag uint64) bool { return uint32(tag) == repairBit }

func (p *repair) tag() uint64 { return uint64(p.attempt)<<32 | repairBit }

// Repair queues the repair of a position at which the store cannot read data. It does nothing at a replica that does
// not serve.
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
	if p.queued == repairQueue || p.state == repairIdle && r.nowNS < p.dueNS && !r.role.Filling {
		return
	}
	p.queue[p.queued] = position
	p.queued++
}

// covers reports whether a position is among those of the present repair.
func (p *repair) covers(position uint64) bool {
	return position == p.position || p.token != 0 && position>>(64-p.width) == p.position>>(64-p.width)
}

// positions returns the positions of the present repair.
func (p *repair) positions() (first, last uint64) {
	if p.token == 0 {
		return p.position, p.position
	}
	return p.First, p.First + (1<<p.Bits - 1)
}

// MayRepair reports whether a Repair would begin at once.
func (r *Replica) MayRepair() bool {
	p := &r.repair
	return r.role.Member && !r.role.Filling && !r.damaged && p.state == repairIdle && p.queued == 0 &&
		r.nowNS >= p.dueNS
}

// repairing reports whether there is a repair, or one is queued.
func (r *Replica) repairing() bool { return r.repair.state != repairIdle || r.repair.queued > 0 }

// Ended reports whether the answer to a CopyOut need not wait any longer: all writes with a version up to bound have
// ended, or the epoch of op is over, so that its result is not used.
func (r *Replica) Ended(op *RangeOp, bound uint64) bool {
	return op.epoch != r.role.Epoch || !r.role.Member || r.damaged || r.ended(bound, false)
}

// ended reports whether all writes up to a version have ended, also in the store. The version of a write that is gone
// is not known any more, so that it counts. With ordered, writes that are deciding do not count: they are not stored
// before the store has decided, and may wait for the repair themselves.
func (r *Replica) ended(upTo uint64, ordered bool) bool {
	for i := range r.writes.End() {
		if w := r.writes.At(i); (w.storing || w.version != 0) && w.version <= upTo && !(ordered && w.deciding) {
			return false
		}
	}
	return true
}

// continueRepair takes the next step of the repair, or begins the next one.
func (r *Replica) continueRepair(out *Actions) {
	p := &r.repair
	if p.state == repairIdle && p.queued == 0 && r.unjudged.N > 0 {
		r.queueRepair(r.writes.At(r.unjudged.First).Position, out) // not while it pauses
	}
	if p.state == repairIdle && p.queued > 0 && r.nowNS >= p.dueNS {
		r.beginRepair(out)
	}
	if p.state == repairWaits && r.ended(p.bound, true) {
		if p.state = repairWanted; r.role.Filling {
			p.state = repairSettles
		}
	} else if p.state == repairWaits && !r.role.Filling && r.nowNS-p.beginNS >= repairNS {
		r.endRepair(RepairFailed, out)
	}
	if r.nowNS < p.dueNS {
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
	*p = repair{state: repairAsks, position: position, attempt: p.attempt + 1, beginNS: r.nowNS, queue: p.queue,
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
	if p.state, p.dueNS = repairIdle, r.nowNS; how != RepairDone {
		p.dueNS = r.nowNS + repairPauseNS
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

// repairLater repeats a step after repairAgainNS, unless the repair has taken too long.
func (r *Replica) repairLater(next repairState, out *Actions) {
	p := &r.repair
	if r.nowNS-p.beginNS >= repairNS {
		r.endRepair(RepairFailed, out)
		return
	}
	p.state, p.dueNS = next, r.nowNS+repairAgainNS
}

// askSource asks another member for a batch.
func (r *Replica) askSource(out *Actions) {
	p := &r.repair
	if p.source >= r.role.NumOthers {
		r.endRepair(RepairNoSource, out)
		return
	}
	p.state, p.askedNS = repairAsked, r.nowNS
	p.attempt++
	r.send(r.role.Others[p.source], Message{Kind: Fetch, Tag: p.tag(), Round: r.round,
		Part: &Part{First: p.First, Bits: p.Bits, From: p.From}}, out)
}

// repairRefused notes that another member has not sent the batch. lacks: it cannot read the data either. The next
// member is asked, after a delay if all were.
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

// receiveRepair handles a batch of a repair.
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

// wantsRepair reports whether the repair waits for an operation, and has not taken too long.
func (r *Replica) wantsRepair(op *RangeOp) bool {
	p := &r.repair
	return p.state == repairAtStore && !p.stale && op.tag == p.tag() && r.nowNS-p.beginNS < repairNS
}

// repaired handles the outcome of an operation of the repair.
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

// foundLoss handles the result of the first Settle: how far the loss reaches.
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
		// The segment has positions of other ranges, which may have other members. The store splits it soon.
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

// settled continues after a segment of the part that was settled. There are several if the segment was split meanwhile.
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
		*p = repair{state: repairAsks, position: p.position, attempt: p.attempt + 1, beginNS: r.nowNS, queue: p.queue,
			queued: p.queued, restarts: p.restarts}
	default:
		p.state, p.dueNS = repairIdle, 0
		p.attempt++
	}
}

// passLost begins the pass again, because the store of this filling member has lost data: at a position, if that is
// known.
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

// repairDueNS is when the next step of the repair is due; 0: it is due at once, or waits for an event.
func (r *Replica) repairDueNS() int64 {
	p := &r.repair
	if p.state == repairWaits && !r.role.Filling {
		return p.beginNS + repairNS
	}
	if p.dueNS <= r.nowNS || p.state == repairAsked || p.state == repairAtStore || !r.repairing() && r.unjudged.N == 0 {
		return 0
	}
	return p.dueNS
}
