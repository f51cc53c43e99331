// Package ycsb is the Yahoo! Cloud Serving Benchmark for key-value namespaces: its workload files, its ways of choosing
// records, and its output. In addition every value that is read is verified.
//
//	properties ──> Workload ──> Bench ── thread ── thread ── ...   each with a queue of the DB,
//	                              │        │                       a chooser and histograms
//	                              └── versions <── issued, settled, checked
//
// A thread keeps Config.Depth operations outstanding (closed loop), or begins operations when they are due (open loop:
// Workload.Target). In an open loop latency is also counted from when an operation was due, and not only from when it
// could be submitted, so that a stall shows in every operation that it has delayed.
//
// A value is computed from its key, its version and its length (record.go). The table of versions knows which of them a
// read may find (versions.go). With Config.StatePath the table outlives the process, so that a store that was killed
// can be verified against every write that it has acknowledged.
//
// Differences from YCSB: keys have 16 bytes ("user" and 12 digits); a record is one value, whose fields are read and
// written together; uniform and hotspot choose among the records that a run has inserted as well; there are no ordered
// scans.
//
// Source: B. Cooper et al., Benchmarking Cloud Serving Systems with YCSB (SoCC 2010), and its CoreWorkload.
package ycsb

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"jbofd/internal/bench"
)

// ErrConfig is wrapped by errors about an invalid Config.
var ErrConfig = errors.New("invalid configuration")

// Config says how a workload is run.
type Config struct {
	// Depth is how many operations each thread keeps outstanding, 1 to 1024.
	Depth int
	// Poisson draws the intervals under Workload.Target from an exponential distribution; otherwise
	// they are equal.
	Poisson bool
	// Seed makes the choice of operations and records repeatable.
	Seed uint64
	// StatePath is a file that keeps the versions of the records; empty: they are kept in memory.
	StatePath string
	// Life distinguishes the values of this run from those of earlier ones. With an existing state file the file's is
	// used. 0: a random one.
	Life uint32
	// ContinueOnError goes on after failed operations.
	ContinueOnError bool
	// DrainTimeout bounds the wait for outstanding operations at the end. 0: 30 s.
	DrainTimeout time.Duration
	// Progress, if set, is called every second or so, from one goroutine.
	Progress func(Progress)
}

// unbounded is for how many inserts of a run without an operationcount there is room.
const unbounded = 1 << 28

// maxGap is more operations than all threads together have outstanding.
const maxGap = 1 << 21

// Bench is a workload on a DB. One goroutine calls its methods.
type Bench struct {
	db       DB
	w        Workload
	cfg      Config
	workers  *bench.WorkerGroup
	versions *versions
	threads  []*thread

	// sequence is the next record to load, insert or verify, end the first that is not.
	sequence atomic.Uint64
	end      uint64
	// full: a run has inserted as many records as there is room for.
	full atomic.Bool
	// quiet: nothing is being written.
	quiet bool
	// total collects the threads' statistics.
	total stats
	// beganNS is when the phase began, by the clock of workers.
	beganNS int64
}

// Open prepares the workload. The DB stays the caller's, to be closed after the Bench.
//
// Errors: ErrConfig, ErrWorkload, ErrState; those of the DB.
func Open(ctx context.Context, db DB, w Workload, cfg Config) (b *Bench, err error) {
	if cfg.Depth < 1 || cfg.Depth > 1024 {
		return nil, fmt.Errorf("%w: depth is %d, must be 1 to 1024", ErrConfig, cfg.Depth)
	}
	if n := w.ValueBytes(); n > db.MaxValueBytes() {
		return nil, fmt.Errorf("%w: fieldcount times fieldlength is %d, the store takes values of %d bytes at most",
			ErrWorkload, n, db.MaxValueBytes())
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = 30 * time.Second
	}
	for cfg.Life == 0 {
		cfg.Life = rand.Uint32()
	}
	b = &Bench{db: db, w: w, cfg: cfg, workers: bench.NewWorkerGroup(cfg.DrainTimeout)}
	assumed := w.loaded()
	if cfg.StatePath != "" {
		assumed = 0
	}
	if b.versions, err = newVersions(cfg.StatePath, w.RecordCount+b.inserts(), w.Ordered, cfg.Life); err != nil {
		return nil, err
	}
	b.versions.begin(w.InsertStart, assumed)
	for i := range w.Threads {
		t, err := newThread(ctx, b, i)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("thread %d: %w", i, err), b.Close())
		}
		b.threads = append(b.threads, t)
	}
	return b, nil
}

// inserts is how many a run may make at most.
func (b *Bench) inserts() uint64 {
	switch {
	case b.w.Insert == 0:
		return 0
	case b.w.OperationCount == 0:
		return unbounded
	}
	return min(b.w.OperationCount, unbounded)
}

// Close releases everything except the DB.
func (b *Bench) Close() error {
	var errs []error
	for _, t := range b.threads {
		errs = append(errs, t.close())
	}
	b.threads = nil
	return errors.Join(append(errs, b.versions.close())...)
}

// Records is how many records the workload may choose from at present.
func (b *Bench) Records() uint64 { return b.versions.limit.Load() - b.w.InsertStart }

