package e2e

import (
	"fmt"
	"net"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// rawFrom opens a connection from a different local address than well-behaved hosts use. The connection is closed when
// the test ends.
func (d *daemon) rawFrom(address string) *rawHost {
	d.t.Helper()
	dialer := net.Dialer{Timeout: wait, LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	c, err := dialer.Dial("tcp", d.addr)
	if err != nil {
		d.t.Fatal(err)
	}
	h := &rawHost{t: d.t, c: c}
	d.t.Cleanup(h.close)
	return h
}

const evil = "127.0.0.66"

// closedSubsystem allows hostA only.
const closedSubsystem = `  - nqn: nqn.2026-11.example.jbofd:b
    hosts: [` + hostA + `]
    namespaces:
      - {nsid: 1, ssd: ssd0, size: 16MiB, block_size: 512}
`

// TestSilentDiscoveryKeepsNoHostOut: a machine with invented host NQNs opens more discovery associations than the limit
// of controllers, with the longest keep alive timeout, and then stays silent.
func TestSilentDiscoveryKeepsNoHostOut(t *testing.T) {
	t.Parallel()
	s := setup{ssds: memSSD, subsystems: openSubsystem + closedSubsystem, limits: "controllers: 32, hosts: 32, " +
		"connections: 64, connections_per_host: 8, discovery_controllers: 48, discovery_per_address: 40",
		metrics: ", max_tenants: 2", tenants: "  - {name: gold, hosts: [" + hostA + "]}\n"}
	d := start(t, s)
	d.connect(d.options(hostA, nqnB))
	persistent := d.raw()
	persistent.initialize(false)
	persistent.admin(login{host: hostA, sub: nvme.DiscoveryNQN, katoMS: 60_000})
	for i := range 120 {
		host := fmt.Sprintf("nqn.2026-11.example.invented:%d", i)
		if i%2 == 0 {
			host = hostA // an invented NQN would not even be necessary
		}
		h := d.rawFrom(evil)
		h.initialize(false)
		if c := h.connect(login{host: host, sub: nvme.DiscoveryNQN, katoMS: 1<<32 - 1}); !c.Status().OK() {
			t.Fatalf("discovery %d: %v", i, c.Status())
		}
	}
	n := d.namespace(d.options(hostA, nqnB), 1)
	if _, err := n.ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
	if n := d.metric("jbof_io_completed_total", "tenant", "gold", "op", "read"); n != 1 {
		t.Errorf("%v reads of tenant gold are counted, want 1", n)
	}
	if n := d.metric("jbof_tenants_dropped_total"); n != 0 {
		t.Errorf("%v names found no series", n)
	}
	if _, err := client.Discover(ctx(t), d.options(hostA, nvme.DiscoveryNQN)); err != nil {
		t.Errorf("discovery of a good host: %v", err)
	}
	if c := persistent.do(func() (e nvme.SQE) {
		e.SetOpcode(nvme.AdminKeepAlive)
		e.SetCID(
			9)
		return e
	}()); !c.Status().OK() {
		t.Errorf("the good host's discovery association: %v", c.Status())
	}
	eventually(t, "the inventor has no more associations than an address may have",
		func() bool { return d.metric("jbof_connections") <= 2+2+1+40 })
}

// TestInventedHostsKeepNoNamedHostOut: if every host may connect, a machine can invent any number of hosts.
func TestInventedHostsKeepNoNamedHostOut(t *testing.T) {
	t.Parallel()
	for _, limits := range []string{"controllers: 16", "hosts: 16", "connections: 16, connections_per_host: 16"} {
		d := start(t, setup{ssds: memSSD, subsystems: openSubsystem + closedSubsystem, limits: limits})
		refused := 0
		for i := range 20 {
			h := d.rawFrom(evil)
			h.initialize(false)
			c := h.connect(login{host: fmt.Sprintf("nqn.2026-11.example.invented:%d", i), sub: nqnA, katoMS: 1<<32 - 1})
			if c.Status().Code() == nvme.ConnectControllerBusy {
				refused++
			}
		}
		if refused != 8 {
			t.Errorf("%s: %d of 20 invented hosts were refused, want 8: a quarter is kept for the host with a name",
				limits, refused)
		}
		o := d.options(hostA, nqnB)
		o.Queues = 2
		d.namespace(o, 1)
	}
}

// TestConnectionsWithoutConnectKeepNoHostOut: a machine opens more connections than the limit and never sends Connect.
func TestConnectionsWithoutConnectKeepNoHostOut(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = "connections: 8, connections_per_host: 4, pending_connections: 16, pending_per_address: 12, " +
		"handshake_timeout: 1m"
	d := start(t, s)
	slow := d.raw() // a well-behaved host that is slow
	slow.initialize(false)
	for i := range 60 {
		h := d.rawFrom(evil)
		if i%2 == 0 {
			h.send(icreq()[:])
		}
	}
	if _, err := d.namespace(d.options(hostA, nqnA), 1).ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
	if c := slow.connect(login{host: hostB, sub: nqnA}); !c.Status().OK() {
		t.Errorf("Connect of a slow host of another address: %v", c.Status())
	}
	eventually(t, "those that had to make room are counted",
		func() bool { return d.metric("jbof_connections_refused_total", "reason", "pending") >= 48 })
}

// TestConnectionsAreLimited in total and per host. A refused host is told to try again, and counted.
func TestConnectionsAreLimited(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = "connections: 8, connections_per_host: 4"
	d := start(t, s)

	o := d.options(hostA, nqnA)
	o.Queues = 3
	d.connect(o) // 4 connections
	o.Queues, o.CtrlLossTimeout = 1, -1
	o.ConnectTimeout = time.Second // Connect is repeated as long as that
	if c, err := client.Connect(ctx(t), o); err == nil {
		t.Error("a fifth connection of one host was accepted")
		_ = c.Close()
	}
	eventually(t, "the refusal is counted",
		func() bool { return d.metric("jbof_connect_failures_total", "reason", "host_connections") >= 1 })

	o.HostNQN, o.Queues, o.ConnectTimeout = hostB, 3, wait
	b := d.connect(o)
	h := d.raw()
	h.initialize(false)
	if c := h.connect(login{host: "nqn.2026-11.example.host:c", sub: nqnA}); c.Status() != nvme.ConnectControllerBusy {
		t.Errorf("a ninth connection: %v, want controller busy without DNR", c.Status())
	}
	eventually(t, "the refusal is counted",
		func() bool { return d.metric("jbof_connect_failures_total", "reason", "connections") == 1 })
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	within(t, 5*time.Second, "the same connection is accepted once there is room", func() bool {
		c := h.connect(login{host: "nqn.2026-11.example.host:c", sub: nqnA})
		return c.Status().OK()
	})
}
