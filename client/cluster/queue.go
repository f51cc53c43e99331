package cluster

import (
	"context"
	"fmt"
	"sync"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
)

// MaxDepth bounds the depth of an OpQueue.
const MaxDepth = 4096

// OpQueue is a queue of operations on a Store for one goroutine: batches of operations go in, results come out in the
// order in which the operations finish, and nothing is allocated on the way as long as nothing goes wrong.
//
//	for {
//		n, err := q.Poll(results, -1)    // finished operations
//		...                              // build the next batch
//		q.Submit(ops[:k])                // one writev for each node
//	}
//
// Operations that are outstanding together may be carried out in any order. Each is carried out as by the methods of
// Tenant, and ends after Options.Timeout at the latest. All methods but Interrupt must be called by one goroutine at a
// time.
type OpQueue struct {
	e *engine
	// all are the requests of the queue, free those without an operation.
	all, free []*request
	// lane chooses one of a node's queues. timer is that of Poll.
	lane  int
	timer *time.Timer
	// batch is of Submit.
	batch []*request
	// wake, of capacity 1, has a value if there may be something in done, and Poll waits.
	wake chan struct{}
	// interrupted ends with Interrupt.
	interrupted context.Context
	interrupt   context.CancelFunc
	closing     sync.Once

	mu sync.Mutex
	// done are the requests that have ended, oldest first from begin on. waits: Poll waits.
	done  []*request
	begin int
	waits bool
}

// OpenQueue opens an OpQueue with room for depth operations, 1 to MaxDepth. Close must be called, before that of the
// Store.
//
// Errors: client.ErrInvalid; client.ErrClosed.
func (t *Tenant) OpenQueue(depth int) (*OpQueue, error) {
	if depth < 1 || depth > MaxDepth {
		return nil, fmt.Errorf("%w: a queue of depth %d, must be 1 to %d", client.ErrInvalid, depth, MaxDepth)
	}
	q := &OpQueue{e: t.s.engine, timer: time.NewTimer(time.Hour), wake: make(chan struct{}, 1),
		lane: int(t.s.queues.Add(1)), done: make([]*request, 0, depth)}
	q.timer.Stop()
	q.interrupted, q.interrupt = context.WithCancel(context.Background())
	for range depth {
		r := q.e.take()
		if r == nil {
			q.e.give(q.all...)
			return nil, fmt.Errorf("cluster %s: %w", t.s.o.SubNQN, client.ErrClosed)
		}
		r.q, r.tenant, r.wrap = q, t.id, false
		q.all = append(q.all, r)
	}
	q.free = append(q.free, q.all...)
	return q, nil
}

// Depth returns how many operations may be outstanding.
func (q *OpQueue) Depth() int { return len(q.all) }

// Free returns how many operations Submit accepts now.
func (q *OpQueue) Free() int { return len(q.free) }

// Outstanding returns how many operations were submitted and not yet returned by Poll.
func (q *OpQueue) Outstanding() int { return len(q.all) - len(q.free) }

// Submit accepts operations in order, sends them as one batch to each node, and returns how many it has accepted: fewer
// than all if the queue is full. Op.Key is copied.
//
// Errors: client.ErrInvalid for the first operation that was not accepted; client.ErrClosed.
//
// Cost: one system call for each node, 0 allocs.
func (q *OpQueue) Submit(ops []kv.Op) (n int, err error) { // hot: 0 allocs
	if q.interrupted.Err() != nil {
		return 0, errQueueClosed
	}
	for n < len(ops) && len(q.free) > 0 && err == nil {
		o := &ops[n]
		if k := len(o.Key); k < 1 || k > nvme.MaxKVKey {
			err = fmt.Errorf("%w: operation %d of the batch: a key of %d bytes: must be 1 to %d", client.ErrInvalid, n,
				k, nvme.MaxKVKey)
			break
		}
		r := q.free[len(q.free)-1]
		q.free = q.free[:len(q.free)-1]
		a := args(o)
		r.tag, r.lane = o.Tag, q.lane
		r.err = r.begin(&a)
		q.batch = append(q.batch, r)
		n++
	}
	if n == 0 {
		return n, err
	}
	e := q.e
	e.mu.Lock()
	for i, r := range q.batch {
		if r.err != nil {
			r.finish(r.err)
		} else {
			e.startLocked(r)
		}
		q.batch[i] = nil
	}
	q.batch = q.batch[:0]
	e.leave()
	return n, err
}

