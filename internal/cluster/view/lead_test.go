package view

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/uuid"
)

// led returns how many ranges each node leads.
func (v *View) led() []int {
	led := make([]int, len(v.Nodes))
	for _, c := range v.Chains {
		if len(c) > 0 {
			led[v.Partitions[c[0].Partition].Node]++
		}
	}
	return led
}

// excess is how many ranges are led by partitions beyond their shares.
func (v *View) excess() (all float64) {
	excess := make([]float64, len(v.Partitions))
	for _, c := range v.Chains {
		excess[c[0].Partition]++
		for _, m := range c {
			excess[m.Partition] -= 1 / float64(len(c))
		}
	}
	for _, e := range excess {
		all += max(e, 0)
	}
	return all
}

// handOver has each ChainHead that is not the leader yield, and returns the next view and how many did.
func handOver(t *testing.T, v *View) (next *View, moved int) {
	t.Helper()
	leaders := v.Leaders()
	next, changed := v.Next(yielding{allWell{v, nil}, leaders})
	if err := next.Check(); err != nil {
		t.Fatal(err)
	}
	for r, c := range next.Chains {
		if c[0].Partition != leaders[r] {
			t.Fatalf("range %d is led by %d, want %d", r, c[0].Partition, leaders[r])
		}
		if !slices.Equal(c, v.Chains[r]) {
			moved++
			if next.ChainEpochs[r] != v.ChainEpochs[r]+1 {
				t.Fatalf("range %d has epoch %d after %d", r, next.ChainEpochs[r], v.ChainEpochs[r])
			}
		}
	}
	if changed != (moved > 0) {
		t.Fatalf("%d chains differ; the view does: %t", moved, changed)
	}
	return next, moved
}

// yielding are reports of nodes that do what Leaders says.
type yielding struct {
	allWell
	leaders []PartitionID
}

func (y yielding) Range(p PartitionID, r int) Report {
	e := y.allWell.Range(p, r)
	if c := y.v.Chains[r]; len(c) > 0 && c[0].Partition == p && y.leaders[r] != p {
		e.Yield = Yield{ChainEpoch: y.v.ChainEpochs[r], To: y.leaders[r]}
	}
	return e
}

// TestLeadersAreSpread: each node leads its share in the end, also one that was away, and few more ranges change their
// ChainHead than have to. With the same view, all nodes find the same leaders.
func TestLeadersAreSpread(t *testing.T) {
	for _, c := range []struct{ nodes, parts, replicas, ranges int }{
		{3, 1, 3, 256}, {3, 4, 3, 1024}, {5, 2, 3, 256}, {7, 1, 2, 4096}, {40, 6, 3, 4096}, {4, 1, 4, 64},
		{2, 1, 2, 16},
	} {
		v := settle(t, cluster(c.nodes, c.parts, c.replicas, c.ranges))
		v, _ = handOver(t, v)
		for n := range uint16(2) {
			v = settle(t, settle(t, v, n)) // it was away
			if v.led()[n] != 0 {
				t.Fatalf("%+v: a node that was away leads %d ranges", c, v.led()[n])
			}
			moved, least := 0, v.excess()
			if v, moved = handOver(t, v); moved == 0 {
				t.Fatalf("%+v: no ChainHead has changed", c)
			}
			share := float64(c.ranges) / float64(c.nodes)
			led := v.led()
			if few, most := slices.Min(led), slices.Max(led); float64(few) < share-3*float64(c.parts) ||
				float64(most) > share+3*float64(c.parts) {
				t.Errorf("%+v: nodes lead %d to %d ranges, want about %.0f", c, few, most, share)
			}
			if float64(moved) > 1.7*least+1 { // some by way of a third node
				t.Errorf("%+v: %d ranges have changed their ChainHead, %.0f were led beyond a share", c, moved, least)
			}
			if _, moved = handOver(t, v); moved > 0 {
				t.Errorf("%+v: %d ranges change their ChainHead again", c, moved)
			}
		}
	}
}

// TestLeadersFollowWeights: who has more ranges leads more.
func TestLeadersFollowWeights(t *testing.T) {
	v := cluster(3, 1, 2, 1024)
	v.addNode("large", "", 1, 300)
	v = settle(t, v)
	v, _ = handOver(t, v)
	_, has := v.loads()
	for n, led := range v.led() {
		if d := led - has[n]/2; d < -2 || d > 2 {
			t.Errorf("node %d leads %d of its %d ranges", n, led, has[n])
		}
	}
}

