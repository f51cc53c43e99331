package hostconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hosttcp"
)

// maxVector is the longest vector of one writev; longer batches take several.
const maxVector = 512

// TCPConn is the Conn of a TCP connection. Its system calls never block.
type TCPConn struct {
	conn net.Conn
	rc   syscall.RawConn
	m    *hosttcp.QPair

	iov [maxVector]unix.Iovec
	// tryRecv and trySend are recvFD and sendFD as function values for RawConn, made once in order not to allocate.
	// They store their results in the fields below.
	tryRecv, trySend func(fd uintptr)
	waitRecv         func(fd uintptr) bool
	// awaitRecv and awaitSend call recvStep and sendStep, those of AwaitRecv and AwaitSend.
	awaitRecv, awaitSend func(fd uintptr) bool
	recvStep, sendStep   func() bool
	recvN                int
	recvErr, sendErr     error
	blocked              bool
}

var _ Conn = (*TCPConn)(nil)

// DialTCP opens a TCP connection for a queue pair, which comes from an address of this machine; the zero Addr: any.
// Handshake must follow.
func DialTCP(ctx context.Context, address string, from netip.Addr, o hosttcp.Options) (*TCPConn, error) {
	var d net.Dialer
	if from.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return newConn(c, o)
}

func newConn(c net.Conn, o hosttcp.Options) (*TCPConn, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("connection %T has no file descriptor", c)
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	w := &TCPConn{conn: c, rc: rc, m: hosttcp.New(o)}
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

// Recv implements Conn.
//
// Errors: io.EOF, wrapped; those of the system call and of the machine.
//
// Cost: one system call, 0 allocs.
func (c *TCPConn) Recv() (n int, err error) { // hot: 0 allocs
	if err := c.rc.Control(c.tryRecv); err != nil {
		return 0, err
	}
	return c.recvN, c.recvErr
}

// RecvWait implements Conn. It waits on the network poller.
func (c *TCPConn) RecvWait() (n int, err error) { // hot: 0 allocs
	c.recvN, c.recvErr = 0, nil
	if err := c.rc.Read(c.waitRecv); err != nil {
		return 0, err
	}
	return c.recvN, c.recvErr
}

func (c *TCPConn) recvFD(fd uintptr) { // hot: 0 allocs
	direct, rx := c.m.RecvBufs()
	v := c.iov[:0]
	if len(direct) != 0 {
		v = appendIovec(v, direct)
	}
	v = appendIovec(v, rx)
	n, errno := vectorIO(unix.SYS_READV, fd, v)
	clear(v)
	c.recvN, c.recvErr = 0, nil
	switch {
	case errno == unix.EAGAIN:
	case errno != 0:
		c.recvErr = fmt.Errorf("read: %w", errno)
	case n == 0:
		c.recvErr = fmt.Errorf("the target closed the connection: %w", io.EOF)
	default:
		c.recvN = n
		c.recvErr = c.m.Received(n)
	}
}

// Send implements Conn.
//
// Cost: one system call per batch, 0 allocs.
func (c *TCPConn) Send() (blocked bool, err error) { // hot: 0 allocs
	for {
		if len(c.m.SendBufs()) == 0 {
			return false, nil
		}
		if err := c.rc.Control(c.trySend); err != nil {
			return false, err
		}
		if c.sendErr != nil || c.blocked {
			return c.blocked, c.sendErr
		}
	}
}

func (c *TCPConn) sendFD(fd uintptr) { // hot: 0 allocs
	segs := c.m.SendBufs()
	v := c.iov[:0]
	want := 0
	for _, s := range segs[:min(len(segs), maxVector)] {
		v = appendIovec(v, s)
		want += len(s)
	}
	n, errno := vectorIO(unix.SYS_WRITEV, fd, v)
	clear(v)
	c.blocked, c.sendErr = false, nil
	switch {
	case errno == unix.EAGAIN:
		c.blocked = true
	case errno != 0:
		c.sendErr = fmt.Errorf("write: %w", errno)
	default:
		c.m.Sent(n)
		c.blocked = n < want
	}
}

func appendIovec(v []unix.Iovec, b []byte) []unix.Iovec {
	v = append(v, unix.Iovec{Base: &b[0]})
	v[len(v)-1].SetLen(len(b))
	return v
}

// PollBoth implements Conn. It blocks the thread, which is acceptable in the rare case that both directions are full:
// the network poller can wait for one direction only.
func (c *TCPConn) PollBoth(timeout time.Duration) error {
	var perr error
	err := c.rc.Control(func(fd uintptr) {
		p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}}
		if _, e := unix.Poll(p[:], int(max(timeout.Milliseconds(), 1))); e != nil && e != unix.EINTR {
			perr = e
		}
	})
	return errors.Join(err, perr)
}

// Shutdown implements Conn.
func (c *TCPConn) Shutdown() {
	// An error means that the connection is closed already.
	_ = c.rc.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
}

// Close closes the connection.
func (c *TCPConn) Close() error { return c.conn.Close() }

// Machine implements Conn.
func (c *TCPConn) Machine() host.Machine { return c.m }

// Unsent implements Conn.
func (c *TCPConn) Unsent() bool { return len(c.m.SendBufs()) != 0 }

// AwaitRecv implements Conn.
func (c *TCPConn) AwaitRecv(step func() bool) error {
	c.recvStep = step
	return c.rc.Read(c.awaitRecv)
}

// AwaitSend implements Conn.
func (c *TCPConn) AwaitSend(step func() bool) error {
	c.sendStep = step
	return c.rc.Write(c.awaitSend)
}

// SetReadDeadline implements Conn.
func (c *TCPConn) SetReadDeadline(t time.Time) error { return c.conn.SetReadDeadline(t) }

// Handshake exchanges ICReq and ICResp. If ctx ends before it returns, it shuts the connection down and fails.
func (c *TCPConn) Handshake(ctx context.Context) error {
	stop := context.AfterFunc(ctx, c.Shutdown)
	err := c.handshake()
	if !stop() {
		err = ctx.Err() // which is also why the connection failed, if it did
	}
	if err != nil {
		return fmt.Errorf("NVMe/TCP handshake: %w", err)
	}
	return nil
}

func (c *TCPConn) handshake() error {
	if _, err := c.Send(); err != nil {
		return err
	}
	for !c.m.Ready() {
		if _, err := c.RecvWait(); err != nil {
			_, _ = c.Send() // a TermReq, if there is one; err is what counts
			return err
		}
	}
	return nil
}
