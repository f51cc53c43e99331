package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/eventfd"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio/pcie"
	"jbofd/internal/units"
)

// queue implements ssd.Queue.
//
//	Submit ──> requests ──> unsent: they have parts that are not sent ──> commands in the ring
//	Poll   <── done     <── the last part of a request has ended      <──┘
//	Wait   <── event    <── interrupt, if the queue is armed; keeper
//
// A request is in unsent until its last part is sent. A part whose command is to be sent again is in again.
type queue struct {
	dev    *Device
	event  *eventfd.Event // what the interrupt vector signals
	vector int
	mem    ringMemory
	// epoch is when the queue was made: times of the queue are in nanoseconds since then.
	epoch time.Time

	// waiter admits one that waits for event at a time: the caller of Wait, or of Close.
	waiter sync.Mutex
	// waiting: the waiter is about to block, or blocks. Who adds to done then signals event (notify). The waiter sets
	// it before it checks woken and done, so that a completion or a Wake between the check and the wait is not missed.
	waiting atomic.Bool
	// woken: Wake was called, and no Wait has returned because of it yet.
	woken atomic.Bool

	// mu guards what follows. Beside the owner the waiter takes it, and the keeper.
	mu   sync.Mutex
	ring *pcie.Ring
	// armed: the controller sends interrupts. batches counts the Polls since then that have found completions, without
	// a Wait that has blocked.
	armed   bool
	batches int

	closed bool // Submit takes no request
	ended  bool // Close has ended
	down   bool // no command is sent and no register written: the controller is being reset, or the device is gone
	// lied is the error of an invalid completion, for which the keeper is to reset the controller.
	lied error

	requests []request
	free     []int32
	unsent   fifo
	commands []command // by slot in the ring
	// again has the parts that are to be sent again, the one that is due first at the end.
	again   []part
	done    fifo
	bounces *bounces
	scratch []uint16 // for the result of overdue
}

// request is one request from Submit until its completion is polled.
type request struct {
	ssd.Request
	next    int64 // how many of its bytes were sent
	left    int64 // how many of its bytes have not ended; a Flush, which has none, counts as 1
	flying  int32 // its parts that are outstanding, or in again
	sent    bool  // it is not in unsent
	startNS int64 // of Submit
	endNS   int64
	err     error // of the first part that has failed
	link    int32 // the next request of its fifo
}

// part is the bytes from..to of a request, for which one command is sent.
type part struct {
	request  int32
	tries    uint8 // how often it was sent before
	bounce   int16 // its bounce buffer; -1: none
	from, to int64
	// dueNS is when it is to be sent again; 0: at once.
	dueNS int64
}

// command is a part that is outstanding in the ring, in the slot of its index.
type command struct {
	part
	busy, aborted bool
	startNS       int64
}

// fifo is a list of requests.
type fifo struct{ first, last, n int32 }

func (f *fifo) push(all []request, i int32) {
	all[i].link = -1
	if f.n == 0 {
		f.first = i
	} else {
		all[f.last].link = i
	}
	f.last = i
	f.n++
}

func (f *fifo) pop(all []request) int32 {
	i := f.first
	f.first = all[i].link
	f.n--
	return i
}

func newQueue(d *Device, s ringMemory, depth int) *queue {
	vector := int(s.id)
	q := &queue{dev: d, event: d.fn.Vector(vector), vector: vector, mem: s, ring: s.ring, bounces: s.bounces,
		epoch:    time.Now(),
		requests: make([]request, depth), free: make([]int32, depth), commands: make([]command, s.ring.Places()),
		again: make([]part, 0, s.ring.Places()), scratch: make([]uint16, 0, s.ring.Places())}
	for i := range q.free {
		q.free[i] = int32(depth - 1 - i)
	}
	return q
}

func (q *queue) now() int64 { return int64(time.Since(q.epoch)) }

// Synchronous implements ssd.Queue: false.
func (q *queue) Synchronous() bool { return false }

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) int { // hot: 0 allocs
	q.mu.Lock()
	if q.closed || len(reqs) == 0 {
		q.mu.Unlock()
		return 0
	}
	now := q.now()
	gone := q.dev.gone.Load()
	n := min(len(reqs), len(q.free))
	for k := range n {
		i := q.free[len(q.free)-1]
		q.free = q.free[:len(q.free)-1]
		r := &q.requests[i]
		*r = request{Request: reqs[k], left: reqs[k].Len, startNS: now}
		if r.err = ssd.Validate(&q.dev.info, &r.Request); r.err == nil && gone {
			r.err = q.dev.Healthy()
		}
		if r.Op == ssd.Flush {
			r.left = 1
		}
		if r.err != nil || r.left == 0 {
			r.endNS = now
			q.done.push(q.requests, i)
			continue
		}
		q.unsent.push(q.requests, i)
	}
	q.send(now) // which ends a request if there is no memory for a copy of its data
	ended := q.done.n > 0
	q.mu.Unlock()
	if ended {
		q.notify()
	}
	return n
}

