package view

import (
	"slices"

	"jbofd/internal/uuid"
)

// Ranges returns in how many chains a node has a member, in whatever state.
func (v *View) Ranges(node int) (n int) {
	for _, c := range v.Chains {
		if slices.ContainsFunc(c, func(m Member) bool { return int(v.Partitions[m.Partition].Node) == node }) {
			n++
		}
	}
	return n
}

// Forget removes a node with its partitions from v, which is about to be the next view and has Nodes and Partitions of
// its own. Nodes behind it have an index less then, and what the partitions were in Partitions are entries that are not
// used. A node that is a member of a chain stays, whatever it is there: it may be the only one that has the data. It
// reports whether the node is removed.
func (v *View) Forget(node int) bool {
	if v.Ranges(node) > 0 {
		return false
	}
	for i := range v.Partitions {
		p := &v.Partitions[i]
		switch {
		case int(p.Node) == node:
			*p = Partition{}
		case int(p.Node) > node:
			p.Node--
		}
	}
	v.Nodes = slices.Delete(v.Nodes, node, node+1)
	return true
}

// ForgetPartitions removes those partitions from v that gone names and that are members of no chain. v is about to be
// the next view, and has Partitions of its own. It reports whether there were any.
func (v *View) ForgetPartitions(gone func(p *Partition) bool) (changed bool) {
	var left map[PartitionID]bool
	for i := range v.Partitions {
		if p := &v.Partitions[i]; !p.ID.IsZero() && gone(p) {
			if left == nil {
				left = map[PartitionID]bool{}
			}
			left[PartitionID(i)] = true
		}
	}
	if left == nil {
		return false
	}
	for _, c := range v.Chains {
		for _, m := range c {
			delete(left, m.Partition)
		}
	}
	for id := range left {
		v.Partitions[id] = Partition{}
	}
	return len(left) > 0
}

// Add adds a partition of a node to v, which is about to be the next view and has Partitions of its own, or sets its
// weight. It takes an entry that is not used, if there is one: the partition that had it is a member of no chain in the
// view before, so that no report of it counts for a membership of this one. A partition that belongs to another node
// stays there, and beyond MaxPartitions none is added.
func (v *View) Add(id uuid.UUID, node uint16, weight uint32) {
	unused := -1
	for i := range v.Partitions {
		p := &v.Partitions[i]
		switch {
		case p.ID == id && p.Node == node:
			p.Weight = weight
			return
		case p.ID == id:
			return
		case p.ID.IsZero() && unused < 0:
			unused = i
		}
	}
	added := Partition{ID: id, Node: node, Weight: weight}
	switch {
	case unused >= 0:
		v.Partitions[unused] = added
	case len(v.Partitions) < MaxPartitions:
		v.Partitions = append(v.Partitions, added)
	}
}
