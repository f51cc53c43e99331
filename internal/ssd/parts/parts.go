// Package parts keeps account of the requests of a queue of an NVMe driver. A command may be shorter than a request, so
// a request is carried out in parts, with one command for each. A command may have to be sent again.
//
//	Add  ──> unsent: requests with parts that were not sent ── Next ──> the driver sends a command for a part
//	         again: parts that are to be sent again ────────── Next ──┘    │
//	              ^── Again, Back <────────────────────────────────────────┤
//	Poll <── done <── the last part of a request has ended <── End <───────┘
//
// A request is in unsent until its last part was returned by Next. It ends with the error of the first part that has
// failed; what was not sent then is not sent any more.
//
// The package does no I/O. Drivers hold the lock that guards it, and have the commands that are outstanding.
package parts

import (
	"fmt"
	"time"

	"jbofd/internal/invariants"
	"jbofd/internal/list"
	"jbofd/internal/ssd"
)

const (
	// MaxTries is how often a command is sent at most, whatever ended it: a reset, an Abort, or another status that
	// allows a retry.
	MaxTries = 4
	// RetryDelay is how long a command that has ended with such a status waits before it is sent again.
	RetryDelay = 100 * time.Millisecond
)

// Requests has the requests of a queue, each from Add until Poll returns its completion. Times are in nanoseconds since
// an epoch that the queue chooses.
type Requests struct {
	all          []request
	free         []int32
	links        list.Links
	unsent, done list.List
	// again has the parts that are to be sent again, the one that is due first at the end.
	again   []Part
	bounces *Bounces
	most    func(r *ssd.Request, from int64) (n int64, copied bool)
}

// request is one request.
type request struct {
	ssd.Request
	next    int64 // how many of its bytes were sent
	left    int64 // how many of its bytes have not ended; a Flush, which has none, counts as 1
	flying  int32 // its parts that are with the driver, or in again
	sent    bool  // it is not in unsent
	startNS int64 // of Add
	endNS   int64
	err     error // of the first part that has failed
}

// Part is the bytes From..To of a request, for which one command is sent.
type Part struct {
	request int32
	// Tries is how often it was sent before, and the resets that its command has survived.
	Tries    uint8
	bounce   int16 // its bounce buffer; -1: none
	From, To int64
	dueNS    int64 // when it is to be sent again; 0: at once
}

// Config describes a Requests.
type Config struct {
	// Depth is how many requests there are at most, Places how many commands.
	Depth, Places int
	// Most returns how many bytes the command for a request may have whose part begins at from, at least one block, and
	// whether the data has to be copied through a bounce buffer: then they are BounceBytes at most. For a Flush it
	// returns Len.
	Most func(r *ssd.Request, from int64) (n int64, copied bool)
	// Bounces are the queue's.
	Bounces *Bounces
}

// Make returns the account of an empty queue.
func Make(c Config) Requests {
	q := Requests{all: make([]request, c.Depth), free: make([]int32, c.Depth), links: make(list.Links, c.Depth),
		unsent: list.None, done: list.None, again: make([]Part, 0, c.Places), bounces: c.Bounces, most: c.Most}
	for i := range q.free {
		q.free[i] = int32(c.Depth - 1 - i)
	}
	return q
}

// Add takes requests, and returns how many: fewer than len(reqs) if there is no place for more. One that is not valid
// for the device has ended at once, with the error of ssd.Validate; and so have all if the device is gone, with that
// error.
func (q *Requests) Add(reqs []ssd.Request, info *ssd.Info, gone error, now int64) int { // hot: 0 allocs
	n := min(len(reqs), len(q.free))
	for k := range n {
		i := q.free[len(q.free)-1]
		q.free = q.free[:len(q.free)-1]
		r := &q.all[i]
		*r = request{Request: reqs[k], left: reqs[k].Len, startNS: now}
		if r.err = ssd.Validate(info, &r.Request); r.err == nil {
			r.err = gone
		}
		if r.Op == ssd.Flush {
			r.left = 1
		}
		if r.err != nil || r.left == 0 {
			r.endNS = now
			q.links.Push(&q.done, i)
			continue
		}
		q.links.Push(&q.unsent, i)
	}
	return n
}

// Next returns the next part to send: one that is to be sent again and is due, or the next one of the first request in
// unsent. The caller sends it, and calls End, Again or Back for it later. ok is false if there is none, or if it needs
// a bounce buffer and all are in use.
//
// A request that needs a bounce buffer ends with ssd.ErrMedia if the queue has none and there is no memory for one.
func (q *Requests) Next(now int64) (p Part, ok bool) { // hot: 0 allocs
	if q.Due(now) {
		p = q.again[len(q.again)-1]
		q.again = q.again[:len(q.again)-1]
		return p, true
	}
	for q.unsent.N > 0 {
		i := q.unsent.First
		r := &q.all[i]
		if r.err != nil { // a part of it has failed: the rest is not sent
			q.wholeSent()
			q.endIfOver(i, now)
			continue
		}
		most, copied := q.most(&r.Request, r.next)
		p = Part{request: i, bounce: -1, From: r.next, To: min(r.Len, r.next+most)}
		if copied {
			var err error
			if p.bounce, err = q.bounces.take(); err != nil {
				r.err = fmt.Errorf("%w: %v of %d bytes at %d: %w", ssd.ErrMedia, r.Op, r.Len, r.Offset, err)
				continue
			}
			if p.bounce < 0 {
				return p, false
			}
			if r.Op == ssd.Write {
				copy(q.bounces.all[p.bounce].memory, r.Buf[p.From:p.To])
			}
		}
		r.next = p.To
		r.flying++
		if r.next >= r.Len {
			q.wholeSent()
		}
		return p, true
	}
	return p, false
}

