package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/demo"
)

func demoClusterCommand() *cobra.Command {
	cfg := demo.ClusterConfig{Hosts: [3]string{"127.0.77.1", "127.0.77.2", "127.0.77.3"}}
	runtime := secondsFlag(6 * time.Second)
	c := &cobra.Command{
		Use:   "demo-cluster --jbofd PATH",
		Short: "Start three jbofd that are a cluster, kill one under load, bring it back",
		Long: `Start three of the given jbofd on loopback, each with a server of etcd, make a cluster of them in which
each key is on all three, store keys and run YCSB-B's mix of reads and writes. Kill one node with SIGKILL, go on without
it, start it again, and wait until it has all copies. Each second a line says how the load does. In the end all keys are
read, and every read has been compared with what was acknowledged before it began.

Exit status: 0 nothing acknowledged was lost and no read was stale; 1 anything failed; 2 bad flags; 130 interrupted.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg.Runtime, cfg.Out, cfg.Environ = time.Duration(runtime), c.OutOrStdout(), os.Environ()
			if cfg.Runtime <= 0 {
				return usagef("--runtime is %v, must be more than 0", cfg.Runtime)
			}
			return demo.RunCluster(c.Context(), cfg)
		},
	}
	fl := c.Flags()
	fl.StringVar(&cfg.Daemon, "jbofd", "bin/jbofd", "the daemon to start")
	fl.StringVar(&cfg.Dir, "dir", ".", "where to run it: what it needs is made in DIR/data/cluster")
	fl.Var(&runtime, "runtime", "how long the load runs with all nodes, and without one")
	return c
}
