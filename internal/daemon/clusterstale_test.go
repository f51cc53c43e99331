package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"jbofd/internal/admin"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

// TestANodeWithoutEtcdAndManagerSaysSo: it names etcd, and that what it knows is old. No line of its log has a key
// twice, of which readers of JSON keep one.
func TestANodeWithoutEtcdAndManagerSaysSo(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	hosts, log := clusterHosts(2), &lines{}
	worlds := []*world{newWorld(t), newWorld(t)}
	for i, w := range worlds {
		w.configureNode(hosts, i, "demo", etcd.URL, onePartition, "log: {format: json}")
	}
	worlds[0].log = log
	nodes := []*node{worlds[0].mustStart(), worlds[1].mustStart()}
	if _, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{}); err != nil {
		t.Fatal(err)
	}
	agree(t, "a cluster of two", nodes, func(a admin.Cluster) error {
		if up(a) != 2 || a.Ranges.Full != a.Ranges.Total || a.StaleMS != 0 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	// Ranges that were always empty are full before the nodes are connected.
	eventually(t, "the other node is connected", func() error {
		if len(log.with("connected to a node")) == 0 {
			return errors.New("no line about the connection")
		}
		return nil
	})
	etcd.Kill()
	if err := nodes[1].stop(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other one says that etcd is away", func() error {
		a := nodes[0].cluster()
		if a.StaleMS == 0 || !strings.Contains(a.Problem, "the node may not serve its ranges: etcd does not answer") ||
			!strings.Contains(a.Problem, etcd.URL+": connection refused") || a.Ranges.Total == 0 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	for _, line := range log.with("{") {
		if twice := keysTwice(t, line); len(twice) > 0 {
			t.Errorf("%v twice in %s", twice, line)
		}
	}
}

// keysTwice returns the keys that a JSON object has more than once.
func keysTwice(t *testing.T, line string) (twice []string) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(line))
	if _, err := d.Token(); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	seen := map[string]bool{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		name, _ := key.(string)
		if seen[name] {
			twice = append(twice, name)
		}
		seen[name] = true
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
	}
	return twice
}
