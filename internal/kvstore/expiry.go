package kvstore

import (
	"math"

	"jbofd/internal/kvstore/format"
)

// What has expired is dropped whenever its segment is written, and compaction does not move its value. What is left, in
// segments that nobody writes, is found in rounds: a round looks at every segment once, in the order of their numbers,
// as slowly as an audit. There is no round before something can have expired, and none at all in a store in which
// nothing expires. If room is short a round is faster, and soon followed by the next, but only as long as it wins room:
// where objects are stored again before they expire, rounds find nothing, whatever was due.
//
// Identities are dropped in the same way, but as nearly every write may have one, and each is short, they begin a round
// only when many of them have come, compared with the key log that the round reads, and such a round is never fast.

const (
	// expiryWindow is how many segments a round looks at at once, expirySkips how many empty ones it passes in a turn.
	expiryWindow = 16
	expirySkips  = 4096
	// expiryBytesPerSec is how fast a round reads, urgentBytesPerSec if room is short and the round wins at least that
	// part of what it reads.
	expiryBytesPerSec = 4 << 20
	urgentBytesPerSec = 64 << 20
	urgentPart        = 64
	// expiryPauseNS is the time between two rounds, expiryShortNS if room is short and the first has won that much.
	expiryPauseNS = 10e9
	expiryShortNS = 1e9
	// identityPart: identities begin a round when those that have come since the last one are that part of what is
	// live in the key log. maxIdentityWait is how many seconds later the round begins at most.
	identityPart    = 16
	maxIdentityWait = 86400
	// expiryRetry is after how many seconds a round looks again for what is in a segment that it could not read.
	expiryRetry = 600
)

// expiryState is the state of the round that is running, or of the last one.
type expiryState struct {
	// first is a time, in unix seconds, before which nothing expires; 0: nothing expires at all. next is the same for
	// what the round has left so far.
	first, next uint32
	// identities: there may be some. identityBytes is the length of those that have come since they were many for the
	// last time. identityDue is when a round for these begins, in unix seconds, or 0.
	identities    bool
	identityBytes int64
	identityDue   uint32
	// running: looked segments are done or among those that pending ops look at.
	running bool
	looked  uint32
	pending int
	// read is how many bytes the round has read, won how many it has made obsolete.
	read, won int64
	// skipping: the round passes empty segments, and goes on in the next turn.
	skipping bool
	// dueNS is when the next segment may be read, endNS when the last round has ended.
	dueNS, endNS int64
}

// NextVersion gives a version to an object that is not in the store for now. Requests leave 2^61 of them at least.
func (s *Store) NextVersion() uint64 {
	s.clock++
	return s.clock
}

// GreatestVersion returns the greatest version that the store has given or taken.
func (s *Store) GreatestVersion() uint64 { return s.clock }

// NoteVersion says that a version was given, so that it is not given again.
func (s *Store) NoteVersion(version uint64) { s.clock = max(s.clock, version) }

// maxWallBehind is by how many seconds the clock may be behind what it was without the store following it.
const maxWallBehind = 86400

// SetWall sets the time of day in unix seconds, for each Turn, and for Submit if that comes first. The store ignores a
// time that is earlier than the last one by a day or less, so that no object that has expired exists again. If the
// clock is set back by more, the earlier time is assumed to have been wrong: if the store did not follow, objects that
// hosts store for an hour would not exist at all until the clock reaches that time again.
func (s *Store) SetWall(unix uint32) {
	if unix > s.wall || s.wall-unix > maxWallBehind {
		s.wall = unix
	}
	if s.reads != nil {
		s.reads.Wall = s.wall
	}
}

// restoreWall makes the time of a superblock that of the store, unless the store was told another one that counts.
func (s *Store) restoreWall(unix uint32) {
	told := s.wall
	if s.wall = unix; told == 0 {
		told = unix
	}
	s.SetWall(told)
}

// noteExpiry notes that something expires at a time; 0: never.
func (s *Store) noteExpiry(unix uint32) {
	for _, t := range []*uint32{&s.expiry.first, &s.expiry.next} {
		if unix != 0 && (*t == 0 || unix < *t) {
			*t = unix
		}
	}
}

// noteIdentity notes that a key has got an identity, and begins a round if they are many.
func (s *Store) noteIdentity(until uint32) {
	e := &s.expiry
	e.identities = true
	if e.identityBytes += format.IdentityBytes; until != 0 && e.identityDue == 0 &&
		e.identityBytes > s.pool.KeyLive/identityPart {
		e.identityBytes, e.identityDue = 0, min(until, s.wall+maxIdentityWait)
	}
}

// begin is when the next round may begin, in unix seconds, or 0.
func (e *expiryState) begin() uint32 {
	if e.first == 0 || e.identityDue != 0 && e.identityDue < e.first {
		return e.identityDue
	}
	return e.first
}

