// Package hosttcp is the host's end of one NVMe/TCP queue pair as a machine:
// commands and received bytes go in, bytes to send and completions come out.
// It has no goroutine, socket, clock or lock; whoever drives it brings those.
//
//	Submit ──> slot ──> send list ──> SendBufs ──> (writev) ──> Sent
//	                        ^ R2T
//	Completions <── done <──┴── parse <── Received <── (readv) <── RecvBufs
//
// The target is not trusted: every PDU is judged before it touches a buffer,
// and the first violation ends the queue with an error and a TermReq to send.
//
// Data moves without a stop where it can: what a command writes is sent from the
// caller's buffer, and of a large read only the part that arrived together with
// a header passes through the receive buffer.
package hosttcp

import (
	"errors"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// Sizes in bytes unless said otherwise.
const (
	// DefaultRecvBytes is the receive buffer's size if Options names none.
	DefaultRecvBytes = 256 << 10
	minRecvBytes     = 4 << 10
	// sendArenaBytes bounds the headers and small data of one SendBufs batch.
	sendArenaBytes = 64 << 10
	// maxSegments bounds the pieces of one batch; IOV_MAX is 1024.
	maxSegments = 512
	// copyBelow is the size under which data is copied next to its header
	// instead of becoming a piece of its own.
	copyBelow = 512
	// largeData is the C2HData size from which on the receive buffer is kept short so
	// that the rest of the data can be read straight into its place.
	largeData = 16 << 10
	// shortRecv is that short length.
	shortRecv = 4 << 10
)

// ErrTermReq is wrapped by the queue's error when the target sent a C2HTermReq.
var ErrTermReq = errors.New("the target terminated the connection")

// Options sizes a Queue.
type Options struct {
	// Depth is the number of commands that may be outstanding, 1 to host.MaxDepth. The
	// submission queue must have one entry more (SQSIZE, which is 0-based, is Depth).
	Depth int
	// HeaderDigest and DataDigest are asked for; a target that answers otherwise is
	// refused, as Linux does.
	HeaderDigest, DataDigest bool
	// MaxR2T is how many R2Ts per command the target may have outstanding; 0 means 1.
	MaxR2T int
	// InCapsuleBytes is how much data may travel in a command capsule; see
	// SetInCapsuleBytes.
	InCapsuleBytes int
	// RecvBytes is the receive buffer's size; 0 means DefaultRecvBytes.
	RecvBytes int
}

// slot is the state of one outstanding command.
type slot struct {
	sqe    nvme.SQE
	tag    uint64
	result uint64
	length uint32 // of the data
	// received is how much C2HData has been placed or is being placed; the next
	// DATAO. Invariant: received <= length.
	received uint32
	// granted is how much data R2Ts have asked for; the next R2TO. Invariant: granted <= length.
	granted uint32
	tick    uint32 // of the queue, when submitted
	gen     uint16
	// refs counts the PDUs on the send list or in the current batch that need the slot
	// or its data: the capsule and one for every R2T. A slot is done when it is
	// answered and refs is 0. Invariant: refs <= 1+MaxR2T.
	refs   uint16
	status nvme.Status

	busy      bool
	unsent    bool // the capsule is still on the send list
	answered  bool // status and result are final
	toHost    bool
	toTarget  bool
	inCapsule bool
	orphan    bool // the caller has taken its buffer back
	badDigest bool
}

// sendItem is a promise on the send list: a capsule, or the data an R2T asked for.
type sendItem struct {
	slot      uint16
	ttag      uint16
	isData    bool
	off, left uint32 // of the data, if isData
}

// piece says what a segment of the batch is part of.
type piece struct {
	slot uint16
	// last: when this segment is sent, the slot loses a ref.
	last bool
	// dataOff is the segment's place in the slot's data, or -1 if it lies in the arena.
	dataOff int64
}

type recvState uint8

const (
	recvIC     recvState = iota // waiting for the ICResp
	recvHeader                  // between PDUs
	recvData                    // within a C2HData's data
	recvDigest                  // at its data digest
	recvDead                    // failed; err says why
)

// Queue is the machine. All its methods belong to one goroutine at a time.
type Queue struct {
	opts     Options
	maxR2T   uint16
	rx, tx   pdu.Format // target to host, host to target
	maxH2C   uint32     // MAXH2CDATA of the ICResp
	recv     recvState
	err      error
	tick     uint32
	slots    []slot
	bufs     [][]byte // data by slot
	free     []uint16 // stack of free slots
	done     []uint16 // answered slots in order, a ring of len(slots)
	doneHead int
	doneLen  int

	// Sending. list is a ring; batch is what SendBufs handed out and Sent has not
	// yet taken off: segs[segHead:], each described by pieces.
	list              []sendItem
	listHead, listLen int
	arena             []byte // headers, digests, padding, small data of the batch
	segs              [][]byte
	pieces            []piece
	segHead           int
	// openSeg: the last segment lies at the end of the arena and may grow.
	openSeg bool

	// Receiving. buf[rpos:wpos] is received and not parsed.
	buf        []byte
	rpos, wpos int
	direct     int    // length of the piece of user memory that RecvBufs handed out
	dataLen    uint32 // DATAL of the latest C2HData
	dataSlot   uint16 // of the C2HData in progress
	dataLeft   uint32
	dataFlags  uint8
	dataCRC    uint32
}

// New returns a queue whose first bytes to send are an ICReq.
//
// It panics if Depth is out of range, which is the caller's to check.
func New(o Options) *Queue {
	if o.Depth < 1 || o.Depth > host.MaxDepth {
		panic("hosttcp: Depth out of range")
	}
	if o.RecvBytes == 0 {
		o.RecvBytes = DefaultRecvBytes
	}
	o.RecvBytes = max(o.RecvBytes, minRecvBytes)
	o.MaxR2T = min(max(o.MaxR2T, 1), 64)
	n := o.Depth
	q := &Queue{
		opts:   o,
		maxR2T: uint16(o.MaxR2T),
		slots:  make([]slot, n),
		bufs:   make([][]byte, n),
		free:   make([]uint16, n),
		done:   make([]uint16, n),
		list:   make([]sendItem, n*(1+o.MaxR2T)),
		arena:  make([]byte, 0, sendArenaBytes),
		segs:   make([][]byte, 0, maxSegments),
		pieces: make([]piece, 0, maxSegments),
		buf:    make([]byte, o.RecvBytes),
	}
	for i := range q.free {
		q.free[i] = uint16(n - 1 - i) // slot 0 is handed out first
	}
	var ic pdu.IC
	ic.Common().Set(pdu.TypeICReq, 0, pdu.ICLen, 0, pdu.ICLen)
	var dgst uint8
	if o.HeaderDigest {
		dgst |= 1
	}
	if o.DataDigest {
		dgst |= 2
	}
	ic.SetDGST(dgst)
	ic.SetMAXR2T(uint32(o.MaxR2T - 1))
	q.putArena(ic[:], piece{dataOff: -1})
	return q
}

// Ready reports whether the ICResp has arrived and the queue has not failed.
func (q *Queue) Ready() bool { return q.recv != recvIC && q.recv != recvDead }

// Err returns why the queue has failed, or nil: a *pdu.FatalError for a target
// that broke the protocol, ErrTermReq (wrapped) for one that accuses us of it.
func (q *Queue) Err() error { return q.err }

// Depth returns how many commands may be outstanding.
func (q *Queue) Depth() int { return len(q.slots) }

// Free returns how many commands Submit will take now.
func (q *Queue) Free() int { return len(q.free) }

// Outstanding returns how many commands were submitted and not yet collected.
func (q *Queue) Outstanding() int { return len(q.slots) - len(q.free) }

// SetInCapsuleBytes sets how much data a command to the target may carry in its
// capsule: 8192 for fabrics and admin commands, IOCCSZ*16-64 on an I/O queue.
func (q *Queue) SetInCapsuleBytes(n int) { q.opts.InCapsuleBytes = n }

// Submit takes a command: it will be part of the next SendBufs batch, in the
// order of Submit calls. It returns the command's CID.
//
// Errors: ErrQueueFull, ErrNotReady, ErrDataDirection.
//
// Cost: 0 allocs.
func (q *Queue) Submit(c *host.Command) (cid uint16, err error) { // hot: 0 allocs
	if !q.Ready() {
		return 0, host.ErrNotReady
	}
	if len(q.free) == 0 {
		return 0, host.ErrQueueFull
	}
	toTarget, toHost := host.Direction(&c.SQE)
	if !fits(c, toTarget, toHost) {
		return 0, host.ErrDataDirection
	}
	i := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	s := &q.slots[i]
	gen := host.NextGeneration(s.gen)
	*s = slot{
		sqe: c.SQE, tag: c.Tag, length: uint32(len(c.Data)), tick: q.tick, gen: gen,
		refs: 1, busy: true, unsent: true,
		toHost: toHost && len(c.Data) != 0, toTarget: toTarget && len(c.Data) != 0,
	}
	q.bufs[i] = c.Data
	cid = host.CID(i, gen)
	s.sqe.SetCID(cid)
	s.sqe.SetPSDT(nvme.PSDTSGL)
	g := s.sqe.SGL()
	g.SetAddress(0)
	g.SetLength(s.length)
	if s.toTarget && len(c.Data) <= q.opts.InCapsuleBytes {
		s.inCapsule = true
		g.SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
	} else {
		g.SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
	}
	q.push(sendItem{slot: i})
	return cid, nil
}

func fits(c *host.Command, toTarget, toHost bool) bool {
	return len(c.Data) == 0 || toTarget != toHost && uint64(len(c.Data)) <= 1<<32-1
}

// Check tells why Submit would not take a command, other than for want of a slot.
//
// Errors: ErrNotReady, ErrDataDirection.
func (q *Queue) Check(c *host.Command) error { // hot: 0 allocs
	if !q.Ready() {
		return host.ErrNotReady
	}
	if toTarget, toHost := host.Direction(&c.SQE); !fits(c, toTarget, toHost) {
		return host.ErrDataDirection
	}
	return nil
}

// Completions moves finished commands to dst, in the order in which they finished,
// and returns how many. Their slots are free again and their buffers the caller's.
//
// Cost: 0 allocs.
func (q *Queue) Completions(dst []host.Completion) int { // hot: 0 allocs
	n := min(len(dst), q.doneLen)
	for k := range n {
		i := q.done[q.doneHead]
		if q.doneHead++; q.doneHead == len(q.done) {
			q.doneHead = 0
		}
		s := &q.slots[i]
		st := s.status
		if s.badDigest && st.OK() {
			st = nvme.TransientTransportError
		}
		dst[k] = host.Completion{Tag: s.tag, Result: s.result, Received: s.received, Status: st, CID: host.CID(i, s.gen)}
		s.busy = false
		q.bufs[i] = nil
		q.free = append(q.free, i)
	}
	q.doneLen -= n
	return n
}

// Pending returns how many finished commands wait to be collected.
func (q *Queue) Pending() int { return q.doneLen }

// Detach gives the buffer of an outstanding command back to the caller at once: data
// that still arrives for it is dropped, data still to be sent is copied away
// first. The command itself goes on (whether a write takes effect is open), keeps its slot,
// and completes as usual. It reports false if cid is not outstanding.
//
// Cost: copies the data if some of it has yet to be sent.
func (q *Queue) Detach(cid uint16) bool {
	i := uint16(host.SlotOf(cid))
	if int(i) >= len(q.slots) || !q.slots[i].busy || q.slots[i].gen != host.GenerationOf(cid) {
		return false
	}
	s := &q.slots[i]
	if s.orphan {
		return true
	}
	s.orphan = true
	if !s.toTarget || s.refs == 0 && (s.answered || s.inCapsule || s.granted == s.length) {
		q.bufs[i] = nil
		return true
	}
	own := append([]byte(nil), q.bufs[i]...)
	q.bufs[i] = own
	for k := q.segHead; k < len(q.segs); k++ {
		if p := q.pieces[k]; p.slot == i && p.dataOff >= 0 {
			q.segs[k] = own[p.dataOff:][:len(q.segs[k])]
		}
	}
	return true
}

// Tick advances the queue's coarse clock and returns how many ticks ago the oldest
// outstanding command, other than the Asynchronous Event Requests on an admin queue,
// was submitted. A driver that ticks once a second gets command timeouts from it.
func (q *Queue) Tick(admin bool) (oldest uint32) {
	q.tick++
	for i := range q.slots {
		s := &q.slots[i]
		if !s.busy || admin && s.sqe.Opcode() == nvme.AdminAsyncEvent {
			continue
		}
		oldest = max(oldest, q.tick-s.tick)
	}
	return oldest
}

// answer makes a slot's outcome final.
func (q *Queue) answer(i uint16, st nvme.Status, result uint64) {
	s := &q.slots[i]
	s.answered, s.status, s.result = true, st, result
	if s.refs == 0 {
		q.finish(i)
	}
}

// finish appends slot i to the done ring. It has room: a slot is in it at most once.
func (q *Queue) finish(i uint16) {
	k := q.doneHead + q.doneLen
	if k >= len(q.done) {
		k -= len(q.done)
	}
	q.done[k] = i
	q.doneLen++
}
