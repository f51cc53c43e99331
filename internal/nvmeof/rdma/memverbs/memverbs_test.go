package memverbs

import (
	"bytes"
	"context"
	"flag"
	"net/netip"
	"slices"
	"testing"

	"jbofd/internal/nvmeof/rdma/verbs"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the networks; 0: those of the test")

// forSeeds runs f with some seeds, or with the one of -seed.
func forSeeds(t *testing.T, n uint64, f func(t *testing.T, seed uint64)) {
	t.Helper()
	first, last := uint64(1), n
	if *seedFlag != 0 {
		first, last = *seedFlag, *seedFlag
	}
	for seed := first; seed <= last && !t.Failed(); seed++ {
		f(t, seed)
		if t.Failed() {
			t.Logf("with -seed %d", seed)
		}
	}
}

// side is one end of a connection with its resources.
type side struct {
	t    testing.TB
	p    *Provider
	dom  verbs.Domain
	cq   verbs.CQ
	srq  verbs.SRQ
	mr   verbs.MR
	mem  []byte
	ep   *Endpoint
	qp   verbs.QP
	told []verbs.Event
}

// rig is a network that the test advances by steps, and a connection in it.
type rig struct {
	*Network
	t            testing.TB
	lis          verbs.Listener
	target, host *side
}

type rigConfig struct {
	net          Config
	device       DeviceConfig
	cqes         int
	sends, recvs int
	srq          int
	target, host verbs.Params
	unconnected  bool
	// bound listens on the target's address, not on the wildcard.
	bound bool
}

const anything = verbs.LocalWrite | verbs.RemoteRead | verbs.RemoteWrite

var (
	targetIP = netip.MustParseAddr("10.0.0.1")
	hostIP   = netip.MustParseAddr("10.0.0.2")
)

var usual = verbs.Params{ResponderResources: 4, InitiatorDepth: 4, RetryCount: 7, RNRRetryCount: 7}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newSide(t testing.TB, n *Network, ip netip.Addr, c rigConfig) *side {
	t.Helper()
	dev := c.device
	dev.Addr = ip
	s := &side{t: t, p: n.NewProvider(dev), mem: make([]byte, 64<<10)}
	s.dom = must(s.p.Devices()[0].OpenDomain())
	s.cq = must(s.dom.CreateCQ(c.cqes))
	s.mr = must(s.dom.Register(s.mem, anything))
	if c.srq > 0 {
		s.srq = must(s.dom.CreateSRQ(c.srq))
	}
	return s
}

func (s *side) endpoint(e verbs.Endpoint, c rigConfig) {
	s.t.Helper()
	s.ep = e.(*Endpoint)
	q := verbs.QPConfig{Domain: s.dom, SendCQ: s.cq, RecvCQ: s.cq, SRQ: s.srq, Sends: c.sends, Recvs: c.recvs,
		InlineBytes: 64}
	if s.srq != nil {
		q.Recvs = 0
	}
	s.qp = must(e.CreateQP(q))
	e.OnEvent(func(v verbs.Event) { s.told = append(s.told, v) })
}

func newRig(t testing.TB, c rigConfig) *rig {
	t.Helper()
	orDefault(&c.cqes, 1024)
	orDefault(&c.sends, 16)
	orDefault(&c.recvs, 16)
	for _, p := range []*verbs.Params{&c.target, &c.host} {
		if p.RNRRetryCount == 0 && p.InitiatorDepth == 0 {
			*p = usual
		}
	}
	r := &rig{Network: New(c.net), t: t}
	r.target, r.host = newSide(t, r.Network, targetIP, c), newSide(t, r.Network, hostIP, c)
	at := netip.AddrPortFrom(netip.IPv4Unspecified(), 4420)
	if c.bound {
		at = netip.AddrPortFrom(targetIP, 4420)
	}
	r.lis = must(r.target.p.Listen(at, 8))
	if !c.unconnected {
		r.host.endpoint(must(r.host.p.Resolve(context.Background(), netip.AddrPortFrom(targetIP, 4420))), c)
		if err := r.host.ep.Begin(c.host); err != nil {
			t.Fatal(err)
		}
		r.target.endpoint(must(r.lis.Accept()), c)
		if err := r.target.ep.Accept(c.target); err != nil {
			t.Fatal(err)
		}
		if err := r.host.ep.Connect(context.Background(), c.host); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// close closes everything and checks that nothing is left and that the network has recorded no misuse.
func (r *rig) close() {
	r.t.Helper()
	r.closeFaulty()
	if err := r.Faults(); err != nil {
		r.t.Error(err)
	}
}

// closeFaulty is close without the check for misuse.
func (r *rig) closeFaulty() {
	r.t.Helper()
	r.lis.Close()
	for _, s := range []*side{r.target, r.host} {
		if s.ep != nil {
			s.ep.Close()
		}
		if s.srq != nil {
			must(0, s.srq.Close())
		}
		must(0, s.cq.Close())
		must(0, s.mr.Close())
		must(0, s.dom.Close())
		if err := s.p.Close(); err != nil {
			r.t.Error(err)
		}
	}
	r.Network.Close()
}

// send is a work request over n bytes of the side's memory at off, its number is its ID.
func (s *side) send(op verbs.Op, id uint64, off, n int, f verbs.Flags) verbs.SendWR {
	return verbs.SendWR{ID: id, QP: s.qp.Handle(), Addr: s.mr.Addr() + uint64(off), Len: uint32(n), LKey: s.mr.LKey(),
		Op: op, Flags: f}
}

func (s *side) recv(id uint64, off, n int) verbs.RecvWR {
	return verbs.RecvWR{ID: id, Addr: s.mr.Addr() + uint64(off), Len: uint32(n), LKey: s.mr.LKey()}
}

func (s *side) post(wrs ...verbs.SendWR) {
	s.t.Helper()
	if n, err := s.dom.PostSend(wrs); n != len(wrs) || err != nil {
		s.t.Fatalf("PostSend took %d of %d: %v", n, len(wrs), err)
	}
}

func (s *side) postRecv(wrs ...verbs.RecvWR) {
	s.t.Helper()
	var queue interface {
		PostRecv([]verbs.RecvWR) (int, error)
	} = s.srq
	if s.srq == nil {
		queue = s.qp
	}
	if n, err := queue.PostRecv(wrs); n != len(wrs) || err != nil {
		s.t.Fatalf("PostRecv took %d of %d: %v", n, len(wrs), err)
	}
}

// poll takes all completions.
func (s *side) poll() []verbs.WC {
	s.t.Helper()
	wcs := make([]verbs.WC, 128)
	return wcs[:must(s.cq.Poll(wcs))]
}

// to sets the peer's memory as the target of a request.
func to(wr verbs.SendWR, peer *side, off int) verbs.SendWR {
	wr.RemoteAddr, wr.RKey = peer.mr.Addr()+uint64(off), peer.mr.RKey()
	return wr
}

func TestSendWriteAndReadStepByStep(t *testing.T) {
	forSeeds(t, 50, func(t *testing.T, seed uint64) {
		r := newRig(t, rigConfig{net: Config{Seed: seed}})
		h, g := r.host, r.target
		copy(h.mem, "a message")
		copy(h.mem[100:], "written")
		copy(g.mem[300:], "to be read")
		g.postRecv(g.recv(1, 1000, 64))
		h.post(to(h.send(verbs.OpWrite, 1, 100, 7, 0), g, 200), to(h.send(verbs.OpRead, 2, 400, 10, 0), g, 300),
			h.send(verbs.OpSend, 3, 0, 9, verbs.FlagSignaled))
		r.Run()
		if wc := h.poll(); len(wc) != 1 || wc[0].ID != 3 || wc[0].Status != 0 || wc[0].QPNum != h.qp.Num() {
			t.Errorf("host completions %+v", wc)
		}
		if wc := g.poll(); len(wc) != 1 || wc[0].ID != 1 || wc[0].Len != 9 || wc[0].Op != verbs.OpRecv ||
			wc[0].QPNum != g.qp.Num() {
			t.Errorf("target completions %+v", wc)
		}
		if !bytes.Equal(g.mem[1000:1009], h.mem[:9]) || string(g.mem[200:207]) != "written" ||
			string(h.mem[400:410]) != "to be read" {
			t.Error("memory")
		}
		r.close()
	})
}

// wants checks completions by ID and outcome.
func (s *side) wants(got []verbs.WC, want ...verbs.WC) {
	s.t.Helper()
	if len(got) != len(want) {
		s.t.Fatalf("%d completions %+v, want %d", len(got), got, len(want))
	}
	for i, c := range got {
		if c.ID != want[i].ID || c.Status != want[i].Status || c.QPNum != s.qp.Num() {
			s.t.Fatalf("completion %d: %+v (%v), want ID %d, %v", i, c, c.Status, want[i].ID, want[i].Status)
		}
	}
}

// ended is a completion of a request with that ID and outcome.
func ended(id uint64, status verbs.WCStatus) verbs.WC { return verbs.WC{ID: id, Status: status} }

func TestOneSeedGivesOneRun(t *testing.T) {
	run := func(seed uint64) (steps int, log []verbs.WC) {
		r := newRig(t, rigConfig{net: Config{Seed: seed}})
		for i := range uint64(8) {
			r.target.postRecv(r.target.recv(i, 0, 64))
			r.host.postRecv(r.host.recv(i, 0, 64))
			r.host.post(r.host.send(verbs.OpSend, i, 0, 8, verbs.FlagSignaled))
			r.target.post(r.target.send(verbs.OpSend, i, 0, 8, verbs.FlagSignaled))
		}
		for r.Step() {
			steps++
			log = append(append(log, r.target.poll()...), r.host.poll()...)
		}
		r.close()
		return steps, log
	}
	differ := false
	forSeeds(t, 10, func(t *testing.T, seed uint64) {
		n1, l1 := run(seed)
		n2, l2 := run(seed)
		if n1 != n2 || !slices.Equal(l1, l2) {
			t.Errorf("%d steps, then %d; %v, then %v", n1, n2, l1, l2)
		}
		n3, _ := run(seed + 1)
		differ = differ || n1 != n3
	})
	if !differ {
		t.Error("all seeds give one run")
	}
}

func TestQuietNetworkEndsWhatWouldBlock(t *testing.T) {
	r := newRig(t, rigConfig{})
	if _, err := r.lis.Accept(); err != ErrQuiet {
		t.Errorf("accept: %v", err)
	}
	if err := r.host.cq.Wait(); err != ErrQuiet {
		t.Errorf("wait: %v", err)
	}
	r.close()
}

func TestPostStepPollAllocateNothing(t *testing.T) {
	r := newRig(t, rigConfig{srq: 16})
	h, g := r.host, r.target
	inline := h.send(verbs.OpSend, 4, 0, 32, verbs.FlagInline|verbs.FlagSignaled)
	sends := []verbs.SendWR{to(h.send(verbs.OpWrite, 1, 0, 4096, 0), g, 0),
		to(h.send(verbs.OpRead, 2, 0, 4096, 0), g, 0), h.send(verbs.OpSend, 3, 0, 64, 0), inline}
	recvs := []verbs.RecvWR{g.recv(1, 0, 64), g.recv(2, 0, 64)}
	wcs := make([]verbs.WC, 16)
	if n := testing.AllocsPerRun(200, func() {
		h.dom.PostSend(sends)
		for range 20 {
			r.Step() // so that some find no receive posted
		}
		g.srq.PostRecv(recvs)
		r.Run()
		if n, _ := g.cq.Poll(wcs); n != 2 {
			t.Fatalf("%d messages", n)
		}
		if n, _ := h.cq.Poll(wcs); n != 1 {
			t.Fatalf("%d completions", n)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	r.close()
}

func TestStatsAreExact(t *testing.T) {
	r := newRig(t, rigConfig{})
	h, g := r.host, r.target
	g.postRecv(g.recv(1, 0, 64), g.recv(2, 0, 64))
	g.postRecv(g.recv(3, 0, 64))
	w, rd := to(h.send(verbs.OpWrite, 1, 0, 64, 0), g, 0), to(h.send(verbs.OpRead, 2, 0, 64, 0), g, 0)
	h.post(w, w, rd, h.send(verbs.OpSend, 3, 0, 8, verbs.FlagSignaled))
	h.post(h.send(verbs.OpSend, 4, 0, 8, 0))
	r.Run()
	h.poll()
	if s, want := h.ep.Stats(), (Stats{Sends: 2, Writes: 2, Reads: 1, Doorbells: 2, Completions: 1}); s != want ||
		h.p.Stats() != want {
		t.Errorf("host's %+v, %+v, want %+v", s, h.p.Stats(), want)
	}
	if s, want := g.ep.Stats(), (Stats{Recvs: 2, RecvsPosted: 3, Doorbells: 2, Completions: 2}); s != want ||
		g.p.Stats() != want {
		t.Errorf("target's %+v, %+v, want %+v", s, g.p.Stats(), want)
	}
	if h.p.Crossings() != 3 || g.p.Crossings() != 2 || h.dom.Doorbells() != 2 ||
		g.p.Counts().RegisteredBytes != int64(len(g.mem)) {
		t.Errorf("%d and %d crossings, %d doorbells, %d bytes registered", h.p.Crossings(), g.p.Crossings(),
			h.dom.Doorbells(), g.p.Counts().RegisteredBytes)
	}
	r.close()
}
