// Package hostrdma is the state machine of the host's end of one NVMe/RDMA queue pair: commands and completions of work
// requests go in, work requests and completions of commands come out. It is pure: its driver (hostverbs.Conn) has the
// device, the goroutines and the locks.
//
//	Submit ──> slot ──> FIFO ──> Sends ──> (post) ──> Sent ──> in flight
//	                      ^ memory                                │ SEND completed
//	Completions <── done <──┴── judge <── Completed <── (poll) <──┴── response received
//	                              └─────> Recvs ──> (post) ──> Posted
//
// Each slot has a capsule in registered memory, with room for in-capsule data behind the SQE. Other data is described
// to the target by a keyed SGL. It lies in the caller's memory if that is registered and Options.Direct is set;
// otherwise memory is borrowed for the command (Memory). Commands for which there is no memory wait, in order.
//
// A command is finished when its response has arrived and its SEND has completed, because only then the device no
// longer reads the capsule. SENDs complete in order, so that not each of them must request a completion.
//
// The target is not trusted: each response is checked, and the first violation ends the queue.
//
// Source: NVMe RDMA Transport 1.0, sections 2 and 3; Linux's drivers/nvme/host/rdma.c.
package hostrdma

import (
	"jbofd/client/internal/host"
	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

// Sizes in bytes unless said otherwise.
const (
	// responseLen is the size of a response capsule, which is a CQE. Each has a cache line of its own.
	responseLen    = nvme.CQESize
	responseStride = 64
	capsuleAlign   = 64
	// recvBatch is how many receives are collected before they are posted again.
	recvBatch = 16
	// sendBatch bounds the work requests of one call of Sends. Every signalEvery-th SEND and the last one of a batch
	// request a completion.
	sendBatch   = 64
	signalEvery = 16
)

// recvBit marks the ID of a receive, which has the index in bits 15:0 and the generation in bits 47:16. The ID of a
// SEND is the CID of the command.
const recvBit = 1 << 63

// Memory provides registered memory for the data of commands.
type Memory interface {
	// Find returns the remote address and key of b, if b lies in registered memory.
	Find(b []byte) (addr uint64, rkey uint32, ok bool)
	// Get allocates n bytes for the command in a slot; Put frees them. If Get returns false, it must succeed after
	// another command of this queue has freed its memory.
	//
	// Get must not fail for the first two commands of a queue that holds no memory, so that a fused pair can proceed.
	Get(slot uint16, n int) (b []byte, addr uint64, rkey uint32, ok bool)
	Put(slot uint16)
}

// Options configures a QPair.
type Options struct {
	// Depth is the number of commands that may be outstanding, 1 to host.MaxDepth.
	Depth int
	// InCapsuleBytes is how many bytes of data a capsule has room for, and may carry until SetInCapsuleBytes.
	InCapsuleBytes int
	// Region is memory of RegionBytes, registered under Addr and LKey for access by the local device only.
	Region []byte
	Addr   uint64
	LKey   uint32
	// QP is the handle of the queue pair, InlineBytes the size up to which a capsule is posted inline.
	QP          uint64
	InlineBytes int
	// Memory provides the memory for data outside of capsules, MaxBytes the most that one Get may ask for.
	Memory   Memory
	MaxBytes int
	// Direct: the target accesses data in place where Memory.Find finds it. Since it may do so until the command
	// completes, Detach must not be called.
	Direct bool
}

// Recvs returns how many receives a queue of a depth posts at most.
func Recvs(depth int) int { return depth + recvBatch }

// RegionBytes returns how much memory a queue needs for capsules and responses.
func RegionBytes(depth, inCapsuleBytes int) int {
	return depth*capsuleStride(inCapsuleBytes) + Recvs(depth)*responseStride
}

func capsuleStride(inCapsuleBytes int) int {
	return (nvme.SQESize + inCapsuleBytes + capsuleAlign - 1) &^ (capsuleAlign - 1)
}

// slot is the state of one outstanding command. Its SQE is in the capsule.
type slot struct {
	tag    uint64
	result uint64
	// addr and rkey are the remote address and key of the data, outside of a capsule.
	addr   uint64
	rkey   uint32
	length uint32 // of the data
	tick   uint32 // clock of the queue at Submit
	gen    uint16
	sqid   uint16 // of the CQE
	status nvme.Status

	busy      bool
	posted    bool // the SEND of the capsule was posted
	sent      bool // the SEND has completed
	answered  bool // status and result are final
	toHost    bool
	toTarget  bool
	inCapsule bool
	direct    bool // the target accesses the data in the caller's buffer
	borrowed  bool // the data is in memory of Options.Memory
	orphan    bool // the buffer was returned to the caller by Detach
}

// QPair is the state machine. One goroutine at a time may call its methods.
type QPair struct {
	opts      Options
	stride    int // of the capsules
	inCapsule int // how much data a capsule may carry. Invariant: <= opts.InCapsuleBytes
	err       error
	tick      uint32
	slots     []slot
	bufs      [][]byte // the caller's data by slot, while it is needed
	borrowed  [][]byte // memory of Options.Memory by slot
	free      []uint16 // stack of free slots

	waiting  ring // commands that are not yet in a batch
	inFlight ring // posted SENDs of which nothing was heard
	done     ring // finished commands

	// wrs[wrHead:] is what Sends handed out and Sent has not yet taken off.
	wrs      []wr.Send
	wrHead   int
	unsigned int // SENDs since one asked for a completion

	// recvs are receives to post; posted and gens describe all of them, by index.
	recvs      []wr.Recv
	recvPosted []bool
	recvGens   []uint32
	responses  []byte // where they receive to
	respAddr   uint64
}

var _ host.Machine = (*QPair)(nil)

// ring is a queue of slots; each is in it at most once.
type ring struct {
	at      []uint16
	head, n int
}

func (r *ring) push(i uint16) {
	k := r.head + r.n
	if k >= len(r.at) {
		k -= len(r.at)
	}
	r.at[k] = i
	r.n++
}

// peek is the k-th from the front.
func (r *ring) peek(k int) uint16 {
	if k += r.head; k >= len(r.at) {
		k -= len(r.at)
	}
	return r.at[k]
}

func (r *ring) pop() uint16 {
	i := r.at[r.head]
	if r.head++; r.head == len(r.at) {
		r.head = 0
	}
	r.n--
	return i
}

// New returns a queue whose first work requests are its receives. It panics if Depth or Region are out of range.
func New(o Options) *QPair {
	invariants.Check(o.Depth >= 1 && o.Depth <= host.MaxDepth, "hostrdma: Depth out of range")
	invariants.Check(len(o.Region) >= RegionBytes(o.Depth, o.InCapsuleBytes), "hostrdma: Region is too short")
	n := o.Depth
	q := &QPair{
		opts: o, stride: capsuleStride(o.InCapsuleBytes), inCapsule: o.InCapsuleBytes,
		slots: make([]slot, n), bufs: make([][]byte, n), borrowed: make([][]byte, n), free: make([]uint16, n),
		waiting: ring{at: make([]uint16, n)}, inFlight: ring{at: make([]uint16, n)}, done: ring{at: make([]uint16, n)},
		wrs:   make([]wr.Send, 0, sendBatch),
		recvs: make([]wr.Recv, 0, Recvs(n)), recvPosted: make([]bool, Recvs(n)), recvGens: make([]uint32, Recvs(n)),
	}
	for i := range q.free {
		q.free[i] = uint16(n - 1 - i) // slot 0 is handed out first
	}
	q.responses, q.respAddr = o.Region[n*q.stride:], o.Addr+uint64(n*q.stride)
	for i := range q.recvPosted {
		q.addRecv(uint16(i))
	}
	return q
}

// Err returns why the queue has failed, or nil. It wraps host.ErrProtocol for a target that has violated the protocol,
// ErrFlushed for a connection that has ended.
func (q *QPair) Err() error { return q.err }

// Fail ends the queue, the first time.
func (q *QPair) Fail(err error) {
	if q.err == nil {
		q.err = err
	}
}

// Depth implements host.Machine.
func (q *QPair) Depth() int { return len(q.slots) }

// Free implements host.Machine.
func (q *QPair) Free() int { return len(q.free) }

// Outstanding implements host.Machine.
func (q *QPair) Outstanding() int { return len(q.slots) - len(q.free) }

// Waiting returns how many commands wait for memory or are not posted yet.
func (q *QPair) Waiting() int { return q.waiting.n }

// SetInCapsuleBytes sets how many bytes of data a capsule may carry, up to Options.InCapsuleBytes.
func (q *QPair) SetInCapsuleBytes(n int) { q.inCapsule = max(min(n, q.opts.InCapsuleBytes), 0) }

// capsule returns the memory of the capsule of slot i.
func (q *QPair) capsule(i uint16) []byte { return q.opts.Region[int(i)*q.stride:][:q.stride] }

func (q *QPair) sqe(i uint16) *nvme.SQE { return (*nvme.SQE)(q.capsule(i)) }

// Check implements host.Machine.
func (q *QPair) Check(c *host.Command) error { // hot: 0 allocs
	if q.err != nil {
		return host.ErrNotReady
	}
	n := len(c.Data)
	if n == 0 {
		return nil
	}
	toTarget, toHost := host.Direction(&c.SQE)
	if toTarget == toHost {
		return host.ErrDataDirection
	}
	if n <= q.opts.MaxBytes {
		return nil
	}
	if q.opts.Direct && n <= nvme.MaxKeyedLength {
		if _, _, ok := q.opts.Memory.Find(c.Data); ok {
			return nil
		}
	}
	return host.ErrDataLength
}

// Submit accepts a command for a batch of Sends, in the order of Submit calls, as soon as there is memory for its data.
// It returns the CID.
//
// Errors: host.ErrQueueFull, host.ErrNotReady, host.ErrDataDirection, host.ErrDataLength.
//
// Cost: 0 allocs.
func (q *QPair) Submit(c *host.Command) (cid uint16, err error) { // hot: 0 allocs
	if err := q.Check(c); err != nil {
		return 0, err
	}
	if len(q.free) == 0 {
		return 0, host.ErrQueueFull
	}
	i := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	s := &q.slots[i]
	n := len(c.Data)
	*s = slot{tag: c.Tag, length: uint32(n), tick: q.tick, gen: host.NextGeneration(s.gen), busy: true}
	if n != 0 {
		s.toTarget, s.toHost = host.Direction(&c.SQE)
		s.inCapsule = s.toTarget && n <= q.inCapsule
		if q.opts.Direct && !s.inCapsule {
			s.addr, s.rkey, s.direct = q.opts.Memory.Find(c.Data)
		}
	}
	q.bufs[i] = c.Data
	cid = host.CID(i, s.gen)
	e := q.sqe(i)
	*e = c.SQE
	e.SetCID(cid)
	e.SetPSDT(nvme.PSDTSGL)
	q.waiting.push(i)
	return cid, nil
}

// Completions implements host.Machine.
func (q *QPair) Completions(dst []host.Completion) int { // hot: 0 allocs
	n := min(len(dst), q.done.n)
	for k := range n {
		i := q.done.pop()
		s := &q.slots[i]
		c := host.Completion{Tag: s.tag, Result: s.result, Status: s.status, CID: host.CID(i, s.gen), SQID: s.sqid}
		if s.toHost && s.status.OK() {
			c.Received = s.length
		}
		dst[k] = c
		s.busy = false
		q.bufs[i] = nil
		q.free = append(q.free, i)
	}
	return n
}

// Detach implements host.Machine. Memory that was borrowed for the command stays with it until it completes. Data that
// was not copied there yet is copied first.
//
// Cost: copies the data of a write that has not been sent.
func (q *QPair) Detach(cid uint16) bool {
	i := uint16(host.SlotOf(cid))
	if int(i) >= len(q.slots) || !q.slots[i].busy || q.slots[i].gen != host.GenerationOf(cid) {
		return false
	}
	s := &q.slots[i]
	invariants.Check(!s.direct, "hostrdma: a command is detached whose data the target can reach")
	if s.orphan {
		return true
	}
	s.orphan = true
	if s.toTarget && q.isWaiting(i) {
		q.bufs[i] = append([]byte(nil), q.bufs[i]...)
	} else {
		q.bufs[i] = nil
	}
	return true
}

func (q *QPair) isWaiting(i uint16) bool {
	for k := range q.waiting.n {
		if q.waiting.peek(k) == i {
			return true
		}
	}
	return false
}

// Tick implements host.Machine.
func (q *QPair) Tick(admin bool) (oldest uint32) {
	q.tick++
	for i := range q.slots {
		s := &q.slots[i]
		if !s.busy || admin && q.sqe(uint16(i)).Opcode() == nvme.AdminAsyncEvent {
			continue
		}
		oldest = max(oldest, q.tick-s.tick)
	}
	return oldest
}
