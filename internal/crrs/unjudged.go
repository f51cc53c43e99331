package crrs

import "jbofd/internal/list"

// Writes that nobody can judge yet.
//
// The store cannot decide on a conditional write, or on the repetition of one, where it has lost what the key has. Such
// a write waits for the repair, without a version or a place in the order: so others go on, also those of its key,
// which may be done in any order because none of them was answered. The store is not asked again before the repair has
// ended, for each time it would write the value. When it is known that no other member has what was lost, the store is
// asked whether the key was stored since (sound.go). If not, the client is told.
//
// What waits is a small part of what may be under way. What is beyond that ends as Unavailable, and so does what has
// waited for too long: nothing was done then.

const (
	// unjudgedShare is the part of Config.Window that may wait, and maxUnjudgedBytes the length of all values that do,
	// of all Replicas with the same Tables; one of any length may.
	unjudgedShare    = 8
	maxUnjudgedBytes = 1 << 20
	// unjudgedNS is for how long a write waits, unjudgedTries how often.
	unjudgedNS    = 10e9
	unjudgedTries = 3
)

// hopeless are the positions of a segment that no member has, up to untilNS. Then somebody may.
type hopeless struct {
	first, last uint64
	untilNS     int64
}

// awaitsRepair reports whether a write that may start cannot be judged as far as is known, so that the store need not
// be asked: it waits, or has ended. A Retry is not among these, because the store may know that it was done, whatever
// else is lost. If it does not, and nobody has what was lost, the client is told then: it need not wait for the next
// repair, which finds nothing either.
func (r *Replica) awaitsRepair(i int32, out *Actions) bool {
	w, p, h := r.writes.At(i), &r.repair, &r.hopeless
	switch {
	case !w.Conditional && !w.Retry:
		return false
	case r.now < h.untilNS && w.Position >= h.first && w.Position <= h.last:
		w.last = true
		return false
	case !w.Retry && p.state != repairIdle && !p.stale && p.token != 0 && p.covers(w.Position):
		r.awaitRepair(i, out)
	default:
		return false
	}
	return true
}

// awaitRepair lets a write wait for the repair of its position, if that has a chance.
func (r *Replica) awaitRepair(i int32, out *Actions) {
	w, t := r.writes.At(i), r.tables
	if w.waitedNS == 0 {
		w.waitedNS = r.now
	}
	bytes := t.unjudgedBytes + len(w.Value)
	switch {
	case r.role.NumOthers == 0, w.last:
		r.end(i, Unreadable, out)
	case r.unjudged.N >= max(1, len(r.ring)/unjudgedShare), t.unjudgedBytes > 0 && bytes > maxUnjudgedBytes,
		w.tries >= unjudgedTries, r.now-w.waitedNS >= unjudgedNS:
		r.end(i, Unavailable, out)
	default:
		w.tries++
		t.unjudgedBytes = bytes
		r.writes.Links.Push(&r.unjudged, i)
		r.queueRepair(w.Position, out)
	}
}

// popUnjudged takes the first of those that wait.
func (r *Replica) popUnjudged() int32 {
	i := r.writes.Links.Pop(&r.unjudged)
	r.tables.unjudgedBytes -= len(r.writes.At(i).Value)
	return i
}

// judge goes on with those that have waited for a repair that has ended.
func (r *Replica) judge(how RepairOutcome, out *Actions) {
	p := &r.repair
	first, last := p.positions()
	if how == RepairNoSource && p.token != 0 {
		r.hopeless = hopeless{first, last, r.now + repairPauseNS}
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

// judgeAll lets all be judged again, because there is another view.
func (r *Replica) judgeAll() {
	r.hopeless = hopeless{}
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

// endUnjudged ends those that have waited for too long.
func (r *Replica) endUnjudged(out *Actions) {
	for n := r.unjudged.N; n > 0; n-- {
		i := r.writes.Links.Pop(&r.unjudged)
		if w := r.writes.At(i); r.now-w.waitedNS < unjudgedNS {
			r.writes.Links.Push(&r.unjudged, i)
			continue
		}
		r.tables.unjudgedBytes -= len(r.writes.At(i).Value)
		r.end(i, Unavailable, out)
	}
}

// unjudgedDueNS is when one has waited for too long; 0: none waits.
func (r *Replica) unjudgedDueNS() (at int64) {
	for i := r.unjudged.First; i != none; i = r.writes.Links.Next(i) {
		if due := r.writes.At(i).waitedNS + unjudgedNS; at == 0 || due < at {
			at = due
		}
	}
	return at
}
