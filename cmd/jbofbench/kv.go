package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"jbofd/client"
	"jbofd/client/cluster"
	"jbofd/internal/bench"
	"jbofd/internal/bench/ycsb"
)

// kvFlags are the flags of jbofbench kv.
type kvFlags struct {
	connectFlags
	cfg      ycsb.Config
	embedded ycsb.EmbeddedConfig

	nqn         string
	nsid        uint32
	cluster     []string
	readFrom    string
	hedge       time.Duration
	readTimeout time.Duration
	opTimeout   secondsFlag
	files       []string
	props       []string
	threads     int
	rate        float64
	rateProcess string
	size        sizeFlag
	blockSize   sizeFlag
	durability  string
	credits     string
	exactlyOnce bool
	spin        time.Duration
	ctrlLoss    secondsFlag
	status      bool
	json, quiet bool
}

// kvPhases are the commands below kv and what each of them runs.
var kvPhases = []struct {
	use, short string
	phases     []string
}{
	{"load", "Write the records of a workload", []string{"load"}},
	{"run", "Run the operations of a workload", []string{"run"}},
	{"verify", "Read everything back and check it", []string{"verify"}},
}

func kvCommand() *cobra.Command {
	c := newKVCommand("kv (--target tcp|rdma://HOST:PORT --nqn NQN | --cluster ADDRESS[,ADDRESS...] --nqn NQN | "+
		"--embedded PATH|mem:SIZE) -P FILE [-p NAME=VALUE ...]",
		"Run YCSB on a key-value namespace", "load", "run")
	c.Long = `Run YCSB, the Yahoo! Cloud Serving Benchmark, on a key-value namespace (--target, --nqn, --nsid), on the
keys of a cluster (--cluster, --nqn) or on a store in this process (--embedded). kv load writes the records,
kv run runs the operations, kv alone does both; kv verify reads everything back.

Workloads are YCSB's property files (-P, more than one may be given) and single properties (-p). Those
that count:

  recordcount, insertstart, insertcount           the records, and which of them a load writes
  operationcount, maxexecutiontime (seconds)      when a run ends
  readproportion, updateproportion, insertproportion, readmodifywriteproportion
  requestdistribution                             uniform, zipfian, latest, hotspot
  zipfianconstant                                 theta of zipfian and latest, 0.99 unless set
  hotspotdatafraction, hotspotopnfraction
  fieldcount, fieldlength, minfieldlength, fieldlengthdistribution (constant, uniform)
  insertorder                                     hashed, ordered
  threadcount, target                             also as --threads and --rate; target is a run's
  timeseries.granularity (milliseconds)           counts by such intervals as well; measurementtype=timeseries
                                                  alone stands for 1000

A record is one value of fieldcount times fieldlength bytes; its key has 16 bytes. Ordered scans
(workload E) are not offered. Other properties are listed and have no effect.

Every value read is verified: it follows from its key and version, and of each record it is known which
versions a read may find. In one process that is known of what the process itself has written. With
--state FILE it is kept in a file, as writes are acknowledged: after a load with it, runs go on from it,
and kv verify finds out whether a target that was killed has kept all that it had acknowledged. The
file must be used from the load on.

Without target, each thread keeps --depth operations outstanding (closed loop). With a target they begin
when they are due (open loop), and the Intended- series count from then; --depth bounds how many may be
outstanding. Overdue, if there are any, were due when the time was over and had not begun.

Lines of [TIMELINE] have, for each interval: when it began (ms), operations per second that ended in it
well, their mean and longest latency (us), and how many others ended in it.

With --cluster, nodes may come and go: operations are repeated for --op_timeout. Those that were not carried
out then count as SERVICE_UNAVAILABLE, those whose outcome is unknown as ERROR; --continue_on_error goes on
after them. The lines of [STORE] count what has been repeated, and why.

Several processes may share the records out by insertstart and insertcount; each keeps to its own.

Exit status: 0 all well; 1 an operation or a verification failed, or the target is out of reach; 2 bad flags
or a bad workload; 130 interrupted.`
	c.Example = `  jbofbench kv -P configs/ycsb/workloada -p recordcount=100000 -p operationcount=1000000 \
      --embedded mem:1g --depth 64
  jbofbench kv load -P configs/ycsb/workloadb -p recordcount=10000000 -p fieldcount=1 -p fieldlength=256 \
      --threads 4 --depth 32 --target tcp://127.0.0.1:4420 --nqn nqn.2026-11.example.jbofd:kv --state /tmp/kv.state
  jbofbench kv run -P configs/ycsb/workloadb ... -p operationcount=10000000 -p zipfianconstant=0.9 \
      --rate 50000 --state /tmp/kv.state
  jbofbench kv verify -P configs/ycsb/workloadb ... --state /tmp/kv.state
  jbofbench kv -P configs/ycsb/workloadb -p recordcount=100000 -p operationcount=1000000 --depth 32 \
      --cluster 192.0.2.1:4420,192.0.2.2:4420,192.0.2.3:4420 --nqn nqn.2026-11.example.jbofd:kv
  jbofbench kv load -P configs/ycsb/workloadc -p recordcount=1000000 --embedded data/kv.img --size 4g --depth 64
  jbofbench kv run -P configs/ycsb/workloadc -p recordcount=1000000 -p operationcount=1000000 \
      --embedded data/kv.img --depth 64`
	for _, p := range kvPhases {
		c.AddCommand(newKVCommand(p.use, p.short, p.phases...))
	}
	return c
}

