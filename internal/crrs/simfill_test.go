package crrs

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"
)

// Members that are filled, in the simulated chain.

// position is where a key is in the hash space: two groups of neighbours.
func position(k int) uint64 { return uint64(k/3)<<63 | uint64(k%3)<<46 }

// silent reports whether a node says nothing: its process is new, and the view has not seen the last one go.
func (s *sim) silent(n *node) bool {
	n.fresh = n.fresh && (slices.Contains(s.chain, n.id) || s.filling == n.id || s.leaving[n.id])
	return n.fresh
}

// report tells the manager that a member that is filled is complete.
func (s *sim) report(n *node) {
	role := n.r.Role()
	if !role.Filling || !n.r.Complete() || s.cut[pair{n.id, manager}] {
		return
	}
	d := s.upTo(ms)
	if s.rng.IntN(8) == 0 {
		d = s.upTo(2 * lease)
	}
	s.after(d, func() {
		if s.filling == n.id && role.Epoch >= s.since[n.id] {
			s.chain, s.filling = append(slices.Clone(s.chain), n.id), -1
			s.fills++
			s.newEpoch()
		}
	})
}

// watchFilling gives up a member that is filled and not heard of, and begins to fill another one.
func (s *sim) watchFilling() {
	if id := s.filling; id >= 0 {
		if n := s.nodes[id]; s.now-n.heard > lease || n.bad() {
			s.filling = -1
			s.newEpoch()
		}
		return
	}
	for _, i := range s.rng.Perm(len(s.nodes)) {
		n := s.nodes[i]
		if slices.Contains(s.chain, i) || n.dead || s.leaving[i] {
			continue
		}
		if n.failed {
			s.trace("node %d is replaced", i)
			s.wipe(n)
			s.restart(n)
			s.disconnected(i)
			n.failed = false
		} else if !n.fresh && !n.bad() && s.now-n.heard < lease/2 {
			if s.rng.IntN(2) == 0 {
				s.expire()
			}
			s.filling, s.since[i] = i, s.epoch+1
			s.newEpoch()
			s.after(s.upTo(200*ms), s.disturbFilling)
			return
		}
	}
}

// disturbFilling does something bad to the member that is filled or to its copier.
func (s *sim) disturbFilling() {
	if s.calm || s.filling < 0 {
		return
	}
	id, copier := s.filling, s.chain[len(s.chain)-1]
	switch s.rng.IntN(8) {
	case 0, 1:
		s.outage()
	case 2:
		s.kill(s.nodes[id])
	case 3:
		s.kill(s.nodes[copier])
	case 4:
		l := []pair{{id, copier}}
		s.cut[l[0]] = true
		s.after(s.upTo(20*ms), func() { s.mend(id, copier, l) })
	}
}

// kill ends a node's process, if others serve. Some come back, and some of those have lost their data.
func (s *sim) kill(n *node) {
	if n.dead || !s.others(n.id) {
		return
	}
	s.trace("node %d dies", n.id)
	n.dead = true
	s.disconnected(n.id)
	n.failed = n.failed || s.rng.IntN(6) == 0
	if s.rng.IntN(4) > 0 {
		s.after(s.duration(), func() { s.revive(n) })
	}
}

// expire removes tombstones that all members have. Whoever is filled later may still have what was deleted.
func (s *sim) expire() {
	for _, id := range s.chain {
		if n := s.nodes[id]; n.r.Writes() > 0 || n.r.repairing() || !n.mayGoOn() {
			return
		}
	}
	for k, o := range s.nodes[s.chain[0]].store {
		everywhere := o.deleted
		for _, id := range s.chain {
			everywhere = everywhere && s.nodes[id].store[k] == o
		}
		for _, id := range s.chain {
			if everywhere {
				s.nodes[id].store[k] = object{}
				s.expired[k] = o.value
			}
		}
	}
}

func (s *sim) newEpoch() {
	s.epoch++
	s.trace("epoch %d: %v filling %d", s.epoch, s.chain, s.filling)
	if s.hot != nil {
		s.hot.learn()
	}
	for _, n := range s.nodes {
		s.sendView(n)
	}
}

// restart begins a new process, with what the store has made durable.
func (s *sim) restart(n *node) {
	n.life++
	n.paused, n.backlog, n.fresh, n.ops = false, nil, false, 0
	for i, lost := range n.gone {
		if lost { // alone it would serve all that is known
			s.lose(n, i)
		}
	}
	newest := uint64(0)
	if s.rng.IntN(2) == 0 {
		for _, o := range n.store {
			newest = max(newest, o.version)
		}
	}
	window := 8
	if s.load == hot {
		window = 2 * hotDepth
	}
	cfg := Config{Window: window, Reads: 8, Version: newest, Bits: 64, Parts: 1 + s.rng.IntN(3),
		Leaf: 1 + s.rng.Uint64N(4)}
	if s.ports {
		s.newWire(n, cfg)
	} else {
		n.r = New(cfg)
	}
}

// revive begins a new process of a node that has died.
func (s *sim) revive(n *node) {
	if !n.dead {
		return
	}
	s.trace("node %d is back", n.id)
	s.restart(n)
	n.dead, n.fresh = false, true
	s.disconnected(n.id)
}

// wipe makes the store of a node empty.
func (s *sim) wipe(n *node) {
	n.store, n.lossy = [keys]object{}, lossy{losses: n.losses}
	for k := range n.done {
		n.done[k] = map[Identity]uint64{}
	}
}

func (s *sim) rangeTime() int64 {
	if s.rng.IntN(4) == 0 {
		return s.upTo(200 * ms)
	}
	return s.upTo(5 * ms)
}

