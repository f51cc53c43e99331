package view

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"jbofd/internal/uuid"
)

// cluster is a view of n nodes with parts partitions each, without chains yet.
func cluster(n, parts, replicas, ranges int) *View {
	v := &View{Cluster: uuid.UUID{1}, Epoch: 1, Replicas: replicas, Chains: make([]Chain, ranges),
		ChainEpochs: make([]uint32, ranges)}
	for i := range n {
		v.addNode(fmt.Sprintf("node-%04d", i), "", parts, 100)
	}
	return v
}

func (v *View) addNode(name, domain string, parts int, weight uint32) uint16 {
	n := uint16(len(v.Nodes))
	v.Nodes = append(v.Nodes, Node{Name: name, Domain: domain})
	for range parts {
		id := uuid.UUID{2, byte(len(v.Partitions)), byte(len(v.Partitions) >> 8)}
		v.Partitions = append(v.Partitions, Partition{ID: id, Node: n, Weight: weight})
	}
	return n
}

// allWell are reports of nodes that are alive, but for some, and do what the view says.
type allWell struct {
	v    *View
	dead map[uint16]bool
}

func (a allWell) Alive(n uint16) bool       { return !a.dead[n] }
func (a allWell) Usable(p PartitionID) bool { return true }

func (a allWell) Failing(p PartitionID) bool { return false }
func (a allWell) Range(p PartitionID, r int) Report {
	return healthy(a.v.Chains[r], a.v.Epoch)(p)
}

// settle computes views until nothing changes.
func settle(t *testing.T, v *View, dead ...uint16) *View {
	t.Helper()
	gone := map[uint16]bool{}
	for _, n := range dead {
		gone[n] = true
	}
	for range 100 {
		next, changed := v.Next(allWell{v, gone})
		if err := next.Check(); err != nil {
			t.Fatal(err)
		}
		if !changed {
			return v
		}
		if next.Epoch != v.Epoch+1 {
			t.Fatalf("epoch %d follows %d", next.Epoch, v.Epoch)
		}
		v = next
	}
	t.Fatal("the view has not come to rest after 100 epochs")
	return nil
}

// loads returns how many ranges each partition and each node has.
func (v *View) loads() (parts, nodes []int) {
	parts, nodes = make([]int, len(v.Partitions)), make([]int, len(v.Nodes))
	for _, c := range v.Chains {
		for _, m := range c {
			parts[m.Partition]++
			nodes[v.Partitions[m.Partition].Node]++
		}
	}
	return parts, nodes
}

func TestPlacementIsEven(t *testing.T) {
	for _, c := range []struct{ nodes, parts, replicas, ranges int }{
		{3, 4, 3, 1024}, {5, 2, 3, 256}, {7, 12, 2, 4096}, {100, 12, 3, 4096}, {4, 1, 5, 64}, {1, 4, 3, 64},
	} {
		v := settle(t, cluster(c.nodes, c.parts, c.replicas, c.ranges))
		parts, _ := v.loads()
		if least, most := slices.Min(parts), slices.Max(parts); most-least > 1 {
			t.Errorf("%+v: partitions have %d to %d ranges", c, least, most)
		}
		for r, chain := range v.Chains {
			if len(chain) != min(c.nodes, c.replicas) {
				t.Fatalf("%+v: range %d has %d members", c, r, len(chain))
			}
			checkApart(t, v, r, false)
		}
	}
}

// checkApart checks that the members of a range are on different nodes, and in different domains.
func checkApart(t *testing.T, v *View, r int, domains bool) {
	t.Helper()
	seen := map[string]bool{}
	for _, m := range v.Chains[r] {
		n := v.Nodes[v.Partitions[m.Partition].Node]
		key := n.Name
		if domains {
			key = n.Domain
		}
		if m.State != Leaving && seen[key] {
			t.Fatalf("range %d has two members in %s: %v", r, key, v.Chains[r])
		}
		seen[key] = true
	}
}

