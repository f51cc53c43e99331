package file

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvme"
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

// Requests of the kernel's NVMe driver. Source: include/uapi/linux/nvme_ioctl.h.
const (
	nvmeIoctlID    = 'N'<<8 | 0x40
	nvmeIoctlAdmin = 3<<30 | uint(unsafe.Sizeof(passthru{}))<<16 | 'N'<<8 | 0x41
)

// passthru is struct nvme_passthru_cmd.
type passthru struct {
	opcode, flags     uint8
	_                 uint16
	nsid, cdw2, cdw3  uint32
	metadata, address uint64
	metadataBytes     uint32
	dataBytes         uint32
	cdw               [6]uint32 // CDW10 to CDW15
	timeoutMS, result uint32
}

// passAdmin is NVME_IOCTL_ADMIN_CMD, with the kernel's own timeout.
//
// Errors: the kernel's; errStatus; EINTR if the kernel has given the command up.
func passAdmin(fd int, e *nvme.SQE, data []byte) error {
	c := passthru{opcode: e.Opcode(), nsid: e.NSID(), address: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(data)))),
		dataBytes: uint32(len(data))}
	for i := range c.cdw {
		c.cdw[i] = e.CDW(10 + i)
	}
	status, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(nvmeIoctlAdmin), uintptr(unsafe.Pointer(&c)))
	runtime.KeepAlive(data)
	switch {
	case errno != 0:
		return errno
	case status&0x700 == 0x300: // related to the path, which the kernel sets when it ends a command itself
		return unix.EINTR
	case status != 0:
		return errStatus
	}
	return nil
}
