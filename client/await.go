package client

import (
	"errors"
	"fmt"
	"os"
)

// This file has what a QPair offers to programs that share it by a lock instead of giving it to one goroutine: whoever
// has a command takes the lock and calls Submit, and one goroutine waits for completions without the lock.
//
//	goroutine that has a command       lock ── Submit ── Completed ── Blocked? ── unlock
//	one goroutine           AwaitRecv: step: lock ── Receive, until !more ── Blocked? ── unlock
//	another one, if Blocked AwaitSend: step: lock ── Submit(nil) ── Completed ── Blocked? ── unlock

// Completed writes completions to dst that have arrived already, and returns how many. Submit may bring some: of
// commands that the target has answered before they were sent entirely.
//
// Cost: no system call, 0 allocs.
func (p *QPair) Completed(dst []Completion) int { return p.collect(dst) } // hot: 0 allocs

// Receive receives once without blocking, sends what that calls for, and writes completions to dst. more: it must be
// called again, also if n is 0, before AwaitRecv is to be relied on. The connection may be Blocked afterwards.
//
// Errors: the queue pair has failed, see Submit. Completions that had arrived are returned first.
//
// Cost: one system call, 0 allocs.
func (p *QPair) Receive(dst []Completion) (n int, more bool, err error) { // hot: 0 allocs
	if n := p.collect(dst); n > 0 {
		return n, true, nil
	}
	if err := p.ended(); err != nil {
		return 0, false, err
	}
	got, err := p.w.Recv()
	n, err = p.afterReceive(dst, err)
	return n, got > 0 || n > 0, err
}

// Blocked reports whether the connection has not taken all that there is to be sent. Over TCP, AwaitSend tells when it
// takes more. Over RDMA, Receive goes on sending.
func (p *QPair) Blocked() bool { return p.w.Unsent() }

// AwaitRecv calls step at once, and then whenever Receive may find something, until step returns true. Step makes sure
// that it owns the QPair, and calls Receive until more is false, or returns true and AwaitRecv is called again.
// Shutdown, Interrupt and the end of the connection make it call step once more, or return. One goroutine at a time.
//
// Errors: ErrUnsupported if the target has granted credits, for which only Poll waits; ErrClosed; those of the
// connection.
func (p *QPair) AwaitRecv(step func() bool) error {
	if p.credits != nil {
		return fmt.Errorf("%w: AwaitRecv with credits", ErrUnsupported)
	}
	return p.awaited(p.w.AwaitRecv(step))
}

// AwaitSend calls step at once, and then whenever the connection takes more, until step returns true. Step makes sure
// that it owns the QPair, calls Submit without commands, and returns true if Blocked is false. Over RDMA step is called
// once only: see Blocked. One goroutine at a time; it may be another one than that of AwaitRecv.
//
// Errors: ErrClosed; those of the connection.
func (p *QPair) AwaitSend(step func() bool) error { return p.awaited(p.w.AwaitSend(step)) }

func (p *QPair) awaited(err error) error {
	if err != nil && (p.interrupted.Load() || errors.Is(err, os.ErrClosed)) {
		return fmt.Errorf("queue pair %d: %w", p.id, ErrClosed)
	}
	return err
}

// Shutdown ends the connection at once, and with it the association. When it has returned, the target can no longer
// reach the memory of outstanding commands, which end without a completion. Submit, Poll and Receive fail from then on.
// Any goroutine may call it. Close must still be called.
func (p *QPair) Shutdown() {
	p.shutDown(ErrClosed)
	if p.onLoss != nil {
		p.onLoss(fmt.Errorf("%w: queue pair %d was shut down", ErrConnectionLost, p.id))
	}
}
