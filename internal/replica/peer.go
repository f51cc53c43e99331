package replica

import (
	"jbofd/internal/crrs"
	"jbofd/internal/nvme"
	"jbofd/internal/tenant"
)

// Receive takes a command of another node. It is valid (nvme.KVReplicaSQE.Valid). data is that of a Forward, which is
// copied, or memory for that of a Ship, which belongs to the Replica until the Response. The tenant pays for a Forward
// or a Ship. handle is repeated in the Response.
//
// hot: 0 allocs
func (r *Replica) Receive(from crrs.Peer, handle uint64, sqe *nvme.SQE, data []byte, payer tenant.ID) {
	r.begin()
	in := crrs.Incoming{Handle: handle, SQE: sqe, Payer: uint32(payer)}
	k := sqe.KVReplica()
	answer := func(st nvme.Status, result uint64) {
		r.traffic.Responses = append(r.traffic.Responses, crrs.Response{Handle: handle, Status: st, Result: result})
	}
	switch sqe.Opcode() {
	case nvme.CmdKVForward:
		in.Header = (*nvme.KVForwardHeader)(data)
		if at, ok := in.Header.Fault(k.KeyLen()); !ok {
			answer(nvme.KVInvalidHeader|nvme.DNR, uint64(at))
			return
		}
		var ok bool
		needed := r.port.Replica().Needs(uint64(k.Epoch()), k.Sequence())
		in.Value, in.Mem, ok = r.hold(data[nvme.KVForwardHeaderSize:], needed)
		if in.NoMemory = !ok; !ok && !r.starved {
			r.starved, r.starvedNS = true, r.now+retryNS
		}
	case nvme.CmdKVShip:
		in.Value = data[nvme.KVReadHeaderSize:]
	case nvme.CmdKVFetch:
		if int(k.LenBytes()) < r.cfg.Batches.bytes {
			answer(nvme.InvalidField|nvme.DNR, 0) // it might have no room for the next object
			return
		}
		var key [nvme.MaxKVKey]byte
		if at := k.Key(&key); len(at) > 0 {
			in.Position = r.position(at)
		}
	}
	r.port.Receive(from, &in, &r.acts, &r.traffic)
}

// Abort ends a Forward that is kept, because its association has ended: its Response follows. Other commands take their
// course.
func (r *Replica) Abort(handle uint64) {
	r.begin()
	r.port.Abort(handle, &r.traffic)
}

// respond makes Responses of those of the Port.
func (r *Replica) respond(out *Actions) {
	for i := range r.traffic.Responses {
		c := &r.traffic.Responses[i]
		a := Response{Handle: c.Handle, Status: c.Status, Result: c.Result, Version: c.Version,
			Expires: c.Expires, ValueLen: len(c.Value)}
		switch {
		case c.Part == nil || !c.Status.OK():
		case c.Part.Sums != nil:
			a.Data = encodeSums(c.Part)
		default:
			a.Data = c.Data
		}
		if a.Data != nil {
			a.Result = uint64(len(a.Data))
		}
		out.Responses = append(out.Responses, a)
	}
	r.traffic.Responses = r.traffic.Responses[:0]
}

// encodeSums makes a KVRange of the digests of a part.
func encodeSums(p *crrs.Part) []byte {
	_, shift := sumsOf(p)
	buf := make([]byte, nvme.KVRangeHeaderBytes+len(p.Sums)*nvme.KVSumBytes)
	last := lastOf(p)
	b := nvme.NewKVRange(buf, nvme.KVDigest, p.First, last, nvme.KVCursorAt(p.First, nil))
	b.SetTo(nvme.KVLastOf(last))
	b.SetFlags(nvme.KVComplete)
	b.SetShift(shift)
	b.SetTime(p.Time)
	b.SetItems(len(p.Sums))
	b = b[:len(buf)]
	for i, s := range p.Sums {
		b.Sum(i).Add(s.Count, s.Hash)
	}
	b.Seal()
	return b
}

// send makes Commands of those of the Port, and reports whether there may be more then.
func (r *Replica) send(out *Actions) (again bool) {
	for i := range r.traffic.Commands {
		c := Command{Command: r.traffic.Commands[i]}
		k := c.SQE.KVReplica()
		a := r.asked.TakeAt(int32(c.Tag))
		*a = asked{opcode: c.SQE.Opcode(), buffer: noBuffer}
		switch a.opcode {
		case nvme.CmdKVForward:
			c.Data = r.dataOf(&c, a)
		case nvme.CmdKVFetch:
			k.SetLenBytes(uint32(r.cfg.Batches.bytes))
			a.part = r.partOf(k)
			var again int64
			if a.buffer, again = r.cfg.Batches.fetch(r.now, r.shareOf(&c)); a.buffer == noBuffer {
				if r.lost = append(r.lost, c.Tag); r.bufferNS == 0 || again < r.bufferNS {
					r.bufferNS = again
				}
				continue
			}
			c.Buf = r.cfg.Batches.fetched.all[a.buffer]
		case nvme.CmdKVCompare:
			a.part = r.partOf(k)
		}
		out.Commands = append(out.Commands, c)
	}
	r.traffic.Commands = r.traffic.Commands[:0]
	for _, tag := range r.lost {
		r.asked.Put(int32(tag))
		r.port.Postpone(tag, &r.acts, &r.traffic)
		again = true
	}
	r.lost = r.lost[:0]
	r.noteRepeats()
	return again
}

