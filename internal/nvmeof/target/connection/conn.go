// Package connection drives the machine of a queue pair, whatever the transport. I/O commands go to the executors that
// their plans name, admin commands to the target service; their results are answered, counted and accounted for. A
// transport's connection contains a Conn, brings commands to the machine under the Conn's lock and sends what the
// machine has to send.
//
//	transport ── qpair.QPair ──> Conn ── Batches ──> executor.Executor (drive, partition)
//	    ^                         │ └── ExecuteAdmin ──> target.Service
//	    └── responses <── Empty <─┴── Outbox <── NeedData, Done
package connection

import (
	"context"
	"log/slog"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/fence"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/telemetry"
	"jbofd/internal/tenant"
)

// Transport is the connection around a Conn.
type Transport interface {
	// HoldUntilSent takes over the buffer of the data that the machine was just given to send. The transport returns it
	// to the pool when the data is sent. The lock is held.
	HoldUntilSent(b bufpool.Buf)
	// Paused reports that the transport wants no further commands now. The lock is held.
	Paused() bool
	// Wake says that there is something in the outbox, or to send. From any goroutine, also with locks held.
	Wake()
	// Deliver is Wake by a goroutine that holds no lock of a connection but perhaps Handing of others, and that may
	// empty the outbox and send itself.
	Deliver()
	// Resume says that the machine may be able to take commands again for which it had no memory or slot. From any
	// goroutine, also with locks held.
	Resume()
	// Shut begins to close the connection. The reason of the first call counts. From any goroutine, also with the lock
	// held.
	Shut(reason string)
	// Linger sends what there is to send and gives the host a moment to take it. By the goroutine of ExecuteAdmin,
	// before Shut.
	Linger()
	// Lost reports that the connection has ended, as far as can be seen at this moment. It takes no lock.
	Lost() bool
	// ArrivedNS is when the host's latest bytes arrived, whether or not they were taken in; 0: the transport cannot
	// tell. It takes no lock.
	ArrivedNS(nowNS int64) int64
	// LocalAddress is the IP address that the host has connected to.
	LocalAddress() string
}

// Config is what a Conn is told of its transport's connection.
type Config struct {
	Service   *target.Service
	Telemetry *telemetry.Telemetry
	Log       *slog.Logger
	// Ticket is the connection's place among all; its owner calls Leave after Release.
	Ticket    *Ticket
	Transport Transport
	Machine   *qpair.QPair
	// Closed reports that the machine can send nothing any more.
	Closed func() bool
	// Lock guards the machine and the Conn; it may be shared with others.
	Lock sync.Locker
	// Batches collect commands for the executors, Outbox those that return; either may be shared.
	Batches *Batches
	Outbox  *Outbox
	// Peer is the address that the host connects from. Name is the transport's, for metrics and descriptions; Remote
	// and Local are addresses for people.
	Peer                netip.Addr
	Name, Remote, Local string
	Port                nvmeof.Port
	// Agreed is what the transport has negotiated with the host before Connect; nil: nothing.
	Agreed *nvmeof.Agreed
	// ConnectBuffer is where the data of the Connect command goes.
	ConnectBuffer []byte
}

// Conn is the connection of one queue pair. Its methods may be called from any goroutine unless they
// say otherwise.
type Conn struct {
	cfg     Config
	service *target.Service
	tel     *telemetry.Telemetry
	log     *slog.Logger
	t       Transport
	id      nvmeof.ConnID
	since   time.Time

	seen  atomic.Int64 // when the last command arrived
	usage usage
	share fence.Share // of its association; counts commands begun and not finished, with mu held
	// holder is the association's; nil before Connect and of discovery.
	holder atomic.Pointer[fence.Holder]
	// detached counts those that a shutdown does not wait for: they have not come back, but can reach no device.
	detached atomic.Int32

	waiter  bufpool.Waiter
	waiting bool        // waiter is queued, or has a buffer that was not used yet
	granted atomic.Bool // waiter has its buffer

	// mu guards the machine and what follows.
	mu    sync.Locker
	m     *qpair.QPair
	slots []Slot
	// contexts are what executors have for commands, by kind and slot; nil before the first command of the kind, and
	// of the kind in that slot.
	contexts [nvmeof.Kinds][]any
	admin    []int           // slots of commands for ExecuteAdmin
	failures []nvmeof.Failed // for the Error Information log
	ctrl     *nvmeof.Controller
	qid      uint16
	version  uint64
	tenant   target.Tenant
	// credits says whether completions carry credits. The admin queue stands for its
	// controller among tenant.Windows.
	credits nvmeof.CreditState
	series  [nvmeof.Kinds][]*telemetry.IOSeries // by SSD and operation, executor.MaxOps for each SSD
	counts  *telemetry.Tenant                   // to which the series belong; nil before Connect and of discovery
	errors  *telemetry.ErrorSeries
	done    done
	// unreported counts writes that have failed when no host could be told any more; firstUnreported is one of them.
	unreported      uint64
	firstUnreported nvmeof.Failed
	closing         bool // Close was called
	extra           bool // a command has a buffer beyond the pool's bound; see extraBuffer
	stall           stall
	teardown        teardown
	connBuf         []byte // data of the Connect command
}

