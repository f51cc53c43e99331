package replicas_test

import (
	"fmt"
	"testing"
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
)

// ledger writes keys one after the other and knows what was acknowledged.
type ledger struct {
	g    *rig
	seq  uint64
	have map[string]string
}

// write puts a value of each of some keys.
func (l *ledger) write() {
	for i := range 24 {
		key := fmt.Sprint("key", i)
		l.seq++
		value := fmt.Sprint("value", l.seq)
		l.g.putSoon(key, value, l.seq)
		l.have[key] = value
	}
}

// await writes until something is so.
func (l *ledger) await(what string, ok func() bool) {
	l.g.t.Helper()
	for end := time.Now().Add(patient); !ok(); l.write() {
		if time.Now().After(end) {
			l.g.t.Fatalf("not within %v: %s\n%s", patient, what, l.g.describe())
		}
	}
}

// patient is the time limit for what is expected of several nodes on a busy machine.
const patient = 2 * time.Minute

// describe says what the manager knows, and which nodes are alive and have authority.
func (g *rig) describe() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	text := fmt.Sprintf("epoch %d, frozen %t: %v", g.view.Epoch, g.frozen.Load(), g.view.Chains)
	for _, n := range g.nodes {
		text += fmt.Sprintf("\nnode %d: alive %t", n.id, n.alive.Load())
	}
	return text
}

// settled waits until all ranges are full, and looks whether each member has what was acknowledged.
func (l *ledger) settled() {
	l.g.t.Helper()
	l.write()
	l.g.full(patient)
	h := newHost()
	end := time.Now().Add(patient)
	for key, value := range l.have {
		for moved := true; moved; {
			moved = false
			for _, n := range l.g.chain([]byte(key)) {
				h.get(key)
				h.ask(n)
				switch code := h.Status.Code(); {
				case code == nvme.KVWrongView || code == nvme.NamespaceNotReady:
					moved = true // a view has followed
					if time.Now().After(end) {
						l.g.t.Fatalf("node %d does not answer a read of %s within %v: %v\n%s", n.id, key, patient,
							h.Status, l.g.describe())
					}
				case code != nvme.Success || string(h.Value[:h.Bytes]) != value:
					l.g.t.Fatalf("node %d has %q of %s, with %v; want %q", n.id, h.Value[:h.Bytes], key, h.Status,
						value)
				}
			}
		}
	}
}

// spare has a node without ranges.
func (l *ledger) spare(n *node) {
	l.g.t.Helper()
	l.g.setOut(n.id)
	l.await("the node has no ranges", func() bool { return l.g.holds(n) == 0 })
	l.settled()
}

// holds counts the ranges in whose chain a node is.
func (g *rig) holds(n *node) (count int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.view.Chains {
		for _, m := range c {
			if int(m.Partition) == n.id {
				count++
			}
		}
	}
	return count
}

// whileFilling does something after begin, when the nodes have been told of a view in which a member is filled, and of
// no later one. Meanwhile keys are written.
func (l *ledger) whileFilling(begin func(), do func(copier, filled *node)) {
	l.g.t.Helper()
	g, at := l.g, [2]int{}
	g.mu.Lock()
	g.freezeAt = func(v *view.View) bool {
		for _, c := range v.Chains {
			for i := 1; i < len(c); i++ {
				if c[i].State == view.Filling && c[i-1].State <= view.Leaving {
					at = [2]int{int(c[i-1].Partition), int(c[i].Partition)}
					return true
				}
			}
		}
		return false
	}
	g.mu.Unlock()
	begin()
	l.await("a member is filled", g.frozen.Load)
	do(g.nodes[at[0]], g.nodes[at[1]])
	g.frozen.Store(false)
	l.write()
}

// setOut decides which nodes are to have no ranges.
func (g *rig) setOut(out ...int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	nodes := append([]view.Node{}, g.view.Nodes...)
	for i := range nodes {
		nodes[i].Out = false
	}
	for _, i := range out {
		nodes[i].Out = true
	}
	v := *g.view
	v.Nodes = nodes
	g.view = &v
}

// TestEventsOfAChain has one of everything that happens to a chain, while keys are written. Each write is acknowledged
// within a bound, no command of an operator is needed, and in the end all copies are there and equal. The table in
// docs/cluster.md says what is done about each.
func TestEventsOfAChain(t *testing.T) {
	fail := func(place int) func(l *ledger) {
		return func(l *ledger) {
			n := l.g.chain([]byte("key0"))[place]
			n.setAlive(false)
			l.await("the chain goes on without it", func() bool { return len(l.g.chain([]byte("key0"))) == 2 })
			n.setAlive(true)
		}
	}
	for name, c := range map[string]struct {
		nodes int
		do    func(l *ledger)
	}{
		"the ChainHead fails": {3, fail(0)},
		"a middle one fails":  {3, fail(1)},
		"the ChainTail fails": {3, fail(2)},
		"two fail, one after the other": {5, func(l *ledger) {
			g := l.g
			l.whileFilling(func() {
				g.nodes[4].setAlive(false)
				g.setOut(4)
			}, func(_, _ *node) {
				g.nodes[3].setAlive(false)
				g.setOut(3, 4)
			})
			l.settled()
			g.nodes[3].setAlive(true)
			g.nodes[4].setAlive(true)
			g.setOut()
		}},
		"who copies fails": {4, func(l *ledger) {
			g := l.g
			l.spare(g.nodes[3])
			var copier *node
			l.whileFilling(func() { g.setOut() }, func(c, _ *node) {
				copier = c
				c.setAlive(false)
			})
			l.write()
			copier.setAlive(true)
		}},
		"who is filled fails": {4, func(l *ledger) {
			g := l.g
			l.spare(g.nodes[3])
			l.whileFilling(func() { g.setOut() }, func(_, filled *node) { filled.setAlive(false) })
			l.write()
			g.nodes[3].setAlive(true)
		}},
		"a node joins while another one leaves": {4, func(l *ledger) {
			g := l.g
			l.spare(g.nodes[3])
			g.setOut(0)
			l.await("the one that leaves has nothing", func() bool { return g.holds(g.nodes[0]) == 0 })
			if g.holds(g.nodes[3]) == 0 {
				g.t.Error("the one that joins has nothing")
			}
			g.setOut()
		}},
		"the one that joins changes its mind": {4, func(l *ledger) {
			g := l.g
			l.spare(g.nodes[3])
			l.whileFilling(func() { g.setOut() }, func(_, _ *node) { g.setOut(3) })
			l.await("it has nothing", func() bool { return g.holds(g.nodes[3]) == 0 })
		}},
		"all fail together": {3, func(l *ledger) {
			for _, n := range l.g.nodes {
				n.setAlive(false)
			}
			time.Sleep(30 * time.Millisecond) // some views
			for _, n := range l.g.nodes {
				n.setAlive(true)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &ledger{g: newRig(t, c.nodes, 3), have: map[string]string{}}
			l.g.full(patient)
			l.write()
			c.do(l)
			l.settled()
		})
	}
}
