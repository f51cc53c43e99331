// Package hostverbs drives a host's queue machine (hostrdma) over RDMA verbs: Conn joins the two,
// Memory is what one controller has registered for its data.
//
//	Memory ── domain, one per device ── MR of each region of the pool, when first used
//	   │         │                   └─ MR of each buffer of Alloc
//	   │         └─ Conn: queue pair, completion queue, MR of capsules and responses
//	   └ pool that commands borrow from, buffers of Alloc
package hostverbs

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostrdma"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// pollBatch is how many completions one Recv takes at most.
const pollBatch = 64

// Conn joins one queue machine to one RDMA connection: host.Conn. Its owner serialises all
// calls but Shutdown and SetReadDeadline.
type Conn struct {
	m      *hostrdma.Queue
	mem    *queueMemory
	domain *domain
	cq     verbs.CQ
	qp     verbs.QP
	region []byte // capsules and responses
	mr     verbs.MR
	wcs    [pollBatch]verbs.WC
	unsent bool
	// ended is why nothing more comes, other than what the completion queue still holds;
	// one of the end... constants.
	ended atomic.Uint32

	mu     sync.Mutex // for ep's methods, of which two must not run at a time
	ep     verbs.Endpoint
	closed bool
}

var _ host.Conn = (*Conn)(nil)

// Values of Conn.ended: 0, endShutdown, or endEvent and the event.
const (
	endShutdown = 1
	endEvent    = 2
)

var (
	errDisconnected = fmt.Errorf("the target has disconnected: %w", io.EOF)
	errFatal        = errors.New("the queue pair has failed")
)

// end is the error for Conn.ended, or nil.
func (c *Conn) end() error {
	switch e := c.ended.Load(); e {
	case 0:
		return nil
	case endShutdown:
		return net.ErrClosed
	case endEvent + uint32(verbs.Removed):
		return verbs.ErrDeviceRemoved
	case endEvent + uint32(verbs.Fatal):
		return errFatal
	}
	return errDisconnected
}

// event is called by the provider.
func (c *Conn) event(e verbs.Event) {
	if e != verbs.Established {
		c.stop(endEvent + uint32(e))
	}
}

// stop notes why the connection has ended, the first time, and wakes who waits.
func (c *Conn) stop(why uint32) {
	c.ended.CompareAndSwap(0, why)
	// An error means that the queue is closed: nobody waits.
	_ = c.cq.SetDeadline(time.Unix(1, 0))
}

// Machine implements host.Conn.
func (c *Conn) Machine() host.Machine { return c.m }

// Recv polls the completion queue once, lets the machine work through what was there, and posts the
// receives that have gathered.
//
// Errors: io.EOF wrapped, verbs', or the machine's.
//
// Cost: one crossing, a second one for each batch of receives; 0 allocs.
func (c *Conn) Recv() (n int, err error) { // hot: 0 allocs
	n, err = c.cq.Poll(c.wcs[:])
	if err != nil {
		return 0, err
	}
	if n == 0 {
		end := c.end()
		if end == nil {
			return 0, nil
		}
		// What has ended the connection may have completed since: it says more than the event.
		if n, err = c.cq.Poll(c.wcs[:]); n == 0 || err != nil {
			return 0, end
		}
	}
	if err := c.m.Completed(c.wcs[:n]); err != nil {
		if errors.Is(err, hostrdma.ErrFlushed) && c.end() != nil {
			err = c.end()
		}
		return n, err
	}
	return n, c.postRecvs()
}

func (c *Conn) postRecvs() error { // hot: 0 allocs
	rs := c.m.Recvs()
	if len(rs) == 0 {
		return nil
	}
	n, err := c.qp.PostRecv(rs)
	c.m.Posted(n)
	if err != nil {
		if e := c.end(); e != nil {
			return e
		}
		return fmt.Errorf("post receives: %w", err)
	}
	return nil
}

// RecvWait is Recv, but sleeps until there is something, until the read deadline.
func (c *Conn) RecvWait() (int, error) { // hot: 0 allocs
	for {
		if err := c.cq.Arm(); err != nil {
			return 0, err
		}
		if n, err := c.Recv(); n != 0 || err != nil {
			return n, err
		}
		if err := c.sleep(); err != nil {
			return 0, err
		}
		if n, err := c.Recv(); n != 0 || err != nil {
			return n, err
		}
	}
}

// sleep waits for a notice.
func (c *Conn) sleep() error { // hot: 0 allocs
	err := c.cq.Wait()
	if errors.Is(err, os.ErrDeadlineExceeded) && c.ended.Load() != 0 {
		return nil // that is what woke us: Recv says so when it has nothing better
	}
	return err
}

// AwaitRecv implements host.Conn.
func (c *Conn) AwaitRecv(step func() bool) error {
	for {
		if step() {
			return nil
		}
		if err := c.cq.Arm(); err != nil {
			return err
		}
		if step() {
			return nil
		}
		if err := c.sleep(); err != nil {
			return err
		}
	}
}

// AwaitSend implements host.Conn. What could not be posted can be when completions were
// received, and is then: there is nothing to wait for here.
func (c *Conn) AwaitSend(step func() bool) error {
	step()
	return nil
}

// Send posts what the machine has to send.
//
// Cost: one crossing per batch, 0 allocs.
func (c *Conn) Send() (blocked bool, err error) { // hot: 0 allocs
	for {
		ws := c.m.Sends()
		c.unsent = len(ws) != 0
		if !c.unsent {
			return false, c.mem.err
		}
		n, err := c.domain.d.PostSend(ws)
		c.m.Sent(n)
		switch {
		case errors.Is(err, verbs.ErrQueueFull):
			return true, nil
		case err != nil:
			if e := c.end(); e != nil {
				err = e
			}
			return false, fmt.Errorf("post: %w", err)
		}
	}
}

// Unsent implements host.Conn.
func (c *Conn) Unsent() bool { return c.unsent }

// PollBoth implements host.Conn: what makes room to send is a completion, too.
func (c *Conn) PollBoth(timeout time.Duration) error {
	if err := c.cq.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if err := c.cq.Arm(); err != nil {
		return err
	}
	if c.ended.Load() == 0 {
		if err := c.cq.Wait(); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
	return c.cq.SetDeadline(time.Time{})
}

// SetReadDeadline implements host.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.cq.SetDeadline(t) }

// Shutdown disconnects: the queue pair takes nothing more from the target, and all that is posted
// is flushed. From any goroutine; Close must still be called.
func (c *Conn) Shutdown() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	// If it fails, the connection has ended in another way.
	_ = c.ep.Disconnect()
	c.stop(endShutdown)
}

// Close frees all that the connection has, and gives back the memory that its commands have
// borrowed.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	err := c.ep.Close()
	c.mu.Unlock()
	return errors.Join(err, c.free())
}
