package node

import (
	"net/netip"
	"sync"

	"jbofd/internal/bufpool"
	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/tcp"
)

// Fault model of the transport: that of lab.Network. Memory in which data was lent to the connection is given back once
// the network has copied it; commands are not taken while too much waits to be sent, as tcp/serve does. A
// connection that is told to close may take in more before it does.

// backlogBytes of unsent answers stop a connection from taking commands.
const backlogBytes = 64 << 10

// conn is the target's end of one connection: what tcp/serve does with sockets and goroutines, done with a lab.End and
// tasks of a Sim. connection.Conn, tcp.Conn and all behind them are the real ones.
type conn struct {
	connection.Conn
	n       *Node
	end     *lab.End
	ticket  *connection.Ticket
	mu      sync.Mutex // never contended; connection.Conn wants one
	m       *tcp.Conn
	outbox  connection.Outbox
	batches *connection.Batches
	pending []bufpool.Buf // lent to the machine's Out
	out     tcp.Out
	rx      []byte
	// arrivedNS is when the latest bytes have come, as the kernel notes it; reading: process will run.
	arrivedNS int64
	reading   bool
	// woken and resumed are tasks that are ready: wake and process.
	woken, resumed bool
	// dead: it is over, since deadNS.
	dead     bool
	deadNS   int64
	reason   string
	released bool
	resume   chan struct{}
}

// transport is what connection.Conn sees of a conn.
type transport struct{ *conn }

var _ connection.Transport = transport{}

// accept begins to serve a connection.
func (n *Node) accept(end *lab.End) {
	c := &conn{n: n, end: end, batches: connection.NewBatches(n.service), resume: make(chan struct{}, 1)}
	end.Received = c.received
	end.Closed = func(err error) { n.process.Deliver(func() { c.shut(err.Error()) }) }
	end.Drained = func() {
		if !c.dead {
			transport{c}.Resume()
		}
	}
	c.arrivedNS = n.service.Clock()
	from := netip.AddrFrom4([4]byte{10, 0, 0, 1})
	c.ticket = n.admission.Enter(from, c.shut)
	c.m = tcp.New(tcp.Config{InCapsuleBytes: inCapsuleBytes, MaxH2CDataBytes: 64 << 10, Limits: limits}, &c.Conn)
	c.Conn.Init(connection.Config{
		Service: n.service, Telemetry: n.lab.tel, Log: n.lab.log, Ticket: c.ticket, Transport: transport{c},
		Machine: &c.m.QPair, Closed: c.m.Closed, Lock: &c.mu, Batches: c.batches, Outbox: &c.outbox,
		Name: "tcp", Local: end.Local, Remote: end.Remote, Peer: from, Port: nvmeof.Port{ID: 1, TRTYPE: nvme.TRTYPETCP},
		ConnectBuffer: make([]byte, nvme.ConnectDataSize),
	})
	n.conns[c] = true
}

// HoldUntilSent implements connection.Transport.
func (t transport) HoldUntilSent(b bufpool.Buf) { t.pending = append(t.pending, b) }

// Paused implements connection.Transport.
func (t transport) Paused() bool { return t.end.Unsent() > backlogBytes }

// Wake implements connection.Transport.
func (t transport) Wake() {
	if !t.woken {
		t.woken = true
		t.n.task(t.wake)
	}
}

// Deliver implements connection.Transport.
func (t transport) Deliver() { t.Wake() }

// Resume implements connection.Transport.
func (t transport) Resume() {
	if t.dead {
		select { // Release may wait for it
		case t.conn.resume <- struct{}{}:
		default:
		}
		return
	}
	if !t.resumed {
		t.resumed = true
		t.n.task(func() {
			t.resumed = false
			t.process()
		})
	}
}

// Shut implements connection.Transport. What the network brings before the connection notices is still taken in, as by
// a reader on another processor.
func (t transport) Shut(reason string) {
	if t.n.lab.rng.IntN(2) == 0 {
		t.shut(reason)
		return
	}
	t.n.task(func() { t.shut(reason) })
}

// Lost implements connection.Transport.
func (t transport) Lost() bool { return t.dead || t.end.Over() }

// Linger implements connection.Transport.
func (t transport) Linger() { t.flush() }

// ArrivedNS implements connection.Transport.
func (t transport) ArrivedNS(int64) int64 { return t.arrivedNS }

// LocalAddress implements connection.Transport.
func (t transport) LocalAddress() string { return "10.0.0.2" }

// received takes bytes.
func (c *conn) received(b []byte) {
	if c.dead {
		return
	}
	c.rx = append(c.rx, b...)
	c.arrivedNS = c.n.service.Clock()
	if !c.reading {
		c.reading = true
		c.n.process.Deliver(func() {
			c.reading = false
			c.process()
		})
	}
}

// process uses what was received and executes what it amounts to.
func (c *conn) process() {
	for !c.dead {
		c.BeginReceive(c.n.service.Clock())
		used := c.m.Receive(c.rx)
		closed := c.m.Closed()
		c.rx = append(c.rx[:0], c.rx[used:]...)
		c.EndReceive()
		c.flush()
		switch {
		case closed:
			c.shut("closed by the protocol")
			return
		case !c.m.Stalled(), c.Blocked():
			return // more bytes, or Resume, bring the next turn
		}
	}
}

// wake sends what others have left in the outbox.
func (c *conn) wake() {
	c.woken = false
	c.Empty()
	if c.dead {
		c.release()
		return
	}
	c.RecordFailures()
	c.flush()
}

// flush sends what there is to send.
func (c *conn) flush() {
	if c.dead {
		return
	}
	c.mu.Lock()
	c.m.Take(&c.out)
	lent := c.pending
	c.pending = nil
	c.mu.Unlock()
	for _, b := range c.out.Segs {
		c.end.Send(b)
	}
	c.out.Reset()
	for _, b := range lent {
		c.n.pool.Put(b)
	}
}

// shut begins to close the connection; the first reason counts.
func (c *conn) shut(reason string) {
	if c.dead {
		return
	}
	c.dead, c.deadNS, c.reason = true, c.n.lab.Sim.Now(), reason
	c.n.lab.Sim.Tracef("target: connection %d over: %s", c.end.ID, reason)
	c.end.Close()
	c.n.task(c.drain)
}

// drain lets commands in flight come back after the connection has died.
func (c *conn) drain() {
	c.Close()
	for _, b := range c.pending {
		c.n.pool.Put(b)
	}
	c.pending = nil
	c.batches.Handing.Lock()
	c.batches.HandOver()
	c.batches.Handing.Unlock()
	c.Empty()
	c.release()
}

// release gives everything back once nothing is in flight.
func (c *conn) release() {
	if c.released || c.InFlight() > 0 {
		return
	}
	c.released = true
	c.LogClosed(c.reason, "", nil)
	c.Release(c.resume)
	c.ticket.Close()
	delete(c.n.conns, c)
}
