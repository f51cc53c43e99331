package verbstest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"testing"

	"jbofd/internal/nvmeof/rdma/verbs"
)

func isDeadline(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

// waits checks whether Wait returns because of a notification or of its deadline.
func (s *suite) waits(e *end, notice bool) {
	s.Helper()
	switch err := e.cq.Wait(); {
	case notice:
		s.need("wait", err)
	case !isDeadline(err):
		s.fatal("wait: %v, want a deadline's end", err)
	}
}

func (s *suite) messages() {
	g, h := s.pair(size{}, params())
	const window, total = 8, 200
	const room = 256
	for i := range uint64(window) {
		g.postRecv(g.recv(i, int(i)*room, room))
	}
	sent, answered := uint64(0), uint64(0)
	for received := uint64(0); received < total; received++ {
		for sent < total && sent < received+window && sent < answered+window {
			off := int(sent%window) * room
			binary.LittleEndian.PutUint64(h.mem[off:], sent)
			n := 8 + int(sent*13%(room-8))
			if sent%50 == 49 {
				n = 0
			}
			h.post(h.send(verbs.OpSend, sent, off, n, verbs.FlagSignaled))
			sent++
		}
		c := g.completions(1)[0]
		g.wants(c, received%window, verbs.OpRecv, verbs.StatusOK)
		off := int(received%window) * room
		want := 8 + int(received*13%(room-8))
		if received%50 == 49 {
			want = 0
		}
		if int(c.Len) != want || want > 0 && binary.LittleEndian.Uint64(g.mem[off:]) != received {
			s.fatal("message %d has %d bytes and number %d, want %d bytes", received, c.Len,
				binary.LittleEndian.Uint64(g.mem[off:]), want)
		}
		g.postRecv(g.recv(received%window, off, room))
		for ; answered < sent && answered <= received; answered++ {
			h.done(answered, verbs.OpSend)
		}
	}
}

func (s *suite) writeAndRead() {
	const mib = 1 << 20
	g, h := s.pair(size{bytes: 2*mib + 8192}, params())
	for i, n := range []int{1, 511, 4096, 4097, 128 << 10, mib} {
		clear(g.mem)
		clear(h.mem)
		want := pattern(n, i)
		copy(h.mem[100:], want)
		h.post(to(h.send(verbs.OpWrite, 1, 100, n, verbs.FlagSignaled), g, 200))
		h.done(1, verbs.OpWrite)
		// A message tells the target that the data has arrived.
		g.postRecv(g.recv(2, 0, 16))
		h.post(h.send(verbs.OpSend, 3, 0, 16, verbs.FlagSignaled))
		g.done(2, verbs.OpRecv)
		h.done(3, verbs.OpSend)
		if !bytes.Equal(g.mem[200:200+n], want) || g.mem[199] != 0 || g.mem[200+n] != 0 {
			s.fatal("RDMA WRITE of %d bytes", n)
		}
		h.post(to(h.send(verbs.OpRead, 4, mib+300, n, verbs.FlagSignaled), g, 200))
		h.done(4, verbs.OpRead)
		if !bytes.Equal(h.mem[mib+300:mib+300+n], want) || h.mem[mib+299] != 0 || h.mem[mib+300+n] != 0 {
			s.fatal("RDMA READ of %d bytes", n)
		}
	}
}

func (s *suite) manyReads() {
	g, h := s.pair(size{sends: 64}, params())
	copy(g.mem, pattern(64*512, 0))
	var wrs []verbs.SendWR
	for i := range 64 {
		wrs = append(wrs, to(h.send(verbs.OpRead, uint64(i), i*512, 512, verbs.FlagSignaled), g, i*512))
	}
	h.post(wrs...)
	for i, c := range h.completions(64) {
		h.wants(c, uint64(i), verbs.OpRead, verbs.StatusOK)
	}
	if !bytes.Equal(h.mem[:64*512], g.mem[:64*512]) {
		s.Error("data of 64 RDMA READs")
	}
}

func (s *suite) fence() {
	g, h := s.pair(size{}, params())
	copy(g.mem, pattern(4096, 0))
	// The data that was read is written back at once. Without the fence, the WRITE might be sent before the READ has
	// completed.
	h.post(to(h.send(verbs.OpRead, 1, 0, 4096, 0), g, 0),
		to(h.send(verbs.OpWrite, 2, 0, 4096, verbs.FlagFence|verbs.FlagSignaled), g, 8192))
	h.done(2, verbs.OpWrite)
	g.postRecv(g.recv(3, 4096, 16))
	h.post(h.send(verbs.OpSend, 4, 0, 16, verbs.FlagSignaled))
	g.done(3, verbs.OpRecv)
	h.done(4, verbs.OpSend)
	if !bytes.Equal(g.mem[8192:8192+4096], pattern(4096, 0)) {
		s.Error("a fenced RDMA WRITE went before the RDMA READ")
	}
}

func (s *suite) sharedReceives() {
	z := size{shared: 16}.orUsual()
	l := s.listen()
	var targets *pool
	var g, h [2]*end
	for i := range 2 {
		he := s.resolve(l)
		h[i] = s.pool(s.cfg.Host, he.Device(), size{}.orUsual()).end(he)
		connected := s.connect(h[i], params())
		te, err := l.Accept()
		s.need("accept from the listener", err)
		if targets == nil {
			targets = s.pool(s.cfg.Target, te.Device(), z)
		}
		g[i] = targets.end(te)
		s.need("accept", te.Accept(params()))
		s.need("connect", <-connected)
	}
	const each = 30
	next := [2]uint64{}
	for id := range uint64(8) {
		g[0].postRecv(targets.recv(id, int(id)*64, 64))
	}
	for round := range uint64(each) {
		for i, e := range h {
			binary.LittleEndian.PutUint64(e.mem, round)
			e.post(e.send(verbs.OpSend, round, 0, 8+i, verbs.FlagSignaled))
		}
		for range h {
			c := targets.completions(1)[0]
			i := 0
			if c.QPNum == g[1].qp.Num() {
				i = 1
			}
			g[i].wants(c, c.ID, verbs.OpRecv, verbs.StatusOK)
			if got := binary.LittleEndian.Uint64(targets.mem[c.ID*64:]); got != next[i] || int(c.Len) != 8+i {
				s.fatal("message %d of %d bytes by queue pair %d, want number %d", got, c.Len, i, next[i])
			}
			next[i]++
			g[0].postRecv(targets.recv(c.ID, int(c.ID)*64, 64))
		}
		for _, e := range h {
			e.done(round, verbs.OpSend)
		}
	}
	// A queue pair that is closed takes no receives with it.
	h[0].ep.Close()
	g[0].gone()
	g[0].ep.Close()
	for i := range uint64(8) {
		h[1].post(h[1].send(verbs.OpSend, i, 0, 9, verbs.FlagSignaled))
		h[1].done(i, verbs.OpSend)
	}
	for _, c := range targets.completions(8) {
		g[1].wants(c, c.ID, verbs.OpRecv, verbs.StatusOK)
	}
}

func (s *suite) unsignaled() {
	g, h := s.pair(size{sends: 8}, params())
	for round := range uint64(50) {
		var wrs []verbs.SendWR
		for i := range uint64(8) {
			wr := to(h.send(verbs.OpWrite, round*8+i, int(i)*64, 64, 0), g, int(i)*64)
			if i == 7 {
				wr.Flags = verbs.FlagSignaled
			}
			wrs = append(wrs, wr)
		}
		h.post(wrs...)
		h.done(round*8+7, verbs.OpWrite)
	}
	if h.poll() != 0 {
		s.Errorf("requests that were not signaled completed: %+v", h.got)
	}
}

func (s *suite) inline() {
	g, h := s.pair(size{inline: 32}, params())
	n := h.qp.InlineBytes()
	if n == 0 {
		return // the device does not support inline data
	}
	n = min(n, 32)
	for i := range 20 {
		g.postRecv(g.recv(1, 0, 64))
		copy(h.mem, pattern(n, i))
		wr := h.send(verbs.OpSend, 2, 0, n, verbs.FlagSignaled|verbs.FlagInline)
		wr.LKey = 0
		h.post(wr)
		clear(h.mem[:n])
		if c := g.done(1, verbs.OpRecv); int(c.Len) != n || !bytes.Equal(g.mem[:n], pattern(n, i)) {
			s.fatal("inline data % x, want % x", g.mem[:c.Len], pattern(n, i))
		}
		h.done(2, verbs.OpSend)
	}
}

func (s *suite) invalidate() {
	if !s.cfg.Invalidates {
		return
	}
	g, h := s.pair(size{}, params())
	extra := h.register(s.memory(4096), allAccess)
	h.postRecv(h.recv(1, 0, 64))
	wr := g.send(verbs.OpSendInvalidate, 2, 0, 16, verbs.FlagSignaled)
	wr.RKey = extra.RKey()
	g.post(wr)
	if c := h.done(1, verbs.OpRecv); !c.Invalidated || c.RKey != extra.RKey() || c.Len != 16 {
		s.Errorf("%+v, want key %#x invalidated", c, extra.RKey())
	}
	g.done(2, verbs.OpSend)
	bad := g.send(verbs.OpWrite, 3, 0, 16, verbs.FlagSignaled)
	bad.RemoteAddr, bad.RKey = extra.Addr(), extra.RKey()
	g.post(bad)
	g.wants(g.completions(1)[0], 3, 0, verbs.StatusRemoteAccess)
}

func (s *suite) queueFull() {
	_, h := s.pair(size{sends: 4, recvs: 4}, params())
	full := func(what string, post func(id uint64) (int, error)) {
		for id := range uint64(1 << 16) {
			n, err := post(id)
			if err == nil && n == 1 {
				continue
			}
			if n != 0 || !errors.Is(err, verbs.ErrQueueFull) || id < 4 {
				s.Errorf("%s %d: took %d, %v, want ErrQueueFull", what, id, n, err)
			}
			return
		}
		s.Errorf("the queue of %s has no end", what)
	}
	// The peer has posted no receive and sends nothing, so both queues fill up.
	full("send", func(id uint64) (int, error) {
		return h.domain.PostSend([]verbs.SendWR{h.send(verbs.OpSend, id, 0, 8, 0)})
	})
	full("receive", func(id uint64) (int, error) { return h.qp.PostRecv([]verbs.RecvWR{h.recv(id, 0, 64)}) })
}

func (s *suite) lateReceive() {
	g, h := s.pair(size{}, params())
	for i := range uint64(5) {
		h.post(h.send(verbs.OpSend, i, 0, 32, verbs.FlagSignaled))
		g.postRecv(g.recv(i, 0, 64))
		h.done(i, verbs.OpSend)
		g.done(i, verbs.OpRecv)
	}
}

func (s *suite) noReceive() {
	p := params()
	p.RNRRetryCount = 1
	_, h := s.pair(size{}, p)
	h.post(h.send(verbs.OpSend, 1, 0, 32, verbs.FlagSignaled))
	h.wants(h.completions(1)[0], 1, 0, verbs.StatusRNRExceeded)
}

// failed checks the consequences of a failed request with ID 1: later requests are flushed, and a Disconnect reaches
// the peer.
func (s *suite) failed(h, g *end, status verbs.WCStatus, outstanding int) {
	s.Helper()
	c := h.completions(1 + outstanding)
	h.wants(c[0], 1, 0, status)
	for i, c := range c[1:] {
		h.wants(c, uint64(i)+2, 0, verbs.StatusFlushed)
	}
	h.post(h.send(verbs.OpSend, 99, 0, 8, 0))
	h.wants(h.completions(1)[0], 99, 0, verbs.StatusFlushed)
	s.need("disconnect", h.ep.Disconnect())
	g.gone()
}

func (s *suite) badRemote() {
	for _, test := range []struct {
		name string
		op   verbs.Op
		bad  func(wr *verbs.SendWR, g *end)
	}{
		{"write with an unknown key", verbs.OpWrite, func(wr *verbs.SendWR, _ *end) { wr.RKey ^= 0x5a5a5a00 }},
		{"read with an unknown key", verbs.OpRead, func(wr *verbs.SendWR, _ *end) { wr.RKey ^= 0x5a5a5a00 }},
		{"write before the region", verbs.OpWrite, func(wr *verbs.SendWR, g *end) { wr.RemoteAddr = g.mr.Addr() - 8 }},
		{"write over the end", verbs.OpWrite,
			func(wr *verbs.SendWR, g *end) { wr.RemoteAddr = g.mr.Addr() + uint64(len(g.mem)) - 8 }},
		{"read over the end", verbs.OpRead,
			func(wr *verbs.SendWR, g *end) { wr.RemoteAddr = g.mr.Addr() + uint64(len(g.mem)) - 8 }},
		{"write to what may only be read", verbs.OpWrite, func(wr *verbs.SendWR, g *end) {
			mr := g.register(g.memory(4096), verbs.LocalWrite|verbs.RemoteRead)
			wr.RemoteAddr, wr.RKey = mr.Addr(), mr.RKey()
		}},
		{"read of what may only be written", verbs.OpRead, func(wr *verbs.SendWR, g *end) {
			mr := g.register(g.memory(4096), verbs.LocalWrite|verbs.RemoteWrite)
			wr.RemoteAddr, wr.RKey = mr.Addr(), mr.RKey()
		}},
		{"write to what is not registered any more", verbs.OpWrite, func(wr *verbs.SendWR, g *end) {
			mr := g.register(g.memory(4096), allAccess)
			wr.RemoteAddr, wr.RKey = mr.Addr(), mr.RKey()
			s.need("close", mr.Close())
		}},
	} {
		s.Log(test.name)
		g, h := s.pair(size{}, params())
		wr := to(h.send(test.op, 1, 0, 64, verbs.FlagSignaled), g, 0)
		test.bad(&wr, g)
		h.post(wr, to(h.send(verbs.OpWrite, 2, 0, 64, verbs.FlagSignaled), g, 0),
			to(h.send(verbs.OpWrite, 3, 0, 64, 0), g, 0))
		s.failed(h, g, verbs.StatusRemoteAccess, 2)
	}
}

func (s *suite) badLocal() {
	g, h := s.pair(size{}, params())
	g.postRecv(g.recv(1, 0, 64))
	wr := h.send(verbs.OpSend, 1, 0, 64, 0)
	wr.LKey ^= 0x5a5a5a00
	h.post(wr, h.send(verbs.OpSend, 2, 0, 64, 0))
	c := h.completions(2)
	if c[0].ID != 1 || c[0].Status == verbs.StatusOK || c[0].Status == verbs.StatusFlushed {
		s.Errorf("send with a wrong LKey: %+v (%v)", c[0], c[0].Status)
	}
	h.wants(c[1], 2, 0, verbs.StatusFlushed)
	s.need("disconnect", h.ep.Disconnect())
	g.gone()
}

func (s *suite) shortReceive() {
	g, h := s.pair(size{}, params())
	g.postRecv(g.recv(1, 0, 16))
	h.post(h.send(verbs.OpSend, 1, 0, 64, verbs.FlagSignaled))
	for _, e := range []*end{g, h} {
		if c := e.completions(1)[0]; c.ID != 1 || c.Status == verbs.StatusOK {
			s.Errorf("64 bytes for a receive of 16: %+v (%v)", c, c.Status)
		}
	}
}

func (s *suite) batches() {
	g, h := s.pair(size{shared: 16}, params())
	check := func(what string, e *end, crossings, doorbells uint64, do func()) {
		s.Helper()
		c, d := e.provider.Crossings(), e.domain.Doorbells()
		do()
		if c, d = e.provider.Crossings()-c, e.domain.Doorbells()-d; c != crossings || d != doorbells {
			s.Errorf("%s: %d crossings and %d doorbells, want %d and %d", what, c, d, crossings, doorbells)
		}
	}
	check("8 receives", g, 1, 1, func() {
		var wrs []verbs.RecvWR
		for i := range uint64(8) {
			wrs = append(wrs, g.recv(i, int(i)*64, 64))
		}
		g.postRecv(wrs...)
	})
	check("8 sends", h, 1, 1, func() {
		var wrs []verbs.SendWR
		for i := range uint64(8) {
			wrs = append(wrs, h.send(verbs.OpSend, i, 0, 64, verbs.FlagSignaled))
		}
		h.post(wrs...)
	})
	// Wait for all messages, for as many notifications as that takes.
	g.got = append(g.got, g.completions(8)...)
	h.got = append(h.got, h.completions(8)...)
	check("poll of nothing", h, 1, 0, func() { h.poll() })
	check("nothing to post", h, 0, 0, func() { h.post() })
}

func (s *suite) allocations() {
	g, h := s.pair(size{shared: 16}, params())
	var sends [1]verbs.SendWR
	var recvs [1]verbs.RecvWR
	var wcs [4]verbs.WC
	sends[0] = h.send(verbs.OpSend, 1, 0, 64, verbs.FlagSignaled)
	recvs[0] = g.recv(2, 0, 64)
	s.need("set a deadline", g.cq.SetDeadline(g.soon()))
	s.need("set a deadline", h.cq.SetDeadline(h.soon()))
	one := func(cq verbs.CQ) {
		for {
			if n, err := cq.Poll(wcs[:]); n > 0 || err != nil {
				return
			}
			if cq.Arm() != nil {
				return
			}
			if n, err := cq.Poll(wcs[:]); n > 0 || err != nil {
				return
			}
			if cq.Wait() != nil {
				return
			}
		}
	}
	n := testing.AllocsPerRun(100, func() {
		g.srq.PostRecv(recvs[:])
		h.domain.PostSend(sends[:])
		one(g.cq)
		one(h.cq)
	})
	if n != 0 {
		s.Errorf("a message takes %v allocations", n)
	}
}
