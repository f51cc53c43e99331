// Package demo is the newcomer's first run: it starts a daemon with the embedded
// default, uses it over NVMe/TCP as two hosts with a namespace each, checks every
// byte, shows how fast that was and what the daemon's metrics say of it, and
// stops the daemon.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"jbofd/client"
	"jbofd/internal/bench"
	"jbofd/internal/config"
)

// Config is a demonstration.
type Config struct {
	// Daemon is the path of jbofd.
	Daemon string
	// Dir is where ./data is made and the daemon runs.
	Dir string
	// FreePorts lets the daemon listen on any free ports instead of the default's.
	FreePorts bool
	// Runtime is how long the mixed load runs.
	Runtime time.Duration
	// SizeBytes is how much each host writes, a multiple of 1 MiB.
	SizeBytes int64
	// Environ is the daemon's environment, KEY=value.
	Environ []string
	// Out is where progress and results go.
	Out io.Writer
}

// ErrPortTaken: a port of the embedded default is in use.
var ErrPortTaken = errors.New("port is taken")

// Timeouts of what has no end of its own.
const (
	startTimeout  = 30 * time.Second
	stopTimeout   = 10 * time.Second
	scrapeTimeout = 5 * time.Second
)

// Sizes of the demonstration's loads.
const (
	fillBlock  = 128 << 10
	fillDepth  = 8
	mixedBlock = 4 << 10
	mixedDepth = 16
	mixedReads = 70
)

// host is one of the two hosts.
type host struct {
	name string
	nqn  string
	nsid uint32
	// rows are what its loads gave.
	rows []row
	// verified is how many bytes were read and found to be what was written.
	verified uint64
}

// row is a line of the table.
type row struct {
	load string
	d    *bench.Direction
}

// Run runs the demonstration. Whatever happens, the daemon is stopped.
//
// Errors: ErrPortTaken; what failed, with the daemon's last words if it was the
// daemon; a failed verification.
func Run(ctx context.Context, cfg Config) (err error) {
	began := time.Now()
	plan, path, err := configure(&cfg)
	if err != nil {
		return err
	}
	out := &progress{w: cfg.Out, began: began}
	args := []string{"--demo"}
	if path != "" {
		args = []string{"--config", path}
	}
	out.printf("starting %s %s (three file-backed drives in %s)", cfg.Daemon, strings.Join(args, " "),
		filepath.Join(cfg.Dir, "data"))
	d, err := startDaemon(&cfg, args)
	if err != nil {
		return err
	}
	defer func() {
		if d != nil {
			err = errors.Join(err, d.stop())
		}
	}()
	st, err := d.waitReady(ctx, filepath.Join(cfg.Dir, plan.Admin.Socket))
	if err != nil {
		return err
	}
	address := st.Addresses.Listeners[0]
	out.printf("jbofd is ready: NVMe/TCP on %s, process %d", address, d.cmd.Process.Pid)

	var hosts []*host
	sub := plan.Subsystems[0]
	for i, name := range []string{"anna", "bert"} {
		hosts = append(hosts, &host{name: name, nqn: "nqn.2026-11.example.jbofd:host-" + name,
			nsid: sub.Namespaces[i].NSID})
	}
	for _, h := range hosts {
		out.printf("host %s (%s) uses namespace %d of %s", h.name, h.nqn, h.nsid, sub.NQN)
	}
	seed := uint64(began.UnixNano())
	for i, step := range []struct {
		title string
		load  string
		cfg   bench.Config
	}{
		{fmt.Sprintf("both write %s in blocks of %s, each block with its own checksum", bench.FormatSize(cfg.SizeBytes),
			bench.FormatSize(fillBlock)), "sequential",
			bench.Config{Pattern: "write", BlockBytes: fillBlock, IODepth: fillDepth, Jobs: 1, SizeBytes: cfg.SizeBytes,
				Verify: true, NoReadBack: true, Seed: seed}},
		{"both connect anew, read everything back and check it", "sequential",
			bench.Config{Pattern: "read", BlockBytes: fillBlock, IODepth: fillDepth, Jobs: 1, SizeBytes: cfg.SizeBytes,
				Verify: true, VerifyOnly: true, Seed: seed}},
		{fmt.Sprintf("both run %d %% random reads, %d %% writes of %s, queue depth %d, and check again", mixedReads,
			100-mixedReads, bench.FormatSize(mixedBlock), mixedDepth), "random mixed",
			bench.Config{Pattern: "randrw", ReadPercent: mixedReads, BlockBytes: mixedBlock, IODepth: mixedDepth,
				Jobs: 1, Runtime: cfg.Runtime, SizeBytes: cfg.SizeBytes, Verify: true, Seed: seed + 1}},
	} {
		out.printf("%d/3 %s", i+1, step.title)
		if err := runAll(ctx, d, hosts, func(ctx context.Context, h *host) error {
			return h.load(ctx, address, sub.NQN, step.load, step.cfg, out)
		}); err != nil {
			return err
		}
	}
	samples, err := scrape(ctx, st.Addresses.Metrics, hosts)
	if err != nil {
		return err
	}
	out.printf("stopping jbofd")
	if err := d.stop(); err != nil {
		return err
	}
	d = nil
	return report(cfg.Out, hosts, st.Addresses.Metrics, samples, time.Since(began))
}

