package kvstore

import (
	"slices"

	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// maxRestores is how often it is tried to restore a block: for a minute.
const maxRestores = 600

// restore writes the first block of a failed group again, with only what earlier groups have in it. A failed write may
// have left anything there, and those records were acknowledged.
func (s *Store) restore(gi int32) {
	g := &s.groups[gi]
	g.tries, g.retryNS = g.tries+1, 0
	clear(g.buf[g.lead:s.cfg.BlockSize])
	s.io(ioRestore, gi, pipeline.Write, g.at, g.buf[:s.cfg.BlockSize])
}

// restoreEnded ends a restore. If it has failed it is tried again later. A block that cannot be written for a minute is
// given up, and its records are found damaged when they are read.
func (s *Store) restoreEnded(gi int32, ok bool) {
	g := &s.groups[gi]
	if !ok && g.tries < maxRestores {
		g.retryNS = s.now + retryNS
		return
	}
	s.restoring--
	g.tries = 0
	s.settle(g)
	old := max(0, len(s.restored)+1-maxRestored)
	s.restored = append(slices.Delete(s.restored, 0, old), restoredBlock{g.at, s.now})
	s.freeGroup(gi)
}

// restoreStep tries failed restores again when their time has come.
func (s *Store) restoreStep() {
	for i := 0; i < len(s.groups) && s.restoring > 0; i++ {
		switch g := &s.groups[i]; {
		case g.retryNS == 0:
		case g.retryNS > s.now:
			s.wake(g.retryNS)
		default:
			s.restore(int32(i))
		}
	}
}

// restoredFor is how long a restored block still counts as unsettled: reads that began before may end after it. So many
// blocks, the last ones, are known.
const (
	restoredFor = 10e9
	maxRestored = 64
)

// restoredBlock is the place of a block that was restored, or given up, and when that was.
type restoredBlock struct {
	at units.ExtentOffset
	ns int64
}

// unsettled reports whether a record of at most n bytes at a place reaches into a block that is being written with a
// later group, or was restored a short while ago. What was read of it says nothing if that write fails or has failed,
// and the record is not damaged yet.
func (s *Store) unsettled(place units.ExtentOffset, n int) bool {
	if s.shared == 0 && len(s.restored) == 0 {
		return false
	}
	reaches := func(at units.ExtentOffset) bool {
		return place < at+units.ExtentOffset(s.cfg.BlockSize) && at < place+units.ExtentOffset(n)
	}
	return slices.ContainsFunc(s.groups, func(g group) bool { return g.shares && reaches(g.at) }) ||
		slices.ContainsFunc(s.restored, func(r restoredBlock) bool { return s.now < r.ns+restoredFor && reaches(r.at) })
}

// settle ends that the write of a group, or its restore, may leave anything in a block of earlier groups.
func (s *Store) settle(g *group) {
	if g.shares {
		g.shares = false
		s.shared--
	}
}
