package serve

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/rdma"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/rdma/wr"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/tenant"
)

// connectBytes is the data of the Connect command.
const connectBytes = nvme.ConnectDataSize

// maxReads is how many RDMA READs a connection has outstanding at most, whatever both devices
// allow.
const maxReads = 32

// conn is one RDMA connection. A goroutine of its own sets it up, executes its admin commands and takes it down. I/O
// commands and all responses are processed in turns of its group.
type conn struct {
	connection.Conn
	srv    *Server
	ticket *connection.Ticket
	ep     verbs.Endpoint
	req    cm.Request
	port   nvmeof.Port
	remote string

	dev     *device
	g       *group
	qp      verbs.QP
	piece   piece
	sends   int
	admin   chan struct{} // there are admin commands
	wake    chan struct{} // what is being waited for may have happened
	resumed chan struct{} // Transport.Resume, for Release
	dead    chan struct{} // closed by shut
	once    sync.Once
	reason  string // why; set before dead is closed
	opened  atomic.Bool

	// The rest is guarded by the group's lock.
	m *rdma.Conn
	// lent are the buffers of responses on their way, by their number.
	lent []bufpool.Buf
	// waiting are receives whose commands wait for memory, in order.
	waiting held
	// progress counts work requests that are done, for stuck to compare.
	progress         uint32
	took             drainProgress
	touched, stalled bool
	leaving          bool        // Linger waits
	failed           *rdma.Fatal // found by the driver
}

// held are receives of commands that wait, with their lengths.
type held struct {
	b       []heldReceive
	head, n int
}

type heldReceive struct {
	number, len int32
	tenant      tenant.ID // whose share of the receives it counts in
}

func newConn(s *Server, ep verbs.Endpoint, req *cm.Request, port nvmeof.Port) *conn {
	c := &conn{srv: s, ep: ep, req: *req, port: port, remote: ep.Remote().String(),
		admin: make(chan struct{}, 1), wake: make(chan struct{}, 1), resumed: make(chan struct{}, 1),
		dead: make(chan struct{})}
	c.ticket = s.cfg.Admission.Enter(ep.Remote().Addr(), c.shut)
	return c
}

func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// serve runs the connection until it is closed, its commands are done and their buffers are returned.
func (c *conn) serve() {
	if err := c.open(); err != nil {
		c.srv.tel.ConnectionRefused("resources")
		c.srv.reject(c.ep, noResources(err))
		return
	}
	c.opened.Store(true)
	if err := c.accept(); err != nil {
		c.shut(fmt.Sprintf("accept: %v", err))
	}
	handshake := time.AfterFunc(c.srv.cfg.HandshakeTimeout, func() {
		l := turnLock{c.g}
		l.Lock()
		ctrl, _ := c.Controller()
		connecting := c.Connecting()
		l.Unlock()
		if ctrl == nil && !connecting {
			c.shut("handshake timeout")
		}
	})
	for running := true; running; {
		select {
		case <-c.admin:
			c.ExecuteAdmin()
		case <-c.dead:
			running = false
		}
	}
	handshake.Stop()
	c.close()
}

// open takes everything that the connection needs; on error nothing is taken.
func (c *conn) open() (err error) {
	if c.dev, err = c.srv.enter(c.ep.Device()); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			c.srv.connClosed(c.dev)
		}
	}()
	entries := int(c.req.HSQSIZE()) + 1
	reads := int(min(c.ep.Peer().ResponderResources, c.dev.attr.MaxInitiatorDepth, maxReads))
	// A whole queue of reads can be answered at once. A work request that finds no place waits until an earlier one is
	// done.
	c.sends = max(min(2*entries+reads, c.dev.attr.MaxQPWRs), 3)
	if c.g, err = c.dev.place(c.sends); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			c.g.releasePlace(c.sends)
		}
	}()
	if err = c.dev.receives.want(entries); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			c.returnReceives()
		}
	}()
	if c.piece, err = c.dev.control.get(); err != nil {
		return err
	}
	c.g.creating.Lock()
	defer c.g.creating.Unlock()
	c.qp, err = c.ep.CreateQP(verbs.QPConfig{Domain: c.dev.domain, SendCQ: c.g.cq, RecvCQ: c.g.cq,
		SRQ:   c.dev.receives.srq,
		Sends: c.sends, InlineBytes: nvme.CQESize})
	if err != nil {
		c.dev.control.put(c.piece)
		return fmt.Errorf("queue pair: %w", err)
	}
	c.start(entries, reads)
	return nil
}

