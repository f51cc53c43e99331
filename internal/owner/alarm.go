package owner

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// alarm wakes an owner at a time. It is a timerfd, for the runtime's own timers are up to
// a millisecond late when nothing else goes on.
type alarm struct {
	file *os.File
	fd   int
}

func newAlarm() (*alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("timer: %w", os.NewSyscallError("timerfd_create", err))
	}
	return &alarm{file: os.NewFile(uintptr(fd), "timer"), fd: fd}, nil
}

// set lets wait return once, afterNS (at least 1) from now; an earlier set counts no
// more.
func (a *alarm) set(afterNS int64) error {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(afterNS)}
	return os.NewSyscallError("timerfd_settime", unix.TimerfdSettime(a.fd, 0, &spec, nil))
}

// wait sleeps until the time set; false: the alarm was closed.
func (a *alarm) wait() bool {
	var times [8]byte
	_, err := a.file.Read(times[:])
	return err == nil
}

func (a *alarm) close() { _ = a.file.Close() }
