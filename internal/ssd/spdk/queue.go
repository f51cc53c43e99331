//go:build spdk && cgo

package spdk

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/eventfd"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
)

// queue implements ssd.Queue.
//
//	Submit ──> requests ──> unsent: they have parts that are not sent ──> commands, by slot ──> turn
//	Poll   <── done     <── the last part of a request has ended      <── {slot, status}   <──┘
//
// A request is in unsent until its last part is sent. A part whose command is to be sent again is in again.
type queue struct {
	dev *Device
	// event wakes the waiter. irq is the descriptor of the interrupt; -1: there are none. fds are both. irq is the
	// queue's own, a duplicate of that of SPDK, which closes its own while the waiter may poll.
	event *eventfd.Event
	irq   int
	fds   poller
	// epoch is when the queue was made: times of the queue are in nanoseconds since then.
	epoch time.Time

	// waiter admits one that blocks at a time: the caller of Wait, or of Close.
	waiter sync.Mutex
	// waiting: the waiter is about to block, or blocks. The waiter sets it before it checks woken and done, so that a
	// completion or a Wake between the check and the wait is not missed.
	waiting atomic.Bool
	// woken: Wake was called, and no Wait has returned because of it yet.
	woken atomic.Bool

	// mu guards what follows, and the queue pair. Beside the owner the waiter takes it, and the keeper.
	mu     sync.Mutex
	handle handle

	closed bool // Submit takes no request
	ended  bool // Close has ended; handle is not valid
	down   bool // nothing is sent: the controller is being reset, or the device is gone
	// lost is why the queue pair does not work until the controller was reset; nil: it works.
	lost error
	gone error // why the device is gone
	// stalled: SPDK had no memory for a command. stalledNS is since when it has had none while nothing was outstanding;
	// 0: it had.
	stalled   bool
	stalledNS int64
	lies      int32 // completions of commands that were not outstanding, as the last call into C said
	crossings int   // calls into C

	requests []request
	free     []int32
	unsent   fifo
	commands []command // by slot
	slots    []int32   // free ones
	// again has the parts that are to be sent again, the one that is due first at the end.
	again   []part
	done    fifo
	bounces bounces

	batch  []cCmd
	cpls   []cCpl
	turned cTurned
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
	tries    uint8 // how often it was sent before, and the resets that its command has survived
	bounce   int16 // its bounce buffer; -1: none
	from, to int64
	dueNS    int64 // when it is to be sent again; 0: at once
}

// command is a part that is outstanding, in the slot of its index.
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

func newQueue(d *Device, h handle, irq int, event *eventfd.Event, depth, places int) *queue {
	q := &queue{dev: d, event: event, irq: irq, fds: newPoller(event.FD(), irq), epoch: time.Now(), handle: h,
		requests: make([]request, depth), free: make([]int32, depth), commands: make([]command, places),
		slots: make([]int32, places), again: make([]part, 0, places), batch: make([]cCmd, 0, places),
		cpls: make([]cCpl, min(places, 64))}
	for i := range q.free {
		q.free[i] = int32(depth - 1 - i)
	}
	for i := range q.slots {
		q.slots[i] = int32(places - 1 - i)
	}
	return q
}

func (q *queue) now() int64 { return int64(time.Since(q.epoch)) }

// flying is the number of commands that are outstanding.
func (q *queue) flying() int { return len(q.commands) - len(q.slots) }

// busy reports whether there is something that has not ended.
func (q *queue) busy() bool { return q.flying() > 0 || len(q.again) > 0 || q.unsent.n > 0 }

// Synchronous implements ssd.Queue: false.
func (q *queue) Synchronous() bool { return false }

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) int { // hot: 0 allocs
	q.mu.Lock()
	if q.closed || len(reqs) == 0 {
		q.mu.Unlock()
		return 0
	}
	now, gone, idle := q.now(), q.dev.gone.Load(), !q.busy()
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
	q.turn()
	// A waiter that blocks without a limit does not look for what is under way now, unless an interrupt wakes it.
	begins := idle && q.busy() && (q.irq < 0 || q.stalled)
	ended := q.done.n > 0
	q.mu.Unlock()
	if ended || begins {
		q.notify()
	}
	return n
}

// turn sends what can be sent and takes completions. It calls into C until the ring has no completion and nothing more
// can be sent. It does nothing while the queue pair is down, lost or closed. The caller holds mu.
func (q *queue) turn() { // hot: 0 allocs
	for !q.down && !q.ended && q.lost == nil {
		now := q.now()
		q.batch = q.batch[:0]
		q.fill(now)
		if len(q.batch) == 0 && q.flying() == 0 {
			return
		}
		t := &q.turned
		turn(q.handle, q.batch, q.cpls, t)
		q.crossings++
		q.refuse(now)
		// Completions make room for what could not be sent; what was refused waits for the next turn.
		room := t.cpls > 0 && t.refused == 0
		more := t.more > 0
		q.handleCompletions(false)
		if t.lies != q.lies {
			q.lies = t.lies
			q.lose(errLied)
		} else if t.lost < 0 {
			q.lose(unix.Errno(-t.lost))
		}
		if !more && !(room && (q.unsent.n > 0 || q.isDue(now))) {
			return
		}
	}
}

