package lookup

import (
	"bytes"
	"cmp"
	"math/bits"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// A range op goes through the segments of a range of positions, as a List does. Scan and CopyOut return the objects in
// order, Count and Digest only sums. Each returns an nvme.KVRange, which says how far it has come. It ends before the
// end of the range when its memory is full, when it has read maxLooked segments, or when the store is to stop.
//
// Where objects are lost, it never passes an incomplete range for a complete one: it ends before the segment, with what
// is known up to there; and if that is nothing, it passes only this segment, says so (nvme.KVLost), and ends with
// Corrupt or DeviceError. So the caller can continue behind the loss.

const (
	// MaxRanges is how many range ops may be in progress. So many ops are kept for them: others may take all that they
	// can get at any time.
	MaxRanges = 16
	// maxLooked is how many segments a range op reads.
	maxLooked = 1 << 14
	// MaxRangeBytes is how much memory a range op uses: the longest value with its entry fits.
	MaxRangeBytes = format.MaxValue + nvme.KVEntryOverhead
)

// MinRangeBytes is the least memory of a range op. That of a CopyOut must have room for the longest value, or it may
// end with TooShort.
func MinRangeBytes(kind Op) int {
	switch kind {
	case Count:
		return nvme.KVRangeHeaderBytes + nvme.KVTotalsBytes
	case Digest:
		return nvme.KVRangeHeaderBytes + nvme.KVSumBytes
	}
	return nvme.KVRangeHeaderBytes + nvme.KVEntryBytes(nvme.KVScan, format.MaxKey, 0, 0)
}

// Range is what a range op is about.
type Range struct {
	// First and Last are positions, inclusive.
	First, Last uint64
	// From is the position where to begin, behind Request.Key at that position: the cursor To of an earlier op. Less
	// than First: at First.
	From uint64
	// Unix: what expires until then, in unix seconds, is left out, even if that is later than now.
	Unix uint32
	// Looks is how many segments are read at most; 0: maxLooked.
	Looks uint16
	// Width is 1 more than the binary logarithm of the length of the sub-ranges of a Digest, which begin at multiples
	// of their length, as First must; 0: they are as short as the memory allows, and the first one begins at First.
	Width uint8
	// FromKey: First and From are the position of Request.Key.
	FromKey bool
}

// At returns the range with First and From filled in, if they are the position of a key.
func (r Range) At(hashSeed uint64, key []byte) Range {
	if r.FromKey {
		r.From = bits.Reverse64(format.HashKey(hashSeed, key))
		r.First = r.From
	}
	return r
}

// Valid reports whether a range op can begin with n bytes of memory.
func (r *Range) Valid(kind Op, n int) bool {
	if r.First > r.Last || r.From > r.Last || n < MinRangeBytes(kind) {
		return false
	}
	if kind != Digest || r.Width == 0 {
		return true
	}
	shift := r.Width - 1
	return shift <= 64 && r.First&(1<<shift-1) == 0 && (r.Last-r.First)>>shift < uint64(maxSums(n))
}

// maxSums is how many sub-ranges a Digest has at most in n bytes of memory.
func maxSums(n int) int {
	return min((min(n, MaxRangeBytes)-nvme.KVRangeHeaderBytes)/nvme.KVSumBytes, nvme.KVMaxSums)
}

// rangeOp is the state of a range op besides that of its op.
type rangeOp struct {
	out  nvme.KVRange
	last uint64
	unix uint32
	// Everything up to cursor is in out.
	from, cursor nvme.KVCursor
	// looked is how many segments were read, looks how many are at most.
	looked, looks int
	// lossy: out has what is known of a lossy segment, and nothing else.
	lossy bool
	// ended: nothing is added to out any more, whose flags are set. result is the outcome, need the length of memory
	// that was missing.
	ended  bool
	result Result
	need   int
	// copies is how many values a CopyOut is reading, wants the length of the next if it waits for that. cut is the
	// offset in out of the first entry whose value could not be read, or 0, and why says why.
	copies, wants int
	cut           int
	why           Result
	// again counts how often a CopyOut was begun again because its first object had changed.
	again int
	// chore is what is being done with out, at how far that is, sealer the same for the checksum. before is the last
	// entry that was passed in search of cut, passed how many were.
	chore  chore
	at     int
	sealer nvme.KVSealer
	before nvme.KVCursor
	passed int
	// next links those that are free.
	next int32
}

// lists reports whether an op goes through segments.
func (o *op) lists() bool { return o.kind >= List && o.kind <= Digest }

// isRange reports whether an op is a range op.
func (o *op) isRange() bool { return o.kind > List && o.kind <= Digest }

// makeRanges makes the rangeOps.
func (m *Machine) makeRanges() {
	m.ranges, m.freeRange = make([]rangeOp, MaxRanges), none
	for i := range m.ranges {
		m.ranges[i].next, m.freeRange = m.freeRange, int32(i)
	}
}

// beginRange starts a range op.
func (m *Machine) beginRange(i int32, r *Range) {
	o := &m.ops[i]
	o.ranged = m.freeRange
	ro := &m.ranges[o.ranged]
	m.freeRange = ro.next
	m.busyRanges++
	from := nvme.KVCursorAt(r.From, o.key[:o.keyLen])
	if r.From < r.First {
		from = nvme.KVCursorAt(r.First, nil)
	}
	kind := [...]nvme.KVRangeKind{Scan: nvme.KVScan, CopyOut: nvme.KVCopy, Count: nvme.KVCount,
		Digest: nvme.KVDigest}[o.kind]
	buf := o.value[:min(len(o.value), MaxRangeBytes)]
	out := nvme.NewKVRange(buf, kind, r.First, r.Last, from)
	*ro = rangeOp{out: out, last: r.Last, unix: max(r.Unix, m.Wall), from: from, cursor: from, looks: maxLooked}
	if r.Looks > 0 {
		ro.looks = min(int(r.Looks), maxLooked)
	}
	out.SetTime(ro.unix)
	o.position = from.Position
	switch o.kind {
	case Count:
		ro.out = out[:nvme.KVRangeHeaderBytes+nvme.KVTotalsBytes]
		ro.out.SetItems(1)
		clear(ro.out.Totals())
	case Digest:
		n, shift := nvme.KVSubRanges(r.First, r.Last, maxSums(len(buf)))
		if r.Width > 0 {
			shift = r.Width - 1
			n = int((r.Last-r.First)>>shift) + 1
		}
		ro.out = out[:nvme.KVRangeHeaderBytes+n*nvme.KVSumBytes]
		ro.out.SetItems(n)
		ro.out.SetShift(shift)
		m.startChore(i, clearing)
		return
	}
	m.list(i)
}

// pass moves the position of a List or range op behind all hashes that share their low n bits with it, and reports
// whether there are others. If not, a range op is complete.
func (m *Machine) pass(i int32, n int) bool {
	o := &m.ops[i]
	if !o.isRange() {
		return o.pass(n)
	}
	ro := &m.ranges[o.ranged]
	end := o.position | (uint64(1)<<(64-n) - 1)
	if end >= ro.last {
		ro.cursor = nvme.KVLastOf(ro.last)
		return false
	}
	o.position = end + 1
	ro.cursor = nvme.KVCursorAt(o.position, nil)
	return true
}

// endList ends a List or range op that has gone through all segments.
func (m *Machine) endList(i int32) {
	if o := &m.ops[i]; o.isRange() {
		m.endRange(i, Found, nvme.KVComplete)
		return
	}
	m.finish(i, Found)
}

// endRange ends a range op as soon as all values are read.
func (m *Machine) endRange(i int32, r Result, flags uint8) {
	ro := &m.ranges[m.ops[i].ranged]
	ro.ended, ro.result = true, r
	if ro.lossy {
		flags |= nvme.KVLost
	}
	ro.out.SetFlags(flags)
	m.returnBuffer(i)
	if ro.copies == 0 {
		m.sealRange(i)
	}
}

// sealRange begins to complete the result of a range op, unless that is begun again.
func (m *Machine) sealRange(i int32) {
	o := &m.ops[i]
	ro := &m.ranges[o.ranged]
	if m.beginsAgain(o, ro) {
		m.list(i)
		return
	}
	if ro.cut > 0 {
		ro.before, ro.passed = ro.from, 0
		m.startChore(i, cutting)
		return
	}
	m.seal(i)
}

// seal completes the result of a range op.
func (m *Machine) seal(i int32) {
	ro := &m.ranges[m.ops[i].ranged]
	ro.out.SetTo(ro.cursor)
	m.startChore(i, sealing)
}

// rangeSealed ends a range op whose result is complete.
func (m *Machine) rangeSealed(i int32) {
	o := &m.ops[i]
	ro := &m.ranges[o.ranged]
	o.length = uint32(len(ro.out))
	if ro.result == TooShort {
		o.length = uint32(ro.need)
	}
	r := ro.result
	*ro = rangeOp{next: m.freeRange}
	m.freeRange = o.ranged
	m.busyRanges--
	m.finish(i, r)
}

// stops reports whether a range op has done enough, and ends it then.
func (m *Machine) stops(i int32) bool {
	ro := &m.ranges[m.ops[i].ranged]
	if ro.looked < ro.looks && !m.Stopping {
		return false
	}
	m.endRange(i, Found, 0)
	return true
}

// EndEarly makes a range op end as soon as it can, with what it has found until then.
func (m *Machine) EndEarly(tag uint64) {
	for i := range m.ops {
		if o := &m.ops[i]; o.isRange() && o.value != nil && o.tag == tag {
			m.ranges[o.ranged].looks = 0
		}
	}
}

// rangeFails handles a segment of which nothing is known: a range op ends before it, or passes it if it is the first.
func (m *Machine) rangeFails(i int32, r Result) {
	o := &m.ops[i]
	ro := &m.ranges[o.ranged]
	if ro.cursor != ro.from {
		m.endRange(i, Found, 0)
		return
	}
	flags := uint8(nvme.KVLost)
	if !m.pass(i, m.Table.Bits(o.segment)) {
		flags |= nvme.KVComplete
	}
	m.endRange(i, r, flags)
}

// rangeRead continues a range op whose segment was read. If the segment has moved since the read was started, the op
// looks for its segment again.
func (m *Machine) rangeRead(i int32) {
	o := &m.ops[i]
	if m.moved(o) {
		m.restart(i)
		return
	}
	if seg, _ := m.check(i, nil); seg != nil {
		m.ranges[o.ranged].looked++
		m.rangeSegment(i, seg)
	}
}

// rangeSegment adds what a segment has behind the cursor to the result of a range op, and goes on or ends the op. An op
// ends before a segment that has lost keys. If that is the first segment of the op, a Count or Digest fails; other ops
// return what the segment has, and flag the loss.
func (m *Machine) rangeSegment(i int32, seg format.Segment) {
	o := &m.ops[i]
	ro := &m.ranges[o.ranged]
	if seg.Lossy() && !ro.lossy {
		switch {
		case ro.cursor != ro.from:
			m.endRange(i, Found, 0)
			return
		case o.kind == Count || o.kind == Digest:
			m.lost(i)
			return
		}
		ro.lossy = true
	}
	if o.kind == Count || o.kind == Digest {
		m.sumSegment(o, ro, seg)
	} else if !m.rangeEntries(i, seg) {
		return
	}
	more := m.pass(i, m.Table.Bits(o.segment))
	switch {
	case ro.cut > 0:
		m.endRange(i, Found, 0)
	case ro.lossy:
		flags := uint8(0)
		if !more {
			flags = nvme.KVComplete
		}
		m.endRange(i, m.lossOf(o), flags)
	case !more:
		m.endList(i)
	case !m.stops(i):
		m.list(i)
	}
}

// rangeEntries appends the objects and tombstones of a segment to the result of a Scan or CopyOut, and reports whether
// that is done. Otherwise the op has ended, because there is no more room, or waits until values are read.
func (m *Machine) rangeEntries(i int32, seg format.Segment) (done bool) {
	o := &m.ops[i]
	ro := &m.ranges[o.ranged]
	for _, k := range m.sorted(seg, o.segment, &ro.cursor, false) {
		if k.position > ro.last {
			break
		}
		it := seg.Item(k.item)
		n, identities, there := 0, 0, m.counts(it, k.position, ro.unix)
		if o.kind == CopyOut {
			identities = seg.LiveIdentities(k.item, ro.unix)
		}
		switch {
		case !there && identities == 0:
			continue
		case there && !it.Gone():
			_, n = seg.Pieces(k.item)
		}
		copies := o.kind == CopyOut && n > 0
		if copies && !m.mayCopy(ro, n) {
			ro.wants = n
			m.links.Push(&m.parked, i)
			return false
		}
		e, out, ok := ro.out.Append(it.Key(), n, identities)
		switch {
		case ok:
		case out.Items() == 0:
			ro.need = len(out) + nvme.KVEntryBytes(out.Kind(), it.KeyLen(), n, identities)
			m.endRange(i, TooShort, 0)
			return false
		default:
			r := Result(Found)
			if ro.lossy {
				r = m.lossOf(o)
			}
			m.endRange(i, r, 0)
			return false
		}
		at := len(ro.out)
		ro.out, ro.cursor = out, nvme.KVCursorAt(k.position, it.Key())
		e.SetPosition(k.position)
		e.SetVersion(it.Version())
		switch {
		case !there:
			e.SetGone()
		case it.Gone():
			e.SetTombstone()
			fallthrough
		default:
			e.SetExpires(it.Expiry())
		}
		if identities > 0 {
			m.setIdentities(e, seg, k.item, ro.unix)
		}
		if copies {
			m.beginCopy(i, seg, k.item, at)
		}
	}
	return true
}

// setIdentities sets the identities of an entry, which has room for them, to those of a key.
func (m *Machine) setIdentities(e nvme.KVEntry, seg format.Segment, item int, unix uint32) {
	var buf [format.MaxIdentities]format.Identity
	for i, id := range seg.AppendIdentities(buf[:0], item, unix) {
		e.SetIdentity(i, nvme.KVIdentity{Client: id.Client, Seq: id.Seq, Version: id.Version, KeepUntil: id.KeepUntil})
	}
	e.SetEvicted(seg.Evicted(item, unix))
}

// counts reports whether an item is that of an object that exists, or of a tombstone.
func (m *Machine) counts(it format.Item, position uint64, unix uint32) bool {
	return (it.Tombstone() || !it.Gone()) && !it.Expired(unix) && !m.Drops.Covers(position, it.Version())
}

// sumSegment adds the objects and tombstones of a segment to the result of a Count or Digest.
func (m *Machine) sumSegment(o *op, ro *rangeOp, seg format.Segment) {
	for off := seg.First(); off < seg.LengthBytes(); {
		it, at := seg.Item(off), off
		off += it.LengthBytes()
		if !it.HasKey() {
			continue
		}
		hash := format.HashKey(m.HashSeed, it.Key())
		c := nvme.KVCursorAt(bits.Reverse64(hash), it.Key())
		if m.Table.Segment(hash) != o.segment || c.Position > ro.last || c.Compare(&ro.cursor) <= 0 {
			continue
		}
		there := m.counts(it, c.Position, ro.unix)
		switch {
		case o.kind == Digest:
			alone := off >= seg.LengthBytes() || seg.Item(off).HasKey() // without identities
			if !there && alone {
				continue
			}
			if count, hash := m.digest(seg, at, there, alone, ro.unix); count > 0 {
				ro.out.Sum(int((c.Position-ro.out.First())>>ro.out.Shift())).Add(count, hash)
			}
		case !there:
		case it.Gone():
			ro.out.Totals().Add(0, 1, 0)
		default:
			_, n := seg.Pieces(at)
			ro.out.Totals().Add(1, 0, uint64(n+it.KeyLen()))
		}
	}
}

// digest is what the key whose item is at an offset of a segment adds to a Digest. There says whether it counts, alone
// that it has no identities.
func (m *Machine) digest(seg format.Segment, at int, there, alone bool, unix uint32) (count, sum uint64) {
	it := seg.Item(at)
	state := format.KeyState(0)
	switch {
	case !there:
		state = format.KeyAbsent | format.KeyGone
	case it.Gone():
		state = format.KeyAbsent
	}
	if !alone && seg.LiveIdentities(at, unix) > 0 {
		var buf [format.MaxIdentities]format.Identity
		ids := seg.AppendIdentities(buf[:0], at, unix)
		for i := range ids {
			sum += format.HashIdentity(m.HashSeed, it.Key(), &ids[i])
		}
		if seg.Evicted(at, unix) {
			state |= format.KeyEvicted
		}
	} else if !there {
		return 0, 0
	}
	return 1, sum + format.HashVersion(m.HashSeed, it.Key(), it.Version(), state)
}

// sorted returns the keys of a segment in order that come behind a cursor, or with inclusive at it. They are valid
// until the next call.
func (m *Machine) sorted(seg format.Segment, number uint32, from *nvme.KVCursor, inclusive bool) []listed {
	found := m.listed[:0]
	for off := seg.First(); off < seg.LengthBytes(); {
		it := seg.Item(off)
		if it.HasKey() {
			hash := format.HashKey(m.HashSeed, it.Key())
			c := nvme.KVCursorAt(bits.Reverse64(hash), it.Key())
			// Keys that a split has moved to another segment are still in the record, but do not belong to it.
			if d := c.Compare(from); m.Table.Segment(hash) == number && (d > 0 || inclusive && d == 0) {
				found = append(found, listed{position: c.Position, item: off})
			}
		}
		off += it.LengthBytes()
	}
	m.listed = found
	slices.SortFunc(found, func(a, b listed) int {
		if a.position != b.position {
			return cmp.Compare(a.position, b.position)
		}
		return bytes.Compare(seg.Item(a.item).Key(), seg.Item(b.item).Key())
	})
	return found
}