// send sends parts, first those in again, while the ring has a free slot. The caller holds mu.
func (q *queue) send(now int64) { // hot: 0 allocs
	if q.down {
		return
	}
	for len(q.again) > 0 && q.ring.Free() > 0 {
		p := q.again[len(q.again)-1]
		if p.dueNS > now {
			break
		}
		q.again = q.again[:len(q.again)-1]
		q.command(p, now)
	}
	for q.unsent.n > 0 && q.ring.Free() > 0 {
		i := q.unsent.first
		r := &q.requests[i]
		if r.err != nil { // a part of it has failed: the rest is not sent
			q.unsent.pop(q.requests)
			r.sent = true
			q.endIfOver(i, now)
			continue
		}
		p, ok, err := q.nextPart(i)
		if err != nil {
			r.err = fmt.Errorf("%w: %v of %d bytes at %d: %w", ssd.ErrMedia, r.Op, r.Len, r.Offset, err)
			continue
		}
		if !ok {
			break
		}
		r.next = p.to
		r.flying++
		if r.next >= r.Len {
			q.unsent.pop(q.requests)
			r.sent = true
		}
		q.command(p, now)
	}
	q.ring.Submit()
	if q.dev.idle.Load() && q.ring.Free() < q.ring.Places() && q.dev.idle.Swap(false) {
		q.dev.fn.Vector(0).Signal()
	}
}

// nextPart returns the next part of a request to send, with a bounce buffer if it needs one. ok is false if all bounce
// buffers are in use.
//
// Errors: the system's, if there is no memory for the first bounce buffer.
func (q *queue) nextPart(i int32) (p part, ok bool, err error) {
	r, d := &q.requests[i], q.dev
	p = part{request: i, bounce: -1, from: r.next, to: r.Len}
	switch r.Op {
	case ssd.Read, ssd.Write:
		at, mapped := d.address(r.Buf[:r.Len])
		if mapped && at&3 == 0 {
			p.to = min(p.to, p.from+q.mostBytes(at+uint64(p.from)))
			return p, true, nil
		}
		if p.bounce, err = q.bounces.take(); p.bounce < 0 {
			return p, false, err
		}
		p.to = min(p.to, p.from+int64(min(bounceBytes, d.props.MaxTransfer)))
		if r.Op == ssd.Write {
			copy(q.bounces.memory(p.bounce), r.Buf[p.from:p.to])
		}
	case ssd.WriteZeroes:
		most := min(d.props.MaxZeroes, 1<<16<<d.shift)
		if !d.props.WriteZeroes {
			most = int64(min(zeroesBytes, d.props.MaxTransfer))
		}
		p.to = min(p.to, p.from+max(most>>d.shift, 1)<<d.shift)
	case ssd.Deallocate:
		p.to = min(p.to, p.from+min(d.props.MaxRange, 1<<31)<<d.shift)
	}
	return p, true, nil
}

// mostBytes is the longest transfer at an IOVA in bytes, a multiple of the block: MDTS, which counts whole pages.
func (q *queue) mostBytes(at uint64) int64 {
	page := uint64(q.dev.ctrl.PageBytes())
	most := int64(q.dev.props.MaxTransfer) - int64(at&(page-1))
	return max(most>>q.dev.shift, 1) << q.dev.shift
}

// command fills in a command for a part. The ring has a free slot.
func (q *queue) command(p part, now int64) { // hot: 0 allocs
	e, place := q.ring.Next()
	q.commands[place] = command{part: p, busy: true, startNS: now}
	r, d := &q.requests[p.request], q.dev
	e.SetNSID(d.nsid)
	if r.Op == ssd.Flush {
		e.SetOpcode(nvme.CmdFlush)
		return
	}
	first, n := units.LBA(d.blocks(r.Offset+p.from)), d.blocks(p.to-p.from)
	if r.Op == ssd.Deallocate {
		at := place * d.ctrl.PageBytes()
		dsm := (*nvme.DSMRange)(q.mem.lists[at : at+nvme.DSMRangeSize])
		*dsm = nvme.DSMRange{}
		dsm.SetSLBA(first)
		dsm.SetNLB(n)
		e.SetOpcode(nvme.CmdDSM)
		e.SetCDW(11, nvme.DSMDeallocate)
		e.SetPRP1(q.mem.listsAt + uint64(at))
		return
	}
	e.SetSLBA(first)
	cdw12 := uint32(n - 1)
	if r.Flags&ssd.FUA != 0 {
		cdw12 |= nvme.CDW12FUA
	}
	switch {
	case r.Op == ssd.Read:
		e.SetOpcode(nvme.CmdRead)
	case r.Op == ssd.Write:
		e.SetOpcode(nvme.CmdWrite)
	case d.props.WriteZeroes:
		e.SetOpcode(nvme.CmdWriteZeroes)
		if r.Flags&ssd.Unmap != 0 {
			cdw12 |= nvme.CDW12Deallocate
		}
		e.SetCDW(12, cdw12)
		return
	default:
		e.SetOpcode(nvme.CmdWrite)
	}
	e.SetCDW(12, cdw12)
	q.setData(e, place, q.dataOf(r, &p), p.to-p.from)
}

