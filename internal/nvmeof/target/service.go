// Package target is the target service: it drives the target machine (nvmeof.Target) for all transports. It holds the
// lock under which the machine is used, knows every connection, carries out the machine's actions, and runs its timers.
// It also maps hosts to tenants (tenants.go), kinds of commands to executors (executors.go), and carries out the ends
// of associations and namespaces (ends.go).
package target

import (
	"log/slog"
	"sync"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/fence"
	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/ssd"
	"jbofd/internal/turn"
)

// Conn is a connection as the service sees it. The service calls its methods from any goroutine. It calls SeenNS,
// ArrivedNS, Share, Lost and Usage with its own lock held, so these take no lock and do not call the service; it calls
// the others without the lock.
type Conn interface {
	// Complete answers an outstanding event request.
	Complete(slot int, status nvme.Status, result uint64)
	// SetTable changes the namespaces by which new I/O commands are validated. A version below that in force is
	// ignored. When it returns, executors have every command that was validated by an older table.
	SetTable(t *nvmeof.NamespaceTable, version uint64)
	// SetCredits says whether completions carry credits. A state older than that in force is ignored.
	SetCredits(s nvmeof.CreditState)
	// SetTenant says which tenant pays for new I/O commands. When it returns, executors have every command that another
	// tenant pays for, or get it back from waiting for the host's data.
	SetTenant(t Tenant)
	// Abort takes out the command with that identifier if it has not started, and reports whether it did.
	Abort(cid uint16) bool
	// EventSlot returns the slot of the outstanding command with that identifier.
	EventSlot(cid uint16) (slot int, ok bool)
	// SeenNS is when the last command arrived.
	SeenNS() int64
	// ArrivedNS is when the host's latest bytes arrived, although a process that was stopped may not have taken them in
	// yet; 0: the transport cannot tell.
	ArrivedNS(nowNS int64) int64
	// Share counts the connection's commands in flight; the service lets the share of an I/O queue join its
	// controller's holder.
	Share() *fence.Share
	// Lost reports that the transport can see that the connection has ended. It may be so before Remove is called.
	Lost() bool
	// Stop takes out the queued commands; from now on the share begins none.
	Stop()
	// Connected is the outcome of a Connect that was held. It reports whether the connection has taken it; otherwise
	// the connection has ended.
	Connected(r nvmeof.ConnectReply) bool
	// Usage is what the connection's host did since it connected.
	Usage() nvmeof.Usage
	// Shut begins to close the connection. reason is for the log.
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

// Events are told what happens, for logs and metrics. Fields may be nil.
type Events struct {
	KeepAliveExpired func(c *nvmeof.Controller, idle time.Duration)
	// Overdue: a reset, shutdown or end of an association takes longer than its bound; inFlight commands are at the
	// drives.
	Overdue func(c *nvmeof.Controller, what string, inFlight int)
}

// Config of a Service.
type Config struct {
	Target *nvmeof.Target
	// SSDs are the drives by the number that namespaces name them with; nil: there is none, see ReplaceSSD.
	SSDs []*drive.Drive
	Pool *bufpool.Pool
	// Env is where the service runs; nil: turn.Real.
	Env turn.Env
	// Clock returns monotonic nanoseconds; nil: Env's. If it is another clock than that of the drives' Env, drives ask
	// the service more often than they need to whether an association lives.
	Clock  func() int64
	Log    *slog.Logger
	Events Events
}

// Service is the target service: the one driver of the target machine for all connections of all transports. Its
// methods may be called from any goroutine, but not from those methods of a Conn that it calls with its lock held.
type Service struct {
	cfg Config

	mu     sync.Mutex
	target *nvmeof.Target
	conns  map[nvmeof.ConnID]Conn
	lastID nvmeof.ConnID
	// retired sums the usage of connections that have ended, by controller.
	retired map[*nvmeof.Controller]nvmeof.Usage
	// timer runs expire when the next keep alive timer may run out. It is set with mu held, so that the latest setting
	// counts.
	timer turn.Timer

	tenants   tenants
	executors executors
	ends      ends
}

// New starts a service.
func New(cfg Config) *Service {
	if cfg.Env == nil {
		cfg.Env = turn.Real
	}
	if cfg.Clock == nil {
		cfg.Clock = cfg.Env.Now
	}
	if cfg.Events.KeepAliveExpired == nil {
		cfg.Events.KeepAliveExpired = func(*nvmeof.Controller, time.Duration) {}
	}
	if cfg.Events.Overdue == nil {
		cfg.Events.Overdue = func(*nvmeof.Controller, string, int) {}
	}
	f := &Service{
		cfg: cfg, target: cfg.Target, conns: map[nvmeof.ConnID]Conn{}, tenants: newTenants(),
		executors: newExecutors(&cfg),
		retired:   map[*nvmeof.Controller]nvmeof.Usage{},
	}
	var err error
	f.timer, err = cfg.Env.NewTimer(turn.Coarse, f.expire)
	invariants.Check(err == nil, "target: a coarse timer needs nothing of the system")
	f.initEnds()
	return f
}

// SSD returns the drive.
func (s *Service) SSD(i int) *drive.Drive { return s.SSDs()[i] }

// SSDs returns the drives. The caller must not change the slice.
func (s *Service) SSDs() []*drive.Drive { return s.executors.blocks.Drives() }

// Pool returns the data buffers.
func (s *Service) Pool() *bufpool.Pool { return s.cfg.Pool }

// Env is where the service runs.
func (s *Service) Env() turn.Env { return s.cfg.Env }

// Clock returns monotonic nanoseconds.
func (s *Service) Clock() int64 { return s.cfg.Clock() }

// Add registers a new connection and numbers it.
func (s *Service) Add(c Conn) nvmeof.ConnID {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastID++
	s.conns[s.lastID] = c
	return s.lastID
}

// Remove forgets a connection that has ended and has nothing in flight. It was queue qid of c, and usage is what its
// host did there; c is nil if its Connect had not succeeded.
func (s *Service) Remove(id nvmeof.ConnID, c *nvmeof.Controller, qid uint16, usage nvmeof.Usage) {
	s.mu.Lock()
	delete(s.conns, id)
	if c != nil {
		if qid == 0 {
			delete(s.retired, c)
		} else if _, alive := c.QueueConn(0); alive {
			u := s.retired[c]
			s.retired[c] = sum(u, usage)
		}
		s.target.Disconnected(s.cfg.Clock(), c, qid, id)
	} else {
		s.target.CancelConnect(id)
	}
	rest := s.carryOutLocked()
	if c != nil && qid == 0 {
		s.dropHolder(c)
		s.setTimer() // the bound of its drain may begin without an action
	}
	s.unlockAndCarryOut(rest)
}

// release unlocks mu and carries out the actions that the machine has since the last call.
func (s *Service) release() { s.unlockAndCarryOut(s.carryOutLocked()) }

// unlockAndCarryOut unlocks mu and carries out actions, in order: most of them call connections, which is not allowed
// with mu held.
func (s *Service) unlockAndCarryOut(actions []nvmeof.Action) {
	if len(actions) > 0 {
		s.setTimer() // there may be a bound, or an earlier one
	}
	conns := make([]Conn, len(actions))
	for i := range actions {
		conns[i] = s.conns[actions[i].Conn]
	}
	s.mu.Unlock()
	for i := range actions {
		a, c := &actions[i], conns[i]
		switch a.Kind {
		case nvmeof.ActionExpired:
			s.cfg.Events.KeepAliveExpired(a.Controller, time.Duration(a.IdleNS))
			continue
		case nvmeof.ActionOverdue:
			s.cfg.Events.Overdue(a.Controller, a.Reason, s.inFlight(a.Controller))
			continue
		case nvmeof.ActionFlush:
			for _, n := range a.SSDs {
				s.mu.Lock()
				u := s.ends.flushers[n]
				s.mu.Unlock()
				u.start()
			}
			continue
		case nvmeof.ActionConnected:
			s.connected(c, a.Conn, a.Connect)
			continue
		}
		if c == nil {
			continue // the connection has ended in the meantime
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
		case nvmeof.ActionStop:
			c.Stop()
		}
	}
}

// Apply changes the target's state. When it returns, no command of a namespace that was removed starts any more:
// connections judge new ones by the new namespaces, and those that wait are taken out. DrainDrive waits for those that
// a drive has.
func (s *Service) Apply(st nvmeof.State) {
	s.mu.Lock()
	gone := s.grantExtents(&st)
	s.target.Apply(st)
	s.release()
	s.revokeExtents(gone)
}

// SetClusterMap sets the map of the cluster that a subsystem belongs to: see nvmeof.Target.
func (s *Service) SetClusterMap(subNQN string, m nvme.ClusterMap) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.target.SetClusterMap(subNQN, m)
}

