//go:build etcd

package etcdserver

import (
	"context"
	"fmt"
	"net/url"
	"os"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
)

// Built reports whether there is a server in this binary.
const Built = true

// Run runs the server until ctx ends, stops it and returns nil. It calls ready, if not nil, once the server serves
// clients; a new cluster does not before a majority of its members runs. If the server cannot write to its disk, it
// exits the process. It logs to standard error.
//
// Errors: those of Config.Check, of creating the data directory, and of etcd if the server fails or stops by itself.
// Without the tag etcd: ErrNotBuilt.
func Run(ctx context.Context, cfg Config, ready func()) error {
	if err := cfg.Check(); err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return err
	}
	e, err := embed.StartEtcd(cfg.embedded())
	if err != nil {
		return fmt.Errorf("starting etcd: %w", err)
	}
	defer e.Close()
	select {
	case <-e.Server.ReadyNotify():
		if ready != nil {
			ready()
		}
	case err := <-e.Err():
		return err
	case <-ctx.Done():
		return nil
	}
	select {
	case err := <-e.Err():
		return err
	case <-e.Server.StopNotify():
		return fmt.Errorf("etcd has stopped")
	case <-ctx.Done():
		return nil
	}
}

// embedded returns the library's configuration.
func (c *Config) embedded() *embed.Config {
	parse := func(s string) []url.URL {
		u, err := url.Parse(s)
		if err != nil {
			return nil // Check has parsed it
		}
		return []url.URL{*u}
	}
	e := embed.NewConfig()
	e.Name, e.Dir = c.Name, c.Dir
	e.InitialCluster, e.InitialClusterToken = c.initialCluster(), "jbofd-"+c.Cluster
	e.ListenClientUrls, e.AdvertiseClientUrls = parse(c.ClientURL), parse(c.ClientURL)
	e.ListenPeerUrls, e.AdvertisePeerUrls = parse(c.Members[c.Name]), parse(c.Members[c.Name])
	if c.CertFile != "" {
		tls := transport.TLSInfo{CertFile: c.CertFile, KeyFile: c.KeyFile, TrustedCAFile: c.CAFile,
			ClientCertAuth: true}
		e.ClientTLSInfo, e.PeerTLSInfo = tls, tls
	}
	// Elections must be fast. A node that fails may have run etcd's leader. Until another one is elected, the manager
	// cannot prove that it is the only one (package cluster), and no node gets authority. An unnecessary election costs
	// little: for an instant, the map cannot change.
	e.TickMs, e.ElectionMs = 50, 500
	// A manager writes its stamp eight times in a lease. Nobody reads old revisions, which would fill etcd's space
	// quota in weeks.
	e.AutoCompactionMode, e.AutoCompactionRetention = "periodic", "10m"
	e.MaxRequestBytes = 4 << 20 // a view
	e.EnableGRPCGateway = false
	e.LogLevel, e.LogOutputs = "warn", []string{"stderr"}
	return e
}
