package hosttcp

import "jbofd/internal/nvmeof/tcp/pdu"

var zeroPad [pdu.MaxAlignUnits*4 + 4]byte

// maxPDUOverhead is the most space that one PDU takes in the arena besides data: header, digest, padding, data digest.
const maxPDUOverhead = 128 + 128 + pdu.DigestLen

// push appends to the send list, which has room for the capsule and MaxR2T R2Ts of each slot.
func (q *QPair) push(it sendItem) {
	k := q.listHead + q.listLen
	if k >= len(q.list) {
		k -= len(q.list)
	}
	q.list[k] = it
	q.listLen++
}

// SendBufs returns the bytes to send next, in order, or nothing. The segments lie in memory of the queue and in the
// data of outstanding commands; they are valid until Sent or Detach. There may be more bytes to send after these.
//
// Cost: 0 allocs.
func (q *QPair) SendBufs() [][]byte { // hot: 0 allocs
	if q.segHead < len(q.segs) {
		return q.segs[q.segHead:]
	}
	q.arena, q.segs, q.pieces, q.segHead, q.openSeg = q.arena[:0], q.segs[:0], q.pieces[:0], 0, false
	for q.listLen > 0 && q.room() {
		it := &q.list[q.listHead]
		if it.isData {
			q.putData(it)
			if it.left != 0 {
				continue
			}
		} else {
			q.putCapsule(it.slot)
		}
		if q.listHead++; q.listHead == len(q.list) {
			q.listHead = 0
		}
		q.listLen--
	}
	return q.segs
}

// room reports whether one more PDU of any kind fits into the batch.
func (q *QPair) room() bool {
	return len(q.segs)+3 <= maxSegments && len(q.arena)+maxPDUOverhead+copyBelow <= cap(q.arena)
}

// Sent confirms that the first n bytes of the result of SendBufs were sent. Commands that were answered before all of
// their data was sent finish when it was.
//
// Cost: 0 allocs.
func (q *QPair) Sent(n int) { // hot: 0 allocs
	for n > 0 {
		seg := q.segs[q.segHead]
		p := &q.pieces[q.segHead]
		if n < len(seg) {
			q.segs[q.segHead] = seg[n:]
			if p.dataOff >= 0 {
				p.dataOff += int64(n)
			}
			return
		}
		n -= len(seg)
		q.segs[q.segHead] = nil
		q.segHead++
		if p.last {
			q.unref(p.slot)
		}
	}
}

// unref drops one of the references to slot i.
func (q *QPair) unref(i uint16) {
	s := &q.slots[i]
	if s.refs--; s.refs == 0 && s.answered {
		q.finish(i)
	}
}

// putCapsule adds slot i's command capsule to the batch.
func (q *QPair) putCapsule(i uint16) {
	s := &q.slots[i]
	s.unsent = false
	var data []byte
	if s.inCapsule {
		data = q.bufs[i]
	}
	a := len(q.arena)
	q.arena = q.arena[:a+pdu.CapsuleCmdLen]
	h := (*pdu.CapsuleCmd)(q.arena[a:])
	*h.SQE() = s.sqe
	q.finishHeader(h.Common(), a, pdu.TypeCapsuleCmd, 0, data, piece{slot: i, last: true, dataOff: 0})
}

// putData adds the next H2CData PDU of an R2T to the batch, with at most MAXH2CDATA bytes of data.
func (q *QPair) putData(it *sendItem) {
	i := it.slot
	n := min(it.left, q.maxH2C)
	a := len(q.arena)
	q.arena = q.arena[:a+pdu.DataLen]
	h := (*pdu.Data)(q.arena[a:])
	clear(h[20:])
	h.SetCCCID(q.slots[i].sqe.CID())
	h.SetTTAG(it.ttag)
	h.SetOffset(it.off)
	h.SetLength(n)
	var flags uint8
	if n == it.left {
		flags = pdu.FlagLast
	}
	data := q.bufs[i][it.off : it.off+n]
	q.finishHeader(h.Common(), a, pdu.TypeH2CData, flags, data,
		piece{slot: i, last: n == it.left, dataOff: int64(it.off)})
	it.off += n
	it.left -= n
}

