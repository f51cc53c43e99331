package drive

import (
	"errors"
	"sync/atomic"

	"jbofd/internal/bufpool"
	"jbofd/internal/fence"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/tenant"
	"jbofd/internal/turn"
	"jbofd/internal/units"
)

// Outcomes of an IO beside those of ssd.Completion.
var (
	// ErrMismatch: Compare or CompareWrite found other data.
	ErrMismatch = errors.New("compare found different data")
	// ErrAborted: Abort took the IO out before it was carried out, or before all of a composed operation was.
	ErrAborted = errors.New("aborted before it was started")
)

// Sink is told of an IO's progress. Its methods are called during a turn of the drive, by the goroutine that runs it:
// they put the IO into a list and return. Admitted and Done report whether Kick must follow the turn.
type Sink interface {
	// Admitted: the pipeline has dispatched an IO with Fetch set, and its buffer is in io.Buf. The sink moves the
	// host's data there and hands the IO back with Drive.Fetched.
	Admitted(io *IO) (kick bool)
	// Done: the IO is over; Err says how, and Buf, if any, is the sink's.
	Done(io *IO) (kick bool)
	// Kick follows a turn in which a call has asked for it. It may take locks.
	Kick()
}

// States of an IO. Abort changes stateQueued and stateRunning to stateAborted; all other changes are the Drive's.
const (
	stateNew      = iota
	stateQueued   // waits for the pipeline, for memory, a scratch buffer or a claim: Abort takes it out
	stateRunning  // a composed operation with a request at the device, or about to be: Abort ends it after that request
	stateAborted  // Done with ErrAborted will follow
	stateAdmitted // runs to completion: data moves, or the device works; also when it is Done
)

// IO is one request to an SSD. Its submitter allocates it once (see Init) and
// uses it again and again; between Submit and Done it belongs to the Drive.
type IO struct {
	Op    pipeline.Op
	Flags ssd.Flags
	// Fetch: the data is still with the host; the sink is asked for it when the IO
	// is admitted.
	Fetch bool
	// Offset and Len are the range on the device, in whole blocks.
	Offset units.DriveOffset
	Len    units.Bytes
	// Ranges of a DeallocateRanges; the submitter's memory.
	Ranges []pipeline.Range
	// Account pays for the buffer.
	Account *bufpool.Account
	// Tenant is the pipeline's number for who pays.
	Tenant tenant.ID
	// Credited: the host keeps to the tenant's credit.
	Credited bool
	// Pass says in whose name the IO is done. Once it is stale no request of the IO is handed to the device any
	// more, and the IO ends with fence.ErrStale. Requests of it that the device has already are not stopped: a
	// DeallocateRanges may have done some of its ranges, a Compare has read. A CompareWrite has written
	// everything or nothing.
	Pass fence.Pass
	// Extent is the right to what the IO addresses, of a namespace for instance; it works as Pass does.
	Extent fence.Pass
	// Unabortable: nobody calls Abort for the IO, so that its state needs no atomic instructions. It does not change
	// after the first Submit. AbortStale takes the IO out nevertheless.
	Unabortable bool
	// Buf holds the data. If it is empty and there is data to move, the Drive provides one from the pool
	// when the IO is admitted; otherwise it is the submitter's, of the pool or not (then only Buf.B is set).
	// After Done it is the sink's, to return to the pool or not.
	Buf bufpool.Buf
	// Err is the outcome, set before Done: nil, ErrMismatch, ErrAborted, fence.ErrStale or a
	// device's error.
	Err error
	// CreditUnits is, when Done, what the tenant should have outstanding at this SSD at
	// most, in units of 4 KiB; 0: the policy does not say.
	CreditUnits int
	// Slot is the sink's own number for the IO.
	Slot uint32
	// AdmittedNS is when the pipeline let the IO in, on the clock of the Drive's Env.
	AdmittedNS int64

	// Next links the IO into the sink's own list after Admitted or Done.
	Next *IO

	sink   Sink
	waiter bufpool.Waiter
	drive  *Drive
	node   turn.Node[IO] // in a Batch and the inbox
	next   *IO           // in staged and waiting lists
	state  state
	tag    uint32
	epoch  uint32 // of Drive.quiescer
	// begun: the pipeline has dispatched it once. fetched: the sink has handed it back.
	begun, fetched bool
	// paused: it does not occupy the pipeline's window, because it waits for what waits says.
	paused bool
	waits  uint8
	// scratch is the index of the scratch buffer that the IO holds, or -1.
	scratch int8
	// composed is the operation, if it takes more than one device request. Its state: done is how much of the range was
	// read, nextRange the index in Ranges, and writing says that a CompareWrite's compare has succeeded.
	composed  composed
	done      units.Bytes
	nextRange int
	writing   bool
	// request is the device request of a composed operation that is under way.
	request struct {
		op       ssd.Op
		lenBytes int64
	}
	claimed claim
	// latencyNS is the device's latency of the last request.
	latencyNS int64
}

