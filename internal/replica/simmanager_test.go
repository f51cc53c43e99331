package replica_test

import (
	"slices"

	"jbofd/internal/crrs"
)

const manager = -1

// The manager, as that of the simulation of internal/crrs.

// heartbeat keeps a node's authority up, as long as manager and node hear each other.
func (s *sim) heartbeat(n *node) {
	s.After(lease/8, func() { s.heartbeat(n) })
	n.on(func() {
		sent := n.clock(s.Now())
		n.fresh = n.fresh && (slices.Contains(s.chain, n.id) || s.filling == n.id || s.leaving[n.id])
		if s.cut[pair{n.id, manager}] || n.fresh {
			return
		}
		s.report(n)
		life := n.life
		s.After(s.upTo(ms), func() {
			if s.leaving[n.id] || n.life != life {
				return
			}
			n.heard = s.Now()
			s.sendView(n)
			member := slices.Contains(s.chain, n.id)
			s.later(n, s.upTo(ms), func() {
				n.until = max(n.until, sent+authority)
				if member {
					n.r.Extend(sent + authority)
				}
				s.turnDrops(n)
				s.storeTurn(n)
			})
		})
	})
}

// report tells the manager that a member that is filled is complete.
func (s *sim) report(n *node) {
	role := n.r.Role()
	if !role.Filling || !n.r.Complete() {
		return
	}
	s.After(s.upTo(ms), func() {
		if s.filling == n.id && role.Epoch >= s.since[n.id] {
			s.chain, s.filling = append(slices.Clone(s.chain), n.id), -1
			s.fills++
			s.newEpoch()
		}
	})
}

// watch gives up members that are not heard of, and lets others be filled. A new view comes only when the authority of
// those that are given up has ended.
func (s *sim) watch() {
	s.After(lease/10, s.watch)
	if s.halted {
		s.watchHalted()
		return
	}
	for _, id := range s.chain {
		if n := s.nodes[id]; (s.Now()-n.heard > lease || n.bad()) && s.others(id) {
			s.remove(id)
			return
		}
	}
	if s.halt() {
		return
	}
	s.watchOut()
	s.watchFilling()
}

func (s *sim) remove(id int) {
	if s.leaving[id] || !slices.Contains(s.chain, id) {
		return
	}
	s.leaving[id] = true
	s.After(max(1, s.nodes[id].heard+lease-s.Now()), func() {
		delete(s.leaving, id)
		if !s.others(id) || !slices.Contains(s.chain, id) {
			return // the others may be gone for good
		}
		s.chain = slices.DeleteFunc(slices.Clone(s.chain), func(i int) bool { return i == id })
		s.newEpoch()
	})
}

// others reports whether members besides one are alive, serve, and are heard of. One whose drive has just failed a
// request is not among them, because its store may fail of it, and it would be the only member.
func (s *sim) others(id int) bool {
	return !s.halted && slices.ContainsFunc(s.chain, func(i int) bool {
		n := s.nodes[i]
		return i != id && i != s.hurt && !n.dead && !n.bad() && !n.fresh && !s.leaving[i] &&
			s.Now()-n.heard <= lease && (n.faultNS == 0 || s.Now()-n.faultNS > 2*lease)
	})
}

// watchFilling gives up a member that is filled and not heard of, and begins to fill another one.
func (s *sim) watchFilling() {
	if id := s.filling; id >= 0 {
		if n := s.nodes[id]; s.Now()-n.heard > lease || n.bad() {
			s.filling = -1
			s.newEpoch()
		}
		return
	}
	for _, i := range s.rng.Perm(len(s.nodes)) {
		n := s.nodes[i]
		if slices.Contains(s.chain, i) || n.dead || s.leaving[i] || s.out[i] && !n.failed {
			continue
		}
		if n.failed {
			n.die()
			n.revive()
		} else if !n.fresh && !n.bad() && !s.out[i] && s.Now()-n.heard < lease/2 {
			s.filling, s.since[i], n.empty = i, s.epoch+1, false
			s.newEpoch()
			return
		}
	}
}

func (s *sim) newEpoch() {
	s.epoch++
	s.trace("epoch %d: %v filling %d", s.epoch, s.chain, s.filling)
	for _, n := range s.nodes {
		s.sendView(n)
	}
}

