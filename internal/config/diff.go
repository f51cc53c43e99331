package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
)

// SubsystemNamespace is a namespace and the subsystem it belongs to.
type SubsystemNamespace struct {
	NQN       string
	Namespace Namespace
}

// Changes are what a running daemon has to do to get from one configuration to
// another. Everything is given as the new configuration has it, except what was
// removed.
type Changes struct {
	// LogLevel is the new level, or "" if it stays.
	LogLevel string
	// Referrals: the referrals changed.
	Referrals bool
	// TenantsAdded and TenantsChanged, with other hosts, weight or limits, are as the new
	// configuration has them.
	TenantsAdded, TenantsRemoved, TenantsChanged []Tenant
	// SubsystemsAdded come with their namespaces, which are not listed below.
	SubsystemsAdded []Subsystem
	// SubsystemsRemoved go with theirs.
	SubsystemsRemoved []Subsystem
	// HostsChanged are the subsystems with other hosts or allow_any_host.
	HostsChanged []Subsystem
	// NamespacesAdded, NamespacesRemoved: of subsystems that stay.
	NamespacesAdded, NamespacesRemoved []SubsystemNamespace
	// NamespacesGrown are those that became larger, NamespacesShrunk those that became smaller, all of keys and values.
	NamespacesGrown, NamespacesShrunk []SubsystemNamespace
	// NamespaceHostsChanged are those that other hosts may see.
	NamespaceHostsChanged []SubsystemNamespace
	// NodesAdded, NodesRemoved and NodesChanged are other nodes of the cluster.
	NodesAdded, NodesRemoved, NodesChanged []ClusterNode
}

// Empty reports that nothing changes.
func (c Changes) Empty() bool { return reflect.ValueOf(c).IsZero() }

// Change is one of the changes.
type Change struct {
	// What happens: "namespace added", "log level".
	What string
	// Name is that of the subsystem or tenant, or the new value; empty if there is only one of the kind.
	Name string
	// NSID and Size are those of a namespace, as it will be; 0 for others.
	NSID uint32
	Size Bytes
}

// String writes the change as "namespace added: NQN nsid 3 (1GiB)".
func (c Change) String() string {
	s := c.What
	if c.Name != "" {
		s += ": " + c.Name
	}
	if c.NSID != 0 {
		s += fmt.Sprintf(" nsid %d (%s)", c.NSID, c.Size)
	}
	return s
}

// List returns the changes one by one.
func (c Changes) List() (all []Change) {
	subsystems := func(what string, list []Subsystem) {
		for _, s := range list {
			all = append(all, Change{What: what, Name: s.NQN})
		}
	}
	namespaces := func(what string, list []SubsystemNamespace) {
		for _, n := range list {
			all = append(all, Change{What: what, Name: n.NQN, NSID: n.Namespace.NSID, Size: n.Namespace.Size})
		}
	}
	tenants := func(what string, list []Tenant) {
		for _, t := range list {
			all = append(all, Change{What: what, Name: t.Name})
		}
	}
	nodes := func(what string, list []ClusterNode) {
		for _, n := range list {
			all = append(all, Change{What: what, Name: n.Name})
		}
	}
	if c.LogLevel != "" {
		all = append(all, Change{What: "log level", Name: c.LogLevel})
	}
	if c.Referrals {
		all = append(all, Change{What: "referrals changed"})
	}
	subsystems("subsystem added", c.SubsystemsAdded)
	subsystems("subsystem removed", c.SubsystemsRemoved)
	subsystems("subsystem hosts changed", c.HostsChanged)
	namespaces("namespace added", c.NamespacesAdded)
	namespaces("namespace removed", c.NamespacesRemoved)
	namespaces("namespace grown", c.NamespacesGrown)
	namespaces("namespace shrunk", c.NamespacesShrunk)
	namespaces("namespace hosts changed", c.NamespaceHostsChanged)
	tenants("tenant added", c.TenantsAdded)
	tenants("tenant removed", c.TenantsRemoved)
	tenants("tenant changed", c.TenantsChanged)
	nodes("node of the cluster added", c.NodesAdded)
	nodes("node of the cluster removed", c.NodesRemoved)
	nodes("node of the cluster changed", c.NodesChanged)
	return all
}

