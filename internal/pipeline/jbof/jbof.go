// Package jbof is the default policy of an SSD's switch. It keeps what Gimbal is for,
// fair shares of a drive whose reads and writes cost differently, and replaces the
// parts of the paper's mechanism that go wrong (docs/decisions/0004 lists them).
//
// Everything is counted in device time: an I/O costs the nanoseconds for which it
// occupies the drive when the drive is busy.
//
//   - Cost. A read costs a fixed part and a part by length, a write a part by length.
//     Calibration measures reads before the drive is put to work; writes are measured
//     while it works (see Costs).
//   - Share. Tenants advance in virtual time by the cost of their I/Os over their
//     weight; the one that is furthest behind goes first (start-time fair queueing). Odd
//     sizes, deep queues and many connections win nothing.
//   - Window. The drive gets as much device time at once as keeps it busy and no more; what
//     is beyond waits here, where the order can still be chosen. Writes that are stuck do
//     not stop reads.
//   - Credit. A tenant is told its part of a small multiple of the window.
package jbof

import (
	"math"

	"jbofd/internal/invariants"
	"jbofd/internal/pipeline"
)

// Config of a Policy.
type Config struct {
	// Profile is what is known of the drive; the zero Profile stands for a common NVMe
	// drive.
	Profile Profile
	// Depth is how many I/Os may be outstanding at the device; 0: 256.
	Depth int
}

// Lanes: a tenant's reads and its other I/Os wait apart.
const (
	readLane = iota
	writeLane
	lanes
)

func laneOf(c pipeline.Class) int {
	if c == pipeline.ReadClass {
		return readLane
	}
	return writeLane
}

const (
	noTag = ^pipeline.Tag(0)
	// minInflight is how many I/Os a lane may always have at the device: one at work
	// and one behind it, whatever they cost.
	minInflight = 2
	// creditWindows is how many windows' worth of I/O hosts should keep outstanding
	// together: one at the device, the rest on the way or waiting here, so that there is
	// always one to choose.
	creditWindows = 1.15
	// fillRounds bounds the search for who leaves something of the credit; demandGrowth is
	// how much more than lately a tenant may ask for.
	fillRounds, demandGrowth = 8, 1.5
	// dearestPart of what the dearest I/O costs more than its own a tenant may have
	// outstanding at least.
	dearestPart = 0.8
	// maxCredit is what the wire can say.
	maxCredit = 1<<16 - 1
	// A lane that used at least reachBusy of an interval and in which I/Os waited for less than
	// reachLeast of it reaches reachUp times as far, up to reachLimit; one in which they
	// waited for more than reachMost, reachDown times. Hosts that ask for no more do not use it.
	reachBusy, reachLeast, reachMost, reachUp, reachDown, reachLimit = 0.05, 0.5, 0.8, 1.1, 0.8, 16
	// slackWindows is how many windows, or dearest I/Os, a tenant may catch up.
	slackWindows = 4
	// pausedWindows and pausedIOs bound what a tenant has waiting for its data beyond its
	// turn: enough for a far host, not all memory.
	pausedWindows, pausedIOs = 8, 32
	// tickNS is the control interval: costs are learned and idle tenants forgotten once
	// in it.
	tickNS = 20_000_000
	// idleNS without an I/O makes a tenant's lane inactive.
	idleNS = 20_000_000
	// unit is what credits count, in bytes.
	unit = 4096
	// rebase is the virtual time after which it begins anew, long before it overflows.
	rebase = 1 << 60
	// weightOne scales virtual time so that weights divide it.
	weightOne = 1 << 10
)

// request is an I/O's place in the slab.
type request struct {
	next, prev pipeline.Tag // in its lane
	len        int64
	costNS     int64
	place      int64  // in the window
	seq        uint64 // order of arrival
	tenant     pipeline.Tenant
	op         pipeline.Op
	lane       uint8
	paused     bool
}

// queue is a tenant's lane.
type queue struct {
	first, last pipeline.Tag
	n           int
	pos         int32 // place in the lane's heap, -1 if not there
}

