package pcietest

import "errors"

// interrupt sends one, or remembers it if it is masked.
func (c *Controller) interrupt(vector int) {
	if c.maskOf[vector] {
		c.dueOf[vector] = true
		return
	}
	c.interrupts[vector]++
	c.vectors[vector].Signal()
}

// Mask implements pcie.Function.
func (c *Controller) Mask(i int, on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cfg.NoMasks {
		return
	}
	if c.revoked {
		c.stray("the mask of vector %d after access was revoked", i)
		return
	}
	c.masks++
	if !on && c.cfg.AtUnmask {
		c.serveUpTo(c.cfg.Entries)
	}
	c.maskOf[i] = on
	if !on && c.dueOf[i] {
		c.dueOf[i] = false
		if !c.cfg.Forgets {
			c.interrupt(i)
		}
	}
}

// Unmasked implements pcie.Function.
func (c *Controller) Unmasked() error {
	if c.cfg.NoMasks {
		return errors.New("it has no masks")
	}
	return nil
}

// Serve carries out up to n commands that are in I/O queues, for a Manual controller, and returns how many.
func (c *Controller) Serve(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.serveUpTo(n)
}

func (c *Controller) serveUpTo(n int) (served int) {
	for id, q := range c.queues {
		if id == 0 || c.vanished {
			continue
		}
		for served < n && q.head != q.tail {
			before := q.head
			c.limit = n - served
			c.serve(q)
			served += int((q.head - before + q.entries) % q.entries)
		}
	}
	c.limit = 0
	return served
}
