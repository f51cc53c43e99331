//go:build spdk && cgo

package spdk

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// How long a Wait without interrupts naps while requests are under way: a part of the time for which it has waited.
const (
	napPart  = 4
	leastNap = 20 * time.Microsecond
	mostNap  = time.Millisecond
)

// nap returns how long to sleep after a wait of so long.
func nap(waited time.Duration) time.Duration { return min(max(waited/napPart, leastNap), mostNap) }

// ready reports whether a Wait returns. The caller holds mu.
func (q *queue) ready() bool { // hot: 0 allocs
	q.turn()
	return q.requests.Done() || q.ended || q.woken.Swap(false)
}

// Wait implements ssd.Queue.
func (q *queue) Wait(limit time.Duration) bool { // hot: 0 allocs
	if limit == 0 {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.ready()
	}
	q.waiter.Lock()
	defer q.waiter.Unlock()
	var until time.Time
	if limit > 0 {
		until = time.Now().Add(limit)
	}
	q.waiting.Store(true)
	defer q.waiting.Store(false)
	var since time.Time // when requests were under way first
	for timely := true; ; {
		q.mu.Lock()
		r := q.ready()
		busy, stalled, dead := q.busy(), q.requests.Waiting() || q.stalled, q.down || q.lost != nil
		q.mu.Unlock()
		if r || !timely {
			return r
		}
		timely = q.block(&since, until, busy && !dead, stalled)
	}
}

// block waits until there may be something new, and returns false if it is later than until. The caller holds waiter.
func (q *queue) block(since *time.Time, until time.Time, busy, stalled bool) bool { // hot: 0 allocs
	if !busy && q.irq < 0 {
		*since = time.Time{}
		return q.event.Wait(until)
	}
	left := time.Duration(-1)
	now := time.Now()
	if !until.IsZero() {
		if left = until.Sub(now); left <= 0 {
			return false
		}
	}
	if busy && (q.irq < 0 || stalled) {
		if since.IsZero() {
			*since = now
		}
		n := nap(now.Sub(*since))
		if left < 0 || n < left {
			left = n
			until = time.Time{}
		}
	}
	return q.fds.wait(left) || until.IsZero()
}

// follow has irq stand for another descriptor, while the waiter may poll: its number stays the queue's. A poll that is
// under way goes on with the one before, so that a notify has to follow.
func (q *queue) follow(fd int) error {
	if q.irq < 0 {
		return nil
	}
	if err := unix.Dup3(fd, q.irq, unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("the descriptor of its interrupt: %w", err)
	}
	return nil
}

// notify wakes a Wait that blocks.
func (q *queue) notify() {
	if q.waiting.Load() {
		q.event.Signal()
	}
}

// notifyDone is notify if there is something to poll. The caller holds mu.
func (q *queue) notifyDone() {
	if q.requests.Done() {
		q.notify()
	}
}

// Wake implements ssd.Queue.
func (q *queue) Wake() {
	q.woken.Store(true)
	q.notify()
}

// Close implements ssd.Queue.
func (q *queue) Close() error {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.Wake()
	q.waiter.Lock()
	defer q.waiter.Unlock()
	q.waiting.Store(true)
	defer q.waiting.Store(false)
	var since time.Time
	for {
		q.mu.Lock()
		q.turn()
		ended, left := q.ended, q.requests.Open()
		dead := q.down || q.lost != nil
		q.mu.Unlock()
		if ended {
			return nil
		}
		if left == 0 {
			break
		}
		q.block(&since, time.Time{}, !dead, true)
	}
	q.dev.admin.Lock()
	defer q.dev.admin.Unlock()
	q.dev.mu.Lock()
	delete(q.dev.queues, q)
	q.dev.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	queueClose(q.handle)
	q.ended = true
	err := q.event.Close()
	if q.irq >= 0 {
		err = errors.Join(err, unix.Close(q.irq))
	}
	q.bounces.Release(free)
	return err
}
