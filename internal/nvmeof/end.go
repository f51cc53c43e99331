package nvmeof

import (
	"slices"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/uuid"
)

// How a controller's I/O queues end. A reset (CC.EN cleared), a shutdown (CC.SHN set) and the end of the association
// are one protocol in three variants:
//
//	        fence            drained                                bound passed
//	reset      ──> RDY stays 1  ──> RDY 0                                CFS 1, until drained
//	shutdown   ──> SHST 01b     ──> drives flushed ──> SHST 10b          CFS 1, SHST stays 01b until it is done
//	drop       ──> ended        ──> Connects that wait go on             Connects that wait fail: Controller Busy
//
// Fencing raises the controller's epoch. The driver sees to it that no command of an older epoch starts any more,
// and calls Drained when none is in flight. A controller whose I/O queues were never connected in the current epoch
// has nothing to wait for.

const (
	// defaultQuiesceMS is Config.QuiesceMS if that is 0, and the default of limits.quiesce_timeout.
	defaultQuiesceMS = 6000
	// disabledIdleNS is how long the host of a controller may be silent that was reset or shut down. The keep alive
	// timer of such a controller does not run, so that a host may take its time before it enables the controller
	// again; but a host that has vanished must not leave its association behind for ever. Before the first enable the
	// timer runs, and this is the limit for hosts that want none.
	//
	// Source: NVMe Base 2.0, section 3.9 (the keep alive timer is active while CSTS.RDY is 1 and no shutdown occurs).
	disabledIdleNS = 120e9
	// maxHeld bounds the Connects that wait for the end of an earlier association, maxHeldPerHost those of one host
	// and subsystem: a host with many paths may come back on all of them at once.
	maxHeld, maxHeldPerHost = 256, 16
)

// shutdownPhase is how far a shutdown is.
type shutdownPhase uint8

const (
	shutdownNone     shutdownPhase = iota
	shutdownDraining               // SHST 01b: commands are in flight
	shutdownFlushing               // SHST 01b: the drives are being flushed
	shutdownFailed                 // SHST 01b, CFS 1: a drive could not be flushed; only a reset helps
	shutdownComplete               // SHST 10b
)

// ending is the part of a controller's state that its reset, shutdown and end need.
type ending struct {
	// epoch numbers the periods in which I/O queues may work, from 1. It is raised by fence only.
	epoch uint64
	// joined: an I/O queue was connected in this epoch.
	joined bool
	// draining: Drained of this epoch is awaited. Invariant: !joined while draining, since a controller takes no
	// I/O queues before its reset is complete.
	draining bool
	// resetting: CC.EN is 0 and CSTS.RDY still 1.
	resetting bool
	shutdown  shutdownPhase
	// flush numbers the flushes that were asked for, to tell the outcome of an earlier one.
	flush uint64
	// boundNS is when CFS is set, or for an association that has ended, when Connects are not held any more.
	// 0: no bound is running.
	boundNS int64
	// lostNS is when a Connect of the host, or a reset, first found that an I/O queue's connection had ended without
	// Disconnect although the association lives; 0: none has. A host that has lost one connection and gives the
	// association up may be back before the target sees the others end.
	lostNS int64
}

// hostKey names the associations of one host with one subsystem.
type hostKey struct {
	nqn string
	id  uuid.UUID
	sub string
}

func (c *Controller) key() hostKey { return hostKey{c.HostNQN, c.HostID, c.SubNQN} }

// Epoch numbers the periods in which the controller's I/O queues may work: a queue belongs to the one in which it was
// connected.
func (c *Controller) Epoch() uint64 { return c.end.epoch }

// Quiesce is the bound of a drain.
func (t *Target) Quiesce() time.Duration { return time.Duration(t.quiesceNS()) }

func (t *Target) quiesceNS() int64 { return int64(t.cfg.QuiesceMS) * 1e6 }

// fence lets nothing start any more that the controller's I/O queues have begun or will yet send.
func (c *Controller) fence() {
	if !c.end.joined {
		return // nothing of this epoch; what is older may still be draining
	}
	c.end.epoch++
	c.end.joined, c.end.draining = false, true
	c.t.act(Action{Kind: ActionFence, Controller: c, Epoch: c.end.epoch})
}

