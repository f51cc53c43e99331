package crrs

import "math"

// Sound items.
//
// A segment that has lost keys has the items that were stored in it since then. Which of them may be used? An item that
// a client's write has stored is not older than the one that was lost of its key: the writes of a key are committed in
// the order of their versions, and one that is stored before an earlier one is stored again after it (storeAgain). An
// item that a copy has stored may be older, if the store has lost a newer write while the copy was on its way. So an
// item is sound, which is to say it may be used, if its version is greater than all versions that the replica had seen
// when a copy was last stored: by a pass, or by a repair, which copies into a part of the range. Sound returns that
// bound.
//
// While other members serve they are asked first, because they may have everything. When none can read the key, the
// member asks its store once more (StoreOp.Last), and then sound items are used. It does the same for another member
// that asks: if all members have lost the key, and it was stored since, and lost again by that one, only this one has
// it.

// soundBits is the base-2 logarithm of the number of parts into which the range is divided to note where repairs have
// copied.
const soundBits = 4

// Sound returns the version above which an item is sound in a segment that has lost keys, for a StoreOp whose key is at
// a position. The position matters only if RepairsHaveCopied.
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

// noteCopy notes that a batch of a repair is about to be stored.
func (r *Replica) noteCopy(p *Part) {
	if r.copied == nil {
		r.copied = make([]uint64, 1<<soundBits)
	}
	for i := r.soundPart(p.First); i <= r.soundPart(p.First+(1<<p.Bits-1)); i++ {
		r.copied[i] = r.version
	}
}

// adoptSound sets soundAbove for a new view: to the greatest version seen, if the view ends the filling of the replica,
// or if others serve beside it from now on. A replica that is alone from the beginning of its membership has had no
// copies, so that all its items are sound.
func (r *Replica) adoptSound(was Role, stayed bool) {
	if !stayed && r.role.Since != r.soundSince {
		r.soundAbove, r.copied = 0, nil
	}
	r.soundSince = r.role.Since
	if stayed && was.Filling || r.role.NumOthers > 0 && (!stayed || was.NumOthers == 0) {
		r.soundAbove = r.version
	}
}

// isOrderly reports whether all writes of earlier epochs have ended: the clock is known. Until then no item in a
// segment that has lost keys is sound for a Get. The replica may have committed such writes without its Predecessor
// having learned that, and is forwarded them again, one after the other. If the store has lost them meanwhile, it has
// older items for a while than reads have returned. A write that the store decides does not depend on that, because it
// waits for the earlier writes of its key.
func (r *Replica) isOrderly() bool { return r.clock != 0 }
