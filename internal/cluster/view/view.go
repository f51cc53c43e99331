// Package view is the map of a cluster: which partitions hold which range of the hash space, at one epoch. It is pure:
// the manager computes the next view from the last one and from what the nodes report, and etcd keeps it as one record
// that is changed by compare-and-swap.
//
//	position of a key     0        1/n       2/n                        1
//	                      ├─────────┼─────────┼─────────┼── ··· ──┼─────┤     n ranges of equal length, the ring
//	                           │
//	                           └─> Chain: ChainHead ──> … ──> ChainTail ──> Filling      Waiting
//	                                      Partition of Node                                     (place.go, chain.go)
//
// The position of a key is its bit-reversed hash, as in package kvstore, so that a range is a contiguous part of what a
// partition lists, copies and digests.
package view

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"jbofd/internal/uuid"
)

// Epoch is the number of a view. It grows by one with each change of the map, and every message of the membership
// carries it. Messages between the replicas of a chain carry View.ChainEpochs of their range instead.
type Epoch uint64

// PartitionID is the index of a partition in View.Partitions. It stays the same as long as the partition is a member of
// the cluster, and is used again afterwards.
type PartitionID uint16

// Limits.
const (
	// MaxReplicas is the largest number of replicas.
	MaxReplicas = 5
	// MinRanges and MaxRanges bound the number of ranges, a power of two. There should be eight for each partition or
	// more.
	MinRanges, MaxRanges = 16, 1 << 16
	// MaxNodes and MaxPartitions bound the members.
	MaxNodes, MaxPartitions = 4096, 1 << 16
	// MaxName is the length of the longest name of a node or a failure domain.
	MaxName = 223
)

// Node is a node of the cluster.
type Node struct {
	// Name is unique in the cluster.
	Name string
	// Domain is the failure domain: nodes of one domain may fail together. Empty: the node is a domain of its own.
	Domain string
	// Out: the node is to have no ranges, because it is drained or has been away for too long.
	Out bool
}

// Partition is a key-value store on a slice of a drive of a node.
type Partition struct {
	// ID identifies the partition for good. A zero ID is an entry that is not used.
	ID uuid.UUID
	// Node is the index of the partition's node in View.Nodes.
	Node uint16
	// Weight is how much the partition is to hold, in proportion to the others: its capacity in GiB.
	Weight uint32
	// Out: the partition is to have no ranges.
	Out bool
}

// View is the map of a cluster at one epoch.
type View struct {
	// Cluster identifies the cluster.
	Cluster uuid.UUID
	Epoch   Epoch
	// Replicas is how many replicas a range is to have, 1 to MaxReplicas.
	Replicas int
	// HashSeed is that of all partitions, so that a key has the same position everywhere.
	HashSeed   uint64
	Nodes      []Node
	Partitions []Partition
	// Chains has the chain of each range. Their number is a power of two.
	Chains []Chain
	// ChainEpochs counts the changes of each chain. It is the epoch of the chain, which the messages between its
	// replicas carry, so that a change of one chain does not concern the others.
	ChainEpochs []uint32
}

// ErrInvalid is wrapped by the errors of Check and Decode.
var ErrInvalid = errors.New("cluster view")

// RangeOf returns the number of the range that a position belongs to.
//
// hot: 0 allocs
func (v *View) RangeOf(position uint64) int {
	return int(position >> (64 - v.rangeBits()))
}

// Range returns the first and the last position of a range.
func (v *View) Range(r int) (first, last uint64) {
	shift := 64 - v.rangeBits()
	first = uint64(r) << shift
	return first, first + (1<<shift - 1)
}

func (v *View) rangeBits() int { return bits.TrailingZeros(uint(len(v.Chains))) }

// Reports is what the manager knows of the nodes when it computes a view.
type Reports interface {
	// Alive reports whether a node takes part: the next view admits its process. One that is silent is not alive.
	Alive(node uint16) bool
	// Range returns what a node that is alive has reported of a range in one of its partitions.
	Range(p PartitionID, r int) Report
	// Usable reports whether a partition can be used at all. One of a node that is not alive counts as it did before.
	Usable(p PartitionID) bool
	// Failing reports whether the drive of a partition does not work at present. It is not filled with other ranges.
	Failing(p PartitionID) bool
}