// tenant is what the policy knows of one.
type tenant struct {
	weight int64
	// pace is the virtual time of a ns of cost.
	pace float64
	// virtual is its virtual time: costs over weight, scaled by weightOne.
	virtual  int64
	queues   [lanes]queue
	inflight int
	// paused I/Os wait for data or memory; pausedNS is what they cost.
	paused   int
	pausedNS int64
	costNS   int64
	// ioNS and ioPlace average what the tenant's I/Os cost and take of the window, ioUnits
	// how many units they have.
	ioNS, ioPlace, ioUnits float64
	// creditUnits is its credit as of the last interval.
	creditUnits int
	// units are outstanding, queued or in flight; peak is the most lately. With peak at its
	// credit it could use more.
	units, peak int64
	// seenNS is when each lane last had an I/O. The tenants that are active in a lane
	// share its credit.
	seenNS [lanes]int64
	active [lanes]bool
}

// window is what one lane has at the device.
type window struct {
	inflight   int
	inflightNS int64
	// taken sums the places.
	taken int64
	// movedNS is when an I/O last completed, or the first one was sent.
	movedNS int64
}

// Policy implements pipeline.Policy.
type Policy struct {
	costs   Costs
	depth   int
	tenants []tenant
	ios     []request // by tag
	heaps   [lanes]heap
	windows [lanes]window
	// limit is what windows may have taken together.
	limit int64
	// dearestNS is the cost of the dearest I/O of the last interval, and so far of this one.
	dearestNS [2]int64
	seq       uint64
	queued    int
	// virtual is the virtual time of the I/O dispatched last, readVirtual that of the
	// last read.
	virtual, readVirtual int64
	// activeWeight sums the weights of the tenants active in each lane.
	activeWeight [lanes]int64
	// leastWeight is the least weight of the tenants active in the last interval, 0 if there
	// were none.
	leastWeight int64
	// level is the part of the window for each unit of weight that a lane's tenants may
	// have outstanding.
	level [lanes]float64
	// reach is how many times the credit a lane's tenants have, at least 1: hosts that are far
	// must have more under way for some of it to wait here.
	reach    [lanes]float64
	tickedNS int64
	// fullNS is when Dispatch was last called. The lanes in full had I/Os left then.
	full   [lanes]bool
	fullNS int64
	// wakeNS is when a lane that stands still lets the other one go on; 0: no matter.
	wakeNS int64
}

var _ pipeline.Policy = (*Policy)(nil)

// New makes a policy.
func New(cfg Config) *Policy {
	if cfg.Depth == 0 {
		cfg.Depth = 256
	}
	p := &Policy{costs: NewCosts(cfg.Profile), depth: cfg.Depth, reach: [lanes]float64{1, 1}}
	p.limit = p.costs.Window()
	return p
}

// Name implements pipeline.Policy.
func (p *Policy) Name() string { return "jbof" }

// SetTenant implements pipeline.Policy.
func (p *Policy) SetTenant(_ int64, t pipeline.Tenant, weight int) {
	for int(t) >= len(p.tenants) {
		p.tenants = append(p.tenants, newTenant())
	}
	ten := &p.tenants[t]
	for lane := range ten.active {
		if ten.active[lane] {
			p.activeWeight[lane] += int64(weight) - ten.weight
		}
	}
	ten.weight, ten.pace = int64(weight), weightOne/float64(weight)
	ten.creditUnits = p.credit(ten)
}

func newTenant() tenant {
	return tenant{queues: [lanes]queue{{first: noTag, last: noTag, pos: -1}, {first: noTag, last: noTag, pos: -1}}}
}

// RemoveTenant implements pipeline.Policy.
func (p *Policy) RemoveTenant(_ int64, t pipeline.Tenant) {
	ten := &p.tenants[t]
	invariants.Check(ten.inflight+ten.queues[readLane].n+ten.queues[writeLane].n == 0, "jbof: a tenant leaves with I/Os")
	for lane := range ten.active {
		p.deactivate(ten, lane)
	}
	*ten = newTenant()
}

func (p *Policy) activate(ten *tenant, lane int) {
	if !ten.active[lane] {
		ten.active[lane] = true
		p.activeWeight[lane] += ten.weight
	}
}

func (p *Policy) deactivate(ten *tenant, lane int) {
	if ten.active[lane] {
		ten.active[lane] = false
		p.activeWeight[lane] -= ten.weight
	}
}

