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
//		q.Submit(ops[:k])
//	}
//
// Operations that are outstanding together may be carried out in any order. Each is carried out as by the methods of
// Store, by a goroutine of the queue, and ends after Options.Timeout at the latest. All methods but Interrupt must be
// called by one goroutine at a time.
type OpQueue struct {
	s     *Store
	slots []slot
	free  []*slot
	// work has the operations to carry out, done those that have ended; each has room for all.
	work, done chan *slot
	timer      *time.Timer
	workers    sync.WaitGroup
	// interrupted ends with Interrupt.
	interrupted context.Context
	interrupt   context.CancelFunc
	closing     sync.Once
}

// slot is one operation.
type slot struct {
	r   *request
	op  kv.Op
	key [nvme.MaxKVKey]byte
	res kv.Result
}

// OpenQueue opens an OpQueue with room for depth operations, 1 to MaxDepth. Close must be called, before that of the
// Store.
//
// Errors: client.ErrInvalid; client.ErrClosed.
func (s *Store) OpenQueue(depth int) (*OpQueue, error) {
	if depth < 1 || depth > MaxDepth {
		return nil, fmt.Errorf("%w: a queue of depth %d, must be 1 to %d", client.ErrInvalid, depth, MaxDepth)
	}
	q := &OpQueue{s: s, slots: make([]slot, depth), work: make(chan *slot, depth), done: make(chan *slot, depth),
		timer: time.NewTimer(time.Hour)}
	q.timer.Stop()
	q.interrupted, q.interrupt = context.WithCancel(context.Background())
	for i := range q.slots {
		sl := &q.slots[i]
		r, err := s.take()
		if err != nil {
			q.giveBack()
			return nil, err
		}
		sl.r = r
		q.free = append(q.free, sl)
	}
	for range depth {
		q.workers.Go(q.carryOut)
	}
	return q, nil
}

// carryOut carries out operations, one after the other.
func (q *OpQueue) carryOut() { // hot: 0 allocs
	for sl := range q.work {
		a := args(&sl.op)
		var err error
		sl.res, err = sl.r.run(&a, false)
		sl.res.Tag, sl.res.Err = sl.op.Tag, err
		q.done <- sl
	}
}

// Depth returns how many operations may be outstanding.
func (q *OpQueue) Depth() int { return len(q.slots) }

// Free returns how many operations Submit accepts now.
func (q *OpQueue) Free() int { return len(q.free) }

// Outstanding returns how many operations were submitted and not yet returned by Poll.
func (q *OpQueue) Outstanding() int { return len(q.slots) - len(q.free) }

// Submit accepts operations in order and returns how many: fewer than all if the queue is full. Op.Key is copied.
//
// Errors: client.ErrInvalid for the first operation that was not accepted; client.ErrClosed.
//
// Cost: 0 allocs.
func (q *OpQueue) Submit(ops []kv.Op) (n int, err error) { // hot: 0 allocs
	if q.interrupted.Err() != nil {
		return 0, errQueueClosed
	}
	for n < len(ops) && len(q.free) > 0 {
		o := &ops[n]
		if k := len(o.Key); k < 1 || k > nvme.MaxKVKey {
			return n, fmt.Errorf("%w: operation %d of the batch: a key of %d bytes: must be 1 to %d", client.ErrInvalid,
				n, k, nvme.MaxKVKey)
		}
		sl := q.free[len(q.free)-1]
		q.free = q.free[:len(q.free)-1]
		sl.op = *o
		sl.op.Key = sl.key[:copy(sl.key[:], o.Key)]
		sl.r.prepare()
		q.work <- sl
		n++
	}
	return n, nil
}

var errQueueClosed = fmt.Errorf("key value queue: %w", client.ErrClosed)

// Poll writes results to dst and returns how many. With wait 0 it only looks; with wait > 0 it waits up to that long
// for the first one; with wait < 0 until there is one.
//
// Errors: client.ErrClosed after Interrupt.
//
// Cost: 0 allocs.
func (q *OpQueue) Poll(dst []kv.Result, wait time.Duration) (n int, err error) { // hot: 0 allocs
	if n = q.collect(dst, 0); n > 0 || len(dst) == 0 {
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
	select {
	case sl := <-q.done:
		q.finish(sl, &dst[0])
		return q.collect(dst, 1), nil
	case <-late:
		return 0, nil
	case <-q.interrupted.Done():
		return 0, errQueueClosed
	}
}

// collect appends the results that are there to the first n of dst.
func (q *OpQueue) collect(dst []kv.Result, n int) int { // hot: 0 allocs
	for n < len(dst) {
		select {
		case sl := <-q.done:
			q.finish(sl, &dst[n])
			n++
		default:
			return n
		}
	}
	return n
}

func (q *OpQueue) finish(sl *slot, dst *kv.Result) { // hot: 0 allocs
	*dst = sl.res
	sl.r.op.Forget()
	sl.op, sl.res = kv.Op{}, kv.Result{}
	q.free = append(q.free, sl)
}

// Interrupt makes Poll and Submit return client.ErrClosed and wakes a blocked Poll. Any goroutine may call it.
func (q *OpQueue) Interrupt() { q.interrupt() }

// Close ends the queue. Outstanding operations end with client.ErrClosed, and client.ErrIndeterminate if their outcome
// is unknown; their results are dropped, and the buffers are the caller's afterwards. The owner calls it when no Poll
// or Submit is under way. Idempotent.
func (q *OpQueue) Close() error {
	q.closing.Do(func() {
		q.Interrupt()
		for i := range q.slots {
			q.slots[i].r.cancelAll(client.ErrClosed)
		}
		close(q.work)
		q.workers.Wait()
		q.giveBack()
	})
	return nil
}

func (q *OpQueue) giveBack() {
	for i := range q.slots {
		if r := q.slots[i].r; r != nil {
			q.s.give(r)
		}
	}
}
