// Package tcp is the target's side of an NVMe/TCP connection as a machine:
// bytes received go in, commands come out to a Handler; responses go in, bytes
// to send come out. It does no I/O, reads no clock and takes no lock. The serve
// package drives it with a socket.
//
//	bytes ──> Receive ──> Handler.Execute, Admin, Fetched
//	             │ memory for the host's data: Handler.Buffer
//	Out <── Respond, RespondData, RequestData (R2T) <── the driver
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
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/pipeline"
)

// Handler receives what a connection's bytes amount to. The machine calls it
// from within Receive and Placed; it must not call those, but may call Respond,
// RespondData and RequestData at once.
type Handler interface {
	// Buffer returns memory for n bytes of slot's data. nil: there is none now; the
	// machine stops before the command, and Receive is to be called again when there
	// is.
	Buffer(slot, n int) []byte
	// Execute: slot holds an I/O command with a valid Plan. Its in-capsule data, if
	// any, is in the Buffer; the rest is to be asked for with RequestData.
	Execute(slot int)
	// Admin: slot holds an admin or fabrics command, with its data.
	Admin(slot int)
	// Fetched: all data asked for with RequestData is there. Not ok: a digest was
	// wrong, and the command must fail with Transient Transport Error.
	Fetched(slot int, ok bool)
	// Unused: slot's Buffer, if any, is no longer needed.
	Unused(slot int)
	// Paired: first is the Compare, second the Write of a fused pair; Execute(second)
	// follows and stands for both. A Buffer of first goes over to second.
	Paired(first, second int)
	// Failed: slot's command is about to be answered with an error that the machine
	// itself found.
	Failed(slot int, status nvme.Status)
	// Paused reports that no further commands are wanted now; like a refused Buffer.
	Paused() bool
}

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

// States of a slot.
const (
	slotFree      = iota
	slotArriving  // in-capsule data is arriving
	slotExecuting // with the handler
	slotFetching  // R2T sent, H2CData awaited
	slotFused     // first of a fused pair, waiting for the second or sharing its fate
	slotZombie    // responded to (aborted) but still with the handler
)

// Slot is one command outstanding.
type Slot struct {
	SQE nvme.SQE
	// Plan is set for I/O commands.
	Plan nvmeof.Plan
	// Arg is the driver's own, a timestamp for instance; 0 in a new command.
	Arg int64

	state uint8
	gen   uint8
	// inline: the data came with the capsule.
	inline bool
	// pair is the other slot of a fused pair, or -1.
	pair  int16
	table *nvmeof.NamespaceTable // that the Plan was made by
	data  []byte                 // where the host's data goes
	// got counts the bytes of data placed. Invariant: got <= len(data).
	got int
	bad bool // a data digest was wrong
}

// Conn is the machine. It is used by one goroutine at a time.
type Conn struct {
	cfg   Config
	h     Handler
	phase int
	fatal *pdu.FatalError
	peer  *pdu.FatalError

	in, out pdu.Format // host to controller, controller to host

	// Set by Attach.
	qid       uint16
	sqEntries int
	sqhd      uint16
	noSQFlow  bool
	credits   bool
	table     *nvmeof.NamespaceTable

	slots   []Slot
	free    []uint16
	zombies int
	// fused is the slot of a first fused command whose second has not come, or -1.
	// fusedFailed: there was one just before and it has failed already.
	fused       int
	fusedFailed bool

	// The PDU whose data is arriving.
	cur       int  // slot, or -1 when between PDUs
	left      int  // bytes of data still to come
	discard   bool // the data is thrown away
	h2c       bool // it is an H2CData, else a capsule
	digest    uint32
	digestDue bool

	// awaited is how many bytes R2Ts have asked for that have not come.
	awaited int

	// stalled: the last Receive stopped before a command that the handler refused.
	stalled bool

	tx Out
}

// extraSlots beyond the queue's entries keep zombies from taking a slot that
// the host may rightly use.
const extraSlots = 8

// New returns the machine of a new connection.
func New(cfg Config, h Handler) *Conn {
	c := &Conn{cfg: cfg, h: h, cur: -1, fused: -1}
	c.makeSlots(1)
	return c
}

func (c *Conn) makeSlots(n int) {
	c.slots = make([]Slot, n)
	c.free = make([]uint16, n)
	for i := range c.slots {
		c.slots[i].pair = -1
		c.free[i] = uint16(n - 1 - i)
	}
}

