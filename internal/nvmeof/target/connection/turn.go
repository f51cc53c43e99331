package connection

import "jbofd/internal/nvmeof/target"

// What every transport does around its machine, so that the lab runs what the daemon runs. A transport whose
// connections have an outbox and batches of their own calls
//
//	BeginReceive ── the machine gets what has arrived ── EndReceive ── send
//	Empty ── send                                        when Transport.Wake was called
//
// One whose connections share them, with the lock, calls EmptyLocked.

// BeginReceive begins a turn in which the machine gets what has arrived by now. It takes the lock, which EndReceive
// releases. By one goroutine at a time.
func (c *Conn) BeginReceive(now int64) {
	c.cfg.Batches.Handing.Lock()
	c.NoteActivity(now)
	c.cfg.Outbox.Claim() // EndReceive empties it
	c.mu.Lock()
}

// EndReceive ends the turn: executors get the commands that have arrived, admin commands are executed, and what is done
// by now is answered. The caller then sends the responses.
func (c *Conn) EndReceive() {
	c.mu.Unlock()
	c.cfg.Batches.HandOver()
	c.cfg.Batches.Handing.Unlock()
	if c.AdminPending() {
		c.ExecuteAdmin()
	}
	c.Empty()
	c.RecordFailures() // before the host sees a failed response and reads the log page
}

// Blocked reports that the machine, which has stopped before a command, would stop there again until Transport.Resume.
// The lock is held.
func (c *Conn) Blocked() bool { return c.memoryWanted() || c.t.Paused() || c.m.Full() }

// Empty processes the commands that executors have put into the outbox: it answers those that are done and requests the
// data of those that want it, until the outbox is empty. The outbox is the connection's own. The caller then sends the
// responses.
func (c *Conn) Empty() {
	o := c.cfg.Outbox
	for {
		if s := o.take(); s != nil {
			if back := c.processEvents(s); back != nil {
				c.returnCommands(back)
			}
		}
		if o.leave() {
			return
		}
	}
}

// EmptyDone is Empty for a goroutine that may hold Handing of other connections, and so must not wait for that of this
// one: commands that are to go back to their executors stay in the outbox. It reports whether there are any: then Empty
// must be called by another goroutine.
//
// hot: 0 allocs, if none stay
func (c *Conn) EmptyDone() (left bool) {
	o := c.cfg.Outbox
	var back []*Slot
	for {
		if s := o.take(); s != nil {
			back = append(back, c.processEvents(s)...)
		}
		if o.leave() {
			break
		}
	}
	for _, s := range back {
		o.push(s, eventNeedData)
	}
	return len(back) > 0
}

// processEvents processes s and the commands linked behind it, and returns those that are to go back to their
// executors. They are few: memory was short, or the connection is closing.
func (c *Conn) processEvents(s *Slot) (back []*Slot) {
	now := c.service.Clock()
	c.mu.Lock()
	defer c.mu.Unlock()
	for s != nil {
		next := s.next // the slot of an answered command may be used again at once
		if c.processEvent(s, now) {
			back = append(back, s)
		}
		s = next
	}
	c.flushCounts()
	return back
}

// returnCommands calls Batch.DataReady for commands that need no data from the host although their executors have
// called Port.NeedData, and submits the batches. processEvents cannot do so itself, because a batch needs Handing,
// which must be locked before mu.
func (c *Conn) returnCommands(slots []*Slot) {
	c.cfg.Batches.Handing.Lock()
	defer c.cfg.Batches.Handing.Unlock()
	c.mu.Lock()
	for _, s := range slots {
		c.returnToExecutor(s)
	}
	c.mu.Unlock()
	c.cfg.Batches.HandOver()
}

// EmptyLocked is Empty for an outbox that connections share. The lock is held, which they share as well and which also
// guards their batches. EmptyLocked calls finished for the connection of each command and reports whether there were
// any. The caller then calls Batches.HandOver.
//
// hot: 0 allocs
func (o *Outbox) EmptyLocked(f *target.Service, finished func(*Conn)) (any bool) {
	for {
		if s := o.take(); s != nil {
			any = true
			now := f.Clock()
			for s != nil {
				next := s.next
				c := s.cmd.Port.(*Conn)
				if c.processEvent(s, now) {
					c.returnToExecutor(s)
				}
				if next == nil || next.cmd.Port != s.cmd.Port {
					c.flushCounts()
				}
				finished(c)
				s = next
			}
		}
		if o.leave() {
			return any
		}
	}
}