// newKVCommand makes a command that runs the phases.
func newKVCommand(use, short string, phases ...string) *cobra.Command {
	f := &kvFlags{}
	c := &cobra.Command{
		Use:   use,
		Short: short,
		Long:  short + ". All about workloads and flags is in jbofbench kv --help.",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return f.run(c, phases) },
	}
	f.connectFlags.add(c)
	fl := c.Flags()
	fl.StringVarP(&f.nqn, "nqn", "n", "", "subsystem NQN")
	fl.Uint32Var(&f.nsid, "nsid", 1, "namespace")
	fl.StringSliceVar(&f.cluster, "cluster", nil, "addresses of some nodes of a cluster, as those of --target; the "+
		"others are in its map")
	fl.StringVar(&f.readFrom, "read_from", "any", "with --cluster: which members of a chain are asked for reads: any "+
		"(that with most of its credit left), tail, or turn (each in turn)")
	fl.DurationVar(&f.hedge, "hedge", 0, "with --cluster: ask a second member for what has not been read for so long; "+
		"0: never")
	fl.DurationVar(&f.readTimeout, "read_timeout", 500*time.Millisecond, "with --cluster: how long a member may "+
		"take to answer a read before another one is asked instead")
	f.opTimeout = secondsFlag(10 * time.Second)
	fl.Var(&f.opTimeout, "op_timeout", "with --cluster: how long an operation is tried")
	fl.StringVar(&f.embedded.Path, "embedded", "", "run a store in this process, on this file or block device, or on "+
		"mem:SIZE")
	fl.Var(&f.size, "size", "with --embedded: make a file of this size and a store in it, if there is none")
	fl.BoolVar(&f.embedded.Format, "format", false, "with --embedded: make a new store there, whatever there is")
	fl.StringVar(&f.embedded.Engine, "embedded_engine", "", "I/O engine of --embedded PATH: io_uring or threads "+
		"(default: io_uring if the kernel lets us)")
	f.blockSize = 4096
	fl.Var(&f.blockSize, "embedded_block", "block size of --embedded mem:SIZE")
	fl.IntVar(&f.embedded.KeysPerSegment, "keys_per_segment", 0, "with --embedded: keys of a segment, on average "+
		"(default: the store's)")
	fl.IntVar(&f.embedded.Requests, "requests", 0, "with --embedded: requests in progress at most (default: the "+
		"store's)")
	fl.StringVar(&f.durability, "durability", "device", "with --embedded: device (by its nature), or none: "+
		"acknowledged writes may be lost with the power")
	fl.StringArrayVarP(&f.files, "workload", "P", nil, "workload file")
	fl.StringArrayVarP(&f.props, "property", "p", nil, "property, as recordcount=1000; counts before those of files")
	fl.IntVar(&f.threads, "threads", 0, "threads, each with a queue of its own: the property threadcount")
	fl.Float64Var(&f.rate, "rate", 0, "operations per second of all threads together: the property target")
	fl.StringVar(&f.rateProcess, "rate_process", "linear", "intervals under a rate: linear or poisson")
	fl.IntVar(&f.cfg.Depth, "depth", 0, "operations outstanding per thread (default: 1, and 64 under a rate)")
	fl.StringVar(&f.cfg.StatePath, "state", "", "file that keeps the versions of the records")
	fl.Uint64Var(&f.cfg.Seed, "randseed", 1, "seed of the choice of operations and records")
	fl.BoolVar(&f.cfg.ContinueOnError, "continue_on_error", false, "go on after failed operations")
	fl.BoolVar(&f.exactlyOnce, "exactly_once", false, "give PUTs identities, so that none is carried out twice when "+
		"the connection is lost; each takes space on the drive")
	fl.StringVar(&f.credits, "credits", "auto", "keep within what the target lets this host have outstanding: on, "+
		"off, or auto (if it offers that)")
	fl.DurationVar(&f.spin, "spin", client.DefaultSpin, "how long to look for completions before blocking, at low "+
		"depth; negative: block at once")
	f.ctrlLoss = secondsFlag(-time.Second)
	fl.Var(&f.ctrlLoss, "ctrl_loss_tmo", "how long to try to reconnect when the connection is lost; negative: not at "+
		"all, for a measurement with a gap in it is none")
	fl.BoolVarP(&f.status, "status", "s", false, "YCSB's status line every second")
	fl.BoolVar(&f.json, "json", false, "print the report as JSON")
	fl.BoolVarP(&f.quiet, "quiet", "q", false, "no progress")
	return c
}

