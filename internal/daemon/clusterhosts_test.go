package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"jbofd/client"
	"jbofd/internal/cluster"
	"jbofd/internal/nvme"
	"jbofd/internal/testutil/loopback"
)

// TestOnlyANodeIsANode: a host gets the commands of nodes with the NQN of a node and from that one's address, not with
// one of the two. Nobody else may use that NQN, not even for what every host may do.
func TestOnlyANodeIsANode(t *testing.T) {
	hosts := clusterHosts(2)
	w := newWorld(t)
	w.configureNode(hosts, 0, "demo", "http://"+strings.TrimSuffix(loopback.Address(), ":0")+":2379", onePartition)
	n := w.mustStart()
	this, other, stranger := hosts[0], hosts[1], clusterHosts(1)[0]
	node, host := cluster.HostNQN("demo", "n2"), "nqn.2026-11.example.jbofd:host"
	for _, c := range []struct {
		what, from, hostNQN string
		// serves: as a host. commands: with those of nodes.
		serves, commands bool
	}{
		{"the node", other, node, true, true},
		{"a host with the node's NQN", stranger, node, false, false},
		{"a host on this node with the other's NQN", this, node, false, false},
		{"this node", this, cluster.HostNQN("demo", "n1"), true, true},
		{"a host with the NQN of this node", stranger, cluster.HostNQN("demo", "n1"), false, false},
		{"a host on the other node", other, host, true, false},
		{"a host", stranger, host, true, false},
	} {
		for _, asNode := range []bool{false, true} {
			o := client.Options{Address: n.addrs.Listeners[0], LocalAddress: netip.MustParseAddr(c.from),
				SubNQN: nqn, HostNQN: c.hostNQN, Replication: asNode, Queues: 1}
			err := forward(t, o)
			var refused *client.StatusError
			switch {
			case !c.serves:
				if !errors.As(err, &refused) || refused.Status.Code() != nvme.ConnectInvalidHost {
					t.Errorf("%s: %v, want %v", c.what, err, nvme.ConnectInvalidHost)
				}
			case asNode && !c.commands:
				if !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), c.hostNQN) {
					t.Errorf("%s, which asks for the commands of nodes: %v", c.what, err)
				}
			case !asNode:
				if !errors.As(err, &refused) || refused.Status.Code() != nvme.InvalidOpcode {
					t.Errorf("%s, which sends a Forward: %v", c.what, err)
				}
			}
		}
	}
}

// TestANodeIsKnownByItsIPv6Address, not by its network, and not only by an address as IPv4 has them.
func TestANodeIsKnownByItsIPv6Address(t *testing.T) {
	w, hosts := newWorld(t), append(clusterHosts(1), "[::1]")
	w.configureNode(hosts, 0, "demo", "http://"+hosts[0]+":2379", onePartition, `listeners: [{address: "[::]:0"}]`)
	n := w.mustStart()
	port := netip.MustParseAddrPort(n.addrs.Listeners[0]).Port()
	for address, ok := range map[string]bool{"[::1]": true, hosts[0]: false} {
		c, err := client.Connect(t.Context(), client.Options{Address: fmt.Sprintf("%s:%d", address, port), SubNQN: nqn,
			HostNQN: cluster.HostNQN("demo", "n2"), Replication: true, QPairs: 1})
		if (err == nil) != ok {
			t.Errorf("to %s: %v", address, err)
		}
		if err == nil {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// forward sends a Forward as some host, and returns what becomes of that.
func forward(t *testing.T, o client.Options) error {
	t.Helper()
	c, err := client.Connect(t.Context(), o)
	if err != nil {
		return err
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	data := make([]byte, nvme.KVForwardHeaderSize+1)
	var e nvme.SQE
	e.SetOpcode(nvme.CmdKVForward)
	e.SetNSID(2)
	k := e.KVReplica()
	k.SetEpoch(1)
	k.SetSequence(1)
	k.SetKeyLen(1)
	k.SetLenBytes(uint32(len(data)))
	_, err = c.IOPassthru(t.Context(), e, data)
	return err
}
