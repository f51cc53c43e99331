package vfio

import (
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/eventfd"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/parts"
	"jbofd/internal/ssd/vfio/pcie"
	"jbofd/internal/units"
)

// queue implements ssd.Queue.
//
//	Submit ──> requests (package parts) ── Next ──> commands in the ring
//	Poll   <── requests <── End, Again <──────────┘
//	Wait   <── event    <── interrupt, if the queue is armed; keeper
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

	requests parts.Requests
	commands []parts.Command // by slot in the ring
	scratch  []uint16        // for the result of overdue
}

func newQueue(d *Device, s ringMemory, depth int) *queue {
	vector := int(s.id)
	q := &queue{dev: d, event: d.fn.Vector(vector), vector: vector, mem: s, ring: s.ring, epoch: time.Now(),
		commands: make([]parts.Command, s.ring.Places()), scratch: make([]uint16, 0, s.ring.Places())}
	q.requests = parts.Make(parts.Config{Depth: depth, Places: s.ring.Places(), Most: q.most, Bounces: s.bounces})
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
	var gone error
	if q.dev.gone.Load() {
		gone = q.dev.Healthy()
	}
	n := q.requests.Add(reqs, &q.dev.info, gone, now)
	q.send(now) // which ends a request if there is no memory for a copy of its data
	ended := q.requests.Done()
	q.mu.Unlock()
	if ended {
		q.notify()
	}
	return n
}

// send sends parts while the ring has a free slot. The caller holds mu.
func (q *queue) send(now int64) { // hot: 0 allocs
	if q.down {
		return
	}
	for q.ring.Free() > 0 {
		p, ok := q.requests.Next(now)
		if !ok {
			break
		}
		q.command(&p, now)
	}
	q.ring.Submit()
	if q.dev.idle.Load() && q.ring.Free() < q.ring.Places() && q.dev.idle.Swap(false) {
		q.dev.fn.Vector(0).Signal()
	}
}

// most returns how many bytes the command for a part that begins at from may have, and whether they have to be copied:
// the memory is not mapped for the device, or not aligned to 4 bytes.
func (q *queue) most(r *ssd.Request, from int64) (n int64, copied bool) {
	d := q.dev
	switch r.Op {
	case ssd.Read, ssd.Write:
		at, mapped := d.regions.Address(r.Buf[:r.Len])
		if mapped && at&3 == 0 {
			return q.mostBytes(at + uint64(from)), false
		}
		return int64(min(parts.BounceBytes, d.props.MaxTransfer)), true
	case ssd.WriteZeroes:
		most := min(d.props.MaxZeroes, 1<<16<<d.shift)
		if !d.props.WriteZeroes {
			most = int64(min(zeroesBytes, d.props.MaxTransfer))
		}
		return max(most>>d.shift, 1) << d.shift, false
	case ssd.Deallocate:
		return min(d.props.MaxRange, 1<<31) << d.shift, false
	}
	return r.Len, false
}

// mostBytes is the longest transfer at an IOVA in bytes, a multiple of the block: MDTS, which counts whole pages.
func (q *queue) mostBytes(at uint64) int64 {
	page := uint64(q.dev.ctrl.PageBytes())
	most := int64(q.dev.props.MaxTransfer) - int64(at&(page-1))
	return max(most>>q.dev.shift, 1) << q.dev.shift
}

// command fills in a command for a part. The ring has a free slot.
func (q *queue) command(p *parts.Part, now int64) { // hot: 0 allocs
	e, place := q.ring.Next()
	q.commands[place] = parts.Command{Part: *p, Busy: true, StartNS: now}
	r, d := q.requests.Of(p), q.dev
	e.SetNSID(d.nsid)
	if r.Op == ssd.Flush {
		e.SetOpcode(nvme.CmdFlush)
		return
	}
	first, n := units.LBA(d.blocks(r.Offset+p.From)), d.blocks(p.To-p.From)
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
	q.setData(e, place, q.dataOf(r, p), p.To-p.From)
}

// dataOf returns the IOVA of the data of a part.
func (q *queue) dataOf(r *ssd.Request, p *parts.Part) uint64 {
	if r.Op == ssd.WriteZeroes {
		return q.dev.zeroesAt
	}
	if at, ok := q.requests.Copied(p); ok {
		return at
	}
	at, _ := q.dev.regions.Address(r.Buf[:r.Len]) // it was mapped when the part was made
	return at + uint64(p.From)
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
	p := q.commands[place].Part
	q.commands[place] = parts.Command{}
	var err error
	switch {
	case st.OK():
	case parts.MayRetry(st) && q.requests.Again(&p, now+int64(parts.RetryDelay)):
		q.dev.fn.Vector(0).Signal() // the keeper sends it
		return
	default:
		err = q.requests.StatusError(&p, st)
	}
	q.requests.End(&p, err, now)
}

// Poll implements ssd.Queue.
func (q *queue) Poll(dst []ssd.Completion) int { // hot: 0 allocs
	q.mu.Lock()
	defer q.mu.Unlock()
	q.reap()
	n := q.requests.Poll(dst)
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
	return q.requests.Done() || q.ended || q.woken.Swap(false)
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
		busy := q.requests.Open()
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

// errReset is wrapped by the error of a request if a reset ended the last try (parts.MaxTries) of one of its commands.
var errReset = errors.New("the controller was reset")
