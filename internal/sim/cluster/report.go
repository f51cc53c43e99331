package cluster

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"jbofd/internal/sim"
)

// Plan returns the steps that run scenarios, which may be done in any order or concurrently, after the first stage. The
// results are valid after the last one.
func Plan(scenarios []Scenario, seed uint64) (stages [][]sim.Step, results []*Result) {
	var l *Lab
	stages = [][]sim.Step{{{Name: "drive", Do: func() (err error) {
		l, err = NewLab(Preset, DriveBytes, Slowdown, seed)
		return err
	}}}, nil}
	results = make([]*Result, len(scenarios))
	for i, sc := range scenarios {
		stages[1] = append(stages[1], sim.Step{Name: sc.String(), Do: func() (err error) {
			results[i], err = l.Run(sc)
			return err
		}})
	}
	return stages, results
}

// Estimate is about how long scenarios take on so many processors.
func Estimate(scenarios []Scenario, processors int) time.Duration {
	const each, perSecond = 2 * time.Second, 3 * time.Second // loading the records, and a second of virtual time
	total := time.Duration(0)
	for _, sc := range scenarios {
		total += each + perSecond*time.Duration(sc.AgeNS+sc.WarmNS+sc.MeasuredNS)/time.Second
	}
	return total / time.Duration(max(min(processors, len(scenarios)), 1))
}

// apiVersion is the version of the JSON document. Fields may be added but are never renamed or removed.
const apiVersion = "jbofd.sim/v1"

// WriteJSON writes results and verdicts as JSON.
func WriteJSON(w io.Writer, seed uint64, results []*Result) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(struct {
		APIVersion string    `json:"apiVersion"`
		Kind       string    `json:"kind"`
		Seed       uint64    `json:"seed"`
		Slowdown   int       `json:"slowdown"`
		Results    []*Result `json:"results"`
		Verdicts   []Verdict `json:"verdicts"`
	}{apiVersion, "ClusterSimReport", seed, Slowdown, results, Verdicts(results)})
}

// WriteTable writes a line for each result, what happened over time where something did, and the verdicts.
func WriteTable(w io.Writer, results []*Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "scenario\tfigure\tops/s\tread mean ms\tp99\tp99.9\twrite mean\tp99\tp99.9\tforwards\tshipped\t")
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%s\t%.0f\t%s%s%s\t%.1f %%\t\n", &r.Scenario, r.Scenario.Figure, r.OpsPerSec,
			latencies(r.Reads), latencies(r.Writes), forwards(r), r.ShippedPercent)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, r := range results {
		if n := len(r.Series); n > 0 {
			fmt.Fprintf(w, "\n%s, ops/s each %.2f s; %s after %.0f s; %d MiB were copied, within %.1f s\n%s\n",
				&r.Scenario, float64(r.Scenario.BinNS)/1e9, r.Scenario.Event, float64(r.Scenario.AtNS)/1e9,
				r.FilledBytes>>20, float64(r.FullNS)/1e9, bars(r.Series))
		}
	}
	verdicts := Verdicts(results)
	if len(verdicts) == 0 {
		return nil
	}
	fmt.Fprintln(w, "\nVerdict, each by the scenario of that name with -tail, -in-turn or -locked, or by what was "+
		"before")
	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "scenario\twanted\tmeasured\tthe paper's\t")
	for _, v := range verdicts {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", v.What, v.Wanted, v.Measured, v.Paper, map[bool]string{true: "met",
			false: "SHORT"}[v.Met])
	}
	return t.Flush()
}

func latencies(l sim.Latency) string {
	if l.Count == 0 {
		return "\t\t\t"
	}
	return fmt.Sprintf("%.2f\t%.1f\t%.1f\t", l.MeanNS/1e6, float64(l.P99NS)/1e6, float64(l.P999NS)/1e6)
}

func forwards(r *Result) string {
	if r.ForwardsPerWrite == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f", r.ForwardsPerWrite)
}

// bars draws a series as a line of bars.
func bars(series []float64) string {
	levels := []rune("▁▂▃▄▅▆▇█")
	most := 1.0
	for _, v := range series {
		most = max(most, v)
	}
	line := make([]rune, 0, len(series))
	for _, v := range series {
		line = append(line, levels[min(int(v/most*float64(len(levels))), len(levels)-1)])
	}
	return fmt.Sprintf("%s  0 to %.0f", string(line), most)
}
