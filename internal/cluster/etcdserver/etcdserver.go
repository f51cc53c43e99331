// Package etcdserver runs an etcd server, so that a jbofd cluster needs no other installation of etcd. It is made for a
// process of its own (jbofd etcd), for two reasons: an etcd server exits the process when it cannot write to its disk,
// and in the process of a target its heap would make the garbage collector of the data path work harder. The server is
// built with the tag etcd, which make build sets.
package etcdserver

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"jbofd/internal/cluster/etcd"
)

// ErrNotBuilt is the error of Run without the tag etcd.
var ErrNotBuilt = errors.New("built without etcd (make build with ETCD=): use another jbofd, or name the endpoints " +
	"of another etcd")

// Config describes a server.
type Config struct {
	// Cluster is the name of the cluster. The server refuses members of other clusters.
	Cluster string
	// Name is the name of this member. Members maps the name of each member, this one included, to the URL at which the
	// other members reach it. Members describes a new cluster, and is ignored if Dir has data.
	Name    string
	Members map[string]string
	// Dir is the data directory. Run creates it.
	Dir string
	// ClientURL is where clients connect, http or https.
	ClientURL string
	// CertFile, KeyFile and CAFile configure https for clients and members. Both must present a certificate that the CA
	// has issued. All three are empty for http.
	CertFile, KeyFile, CAFile string
}

// Check returns what is wrong with the configuration.
func (c *Config) Check() error {
	if err := etcd.CheckName(c.Cluster); err != nil {
		return err
	}
	if c.Name == "" || strings.ContainsAny(c.Name, "=,") {
		return fmt.Errorf("name of the member is %q, must not be empty nor contain \"=\" or \",\"", c.Name)
	}
	if c.Members[c.Name] == "" {
		return fmt.Errorf("the members are %s, must include %s itself", c.initialCluster(), c.Name)
	}
	if c.Dir == "" {
		return errors.New("the directory of the data is empty")
	}
	secure := c.CertFile != ""
	if secure != (c.KeyFile != "") || secure != (c.CAFile != "") {
		return errors.New("certificate, key and CA must be given all or none")
	}
	for _, u := range append(slices.Collect(maps.Values(c.Members)), c.ClientURL) {
		p, err := url.Parse(u)
		switch {
		case err != nil:
			return fmt.Errorf("URL %q: %w", u, err)
		case p.Port() == "" || p.Hostname() == "" || p.Path != "":
			return fmt.Errorf("URL %q must be http or https with host and port", u)
		case p.Scheme == "https" && !secure, p.Scheme == "http" && secure, p.Scheme != "http" && p.Scheme != "https":
			return fmt.Errorf("URL %q must be https if there is a certificate, else http", u)
		}
	}
	return nil
}

// initialCluster returns the members in the form of etcd's --initial-cluster.
func (c *Config) initialCluster() string {
	var list []string
	for name, u := range c.Members {
		list = append(list, name+"="+u)
	}
	slices.Sort(list)
	return strings.Join(list, ",")
}
