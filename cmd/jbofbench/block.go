package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"jbofd/client"
	"jbofd/internal/bench"
)

// sizeFlag is a pflag.Value that reads sizes as fio does.
type sizeFlag int64

func (f *sizeFlag) String() string { return bench.FormatSize(int64(*f)) }
func (f *sizeFlag) Type() string   { return "size" }
func (f *sizeFlag) Set(s string) error {
	n, err := bench.ParseSize(s)
	*f = sizeFlag(n)
	return err
}

// secondsFlag is a pflag.Value that reads durations as fio does: bare numbers are seconds.
type secondsFlag time.Duration

func (f *secondsFlag) String() string { return time.Duration(*f).String() }
func (f *secondsFlag) Type() string   { return "seconds" }
func (f *secondsFlag) Set(s string) error {
	if n, err := strconv.ParseFloat(s, 64); err == nil {
		*f = secondsFlag(n * float64(time.Second))
		return nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("%q: must be seconds, or a duration as 500ms or 2m", s)
	}
	*f = secondsFlag(d)
	return nil
}

// blockFlags are the flags of jbofbench block.
type blockFlags struct {
	connectFlags
	cfg bench.Config

	nqn          string
	nsid         uint32
	raw          string
	engine       string
	rawBlock     sizeFlag
	bs           sizeFlag
	size, offset sizeFlag
	rate         sizeFlag
	runtime      secondsFlag
	ramp         secondsFlag
	verify       string
	doVerify     bool
	rateProcess  string
	spin         time.Duration
	credits      string
	json, quiet  bool
	cpus         string
	gomaxprocs   int
	cpuProfile   string
}

// connectFlags are what block and discover share.
type connectFlags struct {
	target, hostNQN, hostID string
	hdgst, ddgst            bool
	kato                    secondsFlag
}

func (f *connectFlags) add(c *cobra.Command) {
	fl := c.Flags()
	fl.StringVar(&f.target, "target", "", "NVMe target, tcp://HOST:PORT or rdma://HOST:PORT; the latter needs a "+
		"jbofbench built with the tag rdma")
	fl.StringVar(&f.hostNQN, "hostnqn", "", "host NQN (default: the machine's in /etc/nvme, else a new one)")
	fl.StringVar(&f.hostID, "hostid", "", "host identifier, a UUID (default: goes with --hostnqn)")
	fl.BoolVarP(&f.hdgst, "hdr_digest", "g", false, "header digests, over TCP")
	fl.BoolVarP(&f.ddgst, "data_digest", "G", false, "data digests, over TCP")
	f.kato = secondsFlag(5 * time.Second)
	fl.Var(&f.kato, "keep_alive_tmo", "keep-alive timeout; 0 is none")
}

// options turns the flags into connection options. Slow Connects and losses of the connection are logged to stderr.
func (f *connectFlags) options(stderr io.Writer) (client.Options, error) {
	o := client.Options{Logger: newLog(stderr), HostNQN: f.hostNQN, HeaderDigest: f.hdgst, DataDigest: f.ddgst,
		KATO: time.Duration(f.kato)}
	if o.KATO == 0 {
		o.KATO = -1
	}
	scheme, addr, ok := strings.Cut(f.target, "://")
	if !ok || addr == "" || scheme != client.TCP && scheme != client.RDMA {
		return o, usagef("--target is %q, must be tcp://HOST:PORT or rdma://HOST:PORT", f.target)
	}
	o.Address = f.target
	if scheme == client.RDMA && (f.hdgst || f.ddgst) {
		return o, usagef("--hdr_digest and --data_digest are for tcp://, RDMA has checksums of its own")
	}
	if f.hostID != "" {
		id, err := client.ParseUUID(f.hostID)
		if err != nil {
			return o, usagef("--hostid: %v", err)
		}
		o.HostID = id
	}
	if f.hostNQN == "" && f.hostID == "" {
		if nqn, id, ok := client.MachineHost(); ok {
			o.HostNQN, o.HostID = nqn, id
		}
	}
	return o, nil
}