// wholeSent takes the first request out of unsent.
func (q *Requests) wholeSent() { q.all[q.links.Pop(&q.unsent)].sent = true }

// Of returns the request of a part.
func (q *Requests) Of(p *Part) *ssd.Request { return &q.all[p.request].Request }

// Copied returns the address of the bounce buffer of a part, if it has one.
func (q *Requests) Copied(p *Part) (at uint64, ok bool) {
	if p.bounce < 0 {
		return 0, false
	}
	return q.bounces.all[p.bounce].at, true
}

// Again counts a try of a part whose command has ended, and has the part sent again at dueNS (0: at once). It returns
// false, and does nothing else, if the part was sent MaxTries times: then it has to end.
func (q *Requests) Again(p *Part, dueNS int64) bool {
	if p.Tries++; p.Tries >= MaxTries {
		return false
	}
	p.dueNS = dueNS
	q.wait(*p)
	return true
}

// Back has a part sent at once that Next has returned and that could not be sent. It counts no try.
func (q *Requests) Back(p Part) {
	p.dueNS = 0
	q.wait(p)
}

// wait puts a part into again, which stays in order.
func (q *Requests) wait(p Part) {
	i := len(q.again)
	q.again = append(q.again, p)
	for ; i > 0 && q.again[i-1].dueNS < p.dueNS; i-- {
		q.again[i] = q.again[i-1]
	}
	q.again[i] = p
}

// End says that a part has ended, with its error. Its request ends with it if it was the last part.
func (q *Requests) End(p *Part, err error, now int64) { // hot: 0 allocs
	r := &q.all[p.request]
	if p.bounce >= 0 {
		if err == nil && r.Op == ssd.Read {
			copy(r.Buf[p.From:p.To], q.bounces.all[p.bounce].memory)
		}
		q.bounces.put(p.bounce)
	}
	r.flying--
	invariants.Check(r.flying >= 0, "parts: a part has ended that was not sent")
	r.left -= max(p.To-p.From, 1)
	if r.err == nil {
		r.err = err
	}
	q.endIfOver(p.request, now)
}

// endIfOver ends a request that has no part with the driver or in again, if all parts were sent, or no more is sent
// because one has failed.
func (q *Requests) endIfOver(i int32, now int64) {
	r := &q.all[i]
	if r.flying == 0 && r.sent && (r.left <= 0 || r.err != nil) {
		r.endNS = now
		q.links.Push(&q.done, i)
	}
}

// FailWaiting ends the parts that are to be sent again.
func (q *Requests) FailWaiting(why error, now int64) {
	for i := range q.again {
		q.End(&q.again[i], why, now)
	}
	q.again = q.again[:0]
}

// Fail is FailWaiting, and ends the requests in unsent: those whose parts have all ended at once, the others with the
// last End.
func (q *Requests) Fail(why error, now int64) {
	q.FailWaiting(why, now)
	for q.unsent.N > 0 {
		i := q.unsent.First
		q.wholeSent()
		if r := &q.all[i]; r.err == nil {
			r.err = why
		}
		q.endIfOver(i, now)
	}
}

// Poll writes completions of requests that have ended to dst, in the order in which they ended, and returns their
// number.
func (q *Requests) Poll(dst []ssd.Completion) (n int) { // hot: 0 allocs
	for ; n < len(dst) && q.done.N > 0; n++ {
		i := q.links.Pop(&q.done)
		r := &q.all[i]
		dst[n] = ssd.Completion{Tag: r.Tag, Err: r.err, LatencyNS: r.endNS - r.startNS}
		r.Buf, r.err = nil, nil
		q.free = append(q.free, i)
	}
	return n
}

// Done reports whether Poll has something to return.
func (q *Requests) Done() bool { return q.done.N > 0 }

// Open is the number of requests that have not ended.
func (q *Requests) Open() int { return len(q.all) - len(q.free) - q.done.N }

// Unsent reports whether a request has parts that were not sent.
func (q *Requests) Unsent() bool { return q.unsent.N > 0 }

// Waiting reports whether a part is to be sent again.
func (q *Requests) Waiting() bool { return len(q.again) > 0 }

// Due reports whether a part is to be sent again now.
func (q *Requests) Due(now int64) bool {
	return len(q.again) > 0 && q.again[len(q.again)-1].dueNS <= now
}

// DueNS is when the first part is to be sent again, of those that Waiting reports; 0: at once.
func (q *Requests) DueNS() int64 { return q.again[len(q.again)-1].dueNS }

// Command is a part that is outstanding, in the slot that its driver has given it.
type Command struct {
	Part
	Busy, Aborted bool
	StartNS       int64
}

// Overdue reports whether a command is to be aborted now, because it has been outstanding for timeout. It does so once.
//
// Errors: the command is still outstanding after grace more. The controller has to be reset.
func (c *Command) Overdue(now int64, timeout, grace time.Duration) (abort bool, err error) {
	took := time.Duration(now - c.StartNS)
	switch {
	case !c.Busy || took < timeout:
	case !c.Aborted:
		c.Aborted = true
		return true, nil
	case took >= timeout+grace:
		return false, fmt.Errorf("a command has not ended after %v, although it was aborted", took)
	}
	return false, nil
}
