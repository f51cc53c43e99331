// Package hosttcp is the state machine of the host's end of one NVMe/TCP queue pair: commands and received bytes go in,
// bytes to send and completions come out. It is pure: its driver (hostconn.TCPConn) has the socket, the goroutines and
// the locks.
//
//	Submit ──> slot ──> send list ──> SendBufs ──> (writev) ──> Sent
//	                        ^ R2T
//	Completions <── done <──┴── parse <── Received <── (readv) <── RecvBufs
//
// The target is not trusted: each PDU is checked before its data is written to a buffer, and the first violation ends
// the queue with an error and a TermReq to send.
//
// Data is copied as little as possible: the data of a write is sent from the caller's buffer, and only the part of a
// large read that arrives together with a header is copied from the receive buffer.
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
	// maxSegments bounds the segments of one batch; IOV_MAX is 1024.
	maxSegments = 512
	// copyBelow is the size below which data is copied behind its header, instead of being a segment of its own.
	copyBelow = 512
	// largeData is the size of a C2HData PDU from which on RecvBufs offers only shortRecv of the receive buffer, so
	// that most data is received directly into the caller's buffer.
	largeData = 16 << 10
	shortRecv = 4 << 10
)

// ErrTermReq is wrapped by the error of a queue to which the target has sent a C2HTermReq.
var ErrTermReq = errors.New("the target terminated the connection")

// Options configures a QPair.
type Options struct {
	// Depth is the number of commands that may be outstanding, 1 to host.MaxDepth. The
	// submission queue must have one entry more (SQSIZE, which is 0-based, is Depth).
	Depth int
	// HeaderDigest and DataDigest are requested in the ICReq. A target that answers otherwise is refused, as by Linux.
	HeaderDigest, DataDigest bool
	// MaxR2T is how many R2Ts per command the target may have outstanding; 0 means 1.
	MaxR2T int
	// InCapsuleBytes is how many bytes of data a command capsule may carry; see SetInCapsuleBytes.
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
	// received is the number of bytes that C2HData PDUs have announced, and therefore the next DATAO.
	// Invariant: received <= length.
	received uint32
	// granted is the number of bytes that R2Ts have asked for, and therefore the next R2TO.
	// Invariant: granted <= length.
	granted uint32
	tick    uint32 // clock of the queue at Submit
	gen     uint16
	// refs counts the PDUs on the send list or in the batch that refer to the slot or its data: the capsule, and one
	// for each R2T. A slot is finished when it is answered and refs is 0. Invariant: refs <= 1+MaxR2T.
	refs   uint16
	sqid   uint16 // of the CQE
	status nvme.Status

	busy      bool
	unsent    bool // the capsule is on the send list
	answered  bool // status and result are final
	toHost    bool
	toTarget  bool
	inCapsule bool
	orphan    bool // the buffer was returned to the caller by Detach
	badDigest bool
}

// sendItem is an entry of the send list: a capsule, or the data that an R2T asks for.
type sendItem struct {
	slot      uint16
	ttag      uint16
	isData    bool
	off, left uint32 // of the data, if isData
}

// piece describes a segment of the batch.
type piece struct {
	slot uint16
	// last: the slot loses a reference when this segment was sent.
	last bool
	// dataOff is the offset of the segment in the data of the slot, or -1 if the segment lies in the arena.
	dataOff int64
}

type recvState uint8

const (
	recvIC     recvState = iota // waiting for the ICResp
	recvHeader                  // between PDUs
	recvData                    // in the data of a C2HData PDU
	recvDigest                  // before its data digest
	recvDead                    // failed with err
)

// QPair is the state machine. One goroutine at a time may call its methods.
type QPair struct {
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

	// Sending. list is a ring. The batch is what SendBufs has returned and Sent has not confirmed yet: segs[segHead:],
	// each described by its element of pieces.
	list              []sendItem
	listHead, listLen int
	arena             []byte // headers, digests, padding, small data of the batch
	segs              [][]byte
	pieces            []piece
	segHead           int
	// openSeg: the last segment ends at the end of the arena and may grow.
	openSeg bool

	// Receiving. buf[rpos:wpos] is received and not parsed.
	buf        []byte
	rpos, wpos int
	direct     int    // length of the part of a caller's buffer that RecvBufs has returned
	dataLen    uint32 // DATAL of the latest C2HData
	dataSlot   uint16 // of the C2HData in progress
	dataLeft   uint32
	dataFlags  uint8
	dataCRC    uint32
}

