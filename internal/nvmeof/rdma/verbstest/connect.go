package verbstest

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"jbofd/internal/nvmeof/rdma/verbs"
)

func (s *suite) addresses() {
	l := s.listen()
	if a := l.Addr(); a.Port() == 0 || a.Addr() != s.cfg.Addr {
		s.Errorf("listener at %v, want a port of %v", a, s.cfg.Addr)
	}
	he := s.resolve(l)
	h := s.pool(s.cfg.Host, he.Device(), size{}.orUsual()).end(he)
	connected := s.connect(h, params())
	te, err := l.Accept()
	s.need("accept from the listener", err)
	g := s.pool(s.cfg.Target, te.Device(), size{}.orUsual()).end(te)
	s.need("accept", te.Accept(params()))
	s.need("connect", <-connected)
	s.established(g)
	if te.Local() != l.Addr() || he.Remote() != l.Addr() {
		s.Errorf("target's end at %v, host's leads to %v, want %v", te.Local(), he.Remote(), l.Addr())
	}
	if te.Remote().Addr() != he.Local().Addr() || !he.Local().IsValid() {
		s.Errorf("host's end at %v, target's leads to %v", he.Local(), te.Remote())
	}
	again := s.resolve(l)
	s.closes("endpoint", again)
	if again.Device() != he.Device() {
		s.Error("two endpoints over one device name two devices")
	}
	for _, d := range []verbs.Device{he.Device(), te.Device()} {
		a := d.Attr()
		if a.Name == "" || a.MaxQPs < 1 || a.MaxQPWRs < 16 || a.MaxCQEs < cqEntries || a.MaxSRQWRs < 16 ||
			a.MaxMRs < 1 || a.MaxMRBytes < 1<<20 ||
			a.MaxResponderResources < 1 || a.MaxInitiatorDepth < 1 {
			s.Errorf("%+v", a)
		}
		select {
		case <-d.Removed():
			s.Error("the device is reported as gone")
		default:
		}
	}
}

// begins checks that private data consists of what was sent, followed by zeroes where the wire format pads it.
func (s *suite) begins(what string, got, want []byte) {
	s.Helper()
	if !bytes.HasPrefix(got, want) || len(bytes.Trim(got[len(want):], "\x00")) > 0 {
		s.Errorf("private data of %s: % x, want % x", what, got, want)
	}
}

func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8*13 + seed + 1)
	}
	return b
}

func (s *suite) accept() {
	for i, n := range []int{0, 32, verbs.MaxRequestData} {
		l := s.listen()
		he := s.resolve(l)
		h := s.pool(s.cfg.Host, he.Device(), size{}.orUsual()).end(he)
		p, q := params(), params()
		p.PrivateData, p.ResponderResources, p.InitiatorDepth = pattern(n, 1), 3, 2
		q.PrivateData, q.ResponderResources, q.InitiatorDepth = pattern([]int{0, 32, verbs.MaxAcceptData}[i], 2), 2, 3
		connected := s.connect(h, p)
		te, err := l.Accept()
		s.need("accept from the listener", err)
		peer := te.Peer()
		s.begins("the request", peer.PrivateData, p.PrivateData)
		if peer.ResponderResources != 3 || peer.InitiatorDepth != 2 {
			s.Errorf("the request has %d responder resources, initiator depth %d, want 3 and 2",
				peer.ResponderResources, peer.InitiatorDepth)
		}
		g := s.pool(s.cfg.Target, te.Device(), size{}.orUsual()).end(te)
		s.need("accept", te.Accept(q))
		s.need("connect", <-connected)
		s.begins("the answer", he.Peer().PrivateData, q.PrivateData)
		s.established(g)
	}
	l := s.listen()
	he := s.resolve(l)
	h := s.pool(s.cfg.Host, he.Device(), size{}.orUsual()).end(he)
	if err := h.ep.Connect(s.context(), verbs.Params{PrivateData: make([]byte, verbs.MaxRequestData+1)}); err == nil {
		s.Error("a request with too much private data was sent")
	}
}

