package peers_test

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"jbofd/internal/peers"
	"jbofd/internal/testutil/loopback"
)

// setNodes calls SetNodes.
func (r *rig) setNodes(t *testing.T, nodes ...peers.Node) {
	t.Helper()
	if err := r.SetNodes(nodes); err != nil {
		t.Fatal(err)
	}
}

// TestANodeThatMovesIsDisconnected before SetNodes returns, also where nobody answers at its new address; one that the
// view does not have is not.
func TestANodeThatMovesIsDisconnected(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		l := loopback.Listen(t) // accepts nothing
		defer l.Close()
		b, c := w.box(t, "b", 1), w.box(t, "c", 1)
		r := w.rig(t, nil, b, c)
		r.see(b)
		r.awaitConnected(t, "b")
		moved, other := b.node(), c.node()
		moved.Address, other.Address = "tcp://"+l.Addr().String(), "tcp://"+l.Addr().String()
		r.setNodes(t, moved, other)
		if n := len(r.lost); n != 1 {
			t.Fatalf("%d losses when SetNodes has returned, want 1", n)
		}
		<-r.lost
		r.setNodes(t, b.node(), c.node())
		r.awaitConnected(t, "b")
	})
}

// TestAMovedNodeIsNotCalledDisconnectedLate: neither by the goroutine for its old address, nor by a call that has begun
// before and takes long.
func TestAMovedNodeIsNotCalledDisconnectedLate(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b, elsewhere := w.box(t, "b", 1), w.box(t, "b", 1)
		b.State.Subsystems[0].Nodes = nil // refuses
		b.reload()
		var mu sync.Mutex
		var told []string
		tell := func(what string) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, what)
		}
		began, goOn := make(chan struct{}), make(chan struct{})
		var once sync.Once
		connected := make(chan struct{}, 1)
		r := w.rig(t, func(c *peers.Config) {
			c.Connected = func(string) { tell("connected"); connected <- struct{}{} }
			c.Disconnected = func(string, peers.Loss) {
				once.Do(func() { close(began); <-goOn })
				tell("disconnected")
			}
		}, b)
		r.see(b)
		<-began
		late := r.Disconnected("b")
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.setNodes(t, elsewhere.node())
		}()
		select {
		case <-connected:
			t.Error("connected while it is called disconnected")
		case <-time.After(100 * time.Millisecond): // most likely a broken one has connected then
		}
		close(goOn)
		<-done
		<-connected
		late(peers.Loss{})
		mu.Lock()
		defer mu.Unlock()
		if told[len(told)-1] != "connected" {
			t.Errorf("told: %v, want connected as the last one", told)
		}
	})
}

// TestWhatThereWasOfANodeIsGivenUp when it moves or is removed.
func TestWhatThereWasOfANodeIsGivenUp(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b, elsewhere := w.box(t, "b", 1), w.box(t, "b", 1)
		r := w.rig(t, nil, b)
		r.see(b)
		r.awaitConnected(t, "b")
		for _, nodes := range [][]peers.Node{{elsewhere.node()}, nil} {
			r.send(r.forward(0, 1, 64))
			r.sink.await(t, 1)
			gone := r.Gone("b")
			r.setNodes(t, nodes...)
			if nodes != nil {
				r.awaitConnected(t, "b")
			}
			eventually(t, "nothing refers to the node", func() bool {
				runtime.GC()
				return gone()
			})
		}
	})
}
