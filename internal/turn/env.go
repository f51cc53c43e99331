package turn

import (
	"sync"
	"time"
)

// Env is the environment in which machines run: time, goroutines and timers. Real is the operating system's. A
// simulation implements it with events in virtual time, all on one goroutine.
type Env interface {
	// Now returns monotonic nanoseconds, more than 0. Times of one Env can be compared, also between machines.
	Now() int64
	// Go runs f soon on another goroutine. A simulation runs it as an event of its own after the present one.
	Go(f func())
	// NewTimer makes a Timer, not set, that runs f.
	//
	// Errors: the system's, for want of resources.
	NewTimer(p Precision, f func()) (Timer, error)
	// Wait waits until done is closed or has a value, which it takes, and returns true; or until the timeout is over,
	// and returns false. A negative timeout never is. A simulation runs its events meanwhile. Not during a turn.
	Wait(done <-chan struct{}, timeout time.Duration) bool
}

// Timer runs a function at a time.
type Timer interface {
	// Reset lets the function run once, afterNS (at least 1) from now. An earlier Reset that has not taken effect does
	// not any more; one that has just taken effect may lead to one more run. It does nothing after Close.
	//
	// Cost: 0 allocs.
	Reset(afterNS int64)
	// Close ends the timer: when it returns, the function is not running and will not run. Not from within the
	// function, nor with a lock held that the function takes. Idempotent.
	Close()
}

// Precision is how late a Timer may be.
type Precision uint8

const (
	// Coarse timers may be a millisecond late.
	Coarse Precision = iota
	// Fine timers are as exact as the system's timers and its scheduler are, some 50 µs. Each costs a file descriptor
	// and a goroutine.
	Fine
)

// Real is the operating system's time, with goroutines and timers of the Go runtime and of Linux.
var Real Env = real{}

type real struct{}

var start = time.Now()

// Now implements Env.
func (real) Now() int64 { return int64(time.Since(start)) + 1 }

// Go implements Env.
func (real) Go(f func()) { go f() }

// Wait implements Env.
func (real) Wait(done <-chan struct{}, timeout time.Duration) bool {
	if timeout < 0 {
		<-done
		return true
	}
	t := time.NewTimer(timeout)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// NewTimer implements Env.
func (real) NewTimer(p Precision, f func()) (Timer, error) {
	if p == Fine {
		return newTimerFD(f)
	}
	t := &coarse{f: f}
	t.timer = time.AfterFunc(time.Hour, t.fire)
	t.timer.Stop()
	return t, nil
}

// coarse is a timer of the Go runtime.
type coarse struct {
	f     func()
	timer *time.Timer
	// mu is held while f runs and guards closed.
	mu     sync.Mutex
	closed bool
}

func (c *coarse) fire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.f()
	}
}

// Reset implements Timer.
func (c *coarse) Reset(afterNS int64) { c.timer.Reset(time.Duration(afterNS)) }

// Close implements Timer.
func (c *coarse) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.timer.Stop()
}
