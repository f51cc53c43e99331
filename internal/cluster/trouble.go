package cluster

import "jbofd/internal/cluster/view"

// trouble is what a manager knows of a partition whose drive does not work: it fails writes, or answers nothing. It
// keeps its ranges for a while, as a node does that is away, because they would be a long copy, and the drive may come
// back. After Timing.Away the partition is out: others get its ranges, if there are enough others. It is in again when
// the drive has worked for calm of that time.
type trouble struct {
	// firstNS and lastNS are when its node has said so first and last.
	firstNS, lastNS int64
}

// calm is for which part of Timing.Away a drive has to work until its trouble is over.
const calm = 10

// setPartitionsOut sets which partitions are to have no ranges because of their drives. It reports whether these are
// others than before. Those of a node that is not admitted, or has not reported, stay as they are.
func (n *Node) setPartitionsOut(m *Map) (differs bool) {
	l := n.lead
	for i := range m.Partitions {
		p, id := &m.Partitions[i], view.PartitionID(i)
		process := l.processes[m.Admitted[p.Node]]
		if process == nil || process.version == 0 {
			continue
		}
		t, known := l.troubles[id]
		switch fails := process.failing[id]; {
		case fails && !known:
			l.troubles[id] = trouble{n.now, n.now}
		case fails:
			l.troubles[id] = trouble{t.firstNS, n.now}
			if !p.Out && n.now-t.firstNS > n.t.away && m.CanSpare(id, &judgement{l, m}) {
				p.Out, differs = true, true
			}
		case !known || n.now-t.lastNS > n.t.away/calm:
			delete(l.troubles, id)
			differs = differs || p.Out
			p.Out = false
		}
	}
	return differs
}
