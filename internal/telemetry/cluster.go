package telemetry

// RangeStates are the states of a range of the cluster, and ReplicaRoles the roles of this node's replicas of ranges.
var (
	RangeStates  = []string{"full", "filling", "under_replicated", "halted", "unassigned"}
	ReplicaRoles = []string{"only", "chain_head", "chain_middle", "chain_tail", "filling", "waiting", "last_copy"}
)

// ClusterStats are what the node knows of its cluster at the time of a scrape.
type ClusterStats struct {
	// Epoch is that of the newest view, ActiveEpoch that of the view on which the node acts; 0: none.
	Epoch, ActiveEpoch uint64
	// Manager reports that this node is the manager.
	Manager bool
	// AuthoritySeconds is for how long the node may serve its ranges without hearing of the manager.
	AuthoritySeconds float64
	// ViewAgeSeconds is the time since the node has seen the newest view first.
	ViewAgeSeconds float64
	// Nodes are those of the newest view, NodesUp those that it admits.
	Nodes, NodesUp int
	// Ranges counts the ranges by RangeStates. UnderReplicated is how many have fewer complete copies than they should
	// have. Roles counts this node's replicas by ReplicaRoles.
	Ranges          map[string]int
	UnderReplicated int
	Roles           map[string]int
}

// SetCluster sets the source of the statistics of the cluster, and what tells why the node does not take part in it;
// nil: it does. The daemon is not ready as long as it does not.
func (t *Telemetry) SetCluster(stats func() ClusterStats, ready func() error) {
	t.mu.Lock()
	t.cluster = stats
	t.mu.Unlock()
	t.health.watch("cluster", ready)
}

var (
	clusterEpoch = gauge("jbof_cluster_epoch", "Epoch of the newest view of the cluster that the node has seen; 0: "+
		"none.")
	clusterActive = gauge("jbof_cluster_active_epoch", "Epoch of the view on which the node acts; 0: it is not in "+
		"the view.")
	clusterManager   = gauge("jbof_cluster_manager", "1 if this node is the manager of its cluster, else 0.")
	clusterAuthority = gauge("jbof_cluster_authority_seconds", "For how long the node may serve its ranges without "+
		"hearing of the manager; 0: it may not.")
	clusterViewAge = gauge("jbof_cluster_view_age_seconds", "Time since the node has seen the newest view first.")
	clusterNodes   = gauge("jbof_cluster_nodes", "Nodes of the cluster in the newest view, by state: up, or away.",
		"state")
	clusterRanges = gauge("jbof_cluster_ranges", "Ranges of the cluster by state: full, filling, under_replicated "+
		"(and nothing is being filled), halted (all copies are away), unassigned (of a new cluster).", "state")
	clusterUnder = gauge("jbof_cluster_under_replicated_ranges", "Ranges with fewer complete copies than the cluster "+
		"is to have.")
	clusterReplicas = gauge("jbof_cluster_replicas", "Replicas of ranges that this node has, by role.", "role")
)

// clusterMetrics returns the metric families of this file.
func clusterMetrics() []metric {
	return []metric{clusterEpoch, clusterActive, clusterManager, clusterAuthority, clusterViewAge, clusterNodes,
		clusterRanges, clusterUnder, clusterReplicas}
}

func collectCluster(s ClusterStats, put func(m metric, v float64, labels ...string)) {
	put(clusterEpoch, float64(s.Epoch))
	put(clusterActive, float64(s.ActiveEpoch))
	put(clusterManager, boolValue(s.Manager))
	put(clusterAuthority, max(s.AuthoritySeconds, 0))
	put(clusterViewAge, s.ViewAgeSeconds)
	put(clusterNodes, float64(s.NodesUp), "up")
	put(clusterNodes, float64(s.Nodes-s.NodesUp), "away")
	put(clusterUnder, float64(s.UnderReplicated))
	for _, state := range RangeStates {
		put(clusterRanges, float64(s.Ranges[state]), state)
	}
	for _, role := range ReplicaRoles {
		put(clusterReplicas, float64(s.Roles[role]), role)
	}
}
