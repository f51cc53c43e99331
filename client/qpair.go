package client

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostconn"
	"jbofd/client/internal/window"
)

// DefaultSpin is how long QPair.Poll looks for completions without blocking, if
// Options.Spin is 0 and there is a second processor.
const DefaultSpin = 50 * time.Microsecond

// spinOutstanding is how many commands may be outstanding for Poll to spin. With more, sleeping costs no
// throughput and lets completions and the commands that follow them gather into larger batches
// at both ends.
const spinOutstanding = 8

// stuckWait bounds one wait for a socket that takes no more bytes.
const stuckWait = 20 * time.Millisecond

// QPair is an I/O queue pair for one goroutine: batches of commands go in, batches of completions come out, and
// nothing is allocated on the way. Load generators and replication use it; Namespace is the convenient interface.
//
//	for {
//		n, err := q.Poll(comps, -1)      // finished commands
//		...                              // build the next batch
//		q.Submit(cmds[:k])               // one writev
//	}
//
// All methods but Interrupt, Shutdown, AwaitRecv and AwaitSend must be called by one goroutine at a time. Programs
// without a goroutine for each QPair use Receive and AwaitRecv instead of Poll.
//
// A QPair does not reconnect. When its connection is lost, Poll and Submit return ErrConnectionLost, whether the
// outstanding commands took effect is unknown, and their buffers are the caller's again. The loss of one QPair ends
// the association, so that a QPair opened afterwards belongs to a new one: a command that the caller repeats there
// cannot be overtaken by its first copy (see Options.CtrlLossTimeout).
//
// A QPair does not time commands out either: call Poll with a bound and decide.
//
// With credits (Options.Credits), Submit also takes commands beyond the drive's window. They are sent when Poll has
// seen room for them: keep calling Poll while commands are outstanding.
type QPair struct {
	id   uint16
	w    hostconn.Conn
	spin time.Duration
	base time.Time // origin of the clock that bounds spinning

	// credits holds back commands that the target has given no credit for; nil if the target grants none.
	credits *window.Pair

	err    error // why the queue pair has ended
	expire bool  // a read deadline is set on the connection

	// orderly is set once Connect has succeeded: Close then drains the queue instead of cutting the connection.
	orderly bool
	// canDisconnect: the target announces the Disconnect command (OFCS).
	canDisconnect bool
	// closeTimeout bounds Close.
	closeTimeout time.Duration

	closeOnce sync.Once
	closeErr  error
	// onLoss is told that the connection has failed, or that commands are outstanding whose end Close could not
	// await. onClose is told of Close. Both may be nil.
	onLoss  func(error)
	onClose func(*QPair)

	// interrupted is set by Interrupt: Poll and Submit return ErrClosed.
	interrupted atomic.Bool

	mu      sync.Mutex
	closing error // why the connection was shut down by this host; guarded by mu
}

// ID returns the queue identifier: 0 for the admin queue.
func (p *QPair) ID() uint16 { return p.id }

// Depth returns how many commands may be outstanding.
func (p *QPair) Depth() int { return p.w.Machine().Depth() }

// Outstanding returns how many commands were submitted and not yet returned by Poll.
func (p *QPair) Outstanding() int { return p.w.Machine().Outstanding() + p.Held() }

// Held returns how many of them wait at the host for credit: see Options.Credits.
func (p *QPair) Held() int {
	if p.credits == nil {
		return 0
	}
	return p.credits.Held()
}

// Submit takes commands in order, sends them as one batch, and returns how many it
// took: fewer than all when the queue is full. The Data of a command taken belongs
// to the queue pair until Poll has returned its completion. A fused pair must lie in one
// batch, and Free must be at least its length.
//
// Errors: ErrInvalid for a command whose Data does not fit its opcode (the ones before it were
// taken); otherwise the queue pair has failed, with ErrConnectionLost, ErrProtocol or ErrClosed.
//
// Cost: one system call a batch, 0 allocs.
func (p *QPair) Submit(cmds []Command) (int, error) { // hot: 0 allocs
	if err := p.ended(); err != nil {
		return 0, err
	}
	n, bad := p.take(cmds)
	if bad != nil && !errors.Is(bad, host.ErrQueueFull) {
		bad = fmt.Errorf("%w: command %d of the batch: %w", ErrInvalid, n, bad)
	} else {
		bad = nil
	}
	if _, err := p.w.Send(); err != nil {
		return n, p.fail(err)
	}
	return n, bad
}