// Enqueue implements pipeline.Policy.
//
// hot: 0 allocs
func (p *Policy) Enqueue(now int64, io pipeline.IO) {
	for int(io.Tag) >= len(p.ios) {
		p.ios = append(p.ios, request{})
	}
	ten := &p.tenants[io.Tenant]
	lane := laneOf(io.Op.Class())
	q := &ten.queues[lane]
	p.seq++
	r := &p.ios[io.Tag] // field by field: what dispatch fills in needs no zero
	r.next, r.prev, r.len, r.seq = noTag, q.last, io.LenBytes, p.seq
	r.tenant, r.op, r.lane, r.paused = io.Tenant, io.Op, uint8(lane), false
	if q.n == 0 {
		q.first = io.Tag
	} else {
		p.ios[q.last].next = io.Tag
	}
	q.last = io.Tag
	q.n++
	p.queued++
	ten.seenNS[lane] = now
	ten.units += int64(io.Units())
	ten.peak = max(ten.peak, ten.units)
	p.activate(ten, lane)
	// A right to the drive that was not used lapses, but for what a host needs to send
	// the next command after a completion.
	if v := p.virtual - p.slack(); ten.virtual < v && ten.queues[readLane].n+ten.queues[writeLane].n == 1 {
		ten.virtual = v
	}
	if q.n == 1 {
		p.offer(io.Tenant, lane)
	}
}

// slack is how far behind a tenant may fall and still catch up, in virtual time of
// weight 1: what goes on while all its I/Os are on their way.
func (p *Policy) slack() int64 {
	return slackWindows * max(p.costs.WindowNS(), p.dearest()) * weightOne
}

// dearest is the cost of the dearest I/O lately.
func (p *Policy) dearest() int64 { return max(p.dearestNS[0], p.dearestNS[1]) }

// offer puts a tenant into a lane's heap if it has something there that may go.
func (p *Policy) offer(t pipeline.Tenant, lane int) {
	ten := &p.tenants[t]
	q := &ten.queues[lane]
	if q.pos < 0 && q.n > 0 && (ten.paused < pausedIOs || ten.pausedNS < pausedWindows*p.costs.WindowNS()) {
		p.push(lane, t)
	}
}

// Cancel implements pipeline.Policy.
func (p *Policy) Cancel(_ int64, tag pipeline.Tag) {
	r := &p.ios[tag]
	p.unlink(r)
	p.tenants[r.tenant].units -= r.units()
	q := &p.tenants[r.tenant].queues[r.lane]
	switch {
	case q.pos < 0:
	case q.n == 0:
		p.remove(int(r.lane), int(q.pos))
	default: // another I/O is its first: it may go behind its equals
		p.down(int(r.lane), int(q.pos))
	}
}

// unlink takes a queued I/O out of its lane.
func (p *Policy) unlink(r *request) {
	q := &p.tenants[r.tenant].queues[r.lane]
	if r.prev == noTag {
		q.first = r.next
	} else {
		p.ios[r.prev].next = r.next
	}
	if r.next == noTag {
		q.last = r.prev
	} else {
		p.ios[r.next].prev = r.prev
	}
	q.n--
	p.queued--
}

// Dispatch implements pipeline.Policy.
//
// hot: 0 allocs, given room in dst
func (p *Policy) Dispatch(now int64, dst []pipeline.Tag) []pipeline.Tag {
	p.costs.Waited(p.full, now-p.fullNS)
	if now-p.tickedNS >= tickNS {
		p.tick(now)
	}
	p.wakeNS = 0
	for {
		lane := p.choose(now)
		if lane < 0 {
			break
		}
		if w := &p.windows[lane]; w.inflight == 0 {
			w.movedNS = now
		}
		dst = append(dst, p.dispatch(lane))
	}
	p.full, p.fullNS = [lanes]bool{len(p.heaps[readLane]) > 0, len(p.heaps[writeLane]) > 0}, now
	return dst
}

// open reports whether a lane has room at the device.
func (p *Policy) open(lane int, now int64) bool {
	w, o := &p.windows[lane], &p.windows[lane^1]
	if w.inflight+o.inflight >= p.depth {
		return false
	}
	if w.inflight < minInflight || w.taken+o.taken < p.limit {
		return true
	}
	return w.taken < p.limit && o.inflight > 0 && now >= p.stuckAt(lane^1)
}

