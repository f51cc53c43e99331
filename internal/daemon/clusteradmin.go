package daemon

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/member"
	"jbofd/internal/cluster/view"
	"jbofd/internal/config"
	"jbofd/internal/partition"
	"jbofd/internal/ssd/label"
	"jbofd/internal/telemetry"
	"jbofd/internal/uuid"
)

// errNoCluster refuses requests about a cluster that is not configured.
var errNoCluster = errors.New("this node has no section cluster in its configuration")

var errTryAgain = errors.New("try again in a moment")

// forgotAgain is the time between two looks whether nodes have left the map.
const forgotAgain = 20 * time.Millisecond

// etcdPatience is how long a request of the admin API waits for etcd.
const etcdPatience = 10 * time.Second

// clusterAPI adds what answers requests about the cluster.
func (n *Node) clusterAPI(mux *http.ServeMux, change func(string, func(*http.Request) (any, error))) {
	get := func(pattern string, answer func(*http.Request) (any, error)) {
		mux.HandleFunc("GET "+pattern, func(w http.ResponseWriter, r *http.Request) {
			a, err := any(nil), errNoCluster
			if n.cluster != nil {
				a, err = answer(r)
			}
			if err != nil {
				writeJSON(w, http.StatusConflict, admin.Answer{APIVersion: admin.Version, Error: err.Error()})
				return
			}
			writeJSON(w, http.StatusOK, a)
		})
	}
	get(admin.PathCluster, func(*http.Request) (any, error) { return n.cluster.describe(), nil })
	get(admin.PathClusterChains, func(r *http.Request) (any, error) {
		return n.cluster.chains(r.URL.Query().Get(admin.ParamRange))
	})
	change(admin.PathClusterInit, func(r *http.Request) (any, error) {
		var what admin.InitCluster
		if err := readJSON(r, &what); err != nil {
			return nil, err
		}
		err := n.InitCluster(r.Context(), &what)
		return admin.ClusterMade{Answer: admin.Answer{APIVersion: admin.Version}, Replicas: what.Replicas,
			Ranges: what.Ranges}, err
	})
	change(admin.PathClusterChange, func(r *http.Request) (any, error) {
		var what admin.ChangeCluster
		if err := readJSON(r, &what); err != nil {
			return nil, err
		}
		losses, err := n.ChangeCluster(r.Context(), what)
		return admin.ClusterChanged{Answer: admin.Answer{APIVersion: admin.Version}, AcceptLoss: losses}, err
	})
}

// InitCluster makes the cluster for which the node is configured. Where what has a 0, it puts what was made.
//
// Errors: what cannot be; member.ErrExists; cluster.ErrUnreachable.
func (n *Node) InitCluster(ctx context.Context, what *admin.InitCluster) error {
	c := n.cluster
	if c == nil {
		return errNoCluster
	}
	partitions := 0
	n.replicated(func(config.Namespace, uuid.UUID, *partition.Partition) { partitions++ })
	nodes := len(n.config().Cluster.Nodes)
	if what.Replicas == 0 {
		what.Replicas = min(3, nodes)
	}
	if what.Ranges == 0 {
		what.Ranges = defaultRanges(nodes * partitions)
	}
	if err := c.enough(what.Replicas, nodes); err != nil {
		return err
	}
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, etcdPatience)
	defer cancel()
	id := label.NewUUID()
	err := member.Create(ctx, c.etcd, cluster.Settings{Cluster: uuid.UUID(id), Replicas: what.Replicas,
		ValueBytes: uint32(c.longestValue())},
		binary.LittleEndian.Uint64(seed[:]), what.Ranges)
	if err != nil {
		return c.explain(err)
	}
	n.log.Info("the cluster was made", "cluster", c.cfg.Name, "uuid", id.String(), "replicas", what.Replicas, "ranges",
		what.Ranges)
	return nil
}

// defaultRanges is the number of ranges of a cluster of so many partitions: 32 or more for each, so that loads differ
// by little, also when there are four times as many.
func defaultRanges(partitions int) int {
	return min(max(1<<bits.Len(uint(32*max(partitions, 1)-1)), 64), view.MaxRanges)
}