// take submits commands to the machine until it refuses one.
func (p *QPair) take(cmds []Command) (n int, err error) { // hot: 0 allocs
	if p.credits != nil {
		return p.credits.Submit(cmds)
	}
	for n < len(cmds) {
		if _, err := p.w.Machine().Submit(&cmds[n]); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// setGate makes later commands wait for credit, if g is not nil.
func (p *QPair) setGate(g *window.Gate) {
	if g == nil {
		return
	}
	p.credits = g.NewPair(p.w.Machine(), func() {
		// This wakes block. An error means that the connection is closed, so that block does not wait.
		_ = p.w.SetReadDeadline(time.Unix(1, 0))
	})
}

// collect returns completions, and sends commands that have waited for the credit that these release.
func (p *QPair) collect(dst []Completion) int { // hot: 0 allocs
	n := p.w.Machine().Completions(dst)
	if n > 0 && p.credits != nil {
		held := p.credits.Held()
		p.credits.Completed(dst[:n])
		if p.credits.Held() < held && p.err == nil {
			if _, err := p.w.Send(); err != nil {
				_ = p.fail(err) // Poll returns the error when there are no completions left
			}
		}
	}
	return n
}

// Free returns how many commands Submit will take now.
func (p *QPair) Free() int { return p.w.Machine().Free() - p.Held() }

// Poll writes completions to dst and returns how many. With wait 0 it only looks; with
// wait > 0 it waits up to that long for the first one; with wait < 0 until there is one.
// Before it blocks it looks again and again for the spin time, if few commands are outstanding.
//
// Errors: the queue pair has failed, see Submit. Completions that had arrived are returned first.
//
// Cost: one system call when completions are there, 0 allocs.
func (p *QPair) Poll(dst []Completion, wait time.Duration) (int, error) { // hot: 0 allocs
	m := p.w.Machine()
	if n := p.collect(dst); n > 0 {
		return n, nil
	}
	var start time.Duration
	started := false
	for {
		if err := p.ended(); err != nil {
			return 0, err
		}
		if p.credits != nil && p.credits.Granted() {
			p.credits.Advance() // after sends them
		}
		got, err := p.w.Recv()
		if n, err := p.afterReceive(dst, err); n > 0 || err != nil {
			return n, err
		}
		if wait == 0 {
			return 0, nil
		}
		if got > 0 {
			continue // part of something: more is near
		}
		now := time.Since(p.base)
		if !started {
			start, started = now, true
		}
		if wait > 0 && now-start >= wait {
			return 0, nil
		}
		if now-start < p.spin && m.Outstanding() <= spinOutstanding {
			runtime.Gosched()
			continue
		}
		left := time.Duration(-1)
		if wait > 0 {
			left = wait - (now - start)
		}
		timedOut, err := p.block(left)
		if n, err := p.afterReceive(dst, err); n > 0 || err != nil {
			return n, err
		}
		if timedOut {
			return 0, nil
		}
	}
}

// afterReceive follows every receive: it sends what the machine now has to send and
// collects completions.
func (p *QPair) afterReceive(dst []Completion, err error) (int, error) { // hot: 0 allocs
	if err == nil {
		_, err = p.w.Send()
	}
	if err != nil {
		_ = p.fail(err)
	}
	if n := p.collect(dst); n > 0 {
		return n, nil
	}
	return 0, p.err
}

// block waits until bytes were received (and worked through), up to left if that is
// not negative.
func (p *QPair) block(left time.Duration) (timedOut bool, err error) {
	if p.w.Unsent() {
		if left < 0 || left > stuckWait {
			left = stuckWait
		}
		return false, p.w.PollBoth(left)
	}
	if left >= 0 {
		if err := p.w.SetReadDeadline(time.Now().Add(left)); err != nil {
			return false, err
		}
		p.expire = true
	} else if p.expire {
		if err := p.w.SetReadDeadline(time.Time{}); err != nil {
			return false, err
		}
		p.expire = false
	}
	// Whoever wakes this goroutine first sets what it is to see (granted or interrupted) and then moves the read
	// deadline, so looking once more after the deadline was set cannot miss a wake-up.
	if p.credits != nil {
		defer p.credits.Unpark()
		if p.credits.Park() {
			return false, nil
		}
	}
	if p.interrupted.Load() {
		return false, nil
	}
	_, err = p.w.RecvWait()
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false, err
	}
	p.expire = true // the deadline may be another goroutine's
	return p.credits == nil && !p.interrupted.Load(), nil
}

// ended returns why the queue pair takes and returns no more commands, or nil.
func (p *QPair) ended() error { // hot: 0 allocs
	if p.err == nil && p.interrupted.Load() {
		p.err = fmt.Errorf("queue pair %d: %w", p.id, ErrClosed)
	}
	return p.err
}

// fail records that the connection has failed with err. The first failure stays.
func (p *QPair) fail(err error) error {
	if p.err != nil {
		return p.err
	}
	why := p.shutdownCause()
	if why == nil {
		_, _ = p.w.Send() // a TermReq, if the target has broken the protocol; err is what counts
		why = hostconn.Classify(err)
	}
	p.err = fmt.Errorf("queue pair %d: %w", p.id, why)
	p.w.Shutdown()
	if p.onLoss != nil {
		p.onLoss(p.err)
	}
	return p.err
}

// Interrupt makes Poll and Submit return ErrClosed and wakes a blocked Poll; any goroutine may call it. The
// connection stays open until Close, and so do the buffers of outstanding commands belong to the queue pair.
func (p *QPair) Interrupt() {
	p.interrupted.Store(true)
	// An error means that the connection is closed, so that Poll does not wait.
	_ = p.w.SetReadDeadline(time.Unix(1, 0))
}

// shutDown ends the connection at once; any goroutine may call it.
func (p *QPair) shutDown(why error) {
	p.mu.Lock()
	if p.closing == nil {
		p.closing = why
	}
	p.mu.Unlock()
	p.w.Shutdown()
}

// shutdownCause returns the argument of the first shutDown, or nil.
func (p *QPair) shutdownCause() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closing
}

