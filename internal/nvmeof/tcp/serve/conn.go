package serve

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/owner"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/telemetry"
)

// maxIOV is how many pieces one system call sends.
const maxIOV = 512

// writerIOV is how many pieces the writer sends before it lets readers in whose
// hosts have reacted already. After a drive has completed a whole queue's worth of
// requests at once, it works on the next ones while the rest of the answers is
// being sent, instead of waiting for the last.
const writerIOV = 16

// conn is one connection at work. Two goroutines serve it. The reader takes bytes
// in, hands batches of commands to the SSDs and, when those complete at once,
// sends the answers itself. The writer sleeps until somebody else has something
// to send: an SSD's completions, an event, or what the socket would not take.
type conn struct {
	srv       *Server
	nc        *net.TCPConn
	raw       syscall.RawConn
	watchSlot int32
	id        nvmeof.ConnID
	port      nvmeof.Port
	since     time.Time
	remote    string

	seen   atomic.Int64 // when the last command arrived
	outbox outbox
	wake   chan struct{} // to the writer
	resume chan struct{} // to the reader, waiting for memory or for the backlog to shrink
	dead   chan struct{} // closed by shut
	once   sync.Once
	reason string // why; set before dead is closed
	usage  usage

	// The reader's own.
	rx       []byte // nil while idle
	rxStart  int    // rx[rxStart:rxEnd] is received and not used
	rxEnd    int
	iov      [2]unix.Iovec
	batches  []owner.Batch // by SSD
	fetched  []owner.Batch
	touched  []int // SSDs with something in batches or fetched
	admin    []int // slots
	spin     spinner
	readFn   func(fd uintptr) bool
	readN    int
	readErr  error
	connBuf  []byte // data of the Connect command
	place    []byte
	parked   atomic.Bool // or about to be; see watch
	events   [16]unix.EpollEvent
	lookedNS int64
	waiter   bufpool.Waiter
	waiting  bool        // waiter is queued, or was granted its buffer and not used yet
	granted  atomic.Bool // waiter has its buffer

	// mu guards the machine and what follows.
	mu       sync.Mutex
	m        *tcp.Conn
	slots    []slot
	failures []nvmeof.Failed // for the Error Information log
	ctrl     *nvmeof.Controller
	qid      uint16
	version  uint64
	tenant   fabric.Tenant
	series   [][pipeline.Ops]*telemetry.IOSeries // by SSD
	errors   *telemetry.ErrorSeries
	inFlight atomic.Int32 // slots with an SSD; changed with mu held
	closing  bool         // no more commands; what is in flight drains
	partial  bool         // part of a PDU has come
	stall    stall
	// Sending: whoever sets sending owns txOut, txSkip and the descriptor's write side.
	sending  bool
	handoff  atomic.Bool // the writer is to go on with what the reader could not send
	sendWait bool
	pending  []bufpool.Buf // go with the machine's Out
	txOut    tcp.Out
	txBufs   []bufpool.Buf
	txSeg    int
	txSkip   int
	txIOV    []unix.Iovec
	txEvents [16]unix.EpollEvent
	writeFn  func(fd uintptr) bool
	writeErr error
}

// slot is the driver's part of a command.
type slot struct {
	io      owner.IO
	ranges  []pipeline.Range
	startNS int64
	// admitted tells an IO in the outbox that awaits its data from one that is done.
	admitted bool
	// fetching: the SSD waits for the host's data, asked for at askedNS.
	fetching bool
	askedNS  int64
}

// usage is what the host did, for the SMART log.
type usage struct {
	reads, writes, readBytes, writtenBytes, mediaErrors atomic.Uint64
}

var _ fabric.Conn = (*conn)(nil)
var _ tcp.Handler = (*conn)(nil)
var _ owner.Sink = (*conn)(nil)

func newConn(s *Server, nc *net.TCPConn, port nvmeof.Port) (*conn, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil, err
	}
	n := len(s.fabric.SSDs())
	c := &conn{
		srv: s, nc: nc, raw: raw, port: port, since: time.Now(), remote: nc.RemoteAddr().String(),
		wake: make(chan struct{}, 1), resume: make(chan struct{}, 1), dead: make(chan struct{}),
		batches: make([]owner.Batch, n), fetched: make([]owner.Batch, n), touched: make([]int, 0, n),
		slots: make([]slot, 1),
	}
	c.m = tcp.New(s.cfg.Machine, c)
	c.slots[0].io.Init(c, 0)
	c.waiter.Wake = func() {
		c.granted.Store(true)
		signal(c.resume)
	}
	c.readFn = c.readReady
	c.writeFn = c.writeReady
	c.seen.Store(s.fabric.Clock())
	c.id = s.fabric.Add(c)
	return c, nil
}

