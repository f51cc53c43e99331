package main

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"jbofd/internal/admin"
)

// clusterCommands are those after "cluster".
func (x *cli) clusterCommands() []*cobra.Command {
	return []*cobra.Command{x.clusterInitCommand(), x.clusterStatusCommand(), x.clusterRingCommand(),
		x.clusterChainsCommand(), x.clusterReplicasCommand(),
		x.clusterNodeCommand("drain", "Move all ranges of a node to the others, as far as they have room; it stays a "+
			"member", func(node string) admin.ChangeCluster { return admin.ChangeCluster{Drain: node} }),
		x.clusterNodeCommand("join", "Give a node its share of the ranges again, after drain or leave",
			func(node string) admin.ChangeCluster { return admin.ChangeCluster{Join: node} }),
		x.clusterLeaveCommand(), x.clusterForgetCommand(), x.clusterAcceptCommand(), x.clusterLostCommand()}
}

func (x *cli) clusterInitCommand() *cobra.Command {
	var what admin.InitCluster
	c := &cobra.Command{
		Use:   "init",
		Short: "Make the cluster for which the daemon is configured, once for all nodes",
		Long: `Make the cluster that the section "cluster" of the daemon's configuration names, in its etcd. Run it
once, on any of the nodes; all of them join then. It says how many ranges and replicas it has. It is refused if etcd
has a cluster of that name already.`,
		Args: none,
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		switch {
		case what.Replicas < 0 || what.Replicas > 5:
			return usagef("--replicas is %d, must be 1 to 5, or 0 for the default", what.Replicas)
		case what.Ranges != 0 && (what.Ranges < 16 || what.Ranges > 65536 || bits.OnesCount(uint(what.Ranges)) != 1):
			return usagef("--ranges is %d, must be a power of two from 16 to 65536, or 0 for the default", what.Ranges)
		}
		a, err := ask(x, c, func(cl *admin.Client, ctx context.Context) (admin.ClusterMade, error) {
			return cl.InitCluster(ctx, what)
		})
		if err != nil {
			return err
		}
		return x.print(c, a, func(t *tabwriter.Writer) {
			row(t, fmt.Sprintf("the cluster is made: %d ranges, for good, of which there are to be %s; see jbofctl "+
				"cluster status", a.Ranges, copies(a.Replicas)))
		})
	}
	c.Flags().IntVar(&what.Replicas, "replicas", 0, "how many copies of each key, 1 to 5; 0: three, or as many as "+
		"there are nodes")
	c.Flags().IntVar(&what.Ranges, "ranges", 0, "into how many ranges keys are divided for good, a power of two; 0: "+
		"32 or more for each partition that is configured, which suits four times as many, too")
	return c
}

func (x *cli) clusterStatusCommand() *cobra.Command {
	var wait bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the nodes of the cluster, who makes its map, and how many ranges have all their copies",
		Args:  none,
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		if wait {
			if err := x.settle(c, admin.ChangeCluster{}); err != nil {
				return err
			}
		}
		a, err := ask(x, c, (*admin.Client).Cluster)
		if err != nil {
			return err
		}
		return x.print(c, a, func(t *tabwriter.Writer) { clusterRows(t, &a) })
	}
	waitFlag(c, &wait)
	return c
}

func clusterRows(t *tabwriter.Writer, a *admin.Cluster) {
	row(t, "cluster", a.Name)
	row(t, "uuid", a.UUID)
	row(t, "subsystem", a.SubNQN)
	row(t, "node", a.Node)
	if a.Problem != "" {
		row(t, "problem", a.Problem)
	}
	epoch := fmt.Sprintf("%d, for %s", a.Epoch, millis(a.ViewMS).Round(time.Second))
	if a.ActiveEpoch != a.Epoch {
		epoch += fmt.Sprintf("; this node acts on %d", a.ActiveEpoch)
	}
	row(t, "epoch", epoch)
	row(t, "manager", a.Manager)
	row(t, "authority", millis(a.AuthorityMS))
	row(t, "replicas", a.Replicas)
	r := a.Ranges
	ranges := fmt.Sprintf("%d: %d full, %d filling, %d under-replicated, %d halted, %d unassigned", r.Total, r.Full,
		r.Filling, r.UnderReplicated, r.Halted, r.Unassigned)
	if a.StaleMS > 0 {
		ranges += fmt.Sprintf("; as of %s ago: this node serves none of them, and does not know who does",
			millis(a.StaleMS).Round(time.Second))
	}
	row(t, "ranges", ranges)
	if r.HaltedUp > 0 {
		row(t, "halted", stuck(r.HaltedUp))
	}
	fmt.Fprintln(t)
	row(t, "NODE", "STATE", "PARTITIONS", "REPLICAS", "LED", "FILLING", "WAITING", "DOMAIN", "ADDRESS", "TARGET")
	for _, n := range a.Nodes {
		state := n.State
		if a.StaleMS > 0 && state == "up" {
			state = "was up"
		}
		if n.Out {
			state += ", out"
		}
		row(t, n.Name, state, n.Partitions, n.Replicas, n.Led, n.Filling, n.Waiting, n.Domain, n.Address, n.Target)
	}
}

