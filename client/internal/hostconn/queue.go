package hostconn

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"jbofd/client/internal/host"
	"jbofd/client/internal/window"
	"jbofd/internal/nvme"
)

// Queue is a queue pair for any number of goroutines: each submits under the mutex
// and sends what is to be sent, one goroutine receives, and a second one, idle as a rule, goes
// on sending when the socket was full.
//
// No system call that touches a command's buffer is under way when mu is free, and no device
// knows where one lies. That is what lets a cancelled command give its buffer back at once.
type Queue struct {
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
	// gate, if not nil, is what commands pass first; set before the queue is shared.
	gate *window.Gate

	mu    sync.Mutex
	w     host.Conn
	m     host.Machine // of w
	cmd   host.Command // scratch of Do, so that callers' need not live on the heap
	err   error        // why the queue failed
	calls []call
	comps []host.Completion // scratch of the receiver
}

// call is one caller's command.
type call struct {
	index uint64
	// done gets the completion; capacity 1, so the receiver never blocks.
	done chan host.Completion
	// ticket is the command's part of a window, if there is a gate. Guarded by Queue.mu.
	ticket window.Ticket
	// abandoned: nobody waits; the receiver returns the call to free. Guarded by Queue.mu.
	abandoned bool
}

// NewQueue takes over w, which is connected. Close must be called.
func NewQueue(w host.Conn, id uint16, onFail func(error)) *Queue {
	n := w.Machine().Depth()
	q := &Queue{
		id: id, depth: n, w: w, m: w.Machine(), onFail: onFail,
		free: make(chan *call, n), kick: make(chan struct{}, 1), dead: make(chan struct{}), pair: make(chan struct{}, 1),
		calls: make([]call, n), comps: make([]host.Completion, min(n, 64)),
	}
	for i := range q.calls {
		c := &q.calls[i]
		c.index, c.done = uint64(i), make(chan host.Completion, 1)
		q.free <- c
	}
	q.wg.Add(2)
	go q.receive()
	go q.pump()
	return q
}

// DetachedError marks a command whose caller left before it completed; cid is for an Abort.
type DetachedError struct {
	Cause error
	CID   uint16
}

func (e *DetachedError) Error() string { return e.Cause.Error() }
func (e *DetachedError) Unwrap() error { return e.Cause }

// Do submits the commands in order, in one piece (two of them for a fused pair), and waits for
// them. It returns when all have completed, the queue has failed, or ctx is done; in every case
// the buffers are the caller's again. comps has room for all.
func (q *Queue) Do(ctx context.Context, cmds []host.Command, comps []host.Completion) error {
	var held [2]*call
	if len(cmds) > len(held) || len(cmds) > q.depth {
		return fmt.Errorf("%w: %d commands at once on a queue of depth %d", host.ErrInvalid, len(cmds), q.depth)
	}
	var tickets [2]window.Ticket
	if q.gate != nil {
		if err := q.gate.Acquire(ctx, q.dead, cmds, tickets[:]); err != nil {
			if errors.Is(err, window.ErrDead) {
				return q.failure()
			}
			return err
		}
	}
	if err := q.take(ctx, held[:len(cmds)]); err != nil {
		q.release(tickets[:len(cmds)])
		return err
	}
	var cids [2]uint16
	q.mu.Lock()
	if q.err != nil {
		q.mu.Unlock()
		return q.err // and with it the gate is of no use any more
	}
	for i := range cmds {
		held[i].ticket = tickets[i]
		q.cmd = cmds[i]
		q.cmd.Tag = held[i].index
		cid, err := q.m.Submit(&q.cmd)
		q.cmd.Data = nil
		if err != nil {
			// Calls and slots are equal in number, so this is the command's fault; of a
			// fused pair both have the same shape, so it is the first that fails.
			q.mu.Unlock()
			for _, c := range held[i:len(cmds)] {
				q.free <- c
			}
			q.release(tickets[i:len(cmds)])
			return fmt.Errorf("%w: %w", host.ErrInvalid, err)
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

// release gives tickets back whose commands were not sent.
func (q *Queue) release(tickets []window.Ticket) {
	if q.gate == nil {
		return
	}
	for _, t := range tickets {
		q.gate.Release(t, 0)
	}
}

// take gets calls at rest for a command each.
func (q *Queue) take(ctx context.Context, calls []*call) error {
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
func (q *Queue) abandon(calls []*call, cids []uint16, cause error) error {
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
		q.m.Detach(cids[i])
	}
	return &DetachedError{Cause: cause, CID: cids[0]}
}

// sendLocked sends without blocking and leaves the rest to pump. Called with mu held.
func (q *Queue) sendLocked() {
	if q.err != nil {
		return
	}
	blocked, err := q.w.Send()
	q.deliverLocked() // sending finishes commands that were answered early
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
func (q *Queue) receive() {
	defer q.wg.Done()
	step := func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.err != nil {
			return true
		}
		n, err := q.w.Recv()
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
		if err := q.w.AwaitRecv(step); err != nil {
			q.Fail(err)
		}
		select {
		case <-q.dead:
			return
		default:
		}
	}
}

// deliverLocked hands completions to their callers. Called with mu held.
func (q *Queue) deliverLocked() {
	for {
		n := q.m.Completions(q.comps)
		if n == 0 {
			return
		}
		for _, comp := range q.comps[:n] {
			c := &q.calls[comp.Tag]
			if q.gate != nil {
				q.gate.Release(c.ticket, nvme.Credit(comp.Result>>32))
			}
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
func (q *Queue) pump() {
	defer q.wg.Done()
	step := func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.err != nil {
			return true
		}
		blocked, err := q.w.Send()
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
		if err := q.w.AwaitSend(step); err != nil {
			q.Fail(err)
		}
	}
}

// Fail ends the queue: every caller gets err, and the connection is shut down.
func (q *Queue) Fail(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.failLocked(err)
}

func (q *Queue) failLocked(err error) {
	if q.err != nil {
		return
	}
	_, _ = q.w.Send() // a TermReq, if the target is at fault; err is what counts
	q.err = fmt.Errorf("queue %d: %w", q.id, Classify(err))
	close(q.dead)
	q.w.Shutdown()
	q.onFail(q.err)
}

// ID returns the queue identifier; 0 is the admin queue.
func (q *Queue) ID() uint16 { return q.id }

// SetGate makes commands pass g from now on. The queue is not shared yet.
func (q *Queue) SetGate(g *window.Gate) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.gate = g
}

// SetInCapsule sets how much data later commands may carry in their capsules.
func (q *Queue) SetInCapsule(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.m.SetInCapsuleBytes(n)
}

// failure returns why the queue failed.
func (q *Queue) failure() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

// Tick ages the outstanding commands and fails the queue if one of them is older than
// limit ticks (0: no limit).
func (q *Queue) Tick(limit uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err != nil {
		return // the machine's memory is the connection's, which may be closed by now
	}
	if oldest := q.m.Tick(q.id == 0); limit != 0 && oldest > limit {
		q.failLocked(fmt.Errorf("%w: %w: a command got no answer for %d s", host.ErrConnectionLost, host.ErrTimeout, oldest-1))
	}
}

// Close fails the queue with why and waits for its goroutines.
func (q *Queue) Close(why error) error {
	q.Fail(why)
	q.wg.Wait()
	return q.w.Close()
}
