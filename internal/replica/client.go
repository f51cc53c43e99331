package replica

import (
	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/tenant"
)

// Write is a client's Put or Delete.
type Write struct {
	Op kvstore.Op
	// Condition is any but kvstore.IfNewer, for versions are given by the ChainHead alone. Version is that of
	// IfVersion.
	Condition kvstore.Condition
	Version   uint64
	Key       crrs.Key
	// Value is copied.
	Value []byte
	// ID has a time until which it is kept, if it is one.
	ID kvstore.Identity
	// Expires is that of the object, in unix seconds, or with a Tombstone that of the Delete's.
	Expires   uint32
	Tombstone bool
	// Tenant pays.
	Tenant tenant.ID
	// Tag is repeated in the Reply.
	Tag uint64
}

// Write takes a client's write. Its Reply comes when it is committed.
//
// hot: 0 allocs
func (r *Replica) Write(w *Write) {
	r.begin()
	c := client{tag: w.Tag, cond: w.Condition, version: w.Version}
	if c.idle = w.Op == kvstore.Delete && w.Condition == kvstore.Always && r.port.Replica().Full(); c.idle {
		c.cond = kvstore.IfPresent // a Delete of an absent key leaves no tombstone, and gets no seq
	}
	q := crrs.Write{Op: crrs.Put, Key: w.Key, ID: crrs.Identity{Client: w.ID.Client, Seq: w.ID.Seq},
		Answered: w.ID.Answered, Expires: w.Expires, KeepUntil: w.ID.KeepUntil, Payer: uint32(w.Tenant),
		Retry: w.ID.Retry && w.ID.Client != 0, Conditional: c.cond != kvstore.Always}
	switch {
	case w.Condition == kvstore.IfNewer || w.Op != kvstore.Put && w.Op != kvstore.Delete,
		(w.ID.Client == 0) != (w.ID.KeepUntil == 0) || w.ID.Client == 0 && w.ID.Seq != 0:
		// Other replicas would not take it.
		r.replies = append(r.replies, Reply{Tag: w.Tag, Status: crrs.Refused, Refusal: kvstore.InvalidValue})
		return
	case w.Op == kvstore.Delete:
		q.Op = crrs.Delete
		q.Expires = r.wallIn(r.cfg.TombstoneSeconds)
		if w.Tombstone && (w.Expires == 0 || w.Expires > q.Expires) {
			q.Expires = w.Expires
		}
	case r.port.Replica().Full() && !q.Retry && r.port.Replica().Leads():
		r.replies = append(r.replies, Reply{Tag: w.Tag, Status: crrs.Refused, Refusal: kvstore.CapacityExceeded})
		return
	default:
		var ok bool
		if q.Value, q.Mem, ok = r.hold(w.Value, false); !ok {
			r.replies = append(r.replies, Reply{Tag: w.Tag, Status: crrs.Unavailable})
			return
		}
	}
	if q.KeepUntil != 0 && !q.Retry {
		q.KeepUntil = max(q.KeepUntil, r.wallIn(minKeepSeconds+keepMargin))
	}
	if q.Conditional || q.Retry {
		q.Position = r.position(w.Key.Bytes[:w.Key.Len])
	}
	c.retry = q.Retry
	q.Tag = r.addClient(c)
	r.port.Replica().Write(q, &r.acts)
}

// Read takes a client's read. value is memory for the value, and belongs to the replica until the Reply. The tenant
// pays.
//
// hot: 0 allocs
func (r *Replica) Read(key crrs.Key, value []byte, payer tenant.ID, tag uint64) {
	r.begin()
	r.port.Replica().Read(crrs.Read{Key: key, Value: value, Payer: uint32(payer), Tag: r.addClient(client{tag: tag})},
		&r.acts)
}

// addClient takes a place for a client's request, and returns its tag. It allocates when there are more than before.
func (r *Replica) addClient(c client) uint64 {
	i := r.clients.Take()
	*r.clients.At(i) = c
	return uint64(i)
}

// takeReplies takes the replies to clients. why and version say what the store has told of a write that was refused.
func (r *Replica) takeReplies(why kvstore.Status, version uint64) {
	for i := range r.acts.Replies {
		p := &r.acts.Replies[i]
		a := Reply{Tag: r.clients.At(int32(p.Tag)).tag, Status: p.Status, Version: p.Version, ValueLen: p.ValueLen,
			Expires: p.Expires}
		switch p.Status {
		case crrs.Refused:
			if a.Refusal, a.Version = why, version; why == kvstore.NotFound && r.clients.At(int32(p.Tag)).idle {
				a.Status, a.Refusal, a.Version = crrs.OK, kvstore.OK, 0
			}
		case crrs.NotFound:
			a.Refusal = why
		case crrs.Unreadable:
			if r.clients.At(int32(p.Tag)).retry { // nobody can tell whether it was done before
				a.Status, a.Refusal, a.Version = crrs.Refused, kvstore.Indeterminate, version
			}
		}
		r.replies = append(r.replies, a)
		r.ended = append(r.ended, uint32(p.Tag))
	}
	r.acts.Replies = r.acts.Replies[:0]
}
