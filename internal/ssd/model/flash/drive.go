// Package flash is an emulated NVMe drive as a pure machine in virtual time: the same
// requests at the same times give the same completions for a seed, as fast as the processor allows.
//
// What a command passes:
//
//	Submit -> controller (serial: a time per flash operation, and bytes at a rate)
//	  read:  -> die (waits for its turn, ReadNS) -> channel (bytes) -> fixed latency -> Completion
//	  write: -> write buffer (waits while it is full) -> fixed latency -> Completion
//	            buffer -> program on the next die that has room -> units are on flash, their slots free again
//
// The dies hold the data of a page-mapped translation layer with units of 4 KiB. Host writes go
// to the dies in turn; each die collects its own garbage (greedy), in pieces between host programs so that
// it keeps pace with them. Programs, collection and erases are suspended for reads within
// bounds that let neither starve.
//
// A partly written unit costs as much as a whole one; its read-modify-write is not modelled, nor are
// wear, refresh and errors. There is no data: a device above keeps it.
package flash

import (
	"jbofd/internal/invariants"
)

// Op is what a Request asks for, with the numbers of ssd.Op.
type Op uint8

// The operations.
const (
	Read Op = iota
	Write
	Flush
	Deallocate
	WriteZeroes
)

// Request is a command. Offset and length are within the drive, of any alignment; Flush has none.
type Request struct {
	Op                    Op
	OffsetBytes, LenBytes int64
	// FUA, of a Write: it completes when its data is durable.
	FUA bool
	// Tag comes back in the Completion.
	Tag uint64
}

// Completion tells that the command with Tag was done at AtNS, LatencyNS after its submission.
type Completion struct {
	Tag             uint64
	AtNS, LatencyNS int64
}

// Stats are counters since New or Precondition, and gauges.
type Stats struct {
	// Units of hosts as they asked for them, in bytes.
	HostReadBytes, HostWriteBytes int64
	// What was programmed for hosts and by collection, in bytes.
	NANDWriteBytes, GCWriteBytes int64
	// WriteAmplification is (host + collection) / host bytes programmed; 0 before the first.
	WriteAmplification float64
	// Erases are blocks erased, Suspends programs, collections and erases put aside for reads.
	Erases, Suspends int64
	// BufferUsedBytes of BufferBytes are taken; WritesWaiting commands wait for room.
	BufferUsedBytes, BufferBytes int64
	WritesWaiting                int
	// InFlight commands are submitted and not completed.
	InFlight int
	// The time that all dies together spent with reads, and with programs, collection and erases.
	DieReadNS, DieProgramNS int64
	// DieBusy is the part of the dies' time since the start that they were busy, 0 to 1, as of the last Advance.
	DieBusy float64
}

// request is a command under way.
type request struct {
	tag       uint64
	submitNS  int64
	doneNS    int64 // the latest end of a part so far
	latencyNS int64 // comes on top
	unit      uint32
	units     uint32 // write: not yet in the buffer, from unit on
	left      int32  // parts or units not done
	op        Op
	fua       bool
	next      int32
}

// part is a piece of a command that passes the controller at atNS: a flash read, a unit
// written in place, or the whole of a command that needs no die.
type part struct {
	atNS  int64
	req   int32
	next  int32
	page  uint32
	bytes uint32
	die   int16 // -1: none
	write bool  // in place
}

// list is a FIFO of parts.
type list struct{ head, tail int32 }

// slot is a slot of the write buffer, 4 KiB.
type slot struct {
	unit     uint32
	next     uint32
	inFlight bool // assigned to a program of a die
}

// Drive is the state machine. One goroutine at a time may call it. It allocates nothing once it has seen the largest
// number of outstanding requests.
type Drive struct {
	cfg Config
	ftl *ftl
	rnd random
	// slow is cfg.Slowdown, 1 or more. The times below are the drive's own, which pass so many times
	// slower than those that its methods speak of.
	slow int64

	nowNS  int64
	ctlNS  int64 // the controller is busy until then
	chanNS []int64
	dies   []die
	next   winner

	reqs     []request
	freeReq  int32
	parts    []part
	freePart int32
	arriving list
	waiting  list // writes before a full buffer
	nWaiting int
	due      dueHeap
	seq      uint32
	inFlight int

	slots     []slot
	freeSlot  uint32
	nFree     int    // free slots
	dirty     uint32 // FIFO of slots not yet given to a die
	dirtyTail uint32
	nDirty    int // of them those that the map still points at
	durable   durable
	// With fewer free slots the buffer is pressed.
	pressedBelow int
	room         uint64 // dies whose queue of programs has room
	nextDie      int

	// Picoseconds per byte, and derived numbers.
	readPSPerByte, writePSPerByte, chanPSPerByte int64
	pageUnits, programUnits                      uint32

	stats   Stats
	startNS int64
}

