package cluster

import (
	"context"
	"sync"
	"time"

	"jbofd/client"
	"jbofd/client/internal/kvop"
	"jbofd/internal/flowctl"
)

// engine carries out the requests of a Store: no goroutine waits for one. A goroutine that has an event for it (an
// operation, the end of commands, another map, a time) takes the lock, and sends what follows from the event when it
// has released the lock: commands of one batch that go to one queue of a node are sent together.
//
//	OpQueue.Submit, Store.Get ──> start ──┐
//	IOQueue ──> Ended ────────────────────┼─> requests, flowctl.Machine ──> leave ──> IOQueue.Send
//	adopt, tick, check, cancelOp ─────────┘                                   └────> OpQueue.Poll
type engine struct {
	s *Store

	mu sync.Mutex
	// flow decides what is sent when.
	flow *flowctl.Machine
	// numbers counts the writes of the Store. lateEnded: one that was late has ended, since the last pump.
	numbers   kvop.Numbers
	lateEnded bool
	// all are the requests that there are, free those that are not in use. kept is the memory that the free ones keep.
	all, free []*request
	kept      int
	closed    bool
	// paused wait for the time of their next try, or for earlier writes of their keys (request.held); woken is of
	// wakeHeld. hedges are reads that may ask a second member, in order of time.
	paused, woken []*request
	hedges        []hedgeTime
	// timer calls tick at timerAt; 0: it is not set.
	timer   *time.Timer
	timerAt time.Duration
	// lane chooses the queue of methods with contexts.
	lane int
	// out are the queues of nodes that have commands to be sent, done are requests that have ended: since the lock was
	// taken. batches are free ones.
	out     []*ioQueue
	done    []*request
	batches []*batch
}

// ioQueue is a queue of a node, with the commands that are to be sent there when the lock is released.
type ioQueue struct {
	*client.IOQueue
	first, last *client.Async
}

// batch is what leave does without the lock.
type batch struct {
	sends []send
	done  []*request
}

type send struct {
	q    *client.IOQueue
	list *client.Async
}

func newEngine(s *Store, c flowctl.Config) *engine {
	e := &engine{s: s, flow: flowctl.New(c)}
	e.timer = time.AfterFunc(time.Hour, e.tick)
	e.timer.Stop()
	return e
}

// take returns a request; nil if the Store is closed.
func (e *engine) take() *request {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	if n := len(e.free); n > 0 {
		r := e.free[n-1]
		e.free = e.free[:n-1]
		e.kept -= r.memory()
		return r
	}
	r := newRequest(e.s)
	r.index = len(e.all)
	e.all = append(e.all, r)
	return r
}

// Bounds of engine.free: how many requests, and how much memory they may keep for values.
const (
	maxFree = 256
	maxKept = 16 << 20
)

// give gives requests back. What was needed for a crowd only is not kept.
func (e *engine) give(rs ...*request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range rs {
		r.op.Forget()
		r.q = nil
		if n := r.memory(); len(e.free) < maxFree && e.kept+n <= maxKept {
			e.kept += n
			e.free = append(e.free, r)
			continue
		}
		last := e.all[len(e.all)-1]
		e.all[r.index], last.index = last, r.index
		e.all[len(e.all)-1] = nil
		e.all = e.all[:len(e.all)-1]
	}
}

// start begins the operation of a request for which begin has returned nil, and returns the number of its use.
func (e *engine) start(r *request) (use uint64) {
	e.mu.Lock()
	e.lane++
	r.lane = e.lane
	e.startLocked(r)
	use = r.use
	e.leave()
	return use
}

// startLocked is start with mu held, and leave to follow.
func (e *engine) startLocked(r *request) { // hot: 0 allocs
	now := e.s.now()
	r.use++
	r.over, r.phase, r.deadline = nil, choosing, now+e.s.o.Timeout
	if e.closed {
		r.finish(r.fail(client.ErrClosed))
		return
	}
	r.next(now)
}

// leave releases mu and does what has to be done without it, until nothing is left to do.
func (e *engine) leave() { // hot: 0 allocs
	for {
		e.pump()
		if len(e.out)+len(e.done) == 0 {
			e.mu.Unlock()
			return
		}
		b := e.takeBatch()
		e.mu.Unlock()
		tell(b.done)
		var ended, last *client.Async
		for i := range b.sends {
			for a := b.sends[i].q.Send(b.sends[i].list); a != nil; {
				next := a.Next
				if last == nil {
					ended = a
				} else {
					last.Next = a
				}
				last, a.Next = a, nil
				a = next
			}
			b.sends[i] = send{}
		}
		judge(ended)
		e.mu.Lock()
		b.sends, b.done = b.sends[:0], b.done[:0]
		e.batches = append(e.batches, b)
		e.settle(ended)
	}
}

