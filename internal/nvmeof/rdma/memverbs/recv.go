package memverbs

import (
	"fmt"
	"net"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// recvQueue is a ring of receives, shared or of one queue pair. The network's mu guards all fields.
type recvQueue struct {
	domain *domain
	ring   []verbs.RecvWR
	// first is the oldest receive that no message has taken. n is the number of such receives.
	first, n int
	// used counts places: receives that wait, and those whose completion nobody has
	// polled. Invariant: n <= used <= len(ring).
	used int
	// waiting holds the peers whose messages wait for a receive.
	waiting []*Endpoint
	posted  uint64
}

func newRecvQueue(d *domain, entries int) recvQueue {
	return recvQueue{domain: d, ring: make([]verbs.RecvWR, entries)}
}

// post adds receives for the endpoint e, or for all queue pairs if e is nil.
func (q *recvQueue) post(e *Endpoint, wrs []verbs.RecvWR) (int, error) { // hot: 0 allocs
	p := q.domain.dev.provider
	p.crossings++
	if q.domain.dev.gone {
		return 0, verbs.ErrDeviceRemoved
	}
	n := min(len(wrs), len(q.ring)-q.used)
	for _, wr := range wrs[:n] {
		q.ring[(q.first+q.n)%len(q.ring)] = wr
		q.n++
	}
	q.used += n
	q.posted += uint64(n)
	p.stats.RecvsPosted += uint64(n)
	if n > 0 {
		q.domain.ring(e)
		q.domain.net.resume(q.waiting)
		clear(q.waiting)
		q.waiting = q.waiting[:0]
	}
	if n < len(wrs) {
		return n, verbs.ErrQueueFull
	}
	return n, nil
}

// take removes the oldest receive. Its place stays in use until its completion is polled.
func (q *recvQueue) take() verbs.RecvWR {
	wr := q.ring[q.first]
	q.first = (q.first + 1) % len(q.ring)
	q.n--
	return wr
}

// resume lets endpoints retry whose messages found no receive.
func (n *Network) resume(list []*Endpoint) {
	for _, e := range list {
		e.parked = false
		n.activate(e)
	}
}

// srq implements verbs.SRQ.
type srq struct {
	recvQueue
	// users is the number of queue pairs that share the queue.
	users  int
	closed bool
}

func (q *srq) PostRecv(wrs []verbs.RecvWR) (int, error) { // hot: 0 allocs
	if len(wrs) == 0 {
		return 0, nil
	}
	n := q.domain.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if q.closed {
		return 0, net.ErrClosed
	}
	return q.post(nil, wrs)
}

func (q *srq) Close() error {
	n := q.domain.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if q.closed {
		return nil
	}
	if q.users > 0 {
		return fmt.Errorf("memverbs: %d queue pairs use the shared receive queue", q.users)
	}
	q.closed = true
	q.domain.users--
	q.domain.dev.provider.counts.SRQs--
	return nil
}
