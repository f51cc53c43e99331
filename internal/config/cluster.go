package config

import (
	"fmt"
	"net/netip"
	"net/url"
	"strings"
)

// maxClusterNodes is how many nodes a cluster can have; package view has the same limit.
const maxClusterNodes = 4096

// cluster checks the section "cluster", and which namespaces are replicated.
func (v *validator) cluster() {
	c := v.c.Cluster
	v.replicated()
	if c == nil || !v.ok("cluster") {
		return
	}
	v.name("cluster.name", c.Name)
	var nqns []string
	for _, s := range v.c.Subsystems {
		nqns = append(nqns, s.NQN)
	}
	if p := "cluster.subsystem"; v.ok(p) && !contains(nqns, c.Subsystem) {
		v.complain(p, "%q is no subsystem; allowed: %s", c.Subsystem, anyOf(nqns, "an NQN under subsystems, which "+
			"has none"))
	}
	v.clusterNodes(c)
	v.tls("cluster.tls", c.TLS)
	if p := "cluster.away"; c.Away < c.Lease && v.ok(p) && v.ok("cluster.lease") {
		v.complain(p, "%v is shorter than cluster.lease, %v (%s): a node would be replaced before it counts as gone; "+
			"allowed: the lease or longer", c.Away, c.Lease, v.line("cluster.lease"))
	}
	if a := c.Listen; a != "" {
		if a := v.address("cluster.listen", a); a.IsValid() && a.Port() == 0 {
			v.complain("cluster.listen", "%q has no port that others could know; allowed: another one than 0", a)
		}
	}
	v.etcd(&c.Etcd)
}

func contains(all []string, s string) bool {
	for _, x := range all {
		if x == s {
			return true
		}
	}
	return false
}

// replicated checks which namespaces say that they are partitions of the cluster.
func (v *validator) replicated() {
	for i, s := range v.c.Subsystems {
		for j, n := range s.Namespaces {
			np := index(join(index("subsystems", i), "namespaces"), j)
			p := join(np, "replicated")
			switch {
			case !n.Replicated || !v.ok(p):
			case v.c.Cluster == nil:
				v.complain(p, "true, but there is no section cluster; allowed: false, or configure a cluster")
			case n.Type != "kv" && v.ok(join(np, "type")):
				v.complain(p, "true, but the namespace has type %s; allowed: false, or type kv", n.Type)
			case s.NQN != v.c.Cluster.Subsystem && v.ok("cluster.subsystem"):
				v.complain(p, "true, but the cluster's subsystem is %q (cluster.subsystem, %s); allowed: false, or "+
					"have the namespace there", v.c.Cluster.Subsystem, v.line("cluster.subsystem"))
			case n.KV.Durability == "none" && v.ok(join(np, "kv")):
				v.complain(join(join(np, "kv"), "durability"), "none, but the namespace is replicated, and what the "+
					"cluster has acknowledged must survive a loss of power; allowed: device")
			}
		}
	}
}

// clusterListens calls f with each address at which this node listens for the cluster: for other nodes, and as a server
// of etcd. Those that cannot be are left to cluster.
func (v *validator) clusterListens(f func(path, address string)) {
	c := v.c.Cluster
	if c == nil || !v.ok("cluster") {
		return
	}
	path, own := "cluster.listen", c.Listen
	for i, n := range c.Nodes {
		if n.Name == v.c.Node.Name && own == "" {
			path, own = join(index("cluster.nodes", i), "address"), n.Address
		}
	}
	if _, err := netip.ParseAddrPort(own); err == nil && v.ok(path) {
		f(path, own)
	}
	if c.Etcd.Embedded == nil || !v.ok("cluster.etcd") {
		return
	}
	for i, m := range c.Etcd.Embedded.Members {
		p := index("cluster.etcd.embedded.members", i)
		if m.Name != v.c.Node.Name || !v.ok(p) {
			continue
		}
		for _, e := range []struct{ key, url string }{{"client_url", m.ClientURL}, {"peer_url", m.PeerURL}} {
			u, err := url.Parse(e.url)
			if err != nil || !v.ok(join(p, e.key)) {
				continue
			}
			host := strings.Replace(u.Host, "localhost:", "127.0.0.1:", 1)
			if _, err := netip.ParseAddrPort(host); err == nil { // a name may be any address
				f(join(p, e.key), host)
			}
		}
	}
}

