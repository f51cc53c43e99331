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
	"jbofd/internal/nvmeof/fabric/queue"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/pdu"
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
	queue.Queue
	srv       *Server
	nc        *net.TCPConn
	raw       syscall.RawConn
	watchSlot int32

	outbox  queue.Outbox
	batches *queue.Batches
	wake    chan struct{} // to the writer
	resume  chan struct{} // to the reader, waiting for memory or for the backlog to shrink
	dead    chan struct{} // closed by Shut
	once    sync.Once
	reason  string // why; set before dead is closed

	// The reader's own.
	rx       []byte // nil while idle
	rxStart  int    // rx[rxStart:rxEnd] is received and not used
	rxEnd    int
	iov      [2]unix.Iovec
	spin     queue.Spinner
	readFn   func(fd uintptr) bool
	readN    int
	readErr  error
	place    []byte
	bulk     bool        // much data is awaited
	parked   atomic.Bool // or about to be; see watch
	events   [16]unix.EpollEvent
	lookedNS int64

	// mu guards the machine and what follows.
	mu        sync.Mutex
	m         *tcp.Conn
	partial   bool // part of a PDU has come, at partialNS
	partialNS int64
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

var _ queue.Transport = transport{}

// transport is what the Queue in a conn sees of it.
type transport struct{ *conn }

func newConn(s *Server, nc *net.TCPConn, port nvmeof.Port) (*conn, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &conn{
		srv: s, nc: nc, raw: raw, batches: queue.NewBatches(s.fabric),
		wake: make(chan struct{}, 1), resume: make(chan struct{}, 1), dead: make(chan struct{}),
	}
	c.m = tcp.New(s.cfg.Machine, &c.Queue)
	c.readFn = c.readReady
	c.writeFn = c.writeReady
	c.Queue.Init(queue.Config{
		Fabric: s.fabric, Telemetry: s.tel, Log: s.log, Admission: s.cfg.Admission, Transport: transport{c},
		Machine: &c.m.QPair, Closed: c.m.Closed, Lock: &c.mu, Batches: c.batches, Outbox: &c.outbox,
		Name: "tcp", Local: nc.LocalAddr().String(), Remote: nc.RemoteAddr().String(), Port: port,
		ConnectBuffer: make([]byte, nvme.ConnectDataSize),
	})
	return c, nil
}

// Lend implements queue.Transport.
func (t transport) Lend(b bufpool.Buf) { t.pending = append(t.pending, b) }

// Paused implements queue.Transport.
func (t transport) Paused() bool { return t.paused() }

// Wake implements queue.Transport.
func (t transport) Wake() { signal(t.wake) }

// Resume implements queue.Transport.
func (t transport) Resume() { signal(t.resume) }

// Shut implements queue.Transport.
func (t transport) Shut(reason string) { t.shut(reason) }

// Bye implements queue.Transport.
func (t transport) Bye() {
	t.flush()
	t.finishSending()
}

// LocalAddress implements queue.Transport.
func (t transport) LocalAddress() string { return t.nc.LocalAddr().(*net.TCPAddr).IP.String() }

func (c *conn) paused() bool {
	return c.sending && c.m.Pending() > c.srv.cfg.BacklogBytes
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
		ctrl, _ := c.Controller()
		c.mu.Unlock()
		if ctrl == nil {
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
	c.Close()
	c.mu.Lock()
	// Nothing will be sent any more, and what is in flight may wait for this memory.
	dropBufs(c.srv.fabric.Pool(), c.pending)
	dropBufs(c.srv.fabric.Pool(), c.txBufs)
	c.pending, c.txBufs = nil, nil
	c.mu.Unlock()
	c.batches.HandOver()
	for c.empty(); c.InFlight() > 0; c.empty() {
		<-c.wake
	}
}

// release gives everything back.
func (c *conn) release() {
	c.dropRX()
	c.srv.watch.remove(c)
	_ = c.nc.Close()
	c.Release(c.resume)
}

// log says that the connection is over.
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

// empty takes what the SSDs and partitions left in the outbox.
func (c *conn) empty() {
	for {
		if first := c.outbox.Take(); first != nil {
			now := c.srv.fabric.Clock()
			var later []*queue.Slot // few: memory was short, or the connection is closing
			c.mu.Lock()
			for s := first; s != nil; {
				next := s.Next()
				if c.Finish(s, now) {
					later = append(later, s)
				}
				s = next
			}
			c.mu.Unlock()
			if later != nil {
				c.goOn(later, now)
			}
		}
		if c.outbox.Leave() {
			return
		}
	}
}

// goOn hands on commands that have waited for it.
func (c *conn) goOn(later []*queue.Slot, now int64) {
	c.batches.Handing.Lock()
	defer c.batches.Handing.Unlock()
	c.mu.Lock()
	for _, s := range later {
		c.Later(s, now)
	}
	c.mu.Unlock()
	c.batches.HandOver()
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
		c.batches.Handing.Lock() // for process
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
// Handing, which the caller has.
func (c *conn) process() (stop bool) {
	for {
		now := c.srv.fabric.Clock()
		c.Saw(now)
		c.outbox.Claim()
		c.mu.Lock()
		c.rxStart += c.m.Receive(c.rx[c.rxStart:c.rxEnd])
		closed := c.m.Closed()
		c.partial, c.partialNS = !c.m.Stalled() && (c.rxStart < c.rxEnd || !c.m.Idle()), now
		c.mu.Unlock()
		if c.rxStart == c.rxEnd {
			c.rxStart, c.rxEnd = 0, 0
		}
		c.batches.HandOver()
		c.batches.Handing.Unlock()
		if c.AdminPending() {
			c.ExecuteAdmin()
		}
		c.empty()
		c.RecordFailures() // before the host can know and ask
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
		c.batches.Handing.Lock()
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
	case c.MemoryWanted(), c.paused(), c.m.Full():
		return waiting
	}
	return again
}

func (c *conn) String() string {
	return fmt.Sprintf("connection %d from %s", c.ID(), c.nc.RemoteAddr())
}