// enough refuses more replicas than there are nodes.
func (c *clusterMember) enough(replicas, nodes int) error {
	if replicas < 1 || replicas > view.MaxReplicas {
		return fmt.Errorf("replicas are %d, must be 1 to %d", replicas, view.MaxReplicas)
	}
	if replicas > nodes {
		return fmt.Errorf("replicas are %d, must be at most %d, the number of nodes that may have ranges", replicas,
			nodes)
	}
	return nil
}

// errDryRun ends a change that is only looked at, before it is written.
var errDryRun = errors.New("dry run")

// ChangeCluster changes the settings of the cluster, and returns the ranges whose data are given up. The manager sees
// them at once.
//
// Errors: what cannot be; cluster.ErrNoCluster, cluster.ErrUnreachable.
func (n *Node) ChangeCluster(ctx context.Context, what admin.ChangeCluster) (losses []int, err error) {
	c := n.cluster
	if c == nil {
		return nil, errNoCluster
	}
	ctx, cancel := context.WithTimeout(ctx, etcdPatience)
	defer cancel()
	err = member.Change(ctx, c.etcd, func(r *cluster.Records) (err error) {
		if losses, err = c.change(r, what); err != nil || !what.DryRun {
			return err
		}
		return errDryRun
	})
	if errors.Is(err, errDryRun) {
		return losses, nil
	}
	if err == nil && len(what.Forget) > 0 {
		err = c.forgotten(ctx, what.Forget)
	}
	if err != nil {
		return nil, c.explain(err)
	}
	n.log.Info("the settings of the cluster were changed", "cluster", c.cfg.Name, "replicas", what.Replicas, "drain",
		what.Drain, "join", what.Join, "accept_loss", losses, "all_losses", what.AllLosses, "lost", what.Lost, "forget",
		what.Forget)
	return losses, nil
}

// forgotten waits until the manager has removed nodes from the map that are to be forgotten, and makes that final.
func (c *clusterMember) forgotten(ctx context.Context, names []string) error {
	tick := time.NewTicker(forgotAgain)
	defer tick.Stop()
	for {
		var done bool
		var members []string
		err := member.Change(ctx, c.etcd, func(r *cluster.Records) error {
			done, members = r.Forgot(names)
			return nil
		})
		switch {
		case err == nil && len(members) > 0:
			return fmt.Errorf("nodes that have come back meanwhile, and are members as before: %s",
				strings.Join(members, ", "))
		case err == nil && done:
			return nil
		case err != nil && ctx.Err() == nil:
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the map has %s still, as long as there is no manager that changes it; nothing of them "+
				"is admitted any more. Repeat the command when there is one", strings.Join(names, ", "))
		}
	}
}

// change changes the settings as is asked for, and returns the ranges whose data are given up.
func (c *clusterMember) change(r *cluster.Records, what admin.ChangeCluster) (losses []int, err error) {
	var names, in []string
	for _, node := range r.Map.Nodes {
		names = append(names, node.Name)
		if !slices.Contains(r.Settings.Out, node.Name) {
			in = append(in, node.Name)
		}
	}
	slices.Sort(names)
	if what.Drain != "" && !slices.Contains(names, what.Drain) {
		return nil, fmt.Errorf("node is %q, must be one of the view: %s", what.Drain, strings.Join(names, ", "))
	}
	if what.Replicas != 0 {
		if err := c.enough(what.Replicas, len(in)); err != nil {
			return nil, err
		}
		r.Settings.Replicas = what.Replicas
	}
	if what.Drain != "" && slices.Contains(in, what.Drain) {
		if len(in)-1 < r.Settings.Replicas {
			return nil, fmt.Errorf("without %s, nodes that may have ranges: %d, replicas: %d; reduce the replicas "+
				"first, or add a node", what.Drain, len(in)-1, r.Settings.Replicas)
		}
		r.Settings.Out = append(r.Settings.Out, what.Drain)
	}
	if losses, err = acceptLosses(r, what); err != nil {
		return nil, err
	}
	if err := loseNodes(r, what.Lost); err != nil {
		return nil, err
	}
	if err := r.Forget(what.Forget); err != nil {
		return nil, err
	}
	if what.Join != "" {
		return losses, r.Join(what.Join)
	}
	return losses, nil
}

