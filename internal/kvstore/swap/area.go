package swap

import (
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/swap/guest"
	"jbofd/internal/pipeline"
)

// Append asks an Area to write a record.
type Append struct {
	// Home is the number that Attach gave.
	Home int
	Kind guest.Kind
	Key  []byte
	// Value is copied when the Area has taken the Append.
	Value []byte
	// Tag comes back in the Outcomes; Tenant in the I/O.
	Tag    uint32
	Tenant uint32
}

// Result is what became of an Append.
type Result uint8

// Results.
const (
	// Stored: the record is durable.
	Stored Result = iota
	// Refused: there is no room or the device fails. Nothing was or will be written.
	Refused
	// Doubtful: writing has failed and is tried again. A restart may find the record or not; when it is durable at last,
	// Stored follows with the same tag.
	Doubtful
)

// Outcome answers an Append.
type Outcome struct {
	Home int
	Tag  uint32
	// Result is what happened. Outcomes of one area come in the order of the log.
	Result Result
	// Place is where in the log the record is, if Stored, At how far behind its group's beginning, and End where
	// the group ends.
	Place, End uint64
	At         uint32
}

// AreaActions is what an Area's Turn wants done. The driver keeps it and empties the slices.
type AreaActions struct {
	// IOs are in the area; at most one of the groups and one of the superblock are under way.
	IOs      []IO
	Outcomes []Outcome
	// WakeNS is when Turn is to be called at the latest even if nothing happens; 0: never.
	WakeNS int64
}

// IO is a request to a device. Offset and length are whole blocks.
type IO struct {
	// Area is whose it is in the Home's list of areas, -1 for the home's own partition. An Area leaves it 0.
	Area int
	// Op is pipeline.Read or Write. FUA: complete only when durable.
	Op         pipeline.Op
	FUA        bool
	Background bool
	Tenant     uint32
	Offset     int64
	// Buf belongs to the device until Complete.
	Buf []byte
	// Tag is for Complete.
	Tag uint32
}

// Tags of an Area's I/Os.
const (
	groupTag = iota
	superTag
	// AreaTags is how many there are.
	AreaTags
)

const (
	// maxFailures is after how many failed writes of a group those in it are told, and retryNS how long
	// after a failure it is tried again: at first at once, as a device may have dropped one request.
	maxFailures = 3
	retryNS     = 100e6
	// headParts: LogHead is written to a superblock when this part of the log has become free.
	headParts = 16
	// deleteParts is the part of the log that only Deletes may use.
	deleteParts = 16
)

// Area is the machine of one swap area: it appends what homes send, and forgets what they have released. Made
// by OpenArea.
type Area struct {
	cfg   AreaConfig
	log   guest.Log
	super guest.Superblock
	now   int64
	out   []Outcome
	// head is where the log begins as the superblock has it: what is before may be overwritten. tail is where the next group
	// goes, durable where the log ends for sure.
	// Invariant: head <= durable <= tail <= head + log.LenBytes
	head, tail, durable uint64
	homes               []homeOfArea
	// open takes records, flight is being written, or will be again at retryNS after so many failures.
	open, flight group
	flying       bool
	failures     int
	atDevice     bool
	retryNS      int64
	// superWriting: a superblock with newHead is being written; short: somebody was refused since, superRetryNS: not before.
	superWriting bool
	newHead      uint64
	short        bool
	superRetryNS int64
	stats        AreaStats
}

// AreaStats count since the opening, but for LiveBytes and LogBytes, which are as of now.
type AreaStats struct {
	// Records were stored in Groups, WrittenBytes with all that is around them.
	Records, Groups, WrittenBytes int64
	// Refusals are Appends for which there was no room, Failures groups that could not be written.
	Refusals, Failures int64
	// LiveBytes is how much of LogBytes lies between LogHead and LogTail.
	LiveBytes, LogBytes int64
}

// homeOfArea is what an area knows of a home.
type homeOfArea struct {
	uuid [16]byte
	// released: no record before counts. last is the place of the newest record; 0 if there is none.
	released, last uint64
	attached       bool
	// guests are what was found at the opening, until the home has taken them.
	guests map[guestKey]Guest
}

// group is a group being filled or written.
type group struct {
	buf  []byte
	used int
	of   []recordOf
}

// recordOf is a record of a group.
type recordOf struct {
	home int
	tag  uint32
	at   uint32
}

// Attachment is what a home gets when it comes to an area.
type Attachment struct {
	// Home is the home's number there.
	Home int
	// Guests are the newest records of all its keys that were found, in the order of the log.
	Guests []Guest
	// Tail is where the log ends for sure.
	Tail uint64
}

