package memverbs

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// modelQP is a model of a queue pair, based on lists.
type modelQP struct {
	h, g *side
	// signaled are the requests in order, with whether they complete.
	signaled []bool
	// completed is the next request whose completion may come, freed the first one that occupies a place.
	completed, freed int
	// written is the last value written; reads are the posted READs, with the minimum value that each must return.
	written uint64
	reads   []modelRead
	// sent and received are messages.
	sent, received uint64
}

type modelRead struct {
	off   int
	least uint64
}

func TestRandomRequestsAgreeWithAList(t *testing.T) {
	forSeeds(t, 150, func(t *testing.T, seed uint64) {
		const qps, sends = 3, 8
		c := rigConfig{net: Config{Seed: seed}, srq: 8, sends: sends}
		r := newRig(t, c)
		c.recvs = 0
		first := &modelQP{h: r.host, g: r.target}
		models := []*modelQP{first}
		for len(models) < qps {
			// More connections over the same domains and queues, with memory of their own.
			m := &modelQP{h: &side{}, g: &side{}}
			*m.h, *m.g = *r.host, *r.target
			m.h.mem, m.g.mem = make([]byte, 64<<10), make([]byte, 64<<10)
			m.h.mr, m.g.mr = must(m.h.dom.Register(m.h.mem, anything)), must(m.g.dom.Register(m.g.mem, anything))
			m.h.endpoint(must(m.h.p.Resolve(context.Background(), netip.AddrPortFrom(targetIP, 4420))), c)
			must(0, m.h.ep.Begin(usual))
			m.g.endpoint(must(r.lis.Accept()), c)
			must(0, m.g.ep.Accept(usual))
			must(0, m.h.ep.Connect(context.Background(), usual))
			models = append(models, m)
		}
		byNum := map[uint32]*modelQP{}
		for _, m := range models {
			byNum[m.h.qp.Num()], byNum[m.g.qp.Num()] = m, m
		}
		rng := rand.New(rand.NewPCG(seed, 1))
		recvsPosted, recvsTaken := uint64(0), uint64(0)

		// Each request has memory of its own: 8 bytes at 64 + 8 times its number; writes go to offset 0, messages
		// to the first connection's memory.
		post := func(m *modelQP) {
			number := len(m.signaled)
			off := 64 + 8*number
			wr := m.h.send(0, uint64(number), off, 8, verbs.Flags(rng.IntN(2))*verbs.FlagSignaled)
			switch rng.IntN(3) {
			case 0:
				binary.LittleEndian.PutUint64(m.h.mem[off:], m.sent)
			case 1:
				wr = to(wr, m.g, 0)
				wr.Op = verbs.OpWrite
				binary.LittleEndian.PutUint64(m.h.mem[off:], m.written+1)
			case 2:
				wr = to(wr, m.g, 0)
				wr.Op = verbs.OpRead
			}
			n, err := m.h.dom.PostSend([]verbs.SendWR{wr})
			if full := number-m.freed == sends; full != (n == 0) || full != (err == verbs.ErrQueueFull) {
				t.Fatalf("request %d with those from %d on in use: took %d, %v", number, m.freed, n, err)
			}
			if n == 0 {
				return
			}
			m.signaled = append(m.signaled, wr.Flags != 0)
			switch wr.Op {
			case verbs.OpSend:
				m.sent++
			case verbs.OpWrite:
				m.written++
			case verbs.OpRead:
				m.reads = append(m.reads, modelRead{off, m.written})
			}
		}
		pollHost := func() {
			for _, wc := range r.host.poll() {
				m := byNum[wc.QPNum]
				for m.completed < len(m.signaled) && !m.signaled[m.completed] {
					m.completed++
				}
				if wc.Status != verbs.StatusOK || wc.ID != uint64(m.completed) {
					t.Fatalf("%+v, want request %d", wc, m.completed)
				}
				m.completed++
				m.freed = m.completed
			}
		}
		pollTarget := func() {
			for _, wc := range r.target.poll() {
				m := byNum[wc.QPNum]
				if wc.Status != verbs.StatusOK || wc.ID != recvsTaken || wc.Len != 8 {
					t.Fatalf("%+v, want receive %d", wc, recvsTaken)
				}
				if v := binary.LittleEndian.Uint64(r.target.mem[64+8*(wc.ID%8):]); v != m.received {
					t.Fatalf("message %d, want %d", v, m.received)
				}
				m.received++
				recvsTaken++
			}
		}
		receive := func() {
			n, err := r.target.srq.PostRecv([]verbs.RecvWR{r.target.recv(recvsPosted, 64+8*int(recvsPosted%8), 8)})
			if full := recvsPosted-recvsTaken == 8; full != (n == 0) || full != (err == verbs.ErrQueueFull) {
				t.Fatalf("receive %d, %d taken: %d, %v", recvsPosted, recvsTaken, n, err)
			}
			recvsPosted += uint64(n)
		}
		for range 400 {
			switch rng.IntN(6) {
			case 0, 1:
				post(models[rng.IntN(qps)])
			case 2:
				receive()
			case 3:
				for range rng.IntN(20) {
					r.Step()
				}
			case 4:
				pollHost()
			case 5:
				pollTarget()
			}
		}
		for range 100 {
			receive()
			r.Run()
			pollHost()
			pollTarget()
		}
		for i, m := range models {
			for _, done := range m.signaled[m.completed:] {
				if done {
					t.Fatalf("queue pair %d: %d requests, the completion from %d on is missing", i, len(m.signaled),
						m.completed)
				}
			}
			if m.received != m.sent || binary.LittleEndian.Uint64(m.g.mem) != m.written {
				t.Fatalf("queue pair %d: %d of %d messages, the last of %d writes is %d", i, m.received, m.sent,
					m.written, binary.LittleEndian.Uint64(m.g.mem))
			}
			for _, read := range m.reads {
				if v := binary.LittleEndian.Uint64(m.h.mem[read.off:]); v < read.least || v > m.written {
					t.Fatalf("queue pair %d: a READ saw %d, want at least %d", i, v, read.least)
				}
			}
			if m != first {
				must(0, m.h.ep.Close())
				must(0, m.g.ep.Close())
				must(0, m.h.mr.Close())
				must(0, m.g.mr.Close())
			}
		}
		r.close()
	})
}

