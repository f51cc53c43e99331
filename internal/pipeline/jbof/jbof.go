// Package jbof is the default policy of a pipeline. Like Gimbal it gives tenants fair shares of a drive whose reads and
// writes cost differently; it replaces the parts of Gimbal's mechanism that fail in practice (docs/decisions/0004 lists
// them).
//
// The unit of account is device time: an I/O costs the nanoseconds for which it occupies a busy drive.
//
//   - Cost. A read costs a fixed part and a part proportional to its length, a write a part proportional to its length.
//     Calibration measures reads before the drive serves; writes are measured while it serves (see Costs).
//   - Share. Each tenant's virtual time advances by the cost of its I/Os divided by its weight. The tenant with the
//     least virtual time goes first (start-time fair queueing). Odd sizes, deep queues and many connections gain
//     nothing.
//   - Window. As much device time is outstanding as keeps the drive busy, and no more. The rest is queued here, where
//     the order can still be chosen. Writes that stall in the drive do not stop reads.
//   - Credit. A tenant's credit is its part of a small multiple of the window.
package jbof

import (
	"jbofd/internal/invariants"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// Config configures a Policy.
type Config struct {
	// Profile holds what was measured of the drive. The zero Profile means a typical NVMe drive.
	Profile Profile
	// Depth is how many I/Os may be outstanding at the device; 0 means 256.
	Depth int
}

// A tenant has two queues, and the policy two windows: one lane for reads and one for all other I/Os, so that writes
// that stall in the drive do not stop reads.
const (
	readLane = iota
	writeLane
	lanes
)

// laneOf returns the lane of a class of I/Os.
func laneOf(c pipeline.Class) int {
	if c == pipeline.ReadClass {
		return readLane
	}
	return writeLane
}

const (
	noTag = ^pipeline.Tag(0)
	// minInflight is how many I/Os of a lane may always be at the device, whatever they cost: one being processed and
	// one queued behind it.
	minInflight = 2
	// creditWindows is how many windows' worth of I/O all hosts together should keep outstanding: one window at the
	// device, and a little more queued here, so that there is always an I/O to choose.
	creditWindows = 1.15
	// fillRounds bounds the iterations in which fill redistributes unused credit. demandGrowth is how much more than
	// its recent peak a tenant is expected to ask for.
	fillRounds, demandGrowth = 8, 1.5
	// A tenant may have outstanding at least maxCostPart of the cost by which the most expensive I/O exceeds its own.
	maxCostPart = 0.8
	// maxCredit is the largest credit that the wire format can express.
	maxCredit = 1<<16 - 1
	// The reach of a lane is multiplied by reachUp, up to reachLimit, after an interval in which the lane used at least
	// the part reachBusy of the drive's time and had I/Os queued for less than the part reachMin of the interval. It
	// is multiplied by reachDown after an interval in which I/Os were queued for more than reachMax. A larger reach
	// does no harm with hosts that have no more to send.
	reachBusy, reachMin, reachMax, reachUp, reachDown, reachLimit = 0.05, 0.5, 0.8, 1.1, 0.8, 16
	// slackWindows is how much unused time a tenant may catch up with, in windows or costs of its own I/Os or of the
	// most expensive I/O, which count as dearWindows windows at most.
	slackWindows, dearWindows = 4, 4
	// pausedWindows and pausedIOs bound the paused I/Os of a tenant, which wait for data: enough for a distant host,
	// too little to take all memory.
	pausedWindows, pausedIOs = 8, 32
	// tickNS is the control interval, at whose end costs are learned and idle tenants are deactivated.
	tickNS = 20_000_000
	// idleNS is how long a lane of a tenant stays active without an I/O.
	idleNS = 20_000_000
	// unit is the size of a credit unit in bytes.
	unit = 4096
	// rebase is the virtual time at which virtual times are reset, long before they overflow.
	rebase = 1 << 60
	// weightOne scales virtual times so that the division by a weight keeps its precision.
	weightOne = 1 << 10
)

// request is the state of an I/O, in the slab.
type request struct {
	next, prev pipeline.Tag // in its lane
	len        int64
	costNS     int64
	place      int64  // in the window
	seq        uint64 // order of arrival
	tenant     tenant.ID
	op         pipeline.Op
	lane       uint8
	paused     bool
}

// queue is the queue of a tenant's I/Os in one lane, in the order of arrival.
type queue struct {
	first, last pipeline.Tag
	n           int
	pos         int32 // place in the lane's heap, -1 if not there
	// held is set while the queue has I/Os and is not in the heap because its tenant has used its credit.
	held bool
}

// tenantState is the state of a tenant.
type tenantState struct {
	weight int64
	// pace is how much virtual time passes for each ns of cost.
	pace float64
	// virtual is the tenant's virtual time: the sum of its costs over its weight, scaled by weightOne.
	virtual  int64
	queues   [lanes]queue
	inflight int
	// paused counts the I/Os that wait for data or memory; pausedNS is the sum of their costs.
	paused   int
	pausedNS int64
	costNS   int64
	// ioNS, ioPlace and ioUnits are moving averages, per I/O, of the cost, the part of the window and the credit units.
	ioNS, ioPlace, ioUnits float64
	// creditUnits is the credit computed at the end of the last interval.
	creditUnits int
	// unitsAtDrive is the sum of the credit units in flight and not paused. Flushes do not count: how long they take
	// depends on what others have written, and they occupy little of the drive.
	unitsAtDrive int64
	// units is the sum of the credit units queued and in flight, peak the maximum in this interval. A tenant whose peak
	// reaches its credit could use more.
	units, peak int64
	// seenNS is when each lane last had an I/O. The tenants active in a lane share its credit.
	seenNS [lanes]int64
	active [lanes]bool
}

// Policy is the state of the policy for one drive. It implements pipeline.Policy, whose comments say who calls what,
// and when; the package comment says how it decides.
type Policy struct {
	costs   Costs
	depth   int
	tenants []tenantState
	ios     []request // by tag
	heaps   [lanes]heap
	windows [lanes]window
	// limit bounds the sum of taken over both windows.
	limit int64
	// maxCostNS is the cost of the most expensive I/O of the last interval [0] and of the current one so far [1].
	maxCostNS [2]int64
	seq       uint64
	queued    int
	// virtual is the virtual time of the tenant dispatched last, readVirtual that of the last read. writeVirtual is
	// that of the last writer, after its write.
	virtual, readVirtual, writeVirtual int64
	// activeWeight is the sum of the weights of the tenants active in each lane.
	activeWeight [lanes]int64
	// minWeight is the least weight of the tenants active in the last interval, 0 if there were none.
	minWeight int64
	// level is how much of the window a tenant active in the lane may have outstanding for each unit of its weight.
	level [lanes]float64
	// reach multiplies the credit of the tenants active in a lane, at least 1. Distant hosts must keep more in flight
	// so that some of their I/Os are queued here.
	reach    [lanes]float64
	tickedNS int64
	// probing is set while a probe runs. Probes begin and end with an interval.
	probing bool
	// held is the number of tenants whose I/Os of a lane wait because their credit is used.
	held [lanes]int
	// full holds, for each lane, whether I/Os were left queued when Dispatch was last called, at fullNS. Writes that
	// are held count, because the drive places them where it likes, so that they keep it busy. Reads that are held do
	// not: they may be for one die, while others are idle.
	full   [lanes]bool
	fullNS int64
	// wakeNS is when a stalled lane stops holding up the other one; 0 if none does.
	wakeNS int64
}

var _ pipeline.Policy = (*Policy)(nil)

// New returns a Policy.
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
func (p *Policy) SetTenant(_ int64, t tenant.ID, weight int) {
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

func newTenant() tenantState {
	return tenantState{queues: [lanes]queue{{first: noTag, last: noTag, pos: -1}, {first: noTag, last: noTag, pos: -1}}}
}

// RemoveTenant implements pipeline.Policy.
func (p *Policy) RemoveTenant(_ int64, t tenant.ID) {
	ten := &p.tenants[t]
	invariants.Check(ten.inflight+ten.queues[readLane].n+ten.queues[writeLane].n == 0,
		"jbof: a tenant leaves with I/Os")
	for lane := range ten.active {
		p.deactivate(ten, lane)
	}
	*ten = newTenant()
}

// activate counts a tenant's weight among those that share a lane. A tenant is active in a lane from its first I/O
// there until it has had none for idleNS.
func (p *Policy) activate(ten *tenantState, lane int) {
	if !ten.active[lane] {
		ten.active[lane] = true
		p.activeWeight[lane] += ten.weight
	}
}

// deactivate undoes activate.
func (p *Policy) deactivate(ten *tenantState, lane int) {
	if ten.active[lane] {
		ten.active[lane] = false
		p.activeWeight[lane] -= ten.weight
	}
}

// Enqueue implements pipeline.Policy. The I/O goes to the end of its tenant's queue of its lane.
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
	r := &p.ios[io.Tag] // field by field: the fields that dispatch sets need no clearing
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
	// Time that a tenant did not use lapses, except for as much as a host needs to send its next command after a
	// completion.
	if v := p.virtual - p.slack(ten); ten.virtual < v && ten.queues[readLane].n+ten.queues[writeLane].n == 1 {
		ten.virtual = v
	}
	if q.n == 1 {
		p.pushIfEligible(io.Tenant, lane)
	}
}

// slack is how far a tenant may fall behind and still catch up, in virtual time of weight 1. It covers the time for
// which all I/Os of a tenant may be on their way between host and node, and for which the most expensive I/O of others
// may have kept the drive busy. But others wait while a tenant catches up, so an I/O counts as dearWindows at most.
func (p *Policy) slack(ten *tenantState) int64 {
	window := p.costs.WindowNS()
	return slackWindows * max(window, int64(ten.ioNS), min(p.maxCost(), dearWindows*window)) * weightOne
}

// maxCost returns the cost of the most expensive recent I/O.
func (p *Policy) maxCost() int64 { return max(p.maxCostNS[0], p.maxCostNS[1]) }

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
	default: // its first I/O may have changed, which decides between equal virtual times
		p.down(int(r.lane), int(q.pos))
	}
}