// Next returns the view that follows v, and whether it differs from v. Its epoch is then one more.
func (v *View) Next(reports Reports) (*View, bool) {
	next := *v
	next.Epoch++
	next.Chains, next.ChainEpochs = make([]Chain, len(v.Chains)), slices.Clone(v.ChainEpochs)
	wanted := v.wanted(reports)
	changed := false
	for r, c := range v.Chains {
		report := func(p PartitionID) Report {
			switch {
			case !reports.Alive(v.Partitions[p].Node):
				return Report{}
			case !reports.Usable(p), reports.Failing(p) && !c.uses(p):
				return Report{Local: Damaged}
			}
			return reports.Range(p, r)
		}
		next.Chains[r] = Next(c, wanted[r], report, next.Epoch)
		if len(c) > 1 && slices.Equal(c, next.Chains[r]) {
			next.Chains[r] = HandOver(c, report(c[0].Partition).Yield, v.ChainEpochs[r])
		}
		if !slices.Equal(c, next.Chains[r]) {
			next.ChainEpochs[r]++
			changed = true
		}
	}
	if !changed {
		return v, false
	}
	next.spreadFresh(v)
	return &next, true
}

// spreadFresh makes those the ChainHeads of new chains that are to be (Leaders). All members of a new chain are empty.
func (v *View) spreadFresh(before *View) {
	var leaders []PartitionID
	for r, c := range v.Chains {
		if len(before.Chains[r]) > 0 || !c.Full() {
			continue
		}
		if leaders == nil {
			leaders = v.Leaders()
		}
		at := c.find(leaders[r])
		c[0], c[at] = c[at], c[0]
	}
}

// AcceptLoss gives up the data of a halted range in v, which is about to be the next view and has Chains and
// ChainEpochs of its own: see the function of that name. Whoever has the most objects comes first, also if it has left
// the chain. Of those that have as many, members come first, because they may have some of the data. It reports whether
// it has.
func (v *View) AcceptLoss(r int, reports Reports) bool {
	var candidates []PartitionID
	for _, m := range v.Chains[r] {
		candidates = append(candidates, m.Partition)
	}
	for i := range v.Partitions {
		// Begin with another partition for each range, so that no single one gets all of them.
		candidates = append(candidates, PartitionID((i+r)%len(v.Partitions)))
	}
	report := func(p PartitionID) Report {
		e := &v.Partitions[p]
		if e.ID.IsZero() || e.Out || e.Weight == 0 || v.Nodes[e.Node].Out || !reports.Alive(e.Node) ||
			!reports.Usable(p) || reports.Failing(p) || reports.Range(p, r).Local == Damaged {
			return Report{}
		}
		return Report{Local: Silent}
	}
	slices.SortStableFunc(candidates, func(p, q PartitionID) int {
		return cmp.Compare(reports.Range(q, r).Objects, reports.Range(p, r).Objects)
	})
	next := AcceptLoss(v.Chains[r], candidates, report, v.Epoch+1)
	if slices.Equal(next, v.Chains[r]) {
		return false
	}
	v.Chains[r] = next
	v.ChainEpochs[r]++
	return true
}

// wanted returns which partitions each range is to have.
func (v *View) wanted(reports Reports) [][]PartitionID {
	usable := v.mayHaveRanges()
	for i := range v.Partitions {
		usable[i] = usable[i] && (!reports.Alive(v.Partitions[i].Node) || reports.Usable(PartitionID(i)))
	}
	current, serving := make([][]PartitionID, len(v.Chains)), make([]int, len(v.Chains))
	members := make([]PartitionID, 0, len(v.Chains)*(v.Replicas+1))
	for r, c := range v.Chains {
		begin := len(members)
		for _, m := range c {
			if m.State != Leaving {
				members = append(members, m.Partition)
			}
			if m.State == Serving {
				serving[r]++
			}
		}
		current[r] = members[begin:len(members):len(members)]
	}
	return place(v.Nodes, v.Partitions, usable, v.Replicas, current, serving)
}

// mayHaveRanges returns which partitions may be given ranges.
func (v *View) mayHaveRanges() []bool {
	may := make([]bool, len(v.Partitions))
	for i := range v.Partitions {
		p := &v.Partitions[i]
		may[i] = !p.ID.IsZero() && !p.Out && p.Weight > 0 && !v.Nodes[p.Node].Out
	}
	return may
}

// CanSpare reports whether ranges can have as many replicas without a partition as with it, in as many failure domains,
// on partitions that do not fail.
func (v *View) CanSpare(p PartitionID, reports Reports) bool {
	usable := v.mayHaveRanges()
	for i := range usable {
		usable[i] = usable[i] && (PartitionID(i) == p || !reports.Failing(PartitionID(i)))
	}
	nodes, spread := spreadOver(v, usable)
	usable[p] = false
	without, spreadWithout := spreadOver(v, usable)
	return (without >= v.Replicas || without == nodes) && spreadWithout == spread
}

