package file

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

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

	// subMu admits one submitter at a time: the caller of Submit, or a Poll that continues short transfers.
	subMu      sync.Mutex
	closed     bool
	ring       *uring.Ring                    // nil: the workers do everything
	submit     func(*uring.Ring) (int, error) // hands the ring's entries to the kernel
	batch      []*slot                        // scratch, cap = depth
	registered []regionState
	// stuck is set while the kernel has not taken all prepared entries.
	stuck atomic.Bool

	// pollMu admits one poller at a time: the caller of Poll or Close.
	pollMu   sync.Mutex
	drained  bool    // Close has closed the ring
	again    []*slot // scratch: short reads and writes to continue
	event    *os.File
	eventRaw syscall.RawConn
	eventFn  func(fd uintptr) bool
	deadline bool // a read deadline is set on event

	// waiting: a Poll is about to block; write to event after giving it work.
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
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	q.event = os.NewFile(uintptr(fd), "eventfd")
	if q.eventRaw, err = q.event.SyscallConn(); err == nil && d.uring {
		if err = q.openRing(depth, fd); err != nil && !d.strict {
			d.fallback, err = fmt.Errorf("a queue uses threads: %w", err), nil
			d.workers.raise(threadsWorkers)
		}
	}
	if err != nil {
		return nil, errors.Join(err, q.event.Close())
	}
	var count [8]byte
	q.eventFn = func(fd uintptr) bool {
		_, err := unix.Read(int(fd), count[:])
		return err != unix.EAGAIN
	}
	return q, nil
}

func (q *queue) openRing(depth, eventFD int) error {
	r, err := uring.New(depth)
	if err != nil {
		return err
	}
	r.EnableEventfd(false)
	err = errors.Join(r.RegisterEventfd(eventFD), r.RegisterFile(q.dev.fd))
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
	q.subMu.Lock()
	defer q.subMu.Unlock()
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
	// A Poll that blocks without a time limit would not submit the entries again that the kernel has refused.
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

// prep fills a ring entry for the rest of a read or write. The caller holds subMu.
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
// submitted again by the next Submit or Poll.
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

// eventOne is what one writes to an eventfd; any number but 0 does.
var eventOne = [8]byte{1}

// notify wakes a Poll that blocks.
func (q *queue) notify() {
	if q.waiting.Load() {
		if _, err := q.event.Write(eventOne[:]); err != nil && !errors.Is(err, os.ErrClosed) &&
			!errors.Is(err, unix.EAGAIN) {
			panic("invariant broken: file: eventfd: " + err.Error())
		}
	}
}

// harvest marks the slots that the ring has completed as done and continues short transfers. The caller holds pollMu.
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
	q.subMu.Lock()
	for _, s := range q.again {
		q.prep(s)
	}
	q.again = q.again[:0]
	q.pushRing()
	q.subMu.Unlock()
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
func (q *queue) Poll(dst []ssd.Completion, wait time.Duration) int { // hot: 0 allocs
	q.pollMu.Lock()
	defer q.pollMu.Unlock()
	q.harvest()
	if n := q.emit(dst); n > 0 || wait == 0 || len(dst) == 0 {
		return n
	}
	var until time.Time
	if wait > 0 {
		until = time.Now().Add(wait)
	}
	for {
		if q.drained || q.woken.Swap(false) {
			return 0
		}
		timely := q.block(until)
		if n := q.emit(dst); n > 0 || !timely {
			return n
		}
	}
}

// stuckRetry is how soon a blocked Poll submits again the entries that the kernel did not take.
const stuckRetry = time.Millisecond

// block waits until a slot is done or Wake is called; then it returns true. It returns false at the time until; the
// zero time means no limit. The caller holds pollMu.
func (q *queue) block(until time.Time) bool { // hot: 0 allocs
	q.waiting.Store(true)
	if q.ring != nil {
		q.ring.EnableEventfd(true)
	}
	// Completions before this point are seen by harvest; later ones write to the eventfd.
	q.harvest()
	timely := true
	if !q.ready() {
		retry := q.stuck.Load()
		at := until
		if soon := time.Now().Add(stuckRetry); retry && (until.IsZero() || soon.Before(until)) {
			at = soon
		} else {
			retry = false
		}
		if !at.IsZero() || q.deadline {
			q.deadline = !at.IsZero()
			if err := q.event.SetReadDeadline(at); err != nil {
				panic("invariant broken: file: eventfd deadline: " + err.Error())
			}
		}
		err := q.eventRaw.Read(q.eventFn)
		timely = err == nil || retry
		q.harvest()
	}
	if q.ring != nil {
		q.ring.EnableEventfd(false)
	}
	q.waiting.Store(false)
	return timely
}

// ready reports whether a Poll has something to return for.
func (q *queue) ready() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.doneN > 0 || q.woken.Load()
}

// Wake implements ssd.Queue.
func (q *queue) Wake() {
	q.woken.Store(true)
	q.notify()
}

// Synchronous implements ssd.Queue: false.
func (q *queue) Synchronous() bool { return false }

// Close implements ssd.Queue. Completions not yet polled can still be polled. It waits as long as the drive takes to
// answer, because memory of requests in flight cannot be taken back.
func (q *queue) Close() error {
	q.subMu.Lock()
	q.closed = true
	q.subMu.Unlock()
	q.Wake()
	q.pollMu.Lock()
	defer q.pollMu.Unlock()
	if q.drained {
		return nil
	}
	for q.harvest(); q.inFlight() > 0; {
		q.blockForDrain()
	}
	q.drained = true
	q.woken.Store(true)
	var err error
	if q.ring != nil {
		err = q.ring.Close()
	}
	q.dev.mu.Lock()
	delete(q.dev.queues, q)
	q.dev.mu.Unlock()
	return errors.Join(err, q.event.Close())
}

// inFlight is how many slots are with the ring or the workers.
func (q *queue) inFlight() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.slots) - len(q.free) - q.doneN
}

// blockForDrain waits for one more slot to be done. The caller holds pollMu.
func (q *queue) blockForDrain() {
	before := q.inFlight()
	q.waiting.Store(true)
	if q.ring != nil {
		q.ring.EnableEventfd(true)
	}
	for q.harvest(); q.inFlight() == before; q.harvest() {
		at := time.Time{}
		if q.stuck.Load() {
			at = time.Now().Add(stuckRetry)
		}
		if err := q.event.SetReadDeadline(at); err != nil {
			panic("invariant broken: file: eventfd deadline: " + err.Error())
		}
		if err := q.eventRaw.Read(q.eventFn); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			panic("invariant broken: file: eventfd: " + err.Error())
		}
	}
	if q.ring != nil {
		q.ring.EnableEventfd(false)
	}
	q.waiting.Store(false)
}
