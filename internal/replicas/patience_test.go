package replicas

import (
	"log/slog"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/crrs"
	"jbofd/internal/peers"
	"jbofd/internal/replica"
	"jbofd/internal/turn"
)

// watcher is partition 0 of node n0, which is told what it sees, in virtual time.
type watcher struct{ *Replicas }

const watchPatience = 1000

func newWatcher() watcher {
	g := &Replicas{cfg: Config{Patience: watchPatience, Changed: func() {}, Log: slog.New(slog.DiscardHandler)},
		joined: true, ranges: make([]*member, 1), untilNS: 1 << 60}
	g.ranges[0] = &member{r: replica.New(replica.Config{TombstoneSeconds: tombstoneSeconds,
		PortConfig: crrs.PortConfig{Keep: 1, Requests: 4, Served: 2,
			Config: crrs.Config{Window: 1, Reads: 1, Parts: 1}}})}
	return watcher{g}
}

// at sets the time.
func (w watcher) at(clock int64) {
	w.clockNS = clock
	w.lookForCuts()
}

// sees is a view in which these partitions serve the range, in that order.
func (w watcher) sees(serving []view.PartitionID) {
	v := &view.View{Chains: make([]view.Chain, 1), ChainEpochs: []uint32{1}}
	for i, name := range []string{"n0", "n1", "n2", "n3"} {
		v.Nodes = append(v.Nodes, view.Node{Name: name})
		v.Partitions = append(v.Partitions, view.Partition{Node: uint16(i)})
	}
	for _, p := range serving {
		v.Chains[0] = append(v.Chains[0], view.Member{Partition: p, Since: 1})
	}
	w.active = &cluster.Map{View: v}
	w.newest = w.active
	w.makeReport()
}

func (w watcher) reports() view.Local { return w.Report().Ranges[0].Local }

// TestPatienceBeginsWithTheNeighbour: a node that was lost long ago is back, and becomes a neighbour before there is a
// connection to it. It has the whole patience.
func TestPatienceBeginsWithTheNeighbour(t *testing.T) {
	for name, c := range map[string]struct {
		// lost are the nodes without a connection.
		lost          []string
		before, after []view.PartitionID
		// give is after which time the membership is given up.
		give int64
	}{
		"the successor": {[]string{"n1"}, []view.PartitionID{0, 2}, []view.PartitionID{0, 2, 1}, 0},
		"another one behind it leaves": {[]string{"n1"}, []view.PartitionID{0, 2, 1}, []view.PartitionID{0, 1},
			watchPatience},
		"the successor is new": {[]string{"n1"}, []view.PartitionID{0}, []view.PartitionID{0, 1}, watchPatience},
		"all others are new": {[]string{"n1", "n2"}, []view.PartitionID{0}, []view.PartitionID{1, 2, 0},
			watchPatience * 3 / 4},
		"one in front of it comes back":   {[]string{"n1"}, []view.PartitionID{0}, []view.PartitionID{1, 0}, 0},
		"another one in front of it goes": {[]string{"n1"}, []view.PartitionID{2, 0}, []view.PartitionID{0}, 0},
	} {
		w := newWatcher()
		w.sees(c.before)
		w.at(1)
		for _, n := range c.lost {
			w.linkChanged(&linkChange{conn: connection{node: n}, loss: loss{1, 1}})
		}
		const late = 100 * watchPatience
		w.at(late)
		if got := w.reports(); got != view.Complete {
			t.Errorf("%s: %v before the view", name, got)
			continue
		}
		w.sees(c.after)
		for _, d := range []int64{0, watchPatience / 2, watchPatience*3/4 - 1, watchPatience * 3 / 4,
			watchPatience - 1, watchPatience, 10 * watchPatience} {
			w.at(late + d)
			want := view.Complete
			if c.give != 0 && d >= c.give {
				want = view.Incomplete
			}
			if got := w.reports(); got != want {
				t.Errorf("%s: %v after %d, want %v", name, got, d, want)
			}
			if next := w.cuts.nextNS(); want == view.Complete && c.give != 0 && next != late+c.give {
				t.Errorf("%s: looks again at %d, want %d", name, next-late, c.give)
			}
		}
	}
}

// TestAMemberIsNotFilledByANodeOutOfReach, from when one that reaches nobody leaves: it would be filled at once.
func TestAMemberIsNotFilledByANodeOutOfReach(t *testing.T) {
	w := newWatcher()
	w.sees([]view.PartitionID{1, 2})
	chain := &w.newest.Chains[0]
	*chain = append(*chain, view.Member{Partition: 0, State: view.Waiting, Since: 1})
	w.linkChanged(&linkChange{conn: connection{node: "n2"}, loss: loss{1, 1}})
	for _, c := range []struct {
		clock int64
		want  view.Local
	}{{2, view.Incomplete}, {watchPatience * 3 / 4, view.Incomplete}, {watchPatience*3/4 + 1, view.Damaged}} {
		w.at(c.clock)
		if w.makeReport(); w.reports() != c.want {
			t.Errorf("%v at %d, want %v", w.reports(), c.clock, c.want)
		}
	}
	w.linkChanged(&linkChange{conn: connection{node: "n2"}})
	if w.reports() != view.Incomplete {
		t.Errorf("%v when it is in reach, want %v", w.reports(), view.Incomplete)
	}
}

