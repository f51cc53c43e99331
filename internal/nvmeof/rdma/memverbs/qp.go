package memverbs

import (
	"errors"
	"net"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// queuePair is the queue pair of an endpoint. Requests of its send queue are counted from 0:
//
//	freed <= acked <= sent <= posted <= freed + len(sends)
//
// Requests from acked to sent were executed and wait for their acknowledgement. Requests from sent to posted wait to be
// executed. Places from freed on are in use: as with hardware, a place becomes free only when a completion that covers
// it is polled.
type queuePair struct {
	hasQP          bool
	domain         *domain
	sendCQ, recvCQ *cq
	// shared is the shared receive queue that receives come from; nil if the queue pair has its own.
	shared      *srq
	own         recvQueue
	num         uint32
	handle      uint64
	inlineBytes int

	sends                      []sendRequest
	inline                     []byte
	freed, acked, sent, posted uint64
	// reads is the number of RDMA READs between acked and sent. Invariant: reads <= depth.
	reads, depth uint8
	// broken: a request between acked and sent has failed, so no later request is executed.
	broken bool
	// parked: there was no receive for the next request, which waits for one or for the timer. attempts counts the
	// failed attempts.
	parked   bool
	attempts uint8
}

// sendRequest is a place of a send queue.
type sendRequest struct {
	wr     verbs.SendWR
	status verbs.WCStatus
	// answered: the data of an RDMA READ has arrived.
	answered bool
}

// awaits reports whether the request is an RDMA READ that was sent and whose data has not arrived.
func (s *sendRequest) awaits() bool {
	return s.wr.Op == verbs.OpRead && s.status == verbs.StatusOK && !s.answered
}

var errForeign = errors.New("memverbs: made by another provider or device")

// CreateQP implements verbs.Endpoint.
func (e *Endpoint) CreateQP(c verbs.QPConfig) (verbs.QP, error) {
	n := e.net
	n.mu.Lock()
	defer n.mu.Unlock()
	d, ok1 := c.Domain.(*domain)
	scq, ok2 := c.SendCQ.(*cq)
	rcq, ok3 := c.RecvCQ.(*cq)
	s, ok4 := c.SRQ.(*srq)
	a := &e.dev.attr
	switch {
	case e.dev.gone:
		return nil, verbs.ErrDeviceRemoved
	case e.hasQP || e.state != idle:
		return nil, errUsed
	case !ok1 || !ok2 || !ok3 || !ok4 && c.SRQ != nil || d.dev != e.dev || scq.domain.dev != e.dev ||
		rcq.domain.dev != e.dev:
		return nil, errForeign
	case d.closed || scq.closed || rcq.closed || s != nil && s.closed:
		return nil, net.ErrClosed
	case s != nil && s.domain != d:
		return nil, errOtherDomain
	case s != nil && c.Recvs != 0:
		return nil, errors.New("memverbs: receives of its own for a queue pair with a shared receive queue")
	case e.dev.qps >= a.MaxQPs:
		return nil, limit("queue pairs", e.dev.qps+1, a.MaxQPs)
	case max(c.Sends, c.Recvs) > a.MaxQPWRs:
		return nil, limit("work requests", max(c.Sends, c.Recvs), a.MaxQPWRs)
	}
	e.hasQP, e.domain, e.sendCQ, e.recvCQ, e.shared = true, d, scq, rcq, s
	if s != nil {
		s.users++
	} else {
		e.own = newRecvQueue(d, max(c.Recvs, 1))
	}
	d.users++
	scq.users++
	rcq.users++
	e.sends = make([]sendRequest, max(c.Sends, 1))
	e.inlineBytes = min(max(c.InlineBytes, 0), e.dev.inline)
	e.inline = make([]byte, len(e.sends)*e.inlineBytes)
	n.lastQP = (n.lastQP + 1) & 0xffffff
	e.num = n.lastQP
	e.handle = uint64(n.rng.Uint32())<<32 | uint64(e.num)
	n.qps[e.handle] = e
	e.dev.qps++
	e.dev.provider.counts.QPs++
	return qp{e}, nil
}

// destroyQP removes the queue pair from all queues. Its completions, and the flushes of its outstanding requests, are
// lost or can still be polled.
func (e *Endpoint) destroyQP() {
	n := e.net
	if n.coin() {
		e.sendCQ.drop(e)
		e.recvCQ.drop(e)
	} else if e.state == failed && !e.stalled {
		for e.flush() {
		}
	}
	delete(n.qps, e.handle)
	e.hasQP = false
	if e.shared != nil {
		e.shared.users--
	}
	e.domain.users--
	e.sendCQ.users--
	e.recvCQ.users--
	e.dev.qps--
	e.dev.provider.counts.QPs--
}

// qp implements verbs.QP.
type qp struct{ e *Endpoint }

func (q qp) Num() uint32      { return q.e.num }
func (q qp) Handle() uint64   { return q.e.handle }
func (q qp) InlineBytes() int { return q.e.inlineBytes }

func (q qp) PostRecv(wrs []verbs.RecvWR) (int, error) { // hot: 0 allocs
	if len(wrs) == 0 {
		return 0, nil
	}
	e := q.e
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	switch {
	case !e.hasQP:
		return 0, net.ErrClosed
	case e.shared != nil:
		return 0, errors.New("memverbs: the queue pair receives from a shared receive queue")
	}
	n, err := e.own.post(e, wrs)
	if e.state == failed {
		e.net.activate(e)
	}
	return n, err
}

// post adds a request to the send queue.
func (e *Endpoint) post(wr *verbs.SendWR) error { // hot: 0 allocs
	switch {
	case e.dev.gone:
		return verbs.ErrDeviceRemoved
	case e.state != ready && e.state != failed:
		return errNotConnected
	case wr.Op > verbs.OpRead:
		return errOp
	case e.posted-e.freed == uint64(len(e.sends)):
		return verbs.ErrQueueFull
	}
	i := e.posted % uint64(len(e.sends))
	if wr.Flags&verbs.FlagInline != 0 {
		if int64(wr.Len) > int64(e.inlineBytes) || wr.Op == verbs.OpRead {
			return errInlineLong
		}
		data, ok := e.domain.at(wr.Addr, wr.Len)
		if !ok {
			return errInlineAddr
		}
		copy(e.inline[int(i)*e.inlineBytes:], data)
	}
	e.sends[i] = sendRequest{wr: *wr}
	e.posted++
	e.count(wr.Op)
	e.net.activate(e)
	return nil
}

// request returns the request with that number.
func (e *Endpoint) request(number uint64) *sendRequest { return &e.sends[number%uint64(len(e.sends))] }

// receives returns the queue from which messages for the endpoint take receives.
func (e *Endpoint) receives() *recvQueue {
	if e.shared != nil {
		return &e.shared.recvQueue
	}
	return &e.own
}

// fail moves the queue pair to the error state.
func (e *Endpoint) fail() {
	if e.state == failed || e.state == closed {
		return
	}
	e.state, e.parked = failed, false
	close(e.drained)
	if e.tell {
		e.tells(verbs.Disconnected)
	}
	e.net.activate(e, e.peer)
}

// breaks handles a failure that the device has detected. It either reports the failure by an event or leaves that to
// the completions.
func (e *Endpoint) breaks() {
	e.fail()
	if e.net.coin() {
		e.tells(verbs.Fatal)
	}
}
