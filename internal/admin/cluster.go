package admin

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
)

// Paths of the cluster's API:
//
//	GET  /v1/cluster           Cluster
//	GET  /v1/cluster/chains    List[Chain]; with ?range=N that one only
//	POST /v1/cluster/init      InitCluster -> ClusterMade
//	POST /v1/cluster/change    ChangeCluster -> ClusterChanged
const (
	PathCluster       = "/v1/cluster"
	PathClusterChains = "/v1/cluster/chains"
	PathClusterInit   = "/v1/cluster/init"
	PathClusterChange = "/v1/cluster/change"
)

// ParamRange is the query parameter of PathClusterChains.
const ParamRange = "range"

// Cluster describes the cluster as the node that answers sees it. Without a view, only the node's own part is there.
type Cluster struct {
	APIVersion string `json:"apiVersion"`
	Name       string `json:"name"`
	// UUID is empty as long as the node has seen no view.
	UUID   string `json:"uuid"`
	SubNQN string `json:"subNQN"`
	// Node is the node that answers.
	Node string `json:"node"`
	// RunsEtcd: that node runs a server of etcd.
	RunsEtcd bool `json:"runsEtcd"`
	// Problem is what keeps that node from taking part, or the map from changing.
	Problem string `json:"problem,omitempty"`
	// NoCluster: etcd has no cluster of that name, which only PathClusterInit ends.
	NoCluster bool `json:"noCluster,omitempty"`
	// Ready: all nodes that are up act on the newest view and are connected to each other, as the manager knows. Then a
	// write of any key of a range that is served is carried out at once.
	Ready bool `json:"ready"`
	// Epoch is that of the newest view that the node has seen, ActiveEpoch that of the view on which it acts; 0: none.
	Epoch       uint64 `json:"epoch"`
	ActiveEpoch uint64 `json:"activeEpoch"`
	// ViewMS is since when the node has had the newest view, in milliseconds.
	ViewMS int64 `json:"viewMS"`
	// StaleMS is for how long the node has heard neither of etcd nor of the manager, in milliseconds. What it says of
	// nodes and ranges is from before, and it serves none of them. 0: it hears of one of them.
	StaleMS int64 `json:"staleMS,omitempty"`
	// Manager is the node that makes the views.
	Manager string `json:"manager"`
	// AuthorityMS is for how long the node may serve its ranges without hearing of the manager; 0: it may not.
	AuthorityMS int64 `json:"authorityMS"`
	// Replicas is how many copies there are to be of each key.
	Replicas   int                `json:"replicas"`
	Ranges     ClusterRanges      `json:"ranges"`
	Nodes      []ClusterNode      `json:"nodes"`
	Partitions []ClusterPartition `json:"partitions"`
}

// ClusterRanges counts the ranges of the cluster by their states.
type ClusterRanges struct {
	Total int `json:"total"`
	// Full ranges have all their copies. Filling ones have a copy that is being made. UnderReplicated ones lack copies
	// that nobody makes, for want of nodes.
	Full            int `json:"full"`
	Filling         int `json:"filling"`
	UnderReplicated int `json:"underReplicated"`
	// Halted ranges are not served: nobody that has all their data can. Of HaltedUp of them, a node that is up has a
	// last copy, which its drive does not return, or which has lost something. Unassigned ranges are those of a cluster
	// without nodes.
	Halted     int `json:"halted"`
	HaltedUp   int `json:"haltedUp,omitempty"`
	Unassigned int `json:"unassigned"`
}

// ClusterNode describes a node of the cluster: of the configuration of the node that answers, or of the view.
type ClusterNode struct {
	Name string `json:"name"`
	// Address, Target and HostNQN are empty if the configuration does not have the node.
	Address string `json:"address"`
	Target  string `json:"target"`
	HostNQN string `json:"hostNQN"`
	Domain  string `json:"domain"`
	// State is up, away (the view does not admit it), forgetting (the same, and it is about to leave the map),
	// forgotten (an operator has had it removed from the map), new (it has never been in a view), or unknown (the node
	// that answers has seen no view yet).
	State string `json:"state"`
	// Out reports that the node is to have no ranges: it is drained, or has been away for too long.
	Out        bool `json:"out"`
	Partitions int  `json:"partitions"`
	// Replicas is how many replicas of ranges the node has that are complete, Filling how many are being filled, and
	// Waiting how many are to be filled later: after others, or when the node is back.
	Replicas int `json:"replicas"`
	Filling  int `json:"filling"`
	Waiting  int `json:"waiting"`
	// Led is how many ranges it leads: it is their ChainHead, which writes go to.
	Led int `json:"led"`
}