var errQueueClosed = fmt.Errorf("key value queue: %w", client.ErrClosed)

// Poll writes results to dst and returns how many. With wait 0 it only looks; with wait > 0 it waits up to that long
// for the first one; with wait < 0 until there is one.
//
// Errors: client.ErrClosed after Interrupt.
//
// Cost: 0 allocs.
func (q *OpQueue) Poll(dst []kv.Result, wait time.Duration) (n int, err error) { // hot: 0 allocs
	if n = q.collect(dst, wait != 0); n > 0 || len(dst) == 0 {
		return n, nil
	}
	if q.interrupted.Err() != nil {
		return 0, errQueueClosed
	}
	if wait == 0 {
		return 0, nil
	}
	var late <-chan time.Time
	if wait > 0 {
		q.timer.Reset(wait)
		defer q.timer.Stop()
		late = q.timer.C
	}
	for {
		select {
		case <-q.wake:
			if n = q.collect(dst, true); n > 0 {
				return n, nil
			}
		case <-late:
			return 0, nil
		case <-q.interrupted.Done():
			return 0, errQueueClosed
		}
	}
}

// collect takes results that are there. waits: the caller waits for wake if there are none.
func (q *OpQueue) collect(dst []kv.Result, waits bool) (n int) { // hot: 0 allocs
	q.mu.Lock()
	defer q.mu.Unlock()
	for n < len(dst) && q.begin < len(q.done) {
		r := q.done[q.begin]
		q.done[q.begin] = nil
		q.begin++
		dst[n] = r.res
		dst[n].Tag, dst[n].Err = r.tag, r.err
		r.op.Forget()
		r.args.Value, r.err = nil, nil
		q.free = append(q.free, r)
		n++
	}
	if q.begin == len(q.done) {
		q.done, q.begin = q.done[:0], 0
	}
	q.waits = waits && n == 0
	return n
}

// put adds requests that have ended.
func (q *OpQueue) put(done []*request) { // hot: 0 allocs
	q.mu.Lock()
	if len(q.done)+len(done) > cap(q.done) { // there are as many places as requests
		q.done = q.done[:copy(q.done, q.done[q.begin:])]
		q.begin = 0
	}
	q.done = append(q.done, done...)
	wake := q.waits
	q.waits = false
	q.mu.Unlock()
	if wake {
		select {
		case q.wake <- struct{}{}:
		default:
		}
	}
}

// Interrupt makes Poll and Submit return client.ErrClosed and wakes a blocked Poll. Any goroutine may call it.
func (q *OpQueue) Interrupt() { q.interrupt() }

// Close ends the queue. Outstanding operations end with client.ErrClosed, and client.ErrIndeterminate if their outcome
// is unknown; their results are dropped, and the buffers are the caller's afterwards. The owner calls it when no Poll
// or Submit is under way. Idempotent.
func (q *OpQueue) Close() error {
	q.closing.Do(func() {
		q.Interrupt()
		e := q.e
		e.mu.Lock()
		now := e.s.now()
		for _, r := range q.all {
			r.end(now, client.ErrClosed)
		}
		e.leave()
		var dropped [64]kv.Result
		for q.Outstanding() > 0 {
			if q.collect(dropped[:], true) == 0 {
				<-q.wake
			}
		}
		e.give(q.all...)
	})
	return nil
}
