package telemetry

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

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
	// StaleSeconds is for how long that view may be an old one, because the node serves nothing and hears neither of
	// etcd nor of the manager; 0: it is not.
	StaleSeconds float64
	// Nodes are those of the newest view, NodesUp those that it admits.
	Nodes, NodesUp int
	// Ranges counts the ranges by RangeStates. UnderReplicated is how many have fewer complete copies than they should
	// have. Roles counts this node's replicas by ReplicaRoles.
	Ranges          map[string]int
	UnderReplicated int
	Roles           map[string]int
	// Dirty is how many writes of this node's replicas are not known to be committed yet.
	Dirty int64
	// LeftRanges is how many ranges are others' now of which the node's partitions may have something that is to be
	// dropped. DroppedRanges and DroppedBytes are what was dropped, bytes of keys and values.
	LeftRanges                  int
	DroppedRanges, DroppedBytes uint64
	// KnownLosses is how many things the stores of the node's partitions have lost, as far as is known, that were not
	// repaired yet. FoundLosses counts those that were found.
	KnownLosses int
	FoundLosses uint64
	// SilentPartitions is how many of the node's partitions have a drive that takes requests and completes none.
	SilentPartitions int
	// FailingPartitions is how many of them have a drive that does not work: those, and those that fail writes.
	FailingPartitions int
	// OutPartitions is how many of them the cluster gives no ranges because their drive did not work.
	OutPartitions int
}

// PeerKinds are the kinds of commands that replicas send to those of other nodes.
var PeerKinds = []string{"forward", "durable", "sync", "ship", "compare", "fetch"}

// PeerSeries counts the commands of this node's replicas to other nodes, by the index of PeerKinds.
type PeerSeries struct {
	ended [6]IOSeries
	lost  [6]atomic.Uint64
	// repairs counts by RepairOutcomes.
	repairs [4]atomic.Uint64
}

// RepairOutcomes are what becomes of what a store cannot read.
var RepairOutcomes = []string{"found", "repaired", "no_source", "failed"}

// CountRepair counts one of RepairOutcomes.
func (s *PeerSeries) CountRepair(outcome int) { s.repairs[outcome].Add(1) }

// Observe counts a command that was answered after some time, or lost with its connection. If took is negative, it is
// not counted among the durations.
//
// hot: 0 allocs
func (s *PeerSeries) Observe(kind, bytes int, took time.Duration, lost bool) {
	if lost {
		s.lost[kind].Add(1)
		return
	}
	if took < 0 {
		s.ended[kind].bytes.Add(int64(bytes))
		return
	}
	s.ended[kind].Observe(1, int64(bytes), took)
}

