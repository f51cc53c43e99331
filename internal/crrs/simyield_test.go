package crrs

import "slices"

// ChainHeads that yield, in the simulated chain: at any time, also beside other faults. The view may
// come when the time is over for which they hold writes back, or before they have yielded.

// reportYield lets a ChainHead yield now and then, and tells the manager when it has.
func (s *sim) reportYield(n *node) {
	role := n.r.Role()
	if s.still || !role.Member || !role.head() || len(s.chain) < 2 || s.chain[0] != n.id || s.cut[pair{n.id, manager}] {
		return
	}
	if !n.r.Yields() {
		if s.rng.IntN(6) == 0 && (!s.calm || s.rng.IntN(4) == 0) {
			s.trace("node %d yields", n.id)
			s.turn(n, func(*Actions) { n.r.Yield(n.clock(s.now) + s.upTo(lease)) })
		}
		return
	}
	if !n.r.Yielded() && s.rng.IntN(20) > 0 {
		return
	}
	d := s.upTo(ms)
	if s.rng.IntN(8) == 0 {
		d = s.upTo(2 * lease)
	}
	s.after(d, func() {
		if s.epoch != role.Epoch || s.filling >= 0 || s.halted || s.leaving[n.id] {
			return
		}
		at := 1 + s.rng.IntN(len(s.chain)-1)
		s.handed++
		if !n.dead && n.r.begun() > 0 {
			s.late++
		}
		next := slices.Delete(slices.Clone(s.chain), at, at+1)
		s.chain = slices.Insert(next, 0, s.chain[at])
		if !s.calm && s.rng.IntN(4) > 0 {
			s.overtake(n, s.nodes[s.chain[0]])
		}
		s.newEpoch()
	})
}

// overtake has a node miss the next view. The ChainHead of that takes writes and dies, so that the view after it, which
// is the next one that the node sees, may have the node as the ChainHead again.
func (s *sim) overtake(n, head *node) {
	missed := s.epoch + 1
	s.unseen[n.id] = missed
	s.after(s.upTo(200*ms), func() {
		if !s.calm {
			s.kill(head)
		}
	})
	s.after(lease+s.upTo(2*lease), func() {
		if s.unseen[n.id] == missed { // not one that is missed since
			delete(s.unseen, n.id)
		}
	})
}

// sees hands a node's Replica a view.
func (s *sim) sees(n *node, role Role, setRole func(Role, *Actions), out *Actions) {
	if was := n.r.role; was.Member && was.head() && role.Member && role.head() && role.Epoch > was.Epoch+1 {
		s.overtaken++
	}
	setRole(role, out)
}

// watchLastCopies lets one member go on alone if none can take part any more: they lack data, or are new processes. One
// that does not suffice, or is dead, is none of them.
func (s *sim) watchLastCopies() {
	for _, id := range s.chain {
		if n := s.nodes[id]; !n.dead && !n.bad() && !n.fresh && !n.r.Lacks(s.since[id]) {
			return
		}
	}
	for _, id := range s.chain {
		n := s.nodes[id]
		if n.dead || n.bad() || s.leaving[id] || !n.fresh && !(n.r.Lacks(s.since[id]) && n.r.Sufficient()) {
			continue
		}
		s.trace("node %d goes on alone", id)
		n.fresh, n.heard = false, s.now
		s.chain, s.filling = []int{id}, -1
		s.newEpoch()
		return
	}
}
