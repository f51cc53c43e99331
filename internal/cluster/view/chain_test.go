package view

import (
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/buildtags"

	"jbofd/internal/uuid"
)

// The enumeration: every legal chain over a few partitions, with every set of wanted ones and every report of each.
// Partitions are interchangeable, so that the members of a chain are always 0, 1, 2, …
const (
	// began is the epoch since which all members of the enumerated chains are members, now that of the next view.
	began, now = 5, 9
)

// partitions is how many there are.
var partitions = 4

func init() {
	if buildtags.Race {
		partitions = 3 // one goroutine, and ten times the time
	}
}

// reports are all that a node can say, of this membership and of an earlier one.
var reports = []Report{
	{Local: Absent},
	{Local: Silent},
	{Local: Damaged, Epoch: now},
	{Local: Incomplete, Epoch: now},
	{Local: Incomplete, Epoch: began - 1},
	{Local: Complete, Epoch: now},
	{Local: Complete, Epoch: began - 1},
}

// chains calls f with every legal chain of at most n members.
func chains(n int, f func(Chain)) {
	f(Chain{})
	var grow func(c Chain)
	grow = func(c Chain) {
		if len(c) == n {
			return
		}
		for s := range numStates {
			next := append(slices.Clone(c), Member{Partition: PartitionID(len(c)), State: s, Since: began})
			if legal(next) == nil {
				f(next)
				grow(next)
			}
		}
	}
	grow(nil)
}

// legal is View.checkChain for a view in which all partitions exist.
func legal(c Chain) error {
	v := View{Epoch: 1000, Partitions: make([]Partition, 2*partitions)}
	for i := range v.Partitions {
		v.Partitions[i].ID[0] = 1
	}
	return v.checkChain(c)
}

// wants calls f with every set of 1 to 3 of n partitions.
func wants(n int, f func([]PartitionID)) {
	for set := 1; set < 1<<n; set++ {
		var w []PartitionID
		for p := range n {
			if set>>p&1 == 1 {
				w = append(w, PartitionID(p))
			}
		}
		if len(w) <= 3 {
			f(w)
		}
	}
}

// everyCase calls f with every chain, every set of wanted partitions, and all that the nodes of the partitions which
// are in either of them can say.
func everyCase(f func(c Chain, wanted []PartitionID, said []Report)) (cases int) {
	chains(partitions, func(c Chain) {
		wants(partitions, func(wanted []PartitionID) {
			concerned := len(c)
			for _, p := range wanted {
				concerned = max(concerned, int(p)+1)
			}
			said := make([]Report, concerned)
			var choose func(p int)
			choose = func(p int) {
				if p == concerned {
					cases++
					f(c, wanted, said)
					return
				}
				for _, r := range reports {
					said[p] = r
					choose(p + 1)
				}
			}
			choose(0)
		})
	})
	return cases
}

func saying(said []Report) func(PartitionID) Report {
	return func(p PartitionID) Report { return said[p] }
}

func TestEveryTransitionIsLegal(t *testing.T) {
	cases := everyCase(func(c Chain, wanted []PartitionID, said []Report) {
		before := slices.Clone(c)
		next := Next(c, wanted, saying(said), now)
		fail := func(format string, args ...any) {
			t.Fatalf("%s\nchain %v\nwanted %v\nreports %v\nnext %v", fmt.Sprintf(format, args...), before, wanted, said,
				next)
		}
		if !slices.Equal(c, before) {
			fail("the old chain was changed")
		}
		if err := legal(next); err != nil {
			fail("the next chain is not legal: %v", err)
		}
		for _, m := range next {
			if m.Since > now || m.Since != began && m.Since != now {
				fail("partition %d is a member since %d", m.Partition, m.Since)
			}
			if m.State == Waiting && !contains(wanted, m.Partition) {
				fail("partition %d waits and is not wanted", m.Partition)
			}
			i := before.find(m.Partition)
			if m.State == Filling && m.Since != now && (i < 0 || before[i].State != Filling) {
				fail("partition %d is filled from now on, and may be complete by a report of before", m.Partition)
			}
			if r := said[m.Partition]; (m.State == Filling) && (r.Local == Absent || r.Local == Damaged) {
				fail("partition %d is to be filled, and cannot", m.Partition)
			}
		}
		checkSafe(fail, before, next, wanted, said)
	})
	t.Logf("%d cases: every chain of up to %d members, every set of 1 to 3 wanted partitions, every report", cases,
		partitions)
}

