package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/config"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

// TestANodeIsAddedAndRemovedByReloads of the others, while they serve. One that has ranges cannot be removed.
func TestANodeIsAddedAndRemovedByReloads(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	hosts := clusterHosts(3)
	worlds := make([]*world, 3)
	for i := range hosts {
		worlds[i] = newWorld(t)
	}
	// configure gives the first two nodes a configuration with so many nodes.
	configure := func(of int) {
		for i := range 2 {
			worlds[i].configureNode(hosts[:of], i, "demo", etcd.URL, onePartition)
		}
	}
	configure(2)
	nodes := []*node{worlds[0].mustStart(), worlds[1].mustStart()}
	reload := func() string {
		t.Helper()
		for i, n := range nodes[:2] {
			r, err := n.admin.Reload(t.Context())
			if err != nil {
				t.Fatalf("n%d: %v", i+1, err)
			}
			if i == 1 {
				return fmt.Sprint(r.Changes)
			}
		}
		return ""
	}
	eventually(t, "the cluster is made", func() error {
		_, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: 2, Ranges: 64})
		return err
	})
	complete := func(of int) func(a admin.Cluster) error {
		return func(a admin.Cluster) error {
			if up(a) != of || a.Ranges.Full != a.Ranges.Total || len(a.Nodes) < of || a.Nodes[of-1].Replicas == 0 {
				return fmt.Errorf("%+v", a)
			}
			return nil
		}
	}
	agree(t, "two nodes have all", nodes, complete(2))
	ns := keysOf(nodes)
	for i := range 20 {
		ns.stored(t, fmt.Sprint("key", i), fmt.Sprint("value", i))
	}

	// Started too early, the third one says who does not know it.
	worlds[2].configureNode(hosts, 2, "demo", etcd.URL, onePartition)
	nodes = append(nodes, worlds[2].mustStart())
	eventually(t, "the third node is refused, and knows why", func() error {
		a := nodes[2].cluster()
		if want := fmt.Sprintf(`; the manager is %q; %[1]s refuses it: node "n3" is not one of the others in the `+
			"configuration of %[1]s", a.Manager); !strings.Contains(a.Problem, want) {
			return fmt.Errorf("want %s, have %s", want, a.Problem)
		}
		return nil
	})
	configure(3)
	if got := reload(); !strings.Contains(got, "node of the cluster added") || !strings.Contains(got, "n3") {
		t.Errorf("the changes are %s", got)
	}
	agree(t, "the third node has its share", nodes, complete(3))
	keysOf(nodes).read(t, "key7", "value7", 2)

	configure(2)
	if _, err := nodes[0].admin.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "cluster.nodes") ||
		!strings.Contains(err.Error(), "node n3 is removed, and has replicas of ") ||
		!strings.Contains(err.Error(), "jbofctl cluster drain n3") {
		t.Errorf("a node with ranges is removed: %v", err)
	}
	if up(nodes[0].cluster()) != 3 {
		t.Error("a refused reload has changed something")
	}
	if _, err := nodes[0].admin.ChangeCluster(t.Context(), admin.ChangeCluster{Drain: "n3"}); err != nil {
		t.Fatal(err)
	}
	agree(t, "the third node has nothing", nodes, func(a admin.Cluster) error {
		if e := a.Nodes[2]; e.Replicas+e.Filling+e.Waiting > 0 || a.Ranges.Full != a.Ranges.Total {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	// One that is up may be the manager, which gives up who does not hear it.
	for _, ask := range []func(context.Context) (admin.Reload, error){nodes[0].admin.Reload,
		nodes[0].admin.DryReload} {
		if _, err := ask(t.Context()); err == nil || !strings.Contains(err.Error(), "node n3 is removed, and is up") {
			t.Errorf("a node that is up is removed: %v", err)
		}
	}
	if err := nodes[2].stop(); err != nil {
		t.Fatal(err)
	}
	agree(t, "the third node is away", nodes[:2], func(a admin.Cluster) error {
		if up(a) != 2 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	forgotten(t, nodes[:2], worlds[2])
	if got := reload(); !strings.Contains(got, "node of the cluster removed") {
		t.Errorf("the changes are %s", got)
	}
	agree(t, "two nodes go on", nodes[:2], func(a admin.Cluster) error {
		if up(a) != 2 || a.Ranges.Full != a.Ranges.Total {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	ns = keysOf(nodes[:2])
	for i := range 20 {
		ns.read(t, fmt.Sprint("key", i), fmt.Sprint("value", i), 2)
		ns.stored(t, fmt.Sprint("key", i), "later")
	}
}

// forgotten has the third node forgotten, which was drained and stopped. It is refused when it starts again, until it
// may join; then it is drained, stopped and forgotten once more.
func forgotten(t *testing.T, nodes []*node, third *world) {
	t.Helper()
	change := func(what admin.ChangeCluster) error {
		_, err := nodes[0].admin.ChangeCluster(t.Context(), what)
		return err
	}
	state := func(a admin.Cluster) string {
		i := slices.IndexFunc(a.Nodes, func(e admin.ClusterNode) bool { return e.Name == "n3" })
		return a.Nodes[i].State
	}
	forget := func() {
		t.Helper()
		for name, want := range map[string]string{"n1": "node n1 is up", "n9": "must be one of the view: n1, n2, n3"} {
			if err := change(admin.ChangeCluster{Forget: []string{name}}); err == nil ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("%s is forgotten: %v", name, err)
			}
		}
		eventually(t, "the third node is forgotten", func() error { // it is registered for some seconds
			return change(admin.ChangeCluster{Forget: []string{"n3"}})
		})
		agree(t, "it is not in the map", nodes, func(a admin.Cluster) error {
			if got := state(a); got != "forgotten" || len(a.Partitions) != 2 {
				return fmt.Errorf("%s, %+v", got, a.Partitions)
			}
			return nil
		})
		if err := change(admin.ChangeCluster{Forget: []string{"n3"}}); err != nil {
			t.Errorf("it is forgotten again: %v", err)
		}
	}
	forget()
	n := third.mustStart()
	eventually(t, "it is refused", func() error {
		if a := n.cluster(); !strings.Contains(a.Problem, "the cluster has forgotten this node") ||
			!strings.Contains(a.Problem, "jbofctl cluster join n3") {
			return fmt.Errorf("its problem is %q", a.Problem)
		}
		return nil
	})
	if err := change(admin.ChangeCluster{Join: "n3"}); err != nil {
		t.Fatal(err)
	}
	agree(t, "it has its share again", append(nodes[:2:2], n), func(a admin.Cluster) error {
		if state(a) != "up" || a.Ranges.Full != a.Ranges.Total || len(a.Partitions) != 3 ||
			slices.ContainsFunc(a.Partitions, func(p admin.ClusterPartition) bool { return p.Replicas == 0 }) {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	keysOf(append(nodes[:2:2], n)).read(t, "key7", "value7", 2)
	if err := change(admin.ChangeCluster{Drain: "n3"}); err != nil {
		t.Fatal(err)
	}
	agree(t, "it has nothing", nodes, func(a admin.Cluster) error {
		if a.Ranges.Full != a.Ranges.Total || a.Nodes[2].Replicas+a.Nodes[2].Filling+a.Nodes[2].Waiting > 0 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	forget()
}

// TestNodesAreCheckedAgainBeforeTheyChange: what a reload has checked may be otherwise after a resize. What is refused
// then changes nothing.
func TestNodesAreCheckedAgainBeforeTheyChange(t *testing.T) {
	w := newWorld(t)
	w.configureNode(clusterHosts(2), 0, "demo", "http://"+loopback.Address(), onePartition) // nobody is there
	load, err := w.load()
	if err != nil {
		t.Fatal(err)
	}
	n, err := start(Options{Config: load, Load: w.load, Stderr: &lines{}, Version: "test", CloseTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer n.close()
	v := &view.View{Nodes: []view.Node{{Name: "n1"}, {Name: "n2"}}}
	seen := func(admitted ...cluster.Incarnation) {
		n.cluster.mu.Lock()
		defer n.cluster.mu.Unlock()
		n.cluster.newest = &cluster.Map{View: v, Admitted: admitted}
	}
	seen(1, 2)
	for name, c := range map[string]struct {
		change func(nodes []config.ClusterNode) []config.ClusterNode
		want   string
	}{
		"a node that is up": {func(all []config.ClusterNode) []config.ClusterNode { return all[:1] },
			"node n2 is removed, and is up"},
		"what a connection cannot use": {func(all []config.ClusterNode) []config.ClusterNode {
			return append(all[:2:2], config.ClusterNode{Name: "n2", Address: "192.0.2.1:1",
				Target: "tcp://192.0.2.1:2"})
		}, `name of a node is "n2"`},
	} {
		cfg := *n.cfg
		section := *cfg.Cluster
		section.Nodes = c.change(section.Nodes)
		cfg.Cluster = &section
		cfg.Subsystems = slices.Clone(cfg.Subsystems)
		cfg.Subsystems[0].Namespaces = append(slices.Clone(cfg.Subsystems[0].Namespaces), config.Namespace{NSID: 9,
			SSD: "ssd0", Size: 1 << 20, BlockSize: 4096, Type: "block"})
		if err := n.apply(&cfg, strict); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := len(n.drives()[0].label.Label().Extents); got != 1 {
		t.Errorf("the drive has %d extents", got)
	}
	seen(1, 0)
	cfg := *n.cfg
	section := *cfg.Cluster
	section.Nodes = section.Nodes[:1]
	cfg.Cluster = &section
	if err := n.apply(&cfg, strict); err != nil {
		t.Errorf("a node that is away: %v", err)
	}
}

// TestAJoinGoesOnWhenThereIsRoomForItsPartition: the place is taken by a namespace that was removed from the
// configuration, until an operator frees it. Meanwhile the node says so once, however often it tries and reloads.
func TestAJoinGoesOnWhenThereIsRoomForItsPartition(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	w, hosts, log := newWorld(t), clusterHosts(1), &lines{}
	w.log = log
	w.configureNode(hosts, 0, "demo", etcd.URL, "{nsid: 3, ssd: ssd0, size: 200MiB}")
	n := w.mustStart()
	subs, err := n.admin.Subsystems(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	id := subs.Items[0].Namespaces[1].UUID
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	w.configureNode(hosts, 0, "demo", etcd.URL, onePartition)
	n = w.mustStart()
	eventually(t, "the node finds no cluster", func() error {
		if r := n.reason("cluster"); !strings.Contains(r, "no cluster") {
			return errors.New(r)
		}
		return nil
	})
	for range 20 { // while join looks for its cluster
		if _, err := n.admin.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := n.admin.InitCluster(t.Context(), admin.InitCluster{Ranges: 16}); err != nil {
		t.Fatal(err)
	}
	const reason = "the new partitions of the cluster cannot be made"
	eventually(t, "the node says that there is no room", func() error {
		if r := n.reason("cluster"); !strings.Contains(r, reason) || !strings.Contains(r, "no room") {
			return errors.New(r)
		}
		return nil
	})
	if _, err := n.admin.DeleteNamespace(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	agree(t, "the node has joined", []*node{n}, func(a admin.Cluster) error {
		if up(a) != 1 || a.Ranges.Full != a.Ranges.Total {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	if said := log.with(reason); len(said) != 1 {
		t.Errorf("the log says it %d times: %q", len(said), said)
	}
}
