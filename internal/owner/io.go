package owner

import (
	"errors"
	"sync/atomic"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// Outcomes of an IO beside those of ssd.Completion.
var (
	// ErrMismatch: Compare or CompareWrite found other data.
	ErrMismatch = errors.New("compare found different data")
	// ErrAborted: Abort took the IO out before it was admitted.
	ErrAborted = errors.New("aborted before it was started")
)

// Sink is told of an IO's progress. Its methods are called by whichever
// goroutine drives the SSD at that moment: they hand the IO on and return. For
// Admitted and Done they report whether the sink must be kicked once the batch is
// over.
type Sink interface {
	// Admitted: the SSD has let an IO with Fetch set in; its buffer is in io.Buf.
	// The sink moves the host's data there and hands the IO back with Owner.Fetched.
	Admitted(io *IO) (kick bool)
	// Done: the IO is over; Err says how, and Buf, if any, is the sink's.
	Done(io *IO) (kick bool)
	// Kick follows a batch of calls of which one asked for it.
	Kick()
}

// States of an IO.
const (
	stateIdle     = iota
	stateQueued   // submitted, not admitted: can be aborted
	stateAborted  // aborted while queued; Done will follow
	stateAdmitted // has its buffer; data moves or the device works
)

// IO is one request to an SSD. Its submitter allocates it once (see Init) and
// uses it again and again; between Submit and Done it belongs to the owner.
type IO struct {
	Op    pipeline.Op
	Flags ssd.Flags
	// Fetch: the data is still with the host; the sink is asked for it when the IO
	// is admitted.
	Fetch bool
	// Offset and Len are bytes on the device, in whole blocks.
	Offset, Len int64
	// Ranges of a DeallocateRanges; the submitter's memory.
	Ranges []pipeline.Range
	// Account pays for the buffer.
	Account *bufpool.Account
	// Tenant is the pipeline's number for who pays.
	Tenant pipeline.Tenant
	// Credited: the host keeps to the tenant's credit.
	Credited bool
	// Buf holds the data. If it is empty and there is data to move, the owner provides one from the pool
	// when the IO is admitted; otherwise it is the submitter's, of the pool or not (then only Buf.B is set).
	// After Done it is the sink's, to return to the pool or not.
	Buf bufpool.Buf
	// Err is the outcome, set before Done: nil, ErrMismatch, ErrAborted or a
	// device's error.
	Err error
	// CreditUnits is, when Done, what the tenant should have outstanding at this SSD at
	// most, in units of 4 KiB; 0: the policy does not say.
	CreditUnits int
	// Slot is the sink's own number for the IO.
	Slot uint32
	// AdmittedNS is when the pipeline let the IO in, on the owner's clock.
	AdmittedNS int64

	// Next links the IO into the sink's own list after Admitted or Done.
	Next *IO

	sink    Sink
	waiter  bufpool.Waiter
	owner   *Owner
	next    *IO // inbox, staged and waiting lists
	state   atomic.Uint32
	fetched bool
	tag     uint32
	at      int64 // progress of a composed operation: bytes done, or range index
	lane    int8  // scratch memory in use, or -1
	staged  bool  // past stage: at the device or about to be
	holders int32 // CompareWrite: overlapping mutations that must finish first
	writing bool  // CompareWrite: the compare succeeded
	locked  bool  // CompareWrite: its range lock is held
	epoch   uint8 // Owner.epoch at its beginning
	// latencyNS sums the device's latencies.
	latencyNS int64
}

// Init prepares an IO for use by sink; once, before its first Submit.
func (io *IO) Init(sink Sink, slot uint32) {
	io.sink, io.Slot = sink, slot
	io.waiter.Wake = func() { io.owner.resubmit(io) }
}

// Sink is who is told of the IO's progress.
func (io *IO) Sink() Sink { return io.sink }

// dataBytes is how large a buffer the IO needs.
func (io *IO) dataBytes() int64 {
	switch io.Op {
	case pipeline.Read, pipeline.Write, pipeline.Compare:
		return io.Len
	case pipeline.CompareWrite:
		return 2 * io.Len
	case pipeline.DeallocateRanges:
		if io.Fetch { // Len is the size of the list of ranges
			return io.Len
		}
	}
	return 0
}

// Writing reports, of a finished CompareWrite, that the compare had succeeded.
func (io *IO) Writing() bool { return io.writing }

// Return gives an admitted IO back to its SSD without the host's data: it is
// done with err.
func (io *IO) Return(err error) {
	io.Err = err
	b := Batch{newest: io, oldest: io}
	io.next = nil
	io.owner.Fetched(&b)
}

func (io *IO) overlaps(other *IO) bool {
	if other.Op == pipeline.DeallocateRanges {
		for _, r := range other.Ranges {
			if io.Offset < r.Offset+r.Len && r.Offset < io.Offset+io.Len {
				return true
			}
		}
		return false
	}
	return io.Offset < other.Offset+other.Len && other.Offset < io.Offset+io.Len
}

// list is an intrusive FIFO of IOs linked by next.
type list struct {
	first, last *IO
	n           int
}

func (l *list) push(io *IO) {
	io.next = nil
	if l.last == nil {
		l.first = io
	} else {
		l.last.next = io
	}
	l.last = io
	l.n++
}

func (l *list) pop() *IO {
	io := l.first
	if io == nil {
		return nil
	}
	l.first = io.next
	if l.first == nil {
		l.last = nil
	}
	io.next = nil
	l.n--
	return io
}
