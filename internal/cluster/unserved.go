package cluster

import (
	"cmp"
	"slices"
)

// A node is unserved if it gets no authority from a manager that stamps.
//
// A manager that reaches etcd stamps, whether other nodes reach it or not. If most nodes do not get its answers, one of
// them replaces it. An unserved node cannot tell whether it or the manager is cut off. So it sends its reports to other
// nodes, too. A node that is unserved itself, and has got such reports of most of the nodes, takes over (outvoted).
// Where there is no majority, as of two nodes, or where no node reaches another one, the manager stays, and gives up
// the nodes whose reports do not come.
//
// The order of the times in leases, since a cut: at 0.5 the nodes have no authority and report to each other, at 0.6
// one of them takes over, at 1.5 the manager would give them up, after which none of them could take over (rule 4 of
// docs/decisions/0014-cluster-etcd.md).

// unserved is a node's record of whether it and others are unserved.
type unserved struct {
	// termNS is when the term has become known, admittedNS when a view that admits the node has.
	termNS, admittedNS int64
	// terms is how many terms in succession have ended in which the node got no authority, at most maxTerms. Each
	// manager has more time than the one before it, so that where no manager reaches most nodes, the last one gives up
	// those that it does not reach.
	terms int64
	// others has the times of the last reports that other nodes, which are unserved in the present term, have sent to
	// this node.
	others map[Incarnation]int64
}

const (
	maxTerms = 3
	// maxTold is to how many nodes an unserved node reports, besides the manager. All unserved nodes choose the same
	// ones, so that each of these gets as many reports as a manager. At least one of the chosen nodes has to be
	// unserved, too, and to reach the others. So they are drawn by the term: nodes that are cut off together are often
	// neighbours in the view, as they are in a rack. If more than half of the nodes are unserved, the probability that
	// no chosen node is unserved is below 2^-16.
	maxTold = 16
)

// follow begins a term. grantedNS is when the last report that was answered with authority was sent.
func (u *unserved) follow(now, grantedNS int64) {
	if u.termNS != 0 && grantedNS < u.termNS {
		u.terms = min(u.terms+1, maxTerms)
	} else {
		u.terms = 0
	}
	u.termNS = now
	clear(u.others)
}

// unservedNS is for how long the node has been unserved; 0: it is not, or the manager does not stamp.
func (n *Node) unservedNS() int64 {
	e, u := &n.etcd, &n.unserved
	if n.lead != nil || n.problem != nil || e.manager == nil || e.manager.term != n.term || !e.synced ||
		n.now-e.seenNS >= n.t.takeoverNS || n.newest == nil || !n.newest.admits(n.cfg.Incarnation) {
		return 0
	}
	return n.now - max(n.grantedNS, n.attentiveNS, u.termNS, u.admittedNS, e.signsNS)
}

// tellOthers sends a report to other nodes than the manager. It contains no further promise.
func (n *Node) tellOthers(r *Report, out *Actions) {
	for _, inc := range n.told() {
		if address := n.etcd.addresses[inc]; address != "" && inc != n.cfg.Incarnation {
			out.Sends = append(out.Sends, Send{To: address, Message: Message{Report: r}})
		}
	}
}

// told returns the processes to which unserved nodes report: those of all nodes but the manager, or maxTold of them.
func (n *Node) told() []Incarnation {
	all := slices.DeleteFunc(slices.Clone(n.newest.Admitted), func(i Incarnation) bool {
		return i == 0 || i == n.manager.Incarnation
	})
	if len(all) <= maxTold {
		return all
	}
	draw := func(i Incarnation) uint64 { return mix(mix(n.term) ^ uint64(i)) }
	slices.SortFunc(all, func(a, b Incarnation) int { return cmp.Compare(draw(a), draw(b)) })
	return all[:maxTold]
}

// mix is a bijection that scatters its argument: the finalizer of splitmix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// overheard handles a report to this node while it is not the manager: the sender is unserved.
func (n *Node) overheard(r *Report) {
	if r.Term == n.term && n.newest != nil && n.newest.admits(r.Incarnation) {
		n.unserved.others[r.Incarnation] = n.now
	}
}

// outvoted reports whether the node is to take over from a manager that stamps: it is unserved, and with the others
// that have reported to it that they are, it has the majority of the admitted nodes.
func (n *Node) outvoted() bool {
	terms := n.unserved.terms
	if n.grantedNS >= n.unserved.termNS {
		terms = 0 // this manager has granted authority
	}
	if n.unservedNS() < n.t.replaceNS*(1+terms) {
		return false
	}
	all, unserved := 0, 1
	for _, inc := range n.newest.Admitted {
		if inc == 0 {
			continue
		}
		all++
		if at, told := n.unserved.others[inc]; told && inc != n.cfg.Incarnation && n.now-at < n.t.unansweredNS {
			unserved++
		}
	}
	return 2*unserved > all
}