// Named reports whether the configuration names a host, and whether it names nobody.
func (s *Service) Named(hostNQN string) (named, nobody bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.target.Named(hostNQN)
}

// Connect executes a Connect command. If the reply says that it is held, Conn.Connected is called later.
func (s *Service) Connect(a nvmeof.ConnectArgs) nvmeof.ConnectReply {
	a.Lost = s.lost
	s.mu.Lock()
	r := s.target.Connect(s.cfg.Clock(), a)
	if r.Status.OK() && !r.Held && r.QID != 0 {
		s.join(r.Controller, s.conns[a.Conn].Share())
	}
	if r.Status.OK() && !r.Held && r.QID == 0 && !r.Controller.Discovery {
		s.hold(r.Controller)
	}
	s.release()
	if r.Held || r.Status.OK() && r.QID == 0 {
		s.rearm()
	}
	return r
}

// Admin executes an admin or fabrics command other than Connect. The target machine decides the reply. The service adds
// what the machine cannot do by itself: it takes the command that an Abort names out of its connection, and fills in
// how much of a key-value namespace is used. The caller executes the commands of one admin queue one after the other.
func (s *Service) Admin(a nvmeof.AdminArgs) nvmeof.Reply {
	a.Usage, a.Lost, a.Health = s.usage, s.lost, s.health
	s.mu.Lock()
	now := s.cfg.Clock()
	s.target.ExpireOne(now, a.Controller, s.seen) // otherwise a command of long ago would be a sign of life
	r := s.target.Admin(now, a)
	s.setLease(a.Controller) // the keep alive timeout may be shorter now
	var victim Conn
	if r.Abort {
		if id, ok := a.Controller.QueueConn(r.AbortSQID); ok {
			victim = s.conns[id]
		}
	}
	s.release()
	if r.Abort {
		r.Result = nvme.AbortNotDone
		if victim != nil && s.abort(a.Controller, victim, r.AbortSQID, r.AbortCID) {
			r.Result = 0
		}
	}
	if r.Used != nil { // without mu, because it asks the partition
		(*nvme.IdentifyNamespaceKV)(a.Data).SetNUSE(uint64(r.Used()))
	}
	if op := a.SQE.Opcode(); op == nvme.AdminSetFeatures || op == nvme.OpFabrics {
		s.rearm() // the keep alive timeout may be another, or run again since the controller is enabled
	}
	return r
}

