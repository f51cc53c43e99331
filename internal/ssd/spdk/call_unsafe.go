//go:build spdk && cgo

package spdk

/*
#cgo CFLAGS: -Wall -O2
#include <stdlib.h>
#include "shim.h"

// Nothing in shim.c keeps a pointer or calls Go.
#cgo noescape jbof_turn
#cgo noescape jbof_queue_open
#cgo noescape jbof_queue_reconnect
#cgo noescape jbof_attach
#cgo noescape jbof_reset
#cgo noescape jbof_env_init
#cgo nocallback jbof_env_init
#cgo nocallback jbof_mem_register
#cgo nocallback jbof_mem_unregister
#cgo nocallback jbof_alloc
#cgo nocallback jbof_free
#cgo nocallback jbof_attach
#cgo nocallback jbof_detach
#cgo nocallback jbof_admin
#cgo nocallback jbof_reset
#cgo nocallback jbof_queue_open
#cgo nocallback jbof_queue_disconnect
#cgo nocallback jbof_queue_reconnect
#cgo nocallback jbof_queue_end
#cgo nocallback jbof_queue_close
#cgo nocallback jbof_queue_abort
#cgo nocallback jbof_turn
*/
import "C"

import (
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvme"
)

// This file has all calls into C. Each function makes one call and takes Go types.

// cCmd is struct jbof_cmd, cCpl struct jbof_cpl and cTurned struct jbof_turned.
type (
	cCmd struct {
		lba, addr    uint64
		blocks, slot uint32
		op, flags    uint8
		_            [6]uint8
	}
	cCpl struct {
		slot   uint32
		status nvme.Status
		_      uint16
	}
	cTurned struct{ took, refused, cpls, lost, more, lies int32 }
)

// The memory layout of the C structs. shim.c asserts the same numbers, so a mismatch does not compile.
var (
	_ [0]struct{} = [unsafe.Sizeof(cCmd{}) - 32]struct{}{}
	_ [0]struct{} = [unsafe.Offsetof(cCmd{}.slot) - 20]struct{}{}
	_ [0]struct{} = [unsafe.Offsetof(cCmd{}.op) - 24]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(cCpl{}) - 8]struct{}{}
	_ [0]struct{} = [unsafe.Offsetof(cCpl{}.status) - 4]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(cTurned{}) - C.sizeof_struct_jbof_turned]struct{}{}
)

// handle is the address of a C object; 0 stands for no object.
type handle uint64

// errno converts a negative error number.
func errno(r C.int32_t) error {
	if r < 0 {
		return unix.Errno(-r)
	}
	return nil
}

func envInit(name, lcores string, memoryMiB int, pci bool) error {
	n, l := C.CString(name), C.CString(lcores) // not freed: SPDK may keep them
	p := C.int32_t(0)
	if pci {
		p = 1
	}
	return errno(C.jbof_env_init(n, l, C.int32_t(memoryMiB), p))
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func memRegister(b []byte) error {
	return errno(C.jbof_mem_register(C.uint64_t(addressOf(b)), C.uint64_t(len(b))))
}

func memUnregister(b []byte) error {
	return errno(C.jbof_mem_unregister(C.uint64_t(addressOf(b)), C.uint64_t(len(b))))
}

// alloc returns memory of SPDK, or nil.
func alloc(n int) []byte {
	at := C.jbof_alloc(C.uint64_t(n))
	if at == 0 {
		return nil
	}
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&at)), n)
}

func free(b []byte) { C.jbof_free(C.uint64_t(addressOf(b))) }

// identity is what a controller says of itself and of a namespace.
type identity struct {
	model, serial                                        string
	names                                                [40]byte // as in struct jbof_info
	blocks                                               uint64
	blockBytes, maxTransfer                              int
	nsid                                                 uint32
	metadataBytes, optimalBlocks                         int
	volatileCache, deallocates, readsZero, hasZeroes, fd bool
	atomics                                              nvme.AtomicWrites
}

func fromC(c *C.struct_jbof_info) identity {
	text := func(at *C.char, n int) string {
		return strings.TrimRight(string(unsafe.Slice((*byte)(unsafe.Pointer(at)), n)), " \x00")
	}
	return identity{model: text(&c.model[0], len(c.model)), serial: text(&c.serial[0], len(c.serial)),
		names:  *(*[40]byte)(unsafe.Pointer(&c.names)),
		blocks: uint64(c.blocks), blockBytes: int(c.block_bytes), maxTransfer: int(c.max_transfer),
		nsid: uint32(c.nsid), metadataBytes: int(c.md_bytes), optimalBlocks: int(c.optimal_blocks),
		atomics: nvme.AtomicWrites{Controller: int(c.atomic_blocks), Own: c.ns_atomics != 0, NAWUPF: uint16(c.nawupf),
			NABSPF: uint16(c.nabspf), NABO: uint16(c.nabo)},
		volatileCache: c.volatile_cache != 0,
		deallocates:   c.deallocates != 0, readsZero: c.reads_zero != 0, hasZeroes: c.write_zeroes != 0,
		fd: c.interrupts != 0}
}

