package replica

import (
	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// What the store cannot read is repaired from another member (crrs, repair.go), and whoever asks for it is answered by
// one. Writes are tried again meanwhile, for the others have them. The store takes them as soon as it knows that what
// there was is lost, which needs a second where the drive refuses to read it.

// failingNS is for how long a write is tried again that the store cannot do; then the replica is damaged. uncommittedNS
// is for how long a copy for another member waits for writes; then that may ask again, or ask another one.
const (
	failingNS     = 2e9
	uncommittedNS = 1e9
)

// isUnreadable reports whether a status says that the store has lost something, or cannot read it.
func isUnreadable(st kvstore.Status) bool { return st == kvstore.Corrupt || st == kvstore.DeviceError }

// unreadable has what the store could not read for a request repaired, and reports whether the request is tried again.
func (r *Replica) unreadable(i int32, o *storeOp, st kvstore.Status) bool {
	crr := r.port.Replica()
	if st == kvstore.Corrupt && o.decides() {
		return false // crrs lets it wait
	}
	if role := crr.Role(); st == kvstore.DeviceError || role.NumOthers > 0 || o.op.Op == crrs.Get {
		crr.Repair(r.position(o.key.Bytes[:o.key.Len]), &r.acts)
	} else {
		return false // nobody has it
	}
	if o.op.Op == crrs.Get || crr.Gone(o.op.Slot) {
		return false
	}
	if o.failingNS == 0 {
		o.failingNS = r.now
	}
	if r.now-o.failingNS >= failingNS {
		return false
	}
	after := int64(retryNS)
	if r.now-o.failingNS > retryFullNS {
		after = retryFullNS // each try writes the value again
	}
	r.tryLater(i, after)
	return true
}

// sound is the Sound of a StoreOp.
func (r *Replica) sound(s *crrs.StoreOp) uint64 {
	crr, position := r.port.Replica(), uint64(0)
	if crr.RepairsHaveCopied() {
		position = r.position(s.Key.Bytes[:s.Key.Len])
	}
	return crr.Sound(s, position)
}

// lost notes where the loss is that a request for a range has met, if the store says it.
func (o *storeOp) lost(p *kvstore.Reply) {
	if op := o.req.Op; op != kvstore.CopyOut && op != kvstore.Digest || p.ValueLen < nvme.KVRangeHeaderBytes {
		return
	}
	b := nvme.KVRange(o.req.Value[:p.ValueLen])
	o.ranged.Lost, o.ranged.LostAt = b.Lost(), lossOf(b)
}

// lossOf is the last position of what is lost in a KVRange: that of the value, or of the segment. One of a segment ends
// in front of the next position.
func lossOf(b nvme.KVRange) uint64 {
	to := b.To()
	if to.KeyLen == 0 {
		to.Position--
	}
	return to.Position
}

// answerCopies answers those CopyOuts whose objects are all committed, and those that have waited for that for too
// long. The others stay in their order. Uncommitted writes must reach the other member as Forwards, so that it knows
// that they are uncommitted. In a batch they would look committed to its readers, although all members that have them
// may be lost.
func (r *Replica) answerCopies() {
	for n := r.uncommitted.N; n > 0; n-- {
		i := r.ops.Links.Pop(&r.uncommitted)
		if o := r.ops.At(i); r.port.Replica().Ended(o.ranged, o.bound) {
			r.endRanged(i, crrs.Done)
			continue
		} else if r.now-o.failingNS >= uncommittedNS {
			r.endRanged(i, crrs.GivenUp)
			continue
		}
		r.ops.Links.Push(&r.uncommitted, i)
	}
}

// Repair has something repaired that the store has lost at a position.
func (r *Replica) Repair(position uint64) LossStep {
	crr := r.port.Replica()
	switch role := crr.Role(); {
	case !role.Member || role.Filling || r.damaged:
		return LossBegun
	case role.NumOthers == 0:
		return LossAlone
	case !crr.MayRepair():
		return LossBusy
	}
	r.begin()
	crr.Repair(position, &r.acts)
	return LossBegun
}
