package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// table prints the results for people.
func table(out io.Writer, cfg Config, results []Result) error {
	mib := func(n int64) string { return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20)) }
	limit := "no limit"
	if cfg.PageCacheBytes >= 0 {
		limit = mib(cfg.PageCacheBytes)
	}
	fmt.Fprintf(out, "%d objects of %d + %d B (%s), %d workers, %v a phase; memory for a peer's caches and memtables "+
		"%s, page cache %s\n\n",
		cfg.Objects, keyBytes, cfg.ValueBytes, mib(cfg.dataBytes()), cfg.Workers, cfg.PhaseTime, mib(cfg.MemoryBytes),
		limit)
	speed := [][]string{{"", "load/s", "GET/s", "p50 µs", "p99", "p99.9", "CPU µs", "B read", "PUT/s", "p50 µs", "p99",
		"p99.9", "CPU µs"}}
	cost := [][]string{{"", "heap and buffers", "RSS peak", "page cache", "disk", "written/user", "open ms",
		"after kill -9", "settled"}}
	for _, r := range results {
		row := []string{r.Engine, fmt.Sprintf("%.0f", r.Load.PerSec)}
		for _, p := range []Phase{r.Get, r.Put} {
			row = append(row, fmt.Sprintf("%.0f", p.PerSec))
			for _, us := range []float64{p.P50US, p.P99US, p.P999US} {
				row = append(row, fmt.Sprintf("%.0f", us))
			}
			row = append(row, fmt.Sprintf("%.1f", p.CPUSeconds*1e6/float64(max(p.Operations, 1))))
			if p == r.Get {
				row = append(row, fmt.Sprintf("%.0f", float64(p.ReadBytes)/float64(max(p.Operations, 1))))
			}
		}
		speed = append(speed, row)
		written := "-"
		if r.Written > 0 {
			written = fmt.Sprintf("%.2f", r.Written)
		}
		cost = append(cost, []string{r.Engine, mib(r.AnonPeakBytes), mib(r.RSSPeakBytes), mib(r.PageCachePeakBytes),
			mib(r.DiskBytes), written,
			fmt.Sprintf("%.0f", r.OpenMS), recoveries(r.Recoveries), fmt.Sprintf("%v, %v", r.Settled[0], r.Settled[1])})
	}
	for _, rows := range [][][]string{speed, cost} {
		t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
		for _, r := range rows {
			fmt.Fprintln(t, strings.Join(r, "\t")+"\t")
		}
		if err := t.Flush(); err != nil {
			return err
		}
		fmt.Fprintln(out)
	}
	return nil
}

// recoveries lists how long the openings took.
func recoveries(all []Recovery) string {
	var ms []string
	for _, r := range all {
		ms = append(ms, fmt.Sprintf("%.0f", r.OpenMS))
	}
	return strings.Join(ms, ", ")
}
