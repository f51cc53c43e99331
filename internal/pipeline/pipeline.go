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
	"math"
	"math/bits"

	"jbofd/internal/invariants"
	"jbofd/internal/tokenbucket"
)

// Caps are a tenant's limits at one SSD; 0 is none.
type Caps struct {
	// RWIOsPerSec bounds all I/Os, data or not.
	RWIOsPerSec int64
	// RWBytesPerSec, ReadBytesPerSec and WriteBytesPerSec bound transfers. An I/O may
	// begin as long as nothing is owed for those before it, however large it is.
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
	// first and last are the ends of the queues of I/Os that wait for the cap, noTag if
	// empty; held is how many wait in all. Classes have queues of their own so that
	// writes do not wait for the cap of reads.
	first, last [Classes]Tag
	held        int
	// readyNS is when the caps let the first of any class in, and place where the tenant
	// stands in Pipeline.capped; both are of no meaning with none held.
	readyNS int64
	place   int
	// sinceNS is when it began to have I/Os held or queued.
	sinceNS int64
	// queued counts I/Os at the policy, inflight those dispatched. Both and held are
	// zero if the tenant is idle.
	queued, inflight int
	// units are what all of them count for against the credit, and lastUnits what the one
	// that came last, at arrivedNS, does; credited: its hosts keep to the credit.
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
	// serial tells which of two I/Os came first.
	serial uint64
	// next and prev link the held ones.
	next, prev Tag
}

// absent is a tenant that nobody announced.
var absent = tenant{first: [Classes]Tag{noTag, noTag, noTag}, last: [Classes]Tag{noTag, noTag, noTag}}

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
	// Limit is the reason now.
	Limit Limit

	lastCostNS int64
}

// samplePeriodNS is how often the pipeline looks who is limited by what.
const samplePeriodNS = 1_000_000

// releasePeriodNS is the grid of the times at which held I/Os are let in: those of a
// high cap, and those of several tenants, go together, which saves most of what each
// alone would cost. Nothing is lost, for tokens are saved up meanwhile.
const releasePeriodNS = 200_000

// sharePeriodNS is what one value of Share covers at least.
const sharePeriodNS = 100 * samplePeriodNS

// Pipeline is one SSD's switch.
type Pipeline struct {
	policy  Policy
	tenants []tenant
	ios     []request // by tag
	// capped are the tenants with I/Os held, a binary heap by readyNS: the work that
	// caps make does not grow with the tenants that wait.
	capped []Tenant
	// releaseNS is Pipeline's releasePeriodNS, but for tests.
	releaseNS int64
	serial    uint64
	queued    int
	// held are those of the queued that caps keep back.
	held      int
	inflight  int
	sampledNS int64
	sharedNS  int64
}

// New makes a switch that works by policy.
func New(policy Policy) *Pipeline { return &Pipeline{policy: policy, releaseNS: releasePeriodNS} }

// Policy returns the policy.
func (p *Pipeline) Policy() Policy { return p.policy }

// SetTenant announces a tenant or changes it, from now on.
func (p *Pipeline) SetTenant(now int64, t Tenant, s Settings) {
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
	rates := [buckets]int64{s.Caps.RWIOsPerSec * ioTokens, s.Caps.RWBytesPerSec, s.Caps.ReadBytesPerSec, s.Caps.WriteBytesPerSec}
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
		p.place(now, ten)
		p.release(now) // a cap may be gone
	}
}

// ioTokens is what an I/O costs in the bucket of I/Os: a part of one can be saved up.
const ioTokens = 1000

// burstsPerSec bounds what a capped tenant saves up while it asks for nothing: the
// part of a second's worth that lets a late timer lose nothing and a cap hold within
// a few percent over any second.
const burstsPerSec = 50

