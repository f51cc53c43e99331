// Package owner drives one SSD: its pipeline, its device queue, and the
// operations that take more than one device request.
//
// All of an SSD's state is touched by one goroutine at a time, but no goroutine
// is bound to it: whoever brings work and finds the SSD free becomes its owner
// for a turn and runs the work to completion; whoever finds it taken leaves the
// work in the inbox, and the present owner takes it before it lets go. A device
// that completes asynchronously has one goroutine more, which sleeps in
// Queue.Poll.
//
//	Submit ──> inbox ──> pipeline ──> admitted ──> [host's data] ──> staged ──> device queue
//	                     │  │             │ buffer from the pool                     │
//	                alarm┘ Abort       waits in the pool's queue                   Done
//
// When the pipeline waits for time, a cap's tokens, an alarm brings the next turn.
package owner

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/invariants"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// Sizes of the scratch memory in which Compare and Verify read.
const (
	laneCount = 4
	laneBytes = 128 << 10
)

// Config describes an Owner.
type Config struct {
	Device ssd.Device
	Pool   *bufpool.Pool
	// Depth is how many requests may be outstanding at the device; 0: 256.
	Depth int
	// Policy is how the pipeline decides; nil: a FIFO of Depth.
	Policy pipeline.Policy
	// Clock returns monotonic nanoseconds; nil: the system's.
	Clock func() int64
}

// Owner is one SSD at work.
type Owner struct {
	device  ssd.Device
	queue   ssd.Queue
	sync    bool
	pool    *bufpool.Pool
	clock   func() int64
	stats   Stats
	account *bufpool.Account
	poller  chan struct{} // closed when the poll goroutine has ended
	alarm   *alarm
	ringer  chan struct{} // closed when the alarm's goroutine has ended

	// inbox is a stack of submitted IOs, newest first.
	inbox  atomic.Pointer[IO]
	closed atomic.Bool
	// aborting: there are IOs in stateAborted that the next turn is to take out.
	aborting atomic.Bool

	// mu is ownership: everything below belongs to who holds it.
	mu       sync.Mutex
	pipe     *pipeline.Pipeline
	slab     []*IO    // by tag; grows with what is outstanding, which the transports bound
	freeTags []uint32 // Invariant: cap(freeTags) >= len(slab)
	staged   list     // admitted, for the device queue
	blocked  list     // overlapping a CompareWrite
	laneWait list     // waiting for scratch memory
	lanes    [laneCount]bufpool.Buf
	laneUsed [laneCount]bool
	locks    []*IO // CompareWrites at work
	// epoch is 0 or 1, and live how many IOs began in each; quiet, if not nil, is
	// closed when there are none left of the epoch before.
	epoch    uint8
	live     [2]int
	quiet    chan struct{}
	atDevice int
	// alarmNS is when the alarm rings, 0: it is not set; with alarmOff it cannot be.
	alarmNS  int64
	alarmOff bool
	kicks    *[]Sink
	tags     []pipeline.Tag
	reqs     []ssd.Request
	comps    []ssd.Completion
}

// Stats are an SSD's counters since the start. All are read and written
// atomically.
type Stats struct {
	// Requests and Bytes count what the device completed without error, by ssd.Op;
	// TimeNS sums their latencies.
	Requests, Bytes, TimeNS [ssd.Ops]atomic.Int64
	// Errors counts device requests that failed.
	Errors atomic.Int64
	// NoSpace counts those that failed for want of space; Gone those to a device
	// that vanished.
	NoSpace, Gone atomic.Int64
	// Inflight is what is outstanding at the device, Queued what waits before it, Held the part of that which only waits for
	// the caps of its tenants.
	Inflight, Queued, Held atomic.Int64
	// Aborted counts IOs taken out of the queue; BufferWaits those that had to wait
	// for a buffer.
	Aborted, BufferWaits atomic.Int64
}

// firstTags is how many IOs an owner has room for at first.
const firstTags = 1024

