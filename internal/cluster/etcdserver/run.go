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

// Run runs the server until ctx ends or the server fails. It calls ready, if not nil, once the server serves clients.
// A failure of its disk ends the process. Its log goes to standard error.
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
	// While there is no leader, and a node is away, no node has authority: the leader may be on the node that was lost.
	// An election that was not necessary costs no more than an instant without changes of the map.
	e.TickMs, e.ElectionMs = 50, 500
	// A manager writes its stamp eight times in a lease. The history is of no use, and would fill the quota in weeks.
	e.AutoCompactionMode, e.AutoCompactionRetention = "periodic", "10m"
	e.MaxRequestBytes = 4 << 20 // a view
	e.EnableGRPCGateway = false
	e.LogLevel, e.LogOutputs = "warn", []string{"stderr"}
	return e
}