// attach connects to a controller. why is the reason if the handle is 0.
func attach(trid, hostNQN string, nsid uint32, interrupts bool) (h handle, id identity, why string) {
	t, n := C.CString(trid), C.CString(hostNQN)
	defer C.free(unsafe.Pointer(t))
	defer C.free(unsafe.Pointer(n))
	var info C.struct_jbof_info
	var text [256]C.char
	i := C.int32_t(0)
	if interrupts {
		i = 1
	}
	h = handle(C.jbof_attach(t, n, C.uint32_t(nsid), i, &info, &text[0], C.int32_t(len(text))))
	if h == 0 {
		return 0, identity{}, C.GoString(&text[0])
	}
	return h, fromC(&info), ""
}

func detach(ctrl handle) { C.jbof_detach(C.uint64_t(ctrl)) }

// admin processes admin completions, and sends a keep alive when it is time for that. It returns an error if the
// controller has failed.
func admin(ctrl handle) error { return errno(C.jbof_admin(C.uint64_t(ctrl))) }

func reset(ctrl handle) (identity, error) {
	var info C.struct_jbof_info
	err := errno(C.jbof_reset(C.uint64_t(ctrl), &info))
	return fromC(&info), err
}

// queueOpen makes a queue pair for so many commands, or less. fd is readable when there are completions; -1: there are
// no interrupts. It is SPDK's, which closes it at the end of the queue, or in a reset.
func queueOpen(ctrl handle, most int) (q handle, places, fd int, err error) {
	var cfd, cerr C.int32_t
	n := C.uint32_t(most)
	q = handle(C.jbof_queue_open(C.uint64_t(ctrl), &n, &cfd, &cerr))
	return q, int(n), int(cfd), errno(cerr)
}

func queueDisconnect(q handle) { C.jbof_queue_disconnect(C.uint64_t(q)) }

// queueReconnect connects a queue pair again. fd is as that of queueOpen, and may be another one.
func queueReconnect(q handle) (fd int, err error) {
	var cfd C.int32_t
	err = errno(C.jbof_queue_reconnect(C.uint64_t(q), &cfd))
	return int(cfd), err
}

// queueEnd frees the queue pair, which ends its commands. Their completions can still be taken.
func queueEnd(q handle)   { C.jbof_queue_end(C.uint64_t(q)) }
func queueClose(q handle) { C.jbof_queue_close(C.uint64_t(q)) }

func queueAbort(q handle, slot int) error {
	return errno(C.jbof_queue_abort(C.uint64_t(q), C.uint32_t(slot)))
}

// turn sends commands and returns completions.
//
// hot: 0 allocs
func turn(q handle, cmds []cCmd, cpls []cCpl, out *cTurned) {
	C.jbof_turn(C.uint64_t(q), (*C.struct_jbof_cmd)(unsafe.Pointer(unsafe.SliceData(cmds))), C.int32_t(len(cmds)),
		(*C.struct_jbof_cpl)(unsafe.Pointer(unsafe.SliceData(cpls))), C.int32_t(len(cpls)),
		(*C.struct_jbof_turned)(unsafe.Pointer(out)))
}

// poller waits for several file descriptors, by one system call.
type poller struct {
	fds [2]unix.PollFd
	n   int
}

func newPoller(fds ...int) (p poller) {
	for _, fd := range fds {
		if fd >= 0 {
			p.fds[p.n] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
			p.n++
		}
	}
	return p
}

// wait blocks until a file descriptor is readable, at most for limit (< 0: no limit), and reads the counters of those
// that are. It reports whether there was one.
//
// hot: 0 allocs
func (p *poller) wait(limit time.Duration) bool {
	var at *unix.Timespec
	var limited unix.Timespec
	if limit >= 0 {
		limited = unix.NsecToTimespec(int64(limit))
		at = &limited
	}
	if n, err := unix.Ppoll(p.fds[:p.n], at, nil); err != nil || n == 0 {
		return err != nil // a signal: look again
	}
	var count [8]byte
	for _, f := range p.fds[:p.n] {
		if f.Revents != 0 {
			_, _ = unix.Read(int(f.Fd), count[:]) // another thread may have read it
		}
	}
	return true
}