// acceptYCSBFlags turns YCSB's own flags with one hyphen into ours: -load and -t (transactions) are kv load and kv run.
func acceptYCSBFlags(args []string) []string {
	if len(args) == 0 || args[0] != "kv" {
		return args
	}
	out := []string{"kv"}
	for _, a := range args[1:] {
		switch a {
		case "-threads":
			out = append(out, "--threads")
		case "-target":
			out = append(out, "--rate")
		case "-load":
			out = slices.Insert(out, 1, "load")
		case "-t":
			out = slices.Insert(out, 1, "run")
		default:
			out = append(out, a)
		}
	}
	return out
}

// workload reads the workload.
func (f *kvFlags) workload(c *cobra.Command) (ycsb.Workload, error) {
	if len(f.files) == 0 && len(f.props) == 0 {
		return ycsb.Workload{}, usagef("recordcount is missing: give a YCSB workload, -P FILE, or its properties, " +
			"-p NAME=VALUE each")
	}
	p := ycsb.Properties{}
	for _, name := range f.files {
		file, err := os.Open(name)
		if err != nil {
			return ycsb.Workload{}, usagef("-P: %v", err)
		}
		if err := errors.Join(p.Read(name, file), file.Close()); err != nil {
			return ycsb.Workload{}, err
		}
	}
	for _, s := range f.props {
		if err := p.Set(s); err != nil {
			return ycsb.Workload{}, fmt.Errorf("-p: %w", err)
		}
	}
	if c.Flags().Changed("threads") {
		p["threadcount"] = fmt.Sprint(f.threads)
	}
	if c.Flags().Changed("rate") {
		p["target"] = fmt.Sprint(f.rate)
	}
	load, warnings, err := p.Workload()
	for _, s := range warnings {
		fmt.Fprintf(c.ErrOrStderr(), "jbofbench: %s\n", s)
	}
	return load, err
}

func (f *kvFlags) run(c *cobra.Command, phases []string) error {
	err := f.phases(c, phases)
	if errors.Is(err, ycsb.ErrConfig) || errors.Is(err, ycsb.ErrWorkload) || errors.Is(err, ycsb.ErrState) {
		return usagef("%v", err)
	}
	return err
}

func (f *kvFlags) phases(c *cobra.Command, phases []string) (err error) {
	w, err := f.workload(c)
	if err != nil {
		return err
	}
	if slices.Contains(phases, "run") {
		if err := w.CheckRun(); err != nil {
			return err
		}
	}
	switch f.rateProcess {
	case "linear":
	case "poisson":
		f.cfg.Poisson = true
	default:
		return usagef("--rate_process is %q, must be linear or poisson", f.rateProcess)
	}
	if f.cfg.Depth == 0 {
		f.cfg.Depth = 1
		if w.Target > 0 {
			f.cfg.Depth = 64
		}
	}
	if f.cfg.Depth < 1 || f.cfg.Depth > 1024 {
		return usagef("--depth is %d, must be 1 to 1024", f.cfg.Depth)
	}
	ctx := c.Context()
	db, err := f.open(c, w.Threads)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	switch {
	case f.status:
		f.cfg.Progress = func(b ycsb.Progress) { fmt.Fprintln(c.ErrOrStderr(), b.StatusLine(time.Now())) }
	case !f.quiet:
		f.cfg.Progress = showKV(newScreen(c.ErrOrStderr()))
	}
	b, err := ycsb.Open(ctx, db, w, f.cfg)
	if err != nil {
		return err
	}
	rep := b.NewReport()
	for _, name := range phases {
		var p *ycsb.Phase
		switch name {
		case "load":
			p, err = b.Load(ctx)
			rep.Load = p
		case "run":
			p, err = b.Run(ctx)
			rep.Run = p
		default:
			p, err = b.Verify(ctx)
			rep.Verify = p
		}
		if err != nil || !p.OK() || p.Interrupted {
			break
		}
	}
	err = errors.Join(err, b.Close())
	if rerr := f.report(c, rep); err == nil {
		err = rerr
	}
	return err
}

