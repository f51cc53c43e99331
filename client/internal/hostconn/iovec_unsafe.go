package hostconn

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// vectorIO calls readv or writev once without blocking on an fd that is in non-blocking mode.
// x/sys/unix has both, but allocates for longer vectors. The vector's pointers are real Go
// pointers, so the memory behind them stays alive.
func vectorIO(trap, fd uintptr, iov []unix.Iovec) (int, unix.Errno) { // hot: 0 allocs
	for {
		n, _, errno := unix.Syscall(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}
