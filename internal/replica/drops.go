package replica

import (
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// Drops gives back the room of ranges that a partition has lost to others: what it still has of them is dropped. It is
// a machine for one partition, and looks at one range at a time.
//
//	         no member, range full                      a Scan finds nothing
//	kept ──────────────────────────> left ── AfterNS ──────────────────────────> empty
//	 ^ <────────────────────────────  │ ^                                          │
//	 │   member, or not full          │ └─────────────── off the list              │ member
//	 │                                └── a Scan finds something: a Drop ──> dropping
//	 └─────────────────────────────────────────────────────────────────────────────┘
//
// What there is counts for nothing, because the members have it, and whoever is filled again is given all anew. It is
// kept all the same until the range has had all its members for AfterNS, by views that act: if all members were lost,
// an operator could have the range served with it (view.AcceptLoss).
//
// The clock of a Drop is the greatest version that a Scan has found, so that nothing is covered that comes later. And a
// range whose Drop may still take effect, or is on the list of the store, is Busy: the partition takes no part in its
// chain until that is over. Otherwise what a pass has compared or copied could be dropped behind it.
//
// Its driver calls Turn after each call of another method, and at WakeNS.
type Drops struct {
	cfg    DropsConfig
	ranges []leftRange
	// dropping are those whose Drop is not over, in their order.
	dropping []int
	// next is the range at which to go on looking for one that is due, lookNS when to do so, pollNS when to ask for the
	// Drops that are not over.
	next           int
	lookNS, pollNS int64
	look           lookThrough
	stats          DropStats
}

// DropsConfig describes Drops.
type DropsConfig struct {
	// Ranges is the number of ranges, each of which has 2^Bits positions.
	Ranges int
	Bits   uint8
	// AfterNS is how long a range must have been full without the partition.
	AfterNS int64
}

// Standing is what views say of a range.
type Standing struct {
	// Version counts the changes of the chain.
	Version uint32
	// Member: the partition is in its chain, in whatever state. Full: the chain has all members that it is to have, and
	// each of them serves.
	Member, Full bool
}

// DropStats counts what was dropped.
type DropStats struct {
	// Ranges, Objects and Bytes are what was dropped: Bytes of keys and values, Objects with tombstones.
	Ranges, Objects, Bytes uint64
	// Left is how many ranges may have something that is to be dropped.
	Left int
}

// DropActions are what a Turn wants done. The driver empties them.
type DropActions struct {
	// Request is for the partition's store, if Asks is set: a Scan or a Drop of range Number. If something of the range
	// is still under way in the store, the driver calls Postpone, otherwise Answered with the Reply.
	Asks    bool
	Number  int
	Request kvstore.Request
	// Looks are ranges of which the driver calls Looked.
	Looks []DropLook
	// Free are ranges that are Busy no more, and of which the partition is a member.
	Free []int
	// WakeNS is when Turn must be called at the latest; 0: never.
	WakeNS int64
}

// DropLook asks whether a Drop of a range is over: kvstore.Store.Dropping.
type DropLook struct {
	Number      int
	First, Last uint64
	Hurry       bool
}

type leftState uint8

const (
	rangeKept leftState = iota
	rangeLeft
	rangeEmpty
	rangeDropping
)

// leftRange is what is known of a range.
type leftRange struct {
	Standing
	state leftState
	// tries counts the Drops since it was left.
	tries uint8
	// dueNS is when it may be looked through; while it is dropped, for losses.
	dueNS int64
}

// lookThrough is the Scan of a range.
type lookThrough struct {
	// number is that of the range; running: there is one. asked: the store has a Request. void: its Reply counts for
	// nothing. drop: the Request is a Drop.
	number                     int
	running, asked, void, drop bool
	// losses: it searches for losses alone, because the Drop of the range is not over.
	losses bool
	settlement
	// from is where the next Request begins, key its key.
	from             nvme.KVCursor
	value            []byte
	greatest         uint64
	objects, payload uint64
}

const (
	// mostDropping is how many Drops may be on the list of the store, which has room for 64.
	mostDropping = 16
	// pauseNS is the time between two ranges: there may be tens of thousands that have nothing.
	pauseNS = 5e6
	// pollDropsNS is the interval at which the store is asked whether Drops have ended, pollWantedNS that if a chain
	// waits for one.
	pollDropsNS, pollWantedNS = 1e9, 20e6
	// retryDropNS is the delay before a range is searched again if that has failed, or if it has objects left; it grows
	// up to retryDropMostNS.
	retryDropNS, retryDropMostNS = 1e9, 600e9
	lookBytes                    = 64 << 10
)

// NewDrops returns Drops that know of no view yet.
func NewDrops(cfg DropsConfig) *Drops {
	return &Drops{cfg: cfg, ranges: make([]leftRange, cfg.Ranges)}
}

// Resume says that a Drop of a range is not over that an earlier process has begun.
func (d *Drops) Resume(number int) { d.setDropping(number) }

// See says what views say of a range now.
func (d *Drops) See(now int64, number int, s Standing) {
	r := &d.ranges[number]
	was := r.Standing
	r.Standing = s
	left := !s.Member && s.Full
	switch {
	case r.state == rangeDropping:
		if s.Member && !was.Member {
			d.pollNS = now
		}
	case s.Member:
		r.state = rangeKept
	case r.state == rangeEmpty: // nothing can have got there
	case !left:
		r.state = rangeKept
	case r.state == rangeKept || was.Version != s.Version:
		r.state, r.tries, r.dueNS = rangeLeft, 0, now+d.cfg.AfterNS
		d.lookAt(r.dueNS)
	}
	if l := &d.look; l.running && l.number == number && !(l.drop && l.asked) &&
		(r.state != rangeLeft && !l.losses || was != s) {
		d.endLook()
	}
}

// Busy reports whether a Drop of the range may still take effect, or is on the list: the partition must not take part
// in its chain.
func (d *Drops) Busy(number int) bool { return d.ranges[number].state == rangeDropping }

// Stats returns what was dropped so far.
func (d *Drops) Stats() DropStats {
	s := d.stats
	for i := range d.ranges {
		if r := &d.ranges[i]; r.state == rangeLeft || r.state == rangeDropping || r.state == rangeKept && !r.Member {
			s.Left++
		}
	}
	return s
}

// Turn asks for what is to be done next. authority: the node has authority, so that no newer view acts than it knows,
// and it knows of none that is to act. Without, nothing is asked for; the time of a range goes on all the same, because
// a chain with the same Version has not changed meanwhile.
func (d *Drops) Turn(now int64, authority bool, out *DropActions) {
	if len(d.dropping) > 0 && now >= d.pollNS {
		d.poll(now, out)
	}
	if authority {
		d.proceed(now, out)
	}
	d.wake(now, authority, out)
}

// poll asks for Drops that are not over.
func (d *Drops) poll(now int64, out *DropActions) {
	d.pollNS = now + pollDropsNS
	for i, number := range d.dropping {
		// The store sweeps in their order, so that there is one checkpoint for all.
		hurry := i == mostDropping-1
		if d.ranges[number].Member {
			d.pollNS, hurry = now+pollWantedNS, true
		}
		first, last := d.bounds(number)
		if l := &d.look; !l.asked || !l.drop || l.number != number {
			out.Looks = append(out.Looks, DropLook{Number: number, First: first, Last: last, Hurry: hurry})
		}
	}
}

// Looked says whether a Drop of a range is still not over.
func (d *Drops) Looked(now int64, number int, dropping bool, out *DropActions) {
	r := &d.ranges[number]
	if dropping || r.state != rangeDropping {
		return
	}
	n := 0
	for _, o := range d.dropping {
		if o != number {
			d.dropping[n] = o
			n++
		}
	}
	d.dropping = d.dropping[:n]
	r.state = rangeKept
	d.lookAt(now) // others may have waited for a place
	if l := &d.look; l.running && l.losses && l.number == number {
		d.endLook()
	}
	switch s := r.Standing; {
	case s.Member:
		out.Free = append(out.Free, number)
	case s.Full: // check that no object is left
		r.state, r.dueNS = rangeLeft, now+d.backoff(r)
		d.lookAt(r.dueNS)
	}
}

// backoff is for how long to leave a range alone that was dropped.
func (d *Drops) backoff(r *leftRange) int64 {
	return min(int64(retryDropNS)<<(max(r.tries, 1)-1), retryDropMostNS)
}

// proceed asks for the next Scan, or for a Drop.
func (d *Drops) proceed(now int64, out *DropActions) {
	l := &d.look
	if l.asked {
		return
	}
	if !l.running {
		if now < d.lookNS || !d.findDue(now) {
			return
		}
		l.running, l.value = true, make([]byte, lookBytes)
		l.losses = d.ranges[l.number].state == rangeDropping
	}
	first, last := d.bounds(l.number)
	q := &out.Request
	*q = kvstore.Request{Op: kvstore.Scan, Range: kvstore.Range{First: first, Last: last}, Background: true}
	switch {
	case l.settlement.running:
		l.request(q, d.cfg.Bits)
	case l.drop:
		q.Op, q.Version = kvstore.Drop, l.greatest
		d.setDropping(l.number)
		r := &d.ranges[l.number]
		r.tries, r.dueNS = min(r.tries, 20)+1, now+dropLongNS
		d.lookAt(r.dueNS)
		d.pollNS = now + pollDropsNS
	default:
		q.Value, q.Range.From, q.Key = l.value, max(first, l.from.Position), l.from.Key[:l.from.KeyLen]
	}
	l.asked, out.Asks, out.Number = true, true, l.number
}

func (d *Drops) setDropping(number int) {
	d.ranges[number].state = rangeDropping
	d.dropping = append(d.dropping, number)
}

// findDue finds the next range that is due. If there is none it sets lookNS.
func (d *Drops) findDue(now int64) bool {
	d.lookNS = 0
	for range d.ranges {
		number := d.next
		d.next = (d.next + 1) % len(d.ranges)
		if r := &d.ranges[number]; r.state == rangeLeft && len(d.dropping) < mostDropping || r.state == rangeDropping {
			if now >= r.dueNS {
				d.look, d.lookNS = lookThrough{number: number}, now
				return true
			}
			d.lookAt(r.dueNS)
		}
	}
	if d.lookNS == 0 {
		d.lookNS = never
	}
	return false
}

const never = 1<<63 - 1

// lookAt lets a range be looked for at that time.
func (d *Drops) lookAt(at int64) {
	if d.lookNS == 0 || at < d.lookNS {
		d.lookNS = at
	}
}

// Postpone takes a Request back that was not made, because something of the range is under way in the store.
func (d *Drops) Postpone(now int64) { d.later(now, retryDropNS) }

// later leaves the range alone that is looked through, and looks through it again after some time.
func (d *Drops) later(now, after int64) {
	l := &d.look
	r := &d.ranges[l.number]
	if l.drop && r.state == rangeDropping { // it was not made
		d.dropping = d.dropping[:len(d.dropping)-1]
		r.state = rangeLeft
	}
	l.asked, l.drop = false, false
	if r.state == rangeLeft || l.losses {
		r.dueNS = now + after
	}
	d.endLook()
	d.lookNS = now + pauseNS
}

// endLook ends the look at a range. What the store has of it counts for nothing.
func (d *Drops) endLook() {
	if d.look.void = d.look.asked; !d.look.void {
		d.look = lookThrough{}
	}
}

// Answered takes the store's Reply to the Request. If something was dropped, it returns how much.
func (d *Drops) Answered(now int64, p *kvstore.Reply) (dropped DropStats) {
	l := &d.look
	l.asked = false
	switch b := nvme.KVRange(l.value); {
	case l.void:
		d.look = lookThrough{}
	case l.drop:
		if p.Status == kvstore.OK {
			dropped = DropStats{Ranges: 1, Objects: l.objects, Bytes: l.payload}
			d.stats.Ranges++
			d.stats.Objects += l.objects
			d.stats.Bytes += l.payload
		}
		// Whatever the status, the store tells when it is over. What is left then is dropped again.
		d.look = lookThrough{}
		d.lookNS = now + pauseNS
	case p.Status == kvstore.NoMemory || p.Status == kvstore.Aborted:
		d.later(now, retryDropNS)
	case l.settlement.running:
		d.settleAnswered(now, p)
	case p.ValueLen < nvme.KVRangeHeaderBytes || p.Status != kvstore.OK && !b.Lost():
		d.later(now, retryDropMostNS)
	case b.Lost():
		d.beginSettle(now, b)
	default:
		for e := range b[:p.ValueLen].Entries() {
			l.objects++
			l.payload += uint64(e.KeyLen() + e.ValueLen())
			l.greatest = max(l.greatest, e.Version())
		}
		l.from = b.To()
		switch {
		case !b.Complete():
		case l.losses:
			d.later(now, dropLongNS)
		case l.objects == 0:
			d.ranges[l.number].state = rangeEmpty
			d.endLook()
			d.lookNS = now + pauseNS
		default:
			l.drop, l.value = true, nil
		}
	}
	return dropped
}

// wake sets when the next turn is due.
func (d *Drops) wake(now int64, authority bool, out *DropActions) {
	out.WakeNS = 0
	at := int64(never)
	switch {
	case d.look.asked:
	case d.look.running:
		at = now
	case d.lookNS != 0:
		at = min(at, d.lookNS)
	}
	if !authority && at < now+retryDropNS {
		at = now + retryDropNS // until it is back
	}
	if len(d.dropping) > 0 {
		at = min(at, d.pollNS)
	}
	if at != never {
		out.WakeNS = max(at, now+1)
	}
}

// bounds returns the first and the last position of a range.
func (d *Drops) bounds(number int) (first, last uint64) {
	if d.cfg.Bits >= 64 {
		return 0, 1<<64 - 1
	}
	first = uint64(number) << d.cfg.Bits
	return first, first + (1<<d.cfg.Bits - 1)
}
