package daemon

import (
	"fmt"
	"strings"
	"testing"

	"jbofd/internal/admin"
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

	configure(3)
	if got := reload(); !strings.Contains(got, "node of the cluster added") || !strings.Contains(got, "n3") {
		t.Errorf("the changes are %s", got)
	}
	worlds[2].configureNode(hosts, 2, "demo", etcd.URL, onePartition)
	nodes = append(nodes, worlds[2].mustStart())
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
		if e := a.Nodes[2]; e.Replicas+e.Filling > 0 || a.Ranges.Full != a.Ranges.Total {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	// A manager that removes the others hears them no more.
	if err := nodes[2].stop(); err != nil {
		t.Fatal(err)
	}
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
