package client

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"jbofd/client/internal/hosttcp"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// queue is a queue pair for any number of goroutines: each submits under the mutex
// and sends what is to be sent, one goroutine receives, and a second one, idle as a rule, goes
// on sending when the socket was full.
//
// No system call that touches a command's buffer is under way when mu is free. That
// is what lets a cancelled command give its buffer back at once.
type queue struct {
	id    uint16
	depth int
	// onFail is told the queue's end, once; it must not call back.
	onFail func(error)
	free   chan *call    // calls at rest; a caller holds one while its command is out
	kick   chan struct{} // capacity 1: the socket was full
	dead   chan struct{} // closed when err is set
	// pair, of capacity 1, is held while taking two calls, so that two fused pairs
	// cannot wait for each other's second call.
	pair chan struct{}
	wg   sync.WaitGroup

	mu    sync.Mutex
	w     *wire
	err   error // why the queue failed
	calls []call
	comps []Completion // scratch of the receiver
}

// call is one caller's command.
type call struct {
	index uint64
	// done gets the completion; capacity 1, so the receiver never blocks.
	done chan Completion
	// abandoned: nobody waits; the receiver returns the call to free. Guarded by queue.mu.
	abandoned bool
}

// newQueue takes over w, whose handshake is done. close must be called.
func newQueue(w *wire, id uint16, onFail func(error)) *queue {
	n := w.m.Depth()
	q := &queue{
		id: id, depth: n, w: w, onFail: onFail,
		free: make(chan *call, n), kick: make(chan struct{}, 1), dead: make(chan struct{}), pair: make(chan struct{}, 1),
		calls: make([]call, n), comps: make([]Completion, min(n, 64)),
	}
	for i := range q.calls {
		c := &q.calls[i]
		c.index, c.done = uint64(i), make(chan Completion, 1)
		q.free <- c
	}
	q.wg.Add(2)
	go q.receive()
	go q.pump()
	return q
}

// detachedError marks a command whose caller left before it completed; cid is for an Abort.
type detachedError struct {
	cause error
	cid   uint16
}

func (e *detachedError) Error() string { return e.cause.Error() }
func (e *detachedError) Unwrap() error { return e.cause }

