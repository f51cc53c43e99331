package replicas

import (
	"log/slog"
	"slices"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/crrs"
	"jbofd/internal/replica"
)

const testYieldAfter = int64(time.Second)

// newLeader returns the replicas of partition 0, which leads all ranges of a cluster of two, in virtual time. The other
// partition is to lead half of them. No view comes.
func newLeader(ranges int) *Replicas {
	g := &Replicas{cfg: Config{YieldAfter: time.Duration(testYieldAfter), Log: slog.New(slog.DiscardHandler)},
		joined: true, clockNS: 1, untilNS: 1 << 60, ranges: make([]*member, ranges)}
	v := &view.View{Epoch: 1, Replicas: 2, Nodes: make([]view.Node, 2),
		Partitions: []view.Partition{{Node: 0}, {Node: 1}}, ChainEpochs: slices.Repeat([]uint32{1}, ranges)}
	for range ranges {
		v.Chains = append(v.Chains, view.Chain{{Partition: 0, Since: 1}, {Partition: 1, Since: 1}})
	}
	g.active = &cluster.Map{View: v}
	g.newest = g.active
	for i := range ranges {
		m := &member{number: i, r: replica.New(replica.Config{TombstoneSeconds: tombstoneSeconds,
			PortConfig: crrs.PortConfig{Keep: 1, Requests: 4, Served: 2,
				Config: crrs.Config{Window: 1, Reads: 1, Parts: 1}}})}
		g.ranges[i], g.members = m, append(g.members, m)
		g.touch(m).Adopt(g.roleOf(i, 0), 1)
		g.seeVersion(m)
	}
	g.yields.nextNS = 1
	return g
}

// yieldingAt returns the ranges that yield, after a look at a time.
func (g *Replicas) yieldingAt(clock int64) (numbers []int) {
	for g.clockNS = clock; len(g.touched) > 0; g.touched = g.touched[1:] {
		g.touched[0].touched = false
	}
	g.lookForYields()
	for _, m := range g.members {
		if m.yielding {
			numbers = append(numbers, m.number)
		}
	}
	return numbers
}

// expire ends the time for which the ranges that yield hold writes back.
func (g *Replicas) expire() {
	for _, m := range g.members {
		if m.yielding {
			g.clockNS += g.yieldNS()
			m.r.SetTime(g.clockNS, 0)
			g.tendYield(m)
		}
	}
}

// TestARangeThatIsWithdrawnDoesNotYield: the newest view takes it away, or the member has given it up, so that what it
// says of its writes is nothing to the next ChainHead. The others yield.
func TestARangeThatIsWithdrawnDoesNotYield(t *testing.T) {
	g := newLeader(32)
	var due []int
	for number, to := range g.active.Leaders() {
		if to != g.self {
			due = append(due, number)
		}
	}
	if len(due) != 16 {
		t.Fatalf("%d of 32 ranges are to have another ChainHead", len(due))
	}
	for _, number := range due {
		g.ranges[number].withdrawn = true
	}
	if got := g.yieldingAt(10 * testYieldAfter); len(got) > 0 {
		t.Errorf("ranges %v yield, and are withdrawn", got)
	}
	g.yields.nextNS = g.clockNS
	g.ranges[due[7]].withdrawn, g.ranges[due[9]].withdrawn = false, false
	if got := g.yieldingAt(g.clockNS); !slices.Equal(got, []int{due[7], due[9]}) {
		t.Errorf("ranges %v yield, want %d and %d, which are not withdrawn", got, due[7], due[9])
	}
}

// TestYieldsThatFailAreTriedLessOften: no view comes while writes are held back. The time to the next attempt doubles
// up to 64 times, and is what it was when a view has come.
func TestYieldsThatFailAreTriedLessOften(t *testing.T) {
	g := newLeader(16)
	next := 10 * testYieldAfter
	for n, want := range []int64{2, 4, 8, 16, 32, 64, 64, 64} {
		if got := g.yieldingAt(next); len(got) != 1 {
			t.Fatalf("attempt %d: %d ranges yield, want 1", n, len(got))
		}
		g.expire()
		next = g.clockNS + want*testYieldAfter
		if got := g.yieldingAt(next - 1); len(got) > 0 {
			t.Fatalf("attempt %d follows the one before sooner than after %d times YieldAfter", n+1, want)
		}
	}
	yields := g.yieldingAt(next)
	m := g.ranges[yields[0]]
	if !g.tendYield(m) {
		t.Fatal("the range has no writes, and has not yielded")
	}
	v := *g.active.View
	v.Epoch++
	v.Chains, v.ChainEpochs = slices.Clone(v.Chains), slices.Clone(v.ChainEpochs)
	c := v.Chains[m.number]
	v.Chains[m.number], v.ChainEpochs[m.number] = view.Chain{c[1], c[0]}, 2
	g.active = &cluster.Map{View: &v}
	g.newest = g.active
	g.seeVersion(m)
	next = g.clockNS + g.yieldNS()
	if got := g.yieldingAt(next); len(got) != 1 {
		t.Fatal("no other range yields a moment after one has succeeded")
	}
	g.expire()
	if got := g.yieldingAt(g.clockNS + 2*testYieldAfter); len(got) != 1 {
		t.Error("after a success the time to the next attempt is not the shortest")
	}
}
