package serve

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/owner"
	"jbofd/internal/pipeline"
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
	bulk     bool        // much data is awaited
	parked   atomic.Bool // or about to be; see watch
	events   [16]unix.EpollEvent
	lookedNS int64
	waiter   bufpool.Waiter
	waiting  bool        // waiter is queued, or was granted its buffer and not used yet
	granted  atomic.Bool // waiter has its buffer

	// handing is held by the reader from when it takes commands in until the SSDs have
	// them, and before mu. After a change of the namespaces, whoever has had it knows that
	// no command of before is on its way any more.
	handing sync.Mutex

	// mu guards the machine and what follows.
	mu       sync.Mutex
	m        *tcp.Conn
	slots    []slot
	failures []nvmeof.Failed // for the Error Information log
	ctrl     *nvmeof.Controller
	qid      uint16
	version  uint64
	tenant   fabric.Tenant
	// credits says whether completions carry credits. The admin queue stands for its
	// controller among tenant.Windows.
	credits  nvmeof.CreditState
	series   [][pipeline.Ops]*telemetry.IOSeries // by SSD
	errors   *telemetry.ErrorSeries
	inFlight atomic.Int32 // slots with an SSD; changed with mu held
	closing  bool         // no more commands; what is in flight drains
	partial  bool         // part of a PDU has come
	extra    bool         // a buffer beyond the pool's bound is out; see extraBuffer
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

var _ qpair.Handler = (*conn)(nil)

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
	for i := range c.slots { // what waits, for its cap perhaps, need not be done any more
		if c.withSSD(i) {
			c.srv.fabric.SSD(c.ssdOf(i)).Abort(&c.slots[i].io)
		}
	}
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
		c.SetCredits(nvmeof.CreditState{Version: math.MaxUint64})
		c.srv.fabric.CloseTenant(c.id)
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
		c.handing.Lock() // for process
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

// With so much data awaited, only bulkTail bytes are read beyond what has a
// place: the next PDU's header is among them and little of its data, which would
// be copied twice.
const (
	bulkBytes = 64 << 10
	bulkTail  = 4 << 10
)

// minPlace is the least data worth reading straight into its place.
const minPlace = 4 << 10

// process uses what was received and executes what it amounts to. It gives up
// handing, which the caller has.
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
		c.handing.Unlock()
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
		c.handing.Lock()
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
	c.bulk = c.m.AwaitedBytes() >= bulkBytes
	switch {
	case !c.m.Stalled():
		return running
	case c.waiting && !c.granted.Load() && (c.qid == 0 || c.extra), c.paused(), c.m.Full():
		return waiting
	}
	return again
}

func (c *conn) String() string { return fmt.Sprintf("connection %d from %s", c.id, c.remote) }
