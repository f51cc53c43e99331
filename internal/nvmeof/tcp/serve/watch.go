package serve

import (
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A goroutine that always finds data on its own socket never gives the runtime
// reason to look at the others: when every processor is kept busy like that,
// sockets that became readable wait until the runtime's monitor looks, which is
// every 10 ms. watch is a second view of all sockets, asked without waiting by
// those who have run for a while and by those who spin:
//
//   - a busy reader wakes readers that are parked although they have data;
//   - a spinning reader stops as soon as somebody else has some.
type watch struct {
	epfd int

	mu    sync.Mutex
	conns map[int32]*conn // by descriptor
}

// watchInterval is how long a reader runs before it looks after the others.
const watchInterval = 50 * time.Microsecond

func newWatch() (*watch, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	return &watch{epfd: epfd, conns: map[int32]*conn{}}, nil
}

func (w *watch) add(c *conn) error {
	var err error
	if cerr := c.raw.Control(func(fd uintptr) {
		c.fd = int32(fd)
		err = unix.EpollCtl(w.epfd, unix.EPOLL_CTL_ADD, int(fd), &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: c.fd})
	}); cerr != nil {
		return cerr
	}
	if err != nil {
		return os.NewSyscallError("epoll_ctl", err)
	}
	w.mu.Lock()
	w.conns[c.fd] = c
	w.mu.Unlock()
	return nil
}

// remove is called before c's descriptor is closed.
func (w *watch) remove(c *conn) {
	w.mu.Lock()
	delete(w.conns, c.fd)
	w.mu.Unlock()
	_ = unix.EpollCtl(w.epfd, unix.EPOLL_CTL_DEL, int(c.fd), nil)
}

// othersWait reports whether a connection other than c is parked although it has
// data.
//
// hot: 0 allocs
func (w *watch) othersWait(c *conn, wake bool) (waiting bool) {
	n := epollNow(w.epfd, c.events[:])
	if n == 0 || n == 1 && c.events[0].Fd == c.fd {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range c.events[:n] {
		o := w.conns[e.Fd]
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
