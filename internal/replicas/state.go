package replicas

import (
	"math/bits"
	"slices"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/crrs"
	"jbofd/internal/nvme"
)

// rangeBits is the logarithm of the number of positions of a range.
func rangeBits(m *cluster.Map) uint8 { return uint8(64 - bits.TrailingZeros(uint(len(m.Chains)))) }

// SetState adopts what the membership says: active is the view that the node acts on, newest the newest one that it has
// seen; nil: none. When it returns, no read is answered any more of a range that newest takes from the partition.
func (g *Replicas) SetState(active, newest *cluster.Map) {
	g.driver.Lock()
	defer g.driver.Unlock()
	if g.closed {
		return
	}
	g.readTime()
	if active == g.active && newest == g.newest {
		return
	}
	adopt := active != g.active && active != nil
	g.newest = newest
	if active != nil {
		g.active = active // a node that is not admitted any more (nil) keeps its last roles, without authority
	}
	if adopt {
		g.findSelf()
	}
	if g.active == nil {
		return
	}
	g.takeBack()
	if adopt {
		g.losses.Retry(g.clockNS)
	}
	for number, c := range g.active.Chains {
		g.seeDrop(number)
		g.seeHalted(number, c)
		m := g.ranges[number]
		at := g.placeIn(c)
		if m == nil && at < 0 {
			continue
		}
		if m == nil {
			m = g.newMember(number)
			g.ranges[number], g.members = m, append(g.members, m)
		}
		gaveUp := at >= 0 && m.gaveUp(c[at].Since)
		if m.withdrawn = gaveUp || !g.joined || !cluster.Serves(active, newest, g.self, number); m.withdrawn {
			m.r.Withdraw()
		}
		if adopt {
			g.seeVersion(m)
			g.adopt(m, at)
		}
		g.foresee(m)
	}
	if adopt && g.cfg.YieldAfter > 0 && g.yields.nextNS == 0 {
		g.yields.nextNS = g.clockNS + g.yieldNS()
	}
	g.countHalted()
	g.makeReport()
	g.finish()
}

// adopt has a replica adopt the active view, with its place in the chain.
func (g *Replicas) adopt(m *member, at int) {
	role := g.roleOf(m.number, at)
	m.r.SetShort(countServing(g.active.Chains[m.number]) < g.active.Replicas)
	if m.held = role.Member && g.drops.busy(m.number); m.held {
		return
	}
	g.touch(m).Adopt(role, membersBehind(g.active.Chains[m.number], at))
}

// findSelf finds the partition in a new view, and the nodes by their host NQNs.
func (g *Replicas) findSelf() {
	g.joined = false
	for i := range g.active.Partitions {
		if g.active.Partitions[i].ID == g.cfg.ID {
			g.self, g.joined = view.PartitionID(i), true
		}
	}
	g.nodes = make(map[string]uint16, len(g.active.Nodes))
	for i := range g.active.Nodes {
		g.nodes[g.cfg.HostNQN(g.active.Nodes[i].Name)] = uint16(i)
	}
	if g.ranges == nil {
		g.ranges = make([]*member, len(g.active.Chains)) // which are as many in each view
		g.beginDrops()
	}
}

// peerOf returns the member of a range's chain that has sent a command, NoPeer if the host may not speak for it. Its
// partition is on the node that the host is: the command says which one, because a node has two in a chain while a
// range moves from one to the other.
func (g *Replicas) peerOf(host string, k *nvme.KVReplicaSQE) crrs.Peer {
	node, known := g.nodes[host]
	if !known {
		return crrs.NoPeer
	}
	for _, e := range g.active.Chains[k.Range()] {
		if e.Partition == view.PartitionID(k.Sender()) && g.active.Partitions[e.Partition].Node == node {
			return crrs.Peer(e.Partition)
		}
	}
	return crrs.NoPeer
}

// placeIn is the index of the partition among the members of a chain that get its writes: those that serve, from the
// ChainHead on, and the filling one. It is -1 if the partition is not among them.
func (g *Replicas) placeIn(c view.Chain) int {
	if !g.joined {
		return -1
	}
	for i, e := range c {
		if e.Partition == g.self && takesPart(e) {
			return i
		}
	}
	return -1
}

func takesPart(e view.Member) bool {
	return e.State == view.Serving || e.State == view.Leaving || e.State == view.Filling
}

// membersBehind counts the members that get the writes downstream of index place.
func membersBehind(c view.Chain, at int) (n int) {
	for _, e := range c[max(at, 0):] {
		if takesPart(e) {
			n++
		}
	}
	return max(n-1, 0)
}