// echo is a target that sends every message back, until its listener closes.
type echo struct {
	*side
	mu  sync.Mutex
	eps map[uint32]*side // by queue pair
	// accepting, serving and closing wait for the goroutines accept, serve, and one for each endpoint.
	accepting, serving, closing sync.WaitGroup
}

func (s *echo) accept(l verbs.Listener, c rigConfig) {
	for {
		e, err := l.Accept()
		if err != nil {
			return
		}
		one := *s.side
		one.ep = e.(*Endpoint)
		one.qp = must(e.CreateQP(verbs.QPConfig{Domain: s.dom, SendCQ: s.cq, RecvCQ: s.cq, SRQ: s.srq, Sends: c.sends,
			InlineBytes: 64}))
		gone := make(chan struct{}, 4)
		e.OnEvent(func(v verbs.Event) {
			if v != verbs.Established {
				gone <- struct{}{}
			}
		})
		s.mu.Lock()
		s.eps[one.qp.Num()] = &one
		s.mu.Unlock()
		s.closing.Go(func() {
			<-gone
			s.mu.Lock()
			delete(s.eps, one.qp.Num())
			s.mu.Unlock()
			must(0, e.Close())
		})
		must(0, e.Accept(usual))
	}
}

func (s *echo) serve() {
	wcs := make([]verbs.WC, 8)
	for armed := false; ; {
		n, err := s.cq.Poll(wcs)
		switch {
		case err != nil:
			return
		case n == 0 && !armed:
			must(0, s.cq.Arm())
			armed = true
			continue
		case n == 0:
			if s.cq.Wait() != nil {
				return
			}
		}
		armed = false
		for _, wc := range wcs[:n] {
			if wc.Op != verbs.OpRecv || wc.Status != verbs.StatusOK {
				continue
			}
			s.mu.Lock()
			one := s.eps[wc.QPNum]
			s.mu.Unlock()
			// Inline: the receive's memory is free at once.
			if one != nil {
				wr := one.send(verbs.OpSend, wc.ID, int(wc.ID)*64, int(wc.Len), verbs.FlagSignaled|verbs.FlagInline)
				s.dom.PostSend([]verbs.SendWR{wr}) // refused if it has gone
			}
			s.postRecv(s.recv(wc.ID, int(wc.ID)*64, 64))
		}
	}
}

