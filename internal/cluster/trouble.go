package cluster

import (
	"maps"
	"slices"

	"jbofd/internal/cluster/view"
	"jbofd/internal/uuid"
)

// trouble is the manager's record of a partition whose drive does not work: it fails writes, or completes nothing. The
// partition keeps its ranges for a while, like a node that is away, because copying them takes long, and the drive may
// recover. After timing.awayNS the partition is out: others get its ranges, if there are enough others. It is in again
// when its node has not reported the trouble for timing.awayNS/calm while the manager hears the node: whether the drive
// works shows only when it gets ranges and their writes, and those would be copied in vain.
type trouble struct {
	// firstNS and lastNS are when its node has reported it first and last.
	firstNS, lastNS int64
}

// calm divides timing.awayNS: the trouble of a partition is over when its node has not reported it for that long.
const calm = 10

// setPartitionsOut sets which partitions are to have no ranges because of their drives, and reports whether that has
// changed. Partitions of a node that is not admitted, or has not reported, stay as they are.
func (n *Node) setPartitionsOut(m *Map) (differs bool) {
	l := n.lead
	for i := range m.Partitions {
		p, id := &m.Partitions[i], view.PartitionID(i)
		if p.ID.IsZero() {
			continue
		}
		t, known := l.troubles[p.ID]
		if !known && p.Out { // an earlier manager has known it
			t, known = trouble{n.now, n.now}, true
			l.troubles[p.ID] = t
		}
		process := l.processes[m.Admitted[p.Node]]
		if process == nil || process.version == 0 {
			if known {
				l.troubles[p.ID] = trouble{t.firstNS, n.now}
			}
			continue
		}
		switch fails := process.failing[id]; {
		case fails && !known:
			l.troubles[p.ID] = trouble{n.now, n.now}
		case fails:
			l.troubles[p.ID] = trouble{t.firstNS, n.now}
			if !p.Out && n.now-t.firstNS > n.t.awayNS && m.CanSpare(id, &judgement{l, m}) {
				p.Out, differs = true, true
			}
		case !known || n.now-t.lastNS > n.t.awayNS/calm:
			delete(l.troubles, p.ID)
			differs = differs || p.Out
			p.Out = false
		}
	}
	maps.DeleteFunc(l.troubles, func(id uuid.UUID, _ trouble) bool {
		return !slices.ContainsFunc(m.Partitions, func(p view.Partition) bool { return p.ID == id })
	})
	return differs
}
