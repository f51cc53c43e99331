package cluster

import (
	"cmp"
	"slices"
)

// A manager that reaches etcd stamps, whether other nodes hear it or not. One that most nodes do not hear is replaced
// by one of them. A node that gets no authority cannot tell which of the two is cut off. So it sends its reports to
// other nodes, too; one that gets no authority either, and has such reports of most of the nodes, takes over. Where
// there is no majority, as of two nodes, or where none of the nodes hears another one, the manager stays, and gives up
// whom it does not hear.
//
// The order of the times in leases, since a cut: 0.5 the nodes have no authority and tell each other, 0.6 one of them
// takes over, 1.5 the manager would give them up, after which none of them could (rule 4 of
// docs/decisions/0014-cluster-etcd.md).

// unserved is what a node knows of itself and others that get no authority from the manager.
type unserved struct {
	// termNS is when the term has become known, admittedNS when a view that admits the node has.
	termNS, admittedNS int64
	// terms is how many terms have ended in succession in which the node got no authority, at most maxTerms. Each
	// manager has more time than the last one, so that where none is of use, the last one gives up whom it does not
	// hear.
	terms int64
	// others is when other nodes have told that they get none of the manager of the present term.
	others map[Incarnation]int64
}

const (
	maxTerms = 3
	// maxTold is how many nodes an unserved node tells, the same ones as all others. All nodes together send to each of
	// them as much as they send to a manager. One of them has to be unserved, too, to hear the others and to be heard
	// by them. So they are drawn by the term: nodes that are cut off together are neighbours in the view most likely,
	// as they are in a rack. Of more than half of the nodes, 2^-16 is the chance that none is drawn.
	maxTold = 16
)

// follow begins a term. grantedNS is when the last report was sent that was answered with authority.
func (u *unserved) follow(now, grantedNS int64) {
	if u.termNS != 0 && grantedNS < u.termNS {
		u.terms = min(u.terms+1, maxTerms)
	} else {
		u.terms = 0
	}
	u.termNS = now
	clear(u.others)
}

// unservedNS is for how long the node has got no authority although the manager has written its stamp all the time.
func (n *Node) unservedNS() int64 {
	e, u := &n.etcd, &n.unserved
	if n.lead != nil || n.problem != nil || e.manager == nil || e.manager.term != n.term || !e.synced ||
		n.now-e.seenNS >= n.t.takeover || n.newest == nil || !n.newest.admits(n.cfg.Incarnation) {
		return 0
	}
	return n.now - max(n.granted, n.attentive, u.termNS, u.admittedNS, e.signsNS)
}

// tellOthers sends a report to other nodes than the manager. It promises them nothing more.
func (n *Node) tellOthers(r *Report, out *Actions) {
	for _, inc := range n.told() {
		if address := n.etcd.addresses[inc]; address != "" && inc != n.cfg.Incarnation {
			out.Sends = append(out.Sends, Send{To: address, Message: Message{Report: r}})
		}
	}
}

// told returns the processes that unserved nodes tell: those of all nodes but the manager, or maxTold of them.
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

// overheard takes a report that is for the manager, which this node is not.
func (n *Node) overheard(r *Report) {
	if r.Term == n.term && n.newest != nil && n.newest.admits(r.Incarnation) {
		n.unserved.others[r.Incarnation] = n.now
	}
}

// outvoted reports whether the node is to take over from a manager that stamps: it and others that it hears are most of
// the admitted nodes, and get no authority.
func (n *Node) outvoted() bool {
	terms := n.unserved.terms
	if n.granted >= n.unserved.termNS {
		terms = 0 // this manager was of use
	}
	if n.unservedNS() < n.t.replace*(1+terms) {
		return false
	}
	all, unserved := 0, 1
	for _, inc := range n.newest.Admitted {
		if inc == 0 {
			continue
		}
		all++
		if at, told := n.unserved.others[inc]; told && inc != n.cfg.Incarnation && n.now-at < n.t.unanswered {
			unserved++
		}
	}
	return 2*unserved > all
}
