package daemon

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/client/kv"
	"jbofd/internal/admin"
	"jbofd/internal/cluster/etcdserver"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

func TestMain(m *testing.M) { etcdproc.Main(m) }

// clusterWait is the time limit for what is expected of a cluster on a busy machine.
const clusterWait = 2 * time.Minute

// clusterDrive has room for a namespace of blocks, one of keys and a partition.
const clusterDrive = "{name: ssd0, path: DIR/ssd0.img, size: 256MiB, create: true}"

// clusterHosts returns loopback addresses without ports.
func clusterHosts(n int) (hosts []string) {
	for range n {
		h, _, _ := net.SplitHostPort(loopback.Address())
		hosts = append(hosts, h)
	}
	return hosts
}

// configureNode makes a world the i-th of the nodes of a cluster. More are sections that replace others.
func (w *world) configureNode(hosts []string, i int, name, etcd, partitions string, more ...string) {
	w.address = hosts[i] + ":0"
	text := fmt.Sprintf("cluster:\n  name: %s\n  subsystem: %s\n  etcd: {endpoints: [%q]}\n  nodes:\n", name, nqn, etcd)
	for j, h := range hosts {
		text += fmt.Sprintf("    - {name: n%d, address: \"%s:4430\", target: \"tcp://%s:4420\"}\n", j+1, h, h)
	}
	w.configure([]string{clusterDrive}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}", partitions},
		append([]string{fmt.Sprintf("node: {name: n%d, data_dir: DIR}", i+1),
			fmt.Sprintf("listeners: [{address: \"%s:4420\"}]", hosts[i]), text}, more...)...)
}

const onePartition = "{nsid: 2, ssd: ssd0, size: 64MiB, type: kv, replicated: true}"

// eventually waits until f returns nil.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(clusterWait); ; <-tick.C {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not yet: %v", what, err)
		}
	}
}

// cluster returns what a node says of its cluster.
func (n *node) cluster() admin.Cluster {
	n.w.t.Helper()
	a, err := n.admin.Cluster(n.w.t.Context())
	if err != nil {
		n.w.t.Fatal(err)
	}
	return a
}

// agree waits until each of these nodes says the same of the cluster, and that is what is wanted.
func agree(t *testing.T, what string, nodes []*node, ok func(a admin.Cluster) error) {
	t.Helper()
	eventually(t, what, func() error {
		for _, n := range nodes {
			a := n.cluster()
			if a.Problem != "" || a.ActiveEpoch != a.Epoch || a.Epoch != nodes[0].cluster().Epoch {
				return fmt.Errorf("%s: problem %q, epochs %d and %d", a.Node, a.Problem, a.Epoch, a.ActiveEpoch)
			}
			if err := ok(a); err != nil {
				return fmt.Errorf("%s: %w", a.Node, err)
			}
		}
		return nil
	})
}

// up counts the nodes that the view admits.
func up(a admin.Cluster) (n int) {
	for _, e := range a.Nodes {
		if e.State == "up" {
			n++
		}
	}
	return n
}

// reason returns why the node is not ready on behalf of a component.
func (n *node) reason(component string) string {
	n.w.t.Helper()
	s, err := n.admin.Status(n.w.t.Context())
	if err != nil {
		n.w.t.Fatal(err)
	}
	for _, r := range s.Reasons {
		if r.Component == component {
			return r.Reason
		}
	}
	return ""
}