// dropExpired drops from an active segment what has expired, and reports whether there was anything.
func (s *Store) dropExpired(a *activeSeg) (dropped bool) {
	seg := format.Segment(a.buf)
	a.won = 0
	may := s.expiry.identities || s.expiry.first != 0 && s.wall >= s.expiry.first
	if len(s.drops.list) == 0 && (!may || !seg.MayDrop(s.wall)) {
		return false
	}
	length, dead := seg.LengthBytes(), len(a.dead)
	for at := seg.First(); at < seg.LengthBytes(); {
		it := seg.Item(at)
		if !it.HasKey() {
			at += it.LengthBytes()
			continue
		}
		if it.Expired(s.wall) || s.isDropped(it) {
			if !it.Gone() {
				s.kill(a, at)
				seg.Truncate(at)
				a.dropped++
			}
			seg.SetExpiry(at, false, 0)
			seg.Item(at).SetGone()
			dropped = true
		}
		if seg.DropIdentities(at, s.wall) {
			dropped = true
		}
		if seg.Settle(at) {
			dropped = true
			continue
		}
		at += seg.Item(at).LengthBytes()
	}
	a.won = length - seg.LengthBytes()
	for _, d := range a.dead[dead:] {
		a.won += int(d.bytes)
	}
	return dropped
}

// expires reports whether the item at an offset in a segment, or the key whose value it is a part of, has expired.
func (s *Store) expires(seg format.Segment, at int) bool {
	return s.expiry.first != 0 && seg.Item(seg.KeyOf(at)).Expired(s.wall)
}

// isShort reports that room is short, so that what has expired should give way at once.
func (s *Store) isShort() bool {
	return s.pool.Live+s.spare() > s.budget.MaxLive/8*7 || s.stalled()
}

// untilDue is in how many seconds a time comes that is in unix seconds; 0 is never.
func (s *Store) untilDue(unix uint32) int64 {
	if unix == 0 {
		return math.MaxInt64
	}
	return max(0, int64(unix)-int64(s.wall))
}

// expiryStep begins a round if something may have expired, or continues it.
func (s *Store) expiryStep() {
	e := &s.expiry
	if s.stopping {
		return
	}
	objects, identities := s.untilDue(e.first) == 0, s.untilDue(e.identityDue) == 0
	if !e.running && !objects && !identities {
		if after := min(s.untilDue(e.first), s.untilDue(e.identityDue)); after != math.MaxInt64 {
			s.wake(s.now + min(after, 3600)*1e9)
		}
		return
	}
	short := objects && s.isShort()
	due := e.dueNS
	switch {
	case !e.running && e.endNS == 0:
		due = 0
	case !e.running && short && e.pays():
		due = e.endNS + expiryShortNS
	case !e.running:
		due = e.endNS + expiryPauseNS
	}
	if s.now < due {
		s.wake(due)
		return
	}
	if !e.running {
		e.running, e.next, e.looked, e.dueNS, e.read, e.won = true, 0, 0, s.now, 0, 0
		if identities {
			e.identityDue = 0
		}
	}
	e.skipping = false
	for skipped := 0; e.looked < s.tbl.Len() && e.pending < expiryWindow && s.freeInt.N > maxMoves/4; {
		n := e.looked
		e.looked++
		if s.tbl.Get(n) == 0 {
			if skipped++; skipped == expirySkips {
				e.skipping = true
				s.wake(s.now + 1)
				return
			}
			continue
		}
		e.pending++
		i := s.opLinks.Pop(&s.freeInt)
		s.ops[i] = op{kind: opExpire, ready: true, segment: n, parts: [2]part{noPart, noPart}}
		rate := max(s.cfg.ScrubBytesPerSec, expiryBytesPerSec)
		if short && e.pays() {
			rate = max(rate, urgentBytesPerSec)
		}
		length := int64(s.tbl.Get(n).MaxBytes())
		e.read += length
		e.dueNS = max(e.dueNS, s.now-1e9) + length*1e9/rate
		s.dispatch(i)
		if s.now < e.dueNS {
			s.wake(e.dueNS)
			break
		}
	}
	if e.looked == s.tbl.Len() && e.pending == 0 {
		e.running, e.first, e.endNS = false, e.next, s.now
		s.progress++
	}
}

// pays reports whether the round, or the last one if none is running, wins room enough to be fast.
func (e *expiryState) pays() bool { return e.won > 0 && e.won >= e.read/urgentPart }

// lookedForExpired ends the look of a round at a segment.
func (s *Store) lookedForExpired(st Status) {
	s.expiry.pending--
	s.progress++
	if st != OK {
		s.noteExpiry(s.wall + expiryRetry)
	}
}
