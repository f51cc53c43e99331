package replicas_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/peers"
	"jbofd/internal/replicas"
)

// testPatience is longer than it takes until the rig's manager goes on without a node.
const testPatience = 300 * time.Millisecond

// setCut cuts the connections between two nodes, or mends those that are cut. Both are told, as package peers does.
func (g *rig) setCut(cut *[2]int) {
	last := g.cut.Swap(cut)
	name := func(i int) string { return fmt.Sprint("n", i) }
	if last != nil {
		g.nodes[last[0]].r.NodeReachable(name(last[1]))
		g.nodes[last[1]].r.NodeReachable(name(last[0]))
	}
	if cut != nil {
		g.nodes[cut[0]].r.NodeUnreachable(name(cut[1]), peers.Loss{})
		g.nodes[cut[1]].r.NodeUnreachable(name(cut[0]), peers.Loss{})
	}
}

// setLacks takes the connection away that a node has to another one, or gives it back. Both see it, as the host and
// as the target.
func (g *rig) setLacks(lacks *[2]int) {
	last := g.lacks.Swap(lacks)
	name := func(i int) string { return fmt.Sprint("n", i) }
	if last != nil {
		g.nodes[last[0]].r.NodeReachable(name(last[1]))
		g.nodes[last[1]].r.HostConnected(name(last[0]))
	}
	if lacks != nil {
		g.nodes[lacks[0]].r.NodeUnreachable(name(lacks[1]), peers.Loss{})
		g.nodes[lacks[1]].r.HostDisconnected(name(lacks[0]))
	}
}

// putSoon puts a value at the ChainHead, whichever that is, and fails if it is not acknowledged.
func (g *rig) putSoon(key, value string, seq uint64) {
	g.t.Helper()
	g.putSoonAs(7, key, value, seq)
}

