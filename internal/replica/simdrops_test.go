package replica_test

import (
	"math"
	"slices"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replica"
)

// Nodes that are to have no replica for a while, as if they were drained: what they have is dropped, also while they
// are taken back already.

// dropTag is the tag of requests of Drops to the store.
const dropTag = math.MaxUint64 - 1

// startDrops begins a new process.
func (n *node) startDrops() {
	n.drops = replica.NewDrops(replica.DropsConfig{Ranges: n.sim.number + 1, Bits: n.sim.bits,
		AfterNS: n.sim.upTo(lease / 2)})
	for other := range n.sim.number {
		n.drops.See(0, other, replica.Standing{Member: true})
	}
	n.dropActs, n.until, n.seen, n.held = replica.DropActions{}, 0, 0, nil
	if n.store.Dropping(n.sim.first, n.sim.last(), false) {
		n.sim.counts["drop of an earlier process"]++
		n.drops.Resume(n.sim.number)
	}
}

// standing is what the manager's view says of a node.
func (s *sim) standing(n *node) replica.Standing {
	full := !s.halted && s.filling < 0 && len(s.leaving) == 0 && len(s.chain) > 0
	for _, m := range s.nodes {
		full = full && (s.out[m.id] || slices.Contains(s.chain, m.id))
	}
	return replica.Standing{Version: uint32(s.epoch), Full: full,
		Member: n.id == s.filling || slices.Contains(s.chain, n.id)}
}

// adopt tells a node a view. While a Drop is not over it waits.
func (s *sim) adopt(n *node, role crrs.Role, place int, standing replica.Standing) {
	if n.fresh || role.Epoch < n.seen {
		return
	}
	n.seen = role.Epoch
	s.call(n, func(r *replica.Replica) {
		n.drops.See(n.clock(s.Now()), s.number, standing)
		n.held = nil
		if role.Member && n.drops.Busy(s.number) {
			s.counts["held"]++
			n.held = func() { s.call(n, func(r *replica.Replica) { r.Adopt(role, place) }) }
			return
		}
		r.Adopt(role, place)
	})
}

// turnDrops takes a turn of a node's Drops.
func (s *sim) turnDrops(n *node) {
	if n.failed {
		return
	}
	now := n.clock(s.Now())
	a := &n.dropActs
	for again := true; again; {
		again = false
		n.drops.Turn(now, now < n.until, a)
		if a.Asks {
			a.Asks = false
			if q := a.Request; !n.r.Quiet() {
				s.counts["drop postponed"]++
				n.drops.Postpone(now)
				again = true
			} else {
				q.Tag, q.Key = dropTag, slices.Clone(q.Key)
				n.requests = append(n.requests, q)
				if q.Op == kvstore.Drop {
					s.counts["dropped"]++
					s.trace("node %d drops what it has", n.id)
				}
			}
		}
		for _, l := range a.Looks {
			n.drops.Looked(now, l.Number, n.store.Dropping(l.First, l.Last, l.Hurry), a)
			again = true
		}
		a.Looks = a.Looks[:0]
	}
	free := len(a.Free) > 0
	a.Free = a.Free[:0]
	if a.WakeNS != 0 {
		s.later(n, max(1, int64(float64(a.WakeNS)/n.rate)-s.Now()), func() {
			s.turnDrops(n)
			s.storeTurn(n)
		})
	}
	if free && n.held != nil {
		adopt := n.held
		n.held = nil
		adopt()
	}
}

// takeDropReply takes a reply of the store that is for Drops.
func (s *sim) takeDropReply(n *node, p *kvstore.Reply) bool {
	if p.Tag == dropTag {
		n.drops.Answered(n.clock(s.Now()), p)
	}
	return p.Tag == dropTag
}

// drain decides whether a node is to have no replica. One of those that are to have some stays.
func (s *sim) drain(n *node) {
	switch {
	case s.out[n.id]:
		s.trace("node %d is taken back", n.id)
		delete(s.out, n.id)
	case len(s.out)+1 < len(s.nodes):
		s.trace("node %d is drained", n.id)
		s.counts["drained"]++
		s.out[n.id] = true
	}
}

// watchOut takes the replica from those that are to have none, when all others have one.
func (s *sim) watchOut() {
	if s.filling >= 0 && s.out[s.filling] {
		s.filling = -1
		s.newEpoch()
	}
	for _, id := range s.chain {
		if s.out[id] && slices.ContainsFunc(s.chain, func(i int) bool { return !s.out[i] && s.others(id) }) {
			s.remove(id)
			return
		}
	}
}

// emptied drains a node when all works, and waits until it has nothing left. Then it is taken back.
func (s *sim) emptied() {
	clear(s.out)
	if len(s.nodes) < 2 || s.rng.IntN(4) > 0 { // it takes many events until a store takes a Drop off its list
		return
	}
	n := s.nodes[s.rng.IntN(len(s.nodes))]
	s.drain(n)
	if !s.Run(1000*lease, func() bool {
		return s.t.Failed() || !s.standing(n).Member && n.seen == s.epoch && n.drops.Stats().Left == 0 && !n.bad()
	}) {
		s.t.Errorf("node %d still has %+v: %+v, quiet %t; chain %v, filling %d", n.id, n.drops.Stats(), s.standing(n),
			n.r.Quiet(), s.chain, s.filling)
	}
	if has := n.objects(); has > 0 {
		s.t.Errorf("node %d still has %d objects and tombstones", n.id, has)
	}
	s.drain(n)
}

// objects counts those of the store, with tombstones.
func (n *node) objects() (count uint64) {
	q := kvstore.Request{Op: kvstore.Count, Range: n.sim.all(), Value: make([]byte, 1<<10)}
	n.askStore(&q, func(b nvme.KVRange) { count += b.Totals().Objects() + b.Totals().Tombstones() })
	return count
}