// sendView tells a node its role.
func (s *sim) sendView(n *node) {
	role := crrs.Role{Epoch: s.epoch, Since: s.since[n.id], Predecessor: crrs.NoPeer, Successor: crrs.NoPeer,
		ChainTail: crrs.NoPeer}
	last := s.chain[len(s.chain)-1]
	place := 0
	switch i := slices.Index(s.chain, n.id); {
	case s.halted:
	case n.id == s.filling:
		role.Member, role.Filling, role.Predecessor = true, true, crrs.Peer(last)
	case i >= 0:
		role.Member = true
		if place = len(s.chain) - 1 - i; s.filling >= 0 {
			place++
		}
		if i > 0 {
			role.Predecessor = crrs.Peer(s.chain[i-1])
		}
		if i < len(s.chain)-1 {
			role.Successor, role.ChainTail = crrs.Peer(s.chain[i+1]), crrs.Peer(last)
		} else if s.filling >= 0 {
			role.Successor = crrs.Peer(s.filling)
		}
	}
	for i := len(s.chain) - 1; role.Member && i >= 0; i-- {
		if s.chain[i] != n.id {
			role.Others[role.NumOthers] = crrs.Peer(s.chain[i])
			role.NumOthers++
		}
	}
	if s.cut[pair{manager, n.id}] {
		return
	}
	standing := s.standing(n)
	s.later(n, s.upTo(10*ms), func() { s.adopt(n, role, place, standing) })
}

// disturb does something bad, and ends it later.
func (s *sim) disturb() {
	if s.calm {
		return
	}
	s.After(s.upTo(lease/2), s.disturb)
	n := s.nodes[s.rng.IntN(len(s.nodes))]
	other := s.rng.IntN(len(s.nodes)+1) - 1
	if other >= 0 && other != n.id {
		for range s.rng.IntN(8) {
			s.After(s.upTo(lease/2), func() { s.reconnect(n, other) })
		}
	}
	switch s.rng.IntN(13) {
	case 12:
		s.flip(n)
	case 0:
		if s.rng.IntN(3) == 0 {
			s.outage()
		}
	case 1, 2:
		s.kill(n)
	case 3, 4:
		s.trace("node %d is paused", n.id)
		n.paused = !n.dead
		life := n.life
		s.After(s.duration(), func() {
			if n.life == life {
				n.resume()
			}
		})
	case 5:
		n.slow = !n.slow
	case 10, 11:
		s.drain(n)
		for range s.rng.IntN(3) {
			s.After(s.upTo(3*lease), func() {
				if !s.calm {
					s.drain(n)
				}
			})
		}
	default:
		if other == n.id {
			return
		}
		s.cut[pair{n.id, other}], s.cut[pair{other, n.id}] = true, true
		s.trace("cut %d %d", n.id, other)
		s.After(s.duration(), func() { s.mend(n.id, other) })
	}
}

// duration is short, or longer than every lease.
func (s *sim) duration() int64 {
	if s.rng.IntN(2) == 0 {
		return s.upTo(lease / 5)
	}
	return s.upTo(3 * lease)
}

// kill ends a node's process, if others serve. It comes back some time later, perhaps without its data.
func (s *sim) kill(n *node) {
	if n.dead || !s.others(n.id) {
		return
	}
	n.die()
	n.failed = s.rng.IntN(6) == 0
	s.After(s.duration(), n.revive)
}

// outage ends the processes of all members. One of them goes on as the last copy.
func (s *sim) outage() {
	var back []int
	for _, id := range s.chain {
		if n := s.nodes[id]; !s.halted && !n.dead && !n.bad() && !n.empty && !s.leaving[id] && id != s.hurt {
			back = append(back, id)
		}
	}
	if len(back) == 0 {
		return
	}
	s.trace("outage")
	s.counts["outage"]++
	for _, id := range s.chain {
		if n := s.nodes[id]; !n.dead {
			n.die()
		}
	}
	n := s.nodes[back[s.rng.IntN(len(back))]]
	s.chain, s.filling = []int{n.id}, -1
	for _, m := range s.nodes {
		if m.dead {
			m.restart(false)
			s.reconnectAll(m.id)
		}
	}
	n.heard = s.Now()
	s.newEpoch()
}
