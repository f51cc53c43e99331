package replicas

import (
	"time"

	"jbofd/internal/cluster/view"
)

// cuts is what Replicas know of nodes that are out of reach although the manager hears them: the connection between two
// nodes is cut, and both are alive. No view ends that by itself, and writes would wait for as long as it lasts.
//
//   - A member that serves, and whose successor serves and is out of reach, gives its membership up: it answers no
//     reads any more, and reports that its data are incomplete. Then the chain goes on without it, and it is filled
//     behind the ChainTail, where it has another neighbour. It is always the predecessor, so that one of both stays.
//   - A member that waits for being filled, or is filled, while the ChainTail is out of reach, reports that it cannot
//     be filled. It is not in the chain then, which would wait for it.
//
// A last copy has given nothing up: it reports what it has.
type cuts struct {
	// lost are the nodes without a connection, and since when they were silent.
	lost map[string]int64
	// cut are those for which the patience is over.
	cut map[string]bool
	// heldNS is since when there has been authority. Without it this node may be the one that is cut off.
	heldNS int64
	// lookNS is when to look next, 0: never.
	lookNS int64
}

// linkChange is news of the connection to a node. lostNS is since when it has been silent, 0: there is a connection.
type linkChange struct {
	node   string
	lostNS int64
}

// NodeReachable says that there is a connection to a node again.
func (g *Replicas) NodeReachable(node string) {
	g.links.Put(linkChange{node: node})
	g.driver.RunLater()
}

// NodeUnreachable says that there is no connection to a node, which has been silent for that long.
func (g *Replicas) NodeUnreachable(node string, silent time.Duration) {
	g.links.Put(linkChange{node: node, lostNS: max(g.cfg.Clock()-int64(silent), 1)})
	g.driver.RunLater()
}

// linkChanged takes news of the connection to a node.
func (g *Replicas) linkChanged(l *linkChange) {
	c := &g.cuts
	if l.lostNS != 0 {
		if c.lost == nil {
			c.lost, c.cut = map[string]int64{}, map[string]bool{}
		}
		if _, known := c.lost[l.node]; !known {
			c.lost[l.node] = l.lostNS
		}
		return
	}
	delete(c.lost, l.node)
	if c.cut[l.node] {
		delete(c.cut, l.node)
		g.makeReport()
	}
	g.reach(l.node)
}

// lookForCuts looks for nodes that have been out of reach for too long.
func (g *Replicas) lookForCuts() {
	c := &g.cuts
	if c.lookNS = 0; g.cfg.Patience == 0 || len(c.lost) == len(c.cut) {
		return
	}
	changed := false
	for node, since := range c.lost {
		at := max(since, c.heldNS) + int64(g.cfg.Patience)
		if g.until <= g.clock {
			at = g.clock + int64(g.cfg.Patience)
		}
		switch {
		case c.cut[node]:
		case at <= g.clock:
			c.cut[node], changed = true, true
		case c.lookNS == 0 || at < c.lookNS:
			c.lookNS = at
		}
	}
	if changed {
		g.makeReport()
	}
}

// isCut reports whether the node of a partition of the newest view is out of reach.
func (g *Replicas) isCut(p view.PartitionID) bool {
	return g.cuts.cut[g.newest.Nodes[g.newest.Partitions[p].Node].Name]
}

// resign gives up the memberships whose successor is out of reach.
func (g *Replicas) resign() {
	if len(g.cuts.cut) == 0 {
		return
	}
	for number, m := range g.ranges {
		c := g.newest.Chains[number]
		for i := 0; m != nil && i+1 < len(c) && c[i+1].State <= view.Leaving; i++ {
			if c[i].Partition == g.self && !m.gaveUp(c[i].Since) && g.isCut(c[i+1].Partition) {
				g.cfg.Log.Warn("the next member of a chain is out of reach: the membership is given up", "partition",
					g.cfg.ID.String(), "range", number)
				m.resigned, m.withdrawn = uint64(c[i].Since), true
				m.r.Withdraw()
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
	return len(c) > 0 && c[0].State <= view.Leaving && g.isCut(c[chainTail(c)].Partition)
}
