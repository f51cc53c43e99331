package hostconn

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"jbofd/client/internal/host"
	"jbofd/client/internal/window"
)

// SharedQPair is a queue pair for any number of goroutines. Each submits and sends under the mutex. Two goroutines of
// the SharedQPair receive completions, and continue sending when the socket was full. Do waits for its commands; Send
// does not.
//
// No system call accesses the buffer of a command while mu is free, and no device knows its address. Therefore a
// cancelled command can return its buffer at once.
type SharedQPair struct {
	id    uint16
	depth int
	// onFail is called once, with mu held, when the queue has failed. It must not call methods of the queue.
	onFail func(error)
	free   chan *call    // unused calls; a caller holds one while its command is outstanding
	kick   chan struct{} // capacity 1; receives when the socket was full
	dead   chan struct{} // closed when err is set
	// pair, of capacity 1, is held while two calls are taken for a fused pair, so that two fused pairs cannot wait for
	// each other's second call.
	pair chan struct{}
	wg   sync.WaitGroup
	// gate, if not nil, holds commands back until there is credit; set before the queue is shared.
	gate *window.Gate

	mu    sync.Mutex
	w     Conn
	m     host.Machine // of w
	cmd   host.Command // of Do: a copy here keeps the callers' commands off the heap
	err   error        // why the queue has failed
	calls []call
	comps []host.Completion // of deliverLocked
	// backlog are commands of Send for which there is no call yet, ended those whose Sinks are to be told.
	backlog, ended asyncs
}

// call is one caller's command.
type call struct {
	index uint64
	// done receives the completion; capacity 1, so that the sender never blocks.
	done chan host.Completion
	// ticket is the command's share of a window, if there is a gate. Guarded by SharedQPair.mu.
	ticket window.Ticket
	// abandoned: the caller has stopped waiting; deliverLocked returns the call to free. async is the command of Send,
	// nil if a goroutine waits. Guarded by SharedQPair.mu.
	abandoned bool
	async     *Async
}

