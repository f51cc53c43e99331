package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"jbofd/internal/cluster/view"
)

// A node that has left stays in the map until an operator has it forgotten, in two steps:
//
//  1. The settings name the node, without an epoch. The manager answers no process of it that is not admitted, and
//     removes it from the next view, if it is a member of no chain.
//  2. When the view lacks the node, the settings get the epoch of that view. A process that has seen an earlier view is
//     of the node that was forgotten, and is refused for good. One that has seen none, because its state directory is
//     new, is a new node of that name.
//
// Without the first step the node could be admitted between the look at the view and the change of it; without the
// second one the name could not be used again. If the second is missing, the command is repeated.
//
// The epoch is no matter of safety: whatever a partition had counts for nothing when it becomes a member again, because
// only reports since then do (view.Member.Since). It keeps a machine that somebody has switched on again by mistake
// from taking a share of the ranges.

// Forgotten is a node that is no member any more.
type Forgotten struct {
	Name string
	// Epoch is that of a view without the node, 0 as long as there may be none.
	Epoch view.Epoch
}

// ErrForgotten: the node was removed from the map by an operator. It ends when an operator lets it join again, and does
// not concern a node of the same name with another state directory.
var ErrForgotten = errors.New("the cluster has forgotten this node")

// forgets reports whether a process of a node that has seen a view of this epoch, 0: none, is one that was forgotten.
func (s *Settings) forgets(name string, seen view.Epoch) bool {
	if s == nil {
		return false
	}
	return slices.ContainsFunc(s.Forgotten, func(f Forgotten) bool {
		return f.Name == name && (f.Epoch == 0 || seen > 0 && seen < f.Epoch)
	})
}

// forgotten returns why a process of this node may not take part under these settings, nil if it may.
func (n *Node) forgotten(s *Settings, m *Map) error {
	seen := n.cfg.Seen
	if n.newest != nil {
		seen = max(seen, n.newest.Epoch)
	}
	if m != nil && m.admits(n.cfg.Incarnation) || !s.forgets(n.cfg.Name, seen) {
		return nil
	}
	return fmt.Errorf("%w: %s, which has seen epoch %d", ErrForgotten, n.cfg.Name, seen)
}

// forgetMembers removes from m, the next view, the nodes that are to be forgotten, and partitions that their nodes do
// not have any more. It reports whether there were any.
func (n *Node) forgetMembers(m *Map) (differs bool) {
	for _, f := range n.etcd.settings.Forgotten {
		i := slices.IndexFunc(m.Nodes, func(e view.Node) bool { return e.Name == f.Name })
		if f.Epoch != 0 || i < 0 || m.Admitted[i] != 0 || n.newest.Admitted[i] != 0 || !m.Forget(i) {
			continue
		}
		m.Admitted = slices.Delete(m.Admitted, i, i+1)
		delete(n.lead.goneNS, f.Name)
		return true // another one has its turn in the view after this one, which has other indices
	}
	return m.ForgetPartitions(func(p *view.Partition) bool {
		// What a node that is away has is not known.
		process := m.Admitted[p.Node]
		reg := n.etcd.nodes[m.Nodes[p.Node].Name]
		return process != 0 && int(p.Node) < len(n.newest.Admitted) && n.newest.Admitted[p.Node] == process &&
			reg != nil && reg.incarnation == process &&
			!slices.ContainsFunc(reg.partitions, func(own Partition) bool { return own.ID == p.ID })
	})
}

// Forget sets in the settings that nodes are to be forgotten.
//
// Errors: a node that may come back, or that is needed; nothing is set then.
func (r *Records) Forget(names []string) error {
	for _, name := range names {
		i := slices.IndexFunc(r.Map.Nodes, func(e view.Node) bool { return e.Name == name })
		switch {
		case i < 0 && r.forgotten(name) != nil:
			continue
		case i < 0:
			return fmt.Errorf("node is %q, must be one of the view: %s", name, strings.Join(nodeNames(r.Map), ", "))
		case r.Map.Admitted[i] != 0:
			return fmt.Errorf("node %s is up: drain it, stop it, and wait until the cluster counts it as away", name)
		case slices.Contains(r.Registered, name):
			return fmt.Errorf("node %s runs, or has ended a moment ago: stop it, and wait some seconds", name)
		}
		if n := r.Map.Ranges(i); n > 0 {
			return fmt.Errorf("node %s is a member of %d ranges, and may have the only copy: drain it first, and give "+
				"up what is halted for want of it", name, n)
		}
	}
	for _, name := range names {
		if f := r.forgotten(name); f == nil {
			r.Settings.Forgotten = append(r.Settings.Forgotten, Forgotten{Name: name})
		} else if slices.Contains(nodeNames(r.Map), name) {
			f.Epoch = 0 // it had become a member again
		}
	}
	return nil
}

// Forgot is the second step, when the view lacks the nodes. It reports whether it does. Nodes that are members have
// become so again just before the first step, which is taken back then: they are not forgotten.
func (r *Records) Forgot(names []string) (done bool, members []string) {
	done = true
	for _, name := range names {
		f := r.forgotten(name)
		if f == nil || f.Epoch != 0 {
			continue
		}
		i := slices.IndexFunc(r.Map.Nodes, func(e view.Node) bool { return e.Name == name })
		switch {
		case i < 0:
			f.Epoch = r.Map.Epoch
			r.Settings.Out = slices.DeleteFunc(r.Settings.Out, func(out string) bool { return out == name })
		case r.Map.Admitted[i] != 0 || r.Map.Ranges(i) > 0:
			r.Settings.Forgotten = slices.DeleteFunc(r.Settings.Forgotten,
				func(f Forgotten) bool { return f.Name == name })
			members = append(members, name)
		default:
			done = false
		}
	}
	return done, members
}

// Join sets in the settings that a node is to have its share of the ranges: one that is a member, or that was forgotten
// and may become one.
//
// Errors: another node.
func (r *Records) Join(name string) error {
	if r.forgotten(name) == nil && !slices.Contains(nodeNames(r.Map), name) {
		return fmt.Errorf("node is %q, must be one that was forgotten, or one of the view: %s", name,
			strings.Join(nodeNames(r.Map), ", "))
	}
	r.Settings.Forgotten = slices.DeleteFunc(r.Settings.Forgotten, func(f Forgotten) bool { return f.Name == name })
	r.Settings.Out = slices.DeleteFunc(r.Settings.Out, func(out string) bool { return out == name })
	return nil
}

// forgotten returns the entry of a node, nil: there is none.
func (r *Records) forgotten(name string) *Forgotten {
	for i := range r.Settings.Forgotten {
		if f := &r.Settings.Forgotten[i]; f.Name == name {
			return f
		}
	}
	return nil
}

// nodeNames returns the names of the nodes of a view, in their order.
func nodeNames(m *Map) (names []string) {
	for i := range m.Nodes {
		names = append(names, m.Nodes[i].Name)
	}
	slices.Sort(names)
	return names
}
