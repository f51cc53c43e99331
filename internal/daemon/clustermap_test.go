package daemon

import (
	"slices"
	"testing"

	"jbofd/internal/admin"
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
	"jbofd/internal/uuid"
)

// TestAHaltedRangeOfANodeThatIsUpIsShown: its last copy is not away, so that something else is to be done about it.
func TestAHaltedRangeOfANodeThatIsUpIsShown(t *testing.T) {
	v := &cluster.Map{Admitted: []cluster.Incarnation{7, 0}, View: &view.View{Replicas: 2,
		Nodes:      []view.Node{{Name: "a"}, {Name: "b"}},
		Partitions: []view.Partition{{ID: uuid.UUID{1}, Weight: 1}, {ID: uuid.UUID{2}, Node: 1, Weight: 1}},
		Chains: []view.Chain{
			{{Partition: 0, State: view.LastCopy}, {Partition: 1, State: view.LastCopy}},
			{{Partition: 1, State: view.LastCopy}, {Partition: 0, State: view.Waiting}},
			{{Partition: 0, State: view.Serving}, {Partition: 1, State: view.Waiting}},
			{}},
		ChainEpochs: make([]uint32, 4)}}
	var a admin.Cluster
	describeView(&a, v)
	if a.Ranges.Halted != 2 || a.Ranges.HaltedUp != 1 {
		t.Errorf("%+v", a.Ranges)
	}
	l, err := (&clusterMember{newest: v}).chains("0")
	if err != nil {
		t.Fatal(err)
	}
	if m := l.(admin.List[admin.Chain]).Items[0].Members; !m[0].Up || m[1].Up {
		t.Errorf("%+v", m)
	}
}

func TestTheMapForHostsHasTheMembersThatServe(t *testing.T) {
	v := &view.View{Cluster: uuid.UUID{1}, Epoch: 9, Replicas: 3, HashSeed: 77,
		Nodes:       []view.Node{{Name: "a"}, {Name: "b"}},
		Chains:      make([]view.Chain, 16),
		ChainEpochs: make([]uint32, 16)}
	for i := range 40 {
		v.Partitions = append(v.Partitions, view.Partition{ID: uuid.UUID{2, byte(i)}, Node: uint16(i % 2), Weight: 1})
	}
	v.Partitions[3] = view.Partition{Node: 99} // not used
	v.Chains[0] = view.Chain{{Partition: 5, State: view.Serving}, {Partition: 6, State: view.Leaving},
		{Partition: 7, State: view.Filling}, {Partition: 8, State: view.Waiting}}
	v.Chains[1] = view.Chain{{Partition: 5, State: view.LastCopy}}
	for p := range view.PartitionID(20) {
		v.Chains[2] = append(v.Chains[2], view.Member{Partition: p + 10, State: view.Leaving})
	}
	v.ChainEpochs[0], v.ChainEpochs[2] = 4, 6
	b := nvme.ClusterMap(EncodeClusterMap(&cluster.Map{View: v}, map[string]string{"a": "tcp://192.0.2.1:4420"}, "nqn"))
	if err := b.Check(); err != nil {
		t.Fatal(err)
	}
	members := func(r int) (out []uint16) {
		for i := range b.MembersOf(r) {
			out = append(out, b.Member(r, i))
		}
		return out
	}
	if b.Cluster() != v.Cluster || b.Epoch() != 9 || b.HashSeed() != 77 || b.Ranges() != 16 || b.ChainEpoch(0) != 4 ||
		b.ChainEpoch(2) != 6 {
		t.Errorf("epoch %d, seed %d, chains %d and %d", b.Epoch(), b.HashSeed(), b.ChainEpoch(0), b.ChainEpoch(2))
	}
	if got := members(0); !slices.Equal(got, []uint16{5, 6}) {
		t.Errorf("range 0: %v", got)
	}
	if got := members(1); got != nil {
		t.Errorf("a halted range: %v", got)
	}
	if got := members(2); len(got) != nvme.ClusterMapMaxMembers || got[0] != 10 || got[len(got)-1] != 29 {
		t.Errorf("a range with too many members: %v", got)
	}
	for _, i := range []int{0, 3, 39} {
		want := uint16(i % 2)
		if i == 3 {
			want = 0
		}
		if id, node := b.Partition(i); id != v.Partitions[i].ID || node != want {
			t.Errorf("partition %d: %s of node %d", i, id, node)
		}
	}
	want := []nvme.ClusterMapNode{{Name: "a", Address: "tcp://192.0.2.1:4420", SubNQN: "nqn"},
		{Name: "b", SubNQN: "nqn"}}
	if got := slices.Collect(b.AllNodes()); !slices.Equal(got, want) {
		t.Errorf("nodes %q", got)
	}
	for i := range v.Chains[2] { // a map without nodes, as that of a new cluster
		v.Chains[2][i].State = view.LastCopy
	}
	v.Nodes, v.Chains[0] = nil, nil
	if err := nvme.ClusterMap(EncodeClusterMap(&cluster.Map{View: v}, nil, "nqn")).Check(); err != nil {
		t.Error(err)
	}
}
