package main

import (
	"encoding/json"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"jbofd/client"
)

func discoverCommand() *cobra.Command {
	f := &connectFlags{}
	asJSON := false
	c := &cobra.Command{
		Use:   "discover --target tcp|rdma://HOST:PORT",
		Short: "List the subsystems that a discovery service shows to this host",
		Args:  cobra.NoArgs,
		Example: `  jbofbench discover --target tcp://192.0.2.1:8009
  jbofbench discover --target rdma://192.0.2.1:4420`,
		RunE: func(c *cobra.Command, _ []string) error {
			o, err := f.options(c.ErrOrStderr())
			if err != nil {
				return err
			}
			log, err := client.Discover(c.Context(), o)
			if err != nil {
				return err
			}
			if asJSON {
				e := json.NewEncoder(c.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(struct {
					APIVersion string `json:"apiVersion"`
					Kind       string `json:"kind"`
					client.DiscoveryLog
				}{"jbofd.bench/v1", "DiscoveryLog", log})
			}
			t := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintf(t, "TYPE\tTRANSPORT\tADDRESS\tSUBNQN\n")
			for _, e := range log.Entries {
				fmt.Fprintf(t, "%s\t%s/%s\t%s\t%s\n", e.Type, e.Transport, e.Family, e.Address(), e.SubNQN)
			}
			return t.Flush()
		},
	}
	f.add(c)
	c.Flags().BoolVar(&asJSON, "json", false, "print the log as JSON")
	return c
}
