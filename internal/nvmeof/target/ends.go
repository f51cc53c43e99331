package target

import (
	"errors"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"jbofd/internal/drive"
	"jbofd/internal/fence"
	"jbofd/internal/invariants"
	"jbofd/internal/nvmeof"
	"jbofd/internal/turn"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// ends carries out what the machine asks for when I/O queues end: fences, drains and flushes. docs/ends.md has the
// time lines.
//
//	ActionFence ──> Holder.Raise ──> [shares reach zero] ──> Target.Drained
//	ActionFlush ──> the flusher of each drive ──> [all done] ──> Target.Flushed
//	a user finds the lease over ──> Service.renew ──> Target.ExpireOne ──> SetLease or ActionFence
type ends struct {
	// holders are those of controllers, but for those of discovery, raised those whose drain is awaited, oldest first.
	// Both are guarded by Service.mu.
	holders map[*nvmeof.Controller]*fence.Holder
	raised  []raisedFence
	// later are actions that renew could not carry out, because its caller held locks. Guarded by Service.mu.
	later []nvmeof.Action
	// extents are the holders of the extents that namespaces are published on. Guarded by Service.mu.
	extents map[extent]*fence.Holder
	// timer runs Service.checkDrains. Any goroutine may set it, with any locks held.
	timer turn.Timer
	// flushers are the drives', nil where there is no drive.
	flushers []*flusher

	// mu guards flushed and is a leaf: drives take it while they work.
	mu      sync.Mutex
	flushed []*flusher // those whose IO is done
}

// extent is what a namespace lies on.
type extent struct {
	ssd         int
	offsetBytes units.DriveOffset
	id          uuid.UUID
}

type raisedFence struct {
	ctrl  *nvmeof.Controller
	epoch uint64
}

func (s *Service) initEnds() {
	s.ends.holders = map[*nvmeof.Controller]*fence.Holder{}
	s.ends.flushers = newFlushers(s)
	var err error
	s.ends.timer, err = s.cfg.Env.NewTimer(turn.Coarse, s.checkDrains)
	invariants.Check(err == nil, "target: a coarse timer needs nothing of the system")
}

// scheduleCheck lets look run. From any goroutine, with any locks held.
func (s *Service) scheduleCheck() { s.ends.timer.Reset(1) }

// checkDrains tells the machine which flushes have ended and lets it look for controllers whose commands have drained.
// Then it starts the next flush of each drive for the shutdowns that came meanwhile.
func (s *Service) checkDrains() {
	s.ends.mu.Lock()
	flushed := s.ends.flushed
	s.ends.flushed = nil
	s.ends.mu.Unlock()
	s.mu.Lock()
	for _, u := range flushed {
		u.finished()
	}
	s.release()
	for _, u := range flushed {
		u.start()
	}
}

// hold makes the holder of a new controller. mu is held.
func (s *Service) hold(c *nvmeof.Controller) {
	h := fence.NewHolder(s.scheduleCheck)
	h.Lease(func() { s.renew(c) })
	s.ends.holders[c] = h
	s.setLease(c)
}

// join makes share one of an I/O queue's controller. mu is held.
func (s *Service) join(c *nvmeof.Controller, share *fence.Share) {
	h := s.ends.holders[c]
	invariants.Check(h.Epoch() == c.Epoch(), "target: a queue joins an epoch that is not the controller's")
	h.Join(share)
}

// Holder returns what stands for a controller's right to make requests; nil for discovery, which makes none, and after
// the end of the association.
func (s *Service) Holder(c *nvmeof.Controller) *fence.Holder {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ends.holders[c]
}

// setLease makes the lease of c's holder what c's keep alive timer says. mu is held.
func (s *Service) setLease(c *nvmeof.Controller) {
	h := s.ends.holders[c]
	if h == nil {
		return
	}
	until := c.ExpiryNS()
	if _, alive := c.QueueConn(0); until == 0 || !alive {
		until = math.MaxInt64
	}
	h.SetLease(until)
}

// renew renews or ends an association past its lease: its host may be alive, for the machine hears of I/O commands only
// now. Connections and drives call it with their locks held, so of the actions it carries out the fence only.
func (s *Service) renew(c *nvmeof.Controller) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.target.ExpireOne(s.cfg.Clock(), c, s.seen)
	s.ends.later = s.carryOutLocked()
	s.setLease(c)
	if len(s.ends.later) > 0 {
		s.scheduleCheck()
	}
}

// carryOutLocked carries out those of the machine's actions that must be carried out under the lock, tells the machine
// of drains, and returns the other actions. mu is held.
func (s *Service) carryOutLocked() (rest []nvmeof.Action) {
	rest, s.ends.later = s.ends.later, nil
	for {
		actions := s.target.TakeActions()
		for i := range actions {
			switch a := &actions[i]; a.Kind {
			case nvmeof.ActionFence:
				epoch := s.ends.holders[a.Controller].Raise()
				invariants.Check(epoch == a.Epoch, "target: the machine's epoch and the fence's differ")
				s.ends.raised = append(s.ends.raised, raisedFence{a.Controller, epoch})
			case nvmeof.ActionConnected:
				if a.Connect.Status.OK() {
					s.hold(a.Connect.Controller)
				}
			case nvmeof.ActionFlush:
				s.wantFlush(a) // in the machine's order: of a controller's flushes the latest counts
			}
		}
		rest = append(rest, actions...)
		if !s.takeDrained() && len(actions) == 0 {
			return rest
		}
	}
}