// setCC is a write to Controller Configuration (NVMe Base 2.0, section 3.1.3.5).
func (c *Controller) setCC(now int64, cc nvme.CC, lost func(ConnID) bool) nvme.Status {
	was := c.cc
	busy := c.end.resetting || c.end.shutdown == shutdownDraining || c.end.shutdown == shutdownFlushing
	if cc.EN() && !was.EN() && busy {
		// After a reset that is not complete RDY is still 1. A host that took that for its own enable would send
		// commands to a controller that has not been reset.
		return nvme.CommandSequenceError
	}
	c.cc = cc
	switch {
	case cc.EN() && !was.EN():
		c.enable()
	case !cc.EN() && was.EN():
		wasLost := c.lostQueue(lost) // the reset closes the queue, and then nobody can see that it was lost
		c.reset(now)
		if wasLost && c.end.draining && c.end.lostNS == 0 {
			c.end.lostNS = now
		}
	}
	if cc.SHN() != nvme.SHNNone && was.SHN() == nvme.SHNNone {
		c.shutDown(now)
	}
	return nvme.Success
}

// enable makes the controller ready if it can work as configured.
func (c *Controller) enable() {
	cc := c.cc
	if cc.MPS() != nvme.CCMPS4KiB || cc.AMS() != nvme.CCAMSRobin ||
		cc.CSS() != nvme.CCCSSNVM && cc.CSS() != nvme.CCCSSIOCS ||
		!c.Discovery && (cc.IOSQES() != nvme.CCIOSQES64 || cc.IOCQES() != nvme.CCIOCQES16) {
		c.csts |= nvme.CSTSCFS
		return
	}
	c.css, c.wasEnabled = cc.CSS(), true
	c.csts, c.end.shutdown = nvme.CSTSRDY, shutdownNone // a disabled controller can have been shut down
	c.table = c.view()
}

// reset disables the controller. Event requests are completed as aborted: the admin queue lives on, and would
// otherwise fill up with them reset by reset.
func (c *Controller) reset(now int64) {
	c.fence()
	for _, slot := range c.aers {
		c.t.act(Action{Kind: ActionComplete, Conn: c.Admin, Slot: slot, Status: nvme.AbortRequested})
	}
	c.aers = nil
	c.pending, c.masked = [events]bool{}, [events]bool{}
	credits := c.CreditState()
	c.features.init()
	c.ioQueues = c.t.cfg.MaxIOQueues
	c.closeQueues("controller reset", false)
	c.creditsChanged(credits)
	c.csts = c.csts.WithSHST(0)
	c.end.shutdown = shutdownNone
	if c.end.draining {
		c.end.resetting, c.end.boundNS = true, now+c.t.quiesceNS()
		return
	}
	c.resetDone()
}

// resetDone completes a reset: nothing that was sent before is in flight.
func (c *Controller) resetDone() {
	c.csts &^= nvme.CSTSRDY | nvme.CSTSCFS
	c.end.resetting = false
	if c.end.shutdown != shutdownDraining { // its bound runs on
		c.end.boundNS = 0
	}
}

// shutDown begins a shutdown. A normal and an abrupt one are the same: commands that the drives do not have yet are
// aborted, those that they have are waited for, and the drives are flushed.
//
// Source: NVMe Base 2.0, section 3.6.2.
func (c *Controller) shutDown(now int64) {
	if c.end.shutdown != shutdownNone {
		return // it takes a reset to begin another one
	}
	c.csts = c.csts.WithSHST(uint8(nvme.CSTSSHSTOccurring >> 2))
	c.end.shutdown, c.end.boundNS = shutdownDraining, now+2*c.t.quiesceNS()
	c.fence()
	for _, qid := range c.sortedQIDs() {
		if qid != 0 {
			c.t.act(Action{Kind: ActionStop, Conn: c.queues[qid]})
		}
	}
	if !c.end.draining {
		c.flushDrives()
	}
}

// flushDrives asks for a flush of the drives that the host's namespaces lie on.
func (c *Controller) flushDrives() {
	ssds := c.table.ssds()
	if len(ssds) == 0 {
		c.shutDownDone()
		return
	}
	c.end.flush++
	c.end.shutdown = shutdownFlushing
	c.t.act(Action{Kind: ActionFlush, Controller: c, SSDs: ssds, Flush: c.end.flush})
}

