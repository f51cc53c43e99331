package main

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
	"jbofd/internal/config"
)

func (x *cli) kvScrubCommand() *cobra.Command {
	var rate string
	c := &cobra.Command{
		Use:   "scrub [UUID]",
		Short: "Say how far the scrub of key-value namespaces is and what it has found, or change its rate",
		Long: `Say how far the scrub is, which reads key-value namespaces in the background to find what drives have
damaged, and what it has found: of all namespaces, or of the one of that UUID. With --rate, change how much it reads a
second, until the namespace is opened again: 0 pauses it, and a greater rate ends the pass sooner. kv.scrub_rate of the
configuration is the rate otherwise.`,
		Args: cobra.MaximumNArgs(1),
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 1 {
			if _, err := admin.ParseUUID(args[0]); err != nil {
				return usagef("%v; jbofctl namespace list -o json shows the UUIDs", err)
			}
		}
		if c.Flags().Changed("rate") {
			n, err := config.ParseBytes(rate)
			if err != nil || n < 0 {
				return usagef("--rate is %q, must be bytes a second, such as 0, 1MiB or 200MiB", rate)
			}
			if len(args) == 0 {
				return usagef("--rate needs the UUID of a namespace")
			}
			if _, err := ask(x, c, func(cl *admin.Client, ctx context.Context) (admin.KVScrub, error) {
				return cl.ScrubKV(ctx, args[0], int64(n))
			}); err != nil {
				return err
			}
		}
		return x.showScrubs(c, args)
	}
	c.Flags().StringVar(&rate, "rate", "", "bytes a second, such as 100MiB; 0: a pause")
	return c
}

// showScrubs prints how far scrubs are: of all namespaces, or of the one that args has.
func (x *cli) showScrubs(c *cobra.Command, args []string) error {
	l, err := ask(x, c, (*admin.Client).KVScrubs)
	if err != nil {
		return err
	}
	if len(args) == 1 {
		all := l.Items
		l.Items = l.Items[:0:0]
		for _, s := range all {
			if s.UUID == args[0] {
				l.Items = append(l.Items, s)
			}
		}
		if len(l.Items) == 0 {
			return fmt.Errorf("no key-value namespace of UUID %s is served", args[0])
		}
	}
	return x.print(c, l, func(t *tabwriter.Writer) {
		row(t, "SUBSYSTEM", "NSID", "RATE", "READ", "PASSES", "FOR", "DAMAGED", "LAST TOOK", "LAST DAMAGED",
			"NOT REPAIRED")
		for _, s := range l.Items {
			rate, last, found := "paused", "-", "-"
			if s.BytesPerSec > 0 {
				rate = size(s.BytesPerSec) + "/s"
			}
			if s.Passes > 0 {
				last = (time.Duration(s.Last.Seconds) * time.Second).String()
				found = fmt.Sprint(s.Last.Damaged)
			}
			since := (time.Duration(s.Present.Seconds) * time.Second).String()
			row(t, s.SubNQN, s.NSID, rate, fmt.Sprintf("%d%%", s.Chunk*100/max(s.Chunks, 1)), s.Passes, since,
				s.Present.Damaged, last, found, s.KnownLosses)
		}
	})
}
