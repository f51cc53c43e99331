// Package rdma implements the target's side of an NVMe/RDMA connection as a state machine around a qpair.QPair. Its
// inputs are received capsules and work completions. Its outputs are calls of the QPair's Handler and a batch of work
// requests. The machine does no I/O, calls no verbs, reads no clock and takes no lock; package serve drives it with
// RDMA devices.
//
//	capsule ──> Received ──> Begin, Arrived ──> Handler
//	Out <── SEND (SendResponse), WRITE + SEND (SendData), READ (Fetch) <── QPair <── the driver
//	completion ──> Completed ──> DataReceived, Done; Sink.Sent
//
// A read command costs one receive, one RDMA WRITE and one SEND. A write command costs one receive, at most one RDMA
// READ and one SEND. The WRITE is posted unsignaled directly before its SEND: the queue pair executes the two in order,
// so the completion of the SEND covers both.
//
// The send queue holds a fixed number of work requests, and the host serves a fixed number of RDMA READs at a time.
// Responses and READs that exceed these limits wait in two FIFOs here. A READ therefore never delays a response, and
// nothing is posted to a full send queue.
//
// Source: NVMe RDMA Transport 1.0.
package rdma

import (
	"fmt"

	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/rdma/wr"
)

// Sink translates buffers to addresses and keys, and learns when the data of a response is no longer needed.
type Sink interface {
	// Locate returns the address and the local key of b. It reports false if the device cannot reach that memory.
	Locate(b []byte) (addr uint64, lkey uint32, ok bool)
	// Sent reports that the data of a response is no longer needed. The number is the one that Conn.Last returned when
	// the response was made.
	Sent(number int)
}

// Config describes a connection.
type Config struct {
	Limits nvmeof.Limits
	// InCapsuleBytes is the largest in-capsule data (IOCCSZ without the SQE).
	InCapsuleBytes int
	// Entries is the queue size that the connection request's private data states.
	Entries int
	// QP is the handle of the queue pair in work requests. Sends is the size of its send queue, and Reads is how many
	// RDMA READs it may have outstanding.
	QP           uint64
	Sends, Reads int
	// Responses is registered memory for completion queue entries. It is ResponseBytes(Entries) long and lies at Addr
	// with key LKey.
	Responses []byte
	Addr      uint64
	LKey      uint32
	// Inline says that the device copies a completion queue entry into the work request when it is posted.
	Inline bool
}

// Out is a batch of work requests, possibly of several connections.
type Out struct{ Sends []wr.Send }

// Reset empties the batch.
func (o *Out) Reset() { o.Sends = o.Sends[:0] }

// States of a response.
const (
	respFree    = iota
	respWaiting // waits for places in the send queue
	respPosted
)

// response is a completion queue entry on its way to the host, with its data if there is any.
type response struct {
	state uint8
	op    wr.Op // OpSend or OpSendInvalidate
	gen   uint16
	rkey  uint32 // key to invalidate at the host
	// The data for the host, if n > 0.
	n          uint32
	addr       uint64
	lkey, dkey uint32
	remote     uint64
}

// requests returns how many work requests the response needs.
func (r *response) requests() int {
	if r.n > 0 {
		return 2
	}
	return 1
}

// Conn is the machine. It is used by one goroutine at a time.
type Conn struct {
	qpair.QPair
	cfg    Config
	sink   Sink
	out    *Out
	closed bool
	fatal  *Fatal

	// responses is the pool of responses. Its size is explained at responsesFor.
	responses []response
	free      []uint16 // indices of unused responses
	last      int
	// waiting holds responses that wait for places in the send queue. fetches holds slots whose READ waits.
	waiting, fetches ring
	// places is the number of free places in the send queue. reads is how many more READs may be posted.
	places, reads int
	// reading tells for each slot whether its READ is posted.
	reading []bool
}

// Fatal is the reason why a connection must end.
type Fatal struct {
	// Label is the reason's label in metrics.
	Label string
	What  string
}

func (f *Fatal) Error() string { return f.What }

var _ qpair.Wire = (*Conn)(nil)

