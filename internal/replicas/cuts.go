package replicas

import (
	"jbofd/internal/cluster/view"
	"jbofd/internal/peers"
)

// cuts has the nodes that are out of reach of this one although the manager admits them: the connection between two
// nodes is cut, and both are alive (a partial network partition; elsewhere here a partition is a store). No view ends
// that by itself, and writes would wait for as long as it lasts. The rules are:
//
//   - A serving member whose successor serves and is out of reach gives its membership up: it answers no reads any
//     more, and reports that its data are incomplete. Then the next view continues the chain without it, and it is
//     filled downstream of the ChainTail, where it has another neighbour. It is always the predecessor, so that one of
//     both stays. The patience with a neighbour begins when it becomes one, because only then a connection to it may
//     be made.
//   - A member that serves beside several others, and reaches none of them, gives its membership up wherever it is, a
//     little sooner: otherwise the members upstream of it would give up theirs, although they reach each other.
//   - A member that waits to be filled, or is being filled, while the ChainTail is out of reach, reports that it
//     cannot be filled. Then it is not in the chain, which would wait for it. That is as soon as the second rule, so
//     that a node that has just given up by the second rule is not filled again at once.
//
// If a view makes a member that has given its membership up a last copy, giving up is void: the member has all
// acknowledged data, reports that, and may serve again.
//
// Two nodes have two connections, as each is a host of the other, and a chain needs both: Forwards go one way, and
// requests for lost writes the other way. So a node is out of reach if one of them is missing. Both nodes see that.
type cuts struct {
	// lost are the connections that are missing.
	lost map[connection]loss
	// cut are those for which most of Config.Patience is over, or all of it.
	cut map[connection]patience
	// heldNS is since when this node has had authority without a break. Without authority it may be the one that is cut
	// off.
	heldNS int64
	// lookNS is when the connections are checked next, resignNS when there may be a membership to give up; 0: at no
	// time.
	lookNS, resignNS int64
}

// neighbour is the Predecessor or the Successor of this partition in the chain of a range, if it serves, and since when
// it has been that. The zero value: there is none.
type neighbour struct {
	partition view.PartitionID
	sinceNS   int64
}

// set sets the neighbour to the member at index i of a chain. is: there is one.
func (b *neighbour) set(c view.Chain, i int, is bool, clock int64) {
	switch {
	case !is:
		*b = neighbour{}
	case b.sinceNS == 0 || b.partition != c[i].Partition:
		*b = neighbour{c[i].Partition, clock}
	}
}

// connection is one of the two with a node: the one that this node has to it, or, if host is set, the one that it has
// to this node as a host.
type connection struct {
	node string
	host bool
}

// loss is since when a connection has been missing, in nanoseconds of Config.Clock: not before silentNS, and not after
// certainNS.
type loss struct{ silentNS, certainNS int64 }

// patience tells how much of Config.Patience with a connection is over.
type patience uint8

// Values of patience. No membership is given up before mostOver: see dueNS.
const (
	mostOver patience = iota + 1 // three quarters
	allOver
)

// patienceNS is mostOver or allOver as a duration.
func (g *Replicas) patienceNS(p patience) int64 {
	if p == mostOver {
		return int64(g.cfg.Patience) * 3 / 4
	}
	return int64(g.cfg.Patience)
}

// dueNS is when the part p of the patience with a connection is over, by Config.Clock.
//
// The whole patience is counted from silentNS, so that writes do not wait for longer than they have to. But the manager
// must give up a node that has failed before others give up memberships because of it: they might be all that is left
// of a chain. It may have been alive until certainNS. So mostOver is counted from certainNS, and allOver comes at least
// an eighth of the patience after mostOver.
func (g *Replicas) dueNS(l loss, p patience) int64 {
	held := g.cuts.heldNS
	if g.untilNS <= g.clockNS {
		held = g.clockNS
	}
	due := max(l.certainNS, held) + g.patienceNS(mostOver)
	if p == allOver {
		due = max(due+int64(g.cfg.Patience)/8, max(l.silentNS, held)+g.patienceNS(allOver))
	}
	return due
}

// linkChange is a change of a connection. With the zero loss it was made, otherwise it was lost.
type linkChange struct {
	conn connection
	loss loss
}

// NodeReachable notes that there is a connection to a node again.
func (g *Replicas) NodeReachable(node string) {
	g.links.Put(linkChange{conn: connection{node: node}})
	g.driver.RunLater()
}

// NodeUnreachable notes that there is no connection to a node.
func (g *Replicas) NodeUnreachable(node string, l peers.Loss) {
	g.links.Put(linkChange{connection{node: node}, g.lossOf(l)})
	g.driver.RunLater()
}

// HostConnected notes that a node has a connection to this one, as its host.
func (g *Replicas) HostConnected(node string) {
	g.links.Put(linkChange{conn: connection{node, true}})
	g.driver.RunLater()
}

// HostDisconnected notes that a node has no connection to this one.
func (g *Replicas) HostDisconnected(node string) {
	g.links.Put(linkChange{connection{node, true}, g.lossOf(peers.Loss{})})
	g.driver.RunLater()
}

// lossOf returns the loss of a connection that is missing now.
func (g *Replicas) lossOf(l peers.Loss) loss {
	now := g.cfg.Clock()
	return loss{silentNS: max(now-int64(l.Silent), 1), certainNS: max(now-int64(l.Certain), 1)}
}