// shareOf is how much of the time a Fetch may have. A repair is short, and clients may wait for it.
func (r *Replica) shareOf(c *Command) Share {
	switch {
	case c.Repairs:
		return 100
	case r.short:
		return r.cfg.RestoreShare
	}
	return r.cfg.FillShare
}

// dataOf returns what a Forward sends. The memory of a value has room for the header, which is the same each time that
// the write is forwarded: it may be sent already.
func (r *Replica) dataOf(c *Command, a *asked) []byte {
	if c.Mem == 0 {
		a.header = c.Header
		return a.header[:]
	}
	data := r.framed(r.values.At(int32(c.Mem-1)), len(c.Value))
	if h := (*nvme.KVForwardHeader)(data); *h != c.Header {
		*h = c.Header
	}
	return data
}

// partOf returns the part and the cursor of a Compare or a Fetch.
func (r *Replica) partOf(k *nvme.KVReplicaSQE) (p crrs.Part) {
	p.First, p.Bits = k.First(), k.Bits()
	if k.KeyLen() > 0 {
		p.From.Key.Len = uint8(len(k.Key(&p.From.Key.Bytes)))
		p.First = r.position(p.From.Key.Bytes[:p.From.Key.Len])
	}
	p.From.Position = p.First
	if p.Bits < 64 {
		p.First &^= 1<<p.Bits - 1
	} else {
		p.First = 0
	}
	return p
}

// Completed takes the completion of a Command, and its data: that of a Fetch is in its Buf.
//
// hot: 0 allocs
func (r *Replica) Completed(tag uint32, st nvme.Status, result uint64, data []byte) {
	r.begin()
	a := *r.asked.At(int32(tag))
	r.asked.Put(int32(tag))
	o := crrs.Outcome{Status: st, Result: result}
	if a.buffer != noBuffer && a.opcode == nvme.CmdKVFetch {
		o.Mem = uint32(r.values.Max()) + uint32(a.buffer) + 1
	}
	if st.OK() {
		switch a.opcode {
		case nvme.CmdKVShip:
			if len(data) < nvme.KVReadHeaderSize {
				o.Status = nvme.InternalError
				break
			}
			h := (*nvme.KVReadHeader)(data)
			o.Version, o.Expires, o.Value = h.Version(), h.Expires(), data[nvme.KVReadHeaderSize:]
		case nvme.CmdKVCompare, nvme.CmdKVFetch:
			if o.Part = answerOf(&a, data); o.Part == nil {
				o.Status = nvme.InternalError
			} else if a.opcode == nvme.CmdKVFetch {
				o.Value = data
			}
		}
	}
	r.port.Completed(tag, &o, &r.acts, &r.traffic)
}

// answerOf reads the answer to a Compare or a Fetch. It returns nil if that is not about what was asked for.
func answerOf(a *asked, data []byte) *crrs.Part {
	b := nvme.KVRange(data)
	p := a.part
	if b.Check() != nil || b.First() != p.First || b.Last() != lastOf(&p) || b.Lost() {
		return nil
	}
	from := b.From()
	want := nvme.KVCursorAt(p.From.Position, p.From.Key.Bytes[:p.From.Key.Len])
	if from.Compare(&want) != 0 {
		return nil
	}
	if a.opcode == nvme.CmdKVFetch {
		if b.Kind() != nvme.KVCopy {
			return nil
		}
		to := b.To()
		p.To, p.Last = cursorOf(&to), b.Complete()
		return &p
	}
	n, shift := sumsOf(&p)
	if b.Kind() != nvme.KVDigest || b.Items() != n || b.Shift() != shift || !b.Complete() {
		return nil
	}
	p.Time, p.Sums = b.Time(), make([]crrs.Sum, n)
	for i := range p.Sums {
		p.Sums[i] = crrs.Sum{Count: b.Sum(i).Count(), Hash: b.Sum(i).Sum()}
	}
	return &p
}

// Failed takes back a Command whose outcome is not known, because its connection is lost. When there is another one,
// the driver calls Reconnected.
func (r *Replica) Failed(tag uint32) {
	r.begin()
	if a := r.asked.At(int32(tag)); a.opcode == nvme.CmdKVFetch && a.buffer != noBuffer {
		r.cfg.Batches.putFetched(a.buffer, r.now)
	}
	r.asked.Put(int32(tag))
	r.port.Failed(tag, &r.acts, &r.traffic)
}

// Reconnected says that there is a connection to another node again, after Failed for each Command of the last one.
func (r *Replica) Reconnected(to crrs.Peer) {
	r.begin()
	r.port.Repeat(to, &r.acts)
}

// noteRepeats notes the nodes to which to repeat what was lost.
func (r *Replica) noteRepeats() {
	for _, to := range r.traffic.Repeat {
		if len(r.repeats) == 0 {
			r.repeatNS = r.now + retryNS
		}
		known := false
		for _, p := range r.repeats {
			known = known || p == to
		}
		if !known {
			r.repeats = append(r.repeats, to)
		}
	}
	r.traffic.Repeat = r.traffic.Repeat[:0]
}

// repeat repeats it when it is time.
func (r *Replica) repeat() {
	if len(r.repeats) == 0 || r.now < r.repeatNS {
		return
	}
	for _, to := range r.repeats {
		r.port.Repeat(to, &r.acts)
	}
	r.repeats = r.repeats[:0]
}
