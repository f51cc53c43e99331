package file

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/eventfd"
	"jbofd/internal/invariants"
	"jbofd/internal/ssd"
	"jbofd/internal/uring"
)

// slot is one request from Submit until its completion is polled.
type slot struct {
	queue *queue
	index int32
	req   ssd.Request
	// pos is how many bytes of a read or write are done.
	pos     int64
	startNS int64
	endNS   int64
	err     error
	// bounce replaces req.Buf if that is not aligned for O_DIRECT.
	bounce []byte
	next   *slot // in the workers' FIFO
}

// rest returns the memory still to be read or written.
func (s *slot) rest() []byte {
	b := s.req.Buf
	if s.bounce != nil {
		b = s.bounce
	}
	return b[s.pos:s.req.Len]
}

// queue implements ssd.Queue. A slot is free, in flight (in the ring or with the workers) or done. Submit, the engines
// and Poll move it from state to state.
type queue struct {
	dev   *Device
	epoch time.Time // startNS and endNS count from here

	// ringMu guards what the caller of Submit or Poll uses, because a Wait, and Close, take completions from the ring.
	ringMu     sync.Mutex
	closed     bool                           // no request is taken
	drained    bool                           // Close has closed the ring
	ring       *uring.Ring                    // nil: the workers do everything
	submit     func(*uring.Ring) (int, error) // hands the ring's entries to the kernel
	batch      []*slot                        // scratch, cap = depth
	again      []*slot                        // scratch: short reads and writes to continue
	registered []regionState
	// stuck is set while the kernel has not taken all prepared entries.
	stuck atomic.Bool

	// waiter admits one that waits for event at a time: the caller of Wait, or of Close.
	waiter sync.Mutex
	event  *eventfd.Event
	// waiting: it is about to block; signal event after giving it work.
	waiting atomic.Bool
	woken   atomic.Bool

	// mu guards the slots' states.
	mu    sync.Mutex
	slots []slot
	free  []int32 // stack
	done  []int32 // ring
	doneI int     // the oldest
	doneN int
}

// regionState is whether a buffer region is registered with the ring.
type regionState uint8

const (
	regionNew regionState = iota
	regionRegistered
	regionRefused
)

// newQueue makes a queue. The caller holds d.mu.
func newQueue(d *Device, depth int) (*queue, error) {
	q := &queue{
		dev:   d,
		epoch: time.Now(),
		batch: make([]*slot, 0, depth),
		again: make([]*slot, 0, depth),
		slots: make([]slot, depth),
		free:  make([]int32, depth),
		done:  make([]int32, depth),
	}
	for i := range q.slots {
		q.slots[i].queue, q.slots[i].index = q, int32(i)
		q.free[i] = int32(depth - 1 - i)
	}
	var err error
	if q.event, err = eventfd.New(); err != nil {
		return nil, err
	}
	if !d.uring {
		return q, nil
	}
	if err = q.openRing(depth); err != nil && !d.strict {
		d.fallback, err = fmt.Errorf("a queue uses threads: %w", err), nil
		d.workers.raise(threadsWorkers)
	}
	if err != nil {
		return nil, errors.Join(err, q.event.Close())
	}
	return q, nil
}

func (q *queue) openRing(depth int) error {
	r, err := uring.New(depth)
	if err != nil {
		return err
	}
	r.EnableEventfd(false)
	err = errors.Join(r.RegisterEventfd(q.event.FD()), r.RegisterFile(q.dev.fd))
	if p := q.dev.pool; p != nil && err == nil {
		n := min(p.Regions(), uring.MaxBuffers)
		if r.RegisterSparse(n) == nil { // or else: without registered buffers, slower
			q.registered = make([]regionState, n)
		}
	}
	if err != nil {
		return errors.Join(err, r.Close())
	}
	q.ring, q.submit = r, (*uring.Ring).Submit
	return nil
}

func (q *queue) now() int64 { return int64(time.Since(q.epoch)) }

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) int { // hot: 0 allocs
	q.ringMu.Lock()
	defer q.ringMu.Unlock()
	if q.closed || len(reqs) == 0 {
		return 0
	}
	now := q.now()
	info := &q.dev.info
	gone := q.dev.gone.Load()
	q.batch = q.batch[:0]
	answered := false

	q.mu.Lock()
	n := min(len(reqs), len(q.free))
	for i := range n {
		s := &q.slots[q.free[len(q.free)-1]]
		q.free = q.free[:len(q.free)-1]
		s.req, s.pos, s.startNS, s.err = reqs[i], 0, now, nil
		err := ssd.Validate(info, &s.req)
		switch {
		case err != nil:
		case gone:
			err = ssd.ErrGone
		case s.req.Len == 0 && s.req.Op != ssd.Flush:
		default:
			q.batch = append(q.batch, s)
			continue
		}
		q.setDone(s, err, now)
		answered = true
	}
	q.mu.Unlock()

	for _, s := range q.batch {
		if err := s.prepare(); err != nil {
			q.finish(s, err)
		} else if q.ring != nil && q.dev.forRing(&s.req) {
			q.prep(s)
		} else {
			q.dev.workers.push(s)
		}
	}
	if q.ring != nil {
		q.pushRing()
	}
	// A Wait that blocks without a time limit would not submit the entries again that the kernel has refused.
	if answered || q.stuck.Load() {
		q.notify()
	}
	return n
}

