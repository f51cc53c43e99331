// Package queue drives a queue pair's machine, whatever the transport: commands get memory
// and go to their SSDs or to the target machine, what comes back is answered, counted and
// paid for. A transport's connection contains a Queue, brings commands to the machine
// under the Queue's lock and sends what the machine has to send.
//
//	transport ── qpair.QPair ──> Queue ── Batches ──> owner.Owner (SSD), partition
//	    ^                          │ └── ExecuteAdmin ──> fabric.Fabric
//	    └── responses <── Finish <─┴── Outbox <── Admitted, Done, KVDone
package queue

import (
	"context"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/owner"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/telemetry"
)

// Transport is the connection around a Queue.
type Transport interface {
	// Lend takes a buffer with data that the machine has just been given to send; it goes
	// back to the pool once that is sent. The lock is held.
	Lend(b bufpool.Buf)
	// Paused reports that the transport wants no further commands now. The lock is held.
	Paused() bool
	// Wake: the outbox or the machine has something. From any goroutine, also with locks held.
	Wake()
	// Resume: what made the machine stop may be over. From any goroutine, also with locks held.
	Resume()
	// Shut begins to close the connection; the first reason counts. From any goroutine, also
	// with the lock held.
	Shut(reason string)
	// Bye sends what there is to send before the connection is closed at the host's wish.
	Bye()
	// LocalAddress is the IP address that the host has connected to.
	LocalAddress() string
}

// Config is what a Queue is told of its connection.
type Config struct {
	Fabric    *fabric.Fabric
	Telemetry *telemetry.Telemetry
	Log       *slog.Logger
	Admission *Admission
	Transport Transport
	Machine   *qpair.QPair
	// Closed reports that the machine can send nothing any more.
	Closed func() bool
	// Lock guards the machine and the Queue; it may be shared with others.
	Lock sync.Locker
	// Batches collect commands for the SSDs, Outbox what comes back; either may be shared.
	Batches *Batches
	Outbox  *Outbox
	// Name is the transport's, for metrics and descriptions; Remote and Local are addresses.
	Name, Remote, Local string
	Port                nvmeof.Port
	// Agreed is what the transport has agreed on with the host before Connect; nil: nothing.
	Agreed *nvmeof.Agreed
	// ConnectBuffer is where the data of the Connect command goes.
	ConnectBuffer []byte
}

// Queue is one queue pair at work. Its methods may be called from any goroutine unless they
// say otherwise.
type Queue struct {
	cfg   Config
	fab   *fabric.Fabric
	tel   *telemetry.Telemetry
	log   *slog.Logger
	t     Transport
	id    nvmeof.ConnID
	since time.Time

	seen     atomic.Int64 // when the last command arrived
	usage    usage
	inFlight atomic.Int32 // commands begun and not finished; changed with mu held

	waiter  bufpool.Waiter
	waiting bool        // waiter is queued, or was granted its buffer and not used yet
	granted atomic.Bool // waiter has its buffer

	// mu guards the machine and what follows.
	mu       sync.Locker
	m        *qpair.QPair
	slots    []Slot
	kv       []kvSlot        // as many as slots; nil before the first command for a partition
	admin    []int           // slots of commands for ExecuteAdmin
	failures []nvmeof.Failed // for the Error Information log
	ctrl     *nvmeof.Controller
	qid      uint16
	version  uint64
	tenant   fabric.Tenant
	// credits says whether completions carry credits. The admin queue stands for its
	// controller among tenant.Windows.
	credits  nvmeof.CreditState
	series   [][pipeline.Ops]*telemetry.IOSeries // by SSD
	kvSeries [][kvOps]*telemetry.IOSeries        // by SSD
	errors   *telemetry.ErrorSeries
	closing  bool // no more commands; what is in flight drains
	extra    bool // a buffer beyond the pool's bound is out; see extraBuffer
	stall    stall
	connBuf  []byte // data of the Connect command
}

// Slot is the driver's part of a command.
type Slot struct {
	io     owner.IO
	ranges []pipeline.Range
	// startNS is when the command began; 0: it is not in flight.
	startNS int64
	// next links the slot in an outbox, news is what it is there for.
	next *Slot
	news news
	// noted: the machine has told of the command's failure.
	noted bool
	// fetching: the host's data is awaited, asked for at askedNS.
	fetching bool
	askedNS  int64
}

// news is what a command is in the outbox for.
type news uint8

const (
	ioDone     news = iota
	ioAdmitted      // its data is to be fetched
	kvDone
	kvMemory // the memory that it has waited for is there
)

// Next is the next command that Outbox.Take has returned. It is read before the command is finished.
func (s *Slot) Next() *Slot { return s.next }

// Queue is whose command it is.
func (s *Slot) Queue() *Queue { return s.io.Sink().(*Queue) }

