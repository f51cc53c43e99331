package format

import "cmp"

// LiveIdentities is the number of identities of the key whose item is at offset at that may not be dropped at a time in
// unix seconds.
//
// hot: 0 allocs
func (b Segment) LiveIdentities(at int, unix uint32) (n int) {
	end := b.LengthBytes()
	off := at + itemBytes(b[at], b.Width())
	for off < end && b[off]&itemKeyLen == 0 {
		off += ItemHeaderBytes
	}
	for ; off < end && b[off]&itemKeyLen == identityKey; off += IdentityBytes {
		if !b.Item(off).mayGo(unix) {
			n++
		}
	}
	return min(n, MaxIdentities)
}

// AppendIdentities appends them, oldest first, at most MaxIdentities.
//
// hot: 0 allocs
func (b Segment) AppendIdentities(to []Identity, at int, unix uint32) []Identity {
	n := len(to)
	for off := b.identitiesAt(at); off < b.LengthBytes() && b.Item(off).IsIdentity(); off += IdentityBytes {
		if it := b.Item(off); !it.mayGo(unix) && len(to)-n < MaxIdentities {
			to = append(to, it.Identity())
		}
	}
	return to
}

// SetIdentities replaces the identities of the key whose item is at offset at, at most MaxIdentities, and says whether
// others were dropped before their time. The view must have room for them.
//
// hot: 0 allocs
func (b Segment) SetIdentities(at int, ids []Identity, evicted bool) {
	first, n := b.identitiesAt(at), b.Identities(at)
	switch more := (len(ids) - n) * IdentityBytes; {
	case more > 0:
		b.open(first, more)
	case more < 0:
		b.cut(first, -more)
	}
	b.SetItems(b.Items() + len(ids) - n)
	for i := range ids {
		b.Item(first + i*IdentityBytes).setIdentity(&ids[i])
	}
	b.Item(at).SetEvicted(evicted && len(ids) > 0)
}

// Equal reports whether an identity has the same content, but for the outcome.
func (id *Identity) Equal(o *Identity) bool {
	return id.Client == o.Client && id.Seq == o.Seq && id.Version == o.Version && id.KeepUntil == o.KeepUntil
}

// ByVersion orders identities by the order of the requests.
func (id *Identity) ByVersion(o *Identity) int {
	return cmp.Or(cmp.Compare(id.Version, o.Version), cmp.Compare(id.Client, o.Client), cmp.Compare(id.Seq, o.Seq))
}

// answeredBefore reports whether an identity is one of a client with a lower Seq than answered.
func (id *Identity) answeredBefore(client, answered uint64) bool {
	return id.Client == client && id.Seq < answered
}

// DropAnswered removes from the identities of a key those of a client with a lower Seq than answered. The oldest one
// stays if evicted: its KeepUntil says until when identities are known to be missing (see AddIdentity). ids is changed
// in place.
//
// hot: 0 allocs
func DropAnswered(ids []Identity, client, answered uint64, evicted bool) []Identity {
	n := 0
	for i := range ids {
		if o := &ids[i]; !o.answeredBefore(client, answered) || i == 0 && evicted {
			ids[n] = *o
			n++
		}
	}
	return ids[:n]
}

// MergeIdentities adds an identity to those of a key, which are in the order of their versions. If the same request is
// there already, the higher version and the later KeepUntil stay. If there are more than MaxIdentities then, the oldest
// is evicted, which may be the new one. evicted says that identities of the key were evicted; ids is not empty then. It
// is true as long as the oldest identity is kept, so that one gets the latest KeepUntil of all that were evicted. ids
// is changed in place, and needs a capacity of MaxIdentities+1.
//
// hot: 0 allocs
func MergeIdentities(ids []Identity, id Identity, evicted bool) ([]Identity, bool) {
	until := uint32(1)
	if evicted {
		until = ids[0].KeepUntil
	}
	for i := range ids {
		o := &ids[i]
		if o.Client != id.Client || o.Seq != id.Seq {
			continue
		}
		if id.KeepUntil = LaterOf(o.KeepUntil, id.KeepUntil); id.Version <= o.Version {
			o.KeepUntil = id.KeepUntil
			return ids, evicted
		}
		ids = append(ids[:i], ids[i+1:]...)
		break
	}
	at := len(ids)
	for at > 0 && id.ByVersion(&ids[at-1]) < 0 {
		at--
	}
	ids = append(ids, Identity{})
	copy(ids[at+1:], ids[at:])
	ids[at] = id
	if len(ids) > MaxIdentities {
		until = LaterOf(until, ids[0].KeepUntil)
		ids, evicted = append(ids[:0], ids[1:]...), true
	}
	if evicted {
		ids[0].KeepUntil = LaterOf(ids[0].KeepUntil, until)
	}
	return ids, evicted
}

// LaterOf is the later of two times until which something is kept; 0: for ever.
func LaterOf(a, b uint32) uint32 {
	if a == 0 || b == 0 {
		return 0
	}
	return max(a, b)
}
