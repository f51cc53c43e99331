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
	m := c.m.Slot(i)
	f := nvmeof.Failed{QID: c.qid, CID: m.SQE.CID(), Opcode: m.SQE.Opcode(), NSID: m.SQE.NSID(), Status: status}
	if ns := m.Plan.Namespace; ns != nil && ns.CSI == nvme.CSIKV {
		f.CSI = nvme.CSIKV
	} else if ns != nil {
		f.LBA = m.SQE.SLBA()
	}
	c.failures = append(c.failures, f)
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