// clusterNodes checks the nodes of the cluster, of which this is one.
func (v *validator) clusterNodes(c *Cluster) {
	const path = "cluster.nodes"
	if !v.ok(path) {
		return
	}
	if len(c.Nodes) == 0 || len(c.Nodes) > maxClusterNodes {
		v.complain(path, "%d nodes; allowed: 1 to %d, with this one", len(c.Nodes), maxClusterNodes)
		return
	}
	names, addresses, targets := v.unique("node"), v.unique("address of a node"), v.unique("target of a node")
	var all []string
	for i, n := range c.Nodes {
		p := index(path, i)
		all = append(all, n.Name)
		if !v.ok(p) {
			continue
		}
		v.name(join(p, "name"), n.Name)
		names.add(join(p, "name"), n.Name)
		at := join(p, "address")
		if a := v.address(at, n.Address); a.IsValid() && (a.Port() == 0 || a.Addr().IsUnspecified()) {
			v.complain(at, "%q cannot be connected to; allowed: an address and port of the node", n.Address)
		} else if a.IsValid() {
			addresses.add(at, a.String())
		}
		if at := join(p, "domain"); n.Domain != "" {
			v.name(at, n.Domain)
		}
		v.target(join(p, "target"), n, targets)
	}
	if v.ok("node.name") && !contains(all, v.c.Node.Name) {
		v.complain(path, "none of %s is this node, whose node.name is %q (%s); allowed: all nodes, also this one",
			strings.Join(all, ", "), v.c.Node.Name, v.line("node.name"))
	}
}

// target checks where a node serves NVMe over Fabrics. That of this node is one of its listeners.
func (v *validator) target(path string, n ClusterNode, targets *unique) {
	if !v.ok(path) {
		return
	}
	transport, rest, _ := strings.Cut(n.Target, "://")
	a, err := netip.ParseAddrPort(rest)
	if err != nil || transport != "tcp" && transport != "rdma" || a.Port() == 0 || a.Addr().IsUnspecified() {
		v.complain(path, "%q is not a target; allowed: tcp://IP:port or rdma://IP:port, an address and port of the "+
			"node", n.Target)
		return
	}
	targets.add(path, transport+"://"+a.String())
	if n.Name != v.c.Node.Name || !v.ok("listeners") {
		return
	}
	var have []string
	for i, l := range v.c.Listeners {
		p := join(index("listeners", i), "address")
		at, err := netip.ParseAddrPort(l.Address)
		if !v.ok(p) || err != nil {
			return
		}
		have = append(have, l.Transport+"://"+l.Address)
		if l.Transport == transport && (at.Port() == 0 || at.Port() == a.Port()) &&
			(at.Addr().IsUnspecified() || at.Addr().Unmap() == a.Addr().Unmap()) {
			return
		}
	}
	v.complain(path, "%q is that of this node, whose node.name is %q, and it has no such listener; allowed: "+
		"transport, address and port of one of the listeners: %s", n.Target, n.Name, anyOf(have, "there is none"))
}

// tls checks a section of files; nil: absent.
func (v *validator) tls(path string, t *TLS) {
	if t == nil || !v.ok(path) {
		return
	}
	for _, f := range []struct{ key, file string }{{"ca", t.CA}, {"cert", t.Cert}, {"key", t.Key}} {
		if p := join(path, f.key); f.file == "" && v.ok(p) {
			v.complain(p, `"" is empty; allowed: the path of a file`)
		}
	}
}