// runRange does an operation of a node's store on a range.
func (s *sim) runRange(n *node, op RangeOp) {
	st := Done
	switch {
	case !s.calm && s.rng.IntN(3000) == 0 && s.others(n.id):
		st = Failed
	case op.Kind == Settle:
		st = n.settle(&op)
	case op.Kind != CopyIn && n.lostPart(&op):
		st = StoreUnreadable
	case op.Kind == Digest:
		op.Sums = n.digest(op.Part)
	case op.Kind == CopyOut:
		op.Data = n.copyOut(&op.Part, 1+s.rng.IntN(2))
		s.answerCopy(n, &op, n.r.Version(), 1+s.rng.IntN(20))
		return
	default:
		s.loseBefore(n, &op)
		n.copyIn(&op)
	}
	s.ranged(n, &op, st)
}

// answerCopy answers with a copy when all is committed that it may have, or gives it up after so many looks.
func (s *sim) answerCopy(n *node, op *RangeOp, bound uint64, looks int) {
	switch {
	case n.r.Ended(op, bound) || s.fault == earlyCopy:
		s.ranged(n, op, Done)
	case looks <= 0 && n.wire != nil: // without a Port nobody is told
		s.ranged(n, op, GivenUp)
	default:
		s.later(n, s.upTo(5*ms), func() { s.answerCopy(n, op, bound, looks-1) })
	}
}

// ranged gives a RangeOp back.
func (s *sim) ranged(n *node, op *RangeOp, st StoreStatus) {
	s.later(n, s.upTo(ms), func() {
		s.turn(n, func(out *Actions) {
			if n.ops--; n.wire != nil {
				n.p.Ranged(op, st, out, &n.t)
				return
			}
			n.r.Ranged(op, st, out)
		})
	})
}

// within reports whether a key is in a part, behind its From.
func (p *Part) within(k int) bool {
	at := position(k)
	return at >= p.First && at-p.First <= 1<<p.Bits-1 && (p.From == Cursor{} || at > p.From.Position)
}

func (n *node) digest(p Part) []Sum {
	sums := make([]Sum, 1<<min(p.Bits, fanBits))
	for k, o := range n.store {
		if !p.within(k) || o.version == 0 && len(n.done[k]) == 0 {
			continue
		}
		sum := &sums[(position(k)-p.First)>>(p.Bits-min(p.Bits, fanBits))]
		sum.Count++
		for _, e := range n.entry(k) {
			sum.Hash = (sum.Hash + e) * 0x9E3779B97F4A7C15
			sum.Hash ^= sum.Hash >> 29
		}
	}
	return sums
}

// entry is what a store has of a key, its identities included.
func (n *node) entry(k int) []uint64 {
	o := n.store[k]
	e := []uint64{uint64(k), o.version, o.value, 0, uint64(len(n.done[k]))}
	if o.deleted {
		e[3] = 1
	}
	for _, id := range slices.SortedFunc(maps.Keys(n.done[k]), func(a, b Identity) int {
		return cmp.Compare(a.Seq, b.Seq)
	}) {
		e = append(e, id.Client, id.Seq, n.done[k][id])
	}
	return e
}

func (n *node) copyOut(p *Part, most int) (data []byte) {
	p.Last = true
	for k := range n.store {
		if !p.within(k) || n.store[k].version == 0 && len(n.done[k]) == 0 {
			continue
		}
		if most--; most < 0 {
			p.Last = false
			return data
		}
		for _, e := range n.entry(k) {
			data = binary.LittleEndian.AppendUint64(data, e)
		}
		p.To = Cursor{Position: position(k), Key: Key{Bytes: [16]byte{byte(k)}, Len: 1}}
	}
	return data
}

// copyIn is exact: docs/ranges.md.
func (n *node) copyIn(op *RangeOp) {
	next := func() uint64 {
		e := binary.LittleEndian.Uint64(op.Data)
		op.Data = op.Data[8:]
		return e
	}
	for k := range n.store {
		if !op.within(k) || !op.Last && position(k) > op.To.Position {
			continue
		}
		var copied object
		o, done := &n.store[k], n.done[k]
		maps.DeleteFunc(done, func(_ Identity, v uint64) bool { return v <= op.Clock })
		if len(op.Data) > 0 && int(binary.LittleEndian.Uint64(op.Data)) == k {
			next()
			copied = object{version: next(), value: next(), deleted: next() == 1}
			for ids := next(); ids > 0; ids-- {
				id := Identity{next(), next()}
				done[id] = next()
			}
		}
		if o.version <= op.Clock && o.version != copied.version {
			*o = object{}
		}
		if copied.version > o.version {
			*o = copied
		}
	}
}

// checkStores compares the stores when all has been calm for long.
func (s *sim) checkStores() {
	if len(s.chain) < len(s.nodes) {
		s.t.Errorf("of %d nodes %v serve, %d is filled", len(s.nodes), s.chain, s.filling)
	}
	first := s.nodes[s.chain[0]]
	for _, id := range s.chain {
		s.dropSaid(s.nodes[id])
	}
	for _, id := range s.chain[1:] {
		for k := range first.store {
			a, b := first.entry(k), s.nodes[id].entry(k)
			if s.lostSegments > 0 { // and identities with them
				a, b = a[:4], b[:4]
			}
			if !slices.Equal(a, b) {
				s.t.Errorf("node %d has %v, node %d has %v", first.id, a, id, b)
			}
		}
	}
}

func (s *sim) resume(n *node) {
	s.trace("node %d goes on", n.id)
	n.paused, n.late = false, s.rng.IntN(2) == 0
	defer func() { n.late = false }()
	for len(n.backlog) > 0 && !n.paused {
		do := n.backlog[0]
		n.backlog = n.backlog[1:]
		do()
	}
}
