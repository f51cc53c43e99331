package crrs

import (
	"math"
	"math/rand/v2"
	"testing"

	"jbofd/internal/testutil/hunt"
)

// Faults that are planted in the simulated chain: each takes away what one rule of the package is for, and the
// histories must show it.

// fault is a planted fault.
type fault uint8

const (
	sound fault = iota
	// dirtyRead: members that are not the ChainTail answer reads of dirty keys.
	dirtyRead
	// noStamp: reads are answered by members whose authority has ended.
	noStamp
	// oldAck: an acknowledgement from an earlier epoch counts as one from the present epoch.
	oldAck
	// missedWrite: a member that is filled acknowledges writes, and does not store them.
	missedWrite
	// lostIdentity: a ChainHead does not know the identities of writes that an earlier ChainHead has taken.
	lostIdentity
	// earlyCopy: a member that is filled is given what is not committed.
	earlyCopy
	// soundBelow: what a store knows in a segment that has lost keys counts, whatever its version.
	soundBelow
	// nothingSound: nothing counts that was stored after the loss.
	nothingSound
	// anyRound: who asks is given what was read for an earlier pass, or an earlier repair, of the same epoch.
	anyRound
	// hasty: writes of a hot key begin while earlier ones have to be sent again.
	hasty
)

// reading runs do, which begins or ends a read of a node.
func (s *sim) reading(n *node, do func()) {
	r := n.r
	switch {
	case s.fault == dirtyRead && !r.role.tail():
		dirty := r.dirty
		r.dirty = make([]int32, len(dirty))
		fill(r.dirty)
		if do(); !r.damaged {
			r.dirty = dirty
		}
	case s.fault == noStamp && r.untilNS > 0:
		until := r.untilNS
		r.untilNS = math.MaxInt64
		do()
		r.untilNS = until
	default:
		do()
	}
}

// epochOf is the epoch that a node takes a message for, which may be an acknowledgement.
func (s *sim) epochOf(n *node, ack bool, epoch uint64) uint64 {
	if ack && s.fault == oldAck {
		return n.r.role.Epoch
	}
	return epoch
}

// TestPlantedFaultsAreFound: one history in fifty, or more, shows each fault, so that one of 1500 does.
func TestPlantedFaultsAreFound(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	for f, name := range map[fault]string{dirtyRead: "dirty read", noStamp: "no stamp", oldAck: "old acknowledgement",
		missedWrite: "missed write", lostIdentity: "lost identity",
		soundBelow: "sound below", nothingSound: "nothing sound", anyRound: "any round"} {
		t.Run(name, func(t *testing.T) {
			for i := range uint64(1500) {
				if f >= soundBelow { // one of the histories in which segments are lost
					i = 4*i + 2
				}
				found := hunt.Run(func(t hunt.Reporter) { run(t, seed, i, mixed, f) })
				if found != "" {
					t.Logf("history %d: %.300s", i, found)
					return
				}
			}
			t.Error("not found")
		})
	}
}
