package kvstore

import (
	"math"
	"math/bits"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// A CopyIn is validated as a whole before it changes anything. Then an exact one clears its part of the range, and then
// the entries are stored. A batch of 1 MiB may have 32,000 entries, and to look at all of them takes milliseconds. So
// each turn does a bounded amount of work for CopyIns, and the next turn goes on.

// copyWrites is how many entries of CopyIns are written at once, by ops that are kept for that. Entries of the same
// segment are next to each other, and so are written together.
const copyWrites = 48

// copyWorkMost is how much work for CopyIns a turn begins, in units of about 0.1 µs. A unit is to look at an entry, to
// sum up 1 KiB of the batch, to skip an empty segment, to look at a key in a segment that is being cleared, or to pass
// copyPassed entries in search of the one of that key; an op takes copyWorkEach, and half of that for each KiB of its
// value. What has begun is completed, so that a long value may take more.
const (
	copyWorkMost = 256
	copyWorkEach = 4
	copyPassed   = 8
	// copySumBytes is how many bytes are summed up before other CopyIns have their turn, copyLooks how many entries are
	// looked at.
	copySumBytes = 64 << 10
	copyLooks    = 64
)

// copyIn is a CopyIn in progress: next is the offset of its next entry, left are not begun, running are in progress.
type copyIn struct {
	b             nvme.KVRange // nil: it is free
	tag           uint64
	pays          payer
	next          int
	left, running int
	// applied counts the entries that have changed something. status is the first that was not as it should be.
	applied int
	status  Status
	// restores is Request.Restore, ahead is Request.AheadSeconds.
	restores bool
	ahead    int64
	// valid: the batch is valid, so that it may be applied. Until then checker says how far that is known; summed: the
	// checksum is right. dropped: a Drop on the list covers an entry.
	checker                nvme.KVChecker
	summed, dropped, valid bool
	index                  copyIndex
	// clearing is the first half of an exact one.
	clearing clearing
}

// submitCopyIn takes a CopyIn. Whether it is valid turns out later.
func (s *Store) submitCopyIn(r *Request) bool {
	var c *copyIn
	for i := range s.copyIns {
		if s.copyIns[i].b == nil {
			c = &s.copyIns[i]
			break
		}
	}
	if c == nil {
		return false
	}
	b := nvme.KVRange(r.Value)
	var checker nvme.KVChecker
	if len(b) > MaxRangeBytes || checker.Begin(b) != nil || b.Kind() != nvme.KVCopy ||
		r.Version != 0 && (r.Version > max(MaxCopied, s.clock) || b.Lost()) {
		s.answer(r.Tag, InvalidValue)
		return true
	}
	*c = copyIn{b: b[:b.LenBytes()], tag: r.Tag, pays: payerOf(r.Tenant, r.Background), next: nvme.KVRangeHeaderBytes,
		restores: r.Restore, ahead: r.AheadSeconds, checker: checker, index: c.index[:0],
		clearing: clearing{clock: r.Version}}
	s.copying++
	return true
}

// validate goes on to validate a CopyIn, and begins it when it is known to be valid.
func (s *Store) validate(c *copyIn) {
	if !c.summed {
		s.copyWork -= copySumBytes >> 10
		done, err := c.checker.Sum(copySumBytes)
		if c.summed = done; err != nil {
			s.entryEnded(c, InvalidValue)
		}
		return
	}
	for range copyLooks {
		s.copyWork -= 1 + len(s.drops.list)/16
		at := c.checker.At()
		e, err := c.checker.Next()
		switch {
		case err != nil || e != nil && s.isWrongEntry(c, e):
			s.entryEnded(c, InvalidValue)
			return
		case e == nil:
			s.validated(c)
			return
		}
		c.index.add(c.left, at)
		c.left++
	}
}

// isWrongEntry reports whether an entry cannot be copied in. An exact one must be at the position that its key has in
// this store. It notes whether what the entry has of its key would not exist because of a Drop.
func (s *Store) isWrongEntry(c *copyIn, e nvme.KVEntry) bool {
	exact := c.clearing.clock != 0
	if e.Version() > max(MaxCopied, s.clock) || e.ValueLen() > s.MaxValueBytes() {
		return true
	}
	if !exact && len(s.drops.list) == 0 {
		return false
	}
	position := bits.Reverse64(format.HashKey(s.hashSeed, e.Key()))
	c.dropped = c.dropped || !e.Gone() && s.drops.list.Covers(position, e.Version())
	return exact && position != e.Position()
}

// validated begins a CopyIn whose batch is valid. It is Superseded if a Drop on the list covers an entry. Such an entry
// would not exist, and after the Drop has left the list it would, so that what a CopyIn stores would depend on when it
// comes. The sender repeats it then.
func (s *Store) validated(c *copyIn) {
	c.valid = true
	switch clock := c.clearing.clock; {
	case c.dropped:
		if c.status = Superseded; len(s.drops.swept) > 0 {
			s.ckpt.wanted = true // it takes Drops off the list that are swept
		}
	case clock != 0:
		c.clearing.begin(c.b, clock)
	}
}

// copyInStep goes on with CopyIns, in turn, and ends those that are done.
func (s *Store) copyInStep() {
	s.checkStep()
	for n := s.copying; n > 0; {
		n = 0
		for i := range s.copyIns {
			c := &s.copyIns[i]
			ended := c.status != OK || c.valid && c.clearing.left == 0 && c.left == 0
			switch {
			case c.b == nil:
			case ended && c.running == 0:
				s.copying--
				s.answer(c.tag, c.status).ValueLen = c.applied
				*c = copyIn{index: c.index}
				s.progress++
			case ended:
			case s.copyWork <= 0:
				s.wake(s.now + 1)
			case !c.valid:
				s.validate(c)
				n++
			case c.clearing.left > 0:
				if s.clearStep(int32(i)) {
					n++
				}
			case s.freeCopy.N > 0 && s.beginEntry(int32(i)):
				n++
			}
		}
	}
}

// beginEntry begins to write the next entry of a CopyIn, and reports whether there was room for that.
func (s *Store) beginEntry(i int32) bool {
	c := &s.copyIns[i]
	e, next := c.b.EntryAt(c.next)
	r := Request{Op: Put, Condition: IfNewer, Tenant: c.pays.tenant, Key: e.Key(), Value: e.Value(),
		Version: e.Version(), Expires: e.Expires()}
	if !e.Exists() {
		r.Op, r.Tombstone, r.Expires = Delete, e.Tombstone(), c.until(e.Expires())
	}
	st := OK
	if (r.Op == Put || e.Identities() > 0) && s.isFull(&r, e.Identities()) {
		st = CapacityExceeded
	}
	switch {
	case st != OK:
		s.entryEnded(c, st)
		return true
	case r.Op == Put && len(r.Value) > 0 && !s.roomFor(userLog, len(r.Value)):
		return false
	}
	s.copyWork -= copyWorkEach + copyWorkEach/2*len(r.Value)>>10
	c.next = next
	c.left--
	c.running++
	k := s.opLinks.Pop(&s.freeCopy)
	r.Background = c.pays.background
	s.beginWrite(k, &r, uint8(i)+1, false)
	if e.Identities() > 0 {
		s.ops[k].value = e
	}
	return true
}

// until is a time until which an entry of a CopyIn keeps something, by the time of day of the store; 0: for ever.
func (c *copyIn) until(t uint32) uint32 {
	if t == 0 {
		return 0
	}
	return uint32(max(1, min(int64(t)+c.ahead, math.MaxUint32)))
}

// entryDone ends the op of an entry.
func (s *Store) entryDone(i int32, st Status) {
	c := &s.copyIns[s.ops[i].copyIn-1]
	c.running--
	s.entryEnded(c, st)
	s.opLinks.PushFront(&s.freeCopy, i)
	s.progress++
}

// entryEnded notes the outcome of an entry. After one that has failed no more are begun.
func (s *Store) entryEnded(c *copyIn, st Status) {
	switch st {
	case OK:
		c.applied++
	case Superseded:
	default:
		if c.status == OK {
			c.status = st
		}
		c.left = 0
	}
}

// indexEvery is how many entries there are for each of a copyIndex.
const indexEvery = 16

// copyIndex has the offset of each indexEvery-th entry of a batch, so that an entry is found without a look at all.
type copyIndex []uint32

// makeCopyIndexes makes the index of each CopyIn, with room for as many entries as the longest batch may have.
func (s *Store) makeCopyIndexes() {
	least := nvme.KVEntryBytes(nvme.KVCopy, 1, 0, 0)
	for i := range s.copyIns {
		s.copyIns[i].index = make(copyIndex, 0, (MaxRangeBytes-nvme.KVRangeHeaderBytes)/least/indexEvery+1)
	}
}

// add adds entry n, which is at an offset.
func (x *copyIndex) add(n, at int) {
	if n%indexEvery == 0 {
		*x = append(*x, uint32(at))
	}
}

// before returns the last of the entries first to last of the index that is at a position before another one, or first.
// No entry of the batch that is at the other position is before that one.
func (x copyIndex) before(b nvme.KVRange, position uint64, first, last int) int {
	for first < last {
		middle := (first + last + 1) / 2
		if e, _ := b.EntryAt(int(x[middle])); e.Position() < position {
			first = middle
		} else {
			last = middle - 1
		}
	}
	return first
}