// Attach brings a home to the area. A home with guests can come again only after the area was opened again, because
// only that finds them.
//
// Errors: ErrAttached.
func (a *Area) Attach(home [16]byte) (Attachment, error) {
	n := a.homeOf(home)
	h := &a.homes[n]
	if h.attached && h.live() {
		return Attachment{}, ErrAttached
	}
	h.attached = true
	at := Attachment{Home: n, Guests: inOrder(h.guests), Tail: a.durable}
	h.guests = nil
	return at, nil
}

// homeOf returns the number of a home.
func (a *Area) homeOf(home [16]byte) int {
	for i := range a.homes {
		if a.homes[i].uuid == home {
			return i
		}
	}
	a.homes = append(a.homes, homeOfArea{uuid: home})
	return len(a.homes) - 1
}

// Release says that no record of a home before place counts any more, which is the beginning or the end of a
// group.
func (a *Area) Release(home int, place uint64) {
	h := &a.homes[home]
	h.released = max(h.released, place)
}

// UUID is the area's.
func (a *Area) UUID() [16]byte { return a.super.UUID() }

// Log says how places become offsets.
func (a *Area) Log() guest.Log { return a.log }

// Failing reports that writing fails: new records are refused.
func (a *Area) Failing() bool { return a.failures >= maxFailures }

// Used is the part of the log in use, in thousandths.
func (a *Area) Used() int { return int((a.tail - a.head) * 1000 / a.log.LenBytes) }

// Idle reports that nothing is under way.
func (a *Area) Idle() bool { return !a.flying && a.open.used == 0 && !a.superWriting }

// Stop asks for a superblock that spares the next opening what nobody wants any more. No Append may follow.
func (a *Area) Stop() { a.short = true }

// Stats returns the counters.
func (a *Area) Stats() AreaStats {
	s := a.stats
	s.LiveBytes, s.LogBytes = int64(a.tail-a.head), int64(a.log.LenBytes)
	return s
}

// Submit takes an Append, or reports that it must be brought again after a Turn with completions: in the order
// in which they are brought, records stand in the log.
//
// hot: 0 allocs
func (a *Area) Submit(p *Append) bool {
	n := guest.RecordBytes(len(p.Value))
	g := &a.open
	switch {
	case a.Failing():
		a.refuse(p)
		return true
	case g.used+n > len(g.buf) || g.used >= a.cfg.GroupBytes:
		return false
	case !a.room(p.Kind, n):
		a.short = true
		a.stats.Refusals++
		a.refuse(p)
		return true
	}
	if g.used == 0 {
		g.used = guest.GroupHeaderBytes
	}
	r := guest.Record(g.buf[g.used : g.used+n])
	clear(r[:guest.RecordHeaderBytes])
	clear(r[n-guest.RecordUnit:])
	r.SetKind(p.Kind)
	r.SetKey(p.Key)
	r.SetHome(a.homes[p.Home].uuid)
	r.SetValueLen(len(p.Value))
	r.SetAt(uint32(g.used))
	copy(r.Value(), p.Value)
	g.of = append(g.of, recordOf{home: p.Home, tag: p.Tag, at: uint32(g.used)})
	if len(g.of) == 1 {
		a.cfg.tenant = p.Tenant
	}
	g.used += n
	return true
}

func (a *Area) refuse(p *Append) {
	a.out = append(a.out, Outcome{Home: p.Home, Tag: p.Tag, Result: Refused})
}

// room reports whether the open group may become n bytes longer.
func (a *Area) room(k guest.Kind, n int) bool {
	size := uint64(format.RoundUp(max(a.open.used, guest.GroupHeaderBytes)+n, a.super.BlockSize()))
	reserve := uint64(0)
	if k != guest.Delete {
		reserve = a.log.LenBytes / deleteParts
	}
	return a.placeFor(size)+size+reserve <= a.head+a.log.LenBytes
}

// placeFor is where a group of that length goes.
func (a *Area) placeFor(size uint64) uint64 {
	if a.log.Rest(a.tail) < size {
		return a.log.NextLap(a.tail)
	}
	return a.tail
}

