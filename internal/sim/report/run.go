// Package report runs a plan of simulations on all processors and writes the results as tables, CSV, JSON and plots.
package report

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"text/tabwriter"

	"jbofd/internal/sim"
)

// Progress is called after each step of a plan, by one goroutine at a time.
type Progress func(done, total int, name string)

// Execute runs the steps of a plan stage by stage on all processors. It returns early on the first error or when ctx is
// cancelled, after the running steps have finished.
func Execute(ctx context.Context, stages [][]sim.Step, progress Progress) error {
	total, done := 0, 0
	for _, s := range stages {
		total += len(s)
	}
	var mu sync.Mutex // guards done, first and progress
	var first error
	for _, steps := range stages {
		var next atomic.Int64
		var workers sync.WaitGroup
		for range min(runtime.GOMAXPROCS(0), len(steps)) {
			workers.Go(func() {
				for ctx.Err() == nil {
					i := int(next.Add(1)) - 1
					if i >= len(steps) {
						return
					}
					err := steps[i].Do()
					mu.Lock()
					done++
					if err != nil && first == nil {
						first = fmt.Errorf("%s: %w", steps[i].Name, err)
					}
					failed := first != nil
					progress(done, total, steps[i].Name)
					mu.Unlock()
					if failed {
						return
					}
				}
			})
		}
		workers.Wait()
		if err := ctx.Err(); err != nil && first == nil {
			first = err
		}
		if first != nil {
			return first
		}
	}
	return nil
}

// APIVersion is the version of the JSON document. Fields may be added but are never renamed or removed.
const APIVersion = "jbofd.sim/v1"

// document is the JSON document.
type document struct {
	APIVersion string        `json:"apiVersion"`
	Kind       string        `json:"kind"`
	Seed       uint64        `json:"seed"`
	Results    []*sim.Result `json:"results"`
}

// WriteJSON writes the results as JSON.
func WriteJSON(w io.Writer, seed uint64, results []*sim.Result) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(document{APIVersion, "SimReport", seed, results})
}

// columns are the columns of a table after scenario, phase and policy.
var columns = []struct {
	name   string
	value  func(p *sim.PhaseResult) float64
	format string
}{
	{"util", func(p *sim.PhaseResult) float64 { return p.Utilisation }, "%.3f"},
	{"f min", func(p *sim.PhaseResult) float64 { return p.FUtilMin }, "%.3f"},
	{"f mean", func(p *sim.PhaseResult) float64 { return p.FUtilMean }, "%.3f"},
	{"f max", func(p *sim.PhaseResult) float64 { return p.FUtilMax }, "%.3f"},
	{"Jain", func(p *sim.PhaseResult) float64 { return p.Jain }, "%.3f"},
	{"MB/s", func(p *sim.PhaseResult) float64 { return p.BytesPerSec / 1e6 }, "%.0f"},
	{"kIOPS", func(p *sim.PhaseResult) float64 { return p.IOsPerSec / 1e3 }, "%.1f"},
	{"mean µs", func(p *sim.PhaseResult) float64 { return p.Latency.MeanNS / 1e3 }, "%.0f"},
	{"p99 µs", func(p *sim.PhaseResult) float64 { return float64(p.Latency.P99NS) / 1e3 }, "%.0f"},
	{"p99.9 µs", func(p *sim.PhaseResult) float64 { return float64(p.Latency.P999NS) / 1e3 }, "%.0f"},
	{"app mean", func(p *sim.PhaseResult) float64 { return p.AppLatency.MeanNS / 1e3 }, "%.0f"},
	{"app p99.9", func(p *sim.PhaseResult) float64 { return float64(p.AppLatency.P999NS) / 1e3 }, "%.0f"},
	{"settle ms", func(p *sim.PhaseResult) float64 { return float64(p.SettleNS) / 1e6 }, "%.0f"},
	{"drive µs", func(p *sim.PhaseResult) float64 { return p.DeviceNS / 1e3 }, "%.0f"},
}

// WriteTable writes one line for each scenario, phase and policy, followed by all violated invariants.
func WriteTable(w io.Writer, results []*sim.Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "scenario\tphase\tpolicy\t")
	for _, c := range columns {
		fmt.Fprintf(t, "%s\t", c.name)
	}
	fmt.Fprintln(t)
	for _, r := range results {
		for i := range r.Phases {
			p := &r.Phases[i]
			fmt.Fprintf(t, "%s/%s\t%s\t%s\t", r.Row, r.Scenario, p.Name, r.Policy)
			for _, c := range columns {
				fmt.Fprintf(t, c.format+"\t", c.value(p))
			}
			fmt.Fprintln(t)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, r := range results {
		for _, v := range r.Violations {
			if _, err := fmt.Fprintf(w, "BROKEN %s/%s, %s: %s\n", r.Row, r.Scenario, r.Policy, v); err != nil {
				return err
			}
		}
	}
	return nil
}

// WriteTenants writes one line for each tenant of each phase.
func WriteTenants(w io.Writer, results []*sim.Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "scenario\tphase\tpolicy\ttenant\tweight\tf-Util\tusage\tMB/s\tkIOPS\tmean µs\tp99 µs\tp99.9 "+
		"µs\tapp mean\tapp p99.9\tdrive µs\tcredit\t")
	const line = "%s/%s\t%s\t%s\t%s\t%d\t%.3f\t%.4f\t%.1f\t%.2f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%d\t\n"
	for _, r := range results {
		for _, p := range r.Phases {
			for _, x := range p.Tenants {
				fmt.Fprintf(t, line, r.Row, r.Scenario, p.Name, r.Policy, x.Name, x.Weight, x.FUtil, x.Usage,
					x.BytesPerSec/1e6, x.IOsPerSec/1e3, x.Latency.MeanNS/1e3, float64(x.Latency.P99NS)/1e3,
					float64(x.Latency.P999NS)/1e3, x.AppLatency.MeanNS/1e3,
					float64(x.AppLatency.P999NS)/1e3, x.DeviceNS/1e3, x.Credit)
			}
		}
	}
	return t.Flush()
}
