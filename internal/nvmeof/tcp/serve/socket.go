package serve

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// read waits until the socket has data and reads it, first into place, which may be nil, and then into rx. It sets
// readN to the number of bytes read.
func (c *conn) read(place []byte) error {
	c.place = place
	for {
		c.readN, c.readErr, c.slept = 0, nil, false
		err := c.raw.Read(c.readFn)
		c.parked.Store(false)
		switch {
		case c.readErr != nil:
			return c.readErr
		case errors.Is(err, os.ErrDeadlineExceeded) && !c.isDead():
			// Another connection has woken this reader by means of a deadline in the past (watch.othersWait). shut sets
			// such a deadline as well. If it has done so in the meantime, its deadline was cleared here, and isDead
			// says so.
			if err := c.nc.SetReadDeadline(time.Time{}); err != nil {
				return err
			}
			if c.isDead() {
				return errors.New(c.reason)
			}
			continue
		case err != nil:
			return err
		}
		return nil
	}
}

// readReady is the callback of RawConn.Read. It reads without blocking and returns true if that returned data, the end
// of the stream or an error (readN, readErr). If it returns false, RawConn.Read parks the goroutine until the socket is
// readable and calls readReady again. Data that arrives between the last attempt to read and the parking is not missed,
// because the runtime's poller notes it.
//
// If data is likely to arrive soon, readReady first spins for up to Config.SpinFor. Before it parks it returns an empty
// receive buffer to the pool, so that idle connections hold none.
//
// hot: 0 allocs
func (c *conn) readReady(fd uintptr) bool {
	c.parked.Store(false)
	if c.rx == nil {
		c.rx = c.srv.rx.get()
	}
	if c.rxStart > 0 { // move the bytes that are not parsed yet to the front, to make room behind them
		c.rxEnd = copy(c.rx, c.rx[c.rxStart:c.rxEnd])
		c.rxStart = 0
	}
	if c.tryRead(fd) {
		return true
	}
	// Data is likely to arrive soon if the host has nothing to wait for: no command is in flight, or it owes the data
	// of a command. Otherwise the host may be waiting for a drive, and the reader would spin for nothing.
	if c.srv.cfg.SpinFor > 0 && (c.InFlight() == 0 || c.awaits) && c.spin.ShouldSpin() {
		ok := c.spinRead(fd)
		c.spin.Result(ok)
		if ok {
			return true
		}
	}
	if c.rxEnd == 0 && c.readErr == nil {
		c.dropRX()
	}
	c.parked.Store(true)
	c.slept = true
	return false
}

// tryRead reads without blocking. It reports whether that returned data, the end of the stream or an error; if not, the
// socket has no data.
func (c *conn) tryRead(fd uintptr) bool {
	room := c.rx[c.rxEnd:]
	if c.bulk {
		room = room[:min(len(room), bulkTail)]
	}
	for {
		n, errno := readv(fd, &c.iov, c.place, room)
		switch errno {
		case 0:
			c.readN = n
			if n == 0 {
				c.readErr = io.EOF
			}
			return true
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return false
		}
		c.readErr = os.NewSyscallError("read", errno)
		return true
	}
}

// spinRounds is how often a spinning reader tries its own socket before it looks at the clock, at the other sockets and
// at the scheduler, which together take longer than one try.
const spinRounds = 4

// spinRead polls the socket until tryRead succeeds, and reports whether it did. It gives up after SpinFor, or when the
// connection is dead, or when another connection has data that nobody reads.
func (c *conn) spinRead(fd uintptr) bool {
	until := c.srv.service.Clock() + int64(c.srv.cfg.SpinFor)
	for {
		for range spinRounds {
			if c.tryRead(fd) {
				return true
			}
		}
		if c.srv.service.Clock() > until || c.isDead() || c.srv.watch.othersWait(c, c.events[:], false) {
			return false
		}
		runtime.Gosched()
	}
}

// dropRX returns an empty receive buffer.
func (c *conn) dropRX() {
	if c.rx != nil {
		c.srv.rx.put(c.rx)
		c.rx, c.rxStart, c.rxEnd = nil, 0, 0
	}
}

// yieldToOthers lets other goroutines run if this one has run for watchInterval. It first wakes readers that are parked
// although their sockets have data. A reader that has slept has let them run: it has not run since the last yield, but
// since now.
func (c *conn) yieldToOthers(now int64) {
	if c.slept {
		c.slept, c.lookedNS = false, now
	}
	if now-c.lookedNS < int64(watchInterval) {
		return
	}
	c.lookedNS = now
	c.srv.watch.othersWait(c, c.events[:], true)
	runtime.Gosched()
}

// flush sends the machine's pending output as far as the socket takes it without blocking. The writer sends the rest.
func (c *conn) flush() {
	c.mu.Lock()
	if c.sending || c.m.Pending() == 0 {
		c.mu.Unlock()
		return // the goroutine that is sending looks again when it is done
	}
	c.sending = true
	c.takeOut()
	c.mu.Unlock()
	if !c.sendAll(false) {
		c.handoff.Store(true) // only now: when sendAll has sent everything, another goroutine may be sending
		signal(c.wake)
	}
}

// writeLoop is the writer goroutine.
func (c *conn) writeLoop() {
	for {
		select {
		case <-c.wake:
		case <-c.dead:
			return
		}
		c.Empty()
		c.RecordFailures()
		c.mu.Lock()
		mine := c.handoff.Swap(false)
		if !mine && (c.sending || c.m.Pending() == 0) {
			c.mu.Unlock()
			continue
		}
		if !mine {
			c.sending = true
			c.takeOut()
		}
		c.mu.Unlock()
		if !c.sendAll(true) {
			return
		}
	}
}

