package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
)

func (x *cli) kvRepairCommand() *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use:   "repair UUID",
		Short: "Give up the keys of a key-value namespace that are lost, so that all others work without errors",
		Long: `Give up what is lost in the key-value namespace of that UUID, while it is served. The keys of a segment
that was damaged are known only as far as they were stored or deleted since; of all other keys that belong to it a
Retrieve is answered Unrecovered Read Error. After a repair these keys do not exist, and they can be stored again.

Run jbofctl kv check first: it says what is lost. Store what you have from another copy before or after.`,
		Args: one("UUID"),
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if x.isReplicated(c, args[0]) {
			return fmt.Errorf("namespace %s is a partition of the cluster, which repairs it from other nodes "+
				"(docs/cluster.md, \"What cannot be read\")", args[0])
		}
		if _, err := admin.ParseUUID(args[0]); err == nil && !yes {
			if err := x.confirm(c, "Keys of namespace "+args[0]+" that are reported as damaged will not exist any "+
				"more.", args[0]); err != nil {
				return err
			}
		}
		return x.audit(c, args[0], true)
	}
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return c
}

func (x *cli) kvOpenCommand() *cobra.Command {
	var yes, accept bool
	c := &cobra.Command{
		Use:   "open UUID",
		Short: "Say what a key-value namespace has lost that is not served therefore, and open it without that",
		Long: `Say what the key-value namespace of that UUID has lost of what was written since its last checkpoint. It
is not served because of that. With --accept-loss it is opened, for writing, with everything that is there. Keys whose
newest change is lost then have an older value or do not exist, although hosts were told that the change is safe.

If the drive may do better, restart the daemon first, or put the drive where it worked: nothing was changed on it.`,
		Args: one("UUID"),
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if _, err := admin.ParseUUID(args[0]); err != nil {
			return usagef("%v; jbofctl namespace list shows the UUIDs", err)
		}
		loss, err := x.lossOf(c, args[0])
		if err != nil {
			return err
		}
		what := "Namespace " + args[0] + " has lost writes that were acknowledged: " + loss.Statement + "."
		switch {
		case !accept:
			return errors.New(what + "\nIt is opened without them with --accept-loss")
		case !yes:
			if err := x.confirm(c, what, args[0]); err != nil {
				return err
			}
		}
		if !c.Flags().Changed("timeout") {
			x.timeout = 0 // opening a namespace takes as long as it takes
		}
		a, err := askChange(x, c, func(cl *admin.Client, ctx context.Context) (admin.Answer, error) {
			return cl.OpenKV(ctx, args[0], loss.Token)
		})
		if err != nil {
			return err
		}
		return x.print(c, a, func(t *tabwriter.Writer) { row(t, "namespace "+args[0]+" opened") })
	}
	c.Flags().BoolVar(&accept, "accept-loss", false, "open it without what is lost")
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return c
}

// lossOf asks the daemon what a namespace has lost that is not served therefore.
func (x *cli) lossOf(c *cobra.Command, uuid string) (*admin.KVLoss, error) {
	l, err := ask(x, c, (*admin.Client).Subsystems)
	if err != nil {
		return nil, err
	}
	for _, s := range l.Items {
		for _, n := range s.Namespaces {
			switch {
			case n.UUID != uuid:
			case n.Loss != nil:
				return n.Loss, nil
			case n.Error != "":
				return nil, fmt.Errorf("namespace %s is not served for another reason than a loss: %s", uuid, n.Error)
			default:
				return nil, fmt.Errorf("namespace %s is served: nothing is to be accepted", uuid)
			}
		}
	}
	return nil, fmt.Errorf("no namespace of the configuration has UUID %s", uuid)
}

// audit runs an audit and prints what it has found.
func (x *cli) audit(c *cobra.Command, uuid string, repair bool) error {
	if _, err := admin.ParseUUID(uuid); err != nil {
		return usagef("%v; jbofctl namespace list -o json shows the UUIDs", err)
	}
	if !c.Flags().Changed("timeout") {
		x.timeout = 0 // it takes as long as it takes
	}
	done := make(chan struct{})
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		x.showAudit(c, uuid, done)
	}()
	a, err := ask(x, c, func(cl *admin.Client, ctx context.Context) (admin.KVAudit, error) {
		return cl.AuditKV(ctx, uuid, repair)
	})
	close(done)
	<-shown
	if errors.Is(err, context.Canceled) {
		return &interruptedError{"interrupted; the daemon goes on with what was begun"}
	}
	if err != nil {
		return err
	}
	if err := x.print(c, a, func(t *tabwriter.Writer) {
		row(t, "segments", a.Segments)
		row(t, "segments with lost keys", a.LossySegments)
		row(t, "segments not readable", a.UnreadableSegments)
		row(t, "segments repaired", a.RepairedSegments)
		row(t, "keys known in these", a.KnownKeys)
		row(t, "keys given up", a.LostKeys)
		row(t, "chunks freed", a.FreedChunks)
		row(t, "chunks with lost values", a.DamagedChunks)
	}); err != nil {
		return err
	}
	switch {
	case a.LossySegments+a.UnreadableSegments == 0 && a.DamagedChunks == 0:
		return nil
	case x.isReplicated(c, uuid):
		return errReplicaLoss
	}
	return errLoss
}

// isReplicated reports whether the daemon says that a namespace is a partition of its cluster.
func (x *cli) isReplicated(c *cobra.Command, uuid string) bool {
	l, _ := ask(x, c, (*admin.Client).Subsystems) // what is asked for next says what is wrong
	for _, s := range l.Items {
		for _, n := range s.Namespaces {
			if n.UUID == uuid {
				return n.Replicated
			}
		}
	}
	return false
}

// showAudit shows on a terminal how far the audit is, until done.
func (x *cli) showAudit(c *cobra.Command, uuid string, done <-chan struct{}) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for shown := false; ; {
		select {
		case <-done:
			if shown {
				fmt.Fprintln(c.ErrOrStderr())
			}
			return
		case <-tick.C:
		}
		l, err := x.client().KVAudits(c.Context())
		if err != nil {
			continue // the audit itself says what is wrong
		}
		for _, a := range l.Items {
			if a.UUID == uuid && a.Running && a.Segments > 0 && isTerminal(c.ErrOrStderr()) {
				shown = true
				fmt.Fprintf(c.ErrOrStderr(), "\r%d of %d segments (%d %%)", a.LookedAt, a.Segments,
					uint64(a.LookedAt)*100/uint64(a.Segments))
			}
		}
	}
}
