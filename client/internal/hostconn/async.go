package hostconn

import (
	"errors"
	"fmt"

	"jbofd/client/internal/host"
)

// ErrCancelled is the error of an Async that was cancelled.
var ErrCancelled = errors.New("cancelled")

// Async is a command for which no goroutine waits: its end is told to a Sink. It belongs to the queue from Send until
// its end, and may be used again then. An Async must not be copied after its first Send.
type Async struct {
	// Cmd is the command. Tag is not used.
	Cmd host.Command
	// Sink is told of the end.
	Sink Sink
	// Next links the commands of a list. Item is the caller's.
	Next *Async
	Item any

	// Outcome. Err is nil if Comp counts. Otherwise the command was not sent, or Sent is set: then the target may have
	// carried it out, or do so still.
	Comp host.Completion
	Err  error
	Sent bool

	// What follows is guarded by SharedQPair.mu.
	state asyncState
	// cancel: Cancel has come before Send.
	cancel bool
	call   *call
	cid    uint16
}

type asyncState uint8

const (
	asyncIdle    asyncState = iota
	asyncWaiting            // for a slot
	asyncSent
)

// Prepare must be called before each Send. A Cancel before that counts for nothing.
func (a *Async) Prepare() { a.cancel = false } // hot: 0 allocs

// Sink takes commands back.
type Sink interface {
	// Ended is told of a list of commands that have ended. A goroutine of the queue calls it, or of Send of another
	// caller, without locks.
	Ended(list *Async)
}

// asyncs is a list of commands.
type asyncs struct{ first, last *Async }

func (l *asyncs) push(a *Async) { // hot: 0 allocs
	if a.Next = nil; l.first == nil {
		l.first = a
	} else {
		l.last.Next = a
	}
	l.last = a
}

func (l *asyncs) pop() *Async { // hot: 0 allocs
	a := l.first
	if a != nil {
		l.first, a.Next = a.Next, nil
	}
	return a
}

func (l *asyncs) remove(a *Async) {
	var before *Async
	for o := l.first; o != a; o = o.Next {
		before = o
	}
	if before == nil {
		l.first = a.Next
	} else {
		before.Next = a.Next
	}
	if l.last == a {
		l.last = before
	}
	a.Next = nil
}

// Send sends a list of commands as one batch, in order. Those for which there is no slot wait for one. It returns a
// list of commands that have ended meanwhile, those of others included, in place of calls of their Sinks.
//
// Cost: one system call, 0 allocs.
func (q *SharedQPair) Send(list *Async) (ended *Async) { // hot: 0 allocs
	q.mu.Lock()
	for a := list; a != nil; {
		next := a.Next
		a.Err, a.Sent, a.call = nil, false, nil
		switch {
		case a.cancel:
			q.endLocked(a, ErrCancelled)
		case q.err != nil:
			q.endLocked(a, q.err)
		default:
			a.state = asyncWaiting
			q.backlog.push(a)
		}
		a = next
	}
	q.sendLocked()
	return q.unlock()
}

// endLocked ends a command. mu is held.
func (q *SharedQPair) endLocked(a *Async, err error) { // hot: 0 allocs
	a.Err, a.Sent, a.state, a.cancel, a.call = err, a.state == asyncSent, asyncIdle, false, nil
	q.ended.push(a)
}

// submitLocked submits commands that wait for a slot. mu is held.
func (q *SharedQPair) submitLocked() { // hot: 0 allocs
	for q.backlog.first != nil && q.err == nil {
		var c *call
		select {
		case c = <-q.free:
		default:
			return
		}
		a := q.backlog.pop()
		q.cmd = a.Cmd
		q.cmd.Tag = c.index
		cid, err := q.m.Submit(&q.cmd)
		q.cmd.Data = nil
		if err != nil {
			q.free <- c
			q.endLocked(a, fmt.Errorf("%w: %w", host.ErrInvalid, err))
			continue
		}
		c.async, a.call, a.cid, a.state = a, c, cid, asyncSent
	}
}

// unlock releases mu and returns the list of commands that have ended.
func (q *SharedQPair) unlock() (ended *Async) { // hot: 0 allocs
	ended, q.ended = q.ended.first, asyncs{}
	q.mu.Unlock()
	return ended
}

// unlockTell is unlock, and tells the Sinks.
func (q *SharedQPair) unlockTell() { // hot: 0 allocs
	for a := q.unlock(); a != nil; {
		first, last := a, a
		for last.Next != nil && last.Next.Sink == first.Sink {
			last = last.Next
		}
		a, last.Next = last.Next, nil
		first.Sink.Ended(first)
	}
}

// Cancel ends a command that was, or is to be, passed to Send, unless it has ended. Its buffer is the caller's again.
// It returns true if the command has ended with this call: its Sink is not told then. Otherwise its end is, or will be,
// told. A command that was sent goes on at the target; CID is for an Abort.
//
// The caller must make sure that the Async has not been used again.
func (q *SharedQPair) Cancel(a *Async) (ended bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch a.state {
	case asyncWaiting:
		q.backlog.remove(a)
		a.state = asyncIdle
	case asyncSent:
		a.call.async, a.call.abandoned = nil, true
		q.m.Detach(a.cid)
		a.Sent, a.call, a.state = true, nil, asyncIdle
	default:
		a.cancel = true
		return false
	}
	a.Err = ErrCancelled
	return true
}

// CID is the identifier of a command that Cancel has ended after it was sent.
func (a *Async) CID() uint16 { return a.cid }

// failAsyncs ends all commands after the connection was shut down. mu is held.
func (q *SharedQPair) failAsyncs() {
	for i := range q.calls {
		if a := q.calls[i].async; a != nil {
			q.calls[i].async = nil
			q.endLocked(a, q.err)
		}
	}
	for a := q.backlog.pop(); a != nil; a = q.backlog.pop() {
		q.endLocked(a, q.err)
	}
}

// Err returns why the queue has failed, or nil.
//
// Cost: 0 allocs.
func (q *SharedQPair) Err() error { // hot: 0 allocs
	select {
	case <-q.dead:
		return q.failure()
	default:
		return nil
	}
}
