package crrs

import "jbofd/internal/list"

// Unjudged writes: those that cannot be decided yet.
//
// The store cannot decide a conditional write, or a retry, if it has lost the data of the key. Such a write waits for
// the repair, without a version or a seq: so other writes proceed, also those of its key, which may be done in any
// order because none of them was answered. The store is not asked again before the repair has ended, because it writes
// the value each time. When it is known that no other member has the data, the store is asked whether the key was
// stored since (StoreOp.Last, sound.go). If not, the write ends with Unreadable.
//
// Only a small part of Window may wait. Further writes end with Unavailable, and so do those that have waited for too
// long: nothing was done then.

const (
	// 1/unjudgedShare of Config.Window may wait, with values of maxUnjudgedBytes together in all Replicas with the same
	// Tables; a single value may be longer.
	unjudgedShare    = 8
	maxUnjudgedBytes = 1 << 20
	// unjudgedNS is how long a write waits at most, in all, unjudgedTries for how many repairs.
	unjudgedNS    = 10e9
	unjudgedTries = 3
)

// unrecoverable has the positions, first to last, of a segment that no member could supply. Until untilNS no repair is
// awaited for them; after that it is tried again.
type unrecoverable struct {
	first, last uint64
	untilNS     int64
}

// awaitsRepair reports whether a write that could start cannot be decided, as far as is known, so that the store need
// not be asked: it then waits for the repair, or has ended. A Retry is never held back that way, because the store may
// know that it was done, whatever else it has lost. If it does not know that, and no member has the data, the Retry
// ends (last is set): it need not wait for the next repair, which would find nothing either.
func (r *Replica) awaitsRepair(i int32, out *Actions) bool {
	w, p, h := r.writes.At(i), &r.repair, &r.unrecoverable
	switch {
	case !w.Conditional && !w.Retry:
		return false
	case r.nowNS < h.untilNS && w.Position >= h.first && w.Position <= h.last:
		w.last = true
		return false
	case !w.Retry && p.state != repairIdle && !p.stale && p.token != 0 && p.covers(w.Position):
		r.awaitRepair(i, out)
	default:
		return false
	}
	return true
}

// awaitRepair lets a write wait for the repair of its position, or ends it if no repair can help, or too much waits.
func (r *Replica) awaitRepair(i int32, out *Actions) {
	w, t := r.writes.At(i), r.tables
	if w.waitedNS == 0 {
		w.waitedNS = r.nowNS
	}
	bytes := t.unjudgedBytes + len(w.Value)
	switch {
	case r.role.NumOthers == 0, w.last:
		r.end(i, Unreadable, out)
	case r.unjudged.N >= max(1, len(r.ring)/unjudgedShare), t.unjudgedBytes > 0 && bytes > maxUnjudgedBytes,
		w.tries >= unjudgedTries, r.nowNS-w.waitedNS >= unjudgedNS:
		r.end(i, Unavailable, out)
	default:
		w.tries++
		t.unjudgedBytes = bytes
		r.writes.Links.Push(&r.unjudged, i)
		r.queueRepair(w.Position, out)
	}
}

// popUnjudged removes the first of the writes that wait, and returns it.
func (r *Replica) popUnjudged() int32 {
	i := r.writes.Links.Pop(&r.unjudged)
	r.tables.unjudgedBytes -= len(r.writes.At(i).Value)
	return i
}

// judge handles the end of the repair: the writes that have waited for it are queued again.
func (r *Replica) judge(how RepairOutcome, out *Actions) {
	p := &r.repair
	first, last := p.positions()
	if how == RepairNoSource && p.token != 0 {
		r.unrecoverable = unrecoverable{first, last, r.nowNS + repairPauseNS}
	}
	kept := list.None
	for r.unjudged.N > 0 {
		w := r.writes.At(r.unjudged.First)
		switch i := r.popUnjudged(); {
		case how == RepairFailed || w.Position < first || w.Position > last:
			r.writes.Links.Push(&kept, i)
			r.tables.unjudgedBytes += len(w.Value)
		case how == RepairNoSource && p.token != 0:
			w.last = true
			r.writes.Links.Push(&r.queued, i)
		default:
			r.writes.Links.Push(&r.queued, i)
		}
	}
	r.unjudged = kept
	r.startQueued(out)
}

// judgeAll queues all unjudged writes again, because there is another view.
func (r *Replica) judgeAll() {
	r.unrecoverable = unrecoverable{}
	for i := range r.writes.End() {
		if r.writes.Has(i) {
			r.writes.At(i).last = false
		}
	}
	for r.unjudged.N > 0 {
		i := r.popUnjudged()
		r.writes.Links.Push(&r.queued, i)
	}
}

// endUnjudged ends the unjudged writes that have waited for too long.
func (r *Replica) endUnjudged(out *Actions) {
	for n := r.unjudged.N; n > 0; n-- {
		i := r.writes.Links.Pop(&r.unjudged)
		if w := r.writes.At(i); r.nowNS-w.waitedNS < unjudgedNS {
			r.writes.Links.Push(&r.unjudged, i)
			continue
		}
		r.tables.unjudgedBytes -= len(r.writes.At(i).Value)
		r.end(i, Unavailable, out)
	}
}

// unjudgedDueNS is when the first unjudged write has waited for too long; 0: none waits.
func (r *Replica) unjudgedDueNS() (at int64) {
	for i := r.unjudged.First; i != none; i = r.writes.Links.Next(i) {
		if due := r.writes.At(i).waitedNS + unjudgedNS; at == 0 || due < at {
			at = due
		}
	}
	return at
}
