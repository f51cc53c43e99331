package replicas_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// setPartitionsOut decides which partitions are to have no ranges.
func (g *rig) setPartitionsOut(out ...int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := *g.view
	v.Partitions = slices.Clone(v.Partitions)
	for i := range v.Partitions {
		v.Partitions[i].Out = slices.Contains(out, i)
	}
	g.view = &v
}

// TestARangeMovesBetweenPartitionsOfANode: partitions 0 and 3 are on node 0. All ranges of 0 move to 3, while 0 serves:
// both are in one chain meanwhile.
func TestARangeMovesBetweenPartitionsOfANode(t *testing.T) {
	g := setup{nodes: 4, copies: 3, ranges: testRanges, onNode: []int{0, 1, 2, 0}}.rig(t)
	g.full(20 * time.Second)
	for i := range 50 {
		g.putSoon(fmt.Sprint("key", i), "value", uint64(i+1))
	}
	for _, from := range []int{0, 3, 0} {
		g.setPartitionsOut(from)
		g.soon("all ranges have moved", func() bool { return g.holds(g.nodes[from]) == 0 })
		g.full(20 * time.Second)
	}
	for i := range 50 {
		g.same(fmt.Append(nil, "key", i))
	}
}

// TestPartitionsOfNodesComeAndGo: three nodes with two partitions each, which are taken out and in, also while nodes
// are lost.
func TestPartitionsOfNodesComeAndGo(t *testing.T) { comeAndGo(t, false) }

// TestPartitionsComeAndGoWhileDrivesFail: the same, and drives fail writes, or are silent, for a while.
func TestPartitionsComeAndGoWhileDrivesFail(t *testing.T) { comeAndGo(t, true) }

func comeAndGo(t *testing.T, drives bool) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	onNode := []int{0, 1, 2, 0, 1, 2}
	c := &crowd{g: setup{nodes: len(onNode), copies: 2 + rng.IntN(2), ranges: testRanges, onNode: onNode,
		dropAfter: 50 * time.Millisecond, silentAfter: 500 * time.Millisecond}.rig(t)}
	g := c.g
	g.full(20 * time.Second)
	c.wanted.Store(math.MaxInt64)
	for i := range 4 {
		c.load.Go(func() { c.client(i) })
	}
	pause := func(most int) { time.Sleep(time.Duration(rng.IntN(most)) * time.Millisecond) }
	faulty := func(i int, r fault.Rule, most int) {
		g.nodes[i].dev.SetRules(r)
		pause(most)
		if rng.IntN(2) == 0 { // else for as long as others are faulty, too
			endSilence(g.nodes[i : i+1])
		}
	}
	kinds := 3
	if drives {
		kinds = 6
	}
	for range 4 {
		var out []int
		for range 2 + rng.IntN(5) {
			i := rng.IntN(len(onNode))
			switch rng.IntN(kinds) {
			case 0:
				g.loseNode(onNode[i], func() { pause(60) })
			case 3:
				faulty(i, fault.Rule{Ops: []ssd.Op{ssd.Write}, Err: ssd.ErrMedia}, 3000)
			case 4:
				faulty(i, fault.Rule{Hold: true}, 1500)
			case 5:
				faulty(i, fault.Rule{Ops: []ssd.Op{ssd.Write}, Err: ssd.ErrMedia, Probability: 0.5}, 1000)
			default:
				out = append(out, i)
				g.setPartitionsOut(out...)
				pause(60)
				if rng.IntN(2) == 0 {
					out = out[:len(out)-1]
					g.setPartitionsOut(out...)
				}
			}
			pause(60)
		}
		endSilence(g.nodes)
		g.setPartitionsOut()
		g.full(2 * time.Minute)
	}
	c.wanted.Store(0)
	c.load.Wait()
	g.atRest()
	done, acked := c.check()
	t.Logf("%d operations, %d writes acknowledged", done, acked)
}

// loseNode has the partitions of a node be away meanwhile.
func (g *rig) loseNode(number int, meanwhile func()) {
	name := fmt.Sprint("n", number)
	for _, away := range []bool{true, false} {
		for _, n := range g.nodes {
			if n.host == name {
				n.setAlive(!away)
			}
		}
		if away {
			meanwhile()
		}
	}
	for _, n := range g.nodes {
		for _, o := range g.nodes {
			if n.host == name || o.host == name {
				n.r.NodeReachable(o.host)
			}
		}
	}
}

// atRest waits until the view has not changed for a while.
func (g *rig) atRest() {
	g.t.Helper()
	last, since := view.Epoch(0), time.Now()
	g.soon("the view is at rest", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.view.Epoch != last {
			last, since = g.view.Epoch, time.Now()
		}
		return time.Since(since) > 500*time.Millisecond
	})
}
