// Package hostverbs joins the state machine of a host's queue pair (hostrdma) to RDMA verbs: Conn is the connection of
// a queue, Memory the registered memory of a controller.
//
//	Memory ── domain, one per device ── MR of each region of the pool, when first used
//	   │         │                   └─ MR of each buffer of Alloc
//	   │         └─ Conn: queue pair, completion queue, MR of capsules and responses
//	   └ pool for data of commands (bounce buffers), buffers of Alloc
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

// pollBatch bounds the completions of one Recv.
const pollBatch = 64

// Conn is the hostconn.Conn of an RDMA connection.
type Conn struct {
	m      *hostrdma.QPair
	mem    *queueMemory
	domain *domain
	cq     verbs.CQ
	qp     verbs.QP
	region []byte // capsules and responses
	mr     verbs.MR
	wcs    [pollBatch]verbs.WC
	unsent bool
	// ended tells why the connection has ended: 0, or one of the end... constants. The completion queue may still hold
	// completions.
	ended atomic.Uint32
	// hasEnded is closed when ended is set.
	hasEnded chan struct{}

	mu     sync.Mutex // serialises Disconnect and Close of ep
	ep     verbs.Endpoint
	closed bool
}

// Values of Conn.ended: 0, endShutdown, or endEvent and the event.
const (
	endShutdown = 1
	endEvent    = 2
)

var (
	errDisconnected = fmt.Errorf("the target has disconnected: %w", io.EOF)
	errFatal        = errors.New("the queue pair has failed")
)

// end returns the error for Conn.ended, or nil.
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

// stop records why the connection has ended, the first time, and wakes a goroutine that waits.
func (c *Conn) stop(why uint32) {
	if c.ended.CompareAndSwap(0, why) {
		close(c.hasEnded)
	}
	// An error means that the completion queue is closed: no goroutine waits.
	_ = c.cq.SetDeadline(time.Unix(1, 0))
}

// Machine implements hostconn.Conn.
func (c *Conn) Machine() host.Machine { return c.m }

// Recv implements hostconn.Conn: it polls the completion queue once and posts receives, if there are enough of them.
//
// Errors: io.EOF, wrapped; those of verbs and of the machine.
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
		// The work request whose failure has ended the connection may have completed since. It says more than the
		// event.
		if n, err = c.cq.Poll(c.wcs[:]); n == 0 || err != nil {
			return 0, end
		}
	}
	if err := c.m.Completed(c.wcs[:n]); err != nil {
		if errors.Is(err, hostrdma.ErrFlushed) {
			err = c.flushedBy(err)
		}
		return n, err
	}
	return n, c.postRecvs()
}

// eventDelay is how long the event that says why a connection has ended may come after the flush of its work requests.
const eventDelay = 100 * time.Millisecond

// flushedBy returns why work requests were flushed, or flushed itself if no event says why.
func (c *Conn) flushedBy(flushed error) error {
	t := time.NewTimer(eventDelay)
	defer t.Stop()
	select {
	case <-c.hasEnded:
		return c.end()
	case <-t.C:
		return flushed
	}
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

// RecvWait implements hostconn.Conn.
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

// sleep waits for an event of the completion queue.
func (c *Conn) sleep() error { // hot: 0 allocs
	err := c.cq.Wait()
	if errors.Is(err, os.ErrDeadlineExceeded) && c.ended.Load() != 0 {
		return nil // stop has set the deadline; Recv returns the error
	}
	return err
}

// AwaitRecv implements hostconn.Conn.
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

// AwaitSend implements hostconn.Conn. It does not wait: work requests that could not be posted are posted when
// completions were received.
func (c *Conn) AwaitSend(step func() bool) error {
	step()
	return nil
}

// Send implements hostconn.Conn.
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

// Unsent implements hostconn.Conn.
func (c *Conn) Unsent() bool { return c.unsent }

// PollBoth implements hostconn.Conn. It waits for a completion, which also makes room to send.
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

// SetReadDeadline implements hostconn.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.cq.SetDeadline(t) }

// Shutdown implements hostconn.Conn. It disconnects: the target can no longer access memory, and posted work requests
// are flushed.
func (c *Conn) Shutdown() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	// An error means that the connection has ended already.
	_ = c.ep.Disconnect()
	c.stop(endShutdown)
}

// Close implements hostconn.Conn. It also frees the memory that commands have borrowed.
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
