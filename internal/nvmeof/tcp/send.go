package tcp

import (
	"encoding/binary"

	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// Out collects what is to be sent: headers in memory of its own, data in the
// callers'. Taken with Conn.Take and given back with Reset, two of them serve a
// connection without allocating.
type Out struct {
	// Segs are the pieces in order. Data among them must not change until sent.
	Segs [][]byte
	// Bytes is their total length.
	Bytes int

	heads []byte // the memory behind headers
	// mergeable: the last piece is a header that ends where heads ends.
	mergeable bool
}

// Reset empties o for reuse.
func (o *Out) Reset() {
	clear(o.Segs)
	o.Segs, o.heads, o.Bytes, o.mergeable = o.Segs[:0], o.heads[:0], 0, false
}

// hdr appends header bytes, joining them to headers just before.
func (o *Out) hdr(b []byte) { o.commit(append(o.heads, b...)) }

// commit takes heads, grown by a header, over.
func (o *Out) commit(heads []byte) {
	n := len(heads) - len(o.heads)
	start := len(o.heads)
	moved := cap(heads) != cap(o.heads) // grown into new memory: older pieces keep the old
	o.heads = heads
	o.Bytes += n
	if o.mergeable && !moved {
		last := &o.Segs[len(o.Segs)-1]
		*last = heads[start-len(*last):]
		return
	}
	o.Segs = append(o.Segs, heads[start:])
	o.mergeable = true
}

// data appends a piece of the caller's memory.
func (o *Out) data(b []byte) {
	o.Segs = append(o.Segs, b)
	o.Bytes += len(b)
	o.mergeable = false
}

// Pending is how many bytes wait to be taken.
func (c *Conn) Pending() int { return c.tx.Bytes }

// Take swaps what is to be sent with empty.
//
// hot: 0 allocs
func (c *Conn) Take(empty *Out) {
	*empty, c.tx = c.tx, *empty
}

// appendResponse appends a response capsule for slot s.
func (c *Conn) appendResponse(h []byte, s *Slot, status nvme.Status, result uint64) []byte {
	start := len(h)
	flags, plen := uint8(0), uint32(pdu.CapsuleRespLen)
	if c.out.HeaderDigest {
		flags, plen = pdu.FlagHDGST, plen+pdu.DigestLen
	}
	var p pdu.CapsuleResp
	p.Common().Set(pdu.TypeCapsuleResp, flags, pdu.CapsuleRespLen, 0, plen)
	e := p.CQE()
	e.SetResult64(result)
	if !c.noSQFlow {
		e.SetSQHD(c.sqhd)
	} else {
		e.SetSQHD(0xFFFF)
	}
	e.SetCID(s.SQE.CID())
	e.SetStatus(status)
	h = append(h, p[:]...)
	return c.appendHeaderDigest(h, start)
}

// appendHeaderDigest appends the digest of h[start:] if one was agreed on.
func (c *Conn) appendHeaderDigest(h []byte, start int) []byte {
	if c.out.HeaderDigest {
		h = binary.LittleEndian.AppendUint32(h, pdu.Digest(h[start:]))
	}
	return h
}

// Respond ends slot's command without data. result goes into DW0 and DW1.
//
// hot: 0 allocs
func (c *Conn) Respond(slot int, status nvme.Status, result uint64) {
	s := &c.slots[slot]
	if s.state == slotZombie {
		c.release(slot)
		return
	}
	invariants.Check(s.state != slotFree, "tcp: response to a free slot")
	if c.phase != phaseClosed {
		c.tx.commit(c.appendResponse(c.tx.heads, s, status, result))
	}
	c.release(slot)
}

// RespondData ends slot's command with success and data to the host, which must
// not change until it has been sent. The response is the SUCCESS flag where the
// host allows that, has not asked for credits, and result is 0; a capsule otherwise. It reports whether the
// data is in Out; if not (the command was aborted), the caller has it back.
//
// hot: 0 allocs
func (c *Conn) RespondData(slot int, data []byte, result uint64) bool {
	s := &c.slots[slot]
	if s.state == slotZombie || c.phase == phaseClosed {
		c.release(slot)
		return false
	}
	invariants.Check(s.state == slotExecuting, "tcp: data for a slot that does not execute")
	flags := uint8(pdu.FlagLast)
	success := c.noSQFlow && result == 0 && !c.credits
	if success {
		flags |= pdu.FlagSuccess
	}
	pdo := c.out.DataOffset(pdu.DataLen)
	plen := pdo + len(data)
	if c.out.HeaderDigest {
		flags |= pdu.FlagHDGST
	}
	if c.out.DataDigest {
		flags |= pdu.FlagDDGST
		plen += pdu.DigestLen
	}
	var p pdu.Data
	p.Common().Set(pdu.TypeC2HData, flags, pdu.DataLen, uint8(pdo), uint32(plen))
	p.SetCCCID(s.SQE.CID())
	p.SetLength(uint32(len(data)))
	h := c.tx.heads
	start := len(h)
	h = c.appendHeaderDigest(append(h, p[:]...), start)
	for len(h)-start < pdo {
		h = append(h, 0)
	}
	c.tx.commit(h)
	c.tx.data(data)
	if c.out.DataDigest {
		c.tx.commit(binary.LittleEndian.AppendUint32(c.tx.heads, pdu.Digest(data)))
	}
	if !success {
		c.tx.commit(c.appendResponse(c.tx.heads, s, nvme.Success, result))
	}
	c.release(slot)
	return true
}

// RequestData asks the host for slot's data, to be placed in buf; Handler.Fetched
// follows.
//
// hot: 0 allocs
func (c *Conn) RequestData(slot int, buf []byte) {
	s := &c.slots[slot]
	invariants.Check(s.state == slotExecuting || s.state == slotFused, "tcp: data asked for by a slot that does not execute")
	c.awaited += len(buf)
	s.state, s.data, s.got, s.bad = slotFetching, buf, 0, false
	s.gen++
	if c.phase == phaseClosed {
		return
	}
	flags, plen := uint8(0), uint32(pdu.R2TLen)
	if c.out.HeaderDigest {
		flags, plen = pdu.FlagHDGST, plen+pdu.DigestLen
	}
	var p pdu.Data
	p.Common().Set(pdu.TypeR2T, flags, pdu.R2TLen, 0, plen)
	p.SetCCCID(s.SQE.CID())
	p.SetTTAG(s.ttag(slot))
	p.SetLength(uint32(len(buf)))
	h := c.tx.heads
	start := len(h)
	c.tx.commit(c.appendHeaderDigest(append(h, p[:]...), start))
}

// Abort responds to slot's command as aborted while the handler still has it; its
// own Respond, when it comes, only frees the slot.
func (c *Conn) Abort(slot int, status nvme.Status) {
	s := &c.slots[slot]
	invariants.Check(s.state == slotExecuting, "tcp: abort of a slot that does not execute")
	if c.phase != phaseClosed {
		c.tx.commit(c.appendResponse(c.tx.heads, s, status, 0))
	}
	s.state = slotZombie
	c.zombies++
}

// Find returns the slot of the outstanding command with this identifier, if it
// is with the handler.
func (c *Conn) Find(cid uint16) (slot int, ok bool) {
	for i := range c.slots {
		if s := &c.slots[i]; s.state == slotExecuting && s.SQE.CID() == cid {
			return i, true
		}
	}
	return 0, false
}

// Fetching calls f for every slot whose data is still awaited: when the
// connection is lost they will never be Fetched. Each is with the handler again
// after.
func (c *Conn) Fetching(f func(slot int)) {
	for i := range c.slots {
		if s := &c.slots[i]; s.state == slotFetching || s.state == slotArriving {
			s.state = slotExecuting
			f(i)
		}
	}
}

func (c *Conn) release(slot int) {
	s := &c.slots[slot]
	if s.state == slotZombie {
		c.zombies--
	}
	s.state, s.pair, s.data = slotFree, -1, nil
	c.free = append(c.free, uint16(slot))
}
