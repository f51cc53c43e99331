package pci

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The structures and requests of linux/vfio.h; a mismatch of sizes does not compile.
var (
	_ [0]struct{} = [unsafe.Sizeof(groupStatus{}) - 8]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(deviceInfo{}) - 20]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(regionInfo{}) - 32]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(irqInfo{}) - 16]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(dmaMap{}) - 32]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(dmaUnmap{}) - 24]struct{}{}
)

// Requests: _IO(';', 100 + n).
const (
	getAPIVersion = 0x3B64 + iota
	checkExtension
	setIOMMU
	groupGetStatus
	groupSetContainer
	groupUnsetContainer
	groupGetDeviceFD
	deviceGetInfo
	deviceGetRegionInfo
	deviceGetIRQInfo
	deviceSetIRQs
	deviceReset
	_
	iommuMapDMA
	iommuUnmapDMA
)

const (
	type1v2 = 3

	groupViable = 1 << 0

	deviceCanReset = 1 << 0

	regionMmap   = 1 << 2
	regionBAR0   = 0
	regionConfig = 7

	irqMSIX    = 2
	irqRequest = 4

	irqDataEventfd   = 1 << 2
	irqActionTrigger = 1 << 5

	dmaRead, dmaWrite = 1 << 0, 1 << 1
)

type groupStatus struct{ argsz, flags uint32 }

type deviceInfo struct{ argsz, flags, regions, irqs, capOffset uint32 }

type regionInfo struct {
	argsz, flags, index, capOffset uint32
	size, offset                   uint64
}

type irqInfo struct{ argsz, flags, index, count uint32 }

type dmaMap struct {
	argsz, flags       uint32
	vaddr, iova, bytes uint64
}

type dmaUnmap struct {
	argsz, flags uint32
	iova, bytes  uint64
}

// irqSet is struct vfio_irq_set with room for descriptors.
type irqSet struct {
	argsz, flags, index, start, count uint32
	fds                               [maxVectors]int32
}

// request carries out an ioctl with a number as argument.
func request(fd int, req, arg uintptr) (int, error) {
	r, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, arg)
	if e != 0 {
		return 0, e
	}
	return int(r), nil
}

// requestWith carries out an ioctl with a structure as argument.
func requestWith[T any](fd int, req uintptr, arg *T) (int, error) {
	r, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(unsafe.Pointer(arg)))
	if e != 0 {
		return 0, e
	}
	return int(r), nil
}

// deviceFD opens the function of a group.
func deviceFD(group int, address string) (int, error) {
	name, err := unix.BytePtrFromString(address)
	if err != nil {
		return -1, err
	}
	return requestWith(group, groupGetDeviceFD, name)
}

func setContainer(group, container int) error {
	fd := int32(container)
	_, err := requestWith(group, groupSetContainer, &fd)
	return err
}

// mapDMA lets the devices of a container see memory.
func mapDMA(container int, memory []byte, at uint64) error {
	m := dmaMap{flags: dmaRead | dmaWrite, vaddr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(memory)))), iova: at,
		bytes: uint64(len(memory))}
	m.argsz = uint32(unsafe.Sizeof(m))
	_, err := requestWith(container, iommuMapDMA, &m)
	return err
}

func unmapDMA(container int, at uint64, bytes int) error {
	m := dmaUnmap{iova: at, bytes: uint64(bytes)}
	m.argsz = uint32(unsafe.Sizeof(m))
	_, err := requestWith(container, iommuUnmapDMA, &m)
	return err
}

// setIRQs has interrupts of an index signal eventfds.
func setIRQs(device int, index uint32, fds []int) error {
	s := irqSet{flags: irqDataEventfd | irqActionTrigger, index: index, count: uint32(len(fds))}
	for i, fd := range fds {
		s.fds[i] = int32(fd)
	}
	s.argsz = uint32(unsafe.Sizeof(s)) - uint32(len(s.fds)-len(fds))*4
	_, err := requestWith(device, deviceSetIRQs, &s)
	return err
}

func getDeviceInfo(device int) (i deviceInfo, err error) {
	i.argsz = uint32(unsafe.Sizeof(i))
	_, err = requestWith(device, deviceGetInfo, &i)
	return i, err
}

func getRegionInfo(device int, index uint32) (i regionInfo, err error) {
	i = regionInfo{index: index}
	i.argsz = uint32(unsafe.Sizeof(i))
	_, err = requestWith(device, deviceGetRegionInfo, &i)
	return i, err
}

func getIRQInfo(device int, index uint32) (i irqInfo, err error) {
	i = irqInfo{index: index}
	i.argsz = uint32(unsafe.Sizeof(i))
	_, err = requestWith(device, deviceGetIRQInfo, &i)
	return i, err
}

func getGroupStatus(group int) (s groupStatus, err error) {
	s.argsz = uint32(unsafe.Sizeof(s))
	_, err = requestWith(group, groupGetStatus, &s)
	return s, err
}