// dataOf returns the IOVA of the data of a part.
func (q *queue) dataOf(r *request, p *part) uint64 {
	switch {
	case r.Op == ssd.WriteZeroes:
		return q.dev.zeroesAt
	case p.bounce >= 0:
		return q.bounces.address(p.bounce)
	}
	at, _ := q.dev.address(r.Buf[:r.Len]) // it was mapped when the part was made
	return at + uint64(p.from)
}

// setData describes n bytes of contiguous data at an IOVA: by an SGL of one data block, or by PRPs, of which all but
// two are in a list.
func (q *queue) setData(e *nvme.SQE, place int, at uint64, n int64) { // hot: 0 allocs
	page := uint64(q.dev.ctrl.PageBytes())
	end, second := at+uint64(n), (at&^(page-1))+page
	switch {
	case end <= second:
		e.SetPRP1(at)
	case end <= second+page:
		e.SetPRP1(at)
		e.SetPRP2(second)
	case q.dev.props.SGL:
		e.SetPSDT(nvme.PSDTSGL)
		e.SGL().SetAddress(at)
		e.SGL().SetLength(uint32(n))
		e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeAddress)
	default:
		list := q.mem.lists[place*int(page):]
		for i := 0; second < end; i, second = i+8, second+page {
			binary.LittleEndian.PutUint64(list[i:], second)
		}
		e.SetPRP1(at)
		e.SetPRP2(q.mem.listsAt + uint64(place)*page)
	}
}

// reap handles the completions in the ring, and sends what has room then. The caller holds mu.
func (q *queue) reap() { // hot: 0 allocs
	if q.down || q.ended || !q.ring.Ready() {
		return
	}
	now := q.now()
	for {
		place, cqe, ok, err := q.ring.Reap()
		if err != nil && q.lied == nil {
			q.lied = err
			q.dev.fn.Vector(0).Signal()
		}
		if !ok || err != nil {
			break
		}
		q.completed(place, cqe.Status(), now)
	}
	q.ring.Seen()
	q.send(now)
}

// completed handles the completion of a command: its part is sent again, or has ended.
func (q *queue) completed(place int, st nvme.Status, now int64) {
	c := &q.commands[place]
	p := c.part
	*c = command{}
	r := &q.requests[p.request]
	var err error
	switch {
	case st.OK():
		if p.bounce >= 0 && r.Op == ssd.Read {
			copy(r.Buf[p.from:p.to], q.bounces.memory(p.bounce))
		}
	case mayRetry(st) && p.tries+1 < maxTries:
		p.tries++
		p.dueNS = now + int64(retryDelay)
		q.sendAgain(p)
		q.dev.fn.Vector(0).Signal() // the keeper sends it
		return
	default:
		err = fmt.Errorf("%w: %v of %d bytes at %d: %v", kindOf(st), r.Op, p.to-p.from, r.Offset+p.from, st)
	}
	q.partEnded(p, err, now)
}

// mayRetry reports whether a status says that the command may succeed later.
func mayRetry(st nvme.Status) bool {
	if st&nvme.DNR != 0 {
		return false
	}
	switch st.Code() {
	case nvme.NamespaceNotReady, nvme.CommandInterrupted, nvme.TransientTransportError, nvme.AbortRequested,
		nvme.AbortedPowerLoss, nvme.AbortedSQDeletion, nvme.AdminMediaNotReady, nvme.FormatInProgress:
		return true
	}
	return false
}

// kindOf returns the sentinel of package ssd for a status.
func kindOf(st nvme.Status) error {
	switch st.Code() {
	case nvme.LBAOutOfRange:
		return ssd.ErrRange
	case nvme.CapacityExceeded:
		return ssd.ErrNoSpace
	case nvme.InvalidOpcode:
		return ssd.ErrUnsupported
	}
	return ssd.ErrMedia
}

