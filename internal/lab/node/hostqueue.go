package node

import (
	"encoding/binary"
	"fmt"

	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// Fault model of a simulated host: none. It keeps to NVMe/TCP, and may send and stop whenever the specifications let
// it. What the target does against them is a violation: a PDU out of order, a completion of no command, a C2HTermReq.

// hostQueue is the host's end of one queue pair. It shares no code with the target but the PDU formats.
type hostQueue struct {
	h        *Host
	a        *association
	qid      uint16
	end      *lab.End
	digests  bool
	in       []byte
	commands map[uint16]*command
	lastCID  uint16
	depth    int
	up       bool   // the ICResp has come
	onUp     func() // or the connection is over
	over     bool
}

// command is one command outstanding.
type command struct {
	q      *hostQueue
	sqe    nvme.SQE
	data   []byte // from or for the host
	toHost bool
	got    int
	// startNS is when it was sent.
	startNS int64
	done    func(o outcome)
}

// outcome is how a command ended; lost: its connection did.
type outcome struct {
	sentNS int64 // when the command was sent
	status nvme.Status
	result uint64
	lost   bool
}

// ok reports success.
func (o outcome) ok() bool { return !o.lost && o.status.OK() }

// dial opens a connection for a queue; onUp is called when it is ready for Connect, or over.
func (a *association) dial(qid uint16, depth int, onUp func()) *hostQueue {
	h := a.h
	q := &hostQueue{h: h, a: a, qid: qid, commands: map[uint16]*command{}, depth: depth, digests: a.digests, onUp: onUp}
	q.end = h.lab.Net.Dial(h.name, Address)
	q.end.Received, q.end.Closed = q.received, func(err error) { q.close(err.Error()) }
	var ic pdu.IC
	ic.Common().Set(pdu.TypeICReq, 0, pdu.ICLen, 0, pdu.ICLen)
	if q.digests {
		ic.SetDGST(3)
	}
	q.end.Send(ic[:])
	h.queues = append(h.queues, q)
	return q
}

// close ends the connection; all commands are lost.
func (q *hostQueue) close(reason string) {
	if q.over {
		return
	}
	q.over = true
	q.h.lab.Sim.Tracef("%s: connection %d (qid %d) over: %s", q.h.name, q.end.ID, q.qid, reason)
	q.end.Close()
	for cid := range 1 << 16 { // in an order that does not depend on the map's
		if len(q.commands) == 0 {
			break
		}
		if c := q.commands[uint16(cid)]; c != nil {
			delete(q.commands, uint16(cid))
			c.done(outcome{lost: true})
		}
	}
	if f := q.onUp; f != nil {
		q.onUp = nil
		f()
	}
}

func (q *hostQueue) format() pdu.Format {
	return pdu.Format{HeaderDigest: q.digests, DataDigest: q.digests, AlignBytes: 4}
}

// send sends a PDU: its header without the common header's fields, and its data.
func (q *hostQueue) send(t pdu.Type, flags uint8, h, data []byte) {
	f := q.format()
	plen, pdo := len(h), 0
	if f.HeaderDigest {
		flags |= pdu.FlagHDGST
		plen += pdu.DigestLen
	}
	if len(data) > 0 {
		pdo = f.DataOffset(len(h))
		plen = pdo + len(data)
		if f.DataDigest {
			flags |= pdu.FlagDDGST
			plen += pdu.DigestLen
		}
	}
	(*pdu.Common)(h).Set(t, flags, uint8(len(h)), uint8(pdo), uint32(plen))
	b := append([]byte(nil), h...)
	if f.HeaderDigest {
		b = binary.LittleEndian.AppendUint32(b, pdu.Digest(h))
	}
	for len(b) < pdo {
		b = append(b, 0)
	}
	b = append(b, data...)
	if len(data) > 0 && f.DataDigest {
		b = binary.LittleEndian.AppendUint32(b, pdu.Digest(data))
	}
	q.end.Send(b)
}

// free reports whether a command may be sent.
func (q *hostQueue) free() bool { return !q.over && q.up && len(q.commands) < q.depth }

// submit sends a command; done is called once.
func (q *hostQueue) submit(sqe nvme.SQE, data []byte, toHost bool, done func(o outcome)) *command {
	for {
		q.lastCID++
		if q.commands[q.lastCID] == nil {
			break
		}
	}
	c := &command{q: q, data: data, toHost: toHost, startNS: q.h.lab.Sim.Now(), done: done}
	sqe.SetCID(q.lastCID)
	sqe.SetPSDT(nvme.PSDTSGL)
	g := sqe.SGL()
	g.SetLength(uint32(len(data)))
	g.SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
	limit := 0 // of data in the capsule
	if q.qid == 0 || !q.a.noInCapsule && q.h.rng.IntN(2) == 0 {
		limit = inCapsuleBytes
	}
	var inline []byte
	if !toHost && len(data) > 0 && len(data) <= limit {
		g.SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
		inline = data
	}
	c.sqe = sqe
	q.commands[q.lastCID] = c
	if sim := q.h.lab.Sim; sim.Tracing() {
		head := data[:min(len(data), 8)]
		if toHost {
			head = nil
		}
		sim.Tracef("%s: connection %d qid %d CID %d: opcode %#x nsid %d, block %d+%d, %d bytes %x", q.h.name, q.end.ID,
			q.qid, q.lastCID, sqe.Opcode(), sqe.NSID(), sqe.SLBA(), sqe.NLB(), len(data), head)
		inner := done
		c.done = func(o outcome) {
			if o.lost {
				sim.Tracef("%s: connection %d qid %d CID %d: lost", q.h.name, q.end.ID, q.qid, sqe.CID())
			} else {
				sim.Tracef("%s: connection %d qid %d CID %d: %v %#x", q.h.name, q.end.ID, q.qid, sqe.CID(), o.status,
					o.result)
			}
			inner(o)
		}
	}
	var p pdu.CapsuleCmd
	*p.SQE() = sqe
	q.send(pdu.TypeCapsuleCmd, 0, p[:], inline)
	return c
}

// violation says that the target has broken the protocol.
func (q *hostQueue) violation(format string, args ...any) {
	q.h.lab.Violation("%s, qid %d: %s", q.h.name, q.qid, fmt.Sprintf(format, args...))
}

// received parses what has come.
func (q *hostQueue) received(b []byte) {
	q.in = append(q.in, b...)
	for !q.over && len(q.in) >= pdu.CommonLen {
		f := q.format()
		ch := (*pdu.Common)(q.in)
		if err := pdu.CheckHeader(q.in, false, f); err != nil {
			q.violation("%v", err)
			return
		}
		n := int(ch.PLEN())
		if len(q.in) < n {
			return
		}
		one := q.in[:n]
		hlen := int(ch.HLEN())
		digests := ch.Type() != pdu.TypeICResp && ch.Type() != pdu.TypeC2HTermReq
		if digests && f.HeaderDigest && pdu.GetDigest(one[hlen:]) != pdu.Digest(one[:hlen]) {
			q.violation("header digest of a %s", ch.Type())
			return
		}
		var data []byte
		if k := pdu.DataLength(one, f); k > 0 {
			pdo := int(ch.PDO())
			data = one[pdo : pdo+k]
			if f.DataDigest && pdu.GetDigest(one[pdo+k:]) != pdu.Digest(data) {
				q.violation("data digest of a %s", ch.Type())
				return
			}
		}
		q.pdu(ch.Type(), one, data)
		q.in = q.in[n:]
	}
}

// pdu takes one PDU.
func (q *hostQueue) pdu(t pdu.Type, b, data []byte) {
	switch t {
	case pdu.TypeICResp:
		q.up = true
		if f := q.onUp; f != nil {
			q.onUp = nil
			f()
		}
	case pdu.TypeC2HTermReq:
		term := (*pdu.Term)(b)
		q.violation("the target ends the connection: %s, %#x", term.FES(), term.FEI())
		q.close("C2HTermReq")
	case pdu.TypeCapsuleResp:
		e := (*pdu.CapsuleResp)(b).CQE()
		q.complete(e.CID(), outcome{status: e.Status(), result: e.Result64()})
	case pdu.TypeC2HData:
		d := (*pdu.Data)(b)
		c := q.commands[d.CCCID()]
		if c == nil || !c.toHost || int(d.Offset()) != c.got || c.got+len(data) > len(c.data) {
			q.violation("C2HData for CID %#x at %d, %d bytes", d.CCCID(), d.Offset(), len(data))
			return
		}
		c.got += copy(c.data[c.got:], data)
		if d.Common().Flags()&pdu.FlagSuccess != 0 {
			q.complete(d.CCCID(), outcome{})
		}
	case pdu.TypeR2T:
		r := (*pdu.Data)(b)
		c := q.commands[r.CCCID()]
		if c == nil || c.toHost || int(r.Offset())+int(r.Length()) > len(c.data) {
			q.violation("R2T for CID %#x at %d, %d bytes", r.CCCID(), r.Offset(), r.Length())
			return
		}
		q.answerR2T(c, r.CCCID(), r.TTAG(), int(r.Offset()), int(r.Length()))
	}
}

// answerR2T sends the data asked for, at once or after a while, in one piece or several.
func (q *hostQueue) answerR2T(c *command, cid, ttag uint16, offset, length int) {
	send := func() {
		for at := offset; at < offset+length && !q.over; {
			n := min(offset+length-at, 1024*(1+q.h.rng.IntN(8)))
			var d pdu.Data
			d.SetCCCID(cid)
			d.SetTTAG(ttag)
			d.SetOffset(uint32(at))
			d.SetLength(uint32(n))
			flags := uint8(0)
			if at+n == offset+length {
				flags = pdu.FlagLast
			}
			q.send(pdu.TypeH2CData, flags, d[:], c.data[at:at+n])
			at += n
		}
	}
	if q.h.rng.IntN(4) == 0 {
		q.h.lab.Sim.After(q.h.rng.Int64N(2e6), send)
		return
	}
	send()
}

// complete ends a command.
func (q *hostQueue) complete(cid uint16, o outcome) {
	c := q.commands[cid]
	if c == nil {
		q.violation("a completion of CID %#x, which is not outstanding: %v", cid, o.status)
		return
	}
	delete(q.commands, cid)
	if o.ok() && c.toHost && c.got != len(c.data) && c.sqe.Opcode() != nvme.CmdRead && q.qid == 0 {
		q.violation("%d of %d bytes of an admin command's data", c.got, len(c.data))
	}
	c.done(o)
}