// report prints what there is of it.
func (f *kvFlags) report(c *cobra.Command, rep *ycsb.Report) (err error) {
	if f.json {
		e := json.NewEncoder(c.OutOrStdout())
		e.SetIndent("", "  ")
		if err := e.Encode(rep); err != nil {
			return err
		}
	} else if err := rep.WriteYCSB(c.OutOrStdout()); err != nil {
		return err
	}
	for _, p := range []*ycsb.Phase{rep.Load, rep.Run, rep.Verify} {
		if p == nil {
			continue
		}
		if !p.OK() {
			fmt.Fprintf(c.ErrOrStderr(), "jbofbench: %d failed operations, %d verification failures\n", p.Failed,
				p.Wrong)
		}
		for _, m := range p.Messages {
			fmt.Fprintf(c.ErrOrStderr(), "jbofbench:   %s\n", m)
		}
		if slices.ContainsFunc(p.Messages, func(m string) bool { return strings.Contains(m, "KV Wrong View") }) &&
			len(f.cluster) == 0 {
			fmt.Fprintf(c.ErrOrStderr(), "jbofbench: %v%s\n", ycsb.ErrPartition, inPlaceOfTarget)
		}
		if p.Interrupted {
			fmt.Fprintf(c.ErrOrStderr(), "jbofbench: interrupted after %d operations\n", p.Operations)
			err = errFailed
		}
	}
	if !rep.OK() {
		err = errFailed
	}
	return err
}

// inPlaceOfTarget follows ycsb.ErrPartition.
const inPlaceOfTarget = ": --cluster is for it, in place of --target"

// modes are the flags that say what is measured, each with those that mean something with it and not with all.
var modes = []struct {
	flag string
	with []string
}{
	{"--target", []string{"nqn", "nsid", "hostnqn", "hostid", "hdr_digest", "data_digest", "keep_alive_tmo", "credits",
		"spin", "exactly_once", "ctrl_loss_tmo"}},
	{"--cluster", []string{"nqn", "hostnqn", "hostid", "hdr_digest", "data_digest", "keep_alive_tmo", "credits",
		"read_from", "hedge", "read_timeout", "op_timeout"}},
	{"--embedded", []string{"size", "format", "embedded_engine", "embedded_block", "keys_per_segment", "requests",
		"durability"}},
}

// refuseUnused refuses flags that would have no effect in a mode.
func refuseUnused(c *cobra.Command, mode string) error {
	var with []string
	for _, m := range modes {
		if m.flag == mode {
			with = m.with
		}
	}
	for _, m := range modes {
		for _, name := range m.with {
			if c.Flags().Changed(name) && !slices.Contains(with, name) {
				return usagef("--%s goes with %s", name, m.flag)
			}
		}
	}
	return nil
}

// mode is which of the modes the flags ask for.
func (f *kvFlags) mode() (mode string, err error) {
	n := 0
	for flag, set := range map[string]bool{"--target": f.target != "", "--cluster": len(f.cluster) > 0,
		"--embedded": f.embedded.Path != ""} {
		if set {
			mode = flag
			n++
		}
	}
	if n != 1 {
		return "", usagef("give one of --target tcp://HOST:PORT, rdma://HOST:PORT, --cluster ADDRESS[,ADDRESS...] " +
			"and --embedded PATH|mem:SIZE")
	}
	return mode, nil
}

// creditMode reads --credits.
func (f *kvFlags) creditMode() (client.CreditMode, error) {
	m, ok := map[string]client.CreditMode{"auto": client.CreditsAuto, "on": client.CreditsOn,
		"off": client.CreditsOff}[f.credits]
	if !ok {
		return m, usagef("--credits is %q, must be on, off or auto", f.credits)
	}
	return m, nil
}