// shutDownDone completes a shutdown. CFS stays if the bound has passed before: a reset clears it.
func (c *Controller) shutDownDone() {
	c.csts = c.csts.WithSHST(uint8(nvme.CSTSSHSTComplete >> 2))
	c.end.shutdown = shutdownComplete
	if !c.end.resetting {
		c.end.boundNS = 0
	}
}

// Drained says that no command is in flight that was sent to the controller's I/O queues before it entered epoch.
func (t *Target) Drained(now int64, c *Controller, epoch uint64) {
	if !c.end.draining || epoch != c.end.epoch {
		return
	}
	c.end.draining = false
	if c.gone {
		t.ended = slices.DeleteFunc(t.ended, func(e *Controller) bool { return e == c })
		t.releaseBudget(c)
		t.admitHeld(now, c.key())
		return
	}
	if c.end.resetting {
		c.resetDone()
	}
	if c.end.shutdown == shutdownDraining {
		c.flushDrives()
	}
	t.lostEnded(now, c)
}

// Flushed is the outcome of an ActionFlush: ok says that every drive was flushed.
func (t *Target) Flushed(c *Controller, flush uint64, ok bool) {
	switch {
	case c.gone || c.end.shutdown != shutdownFlushing || flush != c.end.flush:
	case ok:
		c.shutDownDone()
	default:
		c.csts |= nvme.CSTSCFS
		c.end.shutdown = shutdownFailed
		if !c.end.resetting {
			c.end.boundNS = 0
		}
	}
}

// overdue is what happens when the bound of a reset or shutdown has passed.
func (c *Controller) overdue() {
	what := "shutdown: a drive is still being flushed"
	switch {
	case c.end.resetting:
		what = "controller reset: commands are still in flight"
	case c.end.shutdown == shutdownDraining:
		what = "shutdown: commands are still in flight"
	}
	c.csts |= nvme.CSTSCFS
	c.end.boundNS = 0
	c.t.act(Action{Kind: ActionOverdue, Controller: c, Reason: what})
}

// drop ends an association.
func (t *Target) drop(c *Controller, reason string) {
	if c.gone {
		return
	}
	c.forget()
	c.fence()
	c.closeQueues(reason, true)
	if !c.end.draining {
		t.releaseBudget(c)
		return
	}
	c.end.boundNS = 0 // begins when the driver next tells the time, which NextExpiry asks for
	t.ended = append(t.ended, c)
}

// releaseBudget gives back the controller's place. One whose commands are in flight keeps it.
func (t *Target) releaseBudget(c *Controller) {
	if !c.Discovery {
		t.budgets.release(c)
	}
}

// Stop ends all associations and lets no host in any more.
func (t *Target) Stop(reason string) {
	t.stopped = true
	for _, c := range t.Controllers() {
		t.drop(c, reason)
	}
	for _, h := range t.held {
		t.answerHeld(h, busy("stopping", "the target stops"))
	}
	t.held = nil
}

// heldConnect is a Connect of an admin queue that waits for the end of the host's earlier associations.
type heldConnect struct {
	args ConnectArgs
	sqe  nvme.SQE
	data nvme.ConnectData
	key  hostKey
	// untilNS is when it fails.
	untilNS int64
}

// hold decides whether a Connect that nothing else speaks against must wait, because commands of the host's ended
// associations are in flight, or of I/O queues whose connections were lost: they could overwrite what the host writes
// next. Associations of the host that live, over other paths, are not concerned. ok is false if the Connect need not
// wait; else r says that it waits, or that the host is to come again later.
func (t *Target) hold(now int64, a ConnectArgs, key hostKey) (r ConnectReply, ok bool) {
	var until int64
	for _, c := range slices.Clone(t.subControllers(key.sub)) {
		switch {
		case c.key() != key || a.Lost == nil:
		case a.Lost(c.Admin):
			// The host has closed the connection before it sent this Connect; the driver has not yet come to
			// say so.
			t.drop(c, "the admin queue's connection was lost")
		case !c.lostQueue(a.Lost) && !(c.end.draining && c.end.lostNS != 0): // a reset closes a lost queue, too
			c.end.lostNS = 0
		default:
			if c.end.lostNS == 0 {
				c.end.lostNS = now
			}
			ok, until = true, max(until, c.end.lostNS+t.quiesceNS())
		}
	}
	for _, c := range t.ended {
		if c.key() != key {
			continue
		}
		if ok = true; c.end.boundNS == 0 {
			c.end.boundNS = now + t.quiesceNS()
		}
		until = max(until, c.end.boundNS)
	}
	if !ok {
		return r, false
	}
	mine := 0
	for _, h := range t.held {
		if h.key == key {
			mine++
		}
	}
	if until <= now || len(t.held) >= maxHeld || mine >= maxHeldPerHost {
		return busyDraining(), true
	}
	h := &heldConnect{args: a, sqe: *a.SQE, data: *a.Data, key: key, untilNS: until}
	h.args.SQE, h.args.Data = &h.sqe, &h.data
	t.held = append(t.held, h)
	return ConnectReply{Held: true}, true
}

