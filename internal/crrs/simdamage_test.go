package crrs

// Stores that have failed and work again, in the simulated chain.

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