// stuck says what is known of halted ranges whose last copies are not away.
func stuck(n int) string {
	return fmt.Sprintf("%d with a last copy on a node that is up: it was started a moment ago, or its drive does not "+
		"work or has lost something, which its log says; jbofctl cluster chains shows which ones", n)
}

func millis(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }

func (x *cli) clusterRingCommand() *cobra.Command {
	var svg string
	c := &cobra.Command{
		Use:   "ring",
		Short: "Show the share of each partition, or draw the ring of ranges",
		Args:  none,
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		a, err := ask(x, c, (*admin.Client).Cluster)
		if err != nil {
			return err
		}
		if svg != "" {
			chains, err := ask(x, c, allChains)
			if err != nil {
				return err
			}
			if err := os.WriteFile(svg, drawRing(&a, chains.Items), 0o644); err != nil {
				return err
			}
		}
		return x.print(c, a, func(t *tabwriter.Writer) {
			row(t, "PARTITION", "NODE", "SSD", "NSID", "WEIGHT", "REPLICAS", "LED", "FILLING", "WAITING", "SHARE")
			for _, p := range a.Partitions {
				ssd, nsid := "-", "-"
				if p.SSD != "" {
					ssd, nsid = p.SSD, fmt.Sprint(p.NSID)
				}
				row(t, p.UUID, p.Node, ssd, nsid, p.Weight, p.Replicas, p.Led, p.Filling, p.Waiting,
					fmt.Sprintf("%.1f%%", 100*p.Share))
			}
		})
	}
	c.Flags().StringVar(&svg, "svg", "", "also draw the ring, as SVG, into this `FILE`")
	return c
}

func allChains(cl *admin.Client, ctx context.Context) (admin.List[admin.Chain], error) {
	return cl.Chains(ctx, -1)
}

func (x *cli) clusterChainsCommand() *cobra.Command {
	var only int
	c := &cobra.Command{
		Use:   "chains",
		Short: "Show the chain of each range: who has it, from the ChainHead to the ChainTail, and who is being filled",
		Long: `Show the chain of each range: who has it, from the ChainHead to the ChainTail, and who is being filled.
Each member is NODE/PARTITION, the latter by the beginning of its UUID, as in jbofctl cluster ring and namespace list.`,
		Args: none,
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		if c.Flags().Changed("range") && only < 0 {
			return usagef("--range is %d, must be 0 or more", only)
		}
		l, err := ask(x, c, func(cl *admin.Client, ctx context.Context) (admin.List[admin.Chain], error) {
			return cl.Chains(ctx, only)
		})
		if err != nil {
			return err
		}
		return x.print(c, l, func(t *tabwriter.Writer) {
			row(t, "RANGE", "STATE", "VERSION", "MEMBERS")
			for _, r := range l.Items {
				var members []string
				for _, m := range r.Members {
					if m.State == "last copy" && m.Up {
						m.State += " (up)"
					}
					members = append(members, m.Node+"/"+m.UUID[:min(len(m.UUID), 8)]+" "+m.State)
				}
				row(t, r.Range, strings.ReplaceAll(r.State, "_", "-"), r.Version, strings.Join(members, " > "))
			}
		})
	}
	c.Flags().IntVar(&only, "range", -1, "show only the range with this `NUMBER`; without it, all")
	c.Flag("range").DefValue = "" // -1 may not be given
	return c
}