// start makes the machine and makes the connection known.
func (c *conn) start(entries, reads int) {
	f := c.srv.service
	l := turnLock{c.g}
	n := rdma.ResponseBytes(entries)
	c.m = rdma.New(rdma.Config{Limits: c.srv.cfg.Limits, InCapsuleBytes: c.srv.cfg.InCapsuleBytes, Entries: entries,
		QP: c.qp.Handle(), Sends: c.sends, Reads: reads,
		Responses: c.piece.b[connectBytes:][:n], Addr: c.piece.addr + connectBytes, LKey: c.piece.lkey,
		Inline: c.qp.InlineBytes() >= nvme.CQESize}, &c.Conn, c, &c.g.out)
	c.lent = make([]bufpool.Buf, n/nvme.CQESize)
	c.waiting.b = make([]heldReceive, entries)
	l.Lock()
	c.Conn.Init(connection.Config{
		Service: f, Telemetry: c.srv.tel, Log: c.srv.log, Ticket: c.ticket, Transport: c,
		Machine: &c.m.QPair, Closed: c.m.Closed, Lock: l, Batches: c.g.batches, Outbox: &c.g.outbox,
		Name: "rdma", Local: c.ep.Local().String(), Remote: c.remote, Peer: c.ep.Remote().Addr(), Port: c.port,
		Agreed: &nvmeof.Agreed{QID: c.req.QID(), Entries: entries}, ConnectBuffer: c.piece.b[:connectBytes],
	})
	c.g.conns.put(c.qp.Num(), c)
	l.Unlock()
}

// accept tells the host that its connection stands.
func (c *conn) accept() error {
	c.ep.OnEvent(func(e verbs.Event) {
		switch e {
		case verbs.Disconnected:
			c.shut("closed by the host")
		case verbs.Fatal, verbs.Removed:
			if e == verbs.Removed {
				c.dev.removed.Store(true)
			}
			c.shut(e.String())
		case verbs.Established:
		}
	})
	var a cm.Accept
	a.SetCRQSIZE(c.req.HSQSIZE() + 1)
	return c.ep.Accept(verbs.Params{PrivateData: a[:],
		InitiatorDepth: uint8(min(c.ep.Peer().ResponderResources, c.dev.attr.MaxInitiatorDepth, maxReads)),
		RetryCount:     7, RNRRetryCount: 7})
}

// shut begins to close the connection; the first reason counts.
func (c *conn) shut(reason string) {
	c.once.Do(func() {
		c.reason = reason
		close(c.dead)
	})
}

// close takes the connection down. The order matters: when the queue pair is gone, the device
// touches its memory no more.
func (c *conn) close() {
	l := turnLock{c.g}
	fatal := c.closeQueuePair(l)
	c.Close()
	l.Lock()
	c.g.batches.HandOver()
	l.Unlock()
	c.waitFor(func() bool { return c.InFlight() == 0 }, nil)

	pool := c.srv.service.Pool()
	for i := range c.lent {
		if !c.lent[i].IsZero() {
			pool.Put(c.lent[i])
		}
	}
	c.dev.control.put(c.piece)
	if fatal != nil {
		c.srv.tel.ProtocolError("rdma_" + fatal.Label)
		c.LogClosed(c.reason, "protocol error", fatal)
	} else {
		c.LogClosed(c.reason, "", nil)
	}
	c.Release(c.resumed)
	c.returnReceives()
	c.g.releasePlace(c.sends)
	c.srv.connClosed(c.dev)
}

// drainFor is how long a device may take to say that a queue pair takes no more receives. Some never do.
const drainFor = 100 * time.Millisecond

