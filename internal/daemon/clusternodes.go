package daemon

import (
	"fmt"

	"jbofd/internal/config"
	"jbofd/internal/peers"
)

// The other nodes of the cluster are the one thing of its section that a reload changes.

// checkNodes refuses to forget nodes that have ranges: the others would not hear them any more, as if they had failed.
// The caller holds n.reload.
func (c *clusterMember) checkNodes(cfg *config.Config, changes config.Changes) error {
	if c == nil || len(changes.NodesRemoved) == 0 {
		return nil
	}
	v, _ := c.newestView()
	if v == nil {
		return cfg.FieldProblem("cluster.nodes", fmt.Errorf("node %s is removed, and this node does not know yet "+
			"whether it has ranges; allowed: all nodes as before, until the cluster answers",
			changes.NodesRemoved[0].Name))
	}
	replicas := map[string]int{}
	for _, chain := range v.Chains {
		for _, m := range chain {
			replicas[v.Nodes[v.Partitions[m.Partition].Node].Name]++
		}
	}
	for _, node := range changes.NodesRemoved {
		if n := replicas[node.Name]; n > 0 {
			return cfg.FieldProblem("cluster.nodes", fmt.Errorf("node %s is removed, and has replicas of %d ranges; "+
				"allowed: to remove it when it has none, after jbofctl cluster drain %s", node.Name, n, node.Name))
		}
	}
	return nil
}

// nodesChanged tells all parts which nodes there are now. It is called after each change of the configuration's nodes,
// and once when the membership has begun.
func (c *clusterMember) nodesChanged() error {
	c.changingNodes.Lock()
	defer c.changingNodes.Unlock()
	nodes := c.n.config().Cluster.Nodes
	if m := c.running.Load(); m != nil {
		if err := m.SetNodes(addresses(nodes)); err != nil {
			return err
		}
	}
	return c.host.setNodes(nodes)
}

// addresses returns where nodes listen for the membership, by their names.
func addresses(nodes []config.ClusterNode) map[string]string {
	all := make(map[string]string, len(nodes))
	for _, node := range nodes {
		all[node.Name] = node.Address
	}
	return all
}

// targets returns where hosts reach nodes, by their names.
func targets(nodes []config.ClusterNode) map[string]string {
	all := make(map[string]string, len(nodes))
	for _, node := range nodes {
		all[node.Name] = node.Target
	}
	return all
}

// peerNodes returns the nodes but this one as peers are told of them.
func peerNodes(nodes []config.ClusterNode, self, subNQN string) (all []peers.Node) {
	for _, node := range nodes {
		if node.Name != self {
			all = append(all, peers.Node{Name: node.Name, Address: node.Target, SubNQN: subNQN})
		}
	}
	return all
}