// do submits the commands in order, in one piece (two of them for a fused pair), and waits for
// them. It returns when all have completed, the queue has failed, or ctx is done; in every case
// the buffers are the caller's again. comps has room for all.
func (q *queue) do(ctx context.Context, cmds []Command, comps []Completion) error {
	var held [2]*call
	if len(cmds) > len(held) || len(cmds) > q.depth {
		return fmt.Errorf("%w: %d commands at once on a queue of depth %d", ErrInvalid, len(cmds), q.depth)
	}
	if err := q.take(ctx, held[:len(cmds)]); err != nil {
		return err
	}
	var cids [2]uint16
	q.mu.Lock()
	if q.err != nil {
		q.mu.Unlock()
		return q.err
	}
	for i := range cmds {
		cmds[i].Tag = held[i].index
		cid, err := q.w.m.Submit(&cmds[i])
		if err != nil {
			// Calls and slots are equal in number, so this is the command's fault; of a
			// fused pair both have the same shape, so it is the first that fails.
			q.mu.Unlock()
			for _, c := range held[i:len(cmds)] {
				q.free <- c
			}
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		cids[i] = cid
	}
	q.sendLocked()
	q.mu.Unlock()
	for i := range cmds {
		c := held[i]
		select {
		case comps[i] = <-c.done:
			q.free <- c
		case <-ctx.Done():
			if err := q.abandon(held[i:len(cmds)], cids[i:len(cmds)], ctx.Err()); err != nil {
				return err
			}
			comps[i] = <-c.done // completed meanwhile
			q.free <- c
		case <-q.dead:
			select {
			case comps[i] = <-c.done:
				q.free <- c
			default:
				return q.failure()
			}
		}
	}
	return nil
}

// take gets calls at rest for a command each.
func (q *queue) take(ctx context.Context, calls []*call) error {
	if len(calls) > 1 {
		select {
		case q.pair <- struct{}{}:
			defer func() { <-q.pair }()
		case <-q.dead:
			return q.failure()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for i := range calls {
		select {
		case calls[i] = <-q.free:
		case <-q.dead:
			return q.failure()
		case <-ctx.Done():
			for _, c := range calls[:i] {
				q.free <- c
			}
			return ctx.Err()
		}
	}
	return nil
}

// abandon takes the buffers of the calls back. It returns nil if the first of them has
// completed after all.
func (q *queue) abandon(calls []*call, cids []uint16, cause error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(calls[0].done) != 0 {
		return nil
	}
	for i, c := range calls {
		if len(c.done) != 0 {
			<-c.done
			q.free <- c
			continue
		}
		c.abandoned = true
		q.w.m.Detach(cids[i])
	}
	return &detachedError{cause: cause, cid: cids[0]}
}

// sendLocked sends without blocking and leaves the rest to pump. Called with mu held.
func (q *queue) sendLocked() {
	if q.err != nil {
		return
	}
	blocked, err := q.w.send()
	if err != nil {
		q.failLocked(err)
		return
	}
	if blocked {
		select {
		case q.kick <- struct{}{}:
		default:
		}
	}
}

// receive is the receiving goroutine.
func (q *queue) receive() {
	defer q.wg.Done()
	step := func(fd uintptr) bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.err != nil {
			return true
		}
		q.w.recvFD(fd)
		n, err := q.w.recvN, q.w.recvErr
		q.deliverLocked()
		if err != nil {
			q.failLocked(err)
			return true
		}
		if n > 0 {
			q.sendLocked()
		}
		return n > 0
	}
	for {
		if err := q.w.rc.Read(step); err != nil {
			q.fail(err)
		}
		select {
		case <-q.dead:
			return
		default:
		}
	}
}

// deliverLocked hands completions to their callers. Called with mu held.
func (q *queue) deliverLocked() {
	for {
		n := q.w.m.Completions(q.comps)
		if n == 0 {
			return
		}
		for _, comp := range q.comps[:n] {
			c := &q.calls[comp.Tag]
			if c.abandoned {
				c.abandoned = false
				q.free <- c
				continue
			}
			c.done <- comp
		}
	}
}

// pump is the goroutine that waits until the socket takes bytes again.
func (q *queue) pump() {
	defer q.wg.Done()
	step := func(fd uintptr) bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.err != nil {
			return true
		}
		blocked, err := q.w.send()
		// Sending may finish commands that were answered early.
		q.deliverLocked()
		if err != nil {
			q.failLocked(err)
			return true
		}
		return !blocked
	}
	for {
		select {
		case <-q.dead:
			return
		case <-q.kick:
		}
		if err := q.w.rc.Write(step); err != nil {
			q.fail(err)
		}
	}
}

// fail ends the queue: every caller gets err, and the connection is shut down.
func (q *queue) fail(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.failLocked(err)
}

func (q *queue) failLocked(err error) {
	if q.err != nil {
		return
	}
	_, _ = q.w.send() // a TermReq, if the target is at fault; err is what counts
	q.err = fmt.Errorf("queue %d: %w", q.id, classify(err))
	close(q.dead)
	q.w.shutdown()
	q.onFail(q.err)
}

// setInCapsule sets how much data later commands may carry in their capsules.
func (q *queue) setInCapsule(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.w.m.SetInCapsuleBytes(n)
}

// failure returns why the queue failed.
func (q *queue) failure() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

// tick ages the outstanding commands and fails the queue if one of them is older than
// limit ticks (0: no limit).
func (q *queue) tick(limit uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if oldest := q.w.m.Tick(q.id == 0); limit != 0 && oldest > limit {
		q.failLocked(fmt.Errorf("%w: %w: a command got no answer for %d s", ErrConnectionLost, ErrTimeout, oldest-1))
	}
}

// close fails the queue with why and waits for its goroutines.
func (q *queue) close(why error) error {
	q.fail(why)
	q.wg.Wait()
	return q.w.close()
}

// isFatal reports whether err is the machine's verdict over the target.
func isFatal(err error) bool {
	var f *pdu.FatalError
	return errors.As(err, &f) || errors.Is(err, hosttcp.ErrTermReq)
}