// responsesFor returns how many responses a queue of so many entries needs. The host may have entries commands
// outstanding. The same number of earlier responses may have reached the host, which then sends new commands, before
// the target has polled their completions.
func responsesFor(entries int) int { return 2*entries + 16 }

// ResponseBytes returns the length that Config.Responses must have.
func ResponseBytes(entries int) int { return responsesFor(entries) * nvme.CQESize }

// New returns the state machine of a new connection. It appends its work requests to out.
func New(cfg Config, h qpair.Handler, s Sink, out *Out) *Conn {
	n := responsesFor(cfg.Entries)
	c := &Conn{
		cfg: cfg, sink: s, out: out, places: cfg.Sends, reads: cfg.Reads,
		responses: make([]response, n), free: make([]uint16, n), waiting: newRing(n),
		fetches: newRing(cfg.Entries + qpair.ExtraSlots),
		reading: make([]bool, cfg.Entries+qpair.ExtraSlots),
	}
	for i := range c.free {
		c.free[i] = uint16(n - 1 - i)
	}
	c.Init(cfg.Limits, h, c)
	return c
}

// Closed reports whether the connection has ended: nothing is sent or received any more.
func (c *Conn) Closed() bool { return c.closed }

// Close ends the state machine after the connection was lost.
func (c *Conn) Close() { c.closed = true }

// Fatal returns the reason for which the machine ended the connection, or nil.
func (c *Conn) Fatal() *Fatal { return c.fatal }

func (c *Conn) fail(label, format string, args ...any) {
	if c.fatal == nil && !c.closed {
		c.fatal = &Fatal{Label: label, What: fmt.Sprintf(format, args...)}
	}
	c.closed = true
}

// Unsent returns the number of responses whose SEND has not completed yet.
func (c *Conn) Unsent() int { return len(c.responses) - len(c.free) }

// Received processes a received capsule. It reports false and changes nothing if the command must wait; the caller then
// offers the capsule again before any later one.
//
// hot: 0 allocs
func (c *Conn) Received(capsule []byte) bool {
	if c.closed {
		return true
	}
	if n := len(capsule); n < nvme.SQESize || n > nvme.SQESize+c.cfg.InCapsuleBytes {
		c.fail("capsule", "a capsule of %d bytes, must be %d to %d", n, nvme.SQESize, nvme.SQESize+c.cfg.InCapsuleBytes)
		return true
	}
	sqe := (*nvme.SQE)(capsule)
	data := capsule[nvme.SQESize:]
	if len(c.free) <= c.Outstanding() { // every outstanding command may need a response at once
		return false
	}
	slot, o := c.Begin(sqe, len(data))
	switch o {
	case qpair.Waiting:
		return false
	case qpair.TooMany:
		c.fail("queue_size", "more commands than the queue's %d entries", c.Entries())
	case qpair.Unconnected:
		c.fail("sequence", "commands before Connect")
	case qpair.Arriving:
		s := c.Slot(slot)
		c.DataReceived(slot, copy(s.Data, data))
		c.Arrived(slot, true)
	case qpair.Taken:
	}
	return true
}

// CheckSGL implements qpair.Wire.
//
// Source: NVMe RDMA Transport 1.0, section 3.3; NVMe Base 2.0, section 4.1.2.
func (c *Conn) CheckSGL(sqe *nvme.SQE, ranges int, toController, toHost uint32, inlineLen int) (uint32, bool,
	nvme.Status) {
	if toController == 0 && toHost == 0 {
		return 0, false, nvme.Success
	}
	g := sqe.SGL()
	inline, length := false, g.KeyedLength()
	switch {
	case g.Type() == nvme.SGLTypeKeyedDataBlock &&
		(g.Subtype() == nvme.SGLSubtypeAddress || g.Subtype() == nvme.SGLSubtypeInvalidateRK):
	case g.Type() == nvme.SGLTypeDataBlock && g.Subtype() == nvme.SGLSubtypeOffset && toController > 0:
		inline, length = true, g.Length()
		if g.Address() != 0 {
			return 0, false, nvme.SGLOffsetInvalid | nvme.DNR
		}
	default:
		return 0, false, nvme.SGLTypeInvalid | nvme.DNR
	}
	if ranges > 0 && length > toController && length <= nvmeof.MaxDSMBytes {
		toController = length
	}
	if length != max(toController, toHost) || inline && inlineLen != int(toController) {
		return 0, false, nvme.DataSGLLengthInvalid | nvme.DNR
	}
	return toController, inline, nvme.Success
}

