package memverbs

import (
	"fmt"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// source returns the data that a request sends.
func (e *Endpoint) source(s *sendRequest) ([]byte, bool) {
	if s.wr.Flags&verbs.FlagInline != 0 {
		i := int(e.sent % uint64(len(e.sends)))
		return e.inline[i*e.inlineBytes:][:s.wr.Len], true
	}
	return e.domain.local(s.wr.LKey, s.wr.Addr, s.wr.Len, 0)
}

// write copies to the peer's memory.
func (e *Endpoint) write(s *sendRequest) verbs.WCStatus { // hot: 0 allocs
	src, ok := e.source(s)
	if !ok {
		return verbs.StatusLocalProt
	}
	dst, ok := e.peer.domain.remote(s.wr.RKey, s.wr.RemoteAddr, s.wr.Len, verbs.RemoteWrite)
	if !ok {
		e.refused()
		return verbs.StatusRemoteAccess
	}
	copy(dst, src)
	return verbs.StatusOK
}

// refused handles a request that moves the peer's queue pair to the error state. The peer answers the earlier RDMA
// READs first.
func (e *Endpoint) refused() {
	for i := e.acked; i < e.sent; i++ {
		if s := e.request(i); s.awaits() {
			e.answer(s)
		}
	}
	e.peer.breaks()
}

// beginRead sends the read request of an RDMA READ.
func (e *Endpoint) beginRead(wr *verbs.SendWR) verbs.WCStatus { // hot: 0 allocs
	if _, ok := e.domain.local(wr.LKey, wr.Addr, wr.Len, verbs.LocalWrite); !ok {
		return verbs.StatusLocalProt
	}
	if e.depth == 0 {
		e.net.fault(fmt.Errorf("memverbs: RDMA READ of queue pair %d, whose InitiatorDepth is 0", e.num))
		return verbs.StatusRemoteInvalid
	}
	if e.reads == e.peer.params.ResponderResources {
		e.net.fault(fmt.Errorf("memverbs: RDMA READ of queue pair %d is more than the peer's %d ResponderResources",
			e.num, e.reads))
		e.refused()
		return verbs.StatusRemoteInvalid
	}
	e.reads++
	return verbs.StatusOK
}

// answer handles the arrival of an RDMA READ's data.
func (e *Endpoint) answer(s *sendRequest) {
	s.answered, s.status = true, e.read(&s.wr)
}

// read copies from the peer's memory.
func (e *Endpoint) read(wr *verbs.SendWR) verbs.WCStatus { // hot: 0 allocs
	src, ok := e.peer.domain.remote(wr.RKey, wr.RemoteAddr, wr.Len, verbs.RemoteRead)
	if !ok {
		e.peer.breaks()
		return verbs.StatusRemoteAccess
	}
	dst, ok := e.domain.local(wr.LKey, wr.Addr, wr.Len, verbs.LocalWrite)
	if !ok {
		return verbs.StatusLocalProt
	}
	copy(dst, src)
	return verbs.StatusOK
}

// message delivers a SEND to the peer. It returns false if the peer has no receive and the SEND must be retried.
func (e *Endpoint) message(s *sendRequest) (verbs.WCStatus, bool) { // hot: 0 allocs
	src, ok := e.source(s)
	if !ok {
		return verbs.StatusLocalProt, true
	}
	p := e.peer
	q := p.receives()
	if p.drops > 0 {
		p.drops--
		return e.notReady(q, true)
	}
	if q.n == 0 {
		return e.notReady(q, false)
	}
	wr := q.take()
	wc := verbs.WC{ID: wr.ID, QPNum: p.num}
	status := p.receive(&s.wr, &wr, src, &wc)
	p.recvCQ.push(entry{wc: wc, e: p, recvs: q})
	if status != verbs.StatusOK {
		e.refused()
	}
	return status, true
}

// receive fills a receive of the endpoint and its completion. It returns the sender's status.
func (e *Endpoint) receive(sent *verbs.SendWR, wr *verbs.RecvWR, src []byte, wc *verbs.WC) verbs.WCStatus {
	if sent.Len > wr.Len {
		wc.Status = verbs.StatusLocalLength
		return verbs.StatusRemoteInvalid
	}
	dst, ok := e.domain.local(wr.LKey, wr.Addr, wr.Len, verbs.LocalWrite)
	if !ok {
		wc.Status = verbs.StatusLocalProt
		return verbs.StatusRemoteOp
	}
	if sent.Op == verbs.OpSendInvalidate {
		r := e.domain.net.rkeys[sent.RKey]
		if r == nil || r.domain != e.domain {
			wc.Status = verbs.StatusRemoteInvalid
			return verbs.StatusRemoteInvalid
		}
		delete(e.domain.net.rkeys, sent.RKey)
		wc.Invalidated, wc.RKey = true, sent.RKey
	}
	copy(dst, src)
	wc.Op, wc.Len = verbs.OpRecv, sent.Len
	e.stats.Recvs++
	e.dev.provider.stats.Recvs++
	return verbs.StatusOK
}