// NewSharedQPair takes over w, which is connected. Close must be called.
func NewSharedQPair(w Conn, id uint16, onFail func(error)) *SharedQPair {
	n := w.Machine().Depth()
	q := &SharedQPair{
		id: id, depth: n, w: w, m: w.Machine(), onFail: onFail,
		free: make(chan *call, n), kick: make(chan struct{}, 1), dead: make(chan struct{}),
		pair:  make(chan struct{}, 1),
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

// DetachedError is returned for a command whose caller has stopped waiting for it. CID is for an Abort.
type DetachedError struct {
	Cause error
	CID   uint16
}

func (e *DetachedError) Error() string { return e.Cause.Error() }
func (e *DetachedError) Unwrap() error { return e.Cause }

// Do submits the commands (one, or a fused pair) in order, without others between them, and waits until all have
// completed, the queue has failed or ctx is done. The buffers are the caller's again when it returns. comps must have
// room for all completions.
//
// Errors: *host.SentError if the queue failed after the commands were sent; *DetachedError if ctx ended then; the
// context's and the queue's error if nothing was sent; ErrInvalid.
func (q *SharedQPair) Do(ctx context.Context, cmds []host.Command, comps []host.Completion) error {
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
		return q.err // the association has ended, and its gate with it
	}
	for i := range cmds {
		held[i].ticket = tickets[i]
		q.cmd = cmds[i]
		q.cmd.Tag = held[i].index
		cid, err := q.m.Submit(&q.cmd)
		q.cmd.Data = nil
		if err != nil {
			// There are as many calls as slots, so that the command itself is invalid. Both commands of a fused pair
			// have data of the same length and direction, so that none or the first is invalid.
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
	q.unlockTell()
	for i := range cmds {
		c := held[i]
		select {
		case comps[i] = <-c.done:
			q.free <- c
		case <-ctx.Done():
			if err := q.abandon(held[i:len(cmds)], cids[i:len(cmds)], ctx.Err()); err != nil {
				return err
			}
			comps[i] = <-c.done // it has completed meanwhile
			q.free <- c
		case <-q.dead:
			select {
			case comps[i] = <-c.done:
				q.free <- c
			default:
				return &host.SentError{Err: q.failure()}
			}
		}
	}
	return nil
}

// release returns the tickets of commands that were not sent.
func (q *SharedQPair) release(tickets []window.Ticket) {
	if q.gate == nil {
		return
	}
	for _, t := range tickets {
		q.gate.Release(t, 0)
	}
}

// take gets an unused call for each command.
func (q *SharedQPair) take(ctx context.Context, calls []*call) error {
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

// abandon detaches the buffers of calls whose caller stops waiting. It returns nil if the first one has completed
// meanwhile.
func (q *SharedQPair) abandon(calls []*call, cids []uint16, cause error) error {
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

// sendLocked sends without blocking and leaves the rest to pump. mu is held.
func (q *SharedQPair) sendLocked() {
	if q.err == nil && q.exchangeLocked() {
		select {
		case q.kick <- struct{}{}:
		default:
		}
	}
}

// exchangeLocked sends without blocking. It reports whether the connection takes no more. mu is held.
func (q *SharedQPair) exchangeLocked() (blocked bool) {
	for {
		q.submitLocked()
		blocked, err := q.w.Send()
		n := q.deliverLocked() // a command that was answered before it was sent in full completes now
		if err != nil {
			q.failLocked(err)
			return false
		}
		if blocked || n == 0 || q.backlog.first == nil {
			return blocked
		}
	}
}

// receive is the goroutine that receives.
func (q *SharedQPair) receive() {
	defer q.wg.Done()
	step := func() bool {
		q.mu.Lock()
		defer q.unlockTell()
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

// deliverLocked passes completions to their callers, and returns how many. mu is held.
func (q *SharedQPair) deliverLocked() (delivered int) {
	for {
		n := q.m.Completions(q.comps)
		if delivered += n; n == 0 {
			return delivered
		}
		for _, comp := range q.comps[:n] {
			c := &q.calls[comp.Tag]
			if q.gate != nil {
				q.gate.Completed(c.ticket, &comp)
			}
			if a := c.async; a != nil {
				c.async, a.Comp = nil, comp
				q.free <- c
				q.endLocked(a, nil)
				continue
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

// pump is the goroutine that goes on sending when the socket was full.
func (q *SharedQPair) pump() {
	defer q.wg.Done()
	step := func() bool {
		q.mu.Lock()
		defer q.unlockTell()
		return q.err != nil || !q.exchangeLocked()
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

// Fail ends the queue: all callers get err, and the connection is shut down.
func (q *SharedQPair) Fail(err error) {
	q.mu.Lock()
	defer q.unlockTell()
	q.failLocked(err)
}

func (q *SharedQPair) failLocked(err error) {
	if q.err != nil {
		return
	}
	_, _ = q.w.Send() // a TermReq, if the target has violated the protocol; err is what counts
	q.err = fmt.Errorf("queue %d: %w", q.id, Classify(err))
	close(q.dead)
	q.w.Shutdown()
	q.failAsyncs()
	q.onFail(q.err)
}

// ID returns the queue identifier; 0 is the admin queue.
func (q *SharedQPair) ID() uint16 { return q.id }

// SetGate makes later commands wait for credit at g. The queue must not be shared yet.
func (q *SharedQPair) SetGate(g *window.Gate) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.gate = g
}

// SetInCapsule sets how many bytes of data the capsules of later commands may carry.
func (q *SharedQPair) SetInCapsule(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.m.SetInCapsuleBytes(n)
}

// failure returns why the queue has failed.
func (q *SharedQPair) failure() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

// Tick advances the coarse clock and fails the queue if a command is older than limit ticks (0: no limit).
func (q *SharedQPair) Tick(limit uint32) {
	q.mu.Lock()
	defer q.unlockTell()
	if q.err != nil {
		return // the connection may be closed, and with it the machine's memory
	}
	if oldest := q.m.Tick(q.id == 0); limit != 0 && oldest > limit {
		q.failLocked(fmt.Errorf("%w: %w: a command got no answer for %d s", host.ErrConnectionLost, host.ErrTimeout,
			oldest-1))
	}
}

// Close fails the queue with why and waits for its goroutines.
func (q *SharedQPair) Close(why error) error {
	q.Fail(why)
	q.wg.Wait()
	return q.w.Close()
}
