package report

import (
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"jbofd/internal/sim"
)

// plotFormat is the file name extension of plots: svg, or another format of gonum's plot package.
const plotFormat = "svg"

func format(file string) string { return strings.TrimPrefix(filepath.Ext(file), ".") }

// WriteFolder creates the folder dir and writes results.json, results.csv (a line for each tenant), report.md and the
// plots to it.
func WriteFolder(dir string, seed uint64, results []*sim.Result) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, f := range []struct {
		name  string
		write func(io.Writer) error
	}{
		{"results.json", func(w io.Writer) error { return WriteJSON(w, seed, results) }},
		{"results.csv", func(w io.Writer) error { return writeCSV(w, results) }},
	} {
		if err := create(filepath.Join(dir, f.name), f.write); err != nil {
			return err
		}
	}
	pictures, err := writePlots(dir, results)
	if err != nil {
		return err
	}
	return create(filepath.Join(dir, "report.md"),
		func(w io.Writer) error { return writeMarkdown(w, seed, results, pictures) })
}

func create(file string, write func(io.Writer) error) error {
	w, err := os.Create(file)
	if err != nil {
		return err
	}
	if err := write(w); err != nil {
		_ = w.Close() // the first error counts
		return err
	}
	return w.Close()
}

func writeCSV(w io.Writer, results []*sim.Result) error {
	c := csv.NewWriter(w)
	head := []string{"row", "scenario", "condition", "phase", "policy", "seed", "tenant", "group", "weight", "f_util",
		"usage", "bytes_per_sec", "ios_per_sec",
		"latency_mean_ns", "latency_p50_ns", "latency_p99_ns", "latency_p999_ns", "latency_max_ns",
		"app_latency_mean_ns", "app_latency_p99_ns", "app_latency_p999_ns", "drive_mean_ns", "credit"}
	lines := [][]string{head}
	for _, r := range results {
		for _, p := range r.Phases {
			for _, t := range p.Tenants {
				line := []string{r.Row, r.Scenario, r.Condition, p.Name, r.Policy, fmt.Sprint(r.Seed), t.Name, t.Group,
					fmt.Sprint(t.Weight)}
				for _, v := range []float64{t.FUtil, t.Usage, t.BytesPerSec, t.IOsPerSec, t.Latency.MeanNS} {
					line = append(line, fmt.Sprintf("%.6g", v))
				}
				for _, v := range []int64{t.Latency.P50NS, t.Latency.P99NS, t.Latency.P999NS, t.Latency.MaxNS,
					int64(t.AppLatency.MeanNS), t.AppLatency.P99NS, t.AppLatency.P999NS, int64(t.DeviceNS),
					int64(t.Credit)} {
					line = append(line, fmt.Sprint(v))
				}
				lines = append(lines, line)
			}
		}
	}
	return c.WriteAll(lines)
}

// writePlots draws all plots and returns their file names by row.
func writePlots(dir string, results []*sim.Result) (pictures map[string][]string, err error) {
	pictures = map[string][]string{}
	add := func(row, name string, write func(file string) error) {
		if err != nil {
			return
		}
		file := filepath.Join(dir, name+"."+plotFormat)
		if err = write(file); err != nil {
			err = fmt.Errorf("%s: %w", file, err)
			return
		}
		if _, statErr := os.Stat(file); statErr == nil { // a plot without data is not written
			pictures[row] = append(pictures[row], name+"."+plotFormat)
		}
	}
	for _, c := range charts(results) {
		add(c.row, "futil-"+c.row, c.plotFUtil)
		add(c.row, "tail-"+c.row, c.plotTail)
	}
	for _, group := range scenarios(results) {
		r := group[0]
		name := r.Row + "-" + strings.ReplaceAll(r.Scenario, "/", "-")
		switch {
		case r.Series != nil:
			add(r.Row, "series-"+name, func(file string) error { return plotSeries(file, group) })
			add(r.Row, "write-cost-"+name, func(file string) error { return plotWriteCost(file, group) })
		case r.Row == "utilisation" || r.Row == "read-write":
			add(r.Row, "cdf-"+name, func(file string) error { return plotCDF(file, group) })
		}
	}
	return pictures, err
}

// scenarios groups the results by scenario.
func scenarios(results []*sim.Result) (out [][]*sim.Result) {
	for _, r := range results {
		if n := len(out); n > 0 && out[n-1][0].Row == r.Row && out[n-1][0].Scenario == r.Scenario {
			out[n-1] = append(out[n-1], r)
			continue
		}
		out = append(out, []*sim.Result{r})
	}
	return out
}

func writeMarkdown(w io.Writer, seed uint64, results []*sim.Result, pictures map[string][]string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Scheduling policies on an emulated SSD\n\nVirtual time, seed %d. f-Util: what a tenant gets by "+
		"its fair share of what a load of its sort gets alone; "+
		"1 is ideal. Utilisation: the sum over tenants of what they get by what they would get alone; reads and "+
		"writes use partly different parts of a drive, so it can pass 1. "+
		"Latency: from sending to the answer's arrival, all tenants together; app: from the application's asking, "+
		"with the wait for credit.\n", seed)
	var rows []string
	for _, r := range results {
		if !slices.Contains(rows, r.Row) {
			rows = append(rows, r.Row)
		}
	}
	for _, row := range rows {
		fmt.Fprintf(&b, "\n## %s\n\n| scenario | phase | policy |", row)
		for _, c := range columns {
			fmt.Fprintf(&b, " %s |", c.name)
		}
		b.WriteString("\n|---|---|---|" + strings.Repeat("--:|", len(columns)) + "\n")
		for _, r := range results {
			if r.Row != row {
				continue
			}
			for i := range r.Phases {
				fmt.Fprintf(&b, "| %s | %s | %s |", r.Scenario, r.Phases[i].Name, r.Policy)
				for _, c := range columns {
					fmt.Fprintf(&b, " "+c.format+" |", c.value(&r.Phases[i]))
				}
				b.WriteString("\n")
			}
			for _, v := range r.Violations {
				fmt.Fprintf(&b, "| %s | **broken** | %s | %s |\n", r.Scenario, r.Policy, v)
			}
		}
		for _, p := range pictures[row] {
			fmt.Fprintf(&b, "\n![%s](%s)\n", strings.TrimSuffix(p, "."+plotFormat), p)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
