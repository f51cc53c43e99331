// Package ssd defines the interface of a drive: a device with a size and a few properties, and queues on it that take
// batches of requests and return batches of completions.
//
// Sub-packages implement it: mem (DRAM), file (regular files and block devices, with io_uring or worker threads), model
// (an emulated drive with the timing of a flash drive) and fault (a wrapper that injects seeded errors, delays, and
// torn or lost unflushed writes). A drive may have an Area, memory of its own, beside its queues. Package label keeps
// the on-drive table of extents.
package ssd

import (
	"errors"
	"fmt"
	"time"
)

// Op is what a Request asks of a device.
type Op uint8

// The operations of a device.
const (
	// Read fills Buf[:Len] from the device.
	Read Op = iota
	// Write stores Buf[:Len]. With FUA it completes when the data is durable.
	Write
	// Flush makes every write completed before its submission durable.
	Flush
	// Deallocate tells the device that the content of the range is not needed. It is advice. Whether the range reads as
	// zeroes afterwards is Info.DeallocatedReadsZero.
	Deallocate
	// WriteZeroes makes the range read as zeroes. With Unmap in Flags the
	// device may free the space behind it.
	WriteZeroes
)

var opNames = [...]string{"read", "write", "flush", "deallocate", "write_zeroes"}

// Ops is the number of operations; valid operations are below it.
const Ops = Op(len(opNames))

// String returns the operation's name as metrics and logs write it.
func (o Op) String() string {
	if int(o) < len(opNames) {
		return opNames[o]
	}
	return fmt.Sprintf("Op(%d)", uint8(o))
}

// Flags modify a Request.
type Flags uint8

const (
	// FUA, on a Write or WriteZeroes: complete only when durable. On a Read: make the content of the range durable
	// before reading it, so that no power loss can bring back older content than was read.
	FUA Flags = 1 << iota
	// Unmap, on a WriteZeroes: the device may deallocate, if the range then
	// reads as zeroes.
	Unmap
)

// Request is one operation on a device.
type Request struct {
	Op    Op
	Flags Flags
	// Offset and Len are bytes, multiples of Info.BlockSize; ignored by Flush.
	Offset, Len int64
	// Buf holds the data of a Read or Write, len(Buf) >= Len. The queue owns it from Submit until the completion was
	// polled. Buffers from bufpool are page-aligned and registered with the device; data in others may be copied.
	Buf []byte
	// Tag comes back in the Completion. The caller keeps tags unique among the
	// requests outstanding on one queue.
	Tag uint64
}

// Completion is the result of a Request.
type Completion struct {
	Tag uint64
	// Err is nil or wraps one of the sentinels below.
	Err error
	// LatencyNS is the time from submission to the device until its completion.
	LatencyNS int64
}

// The errors of completions. Every error of a device wraps one of them; unknown causes wrap ErrMedia.
var (
	// ErrMedia: the device could not read or write the range (EIO and kin).
	ErrMedia = errors.New("media error")
	// ErrNoSpace: the file system or thin device behind it is full (ENOSPC, EDQUOT).
	ErrNoSpace = errors.New("no space left on the device")
	// ErrGone: the device has vanished or was closed (ENODEV, ENXIO, ESHUTDOWN). All later requests fail with it, too.
	ErrGone = errors.New("device is gone")
	// ErrRange: offset or length outside the device or not in whole blocks.
	ErrRange = errors.New("range outside the device or not in whole blocks")
	// ErrUnsupported: the device does not implement the operation.
	ErrUnsupported = errors.New("operation not supported by the device")
)