func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// serve runs the connection until it is closed and everything that it lent or
// borrowed is back.
func (c *conn) serve() {
	handshake := time.AfterFunc(c.srv.cfg.HandshakeTimeout, func() {
		c.mu.Lock()
		late := c.ctrl == nil
		c.mu.Unlock()
		if late {
			c.shut("handshake timeout")
		}
	})
	var writer sync.WaitGroup
	writer.Go(c.writeLoop)
	err := c.readLoop()
	c.shut(closeReason(err))
	handshake.Stop()
	writer.Wait() // from here on all is this goroutine's
	c.drain()
	c.log()
	c.release()
}

func closeReason(err error) string {
	switch {
	case err == nil || errors.Is(err, io.EOF):
		return "closed by the host"
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "timeout"
	}
	return err.Error()
}

// shut begins to close the connection; the first reason counts.
func (c *conn) shut(reason string) {
	c.once.Do(func() {
		c.reason = reason
		close(c.dead)
		// Wakes both goroutines out of their waits; Close follows when they are done.
		_ = c.nc.SetDeadline(time.Unix(1, 0))
		signal(c.wake)
		signal(c.resume)
	})
}

// Shut implements fabric.Conn.
func (c *conn) Shut(reason string) { c.shut(reason) }

func (c *conn) isDead() bool {
	select {
	case <-c.dead:
		return true
	default:
		return false
	}
}

// drain lets commands in flight come back after the connection has died.
func (c *conn) drain() {
	c.mu.Lock()
	c.closing = true
	c.m.Fetching(func(i int) { c.abandon(i) })
	// Nothing will be sent any more, and what is in flight may wait for this memory.
	dropBufs(c.srv.fabric.Pool(), c.pending)
	dropBufs(c.srv.fabric.Pool(), c.txBufs)
	c.pending, c.txBufs = nil, nil
	c.mu.Unlock()
	c.handOver()
	for c.empty(); c.inFlight.Load() > 0; c.empty() {
		<-c.wake
	}
	c.mu.Lock()
	for i := range c.slots {
		c.put(&c.slots[i].io.Buf)
	}
	c.mu.Unlock()
	if c.waiting && !c.srv.fabric.Pool().Cancel(&c.waiter) {
		for !c.granted.Load() {
			<-c.resume
		}
		c.put(&c.waiter.Buf)
	}
}

// withSSD reports whether slot i's IO is with an SSD. mu is held.
func (c *conn) withSSD(i int) bool { return c.slots[i].startNS != 0 }

// abandon gives a command whose data will never come back to its SSD. mu is
// held.
func (c *conn) abandon(i int) {
	if p := c.m.Pair(i); p >= 0 && c.m.Slot(i).SQE.Fuse() == nvme.FuseFirst {
		i = p
	}
	s := &c.slots[i]
	if s.fetching {
		s.fetching = false
		s.io.Err = fabric.ErrLost
		c.toSSD(&c.fetched[c.ssdOf(i)], i)
	}
}

// release gives everything back.
func (c *conn) release() {
	c.mu.Lock()
	ctrl, qid := c.ctrl, c.qid
	c.mu.Unlock()
	c.dropRX()
	c.srv.watch.remove(c)
	_ = c.nc.Close()
	c.srv.fabric.Remove(c.id, ctrl, qid, c.Usage())
	if ctrl != nil {
		c.srv.fabric.CloseTenant(c.tenant)
		c.srv.tel.ConnectionClosed("tcp")
	}
}

