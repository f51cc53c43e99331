//go:build rdma && cgo

package verbs

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// completionQueue is a completion queue with its own completion channel. The queue pairs that complete to it count as
// its users.
type completionQueue struct {
	object
	domain *domain
	file   *os.File // file descriptor of the completion channel
	raw    syscall.RawConn
	take   func(uintptr) bool // the method value takeEvent, allocated once
	taken  error              // error of the last take
	closed atomic.Bool
}

// create creates an object of the domain and counts it as a user of the domain until leave.
func (d *domain) create(what string, entries, limit int, make func(handle) (handle, unix.Errno), o *object) error {
	if entries < 1 || entries > limit {
		return fmt.Errorf("%w: a %s of %d entries, %s allows 1 to %d", ErrResources, what, entries, d.dev.attr.Name,
			limit)
	}
	domain, err := d.use()
	if err != nil {
		return fmt.Errorf("create a %s: %w", what, err)
	}
	h, e := make(domain)
	if e != 0 {
		d.unuse()
		return resourceError("create a "+what, e)
	}
	o.h.Store(uint64(h))
	return nil
}

// CreateCQ implements Domain.
func (d *domain) CreateCQ(entries int) (CQ, error) {
	q := &completionQueue{domain: d}
	var fd int
	err := d.create("completion queue", entries, d.dev.attr.MaxCQEs, func(domain handle) (h handle, e unix.Errno) {
		h, fd, e = cqCreate(domain, entries)
		return h, e
	}, &q.object)
	if err != nil {
		return nil, err
	}
	d.dev.p.count(func(c *Counts) { c.CQs++ })
	q.file = os.NewFile(uintptr(fd), "rdma-completions")
	q.take = q.takeEvent
	if q.raw, err = q.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, q.Close())
	}
	return q, nil
}

// Poll implements CQ.
//
// hot: 0 allocs
func (q *completionQueue) Poll(dst []WC) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	h := q.handle()
	if h == 0 {
		return 0, net.ErrClosed
	}
	if len(dst) == 0 {
		return 0, nil
	}
	q.domain.dev.p.crossings.Add(1)
	n, err := cqPoll(h, dst)
	if err != 0 {
		return n, fmt.Errorf("poll: %w", err)
	}
	return n, nil
}

// Arm implements CQ.
//
// hot: 0 allocs
func (q *completionQueue) Arm() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	h := q.handle()
	if h == 0 {
		return net.ErrClosed
	}
	if err := cqArm(h); err != 0 {
		return fmt.Errorf("arm: %w", err)
	}
	return nil
}

// Wait implements CQ.
//
// hot: 0 allocs
func (q *completionQueue) Wait() error {
	err := q.raw.Read(q.take)
	switch {
	case q.closed.Load():
		return net.ErrClosed
	case err != nil:
		return err // os.ErrDeadlineExceeded
	}
	return q.taken
}

func (q *completionQueue) takeEvent(uintptr) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	h := q.handle()
	if h == 0 { // Close is about to close the file descriptor
		q.taken = net.ErrClosed
		return true
	}
	switch err := cqEvent(h); err {
	case unix.EAGAIN, unix.EINTR:
		return false
	case 0:
		q.taken = nil
	default:
		q.taken = fmt.Errorf("wait for a completion: %w", err)
	}
	return true
}

// SetDeadline implements CQ.
func (q *completionQueue) SetDeadline(t time.Time) error {
	if err := q.file.SetReadDeadline(t); !q.closed.Load() {
		return err
	}
	return net.ErrClosed
}

// Close implements CQ.
func (q *completionQueue) Close() error {
	ended, err := q.end("completion queue", cqClose)
	if !ended {
		return err
	}
	q.domain.unuse()
	q.domain.dev.p.count(func(c *Counts) { c.CQs-- })
	q.closed.Store(true)
	return q.file.Close() // wakes a blocked Wait
}

// sharedQueue is a shared receive queue. Its queue pairs count as its users.
type sharedQueue struct {
	object
	domain *domain
}

// CreateSRQ implements Domain.
func (d *domain) CreateSRQ(entries int) (SRQ, error) {
	s := &sharedQueue{domain: d}
	err := d.create("shared receive queue", entries, d.dev.attr.MaxSRQWRs, func(domain handle) (handle, unix.Errno) {
		return srqCreate(domain, entries)
	}, &s.object)
	if err != nil {
		return nil, err
	}
	d.dev.p.count(func(c *Counts) { c.SRQs++ })
	return s, nil
}

// PostRecv implements SRQ.
//
// hot: 0 allocs
func (s *sharedQueue) PostRecv(wrs []RecvWR) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.handle()
	if h == 0 {
		return 0, net.ErrClosed
	}
	if len(wrs) == 0 {
		return 0, nil
	}
	return s.domain.took(srqPost(h, wrs))
}

