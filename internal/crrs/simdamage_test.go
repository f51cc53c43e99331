package crrs

// What goes wrong in the simulated chain, and stores that have failed and work again.

// bad reports whether a node cannot hold a member.
func (n *node) bad() bool { return n.failed || n.r.damaged }

// tryToRevive lets a damaged replica take part again, as soon as that is allowed.
func (s *sim) tryToRevive(n *node) {
	if !n.r.damaged || n.failed {
		return
	}
	if n.ops > 0 || !n.r.MayRevive() {
		s.later(n, s.upTo(20*ms), func() { s.tryToRevive(n) })
		return
	}
	s.trace("node %d has revived", n.id)
	s.revived++
	n.r.Revive()
}

// watchHalted halts the range if its only member is damaged, or lacks data, and has it go on when that has revived or
// suffices: it has seen then that it was no member.
func (s *sim) watchHalted() {
	id := s.chain[0]
	only := s.nodes[id]
	seen := only.r.role.Epoch == s.epoch
	lacks := seen && only.r.Lacks(s.since[id])
	switch {
	case len(s.chain) > 1 || only.dead || only.failed:
		return
	case !s.halted && (only.r.damaged || lacks):
		s.halted = true
		if lacks {
			s.trace("node %d lacks data, alone", id)
		}
	case s.halted && !only.r.damaged && (!only.r.Lacks(s.since[id]) || seen && only.r.Sufficient()):
		s.halted = false
		only.heard = s.now
	default:
		return
	}
	s.filling = -1
	s.newEpoch()
}

// outage ends the processes of all members. What their stores have made durable is there afterwards, and one of them
// goes on as the last copy.
func (s *sim) outage() {
	var back []*node
	for _, id := range s.chain {
		if n := s.nodes[id]; !s.halted && !n.dead && !n.bad() && !s.leaving[id] && n.mayGoOn() {
			back = append(back, n)
		}
	}
	if len(back) == 0 {
		return
	}
	lives := map[int]int{}
	for _, n := range s.nodes {
		lives[n.id] = n.life
	}
	for _, id := range s.chain {
		s.restart(s.nodes[id])
	}
	n := back[s.rng.IntN(len(back))]
	n.heard = s.now
	if s.filling >= 0 && s.rng.IntN(2) == 0 {
		s.restart(s.nodes[s.filling])
	}
	s.chain, s.filling = []int{n.id}, -1
	s.trace("outage")
	for _, n := range s.nodes {
		if n.life != lives[n.id] {
			s.disconnected(n.id)
		}
	}
	s.newEpoch()
}

// disturb does something bad, and ends it later.
func (s *sim) disturb() {
	if s.calm {
		return
	}
	s.after(s.upTo(400*ms), s.disturb)
	n := s.nodes[s.rng.IntN(len(s.nodes))]
	other := s.rng.IntN(len(s.nodes)+1) - 1
	s.endConnections(n, other)
	n.r.SetFull(s.rng.IntN(3) == 0, s.rng.IntN(6) == 0)
	switch s.rng.IntN(9) {
	case 8:
		s.outage()
	case 0:
		if s.rng.IntN(2) == 0 {
			s.kill(n)
		}
	case 1, 2:
		s.trace("node %d is paused", n.id)
		n.paused = true
		s.after(s.duration(), func() { s.resume(n) })
	case 3:
		n.slow = !n.slow
	default:
		if other == n.id {
			return
		}
		links := []pair{{n.id, other}, {other, n.id}}
		if s.rng.IntN(2) == 0 {
			links = links[:1]
		}
		for _, l := range links {
			s.cut[l] = true
		}
		s.trace("cut %v", links)
		s.after(s.duration(), func() { s.mend(n.id, other, links) })
	}
}

// duration is short, or longer than every lease.
func (s *sim) duration() int64 {
	if s.rng.IntN(2) == 0 {
		return s.upTo(100 * ms)
	}
	return s.upTo(3 * lease)
}
