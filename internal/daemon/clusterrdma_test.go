package daemon

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"jbofd/client"
	store "jbofd/client/cluster"
	"jbofd/internal/admin"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

// TestTheLongestValuesAreForwardedAndCopied over each transport: to a node that has none of them yet, and to one that
// takes part. Over RDMA, each node has another address, too, from which the route leads to the others.
func TestTheLongestValuesAreForwardedAndCopied(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	t.Run("tcp", func(t *testing.T) { longestValues(t, etcd, nil) })
	t.Run("rdma", func(t *testing.T) {
		n := memverbs.New(memverbs.Config{Seed: 1, Live: true})
		t.Cleanup(func() {
			if err := n.Faults(); err != nil {
				t.Error(err)
			}
			n.Close()
		})
		longestValues(t, etcd, n)
	})
}

// longestValues is one of the transports: that of a network in memory, or TCP with nil.
func longestValues(t *testing.T, etcd *etcdproc.Server, network *memverbs.Network) {
	hosts, name := clusterHosts(2), "tcp"
	var nodes []*node
	var addresses []string
	conn := client.Options{HostNQN: "nqn.2026-11.example.host:longest"}
	if network != nil {
		name = "rdma"
		conn.RDMA = network.NewProvider(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.9")})
	}
	text := fmt.Sprintf("cluster:\n  name: %s\n  subsystem: %s\n  etcd: {endpoints: [%q]}\n  nodes:\n", name, nqn,
		etcd.URL)
	for i, h := range hosts {
		address := h
		if network != nil {
			address = fmt.Sprintf("10.0.0.%d", i+1)
		}
		addresses = append(addresses, fmt.Sprintf("%s://%s:4420", name, address))
		text += fmt.Sprintf("    - {name: n%d, address: \"%s:4430\", target: %q}\n", i+1, h, addresses[i])
	}
	for i, h := range hosts {
		w := newWorld(t)
		w.address = h + ":0"
		w.configure([]string{clusterDrive}, []string{onePartition},
			fmt.Sprintf("node: {name: n%d, data_dir: DIR}", i+1),
			fmt.Sprintf("listeners: [{transport: %s, address: %q}]", name, addresses[i][len(name+"://"):]), text)
		if network != nil {
			// The route is over the first device, from whose address the others do not accept a node.
			w.rdma = network.NewProvider(memverbs.DeviceConfig{Addr: netip.AddrFrom4([4]byte{10, 1, 0, byte(i + 1)})},
				memverbs.DeviceConfig{Addr: netip.MustParseAddrPort(addresses[i][len(name+"://"):]).Addr()})
		}
		nodes = append(nodes, w.mustStart())
	}
	if _, err := nodes[0].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: 1, Ranges: 16}); err != nil {
		t.Fatal(err)
	}
	copies := func(n int) {
		t.Helper()
		agree(t, fmt.Sprint(n, " copies"), nodes, func(a admin.Cluster) error {
			if up(a) != 2 || a.Replicas != n || a.Ranges.Full != a.Ranges.Total {
				return fmt.Errorf("%+v", a)
			}
			return nil
		})
	}
	copies(1)
	s, err := store.Open(t.Context(), store.Options{Addresses: addresses[:1], SubNQN: nqn, Connection: conn})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := s.Exists(t.Context(), []byte("none")); err != nil { // it learns of the nodes
		t.Fatal(err)
	}
	longest := s.MaxValue()
	if want := 1<<20 - nvme.KVEntryOverhead; longest != want {
		t.Errorf("values of %d bytes, want %d: one is copied in a message of 1 MiB", longest, want)
	}
	const values = 6
	value := func(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, longest-i%3) }
	for i := range values {
		if i == values/2 {
			if _, err := nodes[0].admin.ChangeCluster(t.Context(), admin.ChangeCluster{Replicas: 2}); err != nil {
				t.Fatal(err)
			}
			copies(2)
		}
		if err := s.Put(t.Context(), fmt.Append(nil, "long", i), value(i)); err != nil {
			t.Fatalf("value %d: %v", i, err)
		}
	}
	if err := nodes[0].stop(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, longest)
	for i := range values {
		n, err := s.Get(t.Context(), fmt.Append(nil, "long", i), buf)
		if err != nil || !bytes.Equal(buf[:n], value(i)) {
			t.Errorf("value %d: %d bytes, %v", i, n, err)
		}
	}
}
