// Package eventfd has events that the kernel, a device or any goroutine signals, and for which a goroutine waits
// without a thread of its own.
package eventfd

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Event is an eventfd. One goroutine at a time waits for it; any goroutine and the kernel may signal it.
type Event struct {
	file *os.File
	raw  syscall.RawConn
	read func(fd uintptr) bool
	fd   int
	// limited: a deadline is set on file.
	limited bool
	calls   atomic.Int64
}

// New makes an event that is not signalled.
//
// Errors: the system's, such as EMFILE.
func New() (*Event, error) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	e := &Event{file: os.NewFile(uintptr(fd), "eventfd"), fd: fd}
	if e.raw, err = e.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, e.file.Close())
	}
	var count [8]byte
	e.read = func(fd uintptr) bool {
		_, err := unix.Read(int(fd), count[:])
		e.calls.Add(1)
		return err != unix.EAGAIN
	}
	return e, nil
}

// FD is what the kernel is told to signal.
func (e *Event) FD() int { return e.fd }

// one is what one writes to an eventfd; any number but 0 does.
var one = [8]byte{1}

// Signal ends the Wait that is under way, or the next one.
//
// hot: 0 allocs
func (e *Event) Signal() {
	e.calls.Add(1)
	if _, err := e.file.Write(one[:]); err != nil && !errors.Is(err, os.ErrClosed) && !errors.Is(err, unix.EAGAIN) {
		panic("invariant broken: eventfd: " + err.Error())
	}
}

// Wait waits until the event is signalled, or until a time; the zero time means no limit. It returns whether it was
// signalled or closed.
//
// hot: 0 allocs
func (e *Event) Wait(until time.Time) bool {
	if e.limited || !until.IsZero() {
		e.limited = !until.IsZero()
		if err := e.file.SetReadDeadline(until); err != nil {
			return true // closed
		}
	}
	return !errors.Is(e.raw.Read(e.read), os.ErrDeadlineExceeded)
}

// Calls is how many reads and writes of the event there were: the system calls of its users, beside those of the Go
// runtime's poller.
func (e *Event) Calls() int64 { return e.calls.Load() }

// Close ends a Wait, and those that follow.
func (e *Event) Close() error { return e.file.Close() }