// log says that the connection is over, once, at the level that its reason
// deserves.
func (c *conn) log() {
	c.mu.Lock()
	defer c.mu.Unlock()
	args := []any{"remote", c.remote, "reason", c.reason}
	if c.ctrl != nil {
		args = append(args, "host", c.ctrl.HostNQN, "subsystem", c.ctrl.SubNQN, "cntlid", c.ctrl.ID, "qid", c.qid)
	}
	switch {
	case c.m.Fatal() != nil:
		c.srv.tel.ProtocolError(label(c.m.Fatal().FES))
		c.srv.log.Warn("connection closed: protocol error", append(args, "error", c.m.Fatal().Error())...)
	case c.m.PeerFatal() != nil:
		c.srv.tel.ProtocolError("reported_by_host")
		c.srv.log.Warn("connection closed: the host reports a protocol error", append(args, "error", c.m.PeerFatal().Error())...)
	case c.ctrl == nil:
		c.srv.log.Debug("connection closed before Connect", args...)
	default:
		c.srv.log.Log(c.srv.ctx, connLevel(c.qid), "connection closed", args...)
	}
}

// label is a fatal error status as metrics write it.
func label(f pdu.FES) string {
	switch f {
	case pdu.InvalidHeaderField:
		return "header_field"
	case pdu.SequenceError:
		return "sequence"
	case pdu.HeaderDigestError:
		return "header_digest"
	case pdu.DataTransferOutOfRange:
		return "data_out_of_range"
	case pdu.R2TLimitExceeded:
		return "transfer_limit"
	case pdu.UnsupportedParameter:
		return "unsupported_parameter"
	}
	return "other"
}

// connLevel: associations are worth a line, their I/O queues only for debugging.
func connLevel(qid uint16) slog.Level {
	if qid == 0 {
		return slog.LevelInfo
	}
	return slog.LevelDebug
}

// readLoop receives until the connection dies.
func (c *conn) readLoop() error {
	for {
		if c.isDead() {
			return errors.New(c.reason)
		}
		place := c.m.Place() // only this goroutine changes it
		if len(place) < minPlace {
			place = nil
		}
		if err := c.read(place); err != nil {
			return err
		}
		n := c.readN
		c.mu.Lock()
		if p := min(n, len(place)); p > 0 {
			c.m.Placed(p)
			n -= p
		}
		c.rxEnd += n
		c.mu.Unlock()
		if stop := c.process(); stop {
			return nil
		}
	}
}

// minPlace is the least data worth reading straight into its place.
const minPlace = 4 << 10

// process uses what was received and executes what it amounts to.
func (c *conn) process() (stop bool) {
	for {
		now := c.srv.fabric.Clock()
		c.seen.Store(now)
		c.outbox.claim()
		c.mu.Lock()
		c.rxStart += c.m.Receive(c.rx[c.rxStart:c.rxEnd])
		closed := c.m.Closed()
		c.partial = !c.m.Stalled() && (c.rxStart < c.rxEnd || !c.m.Idle())
		c.mu.Unlock()
		if c.rxStart == c.rxEnd {
			c.rxStart, c.rxEnd = 0, 0
		}
		c.handOver()
		c.executeAdmin()
		c.empty()
		c.recordFailures() // before the host can know and ask
		c.flush()
		if closed {
			c.finishSending()
			return true
		}
		switch c.stalled() {
		case running:
			c.lookAfterOthers(now)
			return false
		case waiting:
			select {
			case <-c.resume:
			case <-c.dead:
				return false
			}
		}
	}
}

// What a reader does after a batch.
const (
	running = iota // read more
	again          // the machine stopped, but what it lacked is there now
	waiting        // the machine has stopped: wait for resume
)

// stalled tells whether the machine has stopped before a command, and whether
// it would stop again.
func (c *conn) stalled() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !c.m.Stalled():
		return running
	case c.waiting && !c.granted.Load(), c.paused(), c.m.Full():
		return waiting
	}
	return again
}

// handOver submits the batches to their SSDs.
func (c *conn) handOver() {
	for _, i := range c.touched {
		o := c.srv.fabric.SSD(i)
		o.Fetched(&c.fetched[i])
		o.Submit(&c.batches[i])
	}
	c.touched = c.touched[:0]
}

// toSSD adds slot's IO to one of the batches.
func (c *conn) toSSD(b *owner.Batch, i int) {
	ssd := c.ssdOf(i)
	if c.batches[ssd].Empty() && c.fetched[ssd].Empty() {
		c.touched = append(c.touched, ssd)
	}
	b.Add(&c.slots[i].io)
}

func (c *conn) ssdOf(i int) int { return c.m.Slot(i).Plan.Namespace.SSD }