// choose returns the lane whose first tenant goes next, or -1.
//
// The tenant furthest behind has the right. If its lane is full, the drive is busy and
// all wait: were others let by, a drive that takes writes into a buffer faster than it
// can keep up with would give writes more than their share. But if the lane has stood
// still for longer than what it has at the drive should take, as writes do behind
// garbage collection, the other lane may go on; the tenant catches up by slack at most.
func (p *Policy) choose(now int64) int {
	r, w := p.first(readLane), p.first(writeLane)
	lane := readLane
	switch {
	case r == nil && w == nil:
		return -1
	case r == nil:
		if p.leads(w) {
			if at := p.stuckAt(readLane); now < at {
				p.wakeNS = at
				return -1
			}
		}
		lane = writeLane
	case w != nil && (w.virtual < r.virtual || w.virtual == r.virtual && p.ios[w.queues[writeLane].first].seq < p.ios[r.queues[readLane].first].seq):
		lane = writeLane
	}
	if p.open(lane, now) {
		return lane
	}
	other := lane ^ 1
	if len(p.heaps[other]) == 0 || p.windows[other].taken >= p.limit && p.windows[other].inflight >= minInflight {
		return -1
	}
	if at := p.stuckAt(lane); now < at {
		p.wakeNS = at
		return -1
	}
	if p.open(other, now) {
		return other
	}
	return -1
}

// leads reports whether a writer is too far ahead of the readers, which have nothing
// queued but much at the drive: more writes would only slow those down. Readers with
// little at the drive do not ask for more, and no writer waits for them.
func (p *Policy) leads(w *tenant) bool {
	return p.windows[readLane].taken > windowOne/4 && w.virtual > p.readVirtual+p.slack()/slackWindows
}

// stuckAt is when a full lane counts as standing still.
func (p *Policy) stuckAt(lane int) int64 {
	w := &p.windows[lane]
	return w.movedNS + w.inflightNS + p.costs.WindowNS() + p.costs.baseNS
}

// first is the tenant of a lane that is furthest behind, nil if there is none.
func (p *Policy) first(lane int) *tenant {
	if len(p.heaps[lane]) == 0 {
		return nil
	}
	return &p.tenants[p.heaps[lane][0]]
}

// dispatch lets the first I/O of a lane's first tenant go.
func (p *Policy) dispatch(lane int) pipeline.Tag {
	t := p.heaps[lane][0]
	ten := &p.tenants[t]
	q := &ten.queues[lane]
	tag := q.first
	r := &p.ios[tag]
	p.unlink(r)
	r.costNS, r.place = p.costs.Of(r.op, r.len)
	p.dearestNS[1] = max(p.dearestNS[1], r.costNS)
	if v := p.virtual - p.slack(); ten.virtual < v {
		ten.virtual = v
	}
	p.virtual = max(p.virtual, ten.virtual)
	if lane == readLane {
		p.readVirtual = max(p.readVirtual, ten.virtual)
	}
	counted := r.costNS
	if lane == readLane {
		counted *= p.costs.Tilt()
	}
	ten.virtual += int64(float64(counted) * ten.pace)
	ten.costNS += r.costNS
	ten.average(r)
	ten.inflight++
	w := &p.windows[lane]
	w.inflight++
	w.inflightNS += r.costNS
	w.taken += r.place
	if q.n == 0 {
		p.remove(lane, 0)
	} else {
		p.down(lane, 0)
	}
	if other := lane ^ 1; ten.queues[other].pos >= 0 {
		p.down(other, int(ten.queues[other].pos))
	}
	return tag
}

// average learns what the tenant's I/Os are like.
func (t *tenant) average(r *request) {
	weight := 1.0 / 16
	if t.ioUnits == 0 {
		weight = 1
	}
	t.ioNS += weight * (float64(r.costNS) - t.ioNS)
	t.ioPlace += weight * (float64(r.place) - t.ioPlace)
	t.ioUnits += weight * (float64(r.units()) - t.ioUnits)
}

// units is what it counts for against its tenant's credit.
func (r *request) units() int64 { return int64(pipeline.IO{Op: r.op, LenBytes: r.len}.Units()) }

