package vfio

import (
	"fmt"
	"time"

	"jbofd/internal/ssd"
)

// What the keeper does to a queue.

// lookIn returns in what time the queue has to be checked; 0: no command is outstanding, or waits to be sent again.
func (q *queue) lookIn() time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	wait := time.Duration(0)
	if q.ring.Free() < q.ring.Places() {
		wait = q.dev.lookEvery()
	}
	if n := len(q.again); n > 0 {
		due := max(time.Duration(q.again[n-1].dueNS-q.now()), time.Millisecond)
		if wait == 0 || due < wait {
			wait = due
		}
	}
	return wait
}

// overdue reaps completions, and returns the CIDs of the commands that are to be aborted now. The slice is valid until
// the next call.
//
// Errors: those after which the controller has to be reset: an invalid completion (pcie.ErrInvalidResponse); a command
// that is still outstanding AbortTimeout after its Timeout.
func (q *queue) overdue() (abort []uint16, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.reap()
	if q.done.n > 0 {
		q.notify() // perhaps an interrupt was lost
	}
	if q.lied != nil {
		return nil, q.lied
	}
	now, abort := q.now(), q.scratch[:0]
	for i := range q.commands {
		c := &q.commands[i]
		took := time.Duration(now - c.startNS)
		switch {
		case !c.busy || took < q.dev.cfg.Timeout:
		case !c.aborted:
			c.aborted = true
			abort = append(abort, q.ring.CID(i))
		case took >= q.dev.cfg.Timeout+q.dev.cfg.AbortTimeout:
			return nil, fmt.Errorf("a command has not ended after %v, although it was aborted", took)
		}
	}
	return abort, nil
}

// resend sends the commands again that are due.
func (q *queue) resend() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.send(q.now()); q.done.n > 0 {
		q.notify()
	}
}

// stop keeps the queue from using its ring, before the controller is reset.
func (q *queue) stop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.reap() // commands that have completed are not sent again
	q.down = true
}

// restart sends the outstanding commands again, after a reset has created the ring again, empty. A command that was
// sent maxTries times ends with ssd.ErrMedia.
func (q *queue) restart(why error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	q.down, q.lied = false, nil
	q.armed = true // a reset of the function has reset its masks
	q.arm(false)   // the waiter, if there is one, is told below, and arms it again
	for i := range q.commands {
		c := &q.commands[i]
		if !c.busy {
			continue
		}
		p := c.part
		*c = command{}
		p.dueNS = 0
		if p.tries++; p.tries < maxTries {
			q.sendAgain(p)
			continue
		}
		q.partEnded(p, fmt.Errorf("%w: %w %d times: %w", ssd.ErrMedia, errReset, p.tries, why), now)
	}
	q.send(now)
	q.notify()
}

// fail ends all requests, because the device is gone. The device does not access memory any more.
func (q *queue) fail() {
	why := q.dev.Healthy()
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	q.down = true
	for i := range q.commands {
		if c := &q.commands[i]; c.busy {
			p := c.part
			*c = command{}
			q.partEnded(p, why, now)
		}
	}
	for _, p := range q.again {
		q.partEnded(p, why, now)
	}
	q.again = q.again[:0]
	for q.unsent.n > 0 {
		i := q.unsent.pop(q.requests)
		r := &q.requests[i]
		r.sent = true
		if r.err == nil {
			r.err = why
		}
		q.endIfOver(i, now)
	}
	q.notify()
}