func blockCommand() *cobra.Command {
	f := &blockFlags{cfg: bench.Config{ReadPercent: 50, IODepth: 1, Jobs: 1}, bs: 4096}
	c := &cobra.Command{
		Use:   "block (--target tcp|rdma://HOST:PORT --nqn NQN | --raw PATH|mem:SIZE)",
		Short: "Run a block workload in fio's terms",
		Long: `Run a block workload in fio's terms against a namespace (--target, --nqn, --nsid) or, for
comparison, straight against a file, block device or memory (--raw).

Each job has a queue of its own and an equal share of the region. With --runtime the jobs go round and
round in their shares for that long; without it each job covers its share once. Sizes are as in fio: 4k,
4KiB, 1m, 10g are powers of 1024.

Writing destroys what is on the target.

Ctrl-C ends the run and reports what was measured until then; a second one ends the process at once.

Exit status: 0 all well; 1 an I/O or a verification failed, or the target is out of reach; 2 bad flags;
130 interrupted.`,
		Example: `  jbofbench block --target tcp://127.0.0.1:4420 --nqn nqn.2026-11.example.jbofd:blocks \
      --rw randread --iodepth 32 --runtime 10
  jbofbench block --target tcp://127.0.0.1:4420 --nqn nqn.2026-11.example.jbofd:blocks \
      --rw randwrite --size 64m --verify crc32c
  jbofbench block --target rdma://192.0.2.1:4420 --nqn nqn.2026-11.example.jbofd:blocks \
      --rw randread --iodepth 32 --runtime 10
  jbofbench block --raw data/ssd0.img --rw randread --iodepth 32 --runtime 10`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c) },
	}
	f.connectFlags.add(c)
	fl := c.Flags()
	fl.StringVarP(&f.nqn, "nqn", "n", "", "subsystem NQN")
	fl.Uint32Var(&f.nsid, "nsid", 1, "namespace")
	fl.StringVar(&f.raw, "raw", "", "run on this file or block device, or on mem:SIZE, without a network")
	fl.StringVar(&f.engine, "raw_engine", "", "I/O engine of --raw PATH: io_uring or threads (default: io_uring if "+
		"the kernel lets us)")
	f.rawBlock = 4096
	fl.Var(&f.rawBlock, "raw_block", "block size of --raw mem:SIZE")
	fl.StringVar(&f.cfg.Pattern, "rw", "read", "workload: "+strings.Join(bench.Patterns, ", "))
	fl.IntVar(&f.cfg.ReadPercent, "rwmixread", 50, "percentage of reads in rw and randrw")
	fl.Var(&f.bs, "bs", "block size of an I/O")
	fl.IntVar(&f.cfg.IODepth, "iodepth", 1, "I/Os outstanding per job")
	fl.IntVar(&f.cfg.Jobs, "numjobs", 1, "jobs")
	fl.Var(&f.size, "size", "size of the region (default: to the end)")
	fl.Var(&f.offset, "offset", "start of the region")
	fl.Var(&f.runtime, "runtime", "run for that long")
	fl.Var(&f.ramp, "ramp_time", "run for that long before measuring")
	fl.Float64Var(&f.cfg.RateIOPS, "rate_iops", 0, "I/Os per second of all jobs together; latency then counts from "+
		"when an I/O was due")
	fl.Var(&f.rate, "rate", "bytes per second of all jobs together")
	fl.StringVar(&f.rateProcess, "rate_process", "linear", "intervals under a rate: linear or poisson")
	fl.BoolVar(&f.cfg.NoRandomMap, "norandommap", false, "draw random offsets independently instead of visiting every "+
		"place once a round")
	fl.Bool("time_based", true, "as with fio; it is so anyway")
	_ = fl.MarkHidden("time_based")
	fl.BoolVar(&f.cfg.FUA, "fua", false, "Force Unit Access on writes")
	fl.IntVar(&f.cfg.FlushEvery, "fsync", 0, "Flush after that many writes")
	fl.StringVar(&f.verify, "verify", "", "crc32c: write blocks that can be checked, check what is read; keeps 4 "+
		"bytes per block in memory")
	fl.BoolVar(&f.doVerify, "do_verify", true, "with --verify, read back everything written in the end")
	fl.BoolVar(&f.cfg.VerifyOnly, "verify_only", false, "only read the region and check it against an earlier run "+
		"with the same --bs and --randseed")
	fl.Uint64Var(&f.cfg.Seed, "randseed", 1, "seed of offsets and verify patterns")
	fl.BoolVar(&f.cfg.ContinueOnError, "continue_on_error", false, "go on after failed I/Os")
	fl.DurationVar(&f.spin, "spin", client.DefaultSpin, "how long to look for completions before blocking, at low "+
		"depth; negative: block at once")
	fl.StringVar(&f.credits, "credits", "auto", "keep within what the target lets this host have outstanding: on, "+
		"off, or auto (if it offers that); I/Os beyond wait at the host")
	fl.IntVar(&f.cfg.TargetPID, "target_pid", 0, "report the CPU that this process uses")
	fl.StringVar(&f.cpus, "cpus_allowed", "", "run on these CPUs only, as 0 or 0,2-3")
	fl.IntVar(&f.gomaxprocs, "gomaxprocs", 0, "threads that run Go code (default: the number of CPUs allowed)")
	fl.StringVar(&f.cpuProfile, "cpuprofile", "", "write a CPU profile of jbofbench to this file")
	fl.BoolVar(&f.json, "json", false, "print the report as JSON")
	fl.BoolVarP(&f.quiet, "quiet", "q", false, "no progress")
	return c
}

