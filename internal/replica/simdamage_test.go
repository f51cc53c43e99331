package replica_test

import (
	"math"
	"slices"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replica"
)

// Bits of one drive of a history flip, where its store reads next for somebody: in segments and values, and what is in
// the same blocks. There is always another member that serves and has everything. So no client sees any of it, and in
// the end all is repaired.

const nobody = -1

// flip has bits of a node's drive flip, unless those of another one have.
func (s *sim) flip(n *node) {
	if s.breaks || s.hurt != nobody && s.hurt != n.id || n.dead || s.out[n.id] || !slices.Contains(s.chain, n.id) ||
		!s.others(n.id) {
		return
	}
	s.hurt = n.id
	n.flips += 1 + s.rng.IntN(3)
}

// flipBefore flips a bit in each block of a read.
func (n *node) flipBefore(q *kvstore.IO) {
	if q.Background || n.sim.calm || !n.sim.others(n.id) || !n.store.Ready() {
		return
	}
	n.flips--
	n.sim.counts["flipped"]++
	n.sim.trace("bits of node %d flip at %d", n.id, q.Offset)
	for at := 0; at < len(q.Buf); at += blockBytes {
		n.drive.Flip(int64(q.Offset)+int64(at+n.sim.rng.IntN(blockBytes)), uint(n.sim.rng.IntN(8)))
	}
}

// mayFault reports whether a request of a drive may fail: not while another one fails requests. Otherwise nobody could
// read a value.
func (s *sim) mayFault(n *node) bool {
	if s.faulty != n.id && s.Now() < s.faultNS {
		return false
	}
	s.faulty, s.faultNS = n.id, s.Now()+50*ms
	return true
}

// heal reads and lists all keys at the node whose drive was hurt, until its store has lost nothing any more.
func (s *sim) heal() {
	if s.hurt == nobody || s.healed {
		return
	}
	s.After(s.upTo(20*ms), s.heal)
	n := s.nodes[s.hurt]
	if !slices.Contains(s.chain, n.id) || n.dead || n.failed || !s.atRest() {
		return
	}
	lost, sound := n.lost()
	if s.healed = sound; sound {
		return
	}
	// A Scan finds also segments that have no keys any more.
	scan := &replica.Scan{Range: kvstore.Range{First: s.first, Last: s.last(), From: max(s.first, lost.Position)},
		Key: crrs.Key{Bytes: lost.Key, Len: lost.KeyLen}, Value: make([]byte, 64<<10)}
	s.ask(n, func(r *replica.Replica, tag uint64) {
		scan.Tag = tag
		r.Scan(scan)
	}, func(replica.Reply) {})
	for k := range keys {
		s.ask(n, func(r *replica.Replica, tag uint64) { r.Read(s.keyOf(k), make([]byte, longest), 5, tag) },
			func(replica.Reply) {})
	}
}

// toldOfDamage fails the test because a node tells a client that something is lost, unless it does not know yet that
// there is another member.
func (s *sim) toldOfDamage(n *node) {
	s.counts["told"]++
	if n.r.Role().Epoch == s.epoch {
		s.t.Errorf("node %d tells a client that something cannot be read", n.id)
	}
}

// lost reports where the store has lost something first, or that it has lost nothing. It takes no virtual time.
func (n *node) lost() (from nvme.KVCursor, sound bool) {
	q := kvstore.Request{Op: kvstore.CopyOut, Range: n.sim.all(), Value: make([]byte, 1<<20),
		Tag: math.MaxUint64}
	for {
		if !n.store.Submit(&q) {
			return from, false
		}
		for answered := false; !answered; {
			for _, p := range n.storeTurn() {
				b := nvme.KVRange(q.Value)
				if p.Status != kvstore.OK || b.Complete() {
					return from, p.Status == kvstore.OK
				}
				from, answered = b.To(), true
				q.Range.From, q.Key = from.Position, from.Key[:from.KeyLen]
			}
			if i := n.drive.Next(); i >= 0 {
				n.endIO(i)
			}
		}
	}
}

// setRange gives the history a range: everything, or so little that a segment of a store with few keys has positions of
// others.
func (s *sim) setRange() {
	if s.bits, s.names = 64, names; s.rng.IntN(2) == 0 {
		s.number, s.bits, s.names, s.first = narrowRange, 56, narrowNames, narrowRange<<56
	}
}

// last is the last position of the range, all is the range.
func (s *sim) last() uint64 { return s.first + 1<<s.bits - 1 }

func (s *sim) all() kvstore.Range {
	return kvstore.Range{First: s.first, Last: s.last(), From: s.first}
}
