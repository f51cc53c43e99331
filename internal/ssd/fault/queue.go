package fault

import (
	"slices"
	"sync/atomic"
	"time"

	"jbofd/internal/ssd"
)

// queue implements ssd.Queue. Requests that need no overlay are passed to a queue of the wrapped device, which also
// does the waiting.
type queue struct {
	dev   *Device
	inner ssd.Queue
	depth int

	// Guarded by dev.mu.
	used   int // requests submitted and not polled
	held   []*held
	passed map[uint64]*held // by tag: now with inner
	woken  bool
	closed bool

	// changed: inner was woken so that Wait looks again, and not because it has a completion.
	changed atomic.Bool

	buf []ssd.Completion // the owner's
}

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) int {
	d := q.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if q.closed {
		return 0
	}
	n := min(len(reqs), q.depth-q.used)
	now := time.Now()
	for i := range n {
		h := &held{req: reqs[i], start: now, due: now}
		q.used++
		if d.isGone() {
			h.err = ssd.ErrGone
			q.held = append(q.held, h)
			continue
		}
		crash := d.applyRules(h)
		pass := d.io == nil && h.err == nil && h.polls == 0 && !h.hold && !h.due.After(now)
		if !pass {
			q.held = append(q.held, h)
			d.inFlight = append(d.inFlight, h)
		}
		if crash {
			if err := d.crash(); err != nil {
				panic("invariant broken: fault: what survived the crash cannot be written: " + err.Error())
			}
		} else if pass && !q.pass(h) {
			q.held = append(q.held, h)
		}
	}
	if len(q.held) > 0 {
		q.changed.Store(true)
		q.inner.Wake()
	}
	return n
}

// pass passes a request to the wrapped device. If it fails, h.err says why.
func (q *queue) pass(h *held) bool {
	if q.inner.Submit([]ssd.Request{h.req}) == 1 {
		q.passed[h.req.Tag] = h
		return true
	}
	h.err = ssd.ErrGone // the inner queue has the same depth, so it refuses only because it was closed
	return false
}

// passedBack records n completions of the wrapped device.
func (q *queue) passedBack(dst []ssd.Completion) {
	gone := q.dev.isGone()
	for i := range dst {
		c := &dst[i]
		if h := q.passed[c.Tag]; h.due != h.start {
			c.LatencyNS = int64(time.Since(h.start))
		}
		delete(q.passed, c.Tag)
		if gone {
			c.Err = ssd.ErrGone
		}
	}
}

// Poll implements ssd.Queue. It advances all requests by one poll.
func (q *queue) Poll(dst []ssd.Completion) int {
	d := q.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	n := q.inner.Poll(q.buf[:min(len(dst), len(q.buf))])
	copy(dst, q.buf[:n])
	q.passedBack(dst[:n])
	now := time.Now()
	gone := d.isGone()
	keep := q.held[:0]
	for _, h := range q.held {
		switch {
		case n == len(dst):
		case gone:
			h.err, h.polls, h.due = ssd.ErrGone, 0, now
			d.releaseHeld(h)
		case h.polls > 0:
			h.polls--
		}
		if n == len(dst) || h.polls > 0 || h.hold || h.due.After(now) {
			keep = append(keep, h)
			continue
		}
		q.takeOff(h)
		if h.err == nil && d.io == nil && q.pass(h) { // delayed, now due
			continue
		}
		err := h.err
		if err == nil {
			err = d.apply(&h.req)
		}
		dst[n] = ssd.Completion{Tag: h.req.Tag, Err: err, LatencyNS: int64(now.Sub(h.start))}
		n++
	}
	clear(q.held[len(keep):])
	q.held = keep
	q.used -= n
	return n
}

// look passes requests to the wrapped device that were delayed. It reports whether a Poll has something to return, and
// when time alone will bring more; the zero time: never. A wait that blocks lets as many polls pass as a request needs.
func (q *queue) look(block bool) (ready bool, due time.Time) {
	d := q.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	ready = q.woken || q.closed || d.closed
	q.woken = false
	now := time.Now()
	gone := d.isGone()
	keep := q.held[:0]
	for _, h := range q.held {
		keep = append(keep, h)
		switch {
		case gone:
			ready = true
			continue
		case h.hold:
			continue
		case h.due.After(now):
			if due.IsZero() || h.due.Before(due) {
				due = h.due
			}
			continue
		case block:
			h.polls = 0
		}
		switch {
		case h.err != nil || d.io != nil:
			ready = ready || h.polls <= 1
		case h.polls == 0:
			q.takeOff(h)
			if q.pass(h) {
				keep = keep[:len(keep)-1]
			}
		}
	}
	clear(q.held[len(keep):])
	q.held = keep
	return ready, due
}

// takeOff takes a request off the device's list.
func (q *queue) takeOff(h *held) {
	if i := slices.Index(q.dev.inFlight, h); i >= 0 {
		q.dev.inFlight = slices.Delete(q.dev.inFlight, i, i+1)
	}
}

// Wait implements ssd.Queue.
func (q *queue) Wait(limit time.Duration) bool {
	var until time.Time
	if limit > 0 {
		until = time.Now().Add(limit)
	}
	for {
		ready, due := q.look(limit != 0)
		if ready {
			return true
		}
		now := time.Now()
		if !until.IsZero() {
			limit = max(until.Sub(now), 0)
		}
		if limit == 0 {
			if q.changed.Swap(false) { // look has seen what it was
				q.inner.Wait(0)
			}
			return q.inner.Wait(0)
		}
		pause := limit
		if wait := max(due.Sub(now), 1); !due.IsZero() && (limit < 0 || wait < limit) {
			pause = wait
		}
		if q.inner.Wait(pause) && !q.changed.Swap(false) {
			return true
		}
	}
}

// Wake implements ssd.Queue.
func (q *queue) Wake() {
	q.dev.mu.Lock()
	defer q.dev.mu.Unlock()
	q.wake()
}

// wake ends a Wait. The caller holds dev.mu.
func (q *queue) wake() {
	q.woken = true
	q.changed.Store(true)
	q.inner.Wake()
}

// Synchronous implements ssd.Queue: false, requests may be delayed.
func (q *queue) Synchronous() bool { return false }

// Close implements ssd.Queue. It does not wait for delayed requests: the device never had them.
func (q *queue) Close() error {
	q.dev.mu.Lock()
	q.closed = true
	if i := slices.Index(q.dev.queues, q); i >= 0 {
		q.dev.queues = slices.Delete(q.dev.queues, i, i+1)
	}
	q.dev.mu.Unlock()
	q.inner.Wake()
	return q.inner.Close()
}
