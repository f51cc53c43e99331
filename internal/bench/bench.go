// Package bench is the load generator of jbofbench. It runs fio's workloads against a namespace of an NVMe-oF target or
// directly against a device.
//
// Each job has a queue, a goroutine and its own part of the region. It keeps iodepth operations outstanding or follows
// a rate, verifies the data it reads on request, and records latencies in HDR histograms. Under a rate, the latency of
// an operation starts when the operation was due, not when it could be submitted. A stall therefore shows in every
// operation that it delayed.
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

// Config describes a workload.
type Config struct {
	// Pattern is the value of fio's rw option: read, write, randread, randwrite, rw or randrw.
	Pattern string
	// ReadPercent is the share of reads in rw and randrw, 0 to 100.
	ReadPercent int
	// BlockBytes is the size of each I/O.
	BlockBytes int
	// IODepth is the number of I/Os each job keeps outstanding.
	IODepth int
	// Jobs is the number of jobs. The region is divided equally among them.
	Jobs int
	// Runtime limits the duration of the load; each job repeats its region until then. If Runtime is 0, each job ends
	// after one pass over its region.
	Runtime time.Duration
	// RampTime is the duration of the load before the measurement begins.
	RampTime time.Duration
	// OffsetBytes and SizeBytes describe the region. A SizeBytes of 0 stands for the rest of the target.
	OffsetBytes, SizeBytes int64
	// RateIOPS is the total rate of all jobs; 0 stands for unlimited. With Poisson, the intervals are exponentially
	// distributed instead of equal.
	RateIOPS float64
	Poisson  bool
	// NoRandomMap draws random offsets independently. Otherwise every offset is visited once before any is visited
	// again.
	NoRandomMap bool
	// FUA sets Force Unit Access on writes. FlushEvery issues a Flush after that many writes.
	FUA        bool
	FlushEvery int
	// Verify writes self-describing blocks and verifies the blocks that are read; see fillVerify.
	Verify bool
	// VerifyOnly reads the region and verifies it against an earlier run with the same Seed.
	VerifyOnly bool
	// NoReadBack skips the final pass of Verify that reads all written blocks.
	NoReadBack bool
	// Seed makes offsets and verification patterns reproducible.
	Seed uint64
	// ContinueOnError continues after failed I/Os.
	ContinueOnError bool
	// DrainTimeout limits the wait for outstanding I/Os at the end; 0 stands for 30 s.
	DrainTimeout time.Duration
	// TargetPID is the process whose CPU time is reported, if not 0.
	TargetPID int
	// Progress, if set, is called about every second from one goroutine.
	Progress func(Progress)
}

// Patterns are the values of Config.Pattern.
var Patterns = []string{"read", "write", "randread", "randwrite", "rw", "randrw"}

// ErrConfig is wrapped by errors about a Config that cannot be run.
var ErrConfig = errors.New("invalid workload")

// Progress is the state of a running load.
type Progress struct {
	// Phase is "ramp", "run" or "verify". Elapsed and Total refer to the phase. A Total of 0 stands for unknown.
	Phase          string
	Elapsed, Total time.Duration
	// Read and Write cover the time since the previous call.
	Read, Write Interval
	Errors      uint64
}

// Interval summarises the operations of one kind in an interval of time.
type Interval struct {
	IOPS, BytesPerSec float64
	MeanNS            float64
	P99NS             int64
}

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrConfig, fmt.Sprintf(format, args...))
}

