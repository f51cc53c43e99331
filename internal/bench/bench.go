// Package bench is the load engine behind jbofbench: fio's workloads, against a namespace of an
// NVMe-oF target or straight against a device.
//
// Each job has a queue, a goroutine and a share of the region of its own. It keeps iodepth
// operations outstanding (or follows a rate), checks what it reads if asked to, and
// records latencies in HDR histograms. Under a rate, latency counts from the moment an
// operation was due, not from when it could at last be submitted, so that a stall shows in
// every operation it delayed.
package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"jbofd/client"
)

// Config is a workload.
type Config struct {
	// Pattern is fio's rw: read, write, randread, randwrite, rw, randrw.
	Pattern string
	// ReadPercent is the share of reads in rw and randrw, 0 to 100.
	ReadPercent int
	// BlockBytes is the size of one I/O.
	BlockBytes int
	// IODepth is the number of I/Os each job keeps outstanding.
	IODepth int
	// Jobs is the number of jobs. Each has its own equal share of the region.
	Jobs int
	// Runtime bounds the load; with it the jobs go round and round in their regions. 0: each
	// job ends when it has covered its region once.
	Runtime time.Duration
	// RampTime is how long to run before measuring.
	RampTime time.Duration
	// OffsetBytes and SizeBytes are the region; SizeBytes 0 is the rest of the target.
	OffsetBytes, SizeBytes int64
	// RateIOPS is the rate of all jobs together, 0 for as fast as possible. Poisson makes
	// the intervals exponentially distributed instead of equal.
	RateIOPS float64
	Poisson  bool
	// NoRandomMap draws random offsets independently; otherwise every place is
	// visited once before any is visited again.
	NoRandomMap bool
	// FUA sets Force Unit Access on writes; FlushEvery issues a Flush after that many writes.
	FUA        bool
	FlushEvery int
	// Verify writes self-describing blocks and checks what is read; see fillVerify.
	Verify bool
	// VerifyOnly reads the region and checks it against an earlier run with the same Seed.
	VerifyOnly bool
	// NoReadBack leaves out the reading back of all that was written, with Verify.
	NoReadBack bool
	// Seed makes offsets and verify patterns repeat.
	Seed uint64
	// ContinueOnError goes on after failed I/Os.
	ContinueOnError bool
	// DrainTimeout bounds the wait for outstanding I/Os at the end. 0: 30 s.
	DrainTimeout time.Duration
	// TargetPID, if not 0, is a process whose CPU time to report.
	TargetPID int
	// Progress, if set, is called every second or so, from one goroutine.
	Progress func(Progress)
}

// Patterns are the values of Config.Pattern.
var Patterns = []string{"read", "write", "randread", "randwrite", "rw", "randrw"}

// ErrConfig is wrapped by errors about a Config that cannot be run.
var ErrConfig = errors.New("invalid workload")

// Progress is the state of a running load.
type Progress struct {
	// Phase is "ramp", "run" or "verify". Elapsed and Total are of the phase; Total 0 is unknown.
	Phase          string
	Elapsed, Total time.Duration
	// Read and Write cover the time since the last call.
	Read, Write Interval
	Errors      uint64
}

// Interval is what happened in a while.
type Interval struct {
	IOPS, BytesPerSec float64
	MeanNS            float64
	P99NS             int64
}

// check fills defaults and judges cfg against the target. Names are those of jbofbench's flags.
func (cfg *Config) check(info TargetInfo) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrConfig, fmt.Sprintf(format, args...))
	}
	if cfg.Pattern == "readwrite" {
		cfg.Pattern = "rw"
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = 30 * time.Second
	}
	if !slices.Contains(Patterns, cfg.Pattern) {
		return bad("--rw is %q, must be one of %s", cfg.Pattern, strings.Join(Patterns, ", "))
	}
	if cfg.ReadPercent < 0 || cfg.ReadPercent > 100 {
		return bad("--rwmixread is %d, must be 0 to 100", cfg.ReadPercent)
	}
	if cfg.IODepth < 1 || cfg.IODepth > 1024 {
		return bad("--iodepth is %d, must be 1 to 1024", cfg.IODepth)
	}
	if info.MaxDepth > 0 && cfg.IODepth > info.MaxDepth {
		return bad("--iodepth is %d, the target's queues take at most %d", cfg.IODepth, info.MaxDepth)
	}
	if cfg.Jobs < 1 || cfg.Jobs > 1024 {
		return bad("--numjobs is %d, must be 1 to 1024", cfg.Jobs)
	}
	bs := int64(info.BlockSize)
	if cfg.BlockBytes <= 0 || int64(cfg.BlockBytes)%bs != 0 {
		return bad("--bs is %d, must be a multiple of the target's block size %d", cfg.BlockBytes, bs)
	}
	if info.MaxTransferBytes > 0 && cfg.BlockBytes > info.MaxTransferBytes {
		return bad("--bs is %d, the target takes at most %d", cfg.BlockBytes, info.MaxTransferBytes)
	}
	if cfg.OffsetBytes < 0 || cfg.OffsetBytes%bs != 0 || cfg.OffsetBytes >= info.SizeBytes {
		return bad("--offset is %d, must be a multiple of %d below the target's size %d", cfg.OffsetBytes, bs, info.SizeBytes)
	}
	if cfg.SizeBytes == 0 {
		cfg.SizeBytes = info.SizeBytes - cfg.OffsetBytes
	}
	if cfg.SizeBytes < 0 || cfg.SizeBytes > info.SizeBytes-cfg.OffsetBytes {
		return bad("--size is %d, the target has %d bytes from --offset on", cfg.SizeBytes, info.SizeBytes-cfg.OffsetBytes)
	}
	blocks := cfg.SizeBytes / int64(cfg.BlockBytes) / int64(cfg.Jobs)
	if blocks < 1 {
		return bad("--size is %d: too small for %d jobs with --bs %d", cfg.SizeBytes, cfg.Jobs, cfg.BlockBytes)
	}
	if cfg.Verify && cfg.Pattern != "read" && cfg.Pattern != "randread" && blocks < 2*int64(cfg.IODepth) {
		return bad("--size is %d: with --verify each of the %d jobs needs at least twice --iodepth blocks", cfg.SizeBytes, cfg.Jobs)
	}
	if cfg.Verify && blocks > 1<<32 {
		return bad("--size is %d: with --verify at most 2^32 blocks a job", cfg.SizeBytes)
	}
	if cfg.VerifyOnly && !cfg.Verify {
		return bad("--verify_only needs --verify crc32c")
	}
	if cfg.RateIOPS < 0 || cfg.Runtime < 0 || cfg.RampTime < 0 || cfg.FlushEvery < 0 {
		return bad("--rate_iops, --rate, --runtime, --ramp_time and --fsync must not be negative")
	}
	if cfg.RampTime > 0 && cfg.Runtime == 0 {
		return bad("--ramp_time needs --runtime")
	}
	return nil
}

