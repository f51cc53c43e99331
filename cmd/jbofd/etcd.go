package main

import (
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"jbofd/internal/cluster/etcdserver"
)

// etcdCommand runs a server of etcd.
func etcdCommand() *cobra.Command {
	var cfg etcdserver.Config
	var members []string
	c := &cobra.Command{
		Use:   "etcd",
		Short: "Run a server of etcd for a cluster, until SIGTERM or SIGINT",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Members = map[string]string{}
			for _, m := range members {
				name, url, ok := strings.Cut(m, "=")
				if !ok || cfg.Members[name] != "" {
					return usagef("--member is %q, must be NAME=URL, once for each name", m)
				}
				cfg.Members[name] = url
			}
			if err := cfg.Check(); err != nil {
				return usageError{err}
			}
			// The daemon may have started it from /proc/self/exe, and "exe" is not what top should call it.
			_ = os.WriteFile("/proc/self/comm", []byte("jbofd"), 0)
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			return etcdserver.Run(ctx, cfg, func() { fmt.Fprintln(cmd.OutOrStdout(), "ready") })
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Cluster, "cluster", "", "`NAME` of the cluster")
	f.StringVar(&cfg.Name, "name", "", "`NAME` of this member")
	f.StringArrayVar(&members, "member", nil, "`NAME=URL` of each member, also this one, for the other members")
	f.StringVar(&cfg.Dir, "dir", "", "`DIRECTORY` of the data")
	f.StringVar(&cfg.ClientURL, "client-url", "http://127.0.0.1:2379", "`URL` for clients")
	f.StringVar(&cfg.CertFile, "cert", "", "certificate `FILE`, for https; without one, anybody may write")
	f.StringVar(&cfg.KeyFile, "key", "", "key `FILE`")
	f.StringVar(&cfg.CAFile, "ca", "", "`FILE` of the certificate authority of clients and members")
	return c
}
