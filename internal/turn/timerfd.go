package turn

import (
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"jbofd/internal/invariants"
)

// timerFD is a timer of the kernel. The Go runtime's own timers are up to a millisecond late when nothing else goes on,
// because the poller then sleeps in epoll_wait, whose timeout counts milliseconds; a timerfd ends that sleep itself.
type timerFD struct {
	file    *os.File
	fd      int
	f       func()
	closed  atomic.Bool
	stopped chan struct{} // closed when the goroutine has ended
}

func newTimerFD(f func()) (Timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("timer: %w", os.NewSyscallError("timerfd_create", err))
	}
	t := &timerFD{file: os.NewFile(uintptr(fd), "timer"), fd: fd, f: f, stopped: make(chan struct{})}
	go t.serve()
	return t, nil
}

// serve runs the function whenever the time has come.
func (t *timerFD) serve() {
	defer close(t.stopped)
	var times [8]byte
	for {
		if _, err := t.file.Read(times[:]); err != nil {
			return // closed
		}
		t.f()
	}
}

// Reset implements Timer. The caller keeps it from running at the same time as Close: a Driver has ownership.
func (t *timerFD) Reset(afterNS int64) {
	if t.closed.Load() {
		return
	}
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(afterNS)}
	err := unix.TimerfdSettime(t.fd, 0, &spec, nil)
	invariants.Check(err == nil, "turn: the timer cannot be set")
}

// Close implements Timer.
func (t *timerFD) Close() {
	if !t.closed.Swap(true) {
		_ = t.file.Close() // ends serve; there is nothing to be lost
	}
	<-t.stopped
}
