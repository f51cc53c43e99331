// Package loopback gives the listeners of tests loopback addresses of their own. At 127.0.0.1 the kernel soon gives the
// port of a listener that has ended to the next one, where hosts of an earlier test, which are still reconnecting, then
// turn up.
package loopback

import (
	"net"
	"os"
	"sync/atomic"
	"testing"
)

// used counts the addresses that this process has handed out.
var used atomic.Uint32

// Address returns host and port for a listener, "127.x.y.z:0": an address that no other caller in this process gets,
// and hardly any in another one. It repeats after 2^12 calls.
func Address() string {
	n := uint32(os.Getpid())<<12 | used.Add(1)&(1<<12-1)
	// The first number keeps clear of 127.0.0.x, which people use, and of the broadcast address 127.255.255.255.
	return net.IPv4(127, 1+byte(n>>16)%254, byte(n>>8), byte(n)).String() + ":0"
}

// Listen listens at a new Address. The caller closes the listener.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", Address())
	if err != nil {
		t.Fatal(err)
	}
	return l
}
