package tcp

import (
	"encoding/binary"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// Out collects what is to be sent. Headers are in memory of its own, data stays in the caller's. Two of them serve a
// connection without allocating: one collects while the other, which Conn.Take has swapped out, is sent and Reset.
type Out struct {
	// Segs are the pieces in order. Data among them must not change until sent.
	Segs [][]byte
	// Bytes is their total length.
	Bytes int

	heads []byte // the memory behind headers, and behind copied bytes of data
	// copied is how many of Bytes are data that was copied.
	copied int
	// mergeable: the last piece is a header that ends where heads ends.
	mergeable bool
}

// Reset empties o for reuse.
func (o *Out) Reset() {
	clear(o.Segs)
	o.Segs, o.heads, o.Bytes, o.copied, o.mergeable = o.Segs[:0], o.heads[:0], 0, 0, false
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

// Data of at most smallData bytes is copied between the headers around it, up to maxCopied bytes in an Out, whose
// memory stays small. As a piece of its own it would cost the kernel more than the copy.
const (
	smallData = 512
	maxCopied = 16 << 10
)

// data appends a piece of the caller's memory.
func (o *Out) data(b []byte) {
	if len(b) <= smallData && o.copied+len(b) <= maxCopied {
		o.copied += len(b)
		o.hdr(b)
		return
	}
	o.Segs = append(o.Segs, b)
	o.Bytes += len(b)
	o.mergeable = false
}

// Pending is how many bytes wait to be taken.
func (c *Conn) Pending() int { return c.tx.Bytes }

// Take moves what is to be sent to empty, and goes on with empty's memory.
//
// hot: 0 allocs
func (c *Conn) Take(empty *Out) {
	*empty, c.tx = c.tx, *empty
}

// Closed reports that no more is received; what is in Out is still to be sent.
func (c *Conn) Closed() bool { return c.phase == phaseClosed }

// appendResponse appends a response capsule.
func (c *Conn) appendResponse(h []byte, e nvme.CQE) []byte {
	start := len(h)
	flags, plen := uint8(0), uint32(pdu.CapsuleRespLen)
	if c.out.HeaderDigest {
		flags, plen = pdu.FlagHDGST, plen+pdu.DigestLen
	}
	var p pdu.CapsuleResp
	p.Common().Set(pdu.TypeCapsuleResp, flags, pdu.CapsuleRespLen, 0, plen)
	*p.CQE() = e
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

// SendResponse implements qpair.Wire.
//
// hot: 0 allocs
func (c *Conn) SendResponse(_ int, e nvme.CQE) {
	c.tx.commit(c.appendResponse(c.tx.heads, e))
}

// SendData implements qpair.Wire. The response is the SUCCESS flag where the
// host allows that, has not asked for credits, and the result is 0; a capsule otherwise.
//
// hot: 0 allocs
func (c *Conn) SendData(_ int, data []byte, e nvme.CQE) {
	flags := uint8(pdu.FlagLast)
	success := c.NoSQFlow() && e.Result64() == 0 && !c.Credits()
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
	p.SetCCCID(e.CID())
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
		c.tx.commit(c.appendResponse(c.tx.heads, e))
	}
}

// Fetch implements qpair.Wire: it sends an R2T.
//
// hot: 0 allocs
func (c *Conn) Fetch(slot int) {
	if c.phase == phaseClosed {
		return
	}
	s := c.Slot(slot)
	flags, plen := uint8(0), uint32(pdu.R2TLen)
	if c.out.HeaderDigest {
		flags, plen = pdu.FlagHDGST, plen+pdu.DigestLen
	}
	var p pdu.Data
	p.Common().Set(pdu.TypeR2T, flags, pdu.R2TLen, 0, plen)
	p.SetCCCID(s.SQE.CID())
	p.SetTTAG(ttag(s, slot))
	p.SetLength(uint32(len(s.Data)))
	h := c.tx.heads
	start := len(h)
	c.tx.commit(c.appendHeaderDigest(append(h, p[:]...), start))
}