// Attachment is what a successful Connect makes of the connection.
type Attachment struct {
	QID uint16
	// Entries is the queue's size, SQSIZE + 1.
	Entries int
	// NoSQFlow: submission queue flow control is disabled, SQHD is not used, and
	// reads may be answered by the SUCCESS flag alone.
	NoSQFlow bool
	// Table are the host's namespaces; nil for admin queues. One that SetTable has
	// brought already is younger and stays.
	Table *nvmeof.NamespaceTable
}

// Attach makes the connection a queue. It is called for the Connect command in
// slot 0 before that is responded to, and returns how many slots there are now.
func (c *Conn) Attach(a Attachment) (slots int) {
	invariants.Check(c.phase == phaseConnect, "tcp: Attach out of order")
	connect := c.slots[0]
	c.makeSlots(a.Entries + extraSlots)
	c.slots[0] = connect
	c.free = c.free[:len(c.free)-1] // slot 0 is the last
	c.qid, c.sqEntries, c.noSQFlow = a.QID, a.Entries, a.NoSQFlow
	c.sqhd = 1 // Connect was the first entry of this queue
	if c.table == nil {
		c.table = a.Table
	}
	c.phase = phaseConnected
	return len(c.slots)
}

// SetTable gives an I/O queue another view of the namespaces, for commands that
// have not arrived yet.
func (c *Conn) SetTable(t *nvmeof.NamespaceTable) { c.table = t }

// SetCredits says whether the host looks for credits in its completions. If so, reads
// have a response capsule to carry them.
func (c *Conn) SetCredits(on bool) { c.credits = on }

// Slot returns a slot by number; valid until it is responded to.
func (c *Conn) Slot(i int) *Slot { return &c.slots[i] }

// Slots is how many slots there are.
func (c *Conn) Slots() int { return len(c.slots) }

// Outstanding is how many commands are not responded to.
func (c *Conn) Outstanding() int { return len(c.slots) - len(c.free) - c.zombies }

// Connected reports whether Attach was called, and QID for which queue.
func (c *Conn) Connected() bool { return c.phase == phaseConnected }

// QID is the queue's number; 0 is the admin queue.
func (c *Conn) QID() uint16 { return c.qid }

// Fatal returns why the machine ended the connection with a TermReq, or nil.
func (c *Conn) Fatal() *pdu.FatalError { return c.fatal }

// PeerFatal returns why the host ended it with one, or nil.
func (c *Conn) PeerFatal() *pdu.FatalError { return c.peer }

// Closed reports that no more is received; what is in Out is still to be sent.
func (c *Conn) Closed() bool { return c.phase == phaseClosed }

// Stalled reports that the last Receive stopped before a command because the
// handler was paused, gave no memory, or all slots were taken.
func (c *Conn) Stalled() bool { return c.stalled }

// Full reports that no slot is free, although the host may send commands:
// aborted ones are still with the handler.
func (c *Conn) Full() bool { return c.zombies > 0 && len(c.free) == 0 }

// AwaitedBytes is how much data R2Ts have asked for that has not come.
func (c *Conn) AwaitedBytes() int { return c.awaited }

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
	s := &c.slots[c.cur]
	return s.data[s.got : s.got+c.left]
}

// Placed says that n bytes were read into what Place returned.
//
// hot: 0 allocs
func (c *Conn) Placed(n int) {
	s := &c.slots[c.cur]
	invariants.Check(n <= c.left, "tcp: placed more than was asked for")
	if c.h2c {
		c.awaited -= n
	}
	if c.in.DataDigest {
		c.digest = pdu.UpdateDigest(c.digest, s.data[s.got:s.got+n])
	}
	s.got += n
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
		s := &c.slots[c.cur]
		copy(s.data[s.got:], b[:n])
		c.Placed(n)
		return n
	}
	// Only the digest is left.
	if len(b) < pdu.DigestLen {
		return 0
	}
	if !c.discard && binary.LittleEndian.Uint32(b) != c.digest {
		c.slots[c.cur].bad = true
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
	s := &c.slots[i]
	if c.h2c {
		if s.got == len(s.data) {
			s.state = slotExecuting
			c.h.Fetched(i, !s.bad)
		}
		return
	}
	status := c.recheck(s)
	if s.bad {
		status = nvme.TransientTransportError
	}
	if !status.OK() {
		c.h.Unused(i)
		if s.pair >= 0 { // the second of a pair: the first shares its fate
			first := int(s.pair)
			c.h.Unused(first)
			c.refuse(first, nvme.AbortedFailedFused|nvme.DNR)
		}
		if c.fused == i {
			c.fused, c.fusedFailed = -1, true
		}
		c.refuse(i, status)
		return
	}
	c.dispatch(i)
}

