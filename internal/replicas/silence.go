package replicas

import (
	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
)

// silence detects a drive that takes requests and completes none, without an error: a controller that hangs, or a path
// that queues for ever. All writes of all chains of the partition would wait for it, while the node reports to the
// manager as usual.
//
// A drive is silent when the store has had a request of a member for silentLooks looks, and the drive had requests in
// all of these looks and has completed none of that kind. A drive that is slow completes some, and a store that is full
// has its drive work. Looks are counted, and not time, so that a process that was stopped for a while, and finds what
// its drive has completed meanwhile only after it has looked at its clock, takes that for one look.
//
//   - A member with a silent drive that serves beside others gives its membership up, as after a cut: see cuts and
//     Replicas.resign. The others continue without it.
//   - One that waits to be filled, or is being filled, reports that it cannot be: the others would wait for it again.
//   - One that is alone stays, because nobody else has the data.
//
// The silence is over when the store has answered all that it has had for so long.
type silence struct {
	// kinds counts the requests of members that the store has, by kind.
	kinds [numKinds]inStore
	// look counts looks. lookNS is when to look next, 0: the store has nothing.
	look   uint32
	lookNS int64
	// silent: the drive is silent.
	silent bool
}

// silentLooks is for how many looks a drive has to be silent. They are Config.SilentAfter/silentLooks apart.
const silentLooks = 10

// kind is a kind of requests, each of which shows by itself whether the drive works: there are drives that read and do
// not write.
type kind uint8

const (
	readKind kind = iota
	writeKind
	numKinds
	otherKind // one that is not looked at
)

func kindOf(op kvstore.Op) kind {
	switch op {
	case kvstore.Get:
		return readKind
	case kvstore.Put, kvstore.Delete:
		return writeKind
	}
	return otherKind
}

// inStore counts the requests of a kind that the store has.
type inStore struct {
	// recent are those that were made since a look, by its number modulo silentLooks; old those that were made before.
	recent [silentLooks]int
	old    int
	// all is how many there are.
	all int
	// completed is how many of that kind the drive had completed at the last look, quiet in how many looks in a row
	// it has completed none although it had some.
	completed int64
	quiet     int
}

// began counts a request that the store is given, and returns the number of the look before it.
//
// hot: 0 allocs
func (s *silence) began(k kind) (look uint32) {
	if k < numKinds {
		s.kinds[k].all++
		s.kinds[k].recent[s.look%silentLooks]++
	}
	return s.look
}

// ended counts a request that the store has answered, with the number of the look before it was made.
//
// hot: 0 allocs
func (s *silence) ended(k kind, look uint32) {
	if k >= numKinds {
		return
	}
	c := &s.kinds[k]
	if c.all--; s.look-look >= silentLooks {
		c.old--
	} else {
		c.recent[look%silentLooks]--
	}
}

// driveWork is what a drive has done: how many requests it has completed of each kind, and whether it has any.
type driveWork struct {
	completed [numKinds]int64
	busy      bool
}

// lookAt evaluates the counters of the drive, and reports whether it has become silent, or is not silent any more.
func (s *silence) lookAt(w *driveWork) (changed bool) {
	s.look++
	was, old := s.silent, false
	for k := range s.kinds {
		c := &s.kinds[k]
		if c.quiet++; !w.busy || w.completed[k] != c.completed || c.all == 0 {
			c.quiet = 0
		}
		c.completed = w.completed[k]
		oldest := &c.recent[s.look%silentLooks]
		c.old, *oldest = c.old+*oldest, 0
		s.silent = s.silent || c.old > 0 && c.quiet >= silentLooks
		old = old || c.old > 0
	}
	s.silent = s.silent && old
	return s.silent != was
}

// waits reports whether the store has requests of a kind that counts.
func (s *silence) waits() bool {
	return s.silent || s.kinds[readKind].all+s.kinds[writeKind].all > 0
}

// lookForSilence checks whether the drive is silent, when that is due.
func (g *Replicas) lookForSilence() {
	s := &g.silence
	if s.lookNS == 0 || g.clockNS < s.lookNS {
		return
	}
	s.lookNS = 0
	if s.lookAt(g.driveWork()) {
		g.silentChanged()
	}
}

// nextLookNS is when to look next, after the store was given what a turn has for it; 0: never.
func (g *Replicas) nextLookNS() int64 {
	s := &g.silence
	if s.lookNS == 0 && s.waits() && g.cfg.Drive != nil && g.cfg.SilentAfter > 0 {
		s.lookNS = g.clockNS + int64(g.cfg.SilentAfter)/silentLooks
	}
	return s.lookNS
}

// driveWork reads what the drive has done.
func (g *Replicas) driveWork() *driveWork {
	d := g.cfg.Drive
	w := &driveWork{busy: d.Inflight.Load() > 0}
	failed := d.Errors.Load() // an error is a completion, too
	w.completed[readKind] = failed + d.Requests[ssd.Read].Load()
	w.completed[writeKind] = failed + d.Requests[ssd.Write].Load() + d.Requests[ssd.Flush].Load()
	return w
}

// silentChanged logs and reports that the drive has become silent, or is not silent any more. makeReport gives
// memberships up.
func (g *Replicas) silentChanged() {
	if g.silence.silent {
		g.cfg.Log.Error("the drive of a partition completes nothing: ranges that other nodes serve go on without it",
			"partition", g.cfg.ID.String(), "after", g.cfg.SilentAfter)
	} else {
		g.cfg.Log.Info("the drive of a partition completes requests again", "partition", g.cfg.ID.String())
	}
	g.isSilent.Store(g.silence.silent)
	g.makeReport()
}

// Silent reports whether the drive takes requests and completes none.
func (g *Replicas) Silent() bool { return g.isSilent.Load() }
