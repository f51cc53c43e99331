package target

import (
	"errors"
	"maps"
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
type ends struct {
	// holders are those of controllers that have or had I/O queues, raised those whose drain is awaited, oldest first.
	// Both are guarded by Service.mu.
	holders map[*nvmeof.Controller]*fence.Holder
	raised  []raisedFence
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

func (f *Service) initEnds() {
	f.ends.holders = map[*nvmeof.Controller]*fence.Holder{}
	f.ends.flushers = newFlushers(f)
	var err error
	f.ends.timer, err = f.cfg.Env.NewTimer(turn.Coarse, f.checkDrains)
	invariants.Check(err == nil, "target: a coarse timer needs nothing of the system")
}

// scheduleCheck lets look run. From any goroutine, with any locks held.
func (f *Service) scheduleCheck() { f.ends.timer.Reset(1) }

// checkDrains tells the machine what has drained and what was flushed.
func (f *Service) checkDrains() {
	f.ends.mu.Lock()
	flushed := f.ends.flushed
	f.ends.flushed = nil
	f.ends.mu.Unlock()
	f.mu.Lock()
	for _, u := range flushed {
		u.finished()
	}
	f.release()
	for _, u := range flushed {
		u.start()
	}
}

// join makes share one of an I/O queue's controller. mu is held.
func (f *Service) join(c *nvmeof.Controller, share *fence.Share) {
	h := f.ends.holders[c]
	if h == nil {
		h = fence.NewHolder(f.scheduleCheck)
		for h.Epoch() < c.Epoch() { // the queues of earlier epochs are gone, and their holder with them
			h.Raise()
		}
		f.ends.holders[c] = h
	}
	invariants.Check(h.Epoch() == c.Epoch(), "target: a queue joins an epoch that is not the controller's")
	h.Join(share)
}

// carryOutLocked carries out those of the machine's actions that must be carried out under the lock, tells the machine
// of drains, and returns the other actions. mu is held.
func (f *Service) carryOutLocked() (rest []nvmeof.Action) {
	for {
		actions := f.target.TakeActions()
		for i := range actions {
			switch a := &actions[i]; a.Kind {
			case nvmeof.ActionFence:
				epoch := f.ends.holders[a.Controller].Raise()
				invariants.Check(epoch == a.Epoch, "target: the machine's epoch and the fence's differ")
				f.ends.raised = append(f.ends.raised, raisedFence{a.Controller, epoch})
			case nvmeof.ActionFlush:
				f.wantFlush(a) // in the machine's order: of a controller's flushes the latest counts
			}
		}
		rest = append(rest, actions...)
		if !f.takeDrained() && len(actions) == 0 {
			return rest
		}
	}
}

// takeDrained tells the machine of what has drained, and reports whether anything has. mu is held.
func (f *Service) takeDrained() bool {
	keep := f.ends.raised[:0]
	var drained []raisedFence
	for _, r := range f.ends.raised {
		if f.ends.holders[r.ctrl].Drained(r.epoch) {
			drained = append(drained, r)
		} else {
			keep = append(keep, r)
		}
	}
	clear(f.ends.raised[len(keep):])
	f.ends.raised = keep
	for _, r := range drained {
		if _, alive := r.ctrl.QueueConn(0); !alive {
			delete(f.ends.holders, r.ctrl)
		}
		f.target.Drained(f.cfg.Clock(), r.ctrl, r.epoch)
	}
	return len(drained) > 0
}

// dropHolder drops the holder of a controller whose admin queue is gone, unless its drain is awaited. mu is held.
func (f *Service) dropHolder(c *nvmeof.Controller) {
	for _, r := range f.ends.raised {
		if r.ctrl == c {
			return
		}
	}
	delete(f.ends.holders, c)
}

// inFlight counts the commands that an end of c waits for.
func (f *Service) inFlight(c *nvmeof.Controller) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if h := f.ends.holders[c]; h != nil {
		return h.InFlight(c.Epoch())
	}
	return 0
}

// lost implements nvmeof.ConnectArgs.Lost. mu is held.
func (f *Service) lost(id nvmeof.ConnID) bool {
	c := f.conns[id]
	return c != nil && c.Lost()
}

// connected hands the outcome of a Connect that was held to its connection.
func (f *Service) connected(c Conn, id nvmeof.ConnID, r *nvmeof.ConnectReply) {
	if c != nil && c.Connected(*r) {
		return
	}
	if r.Controller != nil {
		f.Disconnected(r.Controller, r.QID, id)
	}
}

// Disconnected says that a connection serves its queue no more, so that the host may connect the queue's number again.
// The connection itself may live on for a while; nothing of it may be in flight if it is an I/O queue.
func (f *Service) Disconnected(c *nvmeof.Controller, qid uint16, id nvmeof.ConnID) {
	f.mu.Lock()
	f.target.Disconnected(f.cfg.Clock(), c, qid, id)
	f.setTimer()
	f.release()
}

// Stop ends all associations and lets no host in any more. Commands that drives have take their course; the transports
// wait for them when they close the connections.
func (f *Service) Stop(reason string) {
	f.mu.Lock()
	f.target.Stop(reason)
	f.release()
}

// Quiesce bounds how long an end waits for commands that the drives have.
func (f *Service) Quiesce() time.Duration { return f.target.Quiesce() }

// grantExtents lets the namespaces of s hold their extents, and returns the holders of those that are not used any
// more. Namespaces are immutable once published, so s gets copies. mu is held.
func (f *Service) grantExtents(s *nvmeof.State) (gone map[extent]*fence.Holder) {
	gone, f.ends.extents = f.ends.extents, map[extent]*fence.Holder{}
	s.Subsystems = slices.Clone(s.Subsystems)
	for i := range s.Subsystems {
		sub := &s.Subsystems[i]
		sub.Namespaces = slices.Clone(sub.Namespaces)
		for k, ns := range sub.Namespaces {
			e := extent{ns.SSD, ns.OffsetBytes, ns.UUID}
			h := f.ends.extents[e]
			if h == nil {
				if h = gone[e]; h == nil {
					h = fence.NewHolder(func() {})
				}
				f.ends.extents[e] = h
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
func (f *Service) revokeExtents(gone map[extent]*fence.Holder) {
	for _, h := range gone {
		h.Raise()
	}
	for i, d := range f.cfg.SSDs {
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
func (f *Service) DrainDrive(d *drive.Drive, stop <-chan struct{}) error {
	quiet, late := d.Quiesce(), f.cfg.Clock()+int64(drainDriveFor)
	for !f.cfg.Env.Wait(quiet, stopEvery) {
		select {
		case <-stop:
			return ErrStopped
		default:
		}
		if f.cfg.Clock() >= late {
			return ErrInFlight
		}
	}
	return nil
}