// Slot is the connection's part of a command.
type Slot struct {
	cmd executor.Command
	// kind is that of the last command, whose executor made cmd.Context.
	kind nvmeof.Kind
	// startNS is when the command began; 0: it is not in flight.
	startNS int64
	// next links the slot in an outbox, event is why it is there.
	next  *Slot
	event event
	// noted: the failure of the command is in the log already.
	noted bool
	// fetching: the host's data was requested, at requestedNS, and has not all come. lost: a part of it will not come.
	fetching, lost bool
	// detached: the command counts in Conn.detached, no longer in Conn.share.
	detached    bool
	requestedNS int64
}

// setSlots gives the connection n slots, as many as the machine has.
func (c *Conn) setSlots(n int) {
	c.slots = make([]Slot, n)
	for i := range c.slots {
		m := c.m.Slot(i)
		c.slots[i].cmd = executor.Command{SQE: &m.SQE, Plan: &m.Plan, Port: c, Slot: uint32(i)}
	}
}

// usage counts what the host did, for the SMART log.
type usage struct {
	reads, writes, readBytes, writtenBytes, mediaErrors atomic.Uint64
}

var (
	_ target.Conn   = (*Conn)(nil)
	_ qpair.Handler = (*Conn)(nil)
	_ executor.Port = (*Conn)(nil)
)

// Init makes c drive cfg.Machine, whose Handler it is, and registers it with the service.
// Release must be called.
func (c *Conn) Init(cfg Config) {
	c.cfg = cfg
	c.service, c.tel, c.log, c.t, c.m, c.mu = cfg.Service, cfg.Telemetry, cfg.Log, cfg.Transport, cfg.Machine, cfg.Lock
	c.since, c.connBuf = time.Now(), cfg.ConnectBuffer
	c.setSlots(1)
	c.waiter.Wake = func() {
		c.granted.Store(true)
		c.t.Resume()
	}
	c.seen.Store(c.service.Clock())
	c.id = c.service.Add(c)
}

// ID numbers the connection.
func (c *Conn) ID() nvmeof.ConnID { return c.id }

// Transport is the transport's connection around the Conn.
func (c *Conn) Transport() Transport { return c.t }

// NoteActivity says that something which the host has sent is taken in. If the host was silent for longer than its keep
// alive timeout before, as far as the connection knows, the service first ends or renews the association: this process
// may have been stopped, and what is taken in may have come long ago.
func (c *Conn) NoteActivity(now int64) {
	if h := c.holder.Load(); h != nil {
		h.Renew(now)
	}
	c.seen.Store(now)
}

// InFlight is how many commands have begun and are not finished.
func (c *Conn) InFlight() int { return c.share.InFlight() + int(c.detached.Load()) }

// Controller returns the controller and number of the queue; nil before Connect. The lock is held.
func (c *Conn) Controller() (*nvmeof.Controller, uint16) { return c.ctrl, c.qid }

// Tenant is the tenant that pays for new commands. The lock is held.
func (c *Conn) Tenant() tenant.ID { return c.tenant.Number }

// Close ends the queue of a connection that can neither receive nor send any more: it takes no more commands, gives up
// those that wait for the host's data, and aborts those that have not started. The caller then calls Batches.HandOver
// and waits until InFlight is 0.
func (c *Conn) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closing = true
	c.m.Fetching(c.abandon)
	c.abortQueued() // a command that has not started, for its tenant's cap perhaps, need not be executed
}

// Paused implements qpair.Handler.
func (c *Conn) Paused() bool { return c.closing || c.t.Paused() }

// Closing reports that Close was called. The lock is held.
func (c *Conn) Closing() bool { return c.closing }

// Release returns all memory and removes the connection from the service. Nothing is in flight any more.
// Transport.Resume signals resume.
func (c *Conn) Release(resume <-chan struct{}) {
	c.endTeardown()
	c.mu.Lock()
	for i := range c.slots {
		c.put(&c.slots[i].cmd.Buf)
	}
	ctrl, qid := c.ctrl, c.qid
	c.mu.Unlock()
	if c.waiting && !c.service.Pool().Cancel(&c.waiter) {
		for !c.granted.Load() {
			<-resume
		}
		c.mu.Lock()
		c.put(&c.waiter.Buf)
		c.mu.Unlock()
	}
	c.reportUnreported()
	c.share.Leave()
	c.service.Remove(c.id, ctrl, qid, c.Usage())
	if ctrl != nil {
		c.SetCredits(nvmeof.CreditState{Version: math.MaxUint64})
		c.service.CloseTenant(c.id)
		if c.counts != nil {
			c.counts.Close()
		}
		c.tel.ConnectionClosed(c.cfg.Name)
	}
}

// LogClosed writes the log line of the connection's end. err and what describe a protocol error, if one was the cause.
func (c *Conn) LogClosed(reason, what string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	args := []any{"transport", c.cfg.Name, "remote", c.cfg.Remote, "reason", reason}
	if c.ctrl != nil {
		args = append(args, "host", c.ctrl.HostNQN, "subsystem", c.ctrl.SubNQN, "cntlid", c.ctrl.ID, "qid", c.qid)
	}
	switch {
	case err != nil:
		c.log.Warn("connection closed: "+what, append(args, "error", err.Error())...)
	case c.ctrl == nil:
		c.log.Debug("connection closed before Connect", args...)
	default:
		c.log.Log(context.Background(), connLevel(c.qid), "connection closed", args...)
	}
}

// connLevel is the level of log lines about a queue: an association is worth a line, each of its I/O queues is not.
func connLevel(qid uint16) slog.Level {
	if qid == 0 {
		return slog.LevelInfo
	}
	return slog.LevelDebug
}
