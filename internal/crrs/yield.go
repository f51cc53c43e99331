package crrs

// A ChainHead that yields to another member.
//
// A member that has been filled becomes the ChainTail. To become ChainHead again, where that spreads the writes better,
// it needs a view with another order of the same members. The new ChainHead does not know the writes that only the old
// one has. So the old one first yields: it holds back the writes that have not begun, until all others are committed.
//
//	ChainHead ── Yield: writes wait ── Yielded: none has begun ──> report ──> view with another ChainHead:
//	                                                                          those that wait end with WrongView
//
// Then no member has a write that is not committed, and any order of the members is right. If the view comes after the
// time for which writes are held back, there may be writes that the new ChainHead does not have, because it was
// downstream of the members that do. Then a former ChainHead that has begun writes acts as if it were no member any
// more (SetRole), and so does a member that has a write which the new ChainHead does not forward (lack). They are
// filled again, or serve alone if the others are gone (Sufficient). No such write was acknowledged, and no read has
// seen it, because its key was dirty.

// Yield holds back the writes that have not begun until a time of the clock of Advance, in nanoseconds, or until there
// is another view. Reads continue, and so do the writes that have begun. It may be called again, to set another time; a
// time that is over ends it with the next Flush. It has no effect at a replica that is not the ChainHead.
func (r *Replica) Yield(untilNS int64) {
	if r.role.Member && r.role.head() && !r.damaged {
		r.yieldNS = untilNS
	}
}

// Yields reports whether writes that have not begun are held back.
func (r *Replica) Yields() bool { return r.nowNS < r.yieldNS }

// Yielded reports whether the replica holds writes back and has none that has begun.
func (r *Replica) Yielded() bool { return r.Yields() && r.begun() == 0 && r.Leads() }

// begun is how many writes have begun.
func (r *Replica) begun() int { return r.writes.N() - r.queued.N - r.unjudged.N }

// endYield starts the writes that were held back, when the time of Yield is over.
func (r *Replica) endYield(out *Actions) {
	if r.yieldNS != 0 && !r.Yields() {
		r.yieldNS = 0
		r.startQueued(out)
	}
}

// isOrphaned reports whether the replica has a write that no ChainHead will forward: all writes up to the clock have
// ended at the ChainHead, and this one has no seq in the epoch.
func (r *Replica) isOrphaned(clock uint64) bool {
	for i := r.unordered.First; i != none; i = r.writes.Links.Next(i) {
		if r.writes.At(i).version <= clock {
			return true
		}
	}
	return false
}

// lack lets the replica act as if it were no member any more, because it does not have the data of its membership.
func (r *Replica) lack(out *Actions) {
	was := r.role
	r.lacking, r.surplus, r.lackingSince = true, true, was.Since
	r.abandonReads(out)
	r.become(Role{Epoch: was.Epoch, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, was, false, out)
}
