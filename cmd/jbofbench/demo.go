package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/demo"
)

func demoCommand() *cobra.Command {
	cfg := demo.Config{}
	size := sizeFlag(64 << 20)
	runtime := secondsFlag(4 * time.Second)
	c := &cobra.Command{
		Use:   "demo --jbofd PATH",
		Short: "Start a jbofd, use it as two hosts, show figures, stop it",
		Long: `Start the given jbofd with its embedded default (three file-backed drives in ./data, loopback only),
connect over NVMe/TCP as two different hosts with a namespace each, write with verification, read back,
run a short mixed load, print a table and a few of the metrics, and stop jbofd.

Exit status: 0 all well; 1 anything failed; 2 bad flags; 130 interrupted.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg.SizeBytes, cfg.Runtime, cfg.Out, cfg.Environ = int64(size), time.Duration(runtime), c.OutOrStdout(),
				os.Environ()
			if cfg.SizeBytes < 1<<20 || cfg.SizeBytes%(1<<20) != 0 {
				return usagef("--size is %s, must be a multiple of 1MiB", &size)
			}
			if cfg.Runtime <= 0 {
				return usagef("--runtime is %v, must be more than 0", cfg.Runtime)
			}
			return demo.Run(c.Context(), cfg)
		},
	}
	fl := c.Flags()
	fl.StringVar(&cfg.Daemon, "jbofd", "bin/jbofd", "the daemon to start")
	fl.StringVar(&cfg.Dir, "dir", ".", "where to run it: the drives are made in DIR/data")
	fl.BoolVar(&cfg.FreePorts, "free_ports", false, "listen on any free ports instead of 4420, 8009 and 9420")
	fl.Var(&size, "size", "how much each host writes and checks")
	fl.Var(&runtime, "runtime", "how long the mixed load runs")
	return c
}