// ClusterPartition describes a partition of the cluster.
type ClusterPartition struct {
	UUID string `json:"uuid"`
	Node string `json:"node"`
	// SSD and NSID say where it is. They are known of the partitions of the node that answers, and empty for others.
	SSD    string `json:"ssd,omitempty"`
	NSID   uint32 `json:"nsid,omitempty"`
	Weight uint32 `json:"weight"`
	Out    bool   `json:"out"`
	// Replicas, Filling, Waiting and Led are as in ClusterNode. Share is its part of all complete replicas, 0 to 1.
	Replicas int     `json:"replicas"`
	Filling  int     `json:"filling"`
	Waiting  int     `json:"waiting"`
	Led      int     `json:"led"`
	Share    float64 `json:"share"`
}

// Chain describes a range: the replicas from the ChainHead to the ChainTail, then those that are being filled or wait.
type Chain struct {
	Range int `json:"range"`
	// State is full, filling, under_replicated, halted or unassigned.
	State string `json:"state"`
	// Version counts the changes of the chain.
	Version uint32        `json:"version"`
	Members []ChainMember `json:"members"`
}

// ChainMember is a partition in a chain.
type ChainMember struct {
	Node string `json:"node"`
	// UUID is the partition's.
	UUID string `json:"uuid"`
	// State is serving, leaving, last copy, filling or waiting.
	State string `json:"state"`
	// Since is the epoch at which it became a member.
	Since uint64 `json:"since"`
	// Up: its node is up.
	Up bool `json:"up"`
}

// InitCluster requests that the cluster be made for which the node is configured.
type InitCluster struct {
	// Replicas is 1 to 5; 0: three, or as many as there are nodes, if that is less.
	Replicas int `json:"replicas"`
	// Ranges is a power of two; 0: what suits the configured nodes.
	Ranges int `json:"ranges"`
}

// ClusterMade is the answer to InitCluster: what was made. Replicas and Ranges are 0 if it was refused.
type ClusterMade struct {
	Answer
	Replicas int `json:"replicas"`
	Ranges   int `json:"ranges"`
}

// ChangeCluster requests a change of the settings of the cluster. Fields that are empty change nothing.
type ChangeCluster struct {
	// DryRun: nothing is changed, and the answer says whether the change would be refused.
	DryRun bool `json:"dryRun,omitempty"`
	// Replicas is 1 to 5.
	Replicas int `json:"replicas,omitempty"`
	// AcceptLoss are halted ranges whose data are given up, so that they are served again by others. AllLosses: all.
	AcceptLoss []int `json:"acceptLoss,omitempty"`
	AllLosses  bool  `json:"allLosses,omitempty"`
	// Lost are nodes that have ended for good, so that they need not be waited for when nobody else may make the map.
	Lost []string `json:"lost,omitempty"`
	// Forget are nodes that have left for good and are to be no members any more.
	Forget []string `json:"forget,omitempty"`
	// Drain is a node that is to have no ranges, Join one that is to have its share again.
	Drain string `json:"drain,omitempty"`
	Join  string `json:"join,omitempty"`
}

// ClusterChanged is the answer to ChangeCluster.
type ClusterChanged struct {
	Answer
	// AcceptLoss are the ranges whose data are given up.
	AcceptLoss []int `json:"acceptLoss,omitempty"`
}

// Cluster describes the cluster of the node.
func (c *Client) Cluster(ctx context.Context) (s Cluster, err error) {
	err = c.do(ctx, http.MethodGet, PathCluster, nil, &s)
	return s, err
}

// Chains lists the ranges of the cluster; only is the number of the one that is wanted, negative: all.
func (c *Client) Chains(ctx context.Context, only int) (l List[Chain], err error) {
	path := PathClusterChains
	if only >= 0 {
		path += "?" + url.Values{ParamRange: {strconv.Itoa(only)}}.Encode()
	}
	err = c.do(ctx, http.MethodGet, path, nil, &l)
	return l, err
}

// InitCluster makes the cluster of the node.
func (c *Client) InitCluster(ctx context.Context, what InitCluster) (a ClusterMade, err error) {
	err = c.do(ctx, http.MethodPost, PathClusterInit, what, &a)
	return a, err
}

// ChangeCluster changes the settings of the cluster.
func (c *Client) ChangeCluster(ctx context.Context, what ChangeCluster) (a ClusterChanged, err error) {
	err = c.do(ctx, http.MethodPost, PathClusterChange, what, &a)
	return a, err
}
