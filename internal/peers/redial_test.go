package peers_test

import (
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/peers"
	"jbofd/internal/testutil/loopback"
)

// TestAViewAndRedialEndThePause between attempts to connect, however long it is.
func TestAViewAndRedialEndThePause(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		for what, again := range map[string]func(r *rig, b *box){
			"a view": func(r *rig, b *box) { r.see(b) },
			"Redial": func(r *rig, _ *box) { r.Redial() },
		} {
			t.Run(what, func(t *testing.T) {
				b := w.box(t, "b", 1)
				b.State.Subsystems[0].Nodes = nil
				b.reload()
				r := w.rig(t, func(c *peers.Config) { c.MinPause, c.MaxPause = time.Hour, time.Hour }, b)
				r.see(b)
				<-r.lost
				b.State.Subsystems[0].Nodes = nodeA
				b.reload()
				again(r, b)
				r.awaitConnected(t, "b")
			})
		}
	})
}

// TestRedialEndsAnAttemptThatTakesLong, but not two in a row.
func TestRedialEndsAnAttemptThatTakesLong(t *testing.T) {
	t.Parallel()
	l := loopback.Listen(t)
	var accepted atomic.Int32
	conns := make(chan struct{}, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			conns <- struct{}{}
			defer c.Close()
		}
	}()
	defer l.Close()
	r := newRig(t, func(c *peers.Config) { c.Timeout, c.KATO = time.Hour, 200*time.Millisecond },
		peers.Node{Name: "b", Address: l.Addr().String(), SubNQN: "nqn.2026-11.example.jbofd:test"})
	r.SetView(mapOf(place{"b", partitionID("b", 0)}))
	await := func(what string) {
		t.Helper()
		select {
		case <-conns:
		case <-time.After(wait):
			t.Fatal(what)
		}
	}
	await("no attempt to connect")
	r.Redial()
	await("no other attempt after Redial")
	<-r.lost
	r.Redial()
	time.Sleep(300 * time.Millisecond) // longer than an attempt must have taken to be cut short
	if n := accepted.Load(); n != 2 {
		t.Errorf("%d attempts, want 2", n)
	}
}

// TestANodeThatTheConfigurationDoesNotHaveIsDisconnected, in each view that has it.
func TestANodeThatTheConfigurationDoesNotHaveIsDisconnected(t *testing.T) {
	t.Parallel()
	names := make(chan string, 10)
	r := newRig(t, func(c *peers.Config) { c.Disconnected = func(node string, _ peers.Loss) { names <- node } })
	for range 2 {
		r.SetView(mapOf(place{"a", partitionID("a", 0)}, place{"c", partitionID("c", 0)}))
		if len(names) != 1 || <-names != "c" {
			t.Error("node c is not called disconnected once")
		}
	}
	r.SetView(mapOf(place{"a", partitionID("a", 0)}))
	if len(names) != 0 {
		t.Errorf("%s is called disconnected", <-names)
	}
}
