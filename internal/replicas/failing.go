package replicas

import (
	"slices"

	"jbofd/internal/kvstore"
)

// failing tells whether the drive fails writes.
//
// A member is damaged for longer than its drive fails: it waits for a view without it, and for the store to know all
// outcomes. A drive that works for others meanwhile does not fail. So the drive fails from the time at which a member
// has become damaged until a write of any member is done that the store was given settleNS later or after that. A write
// from before may have been done by then. One that is tried to revive a damaged member counts, too.
type failing struct {
	// sinceNS is when a member has become damaged last, if no write has been done since; 0: otherwise.
	sinceNS int64
	// ended: a write was done, which is to be reported.
	ended bool
}

// settleNS is as long as the time from a damage to the first trial write (package replica).
const settleNS = 1e9

// failed notes that a member has become damaged.
func (f *failing) failed(nowNS int64) { f.sinceNS = nowNS }

// wrote notes the answer to a request of a member that the store was given at a time.
//
// hot: 0 allocs
func (f *failing) wrote(s *storeRequest) {
	if f.sinceNS != 0 && s.kind == writeKind && s.Status == kvstore.OK && s.atNS >= f.sinceNS+settleNS {
		f.sinceNS, f.ended = 0, true
	}
}

// isFailing reports whether the drive does not work: it is silent, or fails writes.
func (g *Replicas) isFailing() bool {
	return g.silence.silent || g.failing.sinceNS != 0 &&
		slices.ContainsFunc(g.members, func(m *member) bool { return m.damaged })
}