// Last returns the number of the response that was made last.
func (c *Conn) Last() int { return c.last }

// respond makes a response and posts it as soon as the send queue has places.
func (c *Conn) respond(slot int, e *nvme.CQE, n, lkey uint32, addr uint64) {
	invariants.Check(len(c.free) > 0, "rdma: no response left")
	i := int(c.free[len(c.free)-1])
	c.free = c.free[:len(c.free)-1]
	r := &c.responses[i]
	g := c.Slot(slot).SQE.SGL()
	*r = response{state: respWaiting, op: wr.OpSend, gen: r.gen + 1, n: n, addr: addr, lkey: lkey, dkey: g.Key(),
		remote: g.Address()}
	if g.Type() == nvme.SGLTypeKeyedDataBlock && g.Subtype() == nvme.SGLSubtypeInvalidateRK && g.KeyedLength() > 0 {
		r.op, r.rkey = wr.OpSendInvalidate, g.Key()
	}
	copy(c.cfg.Responses[i*nvme.CQESize:], e[:])
	c.waiting.push(uint16(i))
	c.post()
	// after post, which may itself make responses: a READ that cannot be posted completes its command with an error
	c.last = i
}

// SendResponse implements qpair.Wire.
//
// hot: 0 allocs
func (c *Conn) SendResponse(slot int, e nvme.CQE) { c.respond(slot, &e, 0, 0, 0) }

// SendData implements qpair.Wire. If the device cannot reach the data, the command completes with an error.
//
// hot: 0 allocs
func (c *Conn) SendData(slot int, data []byte, e nvme.CQE) {
	addr, lkey, ok := c.sink.Locate(data)
	if !ok {
		e.SetStatus(nvme.TransientTransportError)
		c.respond(slot, &e, 0, 0, 0)
		return
	}
	c.respond(slot, &e, uint32(len(data)), lkey, addr)
}

// Fetch implements qpair.Wire. It posts an RDMA READ as soon as the send queue and the READ limit allow.
//
// hot: 0 allocs
func (c *Conn) Fetch(slot int) {
	if c.closed {
		return
	}
	c.fetches.push(uint16(slot))
	c.post()
}

// Fields of a work request ID: the kind of request, a generation, and the index of the response or slot.
const (
	kindResponse = 1
	kindRead     = 2
)

func id(kind uint8, gen uint16, index int) uint64 {
	return uint64(kind)<<32 | uint64(gen)<<16 | uint64(index)
}

// post posts waiting requests while the send queue has places. Responses go first because they complete commands.
func (c *Conn) post() {
	for c.waiting.n > 0 {
		i := int(c.waiting.first())
		r := &c.responses[i]
		if r.requests() > c.places {
			return
		}
		c.waiting.pop()
		c.places -= r.requests()
		r.state = respPosted
		if r.n > 0 {
			c.out.Sends = append(c.out.Sends, wr.Send{ID: id(kindResponse, r.gen, i), QP: c.cfg.QP, Op: wr.OpWrite,
				Addr: r.addr, Len: r.n, LKey: r.lkey, RemoteAddr: r.remote, RKey: r.dkey})
		}
		w := wr.Send{ID: id(kindResponse, r.gen, i), QP: c.cfg.QP, Op: r.op, Flags: wr.FlagSignaled,
			Addr: c.cfg.Addr + uint64(i*nvme.CQESize), Len: nvme.CQESize, LKey: c.cfg.LKey, RKey: r.rkey}
		if c.cfg.Inline {
			w.Flags |= wr.FlagInline
		}
		c.out.Sends = append(c.out.Sends, w)
	}
	for c.fetches.n > 0 && c.reads > 0 && c.places > 0 {
		i := int(c.fetches.first())
		s := c.Slot(i)
		addr, lkey, ok := c.sink.Locate(s.Data)
		if !ok {
			c.fetches.pop()
			s.Bad = true
			c.DataReceived(i, len(s.Data))
			c.Done(i)
			continue
		}
		c.fetches.pop()
		c.reading[i] = true
		c.places--
		c.reads--
		g := s.SQE.SGL()
		c.out.Sends = append(c.out.Sends, wr.Send{ID: id(kindRead, uint16(s.Gen), i), QP: c.cfg.QP, Op: wr.OpRead,
			Flags: wr.FlagSignaled,
			Addr:  addr, Len: uint32(len(s.Data)), LKey: lkey, RemoteAddr: g.Address(), RKey: g.Key()})
	}
}