// TestPatienceEndsWithAConnection, and begins anew when authority is back.
func TestPatienceEndsWithAConnection(t *testing.T) {
	w := newWatcher()
	if err := w.driver.Init(turn.Config{Machine: (*machine)(w.Replicas)}); err != nil {
		t.Fatal(err)
	}
	defer w.driver.Close()
	w.cfg.Clock = func() int64 { return w.clockNS }
	until := int64(1 << 60)
	w.cfg.Authority = func() int64 { return until }
	look := func(clock int64, want view.Local) {
		t.Helper()
		w.clockNS = clock
		w.readTime()
		w.lookForCuts()
		if got := w.reports(); got != want {
			t.Errorf("%v at %d, want %v", got, clock, want)
		}
	}
	w.sees([]view.PartitionID{0, 2})
	w.at(1)
	w.linkChanged(&linkChange{conn: connection{node: "n1"}, loss: loss{1, 1}})
	w.clockNS = 50_000
	w.sees([]view.PartitionID{0, 1})
	look(50_000+watchPatience-1, view.Complete)
	w.linkChanged(&linkChange{conn: connection{node: "n1"}})
	look(60_000, view.Complete)
	w.linkChanged(&linkChange{conn: connection{node: "n1"}, loss: loss{60_000, 60_000}})
	until = 60_000 + watchPatience/2 // authority is lost, and comes back much later
	look(60_000+watchPatience/2+1, view.Complete)
	look(80_000, view.Complete)
	until = 1 << 60
	look(80_000, view.Complete)
	look(80_000+watchPatience-1, view.Complete)
	look(80_000+watchPatience, view.Incomplete)
}

// TestNoMembershipIsGivenUpBeforeTheManagerGivesUpANode, which was alive until just before the loss of its connection,
// however long before that it was silent. The manager needs 1.3 leases for that, and the patience is two.
func TestNoMembershipIsGivenUpBeforeTheManagerGivesUpANode(t *testing.T) {
	const now, lease = 100 * watchPatience, watchPatience / 2
	serving := []view.PartitionID{0, 1}
	for name, c := range map[string]struct {
		serving         []view.PartitionID
		waits           bool
		silent, certain time.Duration
		// give is how long after the loss the membership is given up, or the report says that it cannot be filled.
		give int64
	}{
		"the successor ends":                  {serving, false, 0, 0, 2 * lease},
		"the successor ends, shortly silent":  {serving, false, lease / 8, 0, 2*lease - lease/8},
		"the successor ends, and was silent":  {serving, false, lease * 3 / 2, 0, lease * 7 / 4},
		"a Keep Alive has no answer":          {serving, false, lease, lease, lease},
		"a Keep Alive has no answer, longer":  {serving, false, lease * 3 / 2, lease, lease * 3 / 4},
		"all others end, and were silent":     {[]view.PartitionID{1, 0, 2}, false, lease * 3 / 2, 0, lease * 3 / 2},
		"no Keep Alive has an answer, longer": {[]view.PartitionID{1, 0, 2}, false, lease * 3 / 2, lease, lease / 2},
		"the ChainTail ends, and was silent":  {[]view.PartitionID{2, 1}, true, lease * 3 / 2, 0, lease * 3 / 2},
		"a Keep Alive to it has no answer":    {[]view.PartitionID{2, 1}, true, lease * 3 / 2, lease, lease / 2},
	} {
		w := newWatcher()
		w.cfg.Clock = func() int64 { return w.clockNS }
		w.at(1)
		before, after := view.Complete, view.Incomplete
		w.sees(c.serving)
		if c.waits {
			before, after = view.Incomplete, view.Damaged
			chain := &w.newest.Chains[0]
			*chain = append(*chain, view.Member{Partition: 0, State: view.Waiting, Since: 1})
		}
		w.at(now)
		for _, p := range c.serving {
			if p != 0 && (!c.waits || p == 1) {
				w.linkChanged(&linkChange{connection{node: []string{"n0", "n1", "n2"}[p]},
					w.lossOf(peers.Loss{Silent: c.silent, Certain: c.certain})})
			}
		}
		w.at(now + c.give - 1)
		if w.makeReport(); w.reports() != before {
			t.Errorf("%s: %v just before %d", name, w.reports(), c.give)
		}
		w.at(now + c.give)
		if w.makeReport(); w.reports() != after {
			t.Errorf("%s: %v after %d, want %v", name, w.reports(), c.give, after)
		}
	}
}
