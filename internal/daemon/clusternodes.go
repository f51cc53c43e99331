package daemon

import (
	"errors"
	"fmt"
	"slices"

	"jbofd/internal/config"
	"jbofd/internal/peers"
)

// The other nodes of the cluster are the one thing of its section that a reload changes.

// checkNodes refuses nodes that nodesChanged could not tell to all parts, and to forget nodes that take part or have
// ranges: the others would not hear them any more, as if they had failed. The caller holds n.reload.
func (c *clusterMember) checkNodes(cfg *config.Config) error {
	if c == nil {
		return nil
	}
	if m := c.running.Load(); m != nil {
		if err := m.CheckNodes(addresses(cfg.Cluster.Nodes)); err != nil {
			return cfg.FieldProblem("cluster.nodes", err)
		}
	}
	if err := c.host.checkNodes(cfg.Cluster.Nodes); err != nil {
		return cfg.FieldProblem("cluster.nodes", err)
	}
	var removed []string
	for _, node := range c.n.config().Cluster.Nodes {
		is := func(o config.ClusterNode) bool { return o.Name == node.Name }
		if !slices.ContainsFunc(cfg.Cluster.Nodes, is) {
			removed = append(removed, node.Name)
		}
	}
	if len(removed) == 0 {
		return nil
	}
	v, _ := c.newestView()
	if v == nil {
		return cfg.FieldProblem("cluster.nodes", fmt.Errorf("node %s is removed, and this node does not know yet "+
			"whether it has ranges; allowed: all nodes as before, until the cluster answers", removed[0]))
	}
	replicas := map[string]int{}
	for _, chain := range v.Chains {
		for _, m := range chain {
			replicas[v.Nodes[v.Partitions[m.Partition].Node].Name]++
		}
	}
	up := map[string]bool{}
	for i := range v.Nodes {
		up[v.Nodes[i].Name] = v.Admitted[i] != 0
	}
	for _, name := range removed {
		if n := replicas[name]; n > 0 {
			return cfg.FieldProblem("cluster.nodes", fmt.Errorf("node %s is removed, and has replicas of %d ranges; "+
				"allowed: to remove it when it has none, after jbofctl cluster drain %s", name, n, name))
		}
		// It may be the manager, and give up this node.
		if up[name] {
			return cfg.FieldProblem("cluster.nodes", fmt.Errorf("node %s is removed, and is up; allowed: to remove "+
				"it when its jbofd has been stopped, and the cluster counts it as away", name))
		}
	}
	return nil
}

// nodesChanged tells all parts which nodes there are now. It is called after each change of the configuration's nodes,
// and once when the membership has begun. checkNodes has found nothing wrong with them.
func (c *clusterMember) nodesChanged() error {
	c.changingNodes.Lock()
	defer c.changingNodes.Unlock()
	nodes := c.n.config().Cluster.Nodes
	err := c.host.setNodes(nodes)
	if m := c.running.Load(); m != nil {
		err = errors.Join(err, m.SetNodes(addresses(nodes)))
	}
	return err
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

// peerNodes returns the nodes as peers are told of them.
func peerNodes(nodes []config.ClusterNode, subNQN string) (all []peers.Node) {
	for _, node := range nodes {
		all = append(all, peers.Node{Name: node.Name, Address: node.Target, SubNQN: subNQN})
	}
	return all
}