// New returns a queue whose first bytes to send are an ICReq. It panics if Depth is out of range.
func New(o Options) *QPair {
	if o.Depth < 1 || o.Depth > host.MaxDepth {
		panic("hosttcp: Depth out of range")
	}
	if o.RecvBytes == 0 {
		o.RecvBytes = DefaultRecvBytes
	}
	o.RecvBytes = max(o.RecvBytes, minRecvBytes)
	o.MaxR2T = min(max(o.MaxR2T, 1), 64)
	n := o.Depth
	q := &QPair{
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
func (q *QPair) Ready() bool { return q.recv != recvIC && q.recv != recvDead }

// Err returns why the queue has failed, or nil: a *pdu.FatalError for a target that has violated the protocol,
// ErrTermReq (wrapped) for one that reports a violation by the host.
func (q *QPair) Err() error { return q.err }

// Depth returns how many commands may be outstanding.
func (q *QPair) Depth() int { return len(q.slots) }

// Free returns how many commands Submit accepts now.
func (q *QPair) Free() int { return len(q.free) }

// Outstanding returns how many commands were submitted and not yet collected.
func (q *QPair) Outstanding() int { return len(q.slots) - len(q.free) }

// SetInCapsuleBytes sets how many bytes of data a capsule may carry: 8192 for fabrics and admin commands, IOCCSZ*16-64
// on an I/O queue.
func (q *QPair) SetInCapsuleBytes(n int) { q.opts.InCapsuleBytes = n }

// Submit accepts a command for one of the next batches of SendBufs, in the order of Submit calls. It returns the CID.
//
// Errors: ErrQueueFull, ErrNotReady, ErrDataDirection.
//
// Cost: 0 allocs.
func (q *QPair) Submit(c *host.Command) (cid uint16, err error) { // hot: 0 allocs
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

// Check implements host.Machine.
//
// Errors: ErrNotReady, ErrDataDirection.
func (q *QPair) Check(c *host.Command) error { // hot: 0 allocs
	if !q.Ready() {
		return host.ErrNotReady
	}
	if toTarget, toHost := host.Direction(&c.SQE); !fits(c, toTarget, toHost) {
		return host.ErrDataDirection
	}
	return nil
}

// Completions implements host.Machine.
//
// Cost: 0 allocs.
func (q *QPair) Completions(dst []host.Completion) int { // hot: 0 allocs
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
		dst[k] = host.Completion{Tag: s.tag, Result: s.result, Received: s.received, Status: st,
			CID: host.CID(i, s.gen), SQID: s.sqid}
		s.busy = false
		q.bufs[i] = nil
		q.free = append(q.free, i)
	}
	q.doneLen -= n
	return n
}

// Pending returns how many commands are finished and not collected.
func (q *QPair) Pending() int { return q.doneLen }

// Detach implements host.Machine. Data that arrives for the command later is dropped; data that is still to be sent is
// copied first.
//
// Cost: copies the data if some of it has yet to be sent.
func (q *QPair) Detach(cid uint16) bool {
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

// Tick implements host.Machine.
func (q *QPair) Tick(admin bool) (oldest uint32) {
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

// answer sets the final outcome of a slot.
func (q *QPair) answer(i uint16, st nvme.Status, result uint64, sqid uint16) {
	s := &q.slots[i]
	s.answered, s.status, s.result, s.sqid = true, st, result, sqid
	if s.refs == 0 {
		q.finish(i)
	}
}

// finish appends slot i to the done ring, which has room for each slot once.
func (q *QPair) finish(i uint16) {
	k := q.doneHead + q.doneLen
	if k >= len(q.done) {
		k -= len(q.done)
	}
	q.done[k] = i
	q.doneLen++
}
