// Package gimbal is the policy of the Gimbal paper: deficit round robin over virtual slots, a dual token bucket whose
// rate follows latency, and a write cost that follows the drive.
//
//	Enqueue ──> drr (weighted by write cost) ──> parked I/O ──> dual bucket ──> Dispatch
//	             ^ slot is free                    strict head of line           │
//	Complete ────┴── latency monitor ──> target rate, write cost <───────────────┘
//
// It exists for comparison, so it keeps the paper's mechanism with its weak points: tenants have no weights, constants
// are those of the drive for which the paper was tuned, flush, deallocate and write zeroes are reads of length 0, and
// unused slots are not lent. Package jbof repairs these. Only faults of the released code that stop or falsify the
// mechanism are repaired here: I/Os that overtake one that waits for tokens, the write latency that is always 0,
// stranded I/Os of length 0, removed tenants that still count, and the missing timer for when tokens suffice.
//
// Source: Gimbal (SIGCOMM'21) and its released code.
package gimbal

import (
	"jbofd/internal/congestion"
	"jbofd/internal/drr"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/tokenbucket"
)

// Constants of the released code, tuned by its authors for a Samsung DCT983.
const (
	// Slots is how many virtual slots the active tenants share, SlotBytes the weighted length at which a slot is full,
	// and QuantumBytes what a turn adds to a deficit.
	Slots        = 8
	SlotBytes    = 128 << 10
	QuantumBytes = 128 << 10
	// BucketBytes is the capacity of each side of the dual bucket.
	BucketBytes = 256 << 10
	// LatencyMinNS and LatencyMaxNS bound the latency threshold of either class.
	LatencyMinNS = 250_000
	LatencyMaxNS = 1_500_000
	// The target rate begins at RateStartBytesPerSec and stays between Min and Max.
	RateStartBytesPerSec = 1000 << 20
	RateMinBytesPerSec   = 50 << 20
	RateMaxBytesPerSec   = 4 << 30
	// CompletionWindowBytes is the length of the window of the completion rate.
	CompletionWindowBytes = 16 << 20
	// WriteCostWorst is the highest and the initial write cost, in units of 1/congestion.CostOne.
	WriteCostWorst = 9 * congestion.CostOne
	// WriteCostPeriodNS is how often the write cost is estimated.
	WriteCostPeriodNS = 100_000_000
	// CreditUnitBytes is the size of a credit unit, CreditMax the largest credit.
	CreditUnitBytes = 4 << 10
	CreditMax       = 65535
)

// Config of a Policy.
type Config struct {
	// Depth is the maximum number of I/Os at the device, at least 1. The paper has no such limit, because slots bound
	// the I/Os; but the queue of a device is bounded.
	Depth int
}

const noTag = ^pipeline.Tag(0)

// request is an I/O between Enqueue and Complete.
type request struct {
	tenant tenant.ID
	side   tokenbucket.Side
	// atDevice: dispatched and not paused.
	atDevice bool
	// lenBytes is what it moves, 0 for OtherClass.
	lenBytes int64
}

// Policy implements pipeline.Policy.
type Policy struct {
	depth  int
	drr    *drr.Scheduler
	bucket tokenbucket.Dual
	// monitors and states are indexed by class: ReadClass, WriteClass.
	monitors [2]congestion.Monitor
	states   [2]congestion.State
	rate     congestion.Rate
	cost     congestion.WriteCost
	ios      []request // by tag
	charged  []int64   // weighted bytes, by tenant
	// parked is the I/O that has left the round and waits for tokens, or noTag. No other I/O overtakes it.
	parked   pipeline.Tag
	atDevice int
	nowNS    int64 // of the last Dispatch
}

var _ pipeline.Policy = (*Policy)(nil)

