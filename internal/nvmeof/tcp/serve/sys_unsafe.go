package serve

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The socket calls below are raw: the sockets are non-blocking, so the calls
// return at once and the scheduler need not be told.

// readv reads into the first two pieces and returns the count, or an errno.
//
// hot: 0 allocs
func readv(fd uintptr, iov *[2]unix.Iovec, a, b []byte) (int, unix.Errno) {
	if len(a) == 0 || len(b) == 0 { // one piece: read costs less than readv
		if len(a) == 0 {
			a = b
		}
		r, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(a))), uintptr(len(a)))
		if errno != 0 {
			return 0, errno
		}
		return int(r), 0
	}
	n := 0
	if len(a) > 0 {
		iov[n].Base = unsafe.SliceData(a)
		iov[n].SetLen(len(a))
		n++
	}
	if len(b) > 0 {
		iov[n].Base = unsafe.SliceData(b)
		iov[n].SetLen(len(b))
		n++
	}
	r, _, errno := unix.RawSyscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(iov)), uintptr(n))
	if errno != 0 {
		return 0, errno
	}
	return int(r), 0
}

// writev sends the pieces of segs from byte skip of the first on.
//
// hot: 0 allocs, given room in iov
func writev(fd uintptr, iov []unix.Iovec, segs [][]byte, skip int) (int, unix.Errno) {
	if len(segs) == 1 { // one piece: sendto costs less than sendmsg
		b := segs[0][skip:]
		r, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))),
			uintptr(len(b)),
			unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT, 0, 0)
		if errno != 0 {
			return 0, errno
		}
		return int(r), 0
	}
	n := min(len(segs), len(iov))
	for i := range n {
		iov[i].Base = unsafe.SliceData(segs[i])
		iov[i].SetLen(len(segs[i]))
	}
	iov[0].Base = unsafe.SliceData(segs[0][skip:])
	iov[0].SetLen(len(segs[0]) - skip)
	msg := unix.Msghdr{Iov: &iov[0]}
	msg.SetIovlen(n)
	r, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&msg)),
		unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
	if errno != 0 {
		return 0, errno
	}
	return int(r), 0
}

// epollNow returns which descriptors of epfd are ready, without waiting.
//
// hot: 0 allocs
func epollNow(epfd int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}
