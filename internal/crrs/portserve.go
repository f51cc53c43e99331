package crrs

import "jbofd/internal/nvme"

// The commands that come from other replicas, and their responses.

// Receive handles a command of another replica. There is exactly one Response, at once or later.
//
// hot: 0 allocs
func (p *Port) Receive(from Peer, c *Incoming, out *Actions, t *Traffic) {
	k, role := c.SQE.KVReplica(), &p.r.role
	m := Message{Epoch: uint64(k.Epoch()), Seq: k.Mark(), Payer: c.Payer}
	asked, fits := p.r.role.tail() && from == role.Successor, false
	serves := !role.Filling && role.isOther(from) // it is a repair
	switch c.SQE.Opcode() {
	case nvme.CmdKVForward:
		m.Kind, fits = Forward, from == role.Predecessor
	case nvme.CmdKVDurable:
		m.Kind, fits = Durable, from == role.Predecessor
	case nvme.CmdKVSync:
		m.Kind, fits = Sync, from == role.Successor
	case nvme.CmdKVShip:
		m.Kind, fits = Ship, role.tail() || serves
	case nvme.CmdKVCompare:
		m.Kind, fits = Compare, asked
	case nvme.CmdKVFetch:
		m.Kind, fits = Fetch, asked || serves
	}
	if !fits || p.r.damaged || !role.Member || m.Epoch != role.Epoch || from == NoPeer {
		if m.Kind == Forward {
			out.free(c.Mem)
		}
		t.Responses = append(t.Responses, p.wrongView(c.Handle))
		return
	}
	switch m.Kind {
	case Forward:
		p.receiveForward(from, c, &m, out, t)
	case Durable:
		m.Clock = k.Clock()
		p.r.Receive(from, &m, out)
		p.r.toldFull = p.r.Full() // the Response has it
		t.Responses = append(t.Responses, Response{Handle: c.Handle, Result: p.mark(p.r.committed)})
	case Sync:
		p.r.Receive(from, &m, out)
		t.Responses = append(t.Responses, Response{Handle: c.Handle})
	default:
		if p.served.Room() <= 1 { // the last slot is kept for a Forward
			t.Responses = append(t.Responses, Response{Handle: c.Handle, Status: nvme.NamespaceNotReady})
			return
		}
		m.Tag = p.servedTag(p.serve(from, c, &m))
		switch n := len(k.Key(&m.Key.Bytes)); m.Kind {
		case Ship:
			m.Key.Len, m.Value, m.Len = uint8(n), c.Value, len(c.Value)
		default:
			m.Key.Len, m.Len = uint8(n), int(k.LenBytes())
			m.Part = partOf(k, m.Key, c.Position)
		}
		p.r.Receive(from, &m, out)
	}
}

// mark returns the result of a Forward or a Durable: the committed mark, and whether the partition here or that of a
// member downstream is nearly full.
func (p *Port) mark(committed uint64) uint64 {
	if p.r.Full() {
		committed |= nvme.KVChainFull
	}
	return committed
}

// partOf returns the part of the range that a Compare or a Fetch is about.
func partOf(k *nvme.KVReplicaSQE, behind Key, position uint64) *Part {
	at := k.First()
	if behind.Len > 0 {
		at = position
	} else {
		behind = Key{} // its bytes are those of the position
	}
	part := &Part{First: at &^ (1<<k.Bits() - 1), Bits: k.Bits()}
	if behind.Len > 0 || at != part.First {
		part.From = Cursor{Position: at, Key: behind}
	}
	return part
}