// Complete takes the completion of an I/O.
//
// hot: 0 allocs
func (a *Area) Complete(tag uint32, err error) {
	if tag == superTag {
		a.superWriting = false
		if err != nil {
			a.superRetryNS = a.now + retryNS
			return
		}
		a.head = a.newHead
		return
	}
	invariants.Check(a.atDevice, "swap: a completion of no group")
	a.atDevice = false
	if err != nil {
		a.failures++
		a.stats.Failures++
		if a.failures == maxFailures {
			a.tell(&a.flight, Doubtful)
			a.tell(&a.open, Refused)
			a.open.reset()
		}
		if a.failures > 1 {
			a.retryNS = a.now + retryNS
		}
		return
	}
	a.failures, a.retryNS = 0, 0
	a.durable = a.tail
	a.tell(&a.flight, Stored)
	a.stats.Records += int64(len(a.flight.of))
	a.flight.reset()
	a.flying = false
}

func (g *group) reset() { g.used, g.of = 0, g.of[:0] }

// tell ends, or goes on with, all of a group.
func (a *Area) tell(g *group, r Result) {
	place := uint64(0)
	if r == Stored {
		place = guest.Group(g.buf).Place()
	}
	for _, o := range g.of {
		a.out = append(a.out, Outcome{Home: o.home, Tag: o.tag, Result: r, Place: place + uint64(o.at), End: a.durable, At: o.at})
	}
}

// Turn does what became possible and appends what it wants done to out. The driver calls it after a batch of
// Submit, Complete and Release and when WakeNS has come.
//
// hot: 0 allocs
func (a *Area) Turn(nowNS int64, out *AreaActions) {
	a.now = nowNS
	out.WakeNS = 0
	out.Outcomes = append(out.Outcomes, a.out...)
	a.out = a.out[:0]
	if !a.flying && a.open.used > 0 {
		a.place()
	}
	if a.flying && !a.atDevice {
		if nowNS >= a.retryNS {
			a.atDevice = true
			g := guest.Group(a.flight.buf)
			out.IOs = append(out.IOs, IO{Op: pipeline.Write, FUA: a.cfg.FUA, Tenant: a.cfg.flightTenant, Offset: a.log.Offset(g.Place()), Buf: g[:g.LengthBytes()], Tag: groupTag})
		} else {
			out.WakeNS = a.retryNS
		}
	}
	a.writeSuper(out)
}

// place gives the open group its place: it is complete then, but for being written.
func (a *Area) place() {
	a.open, a.flight = a.flight, a.open
	a.flying = true
	a.cfg.flightTenant = a.cfg.tenant
	f := &a.flight
	g := guest.Group(f.buf)
	size := format.RoundUp(f.used, a.super.BlockSize())
	clear(g[f.used:size])
	clear(g[:guest.GroupHeaderBytes])
	a.tail = a.placeFor(uint64(size))
	g.SetPlace(a.tail)
	g.SetLengthBytes(size)
	g.SetRecords(len(f.of))
	for _, o := range f.of {
		r := guest.Record(g[o.at:])
		r.SetPlace(a.tail + uint64(o.at))
		r.Seal(a.log.Seed(r.Place()))
		a.homes[o.home].last = r.Place()
	}
	g.Seal(a.log.Seed(a.tail))
	a.tail += uint64(size)
	a.stats.Groups++
	a.stats.WrittenBytes += int64(size)
	invariants.Check(a.tail <= a.head+a.log.LenBytes, "swap: the log overtakes its own head")
}

// oldest is the first place that somebody may still want: that of a group.
func (a *Area) oldest() uint64 {
	at := a.durable
	for i := range a.homes {
		// What a home has in the group that is under way lies behind durable.
		if h := &a.homes[i]; h.live() && h.released < at {
			at = h.released
		}
	}
	return max(at, a.head)
}

// writeSuper moves LogHead on, when it is worth a write or somebody needs the room.
func (a *Area) writeSuper(out *AreaActions) {
	if a.superWriting {
		return
	}
	at := a.oldest()
	if free := at - a.head; free == 0 || free < a.log.LenBytes/headParts && !a.short {
		return
	}
	if a.now < a.superRetryNS {
		if out.WakeNS == 0 || a.superRetryNS < out.WakeNS {
			out.WakeNS = a.superRetryNS
		}
		return
	}
	// The other copy stays what it is until this one is durable, and after a failure this one is written again.
	if a.super.LogHead() == a.head {
		a.super.SetGeneration(a.super.Generation() + 1)
	}
	a.super.SetLogHead(at)
	a.super.Seal()
	a.newHead, a.superWriting, a.short = at, true, false
	out.IOs = append(out.IOs, IO{Op: pipeline.Write, FUA: a.cfg.FUA, Background: true, Offset: superOffset(a.super.Generation()), Buf: a.super, Tag: superTag})
}

// superOffset is where the superblock of a generation is.
func superOffset(generation uint64) int64 {
	return int64(generation&1) * guest.SuperblockBytes
}
