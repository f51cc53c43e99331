package baseline

import (
	"math"
	"slices"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// IOCostConfig configures an IOCost. Zero fields get their defaults.
type IOCostConfig struct {
	// Depth is the maximum number of I/Os at the device, at least 1: the number of requests of the kernel's queue.
	Depth int
	// Read and Write are the drive's cost model (io.cost.model).
	Read, Write LinearCost
	// ReadTargetNS, WriteTargetNS and Met are the goals for latency (io.cost.qos): the fraction Met of all reads, and
	// of all writes, is to take at most that long at the device. The defaults are 5 ms, as the kernel has for fast
	// SSDs, and 0.95.
	ReadTargetNS, WriteTargetNS int64
	Met                         float64
	// LeastRate and MostRate bound how fast virtual time passes. The defaults are the kernel's, 0.01 and 100.
	LeastRate, MostRate float64
}

// The kernel's constants. Margins are fractions of a period.
const (
	minMargin, lowMargin, targetMargin = 0.10, 0.20, 0.50
	// raise is the part of a tenant's weight by which its share grows again while it runs out of budget.
	raise = 0.25
	// Above fullBusy of the time with requests that wait for a place at the device, the drive is too busy. Below
	// notBusy of each limit it is not.
	fullBusy, notBusy = 0.05, 0.75
	// lagging is the number of periods after which an I/O that takes longer is not waited for.
	lagging = 10
	// leastPeriodNS and mostPeriodNS bound the period, which is twice the longer target.
	leastPeriodNS, mostPeriodNS = 1e6, 1e9
	defaultTargetNS             = 5_000_000
)

// rateStep returns by what fraction the rate changes after so many periods in a row that were too busy, or not busy
// enough.
func rateStep(periods int) float64 {
	switch {
	case periods < 4:
		return 0
	case periods < 20:
		return 0.01
	case periods < 36:
		return 0.02
	case periods < 44:
		return 0.04
	case periods < 52:
		return 0.08
	}
	return 0.16
}

// payer is the state of a tenant. Times without a unit are virtual: nanoseconds of the drive by the cost model.
type payer struct {
	queue    queue
	inflight int
	weight   float64
	// inUse is the part of weight that counts; the rest is lent to others. 0: the tenant is not active.
	inUse float64
	// spent is the virtual time up to which the tenant has paid, done the same without I/Os at the device. Their
	// distance to the drive's virtual time is the budget.
	spent, done float64
	// margin is the budget that was left when inUse was last determined.
	margin float64
	// used is the cost of the I/Os since the period began, at their price for a tenant that is alone.
	used     float64
	activeNS int64
	period   uint64 // of the last Enqueue
	heapAt   int    // index in the heap; valid if something is queued
	// due is the virtual time from which the first queued I/O may be dispatched.
	due       float64
	chargedNS float64
}

// IOCost is the kernel's blk-iocost for tenants without a hierarchy. An I/O has a cost by a linear model. The drive's
// virtual time passes at a rate; a tenant's share of it pays for its I/Os, and an I/O that it cannot pay waits. In each
// period the rate falls if too many I/Os took longer than the target or waited for a place at the device, and rises if
// tenants wait without that. A tenant that uses less than its share lends the rest of its weight to those that wait,
// and takes it back as soon as it runs short.
//
// What differs: requests carry no position, so that all of them are random; nothing is issued on debt.
//
// Source: Linux, block/blk-iocost.c; Heo et al., "IOCost" (ASPLOS'22), sections 3.1 to 3.4.
type IOCost struct {
	cfg    IOCostConfig
	ios    requests
	costs  []float64 // by tag: what its tenant has paid
	payers []payer
	// due has the tenants with something queued, by the virtual time from which the first of it may be dispatched.
	due    order
	active []tenant.ID // tenants that count, whether or not anything is queued
	device device
	busy   int // tenants with something queued or in flight
	nowNS  int64

	// Sums over the active tenants.
	weights, inUse float64
	// stale: inUse has changed since due was computed.
	stale bool

	// The period: when it began, in both times, and the rate in it. rate is base and what makes up for lost.
	period                  uint64
	periodNS, beganNS       int64
	began, rate, base, lost float64
	level                   int // periods in a row that were too busy, or -(periods that were not busy enough)
	met, missed             [pipeline.Classes]int
	fullSinceNS, fullWaitNS int64 // an I/O that may go waits for a place at the device
	donors                  []tenant.ID
	after                   []float64 // by donor: the fraction of the drive that it is left with
	dueOf                   func(tenant.ID) float64
}

var _ pipeline.Policy = (*IOCost)(nil)

// NewIOCost returns an IOCost.
func NewIOCost(cfg IOCostConfig) *IOCost {
	if cfg.Read == (LinearCost{}) {
		cfg.Read = defaultRead
	}
	if cfg.Write == (LinearCost{}) {
		cfg.Write = defaultWrite
	}
	if cfg.ReadTargetNS == 0 {
		cfg.ReadTargetNS = defaultTargetNS
	}
	if cfg.WriteTargetNS == 0 {
		cfg.WriteTargetNS = defaultTargetNS
	}
	if cfg.Met == 0 {
		cfg.Met = 0.95
	}
	if cfg.LeastRate == 0 {
		cfg.LeastRate = 0.01
	}
	if cfg.MostRate == 0 {
		cfg.MostRate = 100
	}
	c := &IOCost{cfg: cfg, device: device{depth: max(cfg.Depth, 1)}, rate: 1, base: 1,
		periodNS: min(max(2*max(cfg.ReadTargetNS, cfg.WriteTargetNS), leastPeriodNS), mostPeriodNS)}
	c.dueOf = func(t tenant.ID) float64 { return c.payers[t].spent + c.price(&c.payers[t]) }
	return c
}

// Name implements pipeline.Policy.
func (c *IOCost) Name() string { return "iocost" }

// SetTenant implements pipeline.Policy.
func (c *IOCost) SetTenant(_ int64, t tenant.ID, weight int) {
	for int(t) >= len(c.payers) {
		c.payers = append(c.payers, payer{})
	}
	p, was := &c.payers[t], c.payers[t].inUse
	if was > 0 {
		c.weights -= p.weight
		c.share(p, 0)
	}
	p.weight = float64(max(weight, 1))
	if was > 0 {
		c.weights += p.weight
		c.share(p, p.weight)
	}
	// Grow everything for all tenants here, so that the hot path does not.
	c.due.grow(len(c.payers))
	c.active = slices.Grow(c.active, len(c.payers)-len(c.active))
	c.donors, c.after = slices.Grow(c.donors[:0], len(c.payers)), slices.Grow(c.after[:0], len(c.payers))
}

// RemoveTenant implements pipeline.Policy.
func (c *IOCost) RemoveTenant(_ int64, t tenant.ID) {
	if c.payers[t].inUse > 0 {
		c.deactivate(slices.Index(c.active, t))
	}
	c.payers[t] = payer{}
}

// share sets the part of its weight that counts for a tenant.
func (c *IOCost) share(p *payer, inUse float64) {
	c.inUse += inUse - p.inUse
	c.stale = c.stale || inUse != p.inUse
	p.inUse = inUse
}

// deactivate takes the tenant at an index of active from those that count.
func (c *IOCost) deactivate(i int) {
	p := &c.payers[c.active[i]]
	c.weights -= p.weight
	c.share(p, 0)
	c.active[i] = c.active[len(c.active)-1]
	if c.active = c.active[:len(c.active)-1]; len(c.active) == 0 {
		c.weights, c.inUse = 0, 0 // without what rounding has left
	}
}

// virtual returns the drive's virtual time.
func (c *IOCost) virtual(now int64) float64 { return c.began + float64(now-c.beganNS)*c.rate }

// margins returns the virtual time that passes in a part of a period.
func (c *IOCost) margins(part float64) float64 { return part * float64(c.periodNS) * c.base }

// absolute returns the cost of an I/O for a tenant that is alone. The kernel charges reads and writes only.
func (c *IOCost) absolute(r *request) float64 {
	switch r.class {
	case pipeline.ReadClass:
		return float64(max(c.cfg.Read.of(r.lenBytes), 1))
	case pipeline.WriteClass:
		return float64(max(c.cfg.Write.of(r.lenBytes), 1))
	}
	return 0
}

// price returns the cost of a tenant's first queued I/O: the smaller its share, the more.
func (c *IOCost) price(p *payer) float64 {
	return c.absolute(&c.ios[p.queue.first]) * c.inUse / p.inUse
}

// Enqueue implements pipeline.Policy.
//
// hot: 0 allocs
func (c *IOCost) Enqueue(now int64, io pipeline.IO) {
	c.ios.add(io)
	for len(c.costs) < len(c.ios) {
		c.costs = append(c.costs, 0)
	}
	p := &c.payers[io.Tenant]
	c.activate(now, io.Tenant, p)
	if p.queue.n == 0 && p.inflight == 0 {
		c.busy++
	}
	c.ios.push(&p.queue, io.Tag)
	if p.queue.n == 1 {
		c.due.add(io.Tenant, c.head(p, c.virtual(now)))
	}
	c.refresh()
	c.watch(now)
}

// activate lets a tenant count, with a budget as if it had paid lately.
func (c *IOCost) activate(now int64, t tenant.ID, p *payer) {
	if len(c.active) == 0 {
		c.began, c.beganNS = c.virtual(now), now
	}
	p.period = c.period
	if p.inUse > 0 {
		return
	}
	if least := c.virtual(now) - c.margins(targetMargin); p.spent < least {
		p.done += least - p.spent
		p.spent = least
	}
	c.active = append(c.active, t)
	c.weights += p.weight
	c.share(p, p.weight)
	p.activeNS, p.used = now, 0
}

// head returns from when on the first queued I/O of a tenant may go. A tenant that runs short takes back what it has
// lent: step by step, or all of it if it has to wait.
func (c *IOCost) head(p *payer, virtual float64) float64 {
	price := c.price(p)
	left := virtual - p.spent - price
	if left < p.margin && left < c.margins(lowMargin) {
		for step := p.weight * raise; p.inUse < p.weight; {
			c.share(p, min(p.inUse+step, p.weight))
			if price = c.price(p); p.spent+price <= virtual {
				break
			}
		}
	}
	if p.spent+price > virtual && p.inUse < p.weight {
		c.share(p, p.weight)
		price = c.price(p)
	}
	return p.spent + price
}

// refresh computes anew when I/Os are due after shares have changed.
func (c *IOCost) refresh() {
	if c.stale {
		c.stale = false
		c.due.all(c.dueOf)
	}
}

// Cancel implements pipeline.Policy.
func (c *IOCost) Cancel(now int64, tag pipeline.Tag) {
	t := c.ios[tag].tenant
	p := &c.payers[t]
	first := p.queue.first == tag
	c.ios.remove(&p.queue, tag)
	switch {
	case p.queue.n == 0:
		c.due.remove(t)
		if p.inflight == 0 {
			c.busy--
		}
	case first:
		c.due.set(t, c.head(p, c.virtual(now)))
	}
	c.refresh()
	c.watch(now)
}

// watch notes for how long an I/O that may go has been waiting for a place at the device.
func (c *IOCost) watch(now int64) {
	waits := c.device.full() && c.payable(c.virtual(now))
	if c.fullSinceNS > 0 {
		c.fullWaitNS += now - c.fullSinceNS
	}
	c.fullSinceNS = 0
	if waits {
		c.fullSinceNS = now
	}
}

// payable reports whether a queued I/O can be paid.
func (c *IOCost) payable(virtual float64) bool {
	return c.due.len() > 0 && c.due.key(c.due.first()) <= virtual
}

// Dispatch implements pipeline.Policy.
//
// hot: 0 allocs, given room in dst
func (c *IOCost) Dispatch(now int64, dst []pipeline.Tag) []pipeline.Tag {
	c.nowNS = now
	if len(c.active) > 0 && now >= c.beganNS+c.periodNS {
		c.endPeriod(now)
	}
	virtual := c.virtual(now)
	for !c.device.full() && c.payable(virtual) {
		t := c.due.first()
		p := &c.payers[t]
		tag := p.queue.first
		r := &c.ios[tag]
		cost := c.absolute(r)
		c.costs[tag] = c.due.key(t) - p.spent
		p.spent += c.costs[tag]
		p.used += cost
		p.chargedNS += cost
		p.inflight++
		c.ios.remove(&p.queue, tag)
		c.device.enter(r)
		if p.queue.n > 0 {
			c.due.set(t, c.head(p, virtual))
		} else {
			c.due.remove(t)
		}
		c.refresh()
		dst = append(dst, tag)
	}
	c.watch(now)
	return dst
}

// Pause implements pipeline.Policy.
//
// hot: 0 allocs
func (c *IOCost) Pause(now int64, tag pipeline.Tag) {
	c.device.pause(&c.ios[tag])
	c.watch(now)
}

// Resume implements pipeline.Policy.
//
// hot: 0 allocs
func (c *IOCost) Resume(now int64, tag pipeline.Tag) {
	c.device.enter(&c.ios[tag])
	c.watch(now)
}

// Complete implements pipeline.Policy.
//
// hot: 0 allocs
func (c *IOCost) Complete(now int64, tag pipeline.Tag, res pipeline.Result) {
	r := &c.ios[tag]
	c.device.leave(r)
	p := &c.payers[r.tenant]
	p.done += c.costs[tag]
	if res.LatencyNS > 0 && !res.Failed && r.class != pipeline.OtherClass {
		target := c.cfg.ReadTargetNS
		if r.class == pipeline.WriteClass {
			target = c.cfg.WriteTargetNS
		}
		if res.LatencyNS > target {
			c.missed[r.class]++
		} else {
			c.met[r.class]++
		}
	}
	if p.inflight--; p.inflight == 0 {
		p.done = p.spent // without what rounding has left
		if p.queue.n == 0 {
			c.busy--
		}
	}
	c.watch(now)
}

// endPeriod adjusts shares and the rate, and begins the next period.
func (c *IOCost) endPeriod(now int64) {
	c.watch(now)
	virtual := c.virtual(now)
	passed := virtual - c.began
	for i := len(c.active) - 1; i >= 0; i-- {
		p := &c.payers[c.active[i]]
		if p.queue.n == 0 && p.inflight == 0 && p.period != c.period {
			c.lost += max(0, virtual-p.spent-c.margins(targetMargin)) * p.inUse / c.inUse
			c.deactivate(i)
		}
	}
	short, late := c.lend(now, virtual, passed)
	c.adjustRate(now, short, late)
	c.period++
	c.began, c.beganNS = virtual, now
	if len(c.active) == 0 {
		c.level, c.lost = 0, 0
	}
	// What was thrown away comes back as a faster rate, at most twice as fast.
	length := float64(c.periodNS)
	more := min(max(c.lost/length, -c.base/2), c.base)
	c.lost = min(max(c.lost-more*length, -length*c.base), length*c.base)
	c.rate = c.base + more
	for _, t := range c.active {
		c.payers[t].used = 0
	}
	c.met, c.missed, c.fullWaitNS = [pipeline.Classes]int{}, [pipeline.Classes]int{}, 0
	c.refresh()
}

// lend finds which tenants use less than their share and lends the rest of it to those that are short. A tenant that
// lends no more gets its whole weight back. It returns how many are short, which are all that lend nothing, as in the
// kernel, and whether any has I/Os from periods before at the device.
func (c *IOCost) lend(now int64, virtual, passed float64) (short int, late bool) {
	c.donors, c.after = c.donors[:0], c.after[:0]
	kept, takers := 0.0, 0.0
	for _, t := range c.active {
		p := &c.payers[t]
		late = late || p.spent > p.done && p.spent > virtual-lagging*passed && p.done < virtual-passed
		if p.inUse < p.weight || p.queue.n == 0 && p.spent < virtual-c.margins(lowMargin) {
			full := p.weight / c.weights
			if after := c.forfeit(p, now, virtual, passed, full); after < full {
				c.donors, c.after = append(c.donors, t), append(c.after, after)
				kept += after
				continue
			}
			c.share(p, p.weight)
			p.margin = virtual - p.spent
		}
		short++
		takers += p.weight
	}
	if short > 0 && kept < 1 {
		for i, t := range c.donors {
			p := &c.payers[t]
			// So that it has exactly that fraction of the new sum of shares.
			c.share(p, min(p.weight, c.after[i]*takers/(1-kept)))
			p.margin = virtual - p.spent
		}
	}
	return short, late
}

// forfeit takes from a tenant the budget above half a period, which the rate gives back to all (lost). It returns the
// fraction of the drive that the tenant needs to have half a period's budget again at the end of the next period, if it
// goes on as in the last one. full is its fraction by weight, which it keeps if it has I/Os queued or hardly any
// budget.
func (c *IOCost) forfeit(p *payer, now int64, virtual, passed, full float64) float64 {
	if p.queue.n > 0 || p.spent > virtual-c.margins(minMargin) {
		return full
	}
	used := max(p.used, (p.spent-p.done)*p.inUse/c.inUse) / (float64(max(now-max(p.activeNS, c.beganNS), 1)) * c.base)
	if excess := virtual - p.spent - c.margins(targetMargin); excess > 0 {
		p.spent += excess
		p.done += excess
		c.lost += excess * p.inUse / c.inUse
	}
	saved := min(1, (virtual-p.spent)/passed)
	return min(full, max(min(used, 1)/(1-targetMargin+saved), 1.0/(1<<16)))
}

// adjustRate changes the rate by how the period was.
func (c *IOCost) adjustRate(now int64, short int, late bool) {
	most, allowed := 0.0, 1-c.cfg.Met
	for k := range c.met {
		if n := c.met[k] + c.missed[k]; n > 0 {
			most = max(most, float64(c.missed[k])/float64(n))
		}
	}
	waited := float64(c.fullWaitNS) / float64(now-c.beganNS)
	switch {
	case waited > fullBusy || most > allowed:
		c.level = max(c.level, 0) + 1
	case waited > fullBusy*notBusy || most > allowed*notBusy || short == 0:
		c.level = 0
	default:
		if c.level = min(c.level, 0); !late {
			c.level--
		}
	}
	switch {
	case c.level > 0:
		c.base *= 1 - rateStep(c.level)
	case c.level < 0 && !late:
		c.base *= 1 + rateStep(-c.level)
	}
	c.base = min(max(c.base, c.cfg.LeastRate), c.cfg.MostRate)
}

// NextWake implements pipeline.Policy: it is the end of the period, or the time at which a queued I/O can be paid.
func (c *IOCost) NextWake() (at int64, ok bool) {
	if len(c.active) == 0 {
		return 0, false
	}
	at = c.beganNS + c.periodNS
	if c.due.len() == 0 || c.device.full() {
		return at, true
	}
	due := c.due.key(c.due.first())
	if after := (due - c.began) / c.rate; after < float64(c.periodNS) {
		at = c.beganNS + int64(math.Ceil(max(after, 0)))
		if c.virtual(at) < due { // rounding
			at++
		}
	}
	return at, true
}

// Credit implements pipeline.Policy. IOCost computes no credits.
func (c *IOCost) Credit(tenant.ID) int { return 0 }

// Limit implements pipeline.Policy.
func (c *IOCost) Limit(t tenant.ID) pipeline.Limit {
	p := &c.payers[t]
	switch {
	case p.queue.n == 0:
		return pipeline.Unlimited
	case c.device.full() && c.due.key(t) <= c.virtual(c.nowNS):
		return pipeline.LimitSSD
	}
	return pipeline.LimitShare
}

// CostNS implements pipeline.Policy.
func (c *IOCost) CostNS(t tenant.ID) int64 { return int64(c.payers[t].chargedNS) }

// Stats implements pipeline.Policy.
func (c *IOCost) Stats(s *pipeline.Stats) { *s = pipeline.Stats{ActiveTenants: c.busy} }