func (f *blockFlags) run(c *cobra.Command) error {
	cfg := &f.cfg
	cfg.BlockBytes, cfg.SizeBytes, cfg.OffsetBytes = int(f.bs), int64(f.size), int64(f.offset)
	cfg.Runtime, cfg.RampTime = time.Duration(f.runtime), time.Duration(f.ramp)
	cfg.NoReadBack = !f.doVerify
	switch f.verify {
	case "":
	case "crc32c":
		cfg.Verify = true
	default:
		return usagef("--verify is %q, must be crc32c", f.verify)
	}
	switch f.rateProcess {
	case "linear":
	case "poisson":
		cfg.Poisson = true
	default:
		return usagef("--rate_process is %q, must be linear or poisson", f.rateProcess)
	}
	if f.rate > 0 {
		if cfg.RateIOPS > 0 {
			return usagef("--rate and --rate_iops exclude each other")
		}
		if f.bs > 0 {
			cfg.RateIOPS = float64(f.rate) / float64(f.bs)
		}
	}
	if err := cfg.Check(); err != nil {
		return usagef("%v", err)
	}
	if err := f.pin(); err != nil {
		return err
	}
	ctx := c.Context()
	t, err := f.open(ctx, c.ErrOrStderr())
	if errors.Is(err, bench.ErrConfig) {
		return usagef("%v", err)
	}
	if err != nil {
		return err
	}
	s := newScreen(c.ErrOrStderr())
	if !f.quiet {
		cfg.Progress = showBlock(s)
	}
	stopProfile, err := f.profile()
	if err != nil {
		return errors.Join(err, t.Close())
	}
	rep, err := bench.Run(ctx, t, *cfg)
	err = errors.Join(err, stopProfile())
	s.end()
	err = errors.Join(err, t.Close())
	if errors.Is(err, bench.ErrConfig) {
		return usagef("%v", err)
	}
	if rep != nil {
		if f.json {
			e := json.NewEncoder(c.OutOrStdout())
			e.SetIndent("", "  ")
			err = errors.Join(err, e.Encode(rep))
		} else {
			err = errors.Join(err, rep.WriteTable(c.OutOrStdout()))
		}
	}
	if err != nil {
		return err
	}
	if !rep.OK() {
		if f.json {
			fmt.Fprintf(c.ErrOrStderr(), "jbofbench: %d failed I/Os, %d verification failures; first: %s\n",
				rep.Errors.IO, rep.Errors.Verify, first(rep.Errors.Messages))
		}
		return errFailed
	}
	return nil
}

// profile starts the CPU profile, if one is wanted; the function returned ends it.
func (f *blockFlags) profile() (stop func() error, err error) {
	if f.cpuProfile == "" {
		return func() error { return nil }, nil
	}
	w, err := os.Create(f.cpuProfile)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(w); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return w.Close()
	}, nil
}

func first(s []string) string {
	if len(s) == 0 {
		return "none noted"
	}
	return s[0]
}