// New opens a queue on the device and makes its owner.
func New(cfg Config) (*Owner, error) {
	if cfg.Depth == 0 {
		cfg.Depth = 256
	}
	if cfg.Policy == nil {
		cfg.Policy = pipeline.NewFIFO(cfg.Depth)
	}
	if cfg.Clock == nil {
		start := time.Now()
		cfg.Clock = func() int64 { return int64(time.Since(start)) }
	}
	q, err := cfg.Device.OpenQueue(cfg.Depth)
	if err != nil {
		return nil, fmt.Errorf("ssd %s: open queue: %w", cfg.Device.Info().Name, err)
	}
	o := &Owner{
		device: cfg.Device, queue: q, sync: q.Synchronous(), pool: cfg.Pool, clock: cfg.Clock,
		account:  cfg.Pool.Account("ssd:" + cfg.Device.Info().Name),
		pipe:     pipeline.New(cfg.Policy),
		slab:     make([]*IO, firstTags),
		freeTags: make([]uint32, firstTags),
		tags:     make([]pipeline.Tag, 0, cfg.Depth),
		reqs:     make([]ssd.Request, 0, cfg.Depth),
		comps:    make([]ssd.Completion, cfg.Depth),
		kicks:    kickLists.Get().(*[]Sink),
		poller:   make(chan struct{}),
		ringer:   make(chan struct{}),
	}
	for i := range o.freeTags {
		o.freeTags[i] = uint32(firstTags - 1 - i)
	}
	if o.alarm, err = newAlarm(); err != nil {
		o.account.Close()
		return nil, errors.Join(fmt.Errorf("ssd %s: %w", cfg.Device.Info().Name, err), q.Close())
	}
	// One lane is always there, so that a Compare never waits for memory that
	// nobody wakes it for.
	var ok bool
	if o.lanes[0], ok = o.pool.Get(o.account, laneBytes); !ok {
		o.alarm.close()
		o.account.Close()
		return nil, errors.Join(fmt.Errorf("ssd %s: no buffer of %d bytes left for compare operations", cfg.Device.Info().Name, laneBytes), q.Close())
	}
	if o.sync {
		close(o.poller)
	} else {
		go o.poll()
	}
	go o.ring()
	return o, nil
}

// Device returns the device under the owner.
func (o *Owner) Device() ssd.Device { return o.device }

// Stats returns the live counters.
func (o *Owner) Stats() *Stats { return &o.stats }

// Batch collects IOs for one Submit. The zero Batch is empty.
type Batch struct{ newest, oldest *IO }

// Add appends io to the batch.
func (b *Batch) Add(io *IO) { // hot: 0 allocs
	io.next = b.newest
	if b.newest == nil {
		b.oldest = io
	}
	b.newest = io
}

// Empty reports whether there is nothing in the batch.
func (b *Batch) Empty() bool { return b.newest == nil }

// Submit hands the batch over and empties it; on return the IOs may be done
// already. From any goroutine, but not from within a Sink's methods.
//
// hot: 0 allocs
func (o *Owner) Submit(b *Batch) {
	if b.newest == nil {
		return
	}
	for io := b.newest; io != nil; io = io.next {
		io.owner, io.Err, io.fetched, io.at, io.lane = o, nil, false, 0, -1
		io.writing, io.locked, io.staged, io.holders, io.latencyNS = false, false, false, 0, 0
		io.state.Store(stateQueued)
	}
	o.post(b.newest, b.oldest)
	*b = Batch{}
	o.run()
}

// Fetched hands an admitted IO back: the host's data is in its buffer. With
// io.Err set (the data never came) the IO is done without touching the device.
//
// hot: 0 allocs
func (o *Owner) Fetched(b *Batch) {
	if b.newest == nil {
		return
	}
	for io := b.newest; io != nil; io = io.next {
		io.fetched = true
	}
	o.post(b.newest, b.oldest)
	*b = Batch{}
	o.run()
}

// Abort takes io out if it is still queued; then it will be Done with ErrAborted, soon.
// It reports whether that succeeded: otherwise the IO takes its course. From any
// goroutine, also with locks held that Sinks take.
func (o *Owner) Abort(io *IO) bool {
	if !io.state.CompareAndSwap(stateQueued, stateAborted) {
		return false
	}
	o.stats.Aborted.Add(1)
	if !o.aborting.Swap(true) { // else there will be a turn that finds this one too
		go o.run()
	}
	return true
}

// resubmit is the pool's word that io.waiter has its buffer.
func (o *Owner) resubmit(io *IO) {
	io.next = nil
	o.post(io, io)
	// The releaser of the buffer may be this SSD's own turn or a connection that
	// holds locks of its own, so the turn runs on a goroutine of its own; buffers
	// are short, not the processor.
	go o.run()
}

// post pushes a chain of IOs, newest first, onto the inbox.
func (o *Owner) post(newest, oldest *IO) {
	for {
		old := o.inbox.Load()
		oldest.next = old
		if o.inbox.CompareAndSwap(old, newest) {
			return
		}
	}
}

