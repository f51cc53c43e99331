package memverbs

import (
	"time"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// move makes one possible move of an endpoint, and reports whether there was one.
func (n *Network) move(e *Endpoint) bool { // hot: 0 allocs
	const (
		message = iota
		event
		transmit
		acknowledge
		flush
	)
	var moves [4]int
	k := 0
	add := func(m int, possible bool) {
		if possible {
			moves[k] = m
			k++
		}
	}
	add(message, e.outbox != 0)
	add(event, e.events != 0 && e.onEvent != nil && !e.mute)
	switch e.state {
	case ready:
		add(transmit, e.canTransmit())
		add(acknowledge, e.canAcknowledge())
	case failed:
		add(flush, e.canFlush())
	}
	if k == 0 {
		return false
	}
	switch moves[n.rng.IntN(k)] {
	case message:
		e.arrive()
	case event:
		e.callUser()
	case transmit:
		e.transmit()
	case acknowledge:
		e.acknowledge()
	case flush:
		e.flush()
	}
	return true
}

// peerReady reports whether the peer can receive data.
func (e *Endpoint) peerReady() bool {
	return e.peer != nil && e.peer.state == ready && !e.cut && !e.held && !e.peer.held
}

// unreachable reports whether the peer has stopped answering without a message of the connection manager.
func (e *Endpoint) unreachable() bool {
	p := e.peer
	return e.cut || p != nil && (p.state == failed || p.state == closed) && p.outbox&bye == 0
}

func (e *Endpoint) canTransmit() bool {
	if e.sent == e.posted || e.broken || e.parked || !e.peerReady() {
		return false
	}
	wr := &e.request(e.sent).wr
	if wr.Flags&verbs.FlagFence != 0 && e.reads > 0 {
		return false
	}
	return wr.Op != verbs.OpRead || e.reads < e.depth || e.depth == 0
}

func (e *Endpoint) canAcknowledge() bool {
	switch {
	case e.acked == e.posted:
		return false
	case e.unreachable():
		return true
	case e.acked == e.sent:
		return false
	}
	if e.request(e.acked).awaits() {
		return e.peerReady()
	}
	return !e.held && (e.peer == nil || !e.peer.held)
}

// transmit executes the next request at the peer. For an RDMA READ it only sends the read request.
func (e *Endpoint) transmit() { // hot: 0 allocs
	s := e.request(e.sent)
	switch s.wr.Op {
	case verbs.OpRead:
		s.status = e.beginRead(&s.wr)
	case verbs.OpWrite:
		s.status = e.write(s)
	default:
		status, ok := e.message(s)
		if !ok {
			return
		}
		s.status = status
	}
	e.attempts = 0
	e.broken = s.status != verbs.StatusOK
	e.sent++
}

// acknowledge completes the oldest request.
func (e *Endpoint) acknowledge() { // hot: 0 allocs
	s := e.request(e.acked)
	switch {
	case e.cut || e.acked == e.sent || s.awaits() && !e.peerReady():
		s.status = verbs.StatusRetryExceeded
	case s.awaits():
		e.answer(s)
	}
	status := s.status
	if status != verbs.StatusOK || s.wr.Flags&verbs.FlagSignaled != 0 {
		e.completeSend(s, status)
	}
	if s.answered {
		e.reads--
	}
	e.acked++
	e.sent = max(e.sent, e.acked)
	if status != verbs.StatusOK {
		e.breaks()
	}
}

func (e *Endpoint) completeSend(s *sendRequest, status verbs.WCStatus) {
	wc := verbs.WC{ID: s.wr.ID, QPNum: e.num, Status: status}
	if status == verbs.StatusOK {
		wc.Op = s.wr.Op
		if wc.Op == verbs.OpSendInvalidate {
			wc.Op = verbs.OpSend // ibv_poll_cq reports one opcode for both kinds of SEND
		}
	}
	e.sendCQ.push(entry{wc: wc, e: e, sent: e.acked + 1})
}

func (e *Endpoint) canFlush() bool {
	return e.hasQP && !e.stalled && (e.acked < e.posted || e.shared == nil && e.own.n > 0)
}

// flush flushes one request of a failed queue pair, and reports whether there was one.
func (e *Endpoint) flush() bool {
	sends, recvs := e.acked < e.posted, e.shared == nil && e.own.n > 0
	switch {
	case sends && (!recvs || e.net.coin()):
		e.completeSend(e.request(e.acked), verbs.StatusFlushed)
		e.acked++
		e.sent = max(e.sent, e.acked)
	case recvs:
		wr := e.own.take()
		e.recvCQ.push(entry{wc: verbs.WC{ID: wr.ID, QPNum: e.num, Status: verbs.StatusFlushed}, e: e, recvs: &e.own})
	}
	return sends || recvs
}

// notReady handles a message for which q has no receive: the message waits for a retry, or fails.
func (e *Endpoint) notReady(q *recvQueue, dropped bool) (verbs.WCStatus, bool) {
	e.stats.RNRs++
	e.dev.provider.stats.RNRs++
	// The receiver decides the number of retries; the connection manager tells it to the sender.
	tries := e.peer.params.RNRRetryCount
	switch {
	case tries < 7 && e.attempts >= tries:
		return verbs.StatusRNRExceeded, true
	case tries == 7 && !dropped:
		e.parked = true
		q.waiting = append(q.waiting, e)
		return 0, false
	}
	e.attempts++
	if e.net.cfg.Live {
		e.parked = true
		e.net.waitRNR(e)
	}
	return 0, false
}

// waitRNR lets an endpoint retry after the RNR delay.
func (n *Network) waitRNR(e *Endpoint) {
	n.rnr = append(n.rnr, e)
	switch {
	case n.rnrTimer == nil:
		n.rnrTimer = time.AfterFunc(n.cfg.RNRDelay, n.retryRNR)
	case len(n.rnr) == 1:
		n.rnrTimer.Reset(n.cfg.RNRDelay)
	}
}

func (n *Network) retryRNR() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.resume(n.rnr)
	clear(n.rnr)
	n.rnr = n.rnr[:0]
}