// New returns a Policy.
func New(cfg Config) *Policy {
	p := &Policy{
		depth: max(cfg.Depth, 1),
		drr: drr.New(drr.Config{
			Slots: Slots, SlotBytes: SlotBytes, QuantumBytes: QuantumBytes,
			FirstIOs: SlotBytes / CreditUnitBytes, FirstUnits: SlotBytes / CreditUnitBytes,
		}),
		bucket: tokenbucket.NewDual(0, BucketBytes),
		rate: congestion.NewRate(congestion.RateLimits{
			StartBytesPerSec: RateStartBytesPerSec, MinBytesPerSec: RateMinBytesPerSec,
			MaxBytesPerSec: RateMaxBytesPerSec,
			WindowBytes:    CompletionWindowBytes,
		}),
		cost: congestion.NewWriteCost(congestion.CostLimits{
			Worst: WriteCostWorst, PeriodNS: WriteCostPeriodNS, BusyNS: LatencyMinNS, AloneNS: LatencyMaxNS,
		}),
		parked: noTag,
	}
	for i := range p.monitors {
		p.monitors[i] = congestion.NewMonitor(congestion.Thresholds{MinNS: LatencyMinNS, MaxNS: LatencyMaxNS})
	}
	p.bucket.SetRate(p.rate.TargetBytesPerSec())
	p.bucket.SetWriteCost(p.cost.Cost())
	return p
}

// Name implements pipeline.Policy.
func (p *Policy) Name() string { return "gimbal" }

// SetTenant implements pipeline.Policy. The paper has no weights: every tenant counts the same.
func (p *Policy) SetTenant(_ int64, t tenant.ID, _ int) {
	for int(t) >= len(p.charged) {
		p.charged = append(p.charged, 0)
	}
	p.drr.SetTenant(tenant.ID(t), 1)
}

// RemoveTenant implements pipeline.Policy.
func (p *Policy) RemoveTenant(_ int64, t tenant.ID) {
	p.drr.Remove(tenant.ID(t), nil) // it has nothing queued that would be returned
	p.charged[t] = 0
}

// Enqueue implements pipeline.Policy.
//
// hot: 0 allocs
func (p *Policy) Enqueue(now int64, io pipeline.IO) {
	p.estimate(now)
	for int(io.Tag) >= len(p.ios) {
		p.ios = append(p.ios, request{})
	}
	r := request{tenant: io.Tenant, side: tokenbucket.ReadSide, lenBytes: io.LenBytes}
	switch io.Op.Class() {
	case pipeline.WriteClass:
		r.side = tokenbucket.WriteSide
	case pipeline.OtherClass:
		r.lenBytes = 0
	}
	p.ios[io.Tag] = r
	p.drr.Enqueue(tenant.ID(io.Tenant), drr.Tag(io.Tag))
}

// Cancel implements pipeline.Policy. The slot of a parked I/O is free.
func (p *Policy) Cancel(_ int64, tag pipeline.Tag) {
	if tag == p.parked {
		p.parked = noTag
		p.drr.Complete(drr.Tag(tag))
		return
	}
	p.drr.Cancel(drr.Tag(tag))
}

// estimate updates the write cost.
func (p *Policy) estimate(now int64) {
	if p.cost.Advance(now) {
		p.bucket.SetWriteCost(p.cost.Cost())
	}
}

// weigh returns the cost of an I/O in read bytes.
func (p *Policy) weigh(r *request) int64 {
	if r.side == tokenbucket.WriteSide {
		return p.cost.Weigh(r.lenBytes)
	}
	return r.lenBytes
}

// Dispatch implements pipeline.Policy.
//
// hot: 0 allocs, given room in dst
func (p *Policy) Dispatch(now int64, dst []pipeline.Tag) []pipeline.Tag {
	p.nowNS = now
	p.estimate(now)
	p.bucket.Refill(now)
	for p.atDevice < p.depth {
		if p.parked == noTag && !p.take() {
			break
		}
		r := &p.ios[p.parked]
		if !p.bucket.Ready(r.side, r.lenBytes) {
			break
		}
		p.bucket.Take(r.side, r.lenBytes)
		r.atDevice = true
		p.atDevice++
		dst = append(dst, p.parked)
		p.parked = noTag
	}
	return dst
}

// take parks the I/O whose turn it is and reports whether there is one.
func (p *Policy) take() bool {
	for {
		tag, ok := p.drr.Head()
		if !ok {
			return false
		}
		r := &p.ios[tag]
		weighted := p.weigh(r)
		if !p.drr.Serve(drr.Load{WeightedBytes: weighted, Units: units(r.lenBytes)}) {
			continue
		}
		p.charged[r.tenant] += weighted
		p.parked = pipeline.Tag(tag)
		return true
	}
}

