// Package pipeline decides which I/O of an SSD goes to the device next. A Pipeline is a state machine: it does no I/O,
// reads no clock and takes no lock. The drive calls it with the current time, from one goroutine at a time.
//
//	Enqueue ──> cap of the tenant ──> policy ──> Dispatch ──> [Pause, Resume] ──> Complete
//	               token buckets       order, congestion, credit
//
// A Pipeline holds what all policies share: the tenants, their caps, and statistics of how long each tenant waited and
// why. FIFO is the policy without fairness; the fair policies are in sub-packages.
package pipeline

import (
	"jbofd/internal/invariants"
	"jbofd/internal/tenant"
	"jbofd/internal/tokenbucket"
)

// Settings configure a tenant.
type Settings struct {
	// Weight is the tenant's share relative to other tenants, at least 1.
	Weight int
	Caps   Caps
}

// tenantState is the state of a tenant.
type tenantState struct {
	known, leaving, capped bool
	settings               Settings
	caps                   [buckets]tokenbucket.Bucket
	// first and last are the ends of the queues of held I/Os, which wait for the cap; noTag if empty. held is their
	// number over all classes. Each class has a queue of its own so that writes do not wait for the cap of reads.
	first, last [Classes]Tag
	held        int
	// readyNS is when the caps admit the first held I/O of any class. place is the tenant's index in Pipeline.capped.
	// Both are valid only while held > 0.
	readyNS int64
	place   int
	// sinceNS is when the tenant last began to have I/Os held or queued.
	sinceNS int64
	// queued counts I/Os in the policy's queues, inflight those dispatched. The tenant is idle if held, queued and
	// inflight are all zero.
	queued, inflight int
	// units is the sum of the credit units of the tenant's I/Os, lastUnits the units of the I/O that arrived last, at
	// arrivedNS. credited is set if the tenant's hosts observe their credit.
	units, lastUnits int
	credited         bool
	arrivedNS        int64
	stats            TenantStats
}

// request is an I/O between Enqueue and Complete.
type request struct {
	io        IO
	state     requestState
	arrivedNS int64
	// serial orders I/Os by arrival.
	serial uint64
	// next and prev link the held I/Os of a tenant and class.
	next, prev Tag
}

// absent is the state of a tenant that was not announced.
var absent = tenantState{first: [Classes]Tag{noTag, noTag, noTag}, last: [Classes]Tag{noTag, noTag, noTag}}

type requestState uint8

const (
	free requestState = iota
	held
	queued
	inflight
	paused
)

// Pipeline schedules the I/O of an SSD.
type Pipeline struct {
	policy  Policy
	tenants []tenantState
	ios     []request // by tag
	// capped lists the tenants with held I/Os as a binary heap ordered by readyNS, so that the cost of caps does not
	// grow linearly with the number of waiting tenants.
	capped []tenant.ID
	// releaseNS is releasePeriodNS; tests change it.
	releaseNS int64
	serial    uint64
	queued    int
	// held is how many of the queued I/Os wait for a cap.
	held      int
	inflight  int
	sampledNS int64
	sharedNS  int64
}

// New returns a Pipeline with the given policy.
func New(policy Policy) *Pipeline { return &Pipeline{policy: policy, releaseNS: releasePeriodNS} }

// Policy returns the policy.
func (p *Pipeline) Policy() Policy { return p.policy }

// SetTenant announces a tenant, or changes the settings of a known one from now on.
func (p *Pipeline) SetTenant(now int64, t tenant.ID, s Settings) {
	for int(t) >= len(p.tenants) {
		p.tenants = append(p.tenants, absent)
	}
	ten := &p.tenants[t]
	s.Weight = max(s.Weight, 1)
	if !ten.known {
		*ten = absent
		ten.known = true
	}
	ten.leaving = false
	ten.settings = s
	ten.stats.Weight = s.Weight
	rates := [buckets]int64{s.Caps.RWIOsPerSec * ioTokens, s.Caps.RWBytesPerSec, s.Caps.ReadBytesPerSec,
		s.Caps.WriteBytesPerSec}
	ten.capped = rates != [buckets]int64{}
	for i, rate := range rates {
		if rate == 0 {
			ten.caps[i] = tokenbucket.Bucket{}
			continue
		}
		ten.caps[i].SetRate(now, rate, rate/burstsPerSec)
	}
	p.policy.SetTenant(now, t, s.Weight)
	if ten.held > 0 {
		p.fixHeap(now, ten)
		p.release(now) // a cap may be gone
	}
}

// RemoveTenant removes a tenant, at once or when its last I/O has completed.
func (p *Pipeline) RemoveTenant(now int64, t tenant.ID) {
	if !p.Known(t) {
		return
	}
	p.tenants[t].leaving = true
	p.forget(now, t)
}

// forget removes a tenant that is leaving once it has no I/Os.
func (p *Pipeline) forget(now int64, t tenant.ID) {
	ten := &p.tenants[t]
	if !ten.leaving || ten.held+ten.queued+ten.inflight > 0 {
		return
	}
	p.policy.RemoveTenant(now, t)
	*ten = absent
}