// checkSafe checks that the members that serve in the next chain have every acknowledged write.
func checkSafe(fail func(string, ...any), c, next Chain, wanted []PartitionID, said []Report) {
	if len(c) == 0 {
		return // a new range has no writes
	}
	gone := func(m Member) bool {
		r := said[m.Partition]
		return r.Local == Absent || r.Local == Damaged || r.Local == Incomplete && r.Epoch >= m.Since
	}
	stay := 0
	for _, m := range c {
		if m.State <= Leaving && !gone(m) {
			stay++
		}
	}
	for _, m := range next {
		if !m.State.holds() {
			continue
		}
		i := c.find(m.Partition)
		if i < 0 {
			fail("partition %d holds the data and was no member", m.Partition)
		}
		r, was := said[m.Partition], c[i]
		complete := r.Local == Complete && r.Epoch >= was.Since
		switch {
		case m.State == LastCopy:
			if !was.State.holds() || stay > 0 {
				fail("partition %d is a last copy: it was %v, and %d members stay", m.Partition, was.State, stay)
			}
		case was.State <= Leaving:
			if gone(was) {
				fail("partition %d serves, and is gone", m.Partition)
			}
		case was.State == Filling:
			if !complete || stay == 0 {
				fail("partition %d serves before it is filled, or without the one that fills it", m.Partition)
			}
		case was.State == LastCopy:
			if !complete || len(next.serving()) != 1 {
				fail("partition %d is back: it said %v, %d serve", m.Partition, r, len(next.serving()))
			}
		default:
			fail("partition %d waited, and serves", m.Partition)
		}
	}
	// A chain that is halted keeps all of its last copies.
	if next.Halted() {
		for _, m := range c {
			if m.State.holds() && (next.find(m.Partition) < 0 || next[next.find(m.Partition)].State != LastCopy) {
				fail("partition %d is no longer a last copy", m.Partition)
			}
		}
	}
	// Redundancy is given up only for members that are there already.
	if served := next.serving(); stay > 0 && len(served) < min(stay, len(wanted)) {
		fail("%d members could serve, and %d do", stay, len(served))
	}
}

// serving returns the members that serve.
func (c Chain) serving() (out Chain) {
	for _, m := range c {
		if m.State <= Leaving {
			out = append(out, m)
		}
	}
	return out
}

func TestTransitionsComeToRest(t *testing.T) {
	everyCase(func(c Chain, wanted []PartitionID, said []Report) {
		// What is said of an earlier membership says nothing of one that begins now.
		next, epoch := c, Epoch(now)
		for steps := 0; ; steps++ {
			after := Next(next, wanted, saying(said), epoch)
			if slices.Equal(after, next) {
				return
			}
			if steps > 2*partitions {
				t.Fatalf("chain %v, wanted %v, reports %v: no rest after %d steps: %v", c, wanted, said, steps, after)
			}
			next, epoch = after, epoch+1
		}
	})
}

// healthy is what nodes report that are alive and do as the chain says: who is filled gets complete, and who was a last
// copy has its data.
func healthy(c Chain, epoch Epoch) func(PartitionID) Report {
	return func(p PartitionID) Report {
		if i := c.find(p); i >= 0 && c[i].State != Waiting {
			return Report{Local: Complete, Epoch: epoch}
		}
		return Report{Local: Silent}
	}
}

func ideal(c Chain, wanted []PartitionID) bool {
	for _, m := range c {
		if m.State != Serving || !contains(wanted, m.Partition) {
			return false
		}
	}
	return len(c) == len(wanted)
}