func (s *suite) reject() {
	for _, n := range []int{0, 4, verbs.MaxRejectData} {
		l := s.listen()
		he := s.resolve(l)
		h := s.pool(s.cfg.Host, he.Device(), size{}.orUsual()).end(he)
		connected := s.connect(h, params())
		te, err := l.Accept()
		s.need("accept from the listener", err)
		s.closes("request", te)
		s.need("reject", te.Reject(pattern(n, 3)))
		var r *verbs.RejectedError
		if err := <-connected; !errors.As(err, &r) {
			s.fatal("connect: %v, want a RejectedError", err)
		}
		if r.Reason != 28 {
			s.Errorf("reason %d, want 28", r.Reason)
		}
		s.begins("the refusal", r.PrivateData, pattern(n, 3))
	}
}

func (s *suite) unanswered() {
	l := s.listen()
	he := s.resolve(l)
	h := s.pool(s.cfg.Host, he.Device(), size{}.orUsual()).end(he)
	connected := s.connect(h, params())
	te, err := l.Accept()
	s.need("accept from the listener", err)
	s.need("close", te.Close())
	if err := <-connected; err == nil {
		s.Error("connected, though the request was closed")
	}
}

func (s *suite) nobodyListens() {
	l := s.listen()
	he := s.resolve(l)
	s.need("close", l.Close())
	h := s.pool(s.cfg.Host, he.Device(), size{}.orUsual()).end(he)
	if err := h.ep.Connect(s.context(), params()); !errors.Is(err, verbs.ErrUnreachable) {
		s.Errorf("connect to a port where nobody listens: %v, want ErrUnreachable", err)
	}
}

func (s *suite) noDevice() {
	// TEST-NET-1 of RFC 5737: no machine has this address.
	if l, err := s.cfg.Target.Listen(netip.MustParseAddrPort("192.0.2.1:0"), 1); !errors.Is(err, verbs.ErrNoDevice) {
		s.Errorf("listen on a strange address: %v, want ErrNoDevice", err)
		if err == nil {
			s.closes("listener", l)
		}
	}
	ctx, cancel := context.WithCancel(s.context())
	cancel()
	if e, err := s.cfg.Host.Resolve(ctx, netip.AddrPortFrom(s.cfg.Addr, 4420)); !errors.Is(err, context.Canceled) {
		s.Errorf("resolve with a context that has ended: %v", err)
		if err == nil {
			s.closes("endpoint", e)
		}
	}
}

func (s *suite) contextEndsConnect() {
	l := s.listen()
	he := s.resolve(l)
	h := s.pool(s.cfg.Host, he.Device(), size{}.orUsual()).end(he)
	ctx, cancel := context.WithCancel(s.context())
	connected := make(chan error, 1)
	go func() { connected <- h.ep.Connect(ctx, params()) }()
	te, err := l.Accept() // does not answer
	s.need("accept from the listener", err)
	s.closes("request", te)
	cancel()
	if err := <-connected; !errors.Is(err, context.Canceled) {
		s.Errorf("connect: %v, want the context's error", err)
	}
}

func (s *suite) closeEndsAccept() {
	l := s.listen()
	ended := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		ended <- err
	}()
	s.need("close", l.Close())
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		s.Errorf("accept: %v, want net.ErrClosed", err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		s.Errorf("accept after close: %v, want net.ErrClosed", err)
	}
}

func (s *suite) disconnect() {
	for _, who := range []string{"host", "target"} {
		g, h := s.pair(size{}, params())
		g.postRecv(g.recv(1, 0, 64), g.recv(2, 64, 64))
		h.postRecv(h.recv(3, 0, 64), h.recv(4, 64, 64))
		leaves, stays := h, g
		if who == "target" {
			leaves, stays = g, h
		}
		s.need("disconnect", leaves.ep.Disconnect())
		s.need("disconnect again", leaves.ep.Disconnect())
		stays.gone()
		for i, e := range []*end{g, h} {
			for k, c := range e.completions(2) {
				e.wants(c, uint64(2*i+k+1), 0, verbs.StatusFlushed)
			}
		}
		s.need("disconnect of the other end", stays.ep.Disconnect())
		if n, err := h.domain.PostSend([]verbs.SendWR{h.send(verbs.OpSend, 5, 0, 8, 0)}); n == 1 && err == nil {
			h.wants(h.completions(1)[0], 5, 0, verbs.StatusFlushed) // although it was not signaled
		}
	}
}