// Close implements SRQ.
func (s *sharedQueue) Close() error {
	ended, err := s.end("shared receive queue", srqClose)
	if ended {
		s.domain.unuse()
		s.domain.dev.p.count(func(c *Counts) { c.SRQs-- })
	}
	return err
}

// queuePair is an endpoint's queue pair. The handle of its object is that of the domain, which stays open as long as
// the queue pair.
type queuePair struct {
	object
	domain         *domain
	sendCQ, recvCQ *completionQueue
	srq            *sharedQueue // may be nil
	used           []*object
	qp             uint64 // QP.Handle
	num            uint32
	inline         int
}

// newQueuePair creates the queue pair of an RDMA CM identifier on dev.
func newQueuePair(dev *device, id handle, c QPConfig) (*queuePair, error) {
	d, ok := c.Domain.(*domain)
	if !ok || d.dev != dev {
		return nil, errors.New("create a queue pair: the domain is not one of the endpoint's device")
	}
	sendCQ, ok1 := c.SendCQ.(*completionQueue)
	recvCQ, ok2 := c.RecvCQ.(*completionQueue)
	srq, ok3 := c.SRQ.(*sharedQueue)
	limit := dev.attr.MaxQPWRs
	switch {
	case !ok1 || !ok2 || !ok3 && c.SRQ != nil:
		return nil, errors.New("create a queue pair: a queue is missing, or another provider's")
	case srq != nil && c.Recvs != 0:
		return nil, fmt.Errorf("create a queue pair: %d receives of its own beside a shared queue, want 0", c.Recvs)
	case c.Sends < 1 || c.Sends > limit || c.Recvs < 0 || c.Recvs > limit:
		return nil, fmt.Errorf("%w: a queue pair for %d sends and %d receives, %s allows %d", ErrResources, c.Sends,
			c.Recvs, dev.attr.Name, limit)
	}
	q := &queuePair{domain: d, sendCQ: sendCQ, recvCQ: recvCQ, srq: srq}
	var err error
	use := func(o *object) (h handle) {
		if err == nil {
			if h, err = o.use(); err == nil {
				q.used = append(q.used, o)
			}
		}
		return h
	}
	in := qpConfig{domain: use(&d.object), sendCQ: use(&sendCQ.object), recvCQ: use(&recvCQ.object), sends: c.Sends,
		recvs: c.Recvs, inline: c.InlineBytes}
	if srq != nil {
		in.srq = use(&srq.object)
	}
	if err == nil {
		var e unix.Errno
		q.qp, q.num, q.inline, e = qpCreate(id, in)
		if e == unix.EINVAL && in.inline > 0 { // more inline data than the device supports
			in.inline = 0
			q.qp, q.num, q.inline, e = qpCreate(id, in)
		}
		// all sizes are within the device's limits, so the device has run out of resources; rxe reports that as EINVAL
		if e == unix.EINVAL {
			e = unix.ENOMEM
		}
		switch e {
		case 0:
		case unix.ENOTCONN:
			err = fmt.Errorf("create a queue pair: %w: the peer has gone", ErrUnreachable)
		default:
			err = resourceError("create a queue pair", e)
		}
	}
	if err != nil {
		q.unuseAll()
		return nil, err
	}
	q.h.Store(uint64(in.domain))
	dev.p.count(func(c *Counts) { c.QPs++ })
	return q, nil
}

func (q *queuePair) unuseAll() {
	for _, o := range q.used {
		o.unuse()
	}
	q.used = nil
}

// close destroys the queue pair of the RDMA CM identifier.
func (q *queuePair) close(id handle) error {
	p := q.domain.dev.p
	ended, err := q.end("queue pair", func(domain handle) unix.Errno {
		p.cmMu.Lock()
		defer p.cmMu.Unlock()
		return qpClose(id, domain, q.qp)
	})
	if ended {
		q.unuseAll()
		p.count(func(c *Counts) { c.QPs-- })
	}
	return err
}

// Num implements QP.
func (q *queuePair) Num() uint32 { return q.num }

// Handle implements QP.
func (q *queuePair) Handle() uint64 { return q.qp }

// InlineBytes implements QP.
func (q *queuePair) InlineBytes() int { return q.inline }

// PostRecv implements QP.
//
// hot: 0 allocs
func (q *queuePair) PostRecv(wrs []RecvWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	domain := q.handle()
	if domain == 0 {
		return 0, net.ErrClosed
	}
	if len(wrs) == 0 {
		return 0, nil
	}
	return q.domain.took(qpPostRecv(domain, q.qp, wrs))
}
