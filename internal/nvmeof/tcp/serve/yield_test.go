package serve

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A reader that has slept has run for no longer than since then, however long ago it has yielded. There is nothing to
// yield to here, so that a reader that yields panics.
func TestAReaderThatHasSleptDoesNotYieldAtOnce(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	c := &conn{srv: &Server{rx: rxPool{size: 64, free: make(chan []byte, 1)}}}
	if c.readReady(uintptr(fds[0])) {
		t.Fatal("something was read from an empty socket")
	}
	const now = int64(time.Hour)
	c.yieldToOthers(now)
	c.yieldToOthers(now + int64(watchInterval) - 1)
	defer func() {
		if recover() == nil {
			t.Error("a reader that has not slept does not yield after its time")
		}
	}()
	c.yieldToOthers(now + int64(watchInterval))
}