// recheck judges an I/O command again, whose in-capsule data took its time, if
// the namespaces have changed since: its extent may be another's by now.
func (c *Conn) recheck(s *Slot) nvme.Status {
	if s.table == c.table || s.Plan.Namespace == nil {
		return nvme.Success
	}
	was := s.Plan
	var now nvmeof.Plan
	if status := nvmeof.PlanIO(&s.SQE, c.table, c.cfg.Limits, &now); !status.OK() {
		return status
	}
	if now.Offset != was.Offset || now.Len != was.Len || now.Namespace.SSD != was.Namespace.SSD ||
		now.Namespace.OffsetBytes != was.Namespace.OffsetBytes || now.Namespace.UUID != was.Namespace.UUID {
		return nvme.InvalidNamespaceOrFormat | nvme.DNR
	}
	now.Op, now.ToController = was.Op, was.ToController // of a fused pair, and what the SGL said
	s.Plan = now
	return nvme.Success
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
			c.fail(&pdu.FatalError{FES: pdu.HeaderDigestError, FEI: got, What: "header digest of a " + ch.Type().String()}, h)
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
		c.fail(&pdu.FatalError{FES: pdu.UnsupportedParameter, FEI: 8, What: fmt.Sprintf("PFV %d, only 0 is known", q.PFV())}, q[:])
		return
	case q.PDA() > pdu.MaxAlignUnits:
		c.fail(&pdu.FatalError{FES: pdu.InvalidHeaderField, FEI: 10, What: fmt.Sprintf("HPDA %d, must be at most %d", q.PDA(), pdu.MaxAlignUnits)}, q[:])
		return
	case q.DGST()&^3 != 0:
		c.fail(&pdu.FatalError{FES: pdu.InvalidHeaderField, FEI: 11, What: fmt.Sprintf("DGST %#x has reserved bits", q.DGST())}, q[:])
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
	if c.phase == phaseConnect || c.qid == 0 {
		limit = max(limit, adminInCapsuleBytes)
	}
	if dataLen > limit {
		c.fail(&pdu.FatalError{FES: pdu.InvalidHeaderField, FEI: 4,
			What: fmt.Sprintf("%d bytes of in-capsule data, at most %d", dataLen, limit)}, p[:])
		return false
	}
	if c.phase == phaseConnect && (sqe.Opcode() != nvme.OpFabrics || sqe.FCTYPE() != nvme.FabricsConnect) {
		if len(c.free) == 0 {
			c.fail(&pdu.FatalError{FES: pdu.SequenceError, What: "commands before Connect"}, p[:])
			return false
		}
		// A command to a queue that is not connected: it fails, the connection stays.
		i := c.takeSlot(sqe)
		c.refuse(i, nvme.CommandSequenceError|nvme.DNR)
		c.skip(dataLen)
		return true
	}
	if c.h.Paused() {
		return false
	}
	if c.Full() {
		return false
	}
	if len(c.free) == 0 || c.Outstanding() >= max(c.sqEntries, 1) {
		c.fail(&pdu.FatalError{FES: pdu.SequenceError, What: fmt.Sprintf("more commands than the queue's %d entries", max(c.sqEntries, 1))}, p[:])
		return false
	}

	i := int(c.free[len(c.free)-1]) // not taken yet
	s := &c.slots[i]
	io := c.phase == phaseConnected && c.qid != 0 && sqe.Opcode() != nvme.OpFabrics
	var status nvme.Status
	toController, toHost := uint32(0), uint32(0)
	if io {
		status = nvmeof.PlanIO(sqe, c.table, c.cfg.Limits, &s.Plan)
		toController, toHost = s.Plan.ToController, s.Plan.ToHost
	} else {
		toController, toHost, status = nvmeof.PlanAdmin(sqe, c.cfg.Limits)
		s.Plan = nvmeof.Plan{}
	}
	inline := false
	if status.OK() {
		toController, inline, status = checkSGL(sqe, s.Plan.Ranges, toController, toHost, dataLen)
		s.Plan.ToController = toController
	}
	fuse := nvme.FuseNone
	if io {
		fuse = sqe.Fuse()
	}

	// Memory before anything changes.
	need := 0
	switch {
	case !status.OK():
	case inline && fuse != nvme.FuseNone:
		need = 2 * int(toController)
		if fuse == nvme.FuseSecond && c.fused >= 0 && c.slots[c.fused].inline {
			need = 0 // shares the first's buffer
		}
	case inline:
		need = int(toController)
	case !io:
		need = int(max(toController, toHost))
	}
	var buf []byte
	if need > 0 {
		if buf = c.h.Buffer(i, need); buf == nil {
			return false
		}
	}

	c.takeSlot(sqe)
	s.inline, s.table = inline, c.table
	firstFailed := c.fusedFailed
	c.fusedFailed = false
	if c.fused >= 0 && fuse != nvme.FuseSecond {
		first := c.fused
		c.fused = -1
		c.h.Unused(first)
		c.refuse(first, nvme.AbortedMissingFused|nvme.DNR)
	}
	switch {
	case fuse == nvme.FuseSecond && firstFailed:
		status = nvme.AbortedFailedFused | nvme.DNR
	case fuse == nvme.FuseSecond:
		status = c.pairUp(i, status)
	case fuse == nvme.FuseFirst:
		if status.OK() && sqe.Opcode() != nvme.CmdCompare {
			status = nvme.InvalidField | nvme.DNR
		}
		if status.OK() {
			c.fused = i
		} else {
			c.fusedFailed = true
		}
	}
	if !status.OK() {
		if need > 0 {
			c.h.Unused(i)
		}
		c.refuse(i, status)
		c.skip(dataLen)
		return true
	}

	if inline {
		n := int(toController)
		switch {
		case fuse == nvme.FuseSecond && buf == nil:
			s.data = c.slots[s.pair].data[:2*n][n:]
		case fuse == nvme.FuseSecond:
			s.data = buf[n : 2*n]
		default:
			s.data = buf[:n]
		}
		s.state = slotArriving
		c.cur, c.discard, c.h2c = i, false, false
		return true
	}
	c.skip(dataLen) // a command that moves none may still have brought some
	if !io && toController > 0 {
		c.RequestData(i, buf[:toController])
		return true
	}
	c.dispatch(i)
	return true
}