// unlink removes a queued I/O from its lane.
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
	if q.n == 0 {
		p.hold(int(r.lane), q, false)
	}
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
	p.full = [lanes]bool{len(p.heaps[readLane]) > 0, len(p.heaps[writeLane]) > 0 || p.held[writeLane] > 0}
	p.fullNS = now
	return dst
}

// first returns the tenant of a lane with the least virtual time, or nil.
func (p *Policy) first(lane int) *tenantState {
	if len(p.heaps[lane]) == 0 {
		return nil
	}
	return &p.tenants[p.heaps[lane][0]]
}

// dispatch dispatches the first I/O of the lane's first tenant.
func (p *Policy) dispatch(lane int) pipeline.Tag {
	t := p.heaps[lane][0]
	ten := &p.tenants[t]
	q := &ten.queues[lane]
	tag := q.first
	r := &p.ios[tag]
	p.unlink(r)
	r.costNS, r.place = p.costs.Of(r.op, r.len)
	p.maxCostNS[1] = max(p.maxCostNS[1], r.costNS)
	if v := p.virtual - p.slack(ten); ten.virtual < v {
		ten.virtual = v
	}
	p.virtual = max(p.virtual, ten.virtual)
	if lane == readLane {
		p.readVirtual = max(p.readVirtual, ten.virtual)
	}
	counted := r.costNS
	if p.probing {
		counted *= p.costs.Tilt(lane, r.len)
	}
	ten.virtual += int64(float64(counted) * ten.pace)
	if lane == writeLane {
		p.writeVirtual = ten.virtual
	}
	ten.costNS += r.costNS
	ten.average(r)
	ten.inflight++
	w := &p.windows[lane]
	w.inflight++
	w.inflightNS += r.costNS
	w.taken += r.place
	ten.unitsAtDrive += r.unitsAtDrive()
	other, full := lane^1, p.exhausted(ten)
	if q.n == 0 || full {
		p.remove(lane, 0)
		p.hold(lane, q, q.n > 0)
	} else {
		p.down(lane, 0)
	}
	if pos := ten.queues[other].pos; pos >= 0 && full {
		p.remove(other, int(pos))
		p.hold(other, &ten.queues[other], true)
	} else if pos >= 0 {
		p.down(other, int(pos))
	}
	return tag
}