// stale reports whether no request of the IO may be handed to the device any more.
//
// hot: 0 allocs
func (io *IO) stale() bool { return io.Pass.Stale() || io.Extent.Stale() }

// staleAt is stale for the moment at which a request of the IO would be handed to the device.
//
// hot: 0 allocs
func (io *IO) staleAt(nowNS int64) bool { return io.Pass.StaleAt(nowNS) || io.Extent.Stale() }

// whyAborted is the outcome of an IO in stateAborted, which Abort or AbortStale has brought it to.
func (io *IO) whyAborted() error {
	if io.stale() {
		return fence.ErrStale
	}
	return ErrAborted
}

// Init prepares an IO for use by sink; once, before its first Submit.
func (io *IO) Init(sink Sink, slot uint32) {
	io.sink, io.Slot, io.node.Item = sink, slot, io
	io.waiter.Wake = func() { io.drive.resubmit(io) }
	for i := range io.claimed.nodes {
		io.claimed.nodes[i].io = io
	}
}

// begin prepares an IO that is submitted to d.
//
// hot: 0 allocs
func (io *IO) begin(d *Drive) {
	io.drive, io.Err, io.composed = d, nil, composedOps[io.Op]
	io.begun, io.fetched, io.paused, io.writing = false, false, false, false
	io.waits, io.scratch, io.done, io.nextRange, io.latencyNS = waitsForNothing, -1, 0, 0, 0
	io.state.Store(io, stateQueued)
}

// state is the state of an IO. That of an Unabortable IO is changed only by its submitter, before Submit, and during
// turns.
type state struct {
	shared atomic.Uint32
	own    uint32
}

// Load returns the state. // hot: 0 allocs
func (s *state) Load(io *IO) uint32 {
	if io.Unabortable {
		return s.own
	}
	return s.shared.Load()
}

// Store sets the state. // hot: 0 allocs
func (s *state) Store(io *IO, v uint32) {
	if io.Unabortable {
		s.own = v
		return
	}
	s.shared.Store(v)
}

// CompareAndSwap changes the state from old to v, or reports that it is another one. // hot: 0 allocs
func (s *state) CompareAndSwap(io *IO, old, v uint32) bool {
	if !io.Unabortable {
		return s.shared.CompareAndSwap(old, v)
	}
	if s.own != old {
		return false
	}
	s.own = v
	return true
}

// Sink is the sink that Init was given.
func (io *IO) Sink() Sink { return io.sink }

// dataBytes is how large a buffer the IO needs.
func (io *IO) dataBytes() units.Bytes {
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
	var b Batch
	b.Add(io)
	io.drive.Fetched(&b)
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

// drop takes io out.
func (l *list) drop(io *IO) {
	var prev *IO
	for o := l.first; o != io; o = o.next {
		prev = o
	}
	l.remove(prev, io)
}

// remove takes io out, which stands behind prev; prev is nil if it is the first.
func (l *list) remove(prev, io *IO) {
	if prev == nil {
		l.first = io.next
	} else {
		prev.next = io.next
	}
	if l.last == io {
		l.last = prev
	}
	io.next = nil
	l.n--
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
