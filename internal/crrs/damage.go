package crrs

import (
	"jbofd/internal/invariants"
	"jbofd/internal/list"
)

// Damage.
//
// A replica whose store has failed is damaged: it does nothing more, the node reports that, and the next view goes on
// without it. When the store works again, the replica begins anew, as that of a new process does (Revive). That is safe
// on these conditions:
//
//   - The view does not have it as a member any more. The others have gone on without it, and it has forgotten what was
//     under way; in the same membership nobody would send that again.
//   - The store has nothing of it any more, so that no write of the old life comes after one of the new.
//   - The store knows the outcome of all that has failed (kvstore.Certain): it was not done, and is not done after a
//     restart either.
//
// Then the store has all that was acknowledged while the replica was a member: a write that failed was never durable
// here, so that it was not committed. It may have more, which was durable here and not committed. A member that is
// filled replaces that. The last copy serves it: it is committed then, for there is nobody else, and its client was
// told that the outcome is unknown. A repetition of it finds its identity.

// fail makes the replica useless, because its store has failed.
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
		// Its place and its memory are also those of other replicas.
		if w.waited, w.version = false, 0; !w.storing {
			r.release(i, out)
		}
	}
}

// MayRevive reports whether the replica is damaged, and no member of its chain.
func (r *Replica) MayRevive() bool { return r.damaged && !r.role.Member }

// Revive ends the damage of a replica that may revive, and of which the store has nothing. It knows the outcome of all
// that has failed.
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
