package hosttcp

import (
	"fmt"

	"jbofd/client/internal/host"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// Offsets of header fields that a TermReq may name.
const (
	offPFV        = 8
	offCPDA       = 10
	offDGST       = 11
	offMAXH2CDATA = 12
	offCCCID      = 8
	offDATAO      = 12
	offDATAL      = 16
	offCQECID     = pdu.CommonLen + 12
)

// RecvBufs returns the buffers for received bytes: first direct, which lies in the data of an outstanding command and
// may be empty, then rx, which is never empty. Both are valid until Received or Detach.
//
// Cost: 0 allocs.
func (q *QPair) RecvBufs() (direct, rx []byte) { // hot: 0 allocs
	q.direct = 0
	rx = q.buf[q.wpos:]
	if q.dataLen >= largeData && len(rx) > shortRecv {
		rx = rx[:shortRecv]
	}
	if q.recv == recvData && !q.slots[q.dataSlot].orphan {
		off := q.slots[q.dataSlot].received - q.dataLeft
		direct = q.bufs[q.dataSlot][off : off+q.dataLeft]
		q.direct = len(direct)
	}
	return direct, rx
}

// Received processes n bytes that were received into the buffers of RecvBufs. An error is final and the same as Err:
// the driver should try to send what SendBufs returns (a TermReq) and must close the connection. Outstanding commands
// do not complete any more; finished ones can still be collected.
//
// Cost: 0 allocs.
func (q *QPair) Received(n int) error { // hot: 0 allocs
	if q.recv == recvDead {
		return q.err
	}
	if k := min(n, q.direct); k > 0 {
		// RecvBufs returns direct only when the receive buffer has no unparsed bytes.
		s := &q.slots[q.dataSlot]
		off := s.received - q.dataLeft
		q.placed(q.bufs[q.dataSlot][off:off+uint32(k)], uint32(k))
		n -= k
	}
	q.direct = 0
	q.wpos += n
	for q.step() {
	}
	if q.rpos > 0 {
		q.wpos = copy(q.buf, q.buf[q.rpos:q.wpos])
		q.rpos = 0
	}
	return q.err
}

// placed accounts for k bytes of C2HData, b, which are in the command's buffer or were dropped.
func (q *QPair) placed(b []byte, k uint32) {
	if q.rx.DataDigest {
		q.dataCRC = pdu.UpdateDigest(q.dataCRC, b)
	}
	if q.dataLeft -= k; q.dataLeft != 0 {
		return
	}
	if q.rx.DataDigest {
		q.recv = recvDigest
		return
	}
	q.endData()
}

// endData ends a C2HData PDU.
func (q *QPair) endData() {
	q.recv = recvHeader
	if q.dataFlags&pdu.FlagSuccess != 0 {
		q.answer(q.dataSlot, 0, 0, 0)
	}
}

// step parses one element from the receive buffer and reports whether there may be another.
func (q *QPair) step() bool {
	b := q.buf[q.rpos:q.wpos]
	switch q.recv {
	case recvData:
		if len(b) == 0 {
			return false
		}
		k := min(uint32(len(b)), q.dataLeft)
		s := &q.slots[q.dataSlot]
		if !s.orphan {
			copy(q.bufs[q.dataSlot][s.received-q.dataLeft:], b[:k])
		}
		q.rpos += int(k)
		q.placed(b[:k], k)
		return true
	case recvDigest:
		if len(b) < pdu.DigestLen {
			return false
		}
		q.rpos += pdu.DigestLen
		if pdu.GetDigest(b) != q.dataCRC {
			q.slots[q.dataSlot].badDigest = true
		}
		q.endData()
		return true
	case recvDead:
		return false
	}
	return q.header(b)
}

// header parses the PDU header at b, if all of it has been received.
func (q *QPair) header(b []byte) bool {
	if len(b) < pdu.CommonLen {
		return false
	}
	c := (*pdu.Common)(b)
	if err := pdu.CheckHeader(b, false, q.rx); err != nil {
		return q.fail(err, b[:pdu.CommonLen])
	}
	t := c.Type()
	if q.recv == recvIC && t != pdu.TypeICResp && t != pdu.TypeC2HTermReq {
		return q.fail(&pdu.FatalError{FES: pdu.SequenceError, What: fmt.Sprintf("%s before ICResp", t)},
			b[:pdu.CommonLen])
	}
	need := int(c.HLEN())
	switch t {
	case pdu.TypeC2HTermReq:
		need = int(c.PLEN())
	case pdu.TypeC2HData:
		need = int(c.PDO()) // covers the header, its digest and padding
	case pdu.TypeCapsuleResp, pdu.TypeR2T:
		need = int(c.PLEN())
	}
	if len(b) < need {
		return false
	}
	hlen := int(c.HLEN())
	if q.rx.HeaderDigest && t != pdu.TypeC2HTermReq && t != pdu.TypeICResp {
		if got := pdu.GetDigest(b[hlen:]); got != pdu.Digest(b[:hlen]) {
			return q.fail(&pdu.FatalError{FES: pdu.HeaderDigestError, FEI: got, What: "header digest of " + t.String()},
				b[:hlen])
		}
	}
	q.rpos += need
	var err *pdu.FatalError
	switch t {
	case pdu.TypeC2HData:
		err = q.c2hData((*pdu.Data)(b), pdu.DataLength(b, q.rx))
	case pdu.TypeCapsuleResp:
		err = q.capsuleResp((*pdu.CapsuleResp)(b))
	case pdu.TypeR2T:
		err = q.r2t((*pdu.Data)(b))
	case pdu.TypeICResp:
		err = q.icResp((*pdu.IC)(b))
	case pdu.TypeC2HTermReq:
		h := (*pdu.Term)(b)
		q.recv, q.listLen = recvDead, 0
		q.err = fmt.Errorf("%w: %s (fei %#x)", ErrTermReq, h.FES(), h.FEI())
		return false
	}
	if err != nil {
		return q.fail(err, b[:hlen])
	}
	return true
}

// fail ends the queue. It returns false, as the result of step.
func (q *QPair) fail(err *pdu.FatalError, offending []byte) bool {
	q.recv = recvDead
	q.err = err
	q.term(err, offending)
	return false
}

func badField(off uint32, format string, args ...any) *pdu.FatalError {
	return &pdu.FatalError{FES: pdu.InvalidHeaderField, FEI: off, What: fmt.Sprintf(format, args...)}
}

// icResp processes the ICResp.
func (q *QPair) icResp(p *pdu.IC) *pdu.FatalError {
	if q.recv != recvIC {
		return &pdu.FatalError{FES: pdu.SequenceError, What: "second ICResp"}
	}
	if p.PFV() != 0 {
		return &pdu.FatalError{FES: pdu.UnsupportedParameter, FEI: offPFV,
			What: fmt.Sprintf("ICResp: PFV %d, must be 0",
				p.PFV())}
	}
	if p.PDA() > pdu.MaxAlignUnits {
		return badField(offCPDA, "ICResp: CPDA %d, must be at most %d", p.PDA(), pdu.MaxAlignUnits)
	}
	if p.HeaderDigest() != q.opts.HeaderDigest || p.DataDigest() != q.opts.DataDigest {
		return badField(offDGST, "ICResp: header digest %t and data digest %t, the host asked for %t and %t",
			p.HeaderDigest(), p.DataDigest(), q.opts.HeaderDigest, q.opts.DataDigest)
	}
	if p.MAXH2CDATA() < pdu.MinMaxH2CData || p.MAXH2CDATA()%4 != 0 {
		return badField(offMAXH2CDATA, "ICResp: MAXH2CDATA %d, must be a multiple of 4 and at least %d", p.MAXH2CDATA(),
			pdu.MinMaxH2CData)
	}
	q.rx = pdu.Format{HeaderDigest: p.HeaderDigest(), DataDigest: p.DataDigest()}
	q.tx = pdu.Format{HeaderDigest: p.HeaderDigest(), DataDigest: p.DataDigest(), AlignBytes: (int(p.PDA()) + 1) * 4}
	q.maxH2C = p.MAXH2CDATA()
	q.recv = recvHeader
	return nil
}

// lookup returns the slot of an outstanding, unanswered command that was sent.
func (q *QPair) lookup(cid uint16) (uint16, *slot) {
	i := uint16(host.SlotOf(cid))
	if int(i) >= len(q.slots) {
		return 0, nil
	}
	s := &q.slots[i]
	if !s.busy || s.answered || s.unsent || s.gen != host.GenerationOf(cid) {
		return 0, nil
	}
	return i, s
}

func (q *QPair) c2hData(p *pdu.Data, length int) *pdu.FatalError {
	i, s := q.lookup(p.CCCID())
	if s == nil {
		return badField(offCCCID, "C2HData: CCCID %#x is not outstanding", p.CCCID())
	}
	n := p.Length()
	if n == 0 || int64(n) != int64(length) {
		return badField(offDATAL, "C2HData: DATAL %d, the PDU has %d bytes of data", n, length)
	}
	if !s.toHost {
		return badField(offCCCID, "C2HData: CCCID %#x is no command with data to the host", p.CCCID())
	}
	if n > s.length-s.received {
		return &pdu.FatalError{FES: pdu.DataTransferOutOfRange, FEI: offDATAL,
			What: fmt.Sprintf("C2HData: DATAO %d, DATAL %d, the command's buffer has %d bytes", p.Offset(), n,
				s.length)}
	}
	if p.Offset() != s.received {
		return &pdu.FatalError{FES: pdu.DataTransferOutOfRange, FEI: offDATAO,
			What: fmt.Sprintf("C2HData: DATAO %d, must be %d", p.Offset(), s.received)}
	}
	flags := p.Common().Flags()
	if flags&pdu.FlagSuccess != 0 && flags&pdu.FlagLast == 0 {
		return badField(1, "C2HData: SUCCESS without LAST_PDU")
	}
	s.received += n
	q.recv, q.dataSlot, q.dataLeft, q.dataFlags, q.dataLen, q.dataCRC = recvData, i, n, flags, n, 0
	return nil
}

func (q *QPair) capsuleResp(p *pdu.CapsuleResp) *pdu.FatalError {
	e := p.CQE()
	i, s := q.lookup(e.CID())
	if s == nil {
		return badField(offCQECID, "CapsuleResp: CID %#x is not outstanding", e.CID())
	}
	if !s.toHost {
		q.dataLen = 0 // no large data is expected: use the whole receive buffer
	}
	q.answer(i, e.Status(), e.Result64(), e.SQID())
	return nil
}

func (q *QPair) r2t(p *pdu.Data) *pdu.FatalError {
	i, s := q.lookup(p.CCCID())
	if s == nil {
		return badField(offCCCID, "R2T: CCCID %#x is not outstanding", p.CCCID())
	}
	if !s.toTarget || s.inCapsule {
		return badField(offCCCID, "R2T: CCCID %#x has no data to fetch", p.CCCID())
	}
	if s.refs >= q.maxR2T {
		return &pdu.FatalError{FES: pdu.R2TLimitExceeded,
			What: fmt.Sprintf("R2T: more than %d outstanding for CCCID %#x",
				q.maxR2T, p.CCCID())}
	}
	if p.Offset() != s.granted {
		return badField(offDATAO, "R2T: R2TO %d, must be %d", p.Offset(), s.granted)
	}
	n := p.Length()
	if n == 0 || n > s.length-s.granted {
		return &pdu.FatalError{FES: pdu.DataTransferOutOfRange, FEI: offDATAL,
			What: fmt.Sprintf("R2T: R2TO %d, R2TL %d, the command has %d bytes", p.Offset(), n, s.length)}
	}
	s.granted += n
	s.refs++
	q.push(sendItem{slot: i, ttag: p.TTAG(), isData: true, off: p.Offset(), left: n})
	return nil
}
