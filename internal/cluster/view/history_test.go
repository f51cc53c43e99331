package view

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/invariants"
	"jbofd/internal/uuid"
)

var (
	seedFlag = flag.Uint64("seed", 0, "seed of the random histories; 0: a new one")
	runsFlag = flag.Uint64("runs", runs(), "number of random histories")
)

// runs is how many histories there are unless -runs says so: most where each invariant is checked.
func runs() uint64 {
	if invariants.Enabled {
		return 3200
	}
	return 60
}

// TestRandomHistories lets nodes die, come back and lose their data, while ranges are filled at random speed. At every
// epoch the view is valid, and what a range has acknowledged is held by every member that serves.
func TestRandomHistories(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	forgotten := 0
	for run := range *runsFlag {
		forgotten += history(t, rand.New(rand.NewPCG(seed, run)))
	}
	if t.Logf("%d nodes forgotten", forgotten); forgotten == 0 {
		t.Error("no node was forgotten")
	}
}

// world is what is true in a history: which epoch's writes each partition has of each range.
type world struct {
	v     *View
	rng   *rand.Rand
	alive []bool
	// written counts the writes that a range has acknowledged, has those that a partition has, of each range.
	written []int
	has     [][]int
	// complete says that a node believes to have all of a range, and since which epoch.
	complete [][]Epoch
	// joined and forgotten count nodes.
	joined, forgotten int
}

func (w *world) Alive(n uint16) bool       { return w.alive[n] }
func (w *world) Usable(p PartitionID) bool { return true }

func (w *world) Failing(p PartitionID) bool { return false }
func (w *world) Range(p PartitionID, r int) Report {
	if e := w.complete[p][r]; e > 0 {
		return Report{Local: Complete, Epoch: e}
	}
	return Report{Local: Incomplete, Epoch: w.v.Epoch}
}

func history(t *testing.T, rng *rand.Rand) (forgotten int) {
	replicas := 1 + rng.IntN(4)
	v := cluster(2+rng.IntN(5), 1+rng.IntN(2), replicas, 16)
	w := &world{v: v, rng: rng, alive: make([]bool, len(v.Nodes)), written: make([]int, 16)}
	for i := range w.alive {
		w.alive[i] = true
	}
	for range v.Partitions {
		w.has, w.complete = append(w.has, make([]int, 16)), append(w.complete, make([]Epoch, 16))
	}
	for step := range 400 {
		calm := step > 300 // in the end all nodes are alive, and none is out
		w.disturb(calm)
		w.members(calm)
		next, _ := w.v.Next(w)
		for r := range next.Chains {
			same := slices.Equal(next.Chains[r], w.v.Chains[r])
			if same != (next.ChainEpochs[r] == w.v.ChainEpochs[r]) {
				t.Fatalf("range %d has epoch %d after %d: %v, %v", r, next.ChainEpochs[r], w.v.ChainEpochs[r],
					w.v.Chains[r], next.Chains[r])
			}
		}
		if err := next.Check(); err != nil {
			t.Fatal(err)
		}
		w.adopt(t, next)
		w.work(t)
	}
	for r, c := range w.v.Chains {
		if len(c.serving()) != min(replicas, len(w.v.Nodes)) || len(c) != len(c.serving()) {
			t.Fatalf("range %d has not recovered: %v", r, c)
		}
	}
	return w.forgotten
}

// disturb changes which nodes are alive, and lets one lose its data while others have them.
func (w *world) disturb(calm bool) {
	n := w.rng.IntN(len(w.alive))
	switch {
	case calm:
		w.alive[n] = true
		w.alive[w.rng.IntN(len(w.alive))] = true
	case w.rng.IntN(3) == 0:
		w.alive[n] = !w.alive[n]
	}
	if calm || w.rng.IntN(10) > 0 || !w.alive[n] {
		return
	}
	// A node loses a range if others serve it besides.
	for p := range w.has {
		if w.v.Partitions[p].Node != uint16(n) {
			continue
		}
		for r, c := range w.v.Chains {
			if len(c.serving()) > 1 && !c.Halted() && w.otherAlive(c, r, uint16(n)) {
				w.has[p][r], w.complete[p][r] = 0, 0
			}
		}
	}
}

