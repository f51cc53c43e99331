package replicas_test

import (
	"slices"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
)

// TestAChainHeadThatHasMissedThatAnotherOneLedWins: a view hands the lead from one member to another one. That acts on
// it, stores a write, and is lost before the first one acts on the view. In the next view that leads again, without the
// other one. When the other one is back it is filled, and does not keep what only it had, also of keys that were
// written meanwhile.
func TestAChainHeadThatHasMissedThatAnotherOneLedWins(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	g.frozen.Store(true)
	const key = "key"
	chain, h := g.chain([]byte(key)), newHost()
	head, other := chain[0], chain[2]
	h.put(key, "before")
	h.want(head, nvme.Success, "")
	g.mu.Lock()
	first, number := g.view, g.view.RangeOf(position([]byte(key)))
	g.mu.Unlock()
	members, v := slices.Clone(first.Chains[number]), first
	next := func(c ...view.Member) *cluster.Map {
		n := *v
		n.Epoch++
		n.Chains, n.ChainEpochs = slices.Clone(v.Chains), slices.Clone(v.ChainEpochs)
		n.Chains[number] = slices.Clone(c)
		n.ChainEpochs[number]++
		v = &n
		return &cluster.Map{View: v}
	}
	tell := func(m *cluster.Map) {
		for _, n := range chain {
			n.r.SetState(m, m)
		}
	}
	await := func(what string, f func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("it is waited too long for ", what)
			}
		}
	}

	m := next(members[2], members[0], members[1])
	head.r.SetState(&cluster.Map{View: first}, m) // it has seen the view, which does not act there
	other.r.SetState(m, m)
	lost := newHost()
	lost.put(key, "of a ChainHead that was lost")
	lost.Sink, lost.Tenant = lost, 3
	var b replicas.Batch
	b.Add(&lost.Request)
	other.r.Submit(&b)
	await("its store", func() bool { _, value := other.stored(key); return value == string(lost.Value) })

	tell(next(members[0], members[1]))
	if <-lost.done; lost.Status.Code() != nvme.CommandInterrupted {
		t.Errorf("the write of the member that was lost ends with %v", lost.Status)
	}
	h.put(key, "after")
	h.want(head, nvme.Success, "")
	members[2].State, members[2].Since = view.Filling, v.Epoch+1
	tell(next(members...))
	await("the copy", func() bool {
		return slices.ContainsFunc(other.r.Report().Ranges, func(r cluster.RangeReport) bool {
			return r.Range == number && r.Local == view.Complete
		})
	})
	members[2].State = view.Serving
	tell(next(members...))
	read := func(value string) {
		t.Helper()
		for _, n := range chain {
			h.get(key)
			h.want(n, nvme.Success, value)
		}
	}
	read("after")
	h.put(key, "last")
	h.want(head, nvme.Success, "")
	read("last")
	g.same([]byte(key))
}