// lostQueue reports whether the connection of an I/O queue has ended whose commands may be in flight: the driver says
// Disconnected when they are not.
func (c *Controller) lostQueue(lost func(ConnID) bool) bool {
	for qid, conn := range c.queues {
		if qid != 0 && lost != nil && lost(conn) {
			return true
		}
	}
	return false
}

// lostEnded lets the Connects that wait for a lost I/O queue of c be judged again, for a queue of c has ended. If none
// waits, the bound of this loss is over: the next one has its own.
func (t *Target) lostEnded(now int64, c *Controller) {
	if c.end.lostNS == 0 {
		return
	}
	t.admitHeld(now, c.key())
	if !slices.ContainsFunc(t.held, func(h *heldConnect) bool { return h.key == c.key() }) {
		c.end.lostNS = 0
	}
}

func busyDraining() ConnectReply {
	return busy("draining", "commands of an earlier association of this host are still in flight")
}

// subControllers are the controllers of a subsystem.
func (t *Target) subControllers(nqn string) []*Controller {
	if s := t.subs[nqn]; s != nil {
		return s.ctrls
	}
	return nil
}

// admitHeld lets the Connects of a host go on that have waited, if nothing of its ended associations is in flight.
func (t *Target) admitHeld(now int64, key hostKey) {
	if slices.ContainsFunc(t.ended, func(c *Controller) bool { return c.key() == key }) {
		return
	}
	var mine []*heldConnect
	t.held = slices.DeleteFunc(t.held, func(h *heldConnect) bool {
		if h.key != key {
			return false
		}
		mine = append(mine, h)
		return true
	})
	for _, h := range mine {
		// It is judged again: the configuration may have changed.
		if r := t.Connect(now, h.args); !r.Held {
			t.answerHeld(h, r)
		}
	}
}

func (t *Target) answerHeld(h *heldConnect, r ConnectReply) {
	t.act(Action{Kind: ActionConnected, Conn: h.args.Conn, Connect: &r})
}

// CancelConnect says that the connection of a Connect that is held is gone.
func (t *Target) CancelConnect(conn ConnID) {
	t.held = slices.DeleteFunc(t.held, func(h *heldConnect) bool { return h.args.Conn == conn })
}

// nextBound returns the earliest time at which a bound passes; 0: one is to begin at once.
func (t *Target) nextBound() (at int64, ok bool) {
	note := func(ns int64) {
		if !ok || ns < at {
			at, ok = ns, true
		}
	}
	for _, c := range t.ctrls {
		if c.end.boundNS != 0 {
			note(c.end.boundNS)
		}
	}
	for _, c := range t.ended {
		if !c.overdueReported {
			note(c.end.boundNS)
		}
	}
	for _, h := range t.held {
		note(h.untilNS)
	}
	return at, ok
}

// passBounds does what is to be done at bounds that have passed.
func (t *Target) passBounds(now int64) {
	for _, c := range t.Controllers() {
		if c.end.boundNS != 0 && c.end.boundNS <= now {
			c.overdue()
		}
	}
	for _, c := range t.ended {
		switch {
		case c.end.boundNS == 0:
			c.end.boundNS = now + t.quiesceNS()
		case c.end.boundNS <= now && !c.overdueReported:
			c.overdueReported = true
			t.act(Action{Kind: ActionOverdue, Controller: c,
				Reason: "end of the association: commands are still in flight"})
		}
	}
	t.held = slices.DeleteFunc(t.held, func(h *heldConnect) bool {
		if h.untilNS > now {
			return false
		}
		t.answerHeld(h, busyDraining())
		return true
	})
}
