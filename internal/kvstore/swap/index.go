package swap

import (
	"bytes"

	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/list"
)

// find returns the entry of a key, or none.
func (src *Source) find(hash uint32, key []byte) int32 {
	if src.used == 0 {
		return none
	}
	for i := src.table[hash&uint32(len(src.table)-1)]; i != none; i = src.entries[i].chain {
		if e := &src.entries[i]; e.hash == hash && bytes.Equal(e.key[:e.keyLen], key) {
			return i
		}
	}
	return none
}

// addEntry adds an entry. There must be room for it.
func (src *Source) addEntry(area int, key [format.MaxKey]byte, keyLen uint8) int32 {
	i := src.freeEntry
	invariants.Check(i != none, "swap: more entries than there are")
	hash := uint32(src.hash(key[:keyLen]))
	head := &src.table[hash&uint32(len(src.table)-1)]
	e := &src.entries[i]
	src.freeEntry = e.chain
	*e = entry{key: key, keyLen: keyLen, hash: hash, area: uint8(area), chain: *head, prev: none, next: none,
		waiting: list.None}
	*head = i
	src.used++
	src.areas[area].entries++
	return i
}

// append puts an entry at the end of its area's list, because its record is the newest there.
func (src *Source) append(ei int32) {
	e := &src.entries[ei]
	a := &src.areas[e.area]
	e.prev, e.next = a.last, none
	if a.last == none {
		a.first = ei
	} else {
		src.entries[a.last].next = ei
	}
	a.last = ei
}

// unlink takes an entry out of its area's list, if it is there.
func (src *Source) unlink(ei int32) {
	e := &src.entries[ei]
	a := &src.areas[e.area]
	if e.prev == none && a.first != ei {
		return
	}
	if e.prev == none {
		a.first = e.next
	} else {
		src.entries[e.prev].next = e.next
	}
	if e.next == none {
		a.last = e.prev
	} else {
		src.entries[e.next].prev = e.prev
	}
	e.prev, e.next = none, none
}

// takeRequest returns an op for a request, or none.
func (src *Source) takeRequest() int32 {
	if src.requests == src.cfg.Requests {
		return none
	}
	i := src.takeOp()
	if i != none {
		src.requests++
	}
	return i
}

// takeOp returns a free op, or none.
func (src *Source) takeOp() int32 {
	if src.freeOps.N == 0 {
		return none
	}
	i := src.links.Pop(&src.freeOps)
	o := &src.ops[i]
	*o = op{buf: o.buf, big: none, entry: none}
	return i
}

func (src *Source) freeOpNow(i int32) {
	o := &src.ops[i]
	if o.big != none {
		src.bigFree = append(src.bigFree, o.big)
		o.big = none
		if src.bigWait.N > 0 {
			src.startRead(src.links.Pop(&src.bigWait))
		}
	}
	if o.kind != opReturning && o.kind != opMoving {
		src.requests--
	}
	o.kind, o.value = opFree, nil
	src.links.PushFront(&src.freeOps, i) // ops that already have a buffer are used first
}
