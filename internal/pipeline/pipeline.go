// Package pipeline decides which I/O of one SSD goes to the device next. It is
// a machine: it does no I/O, reads no clock and takes no lock; the SSD's owner
// drives it with the time and one goroutine at a time.
//
// FIFO is the vanilla policy: strict arrival order, limited only by the
// device's queue depth. It is what plain targets do and the base that fairer
// policies are measured against.
package pipeline

import "errors"

// Tag names one I/O between Enqueue and Complete. The caller chooses tags below
// the capacity, each at most once at a time.
type Tag uint32

// IO is what a policy needs to know of a request.
type IO struct {
	Tag Tag
	// Tenant is who pays.
	Tenant uint32
	Op     Op
	// LenBytes is the size of the transfer; 0 for a flush.
	LenBytes int64
}

// ErrQueueFull: as many I/Os are queued as the policy has room for; the caller
// keeps the I/O and offers it again after a Complete.
var ErrQueueFull = errors.New("pipeline: queue full")

// FIFO dispatches in order of arrival.
type FIFO struct {
	queue []IO // ring, capacity a power of two
	mask  uint32
	// logHead and logTail count I/Os dispatched and enqueued.
	// Invariant: logTail-logHead <= len(queue).
	logHead, logTail uint32
	inflight         int
	depth            int
}

// NewFIFO makes a policy with room for capacity queued I/Os (rounded up to a
// power of two) and at most depth outstanding at the device.
func NewFIFO(capacity, depth int) *FIFO {
	n := 1
	for n < capacity {
		n <<= 1
	}
	return &FIFO{queue: make([]IO, n), mask: uint32(n - 1), depth: depth}
}

// Enqueue queues io. Errors: ErrQueueFull.
//
// hot: 0 allocs
func (f *FIFO) Enqueue(_ int64, io IO) error {
	if f.logTail-f.logHead == uint32(len(f.queue)) {
		return ErrQueueFull
	}
	f.queue[f.logTail&f.mask] = io
	f.logTail++
	return nil
}

// Dispatch appends to dst the I/Os that may go to the device now.
//
// hot: 0 allocs, given room in dst
func (f *FIFO) Dispatch(_ int64, dst []Tag) []Tag {
	for f.inflight < f.depth && f.logHead != f.logTail {
		dst = append(dst, f.queue[f.logHead&f.mask].Tag)
		f.logHead++
		f.inflight++
	}
	return dst
}

// Complete says that a dispatched I/O is done, one way or another.
//
// hot: 0 allocs
func (f *FIFO) Complete(_ int64, _ Tag) {
	if f.inflight == 0 {
		panic("pipeline: completion without dispatch")
	}
	f.inflight--
}

// Pause says that a dispatched I/O waits for something other than the SSD, memory
// or its host's data: its place at the device is free meanwhile. A host that
// never sends its data would otherwise stop all others.
//
// hot: 0 allocs
func (f *FIFO) Pause(_ int64, _ Tag) {
	if f.inflight == 0 {
		panic("pipeline: pause without dispatch")
	}
	f.inflight--
}

// Resume ends a Pause: the I/O goes on at once, for which later ones wait.
//
// hot: 0 allocs
func (f *FIFO) Resume(_ int64, _ Tag) { f.inflight++ }

// NextWake is the time at which Dispatch may have more without any event
// before it; a FIFO never waits for time.
func (f *FIFO) NextWake() (at int64, ok bool) { return 0, false }

// Queued is how many I/Os wait to be dispatched.
func (f *FIFO) Queued() int { return int(f.logTail - f.logHead) }

// Inflight is how many were dispatched and not completed.
func (f *FIFO) Inflight() int { return f.inflight }
