package hostrdma

import (
	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

// Sends returns the work requests to post next, in order, or nothing. They are valid until Sent. There may be more to
// post after these.
//
// Cost: 0 allocs.
func (q *QPair) Sends() []wr.Send { // hot: 0 allocs
	if q.err != nil {
		return nil
	}
	if q.wrHead < len(q.wrs) {
		return q.wrs[q.wrHead:]
	}
	q.wrs, q.wrHead = q.wrs[:0], 0
	for q.waiting.n > 0 {
		// A target carries out neither command of a fused pair before it has both: they must get memory together.
		i, k := q.waiting.peek(0), 1
		if q.waiting.n > 1 && q.sqe(i).Fuse() == nvme.FuseFirst {
			k = 2
		}
		if len(q.wrs)+k > sendBatch || !q.takeBuffer(i) {
			break
		}
		if k == 2 && !q.takeBuffer(q.waiting.peek(1)) {
			q.returnBuffer(i)
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

// takeBuffer gets memory for the data of slot i, unless it needs none or has some. It returns false if there is none.
func (q *QPair) takeBuffer(i uint16) bool {
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

func (q *QPair) returnBuffer(i uint16) {
	if s := &q.slots[i]; s.borrowed {
		s.borrowed = false
		q.borrowed[i] = nil
		q.opts.Memory.Put(i)
	}
}

// prepare builds slot i's capsule and its work request.
func (q *QPair) prepare(i uint16) {
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
		// The key is valid as long as the connection, so that the target need not invalidate it. Without data only the
		// type is set, as by Linux.
		g.SetKeyed(nvme.SGLSubtypeAddress, s.addr, s.length, s.rkey)
	}
	if s.toTarget && s.orphan {
		q.bufs[i] = nil // the copy that Detach has made
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

// Sent confirms that the first n work requests of Sends were posted.
//
// Cost: 0 allocs.
func (q *QPair) Sent(n int) { // hot: 0 allocs
	for _, w := range q.wrs[q.wrHead : q.wrHead+n] {
		i := uint16(host.SlotOf(uint16(w.ID)))
		q.slots[i].posted = true
		q.inFlight.push(i)
	}
	q.wrHead += n
}

// Recvs returns receives to post, or nothing until there are enough for a batch.
//
// Cost: 0 allocs.
func (q *QPair) Recvs() []wr.Recv { // hot: 0 allocs
	if len(q.recvs) < recvBatch {
		return nil
	}
	return q.recvs
}

// Posted confirms that the first n receives of Recvs were posted.
//
// Cost: 0 allocs.
func (q *QPair) Posted(n int) { // hot: 0 allocs
	for _, r := range q.recvs[:n] {
		q.recvPosted[uint16(r.ID)] = true
	}
	q.recvs = q.recvs[:copy(q.recvs, q.recvs[n:])]
}

// addRecv adds receive i to the receives to post.
func (q *QPair) addRecv(i uint16) {
	q.recvGens[i]++
	q.recvs = append(q.recvs, wr.Recv{
		ID:   recvBit | uint64(q.recvGens[i])<<16 | uint64(i),
		Addr: q.respAddr + uint64(i)*responseStride, Len: responseLen, LKey: q.opts.LKey,
	})
}
