package member

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Now is the clock of Authority: CLOCK_MONOTONIC_RAW in nanoseconds.
//
// The scheduler is not told of the system call, which does not block: replicas make one or two in each turn.
//
// hot: 0 allocs
func Now() int64 {
	var t unix.Timespec
	_, _, errno := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC_RAW, uintptr(unsafe.Pointer(&t)), 0)
	if errno != 0 {
		return 1 << 62 // there is no authority without the clock
	}
	return t.Nano()
}