// members changes who is a member: nodes are drained, forgotten when they hold nothing and are not alive, and others
// join, whose partitions get the entries of forgotten ones, with what was reported of those.
func (w *world) members(calm bool) {
	v := *w.v
	v.Nodes, v.Partitions = slices.Clone(v.Nodes), slices.Clone(v.Partitions)
	n := w.rng.IntN(len(v.Nodes))
	switch kind := w.rng.IntN(8); {
	case calm:
		v.Nodes[n].Out = false
	case kind == 0:
		v.Nodes[n].Out = !v.Nodes[n].Out
	case kind < 5 && !w.alive[n] && len(v.Nodes) > 1:
		if held := v.Ranges(n); v.Forget(n) != (held == 0) {
			panic("a node is forgotten that is a member of a range, or the reverse")
		} else if held == 0 {
			w.alive = slices.Delete(w.alive, n, n+1)
			w.forgotten++
		}
	case kind == 5 && len(v.Nodes) < 7:
		w.joined++
		v.Nodes = append(v.Nodes, Node{Name: fmt.Sprint("later ", w.joined)})
		v.Add(uuid.UUID{3, byte(w.joined), byte(w.joined >> 8)}, uint16(len(v.Nodes)-1), 100)
		w.alive = append(w.alive, true)
		for len(w.has) < len(v.Partitions) {
			w.has, w.complete = append(w.has, make([]int, 16)), append(w.complete, make([]Epoch, 16))
		}
	}
	w.v = &v
}

// otherAlive reports whether a member of range r on another node than n is alive and complete.
func (w *world) otherAlive(c Chain, r int, n uint16) bool {
	for _, m := range c.serving() {
		if node := w.v.Partitions[m.Partition].Node; node != n && w.alive[node] && w.complete[m.Partition][r] > 0 {
			return true
		}
	}
	return false
}

// adopt makes the next view the present one: nodes that are alive learn their memberships.
func (w *world) adopt(t *testing.T, next *View) {
	for r, c := range next.Chains {
		for _, m := range c {
			p := m.Partition
			old := w.v.Chains[r]
			if i := old.find(p); m.State == Serving && (i < 0 || old[i].State == Filling) && len(old) > 0 {
				if w.has[p][r] != w.written[r] {
					t.Fatalf("range %d: partition %d serves with %d of %d writes", r, p, w.has[p][r], w.written[r])
				}
			}
			if !w.alive[next.Partitions[p].Node] {
				continue
			}
			switch {
			case m.State == Waiting || m.State == Filling && m.Since == next.Epoch:
				w.complete[p][r] = 0
			case m.State <= Leaving && len(old) == 0:
				w.complete[p][r] = next.Epoch
			}
		}
	}
	w.v = next
}

// work lets each range that serves acknowledge a write, by all members that serve if they are alive, and fills.
func (w *world) work(t *testing.T) {
	for r, c := range w.v.Chains {
		serving := c.serving()
		able := len(serving) > 0
		for _, m := range serving {
			able = able && w.alive[w.v.Partitions[m.Partition].Node] && w.complete[m.Partition][r] > 0
		}
		for _, m := range serving {
			if able && w.has[m.Partition][r] != w.written[r] {
				t.Fatalf("range %d: partition %d serves with %d of %d writes", r, m.Partition, w.has[m.Partition][r],
					w.written[r])
			}
		}
		if !able {
			continue
		}
		w.written[r]++
		for _, m := range serving {
			w.has[m.Partition][r]++
		}
		for _, m := range c {
			if m.State == Filling && w.alive[w.v.Partitions[m.Partition].Node] && w.rng.IntN(3) == 0 {
				w.has[m.Partition][r], w.complete[m.Partition][r] = w.written[r], w.v.Epoch
			}
		}
	}
}
