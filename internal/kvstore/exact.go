package kvstore

import (
	"math/bits"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// An exact CopyIn makes a part of a range, behind the cursor From of its KVRange up to the cursor To, what the KVRange
// says: besides storing the entries, it removes what is there and has a version of at most the clock, unless the
// KVRange has the key with that version. So what is older than the entry of its key goes, and what is newer but not
// newer than the clock, too: the store has it from a history that did not become that of the source. Newer ones stay.
// So it is with the identities of each key, by the versions of their requests.
//
// First the segments of the part are cleared, several at once, each by an op that removes keys where the segment has
// its writers applied in order. Then the entries are stored as by any CopyIn. A crash between leaves some of both done;
// the same CopyIn does the rest. A segment that has lost something cannot be made exact before it is repaired.

// clearLanes is how many parts of its range an exact CopyIn clears at once.
const clearLanes = 8

// clearing is the first half of an exact CopyIn.
type clearing struct {
	clock    uint64 // 0: the CopyIn is not exact
	from, to nvme.KVCursor
	lanes    [clearLanes]clearLane
	// left are the lanes that are not done.
	left int
}

// clearLane is a part of the positions: those before at were cleared, end is the last that the op in progress clears.
type clearLane struct {
	at, last, end uint64
	busy, done    bool
}

// begin divides the positions into lanes.
func (c *clearing) begin(b nvme.KVRange, clock uint64) {
	*c = clearing{clock: clock, from: b.From(), to: b.To(), left: clearLanes}
	first, last := c.from.Position, c.to.Position
	width := (last - first) / clearLanes
	over := false
	for i := range c.lanes {
		l := &c.lanes[i]
		// A range of few positions does not have enough for all lanes.
		end := last
		if i < clearLanes-1 && last-first > width {
			end = first + width
		}
		*l = clearLane{at: first, last: end, done: over}
		if over {
			c.left--
			continue
		}
		over, first = end == last, end+1
	}
}

// clearStep begins to clear more segments for a CopyIn, and reports whether it began any, or all are clear.
func (s *Store) clearStep(i int32) (any bool) {
	c := &s.copyIns[i].clearing
	for n := range c.lanes {
		l := &c.lanes[n]
		for !l.busy && !l.done && s.freeCopy.N > 0 {
			if s.copyWork <= 0 {
				return true // copyInStep sees to it that this goes on
			}
			hash := bits.Reverse64(l.at)
			number := s.tbl.Segment(hash)
			if b := s.tbl.Empty(number); b > 0 {
				s.copyWork--
				c.pass(l, l.at|(uint64(1)<<(64-b)-1))
				continue
			}
			s.copyWork -= copyWorkEach
			l.busy, any = true, true
			k := s.opLinks.Pop(&s.freeCopy)
			pays := s.copyIns[i].pays
			s.ops[k] = op{kind: opClear, ready: true, hash: hash, slot: uint8(n), copyIn: uint8(i) + 1,
				tenant: pays.tenant, background: pays.background, parts: [2]part{noPart, noPart}}
			s.copyIns[i].running++
			s.dispatch(k)
		}
	}
	return any || c.left == 0
}

// pass notes that a lane is clear up to a position.
func (c *clearing) pass(l *clearLane, end uint64) {
	if l.done = end >= l.last; l.done {
		c.left--
		return
	}
	l.at = end + 1
}

// applyClear removes from a segment what an exact CopyIn does not have, and reports whether there was anything. How
// many keys that were is in op.want.
func (s *Store) applyClear(a *activeSeg, o *op) bool {
	in := &s.copyIns[o.copyIn-1]
	c := &in.clearing
	l := &c.lanes[o.slot]
	l.end = l.at | (uint64(1)<<(64-s.tbl.Bits(a.number)) - 1)
	first := in.index.before(in.b, l.at, 0, len(in.index)-1)
	last := in.index.before(in.b, l.end, first, len(in.index)-1)
	seg := format.Segment(a.buf)
	if seg.Lossy() {
		o.status = Corrupt // what it has lost, and its keys that were removed, would have to be told apart
		return false
	}
	o.want = 0
	for at := seg.First(); at < seg.LengthBytes(); {
		it := seg.Item(at)
		if !it.HasKey() || it.Version() > c.clock && seg.Identities(at) == 0 {
			at += it.LengthBytes()
			continue
		}
		e, inside := s.entryOf(in, l, first, last, it)
		switch {
		case !inside:
		case it.Version() <= c.clock && !says(e, it):
			if !it.Gone() {
				s.kill(a, at)
				a.dropped++
			}
			seg.Remove(at)
			o.want++
			continue
		case in.clearIdentities(seg, at, e):
			if o.want++; seg.Settle(at) {
				continue
			}
		}
		at += seg.Item(at).LengthBytes()
	}
	return o.want > 0
}

// entryOf reports whether an item is in the part of a lane that is being cleared, and returns the entry of its key, or
// nil. Of the index of the batch, first is before that part and last is the last that is not behind it.
func (s *Store) entryOf(in *copyIn, l *clearLane, first, last int, it format.Item) (e nvme.KVEntry, inside bool) {
	c := &in.clearing
	s.copyWork--
	p := bits.Reverse64(format.HashKey(s.hashSeed, it.Key()))
	if p < l.at || p > min(l.end, l.last) {
		return nil, false
	}
	at := nvme.KVCursorAt(p, it.Key())
	if at.Compare(&c.from) <= 0 || at.Compare(&c.to) > 0 {
		return nil, false
	}
	if len(in.index) == 0 {
		return nil, true
	}
	passed := 0
	for off := int(in.index[in.index.before(in.b, p, first, last)]); off < len(in.b); passed++ {
		o, next := in.b.EntryAt(off)
		if o.Position() > p {
			break
		}
		if o.Position() == p && string(o.Key()) == string(it.Key()) {
			e = o
			break
		}
		off = next
	}
	s.copyWork -= passed / copyPassed
	return e, true
}

// cleared ends the op that has cleared a segment.
func (s *Store) cleared(i int32, st Status) {
	o := &s.ops[i]
	c := &s.copyIns[o.copyIn-1]
	l := &c.clearing.lanes[o.slot]
	l.busy = false
	c.running--
	if st == OK {
		c.applied += int(o.want)
		c.clearing.pass(l, l.end)
	} else {
		s.entryEnded(c, st)
	}
	s.opLinks.PushFront(&s.freeCopy, i)
	s.progress++
}
