package daemon

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"jbofd/internal/admin"
	"jbofd/internal/testutil/certs"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

// secureEtcd starts a server of etcd that serves only who has a certificate of the authority and a password.
func secureEtcd(t *testing.T, ca *certs.CA, user, password string) *etcdproc.Server {
	t.Helper()
	host := loopback.Address()
	ip, _, _ := net.SplitHostPort(host)
	cert, key := ca.Issue(ip)
	s := etcdproc.Start(t, etcdproc.Options{Host: host, Cert: cert, Key: key, CA: ca.File})
	cli, err := clientv3.New(clientv3.Config{Endpoints: []string{s.URL}, TLS: ca.Config("client"),
		Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cli.Close() }()
	ctx := t.Context()
	for _, do := range []func() error{
		func() error { _, err := cli.UserAdd(ctx, "root", "another secret"); return err },
		func() error { _, err := cli.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := cli.RoleAdd(ctx, "nodes"); return err },
		func() error {
			_, err := cli.RoleGrantPermission(ctx, "nodes", "/jbofd/v1/", clientv3.GetPrefixRangeEnd("/jbofd/v1/"),
				clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func() error { _, err := cli.UserAdd(ctx, user, password); return err },
		func() error { _, err := cli.UserGrantRole(ctx, user, "nodes"); return err },
		func() error { _, err := cli.AuthEnable(ctx); return err },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// TestNodesWithCertificatesAndAPassword: two nodes show certificates to each other and to etcd, which wants a password
// too. They become a cluster, and nobody without a certificate of the authority gets to the nodes' port.
func TestNodesWithCertificatesAndAPassword(t *testing.T) {
	ca := certs.New(t)
	etcd := secureEtcd(t, ca, "jbofd", "a secret")
	hosts := clusterHosts(2)
	section := func(name string) string {
		cert, key := ca.Issue(name)
		return fmt.Sprintf("tls: {ca: %q, cert: %q, key: %q}", ca.File, cert, key)
	}
	var worlds []*world
	for range hosts {
		worlds = append(worlds, newWorld(t))
	}
	var nodes []*node
	for i, w := range worlds {
		w.configureNode(hosts, i, "demo", etcd.URL, onePartition)
		password := w.path("password")
		if err := os.WriteFile(password, []byte("a secret\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		plain := fmt.Sprintf("etcd: {endpoints: [%q]}\n", etcd.URL)
		secure := strings.Replace(w.text, plain, fmt.Sprintf(
			"etcd: {endpoints: [%q], username: jbofd, password_file: %q, %s}\n  %s\n", etcd.URL, password,
			section("client"), section(fmt.Sprint("n", i+1))), 1)
		if secure == w.text {
			t.Fatal("the configuration has no section of etcd")
		}
		w.text = secure
		nodes = append(nodes, w.mustStart())
	}
	eventually(t, "the cluster is made", func() error {
		_, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: 2, Ranges: 16})
		return err
	})
	agree(t, "a cluster of two", nodes, func(a admin.Cluster) error {
		if up(a) != 2 || a.Ranges.Full != 16 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	ns := keysOf(nodes)
	ns.stored(t, "key", "value")
	ns.read(t, "key", "value", 2)
	for i, h := range hosts {
		cfg := ca.Config("client")
		cfg.ServerName = fmt.Sprint("n", i+1)
		c, err := tls.Dial("tcp", h+":4430", cfg)
		if err != nil {
			t.Fatalf("the certificate of node %d: %v", i+1, err)
		}
		_ = c.Close()
		cfg.Certificates = nil
		// The node looks at the certificate after the handshake of TLS 1.3 has ended here.
		if c, err = tls.Dial("tcp", h+":4430", cfg); err == nil {
			_, err = c.Read(make([]byte, 1))
			_ = c.Close()
		}
		if err == nil || !strings.Contains(err.Error(), "certificate required") {
			t.Errorf("without a certificate, at node %d: %v", i+1, err)
		}
	}
}

// TestFilesOfAClusterThatCannotBeReadAreNamed: the node does not start, and says which field is wrong.
func TestFilesOfAClusterThatCannotBeReadAreNamed(t *testing.T) {
	ca := certs.New(t)
	cert, key := ca.Issue("n1")
	_, other := ca.Issue("n1")
	empty := ca.File + ".empty"
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	files := func(ca, cert, key string) string {
		return fmt.Sprintf("tls: {ca: %q, cert: %q, key: %q}", ca, cert, key)
	}
	hosts := clusterHosts(1)
	for _, c := range []struct{ field, etcd, nodes string }{
		{"cluster.tls.ca", "", files(ca.File+".none", cert, key)},
		{"cluster.tls.ca", "", files(empty, cert, key)},
		{"cluster.tls.cert", "", files(ca.File, cert, other)},
		{"cluster.etcd.tls.cert", ", " + files(ca.File, cert+".none", key), ""},
		{"cluster.etcd.password_file", fmt.Sprintf(", username: jbofd, password_file: %q", ca.File+".none"), ""},
		{"cluster.etcd.password_file", fmt.Sprintf(", username: jbofd, password_file: %q", empty), ""},
	} {
		w := newWorld(t)
		const url = "https://127.0.0.1:1"
		w.configureNode(hosts, 0, "demo", url, onePartition)
		w.text = strings.Replace(w.text, fmt.Sprintf("etcd: {endpoints: [%q]}\n", url),
			fmt.Sprintf("etcd: {endpoints: [%q]%s}\n  %s\n", url, c.etcd, c.nodes), 1)
		if n, err := w.start(); err == nil {
			t.Errorf("%s: the node starts", c.field)
			_ = n.stop()
		} else if !strings.Contains(err.Error(), c.field) {
			t.Errorf("%s: %v", c.field, err)
		}
	}
}