// Peers returns the counts of the commands to other nodes, which are reported as soon as there is a cluster.
func (t *Telemetry) Peers() *PeerSeries { return &t.peers }

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
	clusterStale   = gauge("jbof_cluster_view_stale_seconds", "For how long the node has served nothing and heard "+
		"neither of etcd nor of the manager, so that jbof_cluster_nodes, jbof_cluster_ranges and "+
		"jbof_cluster_under_replicated_ranges may be those of before; 0: they are not.")
	clusterNodes = gauge("jbof_cluster_nodes", "Nodes of the cluster in the newest view, by state: up, or away.",
		"state")
	clusterRanges = gauge("jbof_cluster_ranges", "Ranges of the cluster by state: full, filling, under_replicated "+
		"(and nothing is being filled), halted (all copies are away, "+
		"or their drives do not work), unassigned (of a new cluster).", "state")
	clusterUnder = gauge("jbof_cluster_under_replicated_ranges", "Ranges with fewer complete copies than the cluster "+
		"is to have.")
	clusterReplicas = gauge("jbof_cluster_replicas", "Replicas of ranges that this node has, by role.", "role")
	clusterDirty    = gauge("jbof_cluster_dirty_writes", "Writes of this node's replicas that are not known to be "+
		"committed yet: reads of their keys go to the ChainTail.")
	clusterLeft = gauge("jbof_cluster_left_ranges", "Ranges that are others', of which this node's partitions may "+
		"have something, which is dropped when the range is full. After a start these are all of them, until the node "+
		"has looked: a minute or more.")
	clusterDroppedRanges = counter("jbof_cluster_dropped_ranges_total", "Ranges that are others' now, of which this "+
		"node has dropped what its partitions had.")
	clusterDroppedBytes = counter("jbof_cluster_dropped_bytes_total", "Keys and values of them.")
	peerDuration        = newMetric(prometheus.UntypedValue, "jbof_cluster_peer_duration_seconds", "How long commands "+
		"to replicas of other nodes took, by kind, without those that were refused. A forward counts if the rest of "+
		"the chain has committed its write when it is answered, and took until then: the latency of the chain from "+
		"this hop on. durable asks the next member what it has on its drive, sync the one before what is committed; "+
		"ship is a read of a dirty key; compare looks what a copy lacks, by digests, and fetch brings it.", "kind")
	peerBytes = counter("jbof_cluster_peer_bytes_total", "Data of such commands: of a forward what was sent, else "+
		"what came. That of fetch is what copies were filled with.", "kind")
	peerLost = counter("jbof_cluster_peer_lost_total", "Such commands that were not sent, or not answered, for want "+
		"of a connection.", "kind")
	clusterSilent = gauge("jbof_cluster_silent_partitions", "Partitions of this node whose drive takes requests and "+
		"completes none. Ranges that other nodes serve go on without them.")
	clusterFailing = gauge("jbof_cluster_failing_partitions", "Partitions of this node whose drive fails writes or is "+
		"silent. After cluster.away others get their ranges, if there are enough others.")
	clusterOut = gauge("jbof_cluster_out_partitions", "Partitions of this node that the cluster gives no ranges, "+
		"because their drive did not work. They get some when it has worked for long enough.")
	clusterLosses = gauge("jbof_cluster_known_losses", "Objects and segments that the stores of this node are known "+
		"to have lost, and that were not repaired yet.")
	clusterFound   = counter("jbof_cluster_found_losses_total", "Those that were found.")
	clusterRepairs = counter("jbof_cluster_repairs_total", "Objects and segments that a store of this node could not "+
		"read (found), and how often one was repaired from another replica, no other one had it (no_source), or the "+
		"repair was given up (failed).", "outcome")
)

// clusterMetrics returns the metric families of this file.
func clusterMetrics() []metric {
	return []metric{clusterEpoch, clusterActive, clusterManager, clusterAuthority, clusterViewAge, clusterStale,
		clusterNodes,
		clusterRanges, clusterUnder, clusterReplicas, clusterDirty, clusterLeft, clusterDroppedRanges,
		clusterDroppedBytes, peerDuration, peerBytes, peerLost, clusterLosses, clusterFound, clusterRepairs,
		clusterSilent, clusterFailing, clusterOut}
}

func collectCluster(s ClusterStats, peers *PeerSeries, put func(m metric, v float64, labels ...string),
	ch chan<- prometheus.Metric) {
	put(clusterDirty, float64(s.Dirty))
	put(clusterSilent, float64(s.SilentPartitions))
	put(clusterFailing, float64(s.FailingPartitions))
	put(clusterOut, float64(s.OutPartitions))
	put(clusterLeft, float64(s.LeftRanges))
	put(clusterDroppedRanges, float64(s.DroppedRanges))
	put(clusterDroppedBytes, float64(s.DroppedBytes))
	put(clusterLosses, float64(s.KnownLosses))
	put(clusterFound, float64(s.FoundLosses))
	for i, kind := range PeerKinds {
		count, sum, le := peers.ended[i].histogram()
		ch <- prometheus.MustNewConstHistogram(peerDuration.desc, count, sum, le, kind)
		put(peerBytes, float64(peers.ended[i].Bytes()), kind)
		put(peerLost, float64(peers.lost[i].Load()), kind)
	}
	for i, outcome := range RepairOutcomes {
		put(clusterRepairs, float64(peers.repairs[i].Load()), outcome)
	}
	put(clusterEpoch, float64(s.Epoch))
	put(clusterActive, float64(s.ActiveEpoch))
	put(clusterManager, boolValue(s.Manager))
	put(clusterAuthority, max(s.AuthoritySeconds, 0))
	put(clusterViewAge, s.ViewAgeSeconds)
	put(clusterStale, s.StaleSeconds)
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