// TestEveryChainHasAnExit shows that no operator is needed once the nodes are alive: from every state, every wanted
// partition serves after some steps, and nobody else is a member. If the last copies never return, it takes a command.
func TestEveryChainHasAnExit(t *testing.T) {
	states := 0
	chains(partitions+1, func(c Chain) {
		states++
		wants(partitions+1, func(wanted []PartitionID) {
			next, epoch := c, Epoch(now)
			for steps := 0; !ideal(next, wanted); steps++ {
				if steps > 3*partitions {
					t.Fatalf("chain %v, wanted %v: after %d steps %v", c, wanted, steps, next)
				}
				next, epoch = Next(next, wanted, healthy(next, epoch), epoch), epoch+1
			}
			if len(c) == 0 || c[0].State != LastCopy {
				return
			}
			lost := func(p PartitionID) Report {
				if i := c.find(p); i >= 0 && c[i].State == LastCopy {
					return Report{Local: Absent}
				}
				return Report{Local: Silent}
			}
			if halted := Next(c, wanted, lost, now); !halted.Halted() {
				t.Fatalf("chain %v, wanted %v: serves without its last copies: %v", c, wanted, halted)
			}
			testAcceptedLoss(t, c, wanted, lost)
		})
	})
	t.Logf("%d states of a chain of up to %d members", states, partitions+1)
}

// testAcceptedLoss accepts the loss of a halted chain whose last copies never return: one member serves, and all wanted
// partitions that are alive do after some steps.
func testAcceptedLoss(t *testing.T, c Chain, wanted []PartitionID, lost func(PartitionID) Report) {
	t.Helper()
	candidates := wanted
	for _, m := range c {
		candidates = append(slices.Clone(candidates), m.Partition)
	}
	alive := slices.DeleteFunc(slices.Clone(wanted), func(p PartitionID) bool { return lost(p).Local == Absent })
	next := AcceptLoss(c, candidates, lost, now)
	if slices.Equal(next, c) {
		if len(alive) > 0 {
			t.Fatalf("chain %v, wanted %v: it stays as it is", c, wanted)
		}
		return
	}
	if len(next) != 1 || next[0].State != Serving || next[0].Since != now || legal(next) != nil {
		t.Fatalf("chain %v, wanted %v: after the loss was accepted %v", c, wanted, next)
	}
	epoch := Epoch(now + 1)
	for steps := 0; steps <= 3*partitions; steps++ {
		said := healthy(next, epoch)
		next = Next(next, wanted, func(p PartitionID) Report {
			if lost(p).Local == Absent {
				return Report{Local: Absent}
			}
			return said(p)
		}, epoch)
		epoch++
	}
	serving := next.serving()
	for _, p := range alive {
		if i := next.find(p); i < 0 || next[i].State != Serving {
			t.Fatalf("chain %v, wanted %v: partition %d does not serve at last: %v", c, wanted, p, next)
		}
	}
	if len(serving) < max(len(alive), 1) {
		t.Fatalf("chain %v, wanted %v: at last %v", c, wanted, next)
	}
}

func TestAcceptLossLeavesAServedChainAlone(t *testing.T) {
	chains(partitions, func(c Chain) {
		if next := AcceptLoss(c, []PartitionID{7}, healthy(c, now), now); !c.Halted() && !slices.Equal(next, c) {
			t.Fatalf("chain %v became %v", c, next)
		}
	})
}

// TestAcceptLossTakesWhoeverIsAlive, also a last copy that has lost data.
func TestAcceptLossTakesWhoeverIsAlive(t *testing.T) {
	chains(partitions, func(c Chain) {
		if len(c) == 0 || !c.Halted() {
			return
		}
		for i := range c {
			next := AcceptLoss(c, []PartitionID{0, 1, 2, 3}, func(p PartitionID) Report {
				if p == PartitionID(i) {
					return Report{Local: Incomplete, Epoch: now}
				}
				return Report{Local: Damaged, Epoch: now}
			}, now)
			if want := (Chain{{Partition: PartitionID(i), State: Serving, Since: now}}); !slices.Equal(next, want) {
				t.Fatalf("chain %v became %v, want %v", c, next, want)
			}
		}
	})
}