func (s *suite) closeDisconnects() {
	g, h := s.pair(size{}, params())
	g.postRecv(g.recv(1, 0, 64))
	s.need("close", h.ep.Close())
	g.gone()
	g.wants(g.completions(1)[0], 1, 0, verbs.StatusFlushed)
	if n, err := h.domain.PostSend([]verbs.SendWR{h.send(verbs.OpSend, 5, 0, 8, 0)}); n != 0 || err == nil {
		s.Errorf("a queue pair that is closed took a request: %v", err)
	}
}

func (s *suite) closeTwice() {
	g, h := s.pair(size{shared: 16}, params())
	l := s.listen()
	for range 2 {
		for _, e := range []*end{h, g} {
			s.need("close of an endpoint", e.ep.Close())
		}
		s.need("close of a listener", l.Close())
	}
	for range 2 {
		for _, e := range []*end{h, g} {
			s.need("close of a shared receive queue", e.srq.Close())
			s.need("close of a completion queue", e.cq.Close())
			s.need("close of a memory region", e.mr.Close())
			s.need("close of a domain", e.domain.Close())
		}
	}
}

func (s *suite) manyConnections() {
	l := s.listen()
	he := s.resolve(l)
	hosts := s.pool(s.cfg.Host, he.Device(), size{}.orUsual())
	s.need("close", he.Close())
	var targets *pool
	var before [2]verbs.Counts
	for i := range 50 {
		if i == 1 {
			before = s.cfg.counts()
		}
		here := len(s.cleanup)
		h := hosts.end(s.resolve(l))
		connected := s.connect(h, params())
		te, err := l.Accept()
		s.need("accept from the listener", err)
		if targets == nil {
			targets = s.pool(s.cfg.Target, te.Device(), size{}.orUsual())
			here = len(s.cleanup)
			s.closes("first endpoint", h.ep)
		}
		g := targets.end(te)
		s.need("accept", te.Accept(params()))
		s.need("connect", <-connected)
		h.post(h.send(verbs.OpSend, uint64(i), 0, 8, verbs.FlagSignaled))
		g.postRecv(g.recv(uint64(i), 0, 64))
		h.done(uint64(i), verbs.OpSend)
		g.done(uint64(i), verbs.OpRecv)
		for len(s.cleanup) > here {
			s.cleanup[len(s.cleanup)-1]()
			s.cleanup = s.cleanup[:len(s.cleanup)-1]
		}
	}
	if after := s.cfg.counts(); after != before {
		s.Errorf("objects after the first connection %+v, after the last %+v", before, after)
	}
}

func (s *suite) wait() {
	g, h := s.pair(size{}, params())
	deadline := func(d time.Duration) { s.need("set a deadline", g.cq.SetDeadline(time.Now().Add(d))) }
	for range 2 {
		deadline(-time.Second)
		s.waits(g, false)
		deadline(5 * time.Millisecond)
		s.waits(g, false)
	}

	// A deadline interrupts a Wait in progress.
	s.need("no deadline", g.cq.SetDeadline(time.Time{}))
	ended := make(chan error, 1)
	go func() { ended <- g.cq.Wait() }()
	deadline(-time.Second)
	if err := <-ended; !isDeadline(err) {
		s.Errorf("wait: %v, want a deadline's end", err)
	}

	// Completions after Arm cause one notification each time that the queue is armed.
	deadline(s.cfg.Timeout)
	for i := range uint64(20) {
		g.postRecv(g.recv(i, 0, 64))
		s.need("arm", g.cq.Arm())
		h.post(h.send(verbs.OpSend, i, 0, 8, verbs.FlagSignaled))
		s.waits(g, true)
		if len(g.got) == 0 && g.poll() == 0 {
			s.fatal("a notice, but no completion")
		}
		g.done(i, verbs.OpRecv)
		h.done(i, verbs.OpSend)
	}

	// Close interrupts a Wait.
	g.ep.Close()
	s.need("no deadline", g.cq.SetDeadline(time.Time{}))
	go func() { ended <- g.cq.Wait() }()
	s.need("close", g.cq.Close())
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		s.Errorf("wait: %v, want net.ErrClosed", err)
	}
}
