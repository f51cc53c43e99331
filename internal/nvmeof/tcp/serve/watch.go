package serve

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// watch is a second epoll set with all sockets. The runtime polls its own when a processor runs out of goroutines; a
// reader that always finds data on its socket never lets that happen. If every processor is busy like that, sockets
// that become readable wait for the runtime's monitor, which polls every 10 ms. So goroutines that have run for a
// while, or that spin, poll this set, without waiting:
//
//   - a busy reader wakes readers that are parked although they have data;
//   - so does a writer between the parts of a long batch;
//   - a spinning reader stops as soon as another connection has data.
type watch struct {
	epfd int
	// slots are the connections; epoll's user data is the index, so that asking needs
	// no lock.
	slots []atomic.Pointer[conn]

	mu   sync.Mutex
	free []int32
}

// watchInterval is how long a reader runs before it looks after the others.
const watchInterval = 50 * time.Microsecond

// newWatch makes a view of up to n sockets.
func newWatch(n int) (*watch, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	w := &watch{epfd: epfd, slots: make([]atomic.Pointer[conn], n), free: make([]int32, n)}
	for i := range w.free {
		w.free[i] = int32(n - 1 - i)
	}
	return w, nil
}

// add registers c.
//
// Errors: there are Config.MaxSockets connections; or the kernel's refusal.
func (w *watch) add(c *conn) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.free) == 0 {
		return fmt.Errorf("%d TCP connections are open or being closed, the limit", len(w.slots))
	}
	i := w.free[len(w.free)-1]
	var err error
	if cerr := c.raw.Control(func(fd uintptr) {
		err = unix.EpollCtl(w.epfd, unix.EPOLL_CTL_ADD, int(fd),
			&unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: i})
	}); cerr != nil {
		return cerr
	}
	if err != nil {
		return os.NewSyscallError("epoll_ctl", err)
	}
	w.free = w.free[:len(w.free)-1]
	c.watchSlot = i
	w.slots[i].Store(c)
	return nil
}

// remove is called before c's descriptor is closed.
func (w *watch) remove(c *conn) {
	w.slots[c.watchSlot].Store(nil)
	_ = c.raw.Control(func(fd uintptr) { _ = unix.EpollCtl(w.epfd, unix.EPOLL_CTL_DEL, int(fd), nil) })
	w.mu.Lock()
	defer w.mu.Unlock()
	w.free = append(w.free, c.watchSlot)
}

// othersWait reports whether a connection other than c (nil: any) is parked
// although it has data, and wakes such connections if asked to. events is scratch
// memory of the caller.
//
// hot: 0 allocs
func (w *watch) othersWait(c *conn, events []unix.EpollEvent, wake bool) (waiting bool) {
	n := epollNow(w.epfd, events)
	for _, e := range events[:n] {
		o := w.slots[e.Fd].Load()
		if o == nil || o == c || !o.parked.Load() {
			continue
		}
		waiting = true
		if wake && o.parked.CompareAndSwap(true, false) {
			// The only way to wake a goroutine that the runtime's poller holds.
			_ = o.nc.SetReadDeadline(time.Unix(1, 0))
		}
	}
	return waiting
}

func (w *watch) close() { _ = unix.Close(w.epfd) }
