package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// ErrOutstanding: operations did not end in the time allowed for that, and their queues were interrupted.
var ErrOutstanding = errors.New("operations are still outstanding after the time allowed for them to end")

// Crew is the goroutines of a load, one for each Worker, and their clock. One goroutine calls its methods;
// Now and Stop are for any.
type Crew struct {
	begin   time.Time
	drain   time.Duration
	workers []*Worker
}

// NewCrew makes a crew whose operations have that long to end when it is told to stop.
func NewCrew(drain time.Duration) *Crew { return &Crew{begin: time.Now(), drain: drain} }

// Now is the time since the crew was made, in nanoseconds.
func (c *Crew) Now() int64 { return int64(time.Since(c.begin)) }

// Worker is what a crew and one of its goroutines tell each other.
type Worker struct {
	queue interface{ Interrupt() }
	// stopNS is when the worker was told to begin nothing more; 0: it was not.
	stopNS atomic.Int64
	// interrupted: its queue was.
	interrupted atomic.Bool
}

// Add makes a worker for the goroutine that has the queue.
func (c *Crew) Add(queue interface{ Interrupt() }) *Worker {
	w := &Worker{queue: queue}
	c.workers = append(c.workers, w)
	return w
}

// Stopped reports whether the worker is to begin nothing more, and since when.
func (w *Worker) Stopped() (atNS int64, yes bool) {
	atNS = w.stopNS.Load()
	return atNS, atNS != 0
}

// Interrupted returns ErrOutstanding if the worker is to leave the operations that are outstanding, out of so many slots.
func (w *Worker) Interrupted(outstanding, slots int) error {
	if !w.interrupted.Load() {
		return nil
	}
	return fmt.Errorf("%d of the %d %w", outstanding, slots, ErrOutstanding)
}

// Stop tells every worker to begin nothing more. Any goroutine may call it.
func (c *Crew) Stop() {
	now := c.Now()
	for _, w := range c.workers {
		w.stopNS.CompareAndSwap(0, max(now, 1))
	}
}

// Run has every worker's goroutine do what, given its number, and returns when all have ended. They are told to stop when one
// has failed, after limit if that is not 0, and when ctx is cancelled. each is called every second.
//
// Errors: those of what.
func (c *Crew) Run(ctx context.Context, limit time.Duration, what func(i int) error, each func(now time.Time)) error {
	var wg sync.WaitGroup
	errs := make([]error, len(c.workers))
	done := make(chan struct{})
	for _, w := range c.workers {
		w.stopNS.Store(0)
	}
	for i := range c.workers {
		wg.Go(func() {
			if errs[i] = what(i); errs[i] != nil {
				c.Stop()
			}
		})
	}
	go func() { wg.Wait(); close(done) }()

	var over, late <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		over = t.C
	}
	second := time.NewTicker(time.Second)
	defer second.Stop()
	stop := func() <-chan time.Time {
		c.Stop()
		return time.After(c.drain)
	}
	cancelled := ctx.Done()
	for {
		select {
		case <-done:
			return errors.Join(errs...)
		case <-over:
			over, late = nil, stop()
		case <-cancelled:
			cancelled, late = nil, stop()
		case <-late:
			late = nil
			for _, w := range c.workers {
				w.interrupted.Store(true)
				w.queue.Interrupt()
			}
		case now := <-second.C:
			each(now)
		}
	}
}

// earlyWake is how long before an operation is due a worker stops sleeping and looks at the
// clock instead: timers are not that exact.
const earlyWake = 120 * time.Microsecond

// Pacer is a worker's schedule. Its zero value is none: every operation is due at once.
type Pacer struct {
	// interval is between two operations, on average; due is when the next one is. In nanoseconds of Crew.Now.
	interval float64
	due      float64
	poisson  bool
}

// PacerConfig describes a Pacer.
type PacerConfig struct {
	// PerSec is the rate of all workers together. Poisson makes the intervals exponentially distributed instead of equal.
	PerSec  float64
	Poisson bool
	// BeginNS is when the first worker's first operation is due; the others' follow evenly. Worker is which of so many this is.
	BeginNS         int64
	Worker, Workers int
}

// NewPacer makes the schedule of a worker.
func NewPacer(c PacerConfig) Pacer {
	interval := 1e9 * float64(c.Workers) / c.PerSec
	return Pacer{interval: interval, due: float64(c.BeginNS) + interval*float64(c.Worker)/float64(c.Workers), poisson: c.Poisson}
}

// On reports whether there is a schedule.
func (p *Pacer) On() bool { return p.interval > 0 }

// Due is when the next operation is due, and for how long that is still to come; without a schedule it is now.
func (p *Pacer) Due(now int64) (due int64, wait time.Duration) { // hot: 0 allocs
	if p.interval == 0 {
		return now, 0
	}
	due = int64(p.due)
	return due, time.Duration(max(due-now, 0))
}

// Advance moves the schedule to the next operation. u is drawn uniformly from (0, 1].
func (p *Pacer) Advance(u float64) { // hot: 0 allocs
	if p.poisson {
		p.due += -math.Log(u) * p.interval
		return
	}
	p.due += p.interval
}

// Overdue is how many operations were due by then and are not begun; on average, if the intervals vary.
func (p *Pacer) Overdue(now int64) uint64 {
	if p.interval == 0 || float64(now) < p.due {
		return 0
	}
	return 1 + uint64((float64(now)-p.due)/p.interval)
}

// PollWait is how long to wait for a completion while the next operation is due after wait; negative: it is not known when.
// If nothing is outstanding, it sleeps instead, but not for so long that a stop would be missed, and returns false.
func PollWait(wait time.Duration, outstanding int) (poll time.Duration, ok bool) { // hot: 0 allocs
	if wait > earlyWake {
		wait -= earlyWake
	} else if wait > 0 {
		wait = 0
	}
	if outstanding == 0 && wait > 0 {
		time.Sleep(min(wait, 50*time.Millisecond))
		return 0, false
	}
	return wait, true
}