// Close ends the queue pair. It sends nothing new, waits until the outstanding commands have completed, deletes the
// queue at the target with Disconnect where the target knows that command, and closes the connection. The completions
// are dropped; the buffers are the caller's afterwards. The owner calls it when no Poll or Submit is under way.
// Idempotent.
//
// Close waits for the target for at most 2 s. If commands are still outstanding then, it ends the association: the
// controller reconnects, and what is written over the new association cannot be overtaken by those commands.
func (p *QPair) Close() error {
	p.closeOnce.Do(func() {
		if p.orderly && (p.ended() == nil || errors.Is(p.err, ErrClosed)) && p.shutdownCause() == nil {
			if n := p.disconnect(); n > 0 && p.onLoss != nil {
				p.onLoss(fmt.Errorf("%w: queue pair %d was closed with %d commands outstanding", ErrConnectionLost,
					p.id, n))
			}
		}
		if p.err == nil {
			p.err = fmt.Errorf("queue pair %d: %w", p.id, ErrClosed)
		}
		p.shutDown(ErrClosed)
		p.closeErr = p.w.Close()
		if p.credits != nil {
			p.credits.Close()
		}
		if p.onClose != nil {
			p.onClose(p)
		}
	})
	return p.closeErr
}

// disconnect waits until the queue is empty and then deletes it at the target. It gives up after closeTimeout, or when
// the connection ends, and returns how many of the caller's commands are outstanding then.
func (p *QPair) disconnect() (left int) {
	deadline := time.Now().Add(p.closeTimeout)
	if !p.drain(deadline) {
		return p.w.Machine().Outstanding()
	}
	if p.canDisconnect {
		var c Command
		c.SQE.InitDisconnect()
		if _, err := p.w.Machine().Submit(&c); err == nil {
			p.drain(deadline)
		}
	}
	return 0
}

// drain drops completions until nothing is outstanding: true; or until deadline or the end of the connection: false.
func (p *QPair) drain(deadline time.Time) bool {
	m := p.w.Machine()
	var comps [64]Completion
	for {
		for m.Completions(comps[:]) > 0 {
		}
		if m.Outstanding() == 0 {
			return true
		}
		if time.Now().After(deadline) || p.shutdownCause() != nil {
			return false
		}
		if err := p.exchange(deadline); err != nil {
			for m.Completions(comps[:]) > 0 {
			}
			return m.Outstanding() == 0
		}
	}
}

// exchange sends what is to be sent and waits until something was received or deadline.
func (p *QPair) exchange(deadline time.Time) error {
	if _, err := p.w.Send(); err != nil {
		return err
	}
	if p.w.Unsent() {
		return p.w.PollBoth(min(time.Until(deadline), stuckWait))
	}
	if err := p.w.SetReadDeadline(deadline); err != nil {
		return err
	}
	_, err := p.w.RecvWait()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil // deadline has passed, or another goroutine has moved it in order to wake Poll
	}
	return err
}
