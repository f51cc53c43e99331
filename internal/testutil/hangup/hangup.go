// Package hangup closes TCP connections so that the other side's kernel knows.
package hangup

import (
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// States of a TCP connection that was shut down for sending and whose end the other side has not acknowledged. Source:
// include/net/tcp_states.h.
const (
	finWait1 = 4
	closing  = 11
)

// Close closes a connection and returns when the other side's kernel has acknowledged that, unless there is data that
// it does not take. On a busy machine, even
// loopback delivers what is sent on another connection afterwards before it delivers the end of this one, so a test in
// which a host comes back right after it has gone needs this.
func Close(t testing.TB, c net.Conn) {
	t.Helper()
	defer c.Close()
	tcp, ok := c.(*net.TCPConn)
	if !ok || tcp.CloseWrite() != nil { // it has ended already
		return
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); onItsWay(raw); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the end of the connection to %v was not acknowledged", c.RemoteAddr())
		}
	}
}

// onItsWay reports that the end of the connection was sent and has not been acknowledged.
func onItsWay(raw syscall.RawConn) (yes bool) {
	_ = raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		yes = err == nil && (info.State == finWait1 || info.State == closing) &&
			info.Notsent_bytes == 0
	})
	return yes
}
