// Package tcp is the target's side of an NVMe/TCP connection as a machine around a
// qpair.QPair: bytes received go in, commands come out to its Handler; responses go in,
// bytes to send come out. It does no I/O, reads no clock and takes no lock. The serve
// package drives it with a socket.
//
//	bytes ──> Receive ──> Begin, Arrived, Done ──> Handler
//	Out <── SendResponse, SendData, Fetch (R2T) <── QPair <── the driver
//
// A command's data moves in three ways. In-capsule data is placed when it arrives.
// Data in H2CData PDUs is placed where RequestData said, straight from the socket
// if the driver uses Place. Data to the host goes out of the caller's memory.
//
// Source: NVMe/TCP Transport 1.0.
package tcp

import (
	"encoding/binary"
	"fmt"

	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// Config bounds a connection.
type Config struct {
	// InCapsuleBytes is the largest in-capsule data (IOCCSZ without the SQE).
	InCapsuleBytes int
	// MaxH2CDataBytes is the largest data per H2CData PDU, announced in ICResp.
	MaxH2CDataBytes uint32
	// Limits bound commands.
	Limits nvmeof.Limits
}

// Phases of a connection.
const (
	phaseICReq     = iota // nothing received yet
	phaseConnect          // initialised; the next capsule must be Connect
	phaseConnected        // attached to a queue of a controller
	phaseClosed           // a TermReq was sent or received
)

// Conn is the machine. It is used by one goroutine at a time.
type Conn struct {
	qpair.QPair
	cfg   Config
	phase int
	fatal *pdu.FatalError
	peer  *pdu.FatalError

	in, out pdu.Format // host to controller, controller to host

	// The PDU whose data is arriving.
	headers   uint32
	cur       int  // slot, or -1 when between PDUs
	left      int  // bytes of data still to come
	discard   bool // the data is thrown away
	h2c       bool // it is an H2CData, else a capsule
	digest    uint32
	digestDue bool

	// stalled: the last Receive stopped before a command that the handler refused.
	stalled bool

	tx Out
}

var _ qpair.Wire = (*Conn)(nil)

// New returns the machine of a new connection.
func New(cfg Config, h qpair.Handler) *Conn {
	c := &Conn{cfg: cfg, cur: -1}
	c.Init(cfg.Limits, h, c)
	return c
}

// Attach makes the connection a queue. It is called for the Connect command in
// slot 0 before that is responded to, and returns how many slots there are now.
func (c *Conn) Attach(a qpair.Attachment) (slots int) {
	invariants.Check(c.phase == phaseConnect, "tcp: Attach out of order")
	c.phase = phaseConnected
	return c.QPair.Attach(a)
}

// Fatal returns why the machine ended the connection with a TermReq, or nil.
func (c *Conn) Fatal() *pdu.FatalError { return c.fatal }

// PeerFatal returns why the host ended it with one, or nil.
func (c *Conn) PeerFatal() *pdu.FatalError { return c.peer }

// Stalled reports that the last Receive stopped before a command because the
// handler was paused, gave no memory, or all slots were taken.
func (c *Conn) Stalled() bool { return c.stalled }

// Headers counts the PDUs whose headers have come, so that a driver can tell whether it is still the same one that is
// not complete.
func (c *Conn) Headers() uint32 { return c.headers }

// Idle reports that the machine is between PDUs: no data is being placed.
func (c *Conn) Idle() bool { return c.cur < 0 }

func (c *Conn) fail(f *pdu.FatalError, offending []byte) {
	c.fatal = f
	c.phase = phaseClosed
	c.cur = -1
	c.tx.hdr(pdu.AppendTerm(nil, pdu.TypeC2HTermReq, f, offending))
}

// Receive takes received bytes and returns how many it has used; the rest is to
// be offered again with more behind it. It stops early when it lacks memory
// (Handler.Buffer) or is paused, and uses nothing once Closed.
//
// hot: 0 allocs
func (c *Conn) Receive(b []byte) (used int) {
	c.stalled = false
	for c.phase != phaseClosed {
		if c.cur >= 0 {
			n := c.place(b[used:])
			used += n
			if c.cur >= 0 && n == 0 {
				return used
			}
			continue
		}
		n := c.header(b[used:])
		if n == 0 {
			return used
		}
		c.headers++
		used += n
	}
	return used
}

// Place returns where the next received bytes of a large transfer belong, so
// that the driver can read them there; nil when they go through Receive. After
// reading n bytes the driver calls Placed(n).
//
// hot: 0 allocs
func (c *Conn) Place() []byte {
	if c.cur < 0 || c.discard || c.left == 0 {
		return nil
	}
	s := c.Slot(c.cur)
	return s.Data[s.Got : s.Got+c.left]
}

// Placed says that n bytes were read into what Place returned.
//
// hot: 0 allocs
func (c *Conn) Placed(n int) {
	s := c.Slot(c.cur)
	invariants.Check(n <= c.left, "tcp: placed more than was asked for")
	if c.in.DataDigest {
		c.digest = pdu.UpdateDigest(c.digest, s.Data[s.Got:s.Got+n])
	}
	c.DataReceived(c.cur, n)
	c.left -= n
	if c.left == 0 && !c.digestDue {
		c.dataDone()
	}
}

// place copies data of the current PDU and checks its digest.
func (c *Conn) place(b []byte) (used int) {
	if c.left > 0 {
		n := min(c.left, len(b))
		if n == 0 {
			return 0
		}
		if c.discard {
			c.left -= n
			if c.left == 0 && !c.digestDue {
				c.cur = -1
			}
			return n
		}
		s := c.Slot(c.cur)
		copy(s.Data[s.Got:], b[:n])
		c.Placed(n)
		return n
	}
	// Only the digest is left.
	if len(b) < pdu.DigestLen {
		return 0
	}
	if !c.discard && binary.LittleEndian.Uint32(b) != c.digest {
		c.Slot(c.cur).Bad = true
	}
	c.digestDue = false
	if c.discard {
		c.cur = -1
	} else {
		c.dataDone()
	}
	return pdu.DigestLen
}

// dataDone ends a PDU whose data has been placed.
func (c *Conn) dataDone() {
	i := c.cur
	c.cur = -1
	s := c.Slot(i)
	if !c.h2c {
		c.Arrived(i, !s.Bad)
	} else if s.Got == len(s.Data) {
		c.Done(i)
	}
}

// header takes one PDU's header, with digest and padding, off b.
func (c *Conn) header(b []byte) (used int) {
	if len(b) < pdu.CommonLen {
		return 0
	}
	ch := (*pdu.Common)(b)
	if c.phase == phaseICReq && ch.Type() != pdu.TypeICReq && ch.Type() != pdu.TypeH2CTermReq {
		c.fail(&pdu.FatalError{FES: pdu.SequenceError, What: "the first PDU is not an ICReq"}, ch[:])
		return 0
	}
	if f := pdu.CheckHeader(b, true, c.in); f != nil {
		if ch.Type() == pdu.TypeH2CTermReq {
			c.phase = phaseClosed
			c.peer = f
			return 0
		}
		// No more is quoted than was judged: the rest may not have come, and how the bytes
		// were cut must not show.
		c.fail(f, ch[:])
		return 0
	}
	hlen := int(ch.HLEN())
	whole := hlen // header, digest, padding
	digest := c.in.HeaderDigest && (ch.Type() == pdu.TypeCapsuleCmd || ch.Type() == pdu.TypeH2CData)
	if digest {
		whole += pdu.DigestLen
	}
	dataLen := pdu.DataLength(b, c.in)
	if dataLen > 0 {
		whole = int(ch.PDO())
	}
	if len(b) < whole {
		return 0
	}
	h := b[:hlen]
	if digest {
		if got := binary.LittleEndian.Uint32(b[hlen:]); got != pdu.Digest(h) {
			c.fail(&pdu.FatalError{FES: pdu.HeaderDigestError, FEI: got,
				What: "header digest of a " + ch.Type().String()}, h)
			return 0
		}
	}
	ok := true
	switch ch.Type() {
	case pdu.TypeICReq:
		c.initialize((*pdu.IC)(h))
	case pdu.TypeCapsuleCmd:
		ok = c.capsule((*pdu.CapsuleCmd)(h), dataLen)
	case pdu.TypeH2CData:
		c.h2cData((*pdu.Data)(h), dataLen)
	case pdu.TypeH2CTermReq:
		t := (*pdu.Term)(h)
		c.peer = &pdu.FatalError{FES: t.FES(), FEI: t.FEI(), What: "sent by the host"}
		c.phase = phaseClosed
	}
	if !ok {
		c.stalled = c.phase != phaseClosed
		return 0
	}
	if c.phase == phaseClosed {
		return 0
	}
	if dataLen > 0 {
		c.left = dataLen
		c.digest = 0
		c.digestDue = c.in.DataDigest
	}
	return whole
}

// initialize answers the ICReq.
func (c *Conn) initialize(q *pdu.IC) {
	switch {
	case c.phase != phaseICReq:
		c.fail(&pdu.FatalError{FES: pdu.SequenceError, What: "a second ICReq"}, q[:])
		return
	case q.PFV() != 0:
		c.fail(&pdu.FatalError{FES: pdu.UnsupportedParameter, FEI: 8,
			What: fmt.Sprintf("PFV %d, only 0 is known", q.PFV())}, q[:])
		return
	case q.PDA() > pdu.MaxAlignUnits:
		c.fail(&pdu.FatalError{FES: pdu.InvalidHeaderField, FEI: 10,
			What: fmt.Sprintf("HPDA %d, must be at most %d", q.PDA(), pdu.MaxAlignUnits)}, q[:])
		return
	case q.DGST()&^3 != 0:
		c.fail(&pdu.FatalError{FES: pdu.InvalidHeaderField, FEI: 11,
			What: fmt.Sprintf("DGST %#x has reserved bits", q.DGST())}, q[:])
		return
	}
	c.in = pdu.Format{HeaderDigest: q.HeaderDigest(), DataDigest: q.DataDigest(), AlignBytes: 4} // CPDA 0
	c.out = pdu.Format{HeaderDigest: q.HeaderDigest(), DataDigest: q.DataDigest(), AlignBytes: (int(q.PDA()) + 1) * 4}
	var r pdu.IC
	r.Common().Set(pdu.TypeICResp, 0, pdu.ICLen, 0, pdu.ICLen)
	r.SetDGST(q.DGST())
	r.SetMAXH2CDATA(c.cfg.MaxH2CDataBytes)
	c.tx.hdr(r[:])
	c.phase = phaseConnect
}

// capsule takes a command in. It reports false, with nothing changed, when the
// command must wait for memory.
func (c *Conn) capsule(p *pdu.CapsuleCmd, dataLen int) bool {
	sqe := p.SQE()
	limit := c.cfg.InCapsuleBytes
	if c.phase == phaseConnect || c.QID() == 0 {
		limit = max(limit, adminInCapsuleBytes)
	}
	if dataLen > limit {
		c.fail(&pdu.FatalError{FES: pdu.InvalidHeaderField, FEI: 4,
			What: fmt.Sprintf("%d bytes of in-capsule data, at most %d", dataLen, limit)}, p[:])
		return false
	}
	i, outcome := c.Begin(sqe, dataLen)
	switch outcome {
	case qpair.Waiting:
		return false
	case qpair.TooMany:
		c.fail(&pdu.FatalError{FES: pdu.SequenceError, What: fmt.Sprintf("more commands than the queue's %d entries",
			c.Entries())}, p[:])
		return false
	case qpair.Unconnected:
		c.fail(&pdu.FatalError{FES: pdu.SequenceError, What: "commands before Connect"}, p[:])
		return false
	case qpair.Arriving:
		c.cur, c.discard, c.h2c = i, false, false
	default:
		c.skip(dataLen) // a command that moves none, or has failed, may still have brought some
	}
	return true
}

// adminInCapsuleBytes is the in-capsule data that a host may rely on before it
// knows IOCCSZ: of Connect and on the admin queue.
//
// Source: NVMe/TCP Transport 1.0, section 3.3.2; Linux's NVME_TCP_ADMIN_CCSZ.
const adminInCapsuleBytes = 8192

// CheckSGL implements qpair.Wire.
//
// Source: NVMe/TCP Transport 1.0, section 3.3.2; NVMe Base 2.0, section 4.1.2.
func (c *Conn) CheckSGL(sqe *nvme.SQE, ranges int, toController, toHost uint32, dataLen int) (uint32, bool,
	nvme.Status) {
	if toController == 0 && toHost == 0 {
		return 0, false, nvme.Success
	}
	g := sqe.SGL()
	if ranges > 0 && g.Length() > toController && g.Length() <= nvmeof.MaxDSMBytes {
		toController = g.Length()
	}
	inline := false
	switch {
	case g.Type() == nvme.SGLTypeTransportData && g.Subtype() == nvme.SGLSubtypeTransport:
	case g.Type() == nvme.SGLTypeDataBlock && g.Subtype() == nvme.SGLSubtypeOffset && toController > 0:
		inline = true
		if g.Address() != 0 {
			return 0, false, nvme.SGLOffsetInvalid | nvme.DNR
		}
	default:
		return 0, false, nvme.SGLTypeInvalid | nvme.DNR
	}
	if g.Length() != max(toController, toHost) || inline && dataLen != int(toController) || !inline && dataLen != 0 {
		return 0, false, nvme.DataSGLLengthInvalid | nvme.DNR
	}
	return toController, inline, nvme.Success
}

// skip throws n bytes of data away.
func (c *Conn) skip(n int) {
	if n > 0 {
		c.cur, c.discard = 0, true
	}
}

// h2cData checks an H2CData PDU against the R2T that it answers.
func (c *Conn) h2cData(p *pdu.Data, dataLen int) {
	i := int(p.TTAG() & ttagSlotMask)
	bad := func(fes pdu.FES, fei uint32, format string, args ...any) {
		c.fail(&pdu.FatalError{FES: fes, FEI: fei, What: "H2CData: " + fmt.Sprintf(format, args...)}, p[:])
	}
	switch {
	case i >= c.Slots() || !c.Slot(i).Fetching() || ttag(c.Slot(i), i) != p.TTAG():
		bad(pdu.InvalidHeaderField, 10, "TTAG %#x was not asked for", p.TTAG())
		return
	}
	s := c.Slot(i)
	switch n := int64(p.Length()); {
	case p.CCCID() != s.SQE.CID():
		bad(pdu.InvalidHeaderField, 8, "CCCID %#x, the R2T was for %#x", p.CCCID(), s.SQE.CID())
	case n != int64(dataLen):
		bad(pdu.InvalidHeaderField, 16, "DATAL %d, the PDU holds %d", n, dataLen)
	case n > int64(c.cfg.MaxH2CDataBytes):
		bad(pdu.R2TLimitExceeded, 0, "DATAL %d, MAXH2CDATA is %d", n, c.cfg.MaxH2CDataBytes)
	case int64(p.Offset()) != int64(s.Got) || int64(p.Offset())+n > int64(len(s.Data)):
		bad(pdu.DataTransferOutOfRange, 0, "DATAO %d, DATAL %d of %d bytes, %d received", p.Offset(), n, len(s.Data),
			s.Got)
	case p.Common().Flags()&pdu.FlagLast != 0 && s.Got+dataLen != len(s.Data):
		bad(pdu.InvalidHeaderField, 1, "LAST_PDU at %d of %d bytes", s.Got+dataLen, len(s.Data))
	default:
		c.cur, c.discard, c.h2c = i, false, true
	}
}

// ttag is the transfer tag of what slot i asks for: the slot and a generation that tells a
// stale one.
func ttag(s *qpair.Slot, i int) uint16 { return uint16(s.Gen)<<qpair.SlotBits | uint16(i) }

// ttagSlotMask is the slot in a transfer tag.
const ttagSlotMask = 1<<qpair.SlotBits - 1
