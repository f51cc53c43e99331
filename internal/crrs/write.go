package crrs

import (
	"encoding/binary"
	"math/bits"

	"jbofd/internal/list"
)

// Write begins a client's write. There is one Reply for it: OK, when it is committed; Refused, Unreadable or
// Unavailable, if the store does not do it (StoreStatus); Unknown, if the replica loses its membership, its authority
// or its store meanwhile. It comes at once if nothing was begun: WrongView, if the replica is not the ChainHead;
// Unavailable, if it has no authority or no room for the write.
func (r *Replica) Write(w Write, out *Actions) {
	switch {
	case !r.role.Member || !r.role.head() || r.damaged:
		out.Replies = append(out.Replies, Reply{Tag: w.Tag, Status: WrongView})
		out.free(w.Mem)
		return
	case !r.authority() || r.writes.Room() == 0 || !r.tables.led.may(r.led):
		out.Replies = append(out.Replies, Reply{Tag: w.Tag, Status: Unavailable})
		out.free(w.Mem)
		return
	}
	i := r.take(w)
	r.writes.At(i).waited, r.writes.At(i).led = true, true
	r.led++
	r.tables.led.used++
	r.writes.Links.Push(&r.queued, i)
	r.startQueued(out)
}

// Leads reports whether the replica accepts writes of clients: it is the ChainHead, and has authority.
func (r *Replica) Leads() bool { return r.role.Member && r.role.head() && !r.damaged && r.authority() }

// take takes a slot for a write.
func (r *Replica) take(w Write) int32 {
	i := r.writes.Take()
	*r.writes.At(i) = write{Write: w, held: list.None, next: none}
	return i
}

// mayOrder reports whether one more write may have a seq: Window bounds the writes that have one and are not committed,
// together with those that are deciding, which need one later.
func (r *Replica) mayOrder() bool { return r.seq-r.committed+r.deciding < uint64(len(r.ring)) }

// startQueued starts the queued writes that may start. A write that the store decides waits until the earlier writes of
// its key are committed: a refusal reveals the value that it depends on, as a read does. Later writes of the key wait
// until it is decided: otherwise the decision would depend on another value than the previous one in the order of
// versions.
func (r *Replica) startQueued(out *Actions) {
	if !r.mayOrder() || r.Yields() {
		return
	}
	for n := r.queued.N; n > 0; n-- { // always all of them, so that they keep their order
		i := r.writes.Links.Pop(&r.queued)
		w := r.writes.At(i)
		if !r.mayOrder() || r.isQueued(w.Key, n-1) || r.blocked(w) {
			r.writes.Links.Push(&r.queued, i)
			continue
		}
		if r.awaitsRepair(i, out) {
			continue
		}
		r.version++
		w.version = r.version
		r.mark(i)
		if w.deciding = w.Retry || w.Conditional; !w.deciding {
			r.order(i)
			r.forward(i, out)
		} else {
			r.deciding++
			r.writes.Links.Push(&r.unordered, i)
		}
		r.store(i, out)
	}
}

// isQueued reports whether an older write of the key is queued. startQueued rotates the list: its first `later` entries
// are newer writes, and are skipped.
func (r *Replica) isQueued(k Key, later int) bool {
	i := r.queued.First
	for skip := later; skip > 0; skip-- {
		i = r.writes.Links.Next(i)
	}
	for ; i != none; i = r.writes.Links.Next(i) {
		if r.writes.At(i).Key == k {
			return true
		}
	}
	return false
}

// blocked reports whether a write has to wait for another one of its key.
func (r *Replica) blocked(w *write) bool {
	for i := r.dirty[r.bucket(w.Key)]; i != none; i = r.writes.At(i).next {
		o := r.writes.At(i)
		if o.Key == w.Key && (r.lockKeys || o.deciding || w.Retry || w.Conditional) {
			return true
		}
	}
	return false
}

// order gives a write the next seq.
func (r *Replica) order(i int32) {
	r.seq++
	r.place(i, r.seq)
}

// place puts a write into ring with its seq.
func (r *Replica) place(i int32, seq uint64) {
	r.writes.At(i).seq = seq
	r.ring[seq&uint64(len(r.ring)-1)] = i
}