// maxTurns is how many turns a submitter takes in a row before it may see to what
// it has to do itself.
const maxTurns = 4

// pending reports whether a turn has something to do.
func (o *Owner) pending() bool { return o.inbox.Load() != nil || o.aborting.Load() }

// run takes turns until the inbox is empty or somebody else has the SSD: that
// one looks into the inbox after letting go, so nothing is left behind.
func (o *Owner) run() {
	for turns := 0; o.pending(); turns++ {
		if turns == maxTurns {
			go o.run() // others keep it busy: let a goroutine of its own go on
			return
		}
		if !o.mu.TryLock() {
			return
		}
		o.turn()
		o.unlock()
	}
}

// unlock ends ownership and kicks the sinks that asked for it.
func (o *Owner) unlock() {
	// Sinks may take locks and write to sockets: not under ownership. The list is
	// swapped so that the next owner can fill another one meanwhile.
	kicks := o.kicks
	if len(*kicks) == 0 {
		o.mu.Unlock()
		return
	}
	o.kicks = kickLists.Get().(*[]Sink)
	o.mu.Unlock()
	for _, s := range *kicks {
		s.Kick()
	}
	clear(*kicks)
	*kicks = (*kicks)[:0]
	kickLists.Put(kicks)
}

// kickLists are lists that no owner fills at the moment.
var kickLists = sync.Pool{New: func() any {
	list := make([]Sink, 0, 64)
	return &list
}}

// poll waits for an asynchronous device's completions.
func (o *Owner) poll() {
	defer close(o.poller)
	comps := make([]ssd.Completion, len(o.comps))
	for {
		n := o.queue.Poll(comps, -1)
		if n == 0 && o.closed.Load() {
			return
		}
		if n == 0 {
			continue
		}
		o.mu.Lock()
		o.complete(comps[:n])
		o.turn()
		o.unlock()
		o.run()
	}
}

// ring takes a turn whenever the alarm rings.
func (o *Owner) ring() {
	defer close(o.ringer)
	for o.alarm.wait() {
		o.mu.Lock()
		o.alarmNS = 0
		o.turn()
		o.unlock()
		o.run()
	}
}

// leastAlarmNS is the shortest time the alarm is set to: what comes due sooner goes
// together, and what is saved up meanwhile is not lost.
const leastAlarmNS = 50_000

// setAlarm sees to it that there is a turn when the pipeline has more without any event
// before that. An alarm that comes too early is let ring: setting it costs more.
func (o *Owner) setAlarm(now int64) {
	at, ok := o.pipe.NextWake(now)
	if !ok || o.alarmOff || o.alarmNS != 0 && o.alarmNS <= at {
		return
	}
	now = o.clock() // a turn may have taken long
	at = max(at, now+leastAlarmNS)
	if o.alarmNS != 0 && o.alarmNS <= at {
		return
	}
	err := o.alarm.set(at - now)
	invariants.Check(err == nil, "owner: the timer cannot be set")
	o.alarmNS = at
}

// maxRounds is how often a turn looks into an inbox that others keep filling
// before it ends, so that sinks are kicked.
const maxRounds = 4

// turn brings everything forward that can go. Called with ownership.
func (o *Owner) turn() {
	now := o.clock()
	for rounds, progress := 0, true; progress; rounds++ {
		if rounds >= maxRounds && o.inbox.Load() != nil {
			break // those who are done are to hear of it; run goes on with the inbox
		}
		progress = o.drainInbox(now)
		if o.aborting.Load() {
			o.takeAborted(now)
		}
		o.tags = o.pipe.Dispatch(now, o.tags[:0])
		for _, t := range o.tags {
			o.admit(o.slab[t], now)
			progress = true
		}
		if o.submit() > 0 {
			progress = true
		}
		if o.sync && o.atDevice > 0 {
			if n := o.queue.Poll(o.comps, 0); n > 0 {
				now = o.complete(o.comps[:n])
			}
		}
	}
	o.setAlarm(now)
	o.stats.Inflight.Store(int64(o.atDevice))
	o.stats.Queued.Store(int64(o.pipe.Queued() + o.staged.n + o.blocked.n + o.laneWait.n))
	o.stats.Held.Store(int64(o.pipe.Held()))
}

