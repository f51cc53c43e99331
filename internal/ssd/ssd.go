// Package ssd defines the interface of a drive: a device with a size and a few properties, and queues on it that take
// batches of requests and return batches of completions.
//
// Sub-packages implement it: mem (DRAM), file (regular files and block devices, with io_uring or worker threads), model
// (an emulated drive with the timing of a flash drive) and fault (a wrapper that injects seeded errors, delays, and
// torn or lost unflushed writes). Package label keeps the on-drive table of extents.
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
}

// Queue is one path for requests to a device. One goroutine at a time calls
// Submit; one goroutine at a time calls Poll (it may be another one).
type Queue interface {
	// Submit takes requests in order and returns how many: fewer than len(reqs) if the queue is full. Invalid requests
	// are taken and complete with an error. It never blocks on the device.
	//
	// Cost: 0 allocs; one system call a batch for file devices.
	Submit(reqs []Request) int
	// Poll writes completions to dst and returns their number. With wait > 0 it blocks up to that long for the first
	// one. With wait < 0 it blocks until there is one, or until Wake is called or the device is closed; then it returns
	// 0.
	//
	// Cost: 0 allocs.
	Poll(dst []Completion, wait time.Duration) int
	// Wake makes a blocked Poll return early; from any goroutine.
	Wake()
	// Synchronous reports whether Submit completes every request that it takes before it returns. Poll then never needs
	// to wait.
	Synchronous() bool
	// Close waits for outstanding requests and releases the queue. Idempotent.
	Close() error
}

// Notifier is a Queue that reports completions by a call, so that its user needs no goroutine that blocks in Poll.
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
