package main

import (
	"context"
	"fmt"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
	"jbofd/internal/config"
)

func (x *cli) statusCommand() *cobra.Command {
	var check bool
	var wait time.Duration
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what the daemon is, where it listens and whether it is ready",
		Args:  none,
		RunE: func(c *cobra.Command, _ []string) error {
			if wait < 0 {
				return usagef("--wait is %v, must be 0 or more", wait)
			}
			return x.status(c, check || wait > 0, wait)
		},
	}
	c.Flags().BoolVar(&check, "check", false, "exit with status 3 if the node is not ready")
	c.Flags().DurationVar(&wait, "wait", 0, "wait so long for the node to be ready, then do as with --check")
	return c
}

// statusEvery is how often status --wait asks.
const statusEvery = 50 * time.Millisecond

// readyStatus returns the status once the node is ready, or the last one when wait is over.
func (x *cli) readyStatus(c *cobra.Command, wait time.Duration) (admin.Status, error) {
	ctx, cancel := context.WithTimeout(c.Context(), wait)
	defer cancel()
	tick := time.NewTicker(statusEvery)
	defer tick.Stop()
	for {
		s, err := ask(x, c, (*admin.Client).Status)
		if err == nil && s.Ready {
			return s, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return s, err
		}
	}
}

func (x *cli) status(c *cobra.Command, check bool, wait time.Duration) error {
	s, err := x.readyStatus(c, wait)
	if err != nil {
		return err
	}
	if err := x.print(c, s, func(t *tabwriter.Writer) {
		row(t, "node", s.Node)
		row(t, "version", s.Version)
		row(t, "ready", yesNo(s.Ready))
		for _, r := range s.Reasons {
			row(t, "reason", r.Component+": "+r.Reason)
		}
		for _, r := range s.Degraded {
			row(t, "degraded", r.Component+": "+r.Reason)
		}
		if s.Change != nil {
			row(t, "change", s.Change)
		}
		row(t, "listeners", join(s.Addresses.Listeners))
		row(t, "discovery", s.Addresses.Discovery)
		row(t, "metrics", s.Addresses.Metrics)
		row(t, "hosts", s.Hosts)
		row(t, "controllers", s.Controllers)
		row(t, "connections", s.Connections)
		row(t, "buffers in use", about(s.BufferBytesInUse))
	}); err != nil {
		return err
	}
	if check && !s.Ready {
		return errNotReady
	}
	return nil
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
			row(t, s.SubNQN, len(s.Namespaces), hosts)
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
			out.Items = append(out.Items, namespaceRow{s.SubNQN, n, true})
		}
	}
	for _, d := range ssds.Items {
		for _, e := range d.Extents {
			if !e.Configured && e.Use != "swap" {
				out.Items = append(out.Items,
					namespaceRow{e.SubNQN, admin.Namespace{NSID: e.NSID, SSD: d.Name, SizeBytes: e.LengthBytes,
						Type: e.Use, UUID: e.UUID, Hosts: []string{}}, false})
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
		row(t, "SUBSYSTEM", "NSID", "SSD", "SIZE", "TYPE", "BLOCK", "KEYS", "USED", "SWAPPED", "CONFIGURED", "STATE",
			"UUID")
		for _, n := range l.Items {
			block, keys, used, swapped, served := any(""), any(""), any(""), any(""), ""
			if n.BlockSizeBytes > 0 {
				block = n.BlockSizeBytes
			}
			if n.Type == "kv" && n.Configured {
				keys, used, swapped = n.Objects, about(n.UsedBytes), n.SwappedKeys
			}
			switch {
			case n.Error != "":
				served = "failed"
			case n.Configured:
				served = "ok"
			}
			row(t, n.SubNQN, n.NSID, n.SSD, size(n.SizeBytes), n.Type, block, keys, used, swapped, yesNo(n.Configured),
				served, n.UUID)
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
			return usagef("%v; jbofctl namespace list shows the UUIDs", err)
		}
		if !yes {
			if err := x.confirm(c, "The data of namespace "+args[0]+" will be lost for good.", args[0]); err != nil {
				return err
			}
		}
		if !c.Flags().Changed("timeout") {
			x.timeout = 0 // erasing takes as long as the drive needs
		}
		a, err := askChange(x, c, func(cl *admin.Client, ctx context.Context) (admin.Answer, error) {
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

func (x *cli) swapList(c *cobra.Command, _ []string) error {
	l, err := ask(x, c, (*admin.Client).Swap)
	if err != nil {
		return err
	}
	return x.print(c, l, func(t *tabwriter.Writer) {
		row(t, "UUID", "SSD", "STATE", "SIZE", "USED", "SUBSYSTEM", "NSID", "KEYS", "OPEN")
		for _, a := range l.Items {
			area := []any{a.UUID, a.SSD, a.State, "", ""}
			if a.SSD != "" {
				area[3], area[4] = size(a.SizeBytes), about(a.UsedBytes)
			}
			if len(a.Sources) == 0 {
				row(t, append(area, "", "", "", "")...)
			}
			for _, h := range a.Sources {
				name, nsid := h.SubNQN, any(h.NSID)
				if name == "" {
					name, nsid = "unknown "+h.UUID, ""
				}
				row(t, append(slices.Clone(area), name, nsid, h.Keys, yesNo(h.Open))...)
			}
		}
	})
}

func (x *cli) swapDiscardCommand() *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use: "discard UUID",
		Short: "Give up a swap area that is damaged, missing or no longer configured, with the newest values of " +
			"its keys",
		Long: `Give up the swap area of that UUID. The namespaces that could not be opened without it are opened; the
keys that they had there are lost, or have the values they had before. If a drive has the area, its space is freed.

An area that is in use, or whose keys can still be returned to their own drive, is not given up.`,
		Args: one("UUID"),
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if _, err := admin.ParseUUID(args[0]); err != nil {
			return usagef("%v; jbofctl swap list shows the UUIDs", err)
		}
		if !yes {
			if err := x.confirm(c, "What hosts have written to swap area "+args[0]+", and was acknowledged, will be "+
				"lost for good.", args[0]); err != nil {
				return err
			}
		}
		if !c.Flags().Changed("timeout") {
			x.timeout = 0 // opening namespaces takes as long as it takes
		}
		a, err := askChange(x, c, func(cl *admin.Client, ctx context.Context) (admin.Answer, error) {
			return cl.DiscardSwap(ctx, args[0])
		})
		if err != nil {
			return err
		}
		return x.print(c, a, func(t *tabwriter.Writer) { row(t, "swap area "+args[0]+" given up") })
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
			row(t, n.ID, n.Transport, n.Remote, n.HostNQN, n.SubNQN, n.CNTLID, n.QID, n.Entries, n.Outstanding,
				n.Since.UTC().Format(time.RFC3339))
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
			row(t, n.Name, n.SSD, n.Connections, n.Weight, fmt.Sprintf("%.0f%%", 100*n.Share), caps(n), credit,
				n.Queued, n.Inflight, n.LimitedBy)
		}
	})
}

// caps writes a tenant's caps as the configuration names them.
func caps(n admin.Tenant) string {
	var s []string
	for _, c := range []struct {
		name string
		cap  int64
	}{{"rw_ios", n.RWIOsPerSec}, {"rw_mbytes", n.RWMBytesPerSec}, {"r_mbytes", n.RMBytesPerSec},
		{"w_mbytes", n.WMBytesPerSec}} {
		if c.cap > 0 {
			s = append(s, fmt.Sprintf("%s:%d", c.name, c.cap))
		}
	}
	return join(s)
}

func (x *cli) reloadCommand() *cobra.Command {
	var dryRun bool
	c := &cobra.Command{
		Use:   "reload",
		Short: "Make the daemon read its configuration again, and say what has changed",
		Long: `Make the daemon read its configuration again, as SIGHUP does, and say what has changed. If anything
is wrong with the configuration, needs a restart, or does not fit the drives, nothing changes and the exit status is 1.

With --dry-run nothing changes in any case: the answer is what a reload would change, or why it would be refused.`,
		Args: none,
		RunE: func(c *cobra.Command, _ []string) error { return x.reload(c, dryRun) },
	}
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would change, or why it would be refused")
	return c
}

func (x *cli) reload(c *cobra.Command, dryRun bool) error {
	what := (*admin.Client).Reload
	if dryRun {
		what = (*admin.Client).DryReload
	}
	if !c.Flags().Changed("timeout") {
		x.timeout = 0 // a namespace that shrinks takes as long as it takes
	}
	r, err := askChange(x, c, what)
	if err != nil {
		return err
	}
	return x.print(c, r, func(t *tabwriter.Writer) {
		switch {
		case dryRun && len(r.Changes) == 0:
			row(t, "a reload would change nothing")
		case dryRun:
			row(t, "a reload would change:")
		case len(r.Changes) == 0:
			row(t, "configuration reloaded, nothing changed")
		default:
			row(t, "configuration reloaded:")
		}
		for _, ch := range r.Changes {
			row(t, "  "+config.Change{What: ch.What, Name: ch.Name, NSID: ch.NSID,
				Size: config.Bytes(ch.SizeBytes)}.String())
		}
	})
}
