package drive

import (
	"runtime"
	"sync/atomic"

	"jbofd/internal/pipeline"
)

// Bits of Drive.wants.
const (
	// wantAborted: there are IOs in stateAborted to take out.
	wantAborted = 1 << iota
	// wantStale: there may be IOs with a stale pass to take out.
	wantStale
	// wantPoll: the device has completions, and no goroutine waits for them.
	wantPoll
	// wantTurn: the last turn has ended before its work was done.
	wantTurn
)

// machine is the Drive as its driver sees it.
type machine Drive

// Pending implements turn.Machine.
func (m *machine) Pending() bool { return m.inbox.Pending() || m.wants.Load() != 0 }

// Turn implements turn.Machine.
func (m *machine) Turn() { (*Drive)(m).turn() }

// notify is called by a device that needs no goroutine in Poll.
func (d *Drive) notify() {
	d.wants.Or(wantPoll)
	d.driver.Run()
}

// poll takes an asynchronous device's completions.
func (d *Drive) poll() {
	defer close(d.poller)
	for underWay := false; ; {
		d.await(underWay)
		d.driver.Lock()
		n := d.queue.Poll(d.comps)
		if n > 0 {
			d.complete(d.comps[:n])
			d.turn()
		}
		underWay = d.atDevice > 0
		d.driver.Unlock()
		if n == 0 && d.closed.Load() {
			return
		}
	}
}

// looksInARow is how often await looks for a completion before it lets other goroutines run.
const looksInARow = 8

// await waits until the device may have completions. underWay: it has requests.
func (d *Drive) await(underWay bool) {
	if window := d.spin.WindowNS(underWay && d.polled); window > 0 {
		found := false
		for end, looks := d.driver.Now()+window, 1; !found && d.driver.Now() < end; looks++ {
			if found = d.queue.Wait(0); looks%looksInARow == 0 {
				runtime.Gosched()
			}
		}
		if d.spin.Looked(found); found {
			return
		}
	}
	d.queue.Wait(-1)
	d.spin.Slept()
}

const (
	// maxRounds is how many rounds a turn has while others keep filling the inbox: then the sinks of IOs that are done
	// are kicked first.
	maxRounds = 4
	// maxTurnRounds is how many rounds a turn has at all. On a device that completes within Submit a composed operation
	// would otherwise keep its submitter until its last request.
	maxTurnRounds = 64
)

// turn does all the work that can be done. Needs ownership.
func (d *Drive) turn() {
	now := d.driver.Now()
	for rounds, progress := 0, true; progress; rounds++ {
		if rounds >= maxRounds && (rounds == maxTurnRounds || d.inbox.Pending()) {
			d.wants.Or(wantTurn)
			break
		}
		progress = d.drainInbox(now)
		if d.wants.Load() != 0 {
			now = d.takeWants(now)
		}
		d.tags = d.pipe.Dispatch(now, d.tags[:0])
		for _, t := range d.tags {
			d.admit(d.slab[t], now)
			progress = true
		}
		if d.submit(now) > 0 {
			progress = true
		}
		if d.sync && d.atDevice > 0 {
			if n := d.queue.Poll(d.comps); n > 0 {
				now = d.complete(d.comps[:n])
			}
		}
	}
	if at, ok := d.pipe.NextWake(now); ok {
		d.driver.WakeAt(at)
	}
	set(&d.stats.Inflight, d.atDevice)
	set(&d.stats.Queued, d.pipe.Queued()+d.staged.n+d.waiting)
	set(&d.stats.Held, d.pipe.Held())
}

// set stores a gauge that only the owner changes. Most turns leave it as it was, and to read it costs a fraction of an
// atomic store.
func set(gauge *atomic.Int64, n int) {
	if v := int64(n); gauge.Load() != v {
		gauge.Store(v)
	}
}

// takeWants does what Drive.wants asks for.
func (d *Drive) takeWants(now int64) int64 {
	wants := d.wants.Swap(0) // before the work: what is asked for from here on is for the next round
	if wants&wantPoll != 0 {
		for n := d.queue.Poll(d.comps); n > 0; n = d.queue.Poll(d.comps) {
			now = d.complete(d.comps[:n])
		}
	}
	if wants&wantStale != 0 {
		for _, io := range d.slab {
			if io != nil && io.stale() && !io.state.CompareAndSwap(io, stateQueued, stateAborted) {
				io.state.CompareAndSwap(io, stateRunning, stateAborted)
			}
		}
	}
	if wants&(wantAborted|wantStale) != 0 {
		d.takeAborted(now)
	}
	return now
}

// drainInbox takes the IOs in the inbox and reports whether there were any.
func (d *Drive) drainInbox(now int64) bool {
	n := d.inbox.Take()
	if n == nil {
		return false
	}
	for n != nil {
		io := n.Item
		n = n.Detach()
		switch {
		case io.fetched:
			d.pipe.Resume(now, pipeline.Tag(io.tag))
			d.fetched(io, now)
		case !io.waiter.Buf.IsZero():
			d.pipe.Resume(now, pipeline.Tag(io.tag))
			d.granted(io, now)
		default:
			io.epoch = d.quiescer.Begin()
			d.enqueue(io, now)
			if io.state.Load(io) == stateAborted {
				d.wants.Or(wantAborted) // the turn that Abort has asked for may be over
			}
		}
	}
	return true
}

// takeAborted ends the IOs that were aborted while they waited. Aborts are rare: it looks at all IOs. An aborted IO
// that is not found waiting is at the device, or its buffer is on the way; then that event ends it.
func (d *Drive) takeAborted(now int64) {
	for _, io := range d.slab {
		if io == nil || io.state.Load(io) != stateAborted {
			continue
		}
		err := io.whyAborted()
		switch {
		case io.waits != waitsForNothing:
			d.finish(io, err, now)
		case d.pipe.Cancel(now, pipeline.Tag(io.tag)):
			d.end(io, err, now)
		case d.pool.Cancel(&io.waiter):
			d.finish(io, err, now)
		}
	}
}

// noteSink remembers a sink that wants a kick after the turn.
func (d *Drive) noteSink(s Sink, kick bool) {
	if kick {
		d.driver.Kick(s)
	}
}