// sendAgain puts a part into again, which stays in order.
func (q *queue) sendAgain(p part) {
	i := len(q.again)
	q.again = append(q.again, p)
	for ; i > 0 && q.again[i-1].dueNS < p.dueNS; i-- {
		q.again[i] = q.again[i-1]
	}
	q.again[i] = p
}

// partEnded counts a part that has ended, with its error. Its request ends with it if it was the last part.
func (q *queue) partEnded(p part, err error, now int64) {
	if p.bounce >= 0 {
		q.bounces.put(p.bounce)
	}
	r := &q.requests[p.request]
	r.flying--
	r.left -= max(p.to-p.from, 1)
	if r.err == nil {
		r.err = err
	}
	q.endIfOver(p.request, now)
}

// endIfOver ends a request that has no part outstanding or in again, if all parts were sent, or no more is sent because
// one has failed.
func (q *queue) endIfOver(i int32, now int64) {
	r := &q.requests[i]
	if r.flying == 0 && r.sent && (r.left <= 0 || r.err != nil) {
		r.endNS = now
		q.done.push(q.requests, i)
	}
}

// emit returns completions of requests that are done. The caller holds mu.
func (q *queue) emit(dst []ssd.Completion) (n int) { // hot: 0 allocs
	for ; n < len(dst) && q.done.n > 0; n++ {
		i := q.done.pop(q.requests)
		r := &q.requests[i]
		dst[n] = ssd.Completion{Tag: r.Tag, Err: r.err, LatencyNS: r.endNS - r.startNS}
		r.Buf, r.err = nil, nil
		q.free = append(q.free, i)
	}
	return n
}

// Poll implements ssd.Queue.
func (q *queue) Poll(dst []ssd.Completion) int { // hot: 0 allocs
	q.mu.Lock()
	defer q.mu.Unlock()
	q.reap()
	n := q.emit(dst)
	if n > 0 && q.armed && !q.waiting.Load() {
		if q.batches++; q.batches == busyBatches {
			q.arm(false)
		}
	}
	return n
}

// busyBatches is how many batches of completions a queue finds without a Wait that blocks until it takes no more
// interrupts. A queue that waits for each of them has its interrupts on all the time, which saves it the registers.
const busyBatches = 2

// arm has the controller send interrupts for the queue, or not. The caller holds mu.
func (q *queue) arm(on bool) { // hot: 0 allocs
	if q.armed == on || q.down || q.ended {
		return
	}
	q.armed, q.batches = on, 0
	q.dev.fn.Mask(q.vector, !on)
}

// ready reports whether a Wait returns. It reaps, because a completion may be that of a part, or a lie. The caller
// holds mu.
func (q *queue) ready() bool { // hot: 0 allocs
	q.reap()
	return q.done.n > 0 || q.ended || q.woken.Swap(false)
}

// Wait implements ssd.Queue.
func (q *queue) Wait(limit time.Duration) bool { // hot: 0 allocs
	if limit == 0 {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.ready()
	}
	q.waiter.Lock()
	defer q.waiter.Unlock()
	var until time.Time
	if limit > 0 {
		until = time.Now().Add(limit)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ready() {
		return true
	}
	q.waiting.Store(true)
	defer q.waiting.Store(false)
	for timely := true; ; {
		// First arm, and then look once more: what completes before the look is seen by it, and what completes after
		// it sends an interrupt. After a reset the queue is armed again.
		q.arm(true)
		if r := q.ready(); r || !timely {
			q.batches = 0
			return r
		}
		q.mu.Unlock()
		timely = q.event.Wait(until)
		q.mu.Lock()
	}
}

// over reports whether Close has ended.
func (q *queue) over() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ended
}

// notify wakes a Wait that blocks.
func (q *queue) notify() {
	if q.waiting.Load() {
		q.event.Signal()
	}
}

// Wake implements ssd.Queue.
func (q *queue) Wake() {
	q.woken.Store(true)
	q.notify()
}

// Close implements ssd.Queue.
func (q *queue) Close() error {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.Wake()
	q.waiter.Lock()
	defer q.waiter.Unlock()
	if q.over() {
		return nil
	}
	q.waiting.Store(true)
	for {
		q.mu.Lock()
		q.arm(true)
		q.reap()
		busy := len(q.requests) - len(q.free) - int(q.done.n)
		q.mu.Unlock()
		if busy == 0 {
			break
		}
		q.event.Wait(time.Time{})
	}
	q.waiting.Store(false)
	q.dev.do(func() { q.dev.deleteQueue(q) })
	q.mu.Lock()
	q.ended = true
	q.mu.Unlock()
	return nil
}

// errReset is wrapped by the error of a request if a reset ended the last of maxTries tries of one of its commands.
var errReset = errors.New("the controller was reset")
