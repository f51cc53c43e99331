package nvmeof_test

import (
	"fmt"
	"net/netip"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

// from sets the address that a Connect comes from.
func from(address string) func(*args) {
	return func(a *args) { a.peer = netip.MustParseAddr(address) }
}

// One machine invents host NQNs, opens discovery associations with the longest possible keep alive timeout, and is
// silent on them.
func TestSilentDiscoveryAssociationsKeepNoHostOut(t *testing.T) {
	r := newRig(t, func(c *nvmeof.Config) {
		c.MaxControllers, c.MaxHosts, c.MaxDiscovery, c.MaxDiscoveryPerPeer = 8, 8, 8, 4
	})
	good := r.connect(hostA, nvme.DiscoveryNQN, from("10.0.0.1"))
	for i := range 100 {
		r.now += ms
		if reply := r.tryConnect(fmt.Sprintf("nqn.2026-11.example:invented-%d", i), nvme.DiscoveryNQN,
			from("10.0.0.66"), withKATO(1<<32-1)); !reply.Status.OK() {
			t.Fatalf("discovery of host %d: %v: %s", i, reply.Status, reply.Reason)
		}
	}
	r.take()
	if n := len(r.target.Controllers()); n != 5 {
		t.Errorf("%d discovery associations are left, want 4 of the inventor and the good host's", n)
	}
	if _, ok := good.QueueConn(0); !ok {
		t.Error("the good host's discovery association was ended, which is of another address")
	}
	for range 8 {
		r.connect(hostA, shut, from("10.0.0.1"))
	}
	r.connect(hostA, nvme.DiscoveryNQN, from("10.0.0.1"))
}

func TestTheIdlestDiscoveryAssociationOfTheBusiestAddressGoesFirst(t *testing.T) {
	r := newRig(t, func(c *nvmeof.Config) { c.MaxDiscovery, c.MaxDiscoveryPerPeer = 5, 3 })
	ctrls := map[string]*nvmeof.Controller{}
	join := func(name, address string) {
		t.Helper()
		r.now += ms
		reply := r.tryConnect(hostA, nvme.DiscoveryNQN, from(address))
		if !reply.Status.OK() {
			t.Fatalf("%s: %v", name, reply.Status)
		}
		ctrls[name] = reply.Controller
	}
	gone := func(name string) {
		t.Helper()
		r.wantActions(fmt.Sprintf("close %d: too many discovery associations: of those of its address, this one was "+
			"silent longest", ctrls[name].Admin))
	}
	join("a1", "10.0.0.1")
	join("b1", "10.0.0.2")
	join("b2", "10.0.0.2")
	join("b3", "10.0.0.2")
	r.now += ms
	r.do(ctrls["b1"], 0, command(nvme.AdminKeepAlive, nil), nil) // fails, but counts as activity
	r.noActions()
	join("b4", "10.0.0.2") // its address has three
	gone("b2")
	join("c1", "10.0.0.3")
	r.noActions()
	join("d1", "10.0.0.4") // five exist: a1, b1, b3, b4, c1
	gone("b3")
	join("e1", "10.0.0.5") // a1, b1, b4, c1, d1
	gone("b1")
	join("f1", "10.0.0.6") // one of each address: a1 is the idlest of all
	gone("a1")
}

// A discovery association has no state that is worth a long timeout: a host that is silent for longer connects again.
func TestTheKeepAliveTimeoutOfDiscoveryIsBounded(t *testing.T) {
	r := newRig(t, func(c *nvmeof.Config) { c.MaxDiscoveryKATOMS = 300_000 })
	c := r.connect(hostA, nvme.DiscoveryNQN, withKATO(1<<32-1))
	if got := c.KATOMS(); got != 300_000 {
		t.Errorf("KATO %d ms", got)
	}
	if v, _ := r.must(c, setFeature(nvme.FIDKeepAlive, 1<<32-1), nil); v != 300_000 {
		t.Errorf("Set Features grants %d ms", v)
	}
	if v, _ := r.must(c, setFeature(nvme.FIDKeepAlive, 30_000), nil); v != 30_000 {
		t.Errorf("Set Features grants %d ms of 30 s", v)
	}
	if c := r.connect(hostA, open, withKATO(3_600_000)); c.KATOMS() != 3_600_000 {
		t.Errorf("KATO of an I/O controller %d ms", c.KATOMS())
	}
}

// If a configuration names hosts, a part of every limit is reserved for them.
func TestUnnamedHostsLeaveRoomForNamedHosts(t *testing.T) {
	r := newRig(t, func(c *nvmeof.Config) { c.MaxControllers, c.MaxHosts = 8, 8 })
	fill := func() (n int) {
		for {
			reply := r.tryConnect(fmt.Sprintf("nqn.2026-11.example:invented-%d", n), open)
			if !reply.Status.OK() {
				wantStatus(t, "refusal", reply.Status, nvme.ConnectControllerBusy)
				return n
			}
			n++
		}
	}
	if n := fill(); n != 6 {
		t.Errorf("%d hosts without a name connected, want 6 of 8", n)
	}
	r.connect(hostA, shut)
	r.connect(hostA, open)
	wantStatus(t, "beyond the limit", r.tryConnect(hostA, shut).Status, nvme.ConnectControllerBusy)

	r = newRig(t, func(c *nvmeof.Config) { c.MaxControllers, c.MaxHosts = 8, 8 })
	state := testState()
	state.Hosts = []string{hostB} // of a tenant, for example
	r.target.Apply(state)
	fill()
	r.connect(hostB, open)

	r = newRig(t, func(c *nvmeof.Config) { c.MaxControllers, c.MaxHosts = 8, 8 })
	state = testState()
	state.Subsystems = state.Subsystems[:1]
	state.Subsystems[0].Namespaces = state.Subsystems[0].Namespaces[:2]
	r.target.Apply(state) // no host is named
	if n := fill(); n != 8 {
		t.Errorf("%d hosts connected where none is named, want 8", n)
	}
}
