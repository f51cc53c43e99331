package replica

import (
	"math"
	"math/bits"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
	"jbofd/internal/tenant"
)

// storeOp is a request to the store.
type storeOp struct {
	op crrs.StoreOp
	// ranged is the RangeOp in whose place it is; nil: it is op.
	ranged *crrs.RangeOp
	buffer int32 // of a CopyOut
	// bound is the version up to which all writes have to end before a CopyOut begins, or is answered.
	bound uint64
	// failingNS is since when the store cannot do a write, or a CopyOut waits for the end of others; 0: neither.
	failingNS int64
	req       kvstore.Request
	key       crrs.Key // of req
	revives   bool     // it is for the revival
}

// beginStores makes requests of StoreOps.
//
// hot: 0 allocs
func (r *Replica) beginStores(out *Actions) {
	for i := range r.acts.Stores {
		s := &r.acts.Stores[i]
		n := r.ops.Take()
		o := r.ops.At(n)
		o.op, o.key = *s, s.Key
		q := &o.req
		q.Tag, q.Key, q.Tenant = uint64(n), o.key.Bytes[:o.key.Len], tenant.ID(s.Payer)
		switch s.Op {
		case crrs.Get:
			q.Op, q.Value = kvstore.Get, s.Value
			r.scan(o)
		case crrs.Put:
			q.Op, q.Value = kvstore.Put, s.Value
		case crrs.Delete:
			q.Op, q.Tombstone = kvstore.Delete, true
		}
		if s.Op != crrs.Get {
			q.Given, q.Expires = s.Version, s.Expires
			q.ID = kvstore.Identity{Client: s.ID.Client, Seq: s.ID.Seq, KeepUntil: s.KeepUntil,
				Answered: s.Answered, Retry: s.Retry}
			r.keepLonger(q)
		}
		// What is known in a segment that has lost keys may be older than what was lost (kvstore.Request.Sound).
		if s.Op == crrs.Get || o.decides() {
			q.Sound = r.sound(s)
		}
		if s.Conditional {
			c := r.clients.At(int32(s.Tag))
			q.Condition, q.Version = c.cond, c.version
		}
		out.Requests = append(out.Requests, *q)
	}
	r.acts.Stores = r.acts.Stores[:0]
}

// Stored takes the store's reply to a request.
//
// hot: 0 allocs
func (r *Replica) Stored(p *kvstore.Reply) {
	r.begin()
	i := int32(p.Tag)
	o := r.ops.At(i)
	switch {
	case o.ranged != nil:
		r.ranged(i, p)
		return
	case o.revives:
		r.revives(i, p)
		return
	case o.req.Op == kvstore.Scan && p.Status != kvstore.NoMemory:
		r.scanned(i, p)
		return
	case p.Status == kvstore.NoMemory:
		r.tryLater(i, retryNS)
		return
	case p.Status == kvstore.CapacityExceeded && !o.decides() && o.op.Op != crrs.Get &&
		!r.port.Replica().Gone(o.op.Slot):
		// Other members have the write, and it is held back until there is room. The ChainHead refuses Puts meanwhile.
		r.tryLater(i, retryFullNS)
		return
	case isUnreadable(p.Status) && r.unreadable(i, o, p.Status):
		return
	}
	op, given := o.op, o.req.Given
	decides := o.decides()
	r.ops.Put(i)
	if op.Op == crrs.Get {
		st := crrs.Failed
		switch p.Status {
		case kvstore.OK:
			st = crrs.Done
		case kvstore.NotFound:
			st = crrs.Absent
		case kvstore.Corrupt:
			st = crrs.StoreUnreadable
		case kvstore.DeviceError:
			st = crrs.StoreFailing
		}
		r.port.Replica().Fetched(op.Slot, st, p.Version, p.ValueLen, p.Expires, &r.acts)
		return
	}
	st := crrs.Failed
	switch p.Status {
	case kvstore.OK:
		if st = crrs.Done; decides && p.Version != given {
			st = crrs.Repeated
		}
	case kvstore.Superseded:
		if st = crrs.Superseded; op.Conditional {
			st = crrs.Declined
		}
	case kvstore.Corrupt:
		if decides {
			st = crrs.Unjudged
		}
	case kvstore.NotFound, kvstore.Exists, kvstore.VersionMismatch, kvstore.Indeterminate, kvstore.CapacityExceeded,
		kvstore.InvalidValue:
		if decides {
			st = crrs.Declined
		} else if p.Status == kvstore.CapacityExceeded {
			st = crrs.Superseded // it is gone, and was not tried again
		}
	}
	r.takeReplies(kvstore.OK, 0)
	r.port.Replica().Stored(op.Slot, st, p.Version, &r.acts)
	r.takeReplies(p.Status, p.Version)
}

// decides reports whether the store decides whether a write is done.
func (o *storeOp) decides() bool { return o.op.Conditional || o.op.Retry }

