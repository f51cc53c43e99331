package uring

import (
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's sizes; a mismatch does not compile.
var (
	_ [0]struct{} = [unsafe.Sizeof(SQE{}) - 64]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(CQE{}) - 16]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(params{}) - 120]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(rsrcRegister{}) - 32]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(rsrcUpdate2{}) - 32]struct{}{}
)

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func setup(entries uint32, p *params) (int, error) {
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if e != 0 {
		return -1, e
	}
	unix.CloseOnExec(int(fd))
	return int(fd), nil
}

// mapRings maps both rings and the submission entries. Both sides of the kernel's
// loads and stores are ordered by sync/atomic.
func (r *Ring) mapRings(p *params) (err error) {
	const offRings, offSQEs = 0, 0x10000000
	size := max(p.sq.array+p.sqEntries*4, p.cq.cqes+p.cqEntries*uint32(unsafe.Sizeof(CQE{})))
	prot, flags := unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE
	if r.rings, err = unix.Mmap(r.fd, offRings, int(size), prot, flags); err != nil {
		return err
	}
	if r.sqesMap, err = unix.Mmap(r.fd, offSQEs, int(p.sqEntries)*int(unsafe.Sizeof(SQE{})), prot, flags); err != nil {
		return err
	}
	word := func(off uint32) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&r.rings[off])) }
	r.sqHead, r.sqTail = word(p.sq.head), word(p.sq.tail)
	r.sqMask = word(p.sq.ringMask).Load()
	r.sqes = unsafe.Slice((*SQE)(unsafe.Pointer(&r.sqesMap[0])), p.sqEntries)
	r.cqHead, r.cqTail, r.cqFlags = word(p.cq.head), word(p.cq.tail), word(p.cq.flags)
	r.cqMask = word(p.cq.ringMask).Load()
	r.cqes = unsafe.Slice((*CQE)(unsafe.Pointer(&r.rings[p.cq.cqes])), p.cqEntries)
	// The array of indices between ring and entries: the identity, for ever.
	for i := range p.sqEntries {
		word(p.sq.array + 4*i).Store(i)
	}
	return nil
}

func enter(fd int, submit, minComplete, flags uint32) (int, error) {
	n, _, e := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(fd), uintptr(submit), uintptr(minComplete),
		uintptr(flags), 0, 0)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

// geteventsArg is struct io_uring_getevents_arg.
type geteventsArg struct {
	sigmask uint64
	size, _ uint32
	ts      uint64
}

func wait(fd int, timeoutNS int64) error {
	var arg geteventsArg
	var ts unix.Timespec
	var pin runtime.Pinner
	if timeoutNS >= 0 {
		ts = unix.NsecToTimespec(timeoutNS)
		pin.Pin(&ts) // the kernel reads it through arg, not as an argument
		defer pin.Unpin()
		arg.ts = uint64(uintptr(unsafe.Pointer(&ts)))
	}
	_, _, e := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(fd), 0, 1, enterGetEvents|enterExtArg,
		uintptr(unsafe.Pointer(&arg)), unsafe.Sizeof(arg))
	if e != 0 {
		return e
	}
	return nil
}

func register(fd int, op uint, arg unsafe.Pointer, n uintptr) error {
	_, _, e := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), uintptr(op), uintptr(arg), n, 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// RegisterEventfd has the kernel write to the eventfd for each completion.
func (r *Ring) RegisterEventfd(fd int) error {
	v := int32(fd)
	return register(r.fd, registerEventfd, unsafe.Pointer(&v), 1)
}

// RegisterFile makes fd number 0 of the ring's files; entries name it after
// UseFile. It saves a reference count per request.
func (r *Ring) RegisterFile(fd int) error {
	v := int32(fd)
	return register(r.fd, registerFiles, unsafe.Pointer(&v), 1)
}

// raiseWorkers lets each thread that submits to the ring have maxWorkers kernel threads for requests that wait, as far
// as RLIMIT_NPROC allows it. They are made when they are needed, and end when they have been idle for 5 s.
//
// A thread that has submitted to other rings before keeps what it got from the first of them. So every ring raises.
func (r *Ring) raiseWorkers() error {
	arg := [2]uint32{maxWorkers, 0} // those for files and block devices; the others as they are
	return register(r.fd, registerMaxWorkers, unsafe.Pointer(&arg), 2)
}

// RegisterSparse makes a table of n buffers, all empty; n <= MaxBuffers.
func (r *Ring) RegisterSparse(n int) error {
	arg := rsrcRegister{nr: uint32(n), flags: rsrcRegisterSparse}
	return register(r.fd, registerBuffers2, unsafe.Pointer(&arg), unsafe.Sizeof(arg))
}

// RegisterBuffer puts b, memory outside the Go heap, into the table. The kernel
// pins its pages until the ring is closed.
//
// Errors: ENOMEM when RLIMIT_MEMLOCK does not allow it.
func (r *Ring) RegisterBuffer(index int, b []byte) error {
	iov := unix.Iovec{Base: unsafe.SliceData(b), Len: uint64(len(b))}
	var pin runtime.Pinner
	pin.Pin(&iov)
	defer pin.Unpin()
	arg := rsrcUpdate2{offset: uint32(index), data: uint64(uintptr(unsafe.Pointer(&iov))), nr: 1}
	return register(r.fd, registerBuffersUpdate, unsafe.Pointer(&arg), unsafe.Sizeof(arg))
}

// unregister lets go of registered buffers and files at once; the kernel tears a
// closed ring down later, in its own time, and would hold a file's locks and
// the locked memory until then.
func (r *Ring) unregister() {
	// ENXIO when there are none: nothing to let go of.
	_ = register(r.fd, unregisterFiles, nil, 0)
	_ = register(r.fd, unregisterBuffers, nil, 0)
}