// Buffer implements tcp.Handler.
func (c *conn) Buffer(i, n int) []byte {
	if c.ctrl == nil {
		if c.connBuf == nil {
			c.connBuf = make([]byte, nvme.ConnectDataSize)
		}
		return c.connBuf[:n]
	}
	s := &c.slots[i]
	if c.waiting {
		if !c.granted.Load() {
			return nil
		}
		c.waiting = false
		c.granted.Store(false)
		s.io.Buf, c.waiter.Buf = c.waiter.Buf, bufpool.Buf{}
		if len(s.io.Buf.B) >= n {
			return s.io.Buf.B[:n]
		}
		c.put(&s.io.Buf)
	}
	c.waiter.Size = n
	if !c.srv.fabric.Pool().GetOrWait(c.tenant.Account, &c.waiter) {
		c.waiting = true
		return nil
	}
	s.io.Buf, c.waiter.Buf = c.waiter.Buf, bufpool.Buf{}
	return s.io.Buf.B[:n]
}

// Unused implements tcp.Handler.
func (c *conn) Unused(i int) { c.put(&c.slots[i].io.Buf) }

// Paired implements tcp.Handler.
func (c *conn) Paired(first, second int) {
	f, s := &c.slots[first], &c.slots[second]
	if !f.io.Buf.IsZero() {
		s.io.Buf, f.io.Buf = f.io.Buf, bufpool.Buf{}
	}
}

// Paused implements tcp.Handler.
func (c *conn) Paused() bool { return c.closing || c.paused() }

func (c *conn) paused() bool {
	return c.sending && c.m.Pending() > c.srv.cfg.BacklogBytes
}

// Admin implements tcp.Handler.
func (c *conn) Admin(i int) { c.admin = append(c.admin, i) }

// Execute implements tcp.Handler.
//
// hot: 0 allocs
func (c *conn) Execute(i int) {
	m, s := c.m.Slot(i), &c.slots[i]
	p := &m.Plan
	io := &s.io
	io.Op, io.Offset, io.Len, io.Flags = p.Op, p.Offset, p.Len, 0
	if p.FUA {
		io.Flags |= ssd.FUA
	}
	if p.Unmap {
		io.Flags |= ssd.Unmap
	}
	io.Fetch = c.m.NeedsFetch(i)
	io.Account, io.Tenant = c.tenant.Account, c.tenant.Number
	if p.Op == pipeline.DeallocateRanges {
		io.Len = int64(p.ToController)
		if !io.Fetch {
			if !c.setRanges(i) {
				return
			}
		}
	}
	s.startNS = c.seen.Load()
	c.inFlight.Add(1)
	c.toSSD(&c.batches[p.Namespace.SSD], i)
}

// setRanges decodes a Dataset Management command's data; if that fails, or there
// is nothing to do, the command is responded to and false returned.
func (c *conn) setRanges(i int) bool {
	m, s := c.m.Slot(i), &c.slots[i]
	if s.ranges == nil {
		s.ranges = make([]pipeline.Range, 0, nvme.MaxDSMRanges)
	}
	ranges, status := m.Plan.AppendRanges(s.io.Buf.B, s.ranges[:0])
	if m.Plan.NoOp {
		ranges = nil
	}
	s.ranges = ranges
	s.io.Ranges = ranges
	if status.OK() && len(ranges) > 0 {
		return true
	}
	if s.startNS == 0 { // not with the SSD yet
		c.put(&s.io.Buf)
		c.respond(i, status, 0)
	}
	return false
}

// Fetched implements tcp.Handler.
func (c *conn) Fetched(i int, ok bool) {
	m := c.m.Slot(i)
	if c.qid == 0 || m.SQE.Opcode() == nvme.OpFabrics {
		if !ok {
			c.put(&c.slots[i].io.Buf)
			c.respond(i, nvme.TransientTransportError, 0)
			return
		}
		c.Admin(i)
		return
	}
	if c.m.Pair(i) >= 0 {
		second, complete := c.m.PairFetched(i)
		if !ok {
			c.slots[second].io.Err = fabric.ErrLost
		}
		if !complete {
			return
		}
		i, ok = second, c.slots[second].io.Err == nil
		m = c.m.Slot(i)
	}
	s := &c.slots[i]
	s.fetching = false
	s.io.Err = nil
	if !ok {
		s.io.Err = fabric.ErrLost
	} else if m.Plan.Op == pipeline.DeallocateRanges && !c.setRanges(i) {
		s.io.Err = errRanges
	}
	c.toSSD(&c.fetched[m.Plan.Namespace.SSD], i)
}

