package serve

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// maxIOV is the maximum number of buffers that one system call sends.
const maxIOV = 512

// writerIOV is the number of buffers that the writer sends before it yields to readers whose hosts have sent new
// commands already. A drive may complete a whole queue of requests at once. If the writer sent all responses first, the
// drive would be idle meanwhile.
const writerIOV = 16

// conn is one TCP connection. Two goroutines serve it. The reader receives bytes, hands batches of commands to their
// executors and, if the commands are done at once, sends the responses itself. The writer sleeps until there is
// something else to send: responses to commands that were done later, an event, or bytes that the socket did not take.
// Responses that are done later may also be sent by the goroutine that brings them (Deliver).
type conn struct {
	connection.Conn
	srv       *Server
	ticket    *connection.Ticket
	nc        *net.TCPConn
	raw       syscall.RawConn
	watchSlot int32

	outbox  connection.Outbox
	batches *connection.Batches
	wake    chan struct{} // to the writer
	resume  chan struct{} // to the reader, waiting for memory or for the backlog to shrink
	dead    chan struct{} // closed by Shut
	once    sync.Once
	reason  string // why the connection ends; set before dead is closed

	// The fields from here to slept belong to the reader.
	rx       []byte // nil while idle
	rxStart  int    // rx[rxStart:rxEnd] is received and not used
	rxEnd    int
	iov      [2]unix.Iovec
	spin     connection.Spinner
	readFn   func(fd uintptr) bool
	readN    int
	readErr  error
	place    []byte      // buffer of a command, for the data that the socket has next; nil: rx is read into
	awaits   bool        // the host owes data of a command
	bulk     bool        // at least bulkBytes of them
	parked   atomic.Bool // the reader sleeps in the netpoller, or is about to; see watch
	events   [16]unix.EpollEvent
	lookedNS int64 // when it has looked after the others
	slept    bool  // it has slept before the batch that it has read

	// delivering is held by a goroutine of an executor that delivers answers itself, and from the end of the reader and
	// the writer on for good. It is only tried, so that nobody waits for it but that end.
	delivering sync.Mutex

	// mu guards the machine and the fields below.
	mu sync.Mutex
	m  *tcp.Conn
	// partial: a PDU has been received in part, its first bytes at partialSince and the latest ones at partialNS.
	partial                 bool
	partialNS, partialSince int64
	partialPDU              uint32 // the number of that PDU
	// The goroutine that has set sending owns txOut, txSkip and the write side of the descriptor.
	sending  bool
	handoff  atomic.Bool // the writer must send the rest of what another goroutine could not send
	sendWait bool
	pending  []bufpool.Buf // buffers that the machine's next Out refers to
	txOut    tcp.Out
	txBufs   []bufpool.Buf
	txSeg    int
	txSkip   int
	// txSince is when the writer began to wait for the host to read txOut, which it may do for txAllowed.
	txSince   time.Time
	txAllowed time.Duration
	txIOV     []unix.Iovec
	txEvents  [16]unix.EpollEvent
	writeFn   func(fd uintptr) bool
	writeErr  error
}

var _ connection.Transport = transport{}

// transport is the connection.Transport of a conn.
type transport struct{ *conn }

func newConn(s *Server, nc *net.TCPConn, port nvmeof.Port) (*conn, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &conn{
		srv: s, nc: nc, raw: raw, batches: connection.NewBatches(s.service),
		wake: make(chan struct{}, 1), resume: make(chan struct{}, 1), dead: make(chan struct{}),
	}
	c.m = tcp.New(s.cfg.Machine, &c.Conn)
	c.readFn = c.readReady
	c.writeFn = c.writeReady
	from := nc.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
	c.ticket = s.cfg.Admission.Enter(from, c.shut)
	c.Conn.Init(connection.Config{
		Service: s.service, Telemetry: s.tel, Log: s.log, Ticket: c.ticket, Transport: transport{c},
		Machine: &c.m.QPair, Closed: c.m.Closed, Lock: &c.mu, Batches: c.batches, Outbox: &c.outbox,
		Name: "tcp", Local: nc.LocalAddr().String(), Remote: nc.RemoteAddr().String(), Peer: from, Port: port,
		ConnectBuffer: make([]byte, nvme.ConnectDataSize),
	})
	return c, nil
}

// HoldUntilSent implements connection.Transport.
func (t transport) HoldUntilSent(b bufpool.Buf) { t.pending = append(t.pending, b) }

// Paused implements connection.Transport.
func (t transport) Paused() bool { return t.sending && t.m.Pending() > t.srv.cfg.BacklogBytes }

// Wake implements connection.Transport.
func (t transport) Wake() { signal(t.wake) }

// Deliver implements connection.Transport. If another goroutine delivers, that one may be past what there is to send,
// so that the writer looks again.
func (t transport) Deliver() {
	c := t.conn
	if !c.delivering.TryLock() {
		signal(c.wake)
		return
	}
	left := c.EmptyDone()
	c.RecordFailures()
	c.flush()
	c.delivering.Unlock()
	if left {
		signal(c.wake)
	}
}

// Resume implements connection.Transport.
func (t transport) Resume() { signal(t.resume) }

// Shut implements connection.Transport.
func (t transport) Shut(reason string) { t.shut(reason) }

// Linger implements connection.Transport.
func (t transport) Linger() {
	t.flush()
	t.finishSending()
}

