package hostrdma

import (
	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

// Sends returns the work requests to post next, in order, or nothing. They stay valid until Sent.
// There may be more after they are posted.
//
// Cost: 0 allocs.
func (q *Queue) Sends() []wr.Send { // hot: 0 allocs
	if q.err != nil {
		return nil
	}
	if q.wrHead < len(q.wrs) {
		return q.wrs[q.wrHead:]
	}
	q.wrs, q.wrHead = q.wrs[:0], 0
	for q.waiting.n > 0 {
		// Of a fused pair the target may carry out neither before it has both: they get
		// their memory together.
		i, k := q.waiting.peek(0), 1
		if q.waiting.n > 1 && q.sqe(i).Fuse() == nvme.FuseFirst {
			k = 2
		}
		if len(q.wrs)+k > sendBatch || !q.borrow(i) {
			break
		}
		if k == 2 && !q.borrow(q.waiting.peek(1)) {
			q.giveBack(i)
			break
		}
		for range k {
			q.prepare(q.waiting.pop())
		}
	}
	if n := len(q.wrs); n > 0 {
		q.wrs[n-1].Flags |= wr.FlagSignaled
		q.unsigned = 0
	}
	return q.wrs
}

// borrow gets memory for slot i's data, if it needs some and has none.
func (q *Queue) borrow(i uint16) bool {
	s := &q.slots[i]
	if s.length == 0 || s.inCapsule || s.direct || s.borrowed {
		return true
	}
	b, addr, rkey, ok := q.opts.Memory.Get(i, int(s.length))
	if !ok {
		return false
	}
	q.borrowed[i], s.addr, s.rkey, s.borrowed = b, addr, rkey, true
	return true
}

func (q *Queue) giveBack(i uint16) {
	if s := &q.slots[i]; s.borrowed {
		s.borrowed = false
		q.borrowed[i] = nil
		q.opts.Memory.Put(i)
	}
}

// prepare builds slot i's capsule and its work request.
func (q *Queue) prepare(i uint16) {
	s := &q.slots[i]
	c := q.capsule(i)
	n := nvme.SQESize
	g := q.sqe(i).SGL()
	*g = nvme.SGL{}
	if s.inCapsule {
		n += copy(c[nvme.SQESize:], q.bufs[i])
		g.SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
		g.SetLength(s.length)
	} else {
		if s.toTarget && !s.direct {
			copy(q.borrowed[i], q.bufs[i])
		}
		// The key is good for the life of the connection: nobody need invalidate it. Without data
		// all is zero but the type, as Linux has it.
		g.SetKeyed(nvme.SGLSubtypeAddress, s.addr, s.length, s.rkey)
	}
	if s.toTarget && s.orphan {
		q.bufs[i] = nil // its own copy
	}
	w := wr.Send{
		ID: uint64(host.CID(i, s.gen)), QP: q.opts.QP, Op: wr.OpSend,
		Addr: q.opts.Addr + uint64(int(i)*q.stride), Len: uint32(n), LKey: q.opts.LKey,
	}
	if n <= q.opts.InlineBytes {
		w.Flags |= wr.FlagInline
	}
	if q.unsigned++; q.unsigned == signalEvery {
		w.Flags |= wr.FlagSignaled
		q.unsigned = 0
	}
	q.wrs = append(q.wrs, w)
}

// Sent takes the first n work requests, which the device has taken, off the batch.
//
// Cost: 0 allocs.
func (q *Queue) Sent(n int) { // hot: 0 allocs
	for _, w := range q.wrs[q.wrHead : q.wrHead+n] {
		i := uint16(host.SlotOf(uint16(w.ID)))
		q.slots[i].posted = true
		q.inFlight.push(i)
	}
	q.wrHead += n
}

// Recvs returns receives to post, or nothing: they gather to a batch first.
//
// Cost: 0 allocs.
func (q *Queue) Recvs() []wr.Recv { // hot: 0 allocs
	if len(q.recvs) < recvBatch {
		return nil
	}
	return q.recvs
}

// Posted takes the first n receives, which the device has taken, off the list.
//
// Cost: 0 allocs.
func (q *Queue) Posted(n int) { // hot: 0 allocs
	for _, r := range q.recvs[:n] {
		q.recvPosted[uint16(r.ID)] = true
	}
	q.recvs = q.recvs[:copy(q.recvs, q.recvs[n:])]
}

// addRecv puts receive i on the list of those to post.
func (q *Queue) addRecv(i uint16) {
	q.recvGens[i]++
	q.recvs = append(q.recvs, wr.Recv{
		ID:   recvBit | uint64(q.recvGens[i])<<16 | uint64(i),
		Addr: q.respAddr + uint64(i)*responseStride, Len: responseLen, LKey: q.opts.LKey,
	})
}
