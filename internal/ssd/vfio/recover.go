package vfio

import (
	"fmt"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/parts"
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
	if q.requests.Waiting() {
		due := max(time.Duration(q.requests.DueNS()-q.now()), time.Millisecond)
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
	if q.requests.Done() {
		q.notify() // perhaps an interrupt was lost
	}
	if q.lied != nil {
		return nil, q.lied
	}
	now, abort := q.now(), q.scratch[:0]
	for i := range q.commands {
		late, err := q.commands[i].Overdue(now, q.dev.cfg.Timeout, q.dev.cfg.AbortTimeout)
		if err != nil {
			return nil, err
		}
		if late {
			abort = append(abort, q.ring.CID(i))
		}
	}
	return abort, nil
}

// resend sends the commands again that are due.
func (q *queue) resend() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.send(q.now()); q.requests.Done() {
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
// sent parts.MaxTries times ends with ssd.ErrMedia.
func (q *queue) restart(why error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	q.down, q.lied = false, nil
	q.armed = true // a reset of the function has reset its masks
	q.arm(false)   // the waiter, if there is one, is told below, and arms it again
	for i := range q.commands {
		c := &q.commands[i]
		if !c.Busy {
			continue
		}
		p := c.Part
		*c = parts.Command{}
		if !q.requests.Again(&p, 0) {
			q.requests.End(&p, fmt.Errorf("%w: %w %d times: %w", ssd.ErrMedia, errReset, p.Tries, why), now)
		}
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
		if c := &q.commands[i]; c.Busy {
			p := c.Part
			*c = parts.Command{}
			q.requests.End(&p, why, now)
		}
	}
	q.requests.Fail(why, now)
	q.notify()
}