// TestAcceptLossTakesWhoeverHasTheMost, also if that has left the chain; and no partition whose drive does not work.
func TestAcceptLossTakesWhoeverHasTheMost(t *testing.T) {
	v := &View{Epoch: now, ChainEpochs: make([]uint32, 16), Chains: make([]Chain, 16)}
	for i := range 5 {
		v.Nodes = append(v.Nodes, Node{Name: string(rune('a' + i))})
		v.Partitions = append(v.Partitions, Partition{ID: uuid.UUID{byte(i + 1)}, Node: uint16(i), Weight: 1})
	}
	for r := range v.Chains {
		v.Chains[r] = Chain{{Partition: 0, State: LastCopy, Since: 2}, {Partition: 1, State: Waiting, Since: 3}}
		for _, want := range []struct {
			objects [5]uint32
			of      PartitionID
		}{
			{[5]uint32{900, 10, 9, 11, 500}, 3},
			{[5]uint32{900, 10, 10, 9, 500}, 1},
			{[5]uint32{}, 1},
		} {
			w := *v
			w.Chains, w.ChainEpochs = slices.Clone(v.Chains), slices.Clone(v.ChainEpochs)
			if !w.AcceptLoss(r, haveObjects(want.objects)) || w.Chains[r][0].Partition != want.of {
				t.Errorf("of %v range %d has %v, want %d", want.objects, r, w.Chains[r], want.of)
			}
		}
	}
}

// haveObjects are reports of five partitions, of which the first one is away and the last one has a drive that fails.
type haveObjects [5]uint32

func (haveObjects) Alive(n uint16) bool { return n > 0 }

func (haveObjects) Usable(PartitionID) bool { return true }

func (haveObjects) Failing(p PartitionID) bool { return p == 4 }

func (h haveObjects) Range(p PartitionID, _ int) Report {
	if h[p] == 0 {
		return Report{Local: Silent}
	}
	return Report{Local: Incomplete, Objects: h[p]}
}

// damagedOne are reports of nodes that are all alive, of which one has a partition that cannot be used for a range.
type damagedOne PartitionID

func (d damagedOne) Alive(uint16) bool { return true }

func (d damagedOne) Usable(PartitionID) bool { return true }

func (d damagedOne) Failing(PartitionID) bool { return false }

func (d damagedOne) Range(p PartitionID, _ int) Report {
	if p == PartitionID(d) {
		return Report{Local: Damaged, Epoch: now}
	}
	return Report{Local: Silent}
}

// TestAcceptLossTakesTheMemberThatWasFilled, and none that has waited for that: it may have all but a little. Also if
// the range was halted for a while, and whatever the order in which partitions are wanted.
func TestAcceptLossTakesTheMemberThatWasFilled(t *testing.T) {
	seen := 0
	chains(partitions, func(c Chain) {
		at := slices.IndexFunc(c, func(m Member) bool { return m.State == Filling })
		if at < 0 || c.Halted() {
			return
		}
		report := func(p PartitionID) Report {
			if i := c.find(p); i >= 0 && c[i].State.holds() {
				return Report{} // it is lost
			}
			return Report{Local: Incomplete, Epoch: now}
		}
		for _, wanted := range [][]PartitionID{{0, 1, 2, 3}, {3, 2, 1, 0}} {
			next := c
			for i := range 3 {
				next = Next(next, wanted, report, now+Epoch(i))
			}
			var candidates []PartitionID
			for _, m := range next {
				candidates = append(candidates, m.Partition)
			}
			next = AcceptLoss(next, candidates, report, now+9)
			if len(next) != 1 || next[0].Partition != c[at].Partition || next[0].State != Serving {
				t.Fatalf("chain %v became %v, want %d alone", c, next, c[at].Partition)
			}
			seen++
		}
	})
	if seen < 10 {
		t.Errorf("%d chains", seen)
	}
}

// TestAcceptLossPassesOverWhatIsDamaged: the range would be halted again at once.
func TestAcceptLossPassesOverWhatIsDamaged(t *testing.T) {
	v := &View{Epoch: now, Nodes: []Node{{Name: "a"}, {Name: "b"}}, ChainEpochs: make([]uint32, 2),
		Partitions: []Partition{{ID: uuid.UUID{1}, Weight: 1}, {ID: uuid.UUID{2}, Node: 1, Weight: 1}}}
	for range 2 {
		v.Chains = append(v.Chains, Chain{{Partition: 0, State: LastCopy, Since: 2}})
	}
	for r := range v.Chains {
		if !v.AcceptLoss(r, damagedOne(0)) || len(v.Chains[r]) != 1 || v.Chains[r][0].Partition != 1 {
			t.Errorf("range %d: %v", r, v.Chains[r])
		}
	}
}