// adminInCapsuleBytes is the in-capsule data that a host may rely on before it
// knows IOCCSZ: of Connect and on the admin queue.
//
// Source: NVMe/TCP Transport 1.0, section 3.3.2; Linux's NVME_TCP_ADMIN_CCSZ.
const adminInCapsuleBytes = 8192

// refuse answers a command that does not get as far as the handler.
func (c *Conn) refuse(slot int, status nvme.Status) {
	c.h.Failed(slot, status)
	c.Respond(slot, status, 0)
}

// checkSGL holds a command's SGL against the data that it should move. The
// transfer to the controller is returned anew because a Dataset Management
// command, which has ranges, may send more than those need.
//
// Source: NVMe/TCP Transport 1.0, section 3.3.2; NVMe Base 2.0, section 4.1.2.
func checkSGL(sqe *nvme.SQE, ranges int, toController, toHost uint32, dataLen int) (uint32, bool, nvme.Status) {
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

// takeSlot takes the next free slot for sqe and advances the queue's head.
func (c *Conn) takeSlot(sqe *nvme.SQE) int {
	i := int(c.free[len(c.free)-1])
	c.free = c.free[:len(c.free)-1]
	s := &c.slots[i]
	s.SQE = *sqe
	s.state, s.pair, s.data, s.got, s.bad, s.inline, s.Arg = slotExecuting, -1, nil, 0, false, false, 0
	if c.sqEntries > 0 {
		if c.sqhd++; int(c.sqhd) >= c.sqEntries {
			c.sqhd = 0
		}
	}
	return i
}

// skip throws n bytes of data away.
func (c *Conn) skip(n int) {
	if n > 0 {
		c.cur, c.discard = 0, true
	}
}

// pairUp joins a second fused command, whose own status is given, with the
// first. If that fails, both are responded to here.
func (c *Conn) pairUp(second int, status nvme.Status) nvme.Status {
	s := &c.slots[second]
	if c.fused < 0 {
		return nvme.AbortedMissingFused | nvme.DNR
	}
	first := c.fused
	c.fused = -1
	f := &c.slots[first]
	if status.OK() {
		status = nvmeof.CheckFused(&f.SQE, &s.SQE)
	}
	if status.OK() && (f.Plan.Offset != s.Plan.Offset || f.Plan.Len != s.Plan.Len || f.Plan.Namespace.SSD != s.Plan.Namespace.SSD) {
		status = nvme.InvalidField | nvme.DNR // the namespace has changed in between
	}
	if !status.OK() {
		c.h.Unused(first)
		c.refuse(first, nvme.AbortedFailedFused|nvme.DNR)
		return status
	}
	f.pair, s.pair = int16(second), int16(first)
	s.Plan.Op = pipeline.CompareWrite
	return nvme.Success
}

// dispatch hands a command to the handler; its in-capsule data has arrived.
func (c *Conn) dispatch(i int) {
	s := &c.slots[i]
	s.state = slotExecuting
	switch {
	case c.phase != phaseConnected || c.qid == 0 || s.SQE.Opcode() == nvme.OpFabrics:
		c.h.Admin(i)
	case c.fused == i:
		s.state = slotFused
	case s.pair >= 0:
		c.slots[s.pair].state = slotFused
		c.h.Paired(int(s.pair), i)
		c.h.Execute(i)
	default:
		c.h.Execute(i)
	}
}

// Inline reports whether all of the slot's data to the controller has arrived
// with its capsule, so that nothing is to be asked for; for a fused pair, of both.
func (s *Slot) Inline() bool { return s.inline }

// NeedsFetch reports whether slot i (and its pair) still has data at the host.
func (c *Conn) NeedsFetch(i int) bool {
	s := &c.slots[i]
	if s.Plan.ToController == 0 {
		return false
	}
	return !s.inline || s.pair >= 0 && !c.slots[s.pair].inline
}

// FetchPair asks for what is still with the host of a fused pair; buf is the
// memory for both, the Compare's data first.
func (c *Conn) FetchPair(second int, buf []byte) {
	s := &c.slots[second]
	n := int(s.Plan.ToController)
	if f := &c.slots[s.pair]; !f.inline {
		c.RequestData(int(s.pair), buf[:n])
	}
	if !s.inline {
		c.RequestData(second, buf[n:2*n])
	}
}

// PairFetched reports whether a fused pair's data is complete, and which slot
// executes it.
func (c *Conn) PairFetched(i int) (second int, complete bool) {
	s := &c.slots[i]
	o := &c.slots[s.pair]
	second = i
	if s.SQE.Fuse() == nvme.FuseFirst {
		second = int(s.pair)
	}
	return second, s.got == len(s.data) && o.got == len(o.data)
}

// Pair returns the other slot of a fused pair, or -1.
func (c *Conn) Pair(i int) int { return int(c.slots[i].pair) }

// h2cData checks an H2CData PDU against the R2T that it answers.
func (c *Conn) h2cData(p *pdu.Data, dataLen int) {
	i := int(p.TTAG() & ttagSlotMask)
	bad := func(fes pdu.FES, fei uint32, format string, args ...any) {
		c.fail(&pdu.FatalError{FES: fes, FEI: fei, What: "H2CData: " + fmt.Sprintf(format, args...)}, p[:])
	}
	switch {
	case i >= len(c.slots) || c.slots[i].state != slotFetching || c.slots[i].ttag(i) != p.TTAG():
		bad(pdu.InvalidHeaderField, 10, "TTAG %#x was not asked for", p.TTAG())
		return
	}
	s := &c.slots[i]
	switch n := int64(p.Length()); {
	case p.CCCID() != s.SQE.CID():
		bad(pdu.InvalidHeaderField, 8, "CCCID %#x, the R2T was for %#x", p.CCCID(), s.SQE.CID())
	case n != int64(dataLen):
		bad(pdu.InvalidHeaderField, 16, "DATAL %d, the PDU holds %d", n, dataLen)
	case n > int64(c.cfg.MaxH2CDataBytes):
		bad(pdu.R2TLimitExceeded, 0, "DATAL %d, MAXH2CDATA is %d", n, c.cfg.MaxH2CDataBytes)
	case int64(p.Offset()) != int64(s.got) || int64(p.Offset())+n > int64(len(s.data)):
		bad(pdu.DataTransferOutOfRange, 0, "DATAO %d, DATAL %d of %d bytes, %d received", p.Offset(), n, len(s.data), s.got)
	case p.Common().Flags()&pdu.FlagLast != 0 && s.got+dataLen != len(s.data):
		bad(pdu.InvalidHeaderField, 1, "LAST_PDU at %d of %d bytes", s.got+dataLen, len(s.data))
	default:
		c.cur, c.discard, c.h2c = i, false, true
	}
}

// TTAGs carry the slot and a generation that tells a stale one.
const (
	ttagSlotBits = 11
	ttagSlotMask = 1<<ttagSlotBits - 1
)

// MaxEntries is the largest queue a connection can carry.
const MaxEntries = 1024

func (s *Slot) ttag(i int) uint16 { return uint16(s.gen)<<ttagSlotBits | uint16(i) }
