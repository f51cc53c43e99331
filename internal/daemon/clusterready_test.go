package daemon

import (
	"testing"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/member"
	"jbofd/internal/cluster/view"
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
