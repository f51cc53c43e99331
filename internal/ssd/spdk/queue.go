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
	"jbofd/internal/ssd/parts"
)

// queue implements ssd.Queue.
//
//	Submit ──> requests (package parts) ── Next ──> commands, by slot ──> turn
//	Poll   <── requests <── End, Again <── {slot, status}             <──┘
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

	requests parts.Requests
	bounces  *parts.Bounces
	commands []parts.Command // by slot
	slots    []int32         // free ones

	batch  []cCmd
	cpls   []cCpl
	turned cTurned
}

func newQueue(d *Device, h handle, irq int, event *eventfd.Event, depth, places int) *queue {
	q := &queue{dev: d, event: event, irq: irq, fds: newPoller(event.FD(), irq), epoch: time.Now(), handle: h,
		bounces: parts.NewBounces(allocBounce), commands: make([]parts.Command, places), slots: make([]int32, places),
		batch: make([]cCmd, 0, places), cpls: make([]cCpl, min(places, 64))}
	q.requests = parts.Make(parts.Config{Depth: depth, Places: places, Most: q.most, Bounces: q.bounces})
	for i := range q.slots {
		q.slots[i] = int32(places - 1 - i)
	}
	return q
}

// allocBounce allocates a bounce buffer.
func allocBounce(n int) ([]byte, uint64, error) {
	memory := alloc(n)
	if memory == nil {
		return nil, 0, errNoMemory
	}
	return memory, addressOf(memory), nil
}

var errNoMemory = errors.New("no memory of SPDK for a copy")

func (q *queue) now() int64 { return int64(time.Since(q.epoch)) }

// flying is the number of commands that are outstanding.
func (q *queue) flying() int { return len(q.commands) - len(q.slots) }

// busy reports whether there is something that has not ended.
func (q *queue) busy() bool { return q.flying() > 0 || q.requests.Waiting() || q.requests.Unsent() }

