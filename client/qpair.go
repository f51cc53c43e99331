package client

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
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

// QPair is an I/O queue pair for one goroutine: batches of commands go in, batches
// of completions come out, and nothing is allocated on the way. It is what load
// generators and replication use; Namespace is the convenient way.
//
//	for {
//		n, err := q.Poll(comps, -1)      // finished commands
//		...                              // build the next batch
//		q.Submit(cmds[:k])               // one writev
//	}
//
// All methods but Close and Interrupt must be called by one goroutine at a time. A QPair does
// not reconnect: when it fails, Poll and Submit say so, all commands outstanding are
// gone (whether they took effect is unknown) and their buffers are the caller's. Nor does it time
// commands out: Poll with a bound and decide.
//
// With credits (Options.Credits), commands beyond the drive's window are taken too, and go when
// Poll has seen room for them: keep calling it while something is outstanding.
type QPair struct {
	id   uint16
	w    host.Conn
	spin time.Duration
	base time.Time // what spinning is timed from

	// credits holds commands back that the target has given no credit for; nil: none are.
	credits *window.Pair

	err    error // why the queue pair has ended
	expire bool  // a read deadline is set on the connection

	closeOnce sync.Once
	closeErr  error
	onClose   func(*QPair)

	mu      sync.Mutex
	closing error // why the pair was interrupted; guarded by mu
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
	if p.err != nil {
		return 0, p.err
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

// take gives commands to the machine until it refuses one.
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

// passGate makes commands wait for credit from now on, if g is not nil.
func (p *QPair) passGate(g *window.Gate) {
	if g == nil {
		return
	}
	p.credits = g.NewPair(p.w.Machine(), func() {
		// Wakes block; if the connection is closed, nobody sleeps there.
		_ = p.w.SetReadDeadline(time.Unix(1, 0))
	})
}

// collect returns completions. What they have made room for is sent.
func (p *QPair) collect(dst []Completion) int { // hot: 0 allocs
	n := p.w.Machine().Completions(dst)
	if n > 0 && p.credits != nil {
		held := p.credits.Held()
		p.credits.Completed(dst[:n])
		if p.credits.Held() < held && p.err == nil {
			if _, err := p.w.Send(); err != nil {
				_ = p.fail(err) // Poll says so when it has no completions left
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
	if p.err != nil {
		return 0, p.err
	}
	var start time.Duration
	started := false
	for {
		if p.credits != nil && p.credits.Granted() {
			p.credits.Advance() // after sends it
		}
		got, err := p.w.Recv()
		if n, err := p.after(dst, err); n > 0 || err != nil {
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
		if n, err := p.after(dst, err); n > 0 || err != nil {
			return n, err
		}
		if timedOut {
			return 0, nil
		}
	}
}

// after follows every receive: it sends what the machine now has to send and
// collects completions.
func (p *QPair) after(dst []Completion, err error) (int, error) { // hot: 0 allocs
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
	if p.credits == nil {
		_, err = p.w.RecvWait()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return true, nil
		}
		return false, err
	}
	defer p.credits.Unpark()
	if p.credits.Park() {
		return false, nil
	}
	_, err = p.w.RecvWait()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// Woken, perhaps late, or out of time: Poll looks at both.
		p.expire = true
		return false, nil
	}
	return false, err
}

// fail makes err the queue pair's end, the first time.
func (p *QPair) fail(err error) error {
	if p.err != nil {
		return p.err
	}
	p.mu.Lock()
	why := p.closing
	p.mu.Unlock()
	if why == nil {
		_, _ = p.w.Send() // a TermReq, if the target is at fault; err is what counts
		why = hostconn.Classify(err)
	}
	p.err = fmt.Errorf("queue pair %d: %w", p.id, why)
	p.w.Shutdown()
	return p.err
}

// Interrupt makes the queue pair fail with ErrClosed, waking a blocked Poll; from any goroutine.
func (p *QPair) Interrupt() { p.interrupt(ErrClosed) }

func (p *QPair) interrupt(why error) {
	p.mu.Lock()
	if p.closing == nil {
		p.closing = why
	}
	p.mu.Unlock()
	p.w.Shutdown()
}

// Close ends the queue pair's connection. Outstanding commands are gone, their buffers the
// caller's. The owner calls it when no Poll or Submit is under way. Idempotent.
func (p *QPair) Close() error {
	p.closeOnce.Do(func() {
		p.interrupt(ErrClosed)
		if p.err == nil {
			p.err = fmt.Errorf("queue pair %d: %w", p.id, ErrClosed)
		}
		p.closeErr = p.w.Close()
		if p.credits != nil {
			p.credits.Leave()
		}
		if p.onClose != nil {
			p.onClose(p)
		}
	})
	return p.closeErr
}
