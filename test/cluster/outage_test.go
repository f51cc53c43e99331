package cluster

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"jbofd/internal/buildtags"
)

// kill ends the processes of all nodes at once.
func (all boxes) kill() {
	for _, b := range all {
		b.signal(syscall.SIGKILL)
	}
	for _, b := range all {
		_ = b.cmd.Wait() // says that it was killed
	}
}

// start starts the processes of all nodes.
func (all boxes) start() {
	all[0].t.Helper()
	for _, b := range all {
		b.start()
	}
}

// shuffled returns the nodes in a random order.
func (all boxes) shuffled(rng *rand.Rand) boxes {
	order := append(boxes(nil), all...)
	rng.Shuffle(len(order), func(i, k int) { order[i], order[k] = order[k], order[i] })
	return order
}

func (all boxes) String() string {
	var names []string
	for _, b := range all {
		names = append(names, b.name)
	}
	return strings.Join(names, ", ")
}

// readAll has each of the nodes, which have all keys, read all of them.
func (l *load) readAll(nodes boxes) {
	l.t.Helper()
	c := newCaller(l)
	defer c.close()
	for i, b := range l.all {
		for k := range keys {
			if slices.Contains(nodes, b) {
				what := fmt.Sprint("a read of key ", k, " at ", b.name)
				l.all.eventually(what, func() error { return c.read(k, i) })
			}
		}
	}
}

// refusesAll has the nodes, which lack the newest writes, refuse reads, until they have had the time to give up whoever
// is silent.
func (l *load) refusesAll(nodes boxes) {
	l.t.Helper()
	c := newCaller(l)
	defer c.close()
	for begin, refused := time.Now(), 0; time.Since(begin) < 2*time.Second || refused < 2*keys; {
		for i, b := range l.all {
			if slices.Contains(nodes, b) {
				k := c.rng.IntN(keys)
				l.all.eventually("an answer of "+b.name, func() error {
					err := c.read(k, i)
					if err == nil {
						l.t.Fatalf("%s answers a read of key %d, of which it may lack writes", b.name, k)
					}
					if elsewhere(err) {
						refused++
						return nil
					}
					return err
				})
			}
		}
	}
}

// TestAllNodesAreKilled at once, under load, and start again in a random order: at the same time; one of them five
// seconds after the others; and one that serves alone, is killed, and comes last. Every write that was acknowledged is
// there, and nobody needs to do anything. Before anything is written again, all nodes that serve are read, so that no
// write hides the loss of an earlier one.
func TestAllNodesAreKilled(t *testing.T) {
	if buildtags.Race {
		t.Skip("TestNodesAreKilled has the same goroutines")
	}
	t.Parallel()
	rng := rand.New(rand.NewPCG(newSeed(t), 0))
	all := newBoxes(t, 3, 3)
	l := startLoad(t, all, 6)
	served := func(nodes boxes) {
		t.Helper()
		l.readAll(nodes)
		l.readOnly.Store(false)
		l.allWritten()
	}
	killed := func(nodes boxes) time.Time {
		t.Helper()
		l.allWritten()
		nodes.kill()
		l.readOnly.Store(true)
		return time.Now()
	}
	for round := range rounds() {
		order := all.shuffled(rng)
		at := killed(all)
		order.start()
		all.full()
		t.Logf("round %d: all are killed, and start as %v: all copies are there after %v", round, order,
			time.Since(at).Round(time.Millisecond))
		served(all)

		order = all.shuffled(rng)
		at = killed(all)
		order[:2].start()
		served(order[:2])
		t.Logf("%v start, and serve after %v", order[:2], time.Since(at).Round(time.Millisecond))
		time.Sleep(5*time.Second - time.Since(at))
		order[2:].start()
		all.full()
		l.readAll(all)

		order = all.shuffled(rng)
		at = killed(all)
		order[:1].start()
		served(order[:1])
		t.Logf("%v starts, and serves alone after %v", order[:1], time.Since(at).Round(time.Millisecond))
		at = killed(order[:1])
		order[1:].start()
		l.refusesAll(order[1:])
		t.Logf("%v start in its place, and serve nothing: %v", order[1:], time.Since(at).Round(time.Millisecond))
		order[:1].start()
		served(order[:1])
		all.full()
		l.readAll(all)
	}
	l.stop()
}