// units returns the length in CreditUnitBytes, rounded up, at least 1.
func units(lenBytes int64) int64 {
	return max(1, (lenBytes+CreditUnitBytes-1)/CreditUnitBytes)
}

// Pause implements pipeline.Policy. The I/O keeps its slot, which belongs to its tenant, and the tokens that it took.
//
// hot: 0 allocs
func (p *Policy) Pause(_ int64, tag pipeline.Tag) {
	r := &p.ios[tag]
	if !r.atDevice {
		panic("gimbal: pause without dispatch")
	}
	r.atDevice = false
	p.atDevice--
}

// Resume implements pipeline.Policy.
//
// hot: 0 allocs
func (p *Policy) Resume(_ int64, tag pipeline.Tag) {
	p.ios[tag].atDevice = true
	p.atDevice++
}

// Complete implements pipeline.Policy. An I/O that failed or never reached the device frees its slot and counts as
// completed, but its latency is ignored.
//
// hot: 0 allocs
func (p *Policy) Complete(now int64, tag pipeline.Tag, res pipeline.Result) {
	p.estimate(now)
	r := &p.ios[tag]
	if r.atDevice {
		r.atDevice = false
		p.atDevice--
	}
	p.rate.Completed(now, r.lenBytes)
	p.drr.Complete(drr.Tag(tag))
	if res.Failed || res.LatencyNS <= 0 {
		return
	}
	class := pipeline.ReadClass
	if r.side == tokenbucket.WriteSide {
		class = pipeline.WriteClass
		p.cost.Write(res.LatencyNS)
	} else {
		p.cost.Read()
	}
	p.states[class] = p.monitors[class].Observe(res.LatencyNS)
	if p.rate.Observe(p.states[class], r.lenBytes) {
		p.bucket.Discard()
	}
	p.bucket.SetRate(p.rate.TargetBytesPerSec())
}

// NextWake implements pipeline.Policy: the time at which tokens suffice for the parked
// I/O, or the next estimate of the write cost, which changes that time.
func (p *Policy) NextWake() (at int64, ok bool) {
	if p.atDevice >= p.depth {
		return 0, false
	}
	if p.parked == noTag {
		_, ok = p.drr.Head() // the parked I/O was cancelled, so the next one may go at once
		return p.nowNS, ok
	}
	r := &p.ios[p.parked]
	return min(p.bucket.NextToken(r.side, r.lenBytes), p.cost.NextNS()), true
}

// Credit implements pipeline.Policy: what the slots that the tenant may use would hold if each held what
// its last completed one did. In the paper that is a number of I/Os; here each of them counts in
// units of CreditUnitBytes, rounded up.
func (p *Policy) Credit(t tenant.ID) int {
	return int(min(max(1, int64(p.drr.MaxSlots())*p.drr.SlotUnits(tenant.ID(t))), CreditMax))
}

// Limit implements pipeline.Policy.
func (p *Policy) Limit(t tenant.ID) pipeline.Limit {
	switch {
	case p.parked != noTag && p.ios[p.parked].tenant == t:
		return pipeline.LimitSSD
	case p.drr.Queued(tenant.ID(t)) == 0:
		return pipeline.Unlimited
	case p.drr.Deferred(tenant.ID(t)) && p.drr.NumActive() > 1:
		return pipeline.LimitShare
	}
	return pipeline.LimitSSD
}

// CostNS implements pipeline.Policy; it counts weighted bytes.
func (p *Policy) CostNS(t tenant.ID) int64 { return p.charged[t] }

// Stats implements pipeline.Policy.
func (p *Policy) Stats(s *pipeline.Stats) {
	*s = pipeline.Stats{
		WriteCost:            float64(p.cost.Cost()) / congestion.CostOne,
		TargetBytesPerSec:    float64(p.rate.TargetBytesPerSec()),
		CompletedBytesPerSec: float64(p.rate.CompletedBytesPerSec()),
		ActiveTenants:        p.drr.NumActive(),
	}
	for i := range p.monitors {
		s.Class[i] = pipeline.ClassStats{
			LatencyNS: p.monitors[i].LatencyNS(), ThresholdNS: p.monitors[i].ThresholdNS(),
			State: pipeline.State(p.states[i]), // the same order; a test holds them to it
		}
	}
}