// spreadOver returns how many nodes have usable partitions, and whether each replica can be in a failure domain of its
// own.
func spreadOver(v *View, usable []bool) (nodes int, spread bool) {
	p := &placement{nodes: v.Nodes, parts: v.Partitions, usable: usable, replicas: v.Replicas}
	p.numberDomains()
	used := make([]bool, len(v.Nodes))
	for i, yes := range usable {
		if n := v.Partitions[i].Node; yes && !used[n] {
			used[n] = true
			nodes++
		}
	}
	return nodes, p.spread
}

// Check verifies that the view can be used.
//
// Errors: ErrInvalid naming the field, the value and what is allowed.
func (v *View) Check() error {
	n := len(v.Chains)
	for _, f := range []struct {
		ok    bool
		field string
		got   any
		want  string
	}{
		{!v.Cluster.IsZero(), "cluster", v.Cluster, "a UUID that is not zero"},
		{v.Epoch > 0, "epoch", v.Epoch, "at least 1"},
		{v.Replicas >= 1 && v.Replicas <= MaxReplicas, "replicas", v.Replicas, "1 to 5"},
		{n >= MinRanges && n <= MaxRanges && n&(n-1) == 0, "number of ranges", n, "a power of two from 16 to 65536"},
		{len(v.ChainEpochs) == n, "number of chains' epochs", len(v.ChainEpochs), fmt.Sprint(n)},
		{len(v.Nodes) <= MaxNodes, "number of nodes", len(v.Nodes), "at most 4096"},
		{len(v.Partitions) <= MaxPartitions, "number of partitions", len(v.Partitions), "at most 65536"},
	} {
		if !f.ok {
			return fmt.Errorf("%w: %s is %v, want %s", ErrInvalid, f.field, f.got, f.want)
		}
	}
	if err := v.checkMembers(); err != nil {
		return err
	}
	for r, c := range v.Chains {
		if err := v.checkChain(c); err != nil {
			return fmt.Errorf("%w: range %d: %w", ErrInvalid, r, err)
		}
	}
	return nil
}

func (v *View) checkMembers() error {
	names := make(map[string]bool, len(v.Nodes))
	for i := range v.Nodes {
		n := &v.Nodes[i]
		switch {
		case n.Name == "" || len(n.Name) > MaxName:
			return fmt.Errorf("%w: name of node %d is %q, want 1 to 223 bytes", ErrInvalid, i, n.Name)
		case len(n.Domain) > MaxName:
			return fmt.Errorf("%w: domain of node %s has %d bytes, want at most 223", ErrInvalid, n.Name, len(n.Domain))
		case names[n.Name]:
			return fmt.Errorf("%w: two nodes have the name %s", ErrInvalid, n.Name)
		}
		names[n.Name] = true
	}
	ids := make(map[uuid.UUID]bool, len(v.Partitions))
	for i := range v.Partitions {
		p := &v.Partitions[i]
		switch {
		case p.ID.IsZero():
			continue
		case int(p.Node) >= len(v.Nodes):
			return fmt.Errorf("%w: partition %s: node is %d, want less than %d", ErrInvalid, p.ID, p.Node, len(v.Nodes))
		case ids[p.ID]:
			return fmt.Errorf("%w: partition %s occurs twice", ErrInvalid, p.ID)
		}
		ids[p.ID] = true
	}
	return nil
}

func (v *View) checkChain(c Chain) error {
	count := [numStates]int{}
	for i, m := range c {
		switch {
		case m.State >= numStates:
			return fmt.Errorf("state of member %d is %d, want less than %d", i, m.State, numStates)
		case int(m.Partition) >= len(v.Partitions) || v.Partitions[m.Partition].ID.IsZero():
			return fmt.Errorf("member %d is partition %d, which does not exist", i, m.Partition)
		case c.find(m.Partition) < i:
			return fmt.Errorf("partition %d is a member twice", m.Partition)
		case m.Since > v.Epoch:
			return fmt.Errorf("member %d is one since epoch %d, want at most %d", i, m.Since, v.Epoch)
		case i > 0 && m.State < c[i-1].State && (m.State > Leaving || c[i-1].State > Leaving):
			return fmt.Errorf("member %d is %s behind one that is %s", i, m.State, c[i-1].State)
		}
		count[m.State]++
	}
	switch {
	case count[Filling] > 1:
		return fmt.Errorf("%d members are filling, want at most 1", count[Filling])
	case count[LastCopy] > 0 && count[Serving]+count[Leaving]+count[Filling] > 0:
		return errors.New("a last copy beside members that serve or are filling")
	case len(c) > 0 && count[Serving]+count[Leaving]+count[LastCopy] == 0:
		return errors.New("no member holds the data")
	}
	return nil
}