// prepare gives the slot a copy of its memory if that is not aligned.
func (s *slot) prepare() error {
	r := &s.req
	if r.Op > ssd.Write || addressOf(r.Buf)&uintptr(s.queue.dev.memAlign-1) == 0 {
		return nil
	}
	b, _, err := scratch(int(r.Len))
	if err != nil {
		return fmt.Errorf("%w: %v of %d bytes at %d: %w", ssd.ErrMedia, r.Op, r.Len, r.Offset, err)
	}
	s.bounce = b
	if r.Op == ssd.Write {
		copy(b, r.Buf)
	}
	return nil
}

// forRing reports whether a request is for the ring. The others always wait, and the workers of the drive do that with
// half the CPU time that the kernel's threads take.
func (d *Device) forRing(r *ssd.Request) bool { // hot: 0 allocs
	return r.Op == ssd.Read && r.Flags&ssd.FUA == 0 ||
		r.Op == ssd.Write && (r.Flags&ssd.FUA == 0 || !d.noDSync.Load())
}

// prep fills a ring entry for the rest of a read or write. The caller holds ringMu.
func (q *queue) prep(s *slot) { // hot: 0 allocs
	e := q.ring.NextSQE()
	invariants.Check(e != nil, "file: more requests than ring entries")
	e.UserData = uint64(s.index)
	b := s.rest()
	switch {
	case s.req.Op == ssd.Read:
		e.PrepRead(0, b, s.req.Offset+s.pos)
	case s.req.Flags&ssd.FUA != 0:
		e.PrepWrite(0, b, s.req.Offset+s.pos, unix.RWF_DSYNC)
	default:
		e.PrepWrite(0, b, s.req.Offset+s.pos, 0)
	}
	e.UseFile()
	if q.registered == nil {
		return
	}
	i, region, ok := q.dev.pool.RegionOf(b)
	if !ok || i >= len(q.registered) {
		return
	}
	if q.registered[i] == regionNew {
		q.registered[i] = regionRegistered
		if err := q.ring.RegisterBuffer(i, region); err != nil { // RLIMIT_MEMLOCK, most likely
			q.registered[i] = regionRefused
			q.dev.noteFallback(fmt.Errorf("buffers are not registered with io_uring: %w", err))
		}
	}
	if q.registered[i] == regionRegistered {
		e.UseBuffer(i)
	}
}

// pushRing submits the prepared entries to the kernel. Entries that the kernel does not take, for lack of memory, are
// submitted again by the next Submit, Poll or Wait.
func (q *queue) pushRing() { // hot: 0 allocs
	for q.ring.Unsubmitted() > 0 {
		if _, err := q.submit(q.ring); err != nil {
			q.stuck.Store(true)
			return
		}
	}
	q.stuck.Store(false)
}

// setDone marks a slot done. The caller holds mu.
func (q *queue) setDone(s *slot, err error, now int64) {
	s.err, s.endNS = err, now
	i := q.doneI + q.doneN
	if i >= len(q.done) {
		i -= len(q.done)
	}
	q.done[i] = s.index
	q.doneN++
}

// finish takes a slot back from a worker.
func (q *queue) finish(s *slot, err error) {
	s.unbounce(err)
	now := q.now()
	q.mu.Lock()
	q.setDone(s, err, now)
	q.mu.Unlock()
	q.notify()
}

func (s *slot) unbounce(err error) {
	if s.bounce == nil {
		return
	}
	if s.req.Op == ssd.Read && err == nil {
		copy(s.req.Buf, s.bounce[:s.req.Len])
	}
	if err := unix.Munmap(s.bounce); err != nil {
		panic("invariant broken: file: unmapping our own memory: " + err.Error())
	}
	s.bounce = nil
}

// notify wakes a Wait that blocks.
func (q *queue) notify() {
	if q.waiting.Load() {
		q.event.Signal()
	}
}

// harvest marks the slots that the ring has completed as done and continues short transfers. The caller holds ringMu.
func (q *queue) harvest() { // hot: 0 allocs
	if q.ring == nil || q.drained {
		return
	}
	if q.ring.PeekCQE() != nil {
		now := q.now()
		q.mu.Lock()
		for c := q.ring.PeekCQE(); c != nil; c = q.ring.PeekCQE() {
			s, res := &q.slots[c.UserData], c.Res
			q.ring.SeenCQE()
			switch next, err := s.advance(res); next {
			case nextDone:
				s.unbounce(err)
				q.setDone(s, err, now)
			case nextRing:
				q.again = append(q.again, s)
			case nextWorker:
				q.dev.workers.push(s)
			}
		}
		q.mu.Unlock()
	}
	if len(q.again) == 0 && !q.stuck.Load() {
		return
	}
	for _, s := range q.again {
		q.prep(s)
	}
	q.again = q.again[:0]
	q.pushRing()
}

