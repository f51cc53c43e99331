package client

import (
	"context"
	"testing"
	"time"

	"jbofd/internal/nvme"
)

// quick returns options with short timeouts.
func quick(s *script) Options {
	o := Options{Address: s.addr(), SubNQN: "nqn.2026-11.example.jbofd:test", Queues: 2, QueueDepth: 32,
		ReconnectDelay: time.Millisecond, CtrlLossTimeout: 20 * time.Second}
	if s.rdma != nil {
		o.RDMA = s.rdma.host
	}
	return o
}

func connect(t testing.TB, o Options) (*Controller, *Namespace) {
	t.Helper()
	ctx := testContext(t)
	c, err := Connect(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	n, err := c.Namespace(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	return c, n
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// eventually polls for an event that cannot be waited for otherwise.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(15 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not within 15 s: %s", what)
		}
	}
}

// overEach runs a test over each transport, in parallel with others.
func overEach(t *testing.T, diskBytes int, test func(*testing.T, *script)) {
	t.Parallel()
	for _, rdma := range []bool{false, true} {
		t.Run(map[bool]string{false: "tcp", true: "rdma"}[rdma], func(t *testing.T) {
			t.Parallel()
			test(t, newScriptOver(t, rdma, diskBytes))
		})
	}
}

func newScriptOver(t testing.TB, rdma bool, diskBytes int) *script {
	if rdma {
		return newRDMAScript(t, diskBytes)
	}
	return newScript(t, diskBytes)
}

// stall makes the script drop all further commands of one name. The function that it returns ends that.
func (s *script) stall(name string) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	probe := map[string]uint8{"read": nvme.CmdRead, "write": nvme.CmdWrite, "compare": nvme.CmdCompare,
		"keepalive": nvme.AdminKeepAlive}[name]
	s.stalled = func(e *nvme.SQE) bool { return e.Opcode() == probe }
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.stalled = nil
	}
}