// acceptLosses adds the ranges to the settings whose data are given up, and returns them.
func acceptLosses(r *cluster.Records, what admin.ChangeCluster) ([]int, error) {
	halted := func(n int) bool { return len(r.Map.Chains[n]) > 0 && r.Map.Chains[n].Halted() }
	accept := slices.Clone(what.AcceptLoss)
	for n := range r.Map.Chains {
		if what.AllLosses && halted(n) {
			accept = append(accept, n)
		}
	}
	switch {
	case len(accept) == 0 && what.AllLosses:
		return nil, errors.New("no range is halted: nothing is to be given up")
	case len(accept) == 0:
		return nil, nil
	}
	// Those of chains that have changed since say nothing any more.
	r.Settings.Losses = slices.DeleteFunc(r.Settings.Losses, func(l cluster.Loss) bool {
		return int(l.Range) >= len(r.Map.ChainEpochs) || r.Map.ChainEpochs[l.Range] != l.ChainEpoch
	})
	for _, n := range accept {
		if n < 0 || n >= len(r.Map.Chains) {
			return nil, fmt.Errorf("range is %d, must be 0 to %d", n, len(r.Map.Chains)-1)
		}
		if !halted(n) {
			return nil, fmt.Errorf("range %d is not halted: nothing of it is to be given up", n)
		}
		r.Settings.AcceptLoss(uint32(n), r.Map.ChainEpochs[n])
	}
	return accept, nil
}

// loseNodes adds the processes to the settings of which an operator says that they have ended for good. While one of
// those that the newest view admits may run, there is no need for it.
func loseNodes(r *cluster.Records, names []string) error {
	if len(names) == 0 {
		return nil
	}
	var lost []cluster.Incarnation
	var up []string
	for i, node := range r.Map.Nodes {
		if r.Map.Admitted[i] != 0 {
			up = append(up, node.Name)
			if slices.Contains(names, node.Name) {
				lost = append(lost, r.Map.Admitted[i])
			}
		}
	}
	slices.Sort(up)
	for _, name := range names {
		switch {
		case !slices.Contains(up, name):
			return fmt.Errorf("node is %q, must be one that the newest view counts as up: %s", name,
				strings.Join(up, ", "))
		case slices.Contains(r.Registered, name):
			return fmt.Errorf("node %q runs, or has ended a moment ago: stop it, and wait some seconds", name)
		}
	}
	missing := slices.DeleteFunc(up, func(name string) bool { return slices.Contains(names, name) })
	if len(missing) > 0 {
		return fmt.Errorf("nodes that the newest view counts as up, and that are not said to be lost: %s. Any of them "+
			"gives up the lost ones by itself when it is back; if they are lost, too, name all of them",
			strings.Join(missing, ", "))
	}
	r.Settings.Lost = lost // those of earlier views say nothing any more
	return nil
}

// rangeState names the state of a range that is to have so many replicas, one of telemetry.RangeStates. complete is how
// many members have all its data.
func rangeState(chain view.Chain, replicas int) (state string, complete int) {
	filling := false
	for _, m := range chain {
		switch m.State {
		case view.Serving, view.Leaving:
			complete++
		case view.Filling:
			filling = true
		}
	}
	switch {
	case len(chain) == 0:
		return "unassigned", 0
	case chain.Halted():
		return "halted", 0
	case filling:
		return "filling", complete
	case complete < replicas:
		return "under_replicated", complete
	}
	return "full", complete
}

// roleOf names the role of the i-th member of a chain of which so many are complete, one of telemetry.ReplicaRoles.
func roleOf(chain view.Chain, i, complete int) string {
	switch chain[i].State {
	case view.Filling:
		return "filling"
	case view.Waiting:
		return "waiting"
	case view.LastCopy:
		return "last_copy"
	}
	switch {
	case complete == 1:
		return "only"
	case i == 0:
		return "chain_head"
	case i == complete-1:
		return "chain_tail"
	}
	return "chain_middle"
}

// newestView returns the newest view of the cluster, and since when the node has had it; nil: none.
func (c *clusterMember) newestView() (*cluster.Map, time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.newest == nil {
		return nil, 0
	}
	return c.newest, time.Since(c.seenAt)
}