func (x *cli) clusterReplicasCommand() *cobra.Command {
	var wait bool
	c := &cobra.Command{
		Use:   "replicas N",
		Short: "Change how many copies of each key there are, 1 to 5, while the cluster serves",
		Args:  one("N"),
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		n, err := strconv.Atoi(args[0])
		if err != nil || n < 1 || n > 5 {
			return usagef("N is %q, must be 1 to 5", args[0])
		}
		return x.changeCluster(c, admin.ChangeCluster{Replicas: n}, wait,
			"the cluster is to have "+copies(n)+" of each key")
	}
	waitFlag(c, &wait)
	return c
}

// copies is a number of copies, in words.
func copies(n int) string {
	if n == 1 {
		return "1 copy"
	}
	return fmt.Sprintf("%d copies", n)
}

// clusterNodeCommand builds a command about one node.
func (x *cli) clusterNodeCommand(verb, short string, what func(node string) admin.ChangeCluster) *cobra.Command {
	var wait bool
	c := &cobra.Command{Use: verb + " NODE", Short: short, Args: one("NODE")}
	c.RunE = func(c *cobra.Command, args []string) error {
		change := what(args[0])
		text := "node " + args[0] + " is to have its share of the ranges"
		if change.Drain != "" {
			text = "node " + args[0] + " is to have no ranges"
		}
		return x.changeCluster(c, change, wait, text)
	}
	waitFlag(c, &wait)
	return c
}

func (x *cli) clusterLeaveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "leave",
		Short: "Drain the node of this machine and wait until it has no ranges, so that it can be taken away",
		Args:  none,
		RunE: func(c *cobra.Command, _ []string) error {
			a, err := ask(x, c, (*admin.Client).Cluster)
			if err != nil {
				return err
			}
			done := "node " + a.Node + " has no ranges: stop it, and take it out of the configuration of the others"
			if a.RunsEtcd {
				done += "\nit runs a server of etcd: replace that before you stop it for good, or the cluster stands " +
					"the loss of one server less (docs/cluster.md)"
			}
			return x.changeCluster(c, admin.ChangeCluster{Drain: a.Node}, true, done)
		},
	}
}

func (x *cli) clusterForgetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "forget NODE...",
		Short: "Remove nodes that have left for good from the map, with their partitions",
		Long: `Remove nodes from the map of the cluster that were drained and stopped and do not come back, with their
partitions. It is refused for a node that is up, or has ended a few seconds ago, and for one that is a member of a
range, which may have the only copy of something.

If such a node does come back, it is refused, and says so, until jbofctl cluster join NODE lets it in again. Then, like
a new box of the same name, it is filled before it serves anything.`,
		RunE: func(c *cobra.Command, names []string) error {
			if len(names) == 0 {
				return usagef("%s needs the names of nodes", nameOf(c))
			}
			return x.changeCluster(c, admin.ChangeCluster{Forget: names}, false, "the cluster has forgotten "+
				strings.Join(names, ", "))
		},
	}
}

func (x *cli) clusterAcceptCommand() *cobra.Command {
	var what admin.ChangeCluster
	var yes, wait bool
	c := &cobra.Command{
		Use:   "accept-loss {RANGE... | --all}",
		Short: "Give up the data of halted ranges whose last copies will not return, so that others serve them",
		Long: `Give up the data of halted ranges, of which jbofctl cluster chains says who had the last copies. Another
partition serves each of them then, with what it happens to have: keys may be missing, or have older values, although
clients were told that they are safe. If a node with a last copy comes back later, what it has is not used, and gives
way to what the others have by then.

If any of these nodes can come back with its drives, bring it back: nothing is lost then.

The command counts for five minutes, or until the nodes are started again. If no other node is up so long that could
serve a range, repeat the command when one is.`,
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if what.AllLosses != (len(args) == 0) {
			return usagef("%s needs the numbers of ranges, or --all", nameOf(c))
		}
		for _, a := range args {
			r, err := strconv.Atoi(a)
			if err != nil || r < 0 {
				return usagef("RANGE is %q, must be a number; jbofctl cluster chains shows them", a)
			}
			what.AcceptLoss = append(what.AcceptLoss, r)
		}
		if !yes {
			a, err := ask(x, c, (*admin.Client).Cluster)
			if err != nil {
				return err
			}
			if a.Ranges.Halted == 0 {
				return fmt.Errorf("no range of cluster %s is halted: nothing is to be given up", a.Name)
			}
			text := fmt.Sprintf("%d of %d ranges of cluster %s are halted. What is given up of them will be lost for "+
				"good.", a.Ranges.Halted, a.Ranges.Total, a.Name)
			if err := x.wouldBeRefused(c, what); err != nil {
				return err
			}
			if a.Ranges.HaltedUp > 0 {
				text += " There are " + stuck(a.Ranges.HaltedUp) + ". They are served again when that works."
			}
			if err := x.confirm(c, text, a.Name); err != nil {
				return err
			}
		}
		return x.changeCluster(c, what, wait, "the data of these ranges are given up")
	}
	c.Flags().BoolVar(&what.AllLosses, "all", false, "all halted ranges")
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	waitFlag(c, &wait)
	return c
}