// Synchronous implements ssd.Queue: false.
func (q *queue) Synchronous() bool { return false }

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) int { // hot: 0 allocs
	q.mu.Lock()
	if q.closed || len(reqs) == 0 {
		q.mu.Unlock()
		return 0
	}
	idle := !q.busy()
	var gone error
	if q.dev.gone.Load() {
		gone = q.dev.Healthy()
	}
	n := q.requests.Add(reqs, &q.dev.info, gone, q.now())
	q.turn()
	// A waiter that blocks without a limit does not look for what is under way now, unless an interrupt wakes it.
	begins := idle && q.busy() && (q.irq < 0 || q.stalled)
	ended := q.requests.Done()
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
		if !more && !(room && (q.requests.Unsent() || q.requests.Due(now))) {
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

// fill makes commands of parts while there are free slots.
func (q *queue) fill(now int64) { // hot: 0 allocs
	for len(q.slots) > 0 {
		p, ok := q.requests.Next(now)
		if !ok {
			return
		}
		q.command(&p, now)
	}
}

// most returns how many bytes the command for a part that begins at from may have, and whether they have to be copied.
func (q *queue) most(r *ssd.Request, from int64) (n int64, copied bool) {
	d := q.dev
	block := int64(d.info.BlockSize)
	most := int64(d.id.maxTransfer) / block * block
	switch r.Op {
	case ssd.Read, ssd.Write:
		if _, ok := d.regions.Address(r.Buf[:r.Len]); !ok || addressOf(r.Buf)&3 != 0 {
			return min(most, parts.BounceBytes/block*block), true
		}
		return most, false
	case ssd.WriteZeroes:
		// SPDK does not tell the limit of Write Zeroes (WZSL). No controller has one below that of transfers.
		if !d.id.hasZeroes {
			most = min(most, zeroesBytes/block*block)
		}
		return min(most, block<<16), false
	case ssd.Deallocate:
		return block << 31, false
	}
	return r.Len, false
}

// command adds the command for a part to the batch. There is a free slot.
func (q *queue) command(p *parts.Part, now int64) { // hot: 0 allocs
	slot := q.slots[len(q.slots)-1]
	q.slots = q.slots[:len(q.slots)-1]
	q.commands[slot] = parts.Command{Part: *p, Busy: true, StartNS: now}
	r, d := q.requests.Of(p), q.dev
	block := int64(d.info.BlockSize)
	c := cCmd{lba: uint64((r.Offset + p.From) / block), blocks: uint32((p.To - p.From) / block), slot: uint32(slot),
		op: uint8(r.Op), flags: uint8(r.Flags)}
	switch {
	case r.Op == ssd.Flush:
		c.lba, c.blocks = 0, 0
	case r.Op == ssd.WriteZeroes && !d.id.hasZeroes:
		c.op, c.flags, c.addr = uint8(ssd.Write), c.flags&uint8(ssd.FUA), addressOf(d.zeroes)
	case r.Op <= ssd.Write:
		at, ok := q.requests.Copied(p)
		if !ok {
			at = addressOf(r.Buf) + uint64(p.From)
		}
		c.addr = at
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
		p := q.freeSlot(int(c.slot))
		if k == 0 && why != unix.ENOMEM && why != unix.ENXIO {
			r := q.requests.Of(&p)
			q.requests.End(&p, fmt.Errorf("%w: %v of %d bytes at %d: SPDK: %w", ssd.ErrMedia, r.Op, p.To-p.From,
				r.Offset+p.From, why), now)
			continue
		}
		q.requests.Back(p)
	}
	switch {
	case why == unix.ENXIO:
		q.lose(why)
	case q.stalled && t.took == 0 && q.flying() == 0 && q.stalledNS == 0:
		q.stalledNS = now
	case q.stalled && q.stalledNS != 0 && now-q.stalledNS > int64(q.dev.cfg.Timeout):
		q.requests.FailWaiting(fmt.Errorf("%w: SPDK has had no memory for a command for %v: %w", ssd.ErrMedia,
			q.dev.cfg.Timeout, why), now)
		q.stalledNS = 0
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
		p, st := q.freeSlot(int(c.slot)), c.status
		switch {
		case st.OK():
			q.requests.End(&p, nil, now)
		case q.gone != nil:
			q.requests.End(&p, q.gone, now)
		case ended || st.Code() == nvme.AbortedSQDeletion: // a reset, or the end of the connection, whatever DNR says
			q.tryAgain(p, now, 0, fmt.Errorf("%w: %v", errReset, st))
		case parts.MayRetry(st):
			q.tryAgain(p, now, now+int64(parts.RetryDelay), fmt.Errorf("%v", st))
		default:
			q.requests.End(&p, q.requests.StatusError(&p, st), now)
		}
	}
}

// errReset is wrapped by the error of a request if a reset ended the last try (parts.MaxTries) of one of its commands.
var errReset = errors.New("the controller was reset")

// tryAgain has a part sent again at dueNS (0: at once), or ends it if it was sent often enough.
func (q *queue) tryAgain(p parts.Part, now, dueNS int64, why error) {
	if q.requests.Again(&p, dueNS) {
		return
	}
	r := q.requests.Of(&p)
	q.requests.End(&p, fmt.Errorf("%w: %v of %d bytes at %d, %d times: %w", ssd.ErrMedia, r.Op, p.To-p.From,
		r.Offset+p.From, p.Tries, why), now)
}

// freeSlot frees the slot of a command, and returns its part.
func (q *queue) freeSlot(i int) parts.Part {
	p := q.commands[i].Part
	q.commands[i] = parts.Command{}
	q.slots = append(q.slots, int32(i))
	return p
}

// Poll implements ssd.Queue.
func (q *queue) Poll(dst []ssd.Completion) int { // hot: 0 allocs
	q.mu.Lock()
	defer q.mu.Unlock()
	q.turn()
	return q.requests.Poll(dst)
}
