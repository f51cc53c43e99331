package hostconn

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// vectorIO calls readv or writev once on an fd that is in non-blocking mode.
// x/sys/unix has both, but allocates for longer vectors. The vector's pointers are real Go
// pointers, so the memory behind them stays alive.
//
// The scheduler is not told of the system call. If it were, its monitor would wake up for each, and would hand the
// processor over to another thread when a call over loopback, which does the receiver's work too, takes 20 µs.
func vectorIO(trap, fd uintptr, iov []unix.Iovec) (int, unix.Errno) { // hot: 0 allocs
	for {
		n, _, errno := unix.RawSyscall(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}