func TestLiveEchoWhileConnectionsAreCut(t *testing.T) {
	forSeeds(t, 10, func(t *testing.T, seed uint64) {
		n := New(Config{Seed: seed, Live: true})
		// Receives may be lost with closed queue pairs, so there are far more of them than are ever lost.
		c := rigConfig{cqes: 8192, sends: 64, srq: 1024}
		g := &echo{side: newSide(t, n, targetIP, c), eps: map[uint32]*side{}}
		for i := range uint64(1000) {
			g.postRecv(g.recv(i, int(i)*64, 64))
		}
		l := must(g.p.Listen(netip.AddrPortFrom(targetIP, 4420), 16))
		g.accepting.Go(func() { g.accept(l, c) })
		g.serving.Go(g.serve)
		h := n.NewProvider(DeviceConfig{Addr: hostIP})
		var hosts sync.WaitGroup
		for i := range uint64(4) {
			hosts.Go(func() { echoes(t, h, seed*100+i) })
		}
		hosts.Wait()
		must(0, l.Close())
		g.accepting.Wait()
		for _, e := range n.Endpoints() {
			e.Cut()
		}
		g.closing.Wait()
		must(0, g.cq.Close())
		g.serving.Wait()
		must(0, g.srq.Close())
		must(0, g.mr.Close())
		must(0, g.dom.Close())
		for _, p := range []*Provider{g.p, h} {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
		must(0, n.Close())
		if err := n.Faults(); err != nil {
			t.Error(err)
		}
	})
}

// echoes is a host that connects, sends messages and disconnects, several times.
func echoes(t *testing.T, p *Provider, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 2))
	s := &side{t: t, p: p, mem: make([]byte, 4096)}
	s.dom = must(p.Devices()[0].OpenDomain())
	s.cq = must(s.dom.CreateCQ(64))
	s.mr = must(s.dom.Register(s.mem, anything))
	must(0, s.cq.SetDeadline(time.Now().Add(time.Minute)))
	wcs := make([]verbs.WC, 4)
	next := func() verbs.WC {
		for {
			if n := must(s.cq.Poll(wcs[:1])); n > 0 {
				return wcs[0]
			}
			must(0, s.cq.Arm())
			if n := must(s.cq.Poll(wcs[:1])); n > 0 {
				return wcs[0]
			}
			must(0, s.cq.Wait())
		}
	}
	for range 10 {
		e := must(p.Resolve(context.Background(), netip.AddrPortFrom(targetIP, 4420)))
		s.ep = e.(*Endpoint)
		s.qp = must(e.CreateQP(verbs.QPConfig{Domain: s.dom, SendCQ: s.cq, RecvCQ: s.cq, Sends: 4, Recvs: 4}))
		must(0, e.Connect(context.Background(), usual))
		ends := rng.IntN(30)
		for i := range uint64(20) {
			if int(i) == ends {
				s.ep.Cut()
				break
			}
			binary.LittleEndian.PutUint64(s.mem, i+seed)
			s.postRecv(s.recv(i, 64, 64))
			s.post(s.send(verbs.OpSend, i, 0, 8, verbs.FlagSignaled))
			for got := 0; got < 2; got++ {
				if wc := next(); wc.Status != verbs.StatusOK {
					t.Errorf("%+v (%v)", wc, wc.Status)
				}
			}
			if v := binary.LittleEndian.Uint64(s.mem[64:]); v != i+seed {
				t.Errorf("echo of %d is %d", i+seed, v)
			}
		}
		must(0, e.Close())
		for n := 1; n > 0; {
			n = must(s.cq.Poll(wcs))
		}
	}
	must(0, s.cq.Close())
	must(0, s.mr.Close())
	must(0, s.dom.Close())
	if _, err := s.cq.Poll(wcs); !errors.Is(err, net.ErrClosed) {
		t.Errorf("poll of a closed queue: %v", err)
	}
}
