package crrs

import (
	"math"
	"slices"

	"jbofd/internal/crrs/linear"
)

// Segments that are lost, in the simulated chain: at one node, or at all members at once, so that nobody has what was
// lost. Clients are told so then, until a key is stored anew. In the end all keys are, everywhere, and no segment is
// lossy any more.

// segments are the two groups of neighbours: position.
const segments = 2

func segmentOf(k int) int { return k / (keys / segments) }

func firstOf(segment int) uint64 { return position(segment * keys / segments) }

// lossy is what a node has lost.
type lossy struct {
	gone   [segments]bool
	losses uint64
}

// simLossy is what a history has of this: lostSegments counts the segments that were lost, readAnew the reads of keys
// that were stored since, healed the segments that nobody had. healing are the epochs in which keys were stored anew,
// of each segment.
type simLossy struct {
	loses                          bool // the history has this at all
	lostSegments, readAnew, healed int
	healing                        [segments]uint64
	// lostAgain: a member has lost again what was stored since all had lost a segment.
	lostAgain bool
	// writing is how many writes clients have under way.
	writing int
}

// lose makes a node lose a segment.
func (s *sim) lose(n *node, segment int) {
	s.trace("node %d loses segment %d", n.id, segment)
	s.lostSegments++
	n.gone[segment] = true
	n.losses++
	for k := range keys {
		if segmentOf(k) == segment {
			n.store[k], n.done[k] = object{}, map[Identity]uint64{}
		}
	}
}

// damage has segments lost.
func (s *sim) damage() {
	if s.calm {
		return
	}
	s.after(s.upTo(1000*ms), s.damage)
	segment, one := s.rng.IntN(segments), s.nodes[s.rng.IntN(len(s.nodes))]
	for _, n := range s.nodes {
		if s.rng.IntN(3) > 0 && one != n {
			continue
		}
		for range 1 + s.rng.IntN(2) {
			s.after(s.upTo(30*ms), func() {
				if !s.calm {
					s.lose(n, segment)
				}
			})
		}
	}
}

// loseBefore has a segment lost now and then when something is copied into it, which may be older than what is lost,
// and soon by the others.
func (s *sim) loseBefore(n *node, op *RangeOp) {
	if s.calm || !s.loses || s.rng.IntN(2) == 0 {
		return
	}
	segment, others := int(op.First>>63), s.rng.IntN(2) == 0
	s.lose(n, segment)
	for _, o := range s.nodes {
		if others && o != n {
			s.after(s.upTo(500*ms), func() {
				if !s.calm {
					s.lose(o, segment)
				}
			})
		}
	}
}

// lookForLosses has what a node has lost repaired now and then.
func (s *sim) lookForLosses(n *node) {
	s.after(s.upTo(300*ms), func() { s.lookForLosses(n) })
	for i, lost := range n.gone {
		if lost && !n.dead {
			s.turn(n, func(out *Actions) { n.r.Repair(firstOf(i), out) })
		}
	}
}

// sound is the Sound of a request to a node's store.
func (s *sim) sound(n *node, op *StoreOp) uint64 {
	switch v := n.r.Sound(op, position(int(op.Key.Bytes[0]))); {
	case v == math.MaxUint64 || s.fault == nothingSound && n.r.role.NumOthers > 0:
		return math.MaxUint64
	case s.fault == soundBelow:
		return 0
	default:
		return v
	}
}

// unsound reports whether a node's store cannot say what a key has.
func (n *node) unsound(k byte, sound uint64) bool {
	v := n.store[k].version
	return n.gone[segmentOf(int(k))] && (v == 0 || v <= sound)
}

// lostPart reports whether a node has lost something of the part of a Digest or CopyOut, which says where.
func (n *node) lostPart(op *RangeOp) bool {
	for i, lost := range n.gone {
		last := firstOf(i) | math.MaxUint64>>1
		if lost && op.First <= last && op.First+(1<<op.Bits-1) >= firstOf(i) && op.From.Position < last {
			op.Lost, op.LostAt = true, last
			return true
		}
	}
	return false
}

// settle does a Settle of a node's store.
func (n *node) settle(op *RangeOp) StoreStatus {
	segment, want := int(op.First>>63), op.Clock
	op.Width, op.Clock = 1, 0
	switch {
	case !n.gone[segment]:
	case want == 0:
		op.Clock = n.losses + 1
	case want != n.losses+1:
		return Superseded
	default:
		n.gone[segment] = false
	}
	return Done
}

// heal has all keys stored anew where all members have lost them, and looks whether each reads them. Then nothing of
// the segment is unknown but identities, of writes that nobody repeats any more.
func (s *sim) heal() {
	s.after(500*ms, s.heal)
	for segment := range segments {
		lost, known := 0, true
		for _, id := range s.chain {
			n := s.nodes[id]
			known = known && n.r.Writes() == 0
			if n.gone[segment] {
				lost++
			}
			for k := range keys {
				here := segmentOf(k) == segment
				known = known && (!here || n.store[k].version > 0 && n.store[k] == s.nodes[s.chain[0]].store[k])
			}
		}
		switch {
		case lost == 0:
		case known && s.healing[segment] == s.epoch && s.writing == 0:
			for _, id := range s.chain {
				s.nodes[id].gone[segment] = false
			}
			s.healed++
		case lost == len(s.chain):
			s.healing[segment] = s.epoch
			for k := range keys {
				if segmentOf(k) == segment {
					s.storeAnew(byte(k))
				}
			}
		}
	}
}

// storeAnew stores a key, and reads it at each member.
func (s *sim) storeAnew(k byte) {
	s.open++
	s.writing++
	w, o := s.newWrite(Key{Bytes: [16]byte{k}, Len: 1})
	value, epoch := s.values, s.epoch
	s.try(w, o, 0)
	s.after(200*ms, func() {
		if !slices.ContainsFunc(s.ops[k], func(o linear.Operation) bool { return o.Value == value && o.End < s.now }) {
			return
		}
		if !s.lostAgain && len(s.chain) > 1 && s.rng.IntN(4) == 0 { // then the others have it
			s.lostAgain = true
			s.lose(s.nodes[s.chain[s.rng.IntN(len(s.chain))]], segmentOf(int(k)))
		}
		for _, id := range s.chain {
			s.open++
			s.ask(s.nodes[id], func(tag uint64, out *Actions) {
				s.nodes[id].r.Read(Read{Key: w.Key, Value: make([]byte, 8), Tag: tag}, out)
			}, func(r Reply) {
				s.open--
				s.readAnew++
				if r.Status == Unreadable && s.epoch == epoch {
					s.t.Errorf("key %d was stored since it was lost, and node %d cannot read it", k, id)
				}
			})
		}
	})
}

// mayGoOn reports whether a node's store has lost nothing, so that it can be the last copy.
func (n *node) mayGoOn() bool { return n.gone == [segments]bool{} }
