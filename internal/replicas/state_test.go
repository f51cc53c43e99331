package replicas

import (
	"testing"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/crrs"
	"jbofd/internal/nvme"
	"jbofd/internal/uuid"
)

// TestRolesFollowTheChain: neighbours, tail and place of each member, of chains with every state.
func TestRolesFollowTheChain(t *testing.T) {
	const no = crrs.NoPeer
	member := func(p view.PartitionID, s view.State) view.Member {
		return view.Member{Partition: p, State: s, Since: 40}
	}
	role := func(before, behind, tail crrs.Peer, filling bool) crrs.Role {
		return crrs.Role{Epoch: 7, Member: true, Since: 40, Predecessor: before, Successor: behind, ChainTail: tail,
			Filling: filling}
	}
	others := func(r crrs.Role, others ...crrs.Peer) crrs.Role {
		r.NumOthers = uint8(copy(r.Others[:], others))
		return r
	}
	none := crrs.Role{Epoch: 7, Predecessor: no, Successor: no, ChainTail: no}
	for name, c := range map[string]struct {
		chain  view.Chain
		roles  []crrs.Role // of partitions 1, 2, …
		behind []int
	}{
		"alone": {view.Chain{member(1, view.Serving)}, []crrs.Role{role(no, no, no, false), none}, []int{0, 0}},
		"three serve": {view.Chain{member(3, view.Serving), member(1, view.Leaving), member(2, view.Serving)},
			[]crrs.Role{others(role(3, 2, 2, false), 2, 3), others(role(1, no, no, false), 1, 3),
				others(role(no, 1, 2, false), 2, 1)}, []int{1, 0, 2}},
		"one is filled": {view.Chain{member(1, view.Serving), member(2, view.Serving), member(3, view.Filling),
			member(4, view.Waiting)}, []crrs.Role{others(role(no, 2, 2, false), 2), others(role(1, 3, no, false), 1),
			others(role(2, no, no, true), 2, 1), none}, []int{2, 1, 0, 0}},
		"one serves, one is filled": {view.Chain{member(2, view.Serving), member(1, view.Filling)},
			[]crrs.Role{others(role(2, no, no, true), 2), role(no, 1, no, false)}, []int{0, 1}},
		"halted": {view.Chain{member(1, view.LastCopy), member(2, view.LastCopy)}, []crrs.Role{none, none},
			[]int{0, 0}},
	} {
		for i, want := range c.roles {
			g := &Replicas{joined: true, self: view.PartitionID(i + 1), active: &cluster.Map{View: &view.View{
				Chains: []view.Chain{c.chain}, ChainEpochs: []uint32{7}}}}
			at := g.placeIn(c.chain)
			if got := g.roleOf(0, at); got != want {
				t.Errorf("%s: partition %d: %+v, want %+v", name, i+1, got, want)
			}
			if at >= 0 && membersBehind(c.chain, at) != c.behind[i] {
				t.Errorf("%s: partition %d: %d members behind it, want %d", name, i+1, membersBehind(c.chain, at),
					c.behind[i])
			}
		}
	}
}

// TestWhatIsReported of a range, by its state in the newest view and what the partition knows of that membership.
func TestWhatIsReported(t *testing.T) {
	at := func(s view.State, since view.Epoch) view.Chain {
		return view.Chain{{Partition: 1, State: s, Since: since}}
	}
	for _, c := range []struct {
		name           string
		active, newest view.Chain
		want           view.Local
	}{
		{"serves", at(view.Serving, 4), at(view.Serving, 4), view.Complete},
		{"is a last copy", at(view.Serving, 4), at(view.LastCopy, 4), view.Complete},
		{"was a last copy when the process began", at(view.LastCopy, 4), at(view.LastCopy, 4), view.Complete},
		{"a new chain that is not active yet", nil, at(view.Serving, 9), view.Silent},
		{"another membership than the active one", at(view.Serving, 4), at(view.Filling, 9), view.Silent},
		{"waits", at(view.Waiting, 4), at(view.Waiting, 4), view.Incomplete},
		{"is filled, by another process", at(view.Filling, 4), at(view.Filling, 4), view.Incomplete},
	} {
		g := &Replicas{joined: true, self: 1,
			active: &cluster.Map{View: &view.View{Chains: []view.Chain{c.active}}}, ranges: make([]*member, 1)}
		if got := g.localState(0, c.newest[0]); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestAPartitionThatIsInNoViewReportsNothing: its number may be another one's by then.
func TestAPartitionThatIsInNoViewReportsNothing(t *testing.T) {
	id, other := uuid.UUID{1}, uuid.UUID{2}
	of := func(id uuid.UUID) *cluster.Map {
		return &cluster.Map{View: &view.View{Epoch: 5, Partitions: []view.Partition{{ID: id}},
			Chains: []view.Chain{{{State: view.Serving, Since: 4}}}, ChainEpochs: []uint32{1}}}
	}
	g := &Replicas{cfg: Config{ID: id, Changed: func() {}}, joined: true, active: of(id), newest: of(id),
		ranges: make([]*member, 1)}
	if g.makeReport(); len(g.Report().Ranges) != 1 {
		t.Fatalf("%+v", g.Report())
	}
	g.newest = of(other)
	if g.makeReport(); len(g.Report().Ranges) != 0 {
		t.Errorf("%+v is reported for another partition", g.Report())
	}
}

// TestAQuestionIsWhatACommandAsksFor: what one has begun is given to another one only if both ask for the same, by the
// same member in the same epoch.
func TestAQuestionIsWhatACommandAsksFor(t *testing.T) {
	fetch := func(change func(k *nvme.KVReplicaSQE)) *nvme.SQE {
		var e nvme.SQE
		e.SetOpcode(nvme.CmdKVFetch)
		k := e.KVReplica()
		k.SetRange(3)
		k.SetEpoch(7)
		k.SetBits(40)
		k.SetLenBytes(4096)
		k.SetFirst(1 << 50)
		if change != nil {
			change(k)
		}
		return &e
	}
	want := questionOf(fetch(nil), 2)
	if got := questionOf(fetch(nil), 2); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := questionOf(fetch(nil), 1); got == want {
		t.Error("another member asks the same")
	}
	for name, change := range map[string]func(k *nvme.KVReplicaSQE){
		"opcode":   func(k *nvme.KVReplicaSQE) { (*nvme.SQE)(k).SetOpcode(nvme.CmdKVCompare) },
		"range":    func(k *nvme.KVReplicaSQE) { k.SetRange(4) },
		"epoch":    func(k *nvme.KVReplicaSQE) { k.SetEpoch(8) },
		"bits":     func(k *nvme.KVReplicaSQE) { k.SetBits(39) },
		"length":   func(k *nvme.KVReplicaSQE) { k.SetLenBytes(8192) },
		"position": func(k *nvme.KVReplicaSQE) { k.SetFirst(1<<50 + 1) },
		"key":      func(k *nvme.KVReplicaSQE) { k.SetKey([]byte("key")) },
	} {
		if got := questionOf(fetch(change), 2); got == want {
			t.Errorf("commands that differ by their %s ask the same", name)
		}
	}
	a, b := fetch(func(k *nvme.KVReplicaSQE) { k.SetKey([]byte("a")) }),
		fetch(func(k *nvme.KVReplicaSQE) { k.SetKey([]byte("b")) })
	if questionOf(a, 2) == questionOf(b, 2) {
		t.Error("commands that differ by their keys ask the same")
	}
}