// configure returns the configuration that the daemon will run with, and the path
// of a file for it if it is not the embedded default.
func configure(cfg *Config) (plan *config.Config, path string, err error) {
	plan, err = config.ParseEnv(config.DefaultName, config.DefaultYAML(), cfg.Environ)
	if err != nil {
		return nil, "", err
	}
	if cfg.FreePorts {
		const free = "127.0.0.1:0"
		plan.Metrics.Address, plan.Discovery.Address, plan.Listeners[0].Address = free, free, free
		path = filepath.Join("data", "demo.yaml")
		if err := os.MkdirAll(filepath.Join(cfg.Dir, "data"), 0o750); err != nil {
			return nil, "", err
		}
		return plan, path, os.WriteFile(filepath.Join(cfg.Dir, path), plan.Effective(), 0o600)
	}
	for _, p := range []struct{ what, address string }{
		{"NVMe/TCP", plan.Listeners[0].Address}, {"discovery", plan.Discovery.Address},
		{"metrics", plan.Metrics.Address},
	} {
		if p.address == "" {
			continue
		}
		l, err := net.Listen("tcp", p.address)
		if err != nil {
			return nil, "", fmt.Errorf("%w: %s, which jbofd --demo uses for %s (%w); stop what has it, perhaps "+
				"another jbofd, or let the demo take any free ports with --free-ports",
				ErrPortTaken, p.address, p.what, err)
		}
		if err := l.Close(); err != nil {
			return nil, "", err
		}
	}
	return plan, "", nil
}

// runAll runs what for all hosts at once; it ends early when one fails or the
// daemon dies.
func runAll(ctx context.Context, d *process, hosts []*host, what func(context.Context, *host) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, len(hosts))
	for _, h := range hosts {
		go func() {
			err := what(ctx, h)
			if err != nil {
				err = fmt.Errorf("host %s: %w", h.name, err)
				cancel(err)
			}
			done <- err
		}()
	}
	var errs []error
	died := d.exited
	for n := 0; n < len(hosts); {
		select {
		case err := <-done:
			errs = append(errs, err)
			n++
		case <-died:
			died = nil
			errs = append(errs, d.logTailError("jbofd ended in the middle of the demonstration"))
			cancel(errs[len(errs)-1])
		}
	}
	return errors.Join(errs...)
}

// load connects, runs one load and notes what it gave.
func (h *host) load(ctx context.Context, address, subNQN, name string, cfg bench.Config, out *progress) error {
	c, err := client.Connect(ctx, client.Options{Address: address, SubNQN: subNQN, HostNQN: h.nqn, QPairs: 1,
		QueueDepth: cfg.IODepth, CtrlLossTimeout: -1})
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	t, err := bench.NewNVMe(ctx, c, h.nsid)
	if err != nil {
		return errors.Join(err, c.Close())
	}
	cfg.Progress = func(p bench.Progress) { out.show(h.name, p) }
	rep, err := bench.Run(ctx, t, cfg)
	err = errors.Join(err, t.Close())
	switch {
	case err != nil:
		return err
	case !rep.OK():
		return fmt.Errorf("%d failed I/Os, %d blocks with wrong data: %s", rep.Errors.IO, rep.Errors.Verify,
			strings.Join(rep.Errors.Messages, "; "))
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	h.verified += rep.Verify.CheckedBytes
	for _, r := range []row{{name + " read", rep.Read}, {name + " write", rep.Write}} {
		if r.d != nil {
			h.rows = append(h.rows, r)
		}
	}
	return nil
}

// scrape reads the metrics and returns two lines a host.
func scrape(ctx context.Context, address string, hosts []*host) (samples []string, err error) {
	if address == "" {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("metrics: %s: %w", resp.Status, err)
	}
	for _, h := range hosts {
		for _, name := range []string{"jbof_io_completed_total{", "jbof_io_bytes_total{"} {
			found := false
			for line := range strings.Lines(string(text)) {
				if strings.HasPrefix(line, name) && strings.Contains(line, `op="read"`) &&
					strings.Contains(line, `tenant="`+h.nqn+`"`) {
					samples = append(samples, strings.TrimSpace(line))
					found = true
					break
				}
			}
			if !found {
				return nil, fmt.Errorf("metrics: no %s of tenant %s at http://%s/metrics",
					strings.TrimSuffix(name, "{"), h.nqn, address)
			}
		}
	}
	return samples, nil
}

// report prints the outcome.
func report(w io.Writer, hosts []*host, metrics string, samples []string, took time.Duration) error {
	var b strings.Builder
	b.WriteByte('\n')
	const line = "%-6s %-20s %8s %8s %8s %8s %8s %8s\n"
	fmt.Fprintf(&b, line, "host", "load", "IOPS", "MB/s", "mean", "p50", "p99", "p99.9")
	var verified uint64
	for _, h := range hosts {
		verified += h.verified
		for _, r := range h.rows {
			l := &r.d.LatencyNS
			fmt.Fprintf(&b, line, h.name, r.load, fmt.Sprintf("%.0f", r.d.IOPS),
				fmt.Sprintf("%.1f", r.d.BytesPerSec/1e6),
				bench.FormatNS(l.Mean), bench.FormatNS(float64(l.P50)), bench.FormatNS(float64(l.P99)),
				bench.FormatNS(float64(l.P999)))
		}
	}
	fmt.Fprintf(&b, "\nverified: %d bytes read and found to be what was written\n", verified)
	if metrics != "" {
		fmt.Fprintf(&b, "metrics while jbofd runs: http://%s/metrics, for example\n", metrics)
		for _, s := range samples {
			fmt.Fprintf(&b, "  %s\n", s)
		}
	}
	fmt.Fprintf(&b, "done in %.1f s; jbofd has stopped cleanly\n", took.Seconds())
	_, err := io.WriteString(w, b.String())
	return err
}
