// Package uring is a thin wrapper of the kernel's io_uring: a ring of submission
// entries, a ring of completions, registered buffers and files. It knows what
// jbofd's devices need and nothing else; no cgo.
//
//	NextSQE, Prep… ──> SQ ring ──Enter──> kernel ──> CQ ring ──> PeekCQE, SeenCQE
//	                                         └──────> eventfd (if registered and enabled)
//
// # Threads
//
// Goroutines move between threads, and a ring may be filled by one and emptied
// by another, so rings are made without IORING_SETUP_SINGLE_ISSUER and without
// DEFER_TASKRUN. COOP_TASKRUN is left out as well: with it a completion waits
// until the thread that submitted enters the kernel again, and a Go thread may
// compute for milliseconds before it does, while the goroutine that waits for
// the completion sits on another one. The kernel cancels what a thread has in
// flight when the thread ends; Go ends threads only for goroutines that exit
// while locked to theirs, so such a goroutine must not submit.
//
// # Requests that wait
//
// What the kernel cannot begin without waiting, such as a write for which the file system allocates space, or a request
// for a block device whose queue is full, it hands to threads of its own (io-wq). Each thread that submits has a pool
// of them for all rings, by default of four for each processor. So the requests of a device that hangs would soon have
// all of them. New lets the threads have more. A file must support RWF_NOWAIT: otherwise the kernel may begin a request
// although it waits, and whoever submits hangs.
//
// # Waiting
//
// Three ways to wait for a completion were measured from Go; see Ring.Wait,
// RegisterEventfd and docs/decisions/0002-waiting-for-io-uring.md.
package uring

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// ErrUnavailable is wrapped by New if the kernel does not offer io_uring to us:
// it has none (ENOSYS), forbids it (EPERM and EACCES, from seccomp profiles or
// sysctl kernel.io_uring_disabled), or is too old (before 5.19).
var ErrUnavailable = errors.New("io_uring is not available")

// Opcodes. Source: include/uapi/linux/io_uring.h, enum io_uring_op.
const (
	opNop        = 0
	opReadFixed  = 4
	opWriteFixed = 5
	opRead       = 22
	opWrite      = 23
)

// Flags and commands. Source: include/uapi/linux/io_uring.h.
const (
	setupCQSize    = 1 << 3
	setupClamp     = 1 << 4
	setupSubmitAll = 1 << 7

	featSingleMmap = 1 << 0
	featNoDrop     = 1 << 1
	featExtArg     = 1 << 8
	featRsrcTags   = 1 << 10
	featLinkedFile = 1 << 12 // with kernel 5.17; stands for "not ancient"

	enterGetEvents = 1 << 0
	enterExtArg    = 1 << 3

	sqeFixedFile = 1 << 0

	cqEventfdDisabled = 1 << 0

	unregisterBuffers     = 1
	registerFiles         = 2
	unregisterFiles       = 3
	registerEventfd       = 4
	registerBuffers2      = 15
	registerBuffersUpdate = 16
	registerMaxWorkers    = 19
	rsrcRegisterSparse    = 1 << 0

	// maxWorkers is how many requests of all devices may wait in the kernel, each in a thread, before the devices get
	// into each other's way. More are outstanding only with more than sixteen drives and the longest queues.
	maxWorkers = 16 * 4096

	// MaxBuffers is the kernel's bound on a table of registered buffers
	// (IORING_MAX_REG_BUFFERS).
	MaxBuffers = 1 << 14
)

// SQE is a submission entry, struct io_uring_sqe; fill it with a Prep method and
// set UserData.
type SQE struct {
	opcode   uint8
	flags    uint8
	ioprio   uint16
	fd       int32
	off      uint64
	addr     uint64
	len      uint32
	opFlags  uint32
	UserData uint64
	bufIndex uint16
	persona  uint16
	splice   int32
	_        [2]uint64
}

