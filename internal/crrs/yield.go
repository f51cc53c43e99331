package crrs

// A ChainHead that yields its place.
//
// A member that was filled is the ChainTail. To be ChainHead again, where that spreads the writes better, it needs a
// view with another order of the same members. The new ChainHead does not know of the writes that only the old one has.
// So the old one first yields: it holds back the writes that have not begun, until all others are committed.
//
//	ChainHead ── Yield: writes wait ── Yielded: none is under way ──> report ──> view with another ChainHead
//	                                                                              those that wait end with WrongView
//
// Then no member has a write that is not committed, and any order of the members is right. If the view comes when the
// time is over for which writes wait, there may be writes that the new ChainHead does not have, because it was behind
// those that do. A former ChainHead that has begun writes then acts as no member any more (SetRole), and so does a
// member that has one which the new ChainHead does not pass on (lack). They are filled again, or serve alone if the
// others are gone (Sufficient). Nothing was acknowledged of such a write, and no read has seen it, because its key was
// dirty.

// Yield holds back the writes that have not begun until that time, or until there is another view. Reads go on, and so
// do the writes that have begun. It may be called again, to set another time; one that is over ends it with the next
// Flush. Only a ChainHead yields.
func (r *Replica) Yield(until int64) {
	if r.role.Member && r.role.head() && !r.damaged {
		r.yieldNS = until
	}
}

// Yields reports whether writes that have not begun are held back.
func (r *Replica) Yields() bool { return r.now < r.yieldNS }

// Yielded reports whether the replica holds writes back and has none under way.
func (r *Replica) Yielded() bool { return r.Yields() && r.begun() == 0 && r.Leads() }

// begun is how many writes there are, but for those that have not begun.
func (r *Replica) begun() int { return r.writes.N() - r.queued.N - r.unjudged.N }

// endYield goes on with the writes that were held back when it is time for that.
func (r *Replica) endYield(out *Actions) {
	if r.yieldNS != 0 && !r.Yields() {
		r.yieldNS = 0
		r.startQueued(out)
	}
}

// isOrphaned reports whether the replica has a write that no ChainHead will pass on: all writes up to the clock have
// ended, at each member of the chain, and this one has no place in the order of the epoch.
func (r *Replica) isOrphaned(clock uint64) bool {
	for i := r.unordered.First; i != none; i = r.writes.Links.Next(i) {
		if r.writes.At(i).version <= clock {
			return true
		}
	}
	return false
}

// lack lets the replica act as no member any more, because it does not have the data of its membership.
func (r *Replica) lack(out *Actions) {
	was := r.role
	r.lacking, r.surplus, r.lackingSince = true, true, was.Since
	r.abandonReads(out)
	r.become(Role{Epoch: was.Epoch, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, was, false, out)
}
