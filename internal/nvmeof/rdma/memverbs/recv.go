package memverbs

import (
	"fmt"
	"net"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// recvQueue is a ring of receives: a shared one, or a queue pair's own. All is guarded by the
// network's mu.
type recvQueue struct {
	domain *domain
	ring   []verbs.RecvWR
	// first is the oldest receive that no message has taken, n how many there are.
	first, n int
	// used counts places: receives that wait, and those whose completion nobody has
	// polled. Invariant: n <= used <= len(ring).
	used int
	// waiting are the peers that met no receive.
	waiting []*Endpoint
	posted  uint64
}

func newRecvQueue(d *domain, entries int) recvQueue {
	return recvQueue{domain: d, ring: make([]verbs.RecvWR, entries)}
}

// post adds receives; e is whose they are, nil if shared.
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

// take removes the oldest receive; its place stays used until its completion is polled.
func (q *recvQueue) take() verbs.RecvWR {
	wr := q.ring[q.first]
	q.first = (q.first + 1) % len(q.ring)
	q.n--
	return wr
}

// resume lets endpoints try again that met no receive.
func (n *Network) resume(list []*Endpoint) {
	for _, e := range list {
		e.parked = false
		n.activate(e)
	}
}

// srq implements verbs.SRQ.
type srq struct {
	recvQueue
	// users are the queue pairs.
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