// takeDrained tells the machine of what has drained, and reports whether anything has. mu is held.
func (s *Service) takeDrained() bool {
	keep := s.ends.raised[:0]
	var drained []raisedFence
	for _, r := range s.ends.raised {
		if s.ends.holders[r.ctrl].Drained(r.epoch) {
			drained = append(drained, r)
		} else {
			keep = append(keep, r)
		}
	}
	clear(s.ends.raised[len(keep):])
	s.ends.raised = keep
	for _, r := range drained {
		if _, alive := r.ctrl.QueueConn(0); !alive {
			delete(s.ends.holders, r.ctrl)
		}
		s.target.Drained(s.cfg.Clock(), r.ctrl, r.epoch)
	}
	return len(drained) > 0
}

// dropHolder drops the holder of a controller whose admin queue is gone, unless its drain is awaited. mu is held.
func (s *Service) dropHolder(c *nvmeof.Controller) {
	for _, r := range s.ends.raised {
		if r.ctrl == c {
			return
		}
	}
	delete(s.ends.holders, c)
}

// inFlight counts the commands that an end of c waits for.
func (s *Service) inFlight(c *nvmeof.Controller) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.ends.holders[c]; h != nil {
		return h.InFlight(c.Epoch())
	}
	return 0
}

// lost implements nvmeof.ConnectArgs.Lost. mu is held.
func (s *Service) lost(id nvmeof.ConnID) bool {
	c := s.conns[id]
	return c != nil && c.Lost()
}

// connected hands the outcome of a Connect that was held to its connection.
func (s *Service) connected(c Conn, id nvmeof.ConnID, r *nvmeof.ConnectReply) {
	if c != nil && c.Connected(*r) {
		return
	}
	if r.Controller != nil {
		s.Disconnected(r.Controller, r.QID, id)
	}
}

// Disconnected says that a connection serves its queue no more, so that the host may connect the queue's number again.
// The connection itself may live on for a while; nothing of it may be in flight if it is an I/O queue.
func (s *Service) Disconnected(c *nvmeof.Controller, qid uint16, id nvmeof.ConnID) {
	s.mu.Lock()
	s.target.Disconnected(s.cfg.Clock(), c, qid, id)
	s.setTimer()
	rest := s.carryOutLocked()
	if qid == 0 {
		s.dropHolder(c)
	}
	s.unlockAndCarryOut(rest)
}

// Stop ends all associations and lets no host in any more. Commands that drives have run to completion; the transports
// wait for them when they close the connections.
func (s *Service) Stop(reason string) {
	s.mu.Lock()
	s.target.Stop(reason)
	s.release()
}

// Quiesce bounds how long an end waits for commands that the drives have.
func (s *Service) Quiesce() time.Duration { return s.target.Quiesce() }

// grantExtents lets the namespaces of st hold their extents, and returns the holders of those that are not used any
// more. Namespaces are immutable once published, so st gets copies. mu is held.
func (s *Service) grantExtents(st *nvmeof.State) (gone map[extent]*fence.Holder) {
	gone, s.ends.extents = s.ends.extents, map[extent]*fence.Holder{}
	st.Subsystems = slices.Clone(st.Subsystems)
	for i := range st.Subsystems {
		sub := &st.Subsystems[i]
		sub.Namespaces = slices.Clone(sub.Namespaces)
		for k, ns := range sub.Namespaces {
			e := extent{ns.SSD, ns.OffsetBytes, ns.UUID}
			h := s.ends.extents[e]
			if h == nil {
				if h = gone[e]; h == nil {
					h = fence.NewHolder(func() {})
				}
				s.ends.extents[e] = h
				delete(gone, e)
			}
			granted := *ns
			granted.Extent = h.Pass()
			sub.Namespaces[k] = &granted
		}
	}
	return gone
}

// revokeExtents ends the right to use extents. It takes out the commands that wait, so that DrainDrive does not have to
// wait for a tenant's cap.
func (s *Service) revokeExtents(gone map[extent]*fence.Holder) {
	for _, h := range gone {
		h.Raise()
	}
	for i, d := range s.SSDs() {
		if d != nil && slices.ContainsFunc(slices.Collect(maps.Keys(gone)), func(e extent) bool { return e.ssd == i }) {
			d.AbortStale()
		}
	}
}

// Errors of DrainDrive.
var (
	// ErrInFlight: the drive still has commands after the bound.
	ErrInFlight = errors.New("commands that hosts sent before are still in flight; try again")
	// ErrStopped: the caller's channel was closed.
	ErrStopped = errors.New("stopped before the drive was ready for another use")
)

const (
	// drainDriveFor bounds DrainDrive.
	drainDriveFor = 10 * time.Second
	// stopEvery is how long DrainDrive may take to see that it is to stop.
	stopEvery = 10 * time.Millisecond
)

// DrainDrive waits until no command is in flight at a drive that was sent before the latest Apply, for 10 s at most or
// until stop is closed. Only after that may an extent that Apply has revoked be used for something else.
//
// Errors: ErrInFlight, ErrStopped.
func (s *Service) DrainDrive(d *drive.Drive, stop <-chan struct{}) error {
	quiet, late := d.Quiesce(), s.cfg.Clock()+int64(drainDriveFor)
	for !s.cfg.Env.Wait(quiet, stopEvery) {
		select {
		case <-stop:
			return ErrStopped
		default:
		}
		if s.cfg.Clock() >= late {
			return ErrInFlight
		}
	}
	return nil
}
