package memverbs

import (
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// entry is a completion and the queue places that become free when it is polled.
type entry struct {
	wc verbs.WC
	e  *Endpoint
	// sent is the number of e's send requests up to and including this one, for the completion of a send.
	sent uint64
	// recvs is the queue that a receive came from; nil for the completion of a send.
	recvs *recvQueue
}

// cq implements verbs.CQ. The network's mu guards all fields.
type cq struct {
	domain *domain
	ring   []entry
	first  int
	n      int
	armed  bool
	// notices is the number of notifications that Wait has not consumed.
	notices  int
	noticed  sync.Cond
	deadline time.Time
	timer    *time.Timer
	// users is the number of send and receive queues that complete here.
	users    int
	overflow bool
	closed   bool
}

// push adds a completion. If the queue is full, the completion is lost, and the queue and all its queue pairs fail.
func (q *cq) push(c entry) { // hot: 0 allocs
	c.e.stats.Completions++
	c.e.dev.provider.stats.Completions++
	if q.overflow || q.n == len(q.ring) {
		q.overrun(c.e)
		return
	}
	q.ring[(q.first+q.n)%len(q.ring)] = c
	q.n++
	if q.armed {
		q.armed = false
		q.notices++
		q.noticed.Signal()
	}
}

func (q *cq) overrun(by *Endpoint) {
	if q.overflow {
		return
	}
	q.overflow = true
	n := q.domain.net
	n.fault(fmt.Errorf("memverbs: completion queue of %d entries overflows, by queue pair %d (%v to %v)",
		len(q.ring), by.num, by.local, by.remote))
	for _, e := range n.endpoints {
		if e.hasQP && (e.sendCQ == q || e.recvCQ == q) {
			e.fail()
			e.tells(verbs.Fatal)
		}
	}
}

func (q *cq) Poll(dst []verbs.WC) (int, error) { // hot: 0 allocs
	n := q.domain.net
	n.mu.Lock()
	defer n.mu.Unlock()
	q.domain.dev.provider.crossings++
	if q.closed {
		return 0, net.ErrClosed
	}
	took := 0
	for took < len(dst) && q.n > 0 {
		c := &q.ring[q.first]
		dst[took] = c.wc
		c.free()
		*c = entry{}
		q.first = (q.first + 1) % len(q.ring)
		q.n--
		took++
	}
	if took == 0 && q.overflow {
		return 0, fmt.Errorf("memverbs: the completion queue has overflowed")
	}
	return took, nil
}

// free frees the queue places that the completion covers.
func (e *entry) free() {
	if e.recvs != nil {
		e.recvs.used--
	} else {
		e.e.freed = max(e.e.freed, e.sent)
	}
}

// drop removes the completions of a closed queue pair.
func (q *cq) drop(e *Endpoint) {
	kept := 0
	for i := range q.n {
		c := &q.ring[(q.first+i)%len(q.ring)]
		if c.e == e {
			c.free()
			continue
		}
		q.ring[(q.first+kept)%len(q.ring)] = *c
		kept++
	}
	for i := kept; i < q.n; i++ {
		q.ring[(q.first+i)%len(q.ring)] = entry{}
	}
	q.n = kept
}

func (q *cq) Arm() error {
	n := q.domain.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if q.closed {
		return net.ErrClosed
	}
	q.armed = true
	return nil
}

func (q *cq) Wait() error { // hot: 0 allocs
	n := q.domain.net
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		switch {
		case q.closed || n.closed:
			return net.ErrClosed
		case !q.deadline.IsZero() && !time.Now().Before(q.deadline):
			return os.ErrDeadlineExceeded
		case q.notices > 0:
			q.notices--
			return nil
		case n.cfg.Live:
			q.noticed.Wait()
		case n.step():
		case !q.deadline.IsZero(): // no step remains that could end the wait before the deadline
			return os.ErrDeadlineExceeded
		default:
			return ErrQuiet
		}
	}
}

func (q *cq) SetDeadline(t time.Time) error {
	n := q.domain.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if q.closed {
		return net.ErrClosed
	}
	q.deadline = t
	if !n.cfg.Live {
		return nil
	}
	switch {
	case t.IsZero():
		if q.timer != nil {
			q.timer.Stop()
		}
	case q.timer == nil:
		q.timer = time.AfterFunc(time.Until(t), q.expire)
	default:
		q.timer.Reset(time.Until(t))
	}
	return nil
}

// expire ends Wait. It may run early if the clock was set back.
func (q *cq) expire() {
	n := q.domain.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if q.closed || q.deadline.IsZero() {
		return
	}
	if d := time.Until(q.deadline); d > 0 {
		q.timer.Reset(d)
		return
	}
	q.noticed.Broadcast()
}

// Close destroys the queue and wakes its waiters. Idempotent.
//
// Errors: queue pairs still use it.
func (q *cq) Close() error {
	n := q.domain.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if q.closed {
		return nil
	}
	if q.users > 0 {
		return fmt.Errorf("memverbs: queue pairs use the completion queue")
	}
	q.closed = true
	if q.timer != nil {
		q.timer.Stop()
	}
	q.noticed.Broadcast()
	q.domain.users--
	q.domain.dev.provider.counts.CQs--
	return nil
}
