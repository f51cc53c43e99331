package replica_test

// Drives that fail all writes for a while, and work again. Their replicas become damaged, and take part again without a
// new process. If those of all members are, the range is halted, and goes on with the first one that is back.

// breakDrive lets the drive of a node fail all writes for a while.
func (s *sim) breakDrive() {
	if s.calm {
		return
	}
	s.After(s.upTo(6e9), s.breakDrive)
	if n := s.nodes[s.rng.IntN(len(s.nodes))]; !n.dead {
		n.brokenNS = s.Now() + 2e9 + s.upTo(8e9)
		s.trace("the drive of node %d fails writes until %d", n.id, n.brokenNS)
	}
}

// bad reports whether the node cannot hold a member.
func (n *node) bad() bool { return n.failed || n.r.Damaged() }

// noteDamage notes that a replica is damaged, and whether it gets another process for that.
func (s *sim) noteDamage(n *node) {
	switch damaged := n.r.Damaged(); {
	case damaged && !n.known:
		s.trace("node %d is damaged", n.id)
		s.counts["damaged"]++
		n.known = true
		n.failed = s.rng.IntN(3) == 0 && s.others(n.id)
	case !damaged && n.known:
		s.trace("node %d has revived", n.id)
		s.counts["revived"]++
		n.known = false
	}
}

// halt halts the range if all members are damaged, and reports whether they are.
func (s *sim) halt() bool {
	s.copies = s.copies[:0]
	for _, id := range s.chain {
		if n := s.nodes[id]; n.r.Damaged() && !n.dead && !n.failed && !n.fresh && !n.empty {
			s.copies = append(s.copies, id)
		} else if !n.dead && !n.failed && !n.fresh {
			return false
		}
	}
	if len(s.copies) == 0 {
		return false
	}
	s.counts["halted"]++
	s.halted, s.filling = true, -1
	s.newEpoch()
	return true
}

// watchHalted lets the first last copy that is back serve alone.
func (s *sim) watchHalted() {
	for _, id := range s.copies {
		n := s.nodes[id]
		if n.bad() || n.dead || n.seen != s.epoch || s.Now()-n.heard > lease {
			continue
		}
		s.halted, s.chain = false, []int{id}
		s.newEpoch()
		return
	}
}