// receiveForward passes a Forward to the Replica. If the Replica then has the write, and it is not committed, the
// Forward stays unanswered, in kept, until the write is committed. Otherwise it is answered at once.
//
// The number of kept Forwards is bounded by what the command says (PortConfig.Keep of the sender, which package peers
// lowers so that all ranges together use at most half of a queue), and by the slots for served commands. Beyond that
// the one with the lowest seq is answered early, with the committed mark of the moment.
//
// Invariant: while writes that the Predecessor has forwarded are outstanding here, the Forward with the highest seq of
// them is kept, unless its association has ended (Abort): then the Predecessor sends it again. Its Response
// acknowledges all writes up to it. So no acknowledgement is lost, although others are answered early. A Forward
// without memory, or one that the Replica has dropped, leaves no outstanding write: it is answered at once, and the
// Replica asks for it again by a Sync.
func (p *Port) receiveForward(from Peer, c *Incoming, m *Message, out *Actions, t *Traffic) {
	k := c.SQE.KVReplica()
	m.Seq, m.Mark, m.Value, m.Mem, m.Version = k.Sequence(), k.Mark(), c.Value, c.Mem, c.Header.Version()
	m.Key = Key{Bytes: c.Header.Key(), Len: k.KeyLen()}
	m.ID = Identity{Client: c.Header.Client(), Seq: c.Header.Sequence()}
	m.Answered = min(k.Answered(), m.ID.Seq)
	m.Expires, m.KeepUntil = c.Header.Expires(), c.Header.KeepUntil()
	if m.Op = Put; k.Flags()&nvme.KVForwardDelete != 0 {
		m.Op = Delete
	}
	if c.NoMemory {
		t.Responses = append(t.Responses, Response{Handle: c.Handle, Result: p.mark(p.r.committed)})
		return
	}
	p.r.Receive(from, m, out)
	if !p.r.underWay(m.Seq) {
		t.Responses = append(t.Responses, Response{Handle: c.Handle, Result: p.mark(p.r.committed)})
		return
	}
	if p.served.Room() == 0 {
		// No slot is free. At least one has a Forward, because Receive keeps the last slot for one. Of the new Forward
		// and the kept one with the lowest seq, the one with the higher seq stays: when its write is committed all
		// earlier writes are, so that its Response acknowledges these, too.
		if m.Seq < p.served.At(p.kept[p.lowest()]).seq {
			t.Responses = append(t.Responses, Response{Handle: c.Handle, Result: p.mark(p.r.committed)})
			return
		}
		p.answerLowest(t)
	}
	p.kept = append(p.kept, p.serve(from, c, m))
	for len(p.kept) > int(k.Keep()) {
		p.answerLowest(t)
	}
}

// serve takes a slot for a command that is answered later.
func (p *Port) serve(from Peer, c *Incoming, m *Message) int32 {
	i := p.served.Take()
	p.turn++
	*p.served.At(i) = served{handle: c.Handle, from: from, kind: m.Kind, epoch: m.Epoch, seq: m.Seq, turn: p.turn}
	return i
}

func (p *Port) servedTag(i int32) uint64 { return uint64(p.served.At(i).turn)<<32 | uint64(uint32(i)) }

// servedBy returns the slot of the command with a tag, and whether that has not been answered.
func (p *Port) servedBy(tag uint64) (i int32, ok bool) {
	i = int32(uint32(tag))
	return i, p.served.Has(i) && p.servedTag(i) == tag
}

// unserve frees the slot of a command, and returns its handle.
func (p *Port) unserve(i int32) (handle uint64) {
	handle = p.served.At(i).handle
	p.served.Put(i)
	return handle
}

// takeKept removes the Forward at index n of kept, and returns its slot.
func (p *Port) takeKept(n int) int32 {
	i := p.kept[n]
	p.kept[n] = p.kept[len(p.kept)-1]
	p.kept = p.kept[:len(p.kept)-1]
	return i
}

// answerLowest answers the kept Forward with the lowest seq. The Response has the committed mark, which may be below
// that seq: then it does not acknowledge the Forward's own write.
func (p *Port) answerLowest(t *Traffic) {
	i := p.takeKept(p.lowest())
	t.Responses = append(t.Responses, Response{Handle: p.unserve(i), Result: p.mark(p.r.committed)})
}

// lowest returns the index in kept of the Forward with the lowest seq.
func (p *Port) lowest() (lowest int) {
	for n, i := range p.kept {
		if p.served.At(i).seq < p.served.At(p.kept[lowest]).seq {
			lowest = n
		}
	}
	return lowest
}

