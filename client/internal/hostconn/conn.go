// Package hostconn drives a host's queue machine (hosttcp) over a TCP connection: Conn joins the two
// by system calls that never block. Queue makes a queue pair of a connection, of any transport, that any
// number of goroutines share.
package hostconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hosttcp"
)

// maxVector is the longest vector of one writev; longer batches take several.
const maxVector = 512

// Conn joins one queue machine to one TCP connection by system calls that never
// block: host.Conn.
type Conn struct {
	conn net.Conn
	rc   syscall.RawConn
	m    *hosttcp.Queue

	iov [maxVector]unix.Iovec
	// tryRecv and trySend are recvFD and sendFD as the closures RawConn wants, made
	// once. They leave their outcome in the fields below.
	tryRecv, trySend func(fd uintptr)
	waitRecv         func(fd uintptr) bool
	// awaitRecv and awaitSend call recvStep and sendStep, those of AwaitRecv and AwaitSend.
	awaitRecv, awaitSend func(fd uintptr) bool
	recvStep, sendStep   func() bool
	recvN                int
	recvErr, sendErr     error
	blocked              bool
}

var _ host.Conn = (*Conn)(nil)

// Dial opens a TCP connection for a queue. The ICReq is not sent yet.
func Dial(ctx context.Context, address string, o hosttcp.Options) (*Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return newConn(c, o)
}

func newConn(c net.Conn, o hosttcp.Options) (*Conn, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("connection %T has no file descriptor", c)
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	w := &Conn{conn: c, rc: rc, m: hosttcp.New(o)}
	w.tryRecv = w.recvFD
	w.trySend = w.sendFD
	w.waitRecv = func(fd uintptr) bool {
		w.recvFD(fd)
		return w.recvN != 0 || w.recvErr != nil
	}
	w.awaitRecv = func(uintptr) bool { return w.recvStep() }
	w.awaitSend = func(uintptr) bool { return w.sendStep() }
	return w, nil
}

// Recv reads once without blocking and lets the machine work through what came. n is 0
// if nothing was there.
//
// Errors: io.EOF wrapped, the system call's, or the machine's.
//
// Cost: one system call, 0 allocs.
func (w *Conn) Recv() (n int, err error) { // hot: 0 allocs
	if err := w.rc.Control(w.tryRecv); err != nil {
		return 0, err
	}
	return w.recvN, w.recvErr
}

// RecvWait is Recv, but waits for bytes on the network poller, until the connection's
// read deadline.
func (w *Conn) RecvWait() (n int, err error) { // hot: 0 allocs
	w.recvN, w.recvErr = 0, nil
	if err := w.rc.Read(w.waitRecv); err != nil {
		return 0, err
	}
	return w.recvN, w.recvErr
}

func (w *Conn) recvFD(fd uintptr) { // hot: 0 allocs
	direct, rx := w.m.RecvBufs()
	v := w.iov[:0]
	if len(direct) != 0 {
		v = appendIovec(v, direct)
	}
	v = appendIovec(v, rx)
	n, errno := vectorIO(unix.SYS_READV, fd, v)
	clear(v)
	w.recvN, w.recvErr = 0, nil
	switch {
	case errno == unix.EAGAIN:
	case errno != 0:
		w.recvErr = fmt.Errorf("read: %w", errno)
	case n == 0:
		w.recvErr = fmt.Errorf("the target closed the connection: %w", io.EOF)
	default:
		w.recvN = n
		w.recvErr = w.m.Received(n)
	}
}

// Send writes what the machine has to send until nothing is left or the socket takes no
// more (blocked).
//
// Cost: one system call per batch, 0 allocs.
func (w *Conn) Send() (blocked bool, err error) { // hot: 0 allocs
	for {
		if len(w.m.SendBufs()) == 0 {
			return false, nil
		}
		if err := w.rc.Control(w.trySend); err != nil {
			return false, err
		}
		if w.sendErr != nil || w.blocked {
			return w.blocked, w.sendErr
		}
	}
}

func (w *Conn) sendFD(fd uintptr) { // hot: 0 allocs
	segs := w.m.SendBufs()
	v := w.iov[:0]
	want := 0
	for _, s := range segs[:min(len(segs), maxVector)] {
		v = appendIovec(v, s)
		want += len(s)
	}
	n, errno := vectorIO(unix.SYS_WRITEV, fd, v)
	clear(v)
	w.blocked, w.sendErr = false, nil
	switch {
	case errno == unix.EAGAIN:
		w.blocked = true
	case errno != 0:
		w.sendErr = fmt.Errorf("write: %w", errno)
	default:
		w.m.Sent(n)
		w.blocked = n < want
	}
}

func appendIovec(v []unix.Iovec, b []byte) []unix.Iovec {
	v = append(v, unix.Iovec{Base: &b[0]})
	v[len(v)-1].SetLen(len(b))
	return v
}

// PollBoth blocks the thread until the socket can be read or written or timeout has
// passed. It is for the rare moment when both directions are full: the poller can
// wait for one at a time only.
func (w *Conn) PollBoth(timeout time.Duration) error {
	var perr error
	err := w.rc.Control(func(fd uintptr) {
		p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}}
		if _, e := unix.Poll(p[:], int(max(timeout.Milliseconds(), 1))); e != nil && e != unix.EINTR {
			perr = e
		}
	})
	return errors.Join(err, perr)
}

// Shutdown makes every present and future read and write fail or end; from any goroutine.
// Close must still be called.
func (w *Conn) Shutdown() {
	// An error means that the connection is closed or was never established: as wanted.
	_ = w.rc.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
}

// Close closes the connection.
func (w *Conn) Close() error { return w.conn.Close() }

// Machine returns the queue machine, for the owner of w.
func (w *Conn) Machine() host.Machine { return w.m }

// Unsent implements host.Conn.
func (w *Conn) Unsent() bool { return len(w.m.SendBufs()) != 0 }

// AwaitRecv implements host.Conn.
func (w *Conn) AwaitRecv(step func() bool) error {
	w.recvStep = step
	return w.rc.Read(w.awaitRecv)
}

// AwaitSend implements host.Conn.
func (w *Conn) AwaitSend(step func() bool) error {
	w.sendStep = step
	return w.rc.Write(w.awaitSend)
}

// SetReadDeadline bounds RecvWait.
func (w *Conn) SetReadDeadline(t time.Time) error { return w.conn.SetReadDeadline(t) }

// Handshake exchanges ICReq and ICResp. Cancelling ctx shuts the connection down.
func (w *Conn) Handshake(ctx context.Context) error {
	stop := context.AfterFunc(ctx, w.Shutdown)
	defer stop()
	if _, err := w.Send(); err != nil {
		return errors.Join(ctx.Err(), err)
	}
	for !w.m.Ready() {
		if _, err := w.RecvWait(); err != nil {
			_, _ = w.Send() // the TermReq; the error to report is the first one
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return fmt.Errorf("NVMe/TCP handshake: %w", err)
		}
	}
	return nil
}