// closeQueuePair ends the queue pair, and returns why the machine has ended the connection, if it has.
func (c *conn) closeQueuePair(l sync.Locker) *rdma.Fatal {
	disconnected := c.ep.Disconnect()
	if !c.dev.removed.Load() {
		timeout := time.NewTimer(drainFor)
		select {
		case <-c.ep.Drained():
		case <-timeout.C:
		}
		timeout.Stop()
	}
	// An event may have come before the completions that say what has failed: the machine gets those now. It also gets
	// the receives of the last messages, whose completions may vanish with the queue pair.
	c.g.clear()
	l.Lock()
	fatal := c.m.Fatal()
	if fatal == nil {
		fatal = c.failed
	}
	c.m.Close()
	c.g.forget(c)
	for c.waiting.n > 0 {
		c.g.repost(c.takeWaiting())
	}
	l.Unlock()

	c.g.creating.Lock()
	if err := errors.Join(disconnected, c.ep.Close()); err != nil && !c.dev.removed.Load() {
		c.srv.log.Warn("closing a connection", "transport", "rdma", "remote", c.remote, "error", err)
	}
	c.g.clear()
	c.g.creating.Unlock()
	return fatal
}

// returnReceives takes back the wish for receives.
func (c *conn) returnReceives() { _ = c.dev.receives.want(-int(c.req.HSQSIZE()) - 1) } // wanting less cannot fail

// waitFor waits until done says so, or timeout has fired.
func (c *conn) waitFor(done func() bool, timeout <-chan time.Time) {
	for !done() {
		select {
		case <-c.wake:
		case <-timeout:
			return
		}
	}
}

// received takes the capsule in receive i.
//
// hot: 0 allocs
func (c *conn) received(i, n int) {
	if c.waiting.n == 0 && c.m.Received(c.dev.receives.message(i, n)) {
		c.g.repost(i)
		return
	}
	h := heldReceive{int32(i), int32(n), c.Tenant()}
	switch {
	case c.waiting.full():
		c.fail("queue_size", fmt.Sprintf("more commands than the queue's %d entries", len(c.waiting.b)))
	case !c.dev.receives.hold(h.tenant):
		c.fail("receives", "its tenant's commands that wait hold as many receives as are left for all others "+
			"(limits.rdma_receives)")
	default:
		c.waiting.push(h)
		c.stall()
		return
	}
	c.g.repost(i)
}

// takeWaiting takes the first command that waits and returns its receive.
func (c *conn) takeWaiting() (receive int) {
	h := c.waiting.pop()
	c.dev.receives.release(h.tenant)
	return int(h.number)
}

// stall lets the group offer the commands that wait again when something is resumed.
func (c *conn) stall() {
	if !c.stalled {
		c.stalled = true
		c.g.stalled = append(c.g.stalled, c)
	}
}

// retry offers commands that wait to the machine.
func (c *conn) retry() {
	for c.waiting.n > 0 {
		h := c.waiting.b[c.waiting.head]
		if !c.m.Received(c.dev.receives.message(int(h.number), int(h.len))) {
			c.stall()
			return
		}
		c.g.repost(c.takeWaiting())
	}
}

// receiveFailed ends the connection: its queue pair has failed.
func (c *conn) receiveFailed(w *wr.Completion) {
	switch w.Status {
	case wr.StatusFlushed:
		c.m.Close()
	case wr.StatusLocalLength:
		c.fail("capsule", fmt.Sprintf("a capsule longer than %d bytes", c.dev.receives.stride))
	default:
		c.fail("receive", fmt.Sprintf("receive: %v", w.Status))
	}
}

func (c *conn) fail(label, what string) {
	if c.m.Fatal() == nil && c.failed == nil {
		c.failed = &rdma.Fatal{Label: label, What: what}
	}
	c.m.Close()
}

// afterTurn acts on what a turn has changed, before its work requests are posted.
func (c *conn) afterTurn() {
	c.RecordFailuresLocked()
	if c.AdminPending() {
		signal(c.admin)
	}
	if c.m.Closed() {
		switch {
		case c.m.Fatal() != nil:
			c.shut(c.m.Fatal().What)
		case c.failed != nil:
			c.shut(c.failed.What)
		default:
			c.shut("closed by the host")
		}
	}
	if c.Closing() || c.leaving {
		signal(c.wake)
	}
}

