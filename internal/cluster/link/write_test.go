package link

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/cluster"
)

// answerHello takes a hello from node a and answers as node b.
func answerHello(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
		t.Fatal(err)
	}
	if _, err := readFrame(c, maxHello); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(hello{cluster: "test", from: "b", to: "a"}.frame()); err != nil {
		t.Fatal(err)
	}
}

// TestAConnectionEndsWithAWriteThatFails: a node that reads too slowly for a message has got a part of it. It must
// learn that the rest does not come, by the end of the connection.
func TestAConnectionEndsWithAWriteThatFails(t *testing.T) {
	n := newNetwork(t, "a", "b")
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096)
		}), err)
	}}
	l, err := lc.Listen(t.Context(), "tcp", n["b"])
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a := n.start(t, "a", func(c *Config) { c.Timeout = time.Second })
	long := report("a", 1)
	long.Report.Full, long.Report.Ranges = true, make([]cluster.RangeReport, 50_000)
	for range maxWaiting {
		a.Send(n["b"], long)
	}
	first, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	answerHello(t, first)
	// It reads a little all the time, so that the kernel has no reason to give up the connection.
	again, slow := make(chan net.Conn), make(chan struct{})
	go func() {
		defer close(again)
		c, err := l.Accept()
		if err == nil {
			again <- c
		}
	}()
	go func() {
		defer close(slow)
		for b := make([]byte, 512); ; {
			select {
			case c := <-again:
				if c != nil {
					defer c.Close()
				}
				return
			case <-time.After(20 * time.Millisecond):
			}
			if _, err := first.Read(b); err != nil {
				t.Errorf("before there is another connection: %v", err)
				return
			}
			a.Send(n["b"], long)
		}
	}()
	<-slow
	for b := make([]byte, 64<<10); ; {
		if _, err := first.Read(b); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the first connection is still open after %s", wait)
			}
			return
		}
	}
}
