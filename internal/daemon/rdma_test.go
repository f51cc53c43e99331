package daemon

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// withRDMA makes a network in memory for the daemon and its hosts, and a listener of each
// transport.
func (w *world) withRDMA(ssd string) (target, host *memverbs.Provider) {
	n := memverbs.New(memverbs.Config{Seed: 1, Live: true})
	target = n.NewProvider(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.1")})
	host = n.NewProvider(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.2")})
	w.t.Cleanup(func() {
		for name, p := range map[string]*memverbs.Provider{"daemon": target, "host": host} {
			if c := p.Counts(); c != (verbs.Counts{}) {
				w.t.Errorf("the %s leaves %+v", name, c)
			}
		}
		if err := n.Faults(); err != nil {
			w.t.Error(err)
		}
		n.Close()
	})
	w.rdma = target
	w.configure([]string{ssd}, []string{"{nsid: 1, ssd: s0, size: 16MiB}"},
		`listeners: [{address: "127.0.0.1:0"}, {transport: rdma, address: "10.0.0.1:4420"}]`)
	return target, host
}

// Both transports serve the same namespaces at once, to the same host, and completions carry credits
// on both.
func TestTCPAndRDMAServeTheSameSubsystems(t *testing.T) {
	w := newWorld(t)
	_, host := w.withRDMA("{name: s0, backend: mem, size: 64MiB}")
	n := w.mustStart()
	if got := n.addrs.Listeners[1]; got != "rdma://10.0.0.1:4420" {
		t.Fatalf("listens on %s", got)
	}
	o := client.Options{SubNQN: nqn, HostNQN: "nqn.2026-11.example.jbofd:host", Credits: client.CreditsOn, RDMA: host}
	var spaces []*client.Namespace
	for _, address := range n.addrs.Listeners {
		o.Address = address
		c, err := client.Connect(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		ns, err := c.Namespace(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		spaces = append(spaces, ns)
	}
	for i, ns := range spaces {
		want := bytes.Repeat([]byte{byte(i + 1)}, 256<<10)
		if _, err := ns.WriteAt(t.Context(), want, 1<<20, 0); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want))
		if _, err := spaces[1-i].ReadAt(t.Context(), got, 1<<20); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("what transport %d wrote is not what the other one reads", i)
		}
	}
	for i, ns := range spaces {
		if c := ns.Credit(); !c.On || c.Units == 0 {
			t.Errorf("transport %d: credit %+v", i, c)
		}
	}
	conns, err := n.admin.Connections(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]int{}
	for _, c := range conns.Items {
		by[c.Transport]++
	}
	if by["tcp"] != 2 || by["rdma"] != 2 {
		t.Errorf("connections by transport %v, want two each", by)
	}
}

func TestDiscoveryListsBothTransportsOnBoth(t *testing.T) {
	w := newWorld(t)
	_, host := w.withRDMA("{name: s0, backend: mem, size: 64MiB}")
	n := w.mustStart()
	for _, address := range []string{n.addrs.Discovery, n.addrs.Listeners[0], n.addrs.Listeners[1]} {
		log, err := client.Discover(t.Context(), client.Options{Address: address, RDMA: host})
		if err != nil {
			t.Fatalf("%s: %v", address, err)
		}
		found := map[string]bool{}
		for _, e := range log.Entries {
			if e.Type == client.Storage && e.SubNQN == nqn {
				found[e.Transport+" "+e.Family+" "+e.URL()] = true
			}
		}
		for _, want := range []string{"tcp ipv4 tcp://" + n.addrs.Listeners[0], "rdma ipv4 rdma://10.0.0.1:4420"} {
			if !found[want] {
				t.Errorf("discovery at %s tells %v, not %q", address, found, want)
			}
		}
	}
}

// A limit of connections holds over both transports together.
func TestConnectionsAreLimitedOverAllTransports(t *testing.T) {
	w := newWorld(t)
	_, host := w.withRDMA("{name: s0, backend: mem, size: 64MiB}")
	w.text += "limits: {connections: 3, connections_per_host: 3}\n"
	n := w.mustStart()
	c := n.connect() // two, over TCP
	if _, err := c.Identity(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := client.Connect(t.Context(), client.Options{Address: n.addrs.Listeners[1], SubNQN: nqn, RDMA: host,
		CtrlLossTimeout: -1, ConnectTimeout: time.Second})
	if err == nil || !strings.Contains(err.Error(), "Controller Busy") {
		t.Errorf("two more over RDMA: %v, want controller busy", err)
	}
}

// A machine without RDMA, or a binary without it, reports that, and the listener that needs it.
func TestMissingRDMAIsNamed(t *testing.T) {
	if _, err := os.Stat("/dev/infiniband/rdma_cm"); err == nil {
		t.Skip("this machine has RDMA")
	}
	w := newWorld(t)
	w.withRDMA("{name: s0, backend: mem, size: 64MiB}")
	w.rdma = nil
	_, err := w.start()
	if err == nil || !strings.Contains(err.Error(), "listeners[1]: transport rdma: RDMA is not available") {
		t.Errorf("%v", err)
	}
}

// Acknowledged RDMA writes are there after a stop.
func TestStopAndStartKeepsWhatRDMAWrote(t *testing.T) {
	w := newWorld(t)
	_, host := w.withRDMA("{name: s0, path: DIR/s0.img, size: 64MiB, create: true}")
	want := bytes.Repeat([]byte("jbofd"), 4096*4)
	for round := range 2 {
		n := w.mustStart()
		c, err := client.Connect(t.Context(), client.Options{Address: n.addrs.Listeners[1], SubNQN: nqn, RDMA: host})
		if err != nil {
			t.Fatal(err)
		}
		ns, err := c.Namespace(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		if round == 0 {
			if _, err := ns.WriteAt(t.Context(), want, 0, client.FUA); err != nil {
				t.Fatal(err)
			}
		} else {
			got := make([]byte, len(want))
			if _, err := ns.ReadAt(t.Context(), got, 0); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Error("what was written is gone")
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if err := n.stop(); err != nil {
			t.Fatal(err)
		}
	}
}