// putSoonAs is putSoon of a client with that number.
func (g *rig) putSoonAs(client uint64, key, value string, seq uint64) {
	g.t.Helper()
	h := newHost()
	h.put(key, value)
	h.KeepSeconds, h.ID = 600, kvstore.Identity{Client: client, Seq: seq}
	limit := time.Now().Add(patient)
	end := time.After(patient)
	for {
		if time.Now().After(limit) {
			g.t.Errorf("a write of %s is refused for %v, at last with %v\n%s", key, patient, h.Status, g.describe())
			return
		}
		// A node that is not alive answers nothing; a host would lose its connection.
		if chain := g.chain([]byte(key)); len(chain) > 0 && chain[0].alive.Load() {
			h.Sink, h.Tenant = h, 3
			var b replicas.Batch
			b.Add(&h.Request)
			chain[0].r.Submit(&b)
			select {
			case <-h.done:
			case <-end:
				g.t.Errorf("a write of %s gets no answer within %v, from node %d\n%s", key, patient, chain[0].id,
					g.describe())
				return
			}
			if h.Status.OK() {
				return
			}
			h.ID.Retry = h.ID.Retry || h.Status.Code() == nvme.CommandInterrupted
			if h.Status.Code() == nvme.KVIndeterminate { // the key has had too many writes since
				h.ID.Seq, h.ID.Retry = h.ID.Seq+1<<40, false
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// TestACutBetweenTwoNodesEndsNoWrites: two of three nodes, each with all keys, do not reach each other. The manager
// hears both. Writes go on, and when the nodes reach each other again, all copies are made.
func TestACutBetweenTwoNodesEndsNoWrites(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	seq := uint64(0)
	write := func(round string) {
		t.Helper()
		for k := range 32 {
			seq++
			g.putSoon(fmt.Sprint("key", k), fmt.Sprint(round, k), seq)
		}
	}
	write("before ")
	for _, cut := range [][2]int{{0, 1}, {2, 1}, {0, 2}} {
		g.setCut(&cut)
		write("during ")
		time.Sleep(2 * testPatience) // they stay apart
		write("later ")
		g.mu.Lock()
		for r, c := range g.view.Chains {
			for i := 1; i < len(c); i++ {
				a, b := int(c[i-1].Partition), int(c[i].Partition)
				if c[i].State <= view.Filling && (cut == [2]int{a, b} || cut == [2]int{b, a}) {
					t.Errorf("%d and %d do not reach each other, and are neighbours in range %d: %v", a, b, r, c)
				}
			}
			if len(c) == 0 || c.Halted() {
				t.Errorf("range %d is not served: %v", r, c)
			}
		}
		g.mu.Unlock()
		g.setCut(nil)
		g.full(20 * time.Second)
		write("after ")
		for k := range 32 {
			g.same(fmt.Appendf(nil, "key%d", k))
		}
	}
}

// TestAConnectionThatLacksInOneDirection ends no writes: neither those that a successor has missed, and cannot ask for,
// nor those of ranges that are filled.
func TestAConnectionThatLacksInOneDirection(t *testing.T) {
	g := newRig(t, 4, 3)
	g.full(20 * time.Second)
	seq := uint64(0)
	write := func(round string, meanwhile func()) {
		t.Helper()
		var load sync.WaitGroup
		for k := range 32 {
			seq++
			id := seq
			load.Go(func() { g.putSoon(fmt.Sprint("key", k), fmt.Sprint(round, k), id) })
		}
		meanwhile()
		load.Wait()
	}
	write("before ", func() {})
	for i, lacks := range [][2]int{{1, 0}, {0, 1}} {
		g.apart.Store(true)
		g.frozen.Store(true)
		g.setLacks(&lacks)
		g.nodes[3].setAlive(false)
		write("lost ", func() {
			// Writes wait for node 3. In the next view, node 0 sends them on before others know of it.
			time.Sleep(testPatience / 3)
			g.frozen.Store(false)
		})
		g.apart.Store(false)
		// Node 3 is back, to be filled by others.
		g.setLacks([]*[2]int{{1, 3}, {2, 3}}[i])
		g.nodes[3].setAlive(true)
		write("filled ", func() {})
		time.Sleep(3 * testPatience / 2)
		write("later ", func() {})
		g.setLacks(nil)
		g.full(20 * time.Second)
		write("after ", func() {})
		for k := range 32 {
			g.same(fmt.Appendf(nil, "key%d", k))
		}
	}
}

// TestANodeThatReachesNobodyLeavesTheOthersTogether: wherever it is in a chain, it leaves, and not those in front of
// it, which would a quarter of the patience later.
func TestANodeThatReachesNobodyLeavesTheOthersTogether(t *testing.T) {
	const patience = 6 * time.Second
	g := setup{nodes: 3, copies: 3, ranges: testRanges, patience: patience}.rig(t)
	g.full(20 * time.Second)
	for j := range 2 {
		g.nodes[2].r.NodeUnreachable(fmt.Sprint("n", j), peers.Loss{})
		g.nodes[j].r.NodeUnreachable("n2", peers.Loss{})
	}
	time.Sleep(patience + patience/4) // also those that would leave later have left
	g.mu.Lock()
	for r, c := range g.view.Chains {
		serving := map[int]bool{}
		for _, e := range c {
			if e.State == view.Serving {
				serving[int(e.Partition)] = true
			}
		}
		if len(serving) != 2 || serving[2] {
			t.Errorf("range %d: %v", r, c)
		}
	}
	g.mu.Unlock()
	for j := range 2 {
		g.nodes[2].r.NodeReachable(fmt.Sprint("n", j))
		g.nodes[j].r.NodeReachable("n2")
	}
	g.full(20 * time.Second)
}

// TestAMemberThatGaveUpServesAsALastCopy: it reports that its data are incomplete because of a cut, and before a view
// answers that the other member is lost.
func TestAMemberThatGaveUpServesAsALastCopy(t *testing.T) {
	g := newRig(t, 2, 2)
	g.full(20 * time.Second)
	for k := range 32 {
		g.putSoon(fmt.Sprint("key", k), "value", uint64(k+1))
	}
	g.frozen.Store(true)
	cut := [2]int{0, 1}
	g.setCut(&cut)
	time.Sleep(3 * testPatience)
	g.nodes[1].setAlive(false)
	g.frozen.Store(false)
	alone := func() (epoch view.Epoch, all bool) {
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, c := range g.view.Chains {
			if len(c) == 0 || c[0].Partition != 0 || c[0].State != view.Serving {
				return g.view.Epoch, false
			}
		}
		return g.view.Epoch, true
	}
	last, since := view.Epoch(0), time.Now()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		epoch, all := alone()
		if !all || epoch != last {
			last, since = epoch, time.Now()
		}
		if time.Since(since) > 3*testPatience {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the view does not come to rest, epoch %d: %v", epoch, g.view.Chains)
		}
	}
	for k := range 32 {
		h := newHost()
		h.get(fmt.Sprint("key", k))
		h.want(g.nodes[0], nvme.Success, "value")
		g.putSoon(fmt.Sprint("key", k), "later", uint64(k+100))
	}
	g.setCut(nil)
}

// TestACutOfAllNodesHaltsNothing: no node reaches another one for some time, though the manager hears all. What they
// have counts when they do again.
func TestACutOfAllNodesHaltsNothing(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	for k := range 32 {
		g.putSoon(fmt.Sprint("key", k), "value", uint64(k+1))
	}
	for i, n := range g.nodes {
		for j := range g.nodes {
			if i != j {
				n.r.NodeUnreachable(fmt.Sprint("n", j), peers.Loss{Silent: time.Minute, Certain: time.Minute})
			}
		}
	}
	time.Sleep(3 * testPatience)
	for i, n := range g.nodes {
		for j := range g.nodes {
			if i != j {
				n.r.NodeReachable(fmt.Sprint("n", j))
			}
		}
	}
	g.full(20 * time.Second)
	for k := range 32 {
		h := newHost()
		for _, n := range g.chain(fmt.Appendf(nil, "key%d", k)) {
			h.get(fmt.Sprint("key", k))
			h.want(n, nvme.Success, "value")
		}
	}
}
