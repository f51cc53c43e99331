package crrs

import "jbofd/internal/list"

type readState uint8

const (
	readIdle readState = iota
	readFetching
	readShipped
	readHeld // the value has come, and its write is not committed yet
)

// read is a read of a client, or one that another replica has shipped.
type read struct {
	Read
	state readState
	// from is the replica that has shipped it, or NoPeer for a client. shipTag is the tag of its Ship.
	from    Peer
	shipTag uint64
	// stale: the view has changed since the read began.
	stale   bool
	found   bool
	version uint64
	length  int
	expires uint32
	// shipped is Replica.shipped when the read was shipped, to the replica to.
	shipped uint32
	to      Peer
	// unreadable: the store cannot read the value, and others are asked. tried is how many of Role.Others were asked.
	// refused: one of them could not answer at the moment.
	unreadable, refused bool
	// failing: the store may be able to read the value later.
	failing bool
	tried   uint8
	// last: the store was asked once more, for what was stored since it lost data (StoreOp.Last): no other member can
	// read the value, or the read came from another member.
	last bool
	// early: the store was asked before isOrderly, so that no item of a segment that has lost keys was sound.
	early bool
}

// Read begins a client's read. There is one Reply for it.
func (r *Replica) Read(q Read, out *Actions) {
	switch {
	case !r.role.Member || r.role.Filling || r.damaged:
		out.Replies = append(out.Replies, Reply{Tag: q.Tag, Status: WrongView})
	case !r.mayRead():
		out.Replies = append(out.Replies, Reply{Tag: q.Tag, Status: Unavailable})
	default:
		i := r.takeRead(q, NoPeer, 0)
		if !r.role.tail() && r.isDirty(q.Key) {
			r.ship(i, r.role.ChainTail, out)
		} else {
			r.fetch(i, out)
		}
	}
}

func (r *Replica) takeRead(q Read, from Peer, tag uint64) int32 {
	i := r.reads.Take()
	*r.reads.At(i) = read{Read: q, from: from, shipTag: tag}
	r.tables.asked.used++
	return i
}

// mayRead reports whether a read may begin.
func (r *Replica) mayRead() bool {
	return r.authority() && r.reads.Room() > 0 && r.tables.asked.may(r.reads.N())
}

func (r *Replica) fetch(i int32, out *Actions) {
	q := r.reads.At(i)
	q.state, q.early = readFetching, !r.isOrderly()
	out.Stores = append(out.Stores, StoreOp{Slot: i, Tag: q.Tag, Op: Get, Key: q.Key, Value: q.Value, Payer: q.Payer,
		Last: q.last})
}

// ship asks another member, the ChainTail if the key is dirty.
func (r *Replica) ship(i int32, to Peer, out *Actions) {
	q := r.reads.At(i)
	q.state, q.to = readShipped, to
	r.shipped++
	q.shipped = r.shipped
	r.send(to, Message{Kind: Ship, Key: q.Key, Len: len(q.Value), Tag: r.shipTag(i)}, out)
}

func (r *Replica) shipTag(i int32) uint64 {
	return uint64(r.reads.At(i).shipped)<<32 | uint64(uint32(i))
}

// shipNext asks the next one of the other members for a value that the store cannot read. After the last one it asks
// the store once more for what was stored since the loss, and then refuses the read.
func (r *Replica) shipNext(i int32, out *Actions) {
	q := r.reads.At(i)
	if q.tried < r.role.NumOthers {
		q.tried++
		r.ship(i, r.role.Others[q.tried-1], out)
		return
	}
	st := Unreadable
	switch {
	case q.refused:
		st = Unavailable
	case q.failing:
		st = Failing
	case q.early || !r.isOrderly():
		st = Unavailable
	case !q.last && r.role.NumOthers > 0:
		q.last = true
		r.fetch(i, out)
		return
	}
	r.refuse(i, st, out)
	r.freeRead(i)
}

// receiveShip handles a read that another replica has shipped. Any member that serves may answer it while the key is
// clean, the ChainTail always.
func (r *Replica) receiveShip(from Peer, m *Message, out *Actions) {
	st := WrongView
	switch {
	case !r.role.tail() && (r.role.Filling || !r.role.isOther(from)):
	case !r.mayRead(), !r.role.tail() && r.isDirty(m.Key):
		st = Unavailable
	default:
		r.fetch(r.takeRead(Read{Key: m.Key, Value: m.Value, Payer: m.Payer}, from, m.Tag), out)
		return
	}
	r.send(from, Message{Kind: Answer, Tag: m.Tag, Status: st}, out)
}

// receiveAnswer handles the answer to a read that was shipped.
func (r *Replica) receiveAnswer(m *Message, out *Actions) {
	i := int32(uint32(m.Tag))
	if !r.reads.Has(i) || r.reads.At(i).state != readShipped || r.shipTag(i) != m.Tag {
		return
	}
	q := r.reads.At(i)
	if q.unreadable && (m.Status == Unreadable || m.Status == Unavailable) {
		q.refused = q.refused || m.Status == Unavailable
		r.shipNext(i, out)
		return
	}
	if m.Status == Unreadable { // the ChainTail cannot read it, but this replica may when the key is clean
		m.Status = Unavailable
	}
	copy(q.Value, m.Value)
	out.Replies = append(out.Replies, Reply{Tag: q.Tag, Status: m.Status, Version: m.Version, ValueLen: m.Len,
		Expires: m.Expires})
	r.freeRead(i)
}