// drainInbox takes what was posted and reports whether there was anything.
func (o *Owner) drainInbox(now int64) bool {
	if o.inbox.Load() == nil {
		return false
	}
	var in list
	for io := o.inbox.Swap(nil); io != nil; { // newest first: turn around
		next := io.next
		io.next = in.first
		in.first = io
		io = next
	}
	for io := in.first; io != nil; {
		next := io.next
		io.next = nil
		switch {
		case io.fetched:
			o.pipe.Resume(now, pipeline.Tag(io.tag))
			o.fetched(io, now)
		case !io.waiter.Buf.IsZero():
			o.pipe.Resume(now, pipeline.Tag(io.tag))
			o.granted(io, now)
		default:
			io.epoch = o.epoch
			o.live[o.epoch]++
			o.enqueue(io, now)
			if io.state.Load() == stateAborted {
				o.aborting.Store(true) // whoever looked for aborted ones did not find it
			}
		}
		io = next
	}
	return true
}

// takeAborted ends the IOs that were aborted before they were admitted. Aborts are rare:
// it looks at all IOs.
func (o *Owner) takeAborted(now int64) {
	o.aborting.Store(false) // before looking: an Abort after this asks for a turn of its own
	for _, io := range o.slab {
		switch {
		case io == nil || io.state.Load() != stateAborted:
		case o.pipe.Cancel(now, pipeline.Tag(io.tag)):
			o.end(io, ErrAborted)
		case o.pool.Cancel(&io.waiter): // else its buffer is on the way, or it was never asked for
			o.finish(io, ErrAborted, now)
		}
	}
}

// enqueue gives io a tag and puts it into the pipeline.
func (o *Owner) enqueue(io *IO, now int64) {
	if len(o.freeTags) == 0 {
		o.moreTags()
	}
	tag := o.freeTags[len(o.freeTags)-1]
	o.freeTags = o.freeTags[:len(o.freeTags)-1]
	io.tag = tag
	o.slab[tag] = io
	o.pipe.Enqueue(now, pipeline.IO{Tag: pipeline.Tag(tag), Tenant: io.Tenant, Op: io.Op, LenBytes: io.Len})
	o.pipe.KeepsCredit(io.Tenant, io.Credited)
}

// moreTags doubles the number of tags. IOs that wait for memory or for their
// host's data keep theirs, for as long as a host takes: a fixed number would let
// one host stop all others.
func (o *Owner) moreTags() {
	n := len(o.slab)
	o.slab = append(o.slab, make([]*IO, n)...)
	o.freeTags = make([]uint32, n, 2*n)
	for i := range o.freeTags {
		o.freeTags[i] = uint32(2*n - 1 - i)
	}
}

// admit is the pipeline's word that io may begin: it gets its buffer.
func (o *Owner) admit(io *IO, now int64) {
	if n := io.dataBytes(); n > 0 && len(io.Buf.B) == 0 && io.state.Load() == stateQueued {
		io.waiter.Size = int(n)
		if !o.pool.GetOrWait(io.Account, &io.waiter) {
			o.stats.BufferWaits.Add(1)
			o.pipe.Pause(now, pipeline.Tag(io.tag))
			return // resubmit brings it back
		}
	}
	o.granted(io, now)
}

// granted continues an IO that has its buffer, or needs none.
func (o *Owner) granted(io *IO, now int64) {
	if !io.waiter.Buf.IsZero() {
		io.Buf, io.waiter.Buf = io.waiter.Buf, bufpool.Buf{}
	}
	if !io.state.CompareAndSwap(stateQueued, stateAdmitted) {
		o.finish(io, ErrAborted, now)
		return
	}
	io.AdmittedNS = now
	if io.Fetch {
		o.pipe.Pause(now, pipeline.Tag(io.tag))
		o.tell(io.sink, io.sink.Admitted(io))
		return
	}
	o.stage(io)
}

func (o *Owner) fetched(io *IO, now int64) {
	io.fetched = false
	if io.Err != nil {
		o.finish(io, io.Err, now)
		return
	}
	o.stage(io)
}

// stage queues io for the device, or for what it must wait for first.
func (o *Owner) stage(io *IO) {
	if len(o.locks) > 0 && io.Op.Mutates() && o.isLocked(io) {
		o.blocked.push(io)
		return
	}
	if io.Op == pipeline.CompareWrite && !io.locked {
		io.locked = true
		o.locks = append(o.locks, io)
		io.holders = o.countHolders(io)
		if io.holders > 0 {
			return // the last of them to finish stages it
		}
	}
	if (io.Op == pipeline.Compare || io.Op == pipeline.CompareWrite || io.Op == pipeline.Verify) && io.lane < 0 && !o.takeLane(io) {
		o.pipe.Pause(o.clock(), pipeline.Tag(io.tag)) // others can use the device meanwhile
		o.laneWait.push(io)
		return
	}
	io.staged = true
	o.staged.push(io)
}

