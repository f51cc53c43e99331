package baseline

import (
	"slices"

	"jbofd/internal/pipeline"
)

// LinearCost is what an I/O is taken to occupy a drive for.
type LinearCost struct{ FixedNS, PerMiBNS int64 }

func (c LinearCost) of(lenBytes int64) int64 { return c.FixedNS + c.PerMiBNS*lenBytes>>20 }

// FlashFQConfig configures a FlashFQ. What is 0 gets its default.
type FlashFQConfig struct {
	// Depth is D, the most I/Os that may be at the device, at least 1.
	Depth int
	// Read and Write are the drive's cost model; the defaults are those of a drive that
	// reads 400 K I/Os of 4 KiB or 2.9 GiB a second and writes half of that.
	Read, Write LinearCost
	// AnticipateNS is how long others wait for a tenant that has just become idle; default
	// 200 µs, negative: not at all.
	AnticipateNS int64
}

const defaultAnticipateNS = 200_000

// flow is a tenant.
type flow struct {
	queue    queue
	inflight int
	weight   int
	// start is the start tag of the first queued I/O, finish the finish tag of the last
	// dispatched one.
	start, finish float64
	heapAt        int // place in the heap, if something is queued
	chargedNS     int64
	// anticipated until deadlineNS: idle since idleNS and expected back.
	anticipated bool
	hopeful     bool // it came back in time the last time
	idleNS      int64
	deadlineNS  int64
}

// FlashFQ is start-time fair queueing for flash. Each I/O has a start tag, the finish
// tag of its tenant's I/O before or the present virtual time, whichever is later; a finish tag, that plus
// cost by weight; and the I/O with the smallest start tag goes next, as long as no more than
// D are at the device. Virtual time is the start tag of the last one dispatched.
//
// A tenant that waits for each I/O before it sends the next is idle for a moment after each,
// and would lose its claim to those who are not. So nobody with a later start tag than it would
// have goes in that moment, for a bounded time, unless it did not come back in time before.
//
// Source: Shen and Park, FlashFQ (USENIX ATC'13); SFQ(D): Jin, Chase and Kaur
// (SIGMETRICS'04).
type FlashFQ struct {
	cfg     FlashFQConfig
	ios     requests
	flows   []flow
	heap    []pipeline.Tenant // those with something queued, by start tag
	waiting []pipeline.Tenant // those anticipated
	virtual float64
	device  device
	active  int
	nowNS   int64 // of the last Dispatch
}

var _ pipeline.Policy = (*FlashFQ)(nil)

// NewFlashFQ makes a FlashFQ.
func NewFlashFQ(cfg FlashFQConfig) *FlashFQ {
	if cfg.Read == (LinearCost{}) {
		cfg.Read = LinearCost{FixedNS: 1_200, PerMiBNS: 333_000}
	}
	if cfg.Write == (LinearCost{}) {
		cfg.Write = LinearCost{FixedNS: 2_400, PerMiBNS: 666_000}
	}
	if cfg.AnticipateNS == 0 {
		cfg.AnticipateNS = defaultAnticipateNS
	}
	return &FlashFQ{cfg: cfg, device: device{depth: max(cfg.Depth, 1)}}
}

// Name implements pipeline.Policy.
func (f *FlashFQ) Name() string { return "flashfq" }

// SetTenant implements pipeline.Policy. A new weight holds from the next I/O on.
func (f *FlashFQ) SetTenant(_ int64, t pipeline.Tenant, weight int) {
	for int(t) >= len(f.flows) {
		f.flows = append(f.flows, flow{})
	}
	fl := &f.flows[t]
	if fl.weight == 0 {
		*fl = flow{hopeful: true}
	}
	fl.weight = max(weight, 1)
	// Room for all, so that the hot path never grows them.
	f.heap = slices.Grow(f.heap, len(f.flows)-len(f.heap))
	f.waiting = slices.Grow(f.waiting, len(f.flows)-len(f.waiting))
}

