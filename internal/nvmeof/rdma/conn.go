// Package rdma is the target's side of an NVMe/RDMA connection as a machine around a
// qpair.QPair: capsules received and completions of work requests go in, commands come out to the
// QPair's Handler and work requests to a batch. It does no I/O, knows no verbs, reads no
// clock and takes no lock. The serve package drives it with RDMA devices.
//
//	capsule ──> Received ──> Begin, Arrived ──> Handler
//	Out <── SEND (SendResponse), WRITE + SEND (SendData), READ (Fetch) <── QPair <── the driver
//	completion ──> Completed ──> Came, Done; Sink.Sent
//
// A read costs one receive, one RDMA WRITE and one SEND; a write one receive, at most one RDMA
// READ and one SEND. The WRITE goes unsignaled, just before its SEND: the queue pair keeps their
// order, and the SEND's completion stands for both.
//
// A queue pair takes as many work requests as its send queue has places, and serves so many RDMA
// READs at a time. What is beyond waits here in order, so that a READ never holds up a response
// and nothing is ever posted to a full queue.
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

// Sink is told what has become of data and where memory is.
type Sink interface {
	// Locate returns the address and the local key of memory that the device can reach; not ok: it
	// cannot.
	Locate(b []byte) (addr uint64, lkey uint32, ok bool)
	// Sent: the data of a response is not needed any more; number is Last's of when it was sent.
	Sent(number int)
}

// Config describes a connection.
type Config struct {
	Limits nvmeof.Limits
	// InCapsuleBytes is the largest in-capsule data (IOCCSZ without the SQE).
	InCapsuleBytes int
	// Entries is the queue's size, as the private data of the connection says.
	Entries int
	// QP names the queue pair in work requests. Sends is how many work requests its send queue
	// takes, Reads how many RDMA READs it serves at a time.
	QP           uint64
	Sends, Reads int
	// Responses is registered memory for completion queue entries, ResponseBytes(Entries) long, at
	// Addr with key LKey.
	Responses []byte
	Addr      uint64
	LKey      uint32
	// Inline: the device takes completion queue entries along with the work request.
	Inline bool
}

// Out is a batch of work requests, of any connections.
type Out struct{ Sends []wr.Send }

// Reset empties the batch.
func (o *Out) Reset() { o.Sends = o.Sends[:0] }

// States of a response.
const (
	respFree    = iota
	respWaiting // for places in the send queue
	respPosted
)

// response is a completion on its way to the host, with its data if any.
type response struct {
	state uint8
	op    wr.Op // OpSend or OpSendInvalidate
	gen   uint16
	rkey  uint32 // to be invalidated
	// Data for the host, if n > 0.
	n          uint32
	addr       uint64
	lkey, dkey uint32
	remote     uint64
}

// requests is how many work requests the response takes.
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

	// responses are as many as the host can make necessary: see reserve.
	responses []response
	free      []uint16 // responses at rest
	last      int
	// waiting are responses that wait for places, fetches slots whose READ does; both rings.
	waiting, fetches ring
	// places are those left in the send queue, reads the READs that may be posted.
	places, reads int
	// reading are the slots whose READ is posted.
	reading []bool
}

// Fatal is why a connection cannot go on.
type Fatal struct {
	// Label names it in metrics.
	Label string
	What  string
}

func (f *Fatal) Error() string { return f.What }

var _ qpair.Wire = (*Conn)(nil)

// responsesFor is how many responses there are for a queue. While the host has room for entries
// commands, as many may be outstanding, and as many responses may be on their way whose completions
// have not been seen yet, although the host has them and has sent new commands.
func responsesFor(entries int) int { return 2*entries + 16 }

// ResponseBytes is how much memory Config.Responses needs.
func ResponseBytes(entries int) int { return responsesFor(entries) * nvme.CQESize }

// New returns the machine of a new connection. Work requests go to out.
func New(cfg Config, h qpair.Handler, s Sink, out *Out) *Conn {
	n := responsesFor(cfg.Entries)
	c := &Conn{
		cfg: cfg, sink: s, out: out, places: cfg.Sends, reads: cfg.Reads,
		responses: make([]response, n), free: make([]uint16, n), waiting: newRing(n), fetches: newRing(cfg.Entries + qpair.ExtraSlots),
		reading: make([]bool, cfg.Entries+qpair.ExtraSlots),
	}
	for i := range c.free {
		c.free[i] = uint16(n - 1 - i)
	}
	c.Init(cfg.Limits, h, c)
	return c
}

// Closed reports that nothing is sent or received any more.
func (c *Conn) Closed() bool { return c.closed }

// Close ends the machine: the connection is lost.
func (c *Conn) Close() { c.closed = true }

// Fatal returns why the machine has ended the connection, or nil.
func (c *Conn) Fatal() *Fatal { return c.fatal }

func (c *Conn) fail(label, format string, args ...any) {
	if c.fatal == nil && !c.closed {
		c.fatal = &Fatal{Label: label, What: fmt.Sprintf(format, args...)}
	}
	c.closed = true
}

// Unsent is how many responses have not reached the host as far as the machine knows.
func (c *Conn) Unsent() int { return len(c.responses) - len(c.free) }

// Received takes a capsule. It reports false, with nothing changed, when the command must
// wait; it is to be offered again before any that came later.
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
	if len(c.free) <= c.Outstanding() { // each command may need a response at once
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
		c.Came(slot, copy(s.Data, data))
		c.Arrived(slot, true)
	case qpair.Taken:
	}
	return true
}

