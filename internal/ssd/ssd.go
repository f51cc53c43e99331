// Package ssd is the house's one view of a drive: a device with a size and a
// few properties, and queues on it that take batches of requests and return
// batches of completions.
//
// Sub-packages implement it: mem (DRAM), file (regular files and block
// devices, io_uring or worker threads), model (an emulated drive with a
// flash drive's timing) and fault (wraps another device with
// seeded errors, delays, and torn or lost unflushed writes). The label
// package keeps the on-drive table of extents.
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
	// Write stores Buf[:Len]. With FUA the completion means durable.
	Write
	// Flush makes every write completed before its submission durable.
	Flush
	// Deallocate tells the device that the range holds nothing of worth. It is
	// advice: what the range reads as afterwards is Info.DeallocatedReadsZero.
	Deallocate
	// WriteZeroes makes the range read as zeroes. With Unmap in Flags the
	// device may free the space behind it.
	WriteZeroes
)

var opNames = [...]string{"read", "write", "flush", "deallocate", "write_zeroes"}

// Ops is how many operations there are; valid ones are below it.
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
	// FUA, on a Write or WriteZeroes: complete only when durable.
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
	// Buf holds the data of a Read or Write, len(Buf) >= Len. It belongs to the
	// queue from Submit until its completion was polled. Buffers from bufpool are
	// page-aligned and registered with the device; others may be copied.
	Buf []byte
	// Tag comes back in the Completion. The caller keeps tags unique among the
	// requests outstanding on one queue.
	Tag uint64
}

// Completion is the answer to one Request.
type Completion struct {
	Tag uint64
	// Err is nil or wraps one of the sentinels below.
	Err error
	// LatencyNS is the time from submission to the device until its completion.
	LatencyNS int64
}

// A completion's errors. A device never returns others bare: unknown causes
// wrap ErrMedia.
var (
	// ErrMedia: the device could not read or write the range (EIO and kin).
	ErrMedia = errors.New("media error")
	// ErrNoSpace: the file system or thin device behind it is full (ENOSPC, EDQUOT).
	ErrNoSpace = errors.New("no space left on the device")
	// ErrGone: the device has vanished or was closed (ENODEV, ENXIO, ESHUTDOWN);
	// every later request fails likewise.
	ErrGone = errors.New("device is gone")
	// ErrRange: offset or length outside the device or not in whole blocks.
	ErrRange = errors.New("range outside the device or not in whole blocks")
	// ErrUnsupported: the device does not know the operation.
	ErrUnsupported = errors.New("operation not supported by the device")
)

// Info describes a device. It does not change while the device is open.
type Info struct {
	// Name is the device's name in the configuration.
	Name string
	// Backend is "mem", "file", ...; Path is what it stands on, if anything.
	Backend, Path string
	// Model and Serial identify the drive where it says so; Serial is stable
	// over restarts or empty.
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
	// Deallocates: Deallocate does something. DeallocatedReadsZero: a deallocated
	// range reads as zeroes until written.
	Deallocates, DeallocatedReadsZero bool
	// Engine names how I/O is done: "mem", "io_uring", "threads".
	Engine string
}

// Queue is one path for requests to a device. One goroutine at a time calls
// Submit; one goroutine at a time calls Poll (it may be another one).
type Queue interface {
	// Submit hands over requests in order and returns how many were taken: fewer
	// than len(reqs) when the queue is full. Invalid requests are taken and
	// complete with an error. It never blocks on the device.
	//
	// Cost: 0 allocs; one system call a batch for file devices.
	Submit(reqs []Request) int
	// Poll writes completions to dst and returns how many. With wait > 0 it blocks
	// up to that long for the first one; wait < 0 blocks until there is one, Wake is
	// called or the device is closed (then 0).
	//
	// Cost: 0 allocs.
	Poll(dst []Completion, wait time.Duration) int
	// Wake makes a blocked Poll return early; from any goroutine.
	Wake()
	// Synchronous reports that Submit has completed every request it took by the
	// time it returns, so that Poll never needs to wait.
	Synchronous() bool
	// Close waits for outstanding requests and releases the queue. Idempotent.
	Close() error
}

// Device is an open drive.
type Device interface {
	Info() Info
	// OpenQueue makes a queue that takes up to depth outstanding requests.
	OpenQueue(depth int) (Queue, error)
	// Healthy returns nil or why the device cannot serve (wraps ErrGone, ...); it
	// does no I/O. Readiness probes use it.
	Healthy() error
	// Close closes the queues and the device. Idempotent.
	Close() error
}
