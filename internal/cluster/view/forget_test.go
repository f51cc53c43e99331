package view

import (
	"testing"

	"jbofd/internal/uuid"
)

// TestAMemberOfAChainIsNeverForgotten enumerates all chains: a node, or a partition that its node does not have any
// more, leaves the map only if it is no member, in whatever state it would be. The chain stays as it is, and its
// members are the same partitions.
func TestAMemberOfAChainIsNeverForgotten(t *testing.T) {
	all := partitions + 1 // one that is a member of none
	base := View{Cluster: uuid.UUID{1}, Epoch: now, Replicas: 2, Chains: make([]Chain, 16),
		ChainEpochs: make([]uint32, 16)}
	ids := make([]uuid.UUID, all)
	for i := range all {
		ids[i] = uuid.UUID{2, byte(i)}
		base.Nodes = append(base.Nodes, Node{Name: string(rune('a' + i))})
		base.Partitions = append(base.Partitions, Partition{ID: ids[i], Node: uint16(i), Weight: 1})
	}
	count := 0
	chains(partitions, func(c Chain) {
		for gone := range all {
			count++
			member := c.find(PartitionID(gone)) >= 0
			fresh := func() *View {
				v := base
				v.Nodes, v.Partitions = append([]Node(nil), v.Nodes...), append([]Partition(nil), v.Partitions...)
				v.Chains[7] = c
				return &v
			}
			v := fresh()
			if v.Forget(gone) == member {
				t.Fatalf("node %d of chain %v: is forgotten: %v", gone, c, !member)
			}
			w := fresh()
			if w.ForgetPartitions(func(p *Partition) bool { return p.ID == ids[gone] }) == member {
				t.Fatalf("partition %d of chain %v: is forgotten: %v", gone, c, !member)
			}
			if !member {
				if len(v.Nodes) != all-1 || !w.Partitions[gone].ID.IsZero() || !v.Partitions[gone].ID.IsZero() {
					t.Fatalf("%d is there still", gone)
				}
			}
			for _, v := range []*View{v, w} {
				if err := v.Check(); err != nil {
					t.Fatalf("%d of chain %v: %v", gone, c, err)
				}
				for _, m := range v.Chains[7] {
					p := v.Partitions[m.Partition]
					if want := base.Nodes[m.Partition].Name; p.ID != ids[m.Partition] || v.Nodes[p.Node].Name != want {
						t.Fatalf("%d of chain %v: member %v is %v of node %s", gone, c, m, p, v.Nodes[p.Node].Name)
					}
				}
			}
		}
	})
	t.Logf("%d cases", count)
}

// TestEntriesAreUsedAgain, and nothing else of the map is.
func TestEntriesAreUsedAgain(t *testing.T) {
	v := cluster(3, 2, 2, 16)
	if !v.Forget(1) {
		t.Fatal("not forgotten")
	}
	v.Add(uuid.UUID{9, 1}, 1, 5)
	v.Add(uuid.UUID{9, 2}, 1, 6)
	v.Add(uuid.UUID{9, 3}, 1, 7)
	v.Add(uuid.UUID{9, 2}, 1, 8) // another weight
	v.Add(uuid.UUID{9, 2}, 0, 9) // of another node: it stays
	if len(v.Partitions) != 7 || v.Partitions[2] != (Partition{ID: uuid.UUID{9, 1}, Node: 1, Weight: 5}) ||
		v.Partitions[3] != (Partition{ID: uuid.UUID{9, 2}, Node: 1, Weight: 8}) ||
		v.Partitions[6] != (Partition{ID: uuid.UUID{9, 3}, Node: 1, Weight: 7}) || v.Nodes[1].Name != "node-0002" {
		t.Errorf("%+v", v)
	}
}