// Info describes a device. It does not change while the device is open.
type Info struct {
	// Name is the device's name in the configuration.
	Name string
	// Backend is "mem", "file", ...; Path is the underlying file or block device, if any.
	Backend, Path string
	// Model and Serial identify the drive if it reports them. Serial is the same after a restart, or empty.
	Model, Serial string
	// SizeBytes is the capacity, a multiple of BlockSize.
	SizeBytes int64
	// BlockSize is the smallest unit of I/O in bytes, a power of two >= 512.
	BlockSize int
	// OptimalIOBytes is the preferred granularity and alignment of writes; at
	// least BlockSize.
	OptimalIOBytes int
	// AtomicWriteBytes is the largest aligned write that is never torn by power
	// loss; at least BlockSize.
	AtomicWriteBytes int
	// VolatileCache: completed writes may be lost with the power until a Flush.
	VolatileCache bool
	// Deallocates is set if Deallocate has an effect, DeallocatedReadsZero if a deallocated range reads as zeroes until
	// it is written.
	Deallocates, DeallocatedReadsZero bool
	// Engine is the mechanism used for I/O: "mem", "io_uring", "threads".
	Engine string
	// Polled: completions arrive in the process's memory without the kernel, so that it pays to look for them for a
	// while before waiting.
	Polled bool
}

// Queue is one path for requests to a device. It has an owner: one goroutine at a time, which calls Submit and Poll.
// Neither of them blocks. Another goroutine may wait for completions meanwhile, and hand the queue's work to the owner:
//
//	owner:   Submit ──> ... ──> Poll ──> Submit ──> ...
//	waiter:  Wait ──> become the owner ──> Poll ──> Submit ──> give the ownership back ──> Wait ──> ...
//
// A queue does not decide how long to look for completions before a Wait. That is the waiter's business: see Spin.
type Queue interface {
	// Submit takes requests in order and returns how many: fewer than len(reqs) if the queue is full. Invalid requests
	// are taken and complete with an error. It never blocks on the device.
	//
	// Cost: 0 allocs; a batch costs one system call for file devices, one write to a doorbell for polled ones.
	Submit(reqs []Request) int
	// Poll writes completions that have arrived to dst and returns their number. It never blocks.
	//
	// Cost: 0 allocs; no system call if there are completions, or none.
	Poll(dst []Completion) int
	// Wait blocks until there is a completion to poll, until limit is over (< 0: never), until Wake is called, or until
	// the queue is closed. It returns false only if limit is over. With a limit of 0 it looks, and does not block. A
	// completion that has arrived before the call ends it at once, unless the owner has polled that meanwhile. One
	// goroutine at a time, any, may call it. Interrupts and notifications of the kernel are on only while it blocks.
	//
	// Cost: 0 allocs; none while it blocks.
	Wait(limit time.Duration) bool
	// Wake makes the Wait that is under way, or the next one, return true; from any goroutine.
	Wake()
	// Synchronous reports whether Submit completes every request that it takes before it returns. Nobody needs to wait
	// then.
	Synchronous() bool
	// Close waits for outstanding requests and releases the queue; from any goroutine. Completions that were not polled
	// can still be polled. Idempotent.
	Close() error
}

// Await polls a queue, and waits if there is no completion: for limit, or without a limit if that is negative. It
// returns 0 if limit is over, or if the wait has ended early because of Wake or Close. It is for owners that have
// nothing else to do.
//
// Cost: 0 allocs.
func Await(q Queue, dst []Completion, limit time.Duration) int {
	n := q.Poll(dst)
	if n > 0 || limit == 0 || len(dst) == 0 || !q.Wait(limit) {
		return n
	}
	return q.Poll(dst)
}

// Notifier is a Queue that reports completions by a call, so that its user needs no goroutine that blocks in Wait.
type Notifier interface {
	Queue
	// Notify sets a function that the queue calls when a request completes. The queue does not hold locks of Submit or
	// Poll during the call. Notify must be called before the first Submit.
	Notify(f func())
}

// Device is an open drive.
type Device interface {
	Info() Info
	// OpenQueue makes a queue that takes up to depth outstanding requests.
	OpenQueue(depth int) (Queue, error)
	// Healthy returns nil, or the reason why the device cannot serve (it wraps ErrGone, ...). It does no I/O; readiness
	// probes use it.
	Healthy() error
	// Close closes the queues and the device. Idempotent.
	Close() error
}
