package daemon

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/member"
	"jbofd/internal/config"
)

// silentLeases is for how many leases nothing is heard of a manager until an operator is told so.
const silentLeases = 5

// ready returns what keeps the node from taking part in its cluster, nil if nothing does.
func (c *clusterMember) ready() error {
	m, s, err := c.state()
	switch {
	case err != nil:
		return err
	case s.Problem != nil:
		return c.explain(s.Problem)
	case s.Active != nil && m.Authority() >= member.Now():
		return nil
	}
	if since, err := m.EtcdFailing(); err != nil {
		return fmt.Errorf("the node may not serve its ranges: %w, for %v; without etcd the manager, %q, cannot prove "+
			"that it is the only one, or does not answer", c.explain(fmt.Errorf("%w: %w", cluster.ErrUnreachable, err)),
			time.Since(since).Round(time.Second), s.Manager)
	}
	if !c.knows(s.Manager) {
		return fmt.Errorf("the node may not serve its ranges: the manager is %q, which cluster.nodes of this node "+
			"does not have: add it, and jbofctl reload", s.Manager)
	}
	if s.Active == nil {
		return withRefusals(c.waiting(s, time.Duration(member.Now()-m.LastSign())), m.Refusals())
	}
	return withRefusals(fmt.Errorf("the node may not serve its ranges: the manager, %q, does not answer, or cannot "+
		"prove that it is the only one", s.Manager), m.Refusals())
}

// knows reports whether a manager is one of the nodes of the configuration, or none. This node talks to no other ones.
func (c *clusterMember) knows(manager string) bool {
	return manager == "" || slices.ContainsFunc(c.n.config().Cluster.Nodes, func(n config.ClusterNode) bool {
		return n.Name == manager
	})
}

// waiting says why no view admits the node, when the manager has given no sign for a time.
func (c *clusterMember) waiting(s *member.State, silent time.Duration) error {
	err := fmt.Errorf("the node waits for a view that admits it; the manager is %q", s.Manager)
	if own := c.n.config().Self().Address; s.Manager == c.self && !s.Manages && s.ManagerAddress != own {
		return fmt.Errorf("%w at %s: another node with the name of this one, which is at %s, or this one before it "+
			"was restarted with another address", err, s.ManagerAddress, own)
	}
	if silent < silentLeases*time.Duration(c.cfg.Lease) || s.Newest == nil {
		return err
	}
	var up []string
	for i, n := range s.Newest.Nodes {
		if s.Newest.Admitted[i] != 0 {
			up = append(up, n.Name)
		}
	}
	return fmt.Errorf("%w, of which nothing was heard for %v. The nodes that were up at last are %s: start one of "+
		"them, or, if all of them are lost for good, jbofctl cluster lost %s", err, silent.Round(time.Second),
		strings.Join(up, ", "), strings.Join(up, " "))
}

// withRefusals adds to an error which nodes refuse connections of this one, and why.
func withRefusals(err error, all map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		err = fmt.Errorf("%w; %s refuses it: %s", err, name, all[name])
	}
	return err
}

// explain adds to an error what an operator needs to end it.
func (c *clusterMember) explain(err error) error {
	if endpoints := strings.Join(c.etcd.Endpoints, ", "); errors.Is(err, cluster.ErrNoCluster) ||
		errors.Is(err, cluster.ErrUnreachable) && !strings.Contains(err.Error(), c.etcd.Endpoints[0]) {
		err = fmt.Errorf("%w; etcd is %s", err, endpoints)
	}
	if errors.Is(err, cluster.ErrForgotten) {
		return fmt.Errorf("%w; if it is to take part, jbofctl cluster join %s on another node", err, c.self)
	}
	if !errors.Is(err, cluster.ErrNoCluster) {
		return err
	}
	// A name or an endpoint that is wrong looks the same, and must not lead to a second cluster.
	err = fmt.Errorf("%w; cluster.name is %q", err, c.cfg.Name)
	if id := c.belongs(); id != "" {
		return fmt.Errorf("%w; this node belongs to the cluster %s: correct the name or the endpoints", err, id)
	}
	return fmt.Errorf("%w; if both are right, jbofctl cluster init makes the cluster", err)
}

// stale returns for how long the node has heard neither of etcd nor of the manager, so that the newest view that it has
// may be an old one; 0: it hears of one of them.
func (c *clusterMember) stale() time.Duration {
	m, _, _ := c.state()
	if m == nil || m.Authority() >= member.Now() {
		return 0
	}
	since, err := m.EtcdFailing()
	if err == nil {
		return 0
	}
	return time.Since(since)
}