// forward sends a write to the Successor, if there is one.
func (r *Replica) forward(i int32, out *Actions) {
	if r.role.last() {
		return
	}
	w := r.writes.At(i)
	mark := r.durable()
	r.toldDurable = mark
	r.send(r.role.Successor, Message{Kind: Forward, Seq: w.seq, Mark: mark, Op: w.Op, Key: w.Key, Value: w.Value,
		Mem: w.Mem, Version: w.version, ID: w.ID, Answered: w.Answered, Expires: w.Expires, KeepUntil: w.KeepUntil},
		out)
}

// store asks the store to do a write.
func (r *Replica) store(i int32, out *Actions) {
	w := r.writes.At(i)
	w.storing = true
	out.Stores = append(out.Stores, StoreOp{Slot: i, Tag: w.Tag, Op: w.Op, Key: w.Key, Value: w.Value,
		Version: w.version, ID: w.ID, Answered: w.Answered, Expires: w.Expires, KeepUntil: w.KeepUntil,
		Retry: w.Retry && w.deciding, Conditional: w.Conditional && w.deciding, Payer: w.Payer, Last: w.last})
}

// receiveForward handles a Forward of the Predecessor.
func (r *Replica) receiveForward(m *Message, out *Actions) {
	r.above, r.version = max(r.above, m.Mark), max(r.version, m.Version)
	switch {
	case m.Seq <= r.committed:
		// It was committed, and the Predecessor has not learned that: Flush sends an Ack.
		r.toldCommitted = 0
		r.releaseValue(m, out)
	case m.Seq > r.committed+uint64(len(r.ring)) || r.at(m.Seq) != none:
		// The replica has it already, or the Predecessor exceeds the window.
		r.releaseValue(m, out)
	default:
		r.accept(m, out)
	}
	r.progress(out)
}

// accept puts a write that was forwarded into ring. The replica may have it from an earlier epoch, in unordered.
func (r *Replica) accept(m *Message, out *Actions) {
	i := r.known(m.Version, m.Key)
	switch {
	case i != none:
		r.releaseValue(m, out)
	case r.writes.Room() == 0:
		r.missed = true
		r.releaseValue(m, out)
		return
	default:
		i = r.take(Write{Op: m.Op, Key: m.Key, Value: m.Value, Mem: m.Mem, ID: m.ID, Answered: m.Answered,
			Expires: m.Expires, KeepUntil: m.KeepUntil, Payer: m.Payer})
		r.writes.At(i).version = m.Version
		r.mark(i)
		r.store(i, out)
	}
	r.place(i, m.Seq)
	r.forward(i, out)
}

// known removes the write with a version from unordered and returns it, or none.
func (r *Replica) known(version uint64, k Key) (found int32) {
	found = none
	for n := r.unordered.N; n > 0; n-- {
		i := r.writes.Links.Pop(&r.unordered)
		if w := r.writes.At(i); found == none && w.version == version && w.Key == k {
			found = i
			continue
		}
		r.writes.Links.Push(&r.unordered, i)
	}
	return found
}

// Stored handles the outcome of a StoreOp of a write. slot is StoreOp.Slot, version that of the first try for Repeated.
func (r *Replica) Stored(slot int32, st StoreStatus, version uint64, out *Actions) {
	w := r.writes.At(slot)
	w.storing = false
	switch {
	case st == Failed && !r.damaged:
		r.fail(out)
		return
	case w.gone():
		r.release(slot, out)
		return
	case w.deciding:
		r.decided(slot, st, version, out)
	default:
		w.durable = true
		if st == Done {
			r.storeAgain(w.Key, w.version, out)
		}
	}
	r.progress(out)
	r.startQueued(out)
}

// storeAgain stores later writes of a key once more if the store has done them before this one, although it has done
// this one, too. Normally the store answers Superseded to this one. The exception: it held this write back for lack of
// room until the tombstone of a later Delete had expired. None of the later writes has been reported durable: the
// durable mark stops at this write.
func (r *Replica) storeAgain(k Key, version uint64, out *Actions) {
	for i := r.dirty[r.bucket(k)]; i != none; i = r.writes.At(i).next {
		if w := r.writes.At(i); w.Key == k && w.version > version && w.durable {
			w.durable = false
			r.store(i, out)
		}
	}
}

// decided handles the decision of the store on a write.
func (r *Replica) decided(i int32, st StoreStatus, version uint64, out *Actions) {
	w := r.writes.At(i)
	w.deciding = false
	r.deciding--
	r.remove(&r.unordered, i)
	switch st {
	case Declined:
		st := Refused
		if !r.authority() { // the process may have been paused since the write came, and the others serve without it
			st = Unavailable
		}
		r.end(i, st, out)
	case Unjudged:
		r.unmark(i)
		w.version = 0
		r.awaitRepair(i, out)
	case Repeated:
		w.version = version // it was done before, and is committed (blocked)
		r.end(i, OK, out)
	default:
		w.durable = true
		r.order(i)
		r.forward(i, out)
	}
}

