package main

import (
	"fmt"
	"io"
	"regexp"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/sim"
	"jbofd/internal/sim/cluster"
	"jbofd/internal/sim/report"
)

func simCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "sim",
		Short: "Compare scheduling policies, and ways to run a cluster, on emulated SSDs in virtual time",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(simGimbalCommand(), simClusterCommand(), simListCommand())
	return c
}

// simFlags are the flags of jbofbench sim gimbal.
type simFlags struct {
	policies             []string
	row                  string
	seed                 uint64
	out                  string
	short, json, tenants bool
	quiet                bool
}

func simGimbalCommand() *cobra.Command {
	f := &simFlags{}
	c := &cobra.Command{
		Use:   "gimbal",
		Short: "The evaluation of Gimbal (SIGCOMM 2021), for every policy",
		Long: `Run the workload matrix of Gimbal's evaluation in virtual time: clients, a network, one SSD's
pipeline under each policy, and an emulated SSD. The same seed gives the same figures, on any machine.

A tenant's f-Util is what it gets of the drive by its fair share of what a load of its sort gets alone;
1 is ideal. Utilisation is the sum of what all get by what they would get alone. Latencies are from
the host's sending to its having the answer; those of the application count the wait for credit too.

Exit status: 0 all well; 1 an invariant broke, or the folder cannot be written; 2 bad flags;
130 interrupted.`,
		Example: `  jbofbench sim gimbal --out sim-out
  jbofbench sim gimbal --policy jbof --policy fifo --row 'read-write/4K' --tenants`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c) },
	}
	fl := c.Flags()
	fl.StringSliceVar(&f.policies, "policy", sim.Policies(), "policies to compare")
	fl.StringVar(&f.row, "row", "", "only scenarios whose row/name matches this regular expression; jbofbench sim "+
		"list shows them")
	fl.Uint64Var(&f.seed, "seed", 1, "seed of clients and drive")
	fl.StringVar(&f.out, "out", "", "write results, tables and plots into this folder")
	fl.BoolVar(&f.short, "quick", false, "only the first scenario of each row")
	fl.BoolVar(&f.tenants, "tenants", false, "print a line for each tenant too")
	fl.BoolVar(&f.json, "json", false, "print the results as JSON")
	fl.BoolVarP(&f.quiet, "quiet", "q", false, "no progress")
	return c
}

func simListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the scenarios of the matrix, and the policies",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			t := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', 0)
			for _, s := range sim.Matrix() {
				fmt.Fprintf(t, "%v\t%d tenants\t%.1f s\n", &s, len(s.Tenants), float64(s.EndNS())/1e9)
			}
			fmt.Fprintln(t, "\nof sim cluster:")
			for _, s := range cluster.Matrix(1) {
				fmt.Fprintf(t, "%v\t%d boxes\t%.1f s\n", &s, s.Nodes, float64(s.WarmNS+s.MeasuredNS)/1e9)
			}
			fmt.Fprintf(t, "\npolicies: %s\n", strings.Join(sim.Policies(), ", "))
			return t.Flush()
		},
	}
}

func (f *simFlags) run(c *cobra.Command) error {
	match, err := regexp.Compile(f.row)
	if err != nil {
		return usagef("--row is %q: %v", f.row, err)
	}
	var scenarios []sim.Scenario
	rows := map[string]bool{}
	for _, s := range sim.Matrix() {
		if !match.MatchString(s.String()) || f.short && rows[s.Row] {
			continue
		}
		rows[s.Row] = true
		scenarios = append(scenarios, s)
	}
	if len(scenarios) == 0 {
		return usagef("--row is %q, must match something that jbofbench sim list shows", f.row)
	}
	stages, results, err := sim.NewLab(f.seed).Plan(scenarios, f.policies)
	if err != nil {
		return usagef("--policy: %v", err)
	}
	if !f.quiet {
		fmt.Fprintf(c.ErrOrStderr(), "simulations: %d, of %.0f s of virtual time in all; about %s on %d processors\n",
			len(scenarios)*len(f.policies),
			report.VirtualTime(scenarios, len(f.policies)).Seconds(),
			report.Estimate(scenarios, len(f.policies)).Round(time.Second), runtime.GOMAXPROCS(0))
	}
	began := time.Now()
	if err := report.Execute(c.Context(), stages, simProgress(c.ErrOrStderr(), began, f.quiet)); err != nil {
		return err
	}
	if f.out != "" {
		if err := report.WriteFolder(f.out, f.seed, results); err != nil {
			return err
		}
	}
	if err := f.write(c.OutOrStdout(), results); err != nil {
		return err
	}
	for _, r := range results {
		if r.ViolationCount > 0 {
			fmt.Fprintf(c.ErrOrStderr(), "jbofbench: %s/%s, %s: %d broken invariants, first: %s\n", r.Row, r.Scenario,
				r.Policy, r.ViolationCount, r.Violations[0])
			err = errFailed
		}
	}
	return err
}

// write prints the results.
func (f *simFlags) write(w io.Writer, results []*sim.Result) error {
	if f.json {
		return report.WriteJSON(w, f.seed, results)
	}
	if f.tenants {
		if err := report.WriteTenants(w, results); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	if err := report.WriteTable(w, results); err != nil {
		return err
	}
	return report.WriteVerdicts(w, report.Verdicts(results))
}

// simProgress shows how far simulations are: one line on a terminal, else one each few seconds.
func simProgress(w io.Writer, began time.Time, quiet bool) report.Progress {
	if quiet {
		return func(int, int, string) {}
	}
	s := newScreen(w)
	return func(done, total int, name string) {
		at, last := time.Since(began), done == total
		if !s.due("", at, last) {
			return
		}
		left := at / time.Duration(done) * time.Duration(total-done)
		s.show(fmt.Sprintf("%d/%d  %3.0f s, about %.0f s left  %s", done, total, at.Seconds(), left.Seconds(), name))
		if last {
			s.end()
		}
	}
}