// CQE is a completion entry, struct io_uring_cqe.
type CQE struct {
	UserData uint64
	// Res is the system call's result, a negative errno on failure.
	Res   int32
	Flags uint32
}

// sqOffsets and cqOffsets are struct io_sqring_offsets and io_cqring_offsets,
// params is struct io_uring_params.
type sqOffsets struct {
	head, tail, ringMask, ringEntries, flags, dropped, array, _ uint32
	_                                                           uint64
}

type cqOffsets struct {
	head, tail, ringMask, ringEntries, overflow, cqes, flags, _ uint32
	_                                                           uint64
}

type params struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32
	_                                                                      [3]uint32
	sq                                                                     sqOffsets
	cq                                                                     cqOffsets
}

// rsrcRegister and rsrcUpdate2 are the arguments of buffer registration.
type rsrcRegister struct {
	nr, flags  uint32
	_          uint64
	data, tags uint64
}

type rsrcUpdate2 struct {
	offset, _  uint32
	data, tags uint64
	nr, _      uint32
}

// Ring is one io_uring instance. The submission side (NextSQE, Enter with
// submit) and the completion side (PeekCQE, SeenCQE, Enter without submit) may be
// used by two goroutines; each side by one at a time.
type Ring struct {
	fd             int
	rings, sqesMap []byte // mmaps

	// Submission side.
	sqHead, sqTail *atomic.Uint32 // shared with the kernel, which moves the head
	sqes           []SQE
	sqMask         uint32
	localTail      uint32 // entries handed out by NextSQE
	submitted      uint32 // entries the kernel has taken
	// published orders the submission side before the completion side; see PeekCQE.
	published atomic.Uint32

	// Completion side.
	cqHead, cqTail *atomic.Uint32 // the kernel moves the tail
	cqFlags        *atomic.Uint32
	cqes           []CQE
	cqMask         uint32
}

// New makes a ring with room for that many submissions (rounded up to a power of
// two) and twice as many completions.
//
// Errors: ErrUnavailable; or the kernel's, such as ENOMEM.
func New(entries int) (*Ring, error) {
	p := params{flags: setupClamp | setupCQSize | setupSubmitAll, cqEntries: uint32(2 * entries)}
	fd, err := setup(uint32(entries), &p)
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES),
		errors.Is(err, unix.EINVAL):
		return nil, fmt.Errorf("%w: io_uring_setup: %w", ErrUnavailable, err)
	case errors.Is(err, unix.ENOMEM):
		return nil, fmt.Errorf("io_uring_setup: %w (RLIMIT_MEMLOCK counts rings and registered buffers of all "+
			"processes of a user)", err)
	case err != nil:
		return nil, fmt.Errorf("io_uring_setup: %w", err)
	}
	const need = featSingleMmap | featNoDrop | featExtArg | featRsrcTags | featLinkedFile
	if p.features&need != need {
		unix.Close(fd)
		return nil, fmt.Errorf("%w: kernel features are %#x, need %#x (Linux 5.19 or later)", ErrUnavailable,
			p.features, need)
	}
	r := &Ring{fd: fd}
	if err := r.mapRings(&p); err != nil {
		return nil, errors.Join(fmt.Errorf("io_uring mmap: %w", err), r.Close())
	}
	if err := r.raiseWorkers(); err != nil {
		return nil, errors.Join(fmt.Errorf("more kernel threads for io_uring: %w", err), r.Close())
	}
	return r, nil
}

// Close releases the ring. Requests in flight are cancelled or finish on their
// own time: wait for them first, they use the caller's memory. Idempotent.
func (r *Ring) Close() error {
	if r.fd < 0 {
		return nil
	}
	r.unregister()
	var errs []error
	for _, m := range []*[]byte{&r.rings, &r.sqesMap} {
		if *m != nil {
			errs = append(errs, unix.Munmap(*m))
			*m = nil
		}
	}
	errs = append(errs, unix.Close(r.fd))
	r.fd = -1
	return errors.Join(errs...)
}