// isLocked reports whether a CompareWrite other than io has io's range.
func (o *Owner) isLocked(io *IO) bool {
	for _, l := range o.locks {
		if l != io && l.overlaps(io) {
			return true
		}
	}
	return false
}

// countHolders counts the mutating IOs past stage that overlap io.
func (o *Owner) countHolders(io *IO) (n int32) {
	for _, other := range o.slab {
		if other != nil && other.staged && other.Op.Mutates() && io.overlaps(other) {
			n++
		}
	}
	return n
}

func (o *Owner) takeLane(io *IO) bool {
	for i := range o.laneUsed {
		if o.laneUsed[i] {
			continue
		}
		if o.lanes[i].IsZero() {
			b, ok := o.pool.Get(o.account, laneBytes)
			if !ok {
				return false
			}
			o.lanes[i] = b
		}
		o.laneUsed[i] = true
		io.lane = int8(i)
		return true
	}
	return false
}

// request forms the next device request of io.
func (o *Owner) request(io *IO) ssd.Request {
	r := ssd.Request{Op: ssd.Op(io.Op), Flags: io.Flags, Offset: io.Offset, Len: io.Len, Buf: io.Buf.B, Tag: uint64(io.tag)}
	switch io.Op {
	case pipeline.DeallocateRanges:
		r.Op, r.Offset, r.Len = ssd.Deallocate, io.Ranges[io.at].Offset, io.Ranges[io.at].Len
	case pipeline.Compare, pipeline.CompareWrite, pipeline.Verify:
		if io.writing {
			r.Op, r.Buf = ssd.Write, io.Buf.B[io.Len:]
			break
		}
		r.Op, r.Flags = ssd.Read, 0
		r.Offset, r.Len = io.Offset+io.at, min(io.Len-io.at, laneBytes)
		r.Buf = o.lanes[io.lane].B[:r.Len]
	}
	return r
}

// submit fills the device queue from the staged list.
func (o *Owner) submit() (total int) {
	for o.staged.n > 0 {
		o.reqs = o.reqs[:0]
		for io := o.staged.first; io != nil && len(o.reqs) < cap(o.reqs); io = io.next {
			o.reqs = append(o.reqs, o.request(io))
		}
		n := o.queue.Submit(o.reqs)
		for range n {
			o.staged.pop()
		}
		o.atDevice += n
		total += n
		if n < len(o.reqs) || o.sync {
			break
		}
	}
	return total
}

// complete takes the device's completions, at least one, and returns when.
func (o *Owner) complete(comps []ssd.Completion) (now int64) {
	o.atDevice -= len(comps)
	now = o.clock() // once a batch: the clock costs as much as all else here
	for i := range comps {
		c := &comps[i]
		io := o.slab[c.Tag]
		io.latencyNS += c.LatencyNS
		o.count(io, c)
		if c.Err != nil {
			o.finish(io, c.Err, now)
			continue
		}
		if o.advance(io, now) {
			o.staged.push(io)
		}
	}
	return now
}

// count counts one device completion.
func (o *Owner) count(io *IO, c *ssd.Completion) {
	if c.Err != nil {
		o.stats.Errors.Add(1)
		switch {
		case errors.Is(c.Err, ssd.ErrNoSpace):
			o.stats.NoSpace.Add(1)
		case errors.Is(c.Err, ssd.ErrGone):
			o.stats.Gone.Add(1)
		}
		return
	}
	op, n := ssd.Op(io.Op), io.Len
	switch io.Op {
	case pipeline.DeallocateRanges:
		op, n = ssd.Deallocate, io.Ranges[io.at].Len
	case pipeline.Compare, pipeline.CompareWrite, pipeline.Verify:
		op, n = ssd.Read, min(io.Len-io.at, laneBytes)
		if io.writing {
			op, n = ssd.Write, io.Len
		}
	case pipeline.Flush:
		n = 0
	}
	o.stats.Requests[op].Add(1)
	o.stats.Bytes[op].Add(n)
	o.stats.TimeNS[op].Add(c.LatencyNS)
}

