// Package hostrdma is the host's end of one NVMe/RDMA queue pair as a machine: commands and
// completions of work requests go in, work requests and completions of commands come out.
// It has no goroutine, device, clock or lock; whoever drives it brings those.
//
//	Submit ──> slot ──> FIFO ──> Sends ──> (post) ──> Sent ──> in flight
//	                      ^ memory                                │ SEND completed
//	Completions <── done <──┴── judge <── Completed <── (poll) <──┴── response received
//	                              └─────> Recvs ──> (post) ──> Posted
//
// A slot's capsule lies in registered memory for life, with room for in-capsule data behind
// the SQE. Data that does not travel there is described to the target by a keyed SGL: in the caller's
// memory if the device can reach it and the queue is used in a way that allows it, else in memory that is
// borrowed for the command (Memory). Commands for which there is none wait, in order.
//
// A command is finished when its response has come and its SEND has completed: only then
// the device has let go of the capsule. SENDs complete in order, so not each of them asks for a
// completion.
//
// The target is not trusted: every response is judged, and the first violation ends the
// queue.
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
	// responseLen is a response capsule: a CQE. Each stands in a cache line of its own.
	responseLen    = nvme.CQESize
	responseStride = 64
	capsuleAlign   = 64
	// recvBatch is how many receives gather before they are posted again.
	recvBatch = 16
	// sendBatch bounds the work requests of one Sends; signalEvery is how many SENDs in a row go
	// without asking for a completion, at most, less one. The last of a batch always asks.
	sendBatch   = 64
	signalEvery = 16
)

// recvBit in a work request's ID tells a receive: index in bits 15:0, generation in 47:16. The ID of
// a SEND is the command's CID.
const recvBit = 1 << 63

// Memory is registered memory that commands borrow for their data.
type Memory interface {
	// Find returns where the target finds b, if b lies in memory that the device can
	// reach.
	Find(b []byte) (addr uint64, rkey uint32, ok bool)
	// Get takes n bytes for the command in a slot; false: there are none now, and there will
	// be when another of this queue's commands has given back its own. Put gives them back.
	//
	// It may refuse a queue that holds one or two pieces or more, but never one that holds none:
	// not for two commands, either.
	Get(slot uint16, n int) (b []byte, addr uint64, rkey uint32, ok bool)
	Put(slot uint16)
}

// Options sizes a Queue.
type Options struct {
	// Depth is the number of commands that may be outstanding, 1 to host.MaxDepth.
	Depth int
	// InCapsuleBytes is how much data a capsule has room for, and may carry until
	// SetInCapsuleBytes.
	InCapsuleBytes int
	// Region is registered memory of RegionBytes, which the device knows by Addr and LKey. The
	// device may write to it, the peer must not.
	Region []byte
	Addr   uint64
	LKey   uint32
	// QP is the queue pair's handle, InlineBytes how long a capsule may be that is posted inline.
	QP          uint64
	InlineBytes int
	// Memory is where data lies that is not in the capsule; MaxBytes the most that Get gives.
	Memory   Memory
	MaxBytes int
	// Direct: commands' data may be used in place where Memory finds it. The target can write there until
	// the command completes: such a queue cannot Detach.
	Direct bool
}

// Recvs is how many receives a queue of that depth has posted at most.
func Recvs(depth int) int { return depth + recvBatch }

// RegionBytes is how much memory a queue needs for capsules and responses.
func RegionBytes(depth, inCapsuleBytes int) int {
	return depth*capsuleStride(inCapsuleBytes) + Recvs(depth)*responseStride
}

func capsuleStride(inCapsuleBytes int) int {
	return (nvme.SQESize + inCapsuleBytes + capsuleAlign - 1) &^ (capsuleAlign - 1)
}

