// Package pipeline is one SSD's switch: it decides which I/O goes to the device
// next. It is a machine: it does no I/O, reads no clock and takes no lock; the
// SSD's owner drives it with the time and one goroutine at a time.
//
//	Enqueue ──> cap of the tenant ──> policy ──> Dispatch ──> [Pause, Resume] ──> Complete
//	               token buckets       order, congestion, credit
//
// A Pipeline is the part that all policies share: tenants, their caps, and the
// account of who waited how long for what. FIFO is the vanilla policy; sub-packages
// hold the fair ones.
package pipeline

import (
	"math/bits"

	"jbofd/internal/invariants"
	"jbofd/internal/tokenbucket"
)

// Caps are a tenant's limits at one SSD; 0 is none.
type Caps struct {
	// RWIOsPerSec bounds all I/Os, data or not.
	RWIOsPerSec int64
	// RWBytesPerSec, ReadBytesPerSec and WriteBytesPerSec bound transfers.
	RWBytesPerSec, ReadBytesPerSec, WriteBytesPerSec int64
}

// Settings of a tenant.
type Settings struct {
	// Weight is its share against others', at least 1.
	Weight int
	Caps   Caps
}

// Buckets of a tenant.
const (
	iosBucket = iota
	bytesBucket
	readBucket
	writeBucket
	buckets
)

// tenant is what the pipeline knows of one.
type tenant struct {
	known, leaving, capped bool
	settings               Settings
	caps                   [buckets]tokenbucket.Bucket
	// held are I/Os that wait for the cap, in order.
	heldFirst, heldLast Tag
	held                int
	// queued counts I/Os at the policy, inflight those dispatched. Both and held are
	// zero if the tenant is idle.
	queued, inflight int
	stats            TenantStats
}

// request is an I/O between Enqueue and Complete.
type request struct {
	io        IO
	state     requestState
	arrivedNS int64
	// next and prev link the held ones.
	next, prev Tag
}

type requestState uint8

const (
	free requestState = iota
	held
	queued
	inflight
	paused
)

// WaitBuckets is how many buckets WaitHistogram has.
const WaitBuckets = 26

// WaitHistogram counts waits from arrival to dispatch: bucket i those below
// 1 µs << i, the last one all others.
type WaitHistogram struct {
	Count [WaitBuckets]int64
	SumNS int64
}

// observe counts one wait.
func (h *WaitHistogram) observe(ns int64) {
	i := min(bits.Len64(uint64(ns)/1000), WaitBuckets-1)
	h.Count[i]++
	h.SumNS += ns
}

// TenantStats are a tenant's account at one SSD.
type TenantStats struct {
	Weight int
	// Share is its part of the device time that all tenants used lately, 0 to 1.
	Share float64
	// CostNS is the device time charged to it.
	CostNS int64
	// Credit is what it should have outstanding at most, in 4 KiB units; 0: no matter.
	Credit int
	// Queued wait, Inflight are at the device or wait for their data.
	Queued, Inflight int
	Wait             WaitHistogram
	// LimitedNS is how long it had I/Os waiting, by reason.
	LimitedNS [Limits]int64

	lastCostNS int64
}

// samplePeriodNS is how often the pipeline looks who is limited by what.
const samplePeriodNS = 1_000_000

// sharePeriods is how many samples make one value of Share.
const sharePeriods = 100

// Pipeline is one SSD's switch.
type Pipeline struct {
	policy  Policy
	tenants []tenant
	ios     []request // by tag
	// heldTenants are those with I/Os that wait for a cap.
	heldTenants []Tenant
	queued      int
	inflight    int
	sampledNS   int64
	samples     int
}

// New makes a switch that works by policy.
func New(policy Policy) *Pipeline { return &Pipeline{policy: policy} }

// Policy returns the policy.
func (p *Pipeline) Policy() Policy { return p.policy }

// SetTenant announces a tenant or changes it, from now on.
func (p *Pipeline) SetTenant(now int64, t Tenant, s Settings) {
	for int(t) >= len(p.tenants) {
		p.tenants = append(p.tenants, tenant{heldFirst: noTag, heldLast: noTag})
	}
	ten := &p.tenants[t]
	s.Weight = max(s.Weight, 1)
	if !ten.known {
		*ten = tenant{known: true, heldFirst: noTag, heldLast: noTag}
	}
	ten.leaving = false
	ten.settings = s
	ten.stats.Weight = s.Weight
	rates := [buckets]int64{s.Caps.RWIOsPerSec, s.Caps.RWBytesPerSec, s.Caps.ReadBytesPerSec, s.Caps.WriteBytesPerSec}
	ten.capped = rates != [buckets]int64{}
	for i, rate := range rates {
		if rate == 0 {
			ten.caps[i] = tokenbucket.Bucket{}
			continue
		}
		ten.caps[i].SetRate(now, rate, rate/burstsPerSec)
	}
	p.policy.SetTenant(now, t, s.Weight)
	p.release(now) // a cap may be gone
}