// stats returns the metrics of the cluster.
func (c *clusterMember) stats() telemetry.ClusterStats {
	s := telemetry.ClusterStats{Ranges: map[string]int{}, Roles: map[string]int{}}
	m, st, _ := c.state()
	if m == nil {
		return s
	}
	s.Manager, s.Dirty = st.Manages, c.host.dirty()
	s.KnownLosses, s.FoundLosses = c.host.losses()
	s.SilentPartitions, s.FailingPartitions = c.host.silent(), c.host.failing()
	d := c.host.dropped()
	s.LeftRanges, s.DroppedRanges, s.DroppedBytes = d.Left, d.Ranges, d.Bytes
	if st.Active != nil {
		s.ActiveEpoch = uint64(st.Active.Epoch)
		s.AuthoritySeconds = float64(m.Authority()-member.Now()) / 1e9
	}
	s.StaleSeconds = c.stale().Seconds()
	v, age := c.newestView()
	if v == nil {
		return s
	}
	s.Epoch, s.ViewAgeSeconds, s.Nodes = uint64(v.Epoch), age.Seconds(), len(v.Nodes)
	for _, admitted := range v.Admitted {
		if admitted != 0 {
			s.NodesUp++
		}
	}
	for i := range v.Partitions {
		if p := &v.Partitions[i]; p.Out && v.Nodes[p.Node].Name == c.self {
			s.OutPartitions++
		}
	}
	for _, chain := range v.Chains {
		state, complete := rangeState(chain, v.Replicas)
		s.Ranges[state]++
		if complete < v.Replicas {
			s.UnderReplicated++
		}
		for i, e := range chain {
			if v.Nodes[v.Partitions[e.Partition].Node].Name == c.self {
				s.Roles[roleOf(chain, i, complete)]++
			}
		}
	}
	return s
}

// describe answers the admin API.
func (c *clusterMember) describe() admin.Cluster {
	a := admin.Cluster{APIVersion: admin.Version, Name: c.cfg.Name, SubNQN: c.cfg.Subsystem, Node: c.self,
		RunsEtcd: c.server != nil, Nodes: []admin.ClusterNode{}, Partitions: []admin.ClusterPartition{}}
	if err := c.ready(); err != nil {
		a.Problem, a.NoCluster = err.Error(), errors.Is(err, cluster.ErrNoCluster)
	}
	var settings *cluster.Settings
	if m, s, _ := c.state(); m != nil {
		a.Manager, a.Ready, settings = s.Manager, m.Ready() && a.Problem == "", s.Settings
		if s.Active != nil {
			a.ActiveEpoch, a.AuthorityMS = uint64(s.Active.Epoch), max((m.Authority()-member.Now())/1e6, 0)
		}
	}
	for _, node := range c.n.config().Cluster.Nodes {
		a.Nodes = append(a.Nodes, admin.ClusterNode{Name: node.Name, Address: node.Address, Target: node.Target,
			HostNQN: cluster.HostNQN(c.cfg.Name, node.Name), Domain: node.Domain, State: "unknown"})
	}
	a.StaleMS = c.stale().Milliseconds()
	if v, age := c.newestView(); v != nil {
		a.UUID, a.Epoch, a.ViewMS, a.Replicas = v.Cluster.String(), uint64(v.Epoch), age.Milliseconds(), v.Replicas
		describeView(&a, v)
		c.describePlaces(&a)
		describeForgotten(&a, settings)
	}
	return a
}

// describePlaces says on which drives the partitions of this node are.
func (c *clusterMember) describePlaces(a *admin.Cluster) {
	c.n.replicated(func(nc config.Namespace, id uuid.UUID, _ *partition.Partition) {
		for i := range a.Partitions {
			if p := &a.Partitions[i]; p.UUID == id.String() {
				p.SSD, p.NSID = nc.SSD, nc.NSID
			}
		}
	})
}

// describeForgotten says which of the nodes have been forgotten, or are about to be.
func describeForgotten(a *admin.Cluster, s *cluster.Settings) {
	if s == nil {
		return
	}
	for i := range a.Nodes {
		e := &a.Nodes[i]
		for _, f := range s.Forgotten {
			switch {
			case f.Name != e.Name:
			case e.State == "new":
				e.State = "forgotten"
			case e.State == "away" && f.Epoch == 0:
				e.State = "forgetting"
			}
		}
	}
}

