package swap

import (
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
)

// Submit says who handles a request, and takes it if the Source does.
//
// hot: 0 allocs
func (src *Source) Submit(r *kvstore.Request) Verdict {
	if src.Empty() || len(r.Key) > format.MaxKey || len(r.Key) == 0 && r.Op != kvstore.List && !r.Op.IsRange() {
		return ToStore
	}
	if r.Op == kvstore.List || r.Op.IsRange() {
		return src.takeList(r)
	}
	hash := uint32(src.hash(r.Key))
	ei := src.find(hash, r.Key)
	onlyStore := isOnlyForStore(r)
	if ei == none && (r.Op != kvstore.Put || r.Condition != kvstore.Always || onlyStore || !src.maySwap(len(r.Value)) ||
		src.writing(hash)) {
		// Versions ascend: a write that the store has begun might get a greater one than a later one here.
		return ToStore
	}
	read := r.Op == kvstore.Get || r.Op == kvstore.Exist
	if read && !src.entries[ei].durable && src.entries[ei].indeterminate == 0 {
		return ToStore // the swapped PUT has not been answered yet
	}
	oi := src.takeRequest()
	if oi == none {
		if ei == none {
			return ToStore
		}
		return Full
	}
	o := &src.ops[oi]
	o.kind, o.do, o.cond, o.tag, o.tenant, o.hash = opWrite, r.Op, r.Condition, r.Tag, r.Tenant, hash
	o.keyLen, o.value, o.room = uint8(len(r.Key)), r.Value, r.Room
	o.version, o.given, o.expires, o.tombstone, o.id = r.Version, r.Given, r.Expires, r.Tombstone, r.ID
	o.awaitsReturn = onlyStore && !read
	copy(o.key[:], r.Key)
	if read {
		o.kind = opRead
		src.read(oi, ei)
		return Taken
	}
	if ei == none {
		ei = src.addEntry(src.load.to, o.key, o.keyLen)
	}
	src.write(oi, ei)
	return Taken
}

// isOnlyForStore reports whether a write wants what only the store knows how to do.
func isOnlyForStore(r *kvstore.Request) bool {
	return r.Condition == kvstore.IfVersion || r.Condition == kvstore.IfNewer || r.Expires != 0 || r.Tombstone ||
		r.ID.Client != 0 || r.Given != 0
}

// takeList lets a List, or a request for a range, wait until all keys have returned.
func (src *Source) takeList(r *kvstore.Request) Verdict {
	if src.used == 0 {
		return ToStore
	}
	oi := src.takeRequest()
	if oi == none {
		return Full
	}
	o := &src.ops[oi]
	o.kind, o.do, o.tag, o.tenant, o.keyLen, o.value = opList, r.Op, r.Tag, r.Tenant, uint8(len(r.Key)), r.Value
	o.ranged, o.background, o.restore, o.version = r.Range, r.Background, r.Restore, r.Version
	copy(o.key[:], r.Key)
	src.links.Push(&src.lists, oi)
	return Taken
}

// EndEarly ends a List or request for a range that waits for keys to return, with Aborted. If it is with the store, or
// next to be taken by it, EndEarly returns the tag that it has there.
func (src *Source) EndEarly(tag uint64) (atStore uint64, ok bool) {
	for n := src.lists.N; n > 0; n-- {
		oi := src.links.Pop(&src.lists)
		if src.ops[oi].tag == tag {
			src.finish(oi, kvstore.Aborted, 0)
			continue
		}
		src.links.Push(&src.lists, oi)
	}
	for i := range src.ops {
		if o := &src.ops[i]; o.kind == opList && o.tag == tag {
			return uint64(i), true
		}
	}
	return 0, false
}

// write handles a write of a key with an entry, or lets it wait behind others.
func (src *Source) write(oi, ei int32) {
	o, e := &src.ops[oi], &src.entries[ei]
	o.entry = ei
	switch {
	case e.indeterminate > 0:
		src.finish(oi, kvstore.DeviceError, 0)
	case e.returning || e.waiting.N > 0 || !src.begin(oi):
		src.links.Push(&e.waiting, oi)
	}
}

// begin starts a write, or reports that it must wait: a condition for the appends before it, and a write that cannot be
// appended until the key has returned.
func (src *Source) begin(oi int32) bool {
	o := &src.ops[oi]
	e := &src.entries[o.entry]
	if !o.awaitsReturn && (o.do == kvstore.Delete || o.cond != kvstore.Always) {
		if e.appends > 0 {
			return false
		}
		switch {
		case o.do == kvstore.Delete && e.deleted, o.cond == kvstore.IfPresent && e.deleted:
			src.finish(oi, kvstore.NotFound, 0)
			return true
		case o.cond == kvstore.IfAbsent && !e.deleted:
			o.version = e.version
			src.finish(oi, kvstore.Exists, 0)
			return true
		}
	}
	if o.awaitsReturn || o.do == kvstore.Put && len(o.value) > src.cfg.MaxValueBytes {
		if src.abandoned {
			src.finish(oi, kvstore.DeviceError, 0)
			return true
		}
		src.want(o.entry)
		return false
	}
	src.send(oi)
	return true
}