// durable is the durable mark: all writes up to it are durable here and at every replica upstream.
func (r *Replica) durable() uint64 {
	if r.role.head() {
		return r.applied
	}
	return min(r.applied, r.above)
}

// progress advances applied over the writes that are durable here. The last member of the chain commits them.
func (r *Replica) progress(out *Actions) {
	for {
		i := r.at(r.applied + 1)
		if i == none || r.writes.At(i).seq != r.applied+1 || !r.writes.At(i).durable {
			break
		}
		r.applied++
	}
	if r.role.Member && r.role.last() {
		r.commit(r.durable(), out)
	}
}

// commit ends all writes up to the committed mark of the Successor, or of this replica if it is the last of the chain.
// A mark of this epoch is never above applied, because it includes what is durable here.
func (r *Replica) commit(mark uint64, out *Actions) {
	for r.committed < mark && r.committed < r.applied {
		r.committed++
		i := r.at(r.committed)
		r.ring[r.committed&uint64(len(r.ring)-1)] = none
		r.end(i, OK, out)
	}
	r.startQueued(out)
}

// end ends a write: it sends the Reply, answers the reads that wait for it, marks the key clean, and frees the slot. If
// the store has the write, it is gone, and the slot stays taken until Stored.
func (r *Replica) end(i int32, st Status, out *Actions) {
	w := r.writes.At(i)
	// A ChainHead that serves alone may be the only one that has the write. If it has no authority, as after a pause of
	// its process, the range may have been given to others without the write.
	if st == OK && r.role.NumOthers == 0 && !r.authority() {
		st = Unknown
	}
	if w.waited {
		out.Replies = append(out.Replies, Reply{Tag: w.Tag, Status: st, Version: w.version})
	}
	for w.held.N > 0 {
		r.answer(r.reads.Links.Pop(&w.held), st == OK, out)
	}
	r.unmark(i)
	w.seq, w.waited, w.version = 0, false, 0
	if !w.storing {
		r.release(i, out)
	}
}

// gone reports whether the write has ended while the store has it.
func (w *write) gone() bool { return w.version == 0 }

// Gone reports whether a write that the store has was abandoned, because the replica has lost its membership: it was
// not acknowledged, and need not be stored.
func (r *Replica) Gone(slot int32) bool { return r.writes.At(slot).gone() }

func (r *Replica) release(i int32, out *Actions) {
	w := r.writes.At(i)
	out.free(w.Mem)
	if w.led {
		r.led--
		r.tables.led.used--
	}
	r.writes.Put(i)
}

// remove removes a write from a list.
func (r *Replica) remove(l *list.List, i int32) {
	for n := l.N; n > 0; n-- {
		if j := r.writes.Links.Pop(l); j != i {
			r.writes.Links.Push(l, j)
		}
	}
}

// mark makes the key of a write dirty, unmark ends that.
func (r *Replica) mark(i int32) {
	b := r.bucket(r.writes.At(i).Key)
	r.writes.At(i).next = r.dirty[b]
	r.dirty[b] = i
	r.marks++
	r.tables.dirty++
}

func (r *Replica) unmark(i int32) {
	for at := &r.dirty[r.bucket(r.writes.At(i).Key)]; *at != none; at = &r.writes.At(*at).next {
		if *at == i {
			*at = r.writes.At(i).next
			r.marks--
			r.tables.dirty--
			return
		}
	}
}

func (r *Replica) isDirty(k Key) bool {
	for i := r.dirty[r.bucket(k)]; i != none; i = r.writes.At(i).next {
		if r.writes.At(i).Key == k {
			return true
		}
	}
	return false
}

// bucket mixes the two halves of a key with one multiplication: it is computed several times for each write.
func (r *Replica) bucket(k Key) int {
	a, b := binary.LittleEndian.Uint64(k.Bytes[:8]), binary.LittleEndian.Uint64(k.Bytes[8:])
	hi, lo := bits.Mul64(a^0x9E3779B97F4A7C15^uint64(k.Len), b^0xD6E8FEB86659FD93)
	return int((hi ^ lo) & uint64(len(r.dirty)-1))
}