// errRanges: a Dataset Management command's ranges are wrong or empty; finish
// decodes them again for the status.
var errRanges = errors.New("no ranges to deallocate")

// Admitted implements owner.Sink.
func (c *conn) Admitted(io *owner.IO) bool {
	c.slots[io.Slot].admitted = true
	return c.outbox.push(io)
}

// Done implements owner.Sink.
func (c *conn) Done(io *owner.IO) bool {
	c.slots[io.Slot].admitted = false
	return c.outbox.push(io)
}

// Kick implements owner.Sink.
func (c *conn) Kick() { signal(c.wake) }

// empty takes what the SSDs left in the outbox.
func (c *conn) empty() {
	for {
		if first := c.outbox.take(); first != nil {
			now := c.srv.fabric.Clock()
			var lost []*owner.IO // the connection is closing: their data will not come
			c.mu.Lock()
			for io := first; io != nil; {
				next := io.Next
				if c.slots[io.Slot].admitted {
					if !c.fetch(int(io.Slot), now) {
						lost = append(lost, io)
					}
				} else {
					c.finish(int(io.Slot), now)
				}
				io = next
			}
			c.mu.Unlock()
			for _, io := range lost {
				io.Return(fabric.ErrLost)
			}
		}
		if c.outbox.leave() {
			return
		}
	}
}

// fetch asks the host for an admitted IO's data; false: it cannot be had any
// more. mu is held.
func (c *conn) fetch(i int, now int64) bool {
	s := &c.slots[i]
	if c.closing || c.m.Closed() {
		return false
	}
	s.fetching, s.askedNS = true, now
	s.io.Err = nil
	if p := c.m.Pair(i); p >= 0 {
		c.slots[p].askedNS = now
		c.m.FetchPair(i, s.io.Buf.B)
	} else {
		c.m.RequestData(i, s.io.Buf.B[:c.m.Slot(i).Plan.ToController])
	}
	return true
}

// finish answers a command whose IO is done. mu is held.
//
// hot: 0 allocs
func (c *conn) finish(i int, now int64) {
	m, s := c.m.Slot(i), &c.slots[i]
	p := &m.Plan
	io := &s.io
	op, bytes, start := io.Op, p.Len, s.startNS
	c.inFlight.Add(-1)
	s.startNS = 0
	if c.m.Full() {
		signal(c.resume)
	}
	ssdNumber := p.Namespace.SSD

	if io.Err == nil && op == pipeline.Read {
		c.usage.reads.Add(1)
		c.usage.readBytes.Add(uint64(bytes))
		c.observe(ssdNumber, op, bytes, now-start)
		if !c.closing && c.m.RespondData(i, io.Buf.B, 0) {
			c.pending = append(c.pending, io.Buf)
			io.Buf = bufpool.Buf{}
			return
		}
		if c.closing {
			c.m.Respond(i, nvme.Success, 0)
		}
		c.put(&io.Buf)
		return
	}
	status := fabric.Status(op, io.Err)
	if io.Err == errRanges {
		_, status = p.AppendRanges(io.Buf.B, s.ranges[:0])
	}
	c.put(&io.Buf)
	if op == pipeline.CompareWrite {
		c.finishPair(i, status, io)
	} else {
		c.respond(i, status, 0)
	}
	if !status.OK() {
		bytes = 0
	}
	c.observe(ssdNumber, op, bytes, now-start)
	if status.OK() {
		if op == pipeline.Write || op == pipeline.CompareWrite {
			c.usage.writes.Add(1)
			c.usage.writtenBytes.Add(uint64(bytes))
		}
	} else if status.SCT() == nvme.SCTMedia && status.Code() != nvme.CompareFailure {
		c.usage.mediaErrors.Add(1)
	}
}

// finishPair answers both commands of a fused pair. mu is held.
func (c *conn) finishPair(second int, status nvme.Status, io *owner.IO) {
	first := c.m.Pair(second)
	if first < 0 {
		c.respond(second, status, 0)
		return
	}
	a, b := status, nvme.AbortedFailedFused|nvme.DNR
	if status.OK() {
		a, b = nvme.Success, nvme.Success
	} else if io.Writing() { // the compare held, the write failed
		a, b = nvme.Success, status
	} else if io.Err == owner.ErrAborted {
		b = status
	}
	c.respond(first, a, 0)
	c.respond(second, b, 0)
}

