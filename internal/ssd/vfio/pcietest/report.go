package pcietest

import "jbofd/internal/nvme"

// SetSMART changes the controller's SMART log.
func (c *Controller) SetSMART(l nvme.SMARTLog) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.smart = l
}

// Tell has the controller report an event, when it may: when it has an event request, and the log page of the event
// before, if it was of the same type, was read.
func (c *Controller) Tell(events ...nvme.AER) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events = append(c.events, events...)
	if c.report() {
		c.vectors[0].Signal()
	}
}

// Activate has the controller activate firmware, or end that. It shows that, as with Pause, and fetches no command
// meanwhile. It reports no event of its own accord.
func (c *Controller) Activate(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.activating = on
	c.pause(on)
	c.wake()
}

// Pause has the controller show that it activates firmware, or no longer.
func (c *Controller) Pause(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pause(on)
}

func (c *Controller) pause(on bool) {
	c.regs[nvme.PropCSTS] &^= uint32(nvme.CSTSPP)
	if on {
		c.regs[nvme.PropCSTS] |= uint32(nvme.CSTSPP)
	}
}

// Reports is what the driver has done for events.
type Reports struct {
	// Requests are the event requests that the controller has, of all that it was Asked, and Waiting the events that it
	// has not reported. Unfetched are the admin commands that it has not fetched.
	Requests, Asked, Waiting, Unfetched int
	// Wanted is the Asynchronous Event Configuration.
	Wanted uint32
	// Logs are how often log pages were read.
	Logs map[uint8]int
}

// Reports returns what the driver has done for events.
func (c *Controller) Reports() Reports {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := Reports{Requests: len(c.requests), Asked: c.asked, Waiting: len(c.events), Wanted: c.wanted,
		Logs: map[uint8]int{}}
	if q := c.queues[0]; q != nil {
		r.Unfetched = int((q.tail - q.head + q.entries) % q.entries)
	}
	for lid, n := range c.logs {
		r.Logs[lid] = n
	}
	return r
}

// report reports what may be reported, and returns whether an interrupt must follow.
func (c *Controller) report() (told bool) {
	q := c.queues[0]
	if q == nil || c.vanished || c.revoked {
		return false
	}
	var left []nvme.AER
	for _, e := range c.events {
		if len(c.requests) == 0 || c.masked[e.LID()] {
			left = append(left, e)
			continue
		}
		c.masked[e.LID()] = !c.cfg.Unmasked
		cqe := nvme.CQE{}
		cqe.SetCID(c.requests[0])
		cqe.SetDW0(uint32(e))
		c.requests = c.requests[1:]
		told = c.complete(q, &cqe) || told
	}
	c.events = left
	return told
}

// log carries out Get Log Page.
func (c *Controller) log(e *nvme.SQE) nvme.Status {
	g := e.GetLog()
	page := make([]byte, 4096)
	switch g.LID() {
	case nvme.LIDSMART:
		if e.NSID() != nvme.NSIDBroadcast {
			return nvme.InvalidField | nvme.DNR
		}
		copy(page, c.smart[:])
	case nvme.LIDError, nvme.LIDFirmwareSlot, nvme.LIDChangedNS, 0xC1:
	default:
		return nvme.InvalidLogPage | nvme.DNR
	}
	n := int(min(g.LenBytes(), 4096))
	b := c.memory(e.PRP1(), n)
	if b == nil {
		return nvme.DataTransferError
	}
	copy(b, page)
	c.logs[g.LID()]++
	if !g.RAE() {
		c.masked[g.LID()] = false
	}
	return nvme.Success
}
