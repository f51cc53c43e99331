package nvme

import "iter"

// MaxNSList is the number of NSIDs in a namespace list.
const MaxNSList = 1024

// NSList is a namespace list: Identify CNS 02h, 07h, 10h, 1Ah and the Changed Namespace
// List log (NVMe Base 2.0, Namespace List). NSIDs ascend; a 0 ends it.
type NSList [4 * MaxNSList]byte

// Fill writes the NSIDs of nsids that are greater than after, and returns how many fit. The argument nsids must be in
// ascending order. The rest of the list becomes zero.
func (l *NSList) Fill(after uint32, nsids []uint32) (n int) {
	clear(l[:])
	for _, id := range nsids {
		if id <= after {
			continue
		}
		if n == MaxNSList {
			break
		}
		le.PutUint32(l[4*n:], id)
		n++
	}
	return n
}

// FillChanged writes a Changed Namespace List: nsids, or only FFFFFFFFh if they do not fit (NVMe Base 2.0, section
// 5.16.1.5).
func (l *NSList) FillChanged(nsids []uint32) {
	if len(nsids) > MaxNSList {
		nsids = []uint32{NSIDBroadcast}
	}
	l.Fill(0, nsids)
}

// All iterates over the NSIDs up to the first 0.
func (l *NSList) All() iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for i := range MaxNSList {
			id := le.Uint32(l[4*i:])
			if id == 0 || !yield(id) {
				return
			}
		}
	}
}

// Check validates that the NSIDs ascend.
func (l *NSList) Check() error {
	last := uint32(0)
	for id := range l.All() {
		if id <= last {
			return fieldError("namespace list", "NSID", id, "above the one before it")
		}
		last = id
	}
	return nil
}

// MaxControllerList is the number of CNTLIDs in a controller list.
const MaxControllerList = 2047

// ControllerList is a controller list: Identify CNS 12h, 13h (NVMe Base 2.0, Controller
// List): a u16 count and ascending u16 identifiers.
type ControllerList [4096]byte

// Fill writes the CNTLIDs of cntlids that are at least from, and returns how many fit. The argument cntlids must be in
// ascending order.
func (l *ControllerList) Fill(from uint16, cntlids []uint16) (n int) {
	clear(l[:])
	for _, id := range cntlids {
		if id < from {
			continue
		}
		if n == MaxControllerList {
			break
		}
		n++
		le.PutUint16(l[2*n:], id)
	}
	le.PutUint16(l[0:], uint16(n))
	return n
}

// Len returns the number of identifiers, at most MaxControllerList.
func (l *ControllerList) Len() int { return min(int(le.Uint16(l[0:])), MaxControllerList) }

// All iterates over the identifiers.
func (l *ControllerList) All() iter.Seq[uint16] {
	return func(yield func(uint16) bool) {
		for i := 1; i <= l.Len(); i++ {
			if !yield(le.Uint16(l[2*i:])) {
				return
			}
		}
	}
}

// Check validates the count and that the identifiers ascend.
func (l *ControllerList) Check() error {
	if n := le.Uint16(l[0:]); n > MaxControllerList {
		return fieldError("controller list", "count", n, "at most 2047")
	}
	last := -1
	for id := range l.All() {
		if int(id) <= last {
			return fieldError("controller list", "CNTLID", id, "above the one before it")
		}
		last = int(id)
	}
	return nil
}

// MaxIOCommandSets is the number of combinations in an IOCommandSets.
const MaxIOCommandSets = 512

// IOCommandSets is the Identify I/O Command Set data structure (CNS 1Ch; NVMe Base 2.0,
// section 5.17.2): 512 combinations of command sets, a bit for each CSI; 0 ends it.
type IOCommandSets [IdentifySize]byte

// Combination returns combination i, 0 to 511; 0 when there is no such place.
func (v *IOCommandSets) Combination(i int) uint64 {
	if i < 0 || i >= MaxIOCommandSets {
		return 0
	}
	return le.Uint64(v[8*i:])
}

// SetCombination sets combination i, 0 to 511, to a set of command sets.
func (v *IOCommandSets) SetCombination(i int, sets ...CSI) {
	m := uint64(0)
	for _, s := range sets {
		m |= 1 << (s & 63)
	}
	le.PutUint64(v[8*i:], m)
}