// tryLater has a request made again in after ns, or sooner.
func (r *Replica) tryLater(i int32, after int64) {
	if r.later.N == 0 || r.now+after < r.laterNS {
		r.laterNS = r.now + after
	}
	r.ops.Links.Push(&r.later, i)
}

// continueLater makes the requests again that are due.
func (r *Replica) continueLater(out *Actions) {
	if r.later.N == 0 || r.now < r.laterNS {
		return
	}
	r.laterNS = r.now + retryFullNS // of those that stay
	for n := r.later.N; n > 0; n-- {
		i := r.ops.Links.Pop(&r.later)
		o := r.ops.At(i)
		if o.ranged != nil && o.ranged.Kind == crrs.CopyIn {
			if !r.port.Replica().Wants(o.ranged) || r.isTooFull(o.ranged) {
				r.endRanged(i, crrs.GivenUp) // it is asked for again if somebody needs it
				continue
			}
		}
		r.keepLonger(&o.req)
		out.Requests = append(out.Requests, o.req)
	}
}

// minKeepSeconds is for how long an identity is kept at least: for longer than most clients repeat a write (KeepFor,
// two minutes). The ChainHead gives it keepMargin more, so that all have the same if their clocks differ by less.
const (
	minKeepSeconds = 150
	keepMargin     = 30
)

// keepLonger has a write keep its identity, and a Delete its tombstone, for as long as it is needed by the time of day
// of this node. Both were given by that of the ChainHead, which may be another one. With a Retry the time of the
// identity also says what may have been dropped.
func (r *Replica) keepLonger(q *kvstore.Request) {
	if q.Op == kvstore.Delete && q.Expires != 0 {
		q.Expires = max(q.Expires, r.wallIn(r.cfg.TombstoneSeconds))
	}
	if q.ID.KeepUntil != 0 && !q.ID.Retry {
		q.ID.KeepUntil = max(q.ID.KeepUntil, r.wallIn(minKeepSeconds))
	}
}

// ahead is how many seconds the time of day of this node is ahead of that of the one that has read a batch, so that
// the identities and tombstones in it are kept here for as long as there. It includes the time since then. Times that
// nearly agree count as the same: then both have the same identities, and they are not copied again when the member
// comes back.
func (r *Replica) ahead(batch nvme.KVRange) int64 {
	if len(batch) < nvme.KVRangeHeaderBytes {
		return 0 // the store refuses it
	}
	if d := int64(r.wall) - int64(batch.Time()); d < -keepMargin || d > keepMargin {
		return d
	}
	return 0
}

// wallIn is the time of day of an instant that is so many seconds from now.
func (r *Replica) wallIn(seconds uint32) uint32 {
	return uint32(min(uint64(r.wall)+uint64(seconds), math.MaxUint32))
}

// lastOf returns the last position of a part.
func lastOf(p *crrs.Part) uint64 {
	if p.Bits >= 64 {
		return math.MaxUint64
	}
	return p.First + 1<<p.Bits - 1
}

// sumsOf returns how many sub-ranges are compared of a part, and the logarithm of their length.
func sumsOf(p *crrs.Part) (n int, shift uint8) {
	b := min(p.Bits, 6)
	return 1 << b, p.Bits - b
}

// Position is where a key is in the ring, with the HashSeed of the cluster's stores.
//
// hot: 0 allocs
func Position(hashSeed uint64, key []byte) uint64 {
	return bits.Reverse64(format.HashKey(hashSeed, key))
}

func (r *Replica) position(key []byte) uint64 { return Position(r.cfg.HashSeed, key) }

// beginRanges makes requests of RangeOps.
func (r *Replica) beginRanges(out *Actions) {
	for i := range r.acts.Ranges {
		n := r.ops.Take()
		o := r.ops.At(n)
		rop := r.acts.Ranges[i]
		o.ranged, o.buffer = &rop, noBuffer
		p := &rop.Part
		q := &o.req
		*q = kvstore.Request{Tag: uint64(n), Background: true}
		switch rop.Kind {
		case crrs.Digest:
			sums, shift := sumsOf(p)
			p.Sums = make([]crrs.Sum, sums)
			q.Op, q.Value = kvstore.Digest, make([]byte, nvme.KVRangeHeaderBytes+sums*nvme.KVSumBytes)
			q.Range = kvstore.Range{First: p.First, Last: lastOf(p), From: p.First, Width: shift + 1, Unix: p.Time}
		case crrs.CopyOut:
			o.bound, o.failingNS = r.port.Replica().Version(), r.now
			r.ops.Links.Push(&r.copying, n)
			continue
		case crrs.CopyIn:
			q.Op, q.Value, q.Version, q.AheadSeconds = kvstore.CopyIn, rop.Data, rop.Clock, r.ahead(rop.Data)
			if r.isTooFull(&rop) {
				r.endRanged(n, crrs.GivenUp)
				continue
			}
		case crrs.Settle:
			q.Op, q.Version, q.Range = kvstore.Settle, rop.Clock, kvstore.Range{First: rop.First, Width: rop.Width}
		}
		out.Requests = append(out.Requests, *q)
	}
	r.acts.Ranges = r.acts.Ranges[:0]
	for left := r.copying.N; left > 0; left-- {
		n := r.ops.Links.Pop(&r.copying)
		o := r.ops.At(n)
		// It would wait for these writes with a buffer, which other ranges need.
		ended := r.port.Replica().Ended(o.ranged, o.bound)
		if !ended && r.now-o.failingNS >= uncommittedNS {
			r.endRanged(n, crrs.GivenUp)
			continue
		}
		if !ended || len(r.cfg.Batches.outs.free) == 0 {
			r.ops.Links.Push(&r.copying, n)
			continue
		}
		o.buffer = r.cfg.Batches.outs.take()
		p := &o.ranged.Part
		o.key = p.From.Key
		buf := r.cfg.Batches.outs.all[o.buffer]
		o.req.Op, o.req.Key, o.req.Value = kvstore.CopyOut, o.key.Bytes[:o.key.Len], buf[:min(len(buf), o.ranged.Room)]
		o.req.Range = kvstore.Range{First: p.First, Last: lastOf(p), From: max(p.First, p.From.Position)}
		out.Requests = append(out.Requests, o.req)
	}
}