// takeBatch takes what is to be sent and told.
func (e *engine) takeBatch() (b *batch) { // hot: 0 allocs
	if n := len(e.batches); n > 0 {
		b = e.batches[n-1]
		e.batches = e.batches[:n-1]
	} else {
		b = &batch{}
	}
	for i, q := range e.out {
		b.sends = append(b.sends, send{q.IOQueue, q.first})
		q.first, q.last, e.out[i] = nil, nil, nil
	}
	e.out = e.out[:0]
	b.done, e.done = e.done, b.done[:0]
	return b
}

// pump prepares the commands that are to be sent now.
func (e *engine) pump() { // hot: 0 allocs
	now := e.s.now()
	for e.lateEnded {
		e.lateEnded = false
		e.wakeHeld(now)
	}
	for f := e.flow.Next(int64(now)); f != nil; f = e.flow.Next(int64(now)) {
		f.Item.(*attempt).send(now)
	}
}

// Ended implements client.Sink.
func (e *engine) Ended(list *client.Async) { // hot: 0 allocs
	judge(list)
	e.mu.Lock()
	e.settle(list)
	e.leave()
}

// judge does what can be done with ended commands without the lock.
func judge(list *client.Async) { // hot: 0 allocs
	for a := list; a != nil; a = a.Next {
		a.Item.(*attempt).judge()
	}
}

// settle goes on with the requests of commands that have ended.
func (e *engine) settle(list *client.Async) { // hot: 0 allocs
	if list == nil {
		return
	}
	now := e.s.now()
	for a := list; a != nil; {
		next := a.Next // before the command is used again
		a.Next = nil
		a.Item.(*attempt).settle(now)
		a = next
	}
}

// cancelOp ends the operation of a use with the error of its context.
func (e *engine) cancelOp(r *request, use uint64, err error) {
	e.mu.Lock()
	if r.use == use {
		r.end(e.s.now(), err)
	}
	e.leave()
}

// closeAll ends all operations, those that come later included.
func (e *engine) closeAll() {
	e.mu.Lock()
	e.closed = true
	now := e.s.now()
	for _, r := range e.all {
		r.end(now, client.ErrClosed)
	}
	e.leave()
}

// wake lets paused requests try again, because there is another map, or a node was connected.
func (e *engine) wake() {
	e.mu.Lock()
	e.wakeLocked()
	e.leave()
}

func (e *engine) wakeLocked() {
	now := e.s.now()
	paused := e.paused
	e.paused = nil
	for _, r := range paused {
		r.next(now)
	}
}

// wakeHeld lets all writes try again that wait for earlier ones of their keys, because a late write has ended. Those
// that still must wait pause again.
func (e *engine) wakeHeld(now time.Duration) { // hot: 0 allocs
	keep := e.paused[:0]
	for _, r := range e.paused {
		if r.held {
			e.woken = append(e.woken, r)
		} else {
			keep = append(keep, r)
		}
	}
	clear(e.paused[len(keep):])
	e.paused = keep
	for i, r := range e.woken {
		r.next(now)
		e.woken[i] = nil
	}
	e.woken = e.woken[:0]
}

// moved lets requests look at a new map: commands at a member that does not serve their range by it are cancelled.
func (e *engine) moved(m *clusterMap) {
	e.mu.Lock()
	now := e.s.now()
	for _, r := range e.all {
		r.reroute(now, m)
	}
	e.wakeLocked()
	e.leave()
}

// setTimer sees to it that tick is called at a time.
func (e *engine) setTimer(now, at time.Duration) { // hot: 0 allocs
	if e.timerAt == 0 || at < e.timerAt {
		e.timerAt = at
		e.timer.Reset(max(at-now, 0))
	}
}

// tick lets those requests go on whose time has come.
func (e *engine) tick() {
	e.mu.Lock()
	now := e.s.now()
	e.timerAt = 0
	var due []*request
	keep := e.paused[:0]
	for _, r := range e.paused {
		if r.due <= now {
			due = append(due, r)
		} else {
			keep = append(keep, r)
		}
	}
	clear(e.paused[len(keep):])
	e.paused = keep
	for _, r := range due {
		r.next(now)
	}
	e.hedge(now)
	for _, r := range e.paused {
		e.setTimer(now, r.due)
	}
	e.leave()
}

// watch looks after the times of all requests until the Store is closed.
func (e *engine) watch(ctx context.Context) {
	const interval = 10 * time.Millisecond
	ticks := time.NewTicker(interval)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		e.mu.Lock()
		now, want := e.s.now(), false
		for _, r := range e.all {
			want = r.check(now) || want
		}
		e.leave()
		if want {
			e.s.wantMap()
		}
	}
}

// tell tells of requests that have ended.
func tell(done []*request) { // hot: 0 allocs
	for i := 0; i < len(done); {
		q := done[i].q
		if q == nil {
			done[i].ended <- struct{}{}
			done[i] = nil
			i++
			continue
		}
		k := i
		for k < len(done) && done[k].q == q {
			k++
		}
		q.put(done[i:k])
		clear(done[i:k])
		i = k
	}
}
