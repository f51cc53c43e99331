package turn

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// events is an Env in virtual time: everything happens on the goroutine that calls step, events of one time in an order
// drawn from a seed.
type events struct {
	rng    *rand.Rand
	now    int64
	ready  []func()
	timers []*eventTimer
}

func newEvents(seed uint64) *events { return &events{rng: rand.New(rand.NewPCG(seed, 1)), now: 1} }

type eventTimer struct {
	env    *events
	f      func()
	at     int64 // 0: not set
	resets int
	closed bool
}

func (t *eventTimer) Reset(afterNS int64) {
	if !t.closed {
		t.at = t.env.now + afterNS
		t.resets++
	}
}

func (t *eventTimer) Close() { t.at, t.closed = 0, true }

func (e *events) Now() int64  { return e.now }
func (e *events) Go(f func()) { e.ready = append(e.ready, f) }

func (e *events) NewTimer(_ Precision, f func()) (Timer, error) {
	t := &eventTimer{env: e, f: f}
	e.timers = append(e.timers, t)
	return t, nil
}

// step runs one event, or advances the time to the next timer if there is none. False: there is nothing to run.
func (e *events) step() bool {
	if len(e.ready) == 0 {
		var next *eventTimer
		for _, t := range e.timers {
			if t.at != 0 && (next == nil || t.at < next.at) {
				next = t
			}
		}
		if next == nil {
			return false
		}
		e.now, next.at = max(e.now, next.at), 0
		next.f()
		return true
	}
	i := e.rng.IntN(len(e.ready))
	f := e.ready[i]
	e.ready = append(e.ready[:i], e.ready[i+1:]...)
	f()
	return true
}

func (e *events) Wait(done <-chan struct{}, timeout time.Duration) bool {
	end := e.now + int64(timeout)
	for {
		select {
		case <-done:
			return true
		default:
		}
		if timeout >= 0 && e.now >= end || !e.step() {
			return false
		}
	}
}

func TestRealTimersRunOnceForEachResetAndNeverAfterClose(t *testing.T) {
	for _, p := range []Precision{Coarse, Fine} {
		var mu sync.Mutex
		closed := false
		fired := make(chan int64, 16)
		timer, err := Real.NewTimer(p, func() {
			mu.Lock()
			defer mu.Unlock()
			if closed {
				t.Error("the function ran after Close")
			}
			fired <- Real.Now()
		})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			set := Real.Now()
			timer.Reset(int64(2 * time.Millisecond))
			if at := <-fired; at-set < int64(2*time.Millisecond) {
				t.Errorf("precision %d: the timer ran %d ns after it was set to 2 ms", p, at-set)
			}
		}
		timer.Reset(int64(time.Hour))
		timer.Reset(1) // earlier than the one before, which is forgotten
		<-fired
		if len(fired) > 0 {
			t.Errorf("precision %d: one Reset has run the function twice", p)
		}
		timer.Reset(1)
		timer.Close()
		mu.Lock()
		closed = true
		mu.Unlock()
		timer.Close()
		timer.Reset(1)
	}
}

func TestRealWaitEndsWithItsChannelOrItsTimeout(t *testing.T) {
	never, done := make(chan struct{}), make(chan struct{})
	began := Real.Now()
	if Real.Wait(never, time.Millisecond) {
		t.Error("Wait says that a channel is closed that is not")
	}
	if took := Real.Now() - began; took < int64(time.Millisecond) {
		t.Errorf("Wait has ended after %d ns, before its timeout", took)
	}
	Real.Go(func() { close(done) })
	if !Real.Wait(done, -1) || !Real.Wait(done, time.Hour) {
		t.Error("Wait does not see that its channel is closed")
	}
}
