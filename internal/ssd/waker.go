package ssd

import "time"

// Waker is what the Wait of a Queue blocks on if goroutines of this process complete the requests. It is for
// implementations.
type Waker struct{ c chan struct{} }

// NewWaker returns a Waker that nobody has notified.
func NewWaker() Waker { return Waker{make(chan struct{}, 1)} }

// Notify makes the Wait that is under way, or the next one, call ready again. Any goroutine may call it.
//
// hot: 0 allocs
func (w Waker) Notify() {
	select {
	case w.c <- struct{}{}:
	default:
	}
}

// Wait implements Queue.Wait. It calls ready at once, after each Notify, and when limit is over, until ready returns
// true, and returns its last result. block tells ready that Wait blocks next if it returns false. Change what ready
// reads before you call Notify. One goroutine at a time.
//
// hot: 0 allocs, unless there is a limit
func (w Waker) Wait(limit time.Duration, ready func(block bool) bool) bool {
	if r := ready(limit != 0); r || limit == 0 {
		return r
	}
	// A bounded wait is rare: an owner of queues waits without bound.
	var timeout <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		timeout = t.C
	}
	for {
		select {
		case <-w.c: // perhaps for what was polled already
		case <-timeout:
			return ready(false)
		}
		if ready(true) {
			return true
		}
	}
}
