package swap

import (
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// Append asks an Area to write a record.
type Append struct {
	// Source is the number that Attach gave.
	Source int
	Kind   format.SwapKind
	Key    []byte
	// Value is copied when the Area takes the Append.
	Value []byte
	// Version is that of the object, or of the Delete.
	Version uint64
	// Tag comes back in the Outcomes; Tenant in the I/O.
	Tag    uint32
	Tenant tenant.ID
}

// Result is the outcome of an Append.
type Result uint8

// Results.
const (
	// Stored: the record is durable, so that the PUT may be answered.
	Stored Result = iota
	// Refused: there is no space, or the device fails. Nothing was or will be written.
	Refused
	// Indeterminate: the write has failed and is tried again. A restart may find the record or not. When it is durable
	// at last, Stored follows with the same tag.
	Indeterminate
)

// Outcome answers an Append.
type Outcome struct {
	Source int
	Tag    uint32
	// Result is what happened. Outcomes of one area are in the order of the log.
	Result Result
	// Place is the place of a Stored record in the log, At its offset in its group, and End the end of the group.
	Place, End format.LogOffset
	At         uint32
}

// AreaActions are what an Area's Turn wants done. The driver keeps the value and empties the slices.
type AreaActions struct {
	// IOs are in the area. At most one group and one superblock are under way. They are FUA where the device has a
	// volatile cache: an Outcome with Stored promises that the record survives a loss of power.
	IOs      []IO
	Outcomes []Outcome
	// WakeNS is when Turn must be called at the latest, even if nothing happens before; 0: never.
	WakeNS int64
}

// IO is a request to a device. Offset and length are whole blocks.
type IO struct {
	// Area is an index in SourceConfig.Areas, or -1 for the source's own partition. In the actions of an Area it is 0.
	Area int
	// Op is pipeline.Read or Write. FUA: the write must not complete before it is durable.
	Op         pipeline.Op
	FUA        bool
	Background bool
	Tenant     tenant.ID
	Offset     units.ExtentOffset
	// Buf belongs to the device until Complete.
	Buf []byte
	// Tag is for Complete.
	Tag uint32
}

// Tags of an Area's I/Os.
const (
	groupTag = iota
	superTag
	// AreaTags is the number of tags.
	AreaTags
)

const (
	// maxFailures is how many writes of a group may fail before the outcome of its records becomes indeterminate.
	// retryNS is how long after a failure the next write follows. The first follows at once, because a device may have
	// dropped one request.
	maxFailures = 3
	retryNS     = 100e6
	// headWriteParts: LogHead is written to a superblock when this part of the log has become free.
	headWriteParts = 16
	// deleteReserveParts: this part of the log is reserved for Deletes.
	deleteReserveParts = 16
)

// Area is the machine of one swap area. It appends the records that sources send, and reuses the space of those that
// they have released. OpenArea makes one.
type Area struct {
	cfg   AreaConfig
	log   format.SwapLog
	super format.AreaSuperblock
	now   int64
	out   []Outcome
	// head is LogHead as the durable superblock has it: what is before it may be overwritten. tail is where the next
	// group goes, and durable the end of the last durable group. Invariant: head <= durable <= tail <= head +
	// log.LenBytes
	head, tail, durable format.LogOffset
	sources             []sourceState
	// open is the group to which records are appended. While flying is set, flight is the group that is being written
	// (atDevice) or will be written again at retryNS.
	open, flight group
	flying       bool
	failures     int
	atDevice     bool
	retryNS      int64
	// superWriting: a superblock with newHead is being written. short: a source lacks space, so that LogHead should
	// advance as soon as it can. superRetryNS is when to try again after a failure.
	superWriting bool
	newHead      format.LogOffset
	short        bool
	superRetryNS int64
	// superFailed: the last write of a superblock has failed. upgrades is how many superblocks are still to be written
	// because the area was of an older version.
	superFailed bool
	upgrades    int
	stats       AreaStats
}

// AreaStats are counters since the opening, except LiveBytes and LogBytes, which are current values.
type AreaStats struct {
	// Records were stored in Groups, for which WrittenBytes were written.
	Records, Groups, WrittenBytes int64
	// Refusals are Appends for which there was no space, Failures groups that could not be written.
	Refusals, Failures int64
	// LiveBytes of the log's LogBytes lie between LogHead and LogTail.
	LiveBytes, LogBytes int64
}

// sourceState is what an area knows about a source.
type sourceState struct {
	id uuid.UUID
	// released: no record before this place counts. last is the place of the newest record, 0 if there is none.
	released, last format.LogOffset
	attached       bool
	// records are those that an opening or a Search has found, until the source attaches.
	records map[recordKey]FoundRecord
}

// group is a group that is being filled or written.
type group struct {
	buf  []byte
	used int
	of   []recordOf
}

// recordOf is a record of a group.
type recordOf struct {
	source int
	tag    uint32
	at     uint32
}

// Attachment is what a source gets when it attaches to an area.
type Attachment struct {
	// Source is the number of the source in the area.
	Source int
	// Records are the newest records of all keys of the source that were found, in the order of the log.
	Records []FoundRecord
	// Tail is the end of the last durable group.
	Tail format.LogOffset
}

// Attach connects a source with the area. A source that has records here can attach again only after they were found:
// by an opening of the area, or by Search and Adopt.
//
// Errors: ErrAttached.
func (a *Area) Attach(source uuid.UUID) (Attachment, error) {
	n := a.sourceOf(source)
	st := &a.sources[n]
	if st.attached && st.live() {
		return Attachment{}, ErrAttached
	}
	st.attached = true
	at := Attachment{Source: n, Records: inOrder(st.records), Tail: a.durable}
	st.records = nil
	return at, nil
}

// sourceOf returns the number of a source.
func (a *Area) sourceOf(source uuid.UUID) int {
	for i := range a.sources {
		if a.sources[i].id == source {
			return i
		}
	}
	a.sources = append(a.sources, sourceState{id: source})
	return len(a.sources) - 1
}

// Release says that no record of a source before place counts any more. The place is the beginning or the end of a
// group.
func (a *Area) Release(source int, place format.LogOffset) {
	st := &a.sources[source]
	st.released = max(st.released, place)
}

// UUID identifies the area.
func (a *Area) UUID() uuid.UUID { return a.super.UUID() }

// Log translates the area's places to offsets.
func (a *Area) Log() format.SwapLog { return a.log }

// Failing reports that writes fail, so that new records are refused.
func (a *Area) Failing() bool { return a.failures >= maxFailures }

// Used is the used part of the log, in thousandths.
func (a *Area) Used() int { return int(a.tail.Sub(a.head) * 1000 / a.log.LenBytes) }

// Idle reports that nothing is under way.
func (a *Area) Idle() bool { return !a.flying && a.open.used == 0 && !a.superWriting }

// Stop asks for a superblock that spares the next opening the records that do not count any more. No Append may follow.
func (a *Area) Stop() { a.short = true }

// Stats returns the counters.
func (a *Area) Stats() AreaStats {
	s := a.stats
	s.LiveBytes, s.LogBytes = int64(a.tail.Sub(a.head)), int64(a.log.LenBytes)
	return s
}

// Submit takes an Append, or reports that it must be submitted again after a Turn with completions. Records are in the
// log in the order in which they were submitted.
//
// hot: 0 allocs
func (a *Area) Submit(p *Append) bool {
	n := format.SwapRecordBytes(len(p.Value))
	g := &a.open
	switch {
	case a.Failing() || a.upgrades > 0:
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
		g.used = format.SwapGroupHeaderBytes
	}
	r := format.SwapRecord(g.buf[g.used : g.used+n])
	clear(r[:format.SwapRecordHeaderBytes])
	clear(r[n-format.SwapRecordUnit:])
	r.SetKind(p.Kind)
	r.SetVersion(p.Version)
	r.SetKey(p.Key)
	r.SetSource(a.sources[p.Source].id)
	r.SetValueLen(len(p.Value))
	r.SetAt(uint32(g.used))
	copy(r.Value(), p.Value)
	g.of = append(g.of, recordOf{source: p.Source, tag: p.Tag, at: uint32(g.used)})
	if len(g.of) == 1 {
		a.cfg.tenant = p.Tenant
	}
	g.used += n
	return true
}

func (a *Area) refuse(p *Append) {
	a.out = append(a.out, Outcome{Source: p.Source, Tag: p.Tag, Result: Refused})
}

// room reports whether the open group may become n bytes longer.
func (a *Area) room(k format.SwapKind, n int) bool {
	size := format.RoundUp(max(a.open.used, format.SwapGroupHeaderBytes)+n, a.super.BlockSize())
	reserve := 0
	if k != format.SwapDelete {
		reserve = int(a.log.LenBytes / deleteReserveParts)
	}
	return a.placeFor(size).Add(size+reserve) <= a.log.LapEnd(a.head)
}

// placeFor returns the place of a group of that length.
func (a *Area) placeFor(size int) format.LogOffset {
	if a.log.Rest(a.tail) < uint64(size) {
		return a.log.NextLap(a.tail)
	}
	return a.tail
}

// Complete ends an I/O.
//
// hot: 0 allocs
func (a *Area) Complete(tag uint32, err error) {
	if tag == superTag {
		a.superWriting = false
		if a.superFailed = err != nil; err != nil {
			a.superRetryNS = a.now + retryNS
			return
		}
		a.head = a.newHead
		a.upgrades = max(0, a.upgrades-1)
		return
	}
	invariants.Check(a.atDevice, "swap: a completion of no group")
	a.atDevice = false
	if err != nil {
		a.failures++
		a.stats.Failures++
		if a.failures == maxFailures {
			a.reportGroup(&a.flight, Indeterminate)
			a.reportGroup(&a.open, Refused)
			a.open.reset()
		}
		if a.failures > 1 {
			a.retryNS = a.now + retryNS
		}
		return
	}
	a.failures, a.retryNS = 0, 0
	a.durable = a.tail
	a.reportGroup(&a.flight, Stored)
	a.stats.Records += int64(len(a.flight.of))
	a.flight.reset()
	a.flying = false
}

func (g *group) reset() { g.used, g.of = 0, g.of[:0] }

// reportGroup reports a result for all records of a group.
func (a *Area) reportGroup(g *group, r Result) {
	place := format.LogOffset(0)
	if r == Stored {
		place = format.SwapGroup(g.buf).Place()
	}
	for _, o := range g.of {
		a.out = append(a.out, Outcome{Source: o.source, Tag: o.tag, Result: r, Place: place.Add(int(o.at)),
			End: a.durable, At: o.at})
	}
}

// Turn does everything that has become possible and appends what it wants done to out. The driver calls it after each
// batch of Submit, Complete and Release, and at WakeNS.
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
			g := format.SwapGroup(a.flight.buf)
			out.IOs = append(out.IOs, IO{Op: pipeline.Write, FUA: a.cfg.FUA, Tenant: a.cfg.flightTenant,
				Offset: a.log.Offset(g.Place()), Buf: g[:g.LengthBytes()], Tag: groupTag})
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
	g := format.SwapGroup(f.buf)
	size := format.RoundUp(f.used, a.super.BlockSize())
	clear(g[f.used:size])
	clear(g[:format.SwapGroupHeaderBytes])
	a.tail = a.placeFor(size)
	g.SetPlace(a.tail)
	g.SetLengthBytes(size)
	g.SetRecords(len(f.of))
	for _, o := range f.of {
		r := format.SwapRecord(g[o.at:])
		r.SetPlace(a.tail.Add(int(o.at)))
		r.Seal(a.log.Seed(r.Place()))
		a.sources[o.source].last = r.Place()
	}
	g.Seal(a.log.Seed(a.tail))
	a.tail = a.tail.Add(size)
	a.stats.Groups++
	a.stats.WrittenBytes += int64(size)
	invariants.Check(a.tail <= a.log.LapEnd(a.head), "swap: the log overtakes its own head")
}