// units returns the credit units of the I/O.
func (r *request) units() int64 { return int64(pipeline.IO{Op: r.op, LenBytes: r.len}.Units()) }

// unitsAtDrive returns what the I/O adds to tenantState.unitsAtDrive.
func (r *request) unitsAtDrive() int64 {
	if r.op == pipeline.Flush {
		return 0
	}
	return r.units()
}

// units returns how many units of 4 KiB lenBytes fill, rounded up, at least 1.
func units(lenBytes int64) int64 { return max((lenBytes+unit-1)/unit, 1) }

// Pause implements pipeline.Policy.
//
// hot: 0 allocs
func (p *Policy) Pause(_ int64, tag pipeline.Tag) {
	r := &p.ios[tag]
	r.paused = true
	p.leaveWindow(r)
	ten := &p.tenants[r.tenant]
	ten.paused++
	ten.pausedNS += r.costNS
	ten.unitsAtDrive -= r.unitsAtDrive()
	if ten.paused >= pausedIOs && ten.pausedNS >= pausedWindows*p.costs.WindowNS() {
		for lane := range ten.queues {
			q := &ten.queues[lane]
			p.hold(lane, q, false)
			if q.pos >= 0 {
				p.remove(lane, int(q.pos))
			}
		}
		return
	}
	p.pushAll(r.tenant)
}

