package nvme

import (
	"fmt"
	"iter"
)

// ANAState is the accessibility of the namespaces of an ANA group through a controller.
type ANAState uint8

// ANA states.
const (
	ANAStateOptimized      ANAState = 1
	ANAStateNonOptimized   ANAState = 2
	ANAStateInaccessible   ANAState = 3
	ANAStatePersistentLoss ANAState = 4
	ANAStateChange         ANAState = 0xF
)

// String names the state as Linux does in sysfs.
func (s ANAState) String() string {
	switch s {
	case ANAStateOptimized:
		return "optimized"
	case ANAStateNonOptimized:
		return "non-optimized"
	case ANAStateInaccessible:
		return "inaccessible"
	case ANAStatePersistentLoss:
		return "persistent-loss"
	case ANAStateChange:
		return "change"
	}
	return fmt.Sprintf("ANAState(%d)", uint8(s))
}

// Status returns the path status of a command in this state, or Success if the command is served.
func (s ANAState) Status() Status {
	switch s {
	case ANAStateInaccessible:
		return ANAInaccessible
	case ANAStatePersistentLoss:
		return ANAPersistentLoss
	case ANAStateChange:
		return ANATransition
	}
	return Success
}

// Sizes of structures in the ANA log, in bytes.
const (
	ANAHeaderSize = 16
	ANAGroupSize  = 32 // without NSIDs
)

// LSPANAGroupsOnly is the LSP bit (RGO) that requests groups without their NSIDs.
const LSPANAGroupsOnly = 1

// AppendANAHeader appends the header of log page 0Ch (NVMe Base 2.0, section 5.16.1.13):
//
//	0..7 change count | 8..9 number of groups | 10..15 reserved
func AppendANAHeader(dst []byte, changeCount uint64, groups uint16) []byte {
	dst = le.AppendUint64(dst, changeCount)
	dst = le.AppendUint16(dst, groups)
	return append(dst, 0, 0, 0, 0, 0, 0)
}

// AppendANAGroup appends one group descriptor. The argument nsids must be in ascending order. It is nil for a log that
// contains groups only.
//
//	0..3 ANAGRPID | 4..7 number of NSIDs | 8..15 change count | 16 state | 17..31 reserved | NSIDs
func AppendANAGroup(dst []byte, id uint32, changeCount uint64, s ANAState, nsids []uint32) []byte {
	dst = le.AppendUint32(dst, id)
	dst = le.AppendUint32(dst, uint32(len(nsids)))
	dst = le.AppendUint64(dst, changeCount)
	dst = append(dst, byte(s))
	dst = append(dst, make([]byte, ANAGroupSize-17)...)
	for _, n := range nsids {
		dst = le.AppendUint32(dst, n)
	}
	return dst
}

// ANALog is an ANA log as received.
type ANALog []byte

// ChangeCount returns the change count of the log, or 0 if the log is too short.
func (l ANALog) ChangeCount() uint64 {
	if len(l) < ANAHeaderSize {
		return 0
	}
	return le.Uint64(l)
}

// NumGroups returns the number of groups that the header states.
func (l ANALog) NumGroups() int {
	if len(l) < ANAHeaderSize {
		return 0
	}
	return int(le.Uint16(l[8:]))
}

// Groups iterates over the groups up to the first incomplete one.
func (l ANALog) Groups() iter.Seq[ANAGroup] {
	return func(yield func(ANAGroup) bool) {
		if len(l) < ANAHeaderSize {
			return
		}
		b := l[ANAHeaderSize:]
		for range l.NumGroups() {
			n, ok := anaGroupLen(b)
			if !ok || !yield(ANAGroup(b[:n:n])) {
				return
			}
			b = b[n:]
		}
	}
}

// Check validates the log: all groups must be complete, identifiers and states valid, and NSIDs ascending.
func (l ANALog) Check() error {
	const what = "ANA log"
	if len(l) < ANAHeaderSize {
		return fieldError(what, "length", len(l), "at least 16")
	}
	n := 0
	for g := range l.Groups() {
		n++
		if g.ID() == 0 {
			return fieldError(what, "ANAGRPID", 0, "at least 1")
		}
		switch g.State() {
		case ANAStateOptimized, ANAStateNonOptimized, ANAStateInaccessible, ANAStatePersistentLoss, ANAStateChange:
		default:
			return fieldError(what, "ANA state", uint8(g.State()), "1 to 4 or 15")
		}
		last := uint32(0)
		for i := range g.Len() {
			if id := g.NSID(i); id <= last {
				return fieldError(what, "NSID", id, "above the one before it")
			}
			last = g.NSID(i)
		}
	}
	if n != l.NumGroups() {
		return fieldError(what, "number of groups", l.NumGroups(), "the groups that follow in full")
	}
	return nil
}

// anaGroupLen returns the length of the group descriptor at the start of b. It returns false if the descriptor is
// incomplete.
func anaGroupLen(b []byte) (n int, ok bool) {
	if len(b) < ANAGroupSize {
		return 0, false
	}
	nsids := le.Uint32(b[4:])
	if uint64(nsids) > uint64(len(b)-ANAGroupSize)/4 {
		return 0, false
	}
	return ANAGroupSize + 4*int(nsids), true
}

// ANAGroup is one group descriptor with its NSIDs. It is a view of the log.
type ANAGroup []byte

func (g ANAGroup) ID() uint32          { return le.Uint32(g) }
func (g ANAGroup) ChangeCount() uint64 { return le.Uint64(g[8:]) }
func (g ANAGroup) State() ANAState     { return ANAState(g[16] & 0xf) }

// Len is the number of NSIDs; NSID returns number i of them.
func (g ANAGroup) Len() int          { return (len(g) - ANAGroupSize) / 4 }
func (g ANAGroup) NSID(i int) uint32 { return le.Uint32(g[ANAGroupSize+4*i:]) }
