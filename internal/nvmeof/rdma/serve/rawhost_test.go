package serve_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvmeof/rdma/rawhost"
)

// resolve begins a raw host's connection: everything but Connect.
func (r *rig) resolve(t *testing.T) *rawhost.Host {
	t.Helper()
	return rawhost.New(t, r.host, netip.MustParseAddrPort(strings.TrimPrefix(r.address, "rdma://")))
}

// client connects a well-behaved host that leaves queue 2 to a raw one.
func (r *rig) client(t *testing.T) *client.Controller {
	o := r.options()
	o.Queues, o.QPairs, o.QueueDepth = 1, 1, 8
	return r.connect(t, o)
}

// association returns the association of a raw host's queue.
func association(t *testing.T, c *client.Controller) rawhost.Association {
	t.Helper()
	id, err := c.Identity(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	o := c.Options()
	return rawhost.Association{HostNQN: o.HostNQN, HostID: o.HostID, SubNQN: o.SubNQN, CNTLID: id.CNTLID}
}

// ioQueue connects a raw host as I/O queue 2 of c's controller.
func (r *rig) ioQueue(t *testing.T, c *client.Controller) *rawhost.Host {
	t.Helper()
	h := r.resolve(t)
	h.Join(association(t, c), 2)
	return h
}

// serves checks that the target serves a host.
func serves(t *testing.T, c *client.Controller) {
	t.Helper()
	ns, err := c.Namespace(t.Context(), 1)
	if err == nil {
		_, err = ns.ReadAt(t.Context(), make([]byte, 4096), 0)
	}
	if err != nil {
		t.Errorf("another host is not served any more: %v", err)
	}
}

// logged waits for a line of the log with all words and returns it.
func (r *rig) logged(t *testing.T, words ...string) string {
	t.Helper()
	timeout := time.After(20 * time.Second)
	var seen []string
	for {
		select {
		case line := <-r.log.lines:
			ok := true
			for _, w := range words {
				ok = ok && strings.Contains(line, w)
			}
			if ok {
				return line
			}
			seen = append(seen, line)
		case <-timeout:
			t.Fatalf("no line with %q in the log:\n%s", words, strings.Join(seen, "\n"))
		}
	}
}

// metric returns a counter or gauge with these labels' values.
func (r *rig) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	families, err := r.Telemetry.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			values := map[string]bool{}
			for _, l := range m.GetLabel() {
				values[l.GetValue()] = true
			}
			ok := true
			for _, l := range labels {
				ok = ok && values[l]
			}
			if ok {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}
