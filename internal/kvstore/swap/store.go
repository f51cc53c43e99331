package swap

import (
	"jbofd/internal/kvstore"
)

// RequestBegan says that the store has taken a write of that key under the driver's tag, and RequestEnded that the
// write has ended. A key does not return while a write of it that the store took before is in progress.
//
// hot: 0 allocs
func (src *Source) RequestBegan(tag uint32, key []byte) {
	for int(tag) >= len(src.writes) {
		src.writes = append(src.writes, 0)
	}
	src.writes[tag] = src.hash(key) | 1<<32
}

// RequestEnded says that the request with that tag has ended.
//
// hot: 0 allocs
func (src *Source) RequestEnded(tag uint32) {
	if int(tag) < len(src.writes) { // else it was no write
		src.writes[tag] = 0
	}
}

// passToStore passes an op to the source's store.
func (src *Source) passToStore(oi int32) {
	src.ops[oi].entry = none
	src.links.Push(&src.toStore, oi)
}

// NextForStore returns the request that the store has to take next, or false. Its tag is for Stored. If the store has
// room for the request, TakenByStore follows.
//
// hot: 0 allocs
func (src *Source) NextForStore(r *kvstore.Request) bool {
	if src.toStore.N == 0 {
		return false
	}
	oi := src.toStore.First
	o := &src.ops[oi]
	*r = kvstore.Request{Op: o.do, Condition: o.cond, Tag: uint64(oi), Tenant: o.tenant, Key: o.key[:o.keyLen],
		Value: o.value, Room: o.room, Version: o.version, Given: o.given, Expires: o.expires, Tombstone: o.tombstone,
		ID: o.id, Range: o.ranged, Background: o.background, Restore: o.restore}
	return true
}

// TakenByStore says that the store has taken the request that NextForStore has returned.
func (src *Source) TakenByStore() {
	src.links.Pop(&src.toStore)
	src.atStore++
}

// Stored takes the store's answer to a request of NextForStore.
func (src *Source) Stored(tag uint64, r kvstore.Reply) {
	oi := int32(tag)
	src.atStore--
	if src.ops[oi].kind == opReturning {
		src.returnEnded(oi, r.Status)
		return
	}
	r.Tag = src.ops[oi].tag
	src.out.Replies = append(src.out.Replies, r)
	src.freeOpNow(oi)
}

// writing reports whether a write of a key with that hash is in the source's store, or waits to be taken by it.
func (src *Source) writing(hash uint32) bool {
	for _, w := range src.writes {
		if w == uint64(hash)|1<<32 {
			return true
		}
	}
	if src.atStore+src.toStore.N == 0 {
		return false
	}
	for i := range src.ops {
		if o := &src.ops[i]; o.kind == opWrite && o.entry == none && o.hash == hash {
			return true
		}
	}
	return false
}
