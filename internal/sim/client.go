package sim

import (
	"math"

	"jbofd/internal/credit"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// tenantState is the state of a client during a run.
type tenantState struct {
	spec  *Tenant
	loads []load
	up    bool
	// session counts the client's connections.
	session int32
	// window limits the I/Os that were sent and not answered.
	window credit.Window
	parda  parda
	// off: other clients have the core. Answers wait in inbox meanwhile.
	off   bool
	inbox ring[departure]

	account account
}

// load is the state of one of a client's loads.
type load struct {
	spec *Load
	rng  rng
	on   bool
	// waiting holds the I/Os that the application has requested and the client has not sent.
	waiting ring[waiting]
	// outstanding counts the I/Os that were sent and not answered. Invariant: at most spec.Depth.
	outstanding int
	parts       int64
	// from and to bound the region in which the load reads and writes.
	from, to int64
	// next is the offset of the next sequential I/O, by kind.
	next []int64
	// dueNS is the time at which a paced load requests its next I/O.
	dueNS float64

	standalone float64
	data       bool
}

type waiting struct {
	askedNS int64
	kind    int32
}

const unitBytes = credit.UnitBytes

// newTenants creates the clients. Each writer has its own slice of the drive; readers read the whole drive.
func (r *run) newTenants() {
	writers := 0
	for i := range r.sc.Tenants {
		if r.sc.Tenants[i].mutates() {
			writers++
		}
	}
	r.tenants = make([]tenantState, len(r.sc.Tenants))
	writer, stream := 0, 0
	for i := range r.sc.Tenants {
		t := &r.tenants[i]
		t.spec = &r.sc.Tenants[i]
		t.account.init()
		from, to := int64(0), r.set.SizeBytes
		if t.spec.mutates() {
			slice := r.set.SizeBytes / int64(writers) / maxIO * maxIO
			from, to = int64(writer)*slice, int64(writer+1)*slice
			writer++
		}
		t.loads = make([]load, len(t.spec.Loads))
		for j := range t.loads {
			l := &t.loads[j]
			l.spec, l.rng, l.from, l.to = &t.spec.Loads[j], newRNG(r.set.Seed, stream), from, to
			stream++
			if l.spec.RegionBytes > 0 {
				l.to = min(l.to, l.from+l.spec.RegionBytes)
			}
			l.data = l.spec.data()
			if r.set.Standalone != nil {
				l.standalone = r.set.Standalone(l.spec)
			}
			l.next = make([]int64, len(l.spec.Kinds))
			for k := range l.next {
				l.parts += int64(max(1, l.spec.Kinds[k].Parts))
				// Sequential streams start at different offsets, as files of different age do.
				size := roundUp(l.spec.Kinds[k].SizeBytes)
				l.next[k] = l.from + l.rng.below((l.to-l.from)/size)*size
			}
		}
		at := int64(0)
		if t.spec.UpNS > 0 {
			at = r.jittered(t.spec.DownNS)
		}
		r.timers.push(timer{atNS: at, what: connect, tenant: i})
	}
	r.newCores()
}

// maxIO is the alignment of the writers' slices.
const maxIO = 1 << 20

// roundUp returns the distance between sequential I/Os: their size rounded up to whole units.
func roundUp(n int64) int64 { return max(1, (n+unitBytes-1)/unitBytes) * unitBytes }

// jittered returns a random duration between 0.5 and 1.5 times ns.
func (r *run) jittered(ns int64) int64 { return ns/2 + r.rng.below(ns+1) }

// fire handles an expired timer.
func (r *run) fire(t timer) {
	switch t.what {
	case connect:
		r.connect(t.tenant)
	case disconnect:
		r.disconnect(t.tenant)
	case loadOn, loadOff:
		r.toggle(t)
	case ask:
		r.requestIO(t)
	case control:
		r.control(t)
	case coreTurn:
		r.turnCore(t)
	}
}

func (r *run) connect(i int) {
	t := &r.tenants[i]
	t.up = true
	t.window = credit.Window{}
	t.parda.init()
	r.pipe.SetTenant(r.now, tenant.ID(i), pipeline.Settings{Weight: t.spec.weight(), Caps: t.spec.Caps})
	if !t.spec.IgnoresCredits {
		t.window.Grant(r.now, r.pipe.Credit(tenant.ID(i)))
	}
	for j := range t.loads {
		l := &t.loads[j]
		l.outstanding, l.waiting = 0, ring[waiting]{}
		r.timers.push(timer{atNS: max(r.now, l.spec.StartNS), what: loadOn, tenant: i, load: j})
	}
	if r.set.Parda {
		r.timers.push(timer{atNS: r.now + pardaPeriodNS, what: control, tenant: i, load: int(t.session)})
	}
	if t.spec.UpNS > 0 {
		r.sessions++
		r.timers.push(timer{atNS: r.now + r.jittered(t.spec.UpNS), what: disconnect, tenant: i})
		r.check()
	}
}

// disconnect ends a client and all its outstanding I/Os, as the crash of a host does.
func (r *run) disconnect(i int) {
	t := &r.tenants[i]
	t.up = false
	t.session++
	for j := range t.loads {
		t.loads[j].on = false
		t.loads[j].waiting = ring[waiting]{}
	}
	for tag := range r.reqs {
		q := &r.reqs[tag]
		if int(q.tenant) != i {
			continue
		}
		switch q.state {
		case travel, back:
			q.state = forgotten
			r.result.Cancelled++
		case queued:
			if !r.pipe.Cancel(r.now, pipeline.Tag(tag)) {
				r.violated("a queued I/O of %s cannot be cancelled", t.spec.Name)
			}
			r.target--
			r.result.Cancelled++
			r.release(pipeline.Tag(tag))
		}
	}
	r.pipe.RemoveTenant(r.now, tenant.ID(i))
	r.result.Sessions++
	r.check()
	if r.sc.Sessions == 0 || r.sessions < r.sc.Sessions {
		r.timers.push(timer{atNS: r.now + r.jittered(t.spec.DownNS), what: connect, tenant: i})
	}
}

// toggle turns a load on or off. It does nothing if the client is not connected; the timer does not identify the
// connection for which it was set.
func (r *run) toggle(tm timer) {
	t := &r.tenants[tm.tenant]
	l := &t.loads[tm.load]
	if !t.up || l.spec.StopNS > 0 && r.now >= l.spec.StopNS && tm.what == loadOn {
		return
	}
	l.on = tm.what == loadOn
	if !l.on {
		l.waiting = ring[waiting]{}
		if l.spec.OnNS > 0 && (l.spec.StopNS == 0 || r.now+l.spec.OffNS < l.spec.StopNS) {
			r.timers.push(timer{atNS: r.now + l.spec.OffNS, what: loadOn, tenant: tm.tenant, load: tm.load})
		}
		return
	}
	off := idle
	if l.spec.OnNS > 0 {
		off = r.now + l.spec.OnNS
	}
	if l.spec.StopNS > 0 {
		off = min(off, l.spec.StopNS)
	}
	if off < idle {
		r.timers.push(timer{atNS: off, what: loadOff, tenant: tm.tenant, load: tm.load})
	}
	if l.spec.IOsPerSec > 0 {
		// The first I/O is due at a random time in the interval, so that tenants do not run in phase.
		l.dueNS = float64(r.now) + float64(l.rng.below(1e6))/1e6*1e9/l.spec.IOsPerSec
		r.timers.push(timer{atNS: int64(math.Ceil(l.dueNS)), what: ask, tenant: tm.tenant, load: tm.load})
		return
	}
	for range l.spec.Depth - l.outstanding {
		l.want(r.now)
	}
	r.send(tm.tenant)
}

// requestIO handles the timer of a paced load, which requests an I/O.
func (r *run) requestIO(tm timer) {
	t := &r.tenants[tm.tenant]
	l := &t.loads[tm.load]
	if !t.up || !l.on {
		return
	}
	l.want(r.now)
	l.dueNS += 1e9 / l.spec.IOsPerSec
	tm.atNS = int64(math.Ceil(l.dueNS))
	r.timers.push(tm)
	r.send(tm.tenant)
}

// want adds a request for one I/O.
func (l *load) want(now int64) {
	kind := 0
	if len(l.spec.Kinds) > 1 {
		at := l.rng.below(l.parts)
		for kind = range l.spec.Kinds {
			if at -= int64(max(1, l.spec.Kinds[kind].Parts)); at < 0 {
				break
			}
		}
	}
	l.waiting.push(waiting{now, int32(kind)})
}

// send sends the I/Os that the client's window permits, in the order in which its applications requested them.
func (r *run) send(i int) {
	t := &r.tenants[i]
	if t.off {
		return
	}
	for {
		load, l := -1, (*load)(nil)
		for j := range t.loads {
			if x := &t.loads[j]; x.waiting.n > 0 && x.outstanding < x.spec.Depth &&
				(l == nil || x.waiting.peek().askedNS < l.waiting.peek().askedNS) {
				load, l = j, x
			}
		}
		if l == nil {
			return
		}
		kind := &l.spec.Kinds[l.waiting.peek().kind]
		units := pipeline.IO{Op: kind.Op, LenBytes: kind.SizeBytes}.Units()
		if !t.window.MaySend(r.now, units) {
			return
		}
		if ios, _ := t.window.Outstanding(); r.set.Parda && !t.spec.IgnoresCredits && ios >= t.parda.maxOutstanding() {
			return
		}
		w := l.waiting.pop()
		tag := r.take()
		r.reqs[tag] = request{tenant: int32(i), load: int32(load), kind: w.kind, units: int32(units),
			session: t.session, state: travel,
			len: kind.SizeBytes, askedNS: w.askedNS, sentNS: r.now, offset: l.place(kind, int(w.kind))}
		if kind.Op == pipeline.Flush {
			r.reqs[tag].len, r.reqs[tag].offset = 0, 0
		}
		l.outstanding++
		t.window.Sent(units)
		r.result.Sent++
		at := r.now + r.sc.NetworkNS
		if r.sc.TargetCPUNS > 0 {
			at = max(at, r.cpuFree) + r.sc.TargetCPUNS
			r.cpuFree = at
		}
		r.up.push(arrival{at, tag})
	}
}

// place chooses the offset of an I/O.
func (l *load) place(k *Kind, kind int) int64 {
	size := roundUp(k.SizeBytes)
	if !k.Sequential {
		return l.from + l.rng.below((l.to-l.from)/size)*size
	}
	at := l.next[kind]
	if at+size > l.to {
		at = l.from
	}
	l.next[kind] = at + size
	return at
}

// receive handles an answer that arrives at the client.
func (r *run) receive(d departure) {
	q := &r.reqs[d.tag]
	if q.state == forgotten {
		r.release(d.tag)
		return
	}
	i := int(q.tenant)
	t := &r.tenants[i]
	l := &t.loads[q.load]
	l.outstanding--
	if t.spec.IgnoresCredits {
		d.credit = 0
	}
	t.window.Completed(r.now, int(q.units), d.credit)
	r.result.Completed++
	r.observe(t, l, q)
	if r.set.Parda {
		t.parda.observe(r.now - q.sentNS)
	}
	r.release(d.tag)
	if l.on && l.spec.IOsPerSec == 0 {
		l.want(r.now)
	}
	r.send(i)
}

// parda limits a host's outstanding I/Os according to the latency that the host observes (Gulati, Ahmad, Waldspurger,
// "PARDA", FAST 2009). In each period the window becomes
// w <- (1-gamma) w + gamma (Lth/L w + beta).
type parda struct {
	window, latencyNS float64
	seen              bool
}

// Parameters of PARDA. The paper's values are for disk arrays (threshold 25 ms, periods of a second); these values are
// for flash over a network.
const (
	pardaGamma       = 0.8
	pardaBeta        = 2.0
	pardaThresholdNS = 1e6
	pardaPeriodNS    = 10 * Millisecond
	pardaSmooth      = 1.0 / 16
	pardaMax         = 256.0
)

func (p *parda) init() { *p = parda{window: 16} }

func (p *parda) maxOutstanding() int { return max(1, int(p.window)) }

func (p *parda) observe(ns int64) {
	if !p.seen {
		p.latencyNS, p.seen = float64(ns), true
		return
	}
	p.latencyNS += (float64(ns) - p.latencyNS) * pardaSmooth
}

// control adjusts the PARDA window of a host.
func (r *run) control(tm timer) {
	t := &r.tenants[tm.tenant]
	if !t.up || int(t.session) != tm.load {
		return
	}
	p := &t.parda
	if p.seen {
		p.window = (1-pardaGamma)*p.window +
			pardaGamma*(pardaThresholdNS/p.latencyNS*p.window+pardaBeta*float64(t.spec.weight()))
		p.window = min(max(p.window, 1), pardaMax)
	}
	tm.atNS = r.now + pardaPeriodNS
	r.timers.push(tm)
	r.send(tm.tenant)
}
