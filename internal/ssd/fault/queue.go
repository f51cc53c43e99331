package fault

import (
	"slices"
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

	buf []ssd.Completion // the poller's
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

// step advances all requests by one poll and appends completions to dst[:n]. again reports that another poll would
// bring more at once; due is when time alone would bring more.
func (q *queue) step(dst []ssd.Completion) (n int, again bool, due time.Time) {
	d := q.dev
	n = q.inner.Poll(q.buf[:min(len(dst), len(q.buf))], 0)
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
			again = true
		}
		if n == len(dst) || h.polls > 0 || h.hold || h.due.After(now) {
			if h.due.After(now) && (due.IsZero() || h.due.Before(due)) {
				due = h.due
			}
			keep = append(keep, h)
			continue
		}
		if i := slices.Index(d.inFlight, h); i >= 0 {
			d.inFlight = slices.Delete(d.inFlight, i, i+1)
		}
		if h.err == nil && d.io == nil && q.pass(h) { // delayed, now due
			again = true
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
	return n, again, due
}

// Poll implements ssd.Queue.
func (q *queue) Poll(dst []ssd.Completion, wait time.Duration) int {
	d := q.dev
	var deadline time.Time
	if wait > 0 {
		deadline = time.Now().Add(wait)
	}
	for {
		d.mu.Lock()
		n, again, due := q.step(dst)
		woken := q.woken || q.closed || d.closed
		if n == 0 && wait != 0 {
			q.woken = false
		}
		d.mu.Unlock()
		if n > 0 || wait == 0 || woken || len(dst) == 0 {
			return n
		}
		if again {
			continue
		}
		pause := time.Duration(-1)
		now := time.Now()
		if !deadline.IsZero() {
			if !now.Before(deadline) {
				return 0
			}
			pause = deadline.Sub(now)
		}
		if !due.IsZero() && (pause < 0 || due.Sub(now) < pause) {
			pause = max(due.Sub(now), 1)
		}
		n = q.inner.Poll(q.buf[:min(len(dst), len(q.buf))], pause)
		d.mu.Lock()
		copy(dst, q.buf[:n])
		q.passedBack(dst[:n])
		q.used -= n
		d.mu.Unlock()
		if n > 0 || due.IsZero() && d.inner.Healthy() != nil { // or else it might never block again
			return n
		}
	}
}

// Wake implements ssd.Queue.
func (q *queue) Wake() {
	q.dev.mu.Lock()
	q.woken = true
	q.dev.mu.Unlock()
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
