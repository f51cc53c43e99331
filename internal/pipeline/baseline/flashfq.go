package baseline

import (
	"slices"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// LinearCost models how long an I/O occupies a drive.
type LinearCost struct{ FixedNS, PerMiBNS int64 }

// The default models describe a drive that reads 400,000 I/Os of 4 KiB or 2.9 GiB a second and writes half of that.
var (
	defaultRead  = LinearCost{FixedNS: 1_200, PerMiBNS: 333_000}
	defaultWrite = LinearCost{FixedNS: 2_400, PerMiBNS: 666_000}
)

func (c LinearCost) of(lenBytes int64) int64 { return c.FixedNS + c.PerMiBNS*lenBytes>>20 }

// FlashFQConfig configures a FlashFQ. Zero fields get their defaults.
type FlashFQConfig struct {
	// Depth is D, the maximum number of I/Os at the device, at least 1.
	Depth int
	// Read and Write are the drive's cost model.
	Read, Write LinearCost
	// AnticipateNS is how long other tenants wait for one that has just become idle. The default is 200 µs; a negative
	// value disables anticipation.
	AnticipateNS int64
}

const defaultAnticipateNS = 200_000

// flow is the state of a tenant.
type flow struct {
	queue    queue
	inflight int
	weight   int
	// start is the start tag of the first queued I/O, finish the finish tag of the last dispatched one.
	start, finish float64
	chargedNS     int64
	// anticipated is set until deadlineNS for a tenant that is idle since idleNS and expected to send an I/O soon.
	anticipated bool
	hopeful     bool // the tenant's last anticipation ended with an I/O in time
	idleNS      int64
	deadlineNS  int64
}

// FlashFQ is start-time fair queueing for flash. The start tag of an I/O is the finish tag of its tenant's previous I/O
// or the current virtual time, whichever is later. Its finish tag is the start tag plus its cost divided by the
// tenant's weight. The I/O with the smallest start tag is dispatched next while fewer than D I/Os are at the device.
// Virtual time is the start tag of the I/O dispatched last.
//
// A tenant that sends each I/O after the previous one has completed is idle for a moment in between, and would lose its
// claim to tenants with queued I/Os. So in that moment, for a bounded time, no I/O with a later start tag than the
// tenant's next one is dispatched. A tenant that did not send in time before is not anticipated.
//
// Source: Shen and Park, FlashFQ (USENIX ATC'13); SFQ(D): Jin, Chase and Kaur
// (SIGMETRICS'04).
type FlashFQ struct {
	cfg     FlashFQConfig
	ios     requests
	flows   []flow
	order   order       // tenants with something queued, by start tag
	waiting []tenant.ID // tenants anticipated
	virtual float64
	device  device
	active  int
	nowNS   int64 // of the last Dispatch
}

var _ pipeline.Policy = (*FlashFQ)(nil)

// NewFlashFQ returns a FlashFQ.
func NewFlashFQ(cfg FlashFQConfig) *FlashFQ {
	if cfg.Read == (LinearCost{}) {
		cfg.Read = defaultRead
	}
	if cfg.Write == (LinearCost{}) {
		cfg.Write = defaultWrite
	}
	if cfg.AnticipateNS == 0 {
		cfg.AnticipateNS = defaultAnticipateNS
	}
	return &FlashFQ{cfg: cfg, device: device{depth: max(cfg.Depth, 1)}}
}

// Name implements pipeline.Policy.
func (f *FlashFQ) Name() string { return "flashfq" }

// SetTenant implements pipeline.Policy. A new weight applies from the next I/O on.
func (f *FlashFQ) SetTenant(_ int64, t tenant.ID, weight int) {
	for int(t) >= len(f.flows) {
		f.flows = append(f.flows, flow{})
	}
	fl := &f.flows[t]
	if fl.weight == 0 {
		*fl = flow{hopeful: true}
	}
	fl.weight = max(weight, 1)
	// Grow the heap for all tenants here, so that the hot path does not.
	f.order.grow(len(f.flows))
	f.waiting = slices.Grow(f.waiting, len(f.flows)-len(f.waiting))
}

// RemoveTenant implements pipeline.Policy.
func (f *FlashFQ) RemoveTenant(_ int64, t tenant.ID) {
	f.endAnticipation(t)
	f.flows[t] = flow{}
}

func (f *FlashFQ) cost(r *request) int64 {
	switch r.class {
	case pipeline.ReadClass:
		return max(f.cfg.Read.of(r.lenBytes), 1)
	case pipeline.WriteClass:
		return max(f.cfg.Write.of(r.lenBytes), 1)
	}
	return max(f.cfg.Read.FixedNS, 1)
}

// Enqueue implements pipeline.Policy.
//
// hot: 0 allocs
func (f *FlashFQ) Enqueue(now int64, io pipeline.IO) {
	f.ios.add(io)
	fl := &f.flows[io.Tenant]
	if fl.queue.n == 0 && fl.inflight == 0 {
		f.active++
		if fl.idleNS > 0 {
			fl.hopeful = now-fl.idleNS <= f.cfg.AnticipateNS
		}
		f.endAnticipation(io.Tenant)
	}
	f.ios.push(&fl.queue, io.Tag)
	if fl.queue.n == 1 {
		fl.start = max(f.virtual, fl.finish)
		f.order.add(io.Tenant, fl.start)
	}
}

// endAnticipation ends the anticipation of a tenant.
func (f *FlashFQ) endAnticipation(t tenant.ID) {
	if !f.flows[t].anticipated {
		return
	}
	f.flows[t].anticipated = false
	for i, w := range f.waiting {
		if w == t {
			f.waiting[i] = f.waiting[len(f.waiting)-1]
			f.waiting = f.waiting[:len(f.waiting)-1]
			return
		}
	}
}

// Cancel implements pipeline.Policy. An I/O gets its tags when it becomes the first of its tenant, so one that was
// never dispatched has cost its tenant nothing.
func (f *FlashFQ) Cancel(_ int64, tag pipeline.Tag) {
	t := f.ios[tag].tenant
	fl := &f.flows[t]
	f.ios.remove(&fl.queue, tag)
	if fl.queue.n == 0 {
		f.order.remove(t)
		if fl.inflight == 0 {
			f.active--
		}
	}
}

// Dispatch implements pipeline.Policy.
//
// hot: 0 allocs, given room in dst
func (f *FlashFQ) Dispatch(now int64, dst []pipeline.Tag) []pipeline.Tag {
	f.nowNS = now
	f.expire(now)
	for !f.device.full() && f.order.len() > 0 {
		t := f.order.first()
		fl := &f.flows[t]
		if _, blocked := f.blocker(fl.start); blocked {
			break
		}
		tag := fl.queue.first
		r := &f.ios[tag]
		f.ios.remove(&fl.queue, tag)
		cost := f.cost(r)
		fl.chargedNS += cost
		f.virtual = fl.start
		fl.finish = fl.start + float64(cost)/float64(fl.weight)
		fl.start = fl.finish // of the tenant's next I/O
		fl.inflight++
		f.device.enter(r)
		if fl.queue.n > 0 {
			f.order.set(t, fl.start)
		} else {
			f.order.remove(t)
		}
		dst = append(dst, tag)
	}
	return dst
}

// expire ends the anticipations whose deadline has passed.
func (f *FlashFQ) expire(now int64) {
	kept := f.waiting[:0]
	for _, t := range f.waiting {
		fl := &f.flows[t]
		if fl.deadlineNS > now {
			kept = append(kept, t)
			continue
		}
		fl.anticipated, fl.hopeful = false, false
	}
	f.waiting = kept
}

// blocker returns the earliest deadline among the anticipated tenants that have precedence over an I/O with this start
// tag.
func (f *FlashFQ) blocker(start float64) (deadlineNS int64, blocked bool) {
	for _, t := range f.waiting {
		if fl := &f.flows[t]; fl.finish < start && (!blocked || fl.deadlineNS < deadlineNS) {
			deadlineNS, blocked = fl.deadlineNS, true
		}
	}
	return deadlineNS, blocked
}

// Pause implements pipeline.Policy.
//
// hot: 0 allocs
func (f *FlashFQ) Pause(_ int64, tag pipeline.Tag) { f.device.pause(&f.ios[tag]) }

// Resume implements pipeline.Policy.
//
// hot: 0 allocs
func (f *FlashFQ) Resume(_ int64, tag pipeline.Tag) { f.device.enter(&f.ios[tag]) }

// Complete implements pipeline.Policy.
//
// hot: 0 allocs
func (f *FlashFQ) Complete(now int64, tag pipeline.Tag, _ pipeline.Result) {
	r := &f.ios[tag]
	f.device.leave(r)
	fl := &f.flows[r.tenant]
	fl.inflight--
	if fl.inflight > 0 || fl.queue.n > 0 {
		return
	}
	f.active--
	fl.idleNS = now
	if fl.hopeful && f.cfg.AnticipateNS > 0 && fl.finish >= f.virtual {
		fl.anticipated, fl.deadlineNS = true, now+f.cfg.AnticipateNS
		f.waiting = append(f.waiting, r.tenant)
	}
}

// NextWake implements pipeline.Policy: it is the end of the next anticipation.
func (f *FlashFQ) NextWake() (at int64, ok bool) {
	if f.device.full() || f.order.len() == 0 {
		return 0, false
	}
	if at, ok = f.blocker(f.flows[f.order.first()].start); !ok {
		at = f.nowNS
	}
	return at, true
}

// Credit implements pipeline.Policy. FlashFQ computes no credits.
func (f *FlashFQ) Credit(tenant.ID) int { return 0 }

// Limit implements pipeline.Policy.
func (f *FlashFQ) Limit(t tenant.ID) pipeline.Limit {
	switch {
	case f.flows[t].queue.n == 0:
		return pipeline.Unlimited
	case f.order.first() == t && f.device.full():
		return pipeline.LimitSSD
	}
	return pipeline.LimitShare
}

// CostNS implements pipeline.Policy.
func (f *FlashFQ) CostNS(t tenant.ID) int64 { return f.flows[t].chargedNS }

// Stats implements pipeline.Policy.
func (f *FlashFQ) Stats(s *pipeline.Stats) { *s = pipeline.Stats{ActiveTenants: f.active} }
