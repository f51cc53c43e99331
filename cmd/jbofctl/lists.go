package main

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
)

func (x *cli) status(c *cobra.Command, _ []string) error {
	s, err := ask(x, c, (*admin.Client).Status)
	if err != nil {
		return err
	}
	return x.print(c, s, func(t *tabwriter.Writer) {
		row(t, "node", s.Node)
		row(t, "version", s.Version)
		row(t, "ready", yesNo(s.Ready))
		for _, r := range s.Reasons {
			row(t, "", r.Component+": "+r.Reason)
		}
		row(t, "listeners", join(s.Addresses.Listeners))
		row(t, "discovery", s.Addresses.Discovery)
		row(t, "metrics", s.Addresses.Metrics)
		row(t, "hosts", s.Hosts)
		row(t, "controllers", s.Controllers)
		row(t, "connections", s.Connections)
		row(t, "buffers in use", size(s.BufferBytesInUse))
	})
}

func (x *cli) subsystemList(c *cobra.Command, _ []string) error {
	l, err := ask(x, c, (*admin.Client).Subsystems)
	if err != nil {
		return err
	}
	return x.print(c, l, func(t *tabwriter.Writer) {
		row(t, "NQN", "NAMESPACES", "HOSTS")
		for _, s := range l.Items {
			hosts := join(s.Hosts)
			if s.AllowAnyHost {
				hosts = "any"
			}
			row(t, s.NQN, len(s.Namespaces), hosts)
		}
	})
}

// namespaceRow is a namespace in the list: of the configuration, or left on a drive.
type namespaceRow struct {
	SubNQN string `json:"subNQN"`
	admin.Namespace
	// Configured: hosts can see it. Otherwise only its data are still there.
	Configured bool `json:"configured"`
}

// namespaces lists what is configured and what is left over.
func (x *cli) namespaces(c *cobra.Command) (out admin.List[namespaceRow], err error) {
	subs, err := ask(x, c, (*admin.Client).Subsystems)
	if err != nil {
		return out, err
	}
	ssds, err := ask(x, c, (*admin.Client).SSDs)
	if err != nil {
		return out, err
	}
	out = admin.List[namespaceRow]{APIVersion: subs.APIVersion, Items: []namespaceRow{}}
	for _, s := range subs.Items {
		for _, n := range s.Namespaces {
			out.Items = append(out.Items, namespaceRow{s.NQN, n, true})
		}
	}
	for _, d := range ssds.Items {
		for _, e := range d.Extents {
			if !e.Configured {
				out.Items = append(out.Items, namespaceRow{e.NQN, admin.Namespace{NSID: e.NSID, SSD: d.Name, SizeBytes: e.LengthBytes, Type: e.Use, UUID: e.UUID, Hosts: []string{}}, false})
			}
		}
	}
	return out, nil
}

func (x *cli) namespaceList(c *cobra.Command, _ []string) error {
	l, err := x.namespaces(c)
	if err != nil {
		return err
	}
	return x.print(c, l, func(t *tabwriter.Writer) {
		row(t, "SUBSYSTEM", "NSID", "SSD", "SIZE", "TYPE", "BLOCK", "KEYS", "USED", "CONFIGURED", "UUID")
		for _, n := range l.Items {
			block, keys, used := any(""), any(""), any("")
			if n.BlockSize > 0 {
				block = n.BlockSize
			}
			if n.Type == "kv" && n.Configured {
				keys, used = n.Objects, size(n.UsedBytes)
			}
			row(t, n.SubNQN, n.NSID, n.SSD, size(n.SizeBytes), n.Type, block, keys, used, yesNo(n.Configured), n.UUID)
		}
	})
}

func (x *cli) namespaceDeleteCommand() *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use:   "delete UUID",
		Short: "Erase a namespace that is no longer configured and free its space",
		Args:  one("UUID"),
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if _, err := admin.ParseUUID(args[0]); err != nil {
			return usagef("%q: %v; jbofctl namespace list shows the UUIDs", args[0], err)
		}
		if !yes {
			if err := x.confirm(c, "The data of namespace "+args[0]+" will be lost for good.", args[0]); err != nil {
				return err
			}
		}
		if !c.Flags().Changed("timeout") {
			x.timeout = 0 // erasing takes as long as the drive needs
		}
		a, err := ask(x, c, func(cl *admin.Client, ctx context.Context) (admin.Answer, error) {
			return cl.DeleteNamespace(ctx, args[0])
		})
		if err != nil {
			return err
		}
		return x.print(c, a, func(t *tabwriter.Writer) { row(t, "namespace "+args[0]+" deleted") })
	}
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return c
}

func (x *cli) connectionList(c *cobra.Command, _ []string) error {
	l, err := ask(x, c, (*admin.Client).Connections)
	if err != nil {
		return err
	}
	return x.print(c, l, func(t *tabwriter.Writer) {
		row(t, "ID", "TRANSPORT", "REMOTE", "HOST", "SUBSYSTEM", "CNTLID", "QID", "SIZE", "OUTSTANDING", "SINCE")
		for _, n := range l.Items {
			row(t, n.ID, n.Transport, n.Remote, n.HostNQN, n.SubNQN, n.CNTLID, n.QID, n.Entries, n.Outstanding, n.Since.UTC().Format(time.RFC3339))
		}
	})
}

func (x *cli) tenantList(c *cobra.Command, _ []string) error {
	l, err := ask(x, c, (*admin.Client).Tenants)
	if err != nil {
		return err
	}
	return x.print(c, l, func(t *tabwriter.Writer) {
		row(t, "TENANT", "SSD", "CONNECTIONS", "WEIGHT", "SHARE", "CAPS", "CREDIT", "QUEUED", "INFLIGHT", "LIMITED BY")
		for _, n := range l.Items {
			credit := ""
			if n.Credit > 0 {
				credit = size(int64(n.Credit) * 4096)
			}
			row(t, n.Name, n.SSD, n.Connections, n.Weight, fmt.Sprintf("%.0f%%", 100*n.Share), caps(n), credit, n.Queued, n.Inflight, n.LimitedBy)
		}
	})
}

// caps writes a tenant's caps as the configuration names them.
func caps(n admin.Tenant) string {
	var s []string
	for _, c := range []struct {
		name string
		cap  int64
	}{{"rw_ios", n.RWIOsPerSec}, {"rw_mbytes", n.RWMBytesPerSec}, {"r_mbytes", n.RMBytesPerSec}, {"w_mbytes", n.WMBytesPerSec}} {
		if c.cap > 0 {
			s = append(s, fmt.Sprintf("%s:%d", c.name, c.cap))
		}
	}
	return join(s)
}

func (x *cli) configReload(c *cobra.Command, _ []string) error {
	a, err := ask(x, c, (*admin.Client).Reload)
	if err != nil {
		return err
	}
	return x.print(c, a, func(t *tabwriter.Writer) { row(t, "configuration reloaded") })
}