// next is what is to be done about a request for which the ring has a result.
type next uint8

const (
	// nextDone: the request has ended.
	nextDone next = iota
	// nextRing: all of it or a part remains.
	nextRing
	// nextWorker: a worker knows another way.
	nextWorker
)

// advance processes a result of the ring.
func (s *slot) advance(res int32) (next, error) { // hot: 0 allocs
	r, d := &s.req, s.queue.dev
	switch errno := unix.Errno(-res); {
	case res < 0 && (errno == unix.EAGAIN || errno == unix.EINTR || errno == unix.ECANCELED):
		// ECANCELED: the kernel could not start the thread that was to do it; nobody here cancels.
		return nextRing, nil
	case res < 0 && errno == unix.EOPNOTSUPP && r.Flags&ssd.FUA != 0:
		return nextWorker, nil // it finds out whether the file knows no RWF_DSYNC
	case res < 0:
		return nextDone, d.fail(r, errno)
	case res == 0 && r.Op == ssd.Read:
		return nextDone, d.failEOF(r, r.Offset+s.pos)
	case res == 0:
		return nextDone, d.fail(r, unix.EIO)
	}
	if s.pos += int64(res); s.pos < r.Len {
		return nextRing, nil
	}
	return nextDone, nil
}

// emit writes completions of done slots to dst and frees the slots.
func (q *queue) emit(dst []ssd.Completion) (n int) { // hot: 0 allocs
	q.mu.Lock()
	for n < len(dst) && q.doneN > 0 {
		s := &q.slots[q.done[q.doneI]]
		if q.doneI++; q.doneI == len(q.done) {
			q.doneI = 0
		}
		q.doneN--
		dst[n] = ssd.Completion{Tag: s.req.Tag, Err: s.err, LatencyNS: s.endNS - s.startNS}
		n++
		s.req.Buf, s.err = nil, nil
		q.free = append(q.free, s.index)
	}
	q.mu.Unlock()
	return n
}

// Poll implements ssd.Queue.
func (q *queue) Poll(dst []ssd.Completion) int { // hot: 0 allocs
	q.ringMu.Lock()
	q.harvest()
	q.ringMu.Unlock()
	return q.emit(dst)
}

// stuckRetry is how soon a blocked Wait submits again the entries that the kernel did not take.
const stuckRetry = time.Millisecond

// ready reports whether a Wait returns.
func (q *queue) ready() bool { // hot: 0 allocs
	q.ringMu.Lock()
	q.harvest()
	drained := q.drained
	q.ringMu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.doneN > 0 || drained || q.woken.Swap(false)
}

// Wait implements ssd.Queue.
func (q *queue) Wait(limit time.Duration) bool { // hot: 0 allocs
	if limit == 0 {
		return q.ready()
	}
	q.waiter.Lock()
	defer q.waiter.Unlock()
	var until time.Time
	if limit > 0 {
		until = time.Now().Add(limit)
	}
	if q.ready() {
		return true
	}
	q.arm(true)
	defer q.arm(false)
	for timely := true; ; timely = q.block(until) {
		// Completions before this point are seen; later ones signal the event.
		if r := q.ready(); r || !timely {
			return r
		}
	}
}

// arm turns the notifications on or off for which block waits. The caller holds waiter.
func (q *queue) arm(on bool) {
	q.waiting.Store(on)
	if q.ring != nil {
		q.ring.EnableEventfd(on)
	}
}

// block waits for a notification; then it returns true. It returns false at the time until; the zero time means no
// limit. The caller holds waiter.
func (q *queue) block(until time.Time) bool { // hot: 0 allocs
	if q.stuck.Load() {
		if soon := time.Now().Add(stuckRetry); until.IsZero() || soon.Before(until) {
			q.event.Wait(soon)
			return true
		}
	}
	return q.event.Wait(until)
}

// Wake implements ssd.Queue.
func (q *queue) Wake() {
	q.woken.Store(true)
	q.notify()
}

// Synchronous implements ssd.Queue: false.
func (q *queue) Synchronous() bool { return false }

// Close implements ssd.Queue. It waits as long as the drive takes to answer, because memory of requests in flight
// cannot be taken back.
func (q *queue) Close() error {
	q.ringMu.Lock()
	q.closed = true
	q.ringMu.Unlock()
	q.Wake()
	q.waiter.Lock()
	defer q.waiter.Unlock()
	if q.drained {
		return nil
	}
	q.arm(true)
	for q.underWay() {
		q.block(time.Time{})
	}
	q.arm(false)
	var err error
	q.ringMu.Lock()
	q.drained = true
	if q.ring != nil {
		err = q.ring.Close()
	}
	q.ringMu.Unlock()
	q.dev.mu.Lock()
	delete(q.dev.queues, q)
	q.dev.mu.Unlock()
	return errors.Join(err, q.event.Close())
}

// underWay reports whether slots are with the ring or the workers.
func (q *queue) underWay() bool {
	q.ringMu.Lock()
	q.harvest()
	q.ringMu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.slots)-len(q.free)-q.doneN > 0
}