// TestOnlyFullChainsChangeTheirHead enumerates all chains, what is wanted, and what is said, with each Yield besides:
// the ChainHead changes only if the chain stays as it is otherwise, has all its members, and is of that epoch.
func TestOnlyFullChainsChangeTheirHead(t *testing.T) {
	changed := 0
	everyCase(func(c Chain, wanted []PartitionID, said []Report) {
		if len(c) < 2 || !slices.Equal(Next(c, wanted, saying(said), now), c) {
			return
		}
		for to := range PartitionID(partitions + 1) {
			for _, epoch := range []uint32{0, 6, 7, 8} {
				next := HandOver(c, Yield{ChainEpoch: epoch, To: to}, 7)
				at := c.find(to)
				if epoch != 7 || !c.Full() || at < 1 {
					if !slices.Equal(next, c) {
						t.Fatalf("chain %v yields to %d in epoch %d: %v", c, to, epoch, next)
					}
					continue
				}
				changed++
				rest := slices.Delete(slices.Clone(c), at, at+1)
				if next[0] != c[at] || !slices.Equal(next[1:], rest) || legal(next) != nil {
					t.Fatalf("chain %v yields to %d: %v", c, to, next)
				}
				if again := Next(next, wanted, saying(said), now); !slices.Equal(again, next) {
					t.Fatalf("chain %v yields to %d: %v, and then %v", c, to, next, again)
				}
			}
		}
	})
	if changed == 0 {
		t.Error("no ChainHead has changed")
	}
	c := Chain{{State: Serving}, {Partition: 1, State: Serving}}
	if next := HandOver(c, Yield{To: 1}, 0); next[0].Partition != 0 {
		t.Error("a Yield of nothing is taken")
	}
}

// TestLeadersOfAThousandNodes are found soon: every node looks for them, once for each view.
func TestLeadersOfAThousandNodes(t *testing.T) {
	v := cluster(1000, 12, 3, 1<<15)
	rng := rand.New(rand.NewPCG(1, 2))
	for r := range v.Chains {
		for len(v.Chains[r]) < 3 {
			if p := PartitionID(rng.IntN(len(v.Partitions))); v.Chains[r].find(p) < 0 {
				v.Chains[r] = append(v.Chains[r], Member{Partition: p, State: Serving, Since: 1})
			}
		}
	}
	begin := time.Now()
	leaders := v.Leaders()
	if d := time.Since(begin); d > time.Second {
		t.Errorf("it took %v", d)
	} else {
		t.Logf("it took %v", d)
	}
	led := make([]int, len(v.Partitions))
	for _, p := range leaders {
		led[p]++
	}
	if most := slices.Max(led); most > 8 {
		t.Errorf("a partition leads %d ranges, of 2.7 on average", most)
	}
}

// TestNewChainsAreLedByAllPartitions in their proportion, from the first view on: nobody has data that would have to be
// kept, and no other view follows.
func TestNewChainsAreLedByAllPartitions(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	for range 50 {
		v := &View{Cluster: uuid.UUID{1}, Epoch: 1, Replicas: 1 + rng.IntN(3), Chains: make([]Chain, 64),
			ChainEpochs: make([]uint32, 64)}
		for n := range 3 + rng.IntN(3) {
			v.Nodes = append(v.Nodes, Node{Name: string(rune('a' + n))})
			for range 1 + rng.IntN(2) {
				v.Partitions = append(v.Partitions, Partition{ID: uuid.UUID{byte(len(v.Partitions) + 1)},
					Node: uint16(n), Weight: uint32(1 + rng.IntN(4))})
			}
		}
		next, changed := v.Next(allWell{v, nil})
		if err := next.Check(); err != nil || !changed {
			t.Fatalf("%v, changed %t", err, changed)
		}
		if most := float64(len(v.Partitions)) / 2; next.excess() > most {
			t.Errorf("%d partitions, %d replicas: ChainHeads beyond their shares: %.1f", len(v.Partitions), v.Replicas,
				next.excess())
		}
		if after, moved := next.Next(yielding{allWell{next, nil}, next.Leaders()}); moved {
			t.Errorf("the next view has other ChainHeads: %v", after.Chains)
		}
	}
}
