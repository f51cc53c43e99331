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

// ErrOutstanding: operations did not complete within the drain time, and their queues were interrupted.
var ErrOutstanding = errors.New("operations are still outstanding after the time allowed for them to end")

// WorkerGroup is a group of load-generating goroutines, one for each Worker, with a common clock. One goroutine calls
// its methods, except Now and Stop, which any goroutine may call.
type WorkerGroup struct {
	begin   time.Time
	drain   time.Duration
	workers []*Worker
}

// NewWorkerGroup returns a crew. When it is told to stop, outstanding operations have the time drain to complete.
func NewWorkerGroup(drain time.Duration) *WorkerGroup {
	return &WorkerGroup{begin: time.Now(), drain: drain}
}

// Now returns the time since the crew was created, in nanoseconds.
func (g *WorkerGroup) Now() int64 { return int64(time.Since(g.begin)) }

// Worker is the state shared by a crew and one of its goroutines.
type Worker struct {
	queue interface{ Interrupt() }
	// stopNS is the time at which the worker was told to begin no more operations; 0 if it was not told.
	stopNS atomic.Int64
	// interrupted is set when the worker's queue was interrupted.
	interrupted atomic.Bool
}

// Add creates a worker for the goroutine that owns the queue.
func (g *WorkerGroup) Add(queue interface{ Interrupt() }) *Worker {
	w := &Worker{queue: queue}
	g.workers = append(g.workers, w)
	return w
}

// Stopped reports whether the worker must begin no more operations, and since when.
func (w *Worker) Stopped() (atNS int64, yes bool) {
	atNS = w.stopNS.Load()
	return atNS, atNS != 0
}

// Interrupted returns ErrOutstanding if the worker must abandon its outstanding operations. The arguments are for the
// text of the error.
func (w *Worker) Interrupted(outstanding, slots int) error {
	if !w.interrupted.Load() {
		return nil
	}
	return fmt.Errorf("%d of the %d %w", outstanding, slots, ErrOutstanding)
}

// Stop tells every worker to begin no more operations. Any goroutine may call it.
func (g *WorkerGroup) Stop() {
	now := g.Now()
	for _, w := range g.workers {
		w.stopNS.CompareAndSwap(0, max(now, 1))
	}
}

// Run calls what in a goroutine for each worker, with the worker's number, and returns when all calls have returned.
// The workers are told to stop when one of them fails, after limit if limit is not 0, and when ctx is cancelled. The
// function each is called every second.
//
// Errors: the errors of what.
func (g *WorkerGroup) Run(ctx context.Context, limit time.Duration, what func(i int) error,
	each func(now time.Time)) error {
	var wg sync.WaitGroup
	errs := make([]error, len(g.workers))
	done := make(chan struct{})
	for _, w := range g.workers {
		w.stopNS.Store(0)
	}
	for i := range g.workers {
		wg.Go(func() {
			if errs[i] = what(i); errs[i] != nil {
				g.Stop()
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
		g.Stop()
		return time.After(g.drain)
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
			for _, w := range g.workers {
				w.interrupted.Store(true)
				w.queue.Interrupt()
			}
		case now := <-second.C:
			each(now)
		}
	}
}

// earlyWake is how long before the next operation is due a worker stops sleeping and polls the clock, because timers
// are less precise than that.
const earlyWake = 120 * time.Microsecond

// Pacer is a worker's schedule. With the zero value every operation is due at once.
type Pacer struct {
	// interval is the average time between operations. due is the time of the next one. Both are in nanoseconds of
	// WorkerGroup.Now.
	interval float64
	due      float64
	poisson  bool
}

// PacerConfig describes a Pacer.
type PacerConfig struct {
	// PerSec is the total rate of all workers. With Poisson, the intervals are exponentially distributed instead of
	// equal.
	PerSec  float64
	Poisson bool
	// BeginNS is when the first worker's first operation is due. The first operations of the others follow at equal
	// distances. Worker is the number of this worker out of Workers.
	BeginNS         int64
	Worker, Workers int
}

// NewPacer returns the schedule of a worker.
func NewPacer(c PacerConfig) Pacer {
	interval := 1e9 * float64(c.Workers) / c.PerSec
	return Pacer{interval: interval, due: float64(c.BeginNS) + interval*float64(c.Worker)/float64(c.Workers),
		poisson: c.Poisson}
}

// On reports whether there is a schedule.
func (p *Pacer) On() bool { return p.interval > 0 }

// Due returns the time at which the next operation is due and the time until then. Without a schedule it is due now.
func (p *Pacer) Due(now int64) (due int64, wait time.Duration) { // hot: 0 allocs
	if p.interval == 0 {
		return now, 0
	}
	due = int64(p.due)
	return due, time.Duration(max(due-now, 0))
}

// Advance moves the schedule to the next operation. The argument u is drawn uniformly from (0, 1].
func (p *Pacer) Advance(u float64) { // hot: 0 allocs
	if p.poisson {
		p.due += -math.Log(u) * p.interval
		return
	}
	p.due += p.interval
}

// Overdue returns how many operations were due by now and have not begun. With varying intervals it is the expected
// number.
func (p *Pacer) Overdue(now int64) uint64 {
	if p.interval == 0 || float64(now) < p.due {
		return 0
	}
	return 1 + uint64((float64(now)-p.due)/p.interval)
}

// PollWait returns how long to wait for a completion if the next operation is due after wait; a negative value stands
// for an unknown time. If no operation is outstanding, PollWait sleeps instead and returns false. It sleeps for a
// bounded time, so that the worker notices a stop.
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