// linkChanged takes news of a connection.
func (g *Replicas) linkChanged(l *linkChange) {
	c := &g.cuts
	if l.loss != (loss{}) {
		if c.lost == nil {
			c.lost, c.cut = map[connection]loss{}, map[connection]patience{}
		}
		if _, known := c.lost[l.conn]; !known {
			c.lost[l.conn] = l.loss
		}
		return
	}
	delete(c.lost, l.conn)
	if c.cut[l.conn] != 0 {
		delete(c.cut, l.conn)
		g.makeReport()
	}
	if !l.conn.host {
		g.reach(l.conn.node)
	}
}

// lookForCuts notes which connections have been missing for too long. If there are more than before, or it is time to
// give up a membership (resignNS), it makes a new Report, and makeReport gives up what has to be. Time without
// authority does not count, because this node may then be the one that is cut off.
func (g *Replicas) lookForCuts() {
	c := &g.cuts
	if c.lookNS = 0; g.cfg.Patience == 0 {
		return
	}
	changed := false
	for w, l := range c.lost {
		for p := c.cut[w] + 1; p <= allOver; p++ {
			at := g.dueNS(l, p)
			if at > g.clockNS {
				if c.lookNS == 0 || at < c.lookNS {
					c.lookNS = at
				}
				break
			}
			c.cut[w], changed = p, true
		}
	}
	if changed || c.resignNS != 0 && c.resignNS <= g.clockNS {
		g.makeReport()
	}
}

// nextNS is when the next check is due; 0: none is.
func (c *cuts) nextNS() int64 {
	if c.resignNS != 0 && (c.lookNS == 0 || c.resignNS < c.lookNS) {
		return c.resignNS
	}
	return c.lookNS
}

// isCut reports whether the node of a partition of the newest view is out of reach, and that part of the patience is
// over.
func (g *Replicas) isCut(p view.PartitionID, over patience) bool {
	node := g.newest.Nodes[g.newest.Partitions[p].Node].Name
	return max(g.cuts.cut[connection{node, false}], g.cuts.cut[connection{node, true}]) >= over
}

// resign gives up the memberships whose successor is out of reach, and those in which no other member is in reach, and
// sets resignNS. If the drive is silent it gives up all memberships in which other members serve. makeReport calls it,
// with each new view and when other connections are cut. So it also notes the neighbours, and since when they are that.
func (g *Replicas) resign() {
	g.cuts.resignNS = 0
	for number, m := range g.ranges {
		if m == nil {
			continue
		}
		c := g.newest.Chains[number]
		// at is the index of this member among those that serve, others the number of other members that serve. The
		// chain lists these first, so that there is one after this one if at < others.
		at, others, reached := -1, 0, 0
		for i := 0; i < len(c) && c[i].State <= view.Leaving; i++ {
			switch {
			case c[i].Partition == g.self:
				at = i
			case g.isCut(c[i].Partition, mostOver):
				others++
			default:
				others++
				reached++
			}
		}
		m.before.set(c, at-1, at > 0, g.clockNS)
		m.behind.set(c, at+1, at >= 0 && at < others, g.clockNS)
		if at < 0 || m.gaveUp(c[at].Since) {
			continue
		}
		due := int64(0)
		if at < others && g.isCut(c[at+1].Partition, allOver) {
			due = max(m.behind.sinceNS, g.cuts.heldNS) + g.patienceNS(allOver)
		}
		if others > 1 && reached == 0 {
			soon := max(m.before.sinceNS, m.behind.sinceNS, g.cuts.heldNS) + g.patienceNS(mostOver)
			if due == 0 || soon < due {
				due = soon
			}
		}
		switch {
		case g.silence.silent && others > 0:
			g.giveUp(m, c[at].Since)
		case due == 0:
		case due > g.clockNS:
			if g.cuts.resignNS == 0 || due < g.cuts.resignNS {
				g.cuts.resignNS = due
			}
		default:
			g.cfg.Log.Warn("other members of a chain are out of reach: the membership is given up", "partition",
				g.cfg.ID.String(), "range", number)
			g.giveUp(m, c[at].Since)
		}
	}
}

// giveUp gives up the membership that began at an epoch of the view.
func (g *Replicas) giveUp(m *member, since view.Epoch) {
	m.resigned, m.withdrawn = uint64(since), true
	m.r.Withdraw()
}

// takeBack takes back memberships that were given up, where the newest view has answered that by making the member a
// last copy: the member has all writes.
func (g *Replicas) takeBack() {
	if g.newest == nil {
		return
	}
	for number, m := range g.ranges {
		if m == nil || m.resigned == 0 {
			continue
		}
		for _, e := range g.newest.Chains[number] {
			if e.Partition == g.self && e.State == view.LastCopy && m.gaveUp(e.Since) {
				m.resigned = 0
			}
		}
	}
}

// gaveUp reports whether the member has given up its membership that began at an epoch.
func (m *member) gaveUp(since view.Epoch) bool { return m.resigned != 0 && m.resigned == uint64(since) }

// copierIsCut reports whether the ChainTail of a range, which fills others, is out of reach.
func (g *Replicas) copierIsCut(number int) bool {
	if len(g.cuts.cut) == 0 {
		return false
	}
	c := g.newest.Chains[number]
	return len(c) > 0 && c[0].State <= view.Leaving && g.isCut(c[chainTail(c)].Partition, mostOver)
}
