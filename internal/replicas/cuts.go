package replicas

import (
	"jbofd/internal/cluster/view"
	"jbofd/internal/peers"
)

// cuts is what Replicas know of nodes that are out of reach although the manager hears them: the connection between two
// nodes is cut, and both are alive (a partial network partition; here a partition is one of keys). No view ends that by
// itself, and writes would wait for as long as it lasts.
//
//   - A member that serves, and whose successor serves and is out of reach, gives its membership up: it answers no
//     reads any more, and reports that its data are incomplete. Then the chain goes on without it, and it is filled
//     behind the ChainTail, where it has another neighbour. It is always the predecessor, so that one of both stays.
//     A neighbour has the patience from when it became one: a connection to it may be made again only then.
//   - A member that serves beside several others, and reaches none of them, gives its membership up wherever it is, a
//     little sooner: otherwise those in front of it would, although they reach each other.
//   - A member that waits for being filled, or is filled, while the ChainTail is out of reach, reports that it cannot
//     be filled. It is not in the chain then, which would wait for it. That is as soon as the second rule, so that a
//     node which follows that one is not filled at once.
//
// A last copy has given nothing up: it reports what it has. If a view makes a member one that has, it has all data, and
// serves again if the view says so.
//
// Two nodes have two connections, as each is a host of the other, and a chain needs both: Forwards go one way, and what
// was lost is asked for on the other way. So a node is out of reach if one of them is missing. Both nodes see that.
type cuts struct {
	// lost are the connections that are missing.
	lost map[connection]loss
	// cut are those for which most of Config.Patience is over, or all of it.
	cut map[connection]patience
	// heldNS is since when there has been authority. Without it this node may be the one that is cut off.
	heldNS int64
	// lookNS is when to look next, resignNS when there may be a membership to give up; 0: never.
	lookNS, resignNS int64
}

// neighbour is the member before or behind this one in the chain of a range, if it serves, and since when it is that.
// The zero value is none.
type neighbour struct {
	partition view.PartitionID
	sinceNS   int64
}

// set says that the neighbour is the member at index i of a chain. is: there is one.
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

// loss is since when a connection has been missing, by Config.Clock: not before silentNS, and not after certainNS.
type loss struct{ silentNS, certainNS int64 }

// patience says how much of it is over.
type patience uint8

// Values of patience. No membership is given up before mostOver: see dueNS.
const (
	mostOver patience = iota + 1 // three quarters
	allOver
)

// patienceNS is how long it takes until so much of the patience is over.
func (g *Replicas) patienceNS(p patience) int64 {
	if p == mostOver {
		return int64(g.cfg.Patience) * 3 / 4
	}
	return int64(g.cfg.Patience)
}

// dueNS is when so much of the patience with a connection is over.
//
// All of it begins with the silence, so that writes do not wait for longer than they have to. But a node that has
// failed must be given up by the manager before others give up memberships for it: they might be all that is left of a
// chain. It may have been alive until certainNS. So most of the patience begins there, and the rest ends no sooner than
// an eighth after that.
func (g *Replicas) dueNS(l loss, p patience) int64 {
	held := g.cuts.heldNS
	if g.until <= g.clock {
		held = g.clock
	}
	due := max(l.certainNS, held) + g.patienceNS(mostOver)
	if p == allOver {
		due = max(due+int64(g.cfg.Patience)/8, max(l.silentNS, held)+g.patienceNS(allOver))
	}
	return due
}

// linkChange is news of a connection. The zero loss: there is one.
type linkChange struct {
	conn connection
	loss loss
}

// NodeReachable says that there is a connection to a node again.
func (g *Replicas) NodeReachable(node string) {
	g.links.Put(linkChange{conn: connection{node: node}})
	g.driver.RunLater()
}

// NodeUnreachable says that there is no connection to a node.
func (g *Replicas) NodeUnreachable(node string, l peers.Loss) {
	g.links.Put(linkChange{connection{node: node}, g.lossOf(l)})
	g.driver.RunLater()
}

// HostConnected says that a node has a connection to this one, as its host.
func (g *Replicas) HostConnected(node string) {
	g.links.Put(linkChange{conn: connection{node, true}})
	g.driver.RunLater()
}

// HostDisconnected says that it has none.
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
			if at > g.clock {
				if c.lookNS == 0 || at < c.lookNS {
					c.lookNS = at
				}
				break
			}
			c.cut[w], changed = p, true
		}
	}
	if changed || c.resignNS != 0 && c.resignNS <= g.clock {
		g.makeReport()
	}
}

// nextNS is when to look next, 0: never.
func (c *cuts) nextNS() int64 {
	if c.resignNS != 0 && (c.lookNS == 0 || c.resignNS < c.lookNS) {
		return c.resignNS
	}
	return c.lookNS
}

// isCut reports whether the node of a partition of the newest view is out of reach, for so much of the patience.
func (g *Replicas) isCut(p view.PartitionID, over patience) bool {
	node := g.newest.Nodes[g.newest.Partitions[p].Node].Name
	return max(g.cuts.cut[connection{node, false}], g.cuts.cut[connection{node, true}]) >= over
}

// resign gives up the memberships whose successor is out of reach, and those in which no other member is in reach, and
// notes when the next one may have to be. With a silent drive it gives up all in which there are others. makeReport
// calls it, with each new view and when other connections are cut, so that it also notes who the neighbours are, and
// since when.
func (g *Replicas) resign() {
	g.cuts.resignNS = 0
	for number, m := range g.ranges {
		if m == nil {
			continue
		}
		c := g.newest.Chains[number]
		// at is the index of this member among those that serve, others how many besides it serve. The chain lists them
		// first, so that there is one behind this one if at < others.
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
		m.before.set(c, at-1, at > 0, g.clock)
		m.behind.set(c, at+1, at >= 0 && at < others, g.clock)
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
		case due > g.clock:
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

// giveUp gives up a membership that began at an epoch.
func (g *Replicas) giveUp(m *member, since view.Epoch) {
	m.resigned, m.withdrawn = uint64(since), true
	m.r.Withdraw()
}

// takeBack takes back what was given up where the newest view has answered that by making the member a last copy: it
// has taken all writes meanwhile.
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