// CheckSGL implements qpair.Wire.
//
// Source: NVMe RDMA Transport 1.0, section 3.3; NVMe Base 2.0, section 4.1.2.
func (c *Conn) CheckSGL(sqe *nvme.SQE, ranges int, toController, toHost uint32, inlineLen int) (uint32, bool, nvme.Status) {
	if toController == 0 && toHost == 0 {
		return 0, false, nvme.Success
	}
	g := sqe.SGL()
	inline, length := false, g.KeyedLength()
	switch {
	case g.Type() == nvme.SGLTypeKeyedDataBlock && (g.Subtype() == nvme.SGLSubtypeAddress || g.Subtype() == nvme.SGLSubtypeInvalidateRK):
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

// Last is the number of the response that was made last.
func (c *Conn) Last() int { return c.last }

// respond makes a response and posts it when its turn comes.
func (c *Conn) respond(slot int, e *nvme.CQE, n, lkey uint32, addr uint64) {
	invariants.Check(len(c.free) > 0, "rdma: no response left")
	i := int(c.free[len(c.free)-1])
	c.free = c.free[:len(c.free)-1]
	r := &c.responses[i]
	g := c.Slot(slot).SQE.SGL()
	*r = response{state: respWaiting, op: wr.OpSend, gen: r.gen + 1, n: n, addr: addr, lkey: lkey, dkey: g.Key(), remote: g.Address()}
	if g.Type() == nvme.SGLTypeKeyedDataBlock && g.Subtype() == nvme.SGLSubtypeInvalidateRK && g.KeyedLength() > 0 {
		r.op, r.rkey = wr.OpSendInvalidate, g.Key()
	}
	copy(c.cfg.Responses[i*nvme.CQESize:], e[:])
	c.waiting.push(uint16(i))
	c.post()
	c.last = i // after post, which may have made others: a READ that cannot be posted ends a command
}

// SendResponse implements qpair.Wire.
//
// hot: 0 allocs
func (c *Conn) SendResponse(slot int, e nvme.CQE) { c.respond(slot, &e, 0, 0, 0) }

// SendData implements qpair.Wire. Memory that the device cannot reach makes it an error.
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

// Fetch implements qpair.Wire: it posts an RDMA READ when its turn comes.
//
// hot: 0 allocs
func (c *Conn) Fetch(slot int) {
	if c.closed {
		return
	}
	c.fetches.push(uint16(slot))
	c.post()
}

// Work request identifiers: what it is, a generation, and the response or the slot.
const (
	kindResponse = 1
	kindRead     = 2
)

func id(kind uint8, gen uint16, index int) uint64 {
	return uint64(kind)<<32 | uint64(gen)<<16 | uint64(index)
}

// post posts what waits, as far as there are places. Responses go first: they end commands.
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
			c.Came(i, len(s.Data))
			c.Done(i)
			continue
		}
		c.fetches.pop()
		c.reading[i] = true
		c.places--
		c.reads--
		g := s.SQE.SGL()
		c.out.Sends = append(c.out.Sends, wr.Send{ID: id(kindRead, uint16(s.Gen), i), QP: c.cfg.QP, Op: wr.OpRead, Flags: wr.FlagSignaled,
			Addr: addr, Len: uint32(len(s.Data)), LKey: lkey, RemoteAddr: g.Address(), RKey: g.Key()})
	}
}

// Completed takes the completion of a work request that was posted. Any other changes nothing.
//
// hot: 0 allocs
func (c *Conn) Completed(w *wr.Completion) {
	kind, gen, i := uint8(w.ID>>32), uint16(w.ID>>16), int(uint16(w.ID))
	switch {
	case kind == kindResponse && i < len(c.responses) && c.responses[i].state == respPosted && c.responses[i].gen == gen:
		c.sent(i, w)
	case kind == kindRead && i < c.Slots() && c.reading[i] && uint16(c.Slot(i).Gen) == gen:
		c.fetched(i, w)
	}
	if !c.closed {
		c.post()
	}
}

// sent ends response i.
func (c *Conn) sent(i int, w *wr.Completion) {
	r := &c.responses[i]
	if w.Status != wr.StatusOK {
		c.broken(w.Status, "response") // of a WRITE and its SEND both may fail: the second finds the response at rest
	}
	c.places += r.requests()
	r.state = respFree
	c.free = append(c.free, uint16(i))
	c.sink.Sent(i)
}

// fetched ends the READ of slot i.
func (c *Conn) fetched(i int, w *wr.Completion) {
	c.reading[i] = false
	c.places++
	c.reads++
	s := c.Slot(i)
	if !s.Fetching() {
		return // the connection was lost meanwhile
	}
	if w.Status != wr.StatusOK {
		if w.Status != wr.StatusFlushed {
			c.Note(i, nvme.DataTransferError|nvme.DNR)
		}
		c.broken(w.Status, "RDMA READ")
		return
	}
	if c.closed {
		return
	}
	c.Came(i, len(s.Data))
	c.Done(i)
}

// broken ends the connection: after an error the queue pair sends nothing any more.
func (c *Conn) broken(s wr.Status, what string) {
	switch s {
	case wr.StatusFlushed:
		c.closed = true // what it was flushed for is told by another
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