// abort takes out the command that an Abort names, and reports whether it could: an I/O command that has not started,
// or a pending Asynchronous Event Request. victim is the connection of queue qid of c.
func (s *Service) abort(c *nvmeof.Controller, victim Conn, qid, cid uint16) bool {
	if qid != 0 {
		return victim.Abort(cid)
	}
	// An event may complete the request between the two steps, and then AbortEvent finds none in the slot. The slot
	// cannot be that of a later request: the admin commands of one controller are executed one after the other, and
	// that request would come after this Abort.
	slot, ok := victim.EventSlot(cid)
	if !ok {
		return false
	}
	s.mu.Lock()
	done := s.target.AbortEvent(c, slot)
	s.release()
	return done
}

// RecordErrors adds failed commands to a controller's Error Information log.
func (s *Service) RecordErrors(c *nvmeof.Controller, failed []nvmeof.Failed) {
	s.mu.Lock()
	c.RecordErrors(failed)
	s.mu.Unlock()
}

// health is the SMART log of a drive, or false if the drive says nothing.
func (s *Service) health(i int) (nvme.SMARTLog, bool) {
	all := s.SSDs()
	if i >= len(all) || all[i] == nil {
		return nvme.SMARTLog{}, false
	}
	h, ok := ssd.HealthOf(all[i].Device())
	return h.SMART, ok
}

// usage sums what a controller's host did. mu is held.
func (s *Service) usage(c *nvmeof.Controller) nvmeof.Usage {
	u := s.retired[c]
	for _, id := range c.Queues() {
		if conn := s.conns[id]; conn != nil {
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
func (s *Service) Conns() []Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Conn, 0, len(s.conns))
	for _, c := range s.conns {
		all = append(all, c)
	}
	return all
}

// Counts are the numbers of connections, controllers and hosts.
func (s *Service) Counts() (conns, controllers, hosts int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := map[string]bool{}
	all := s.target.Controllers()
	for _, c := range all {
		seen[c.HostNQN] = true
	}
	return len(s.conns), len(all), len(seen)
}

// Joined returns the hosts that have an association with a subsystem, with an I/O queue.
func (s *Service) Joined(subNQN string) map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	hosts := map[string]bool{}
	s.target.Joined(subNQN, func(h string) { hosts[h] = true })
	return hosts
}

// rearm sets the timer after a command that may have changed when the next keep alive timer runs out.
func (s *Service) rearm() {
	s.mu.Lock()
	s.setTimer()
	s.mu.Unlock()
}

// setTimer sets the timer to when the next keep alive timer may run out or bound may pass. mu is held.
func (s *Service) setTimer() {
	if at, ok := s.target.NextExpiry(); ok {
		s.timer.Reset(max(at-s.cfg.Clock(), int64(time.Millisecond)))
	}
}

// expire ends associations whose keep alive timers have run out.
func (s *Service) expire() {
	s.mu.Lock()
	s.target.Expire(s.cfg.Clock(), s.seen)
	s.setTimer()
	s.release()
}

// seen is when the host last sent something to any of the controller's queues. mu is held.
func (s *Service) seen(c *nvmeof.Controller) (ns int64) {
	now := s.cfg.Clock()
	for _, id := range c.Queues() {
		conn := s.conns[id]
		if conn == nil {
			continue
		}
		// If this process was stopped, its timers may run out before it reads the Keep Alives that have come meanwhile,
		// and it may read commands long after they have come.
		at := conn.ArrivedNS(now)
		if at == 0 {
			at = conn.SeenNS()
		}
		ns = max(ns, at)
	}
	return ns
}

// Close ends the timers. There must be no connections any more. Idempotent.
func (s *Service) Close() {
	s.timer.Close()
	s.ends.timer.Close()
}
