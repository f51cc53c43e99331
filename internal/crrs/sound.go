package crrs

import "math"

// What is sound.
//
// A segment that has lost keys has what was stored in it since then. A write of a client is not older than what was
// lost of its key: the writes of a key are committed in the order of their versions, and one that is stored before an
// earlier one is stored again behind it (storeAgain). A copy may be older, if the store has lost a newer write while
// the copy was under way. So what the store knows counts if its version is greater than all that were known when a copy
// was stored last: while the member was filled, or by a repair, which copies into a part of the range.
//
// While others serve they are asked first, because they may have everything. When none can read it, the member asks its
// store once more, and what was stored since the loss is read. So it does for a member that asks: what was stored since
// all have lost it, and lost by that one again, is nowhere else.

// soundBits is the logarithm of the number of parts into which the range is divided to note where repairs have copied.
const soundBits = 4

// Sound is the version above which what the store knows in a segment that has lost keys counts, for a StoreOp whose key
// is at a position. That is needed only if RepairsHaveCopied.
func (r *Replica) Sound(op *StoreOp, position uint64) uint64 {
	switch {
	case r.role.NumOthers > 0 && !op.Last, op.Op == Get && !r.isOrderly():
		return math.MaxUint64
	case r.copied == nil:
		return r.soundAbove
	}
	return max(r.soundAbove, r.copied[r.soundPart(position)])
}

// RepairsHaveCopied reports whether Sound differs between positions.
func (r *Replica) RepairsHaveCopied() bool { return r.copied != nil }

// soundPart is the part of the range that a position is in. A list has the position of no key.
func (r *Replica) soundPart(position uint64) uint64 {
	return (position - r.first) >> (r.bits - min(r.bits, soundBits)) & (1<<soundBits - 1)
}

// noteCopy notes that the store is given a batch of a repair.
func (r *Replica) noteCopy(p *Part) {
	if r.copied == nil {
		r.copied = make([]uint64, 1<<soundBits)
	}
	for i := r.soundPart(p.First); i <= r.soundPart(p.First+(1<<p.Bits-1)); i++ {
		r.copied[i] = r.version
	}
}

// adoptSound begins anew with what is sound, if the view makes the replica serve, or others beside it. One that is
// alone in a membership from its beginning has nothing but what is known.
func (r *Replica) adoptSound(was Role, stayed bool) {
	if !stayed && r.role.Since != r.soundSince {
		r.soundAbove, r.copied = 0, nil
	}
	r.soundSince = r.role.Since
	if stayed && was.Filling || r.role.NumOthers > 0 && (!stayed || was.NumOthers == 0) {
		r.soundAbove = r.version
	}
}

// isOrderly reports whether nothing with a version of an earlier epoch is stored any more. A member may have committed
// such writes, without its Predecessor having heard of that, and is given them again, one after the other. If the store
// has lost them meanwhile, it has older ones for a while than were read. A write of which the store decides does not
// depend on that, because it waits for those of its key.
func (r *Replica) isOrderly() bool { return r.clock != 0 }