// takeOut moves the machine's pending output to txOut. The caller holds mu and has set sending.
func (c *conn) takeOut() {
	c.m.Take(&c.txOut)
	c.txBufs, c.pending = c.pending, c.txBufs[:0]
	c.txSeg, c.txSkip = 0, 0
	c.txSince = time.Time{}
}

// sendAll sends until the machine has no output left, clears sending and returns true. It returns false, with sending
// still set, if the connection is dead, or if the socket is full and wait is false.
func (c *conn) sendAll(wait bool) bool {
	for {
		if !c.send(wait) {
			return false
		}
		c.srv.service.Pool().PutAll(c.txBufs)
		c.txBufs = c.txBufs[:0]
		c.txOut.Reset()
		c.mu.Lock()
		if c.m.Pending() == 0 {
			c.sending = false
			c.mu.Unlock()
			signal(c.resume)
			return true
		}
		c.takeOut()
		c.mu.Unlock()
		signal(c.resume)
	}
}

// send sends the part of txOut that was not sent yet, and reports whether it has sent all of it.
func (c *conn) send(wait bool) bool {
	if c.txSeg == len(c.txOut.Segs) {
		return true
	}
	c.sendWait, c.writeErr = wait, nil
	if wait && !c.extendWriteDeadline() {
		return false
	}
	err := c.raw.Write(c.writeFn)
	for !wait && errors.Is(err, os.ErrDeadlineExceeded) && !c.isDead() {
		// The deadline is left over from an earlier send that waited for the host, and has passed since. This send does
		// not wait, so it needs none. Clearing a deadline that shut has set does no harm: shut sets it to wake the
		// goroutine that waits to send, and only the one that has set sending could be that.
		_ = c.nc.SetWriteDeadline(time.Time{})
		err = c.raw.Write(c.writeFn)
	}
	if err == nil {
		err = c.writeErr
	}
	if err != nil {
		reason := fmt.Sprintf("write: %v", err)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			reason = fmt.Sprintf("the host did not read for %v, or at less than %d bytes per second",
				c.srv.cfg.StallTimeout, c.srv.cfg.MinBytesPerSec)
		}
		c.shut(reason)
		return false
	}
	return c.txSeg == len(c.txOut.Segs)
}

// writeReady is the callback of RawConn.Write. It sends txOut as far as the socket takes it. If the socket is full and
// sendWait is set, it returns false: RawConn.Write then parks the goroutine until the socket is writable and calls
// writeReady again.
//
// hot: 0 allocs
func (c *conn) writeReady(fd uintptr) bool {
	if c.txIOV == nil {
		c.txIOV = make([]unix.Iovec, maxIOV)
	}
	iov := c.txIOV
	if c.sendWait {
		iov = iov[:writerIOV]
	}
	for c.txSeg < len(c.txOut.Segs) {
		n, errno := writev(fd, iov, c.txOut.Segs[c.txSeg:], c.txSkip)
		switch errno {
		case 0:
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return !c.sendWait
		default:
			c.writeErr = os.NewSyscallError("sendmsg", errno)
			return true
		}
		c.advance(n)
		if c.sendWait && c.txSeg < len(c.txOut.Segs) && c.srv.watch.othersWait(nil, c.txEvents[:], true) {
			runtime.Gosched()
		}
		if c.sendWait && !c.extendWriteDeadline() { // progress: the host does read
			return true
		}
	}
	return true
}

// extendWriteDeadline gives the host another StallTimeout to read, but not longer than all of txOut may take: its
// buffers come back only then. It returns false if the connection is dead.
func (c *conn) extendWriteDeadline() bool {
	now := time.Now()
	if c.txSince.IsZero() {
		bytes := 0
		for _, s := range c.txOut.Segs {
			bytes += len(s)
		}
		c.txSince, c.txAllowed = now, c.srv.limits().Allows(bytes)
	}
	_ = c.nc.SetWriteDeadline(now.Add(min(c.srv.cfg.StallTimeout, c.txAllowed-now.Sub(c.txSince))))
	return !c.isDead() // shut's own deadline may just have been overwritten
}

// advance moves past n bytes sent.
func (c *conn) advance(n int) {
	n += c.txSkip
	for c.txSeg < len(c.txOut.Segs) && n >= len(c.txOut.Segs[c.txSeg]) {
		n -= len(c.txOut.Segs[c.txSeg])
		c.txSeg++
	}
	c.txSkip = n
}

// lingerFor is how long a host may take to read what is sent before the connection is closed.
const lingerFor = time.Second

// finishSending gives the host lingerFor to receive the last PDUs before the connection is closed. It waits until the
// socket has taken them, sends a FIN, and discards what the host still sends until the host has closed too: closing a
// socket with unread data would send a RST, at which the host would lose PDUs that it has not read.
//
// Source: NVMe/TCP Transport 1.0, section 3.5.
func (c *conn) finishSending() {
	deadline := time.Now().Add(lingerFor)
	for {
		c.mu.Lock()
		sending := c.sending
		c.mu.Unlock()
		if !sending {
			break
		}
		select {
		case <-c.resume:
		case <-c.dead:
			return
		case <-time.After(time.Until(deadline)):
			return
		}
	}
	_ = c.nc.CloseWrite()
	_ = c.nc.SetReadDeadline(deadline)
	if c.isDead() {
		return // shut's own deadline may just have been overwritten
	}
	_, _ = io.CopyN(io.Discard, c.nc, 64<<20)
}

// rxPool keeps receive buffers of connections that went idle.
type rxPool struct {
	size int
	free chan []byte
}

func (p *rxPool) get() []byte {
	select {
	case b := <-p.free:
		return b
	default:
		return make([]byte, p.size)
	}
}

func (p *rxPool) put(b []byte) {
	select {
	case p.free <- b:
	default:
	}
}