func TestThreeNodesAreACluster(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	hosts := clusterHosts(3)
	var worlds []*world
	for i := range hosts {
		worlds = append(worlds, newWorld(t))
		worlds[i].configureNode(hosts, i, "demo", etcd.URL, onePartition)
	}
	var nodes []*node
	for _, w := range worlds {
		nodes = append(nodes, w.mustStart())
	}
	// Without a cluster the nodes serve everything else, and say what to do.
	eventually(t, "the nodes say that there is no cluster", func() error {
		for _, n := range nodes {
			r := n.reason("cluster")
			if !strings.Contains(r, "jbofctl cluster init") || !strings.Contains(r, etcd.URL) ||
				!strings.Contains(r, `cluster.name is "demo"`) {
				return fmt.Errorf("the reason is %q", r)
			}
		}
		return nil
	})
	if got := nodes[0].namespaces(nodes[0].connect()); len(got) != 1 || got[1] != 16<<20 {
		t.Errorf("a host sees %v, want namespace 1 only", got)
	}
	if _, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: 4}); err == nil ||
		!strings.Contains(err.Error(), "must be at most 3") {
		t.Errorf("four replicas of three nodes: %v", err)
	}
	for _, ranges := range []int{-4, 8, 100, 1 << 40} { // the last would be more than there is memory
		if _, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{Ranges: ranges}); err == nil ||
			!strings.Contains(err.Error(), "power of two from 16 to 65536") {
			t.Errorf("%d ranges: %v", ranges, err)
		}
	}
	if !nodes[0].cluster().NoCluster {
		t.Error("a program is not told that there is no cluster")
	}
	made, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: 2})
	if err != nil || made.Replicas != 2 || made.Ranges != 128 || made.APIVersion != admin.Version {
		t.Fatalf("%+v, %v", made, err)
	}
	if _, err := nodes[1].admin.InitCluster(t.Context(), admin.InitCluster{}); err == nil ||
		!strings.Contains(err.Error(), "there is a cluster") {
		t.Errorf("a second cluster: %v", err)
	}
	// What is ready takes writes of all keys, at the first attempt.
	eventually(t, "the cluster is ready", func() error {
		if a := nodes[2].cluster(); up(a) != 3 || a.Ranges.Full != 128 || !a.Ready {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	keysOf(nodes).storedAtOnce(t, 200)
	agree(t, "a cluster of three", nodes, func(a admin.Cluster) error {
		if up(a) != 3 || len(a.Partitions) != 3 || a.Ranges.Total != 128 || a.Replicas != 2 || a.Ranges.Full != 128 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	for i, n := range nodes {
		if r := n.reason("cluster"); r != "" || n.cluster().NoCluster {
			t.Errorf("not ready: %s", r)
		}
		for _, p := range n.cluster().Partitions { // a node knows the drives of its own ones
			if own := p.Node == fmt.Sprint("n", i+1); own != (p.SSD != "") || own != (p.NSID != 0) {
				t.Errorf("partition as n%d knows it: %+v", i+1, p)
			}
		}
	}
	chains, err := nodes[1].admin.Chains(t.Context(), 5)
	if err != nil || len(chains.Items) != 1 || chains.Items[0].Range != 5 ||
		len(chains.Items[0].Members) != 2 || chains.Items[0].Members[0].State != "serving" {
		t.Errorf("range 5: %+v, %v", chains, err)
	}
	if _, err := nodes[1].admin.Chains(t.Context(), 128); err == nil {
		t.Error("there is a range 128 of 128")
	}
	ns := keysOf(nodes)
	for i := range 20 {
		ns.stored(t, fmt.Sprint("key", i), fmt.Sprint("value", i))
		ns.read(t, fmt.Sprint("key", i), fmt.Sprint("value", i), 2)
	}
	changing(t, nodes)
	for i := range 20 {
		ns.read(t, fmt.Sprint("key", i), fmt.Sprint("value", i), 2)
	}

	// One is lost that others have the ranges of, and comes back.
	lost := 0
	for i, e := range nodes[0].cluster().Nodes {
		if e.Replicas < nodes[0].cluster().Nodes[lost].Replicas {
			lost = i
		}
	}
	if err := nodes[lost].stop(); err != nil {
		t.Fatal(err)
	}
	others := slices.Delete(slices.Clone(nodes), lost, lost+1)
	agree(t, "the others go on", others, func(a admin.Cluster) error {
		if up(a) != 2 || a.Nodes[lost].State != "away" || a.Ranges.Full == a.Ranges.Total || a.Ranges.Halted > 0 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	left := keysOf(others)
	for i := range 20 {
		left.read(t, fmt.Sprint("key", i), fmt.Sprint("value", i), 1)
		left.stored(t, fmt.Sprint("key", i), fmt.Sprint("later", i))
	}
	nodes[lost] = worlds[lost].mustStart()
	agree(t, "it is back", nodes, func(a admin.Cluster) error {
		if up(a) != 3 || len(a.Partitions) != 3 || a.Ranges.Full != a.Ranges.Total {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	ns = keysOf(nodes)
	for i := range 20 {
		ns.read(t, fmt.Sprint("key", i), fmt.Sprint("later", i), 2)
	}
}

// TestAConnectionThatOneNodeLacks: the configuration of a node has a wrong address of the other one, by which it is
// reached. The other one sees that, too, and is not filled: writes would wait for it.
func TestAConnectionThatOneNodeLacks(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	hosts := clusterHosts(2)
	worlds := []*world{newWorld(t), newWorld(t)}
	for i, w := range worlds {
		w.configureNode(hosts, i, "demo", etcd.URL, onePartition)
		if i == 0 {
			right := fmt.Sprintf("target: \"tcp://%s:4420\"", hosts[1])
			if !strings.Contains(w.text, right) {
				t.Fatalf("no %s in %s", right, w.text)
			}
			w.text = strings.Replace(w.text, right, fmt.Sprintf("target: \"tcp://%s:4\"", hosts[1]), 1)
		}
	}
	nodes := []*node{worlds[0].mustStart(), worlds[1].mustStart()}
	if _, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: 2}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "each range is served by one node, and the other one waits", func() error {
		chains, err := nodes[0].admin.Chains(t.Context(), -1)
		if err != nil {
			return err
		}
		for _, c := range chains.Items {
			if len(c.Members) != 2 || c.Members[0].State != "serving" || c.Members[1].State != "waiting" {
				return fmt.Errorf("%+v", c)
			}
		}
		return nil
	})
	keysOf(nodes).stored(t, "key", "value")
}

// lacking is how many ranges have too few copies, of which none is being filled.
func lacking(a admin.Cluster) int {
	return a.Ranges.UnderReplicated + a.Ranges.Halted + a.Ranges.Unassigned
}

// knocking connects to a node's address for the membership as no node does, each time otherwise, which fills no log.
func knocking(t *testing.T, address string, log *lines) {
	t.Helper()
	began := time.Now()
	const times = 200
	for i := range times {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Write(binary.LittleEndian.AppendUint32(nil, 1<<20+uint32(i))) // a frame that is too long
		if err = errors.Join(err, c.SetDeadline(time.Now().Add(clusterWait))); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(make([]byte, 1)); err == nil || n > 0 {
			t.Errorf("%d bytes come, %v", n, err)
		}
		_ = c.Close()
	}
	most := 5 * (2 + int(time.Since(began)/time.Second)) // log.peer_lines_per_sec
	if got := log.with("a connection of the cluster is refused"); len(got) == 0 || len(got) > most {
		t.Errorf("%d connections leave %d lines, want 1 to %d", times, len(got), most)
	}
}

// changing changes the settings of a cluster of three nodes with two replicas, and back.
func changing(t *testing.T, nodes []*node) {
	t.Helper()
	ask := func(what admin.ChangeCluster, refusal string) {
		t.Helper()
		_, err := nodes[0].admin.ChangeCluster(t.Context(), what)
		if (err == nil) != (refusal == "") || err != nil && !strings.Contains(err.Error(), refusal) {
			t.Errorf("%+v: %v, want %q", what, err, refusal)
		}
	}
	ask(admin.ChangeCluster{Drain: "n9"}, "must be one of the view: n1, n2, n3")
	ask(admin.ChangeCluster{Replicas: 4}, "must be at most 3")
	ask(admin.ChangeCluster{Replicas: 6}, "must be 1 to 5")
	ask(admin.ChangeCluster{Drain: "n3"}, "")
	ask(admin.ChangeCluster{Drain: "n2"}, "without n2, nodes that may have ranges: 1, replicas: 2")
	ask(admin.ChangeCluster{AllLosses: true}, "no range is halted")
	ask(admin.ChangeCluster{Lost: []string{"n9"}}, "must be one that the newest view counts as up: n1, n2, n3")
	ask(admin.ChangeCluster{Lost: []string{"n2"}}, "runs, or has ended a moment ago")
	agree(t, "n3 is drained", nodes, func(a admin.Cluster) error {
		if !a.Nodes[2].Out || a.Nodes[0].Out {
			return fmt.Errorf("%+v", a.Nodes)
		}
		return nil
	})
	ask(admin.ChangeCluster{Join: "n3", Replicas: 1}, "")
	agree(t, "one replica of each key", nodes, func(a admin.Cluster) error {
		if a.Nodes[2].Out || a.Replicas != 1 || lacking(a) > 0 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	ask(admin.ChangeCluster{Replicas: 2}, "")
	// Before all ranges have them, a node may be the only one that has a range.
	agree(t, "two replicas", nodes, func(a admin.Cluster) error {
		if a.Replicas != 2 || a.Ranges.Full != a.Ranges.Total {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
}

// stored puts a key at whatever node takes it, and read gets it from each node that serves it: at least as many as are
// wanted.
func (ns replicatedKeys) stored(t *testing.T, key, value string) {
	t.Helper()
	eventually(t, "a Store of "+key, func() (err error) {
		for _, n := range ns {
			if err = n.Put(t.Context(), []byte(key), []byte(value)); err == nil {
				return nil
			}
		}
		return err
	})
}

// storedAtOnce puts so many keys, each at the node that takes it. Nothing is tried twice.
func (ns replicatedKeys) storedAtOnce(t *testing.T, keys int) {
	t.Helper()
	for i := range keys {
		var errs error
		for _, n := range ns {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			err := n.Put(ctx, fmt.Appendf(nil, "first%d", i), []byte("value"))
			if cancel(); err == nil {
				errs = nil
				break
			}
			errs = errors.Join(errs, err)
		}
		if errs != nil {
			t.Errorf("key %d: %v", i, errs)
		}
	}
}

func (ns replicatedKeys) read(t *testing.T, key, value string, copies int) {
	t.Helper()
	eventually(t, "Retrieves of "+key, func() error {
		found := 0
		for _, n := range ns {
			buf := make([]byte, 64)
			switch size, err := n.Get(t.Context(), []byte(key), buf); {
			case err == nil && string(buf[:size]) != value:
				t.Fatalf("key %s is %q, want %q", key, buf[:size], value)
			case err == nil:
				found++
			}
		}
		if found < copies {
			return fmt.Errorf("%d nodes have %s, want %d", found, key, copies)
		}
		return nil
	})
}

// replicatedKeys are the partitions of nodes.
type replicatedKeys []*kv.Namespace

func keysOf(nodes []*node) (ns replicatedKeys) {
	for _, n := range nodes {
		ns = append(ns, n.keysOf(2))
	}
	return ns
}

// TestANodeWithoutEtcdServesWhatElseItHas, and takes part when etcd is back.
func TestANodeWithoutEtcdServesWhatElseItHas(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	w, hosts, log := newWorld(t), clusterHosts(1), &lines{}
	w.configureNode(hosts, 0, "demo", etcd.URL, onePartition)
	w.log = log
	n := w.mustStart()
	if _, err := n.admin.InitCluster(t.Context(), admin.InitCluster{}); err != nil {
		t.Fatal(err)
	}
	one := func(a admin.Cluster) error {
		if up(a) != 1 || len(a.Partitions) != 1 || a.Replicas != 1 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	}
	agree(t, "a cluster of one", []*node{n}, one)
	knocking(t, hosts[0]+":4430", log)
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	etcd.Kill()
	n = w.mustStart()
	eventually(t, "the node says that etcd does not answer", func() error {
		if r := n.reason("cluster"); !strings.Contains(r, "etcd does not answer") || !strings.Contains(r, etcd.URL) {
			return errors.New(r)
		}
		return nil
	})
	if state := n.cluster().Nodes[0].State; state != "unknown" {
		t.Errorf("the state of a node that no view was seen of is %q", state)
	}
	if got, err := n.connect().NamespaceIDs(t.Context()); err != nil || len(got) != 2 {
		t.Errorf("a host sees %v, %v", got, err)
	}
	if l, err := n.admin.Subsystems(t.Context()); err != nil || !l.Items[0].Namespaces[1].Replicated ||
		l.Items[0].Namespaces[1].Error != "" {
		t.Errorf("the partition is not open: %+v, %v", l, err)
	}
	etcd.Restart()
	agree(t, "etcd is back", []*node{n}, one)
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	// Another cluster is not taken for the node's own.
	w.configureNode(hosts, 0, "other", etcd.URL, onePartition)
	n = w.mustStart()
	eventually(t, "the node says that it belongs elsewhere, and not to make a cluster", func() error {
		if r := n.reason("cluster"); !strings.Contains(r, "this node belongs to the cluster ") ||
			strings.Contains(r, "init") {
			return errors.New(r)
		}
		return nil
	})
	if _, err := n.admin.InitCluster(t.Context(), admin.InitCluster{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node says that this is another cluster", func() error {
		if r := n.reason("cluster"); !strings.Contains(r, "this node belongs to") {
			return errors.New(r)
		}
		return nil
	})
}

// TestAPartitionThatWasMadeForSomethingElseIsLeftOut: its keys have other positions than in the cluster.
func TestAPartitionThatWasMadeForSomethingElseIsLeftOut(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	w, hosts := newWorld(t), clusterHosts(1)
	w.configureNode(hosts, 0, "demo", etcd.URL, strings.Replace(onePartition, ", replicated: true", "", 1))
	n := w.mustStart()
	if _, err := n.admin.InitCluster(t.Context(), admin.InitCluster{}); err != nil {
		t.Fatal(err)
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	w.configureNode(hosts, 0, "demo", etcd.URL, onePartition+"\n      - "+strings.Replace(onePartition, "2", "3", 1))
	n = w.mustStart()
	agree(t, "a cluster with one of two partitions", []*node{n}, func(a admin.Cluster) error {
		if len(a.Partitions) != 1 || a.Ranges.Full != a.Ranges.Total {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	l, err := n.admin.Subsystems(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, ns := range l.Items[0].Namespaces {
		if bad := ns.NSID == 2; strings.Contains(ns.Error, "was not made for this cluster") != bad {
			t.Errorf("namespace %d: %q", ns.NSID, ns.Error)
		}
	}
	id := l.Items[0].Namespaces[2].UUID
	if _, err := n.admin.AuditKV(t.Context(), id, true); err == nil || !strings.Contains(err.Error(), "the cluster") {
		t.Errorf("a repair of a partition: %v", err)
	}
	if _, err := n.admin.OpenKV(t.Context(), id, "x"); err == nil || !strings.Contains(err.Error(), "the cluster") {
		t.Errorf("the opening of a partition: %v", err)
	}
	if _, err := n.admin.ImportKV(t.Context(), id, []byte("x")); err == nil ||
		!strings.Contains(err.Error(), "the cluster") {
		t.Errorf("an import into a partition: %v", err)
	}
	if r := n.reason("namespace " + nqn + " 2"); !strings.Contains(r, "other positions") {
		t.Errorf("the node is not ready because %q", r)
	}
}

// TestADaemonRunsItsServerOfEtcd, which ends with it.
func TestADaemonRunsItsServerOfEtcd(t *testing.T) {
	binary := etcdproc.Binary(t)
	w, hosts := newWorld(t), clusterHosts(1)
	w.etcdBinary = binary
	w.configureNode(hosts, 0, "demo", "http://"+hosts[0]+":2379", onePartition)
	w.text = strings.Replace(w.text, fmt.Sprintf("endpoints: [%q]", "http://"+hosts[0]+":2379"),
		fmt.Sprintf("embedded: {members: [{name: n1, client_url: \"http://%s:2379\", peer_url: \"http://%s:2380\"}]}",
			hosts[0], hosts[0]), 1)
	for round := range 2 {
		n := w.mustStart()
		eventually(t, "the cluster can be made, or is there", func() error {
			_, err := n.admin.InitCluster(t.Context(), admin.InitCluster{})
			if err != nil && strings.Contains(err.Error(), "there is a cluster") && round == 1 {
				return nil
			}
			return err
		})
		agree(t, "a cluster of one", []*node{n}, func(a admin.Cluster) error {
			if up(a) != 1 || len(a.Partitions) != 1 {
				return fmt.Errorf("%+v", a)
			}
			return nil
		})
		// A copy of the configuration that has other drives and addresses, but the same data directory.
		second := &world{t: t, dir: w.dir, address: w.address, closeTimeout: w.closeTimeout, etcdBinary: binary}
		second.text = strings.NewReplacer("admin.sock", "second.sock", "ssd0.img", "second.img",
			hosts[0]+":", clusterHosts(1)[0]+":").Replace(w.text)
		if _, err := second.start(); !errors.Is(err, etcdserver.ErrInUse) {
			t.Errorf("a second daemon with the same directory: %v, want %v", err, etcdserver.ErrInUse)
		}
		if err := n.stop(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(w.path("etcd")); err != nil {
		t.Errorf("the data of etcd are not in the data directory: %v", err)
	}
}
