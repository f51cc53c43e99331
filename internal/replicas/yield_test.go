package replicas_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
	"jbofd/internal/ssd"
)

// led counts the ranges that each node leads, and the chains that are full.
func (g *rig) led() (led []int, full int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	led = make([]int, len(g.nodes))
	for _, c := range g.view.Chains {
		if c.Full() && len(c) == g.view.Replicas {
			led[c[0].Partition]++
			full++
		}
	}
	return led, full
}

// spread reports whether all ranges are full, and each node leads as many as the others.
func (g *rig) spread() bool {
	led, full := g.led()
	least, most := led[0], led[0]
	for _, n := range led {
		least, most = min(least, n), max(most, n)
	}
	return full == testRanges && most-least <= 1
}

// TestANodeThatWasAwayLeadsItsShareAgain, while keys are written, and nothing that was acknowledged is lost.
func TestANodeThatWasAwayLeadsItsShareAgain(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: testRanges, yieldAfter: 20 * time.Millisecond}.rig(t)
	g.full(patient)
	l := &ledger{g: g, have: map[string]string{}}
	l.await("each node leads its share", g.spread)
	for round := range 2 {
		n := g.nodes[round]
		n.setAlive(false)
		l.await("the others go on", func() bool { return g.holds(n) == 0 || g.leads(n) == 0 })
		n.setAlive(true)
		for i := range g.nodes {
			g.nodes[i].r.NodeReachable(fmt.Sprint("n", n.id))
			n.r.NodeReachable(fmt.Sprint("n", i))
		}
		l.await("each node leads its share again", g.spread)
		l.settled()
	}
}

func (g *rig) leads(n *node) int {
	led, _ := g.led()
	return led[n.id]
}

// TestAnotherChainHeadCostsNoCopy: with clients that write all the time, ChainHeads change when a node is back, and no
// member is filled because of that: those that had the data have it all the time.
func TestAnotherChainHeadCostsNoCopy(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: testRanges, yieldAfter: 2 * time.Second}.rig(t)
	g.full(patient)
	var load sync.WaitGroup
	var over atomic.Bool
	var longest, writes atomic.Int64
	for c := range 6 {
		load.Go(func() {
			rng := rand.New(rand.NewPCG(rand.Uint64(), uint64(c)))
			for seq := uint64(1); !over.Load(); seq++ {
				begin := time.Now()
				g.putSoonAs(uint64(c+10), fmt.Sprint("key", rng.IntN(40)), fmt.Sprint("value", seq), seq)
				for d := int64(time.Since(begin)); ; {
					if was := longest.Load(); d <= was || longest.CompareAndSwap(was, d) {
						break
					}
				}
				writes.Add(1)
			}
		})
	}
	n := g.nodes[0]
	n.setAlive(false)
	l := &ledger{g: g, have: map[string]string{}}
	l.await("the others go on", func() bool { return g.holds(n) == 0 || g.leads(n) == 0 })
	n.setAlive(true)
	for i := range g.nodes {
		g.nodes[i].r.NodeReachable(fmt.Sprint("n", n.id))
		n.r.NodeReachable(fmt.Sprint("n", i))
	}
	g.full(patient)
	if g.leads(n) == testRanges/3 {
		t.Fatal("the node leads its share already")
	}
	before := g.memberships()
	longest.Store(0)
	was := writes.Load()
	l.await("each node leads its share again", g.spread)
	t.Logf("%d writes, the longest %v", writes.Load()-was, time.Duration(longest.Load()))
	over.Store(true)
	load.Wait()
	if after := g.memberships(); !maps.Equal(before, after) {
		t.Errorf("members were filled:\n%v\n%v", before, after)
	}
}

// memberships returns since when each partition is a member of each range.
func (g *rig) memberships() map[[2]int]view.Epoch {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := map[[2]int]view.Epoch{}
	for r, c := range g.view.Chains {
		for _, m := range c {
			all[[2]int{r, int(m.Partition)}] = m.Since
		}
	}
	return all
}