// Load writes the records of the workload. Its Phase is valid, as far as it got, with an error
// as well. Cancelling ctx ends it early.
//
// Errors: a queue's failure. Failed operations are in the Phase.
func (b *Bench) Load(ctx context.Context) (*Phase, error) {
	b.sequence.Store(b.w.InsertStart)
	b.end = b.w.InsertStart + b.w.InsertCount
	return b.phase(ctx, "load", b.w.InsertCount, 0, (*thread).nextLoad)
}

// Run runs the operations of the workload, in the manner of Load.
//
// Errors: ErrWorkload, as CheckRun says or for a workload that does not fit what is loaded; otherwise as Load.
func (b *Bench) Run(ctx context.Context) (*Phase, error) {
	w := &b.w
	if err := w.CheckRun(); err != nil {
		return nil, err
	}
	limit := b.versions.limit.Load()
	if need := w.loaded(); limit < need {
		return nil, fmt.Errorf("%w: there must be %d records, but %s knows of %d: load the others first", ErrWorkload,
			need, b.cfg.StatePath, limit)
	}
	b.sequence.Store(limit)
	b.end = uint64(len(b.versions.entries))
	b.full.Store(false)
	// YCSB leaves room for twice the inserts that it expects.
	expected := uint64(float64(w.OperationCount) * w.Insert)
	if w.OperationCount == 0 && w.Insert > 0 {
		expected = w.RecordCount
	}
	for i, t := range b.threads {
		t.choose = newChooser(w, expected, t.rng)
		t.left = ^uint64(0)
		if n := uint64(len(b.threads)); w.OperationCount > 0 {
			t.left = w.OperationCount / n
			if uint64(i) < w.OperationCount%n {
				t.left++
			}
		}
	}
	p, err := b.phase(ctx, "run", w.OperationCount, w.MaxExecution, (*thread).nextRun)
	if b.full.Load() && p != nil {
		p.Messages = append(p.Messages, fmt.Sprintf("ended: there is room for the versions of %d records",
			len(b.versions.entries)))
	}
	return p, err
}

// Verify reads all records that were ever written, or without a state file all that should exist, and checks them, in
// the manner of Load. Nothing may be written meanwhile.
func (b *Bench) Verify(ctx context.Context) (*Phase, error) {
	var first, total uint64
	b.end = 0
	// Inserts have consecutive numbers, so that a long gap is the end. The table may be much longer.
	for n := uint64(0); n < uint64(len(b.versions.entries)) && n < max(b.end, b.w.loaded())+maxGap; n++ {
		if n < b.versions.assumed && n >= b.w.InsertStart || b.versions.entries[n].issued.Load() > 0 {
			if total == 0 {
				first = n
			}
			total++
			b.end = n + 1
		}
	}
	if total == 0 {
		return nil, fmt.Errorf("%w %s: it lists no records", ErrState, b.cfg.StatePath)
	}
	b.sequence.Store(first)
	b.quiet = true
	defer func() { b.quiet = false }()
	return b.phase(ctx, "verify", total, 0, (*thread).nextVerify)
}

// collect moves the threads' statistics into the total and returns what was moved.
func (b *Bench) collect() *stats {
	var sum stats
	for _, t := range b.threads {
		sum.merge(t.take())
	}
	b.total.merge(&sum)
	return &sum
}

// phase runs all threads until each has ended, for at most limit if that is not 0.
func (b *Bench) phase(ctx context.Context, name string, total uint64, limit time.Duration,
	next func(*thread, *slot) bool) (*Phase, error) {
	b.collect()
	b.total = stats{}
	use := b.takeUsage()
	start := time.Now()
	b.beganNS = b.workers.Now()
	for i, t := range b.threads {
		t.stretches = t.stretches[:0]
		t.pacer = bench.Pacer{}
		if b.w.Target > 0 && name == "run" {
			t.pacer = bench.NewPacer(bench.PacerConfig{PerSec: b.w.Target, Poisson: b.cfg.Poisson,
				BeginNS: b.workers.Now(), Worker: i, Workers: len(b.threads)})
		}
	}
	last := start
	err := b.workers.Run(ctx, limit, func(i int) error {
		t := b.threads[i]
		return t.loop(func(s *slot) bool { return next(t, s) })
	}, func(now time.Time) {
		b.progress(name, total, start, last, b.collect(), false)
		last = now
	})
	b.progress(name, total, start, last, b.collect(), true)
	p := b.newPhase(time.Since(start), use)
	p.Interrupted = ctx.Err() != nil
	return p, err
}

// progress tells what was counted since last, or when the phase is over in all of it.
func (b *Bench) progress(name string, total uint64, start, last time.Time, iv *stats, over bool) {
	if b.cfg.Progress == nil {
		return
	}
	if over {
		iv, last = &b.total, start
	}
	now := time.Now()
	p := Progress{Phase: name, Elapsed: now.Sub(start), Ops: b.total.ops, Total: total, Series: seriesOf(iv),
		Failures: b.total.failed() + b.total.wrong, Last: over}
	if name == "run" {
		p.MaxElapsed = b.w.MaxExecution
	}
	if d := now.Sub(last).Seconds(); d > 0 {
		p.OpsPerSec = float64(iv.ops) / d
	}
	b.cfg.Progress(p)
}
