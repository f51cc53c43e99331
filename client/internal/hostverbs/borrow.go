package hostverbs

import (
	"errors"
	"fmt"

	"jbofd/client/internal/hostrdma"
	"jbofd/internal/bufpool"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// queueMemory provides the commands of one queue with memory of the controller's pool. If the pool is exhausted, the
// queue uses two buffers of its own, which are allocated then. Therefore a queue never waits for another one, whose
// completions might not be collected.
type queueMemory struct {
	domain  *domain
	acct    *bufpool.Account
	held    []bufpool.Buf // by slot
	private [2]privateBuffer
	// err is why memory could not be registered; it ends the queue.
	err error
}

var _ hostrdma.Memory = (*queueMemory)(nil)

// privateBuffer is a buffer that does not count for the bound of the pool.
type privateBuffer struct {
	buf  bufpool.Buf
	span span
	busy bool
	slot uint16 // the user, if busy
}

func newQueueMemory(d *domain, depth int) *queueMemory {
	name := fmt.Sprintf("queue %d", d.m.accounts.Add(1))
	return &queueMemory{domain: d, acct: d.m.pool.Account(name), held: make([]bufpool.Buf, depth)}
}

// Find implements hostrdma.Memory.
func (q *queueMemory) Find(b []byte) (addr uint64, rkey uint32, ok bool) { // hot: 0 allocs
	s, ok := q.domain.find(b)
	if !ok {
		return 0, 0, false
	}
	return s.addr + uint64(addrOf(b)-s.start), s.rkey, true
}

// Get implements hostrdma.Memory.
func (q *queueMemory) Get(slot uint16, n int) (b []byte, addr uint64, rkey uint32, ok bool) { // hot: 0 allocs
	pool := q.domain.m.pool
	buf, ok := pool.Get(q.acct, n)
	if !ok {
		return q.getPrivate(slot, n)
	}
	i, base, _ := pool.RegionOf(buf.B)
	s, err := q.domain.region(i, base)
	if err != nil {
		pool.Put(buf)
		q.err = err
		return nil, 0, 0, false
	}
	q.held[slot] = buf
	return buf.B, s.addr + uint64(addrOf(buf.B)-s.start), s.rkey, true
}

func (q *queueMemory) getPrivate(slot uint16, n int) ([]byte, uint64, uint32, bool) {
	for i := range q.private {
		p := &q.private[i]
		if p.busy {
			continue
		}
		if p.buf.IsZero() {
			if err := q.newPrivate(p); err != nil {
				q.err = err
				return nil, 0, 0, false
			}
		}
		p.busy, p.slot = true, slot
		return p.buf.B[:n], p.span.addr, p.span.rkey, true
	}
	return nil, 0, 0, false
}

func (q *queueMemory) newPrivate(p *privateBuffer) error {
	pool := q.domain.m.pool
	buf, ok := pool.Extra(MaxBounceBytes)
	if !ok {
		return fmt.Errorf("%d bytes for a command's data: %w", MaxBounceBytes, verbs.ErrResources)
	}
	s, err := q.domain.register(buf.B)
	if err != nil {
		pool.Put(buf)
		return err
	}
	p.buf, p.span = buf, s
	return nil
}

// Put implements hostrdma.Memory.
func (q *queueMemory) Put(slot uint16) { // hot: 0 allocs
	if b := q.held[slot]; !b.IsZero() {
		q.held[slot] = bufpool.Buf{}
		q.domain.m.pool.Put(b)
		return
	}
	for i := range q.private {
		if p := &q.private[i]; p.busy && p.slot == slot {
			p.busy = false
		}
	}
}

// close frees all memory. The queue pair must be closed already.
func (q *queueMemory) close() error {
	pool := q.domain.m.pool
	for i := range q.held {
		pool.Put(q.held[i])
		q.held[i] = bufpool.Buf{}
	}
	var errs []error
	for i := range q.private {
		if p := &q.private[i]; !p.buf.IsZero() {
			errs = append(errs, p.span.mr.Close())
			pool.Put(p.buf)
			*p = privateBuffer{}
		}
	}
	q.acct.Close()
	return errors.Join(errs...)
}
