package jbof

import (
	"math"

	"jbofd/internal/tenant"
)

// average updates the tenant's averages with a dispatched I/O.
func (t *tenantState) average(r *request) {
	weight := 1.0 / 16
	if t.ioUnits == 0 {
		weight = 1
	}
	t.ioNS += weight * (float64(r.costNS) - t.ioNS)
	t.ioPlace += weight * (float64(r.place) - t.ioPlace)
	t.ioUnits += weight * (float64(r.units()) - t.ioUnits)
}

// extend adapts the reach of the lanes at the end of an interval of ns.
func (p *Policy) extend(ns int64) {
	for lane := range p.reach {
		waited := float64(p.costs.waitedNS[lane]) / float64(max(ns, 1))
		switch {
		case waited > reachMax:
			p.reach[lane] = max(p.reach[lane]*reachDown, 1)
		case waited < reachMin && p.costs.laneNS(lane) > reachBusy*float64(ns):
			p.reach[lane] = min(p.reach[lane]*reachUp, reachLimit)
		}
	}
}

// Credit implements pipeline.Policy.
//
// hot: 0 allocs
func (p *Policy) Credit(t tenant.ID) int {
	return p.tenants[t].creditUnits
}

// credit computes how much a tenant should have outstanding.
func (p *Policy) credit(ten *tenantState) int {
	level, reach := 0.0, 1.0
	for lane := range ten.active {
		if ten.active[lane] {
			level, reach = max(level, p.level[lane]), max(reach, p.reach[lane])
		}
	}
	if level == 0 { // the tenant is new
		level = creditWindows * float64(p.limit) / float64(ten.weight+max(p.activeWeight[readLane],
			p.activeWeight[writeLane]))
	}
	if ten.ioUnits == 0 {
		return max(int(level*float64(ten.weight)*p.costs.depth/windowOne), 1)
	}
	// Every tenant may have one of the most expensive I/Os outstanding, whatever its credit. So each gets credit for
	// nearly that cost, and a tenant of more weight for more. Credit is for whole I/Os.
	heavier := 1.0
	if p.minWeight > 0 {
		heavier = max(float64(ten.weight)/float64(p.minWeight), 1)
	}
	dear := 1.0
	if ten.ioNS > 0 { // on a drive without costs no I/O is more expensive than another
		dear += maxCostPart * max(float64(p.maxCost())/ten.ioNS-1, 0)
	}
	ios := max(math.Ceil(float64(ten.weight)*level/ten.ioPlace), math.Floor(heavier*dear), 1)
	return int(math.Ceil(min(math.Floor(ios*reach)*ten.ioUnits, maxCredit)))
}

// fill computes the level at which the tenants active in a lane together have creditWindows outstanding. What a tenant
// does not ask for goes to the others.
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

// pushIfEligible puts a tenant into the heap of a lane if it has an I/O there that may be dispatched.
func (p *Policy) pushIfEligible(t tenant.ID, lane int) {
	ten := &p.tenants[t]
	q := &ten.queues[lane]
	if q.pos >= 0 || q.n == 0 || ten.paused >= pausedIOs && ten.pausedNS >= pausedWindows*p.costs.WindowNS() {
		return
	}
	exhausted := p.exhausted(ten)
	p.hold(lane, q, exhausted)
	if !exhausted {
		p.push(lane, t)
	}
}

// hold sets whether a queue is out of its heap because its tenant has used its credit.
func (p *Policy) hold(lane int, q *queue, held bool) {
	if q.held == held {
		return
	}
	q.held = held
	if held {
		p.held[lane]++
	} else {
		p.held[lane]--
	}
}

// exhausted reports whether the tenant has as much at the drive as its credit allows, while other tenants are active.
// Hosts that do not know of credits send more than that. Without this bound, the I/Os of a tenant that the drive serves
// slowly, because they are for one die, would fill the window and leave the other dies idle.
func (p *Policy) exhausted(ten *tenantState) bool {
	if ten.unitsAtDrive < int64(ten.creditUnits) || ten.unitsAtDrive == 0 {
		return false
	}
	for lane := range ten.active {
		if p.activeWeight[lane] > 0 && (!ten.active[lane] || p.activeWeight[lane] > ten.weight) {
			return true
		}
	}
	return false
}