// New makes an empty drive.
//
// Errors: ErrConfig.
func New(cfg Config) (*Drive, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	d := &Drive{
		cfg: cfg, slow: int64(max(cfg.Slowdown, 1)), chanNS: make([]int64, cfg.Channels), dies: make([]die, cfg.dies()),
		readPSPerByte: 1e12 / cfg.ReadBytesPerSec, writePSPerByte: 1e12 / cfg.WriteBytesPerSec,
		chanPSPerByte: 1e12 / cfg.ChannelBytesPerSec,
		pageUnits:     uint32(cfg.PageBytes / unitBytes), programUnits: cfg.programUnits(),
	}
	if !cfg.InPlace {
		d.ftl = newFTL(&cfg)
		d.slots = make([]slot, cfg.BufferBytes/unitBytes)
		d.pressedBelow = len(d.slots) / 4
	}
	d.reset()
	return d, nil
}

// reset empties the drive. Nothing is in flight.
func (d *Drive) reset() {
	d.rnd = newRandom(d.cfg.Seed)
	d.next.reset()
	d.reqs, d.freeReq = d.reqs[:0], -1
	d.parts, d.freePart = d.parts[:0], -1
	d.arriving, d.waiting = list{-1, -1}, list{-1, -1}
	d.stats = Stats{}
	d.startNS = d.nowNS
	d.ctlNS = d.nowNS
	for i := range d.dies {
		d.dies[i] = die{reads: list{-1, -1}, channel: uint8(i % d.cfg.Channels), page: none}
	}
	if d.ftl == nil {
		return
	}
	d.ftl.reset()
	d.freeSlot, d.dirty, d.dirtyTail, d.nDirty = none, none, none, 0
	for i := len(d.slots) - 1; i >= 0; i-- {
		d.slots[i].next = d.freeSlot
		d.freeSlot = uint32(i)
	}
	d.nFree = len(d.slots)
	d.durable = durable{}
	d.room = 1<<len(d.dies) - 1
	d.nextDie = 0
}

// Submit submits a command at time now, which must not decrease. The number of outstanding commands is not limited.
//
// Cost: 0 allocs in the long run.
func (d *Drive) Submit(now int64, r Request) { // hot: 0 allocs
	invariants.Check(r.Op <= WriteZeroes, "flash: the operation is known")
	invariants.Check(r.Op == Flush || r.OffsetBytes >= 0 && r.LenBytes >= 0 &&
		r.OffsetBytes <= d.cfg.SizeBytes-r.LenBytes, "flash: the range is within the drive")
	now = max(now/d.slow, d.nowNS)
	d.ctlNS = max(d.ctlNS, now)
	d.inFlight++
	i := d.newRequest()
	q := &d.reqs[i]
	q.tag, q.submitNS, q.doneNS, q.op, q.fua = r.Tag, now, 0, r.Op, r.FUA
	first := uint32(r.OffsetBytes / unitBytes)
	units := uint32(0)
	if r.LenBytes > 0 && r.Op != Flush {
		units = uint32((r.OffsetBytes+r.LenBytes-1)/unitBytes) - first + 1
	}
	q.unit, q.units, q.left = first, units, 1
	switch {
	case r.Op == Read && units > 0:
		q.latencyNS = d.cfg.ReadLatencyNS
		d.stats.HostReadBytes += r.LenBytes
		d.submitRead(i, first, units, r.LenBytes)
	case r.Op == Write && units > 0:
		q.latencyNS = d.cfg.WriteLatencyNS
		d.stats.HostWriteBytes += r.LenBytes
		if d.cfg.InPlace {
			d.submitInPlace(i, first, units, true, r.LenBytes)
			return
		}
		q.left = int32(units)
		d.ctlNS += int64((units+d.pageUnits-1)/d.pageUnits)*d.cfg.WriteOpNS + r.LenBytes*d.writePSPerByte/1000
		d.arrive(part{atNS: d.ctlNS, req: i, die: -1})
	default:
		q.latencyNS = d.cfg.FlushLatencyNS
		d.ctlNS += d.cfg.CommandNS
		if r.Op == Deallocate || r.Op == WriteZeroes {
			d.ctlNS += r.LenBytes * d.cfg.UnmapNSPerMiB >> 20
			// Units that the range only touches keep their place.
			q.unit = uint32((r.OffsetBytes + unitBytes - 1) / unitBytes)
			q.units = max(uint32((r.OffsetBytes+r.LenBytes)/unitBytes), q.unit) - q.unit
		}
		d.arrive(part{atNS: d.ctlNS, req: i, die: -1})
	}
}