// units is how many units of 4 KiB bytes fill, in part or in whole.
func units(lenBytes int64) int64 { return max((lenBytes+unit-1)/unit, 1) }

// Pause implements pipeline.Policy.
//
// hot: 0 allocs
func (p *Policy) Pause(_ int64, tag pipeline.Tag) {
	r := &p.ios[tag]
	r.paused = true
	p.leave(r)
	ten := &p.tenants[r.tenant]
	ten.paused++
	ten.pausedNS += r.costNS
	if ten.paused >= pausedIOs && ten.pausedNS >= pausedWindows*p.costs.WindowNS() {
		for lane := range ten.queues {
			if pos := ten.queues[lane].pos; pos >= 0 {
				p.remove(lane, int(pos))
			}
		}
	}
}

// leave gives an I/O's place at the device back.
func (p *Policy) leave(r *request) {
	w := &p.windows[r.lane]
	if w.inflight == 0 {
		panic("jbof: an I/O leaves the device that is not there")
	}
	w.inflight--
	w.inflightNS -= r.costNS
	w.taken -= r.place
}

// Resume implements pipeline.Policy.
//
// hot: 0 allocs
func (p *Policy) Resume(_ int64, tag pipeline.Tag) {
	r := &p.ios[tag]
	w := &p.windows[r.lane]
	w.inflight++
	w.inflightNS += r.costNS
	w.taken += r.place
	p.unpause(r)
}

func (p *Policy) unpause(r *request) {
	r.paused = false
	ten := &p.tenants[r.tenant]
	ten.paused--
	ten.pausedNS -= r.costNS
	for lane := range ten.queues {
		p.offer(r.tenant, lane)
	}
}

// Complete implements pipeline.Policy.
//
// hot: 0 allocs
func (p *Policy) Complete(now int64, tag pipeline.Tag, res pipeline.Result) {
	r := &p.ios[tag]
	ten := &p.tenants[r.tenant]
	if r.paused {
		p.unpause(r)
	} else {
		p.leave(r)
		p.windows[r.lane].movedNS = now
	}
	ten.inflight--
	ten.units -= r.units()
	ten.seenNS[r.lane] = now
	if !res.Failed {
		p.costs.Completed(r.op, r.len, res.LatencyNS)
	}
}

// NextWake implements pipeline.Policy: most waits here end with a completion.
func (p *Policy) NextWake() (at int64, ok bool) { return p.wakeNS, p.wakeNS != 0 }

// tick ends a control interval.
func (p *Policy) tick(now int64) {
	p.extend(now - p.tickedNS)
	p.costs.Learn(p.activeWeight, now-p.tickedNS)
	p.dearestNS = [2]int64{p.dearestNS[1], 0}
	p.limit = p.costs.Window()
	p.tickedNS = now
	if p.virtual > rebase {
		for i := range p.tenants {
			p.tenants[i].virtual = max(p.tenants[i].virtual-p.virtual, -p.slack())
		}
		p.readVirtual = max(p.readVirtual-p.virtual, -p.slack())
		p.virtual = 0
		for lane := range p.heaps { // those who were far behind are equals now
			for i := len(p.heaps[lane])/2 - 1; i >= 0; i-- {
				p.down(lane, i)
			}
		}
	}
	p.leastWeight = 0
	for i := range p.tenants {
		ten := &p.tenants[i]
		for lane := range ten.active {
			if ten.queues[lane].n == 0 && now-ten.seenNS[lane] > idleNS {
				p.deactivate(ten, lane)
			}
		}
		if ten.active != [lanes]bool{} && (p.leastWeight == 0 || ten.weight < p.leastWeight) {
			p.leastWeight = ten.weight
		}
	}
	for lane := range p.level {
		p.level[lane] = p.fill(lane)
	}
	for i := range p.tenants {
		ten := &p.tenants[i]
		ten.peak, ten.creditUnits = ten.units, p.credit(ten)
		if ten.active[writeLane] && p.costs.Probing() {
			// Not less than it takes to ask for more.
			ten.creditUnits = min(probeTilt*ten.creditUnits, maxCredit)
		}
	}
}