// Lost implements connection.Transport. It polls the socket, because the reader may not have noticed yet that the host
// has closed or reset the connection.
func (t transport) Lost() (lost bool) {
	if t.isDead() {
		return true
	}
	err := t.raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(p, 0)
		lost = err == nil && n > 0 && p[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	})
	return lost || err != nil
}

// ArrivedNS implements connection.Transport: the kernel knows.
func (t transport) ArrivedNS(nowNS int64) (ns int64) {
	_ = t.raw.Control(func(fd uintptr) { // fails only if the connection is closed
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil {
			ns = nowNS - int64(info.Last_data_recv)*1e6
		}
	})
	return ns
}

// LocalAddress implements connection.Transport.
func (t transport) LocalAddress() string { return t.nc.LocalAddr().(*net.TCPAddr).IP.String() }

func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// serve runs the connection until it is closed, its commands are done and their buffers are returned.
func (c *conn) serve() {
	handshake := time.AfterFunc(c.srv.cfg.HandshakeTimeout, func() {
		c.mu.Lock()
		ctrl, _ := c.Controller()
		connecting := c.Connecting()
		c.mu.Unlock()
		if ctrl == nil && !connecting {
			c.shut("handshake timeout")
		}
	})
	var writer sync.WaitGroup
	writer.Go(c.writeLoop)
	err := c.readLoop()
	c.shut(closeReason(err))
	handshake.Stop()
	writer.Wait()
	c.delivering.Lock() // from here on this goroutine owns the whole state
	c.closeSocket()
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

// shut begins to close the connection. Only the first call has an effect.
func (c *conn) shut(reason string) {
	c.once.Do(func() {
		c.reason = reason
		close(c.dead)
		// This wakes both goroutines. Close follows when they have ended.
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

// closeSocket closes the socket before the commands in flight are done, so that the host sees the end of the connection
// at once, however slow a drive is.
func (c *conn) closeSocket() {
	c.srv.watch.remove(c)
	_ = c.nc.Close()
}

// drain waits until executors have finished all commands in flight of a dead connection.
func (c *conn) drain() {
	c.Close()
	c.mu.Lock()
	// Nothing is sent any more. These buffers are returned first, because commands in flight may wait for memory.
	c.srv.service.Pool().PutAll(c.pending)
	c.srv.service.Pool().PutAll(c.txBufs)
	c.pending, c.txBufs = nil, nil
	c.mu.Unlock()
	c.batches.HandOver()
	for c.Empty(); c.InFlight() > 0; c.Empty() {
		<-c.wake
	}
}

// release returns all memory and removes the connection from the service.
func (c *conn) release() {
	c.dropRX()
	c.Release(c.resume)
}

// log logs why the connection has ended.
func (c *conn) log() {
	c.mu.Lock()
	own, peer := c.m.Fatal(), c.m.PeerFatal()
	c.mu.Unlock()
	switch {
	case own != nil:
		c.srv.tel.ProtocolError(label(own.FES))
		c.LogClosed(c.reason, "protocol error", own)
	case peer != nil:
		c.srv.tel.ProtocolError("reported_by_host")
		c.LogClosed(c.reason, "the host reports a protocol error", peer)
	default:
		c.LogClosed(c.reason, "", nil)
	}
}

// label returns the label of a fatal error status in metrics.
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
		placed := min(c.readN, len(place))
		c.rxEnd += c.readN - placed
		if stop := c.process(placed); stop {
			return nil
		}
	}
}

// While bulkBytes or more of data are awaited, at most bulkTail bytes are read into rx behind the data that goes
// directly to its command's buffer. They hold the header of the next PDU and little of its data, because data in rx has
// to be copied.
const (
	bulkBytes = 64 << 10
	bulkTail  = 4 << 10
)

// minPlace is the minimum length of data that is read directly into the buffer of its command. Less is received into rx
// and copied.
const minPlace = 4 << 10

// process parses what was received and executes the commands in it. placed bytes of it were read directly into the
// buffer of their command.
func (c *conn) process(placed int) (stop bool) {
	for {
		now := c.srv.service.Clock()
		c.BeginReceive(now)
		if placed > 0 {
			c.m.Placed(placed)
			placed = 0
		}
		c.rxStart += c.m.Receive(c.rx[c.rxStart:c.rxEnd])
		closed := c.m.Closed()
		partial := !c.m.Stalled() && (c.rxStart < c.rxEnd || !c.m.Idle())
		number := c.m.Headers()
		if c.m.Idle() { // the header of the partial PDU is incomplete and not counted yet
			number++
		}
		if !c.partial || number != c.partialPDU {
			c.partialPDU, c.partialSince = number, now
		}
		c.partial, c.partialNS = partial, now
		if c.rxStart == c.rxEnd {
			c.rxStart, c.rxEnd = 0, 0
		}
		c.EndReceive()
		c.flush()
		if closed {
			c.finishSending()
			return true
		}
		switch c.stalled() {
		case running:
			c.yieldToOthers(now)
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

// Results of stalled: what the reader does after a batch.
const (
	running = iota // read more
	again          // process the rest: the machine has stalled, but can continue now
	waiting        // wait for resume: the machine has stalled and cannot continue yet
)

// stalled returns whether the machine has stalled before a command, and if so, whether it can continue.
func (c *conn) stalled() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	awaited := c.m.AwaitedBytes()
	c.awaits, c.bulk = awaited > 0, awaited >= bulkBytes
	switch {
	case !c.m.Stalled():
		return running
	case c.Blocked():
		return waiting
	}
	return again
}

func (c *conn) String() string {
	return fmt.Sprintf("connection %d from %s", c.ID(), c.nc.RemoteAddr())
}
