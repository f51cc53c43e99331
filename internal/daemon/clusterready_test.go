package daemon

import (
	"strings"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/member"
	"jbofd/internal/cluster/view"
	"jbofd/internal/config"
	"jbofd/internal/peers"
	"jbofd/internal/uuid"
)

// TestANodeIsConnectedIfBothDirectionsAre, to all other nodes that are up and have partitions, on the newest view.
func TestANodeIsConnectedIfBothDirectionsAre(t *testing.T) {
	m := &cluster.Map{View: &view.View{Epoch: 7, Nodes: []view.Node{{Name: "a"}, {Name: "b"}, {Name: "c"}, {Name: "d"}},
		Partitions: []view.Partition{{ID: uuid.UUID{1}}, {ID: uuid.UUID{2}, Node: 1}, {}, {ID: uuid.UUID{3}, Node: 2}}},
		Admitted: []cluster.Incarnation{11, 12, 0, 14}}
	later := *m
	r := &replicaNode{self: "a", hosts: map[string]bool{}, reached: map[string]bool{}}
	expect := func(what string, s *member.State, want view.Epoch) {
		t.Helper()
		if got := r.connectedInLocked(s); got != want {
			t.Errorf("%s: connected in epoch %d, want %d", what, got, want)
		}
	}
	acts := &member.State{Active: m, Newest: m}
	expect("no view", &member.State{}, 0)
	expect("no connections", acts, 0)
	r.connected("b")
	expect("one direction", acts, 0)
	r.hosts["b"] = true // c is away, d has no partitions
	expect("both directions", acts, 7)
	expect("a newer view", &member.State{Active: m, Newest: &later}, 0)
	expect("the view does not act", &member.State{Newest: m}, 0)
	r.disconnected("b", peers.Loss{})
	expect("the other direction", acts, 0)
	r.connected("b")
	m.Admitted[2] = 13
	expect("c is up", acts, 0)
	r.connected("c")
	r.hosts["c"] = true
	expect("all are connected", acts, 7)
}

// TestPartitionsHaveTheSettingsOfTheNode, so that none of what they are there for is left out.
func TestPartitionsHaveTheSettingsOfTheNode(t *testing.T) {
	for _, lock := range []bool{false, true} {
		r := &replicaNode{cfg: &config.Cluster{Lease: 3 * time.Second, LockKeys: lock, FillShare: 7, RestoreShare: 8}}
		c := r.settings()
		if c.LockKeys != lock || c.FillShare != 7 || c.RestoreShare != 8 || c.Patience != 6*time.Second ||
			c.YieldAfter != 15*time.Second || c.SilentAfter != 7*time.Second ||
			c.AnswerWithin != 2500*time.Millisecond {
			t.Errorf("%+v", c)
		}
	}
}

// TestAManagerThatTheConfigurationLacksIsSaidSo: this node connects to no other nodes than its configuration has, nor
// they to it, so that such a manager gives it up.
func TestAManagerThatTheConfigurationLacksIsSaidSo(t *testing.T) {
	c := &clusterMember{n: &Node{cfg: &config.Config{Cluster: &config.Cluster{Nodes: []config.ClusterNode{{Name: "n1"},
		{Name: "n2"}}}}}}
	for name, want := range map[string]bool{"": true, "n1": true, "n2": true, "n3": false} {
		if got := c.knows(name); got != want {
			t.Errorf("manager %q: %t", name, got)
		}
	}
}

// TestAManagerWithTheNameOfThisNodeIsAnotherOne, as long as it has another address: etcd says so only later.
func TestAManagerWithTheNameOfThisNodeIsAnotherOne(t *testing.T) {
	c := &clusterMember{self: "n1", cfg: &config.Cluster{Lease: time.Second}, n: &Node{cfg: &config.Config{
		Node: config.Node{Name: "n1"}, Cluster: &config.Cluster{Nodes: []config.ClusterNode{{Name: "n1",
			Address: "192.0.2.1:4430"}}}}}}
	for _, s := range []struct {
		member.State
		says bool
	}{
		{member.State{Manager: "n1", ManagerAddress: "192.0.2.2:4430"}, true},
		{member.State{Manager: "n1", ManagerAddress: "192.0.2.1:4430"}, false}, // its last process
		{member.State{Manager: "n1", ManagerAddress: "192.0.2.2:4430", Manages: true}, false},
		{member.State{Manager: "n2", ManagerAddress: "192.0.2.2:4430"}, false},
	} {
		err := c.waiting(&s.State, time.Hour)
		const says = "192.0.2.2:4430: another node with the name of this one"
		if got := strings.Contains(err.Error(), says); got != s.says {
			t.Errorf("%+v: %v", s.State, err)
		}
	}
}