// roleOf is the partition's role in the chain of a range, at that index of it.
func (g *Replicas) roleOf(number, at int) crrs.Role {
	c := g.active.Chains[number]
	role := crrs.Role{Epoch: uint64(g.active.ChainEpochs[number]), Predecessor: crrs.NoPeer, Successor: crrs.NoPeer,
		ChainTail: crrs.NoPeer}
	if at < 0 {
		return role
	}
	role.Member, role.Filling, role.Since = true, c[at].State == view.Filling, uint64(c[at].Since)
	if at > 0 {
		role.Predecessor = crrs.Peer(c[at-1].Partition)
	}
	if at+1 < len(c) && takesPart(c[at+1]) {
		role.Successor = crrs.Peer(c[at+1].Partition)
	}
	tail := chainTail(c)
	if tail > at {
		role.ChainTail = crrs.Peer(c[tail].Partition)
	}
	for i := tail; i >= 0; i-- {
		if i != at && isServing(c[i]) && int(role.NumOthers) < len(role.Others) {
			role.Others[role.NumOthers] = crrs.Peer(c[i].Partition)
			role.NumOthers++
		}
	}
	return role
}

// chainTail is the index of the last member that serves.
func chainTail(c view.Chain) (at int) {
	for i, e := range c {
		if isServing(e) {
			at = i
		}
	}
	return at
}

func countServing(c view.Chain) (n int) {
	for _, e := range c {
		if isServing(e) {
			n++
		}
	}
	return n
}

func isServing(e view.Member) bool { return e.State == view.Serving || e.State == view.Leaving }

// Report is the state of the partition's ranges, for the manager. Its slices must not be changed.
func (g *Replicas) Report() cluster.Holdings {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.report
}

// makeReport makes a new Report, and calls Config.Changed.
//
// A member that has all data has had them since its membership began: it became one by a report of its own, or its
// chain was new, and empty. A membership that is not active yet is not reported, because the replica does not know it.
func (g *Replicas) makeReport() {
	if g.active == nil || g.newest == nil {
		return
	}
	g.resign()
	var report cluster.Holdings
	// If the view does not have the partition any more, its number may be another one's.
	known := g.joined && int(g.self) < len(g.newest.Partitions) && g.newest.Partitions[g.self].ID == g.cfg.ID
	if known && g.isFailing() {
		report.Failing = append(report.Failing, g.self)
	}
	others := 0
	for number, c := range g.newest.Chains {
		if !known {
			break
		}
		at := slices.IndexFunc(c, func(e view.Member) bool { return e.Partition == g.self })
		if at < 0 {
			if r, is := g.haltedReport(number); is && others < mostHalted {
				others++
				report.Ranges = append(report.Ranges, cluster.RangeReport{Partition: g.self, Range: number, Report: r})
			}
			continue
		}
		if l := g.localState(number, c[at]); l != view.Silent {
			report.Ranges = append(report.Ranges, cluster.RangeReport{Partition: g.self, Range: number,
				Report: view.Report{Local: l, Epoch: g.newest.Epoch, Yield: g.yieldOf(g.ranges[number]),
					Objects: g.objectsOf(number)}})
		}
	}
	g.mu.Lock()
	g.report = report
	g.mu.Unlock()
	g.cfg.Changed()
}

// localState is what the partition has of a range of which the newest view says that it is a member, e. It is Silent
// until the active view has the same membership. A member that serves or is a last copy is Complete unless something
// here says otherwise: see makeReport.
func (g *Replicas) localState(number int, e view.Member) view.Local {
	m := g.ranges[number]
	was := view.Member{}
	for _, a := range g.active.Chains[number] {
		if a.Partition == g.self {
			was = a
		}
	}
	switch {
	case g.drops.busy(number):
		return view.Damaged // it must not be filled, or serve, until that is over
	case m != nil && m.r.Damaged():
		return view.Damaged // not Incomplete: it would be filled, take no writes, and the others would wait for it
	case m != nil && m.r.Lacks(uint64(e.Since)) && !(e.State == view.LastCopy && m.r.Sufficient()):
		return view.Incomplete // it has missed views, and is filled again
	case was.Since != e.Since || was.Partition != e.Partition:
		return view.Silent
	case e.State <= view.Leaving && m != nil && m.gaveUp(e.Since):
		return view.Incomplete // as a last copy it has all that was acknowledged
	case (e.State == view.Filling || e.State == view.Waiting) && g.silence.silent:
		return view.Damaged // so that nobody waits for its drive
	case e.State >= view.Filling && g.copierIsCut(number):
		return view.Damaged // so that it is not filled now
	case e.State == view.Waiting:
		return view.Incomplete
	case e.State == view.Filling && !(m != nil && m.r.Role().Since == uint64(e.Since) && m.r.Complete()):
		return view.Incomplete
	}
	return view.Complete
}