func (x *cli) clusterLostCommand() *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use:   "lost NODE...",
		Short: "Say that all nodes that were up at last are lost for good, so that others may go on without them",
		Long: `Say that nodes are lost for good. It is needed only if all nodes that were up at last are lost, while
others were away: none of these may make the map, because they cannot know whether the lost ones still serve, and each
waits for a view that admits it. The ranges of the lost ones are halted after it, and jbofctl cluster accept-loss has
them served with what there is.

The nodes must be off for sure. If one of them runs, and only its connection to etcd is broken, both it and the others
serve from then on, and what is written on one side is lost.`,
	}
	c.RunE = func(c *cobra.Command, names []string) error {
		if len(names) == 0 {
			return usagef("%s needs the names of the lost nodes", nameOf(c))
		}
		if !yes {
			a, err := ask(x, c, (*admin.Client).Cluster)
			if err != nil {
				return err
			}
			if err := x.wouldBeRefused(c, admin.ChangeCluster{Lost: names}); err != nil {
				return err
			}
			text := fmt.Sprintf("Nodes %s of cluster %s are off for sure, and do not come back.",
				strings.Join(names, ", "), a.Name)
			if len(names) == 1 {
				text = fmt.Sprintf("Node %s of cluster %s is off for sure, and does not come back.", names[0], a.Name)
			}
			if err := x.confirm(c, text, a.Name); err != nil {
				return err
			}
		}
		return x.changeCluster(c, admin.ChangeCluster{Lost: names}, false, "these nodes are not waited for any more")
	}
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return c
}

func waitFlag(c *cobra.Command, wait *bool) {
	c.Flags().BoolVar(wait, "wait", false, "wait until all ranges have all their copies, this node takes part "+
		"and the nodes are connected to each other, without a time limit unless --timeout is given; on a terminal, "+
		"show how many have")
}

// wouldBeRefused returns why the daemon would refuse a change, so that nobody is asked to confirm it in vain.
func (x *cli) wouldBeRefused(c *cobra.Command, what admin.ChangeCluster) error {
	what.DryRun = true
	_, err := ask(x, c, func(cl *admin.Client, ctx context.Context) (admin.ClusterChanged, error) {
		return cl.ChangeCluster(ctx, what)
	})
	return err
}

// firstOf lists numbers, of many the first ones.
func firstOf(all []int) string {
	const most = 32
	text := strings.Trim(fmt.Sprint(all[:min(len(all), most)]), "[]")
	if len(all) > most {
		text += " …"
	}
	return text
}

// changeCluster makes a change and, if wanted, waits until it has taken effect.
func (x *cli) changeCluster(c *cobra.Command, what admin.ChangeCluster, wait bool, done string) error {
	a, err := ask(x, c, func(cl *admin.Client, ctx context.Context) (admin.ClusterChanged, error) {
		return cl.ChangeCluster(ctx, what)
	})
	if err != nil {
		return err
	}
	if n := len(a.AcceptLoss); n > 0 {
		done = fmt.Sprintf("the data of %d ranges are given up: %s", n, firstOf(a.AcceptLoss))
	}
	if wait {
		if err := x.settle(c, what); err != nil {
			return err
		}
	}
	// The command is recorded in etcd, and the manager carries it out. Show the status, because this node may know that
	// there is no manager.
	now, err := ask(x, c, (*admin.Client).Cluster)
	return x.print(c, a, func(t *tabwriter.Writer) {
		row(t, done)
		if err == nil && now.Problem != "" {
			row(t, "this may take effect later: "+now.Problem)
		}
	})
}

