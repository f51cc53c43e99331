package cluster

import (
	"maps"
	"slices"

	"jbofd/internal/cluster/view"
	"jbofd/internal/uuid"
)

// trouble is the manager's record of a partition whose drive does not work: it fails writes, or completes nothing. The
// partition keeps its ranges for a while, like a node that is away, because copying them takes long, and the drive may
// recover. After timing.awayNS the partition is out: others get its ranges, if there are enough others.
//
// A partition that is out has no writes, so that nothing shows whether its drive works. It comes back when its node has
// reported no trouble for the calm time while the manager hears the node. If the drive fails again then, all of its
// ranges are copied twice in vain. So the calm time is awayNS/calm at first, and doubles each time, up to mostDoublings
// times: with the default of awayNS it is 1 min, 2 min, and so on up to 17 h. A partition without which there are too
// few others comes back after the first calm time.
//
// The count begins anew when the partition has worked for awayNS*remembered (a day) since it came back, and when its
// node is another process: an operator who has mended a drive restarts the node. A new manager counts from one.
type trouble struct {
	// firstNS and lastNS are when the node has reported it first and last. When the trouble is over firstNS is 0, and
	// lastNS the end of it.
	firstNS, lastNS int64
	// times is how often the partition has been out. process is that of its node. out: it is out in the newest view.
	times   uint8
	process Incarnation
	out     bool
}

const (
	calm          = 10
	mostDoublings = 10
	remembered    = 144
)

// troubleLook is what the manager knows of a partition when it looks at its trouble.
type troubleLook struct {
	nowNS, awayNS int64
	// process is that of the node, of which the manager has heard. heard: it reports to this manager; fails: that the
	// drive does not work.
	process      Incarnation
	heard, fails bool
	// out: the partition has no ranges because of its drive. spare: there are enough others without it.
	out, spare bool
}

// calmNS is for how long the node must have reported no trouble until the partition comes back.
func (t *trouble) calmNS(awayNS int64) int64 {
	return awayNS / calm << min(max(int(t.times), 1)-1, mostDoublings)
}

// look adds what the manager knows now, and returns whether the partition is to be out, and whether there is nothing to
// be remembered of it.
func (t *trouble) look(k *troubleLook) (out, forget bool) {
	if k.heard && k.process != t.process {
		t.process, t.times = k.process, 0
	}
	if k.out && !t.out { // not before the view is written
		t.times = min(t.times, 254) + 1
	}
	t.out = k.out
	quietNS := k.nowNS - t.lastNS
	switch {
	case !k.heard:
		if t.firstNS != 0 {
			t.lastNS = k.nowNS
		}
		return k.out, false
	case k.fails:
		if t.firstNS == 0 {
			t.firstNS = k.nowNS
		}
		if t.lastNS = k.nowNS; !k.out && k.spare && k.nowNS-t.firstNS > k.awayNS {
			return true, false
		}
		return k.out, false
	case t.firstNS == 0:
		return false, t.times == 0 || quietNS > k.awayNS*remembered
	case quietNS <= k.awayNS/calm, k.out && k.spare && quietNS <= t.calmNS(k.awayNS):
		return k.out, false
	}
	if t.firstNS = 0; k.out {
		t.lastNS = k.nowNS
	}
	return false, t.times == 0
}

// setPartitionsOut sets which partitions are to have no ranges because of their drives, and reports whether that has
// changed. Partitions of a node that is not admitted, or has not reported, stay as they are.
func (n *Node) setPartitionsOut(m *Map) (differs bool) {
	l := n.lead
	for i := range m.Partitions {
		p, id := &m.Partitions[i], view.PartitionID(i)
		if p.ID.IsZero() {
			continue
		}
		k := troubleLook{nowNS: n.now, awayNS: n.t.awayNS, process: m.Admitted[p.Node], out: p.Out}
		if process := l.processes[k.process]; process != nil && process.version > 0 {
			k.heard, k.fails = true, process.failing[id]
		}
		t, known := l.troubles[p.ID]
		switch {
		case known:
		case p.Out: // an earlier manager has known it
			t = trouble{firstNS: n.now, lastNS: n.now, times: 1, process: k.process, out: true}
		case k.fails:
			t.process = k.process
		default:
			continue
		}
		p.Out = false
		k.spare = m.CanSpare(id, &judgement{l, m})
		out, forget := t.look(&k)
		if p.Out = out; out != k.out {
			differs = true
		}
		if l.troubles[p.ID] = t; forget {
			delete(l.troubles, p.ID)
		}
	}
	maps.DeleteFunc(l.troubles, func(id uuid.UUID, _ trouble) bool {
		return !slices.ContainsFunc(m.Partitions, func(p view.Partition) bool { return p.ID == id })
	})
	return differs
}