// finishHeader completes a PDU whose header is arena[a:]: common header, digests, padding and data. p describes the
// data.
func (q *QPair) finishHeader(c *pdu.Common, a int, t pdu.Type, flags uint8, data []byte, p piece) {
	hlen := len(q.arena) - a
	plen, pdo := hlen, 0
	if q.tx.HeaderDigest {
		flags |= pdu.FlagHDGST
		plen += pdu.DigestLen
	}
	if len(data) != 0 {
		pdo = q.tx.DataOffset(hlen)
		plen = pdo + len(data)
		if q.tx.DataDigest {
			flags |= pdu.FlagDDGST
			plen += pdu.DigestLen
		}
	}
	c.Set(t, flags, uint8(hlen), uint8(pdo), uint32(plen))
	if q.tx.HeaderDigest {
		d := pdu.Digest(q.arena[a:])
		q.arena = q.arena[:len(q.arena)+pdu.DigestLen]
		pdu.PutDigest(q.arena[len(q.arena)-pdu.DigestLen:], d)
	}
	inArena := piece{slot: p.slot, dataOff: -1}
	if len(data) == 0 {
		inArena.last = p.last
		q.seal(a, inArena)
		return
	}
	q.arena = append(q.arena, zeroPad[:a+pdo-len(q.arena)]...)
	if len(data) < copyBelow {
		q.arena = append(q.arena, data...)
		if q.tx.DataDigest {
			q.putDigest(data)
		}
		inArena.last = p.last
		q.seal(a, inArena)
		return
	}
	q.seal(a, inArena)
	last := p.last
	p.last = last && !q.tx.DataDigest
	q.segs = append(q.segs, data)
	q.pieces = append(q.pieces, p)
	q.openSeg = false
	if q.tx.DataDigest {
		a = len(q.arena)
		q.putDigest(data)
		inArena.last = last
		q.seal(a, inArena)
		// The data of the slot precedes this segment: its reference must last until the segment was sent, so that no
		// other PDU may join the segment.
		q.openSeg = !last
	}
}

func (q *QPair) putDigest(data []byte) {
	q.arena = q.arena[:len(q.arena)+pdu.DigestLen]
	pdu.PutDigest(q.arena[len(q.arena)-pdu.DigestLen:], pdu.Digest(data))
}

// seal makes arena[a:] a segment of the batch, or extends the previous segment if that one ends at a and may grow.
// Capsules without data thus form one segment. All of their slots but the last lose their reference at once, which is
// safe because the bytes are in the arena.
func (q *QPair) seal(a int, p piece) {
	if q.openSeg {
		k := len(q.segs) - 1
		if prev := q.pieces[k]; prev.last {
			q.unref(prev.slot)
		}
		start := a - len(q.segs[k])
		q.segs[k] = q.arena[start:len(q.arena):len(q.arena)]
		q.pieces[k] = p
		return
	}
	q.segs = append(q.segs, q.arena[a:len(q.arena):len(q.arena)])
	q.pieces = append(q.pieces, p)
	q.openSeg = true
}

// putArena copies b into the arena as a segment.
func (q *QPair) putArena(b []byte, p piece) {
	a := len(q.arena)
	q.arena = append(q.arena, b...)
	q.seal(a, p)
}

// term replaces everything that is to be sent by an H2CTermReq for err. If a PDU was sent in part, an H2CTermReq could
// not begin at a PDU boundary, and none is sent.
func (q *QPair) term(err *pdu.FatalError, offending []byte) {
	q.listLen = 0
	if q.segHead < len(q.segs) {
		return
	}
	q.arena, q.segs, q.pieces, q.segHead, q.openSeg = q.arena[:0], q.segs[:0], q.pieces[:0], 0, false
	q.arena = pdu.AppendTerm(q.arena, pdu.TypeH2CTermReq, err, offending)
	q.seal(0, piece{dataOff: -1})
}
