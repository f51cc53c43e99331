package daemon

import (
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
)

// EncodeClusterMap returns the map that hosts read to find the members that serve (nvme.ClusterMap). addresses has the
// URL at which hosts reach a node, by the node's name. The subsystem has the same NQN on all nodes.
func EncodeClusterMap(m *cluster.Map, addresses map[string]string, subNQN string) []byte {
	partitions := m.Partitions
	if len(m.Nodes) == 0 {
		partitions = nil // none of them can be a member
	}
	h := nvme.ClusterMapHeader{Cluster: m.Cluster, Epoch: uint64(m.Epoch), HashSeed: m.HashSeed,
		Ranges: len(m.Chains), Partitions: len(partitions)}
	for _, c := range m.Chains {
		h.Members = max(h.Members, len(serving(c)))
	}
	b := nvme.NewClusterMap(h)
	for r, c := range m.Chains {
		b.SetRange(r, m.ChainEpochs[r], serving(c))
	}
	for i := range partitions {
		p := &partitions[i]
		if p.ID.IsZero() {
			b.SetPartition(i, p.ID, 0) // the entry is not used
			continue
		}
		b.SetPartition(i, p.ID, p.Node)
	}
	for i := range m.Nodes {
		name := m.Nodes[i].Name
		b = b.AppendNode(nvme.ClusterMapNode{Name: name, Address: addresses[name], SubNQN: subNQN})
	}
	return b.Seal()
}

// serving returns the members of a chain that take part in writes and answer reads, from ChainHead to ChainTail. If
// there are more than a map has room for, it leaves out some that are neither.
func serving(c view.Chain) []uint16 {
	members := make([]uint16, 0, len(c))
	for _, m := range c {
		if m.State == view.Serving || m.State == view.Leaving {
			members = append(members, uint16(m.Partition))
		}
	}
	if n := len(members); n > nvme.ClusterMapMaxMembers {
		members[nvme.ClusterMapMaxMembers-1] = members[n-1]
		members = members[:nvme.ClusterMapMaxMembers]
	}
	return members
}
