// Package sim runs clients, a network, one SSD's pipeline and the emulated drive in virtual time. It holds the workload
// matrix with which policies are compared, and computes the figures of the comparison. A run is a state machine: it
// starts no goroutine and reads no clock, and the same seed gives the same result. Callers with several CPUs distribute
// runs over them (see Lab).
//
//	client ── NetworkNS ──> pipeline.Pipeline ──> flash.Drive
//	   ^    wait for credit        policy            │
//	   └──────── NetworkNS, credit ──────────────────┘
package sim

import (
	"fmt"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/model/flash"
	"jbofd/internal/tenant"
)

// Drive is the interface of a drive in a run; flash.Drive implements it.
type Drive interface {
	Submit(now int64, r flash.Request)
	NextEvent() (at int64, ok bool)
	Advance(now int64, dst []flash.Completion) []flash.Completion
}

// Setup is the part of a run besides its scenario.
type Setup struct {
	// SizeBytes is the drive's size.
	SizeBytes int64
	Drive     Drive
	Policy    pipeline.Policy
	// Parda: hosts bound what they have outstanding by the latency that they see (see parda).
	Parda bool
	Seed  uint64
	// Standalone is the rate that a load achieves alone on the drive, in bytes per second, or in I/Os per second for
	// loads that move no data; 0 if unknown.
	Standalone func(l *Load) float64
}

const idle = int64(1)<<62 - 1

// run is one run.
type run struct {
	sc       *Scenario
	set      Setup
	now      int64
	pipe     *pipeline.Pipeline
	tenants  []tenantState
	cores    []core
	reqs     []request // by tag
	free     []pipeline.Tag
	up       ring[arrival]
	down     ring[departure]
	timers   timers
	cpuFree  int64
	over     bool // the last phase has ended; clients send no more I/Os
	sessions int
	rng      rng

	// target counts I/Os in the pipeline or at the drive.
	target    int
	events    int64
	dispatch  []pipeline.Tag
	completed []flash.Completion

	result *Result
	phase  int // current or next
	// nextBin is where the current bin of the series begins.
	nextBin  int64
	binBytes int64
}

// request is an I/O from the host's sending it until the host has its completion.
type request struct {
	tenant, load int32
	kind         int32
	units        int32
	// session distinguishes a client's I/Os from those of its earlier connections.
	session int32
	state   state
	len     int64
	askedNS int64
	sentNS  int64
	offset  int64
	// done is how much of it the drive has done, if the target divides it into pieces.
	done int64
	// deviceNS is its time at the drive.
	deviceNS int64
}

type state uint8

const (
	unused    state = iota
	travel          // on the way to the target
	queued          // in the pipeline
	device          // at the drive
	back            // on the way back
	forgotten       // on the way, but its client has disconnected
)

type arrival struct {
	atNS int64
	tag  pipeline.Tag
}

type departure struct {
	atNS   int64
	tag    pipeline.Tag
	credit int
}

// Run runs a scenario to its end and until all I/Os have completed.
func Run(sc *Scenario, set Setup) *Result {
	r := &run{sc: sc, set: set, pipe: pipeline.New(set.Policy), rng: newRNG(set.Seed, -1)}
	r.result = newResult(sc, set)
	r.newTenants()
	end := sc.EndNS()
	for {
		at := r.next()
		if !r.over && at >= end {
			r.now = end
			r.roll(end)
			r.stop()
			continue
		}
		if at == idle {
			break
		}
		if at > end+grace {
			r.violated("%d I/Os are not over %d s after the end", r.outstanding(), grace/Second)
			break
		}
		r.now = max(r.now, at)
		r.step()
	}
	r.finish()
	return r.result
}

// grace is how long I/Os may take to complete after the end of a run.
const grace = 30 * Second

// next is the time of the next event.
func (r *run) next() int64 {
	at := idle
	if r.up.n > 0 {
		at = min(at, r.up.peek().atNS)
	}
	if r.down.n > 0 {
		at = min(at, r.down.peek().atNS)
	}
	if len(r.timers.heap) > 0 {
		at = min(at, r.timers.heap[0].atNS)
	}
	if t, ok := r.set.Drive.NextEvent(); ok {
		at = min(at, t)
	}
	if t, ok := r.pipe.NextWake(r.now); ok {
		at = min(at, max(t, r.now+1))
	}
	return at
}

// step processes everything that is due now.
func (r *run) step() {
	r.events++
	now := r.now
	r.roll(now)
	r.completed = r.set.Drive.Advance(now, r.completed[:0])
	for i := range r.completed {
		r.complete(&r.completed[i])
	}
	for r.up.n > 0 && r.up.peek().atNS <= now {
		r.arrive(r.up.pop().tag)
	}
	for r.down.n > 0 && r.down.peek().atNS <= now {
		d := r.down.pop()
		if t := &r.tenants[r.reqs[d.tag].tenant]; t.off {
			t.inbox.push(d)
		} else {
			r.receive(d)
		}
	}
	for len(r.timers.heap) > 0 && r.timers.heap[0].atNS <= now {
		r.fire(r.timers.pop())
	}
	r.dispatch = r.pipe.Dispatch(now, r.dispatch[:0])
	for _, tag := range r.dispatch {
		q := &r.reqs[tag]
		q.state = device
		r.submit(tag)
	}
}

// submit sends a dispatched I/O, or the next piece of it, to the drive.
func (r *run) submit(tag pipeline.Tag) {
	q := &r.reqs[tag]
	kind := r.kind(q)
	req := flash.Request{Op: flash.Op(kind.Op), OffsetBytes: q.offset + q.done, LenBytes: q.piece(kind.Op),
		FUA: kind.FUA, Tag: uint64(tag)}
	if kind.Op == pipeline.Verify {
		req.Op = flash.Read
	}
	r.set.Drive.Submit(r.now, req)
}