func TestWeightsDecideHowMuchAPartitionHolds(t *testing.T) {
	v := cluster(0, 0, 2, 4096)
	for i := range 8 {
		v.addNode(fmt.Sprintf("n%d", i), "", 2, uint32(100*(1+i%3)))
	}
	v = settle(t, v)
	parts, _ := v.loads()
	total := 0.0
	for _, p := range v.Partitions {
		total += float64(p.Weight)
	}
	for id, p := range v.Partitions {
		if want := float64(p.Weight) / total * 2 * 4096; math.Abs(float64(parts[id])-want) > 2 {
			t.Errorf("partition %d of weight %d has %d ranges, want %.0f", id, p.Weight, parts[id], want)
		}
	}
}

func TestALargeNodeHoldsEachRangeOnce(t *testing.T) {
	v := cluster(3, 2, 2, 256)
	v.addNode("large", "", 2, 100_000)
	v = settle(t, v)
	_, nodes := v.loads()
	if nodes[3] != 256 {
		t.Errorf("the large node has %d of 256 ranges", nodes[3])
	}
	if least, most := slices.Min(nodes[:3]), slices.Max(nodes[:3]); most-least > 2 {
		t.Errorf("the others have %d to %d ranges", least, most)
	}
}

func TestReplicasAreInDifferentDomains(t *testing.T) {
	v := cluster(0, 0, 3, 1024)
	for i := range 9 {
		v.addNode(fmt.Sprintf("n%d", i), fmt.Sprintf("rack-%d", i%3), 2, 100)
	}
	v = settle(t, v)
	for r := range v.Chains {
		checkApart(t, v, r, true)
	}
	// With fewer domains than replicas the nodes differ at least.
	v.Nodes[2].Out, v.Nodes[5].Out, v.Nodes[8].Out = true, true, true
	v = settle(t, v)
	for r, c := range v.Chains {
		if len(c) != 3 {
			t.Fatalf("range %d has %d members without a third rack", r, len(c))
		}
		checkApart(t, v, r, false)
	}
}

// moved counts the members of b that are not in a, by node.
func moved(a, b *View) (n int, byNode []int) {
	byNode = make([]int, len(b.Nodes))
	for r, c := range b.Chains {
		for _, m := range c {
			if a.Chains[r].find(m.Partition) < 0 {
				n++
				byNode[b.Partitions[m.Partition].Node]++
			}
		}
	}
	return n, byNode
}

func TestALostNodeMovesOnlyItsShare(t *testing.T) {
	const nodes, ranges, replicas = 20, 4096, 3
	v := settle(t, cluster(nodes, 4, replicas, ranges))
	next := *v
	next.Nodes = slices.Clone(v.Nodes)
	next.Nodes[7].Out = true
	after := settle(t, &next, 7)
	n, byNode := moved(v, after)
	if share := ranges * replicas / nodes; n > share+share/10 {
		t.Errorf("%d of %d members of chains have moved, the lost node had %d", n, ranges*replicas, share)
	}
	for i, got := range byNode {
		if even := n / (nodes - 1); i != 7 && (got < even*4/5 || got > even*6/5) {
			t.Errorf("node %d has got %d ranges of the lost one, want %d", i, got, even)
		}
	}
	// While it is away and not given up, nothing moves.
	away := settle(t, v, 7)
	if n, _ := moved(v, away); n != 0 {
		t.Errorf("%d members have moved while a node was away", n)
	}
	for r, c := range away.Chains {
		if c.Halted() {
			t.Fatalf("range %d is halted by one node: %v", r, c)
		}
	}
}