// Fetched handles the outcome of a Get of the store: version, length in bytes and expiry (unix seconds, 0: none) of the
// value that was found.
func (r *Replica) Fetched(slot int32, st StoreStatus, version uint64, length int, expires uint32, out *Actions) {
	q := r.reads.At(slot)
	if q.stale {
		r.refuse(slot, WrongView, out)
		r.freeRead(slot)
		return
	}
	q.found, q.version, q.length, q.expires = st == Done, version, length, expires
	switch {
	case st == Failed:
		q.state = readIdle
		r.refuse(slot, Unavailable, out)
		r.freeRead(slot)
		r.fail(out)
	case st == StoreUnreadable && q.from != NoPeer && (q.early || !r.isOrderly()):
		r.refuse(slot, Unavailable, out)
		r.freeRead(slot)
	case st == StoreUnreadable && q.from != NoPeer && !q.last:
		q.last = true // no other member may have what was stored here since the loss
		r.fetch(slot, out)
	case st == StoreUnreadable && q.from != NoPeer:
		r.refuse(slot, Unreadable, out)
		r.freeRead(slot)
	case st == StoreFailing && q.from != NoPeer:
		r.refuse(slot, Unavailable, out)
		r.freeRead(slot)
	case st == StoreUnreadable, st == StoreFailing:
		q.unreadable, q.failing = true, st == StoreFailing
		r.shipNext(slot, out)
	case r.role.tail():
		// The store may have a value that is not committed yet. The read is answered when it is.
		if i := r.uncommitted(q.Key, version); i != none {
			q.state = readHeld
			r.reads.Links.Push(&r.writes.At(i).held, slot)
			return
		}
		r.answer(slot, true, out)
	case r.isDirty(q.Key) && (q.from != NoPeer || q.last):
		r.refuse(slot, Unavailable, out)
		r.freeRead(slot)
	case r.isDirty(q.Key):
		r.ship(slot, r.role.ChainTail, out)
	default:
		r.answer(slot, true, out)
	}
}

// uncommitted returns the write that a value of the ChainTail's store comes from, if it is not committed, or none. A
// store that has deleted a key may not know the version: then that is the newest outstanding Delete.
func (r *Replica) uncommitted(k Key, version uint64) int32 {
	found := int32(none)
	for i := r.dirty[r.bucket(k)]; i != none; i = r.writes.At(i).next {
		w := r.writes.At(i)
		if w.Key != k {
			continue
		}
		if version != 0 && w.version == version {
			return i
		}
		if version == 0 && w.Op == Delete && (found == none || w.version > r.writes.At(found).version) {
			found = i
		}
	}
	return found
}

// answer answers a read with the value that was fetched, if the replica still has authority. committed: the value is
// committed. Otherwise its write was abandoned here, and the read ends with WrongView.
func (r *Replica) answer(i int32, committed bool, out *Actions) {
	q := r.reads.At(i)
	switch {
	case !committed:
		r.refuse(i, WrongView, out)
	case !r.authority():
		r.refuse(i, Unavailable, out)
	case q.from != NoPeer:
		r.send(q.from, Message{Kind: Answer, Tag: q.shipTag, Status: q.status(), Version: q.version,
			Value: q.Value[:min(q.length, len(q.Value))], Len: q.length, Expires: q.expires}, out)
	default:
		out.Replies = append(out.Replies, Reply{Tag: q.Tag, Status: q.status(), Version: q.version, ValueLen: q.length,
			Expires: q.expires})
	}
	r.freeRead(i)
}

func (q *read) status() Status {
	if q.found {
		return OK
	}
	return NotFound
}

// refuse answers a read without a value.
func (r *Replica) refuse(i int32, st Status, out *Actions) {
	if q := r.reads.At(i); q.from != NoPeer {
		r.send(q.from, Message{Kind: Answer, Tag: q.shipTag, Status: st}, out)
	} else {
		out.Replies = append(out.Replies, Reply{Tag: q.Tag, Status: st})
	}
}

func (r *Replica) freeRead(i int32) {
	r.reads.Put(i)
	r.tables.asked.used--
}

// abandonReads ends all reads, because the view changes. A read that the store has, with its memory, ends when the
// store has answered.
func (r *Replica) abandonReads(out *Actions) {
	for i := range r.writes.End() {
		if r.writes.Has(i) {
			r.writes.At(i).held = list.None
		}
	}
	for i := range r.reads.End() {
		if !r.reads.Has(i) {
			continue
		}
		q := r.reads.At(i)
		if q.state == readIdle || q.stale {
			continue
		}
		if q.state == readFetching {
			q.stale = true
			continue
		}
		r.refuse(i, WrongView, out)
		r.freeRead(i)
	}
}

// abandonShips ends the reads that were shipped to a replica whose connection was lost.
func (r *Replica) abandonShips(p Peer, out *Actions) {
	for i := range r.reads.End() {
		if r.reads.Has(i) && r.reads.At(i).state == readShipped && r.reads.At(i).to == p {
			r.refuse(i, Unavailable, out)
			r.freeRead(i)
		}
	}
}