// describeView adds what a view says.
func describeView(a *admin.Cluster, v *cluster.Map) {
	for i := range a.Nodes {
		a.Nodes[i].State = "new"
	}
	nodes := make([]int, len(v.Nodes)) // places in a.Nodes
	for i, node := range v.Nodes {
		k := slices.IndexFunc(a.Nodes, func(e admin.ClusterNode) bool { return e.Name == node.Name })
		if k < 0 {
			k = len(a.Nodes)
			a.Nodes = append(a.Nodes, admin.ClusterNode{Name: node.Name})
		}
		nodes[i] = k
		e := &a.Nodes[k]
		e.Domain, e.Out, e.State = node.Domain, node.Out, "away"
		if v.Admitted[i] != 0 {
			e.State = "up"
		}
	}
	parts := make([]int, len(v.Partitions))
	for i, p := range v.Partitions {
		if p.ID.IsZero() {
			continue
		}
		parts[i] = len(a.Partitions)
		a.Nodes[nodes[p.Node]].Partitions++
		a.Partitions = append(a.Partitions, admin.ClusterPartition{UUID: p.ID.String(), Node: v.Nodes[p.Node].Name,
			Weight: p.Weight, Out: p.Out})
	}
	a.Ranges.Total = len(v.Chains)
	count, all := map[string]int{}, 0
	for _, chain := range v.Chains {
		state, _ := rangeState(chain, v.Replicas)
		count[state]++
		if chain.Halted() && slices.ContainsFunc(chain, func(m view.Member) bool {
			return m.State == view.LastCopy && isUp(v, m.Partition)
		}) {
			a.Ranges.HaltedUp++
		}
		for i, m := range chain {
			p, node := &a.Partitions[parts[m.Partition]], &a.Nodes[nodes[v.Partitions[m.Partition].Node]]
			switch m.State {
			case view.Serving, view.Leaving:
				p.Replicas++
				node.Replicas++
				all++
				if i == 0 {
					p.Led++
					node.Led++
				}
			case view.Filling:
				p.Filling++
				node.Filling++
			case view.Waiting:
				p.Waiting++
				node.Waiting++
			}
		}
	}
	for i := range a.Partitions {
		a.Partitions[i].Share = float64(a.Partitions[i].Replicas) / float64(max(all, 1))
	}
	a.Ranges.Full, a.Ranges.Filling, a.Ranges.UnderReplicated = count["full"], count["filling"],
		count["under_replicated"]
	a.Ranges.Halted, a.Ranges.Unassigned = count["halted"], count["unassigned"]
}

// isUp reports whether a view has the node of a partition take part.
func isUp(v *cluster.Map, p view.PartitionID) bool { return v.Admitted[v.Partitions[p].Node] != 0 }

// chains answers the admin API; only is the number of the range that is asked for, empty: all.
func (c *clusterMember) chains(only string) (any, error) {
	l := admin.List[admin.Chain]{APIVersion: admin.Version, Items: []admin.Chain{}}
	v, _ := c.newestView()
	if v == nil {
		return nil, fmt.Errorf("the node has seen no view of the cluster yet: %w", cmp.Or(c.ready(), errTryAgain))
	}
	first, last := 0, len(v.Chains)
	if only != "" {
		r, err := strconv.Atoi(only)
		if err != nil || r < 0 || r >= last {
			return nil, fmt.Errorf("range is %q, must be 0 to %d", only, last-1)
		}
		first, last = r, r+1
	}
	for r := first; r < last; r++ {
		chain := admin.Chain{Range: r, Version: v.ChainEpochs[r], Members: []admin.ChainMember{}}
		chain.State, _ = rangeState(v.Chains[r], v.Replicas)
		for _, m := range v.Chains[r] {
			p := v.Partitions[m.Partition]
			chain.Members = append(chain.Members, admin.ChainMember{Node: v.Nodes[p.Node].Name, UUID: p.ID.String(),
				State: m.State.String(), Since: uint64(m.Since), Up: isUp(v, m.Partition)})
		}
		l.Items = append(l.Items, chain)
	}
	return l, nil
}
