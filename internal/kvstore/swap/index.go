package swap

import (
	"bytes"

	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/fifo"
	"jbofd/internal/kvstore/format"
)

// find returns the entry of a key, or nobody.
func (h *Home) find(hash uint32, key []byte) int32 {
	if h.used == 0 {
		return nobody
	}
	for i := h.table[hash&uint32(len(h.table)-1)]; i != nobody; i = h.entries[i].chain {
		if e := &h.entries[i]; e.hash == hash && bytes.Equal(e.key[:e.keyLen], key) {
			return i
		}
	}
	return nobody
}

// addEntry makes an entry; there must be room.
func (h *Home) addEntry(area int, key [format.MaxKey]byte, keyLen uint8) int32 {
	i := h.freeEntry
	invariants.Check(i != nobody, "swap: more entries than there are")
	hash := uint32(h.hash(key[:keyLen]))
	head := &h.table[hash&uint32(len(h.table)-1)]
	e := &h.entries[i]
	h.freeEntry = e.chain
	*e = entry{key: key, keyLen: keyLen, hash: hash, area: uint8(area), chain: *head, prev: nobody, next: nobody, waiting: fifo.None}
	*head = i
	h.used++
	h.areas[area].entries++
	return i
}

// append puts an entry at the end of its area's list: its record is the newest there.
func (h *Home) append(ei int32) {
	e := &h.entries[ei]
	a := &h.areas[e.area]
	e.prev, e.next = a.last, nobody
	if a.last == nobody {
		a.first = ei
	} else {
		h.entries[a.last].next = ei
	}
	a.last = ei
}

// unlink takes an entry out of its area's list, if it is there.
func (h *Home) unlink(ei int32) {
	e := &h.entries[ei]
	a := &h.areas[e.area]
	if e.prev == nobody && a.first != ei {
		return
	}
	if e.prev == nobody {
		a.first = e.next
	} else {
		h.entries[e.prev].next = e.next
	}
	if e.next == nobody {
		a.last = e.prev
	} else {
		h.entries[e.next].prev = e.prev
	}
	e.prev, e.next = nobody, nobody
}

// takeRequest returns an op for a request, or nobody.
func (h *Home) takeRequest() int32 {
	if h.requests == h.cfg.Requests {
		return nobody
	}
	i := h.takeOp()
	if i != nobody {
		h.requests++
	}
	return i
}

// takeOp returns a free op, or nobody.
func (h *Home) takeOp() int32 {
	if h.freeOps.N == 0 {
		return nobody
	}
	i := h.links.Pop(&h.freeOps)
	o := &h.ops[i]
	*o = op{buf: o.buf, big: nobody, entry: nobody}
	return i
}

func (h *Home) freeOpNow(i int32) {
	o := &h.ops[i]
	if o.big != nobody {
		h.bigFree = append(h.bigFree, o.big)
		o.big = nobody
		if h.bigWait.N > 0 {
			h.startRead(h.links.Pop(&h.bigWait))
		}
	}
	if o.kind != opHoming && o.kind != opMoving {
		h.requests--
	}
	o.kind, o.value = opFree, nil
	h.links.PushFront(&h.freeOps, i) // those whose buffers are there already are used first
}