// errLied: SPDK has reported the end of a command that was not outstanding.
var errLied = errors.New("a command has ended that was not outstanding")

// lose has the keeper reset the controller.
func (q *queue) lose(why error) {
	if q.lost == nil {
		q.lost = why
		q.dev.event.Signal()
	}
}

func (q *queue) isDue(now int64) bool {
	return len(q.again) > 0 && q.again[len(q.again)-1].dueNS <= now
}

// fill makes commands of parts, first of those in again, while there are free slots.
func (q *queue) fill(now int64) { // hot: 0 allocs
	for len(q.slots) > 0 && q.isDue(now) {
		p := q.again[len(q.again)-1]
		q.again = q.again[:len(q.again)-1]
		q.command(p, now)
	}
	for q.unsent.n > 0 && len(q.slots) > 0 {
		i := q.unsent.first
		r := &q.requests[i]
		if r.err != nil { // a part of it has failed: the rest is not sent
			q.unsent.pop(q.requests)
			r.sent = true
			q.endIfOver(i, now)
			continue
		}
		p, ok := q.nextPart(i)
		if !ok {
			if len(q.bounces.all) == 0 {
				r.err = fmt.Errorf("%w: %v of %d bytes at %d: no memory of SPDK for a copy", ssd.ErrMedia, r.Op, r.Len,
					r.Offset)
				continue
			}
			break // all bounce buffers are in use
		}
		r.next = p.to
		r.flying++
		if r.next >= r.Len {
			q.unsent.pop(q.requests)
			r.sent = true
		}
		q.command(p, now)
	}
}

// nextPart returns the next part of a request to send, with a bounce buffer if it needs one. ok is false if there is
// none.
func (q *queue) nextPart(i int32) (p part, ok bool) {
	r, d := &q.requests[i], q.dev
	block := int64(d.info.BlockSize)
	most := int64(d.id.maxTransfer) / block * block
	p = part{request: i, bounce: -1, from: r.next, to: r.Len}
	switch r.Op {
	case ssd.Read, ssd.Write:
		if !d.reachable(r.Buf[:r.Len]) || addressOf(r.Buf)&3 != 0 {
			if p.bounce = q.bounces.take(); p.bounce < 0 {
				return p, false
			}
			most = min(most, bounceBytes/block*block)
		}
		p.to = min(p.to, p.from+most)
		if p.bounce >= 0 && r.Op == ssd.Write {
			copy(q.bounces.all[p.bounce], r.Buf[p.from:p.to])
		}
	case ssd.WriteZeroes:
		// SPDK does not tell the limit of Write Zeroes (WZSL). No controller has one below that of transfers.
		if !d.id.hasZeroes {
			most = min(most, zeroesBytes/block*block)
		}
		p.to = min(p.to, p.from+min(most, block<<16))
	case ssd.Deallocate:
		p.to = min(p.to, p.from+block<<31)
	}
	return p, true
}

// command adds the command for a part to the batch. There is a free slot.
func (q *queue) command(p part, now int64) { // hot: 0 allocs
	slot := q.slots[len(q.slots)-1]
	q.slots = q.slots[:len(q.slots)-1]
	q.commands[slot] = command{part: p, busy: true, startNS: now}
	r, d := &q.requests[p.request], q.dev
	block := int64(d.info.BlockSize)
	c := cCmd{lba: uint64((r.Offset + p.from) / block), blocks: uint32((p.to - p.from) / block), slot: uint32(slot),
		op: uint8(r.Op), flags: uint8(r.Flags)}
	switch {
	case r.Op == ssd.Flush:
		c.lba, c.blocks = 0, 0
	case r.Op == ssd.WriteZeroes && !d.id.hasZeroes:
		c.op, c.flags, c.addr = uint8(ssd.Write), c.flags&uint8(ssd.FUA), addressOf(d.zeroes)
	case r.Op <= ssd.Write && p.bounce >= 0:
		c.addr = addressOf(q.bounces.all[p.bounce])
	case r.Op <= ssd.Write:
		c.addr = addressOf(r.Buf) + uint64(p.from)
	}
	q.batch = append(q.batch, c)
}

