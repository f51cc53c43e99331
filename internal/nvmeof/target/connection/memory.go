package connection

import (
	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
)

// Buffer implements qpair.Handler: it returns memory for data that comes in a capsule, or for an admin command. Without
// any, the machine stops before the command and the transport reads no further until Transport.Resume.
func (c *Conn) Buffer(i, n int) []byte {
	if c.ctrl == nil {
		if c.connBuf == nil {
			c.connBuf = make([]byte, nvme.ConnectDataSize)
		}
		return c.connBuf[:n]
	}
	buf := &c.slots[i].cmd.Buf
	c.slots[i].requestedNS = c.seen.Load() // of the first of a fused pair; see qpair.QPair.Awaited
	if c.waiting && c.granted.Load() {
		c.waiting = false
		c.granted.Store(false)
		*buf, c.waiter.Buf = c.waiter.Buf, bufpool.Buf{}
		if len(buf.B) >= n {
			return buf.B[:n]
		}
		c.put(buf)
	}
	if !c.waiting {
		c.waiter.Size = n
		if c.service.Pool().GetOrWait(c.tenant.Account, &c.waiter) {
			*buf, c.waiter.Buf = c.waiter.Buf, bufpool.Buf{}
			return buf.B[:n]
		}
		c.waiting = true
	}
	return c.extraBuffer(buf, n)
}

// extraBuffer takes a buffer beyond the pool's bound for a command on an I/O queue whose data is in its capsule; nil if
// one is out already. Commands whose data comes behind that capsule may hold all the memory that the host may have: a
// connection that waited for it would wait for ever. One buffer at a time is enough, because its command needs nothing
// more from the host; Execute refuses the one that does.
func (c *Conn) extraBuffer(buf *bufpool.Buf, n int) []byte {
	if c.qid == 0 || c.extra {
		return nil
	}
	c.extra = true
	b, ok := c.service.Pool().Extra(n)
	if !ok {
		return nil // and none later
	}
	*buf = b
	if c.service.Pool().Cancel(&c.waiter) {
		c.waiting = false
	} // else there is a buffer for the next command
	return b.B[:n]
}

// memoryWanted reports that the machine has stopped for want of memory and would stop again. mu is held.
func (c *Conn) memoryWanted() bool {
	return c.waiting && !c.granted.Load() && (c.qid == 0 || c.extra)
}

// Unused implements qpair.Handler.
func (c *Conn) Unused(i int) { c.put(&c.slots[i].cmd.Buf) }

// Paired implements qpair.Handler.
func (c *Conn) Paired(first, second int) {
	c.slots[first].noted = false
	f, s := &c.slots[first].cmd, &c.slots[second].cmd
	if !f.Buf.IsZero() {
		s.Buf, f.Buf = f.Buf, bufpool.Buf{}
	}
}

// put returns a buffer to the pool. mu is held.
func (c *Conn) put(b *bufpool.Buf) {
	if !b.IsZero() {
		if b.IsExtra() {
			c.extra = false
			c.t.Resume()
		}
		c.service.Pool().Put(*b)
		*b = bufpool.Buf{}
	}
}
