package kvstore

import (
	"math/bits"

	"jbofd/internal/kvstore/format"
)

// A segment that has lost keys is complete again when everything has been copied in that another store has in its
// positions, because whatever was written meanwhile is known. Whoever copies asks twice with a Settle:
//
//	Settle, Version 0 ──> lossy? how many bits of a position?   the record is replaced, so that what is written to
//	                      and a Version                         the segment from now on is part of it
//	CopyIn …
//	Settle, Version ────> the segment is complete
//
// The Version counts the losses of the store. If another record was lost meanwhile, that may be one with some of the
// copies: then the Settle ends with Superseded, and the segment stays lossy.
//
// Whoever copies may have the keys of some positions only, and a young store has few segments, of many positions. So
// the first Settle says how narrow a segment must be. If a lossy one is wider, the table grows until it has been split,
// also if there are not enough keys for that (Store.needs), and each of its parts is lossy until it is settled.

// mostLeast bounds how many segments a Settle may want.
const mostLeast = 1 << 16

// submitSettle takes a Settle.
func (s *Store) submitSettle(r *Request) bool {
	if s.freeOps.N == 0 {
		return false
	}
	i := s.opLinks.Pop(&s.freeOps)
	s.ops[i] = op{kind: Settle, ready: true, tag: r.Tag, tenant: r.Tenant, background: r.Background,
		hash: bits.Reverse64(r.Range.First), want: r.Version, slot: r.Range.Width, parts: [2]part{noPart, noPart}}
	s.dispatch(i)
	return true
}

// applySettle tells of a segment, or makes it complete, and reports whether it must be written.
func (s *Store) applySettle(a *activeSeg, o *op) bool {
	seg := format.Segment(a.buf)
	width := s.tbl.Bits(a.number)
	o.valueLen = uint32(width)
	switch {
	case !seg.Lossy():
		return false
	case o.want == 0:
		if width < int(o.slot) && o.slot < 64 {
			s.merge.least = max(s.merge.least, min(1<<o.slot, mostLeast, int64(s.tbl.Max())))
			s.merge.asked = true
			s.progress++
		}
		o.version = s.unreadable.losses + 1
		return a.bytes == 0
	case o.want != s.unreadable.losses+1 || a.bytes == 0 || width < int(o.slot):
		o.status = Superseded
		return false
	}
	seg.Complete()
	s.sweepNow()
	return true
}

// probeSteps is how many segments are looked at to find some that are probed.
const probeSteps = 256

// mostReads is how many others must have been read for an unreadable segment to count as lost. If a Settle asks, the
// store reads some for that: an idle one would never know.
func (s *Store) mostReads(a *activeSeg) uint64 {
	asked := false
	for o := a.waiting.First; o != none; o = s.opLinks.Next(o) {
		asked = asked || s.ops[o].kind == Settle
	}
	if !asked {
		return unreadableReads
	}
	u := &s.unreadable
	for n, steps := 0, 0; n < settleReads && steps < probeSteps && s.freeInt.N > maxMoves/4; steps++ {
		if u.probed++; u.probed >= s.tbl.Len() {
			u.probed = 0
		}
		if u.probed == a.number || s.tbl.Get(u.probed) == 0 || s.isActive(u.probed) {
			continue
		}
		i := s.opLinks.Pop(&s.freeInt)
		s.ops[i] = op{kind: opProbe, ready: true, segment: u.probed, parts: [2]part{noPart, noPart}}
		s.dispatch(i)
		n++
	}
	return settleReads
}
