package file

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// addressOf returns where b begins, to check its alignment.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// blockDeviceBytes is BLKGETSIZE64.
func blockDeviceBytes(fd int) (int64, error) {
	var n uint64
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.BLKGETSIZE64, uintptr(unsafe.Pointer(&n))); e != 0 {
		return 0, e
	}
	return int64(n), nil
}

// blockRange carries out BLKDISCARD or BLKZEROOUT on [off, off+n).
func blockRange(fd int, request uintptr, off, n int64) unix.Errno {
	arg := [2]uint64{uint64(off), uint64(n)}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&arg)))
	return e
}

// pwriteDSync writes b and returns when it is durable (RWF_DSYNC).
func pwriteDSync(fd int, b []byte, off int64) (int, error) {
	iov := unix.Iovec{Base: unsafe.SliceData(b), Len: uint64(len(b))}
	const longBits = 8 * unsafe.Sizeof(uintptr(0))
	n, _, e := unix.Syscall6(unix.SYS_PWRITEV2, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1,
		uintptr(off), uintptr(uint64(off)>>(longBits/2)>>(longBits/2)), unix.RWF_DSYNC)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}