// Entries is how many submissions the ring has room for.
func (r *Ring) Entries() int { return len(r.sqes) }

// NextSQE returns the next free submission entry, cleared, or nil if the ring is
// full. It is handed to the kernel by the next Enter.
func (r *Ring) NextSQE() *SQE { // hot: 0 allocs
	if r.localTail-r.sqHead.Load() >= uint32(len(r.sqes)) {
		return nil
	}
	s := &r.sqes[r.localTail&r.sqMask]
	r.localTail++
	*s = SQE{}
	return s
}

// Unsubmitted is how many entries the kernel has not taken yet.
func (r *Ring) Unsubmitted() int { return int(r.localTail - r.submitted) }

// Submit hands all prepared entries to the kernel with one system call and
// returns how many it took.
//
// Errors: EAGAIN and EBUSY, when the kernel is short of memory or completions
// have overflowed: the rest stays prepared; try again after reaping.
func (r *Ring) Submit() (int, error) { // hot: 0 allocs
	n := r.localTail - r.submitted
	if n == 0 {
		return 0, nil
	}
	r.published.Store(r.localTail)
	r.sqTail.Store(r.localTail)
	for {
		took, err := enter(r.fd, n, 0, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, err
		}
		r.submitted += uint32(took)
		return took, nil
	}
}

// Wait blocks in the kernel until a completion is there or timeoutNS have passed
// (< 0: for ever). The Go scheduler notices the blocked thread only after up to
// 10 ms; prefer RegisterEventfd.
//
// Errors: ETIME, EINTR.
func (r *Ring) Wait(timeoutNS int64) error { return wait(r.fd, timeoutNS) }

// PeekCQE returns the oldest completion not yet seen, or nil. It stays valid
// until SeenCQE.
func (r *Ring) PeekCQE() *CQE { // hot: 0 allocs
	head := r.cqHead.Load()
	if head == r.cqTail.Load() {
		return nil
	}
	// What the submitter did before Submit happened before the completion, through
	// the kernel. This load says so in Go's memory model.
	r.published.Load()
	return &r.cqes[head&r.cqMask]
}

// SeenCQE gives the entry of the last PeekCQE back to the kernel.
func (r *Ring) SeenCQE() { r.cqHead.Store(r.cqHead.Load() + 1) } // hot: 0 allocs

// EnableEventfd turns the eventfd's notifications on or off, without a system
// call. After turning them on, look at the completions once more before waiting.
func (r *Ring) EnableEventfd(on bool) { // hot: 0 allocs
	if on {
		r.cqFlags.And(^uint32(cqEventfdDisabled))
	} else {
		r.cqFlags.Or(cqEventfdDisabled)
	}
}

// PrepNop prepares an entry that only completes.
func (s *SQE) PrepNop() { s.opcode = opNop }

// PrepRead prepares a read into b, which must stay where it is and reachable
// until the completion.
func (s *SQE) PrepRead(fd int, b []byte, off int64) {
	s.opcode, s.fd, s.addr, s.len, s.off = opRead, int32(fd), address(b), uint32(len(b)), uint64(off)
}

// PrepWrite prepares a write of b with RWF_… flags; b as in PrepRead.
func (s *SQE) PrepWrite(fd int, b []byte, off int64, rwf uint32) {
	s.opcode, s.fd, s.addr, s.len, s.off, s.opFlags = opWrite, int32(fd), address(b), uint32(len(b)), uint64(off), rwf
}

// UseBuffer says that the entry's memory lies in registered buffer index.
func (s *SQE) UseBuffer(index int) {
	if s.opcode == opRead {
		s.opcode = opReadFixed
	} else {
		s.opcode = opWriteFixed
	}
	s.bufIndex = uint16(index)
}

// UseFile says that the entry's fd is the index of a registered file; see RegisterFile.
func (s *SQE) UseFile() { s.flags |= sqeFixedFile }