// TestAMemberThatIsLeftWithAWriteSaysSo: a view has another ChainHead while a member has a write that this one does not
// have. It reports that it lacks data as soon as it knows, so that writes go on without it.
func TestAMemberThatIsLeftWithAWriteSaysSo(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(patient)
	g.frozen.Store(true)
	chain, h := g.chain([]byte("key")), newHost()
	chain[2].alive.Store(false)
	h.put("key", "value")
	h.Sink, h.Tenant = h, 3
	var b replicas.Batch
	b.Add(&h.Request)
	chain[0].r.Submit(&b)
	await := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(patient); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not within %v: %s", patient, what)
			}
		}
	}
	await("the second member has the write", func() bool { return chain[1].r.Dirty() == 1 })
	number, c := g.rangeOf("key")
	m := g.withChain(number, view.Chain{c[2], c[1]})
	chain[1].r.SetState(m, m) // before it could send the write again
	chain[2].alive.Store(true)
	for _, n := range []*node{chain[2], chain[0]} {
		n.r.SetState(m, m)
	}
	<-h.done
	for _, n := range chain {
		chain[1].r.NodeReachable(fmt.Sprint("n", n.id))
		chain[2].r.NodeReachable(fmt.Sprint("n", n.id))
	}
	await("the member that is left with a write reports that", func() bool {
		return g.Range(c[1].Partition, number).Local == view.Incomplete
	})
}

// rangeOf returns the number of a key's range, and its chain.
func (g *rig) rangeOf(key string) (int, view.Chain) {
	g.mu.Lock()
	defer g.mu.Unlock()
	number := g.view.RangeOf(position([]byte(key)))
	return number, g.view.Chains[number]
}

// withChain returns the next view, which has another chain of one range.
func (g *rig) withChain(number int, c view.Chain) *cluster.Map {
	g.mu.Lock()
	defer g.mu.Unlock()
	next := *g.view
	next.Epoch++
	next.Chains, next.ChainEpochs = slices.Clone(next.Chains), slices.Clone(next.ChainEpochs)
	next.Chains[number] = c
	next.ChainEpochs[number]++
	return &cluster.Map{View: &next}
}

// TestAChainHeadForeseesItsSuccessor: it has seen a view, which does not act yet, that has another ChainHead. It begins
// no write until then, so that none is left that this one does not have.
func TestAChainHeadForeseesItsSuccessor(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: testRanges, yieldAfter: time.Hour}.rig(t)
	g.full(patient)
	g.putSoon("key", "value", 1)
	g.frozen.Store(true)
	number, c := g.rangeOf("key")
	head := g.chain([]byte("key"))[0]
	g.mu.Lock()
	now := &cluster.Map{View: g.view}
	g.mu.Unlock()
	next := g.withChain(number, view.Chain{c[1], c[0], c[2]})
	head.r.SetState(now, next)
	for i, op := range []kvstore.Op{kvstore.Put, kvstore.Delete} {
		h := newHost()
		h.put("key", "another")
		h.Op, h.KeepSeconds, h.ID = op, 600, kvstore.Identity{Client: 8, Seq: uint64(i + 1)}
		h.Sink, h.Tenant = h, 3
		var b replicas.Batch
		b.Add(&h.Request)
		head.r.Submit(&b)
		defer func() {
			if <-h.done; h.Status.Code() != nvme.KVWrongView {
				t.Errorf("op %d ends with %v, want that there is another view", op, h.Status)
			}
		}()
	}
	h := newHost()
	h.get("key")
	h.want(head, nvme.Success, "value") // reads go on
	if n := head.r.Dirty(); n > 0 {
		t.Errorf("%d writes have begun", n)
	}
	for _, n := range g.nodes {
		n.r.SetState(next, next)
	}
}

// TestALastCopySaysThatItSuffices when its last write has ended, whatever else happens: it was left with one that no
// other member passes on, so that it lacks data as long as that is under way.
func TestALastCopySaysThatItSuffices(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(patient)
	g.putSoon("key", "value", 1)
	g.frozen.Store(true)
	number, c := g.rangeOf("key")
	chain, h := g.chain([]byte("key")), newHost()
	defer endSilence(chain[:1])
	silence(chain[:1], ssd.Write, ssd.Flush)
	h.put("key", "another")
	h.Sink, h.Tenant = h, 3
	var b replicas.Batch
	b.Add(&h.Request)
	chain[0].r.Submit(&b)
	g.soon("the others have the write", func() bool {
		_, value := chain[2].stored("key")
		return value == "another"
	})
	demoted := g.withChain(number, view.Chain{c[1], c[2], c[0]})
	chain[0].r.SetState(demoted, demoted)
	<-h.done
	last := c[0]
	last.State = view.LastCopy
	g.mu.Lock()
	g.view = demoted.View
	g.mu.Unlock()
	halted := g.withChain(number, view.Chain{last})
	chain[0].r.SetState(halted, halted)
	says := func() view.Local { return g.Range(last.Partition, number).Local }
	if got := says(); got != view.Incomplete {
		t.Fatalf("with a write under way it is %v", got)
	}
	endSilence(chain[:1])
	g.soon("it says that it has all data", func() bool { return says() == view.Complete })
}
