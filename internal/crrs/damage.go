package crrs

import (
	"jbofd/internal/invariants"
	"jbofd/internal/list"
)

// Damage.
//
// A replica whose store has failed is damaged: it does nothing more, the node reports that, and the next view leaves it
// out. When the store works again, the replica begins anew, as that of a new process does (Revive). That is safe on
// these conditions:
//
//   - The view does not have it as a member any more. The others have continued without it, and it has forgotten its
//     outstanding writes; in the same membership nobody would forward these again.
//   - The store has no request of it any more, so that no write from before the failure completes after one from after
//     it.
//   - The store knows the outcome of all writes that have failed (kvstore.Certain): they were not done, and are not
//     done after a restart either.
//
// Then the store has all writes that were acknowledged while the replica was a member: a write that failed was never
// durable here, so that it was not committed. It may also have writes that were durable here and not committed. If the
// replica is filled again, the pass replaces these. If it is the last copy, it serves them: they count as committed
// then, since there is no other member, and their clients were told that the outcome is unknown. A retry of such a
// write finds its identity.

// fail marks the replica damaged, because its store has failed. It ends all reads and writes.
func (r *Replica) fail(out *Actions) {
	if r.damaged {
		return
	}
	r.abandonReads(out)
	r.damaged, out.Damaged, r.yieldNS = true, true, 0
	fill(r.ring)
	fill(r.dirty)
	r.tables.dirty -= r.marks
	r.marks = 0
	r.judgeAll()
	r.unordered, r.queued, r.deciding = list.None, list.None, 0
	for i := range r.writes.End() {
		if !r.writes.Has(i) {
			continue
		}
		w := r.writes.At(i)
		if w.waited {
			out.Replies = append(out.Replies, Reply{Tag: w.Tag, Status: Unknown})
		}
		// Its slot and its memory are shared with other replicas, so they are freed.
		if w.waited, w.version = false, 0; !w.storing {
			r.release(i, out)
		}
	}
}

// MayRevive reports whether the replica is damaged, and not a member of its chain.
func (r *Replica) MayRevive() bool { return r.damaged && !r.role.Member }

// Revive ends the damage, if MayRevive. The store must have no requests of the replica, and must know the outcome of
// all that have failed.
func (r *Replica) Revive() {
	if !r.MayRevive() {
		return
	}
	invariants.Check(r.writes.N()+r.reads.N()+r.marks == 0, "crrs: something is under way in a replica that is damaged")
	r.damaged, r.missed = false, false
	tasks := r.pass.tasks
	for i := range tasks {
		tasks[i] = task{attempt: tasks[i].attempt + 1}
	}
	r.pass = pass{tasks: tasks, differing: r.pass.differing[:0]}
	r.repair = repair{attempt: r.repair.attempt + 1}
}