// acknowledge sends the committed mark to the Predecessor, in the Response to a kept Forward. It answers all kept
// Forwards with a seq up to the mark. If there is none, it answers the one with the lowest seq, unless that is the only
// one, which is needed to acknowledge its own write: then the mark is sent with that. If no Forward is kept, nothing is
// sent: all writes up to the mark were acknowledged by earlier Responses (see the invariant of receiveForward). Flush
// therefore need not repeat an Ack that was not sent.
func (p *Port) acknowledge(mark uint64, t *Traffic) {
	told := false
	for n := len(p.kept) - 1; n >= 0; n-- {
		if p.served.At(p.kept[n]).seq <= mark {
			i := p.takeKept(n)
			t.Responses = append(t.Responses, Response{Handle: p.unserve(i), Result: p.mark(mark)})
			told = true
		}
	}
	if !told && len(p.kept) > 1 {
		p.answerLowest(t)
	}
}

// answerMessage answers a Ship, Compare or Fetch with the Answer, Sums or Batch of the Replica. It ignores a message
// whose command was answered before.
func (p *Port) answerMessage(m *Message, t *Traffic) {
	i, ok := p.servedBy(m.Tag)
	if !ok {
		return
	}
	a := Response{Version: m.Version, Expires: m.Expires, Value: m.Value, Part: m.Part}
	switch {
	case m.Kind != Answer: // Sums are in Part; what a Batch has as its Value is the data of the Response
		a.Value, a.Data = nil, m.Value
	case m.Status == OK:
		a.Result = uint64(m.Len)
	case m.Status == NotFound:
		a.Status = nvme.KeyDoesNotExist | nvme.DNR
	case m.Status == WrongView:
		p.refuseView(i, t)
		return
	case m.Status == Unreadable:
		a.Status = nvme.UnrecoveredReadError | nvme.DNR
	default:
		a.Status = nvme.NamespaceNotReady // without DNR: the sender may ask again
	}
	a.Handle = p.unserve(i)
	t.Responses = append(t.Responses, a)
}

// wrongView returns the Response that refuses a command of another epoch. It has the epoch of the Replica.
func (p *Port) wrongView(handle uint64) Response {
	return Response{Handle: handle, Status: nvme.KVWrongView, Result: uint64(uint32(p.r.role.Epoch))}
}

func (p *Port) refuseView(i int32, t *Traffic) {
	t.Responses = append(t.Responses, p.wrongView(p.unserve(i)))
}

// Ranged handles the outcome of a RangeOp, as Replica.Ranged does. If another replica has asked for it and it has
// failed, or its result is not needed any more, Ranged answers that command. If it has succeeded, Flush does, with the
// message of the Replica.
func (p *Port) Ranged(op *RangeOp, st StoreStatus, out *Actions, t *Traffic) {
	n := len(out.Sends)
	p.r.Ranged(op, st, out)
	if op.Kind == CopyIn {
		out.free(op.Mem)
	}
	i, ok := p.servedBy(op.tag)
	switch {
	case op.asker == NoPeer || !ok:
	case st == GivenUp:
		t.Responses = append(t.Responses, Response{Handle: p.unserve(i), Status: nvme.NamespaceNotReady})
	case st != Done:
		a := Response{Handle: p.unserve(i), Status: nvme.UnrecoveredReadError | nvme.DNR}
		if op.Lost {
			a.Result = lossResult(op.LostAt)
		}
		t.Responses = append(t.Responses, a)
	case len(out.Sends) == n: // the Replica has no answer: its view has changed, or it is damaged
		p.refuseView(i, t)
	}
}

// Abort answers a kept Forward whose association has ended, and reports whether it has found one with the handle. It
// has no effect on other commands, which are answered without it.
func (p *Port) Abort(handle uint64, t *Traffic) bool {
	for n, i := range p.kept {
		if p.served.At(i).handle == handle {
			p.takeKept(n)
			t.Responses = append(t.Responses, Response{Handle: p.unserve(i), Status: nvme.AbortRequested})
			return true
		}
	}
	return false
}
