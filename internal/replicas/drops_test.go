package replicas_test

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
	"jbofd/internal/replicas"
)

// count returns the number of objects and tombstones that a node's store has of a range.
func (n *node) count(first, last uint64) (objects uint64) {
	n.rig.t.Helper()
	q := &storeAsk{done: make(chan struct{}, 1)}
	q.Value = make([]byte, nvme.KVRangeHeaderBytes+nvme.KVTotalsBytes)
	var b nvme.KVRange
	for b == nil || !b.Complete() {
		q.Op, q.Range.First, q.Range.Last, q.Sink, q.Tenant = kvstore.Count, first, last, q, 3
		var batch partition.Batch
		batch.Add(&q.Request)
		n.part.Submit(&batch)
		<-q.done
		if q.Status != kvstore.OK {
			n.rig.t.Fatalf("node %d: a Count ends with %v", n.id, q.Status)
		}
		b = nvme.KVRange(q.Value)
		objects += b.Totals().Objects() + b.Totals().Tombstones()
		to := b.To()
		q.Range.From, q.KeyLen = to.Position, uint8(copy(q.Key[:], to.Key[:to.KeyLen]))
	}
	return objects
}

type storeAsk struct {
	partition.Request
	done chan struct{}
}

func (q *storeAsk) KVDone(*partition.Request) bool {
	q.done <- struct{}{}
	return false
}

func (q *storeAsk) Kick() {}

// onlyMembers waits until no store has anything of a range of which it is no member, and each member has something.
func (g *rig) onlyMembers(within time.Duration) {
	g.t.Helper()
	for end := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		g.mu.Lock()
		v := g.view
		g.mu.Unlock()
		wrong := ""
		for number, c := range v.Chains {
			first, last := v.Range(number)
			members := map[int]bool{}
			for _, e := range c {
				members[int(e.Partition)] = true
			}
			for _, n := range g.nodes {
				if has := n.count(first, last); (has > 0) != members[n.id] {
					wrong += fmt.Sprintf("; node %d has %d objects of range %d, member %t", n.id, has, number,
						members[n.id])
				}
			}
		}
		if wrong == "" {
			return
		}
		if time.Now().After(end) {
			g.t.Fatalf("after %v%s", within, wrong)
		}
	}
}

