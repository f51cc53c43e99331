package kv

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/client/internal/kvop"
	"jbofd/internal/nvme"
)

// Kind is the kind of an Op.
type Kind = kvop.Kind

// Kinds of operations: see the methods of Namespace. The result of Exists for a key that does not exist is
// ErrKeyNotFound.
const (
	Get          = kvop.Get
	Put          = kvop.Put
	PutIfAbsent  = kvop.PutIfAbsent
	PutIfPresent = kvop.PutIfPresent
	Delete       = kvop.Delete
	Exists       = kvop.Exists

	GetVersion      = kvop.GetVersion
	PutIfVersion    = kvop.PutIfVersion
	PutIfNewer      = kvop.PutIfNewer
	DeleteIfVersion = kvop.DeleteIfVersion
	DeleteIfNewer   = kvop.DeleteIfNewer
)

// Op is one operation for an OpQueue.
type Op struct {
	Kind Kind
	// Key is copied by Submit.
	Key []byte
	// Value is the value that a Put stores, or the buffer of a Get. It belongs to the queue until Poll has returned the
	// result.
	Value []byte
	// Tag is copied to the Result.
	Tag uint64

	// What follows needs extended key-value. Version is the one that PutIfVersion and DeleteIfVersion expect, and that
	// PutIfNewer and DeleteIfNewer give.
	Version uint64
	// Expires is when the value of a put, or the tombstone that a delete leaves, expires: in seconds since 1970, or
	// from now on if ExpiresIn is set; 0: never.
	Expires              uint32
	ExpiresIn, Tombstone bool
	// WantVersion: the Result must have the version that a Put, PutIfAbsent, PutIfPresent or Delete has given.
	WantVersion bool
}

// args returns the operation without an identity.
func (o *Op) args() kvop.Args { // hot: 0 allocs
	return kvop.Args{Kind: o.Kind, Key: o.Key, Value: o.Value, Version: o.Version, Expires: o.Expires,
		Relative: o.ExpiresIn, Tombstone: o.Tombstone, WantVersion: o.WantVersion}
}

// Result is the outcome of an Op.
type Result struct {
	Tag  uint64
	Kind Kind
	// Size is, after a Get or GetVersion, the size of the whole value. Op.Value has as much of it as fits.
	Size int
	// Version is that of the value after a GetVersion, or the one that a write has given. With ErrVersionMismatch and
	// ErrSuperseded it is the one that the key has. 0: the target has not reported one, or the key does not exist.
	// Expires is when the value of a GetVersion expires, in seconds since 1970; 0: never.
	Version uint64
	Expires uint32
	// Err is nil, or the error that the method of Namespace would return. Errors that follow from the status alone,
	// such as ErrKeyNotFound, are not wrapped, in order not to allocate.
	Err error
}

// OpQueue is a queue of operations on a Namespace for one goroutine: batches of operations go in, results come out in
// the order in which the operations finish, and nothing is allocated on the way.
//
//	for {
//		n, err := q.Poll(results, -1)    // finished operations
//		...                              // build the next batch
//		q.Submit(ops[:k])                // one writev
//	}
//
// Operations that are outstanding together may be carried out in any order. All methods but Interrupt must be called by
// one goroutine at a time.
//
// When the connection is lost, the queue opens another queue pair, which belongs to a new association, and repeats the
// outstanding operations there. With extended key-value all writes have identities for that; without, PutIfAbsent and
// PutIfPresent are not repeated: their result is client.ErrIndeterminate. After a status of a transient nature an
// operation is repeated up to client.Options.MaxRetries times. Namespace describes what repeating means.
//
// The queue fails when the controller has given up or was closed. Submit and Poll return an error then; whether
// outstanding operations took effect is unknown, and their buffers are the caller's again.
//
// As a client.QPair, an OpQueue does not time operations out: call Poll with a bound and decide.
type OpQueue struct {
	n    *Namespace
	base time.Time // origin of the clock
	// retries is client.Options.MaxRetries.
	retries int
	qp      *client.QPair
	err     error
	slots   []slot
	free    []uint16 // slots without an operation
	unsent  []uint16 // slots whose command is to be sent, in order
	// later has the slots whose command has had a transient status. They are sent again at due.
	later []uint16
	due   time.Duration // since base
	ready []Result      // results of operations that have ended without a completion
	cmds  []client.Command
	comps []client.Completion

	// ctx ends with Interrupt or Close. opened, of capacity 1, receives the result of reopen, of which at most one
	// runs.
	ctx    context.Context
	cancel context.CancelFunc
	opened chan opened
	wg     sync.WaitGroup

	closeOnce sync.Once
	closeErr  error

	mu sync.Mutex
	// live is qp, for Interrupt.
	live *client.QPair
}