// refuse handles the commands of the batch that SPDK has not taken.
func (q *queue) refuse(now int64) {
	t := &q.turned
	if q.stalled = t.refused == -int32(unix.ENOMEM); !q.stalled || t.took > 0 {
		q.stalledNS = 0
	}
	if t.refused == 0 {
		return
	}
	why := unix.Errno(-t.refused)
	rest := q.batch[t.took:]
	for k, c := range rest {
		p := q.commands[c.slot].part
		q.freeSlot(int(c.slot))
		if k == 0 && why != unix.ENOMEM && why != unix.ENXIO {
			r := &q.requests[p.request]
			q.partEnded(p, fmt.Errorf("%w: %v of %d bytes at %d: SPDK: %w", ssd.ErrMedia, r.Op, p.to-p.from,
				r.Offset+p.from, why), now)
			continue
		}
		p.dueNS = 0
		q.sendAgain(p)
	}
	switch {
	case why == unix.ENXIO:
		q.lose(why)
	case q.stalled && t.took == 0 && q.flying() == 0 && q.stalledNS == 0:
		q.stalledNS = now
	case q.stalled && q.stalledNS != 0 && now-q.stalledNS > int64(q.dev.cfg.Timeout):
		for _, p := range q.again {
			q.partEnded(p, fmt.Errorf("%w: SPDK has had no memory for a command for %v: %w", ssd.ErrMedia,
				q.dev.cfg.Timeout, why), now)
		}
		q.again, q.stalledNS = q.again[:0], 0
	}
}

// take takes the completions that are left in the ring. ended: SPDK has ended the commands, the controller did not.
func (q *queue) take(ended bool) {
	for {
		turn(q.handle, nil, q.cpls, &q.turned)
		q.crossings++
		q.handleCompletions(ended)
		if q.turned.more == 0 {
			return
		}
	}
}

// handleCompletions handles the completions that the last turn has returned: a part is sent again, or has ended.
func (q *queue) handleCompletions(ended bool) { // hot: 0 allocs
	now := q.now()
	for _, c := range q.cpls[:q.turned.cpls] {
		i, st := int(c.slot), c.status
		p := q.commands[i].part
		r := &q.requests[p.request]
		switch {
		case st.OK():
			if p.bounce >= 0 && r.Op == ssd.Read {
				copy(r.Buf[p.from:p.to], q.bounces.all[p.bounce])
			}
			q.freeSlot(i)
			q.partEnded(p, nil, now)
		case q.gone != nil:
			q.freeSlot(i)
			q.partEnded(p, q.gone, now)
		case ended || st.Code() == nvme.AbortedSQDeletion:
			q.tryAgain(i, now, 0, fmt.Errorf("%w: %v", errReset, st))
		case mayRetry(st):
			q.tryAgain(i, now, int64(retryDelay), fmt.Errorf("%v", st))
		default:
			q.freeSlot(i)
			q.partEnded(p, fmt.Errorf("%w: %v of %d bytes at %d: %v", kindOf(st), r.Op, p.to-p.from,
				r.Offset+p.from, st), now)
		}
	}
}

// errReset is wrapped by the error of a request if a reset ended the last of maxTries tries of one of its commands.
var errReset = errors.New("the controller was reset")

// tryAgain has the part of a command sent again after delay, or ends it if it was sent often enough.
func (q *queue) tryAgain(slot int, now, delay int64, why error) {
	p := q.commands[slot].part
	q.freeSlot(slot)
	if p.tries++; p.tries < maxTries {
		p.dueNS = now + delay
		if delay == 0 {
			p.dueNS = 0
		}
		q.sendAgain(p)
		return
	}
	r := &q.requests[p.request]
	q.partEnded(p, fmt.Errorf("%w: %v of %d bytes at %d, %d times: %w", ssd.ErrMedia, r.Op, p.to-p.from,
		r.Offset+p.from, p.tries, why), now)
}

func (q *queue) freeSlot(i int) {
	q.commands[i] = command{}
	q.slots = append(q.slots, int32(i))
}

// mayRetry reports whether a status says that the command may succeed later.
func mayRetry(st nvme.Status) bool {
	if st&nvme.DNR != 0 {
		return false
	}
	switch st.Code() {
	case nvme.NamespaceNotReady, nvme.CommandInterrupted, nvme.TransientTransportError, nvme.AbortRequested,
		nvme.AbortedPowerLoss, nvme.AdminMediaNotReady, nvme.FormatInProgress:
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

// Poll implements ssd.Queue.
func (q *queue) Poll(dst []ssd.Completion) (n int) { // hot: 0 allocs
	q.mu.Lock()
	defer q.mu.Unlock()
	q.turn()
	for ; n < len(dst) && q.done.n > 0; n++ {
		i := q.done.pop(q.requests)
		r := &q.requests[i]
		dst[n] = ssd.Completion{Tag: r.Tag, Err: r.err, LatencyNS: r.endNS - r.startNS}
		r.Buf, r.err = nil, nil
		q.free = append(q.free, i)
	}
	return n
}
