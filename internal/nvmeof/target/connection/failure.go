package connection

import (
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

// maxFailures is how many failed commands are remembered between two calls of RecordFailures.
const maxFailures = 64

// noteFailure counts a failed command and remembers it for the Error Information
// log. mu is held.
func (c *Conn) noteFailure(i int, status nvme.Status) {
	if c.errors == nil {
		return // not connected yet
	}
	c.errors.Inc(status.SCT(), status.SC())
	if c := status.Code(); c == nvme.KeyDoesNotExist || c == nvme.KeyExists {
		return // an answer to the host's question, and no error
	}
	if len(c.failures) == cap(c.failures) {
		return // more at once than the log can hold
	}
	c.failures = append(c.failures, c.failure(i, status))
}

// failure describes the command in slot i, which has failed. mu is held.
func (c *Conn) failure(i int, status nvme.Status) nvmeof.Failed {
	m := c.m.Slot(i)
	f := nvmeof.Failed{QID: c.qid, CID: m.SQE.CID(), Opcode: m.SQE.Opcode(), NSID: m.SQE.NSID(), Status: status}
	if ns := m.Plan.Namespace; ns != nil && ns.CSI == nvme.CSIKV {
		f.CSI = nvme.CSIKV
	} else if ns != nil {
		f.LBA = m.SQE.SLBA()
	}
	return f
}

// noteUnreported remembers a write that has failed after its connection had ended, as after a controller reset: its
// host cannot be told. mu is held.
func (c *Conn) noteUnreported(i int) {
	if c.unreported == 0 {
		c.firstUnreported = c.failure(i, c.slots[i].cmd.Status)
	}
	c.unreported++
}

// reportUnreported writes what noteUnreported has remembered to metrics, the log and, if the controller lives, its
// Error Information log, when nothing is in flight any more: one line for each connection.
func (c *Conn) reportUnreported() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unreported == 0 {
		return
	}
	c.RecordFailuresLocked()
	c.tel.UnreportedWriteFailures(c.unreported)
	f := &c.firstUnreported
	c.log.Warn("writes have failed after their connection had ended: no host was told", "transport", c.cfg.Name,
		"remote", c.cfg.Remote, "host", c.ctrl.HostNQN, "subsystem", c.ctrl.SubNQN, "cntlid", c.ctrl.ID, "qid", c.qid,
		"writes", c.unreported, "first_nsid", f.NSID, "first_lba", uint64(f.LBA), "first_opcode", f.Opcode)
}

// Failed implements qpair.Handler.
func (c *Conn) Failed(i int, status nvme.Status) {
	c.noteFailure(i, status)
	c.slots[i].noted = true // a later status of this command is only a consequence
}

// RecordFailures passes failed commands to the controller's log. It is called before their responses are sent, so that
// a host that reads the log after a response finds the entry.
func (c *Conn) RecordFailures() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.RecordFailuresLocked()
}

// RecordFailuresLocked is RecordFailures with the lock held.
func (c *Conn) RecordFailuresLocked() {
	if len(c.failures) > 0 {
		c.service.RecordErrors(c.ctrl, c.failures)
		c.failures = c.failures[:0]
	}
}