// submitRead cuts a read into flash operations: runs of units that lie together in a page, or that
// need no flash.
func (d *Drive) submitRead(i int32, first, units uint32, lenBytes int64) {
	if d.cfg.InPlace {
		d.submitInPlace(i, first, units, false, lenBytes)
		return
	}
	l2p, shift := d.ftl.l2p, d.ftl.pageShift
	parts := int32(0)
	bytesNS := lenBytes * d.readPSPerByte / 1000
	done := int64(0)
	for u, end := first, first+units; u < end; {
		p := l2p[u]
		n := uint32(1)
		if p >= inBuffer { // none included
			for u+n < end && n < d.pageUnits && l2p[u+n] >= inBuffer {
				n++
			}
		} else {
			for u+n < end && l2p[u+n] == p+n && (p+n)>>shift == p>>shift {
				n++
			}
		}
		u += n
		share := bytesNS * int64(u-first) / int64(units)
		d.ctlNS += d.cfg.ReadOpNS + share - done
		done = share
		x := part{atNS: d.ctlNS, req: i, die: -1, bytes: min(n*unitBytes, uint32(min(lenBytes, 1<<31)))}
		if p < inBuffer {
			x.page = p >> shift
			x.die = int16(d.ftl.dieOf[p>>d.ftl.blockShift])
		}
		d.arrive(x)
		parts++
	}
	d.reqs[i].left = parts
}

// submitInPlace cuts a command into its units, which lie on the dies in turn.
func (d *Drive) submitInPlace(i int32, first, units uint32, write bool, lenBytes int64) {
	op, bytesNS := d.cfg.ReadOpNS, lenBytes*d.readPSPerByte/1000
	if write {
		op, bytesNS = d.cfg.WriteOpNS, lenBytes*d.writePSPerByte/1000
	}
	d.reqs[i].left = int32(units)
	done := int64(0)
	for n := uint32(1); n <= units; n++ {
		u := first + n - 1
		share := bytesNS * int64(n) / int64(units)
		d.ctlNS += op + share - done
		done = share
		// Units are placed by a hash, so that no stride of host I/O hits a single die.
		h := u * 2654435761
		d.arrive(part{atNS: d.ctlNS, req: i, die: int16(uint64(h) * uint64(len(d.dies)) >> 32), page: u,
			bytes: min(unitBytes, uint32(min(lenBytes, 1<<31))), write: write})
	}
}

func (d *Drive) newRequest() int32 {
	if i := d.freeReq; i >= 0 {
		d.freeReq = d.reqs[i].next
		return i
	}
	d.reqs = append(d.reqs, request{})
	return int32(len(d.reqs) - 1)
}

// arrive appends a part to the FIFO of parts that pass the controller. Their times never decrease.
func (d *Drive) arrive(x part) {
	i := d.freePart
	if i >= 0 {
		d.freePart = d.parts[i].next
		d.parts[i] = x
	} else {
		d.parts = append(d.parts, x)
		i = int32(len(d.parts) - 1)
	}
	d.push(&d.arriving, i)
}

func (d *Drive) push(l *list, i int32) {
	d.parts[i].next = -1
	if l.tail >= 0 {
		d.parts[l.tail].next = i
	} else {
		l.head = i
	}
	l.tail = i
}

func (d *Drive) pop(l *list) int32 {
	i := l.head
	l.head = d.parts[i].next
	if l.head < 0 {
		l.tail = -1
	}
	return i
}

func (d *Drive) release(i int32) {
	d.parts[i].next = d.freePart
	d.freePart = i
}

// NextEvent returns the time of the next change inside the drive or completion: Advance
// is due then. Without one nothing is in flight and nothing is left to do.
func (d *Drive) NextEvent() (at int64, ok bool) { // hot: 0 allocs
	_, at = d.next.first()
	if d.arriving.head >= 0 {
		at = min(at, d.parts[d.arriving.head].atNS)
	}
	if len(d.due.s) > 0 {
		at = min(at, d.due.s[0].at)
	}
	if at >= never {
		return never, false
	}
	return at * d.slow, true
}