// slot is the state of one outstanding command. Its SQE stands in the capsule.
type slot struct {
	tag    uint64
	result uint64
	// addr and rkey are where the target finds the data, if it is direct.
	addr   uint64
	rkey   uint32
	length uint32 // of the data
	tick   uint32 // of the queue, when submitted
	gen    uint16
	status nvme.Status

	busy      bool
	posted    bool // the capsule was handed to the device
	sent      bool // and the device has let go of it
	answered  bool // status and result are final
	toHost    bool
	toTarget  bool
	inCapsule bool
	direct    bool // the data is used where it lies
	borrowed  bool // Memory was given for it
	orphan    bool // the caller has taken its buffer back
}

// Queue is the machine. All its methods belong to one goroutine at a time.
type Queue struct {
	opts      Options
	stride    int // of the capsules
	inCapsule int // how much data a capsule may carry. Invariant: <= opts.InCapsuleBytes
	err       error
	tick      uint32
	slots     []slot
	bufs      [][]byte // the caller's data by slot, while it is needed
	borrowed  [][]byte // what Memory gave, by slot
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

var _ host.Machine = (*Queue)(nil)

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

// New returns a queue all of whose receives are to be posted.
//
// It panics if Options are out of range, which are the caller's to check.
func New(o Options) *Queue {
	invariants.Check(o.Depth >= 1 && o.Depth <= host.MaxDepth, "hostrdma: Depth out of range")
	invariants.Check(len(o.Region) >= RegionBytes(o.Depth, o.InCapsuleBytes), "hostrdma: Region is too short")
	n := o.Depth
	q := &Queue{
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

// Err returns why the queue has failed, or nil; it wraps host.ErrProtocol for a target that
// broke the protocol, ErrFlushed for a connection that has ended.
func (q *Queue) Err() error { return q.err }

// Fail ends the queue, the first time.
func (q *Queue) Fail(err error) {
	if q.err == nil {
		q.err = err
	}
}

// Depth implements host.Machine.
func (q *Queue) Depth() int { return len(q.slots) }

// Free implements host.Machine.
func (q *Queue) Free() int { return len(q.free) }

// Outstanding implements host.Machine.
func (q *Queue) Outstanding() int { return len(q.slots) - len(q.free) }

// Waiting is how many commands wait for memory or for being posted.
func (q *Queue) Waiting() int { return q.waiting.n }

// SetInCapsuleBytes sets how much data a command to the target may carry in its
// capsule, within what there is room for.
func (q *Queue) SetInCapsuleBytes(n int) { q.inCapsule = max(min(n, q.opts.InCapsuleBytes), 0) }

// capsule is slot i's memory.
func (q *Queue) capsule(i uint16) []byte { return q.opts.Region[int(i)*q.stride:][:q.stride] }

func (q *Queue) sqe(i uint16) *nvme.SQE { return (*nvme.SQE)(q.capsule(i)) }

// Check implements host.Machine.
func (q *Queue) Check(c *host.Command) error { // hot: 0 allocs
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

// Submit takes a command: it will be in a batch of Sends, in the order of Submit calls, as
// soon as there is memory for its data. It returns the command's CID.
//
// Errors: host.ErrQueueFull, host.ErrNotReady, host.ErrDataDirection, host.ErrDataLength.
//
// Cost: 0 allocs.
func (q *Queue) Submit(c *host.Command) (cid uint16, err error) { // hot: 0 allocs
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
func (q *Queue) Completions(dst []host.Completion) int { // hot: 0 allocs
	n := min(len(dst), q.done.n)
	for k := range n {
		i := q.done.pop()
		s := &q.slots[i]
		c := host.Completion{Tag: s.tag, Result: s.result, Status: s.status, CID: host.CID(i, s.gen)}
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

// Detach gives the buffer of an outstanding command back to the caller at once: what was
// borrowed for it stays with the command until it completes, and data that has not yet been copied there
// is copied away. It reports false if cid is not outstanding.
//
// Cost: copies the data of a write that has not been sent.
func (q *Queue) Detach(cid uint16) bool {
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

func (q *Queue) isWaiting(i uint16) bool {
	for k := range q.waiting.n {
		if q.waiting.peek(k) == i {
			return true
		}
	}
	return false
}

// Tick implements host.Machine.
func (q *Queue) Tick(admin bool) (oldest uint32) {
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