// String says what changes, in a line for the log.
func (c Changes) String() string {
	var parts []string
	for _, x := range c.List() {
		parts = append(parts, x.String())
	}
	if len(parts) == 0 {
		return "no change"
	}
	return strings.Join(parts, "; ")
}

// Diff returns what leads from a running configuration to a new one.
//
// Errors: Errors, with every field whose change a running daemon cannot follow;
// nothing is to be changed then.
func Diff(from, to *Config) (Changes, error) {
	d := differ{to: to}
	d.requireEqual("", reflect.ValueOf(from).Elem(), reflect.ValueOf(to).Elem(), "needs a restart")
	if from.Log.Level != to.Log.Level {
		d.LogLevel = to.Log.Level
	}
	d.Referrals = !slices.Equal(from.Discovery.Referrals, to.Discovery.Referrals)
	d.subsystems(from.Subsystems, to.Subsystems)
	d.tenants(from.Tenants, to.Tenants)
	if from.Cluster != nil && to.Cluster != nil {
		d.nodes(from, to)
	}
	if len(d.problems) > 0 {
		return Changes{}, d.problems.sorted()
	}
	return d.Changes, nil
}

type differ struct {
	Changes
	to       *Config
	problems Errors
}

func (d *differ) problem(path, format string, args ...any) {
	d.problems = append(d.problems, d.to.problem(path, fmt.Sprintf(format, args...)))
}

// requireEqual complains about every difference in a field that cannot change live.
func (d *differ) requireEqual(path string, a, b reflect.Value, needs string) {
	switch a.Kind() {
	case reflect.Struct:
		for _, f := range fieldsOf(a.Type()) {
			// Subsystems are compared by name, not by place.
			if f.live || path == "" && f.key == "subsystems" {
				continue
			}
			d.requireEqual(join(path, f.key), a.Field(f.index), b.Field(f.index), needs)
		}
		return
	case reflect.Slice:
		if a.Len() == b.Len() {
			for i := range a.Len() {
				d.requireEqual(index(path, i), a.Index(i), b.Index(i), needs)
			}
			return
		}
		d.problem(path, "%d became %d, which %s", a.Len(), b.Len(), needs)
		return
	case reflect.Pointer:
		if !a.IsNil() && !b.IsNil() {
			d.requireEqual(path, a.Elem(), b.Elem(), needs)
			return
		}
	}
	if !reflect.DeepEqual(a.Interface(), b.Interface()) {
		d.problem(path, "%s became %s, which %s", show(a), show(b), needs)
	}
}

func show(v reflect.Value) string {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return "absent"
		}
		return "present"
	}
	switch x := v.Interface().(type) {
	case string:
		return fmt.Sprintf("%q", x)
	case time.Duration:
		return formatDuration(x)
	default:
		return fmt.Sprint(x)
	}
}

func (d *differ) subsystems(from, to []Subsystem) {
	for _, a := range from {
		if !slices.ContainsFunc(to, func(b Subsystem) bool { return b.NQN == a.NQN }) {
			if d.to.Cluster != nil && a.NQN == d.to.Cluster.Subsystem {
				d.problem("cluster.subsystem", "%q is removed, which needs a restart", a.NQN)
			}
			d.SubsystemsRemoved = append(d.SubsystemsRemoved, a)
		}
	}
	for i, b := range to {
		path := index("subsystems", i)
		k := slices.IndexFunc(from, func(a Subsystem) bool { return a.NQN == b.NQN })
		if k < 0 {
			d.SubsystemsAdded = append(d.SubsystemsAdded, b)
			continue
		}
		a := from[k]
		d.requireEqual(path, reflect.ValueOf(a), reflect.ValueOf(b), "needs a restart")
		if a.AllowAnyHost != b.AllowAnyHost || !sameHosts(a.Hosts, b.Hosts) {
			d.HostsChanged = append(d.HostsChanged, b)
		}
		d.namespaces(join(path, "namespaces"), b.NQN, a.Namespaces, b.Namespaces)
	}
}

// othersServe says that a restart costs little.
const othersServe = ", during which the other nodes serve its ranges if there are two replicas or more"