// NextCompletion returns a time before which nothing completes unless more is submitted: what
// happens inside until then can as well be caught up with at that time. Without a command in flight there is none.
func (d *Drive) NextCompletion() (earliest int64, ok bool) { // hot: 0 allocs
	if d.inFlight == 0 {
		return 0, false
	}
	_, at := d.next.first()
	if d.arriving.head >= 0 {
		at = min(at, d.parts[d.arriving.head].atNS)
	}
	at += min(d.cfg.ReadLatencyNS, d.cfg.WriteLatencyNS, d.cfg.FlushLatencyNS)
	if len(d.due.s) > 0 {
		at = min(at, d.due.s[0].at)
	}
	return at * d.slow, true
}

// Advance lets time pass until now and appends to dst all that completed until then, in order of time.
//
// Cost: 0 allocs besides dst.
func (d *Drive) Advance(now int64, dst []Completion) []Completion { // hot: 0 allocs
	now /= d.slow
	for {
		i, at := d.next.first()
		if h := d.arriving.head; h >= 0 && d.parts[h].atNS <= at {
			if d.parts[h].atNS > now {
				break
			}
			d.arrived(d.parts[h].atNS, d.pop(&d.arriving))
			continue
		}
		if at > now {
			break
		}
		d.dieEvent(at, i)
	}
	d.nowNS = max(d.nowNS, now)
	for len(d.due.s) > 0 && d.due.s[0].at <= now {
		x := d.due.pop()
		q := &d.reqs[x.req]
		dst = append(dst, Completion{Tag: q.tag, AtNS: x.at * d.slow, LatencyNS: (x.at - q.submitNS) * d.slow})
		q.next = d.freeReq
		d.freeReq = x.req
		d.inFlight--
	}
	return dst
}

// arrived takes a part that has passed the controller.
func (d *Drive) arrived(t int64, i int32) {
	p := &d.parts[i]
	if p.die >= 0 {
		x := &d.dies[p.die]
		d.push(&x.reads, i)
		switch x.state {
		case dieIdle:
			d.turn(t, int(p.die))
		case dieProgramming:
			if end := max(t, x.startNS+x.sliceNS); end < d.next.at[p.die] {
				d.next.set(int(p.die), end)
			}
		}
		return
	}
	q := &d.reqs[p.req]
	switch q.op {
	case Write:
		if q.units > 0 {
			d.push(&d.waiting, i)
			d.nWaiting++
			d.admit(t)
			d.dispatch(t)
			return
		}
	case Deallocate, WriteZeroes:
		d.unmap(q.unit, q.units)
		d.durableUpTo(t)
	case Flush:
		d.makeDurable(t, p.req)
		d.release(i)
		return
	}
	d.partDone(t, p.req)
	d.release(i)
}

// partDone ends a part of a request at time t.
func (d *Drive) partDone(t int64, i int32) {
	q := &d.reqs[i]
	q.doneNS = max(q.doneNS, t)
	if q.left--; q.left == 0 {
		d.due.push(due{at: q.doneNS + q.latencyNS, seq: d.seq, req: i})
		d.seq++
	}
}

// unmap removes units from the map.
func (d *Drive) unmap(first, units uint32) {
	if d.ftl == nil {
		return
	}
	f := d.ftl
	for u := first; u < first+units; u++ {
		p := f.l2p[u]
		if p == none {
			continue
		}
		f.l2p[u] = none
		if p < inBuffer {
			f.invalidate(p)
		} else if !d.slots[p&^inBuffer].inFlight {
			d.nDirty--
		}
	}
}

// InFlight is how many commands are submitted and not completed.
func (d *Drive) InFlight() int { return d.inFlight }

// Stats returns the drive's counters.
func (d *Drive) Stats() Stats {
	s := d.stats
	s.DieReadNS, s.DieProgramNS = s.DieReadNS*d.slow, s.DieProgramNS*d.slow
	s.InFlight, s.WritesWaiting = d.inFlight, d.nWaiting
	if f := d.ftl; f != nil {
		s.GCWriteBytes = int64(f.movedUnits) * unitBytes
		s.NANDWriteBytes = int64(f.hostUnits)*unitBytes + s.GCWriteBytes
		if f.hostUnits > 0 {
			s.WriteAmplification = float64(f.hostUnits+f.movedUnits) / float64(f.hostUnits)
		}
		s.Erases = int64(f.erases)
		s.BufferBytes = int64(len(d.slots)) * unitBytes
		s.BufferUsedBytes = s.BufferBytes - int64(d.nFree)*unitBytes
	}
	if d.nowNS > d.startNS {
		s.DieBusy = float64(s.DieReadNS+s.DieProgramNS) / float64((d.nowNS-d.startNS)*d.slow) / float64(len(d.dies))
	}
	return s
}