// burstsPerSec bounds what a capped tenant saves up while it asks for nothing: the
// part of a second's worth that lets a late timer lose nothing and a cap hold within
// a few percent over any second.
const burstsPerSec = 50

// RemoveTenant forgets a tenant: at once, or when its last I/O has completed.
func (p *Pipeline) RemoveTenant(now int64, t Tenant) {
	if int(t) >= len(p.tenants) || !p.tenants[t].known {
		return
	}
	p.tenants[t].leaving = true
	p.forget(now, t)
}

// forget removes a tenant that leaves and has nothing left.
func (p *Pipeline) forget(now int64, t Tenant) {
	ten := &p.tenants[t]
	if !ten.leaving || ten.held+ten.queued+ten.inflight > 0 {
		return
	}
	p.policy.RemoveTenant(now, t)
	*ten = tenant{heldFirst: noTag, heldLast: noTag}
}

// Enqueue queues io. A tenant that nobody announced has weight 1 and no caps.
//
// hot: 0 allocs
func (p *Pipeline) Enqueue(now int64, io IO) {
	for int(io.Tag) >= len(p.ios) {
		p.ios = append(p.ios, request{})
	}
	if int(io.Tenant) >= len(p.tenants) || !p.tenants[io.Tenant].known {
		p.SetTenant(now, io.Tenant, Settings{})
	}
	r, ten := &p.ios[io.Tag], &p.tenants[io.Tenant]
	invariants.Check(r.state == free, "pipeline: a tag is used twice")
	r.io, r.arrivedNS = io, now
	p.queued++
	if ten.capped && (ten.held > 0 || !ten.ready(now, io.Op)) {
		p.hold(ten, r)
		return
	}
	p.admit(now, ten, r)
}

// ready reports whether the caps let an I/O in.
func (t *tenant) ready(now int64, op Op) bool {
	if !t.caps[iosBucket].Ready(now) || !t.caps[bytesBucket].Ready(now) {
		return false
	}
	switch op.Class() {
	case ReadClass:
		return t.caps[readBucket].Ready(now)
	case WriteClass:
		return t.caps[writeBucket].Ready(now)
	}
	return true
}

// readyAt is when the caps let an I/O in.
func (t *tenant) readyAt(now int64, op Op) int64 {
	at := max(t.caps[iosBucket].NextToken(now), t.caps[bytesBucket].NextToken(now))
	switch op.Class() {
	case ReadClass:
		at = max(at, t.caps[readBucket].NextToken(now))
	case WriteClass:
		at = max(at, t.caps[writeBucket].NextToken(now))
	}
	return at
}

// charge pays for an I/O.
func (t *tenant) charge(io IO) {
	t.caps[iosBucket].Take(1)
	switch io.Op.Class() {
	case ReadClass:
		t.caps[bytesBucket].Take(io.LenBytes)
		t.caps[readBucket].Take(io.LenBytes)
	case WriteClass:
		t.caps[bytesBucket].Take(io.LenBytes)
		t.caps[writeBucket].Take(io.LenBytes)
	}
}

// hold keeps an I/O back for its tenant's cap.
func (p *Pipeline) hold(ten *tenant, r *request) {
	r.state, r.next, r.prev = held, noTag, ten.heldLast
	if ten.held == 0 {
		ten.heldFirst = r.io.Tag
		p.heldTenants = append(p.heldTenants, r.io.Tenant)
	} else {
		p.ios[ten.heldLast].next = r.io.Tag
	}
	ten.heldLast = r.io.Tag
	ten.held++
}

// unhold takes a held I/O out of its list. A tenant with none left stays in
// heldTenants until release looks.
func (p *Pipeline) unhold(ten *tenant, r *request) {
	if r.prev == noTag {
		ten.heldFirst = r.next
	} else {
		p.ios[r.prev].next = r.next
	}
	if r.next == noTag {
		ten.heldLast = r.prev
	} else {
		p.ios[r.next].prev = r.prev
	}
	ten.held--
}

// admit gives an I/O to the policy.
func (p *Pipeline) admit(now int64, ten *tenant, r *request) {
	if ten.capped {
		ten.charge(r.io)
	}
	r.state = queued
	ten.queued++
	p.policy.Enqueue(now, r.io)
}

// release admits what the caps let in by now.
func (p *Pipeline) release(now int64) {
	kept := p.heldTenants[:0]
	for _, t := range p.heldTenants {
		ten := &p.tenants[t]
		for ten.held > 0 {
			r := &p.ios[ten.heldFirst]
			if !ten.ready(now, r.io.Op) {
				break
			}
			p.unhold(ten, r)
			p.admit(now, ten, r)
		}
		if ten.held > 0 {
			kept = append(kept, t)
		}
	}
	p.heldTenants = kept
}