// TestFewerCopiesMoveHardlyAny: of each range one replica is dropped, so that what is left is even, also among the
// partitions of a node. At most one of two hundred moves for that.
func TestFewerCopiesMoveHardlyAny(t *testing.T) {
	for _, c := range []struct{ nodes, parts, replicas, ranges int }{{3, 2, 3, 256}, {5, 4, 5, 1024}, {3, 1, 2, 64},
		{20, 3, 4, 4096}} {
		v := settle(t, cluster(c.nodes, c.parts, c.replicas, c.ranges))
		for replicas := c.replicas - 1; replicas > 0; replicas-- {
			next := *v
			next.Replicas = replicas
			after := settle(t, &next)
			if n, _ := moved(v, after); n > c.ranges*replicas/200 {
				t.Errorf("%+v: %d of %d members have moved for %d copies", c, n, c.ranges*replicas, replicas)
			}
			parts, _ := after.loads()
			if lo, hi := slices.Min(parts), slices.Max(parts); hi-lo > 2 {
				t.Errorf("%+v: with %d copies partitions have %d to %d ranges", c, replicas, lo, hi)
			}
			v = after
		}
	}
}

func TestTheReadsOfALostNodeSpreadOverAllOthers(t *testing.T) {
	const nodes = 12
	v := settle(t, cluster(nodes, 2, 3, 4096))
	together := make([]int, nodes) // ranges that node 0 and another one have together
	for _, c := range v.Chains {
		if slices.ContainsFunc(c, func(m Member) bool { return v.Partitions[m.Partition].Node == 0 }) {
			for _, m := range c {
				together[v.Partitions[m.Partition].Node]++
			}
		}
	}
	even := 2 * together[0] / (nodes - 1)
	for n, got := range together[1:] {
		if got < even*3/4 || got > even*5/4 {
			t.Errorf("node %d shares %d ranges with node 0, want about %d", n+1, got, even)
		}
	}
}

func TestANewNodeTakesItsShare(t *testing.T) {
	v := settle(t, cluster(10, 4, 3, 2048))
	next := *v
	next.Nodes, next.Partitions = slices.Clone(v.Nodes), slices.Clone(v.Partitions)
	n := next.addNode("new", "", 4, 100)
	after := settle(t, &next)
	count, byNode := moved(v, after)
	if share := 2048 * 3 / 11; byNode[n] < share-4 || byNode[n] > share+4 || count != byNode[n] {
		t.Errorf("the new node has %d ranges, want %d; %d have moved", byNode[n], share, count)
	}
	for r, c := range after.Chains {
		if len(c) != 3 {
			t.Fatalf("range %d has %d members", r, len(c))
		}
	}
}

func TestReplicasChangeLive(t *testing.T) {
	v := settle(t, cluster(6, 2, 3, 256))
	for _, replicas := range []int{5, 1, 2, 3} {
		next := *v
		next.Replicas = replicas
		v = settle(t, &next)
		for r, c := range v.Chains {
			if len(c) != replicas {
				t.Fatalf("range %d has %d members, want %d", r, len(c), replicas)
			}
		}
	}
}

// TestAThousandNodes is the largest cluster that is promised.
func TestAThousandNodes(t *testing.T) {
	v := settle(t, cluster(1000, 12, 3, 32768))
	if n := len(v.Encode()); n > 1<<20 {
		t.Errorf("the record has %d bytes, want at most 1 MiB", n)
	}
	next := *v
	next.Nodes = slices.Clone(v.Nodes)
	next.Nodes[17].Out = true
	begin := time.Now()
	after, _ := next.Next(allWell{&next, map[uint16]bool{17: true}})
	took := time.Since(begin)
	t.Logf("a view of 12000 partitions takes %v, its record %d bytes", took, len(after.Encode()))
	if took > time.Second {
		t.Errorf("the next view took %v, want at most 1 s", took)
	}
	changed := 0
	for r := range after.Chains {
		for _, m := range after.Chains[r] {
			if i := v.Chains[r].find(m.Partition); i < 0 || v.Chains[r][i].State != m.State {
				changed++
			}
		}
	}
	if most := 2 * 32768 * 3 / 1000; changed > most {
		t.Errorf("%d members of chains have changed, want at most %d (2/N)", changed, most)
	}
}
