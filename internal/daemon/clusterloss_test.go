package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"jbofd/internal/admin"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

// TestALossIsAcceptedByACommand: some ranges have no copy but that of a node that does not return. When it does after
// all, it is filled with what the others have by then.
func TestALossIsAcceptedByACommand(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	hosts := clusterHosts(2)
	var worlds []*world
	for i := range hosts {
		worlds = append(worlds, newWorld(t))
		worlds[i].configureNode(hosts, i, "demo", etcd.URL, onePartition)
	}
	nodes := []*node{worlds[0].mustStart(), worlds[1].mustStart()}
	if _, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	even := func(a admin.Cluster) error {
		if a.Ranges.Full != 64 || a.Nodes[0].Replicas != 32 || a.Nodes[1].Replicas != 32 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	}
	agree(t, "both nodes have half of the ranges", nodes, even)
	for _, n := range nodes {
		eventually(t, "what an earlier process has lost was looked for", func() error {
			if l, err := n.admin.KVAudits(t.Context()); err != nil || l.Items[0].Segments == 0 {
				return fmt.Errorf("%+v, %v", l.Items, err)
			}
			return nil
		})
	}
	if err := nodes[1].stop(); err != nil {
		t.Fatal(err)
	}
	agree(t, "half of the ranges are halted", nodes[:1], func(a admin.Cluster) error {
		if a.Ranges.Full != 32 || a.Ranges.Halted != 32 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	chains, err := nodes[0].admin.Chains(t.Context(), -1)
	if err != nil {
		t.Fatal(err)
	}
	one := map[string]int{}
	for _, c := range chains.Items {
		one[c.State] = c.Range
	}
	accept := func(refusal string, ranges ...int) {
		t.Helper()
		_, err := nodes[0].admin.ChangeCluster(t.Context(), admin.ChangeCluster{AcceptLoss: ranges})
		if (err == nil) != (refusal == "") || err != nil && !strings.Contains(err.Error(), refusal) {
			t.Errorf("the loss of %v is accepted: %v, want %q", ranges, err, refusal)
		}
	}
	accept("is not halted", one["full"])
	accept("must be 0 to 63", 64)
	accept("", one["halted"])
	agree(t, "one range more is served", nodes[:1], func(a admin.Cluster) error {
		if a.Ranges.Full != 33 || a.Ranges.Halted != 31 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	if _, err := nodes[0].admin.ChangeCluster(t.Context(), admin.ChangeCluster{AllLosses: true}); err != nil {
		t.Fatal(err)
	}
	agree(t, "all ranges are served", nodes[:1], func(a admin.Cluster) error {
		if a.Ranges.Full != 64 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	ns := keysOf(nodes[:1])
	for i := range 20 {
		ns.stored(t, fmt.Sprint("key", i), fmt.Sprint("value", i))
	}
	nodes[1] = worlds[1].mustStart()
	agree(t, "both nodes have half of the ranges again", nodes, even)
	ns = keysOf(nodes)
	for i := range 20 {
		ns.read(t, fmt.Sprint("key", i), fmt.Sprint("value", i), 1)
	}
}

// TestAllNodesThatWereUpAreLost: the node that was away may make the map when an operator says so, and not before. What
// only the lost node had is halted then.
func TestAllNodesThatWereUpAreLost(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	hosts := clusterHosts(3)
	var worlds []*world
	var nodes []*node
	for i := range hosts {
		worlds = append(worlds, newWorld(t))
		worlds[i].configureNode(hosts, i, "demo", etcd.URL, onePartition)
		nodes = append(nodes, worlds[i].mustStart())
	}
	if _, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	ranges := func(full, halted int) func(a admin.Cluster) error {
		return func(a admin.Cluster) error {
			if a.Ranges.Full != full || a.Ranges.Halted != halted || a.Nodes[0].Replicas == 0 && full > 0 {
				return fmt.Errorf("%+v", a)
			}
			return nil
		}
	}
	total := 0
	agree(t, "all ranges are full", nodes, func(a admin.Cluster) error {
		total = a.Ranges.Total
		return ranges(a.Ranges.Total, 0)(a)
	})
	own := nodes[0].cluster().Nodes[0].Replicas
	if err := nodes[0].stop(); err != nil {
		t.Fatal(err)
	}
	agree(t, "n1 is away", nodes[1:], func(a admin.Cluster) error {
		if a.Nodes[0].State != "away" {
			return fmt.Errorf("%+v", a.Nodes[0])
		}
		return nil
	})
	for _, n := range nodes[1:] { // both at once would do, too; one after the other leaves the last one in the view
		if err := n.stop(); err != nil {
			t.Fatal(err)
		}
	}
	nodes[0] = worlds[0].mustStart()
	lose := func(names ...string) error {
		_, err := nodes[0].admin.ChangeCluster(t.Context(), admin.ChangeCluster{Lost: names})
		return err
	}
	var lost []string
	eventually(t, "n1 waits, and knows who was up", func() error {
		a := nodes[0].cluster()
		lost = nil
		for _, e := range a.Nodes {
			if e.State == "up" {
				lost = append(lost, e.Name)
			}
		}
		if len(lost) == 0 || slices.Contains(lost, "n1") || !strings.Contains(a.Problem, "a view that admits it") ||
			!strings.Contains(a.Problem, "jbofctl cluster lost n") {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	if err := lose("n1"); err == nil || !strings.Contains(err.Error(), "that the newest view counts as up") {
		t.Errorf("n1 itself is lost: %v", err)
	}
	eventually(t, "the lost nodes may be given up", func() error {
		_, err := nodes[0].admin.ChangeCluster(t.Context(), admin.ChangeCluster{DryRun: true, Lost: lost})
		return err
	})
	if a := nodes[0].cluster(); a.Manager == "n1" || !strings.Contains(a.Problem, "a view that admits it") {
		t.Errorf("a dry run has changed something: %+v", a)
	}
	if err := lose(lost...); err != nil {
		t.Error(err)
	}
	agree(t, "n1 serves what it has", nodes[:1], ranges(own, total-own))
	for _, dry := range []bool{true, false} {
		a, err := nodes[0].admin.ChangeCluster(t.Context(), admin.ChangeCluster{DryRun: dry, AllLosses: true})
		if err != nil || len(a.AcceptLoss) != total-own {
			t.Fatalf("dry run %v: %+v, %v", dry, a, err)
		}
	}
	agree(t, "n1 serves all ranges", nodes[:1], ranges(total, 0))
}