type slot struct {
	op  kvop.Op
	tag uint64
	// first is when the command was first sent, since base.
	first time.Duration
	// busy: the slot holds an operation. sent: its command is outstanding. tries: how often the operation was repeated
	// because of a status.
	busy, sent bool
	tries      uint8
	// again: the command has been sent before.
	again bool
}

type opened struct {
	qp  *client.QPair
	err error
}

// OpenQueue opens an OpQueue. It uses a queue pair, which client.Options.QPairs must have reserved. Close must be
// called.
//
// Errors: as Controller.OpenQPair.
func (n *Namespace) OpenQueue(ctx context.Context) (*OpQueue, error) {
	qp, err := n.c.OpenQPair(ctx)
	if err != nil {
		return nil, err
	}
	depth := qp.Depth()
	q := &OpQueue{
		n: n, base: time.Now(), retries: min(n.c.Options().MaxRetries, 255), qp: qp, live: qp,
		opened: make(chan opened, 1),
		slots:  make([]slot, depth), free: make([]uint16, depth), unsent: make([]uint16, 0, depth),
		later: make([]uint16, 0,
			depth), ready: make([]Result, 0, depth),
		cmds: make([]client.Command, depth), comps: make([]client.Completion, depth),
	}
	for i := range q.free {
		q.free[i] = uint16(depth - 1 - i)
	}
	q.ctx, q.cancel = context.WithCancel(context.Background())
	return q, nil
}

// Depth returns how many operations may be outstanding.
func (q *OpQueue) Depth() int { return len(q.slots) }

// Free returns how many operations Submit accepts now.
func (q *OpQueue) Free() int { return len(q.free) }

// Outstanding returns how many operations were submitted and not yet returned by Poll.
func (q *OpQueue) Outstanding() int { return len(q.slots) - len(q.free) + len(q.ready) }

// Submit accepts operations in order, sends them as one batch, and returns how many it has accepted: fewer than all if
// the queue is full.
//
// Errors: client.ErrInvalid, ErrValueTooLarge for the first operation that was not accepted; with other errors the
// queue has failed.
//
// Cost: one system call a batch, 0 allocs, once buffers for long keys have grown.
func (q *OpQueue) Submit(ops []Op) (n int, err error) { // hot: 0 allocs
	if q.err != nil {
		return 0, q.err
	}
	space := &q.n.geo.Load().space
	for n < len(ops) && len(q.free) > 0 && err == nil {
		i := q.free[len(q.free)-1]
		s, o := &q.slots[i], &ops[n]
		a := o.args()
		q.n.identify(space, &s.op, &a)
		if err = s.op.Start(space, &a); err == nil {
			q.free = q.free[:len(q.free)-1]
			s.tag, s.busy, s.tries, s.again = o.Tag, true, 0, false
			q.unsent = append(q.unsent, i)
			n++
		} else {
			q.n.ended(&s.op, true)
		}
	}
	q.flush()
	if err != nil {
		err = fmt.Errorf("operation %d of the batch: %w", n, err)
	}
	return n, err
}

// flush sends the unsent commands, as many as the queue pair accepts.
func (q *OpQueue) flush() { // hot: 0 allocs
	for len(q.unsent) > 0 && q.qp != nil {
		now := time.Since(q.base)
		for k, i := range q.unsent {
			s := &q.slots[i]
			if !s.again {
				s.first, s.again = now, true
			}
			q.cmds[k] = s.op.Cmd
			q.cmds[k].Tag = uint64(i)
		}
		n, err := q.qp.Submit(q.cmds[:len(q.unsent)])
		for k, i := range q.unsent[:n] {
			q.slots[i].sent = true
			q.cmds[k].Data = nil
		}
		bad := errors.Is(err, client.ErrInvalid)
		if bad {
			q.finish(q.unsent[n], err)
			n++
		}
		q.unsent = q.unsent[:copy(q.unsent, q.unsent[n:])]
		if err != nil && !bad {
			q.queuePairLost(err)
		}
		if err == nil {
			return
		}
	}
}