// Cancel takes a queued I/O out and reports whether it was queued; if so, its tag is
// free.
func (p *Pipeline) Cancel(now int64, tag Tag) bool {
	r := &p.ios[tag]
	ten := &p.tenants[r.io.Tenant]
	switch r.state {
	case held:
		p.unhold(ten, r)
		if ten.held == 0 {
			p.release(now) // drops it from heldTenants
		}
	case queued:
		ten.queued--
		p.policy.Cancel(now, tag)
	default:
		return false
	}
	r.state = free
	p.queued--
	p.forget(now, r.io.Tenant)
	return true
}

// Dispatch appends to dst the I/Os that may go to the device now.
//
// hot: 0 allocs, given room in dst
func (p *Pipeline) Dispatch(now int64, dst []Tag) []Tag {
	if now-p.sampledNS >= samplePeriodNS {
		p.sample(now)
	}
	if len(p.heldTenants) > 0 {
		p.release(now)
	}
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
		panic("pipeline: an I/O is paused or resumed out of turn")
	}
	r.state = to
}

// Complete says that a dispatched I/O is over, one way or another. Its tag is free.
//
// hot: 0 allocs
func (p *Pipeline) Complete(now int64, tag Tag, res Result) {
	r := &p.ios[tag]
	switch r.state {
	case inflight:
		p.inflight--
	case paused:
	default:
		panic("pipeline: completion without dispatch")
	}
	r.state = free
	t := r.io.Tenant
	p.tenants[t].inflight--
	p.policy.Complete(now, tag, res)
	if p.tenants[t].leaving {
		p.forget(now, t)
	}
}

// NextWake is the time at which Dispatch may have more without any event before it.
// now is the time of the Dispatch before.
func (p *Pipeline) NextWake(now int64) (at int64, ok bool) {
	at, ok = p.policy.NextWake()
	for _, t := range p.heldTenants {
		ten := &p.tenants[t]
		if ten.held == 0 {
			continue
		}
		if a := ten.readyAt(now, p.ios[ten.heldFirst].io.Op); !ok || a < at {
			at, ok = a, true
		}
	}
	return at, ok
}

// Queued is how many I/Os wait to be dispatched.
func (p *Pipeline) Queued() int { return p.queued }

// Inflight is how many were dispatched and not completed or paused.
func (p *Pipeline) Inflight() int { return p.inflight }

// Credit is Policy.Credit; 0 for a tenant nobody announced.
//
// hot: 0 allocs
func (p *Pipeline) Credit(t Tenant) int {
	if int(t) >= len(p.tenants) || !p.tenants[t].known {
		return 0
	}
	return p.policy.Credit(t)
}

// sample charges the time since the last sample to what limited each tenant.
func (p *Pipeline) sample(now int64) {
	dt := now - p.sampledNS
	p.sampledNS = now
	if dt > 2*samplePeriodNS && p.queued == 0 {
		dt = 0 // there was nothing to do in between
	}
	p.samples++
	var total int64
	for i := range p.tenants {
		ten := &p.tenants[i]
		if !ten.known {
			continue
		}
		switch {
		case ten.held > 0:
			ten.stats.LimitedNS[LimitCap] += dt
		case ten.queued > 0:
			ten.stats.LimitedNS[p.policy.Limit(Tenant(i))] += dt
		}
		if p.samples >= sharePeriods {
			total += p.policy.CostNS(Tenant(i)) - ten.stats.lastCostNS
		}
	}
	if p.samples < sharePeriods {
		return
	}
	p.samples = 0
	for i := range p.tenants {
		ten := &p.tenants[i]
		if !ten.known {
			continue
		}
		cost := p.policy.CostNS(Tenant(i))
		ten.stats.Share = 0
		if total > 0 {
			ten.stats.Share = float64(cost-ten.stats.lastCostNS) / float64(total)
		}
		ten.stats.lastCostNS = cost
	}
}

// Tenants appends the numbers of the tenants known.
func (p *Pipeline) Tenants(dst []Tenant) []Tenant {
	for i := range p.tenants {
		if p.tenants[i].known {
			dst = append(dst, Tenant(i))
		}
	}
	return dst
}

// TenantStats writes a tenant's account and reports whether it is known.
func (p *Pipeline) TenantStats(t Tenant, s *TenantStats) bool {
	if int(t) >= len(p.tenants) || !p.tenants[t].known {
		return false
	}
	ten := &p.tenants[t]
	*s = ten.stats
	s.Queued, s.Inflight = ten.held+ten.queued, ten.inflight
	s.CostNS, s.Credit = p.policy.CostNS(t), p.policy.Credit(t)
	return true
}

// Stats writes the policy's view of the SSD.
func (p *Pipeline) Stats(s *Stats) { p.policy.Stats(s) }
