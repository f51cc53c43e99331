// Package etcdserver runs a server of etcd, so that a cluster of boxes needs nothing else. It is made for a process of
// its own (jbofd etcd): a server of etcd ends its process when it cannot write to its disk, and its memory would be
// collected together with the data path's. It is built with the tag etcd, which make build sets.
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
	// Cluster is the name of the cluster. Servers of another one are refused.
	Cluster string
	// Name is that of this member; Members has the URL at which the members reach each other, by name, with this one.
	// They are the members of a new cluster, and ignored when Dir has data.
	Name    string
	Members map[string]string
	// Dir is the directory of the data, which is made.
	Dir string
	// ClientURL is where clients connect, http or https.
	ClientURL string
	// CertFile, KeyFile and CAFile are for https, to clients and members: all must show a certificate of the CA.
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

// initialCluster is the list of members as etcd wants it.
func (c *Config) initialCluster() string {
	var list []string
	for name, u := range c.Members {
		list = append(list, name+"="+u)
	}
	slices.Sort(list)
	return strings.Join(list, ",")
}