// openCluster opens what --cluster names.
func (f *kvFlags) openCluster(c *cobra.Command, threads int) (ycsb.DB, error) {
	if f.target = f.cluster[0]; !strings.Contains(f.target, "://") {
		f.target = "tcp://" + f.target
	}
	conn, err := f.options(c.ErrOrStderr())
	if err != nil {
		return nil, err
	}
	if conn.Credits, err = f.creditMode(); err != nil {
		return nil, err
	}
	conn.Address, conn.Queues, conn.QueueDepth = "", threads, max(f.cfg.Depth, 16)
	if !c.Flags().Changed("keep_alive_tmo") {
		conn.KATO = 0 // that of the package
	}
	o := cluster.Options{Addresses: f.cluster, SubNQN: f.nqn, Connection: conn, Hedge: f.hedge,
		ReadTimeout: f.readTimeout, Timeout: time.Duration(f.opTimeout)}
	switch f.readFrom {
	case "any":
	case "tail":
		o.ReadFrom = cluster.ReadTail
	case "turn":
		o.ReadFrom = cluster.ReadInTurn
	default:
		return nil, usagef("--read_from is %q, must be any, tail or turn", f.readFrom)
	}
	s, err := cluster.Open(c.Context(), o)
	if errors.Is(err, client.ErrInvalid) {
		return nil, usagef("%v", err)
	}
	if errors.Is(err, client.ErrUnsupported) {
		err = fmt.Errorf("%w; if it is one node of no cluster, --target is for it", err)
	}
	if err != nil {
		return nil, err
	}
	db, err := ycsb.NewCluster(c.Context(), s)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return db, nil
}

// open opens what the flags name.
func (f *kvFlags) open(c *cobra.Command, threads int) (ycsb.DB, error) {
	mode, err := f.mode()
	if err != nil {
		return nil, err
	}
	if err := refuseUnused(c, mode); err != nil {
		return nil, err
	}
	if mode != "--embedded" && f.nqn == "" {
		return nil, usagef("--nqn is missing: the NQN of the subsystem; jbofbench discover lists them")
	}
	if mode == "--cluster" {
		return f.openCluster(c, threads)
	}
	if f.embedded.Path != "" {
		switch f.durability {
		case "device":
		case "none":
			f.embedded.Volatile = true
		default:
			return nil, usagef("--durability is %q, must be device or none", f.durability)
		}
		f.embedded.SizeBytes, f.embedded.BlockSize = int64(f.size), int(f.blockSize)
		db, err := ycsb.OpenEmbedded(f.embedded)
		if err != nil {
			return nil, err
		}
		return db, nil
	}
	o, err := f.options(c.ErrOrStderr())
	if err != nil {
		return nil, err
	}
	o.SubNQN, o.QPairs, o.QueueDepth, o.Spin, o.CtrlLossTimeout = f.nqn, threads, f.cfg.Depth, f.spin,
		time.Duration(f.ctrlLoss)
	if o.Credits, err = f.creditMode(); err != nil {
		return nil, err
	}
	controller, err := client.Connect(c.Context(), o)
	if err != nil {
		if errors.Is(err, client.ErrInvalid) {
			return nil, usagef("%v", err)
		}
		return nil, err
	}
	db, err := ycsb.NewWire(c.Context(), controller, f.nsid, f.exactlyOnce)
	if errors.Is(err, ycsb.ErrPartition) {
		return nil, errors.Join(fmt.Errorf("%w%s", err, inPlaceOfTarget), controller.Close())
	}
	if errors.Is(err, client.ErrUnsupported) {
		err = fmt.Errorf("%w; if it holds blocks, jbofbench block --nsid %d is for it", err, f.nsid)
	}
	if err != nil {
		return nil, errors.Join(withNamespaces(c.Context(), controller, err), controller.Close())
	}
	return db, nil
}

// barWidth is how many characters all of a phase is.
const barWidth = 30

// showKV returns what shows the state of a phase on a screen.
func showKV(s *screen) func(ycsb.Progress) {
	return func(b ycsb.Progress) {
		if !s.due(b.Phase, b.Elapsed, b.Last) {
			return
		}
		share, known := b.Share()
		var l strings.Builder
		fmt.Fprintf(&l, "%-6s ", b.Phase)
		if known {
			full := int(share * barWidth)
			fmt.Fprintf(&l, "[%s%s] %3.0f %% ", strings.Repeat("#", full), strings.Repeat(".", barWidth-full),
				100*share)
		}
		fmt.Fprintf(&l, "%d operations in %.0f s, %.1f k/s", b.Ops, b.Elapsed.Seconds(), b.OpsPerSec/1e3)
		if b.Failures > 0 {
			fmt.Fprintf(&l, ", FAILURES %d", b.Failures)
		}
		if known && share > 0 && share < 1 && !b.Last {
			fmt.Fprintf(&l, ", %s left", time.Duration(float64(b.Elapsed)*(1-share)/share).Round(time.Second))
		}
		for _, e := range b.Series {
			if e.LatencyNS != nil {
				fmt.Fprintf(&l, ", %s p99 %s", strings.ToLower(e.Name), bench.FormatNS(float64(e.LatencyNS.P99)))
			}
		}
		s.show(l.String())
		if b.Last {
			s.end()
		}
	}
}