func (d *differ) namespaces(path, nqn string, from, to []Namespace) {
	for _, a := range from {
		if !slices.ContainsFunc(to, func(b Namespace) bool { return b.NSID == a.NSID }) {
			d.NamespacesRemoved = append(d.NamespacesRemoved, SubsystemNamespace{nqn, a})
			if a.Replicated {
				d.problem(path, "nsid %d is a partition of the cluster: to remove it needs a restart%s. With one, "+
					"drain the node before it", a.NSID, othersServe)
			}
		}
	}
	for i, b := range to {
		p, ns := index(path, i), SubsystemNamespace{nqn, b}
		k := slices.IndexFunc(from, func(a Namespace) bool { return a.NSID == b.NSID })
		if k < 0 {
			d.NamespacesAdded = append(d.NamespacesAdded, ns)
			if b.Replicated {
				d.problem(join(p, "replicated"), "true: a new partition of the cluster needs a restart%s", othersServe)
			}
			continue
		}
		a := from[k]
		d.requireEqual(join(p, "kv"), reflect.ValueOf(a.KV), reflect.ValueOf(b.KV), "needs a restart")
		a.KV = b.KV
		if a.UUID == "" || b.UUID == "" {
			// An absent UUID is that of the drive's label, with which the daemon compares one that is given.
			a.UUID = b.UUID
		}
		d.requireEqual(join(p, "replicated"), reflect.ValueOf(a.Replicated), reflect.ValueOf(b.Replicated),
			"needs a restart"+othersServe)
		a.Replicated = b.Replicated
		if b.Replicated && a.Size != b.Size {
			d.problem(join(p, "size"), "%s became %s, which needs a restart: it is a partition of the cluster%s",
				a.Size, b.Size, othersServe)
			a.Size = b.Size
		}
		const another = "makes it another namespace: give it another nsid, or remove it by one reload"
		d.requireEqual(join(p, "ssd"), reflect.ValueOf(a.SSD), reflect.ValueOf(b.SSD),
			another+" and add it by the next")
		a.SSD = b.SSD
		// The label of the same drive remembers what the namespace was until it is erased.
		d.requireEqual(p, reflect.ValueOf(a), reflect.ValueOf(b),
			another+", erase it with jbofctl namespace delete, and add it by the next reload")
		switch {
		case b.Size > a.Size:
			d.NamespacesGrown = append(d.NamespacesGrown, ns)
		case b.Size < a.Size && b.Type == "kv":
			d.NamespacesShrunk = append(d.NamespacesShrunk, ns)
		case b.Size < a.Size:
			d.problem(join(p, "size"), "%s is less than the present %s; allowed: the same or more", b.Size, a.Size)
		}
		if !sameHosts(a.Hosts, b.Hosts) {
			d.NamespaceHostsChanged = append(d.NamespaceHostsChanged, ns)
		}
	}
}

func (d *differ) tenants(from, to []Tenant) {
	for _, a := range from {
		if !slices.ContainsFunc(to, func(b Tenant) bool { return b.Name == a.Name }) {
			d.TenantsRemoved = append(d.TenantsRemoved, a)
		}
	}
	for _, b := range to {
		k := slices.IndexFunc(from, func(a Tenant) bool { return a.Name == b.Name })
		switch {
		case k < 0:
			d.TenantsAdded = append(d.TenantsAdded, b)
		case from[k].Weight != b.Weight || from[k].Limits != b.Limits || !sameHosts(from[k].Hosts, b.Hosts):
			d.TenantsChanged = append(d.TenantsChanged, b)
		}
	}
}

// nodes compares the nodes of the cluster. What this node says of itself is in the records of the cluster, and where it
// listens.
func (d *differ) nodes(from, to *Config) {
	find := func(list []ClusterNode, name string) int {
		return slices.IndexFunc(list, func(n ClusterNode) bool { return n.Name == name })
	}
	for _, a := range from.Cluster.Nodes {
		if find(to.Cluster.Nodes, a.Name) < 0 {
			d.NodesRemoved = append(d.NodesRemoved, a)
		}
	}
	for i, b := range to.Cluster.Nodes {
		k := find(from.Cluster.Nodes, b.Name)
		switch {
		case k < 0:
			d.NodesAdded = append(d.NodesAdded, b)
		case b.Name == from.Node.Name:
			d.requireEqual(index("cluster.nodes", i), reflect.ValueOf(from.Cluster.Nodes[k]), reflect.ValueOf(b),
				"needs a restart, because it is this node")
		case from.Cluster.Nodes[k] != b:
			d.NodesChanged = append(d.NodesChanged, b)
		}
	}
}

// sameHosts compares two lists without regard to order.
func sameHosts(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}