// finish ends an operation without a completion.
func (q *OpQueue) finish(i uint16, err error) {
	s := &q.slots[i]
	q.ready = append(q.ready, Result{Tag: s.tag, Kind: s.op.Kind(), Err: err})
	q.release(i, !errors.Is(err, client.ErrIndeterminate))
}

func (q *OpQueue) release(i uint16, answered bool) { // hot: 0 allocs
	s := &q.slots[i]
	q.n.ended(&s.op, answered)
	s.op.Forget()
	s.busy, s.sent = false, false
	q.free = append(q.free, i)
}

// Poll writes results to dst and returns how many. With wait 0 it only looks; with wait > 0 it waits up to
// that long for the first one; with wait < 0 until there is one.
//
// Errors: the queue has failed, see OpQueue. Results that are ready are returned first.
//
// Cost: one system call when results are there, 0 allocs.
func (q *OpQueue) Poll(dst []Result, wait time.Duration) (int, error) { // hot: 0 allocs
	var start time.Duration
	if wait > 0 {
		start = time.Since(q.base)
	}
	for left := wait; ; {
		pause := q.sendLater(left)
		if len(q.ready) > 0 {
			n := copy(dst, q.ready)
			q.ready = q.ready[:copy(q.ready, q.ready[n:])]
			return n, nil
		}
		if q.err != nil {
			return 0, q.err
		}
		some := false
		if q.qp == nil {
			some = q.await(pause)
		} else {
			k, err := q.qp.Poll(q.comps[:min(len(dst), len(q.comps))], pause)
			n := q.complete(dst, q.comps[:k])
			q.flush()
			if err != nil && q.qp != nil {
				q.queuePairLost(err)
			}
			if n > 0 {
				return n, nil
			}
			some = k > 0 || err != nil
		}
		if wait > 0 {
			left = wait - (time.Since(q.base) - start)
		}
		if wait == 0 && !some || wait > 0 && left <= 0 {
			return 0, nil
		}
	}
}

// retryPause, times the number of tries, is how long a command with a transient status waits before it is repeated.
const retryPause = 50 * time.Millisecond

// sendLater sends the commands that are due. It returns how long Poll may wait, at most left, before it must call
// sendLater again.
func (q *OpQueue) sendLater(left time.Duration) time.Duration { // hot: 0 allocs
	if len(q.later) == 0 {
		return left
	}
	until := q.due - time.Since(q.base)
	if until <= 0 {
		q.unsent = append(q.unsent, q.later...)
		q.later = q.later[:0]
		q.flush()
		return left
	}
	if left >= 0 {
		return min(left, until)
	}
	return until
}

// complete processes completions. It writes the results of operations that have ended to dst; the next commands of the
// others become unsent.
func (q *OpQueue) complete(dst []Result, comps []client.Completion) (n int) { // hot: 0 allocs
	space := &q.n.geo.Load().space
	for k := range comps {
		i := uint16(comps[k].Tag)
		s := &q.slots[i]
		s.sent = false
		if int(s.tries) < q.retries && s.op.MayRepeat() && host.Passing(comps[k].Status) {
			s.tries++
			if comps[k].Status.Code() == nvme.CommandInterrupted {
				s.op.Lost() // what was done may be open
			}
			if len(q.later) == 0 {
				q.due = time.Since(q.base) + time.Duration(s.tries)*retryPause
			}
			q.later = append(q.later, i)
			continue
		}
		if !s.op.Step(space, &comps[k]) {
			s.again = false
			q.unsent = append(q.unsent, i)
			continue
		}
		dst[n] = Result{Tag: s.tag, Kind: s.op.Kind(), Size: s.op.Size, Version: s.op.Version, Expires: s.op.Expires,
			Err: s.op.Err}
		if !s.op.Status.OK() {
			if dst[n].Err = host.OfStatus(s.op.Status); dst[n].Err == nil {
				dst[n].Err = host.CheckStatus(s.op.Kind().String(), s.op.Status)
			}
		}
		n++
		q.release(i, true)
	}
	return n
}