// usage is what the host did, for the SMART log.
type usage struct {
	reads, writes, readBytes, writtenBytes, mediaErrors atomic.Uint64
}

var (
	_ fabric.Conn    = (*Queue)(nil)
	_ qpair.Handler  = (*Queue)(nil)
	_ owner.Sink     = (*Queue)(nil)
	_ partition.Sink = (*Queue)(nil)
)

// Init makes q drive cfg.Machine, whose Handler it is, and registers it with the fabric.
// Release must be called.
func (q *Queue) Init(cfg Config) {
	q.cfg = cfg
	q.fab, q.tel, q.log, q.t, q.m, q.mu = cfg.Fabric, cfg.Telemetry, cfg.Log, cfg.Transport, cfg.Machine, cfg.Lock
	q.since, q.connBuf = time.Now(), cfg.ConnectBuffer
	q.slots = make([]Slot, 1)
	q.slots[0].io.Init(q, 0)
	q.waiter.Wake = func() {
		q.granted.Store(true)
		q.t.Resume()
	}
	q.seen.Store(q.fab.Clock())
	q.id = q.fab.Add(q)
}

// ID numbers the connection.
func (q *Queue) ID() nvmeof.ConnID { return q.id }

// Transport is the connection around the Queue.
func (q *Queue) Transport() Transport { return q.t }

// Saw says that the host was heard of.
func (q *Queue) Saw(now int64) { q.seen.Store(now) }

// InFlight is how many commands are with an SSD or a partition, or on their way there.
func (q *Queue) InFlight() int { return int(q.inFlight.Load()) }

// Controller is the queue's controller and number; nil before Connect. The lock is held.
func (q *Queue) Controller() (*nvmeof.Controller, uint16) { return q.ctrl, q.qid }

// Tenant is the pipelines' number for who pays for commands that come now. The lock is held.
func (q *Queue) Tenant() pipeline.Tenant { return q.tenant.Number }

// MemoryWanted reports that the machine has stopped for want of memory and would stop again. The
// lock is held.
func (q *Queue) MemoryWanted() bool {
	return q.waiting && !q.granted.Load() && (q.qid == 0 || q.extra)
}

// Close begins the end: no more commands are taken, and what waits for the host's data or in
// front of an SSD comes back. The connection is dead, and Batches.HandOver is to be called.
func (q *Queue) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closing = true
	q.m.Fetching(q.abandon)
	for i := range q.slots { // what waits, for its cap perhaps, need not be done any more
		if q.withPartition(i) {
			q.abortKV(i)
		} else if q.withSSD(i) {
			q.fab.SSD(q.ssdOf(i)).Abort(&q.slots[i].io)
		}
	}
}

// Closing reports that Close was called. The lock is held.
func (q *Queue) Closing() bool { return q.closing }

// Release gives everything back, when nothing is in flight any more. resume is signalled by
// Transport.Resume.
func (q *Queue) Release(resume <-chan struct{}) {
	q.mu.Lock()
	for i := range q.slots {
		q.put(&q.slots[i].io.Buf)
	}
	ctrl, qid := q.ctrl, q.qid
	q.mu.Unlock()
	if q.waiting && !q.fab.Pool().Cancel(&q.waiter) {
		for !q.granted.Load() {
			<-resume
		}
		q.mu.Lock()
		q.put(&q.waiter.Buf)
		q.mu.Unlock()
	}
	q.fab.Remove(q.id, ctrl, qid, q.Usage())
	if ctrl != nil {
		q.SetCredits(nvmeof.CreditState{Version: math.MaxUint64})
		q.fab.CloseTenant(q.id)
		q.tel.ConnectionClosed(q.cfg.Name)
		q.cfg.Admission.leaveHost(ctrl.HostNQN)
	}
}

// LogClosed says once that the connection is over, at the level that its reason deserves; what
// tells a protocol error, or is empty.
func (q *Queue) LogClosed(reason, what string, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	args := []any{"transport", q.cfg.Name, "remote", q.cfg.Remote, "reason", reason}
	if q.ctrl != nil {
		args = append(args, "host", q.ctrl.HostNQN, "subsystem", q.ctrl.SubNQN, "cntlid", q.ctrl.ID, "qid", q.qid)
	}
	switch {
	case err != nil:
		q.log.Warn("connection closed: "+what, append(args, "error", err.Error())...)
	case q.ctrl == nil:
		q.log.Debug("connection closed before Connect", args...)
	default:
		q.log.Log(context.Background(), connLevel(q.qid), "connection closed", args...)
	}
}

// connLevel: associations are worth a line, their I/O queues only for debugging.
func connLevel(qid uint16) slog.Level {
	if qid == 0 {
		return slog.LevelInfo
	}
	return slog.LevelDebug
}