// lookEvery is how often a command looks whether the ranges of the cluster have all their copies. sayEvery is how often
// it says what is missing, if that has changed, where it cannot show it on a terminal.
var lookEvery, sayEvery = 200 * time.Millisecond, 10 * time.Second

// noClusterPatience is for how long it is waited for a cluster of which etcd has no record. A node looks for it once in
// half a second.
var noClusterPatience = 2 * time.Second

// settle waits until a change has taken effect, and all ranges have all their copies.
func (x *cli) settle(c *cobra.Command, what admin.ChangeCluster) error {
	bounded := c.Flags().Changed("timeout")
	if !bounded {
		x.timeout = 0 // it takes as long as it takes
	}
	ctx, cancel := x.bounded(c)
	defer cancel()
	show := filling(c)
	defer show(nil, 0, 0, false)
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	left, said, saidAt := "the daemon has not answered", "", time.Now()
	var noCluster time.Time // since when there is none
	for {
		a, err := x.client().Cluster(ctx)
		switch {
		case err == nil:
			done, of, missing := settled(&a, what)
			show(&a, done, of, missing == "")
			if missing == "" {
				return nil
			}
			left = missing
			switch {
			case !a.NoCluster:
				noCluster = time.Time{}
			case noCluster.IsZero():
				noCluster = time.Now()
			case !bounded && time.Since(noCluster) >= noClusterPatience:
				return fmt.Errorf("there is nothing to wait for: %s", a.Problem)
			}
		case ctx.Err() != nil: // what was missing at the last look says more
		case errors.Is(err, admin.ErrRefused) && !errors.Is(err, admin.ErrNotNow), errors.Is(err, os.ErrPermission):
			return err
		default: // the daemon may be restarting
			left = err.Error()
		}
		if left != said && time.Since(saidAt) >= sayEvery && !isTerminal(c.ErrOrStderr()) {
			said, saidAt = left, time.Now()
			fmt.Fprintln(c.ErrOrStderr(), "not yet:", left)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("the time is over, and it is not done yet: %s", left)
			}
			return &interruptedError{"interrupted, and it is not done yet: " + left}
		}
	}
}

// settled returns how far a change is, done of so many, and what is missing; empty: nothing.
func settled(a *admin.Cluster, what admin.ChangeCluster) (done, of int, missing string) {
	done, of = a.Ranges.Full, a.Ranges.Total
	for _, n := range a.Nodes {
		switch {
		case n.Name == what.Drain && (!n.Out || n.Replicas+n.Filling+n.Waiting > 0):
			left := n.Replicas + n.Filling + n.Waiting
			return of - min(left, of), of, fmt.Sprintf("node %s has %d replicas", n.Name, left)
		case n.Name == what.Join && n.Out:
			return 0, of, fmt.Sprintf("node %s is to have no ranges", n.Name)
		}
	}
	switch {
	case a.Problem != "": // what the node knows of the cluster may be from before it was restarted
		return min(done, max(of, 1)-1), max(of, 1), "this node does not take part: " + a.Problem
	case of == 0 || what.Replicas != 0 && a.Replicas != what.Replicas:
		return 0, max(of, 1), "the view does not say so yet"
	case done < of:
		return done, of, fmt.Sprintf("%d of %d ranges have all their copies", done, of)
	case !a.Ready:
		return done - 1, of, "the nodes are not connected to each other yet"
	}
	return done, of, ""
}

// filling returns what shows on a terminal how many ranges have all their copies, until all have; nil ends it early.
func filling(c *cobra.Command) func(a *admin.Cluster, done, of int, all bool) {
	if !isTerminal(c.ErrOrStderr()) {
		return func(*admin.Cluster, int, int, bool) {}
	}
	bars := mpb.New(mpb.WithOutput(c.ErrOrStderr()), mpb.WithWidth(40))
	var bar *mpb.Bar
	return func(a *admin.Cluster, done, of int, all bool) {
		switch {
		case a == nil && bar != nil:
			bar.Abort(false) // nothing, if it is complete
			bars.Wait()
			bar = nil
		case a == nil:
		case bar == nil:
			bar = bars.AddBar(int64(of), mpb.AppendDecorators(decor.CountersNoUnit("%d of %d ranges")))
			fallthrough
		default:
			if !all {
				done = min(done, of-1) // at its end the bar is complete, and stays so
			}
			bar.SetCurrent(int64(done))
		}
	}
}