// etcd checks where etcd is.
func (v *validator) etcd(e *Etcd) {
	const path = "cluster.etcd"
	if !v.ok(path) {
		return
	}
	v.tls(path+".tls", e.TLS)
	endpoints, embedded := path+".endpoints", path+".embedded"
	switch {
	case !v.ok(endpoints) || !v.ok(embedded):
	case e.Embedded != nil && len(e.Endpoints) > 0:
		v.complain(endpoints, "%d, but there are those of embedded's members; allowed: one of the two",
			len(e.Endpoints))
	case e.Embedded == nil && len(e.Endpoints) == 0:
		v.complain(path, "it has neither endpoints nor embedded; allowed: one of the two")
	case e.Embedded != nil:
		v.etcdMembers(embedded+".members", e)
	default:
		secure := false
		urls := v.unique("URL")
		for i, u := range e.Endpoints {
			p := index(endpoints, i)
			v.etcdURL(p, u, "http", "https")
			urls.add(p, u)
			secure = secure || strings.HasPrefix(u, "https:")
		}
		if e.TLS != nil && !secure && v.ok(path+".tls") {
			v.complain(path+".tls", "given, but no endpoint is https; allowed: endpoints with https, or leave it out")
		}
	}
	if (e.Username == "") != (e.PasswordFile == "") && v.ok(path+".username") && v.ok(path+".password_file") {
		v.complain(path, "it has one of username and password_file; allowed: both, or none")
	}
}

func (v *validator) etcdMembers(path string, e *Etcd) {
	if !v.ok(path) {
		return
	}
	scheme := "http"
	if e.TLS != nil {
		scheme = "https"
	}
	names, urls := v.unique("member of etcd"), v.unique("URL")
	self := false
	for i, m := range e.Embedded.Members {
		p := index(path, i)
		if !v.ok(p) {
			continue
		}
		v.name(join(p, "name"), m.Name)
		names.add(join(p, "name"), m.Name)
		self = self || m.Name == v.c.Node.Name
		for _, u := range []struct{ key, url string }{{"client_url", m.ClientURL}, {"peer_url", m.PeerURL}} {
			v.etcdURL(join(p, u.key), u.url, scheme)
			urls.add(join(p, u.key), u.url)
		}
	}
	if len(e.Embedded.Members) == 2 {
		v.complain(path, "2 members, of which both must run; allowed: 1, or 3 or more, an odd number of them")
	}
	if !self && v.ok("node.name") {
		v.complain(path, "none is this node, whose node.name is %q; allowed: members with this one, or "+
			"cluster.etcd.endpoints instead of embedded", v.c.Node.Name)
	}
}

// etcdURL checks a URL of a server of etcd.
func (v *validator) etcdURL(path, s string, schemes ...string) {
	if !v.ok(path) {
		return
	}
	u, err := url.Parse(s)
	if err != nil || !contains(schemes, u.Scheme) || u.Hostname() == "" || u.Port() == "" || u.Path != "" ||
		u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		v.complain(path, "%q is not a URL of etcd; allowed: %s://HOST:PORT", s, strings.Join(schemes, " or "))
	}
}

// Remarks returns what is allowed, and probably meant otherwise.
func (c *Config) Remarks() (all Errors) {
	if c.Cluster == nil || c.Cluster.Etcd.Embedded == nil {
		return nil
	}
	nodes := map[string]bool{}
	for _, n := range c.Cluster.Nodes {
		nodes[n.Name] = true
	}
	for i, m := range c.Cluster.Etcd.Embedded.Members {
		if !nodes[m.Name] {
			all = append(all, c.problem(join(index("cluster.etcd.embedded.members", i), "name"), fmt.Sprintf(
				"%q is none of cluster.nodes, so that no jbofd of this cluster runs this server of etcd by itself; "+
					"something else must, such as jbofd etcd", m.Name)))
		}
	}
	return all
}