// advance moves io past its completed device request and reports whether there
// is another one; if not, io is done.
func (o *Owner) advance(io *IO, now int64) bool {
	switch io.Op {
	case pipeline.DeallocateRanges:
		io.at++
		if int(io.at) < len(io.Ranges) {
			return true
		}
	case pipeline.Compare, pipeline.CompareWrite, pipeline.Verify:
		if io.writing {
			break
		}
		n := min(io.Len-io.at, laneBytes)
		if io.Op != pipeline.Verify && !bytes.Equal(o.lanes[io.lane].B[:n], io.Buf.B[io.at:io.at+n]) {
			o.finish(io, ErrMismatch, now)
			return false
		}
		io.at += n
		if io.at < io.Len {
			return true
		}
		if io.Op == pipeline.CompareWrite {
			io.writing = true
			return true
		}
	}
	o.finish(io, nil, now)
	return false
}

// finish ends io and lets those go on who waited for it.
func (o *Owner) finish(io *IO, err error, now int64) {
	o.pipe.Complete(now, pipeline.Tag(io.tag), pipeline.Result{LatencyNS: io.latencyNS, Failed: err != nil && err != ErrMismatch})
	o.end(io, err)
}

// end is what remains of finish for an IO that has left the pipeline.
func (o *Owner) end(io *IO, err error) {
	invariants.Check(o.slab[io.tag] == io, "owner: io finished without its tag")
	o.slab[io.tag] = nil
	o.freeTags = append(o.freeTags, io.tag)
	io.CreditUnits = 0
	if io.Credited {
		io.CreditUnits = o.pipe.Credit(io.Tenant)
	}
	if io.lane >= 0 {
		o.laneUsed[io.lane] = false
		if next := o.laneWait.pop(); next != nil {
			io.lane = -1
			o.pipe.Resume(o.clock(), pipeline.Tag(next.tag))
			o.stage(next)
		}
	}
	io.lane = -1
	if io.locked {
		o.unlockRange(io)
	} else if io.staged && len(o.locks) > 0 && io.Op.Mutates() {
		for _, l := range o.locks {
			if l.holders > 0 && l.overlaps(io) {
				if l.holders--; l.holders == 0 {
					o.stage(l)
				}
			}
		}
	}
	if o.live[io.epoch]--; o.quiet != nil && o.live[o.epoch^1] == 0 {
		close(o.quiet)
		o.quiet = nil
	}
	io.Err = err
	io.state.Store(stateIdle)
	o.tell(io.sink, io.sink.Done(io))
}

// unlockRange ends a CompareWrite's lock and stages what it blocked.
func (o *Owner) unlockRange(io *IO) {
	for i, l := range o.locks {
		if l == io {
			o.locks = append(o.locks[:i], o.locks[i+1:]...)
			break
		}
	}
	io.locked = false
	blocked := o.blocked
	o.blocked = list{}
	for b := blocked.pop(); b != nil; b = blocked.pop() {
		o.stage(b)
	}
}

// Quiesce returns a channel that is closed when every IO submitted before is done.
// While an earlier call's channel is open, that one is returned; it says nothing of
// IOs submitted since.
func (o *Owner) Quiesce() <-chan struct{} {
	o.mu.Lock()
	o.drainInbox(o.clock())
	quiet := o.quiet
	if quiet == nil {
		quiet = make(chan struct{})
		o.epoch ^= 1
		if o.live[o.epoch^1] == 0 {
			close(quiet)
		} else {
			o.quiet = quiet
		}
	}
	o.turn()
	o.unlock()
	o.run()
	return quiet
}

// tell remembers a sink that wants a kick after the turn.
func (o *Owner) tell(s Sink, kick bool) {
	if kick {
		*o.kicks = append(*o.kicks, s)
	}
}

// Close ends the owner after its outstanding IOs; the submitters must have
// stopped. The device stays open. Idempotent.
func (o *Owner) Close() error {
	if o.closed.Swap(true) {
		return nil
	}
	o.queue.Wake()
	err := o.queue.Close()
	<-o.poller
	o.mu.Lock()
	o.alarmOff = true // whoever looks at the tenants still takes turns
	o.mu.Unlock()
	o.alarm.close()
	<-o.ringer
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range o.lanes {
		o.pool.Put(o.lanes[i])
		o.lanes[i] = bufpool.Buf{}
	}
	o.account.Close()
	return err
}