// RemoveTenant forgets a tenant: at once, or when its last I/O has completed.
func (p *Pipeline) RemoveTenant(now int64, t Tenant) {
	if !p.Known(t) {
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
	*ten = absent
}

// Enqueue queues io. A tenant that nobody announced has weight 1 and no caps.
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

// KeepsCredit says of a tenant with I/Os whether its hosts send no more than its credit
// allows.
//
// hot: 0 allocs
func (p *Pipeline) KeepsCredit(t Tenant, keeps bool) { p.tenants[t].credited = keeps }

// transferBucket is the bucket of one direction, of those that move data.
var transferBucket = [Classes]int{ReadClass: readBucket, WriteClass: writeBucket}

// ready reports whether the caps let an I/O of that class in.
func (t *tenant) ready(now int64, c Class) bool {
	return t.caps[iosBucket].Ready(now) &&
		(c == OtherClass || t.caps[bytesBucket].Ready(now) && t.caps[transferBucket[c]].Ready(now))
}

// readyAt is when they do.
func (t *tenant) readyAt(now int64, c Class) int64 {
	at := t.caps[iosBucket].NextToken(now)
	if c != OtherClass {
		at = max(at, t.caps[bytesBucket].NextToken(now), t.caps[transferBucket[c]].NextToken(now))
	}
	return at
}

// charge pays for an I/O.
func (t *tenant) charge(io IO) {
	t.caps[iosBucket].Take(ioTokens)
	if c := io.Op.Class(); c != OtherClass {
		t.caps[bytesBucket].Take(io.LenBytes)
		t.caps[transferBucket[c]].Take(io.LenBytes)
	}
}

// hold keeps an I/O back for its tenant's cap.
func (p *Pipeline) hold(now int64, ten *tenant, r *request) {
	class := r.io.Op.Class()
	r.state, r.next, r.prev = held, noTag, ten.last[class]
	ten.last[class] = r.io.Tag
	p.held++
	if ten.held++; ten.held == 1 {
		ten.place = len(p.capped)
		p.capped = append(p.capped, r.io.Tenant)
	}
	if r.prev != noTag {
		p.ios[r.prev].next = r.io.Tag
		return
	}
	ten.first[class] = r.io.Tag
	p.place(now, ten)
}

// unhold takes a held I/O out of its queue. The caller sees to the tenant's place.
func (p *Pipeline) unhold(ten *tenant, r *request) {
	class := r.io.Op.Class()
	if r.prev == noTag {
		ten.first[class] = r.next
	} else {
		p.ios[r.prev].next = r.next
	}
	if r.next == noTag {
		ten.last[class] = r.prev
	} else {
		p.ios[r.next].prev = r.prev
	}
	ten.held--
	p.held--
}

// readyNS is when the caps let the first held I/O of any class in, on the grid of
// releaseNS.
func (p *Pipeline) readyNS(now int64, ten *tenant) int64 {
	at := int64(math.MaxInt64)
	for c, tag := range ten.first {
		if tag != noTag {
			at = min(at, ten.readyAt(now, Class(c)))
		}
	}
	if rest := at % p.releaseNS; rest > 0 && at < math.MaxInt64-p.releaseNS {
		at += p.releaseNS - rest
	}
	return at
}

// oldest is the held I/O that came first among those that the caps let in now; nil
// if there is none.
func (p *Pipeline) oldest(now int64, ten *tenant) (first *request) {
	for c, tag := range ten.first {
		if tag == noTag {
			continue
		}
		if r := &p.ios[tag]; (first == nil || r.serial < first.serial) && ten.ready(now, Class(c)) {
			first = r
		}
	}
	return first
}

// place puts a tenant where it belongs in the heap after a change of its caps or of
// the first that it has held; with none held it goes out.
func (p *Pipeline) place(now int64, ten *tenant) {
	i := ten.place
	if ten.held == 0 {
		last := len(p.capped) - 1
		p.swap(i, last)
		p.capped = p.capped[:last]
		if i == last {
			return
		}
	} else {
		ten.readyNS = p.readyNS(now, ten)
	}
	for i > 0 && p.before(i, (i-1)/2) {
		p.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		child := 2*i + 1
		if child+1 < len(p.capped) && p.before(child+1, child) {
			child++
		}
		if child >= len(p.capped) || !p.before(child, i) {
			return
		}
		p.swap(i, child)
		i = child
	}
}

func (p *Pipeline) before(i, j int) bool {
	return p.tenants[p.capped[i]].readyNS < p.tenants[p.capped[j]].readyNS
}

func (p *Pipeline) swap(i, j int) {
	p.capped[i], p.capped[j] = p.capped[j], p.capped[i]
	p.tenants[p.capped[i]].place, p.tenants[p.capped[j]].place = i, j
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
	for len(p.capped) > 0 {
		ten := &p.tenants[p.capped[0]]
		if ten.readyNS > now {
			return
		}
		for r := p.oldest(now, ten); r != nil; r = p.oldest(now, ten) {
			p.unhold(ten, r)
			p.admit(now, ten, r)
		}
		p.place(now, ten)
	}
}

// Cancel takes a queued I/O out and reports whether it was queued; if so, its tag is
// free.
func (p *Pipeline) Cancel(now int64, tag Tag) bool {
	r := &p.ios[tag]
	ten := &p.tenants[r.io.Tenant]
	switch r.state {
	case held:
		p.unhold(ten, r)
		p.place(now, ten)
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
		p.sample(now) // nothing was decided meanwhile: who waits now has waited
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
		p.sample(now) // who still waits stands for the whole period
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
	p.tenants[t].units -= r.io.Units()
	p.policy.Complete(now, tag, res)
	if p.tenants[t].leaving {
		p.forget(now, t)
	}
}

// NextWake is the time, now or later, at which Dispatch may have more without any
// event before it.
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

// Queued is how many I/Os wait to be dispatched.
func (p *Pipeline) Queued() int { return p.queued }

// Held is how many of those only wait for their tenants' caps.
func (p *Pipeline) Held() int { return p.held }

// Inflight is how many were dispatched and not completed or paused.
func (p *Pipeline) Inflight() int { return p.inflight }

// Credit is Policy.Credit; 0 for a tenant nobody announced.
//
// hot: 0 allocs
func (p *Pipeline) Credit(t Tenant) int {
	if !p.Known(t) {
		return 0
	}
	return p.policy.Credit(t)
}

// sample charges the time since the last sample to what limits each tenant. Between
// samples that follow each other closely a tenant that waits now stands for the
// whole time; after a pause its own waiting counts.
func (p *Pipeline) sample(now int64) {
	dt := now - p.sampledNS
	pause := dt > 2*samplePeriodNS
	for i := range p.tenants {
		ten := &p.tenants[i]
		if ten.held+ten.queued+ten.inflight == 0 {
			continue
		}
		d, l := dt, p.limit(Tenant(i), ten)
		if pause {
			since := ten.sinceNS
			if l == LimitCredit {
				since = ten.arrivedNS
			}
			d = now - max(p.sampledNS, since)
		}
		ten.stats.LimitedNS[l] += d
	}
	p.sampledNS = now
	if now-p.sharedNS >= sharePeriodNS {
		p.sharedNS = now
		p.share()
	}
}

// limit is what keeps a known tenant's next I/O back.
func (p *Pipeline) limit(t Tenant, ten *tenant) Limit {
	if ten.queued > 0 {
		if l := p.policy.Limit(t); l != Unlimited {
			return l // the SSD does not even take what the cap lets through
		}
	}
	if ten.held > 0 {
		return LimitCap
	}
	if c := p.policy.Credit(t); ten.credited && ten.queued == 0 && ten.inflight > 0 && c > 0 && ten.units+ten.lastUnits > c {
		return LimitCredit
	}
	return Unlimited
}

// share makes each tenant's part of the device time since the last time.
func (p *Pipeline) share() {
	var total int64
	for i := range p.tenants {
		if ten := &p.tenants[i]; ten.known {
			total += p.policy.CostNS(Tenant(i)) - ten.stats.lastCostNS
		}
	}
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

// Known reports whether a tenant was announced and not forgotten.
func (p *Pipeline) Known(t Tenant) bool { return int(t) < len(p.tenants) && p.tenants[t].known }

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
	if !p.Known(t) {
		return false
	}
	ten := &p.tenants[t]
	*s = ten.stats
	s.Queued, s.Inflight = ten.held+ten.queued, ten.inflight
	s.CostNS, s.Credit = p.policy.CostNS(t), p.policy.Credit(t)
	s.Limit = p.limit(t, ten)
	return true
}

// Stats writes the policy's view of the SSD.
func (p *Pipeline) Stats(s *Stats) { p.policy.Stats(s) }
