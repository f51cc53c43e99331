package pipeline

import (
	"math/bits"

	"jbofd/internal/tenant"
)

// WaitBuckets is the number of buckets of a WaitHistogram.
const WaitBuckets = 26

// WaitHistogram counts the waits from arrival to dispatch. Bucket i counts waits below 1 µs << i that no lower bucket
// counts; the last bucket counts all longer ones.
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

// TenantStats are the statistics of a tenant at an SSD.
type TenantStats struct {
	Weight int
	// Share is the tenant's part of the device time that all tenants have used lately, 0 to 1.
	Share float64
	// CostNS is the device time charged to the tenant.
	CostNS int64
	// Credit is how much the tenant should have outstanding at most, in 4 KiB units; 0: no limit.
	Credit int
	// Queued I/Os wait to be dispatched. Inflight I/Os are at the device or wait for data of their host.
	Queued, Inflight int
	Wait             WaitHistogram
	// LimitedNS is how long each reason kept I/Os of the tenant waiting.
	LimitedNS [Limits]int64
	// Limit is the current reason.
	Limit Limit

	lastCostNS int64
}

// samplePeriodNS is how often the pipeline samples what limits each tenant.
const samplePeriodNS = 1_000_000

// sharePeriodNS is the least period over which Share is computed.
const sharePeriodNS = 100 * samplePeriodNS

// sample adds the time since the last sample to LimitedNS of each tenant, under the tenant's current limit. If samples
// follow each other closely the whole interval counts; after a pause, only the time for which the tenant itself waited.
func (p *Pipeline) sample(now int64) {
	dt := now - p.sampledNS
	pause := dt > 2*samplePeriodNS
	for i := range p.tenants {
		ten := &p.tenants[i]
		if ten.held+ten.queued+ten.inflight == 0 {
			continue
		}
		d, l := dt, p.limit(tenant.ID(i), ten)
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

// limit returns why the next I/O of a known tenant is not dispatched.
func (p *Pipeline) limit(t tenant.ID, ten *tenantState) Limit {
	if ten.queued > 0 {
		if l := p.policy.Limit(t); l != Unlimited {
			return l // the policy's queue is the bottleneck, not the cap before it
		}
	}
	if ten.held > 0 {
		return LimitCap
	}
	if c := p.policy.Credit(t); ten.credited && ten.queued == 0 && ten.inflight > 0 && c > 0 &&
		ten.units+ten.lastUnits > c {
		return LimitCredit
	}
	return Unlimited
}

// share computes each tenant's part of the device time used since the last call.
func (p *Pipeline) share() {
	var total int64
	for i := range p.tenants {
		if ten := &p.tenants[i]; ten.known {
			total += p.policy.CostNS(tenant.ID(i)) - ten.stats.lastCostNS
		}
	}
	for i := range p.tenants {
		ten := &p.tenants[i]
		if !ten.known {
			continue
		}
		cost := p.policy.CostNS(tenant.ID(i))
		ten.stats.Share = 0
		if total > 0 {
			ten.stats.Share = float64(cost-ten.stats.lastCostNS) / float64(total)
		}
		ten.stats.lastCostNS = cost
	}
}

// TenantStats stores the statistics of a tenant in s and reports whether the tenant is known.
func (p *Pipeline) TenantStats(t tenant.ID, s *TenantStats) bool {
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

// Stats stores the policy's view of the SSD in s.
func (p *Pipeline) Stats(s *Stats) { p.policy.Stats(s) }