// respond answers a command without data and remembers a failure. mu is held.
func (c *conn) respond(i int, status nvme.Status, result uint64) {
	if !status.OK() {
		c.noteFailure(i, status)
	}
	c.m.Respond(i, status, result)
}

// noteFailure counts a failed command and remembers it for the Error Information
// log. mu is held.
func (c *conn) noteFailure(i int, status nvme.Status) {
	if c.errors == nil {
		return // not connected yet
	}
	c.errors.Inc(status.SCT(), status.SC())
	if len(c.failures) == cap(c.failures) {
		return // more at once than the log could hold
	}
	m := c.m.Slot(i)
	f := nvmeof.Failed{QID: c.qid, CID: m.SQE.CID(), Opcode: m.SQE.Opcode(), NSID: m.SQE.NSID(), Status: status}
	if m.Plan.Namespace != nil {
		f.LBA = m.SQE.SLBA()
	}
	c.failures = append(c.failures, f)
}

// Failed implements tcp.Handler.
func (c *conn) Failed(i int, status nvme.Status) { c.noteFailure(i, status) }

// maxFailures is how many failed commands are remembered between two looks.
const maxFailures = 64

// recordFailures hands failed commands to the controller's log.
func (c *conn) recordFailures() {
	c.mu.Lock()
	if len(c.failures) == 0 {
		c.mu.Unlock()
		return
	}
	failed := slices.Clone(c.failures)
	c.failures = c.failures[:0]
	c.mu.Unlock()
	c.srv.fabric.RecordErrors(c.ctrl, failed)
}

// observe counts one completed I/O. mu is held.
//
// hot: 0 allocs
func (c *conn) observe(ssdNumber int, op pipeline.Op, bytes, durationNS int64) {
	t := c.series[ssdNumber][op]
	if t == nil {
		name := c.srv.fabric.SSD(ssdNumber).Device().Info().Name
		t = c.srv.tel.IO(c.tenant.Name, name, op.String())
		c.series[ssdNumber][op] = t
	}
	if op == pipeline.Flush || op == pipeline.DeallocateRanges {
		bytes = 0
	}
	t.Observe(1, bytes, time.Duration(durationNS))
}

// put returns a buffer to the pool.
func (c *conn) put(b *bufpool.Buf) {
	if !b.IsZero() {
		c.srv.fabric.Pool().Put(*b)
		*b = bufpool.Buf{}
	}
}

// executeAdmin runs the admin and fabrics commands that Receive brought.
func (c *conn) executeAdmin() {
	for k := 0; k < len(c.admin); k++ {
		i := c.admin[k]
		c.mu.Lock()
		m := c.m.Slot(i)
		ctrl, closed := c.ctrl, c.m.Closed()
		c.mu.Unlock()
		if ctrl == nil {
			if !closed { // else what came behind Connect has ended the connection
				c.connect(i)
			}
			continue
		}
		s := &c.slots[i]
		args := nvmeof.AdminArgs{Controller: ctrl, QID: c.qid, Slot: i, SQE: &m.SQE, Data: s.io.Buf.B}
		r := c.srv.fabric.Admin(args)
		c.mu.Lock()
		switch {
		case r.Pending:
		case r.Status.OK() && r.Len > 0:
			if c.m.RespondData(i, s.io.Buf.B[:r.Len], r.Result) {
				c.pending = append(c.pending, s.io.Buf)
				s.io.Buf = bufpool.Buf{}
			} else {
				c.put(&s.io.Buf)
			}
		default:
			c.put(&s.io.Buf)
			c.respond(i, r.Status, r.Result)
		}
		c.mu.Unlock()
		if r.Disconnect {
			c.flush()
			c.finishSending()
			c.shut("disconnected by the host")
		}
	}
	c.admin = c.admin[:0]
}