// send appends an op's record to the area of its entry.
func (src *Source) send(oi int32) {
	o := &src.ops[oi]
	e := &src.entries[o.entry]
	kind, value := format.SwapPut, o.value
	if o.do == kvstore.Delete {
		kind, value = format.SwapDelete, nil
	}
	a := &src.areas[e.area]
	o.valueLen = uint32(len(value))
	if src.cfg.Versions != nil && o.kind != opMoving {
		o.version = src.cfg.Versions.NextVersion()
	}
	e.appends++
	a.appends++
	a.lastNS = src.now
	src.out.Appends = append(src.out.Appends, AreaAppend{Area: int(e.area), Append: Append{
		Source: a.Source, Kind: kind, Key: o.key[:o.keyLen], Value: value, Version: o.version, Tag: uint32(oi),
		Tenant: o.tenant,
	}})
}

// want asks for a key to return.
func (src *Source) want(ei int32) {
	if e := &src.entries[ei]; !e.wanted {
		e.wanted = true
		src.areas[e.area].wanted++
	}
}

// next continues with the writes that wait for an entry.
func (src *Source) next(ei int32) {
	e := &src.entries[ei]
	for e.waiting.N > 0 && !e.returning && e.indeterminate == 0 {
		oi := src.links.Pop(&e.waiting)
		if !src.begin(oi) {
			src.links.PushFront(&e.waiting, oi)
			return
		}
	}
}

// refuseWaiting ends the writes that wait for an entry.
func (src *Source) refuseWaiting(ei int32, st kvstore.Status) {
	e := &src.entries[ei]
	for e.waiting.N > 0 {
		src.finish(src.links.Pop(&e.waiting), st, 0)
	}
	if e.wanted {
		e.wanted = false
		src.areas[e.area].wanted--
	}
}

// Outcome takes an area's answer to an Append.
//
// hot: 0 allocs
func (src *Source) Outcome(r *Outcome) {
	oi := int32(r.Tag)
	o := &src.ops[oi]
	ei := o.entry
	e := &src.entries[ei]
	a := &src.areas[e.area]
	if r.Result == Indeterminate {
		// The writes that wait were submitted before this one failed. As the outcome of this one is not known, the
		// value on which they depend is not known either.
		e.indeterminate++
		o.answered = true
		o.value = nil
		if o.kind == opMoving {
			src.memberEnded(int(o.member), kvstore.DeviceError)
		} else {
			src.answer(o, kvstore.DeviceError, 0)
		}
		src.refuseWaiting(ei, kvstore.DeviceError)
		return
	}
	e.appends--
	a.appends--
	if o.answered {
		e.indeterminate--
	}
	if r.Result == Refused {
		src.stats.Refused++
		if o.kind == opMoving {
			i := int(o.member)
			src.freeOpNow(oi)
			src.memberEnded(i, kvstore.DeviceError)
			return
		}
		if e.indeterminate > 0 {
			src.finish(oi, kvstore.DeviceError, 0)
			return
		}
		if e.durable || e.appends > 0 {
			o.awaitsReturn = true
			src.links.PushFront(&e.waiting, oi)
			src.next(ei)
			return
		}
		src.links.PushFront(&e.waiting, oi)
		src.drop(ei)
		return
	}
	src.outBytes -= int64(e.valueLen)
	e.durable, e.deleted, e.valueLen, e.version = true, o.do == kvstore.Delete, o.valueLen, o.version
	src.outBytes += int64(e.valueLen)
	src.unlink(ei)
	e.place, e.at = r.Place, r.At
	src.append(ei)
	a.acked, a.group, a.end = r.Place+1, e.group(), r.End
	switch {
	case o.kind == opMoving:
		src.stats.Moved++
		if !o.answered {
			src.memberEnded(int(o.member), kvstore.OK)
		}
	default:
		src.stats.Swapped++
		if !o.answered {
			src.answer(o, kvstore.OK, 0)
		}
	}
	src.freeOpNow(oi)
	src.next(ei)
}

// drop removes an entry, because the source's store has the newest value. Writes that wait go to the store.
func (src *Source) drop(ei int32) {
	e := &src.entries[ei]
	invariants.Check(e.appends == 0, "swap: an entry with appends under way is dropped")
	for e.waiting.N > 0 {
		src.passToStore(src.links.Pop(&e.waiting))
	}
	if e.wanted {
		src.areas[e.area].wanted--
	}
	src.outBytes -= int64(e.valueLen)
	src.unlink(ei)
	src.areas[e.area].entries--
	at := &src.table[e.hash&uint32(len(src.table)-1)]
	for *at != ei {
		at = &src.entries[*at].chain
	}
	*at = e.chain
	*e = entry{chain: src.freeEntry}
	src.freeEntry = ei
	src.used--
}