// unsent is how many responses are on their way.
func (c *conn) unsent() int {
	if !c.opened.Load() {
		return 0
	}
	l := turnLock{c.g}
	l.Lock()
	defer l.Unlock()
	if c.m.Closed() {
		return 0
	}
	return c.m.Unsent()
}

// drainProgress is what stuck remembers of what the host had taken at its last look.
type drainProgress struct {
	progress uint32
	// busy: a response was under way.
	busy    bool
	sinceNS int64
}

// stuck reports whether the host has taken no response for the stall timeout. It goes by what has
// changed between its looks: that nothing was done for long says nothing of a host that
// has just sent its first command after a while.
func (c *conn) stuck(now int64) bool {
	if !c.opened.Load() {
		return false
	}
	limit := c.srv.cfg.StallTimeout
	l := turnLock{c.g}
	l.Lock()
	defer l.Unlock()
	if c.Closing() || c.m.Closed() {
		return false
	}
	last, busy := &c.took, c.m.Unsent() > 0
	if !busy || !last.busy || c.progress != last.progress {
		last.sinceNS = now
	}
	last.busy, last.progress = busy, c.progress
	return now-last.sinceNS > int64(limit) ||
		c.Stuck(now, connection.StallLimits{Timeout: limit, BytesPerSec: c.srv.cfg.MinBytesPerSec})
}

// Locate implements rdma.Sink.
//
// hot: 0 allocs
func (c *conn) Locate(b []byte) (addr uint64, lkey uint32, ok bool) {
	if len(b) == connectBytes && &b[0] == &c.piece.b[0] {
		return c.piece.addr, c.piece.lkey, true
	}
	return c.dev.memory.locate(b)
}

// Sent implements rdma.Sink.
//
// hot: 0 allocs
func (c *conn) Sent(number int) {
	if b := &c.lent[number]; !b.IsZero() {
		c.srv.service.Pool().Put(*b)
		*b = bufpool.Buf{}
	}
}

// HoldUntilSent implements connection.Transport.
func (c *conn) HoldUntilSent(b bufpool.Buf) { c.lent[c.m.Last()] = b }

// Paused implements connection.Transport.
func (c *conn) Paused() bool { return false }

// Wake implements connection.Transport.
func (c *conn) Wake() { c.g.driver.Run() }

// Deliver implements connection.Transport.
func (c *conn) Deliver() { c.Wake() }

// Resume implements connection.Transport.
func (c *conn) Resume() {
	signal(c.resumed)
	if !c.g.resume.Swap(true) {
		c.g.driver.RunLater()
	}
}

// Shut implements connection.Transport.
func (c *conn) Shut(reason string) { c.shut(reason) }

// lingerFor is how long a host may take to receive what is sent before the connection is closed.
const lingerFor = time.Second

// Linger implements connection.Transport.
func (c *conn) Linger() {
	l := turnLock{c.g}
	l.Lock()
	c.leaving = true
	l.Unlock()
	t := time.NewTimer(lingerFor)
	defer t.Stop()
	c.waitFor(func() bool { return c.unsent() == 0 }, t.C)
}

// Lost implements connection.Transport. A queue pair in the error state has ended, whether or not the provider has
// reported the event that tells why.
func (c *conn) Lost() bool {
	select {
	case <-c.dead:
		return true
	case <-c.ep.Drained():
		return true
	default:
		return false
	}
}

// ArrivedNS implements connection.Transport. Completions do not say when they came.
func (c *conn) ArrivedNS(int64) int64 { return 0 }

// LocalAddress implements connection.Transport.
func (c *conn) LocalAddress() string { return c.ep.Local().Addr().Unmap().WithZone("").String() }

// full reports that there are as many as the host may have sent.
func (h *held) full() bool { return h.n == len(h.b) }

func (h *held) push(r heldReceive) {
	h.b[(h.head+h.n)%len(h.b)] = r
	h.n++
}

func (h *held) pop() heldReceive {
	r := h.b[h.head]
	h.head = (h.head + 1) % len(h.b)
	h.n--
	return r
}