// connect executes the Connect command in slot i.
func (c *conn) connect(i int) {
	local := c.nc.LocalAddr().(*net.TCPAddr)
	sqe := c.m.Slot(i).SQE
	data := (*nvme.ConnectData)(c.connBuf)
	args := nvmeof.ConnectArgs{Conn: c.id, Port: c.port, LocalAddress: local.IP.String(), SQE: &sqe, Data: data}
	r := nvmeof.ConnectReply{Status: nvme.ConnectControllerBusy, Label: "host_connections", Reason: "too many connections of this host"}
	if c.srv.admit(data.HostNQN()) {
		r = c.srv.fabric.Connect(args)
		if !r.Status.OK() {
			c.srv.leave(data.HostNQN())
		}
	}
	if !r.Status.OK() {
		c.srv.tel.ConnectFailed(r.Label)
		c.srv.log.Warn("connect refused", "remote", c.remote, "host", data.HostNQN(), "subsystem", data.SubNQN(),
			"status", r.Status.String(), "reason", r.Reason)
		c.mu.Lock()
		c.m.Respond(i, r.Status, r.Result)
		c.mu.Unlock()
		return
	}
	tenant := c.srv.fabric.OpenTenant(r.Controller.HostNQN)
	c.mu.Lock()
	n := c.m.Attach(tcp.Attachment{QID: r.QID, Entries: r.Entries, NoSQFlow: r.NoSQFlow, Table: r.Table})
	slots := make([]slot, n)
	for k := range slots {
		slots[k].io.Init(c, uint32(k))
	}
	c.slots = slots
	c.ctrl, c.qid, c.version, c.tenant = r.Controller, r.QID, max(c.version, r.Version), tenant
	c.series = make([][pipeline.Ops]*telemetry.IOSeries, len(c.srv.fabric.SSDs()))
	c.errors = c.srv.tel.Errors(tenant.Name)
	c.failures = make([]nvmeof.Failed, 0, maxFailures)
	c.pending = make([]bufpool.Buf, 0, n)
	c.txBufs = make([]bufpool.Buf, 0, n)
	c.connBuf = nil
	c.m.Respond(i, nvme.Success, r.Result)
	c.mu.Unlock()
	c.srv.tel.ConnectionEstablished("tcp")
	c.srv.log.Log(c.srv.ctx, connLevel(r.QID), "connected", "remote", c.remote, "host", r.Controller.HostNQN,
		"subsystem", r.Controller.SubNQN, "cntlid", r.Controller.ID, "qid", r.QID, "queue_size", r.Entries)
}

// Complete implements fabric.Conn.
func (c *conn) Complete(i int, status nvme.Status, result uint64) {
	c.mu.Lock()
	c.m.Respond(i, status, result)
	c.mu.Unlock()
	signal(c.wake)
}

// SetTable implements fabric.Conn.
func (c *conn) SetTable(t *nvmeof.NamespaceTable, version uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if version > c.version {
		c.version = version
		c.m.SetTable(t)
	}
}

// Abort implements fabric.Conn.
func (c *conn) Abort(cid uint16) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, ok := c.m.Find(cid)
	if !ok || !c.withSSD(i) || c.m.Pair(i) >= 0 {
		return false
	}
	s := &c.slots[i]
	if !c.srv.fabric.SSD(c.ssdOf(i)).Abort(&s.io) {
		return false
	}
	c.noteFailure(i, nvme.AbortRequested)
	c.m.Abort(i, nvme.AbortRequested)
	signal(c.wake)
	return true
}

// EventSlot implements fabric.Conn.
func (c *conn) EventSlot(cid uint16) (int, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.m.Find(cid)
}

// SeenNS implements fabric.Conn.
func (c *conn) SeenNS() int64 { return c.seen.Load() }

// Usage implements fabric.Conn.
func (c *conn) Usage() nvmeof.Usage {
	u := &c.usage
	return nvmeof.Usage{Reads: u.reads.Load(), Writes: u.writes.Load(), ReadBytes: u.readBytes.Load(),
		WrittenBytes: u.writtenBytes.Load(), MediaErrors: u.mediaErrors.Load()}
}

// Describe implements fabric.Conn.
func (c *conn) Describe() fabric.ConnInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := fabric.ConnInfo{ID: uint64(c.id), Transport: "tcp", Local: c.nc.LocalAddr().String(), Remote: c.remote, Since: c.since,
		Outstanding: c.m.Outstanding(), QID: c.qid}
	if c.ctrl != nil {
		i.HostNQN, i.SubNQN, i.CNTLID, i.Entries = c.ctrl.HostNQN, c.ctrl.SubNQN, c.ctrl.ID, len(c.slots)
	}
	return i
}

func (c *conn) String() string { return fmt.Sprintf("connection %d from %s", c.id, c.remote) }