// extend adapts the lanes' reach at the end of an interval of ns.
func (p *Policy) extend(ns int64) {
	for lane := range p.reach {
		waited := float64(p.costs.waitedNS[lane]) / float64(max(ns, 1))
		switch {
		case waited > reachMost:
			p.reach[lane] = max(p.reach[lane]*reachDown, 1)
		case waited < reachLeast && p.costs.laneNS(lane) > reachBusy*float64(ns):
			p.reach[lane] = min(p.reach[lane]*reachUp, reachLimit)
		}
	}
}

// Credit implements pipeline.Policy.
//
// hot: 0 allocs
func (p *Policy) Credit(t pipeline.Tenant) int {
	return p.tenants[t].creditUnits
}

// credit computes what a tenant should have outstanding.
func (p *Policy) credit(ten *tenant) int {
	level, reach := 0.0, 1.0
	for lane := range ten.active {
		if ten.active[lane] {
			level, reach = max(level, p.level[lane]), max(reach, p.reach[lane])
		}
	}
	if level == 0 { // it is new
		level = creditWindows * float64(p.limit) / float64(ten.weight+max(p.activeWeight[readLane], p.activeWeight[writeLane]))
	}
	if ten.ioUnits == 0 {
		return max(int(level*float64(ten.weight)*p.costs.depth/windowOne), 1)
	}
	// Nearly as much as the dearest I/O costs: others have one of that outstanding,
	// whatever their credit, and those of more weight may have more. And whole I/Os.
	heavier := 1.0
	if p.leastWeight > 0 {
		heavier = max(float64(ten.weight)/float64(p.leastWeight), 1)
	}
	dear := 1.0
	if ten.ioNS > 0 { // on a drive that costs nothing, none is dearer than another
		dear += dearestPart * max(float64(p.dearest())/ten.ioNS-1, 0)
	}
	ios := max(math.Ceil(float64(ten.weight)*level/ten.ioPlace), math.Floor(heavier*dear), 1)
	return int(math.Ceil(min(math.Floor(ios*reach)*ten.ioUnits, maxCredit)))
}

// fill finds the level at which the tenants of a lane together have creditWindows
// outstanding. Those who do not ask for their part leave it to the others.
func (p *Policy) fill(lane int) float64 {
	budget, weights := creditWindows*float64(p.limit), float64(p.activeWeight[lane])
	if weights == 0 {
		return 0
	}
	level := budget / weights
	for range fillRounds {
		left, want := budget, 0.0
		for i := range p.tenants {
			ten := &p.tenants[i]
			if !ten.active[lane] {
				continue
			}
			asks := float64(ten.peak) * ten.ioPlace / max(ten.ioUnits, 1) * demandGrowth
			if part := level * float64(ten.weight); asks < part && int(ten.peak) < ten.creditUnits {
				left -= asks
			} else {
				want += float64(ten.weight)
			}
		}
		if want == 0 {
			break
		}
		next := max(left, 0) / want
		if next <= level {
			break
		}
		level = next
	}
	return level
}

// Limit implements pipeline.Policy.
func (p *Policy) Limit(t pipeline.Tenant) pipeline.Limit {
	ten := &p.tenants[t]
	for lane := range ten.queues {
		if ten.queues[lane].n == 0 {
			continue
		}
		if ten.queues[lane].pos == 0 {
			return pipeline.LimitSSD // it is its turn
		}
		return pipeline.LimitShare
	}
	return pipeline.Unlimited
}

// CostNS implements pipeline.Policy.
func (p *Policy) CostNS(t pipeline.Tenant) int64 { return p.tenants[t].costNS }

// Stats implements pipeline.Policy.
func (p *Policy) Stats(s *pipeline.Stats) {
	*s = pipeline.Stats{
		InflightNS: p.windows[readLane].inflightNS + p.windows[writeLane].inflightNS,
	}
	for i := range p.tenants {
		if p.tenants[i].active != [lanes]bool{} {
			s.ActiveTenants++
		}
	}
	p.costs.stats(s)
	if p.queued == 0 && p.windows[readLane].inflight+p.windows[writeLane].inflight == 0 {
		for class := range s.Class { // the latency is that of the last I/Os, however long ago
			s.Class[class].State = pipeline.Underutilised
		}
	}
}
