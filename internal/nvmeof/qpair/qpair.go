// Package qpair is the target's side of one queue pair as a machine, whatever the transport: command slots, validation,
// fused pairs, the head of the submission queue, responses. The machine does no I/O, reads no clock and takes no lock.
// The machine of a transport (tcp, rdma) contains it, brings commands and data, and implements Wire for what goes to
// the host.
//
//	capsule ──> Begin ─┬─> Handler.Execute, Admin
//	                   └─> data arrives ──> Arrived ──┘
//	Wire.SendResponse, SendData, Fetch <── Respond, RespondData, RequestData <── the driver
//	data fetched ──> DataReceived, Done ──> Handler.Fetched
//
// Source: NVMe Base 2.0, chapter 3; NVM Command Set 1.0, section 2.3.
package qpair

import (
	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/pipeline"
)

// Handler receives the commands of a queue pair. The machine calls it from within Begin, Arrived
// and Done; it must not call those, but may call Respond, RespondData and RequestData at
// once. Fetched also comes from within RequestData and FetchPair, where the transport cannot ask.
type Handler interface {
	// Buffer returns memory for n bytes of slot's data. nil: there is none now; the
	// machine stops before the command, which is to be offered again when there is.
	Buffer(slot, n int) []byte
	// Execute: slot holds an I/O command with a valid Plan. Its in-capsule data, if
	// any, is in the Buffer; the rest is to be asked for with RequestData.
	Execute(slot int)
	// Admin: slot holds an admin or fabrics command, with its data.
	Admin(slot int)
	// Fetched: all data asked for with RequestData is there. Not ok: it was damaged or
	// lost on the way, and the command must fail with Transient Transport Error.
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

// Wire is the transport's machine around a queue pair.
type Wire interface {
	// CheckSGL holds a command's SGL against the data that it should move, of which
	// inlineLen bytes came in the capsule. It returns how much the host sends, which may be more
	// than ranges need, and whether that is in the capsule.
	CheckSGL(sqe *nvme.SQE, ranges int, toController, toHost uint32, inlineLen int) (sends uint32, inline bool,
		s nvme.Status)
	// SendResponse sends a completion queue entry.
	SendResponse(slot int, e nvme.CQE)
	// SendData sends data and then the completion e of slot's command.
	SendData(slot int, data []byte, e nvme.CQE)
	// Fetch asks the host for slot's data, Slot.Data; Fetched is to follow.
	Fetch(slot int)
	// Closed reports that nothing can be sent any more.
	Closed() bool
}

// States of a slot.
const (
	slotFree      = iota
	slotArriving  // in-capsule data is arriving
	slotExecuting // with the handler
	slotFetching  // data was asked for
	slotFused     // first of a fused pair, waiting for the second or sharing its fate
	slotZombie    // responded to (aborted) but still with the handler
)

// Slot is one command outstanding.
type Slot struct {
	SQE nvme.SQE
	// Plan is set for I/O commands.
	Plan nvmeof.Plan
	// Data is the memory that the host's data arrives in.
	Data []byte
	// Got counts the bytes of Data that have come. Bad: some of them were wrong. The transport
	// keeps both. Invariant: Got <= len(Data).
	Got int
	Bad bool
	// Gen counts the data that the slot has asked for, to tell stale answers.
	Gen uint8

	state uint8
	// inline: the data came with the capsule.
	inline bool
	// pair is the other slot of a fused pair, or -1.
	pair  int16
	sqid  uint16                 // of the completion
	table *nvmeof.NamespaceTable // that the Plan was made by
}

// Fetching reports that the slot's data was asked for and has not come whole.
func (s *Slot) Fetching() bool { return s.state == slotFetching }

// QPair is the machine. It is used by one goroutine at a time.
type QPair struct {
	limits nvmeof.Limits
	h      Handler
	wire   Wire

	// Set by Attach.
	connected bool
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
	// awaited is how many bytes were asked for that have not come.
	awaited int
	// received is how many bytes of data have come from the host.
	received uint64
}

// ExtraSlots are slots beyond the queue's entries. A zombie, an aborted command that is still with the handler, keeps
// its slot although the host may send another command.
const ExtraSlots = 8

// MaxEntries is the largest queue: transports name slots with SlotBits bits.
const (
	MaxEntries = 1024
	SlotBits   = 11
)

// Init makes q the machine of a new connection.
func (q *QPair) Init(l nvmeof.Limits, h Handler, w Wire) {
	*q = QPair{limits: l, h: h, wire: w, fused: -1}
	q.makeSlots(1)
}

func (q *QPair) makeSlots(n int) {
	q.slots = make([]Slot, n)
	q.free = make([]uint16, n)
	for i := range q.slots {
		q.slots[i].pair = -1
		q.free[i] = uint16(n - 1 - i)
	}
}

// Attachment is what a successful Connect makes of the connection.
type Attachment struct {
	QID uint16
	// Entries is the queue's size, SQSIZE + 1.
	Entries int
	// NoSQFlow: submission queue flow control is disabled, SQHD is not used.
	NoSQFlow bool
	// Table are the host's namespaces; nil for admin queues. One that SetTable has
	// brought already is younger and stays.
	Table *nvmeof.NamespaceTable
}

// Attach makes the connection a queue. It is called for the Connect command in
// slot 0 before that is responded to, and returns how many slots there are now.
func (q *QPair) Attach(a Attachment) (slots int) {
	invariants.Check(!q.connected, "qpair: Attach out of order")
	connect := q.slots[0]
	q.makeSlots(a.Entries + ExtraSlots)
	q.slots[0] = connect
	q.free = q.free[:len(q.free)-1] // slot 0 is the last
	q.qid, q.sqEntries, q.noSQFlow = a.QID, a.Entries, a.NoSQFlow
	q.sqhd = 1 // Connect was the first entry of this queue
	if q.table == nil {
		q.table = a.Table
	}
	q.connected = true
	return len(q.slots)
}

// SetTable gives an I/O queue another view of the namespaces, for commands that
// have not arrived yet.
func (q *QPair) SetTable(t *nvmeof.NamespaceTable) { q.table = t }

// SetCredits says whether the host looks for credits in its completions.
func (q *QPair) SetCredits(on bool) { q.credits = on }

// Credits reports what SetCredits said.
func (q *QPair) Credits() bool { return q.credits }

// NoSQFlow reports that submission queue flow control is disabled.
func (q *QPair) NoSQFlow() bool { return q.noSQFlow }

// Slot returns a slot by number; valid until it is responded to.
func (q *QPair) Slot(i int) *Slot { return &q.slots[i] }

// Slots is how many slots there are.
func (q *QPair) Slots() int { return len(q.slots) }

// Entries is the queue's size; 1 before Attach.
func (q *QPair) Entries() int { return max(q.sqEntries, 1) }

// Outstanding is how many commands are not responded to.
func (q *QPair) Outstanding() int { return len(q.slots) - len(q.free) - q.zombies }

// Connected reports whether Attach was called, and QID for which queue.
func (q *QPair) Connected() bool { return q.connected }

// QID is the queue's number; 0 is the admin queue.
func (q *QPair) QID() uint16 { return q.qid }

// Full reports that no slot is free, although the host may send commands:
// aborted ones are still with the handler.
func (q *QPair) Full() bool { return q.zombies > 0 && len(q.free) == 0 }

// AwaitedBytes is how much data was asked for that has not come.
func (q *QPair) AwaitedBytes() int { return q.awaited }

// ReceivedBytes is how much data has come from the host, in capsules and as asked for.
func (q *QPair) ReceivedBytes() uint64 { return q.received }

// Outcome is what Begin has made of a command.
type Outcome uint8

// Outcomes of Begin.
const (
	// Taken: the command is with the handler, waits for data that was asked for, or was
	// answered with an error. Its in-capsule data, if any, is of no use.
	Taken Outcome = iota
	// Arriving: the in-capsule data belongs into Slot.Data; Arrived is to follow.
	Arriving
	// Waiting: nothing has changed; the handler has no memory or is paused. The command
	// is to be offered again.
	Waiting
	// TooMany: nothing has changed; the host has more commands outstanding than its queue has
	// entries.
	TooMany
	// Unconnected: nothing has changed; commands follow one another before Connect.
	Unconnected
)

// Begin takes a command in, of which inlineLen bytes of data are in the capsule.
//
// hot: 0 allocs
func (q *QPair) Begin(sqe *nvme.SQE, inlineLen int) (slot int, o Outcome) {
	if !q.connected && (sqe.Opcode() != nvme.OpFabrics || sqe.FCTYPE() != nvme.FabricsConnect) {
		if len(q.free) == 0 {
			return 0, Unconnected
		}
		// A command to a queue that is not connected: it fails, the connection stays.
		i := q.takeSlot(sqe)
		q.refuse(i, nvme.CommandSequenceError|nvme.DNR)
		return i, Taken
	}
	if q.h.Paused() || q.Full() {
		return 0, Waiting
	}
	if len(q.free) == 0 || q.Outstanding() >= q.Entries() {
		return 0, TooMany
	}

	i := int(q.free[len(q.free)-1]) // not taken yet
	s := &q.slots[i]
	io := q.connected && q.qid != 0 && sqe.Opcode() != nvme.OpFabrics
	var status nvme.Status
	toController, toHost := uint32(0), uint32(0)
	if io {
		status = nvmeof.PlanIO(sqe, q.table, q.limits, &s.Plan)
		toController, toHost = s.Plan.ToController, s.Plan.ToHost
	} else {
		toController, toHost, status = nvmeof.PlanAdmin(sqe, q.limits)
		s.Plan = nvmeof.Plan{}
	}
	inline := false
	if status.OK() {
		toController, inline, status = q.wire.CheckSGL(sqe, s.Plan.Ranges, toController, toHost, inlineLen)
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
		if fuse == nvme.FuseSecond && q.fused >= 0 && q.slots[q.fused].inline {
			need = 0 // shares the first's buffer
		}
	case inline:
		need = int(toController)
	case !io:
		need = int(max(toController, toHost))
	}
	var buf []byte
	if need > 0 {
		if buf = q.h.Buffer(i, need); buf == nil {
			return 0, Waiting
		}
	}

	q.takeSlot(sqe)
	s.inline, s.table = inline, q.table
	status = q.fuse(i, fuse, status)
	if !status.OK() {
		if need > 0 {
			q.h.Unused(i)
		}
		q.refuse(i, status)
		return i, Taken
	}

	if inline {
		n := int(toController)
		switch {
		case fuse == nvme.FuseSecond && buf == nil:
			s.Data = q.slots[s.pair].Data[:2*n][n:]
		case fuse == nvme.FuseSecond:
			s.Data = buf[n : 2*n]
		default:
			s.Data = buf[:n]
		}
		s.state = slotArriving
		return i, Arriving
	}
	if !io && toController > 0 {
		q.RequestData(i, buf[:toController])
		return i, Taken
	}
	q.dispatch(i)
	return i, Taken
}

// fuse joins the command in slot i with the one before it where they are a fused pair, and
// returns its status then.
func (q *QPair) fuse(i int, fuse nvme.Fuse, status nvme.Status) nvme.Status {
	firstFailed := q.fusedFailed
	q.fusedFailed = false
	if q.fused >= 0 && fuse != nvme.FuseSecond {
		first := q.fused
		q.fused = -1
		q.h.Unused(first)
		q.refuse(first, nvme.AbortedMissingFused|nvme.DNR)
	}
	switch {
	case fuse == nvme.FuseSecond && firstFailed:
		return nvme.AbortedFailedFused | nvme.DNR
	case fuse == nvme.FuseSecond:
		return q.pairUp(i, status)
	case fuse == nvme.FuseFirst:
		if status.OK() && q.slots[i].SQE.Opcode() != nvme.CmdCompare {
			status = nvme.InvalidField | nvme.DNR
		}
		if status.OK() {
			q.fused = i
		} else {
			q.fusedFailed = true
		}
	}
	return status
}

// Arrived says that the in-capsule data of slot i is there; not ok: it was damaged.
//
// hot: 0 allocs
func (q *QPair) Arrived(i int, ok bool) {
	s := &q.slots[i]
	invariants.Check(s.state == slotArriving, "qpair: data arrived for a slot that awaits none")
	status := q.Recheck(i)
	if !ok {
		status = nvme.TransientTransportError
	}
	if !status.OK() {
		q.h.Unused(i)
		if s.pair >= 0 { // the second of a pair: the first shares its fate
			first := int(s.pair)
			q.h.Unused(first)
			q.refuse(first, nvme.AbortedFailedFused|nvme.DNR)
		}
		if q.fused == i {
			q.fused, q.fusedFailed = -1, true
		}
		q.refuse(i, status)
		return
	}
	q.dispatch(i)
}

// Recheck validates an I/O command again if the namespaces have changed since it arrived: it has waited for memory or
// for data, and its extent may belong to another namespace by now.
func (q *QPair) Recheck(i int) nvme.Status {
	s := &q.slots[i]
	if s.table == q.table || s.Plan.Namespace == nil {
		return nvme.Success
	}
	was := s.Plan
	var now nvmeof.Plan
	if status := nvmeof.PlanIO(&s.SQE, q.table, q.limits, &now); !status.OK() {
		return status
	}
	if now.Offset != was.Offset || now.Len != was.Len || now.Namespace.SSD != was.Namespace.SSD ||
		now.Namespace.OffsetBytes != was.Namespace.OffsetBytes || now.Namespace.UUID != was.Namespace.UUID ||
		now.Kind != was.Kind || now.Namespace.Partition != was.Namespace.Partition ||
		now.AnswerBytes < was.AnswerBytes {
		return nvme.InvalidNamespaceOrFormat | nvme.DNR
	}
	// of a fused pair, what the SGL said, the memory
	now.Op, now.ToController, now.AnswerBytes = was.Op, was.ToController, was.AnswerBytes
	s.Plan = now
	return nvme.Success
}

// takeSlot takes the next free slot for sqe and advances the queue's head.
func (q *QPair) takeSlot(sqe *nvme.SQE) int {
	i := int(q.free[len(q.free)-1])
	q.free = q.free[:len(q.free)-1]
	s := &q.slots[i]
	s.SQE = *sqe
	s.state, s.pair, s.Data, s.Got, s.Bad, s.inline = slotExecuting, -1, nil, 0, false, false
	if q.sqEntries > 0 {
		if q.sqhd++; int(q.sqhd) >= q.sqEntries {
			q.sqhd = 0
		}
	}
	return i
}

// pairUp joins a second fused command, whose own status is given, with the
// first. If that fails, the first is responded to here.
func (q *QPair) pairUp(second int, status nvme.Status) nvme.Status {
	s := &q.slots[second]
	if q.fused < 0 {
		return nvme.AbortedMissingFused | nvme.DNR
	}
	first := q.fused
	q.fused = -1
	f := &q.slots[first]
	if status.OK() {
		status = nvmeof.CheckFused(&f.SQE, &s.SQE)
	}
	if status.OK() && (f.Plan.Offset != s.Plan.Offset || f.Plan.Len != s.Plan.Len ||
		f.Plan.Namespace.SSD != s.Plan.Namespace.SSD) {
		status = nvme.InvalidField | nvme.DNR // the namespace has changed in between
	}
	if !status.OK() {
		q.h.Unused(first)
		q.refuse(first, nvme.AbortedFailedFused|nvme.DNR)
		return status
	}
	f.pair, s.pair = int16(second), int16(first)
	s.Plan.Op = pipeline.CompareWrite
	return nvme.Success
}

// dispatch hands a command to the handler; its in-capsule data has arrived.
func (q *QPair) dispatch(i int) {
	s := &q.slots[i]
	s.state = slotExecuting
	switch {
	case !q.connected || q.qid == 0 || s.SQE.Opcode() == nvme.OpFabrics:
		q.h.Admin(i)
	case q.fused == i:
		s.state = slotFused
	case s.pair >= 0:
		q.slots[s.pair].state = slotFused
		q.h.Paired(int(s.pair), i)
		q.h.Execute(i)
	default:
		q.h.Execute(i)
	}
}

// Inline reports whether all of the slot's data to the controller has arrived
// with its capsule, so that nothing is to be asked for; for a fused pair, of both.
func (s *Slot) Inline() bool { return s.inline }

// NeedsFetch reports whether slot i (and its pair) still has data at the host.
func (q *QPair) NeedsFetch(i int) bool {
	s := &q.slots[i]
	if s.Plan.ToController == 0 {
		return false
	}
	return !s.inline || s.pair >= 0 && !q.slots[s.pair].inline
}

// RequestData asks the host for slot's data, to be placed in buf; Handler.Fetched
// follows, at once where the transport cannot ask.
//
// hot: 0 allocs
func (q *QPair) RequestData(slot int, buf []byte) {
	q.await(slot, buf)
	q.wire.Fetch(slot)
}

// await makes slot one whose data is fetched to buf.
func (q *QPair) await(slot int, buf []byte) {
	s := &q.slots[slot]
	invariants.Check(s.state == slotExecuting || s.state == slotFused, "qpair: data asked for by a slot that does not "+
		"execute")
	q.awaited += len(buf)
	s.state, s.Data, s.Got, s.Bad = slotFetching, buf, 0, false
	s.Gen++
}

// DataReceived says that n more bytes of slot's data are in Data, behind those that Got counts.
//
// hot: 0 allocs
func (q *QPair) DataReceived(slot, n int) {
	s := &q.slots[slot]
	s.Got += n
	q.received += uint64(n)
	if s.state == slotFetching {
		q.awaited -= n
	}
}

// Done returns a slot to the handler: all data that was asked for has come.
//
// hot: 0 allocs
func (q *QPair) Done(slot int) {
	s := &q.slots[slot]
	invariants.Check(s.state == slotFetching && s.Got == len(s.Data), "qpair: data is not there whole")
	s.state = slotExecuting
	q.h.Fetched(slot, !s.Bad)
}

// FetchPair asks for the data of a fused pair that the host has not sent in a capsule. buf is the memory for both
// commands, the Compare's data first.
func (q *QPair) FetchPair(second int, buf []byte) {
	s := &q.slots[second]
	n := int(s.Plan.ToController)
	first := int(s.pair)
	fetchFirst, fetchSecond := !q.slots[first].inline, !s.inline
	// Both are awaited before either is asked for: if asking for the first fails at once, the pair
	// is not complete yet.
	if fetchFirst {
		q.await(first, buf[:n])
	}
	if fetchSecond {
		q.await(second, buf[n:2*n])
	}
	if fetchFirst {
		q.wire.Fetch(first)
	}
	if fetchSecond {
		q.wire.Fetch(second)
	}
}

// PairFetched reports whether a fused pair's data is complete, and which slot
// executes it.
func (q *QPair) PairFetched(i int) (second int, complete bool) {
	s := &q.slots[i]
	o := &q.slots[s.pair]
	second = i
	if s.SQE.Fuse() == nvme.FuseFirst {
		second = int(s.pair)
	}
	return second, s.Got == len(s.Data) && o.Got == len(o.Data)
}

// Pair returns the other slot of a fused pair, or -1.
func (q *QPair) Pair(i int) int { return int(q.slots[i].pair) }