// open opens what --target or --raw names.
func (f *blockFlags) open(ctx context.Context, stderr io.Writer) (bench.Target, error) {
	if (f.raw == "") == (f.target == "") {
		return nil, usagef("give either --target tcp://HOST:PORT, rdma://HOST:PORT or --raw PATH|mem:SIZE")
	}
	if f.cfg.Jobs < 1 || f.cfg.Jobs > 1024 || f.cfg.IODepth < 1 || f.cfg.IODepth > 1024 {
		return nil, usagef("--numjobs is %d and --iodepth %d, both must be 1 to 1024", f.cfg.Jobs, f.cfg.IODepth)
	}
	if f.raw != "" {
		return bench.OpenRaw(bench.RawConfig{Path: f.raw, Engine: f.engine, BlockSize: int(f.rawBlock),
			Buffers: f.cfg.Jobs * f.cfg.IODepth, BufferBytes: f.cfg.BlockBytes})
	}
	o, err := f.options(stderr)
	if err != nil {
		return nil, err
	}
	if f.nqn == "" {
		return nil, usagef("--nqn is missing: the NQN of the subsystem; jbofbench discover lists them")
	}
	o.SubNQN, o.QPairs, o.QueueDepth, o.Spin = f.nqn, f.cfg.Jobs, f.cfg.IODepth, f.spin
	modes := map[string]client.CreditMode{"auto": client.CreditsAuto, "on": client.CreditsOn, "off": client.CreditsOff}
	mode, ok := modes[f.credits]
	if !ok {
		return nil, usagef("--credits is %q, must be on, off or auto", f.credits)
	}
	o.Credits = mode
	o.CtrlLossTimeout = -1 // no reconnect: a gap would invalidate the measurement
	c, err := client.Connect(ctx, o)
	if err != nil {
		if errors.Is(err, client.ErrInvalid) {
			return nil, usagef("%v", err)
		}
		return nil, err
	}
	t, err := bench.NewNVMe(ctx, c, f.nsid)
	if errors.Is(err, client.ErrUnsupported) {
		err = fmt.Errorf("%w; if it holds keys and values, jbofbench kv --nsid %d is for it", err, f.nsid)
	}
	if err != nil {
		return nil, errors.Join(withNamespaces(ctx, c, err), c.Close())
	}
	return t, nil
}

// pin keeps the process on the CPUs of --cpus_allowed and sets GOMAXPROCS.
func (f *blockFlags) pin() error {
	n := f.gomaxprocs
	if f.cpus != "" {
		set, err := parseCPUs(f.cpus)
		if err != nil {
			return err
		}
		// Threads started later inherit the mask of the one that starts them; the second round
		// catches those that were started during the first.
		for range 2 {
			tasks, err := os.ReadDir("/proc/self/task")
			if err != nil {
				return err
			}
			for _, t := range tasks {
				tid, err := strconv.Atoi(t.Name())
				if err != nil {
					return err
				}
				if err := unix.SchedSetaffinity(tid, set); err != nil && err != unix.ESRCH {
					return fmt.Errorf("--cpus_allowed %s: %w", f.cpus, err)
				}
			}
		}
		if n == 0 {
			n = set.Count()
		}
	}
	if n < 0 {
		return usagef("--gomaxprocs is %d, must be at least 1", n)
	}
	if n > 0 {
		runtime.GOMAXPROCS(n)
	}
	return nil
}

func parseCPUs(s string) (*unix.CPUSet, error) {
	var set unix.CPUSet
	for part := range strings.SplitSeq(s, ",") {
		lo, hi, ranged := strings.Cut(part, "-")
		a, err := strconv.Atoi(lo)
		b := a
		if err == nil && ranged {
			b, err = strconv.Atoi(hi)
		}
		if err != nil || a < 0 || b < a || b > 1023 {
			return nil, usagef("--cpus_allowed is %q, must be CPU numbers below 1024 and ranges, as 0 or 0,2-3", s)
		}
		for i := a; i <= b; i++ {
			set.Set(i)
		}
	}
	return &set, nil
}

// showBlock returns what shows the state of a running load on a screen.
func showBlock(s *screen) func(bench.Progress) {
	return func(b bench.Progress) {
		if !s.due(b.Phase, b.Elapsed, false) {
			return
		}
		var l strings.Builder
		fmt.Fprintf(&l, "%s %3.0fs", b.Phase, b.Elapsed.Seconds())
		if b.Total > 0 {
			fmt.Fprintf(&l, "/%.0fs", b.Total.Seconds())
		}
		for _, d := range []struct {
			name string
			iv   bench.Interval
		}{{"read", b.Read}, {"write", b.Write}} {
			if d.iv.IOPS > 0 {
				fmt.Fprintf(&l, "  %s %.1fk IOPS %.0f MB/s mean %s p99 %s", d.name, d.iv.IOPS/1e3, d.iv.BytesPerSec/1e6,
					bench.FormatNS(d.iv.MeanNS), bench.FormatNS(float64(d.iv.P99NS)))
			}
		}
		if b.Errors > 0 {
			fmt.Fprintf(&l, "  ERRORS %d", b.Errors)
		}
		s.show(l.String())
	}
}