// Check sets defaults and validates what does not depend on the target. Errors use the names of jbofbench's flags.
//
// Errors: ErrConfig.
func (cfg *Config) Check() error {
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
	if cfg.Jobs < 1 || cfg.Jobs > 1024 {
		return bad("--numjobs is %d, must be 1 to 1024", cfg.Jobs)
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

// check is Check, and validates cfg against the target.
func (cfg *Config) check(info TargetInfo) error {
	if err := cfg.Check(); err != nil {
		return err
	}
	if info.MaxDepth > 0 && cfg.IODepth > info.MaxDepth {
		return bad("--iodepth is %d, the target's queues take at most %d", cfg.IODepth, info.MaxDepth)
	}
	bs := int64(info.BlockSize)
	if cfg.BlockBytes <= 0 || int64(cfg.BlockBytes)%bs != 0 {
		return bad("--bs is %d, must be a multiple of the target's block size %d", cfg.BlockBytes, bs)
	}
	if info.MaxTransferBytes > 0 && cfg.BlockBytes > info.MaxTransferBytes {
		return bad("--bs is %d, the target takes at most %d", cfg.BlockBytes, info.MaxTransferBytes)
	}
	if cfg.OffsetBytes < 0 || cfg.OffsetBytes%bs != 0 || cfg.OffsetBytes >= info.SizeBytes {
		return bad("--offset is %d, must be a multiple of %d below the target's size %d", cfg.OffsetBytes, bs,
			info.SizeBytes)
	}
	if cfg.SizeBytes == 0 {
		cfg.SizeBytes = info.SizeBytes - cfg.OffsetBytes
	}
	if cfg.SizeBytes < 0 || cfg.SizeBytes > info.SizeBytes-cfg.OffsetBytes {
		return bad("--size is %d, the target has %d bytes from --offset on", cfg.SizeBytes,
			info.SizeBytes-cfg.OffsetBytes)
	}
	blocks := cfg.SizeBytes / int64(cfg.BlockBytes) / int64(cfg.Jobs)
	if blocks < 1 {
		return bad("--size is %d: too small for %d jobs with --bs %d", cfg.SizeBytes, cfg.Jobs, cfg.BlockBytes)
	}
	if cfg.Verify && cfg.Pattern != "read" && cfg.Pattern != "randread" && blocks < 2*int64(cfg.IODepth) {
		return bad("--size is %d: with --verify each of the %d jobs needs at least twice --iodepth blocks",
			cfg.SizeBytes, cfg.Jobs)
	}
	if cfg.Verify && blocks > 1<<32 {
		return bad("--size is %d: with --verify at most 2^32 blocks a job", cfg.SizeBytes)
	}
	return nil
}

// Run runs the workload and returns its report. If Run fails, the report covers the run until the failure. Cancelling
// ctx ends the run early as if Runtime had passed.
//
// Errors: ErrConfig; the failure of a queue. The report contains failed I/Os and verification failures.
func Run(ctx context.Context, t Target, cfg Config) (rep *Report, err error) {
	info := t.Info()
	if err := cfg.check(info); err != nil {
		return nil, err
	}
	r := &run{cfg: cfg, info: info, begin: time.Now(), workers: NewWorkerGroup(cfg.DrainTimeout)}
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
	cfg     Config
	info    TargetInfo
	begin   time.Time
	workers *WorkerGroup
	jobs    []*job
	// unwritten is the number of bytes of the region that hold no data.
	unwritten int64
	// credit returns the target's credit, if not nil.
	credit func() client.Credit
	// total collects the jobs' statistics. Only the progress loop adds to it until the jobs have ended.
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
			start := r.workers.Now()
			errs = append(errs, r.phase(ctx, "run", cfg.Runtime, (*job).load, false))
			rep.fill(r, time.Duration(r.workers.Now()-start), use)
		}
	}
	if cfg.Verify && (cfg.VerifyOnly || !cfg.NoReadBack && cfg.writes()) && errors.Join(errs...) == nil &&
		ctx.Err() == nil {
		r.reset()
		start := r.workers.Now()
		errs = append(errs, r.phase(ctx, "verify", 0, (*job).readBack, false))
		rep.fillVerify(r, time.Duration(r.workers.Now()-start))
	}
	if ctx.Err() != nil {
		rep.Interrupted = true
	}
	return rep, errors.Join(errs...)
}

func (cfg *Config) writes() bool { return cfg.Pattern != "read" && cfg.Pattern != "randread" }
func (cfg *Config) random() bool { return strings.HasPrefix(cfg.Pattern, "rand") }

// reset discards the statistics collected so far.
func (r *run) reset() {
	for _, j := range r.jobs {
		j.take()
	}
	r.total = newStats()
}

// phase runs what on every job until all jobs have ended, for at most limit if limit is not 0. With keep, outstanding
// I/Os are not drained at the end, and the next phase continues with them.
func (r *run) phase(ctx context.Context, name string, limit time.Duration, what func(*job) error, keep bool) error {
	for _, j := range r.jobs {
		j.keep = keep
	}
	start := time.Now()
	last := start
	err := r.workers.Run(ctx, limit, func(i int) error { return what(r.jobs[i]) }, func(now time.Time) {
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

// collect adds the jobs' statistics to the total and returns what was added.
func (r *run) collect() *stats {
	sum := newStats()
	for _, j := range r.jobs {
		s := j.take()
		sum.merge(s)
	}
	r.total.merge(&sum)
	return &sum
}