// pushAll puts a tenant into the heaps of all lanes in which it has an I/O that may be dispatched.
func (p *Policy) pushAll(t tenant.ID) {
	for lane := range p.heaps {
		p.pushIfEligible(t, lane)
	}
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
	p.tenants[r.tenant].unitsAtDrive += r.unitsAtDrive()
	p.unpause(r)
}

func (p *Policy) unpause(r *request) {
	r.paused = false
	ten := &p.tenants[r.tenant]
	ten.paused--
	ten.pausedNS -= r.costNS
	p.pushAll(r.tenant)
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
		p.leaveWindow(r)
		p.windows[r.lane].movedNS = now
		if r.op.NamesRange() { // it may have kept the device from all others
			p.windows[readLane].movedNS = now
		}
		ten.unitsAtDrive -= r.unitsAtDrive()
		p.pushAll(r.tenant)
	}
	ten.inflight--
	ten.units -= r.units()
	ten.seenNS[r.lane] = now
	if !res.Failed {
		p.costs.Completed(r.op, r.len, res.LatencyNS)
	}
}

// NextWake implements pipeline.Policy. Most waits end with a completion and need no timer.
func (p *Policy) NextWake() (at int64, ok bool) { return p.wakeNS, p.wakeNS != 0 }

// tick ends a control interval.
func (p *Policy) tick(now int64) {
	p.extend(now - p.tickedNS)
	p.costs.Learn(p.activeWeight, now-p.tickedNS)
	p.probing = p.costs.Probing()
	p.maxCostNS = [2]int64{p.maxCostNS[1], 0}
	p.limit = p.costs.Window()
	p.tickedNS = now
	if p.virtual > rebase {
		for i := range p.tenants {
			p.tenants[i].virtual = max(p.tenants[i].virtual-p.virtual, -p.slack(&p.tenants[i]))
		}
		p.readVirtual = max(p.readVirtual-p.virtual, -slackWindows*p.ahead())
		p.writeVirtual -= p.virtual
		p.virtual = 0
		for lane := range p.heaps { // clamping made virtual times equal, so restore the order of the heaps
			for i := len(p.heaps[lane])/2 - 1; i >= 0; i-- {
				p.down(lane, i)
			}
		}
	}
	p.minWeight = 0
	for i := range p.tenants {
		ten := &p.tenants[i]
		for lane := range ten.active {
			if ten.queues[lane].n == 0 && now-ten.seenNS[lane] > idleNS {
				p.deactivate(ten, lane)
			}
		}
		if ten.active != [lanes]bool{} && (p.minWeight == 0 || ten.weight < p.minWeight) {
			p.minWeight = ten.weight
		}
	}
	for lane := range p.level {
		p.level[lane] = p.fill(lane)
	}
	for i := range p.tenants {
		ten := &p.tenants[i]
		ten.peak, ten.creditUnits = ten.units, p.credit(ten)
		if p.probing && ten.active[p.costs.favoured()] {
			// A probe needs hosts that send more than usual.
			ten.creditUnits = min(probeTilt*ten.creditUnits, maxCredit)
		}
		p.pushAll(tenant.ID(i))
	}
}

// Limit implements pipeline.Policy.
func (p *Policy) Limit(t tenant.ID) pipeline.Limit {
	ten := &p.tenants[t]
	for lane := range ten.queues {
		if ten.queues[lane].n == 0 {
			continue
		}
		if ten.queues[lane].pos == 0 {
			return pipeline.LimitSSD // it is this tenant's turn
		}
		return pipeline.LimitShare
	}
	return pipeline.Unlimited
}

// CostNS implements pipeline.Policy.
func (p *Policy) CostNS(t tenant.ID) int64 { return p.tenants[t].costNS }

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
		for class := range s.Class { // latency stays as it was at the last I/O, which may be long ago
			s.Class[class].State = pipeline.Underutilised
		}
	}
}