// soon waits until something is so.
func (g *rig) soon(what string, ok func() bool) {
	g.t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			g.t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// TestTheRoomOfRangesThatHaveMovedComesBack: a node that is drained has nothing of its ranges any more, and its
// partition is nearly empty. When they come back, it is given all that has been written since.
func TestTheRoomOfRangesThatHaveMovedComesBack(t *testing.T) {
	g := setup{nodes: 4, copies: 3, ranges: testRanges, dropAfter: 100 * time.Millisecond}.rig(t)
	g.full(20 * time.Second)
	const keys = 400
	value := string(make([]byte, 16<<10))
	write := func(round int) {
		for i := range keys {
			g.putSoon(fmt.Sprint("key", i), fmt.Sprint(round, value), uint64(round*keys+i+1))
		}
	}
	write(0)
	g.onlyMembers(20 * time.Second)
	drained := g.nodes[1]
	used := drained.part.UsedBytes()
	for round := range 3 {
		g.setOut(drained.id)
		g.soon("the node has no ranges", func() bool { return g.holds(drained) == 0 })
		if round%2 == 1 {
			write(round)
		}
		g.full(20 * time.Second)
		g.onlyMembers(20 * time.Second)
		g.soon(fmt.Sprintf("a drained node uses less than a tenth of the %d bytes that it has used", used),
			func() bool { return drained.part.UsedBytes() < used/10 })
		if s := drained.r.Dropped(); s.Ranges == 0 || s.Objects < 100 || s.Bytes < 100*16<<10 {
			t.Errorf("round %d: dropped %+v", round, s)
		}
		g.setOut()
		if round == 2 {
			write(round) // while it is filled
		}
		g.soon("the node gets ranges back", func() bool { return g.holds(drained) > 0 })
		g.full(20 * time.Second)
		for i := range keys {
			g.same(fmt.Appendf(nil, "key%d", i))
		}
		g.onlyMembers(20 * time.Second)
	}
}

// nextEpoch returns the view with a newer epoch, as if a chain of other nodes had changed.
func (g *rig) nextEpoch() *view.View {
	v := *g.view
	v.Epoch++
	return &v
}

// TestRangesThatHaveMovedAreDroppedWhileOthersMove: there is a newer view all the time, which for a moment does not act
// yet, and in which nothing of the ranges that are to be dropped has changed.
func TestRangesThatHaveMovedAreDroppedWhileOthersMove(t *testing.T) {
	g := setup{nodes: 4, copies: 3, ranges: testRanges, dropAfter: 200 * time.Millisecond}.rig(t)
	g.full(20 * time.Second)
	for i := range 200 {
		g.putSoon(fmt.Sprint("key", i), "value", uint64(i+1))
	}
	g.restless.Store(true) // every 10 ms
	drained := g.nodes[1]
	g.setOut(drained.id)
	g.soon("the node has no ranges", func() bool { return g.holds(drained) == 0 })
	g.onlyMembers(20 * time.Second)
}

// TestNothingIsDroppedByAViewThatIsToBeReplaced: the next one may take members away. It is dropped when the newest view
// acts.
func TestNothingIsDroppedByAViewThatIsToBeReplaced(t *testing.T) {
	const after = 50 * time.Millisecond
	g := setup{nodes: 4, copies: 3, ranges: testRanges, dropAfter: after}.rig(t)
	g.full(20 * time.Second)
	for i := range 200 {
		g.putSoon(fmt.Sprint("key", i), "value", uint64(i+1))
	}
	g.onlyMembers(20 * time.Second)
	drained := g.nodes[1]
	before := drained.r.Dropped()
	g.ahead.Store(true)
	g.setOut(drained.id)
	g.soon("the node has no ranges", func() bool { return g.holds(drained) == 0 })
	g.full(20 * time.Second)
	for range 5 { // it takes turns all the time
		time.Sleep(after)
	}
	if s := drained.r.Dropped(); s.Ranges != before.Ranges {
		t.Errorf("dropped %+v, before %+v", s, before)
	}
	g.ahead.Store(false)
	g.onlyMembers(20 * time.Second)
}

// TestNothingIsDroppedOfARangeThatIsNotFull: a copy is missing and nobody makes it. What a drained node has of the
// range stays, as long as that is so.
func TestNothingIsDroppedOfARangeThatIsNotFull(t *testing.T) {
	const after = 50 * time.Millisecond
	g := setup{nodes: 4, copies: 3, ranges: testRanges, dropAfter: after}.rig(t)
	g.full(20 * time.Second)
	for i := range 200 {
		g.putSoon(fmt.Sprint("key", i), "value", uint64(i+1))
	}
	g.onlyMembers(20 * time.Second)
	drained, away := g.nodes[1], g.nodes[2]
	before := drained.r.Dropped()
	g.setOut(away.id)
	away.setAlive(false)
	g.setOut(away.id, drained.id)
	g.soon("both nodes have no ranges", func() bool { return g.holds(drained)+g.holds(away) == 0 })
	had := drained.count(0, 1<<64-1)
	for range 10 { // it is looked at views all the time
		time.Sleep(after)
	}
	if has := drained.count(0, 1<<64-1); has != had || drained.r.Dropped().Ranges != before.Ranges || had < 50 {
		t.Errorf("of %d objects %d are left, dropped %+v, before %+v", had, has, drained.r.Dropped(), before)
	}
	g.setOut(drained.id)
	away.setAlive(true)
	for i := range g.nodes {
		g.nodes[i].r.NodeReachable(fmt.Sprint("n", away.id))
		away.r.NodeReachable(fmt.Sprint("n", i))
	}
	g.full(20 * time.Second)
	g.onlyMembers(20 * time.Second)
}

// stillDropping is a store of which a Drop is never over.
type stillDropping struct {
	replicas.Store
	over *atomic.Bool
}

func (s stillDropping) Dropping(first, last uint64, hurry bool) bool {
	return !s.over.Load() || s.Store.Dropping(first, last, hurry)
}

// TestAMemberThatIsBeingDroppedHoldsUpNobody: a Drop of an earlier process is not over when the node is a member of all
// chains. Writes go on without it, and it is filled afterwards.
func TestAMemberThatIsBeingDroppedHoldsUpNobody(t *testing.T) {
	over := [2]atomic.Bool{}
	over[0].Store(true)
	stores := 0
	g := setup{nodes: 2, copies: 2, ranges: testRanges, store: func(p *partition.Partition) replicas.Store {
		stores++
		return stillDropping{p, &over[stores-1]}
	}}.rig(t)
	g.soon("the chains go on without it", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return !slices.ContainsFunc(g.view.Chains, func(c view.Chain) bool {
			return len(c) == 0 || c[0].State != view.Serving || len(c) > 1 && c[1].State != view.Waiting
		})
	})
	for i := range 40 {
		g.putSoon(fmt.Sprint("key", i), "value", uint64(i+1))
	}
	over[1].Store(true)
	g.full(20 * time.Second)
	for i := range 40 {
		g.same(fmt.Appendf(nil, "key%d", i))
	}
}
