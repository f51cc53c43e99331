package main

import (
	"fmt"
	"regexp"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/sim/cluster"
	"jbofd/internal/sim/report"
)

func simClusterCommand() *cobra.Command {
	var row string
	var seed uint64
	var json, quiet bool
	c := &cobra.Command{
		Use:   "cluster",
		Short: "The experiments of LEED (SIGCOMM 2023) in which several boxes take part",
		Long: `Run clusters of three and four boxes in virtual time: hosts that schedule by tokens, a network of
10 µs, and for each box the store, the replicas and the pipeline that the daemon has, on an emulated
SSD that is ten times slower than a dct983. Processors and the bandwidth of the network are not
simulated. The same seed gives the same figures, on any machine.

load     latency and throughput by the number of operations under way (figure 6)
crrs     reads at all replicas, and at the ChainTail only (-tail; figure 7)
tokens   reads where most of the credit is left, and at all replicas in turn (-in-turn; figure 8)
overload four times as many drives and eight times the operations: this scheduling, and none at all: reads at
         all replicas in turn, without credits, drives that take whatever comes (-off; figure 8)
change   a box joins, leaves or dies (figure 9)
hot-key  writes of one key, and with its chain locked for each (-locked)

Latencies count an operation's wait for credit. Figure 5, the energy, cannot be simulated.

Exit status: 0 done, whatever the verdicts; 1 something did not end; 2 bad flags; 130 interrupted.`,
		Example: `  jbofbench sim cluster
  jbofbench sim cluster --row 'crrs/.*0.99'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			match, err := regexp.Compile(row)
			if err != nil {
				return usagef("--row is %q: %v", row, err)
			}
			var scenarios []cluster.Scenario
			virtual := time.Duration(0)
			for _, s := range cluster.Matrix(seed) {
				if match.MatchString(s.String()) {
					scenarios = append(scenarios, s)
					virtual += time.Duration(s.AgeNS + s.WarmNS + s.MeasuredNS)
				}
			}
			if len(scenarios) == 0 {
				return usagef("--row is %q, must match something that jbofbench sim list shows", row)
			}
			if !quiet {
				fmt.Fprintf(c.ErrOrStderr(), "simulations: %d, of %.0f s of virtual time in all; about %s on %d "+
					"processors\n", len(scenarios), virtual.Seconds(),
					cluster.Estimate(scenarios, runtime.GOMAXPROCS(0)).Round(time.Second), runtime.GOMAXPROCS(0))
			}
			stages, results := cluster.Plan(scenarios, seed)
			if err := report.Execute(c.Context(), stages, simProgress(c.ErrOrStderr(), time.Now(), quiet)); err != nil {
				return err
			}
			if json {
				return cluster.WriteJSON(c.OutOrStdout(), seed, results)
			}
			return cluster.WriteTable(c.OutOrStdout(), results)
		},
	}
	fl := c.Flags()
	fl.StringVar(&row, "row", "", "only scenarios whose row/name matches this regular expression; jbofbench sim list "+
		"shows them")
	fl.Uint64Var(&seed, "seed", 1, "seed of hosts and drives")
	fl.BoolVar(&json, "json", false, "print the results as JSON")
	fl.BoolVarP(&quiet, "quiet", "q", false, "no progress")
	return c
}