// RemoveTenant implements pipeline.Policy.
func (f *FlashFQ) RemoveTenant(_ int64, t pipeline.Tenant) {
	f.forgo(t)
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
		f.forgo(io.Tenant)
	}
	f.ios.push(&fl.queue, io.Tag)
	if fl.queue.n == 1 {
		fl.start = max(f.virtual, fl.finish)
		fl.heapAt = len(f.heap)
		f.heap = append(f.heap, io.Tenant)
		f.up(fl.heapAt)
	}
}

// forgo ends the anticipation of a tenant.
func (f *FlashFQ) forgo(t pipeline.Tenant) {
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

// Cancel implements pipeline.Policy: tags are given when an I/O is its tenant's first, so one that
// never went has cost nothing.
func (f *FlashFQ) Cancel(_ int64, tag pipeline.Tag) {
	t := f.ios[tag].tenant
	fl := &f.flows[t]
	f.ios.remove(&fl.queue, tag)
	if fl.queue.n == 0 {
		f.leaveHeap(fl.heapAt)
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
	for !f.device.full() && len(f.heap) > 0 {
		fl := &f.flows[f.heap[0]]
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
		fl.start = fl.finish // of the next one
		fl.inflight++
		f.device.enter(r)
		if fl.queue.n > 0 {
			f.down(0)
		} else {
			f.leaveHeap(0)
		}
		dst = append(dst, tag)
	}
	return dst
}

// expire gives up those who did not come back in time.
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

// blocker returns the first deadline of those anticipated who have a right to go before an I/O with
// this start tag.
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

// NextWake implements pipeline.Policy: the end of an anticipation.
func (f *FlashFQ) NextWake() (at int64, ok bool) {
	if f.device.full() || len(f.heap) == 0 {
		return 0, false
	}
	if at, ok = f.blocker(f.flows[f.heap[0]].start); !ok {
		at = f.nowNS
	}
	return at, true
}

// Credit implements pipeline.Policy: FlashFQ does not say.
func (f *FlashFQ) Credit(pipeline.Tenant) int { return 0 }

// Limit implements pipeline.Policy.
func (f *FlashFQ) Limit(t pipeline.Tenant) pipeline.Limit {
	switch {
	case f.flows[t].queue.n == 0:
		return pipeline.Unlimited
	case f.heap[0] == t && f.device.full():
		return pipeline.LimitSSD
	}
	return pipeline.LimitShare
}

// CostNS implements pipeline.Policy.
func (f *FlashFQ) CostNS(t pipeline.Tenant) int64 { return f.flows[t].chargedNS }

// Stats implements pipeline.Policy.
func (f *FlashFQ) Stats(s *pipeline.Stats) { *s = pipeline.Stats{ActiveTenants: f.active} }

// less orders the heap: by start tag, then by number so that a run can be repeated.
func (f *FlashFQ) less(i, j int) bool {
	a, b := f.heap[i], f.heap[j]
	if f.flows[a].start != f.flows[b].start {
		return f.flows[a].start < f.flows[b].start
	}
	return a < b
}

func (f *FlashFQ) swap(i, j int) {
	f.heap[i], f.heap[j] = f.heap[j], f.heap[i]
	f.flows[f.heap[i]].heapAt, f.flows[f.heap[j]].heapAt = i, j
}

func (f *FlashFQ) up(i int) {
	for i > 0 && f.less(i, (i-1)/2) {
		f.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
}

func (f *FlashFQ) down(i int) {
	for {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < len(f.heap); c++ {
			if f.less(c, least) {
				least = c
			}
		}
		if least == i {
			return
		}
		f.swap(i, least)
		i = least
	}
}

func (f *FlashFQ) leaveHeap(i int) {
	last := len(f.heap) - 1
	f.swap(i, last)
	f.heap = f.heap[:last]
	if i < last {
		f.up(i)
		f.down(i)
	}
}