// Run runs the workload and returns its report. The report is valid, as far as the run got, with an
// error as well. Cancelling ctx ends the run early, as if its time were over.
//
// Errors: ErrConfig; a queue's failure. Failed I/Os and verification failures are in the report.
func Run(ctx context.Context, t Target, cfg Config) (rep *Report, err error) {
	info := t.Info()
	if err := cfg.check(info); err != nil {
		return nil, err
	}
	r := &run{cfg: cfg, info: info, begin: time.Now(), crew: NewCrew(cfg.DrainTimeout)}
	if n, ok := t.(*NVMe); ok {
		r.credit = n.Credit
	}
	if raw, ok := t.(*Raw); ok {
		r.unwritten = raw.unwritten(cfg.OffsetBytes, cfg.SizeBytes)
	}
	defer func() { err = errors.Join(err, r.close()) }()
	for i := range cfg.Jobs {
		j, err := newJob(ctx, r, i, t)
		if err != nil {
			return nil, fmt.Errorf("job %d: %w", i, err)
		}
		r.jobs = append(r.jobs, j)
	}
	return r.run(ctx)
}

// run is one execution of a workload.
type run struct {
	cfg   Config
	info  TargetInfo
	begin time.Time
	crew  *Crew
	jobs  []*job
	// unwritten bytes of the region hold no data.
	unwritten int64
	// credit, if not nil, returns the target's credit.
	credit func() client.Credit
	// total collects the jobs' statistics; the progress loop adds to it and nobody else
	// until the jobs have ended.
	total stats
}

func (r *run) close() error {
	var errs []error
	for _, j := range r.jobs {
		errs = append(errs, j.close())
	}
	return errors.Join(errs...)
}

func (r *run) run(ctx context.Context) (*Report, error) {
	rep := r.newReport()
	cfg := &r.cfg
	var errs []error
	load := !cfg.VerifyOnly
	if load {
		if cfg.RampTime > 0 {
			errs = append(errs, r.phase(ctx, "ramp", cfg.RampTime, (*job).load, true))
			rep.addErrors(&r.total)
		}
		if (rep.Errors.IO == 0 || cfg.ContinueOnError) && errors.Join(errs...) == nil && ctx.Err() == nil {
			r.reset()
			use := r.takeUsage()
			start := r.crew.Now()
			errs = append(errs, r.phase(ctx, "run", cfg.Runtime, (*job).load, false))
			rep.fill(r, time.Duration(r.crew.Now()-start), use)
		}
	}
	if cfg.Verify && (cfg.VerifyOnly || !cfg.NoReadBack && cfg.writes()) && errors.Join(errs...) == nil && ctx.Err() == nil {
		r.reset()
		start := r.crew.Now()
		errs = append(errs, r.phase(ctx, "verify", 0, (*job).readBack, false))
		rep.fillVerify(r, time.Duration(r.crew.Now()-start))
	}
	if ctx.Err() != nil {
		rep.Interrupted = true
	}
	return rep, errors.Join(errs...)
}

func (cfg *Config) writes() bool { return cfg.Pattern != "read" && cfg.Pattern != "randread" }
func (cfg *Config) random() bool { return strings.HasPrefix(cfg.Pattern, "rand") }

// reset forgets what was counted so far.
func (r *run) reset() {
	for _, j := range r.jobs {
		j.take()
	}
	r.total = newStats()
}

// phase runs what on every job until all have ended, for at most limit if that is not 0.
// With keep, the jobs' I/Os are not drained at the end: the next phase goes on with them.
func (r *run) phase(ctx context.Context, name string, limit time.Duration, what func(*job) error, keep bool) error {
	for _, j := range r.jobs {
		j.keep = keep
	}
	start := time.Now()
	last := start
	err := r.crew.Run(ctx, limit, func(i int) error { return what(r.jobs[i]) }, func(now time.Time) {
		iv := r.collect()
		if r.cfg.Progress != nil {
			d := now.Sub(last).Seconds()
			r.cfg.Progress(Progress{Phase: name, Elapsed: now.Sub(start), Total: limit,
				Read: iv.interval(Read, d), Write: iv.interval(Write, d), Errors: r.total.errors()})
		}
		last = now
	})
	r.collect()
	return err
}

// collect moves the jobs' statistics into the total and returns what was moved.
func (r *run) collect() *stats {
	sum := newStats()
	for _, j := range r.jobs {
		s := j.take()
		sum.merge(s)
	}
	r.total.merge(&sum)
	return &sum
}
