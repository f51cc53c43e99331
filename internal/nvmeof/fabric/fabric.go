// Package fabric drives the target machine: it holds the lock under which the
// machine is used, knows every connection of every transport, carries out the
// machine's actions on them, and lets keep alive timers expire.
package fabric

import (
	"log/slog"
	"sync"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/owner"
)

// Conn is a connection as the fabric sees it. Its methods may be called from any
// goroutine: SeenNS and Usage with the fabric's lock held, so they take no lock and call
// nothing of the fabric; the others without it.
type Conn interface {
	// Complete answers an outstanding event request.
	Complete(slot int, status nvme.Status, result uint64)
	// SetTable changes the namespaces that new I/O commands are judged by; a version
	// below the one in force is ignored.
	SetTable(t *nvmeof.NamespaceTable, version uint64)
	// SetCredits says whether completions carry credits; an older version than the one in
	// force is ignored.
	SetCredits(s nvmeof.CreditState)
	// SetTenant says who pays for the I/O commands that come from now on. When it returns,
	// the SSDs have every command that another tenant pays for.
	SetTenant(t Tenant)
	// Abort takes the queued command with that identifier out and reports whether it
	// did.
	Abort(cid uint16) bool
	// EventSlot returns the slot of the outstanding command with that identifier.
	EventSlot(cid uint16) (slot int, ok bool)
	// SeenNS is when the last command arrived.
	SeenNS() int64
	// Usage is what the connection's host did since it connected.
	Usage() nvmeof.Usage
	// Shut begins to close the connection; reason is for the log.
	Shut(reason string)
	// Describe returns figures for the operator.
	Describe() ConnInfo
}

// ConnInfo describes a connection.
type ConnInfo struct {
	ID                       uint64
	Transport, Local, Remote string
	HostNQN, SubNQN          string
	CNTLID, QID              uint16
	// Entries is the queue's size, Outstanding how many commands are not answered.
	Entries, Outstanding int
	Since                time.Time
}

// Events are told what happens, for logs and metrics. All fields are set.
type Events struct {
	KeepAliveExpired func(c *nvmeof.Controller, idle time.Duration)
}

// Config of a Fabric.
type Config struct {
	Target *nvmeof.Target
	// SSDs are the drives by the number that namespaces name them with.
	SSDs []*owner.Owner
	Pool *bufpool.Pool
	// Clock returns monotonic nanoseconds.
	Clock  func() int64
	Log    *slog.Logger
	Events Events
}

// Fabric is the target at work.
type Fabric struct {
	cfg Config

	mu     sync.Mutex
	target *nvmeof.Target
	conns  map[nvmeof.ConnID]Conn
	lastID nvmeof.ConnID
	// retired sums the usage of connections that are gone, by controller.
	retired map[*nvmeof.Controller]nvmeof.Usage
	wake    chan struct{}
	done    chan struct{}
	stopped chan struct{}
	closed  bool

	tenants    tenants
	partitions partitions
}

// New starts a fabric.
func New(cfg Config) *Fabric {
	f := &Fabric{
		cfg: cfg, target: cfg.Target, conns: map[nvmeof.ConnID]Conn{}, tenants: newTenants(),
		retired: map[*nvmeof.Controller]nvmeof.Usage{},
		wake:    make(chan struct{}, 1), done: make(chan struct{}), stopped: make(chan struct{}),
	}
	go f.expire()
	return f
}

// SSD returns the owner of a drive.
func (f *Fabric) SSD(i int) *owner.Owner { return f.cfg.SSDs[i] }

// SSDs returns the owners of all drives.
func (f *Fabric) SSDs() []*owner.Owner { return f.cfg.SSDs }

// Pool returns the data buffers.
func (f *Fabric) Pool() *bufpool.Pool { return f.cfg.Pool }

// Clock returns monotonic nanoseconds.
func (f *Fabric) Clock() int64 { return f.cfg.Clock() }

// Add registers a new connection and numbers it.
func (f *Fabric) Add(c Conn) nvmeof.ConnID {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lastID++
	f.conns[f.lastID] = c
	return f.lastID
}

// Remove forgets a connection. c and qid are its queue, c nil if it has none.
func (f *Fabric) Remove(id nvmeof.ConnID, c *nvmeof.Controller, qid uint16, usage nvmeof.Usage) {
	f.mu.Lock()
	delete(f.conns, id)
	if c != nil {
		if qid == 0 {
			delete(f.retired, c)
		} else if _, alive := c.QueueConn(0); alive {
			u := f.retired[c]
			f.retired[c] = sum(u, usage)
		}
		f.target.Disconnected(c, qid, id)
	}
	f.release()
}

