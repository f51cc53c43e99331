package cluster

import (
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/testutil/loopback"
)

// TestALateAttemptToOpenIsRepeated: whoever answers the first attempts too late answers another one in time. It is not
// repeated for longer than Options.Timeout, nor is what is refused.
func TestALateAttemptToOpenIsRepeated(t *testing.T) {
	g := newRig(t, 1, 1)
	late := loopback.Listen(t)
	var conns sync.WaitGroup
	var mu sync.Mutex
	accepted, silent := 0, 3
	conns.Go(func() {
		for {
			c, err := late.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			accepted++
			forward := accepted > silent
			mu.Unlock()
			conns.Go(func() {
				defer c.Close()
				if !forward {
					_, _ = io.Copy(io.Discard, c) // until the host gives up
					return
				}
				to, err := net.Dial("tcp", strings.TrimPrefix(g.nodes[0].address, "tcp://"))
				if err != nil {
					return
				}
				conns.Go(func() {
					_, _ = io.Copy(to, c)
					to.Close()
				})
				_, _ = io.Copy(c, to)
			})
		}
	})
	t.Cleanup(func() {
		late.Close()
		conns.Wait()
	})
	o := Options{Addresses: []string{late.Addr().String()}, SubNQN: testNQN,
		Connection: client.Options{ConnectTimeout: 100 * time.Millisecond}}
	s, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	mu.Lock()
	accepted, silent = 0, 1<<30
	mu.Unlock()
	o.Timeout = 250 * time.Millisecond
	if s, err := Open(t.Context(), o); err == nil {
		t.Errorf("nobody has answered: %v", s.Close())
	}
	mu.Lock()
	if accepted < 2 {
		t.Errorf("%d attempts", accepted)
	}
	accepted = 0
	mu.Unlock()
	gone := loopback.Listen(t)
	o.Addresses, o.Timeout = []string{gone.Addr().String()}, time.Hour
	gone.Close()
	if s, err := Open(t.Context(), o); err == nil {
		t.Errorf("nobody listens: %v", s.Close())
	}
}

// TestConnectionsOverRDMAMayTakeLonger than those over TCP, and as long as the options say.
func TestConnectionsOverRDMAMayTakeLonger(t *testing.T) {
	for address, want := range map[string]time.Duration{"192.0.2.1:4420": 3 * time.Second,
		"tcp://192.0.2.1:4420": 3 * time.Second, "rdma://192.0.2.1:4420": 10 * time.Second} {
		o, err := Options{Addresses: []string{address}, SubNQN: testNQN}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		if got := o.connection(address); got.ConnectTimeout != want || got.Address != address {
			t.Errorf("%s: %v, want %v", address, got.ConnectTimeout, want)
		}
		o.Connection.ConnectTimeout = time.Minute
		if got := o.connection(address).ConnectTimeout; got != time.Minute {
			t.Errorf("%s: %v, want a minute", address, got)
		}
	}
}
