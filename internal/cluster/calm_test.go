package cluster

import (
	"testing"

	"jbofd/internal/cluster/view"
	"jbofd/internal/uuid"
)

// TestAPartitionThatIsOutComesBackWhenItsDriveWasCalm, as its node has told this manager: not when the manager is new,
// and neither when the node was silent, or has not reported yet.
func TestAPartitionThatIsOutComesBackWhenItsDriveWasCalm(t *testing.T) {
	const away, calmNS, began = 1000, 1000 / calm, 5000
	silent, starts, works := (*process)(nil), &process{}, &process{version: 1}
	fails := &process{version: 1, failing: map[view.PartitionID]bool{0: true}}
	type step struct {
		afterNS int64
		says    *process
		out     bool
	}
	for name, c := range map[string]struct {
		known bool // to this manager, since long ago
		steps []step
	}{
		"a new manager": {false, []step{
			{0, works, true}, {calmNS, works, true}, {calmNS + 1, works, false}}},
		"known": {true, []step{
			{0, works, false}}},
		"it fails still": {false, []step{
			{0, works, true}, {90, fails, true}, {190, works, true}, {191, works, false}}},
		"the node was silent": {true, []step{
			{0, silent, true}, {9, works, true}, {100, works, true}, {101, works, false}}},
		"it has not reported": {true, []step{
			{0, starts, true}, {400, starts, true}, {500, works, true}}},
		"neither to a new manager": {false, []step{
			{0, starts, true}, {400, starts, true}, {500, works, true}, {501, works, false}}},
	} {
		m := someMap()
		m.Partitions = m.Partitions[:1]
		m.Partitions[0].Out = true
		inc := m.Admitted[0]
		n := New(Config{AwayNS: away})
		n.lead = &lead{processes: map[Incarnation]*process{}, troubles: map[uuid.UUID]trouble{}}
		if c.known {
			n.lead.troubles[m.Partitions[0].ID] = trouble{firstNS: 1, lastNS: 2, process: inc}
		}
		for i, s := range c.steps {
			n.now = began + s.afterNS
			delete(n.lead.processes, inc)
			if s.says != nil {
				n.lead.processes[inc] = s.says
			}
			was := m.Partitions[0].Out
			if differs := n.setPartitionsOut(m); m.Partitions[0].Out != s.out || differs != (was != s.out) {
				t.Errorf("%s, step %d: the partition is out: %t, differs: %t", name, i, m.Partitions[0].Out, differs)
			}
		}
	}
}

// TestTheTroubleOfAPartitionIsNotThatOfTheNextOneOfItsNumber, and is forgotten with it.
func TestTheTroubleOfAPartitionIsNotThatOfTheNextOneOfItsNumber(t *testing.T) {
	m := someMap()
	m.Partitions = m.Partitions[:1]
	n := New(Config{AwayNS: 1000})
	n.lead = &lead{troubles: map[uuid.UUID]trouble{}, processes: map[Incarnation]*process{
		m.Admitted[0]: {version: 1, failing: map[view.PartitionID]bool{0: true}}}}
	n.now = 1
	n.setPartitionsOut(m)
	m.Partitions[0].ID = uuid.UUID{77}
	n.now = 5000
	n.setPartitionsOut(m)
	want := trouble{firstNS: 5000, lastNS: 5000, process: m.Admitted[0]}
	if got := n.lead.troubles; len(got) != 1 || got[uuid.UUID{77}] != want {
		t.Errorf("%v, want the trouble of the new partition, since now", got)
	}
	m.Partitions[0].ID, m.Partitions[0].Out = uuid.UUID{78}, true // an earlier manager has put it out
	want = trouble{firstNS: 5000, lastNS: 5000, times: 1, out: true, process: m.Admitted[0]}
	if n.setPartitionsOut(m); n.lead.troubles[uuid.UUID{78}] != want {
		t.Errorf("%+v, want %+v", n.lead.troubles, want)
	}
	m.Partitions[0] = view.Partition{}
	if n.setPartitionsOut(m); len(n.lead.troubles) != 0 {
		t.Errorf("%v, want none without a partition", n.lead.troubles)
	}
}