// oldest is the first place that a source may still need.
func (a *Area) oldest() format.LogOffset {
	at := a.durable
	for i := range a.sources {
		// Records in the group that is being written lie behind durable.
		if st := &a.sources[i]; st.live() && st.released < at {
			at = st.released
		}
	}
	return max(at, a.head)
}

// writeSuper advances LogHead, if enough has become free or a source lacks space.
func (a *Area) writeSuper(out *AreaActions) {
	if a.superWriting {
		return
	}
	at := a.oldest()
	free := at.Sub(a.head)
	if a.upgrades == 0 && (free == 0 || free < a.log.LenBytes/headWriteParts && !a.short) {
		return
	}
	if a.now < a.superRetryNS {
		if out.WakeNS == 0 || a.superRetryNS < out.WakeNS {
			out.WakeNS = a.superRetryNS
		}
		return
	}
	// After a failure the same copy is written again, so that the other one stays valid.
	if !a.superFailed {
		a.super.SetGeneration(a.super.Generation() + 1)
	}
	a.super.SetLogHead(at)
	a.super.Seal()
	a.newHead, a.superWriting, a.short = at, true, false
	out.IOs = append(out.IOs, IO{Op: pipeline.Write, FUA: a.cfg.FUA, Background: true,
		Offset: superOffset(a.super.Generation()), Buf: a.super, Tag: superTag})
}

// superOffset returns the offset of the superblock of a generation.
func superOffset(generation uint64) units.ExtentOffset {
	return units.ExtentOffset(generation&1) * format.SuperblockBytes
}