// Enqueue queues io. A tenant that was not announced gets weight 1 and no caps.
//
// hot: 0 allocs
func (p *Pipeline) Enqueue(now int64, io IO) {
	for int(io.Tag) >= len(p.ios) {
		p.ios = append(p.ios, request{})
	}
	if !p.Known(io.Tenant) {
		p.SetTenant(now, io.Tenant, Settings{})
	}
	r, ten := &p.ios[io.Tag], &p.tenants[io.Tenant]
	invariants.Check(r.state == free, "pipeline: a tag is used twice")
	ten.lastUnits, ten.arrivedNS = io.Units(), now
	ten.units += ten.lastUnits
	p.serial++
	r.io, r.arrivedNS, r.serial = io, now, p.serial
	p.queued++
	if ten.held+ten.queued == 0 {
		ten.sinceNS = now
	}
	if ten.capped && (ten.held > 0 || !ten.ready(now, io.Op.Class())) {
		p.hold(now, ten, r)
		return
	}
	p.admit(now, ten, r)
}

// KeepsCredit sets whether the hosts of a tenant with I/Os observe the tenant's credit.
//
// hot: 0 allocs
func (p *Pipeline) KeepsCredit(t tenant.ID, keeps bool) { p.tenants[t].credited = keeps }

// admit passes an I/O to the policy.
func (p *Pipeline) admit(now int64, ten *tenantState, r *request) {
	if ten.capped {
		ten.charge(r.io)
	}
	r.state = queued
	ten.queued++
	p.policy.Enqueue(now, r.io)
}

// Cancel removes a queued I/O, frees its tag and reports true. It reports false if the I/O is not queued.
func (p *Pipeline) Cancel(now int64, tag Tag) bool {
	r := &p.ios[tag]
	ten := &p.tenants[r.io.Tenant]
	switch r.state {
	case held:
		p.unlinkHeld(ten, r)
		p.fixHeap(now, ten)
	case queued:
		ten.queued--
		p.policy.Cancel(now, tag)
	default:
		return false
	}
	r.state = free
	ten.units -= r.io.Units()
	p.queued--
	p.forget(now, r.io.Tenant)
	return true
}

// Dispatch appends to dst the I/Os that may go to the device now.
//
// hot: 0 allocs, given room in dst
func (p *Pipeline) Dispatch(now int64, dst []Tag) []Tag {
	pause := now - p.sampledNS
	if pause > 2*samplePeriodNS {
		p.sample(now) // before dispatching: I/Os that are queued now have waited during the pause
	}
	p.release(now)
	n := len(dst)
	dst = p.policy.Dispatch(now, dst)
	for _, tag := range dst[n:] {
		r := &p.ios[tag]
		ten := &p.tenants[r.io.Tenant]
		r.state = inflight
		ten.queued--
		ten.inflight++
		ten.stats.Wait.observe(now - r.arrivedNS)
	}
	p.queued -= len(dst) - n
	p.inflight += len(dst) - n
	if pause >= samplePeriodNS && pause <= 2*samplePeriodNS {
		p.sample(now) // after dispatching: what limits a tenant now counts for the whole period
	}
	return dst
}

// Pause is Policy.Pause.
//
// hot: 0 allocs
func (p *Pipeline) Pause(now int64, tag Tag) {
	p.move(tag, inflight, paused)
	p.inflight--
	p.policy.Pause(now, tag)
}

// Resume is Policy.Resume.
//
// hot: 0 allocs
func (p *Pipeline) Resume(now int64, tag Tag) {
	p.move(tag, paused, inflight)
	p.inflight++
	p.policy.Resume(now, tag)
}

func (p *Pipeline) move(tag Tag, from, to requestState) {
	r := &p.ios[tag]
	if r.state != from {
		panic("pipeline: Pause of an I/O that is not in flight, or Resume of one that is not paused")
	}
	r.state = to
}

// Complete ends a dispatched I/O, whatever its result, and frees its tag.
//
// hot: 0 allocs
func (p *Pipeline) Complete(now int64, tag Tag, res Result) {
	r := &p.ios[tag]
	switch r.state {
	case inflight:
		p.inflight--
	case paused:
	default:
		panic("pipeline: Complete of an I/O that was not dispatched")
	}
	r.state = free
	t := r.io.Tenant
	p.tenants[t].inflight--
	p.tenants[t].units -= r.io.Units()
	p.policy.Complete(now, tag, res)
	if p.tenants[t].leaving {
		p.forget(now, t)
	}
}

// NextWake returns the time, not before now, at which Dispatch should be called again if no other event comes before.
//
// hot: 0 allocs
func (p *Pipeline) NextWake(now int64) (at int64, ok bool) {
	at, ok = p.policy.NextWake()
	if len(p.capped) > 0 {
		if a := p.tenants[p.capped[0]].readyNS; !ok || a < at {
			at, ok = a, true
		}
	}
	return max(at, now), ok
}

// Queued returns the number of I/Os that wait to be dispatched, held ones included.
func (p *Pipeline) Queued() int { return p.queued }

// Held returns the number of I/Os that wait for their tenants' caps.
func (p *Pipeline) Held() int { return p.held }

// Inflight returns the number of I/Os that are dispatched, not paused and not completed.
func (p *Pipeline) Inflight() int { return p.inflight }

// Credit is Policy.Credit; 0 for an unknown tenant.
//
// hot: 0 allocs
func (p *Pipeline) Credit(t tenant.ID) int {
	if !p.Known(t) {
		return 0
	}
	return p.policy.Credit(t)
}

// Known reports whether the tenant was announced and not yet removed.
func (p *Pipeline) Known(t tenant.ID) bool { return int(t) < len(p.tenants) && p.tenants[t].known }

// Tenants appends the numbers of the known tenants to dst.
func (p *Pipeline) Tenants(dst []tenant.ID) []tenant.ID {
	for i := range p.tenants {
		if p.tenants[i].known {
			dst = append(dst, tenant.ID(i))
		}
	}
	return dst
}
