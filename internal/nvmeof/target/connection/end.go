package connection

import (
	"sync"
	"time"

	"jbofd/internal/fence"
	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/turn"
)

// teardown is the part of a connection's state that its end at the host's wish needs, and a Connect that is held.
type teardown struct {
	// connecting: a Connect command is being executed, or is held by the target machine.
	connecting bool
	// hostNQN and subNQN are the Connect's, for the log.
	hostNQN, subNQN string
	// leaving: the host has sent Disconnect, in slot. No more commands begin.
	leaving bool
	slot    int
	// answered: there is nothing more to say, and the connection is to be closed.
	answered bool
	// answerByNS is when Disconnect is answered whether or not everything is done.
	answerByNS int64
	// timer runs teardownTimer; nil until it is needed.
	timer turn.Timer

	// lifeMu is held while the outcome of a held Connect is taken, and before Conn.mu. released: it comes too late.
	lifeMu   sync.Mutex
	released bool
}

// lingerFor is how long a host may take to close a connection to which we have nothing more to say.
const lingerFor = time.Second

// Share implements target.Conn.
func (c *Conn) Share() *fence.Share { return &c.share }

// Lost implements target.Conn.
func (c *Conn) Lost() bool { return c.t.Lost() }

// ArrivedNS implements target.Conn.
func (c *Conn) ArrivedNS(nowNS int64) int64 { return c.t.ArrivedNS(nowNS) }

// Connecting reports that a Connect command is being executed: it takes as long as the target machine wants. The lock
// is held.
func (c *Conn) Connecting() bool { return c.teardown.connecting }

// begin counts a command that is about to go to a drive or partition; false: it must not. mu is held.
func (c *Conn) begin() bool { return !c.teardown.leaving && c.share.Begin() }

// end counts a command that has come back. mu is held.
func (c *Conn) end(s *Slot) {
	if s.detached {
		s.detached = false
		c.detached.Add(-1)
		return
	}
	c.endShare()
}

// endShare counts a command that has come back, or that can reach no device. mu is held.
func (c *Conn) endShare() {
	c.share.End()
	if c.teardown.leaving && !c.teardown.answered && c.share.InFlight() == 0 {
		c.teardown.timer.Reset(1) // the last one is answered before Disconnect is
	}
}

// Stop implements target.Conn: the controller is shut down. Commands that are in flight are answered when they end.
func (c *Conn) Stop() {
	// Executors have every command that has begun: one that is on its way to its executor could not be taken out, and
	// would wait for its tenant's cap.
	c.cfg.Batches.Handing.Lock()
	defer c.cfg.Batches.Handing.Unlock()
	c.mu.Lock()
	c.abortQueued()
	for i := range c.slots {
		// Its pass is stale: with its data it would be refused. A host that shuts down may never send that.
		if s := &c.slots[i]; s.fetching && !s.detached {
			s.detached = true
			c.detached.Add(1)
			c.endShare()
		}
	}
	c.mu.Unlock()
	c.t.Wake()
}

// abortQueued takes out the commands that executors have not started. mu is held.
func (c *Conn) abortQueued() {
	for i := range c.slots {
		if c.executing(i) {
			c.abort(i)
		}
	}
}

// Connected implements target.Conn.
func (c *Conn) Connected(r nvmeof.ConnectReply) bool {
	c.teardown.lifeMu.Lock()
	defer c.teardown.lifeMu.Unlock()
	if c.teardown.released {
		return false
	}
	if !r.Status.OK() {
		// The time for a Connect is over. A host that comes again does so with another connection.
		c.mu.Lock()
		c.closeAfterLinger()
		c.mu.Unlock()
	}
	c.connected(0, r) // there is one slot before Connect
	c.t.Wake()
	return true
}

// disconnect executes Disconnect in slot i, for which the machine has nothing more to do. It reports whether the
// connection is to be closed now; else teardownTimer will see to it.
func (c *Conn) disconnect(i int) (now bool) {
	c.mu.Lock()
	if c.teardown.leaving { // the first Disconnect is still to be answered, in its own slot
		if !c.closing {
			c.respond(i, nvme.CommandSequenceError, 0)
		}
		c.mu.Unlock()
		return false
	}
	c.makeTimer()
	c.teardown.leaving, c.teardown.slot, c.teardown.answerByNS = true, i, c.service.Clock()+int64(c.service.Quiesce())
	c.abortQueued()
	idle := c.share.InFlight() == 0
	if idle {
		c.teardown.answered = true
	} else {
		c.teardown.timer.Reset(int64(c.service.Quiesce()))
	}
	c.mu.Unlock()
	if idle {
		c.answerDisconnect(nvme.Success)
	}
	return idle
}

// answerDisconnect answers Disconnect. The queue's number is free before the host can know.
func (c *Conn) answerDisconnect(status nvme.Status) {
	if status.OK() {
		c.service.Disconnected(c.ctrl, c.qid, c.id)
	}
	c.mu.Lock()
	if !c.closing {
		c.respond(c.teardown.slot, status, 0)
	}
	c.mu.Unlock()
}

// teardownTimer is the timer's: it answers Disconnect, or closes the connection a while after the last answer.
func (c *Conn) teardownTimer() {
	c.mu.Lock()
	closing, answered := c.closing, c.teardown.answered
	status := nvme.Success
	if c.share.InFlight() > 0 {
		status = nvme.InternalError
	}
	late := c.service.Clock() >= c.teardown.answerByNS
	if closing || !answered && !status.OK() && !late {
		c.mu.Unlock()
		return
	}
	c.teardown.answered = true
	c.mu.Unlock()
	if answered {
		c.t.Shut("disconnected by the host")
		return
	}
	if !status.OK() {
		c.log.Warn("Disconnect: commands are still in flight", "transport", c.cfg.Name, "remote", c.cfg.Remote,
			"host", c.ctrl.HostNQN, "cntlid", c.ctrl.ID, "qid", c.qid, "in_flight", c.share.InFlight())
	}
	c.answerDisconnect(status)
	c.t.Wake()
	c.mu.Lock()
	c.closeAfterLinger()
	c.mu.Unlock()
}

// closeAfterLinger closes the connection unless the host does. mu is held.
func (c *Conn) closeAfterLinger() {
	c.makeTimer()
	c.teardown.answered = true
	c.teardown.timer.Reset(int64(lingerFor))
}

// makeTimer makes the timer if there is none. mu is held.
func (c *Conn) makeTimer() {
	if c.teardown.timer == nil {
		var err error
		c.teardown.timer, err = c.service.Env().NewTimer(turn.Coarse, c.teardownTimer)
		invariants.Check(err == nil, "connection: a coarse timer needs nothing of the system")
	}
}

// endTeardown ends what may still come to a connection that is being released.
func (c *Conn) endTeardown() {
	c.teardown.lifeMu.Lock()
	c.teardown.released = true
	c.teardown.lifeMu.Unlock()
	c.mu.Lock()
	timer := c.teardown.timer
	c.mu.Unlock()
	if timer != nil {
		timer.Close()
	}
}