// release unlocks and carries out the machine's actions.
func (f *Fabric) release() {
	actions := f.target.TakeActions()
	conns := make([]Conn, len(actions))
	for i := range actions {
		conns[i] = f.conns[actions[i].Conn]
	}
	f.mu.Unlock()
	for i := range actions {
		a, c := &actions[i], conns[i]
		if a.Kind == nvmeof.ActionExpired {
			f.cfg.Events.KeepAliveExpired(a.Controller, time.Duration(a.IdleNS))
			continue
		}
		if c == nil {
			continue // it went meanwhile
		}
		switch a.Kind {
		case nvmeof.ActionClose:
			c.Shut(a.Reason)
		case nvmeof.ActionComplete:
			c.Complete(a.Slot, a.Status, a.Result)
		case nvmeof.ActionTable:
			c.SetTable(a.Table, a.Version)
		case nvmeof.ActionCredits:
			c.SetCredits(a.Credits)
		}
	}
}

// Apply changes the target's state.
func (f *Fabric) Apply(s nvmeof.State) {
	f.mu.Lock()
	f.target.Apply(s)
	f.release()
}

// Connect executes a Connect command.
func (f *Fabric) Connect(a nvmeof.ConnectArgs) nvmeof.ConnectReply {
	f.mu.Lock()
	r := f.target.Connect(f.cfg.Clock(), a)
	f.release()
	if r.Status.OK() && r.QID == 0 {
		f.rearm()
	}
	return r
}

// Admin executes another admin or fabrics command.
func (f *Fabric) Admin(a nvmeof.AdminArgs) nvmeof.Reply {
	a.Usage = f.usage
	f.mu.Lock()
	r := f.target.Admin(f.cfg.Clock(), a)
	var victim Conn
	if r.Abort {
		if id, ok := a.Controller.QueueConn(r.AbortSQID); ok {
			victim = f.conns[id]
		}
	}
	f.release()
	if r.Abort {
		r.Result = nvme.AbortNotDone
		if victim != nil && f.abort(a.Controller, victim, r.AbortSQID, r.AbortCID) {
			r.Result = 0
		}
	}
	if r.Used != nil {
		(*nvme.IdentifyNamespaceKV)(a.Data).SetNUSE(uint64(r.Used()))
	}
	if a.SQE.Opcode() == nvme.AdminSetFeatures {
		f.rearm() // the keep alive timeout may be another
	}
	return r
}

func (f *Fabric) abort(c *nvmeof.Controller, victim Conn, qid, cid uint16) bool {
	if qid != 0 {
		return victim.Abort(cid)
	}
	slot, ok := victim.EventSlot(cid)
	if !ok {
		return false
	}
	f.mu.Lock()
	done := f.target.AbortEvent(c, slot)
	f.release()
	return done
}

// RecordErrors adds failed commands to a controller's Error Information log.
func (f *Fabric) RecordErrors(c *nvmeof.Controller, failed []nvmeof.Failed) {
	f.mu.Lock()
	c.RecordErrors(failed)
	f.mu.Unlock()
}

// usage sums what a controller's host did. Called with mu held.
func (f *Fabric) usage(c *nvmeof.Controller) nvmeof.Usage {
	u := f.retired[c]
	for _, id := range c.Queues() {
		if conn := f.conns[id]; conn != nil {
			u = sum(u, conn.Usage())
		}
	}
	return u
}

func sum(a, b nvmeof.Usage) nvmeof.Usage {
	return nvmeof.Usage{Reads: a.Reads + b.Reads, Writes: a.Writes + b.Writes, ReadBytes: a.ReadBytes + b.ReadBytes,
		WrittenBytes: a.WrittenBytes + b.WrittenBytes, MediaErrors: a.MediaErrors + b.MediaErrors}
}

// Conns returns every connection.
func (f *Fabric) Conns() []Conn {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make([]Conn, 0, len(f.conns))
	for _, c := range f.conns {
		all = append(all, c)
	}
	return all
}

// Counts are the numbers of connections, controllers and hosts.
func (f *Fabric) Counts() (conns, controllers, hosts int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	seen := map[string]bool{}
	all := f.target.Controllers()
	for _, c := range all {
		seen[c.HostNQN] = true
	}
	return len(f.conns), len(all), len(seen)
}

// rearm lets the expiry goroutine look at the timers again.
func (f *Fabric) rearm() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// expire ends associations whose keep alive timers ran out. It sleeps until the
// earliest may.
func (f *Fabric) expire() {
	defer close(f.stopped)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		f.mu.Lock()
		f.target.Expire(f.cfg.Clock(), f.seen)
		at, ok := f.target.NextExpiry()
		f.release()
		wait := time.Hour
		if ok {
			wait = max(time.Duration(at-f.cfg.Clock()), time.Millisecond)
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-f.wake:
		case <-f.done:
			return
		}
	}
}

// seen is when any of a controller's queues last had a command. Called with mu
// held.
func (f *Fabric) seen(c *nvmeof.Controller) (ns int64) {
	for _, id := range c.Queues() {
		if conn := f.conns[id]; conn != nil {
			ns = max(ns, conn.SeenNS())
		}
	}
	return ns
}

// Close ends the timers; connections must be gone. Idempotent.
func (f *Fabric) Close() {
	f.mu.Lock()
	if !f.closed {
		f.closed = true
		close(f.done)
	}
	f.mu.Unlock()
	<-f.stopped
}