// queuePairLost handles the end of the queue pair. Outstanding operations become unsent if they may be repeated, and
// end as indeterminate otherwise.
func (q *OpQueue) queuePairLost(err error) {
	// Its errors say once more that the connection is gone.
	_ = q.qp.Close()
	q.setQueuePair(nil)
	if q.ctx.Err() != nil || !errors.Is(err, client.ErrConnectionLost) {
		q.fail(err)
		return
	}
	for i := range q.slots {
		s := &q.slots[i]
		if !s.busy || !s.sent {
			continue
		}
		s.sent = false
		if s.op.MayRepeat() {
			s.op.Lost()
			q.unsent = append(q.unsent, uint16(i))
		} else {
			q.finish(uint16(i), fmt.Errorf("%s: %w: %w", s.op.Kind(), client.ErrIndeterminate, err))
		}
	}
	q.wg.Add(1)
	go q.reopen()
}

func (q *OpQueue) fail(err error) {
	if q.ctx.Err() != nil {
		err = client.ErrClosed
	}
	q.err = fmt.Errorf("key value queue: %w", err)
}

func (q *OpQueue) setQueuePair(qp *client.QPair) {
	q.mu.Lock()
	q.qp, q.live = qp, qp
	q.mu.Unlock()
}

// reopen opens a queue pair to replace one that was lost.
func (q *OpQueue) reopen() {
	defer q.wg.Done()
	o := q.n.c.Options()
	for begin := time.Now(); ; {
		qp, err := q.n.c.OpenQPair(q.ctx)
		over := q.n.c.Err()
		if over == nil && time.Since(begin) > o.CtrlLossTimeout {
			over = fmt.Errorf("%w: gave up after %s", client.ErrConnectionLost,
				time.Since(begin).Round(time.Millisecond))
		}
		if err != nil && over != nil {
			err = fmt.Errorf("%w: %w", over, err)
		}
		if err == nil || over != nil || q.ctx.Err() != nil {
			q.opened <- opened{qp, err}
			return
		}
		t := time.NewTimer(o.ReconnectDelay)
		select {
		case <-t.C:
		case <-q.ctx.Done():
		}
		t.Stop()
	}
}

// await waits for the result of reopen, up to left if that is not negative. It returns false if there is none yet.
func (q *OpQueue) await(left time.Duration) bool {
	var o opened
	select {
	case o = <-q.opened:
	default:
		if left == 0 {
			return false
		}
		var late <-chan time.Time
		if left > 0 {
			t := time.NewTimer(left)
			defer t.Stop()
			late = t.C
		}
		select {
		case o = <-q.opened:
		case <-late:
			return false
		}
	}
	if o.err != nil {
		q.fail(o.err)
		return true
	}
	q.setQueuePair(o.qp)
	if q.ctx.Err() != nil { // Interrupt was called before adopt
		o.qp.Interrupt()
	}
	q.dropLateRetries()
	q.flush()
	return true
}

// dropLateRetries ends the operations that must not be repeated any more, because the target may have forgotten their
// identities.
func (q *OpQueue) dropLateRetries() {
	now, keep := time.Since(q.base), q.unsent[:0]
	for _, i := range q.unsent {
		s := &q.slots[i]
		if s.op.Retry() {
			if err := q.n.mayRetry(now - s.first); err != nil {
				q.finish(i, fmt.Errorf("%s: %w: %w", s.op.Kind(), client.ErrIndeterminate, err))
				continue
			}
		}
		keep = append(keep, i)
	}
	q.unsent = keep
}

// Interrupt makes Poll and Submit return client.ErrClosed and wakes a blocked Poll. Any goroutine may call it.
func (q *OpQueue) Interrupt() {
	q.cancel()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.live != nil {
		q.live.Interrupt()
	}
}

// Close ends the queue. It waits for outstanding commands as client.QPair.Close does; their results are dropped, and
// the buffers are the caller's afterwards. The owner calls it when no Poll or Submit is under way. Idempotent.
func (q *OpQueue) Close() error {
	q.closeOnce.Do(func() {
		q.Interrupt()
		q.wg.Wait()
		select {
		case o := <-q.opened:
			if o.err == nil {
				q.setQueuePair(o.qp)
			}
		default:
		}
		if q.qp != nil {
			q.closeErr = q.qp.Close()
			q.setQueuePair(nil)
		}
		if q.err == nil {
			q.fail(client.ErrClosed)
		}
		for i := range q.slots {
			q.n.ended(&q.slots[i].op, false)
		}
	})
	return q.closeErr
}