// pieceBytes is how much of a Verify the target reads at a time.
const pieceBytes = 128 << 10

// piece returns the length of the next device request of an I/O, which is what the pipeline charges.
func (q *request) piece(op pipeline.Op) int64 {
	if op == pipeline.Verify {
		return min(q.len-q.done, pieceBytes)
	}
	return q.len
}

// kind returns the kind of an I/O.
func (r *run) kind(q *request) *Kind { return &r.tenants[q.tenant].loads[q.load].spec.Kinds[q.kind] }

// arrive gives an I/O to the pipeline.
func (r *run) arrive(tag pipeline.Tag) {
	q := &r.reqs[tag]
	if q.state == forgotten {
		r.release(tag)
		return
	}
	q.state = queued
	r.target++
	op := r.kind(q).Op
	r.pipe.Enqueue(r.now, pipeline.IO{Tag: tag, Tenant: tenant.ID(q.tenant), Op: op, LenBytes: q.piece(op)})
}

// complete takes an I/O from the drive and sends the answer.
func (r *run) complete(c *flash.Completion) {
	tag := pipeline.Tag(c.Tag)
	q := &r.reqs[tag]
	op := r.kind(q).Op
	q.done += q.piece(op)
	q.deviceNS += c.LatencyNS
	if q.done < q.len && q.session == r.tenants[q.tenant].session {
		q.state = queued
		r.pipe.Continue(r.now, pipeline.Result{LatencyNS: c.LatencyNS},
			pipeline.IO{Tag: tag, Tenant: tenant.ID(q.tenant), Op: op, LenBytes: q.piece(op)})
		return
	}
	r.target--
	r.pipe.Complete(r.now, tag, pipeline.Result{LatencyNS: c.LatencyNS})
	if q.session != r.tenants[q.tenant].session {
		r.result.Cancelled++
		r.release(tag)
		return
	}
	q.state = back
	r.down.push(departure{r.now + r.sc.NetworkNS, tag, r.pipe.Credit(tenant.ID(q.tenant))})
}

// take returns a tag for a new I/O.
func (r *run) take() pipeline.Tag {
	if n := len(r.free); n > 0 {
		tag := r.free[n-1]
		r.free = r.free[:n-1]
		return tag
	}
	r.reqs = append(r.reqs, request{})
	return pipeline.Tag(len(r.reqs) - 1)
}

func (r *run) release(tag pipeline.Tag) {
	r.reqs[tag].state = unused
	r.free = append(r.free, tag)
}

// outstanding is how many I/Os are under way.
func (r *run) outstanding() int { return len(r.reqs) - len(r.free) }

// stop stops all clients from sending I/Os.
func (r *run) stop() {
	r.over = true
	r.timers.heap = r.timers.heap[:0]
	for i := range r.tenants {
		for j := range r.tenants[i].loads {
			l := &r.tenants[i].loads[j]
			l.on = false
			l.waiting = ring[waiting]{}
		}
		r.poll(i)
	}
}

// violated records a broken invariant.
func (r *run) violated(format string, args ...any) {
	const most = 8
	r.result.ViolationCount++
	if len(r.result.Violations) < most {
		r.result.Violations = append(r.result.Violations, fmt.Sprintf("at %.6f s: ", float64(r.now)/1e9)+
			fmt.Sprintf(format, args...))
	}
}

// check verifies the pipeline's counters.
func (r *run) check() {
	if got := r.pipe.Queued() + r.pipe.Inflight(); got != r.target {
		r.violated("the pipeline counts %d I/Os, there are %d", got, r.target)
	}
	var ts pipeline.TenantStats
	known, sum := 0, 0
	for i := range r.tenants {
		t := &r.tenants[i]
		if !r.pipe.TenantStats(tenant.ID(i), &ts) {
			if t.up {
				r.violated("%s is connected and not known", t.spec.Name)
			}
			continue
		}
		known++
		sum += ts.Queued + ts.Inflight
		if !t.up && ts.Queued+ts.Inflight == 0 {
			r.violated("%s has gone, has nothing left, and is known", t.spec.Name)
		}
	}
	if sum != r.target {
		r.violated("tenants have %d I/Os together, there are %d", sum, r.target)
	}
	var s pipeline.Stats
	r.pipe.Stats(&s)
	if s.ActiveTenants > known {
		r.violated("the policy counts %d active tenants of %d", s.ActiveTenants, known)
	}
	if r.target == 0 && s.InflightNS != 0 {
		r.violated("nothing is in flight, the policy counts %d ns", s.InflightNS)
	}
}

// finish checks that nothing is left and completes the result.
func (r *run) finish() {
	if n := r.outstanding(); n > 0 {
		r.violated("%d I/Os never end: %d queued, %d in flight", n, r.pipe.Queued(), r.pipe.Inflight())
	}
	r.check()
	for i := range r.tenants {
		if r.tenants[i].up {
			r.tenants[i].up = false
			r.pipe.RemoveTenant(r.now, tenant.ID(i))
		}
	}
	r.check()
	if s := r.result.Series; s != nil {
		for i := range r.result.Phases {
			if p := &r.result.Phases[i]; r.sc.changedNS(p.FromNS) > 0 {
				p.SettleNS = s.settle(r.sc.changedNS(p.FromNS), p.ToNS)
			}
		}
	}
	r.result.Events = r.events
}