// Completed processes the completion of a posted work request. It ignores completions with an unknown ID.
//
// hot: 0 allocs
func (c *Conn) Completed(w *wr.Completion) {
	kind, gen, i := uint8(w.ID>>32), uint16(w.ID>>16), int(uint16(w.ID))
	switch {
	case kind == kindResponse && i < len(c.responses) && c.responses[i].state == respPosted &&
		c.responses[i].gen == gen:
		c.sent(i, w)
	case kind == kindRead && i < c.Slots() && c.reading[i] && uint16(c.Slot(i).Gen) == gen:
		c.fetched(i, w)
	}
	if !c.closed {
		c.post()
	}
}

// sent processes the completion of response i.
func (c *Conn) sent(i int, w *wr.Completion) {
	r := &c.responses[i]
	if w.Status != wr.StatusOK {
		// a WRITE and its SEND may both fail; the second failure finds the response free already
		c.broken(w.Status, "response")
	}
	c.places += r.requests()
	r.state = respFree
	c.free = append(c.free, uint16(i))
	c.sink.Sent(i)
}

// fetched processes the completion of slot i's READ.
func (c *Conn) fetched(i int, w *wr.Completion) {
	c.reading[i] = false
	c.places++
	c.reads++
	s := c.Slot(i)
	if !s.Fetching() {
		return // the connection ended in the meantime
	}
	if w.Status != wr.StatusOK {
		if w.Status != wr.StatusFlushed {
			c.NoteFailed(i, nvme.DataTransferError|nvme.DNR)
		}
		c.broken(w.Status, "RDMA READ")
		return
	}
	if c.closed {
		return
	}
	c.DataReceived(i, len(s.Data))
	c.Done(i)
}

// broken ends the connection. After an error the queue pair is in the error state and sends nothing more.
func (c *Conn) broken(s wr.Status, what string) {
	switch s {
	case wr.StatusFlushed:
		c.closed = true // a flush is only a consequence; another completion or event reports the cause
	case wr.StatusRemoteAccess:
		c.fail("remote_access", "%s: the host's memory key, address or length is wrong (%v)", what, s)
	case wr.StatusRemoteInvalid, wr.StatusRemoteOp:
		c.fail("remote_operation", "%s: refused by the host's device (%v)", what, s)
	case wr.StatusRNRExceeded:
		c.fail("receiver_not_ready", "%s: the host has posted no receive (%v)", what, s)
	case wr.StatusRetryExceeded:
		c.fail("unreachable", "%s: the host does not answer (%v)", what, s)
	default:
		c.fail("work_request", "%s: %v", what, s)
	}
}

// ring is a bounded FIFO of numbers.
type ring struct {
	b       []uint16
	head, n int
}

func newRing(n int) ring { return ring{b: make([]uint16, n)} }

func (r *ring) push(v uint16) {
	invariants.Check(r.n < len(r.b), "rdma: ring overflow")
	r.b[(r.head+r.n)%len(r.b)] = v
	r.n++
}

func (r *ring) first() uint16 { return r.b[r.head] }

func (r *ring) pop() {
	r.head = (r.head + 1) % len(r.b)
	r.n--
}