// ranged goes on when the store has replied to a request for a range (Digest, CopyOut, CopyIn). What lacks memory or
// room is tried again later; a Digest continues until it has all sums of its part; whatever else fails makes the
// replica damaged until the store works again.
func (r *Replica) ranged(i int32, p *kvstore.Reply) {
	o := r.ops.At(i)
	st := crrs.Failed
	switch {
	case o.ranged.Kind == crrs.Settle && p.Status == kvstore.Superseded:
		st = crrs.Superseded
	case p.Status == kvstore.NoMemory, p.Status == kvstore.Superseded: // the latter: a Drop of the range is being swept
		r.tryLater(i, retryNS)
		return
	case p.Status == kvstore.CapacityExceeded && o.ranged.Kind == crrs.CopyIn && !o.ranged.Repairs():
		st = crrs.GivenUp // filling continues when there is room
	case p.Status == kvstore.CapacityExceeded:
		r.tryLater(i, retryFullNS)
		return
	case isUnreadable(p.Status):
		st = crrs.StoreUnreadable
		o.lost(p)
	case p.Status != kvstore.OK:
	case o.ranged.Kind == crrs.Settle:
		st, o.ranged.Clock, o.ranged.Width = crrs.Done, p.Version, uint8(p.ValueLen)
	case o.ranged.Kind == crrs.Digest:
		if r.addSums(o, nvme.KVRange(o.req.Value[:p.ValueLen])) {
			st = crrs.Done
			break
		}
		r.ops.Links.PushFront(&r.later, i) // it continues in this turn
		r.laterNS = r.now
		return
	case o.ranged.Kind == crrs.CopyOut:
		b := nvme.KVRange(o.req.Value[:p.ValueLen])
		to := b.To()
		o.ranged.To, o.ranged.Last, o.ranged.Data = cursorOf(&to), b.Complete(), b
		st = crrs.Done
		o.bound, o.failingNS = r.port.Replica().Version(), r.now
		r.ops.Links.Push(&r.uncommitted, i)
		r.answerCopies()
		return
	default:
		st = crrs.Done
	}
	r.endRanged(i, st)
}

// isTooFull reports whether there is no room for a batch. That of a repair needs none but what it was stored in before.
func (r *Replica) isTooFull(batch *crrs.RangeOp) bool { return r.tooFull && !batch.Repairs() }

// endRanged ends a request for a range.
func (r *Replica) endRanged(i int32, st crrs.StoreStatus) {
	o := r.ops.At(i)
	rop, buffer := o.ranged, o.buffer
	r.ops.Put(i)
	r.port.Ranged(rop, st, &r.acts, &r.traffic)
	if buffer != noBuffer {
		r.filled = append(r.filled, buffer)
	}
}

// addSums adds what a Digest has found to the sums of its part, and reports whether that was all. Otherwise the request
// continues.
func (r *Replica) addSums(o *storeOp, b nvme.KVRange) (all bool) {
	rop := o.ranged
	for i := range rop.Sums {
		s := b.Sum(i)
		rop.Sums[i].Count += s.Count()
		rop.Sums[i].Hash += s.Sum()
	}
	rop.Time = b.Time()
	if b.Complete() {
		return true
	}
	to := b.To()
	c := cursorOf(&to)
	o.key = c.Key
	o.req.Range.From, o.req.Range.Unix, o.req.Key = c.Position, rop.Time, o.key.Bytes[:o.key.Len]
	return false
}

func cursorOf(c *nvme.KVCursor) crrs.Cursor {
	return crrs.Cursor{Position: c.Position, Key: crrs.Key{Bytes: c.Key, Len: c.KeyLen}}
}
