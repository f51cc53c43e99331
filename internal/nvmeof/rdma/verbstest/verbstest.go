// Package verbstest is a conformance test for implementations of package verbs. The model in package memverbs and real
// devices pass the same tests, so results obtained on the model hold on devices. The tests require nothing that package
// verbs leaves open.
package verbstest

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// Config describes the implementation under test.
type Config struct {
	// Target listens and Host connects. They may be the same provider.
	Target, Host verbs.Provider
	// Addr is an address of Target that Host can reach.
	Addr netip.Addr
	// Timeout limits the wait for an event that must happen; 0 stands for a minute.
	Timeout time.Duration
	// Invalidates: OpSendInvalidate works on memory regions. Few devices support that.
	Invalidates bool
}

// Run runs the whole suite.
func Run(t *testing.T, cfg Config) {
	if cfg.Timeout == 0 {
		cfg.Timeout = time.Minute
	}
	for _, test := range []struct {
		name string
		run  func(*suite)
	}{
		{"AddressesAgreeOnBothSides", (*suite).addresses},
		{"AcceptAndParamsReachTheOtherSide", (*suite).accept},
		{"RejectCarriesPrivateData", (*suite).reject},
		{"RequestClosedUnansweredIsRefused", (*suite).unanswered},
		{"NobodyListens", (*suite).nobodyListens},
		{"NoDeviceHasTheAddress", (*suite).noDevice},
		{"ContextEndsConnect", (*suite).contextEndsConnect},
		{"CloseEndsAccept", (*suite).closeEndsAccept},
		{"MessagesArriveInOrder", (*suite).messages},
		{"WriteAndReadUpToAMebibyte", (*suite).writeAndRead},
		{"ReadsBeyondTheDepthWait", (*suite).manyReads},
		{"FenceWaitsForReads", (*suite).fence},
		{"QueuePairsShareReceives", (*suite).sharedReceives},
		{"UnsignaledDoNotComplete", (*suite).unsignaled},
		{"InlineDataMayChangeAtOnce", (*suite).inline},
		{"SendInvalidateEndsAKey", (*suite).invalidate},
		{"QueuesSayWhenTheyAreFull", (*suite).queueFull},
		{"SendWaitsForAReceive", (*suite).lateReceive},
		{"SendGivesUpWithoutAReceive", (*suite).noReceive},
		{"WrongRemoteMemoryIsRefused", (*suite).badRemote},
		{"WrongLocalMemoryIsRefused", (*suite).badLocal},
		{"ShortReceiveFailsBothSides", (*suite).shortReceive},
		{"DisconnectFlushes", (*suite).disconnect},
		{"CloseDisconnects", (*suite).closeDisconnects},
		{"WaitEndsByNoticeDeadlineAndClose", (*suite).wait},
		{"BatchesCrossAndRingOnce", (*suite).batches},
		{"PostAndPollDoNotAllocate", (*suite).allocations},
		{"ClosingTwiceIsNothing", (*suite).closeTwice},
		{"FiftyConnectionsLeaveNothing", (*suite).manyConnections},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := cfg.counts()
			s := &suite{T: t, cfg: cfg}
			test.run(s)
			s.closeAll()
			if after := cfg.counts(); after != before {
				t.Errorf("objects before %+v, after %+v", before, after)
			}
		})
	}
}

func (c *Config) counts() [2]verbs.Counts {
	return [2]verbs.Counts{c.Target.Counts(), c.Host.Counts()}
}

// suite is a test and the objects that it has opened.
type suite struct {
	*testing.T
	cfg     Config
	cleanup []func()
}

func (s *suite) later(f func()) { s.cleanup = append(s.cleanup, f) }

// closeAll closes the objects in reverse order, as package verbs requires.
func (s *suite) closeAll() {
	for len(s.cleanup) > 0 {
		f := s.cleanup[len(s.cleanup)-1]
		s.cleanup = s.cleanup[:len(s.cleanup)-1]
		f()
	}
}

func (s *suite) context() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout)
	s.later(cancel)
	return ctx
}

// need ends the test if err is not nil.
func (s *suite) need(what string, err error) {
	s.Helper()
	if err != nil {
		s.closeAll()
		s.Fatalf("%s: %v", what, err)
	}
}

// fatal ends the test.
func (s *suite) fatal(format string, args ...any) {
	s.Helper()
	s.closeAll()
	s.Fatalf(format, args...)
}

func (s *suite) closes(what string, c interface{ Close() error }) {
	s.later(func() {
		if err := c.Close(); err != nil {
			s.Errorf("close of %s: %v", what, err)
		}
	})
}

func (s *suite) listen() verbs.Listener {
	s.Helper()
	l, err := s.cfg.Target.Listen(netip.AddrPortFrom(s.cfg.Addr, 0), 64)
	s.need("listen", err)
	s.closes("listener", l)
	return l
}

func (s *suite) resolve(l verbs.Listener) verbs.Endpoint {
	s.Helper()
	e, err := s.cfg.Host.Resolve(s.context(), netip.AddrPortFrom(s.cfg.Addr, l.Addr().Port()))
	s.need("resolve", err)
	return e
}

// size holds the sizes of each end of a connection.
type size struct {
	// bytes is the size of the memory. sends, recvs and shared are the sizes of the send, receive and shared receive
	// queue. inline is the length of inline data.
	bytes, sends, recvs, shared, inline int
}

func (s size) orUsual() size {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&s.bytes, 64<<10)
	def(&s.sends, 16)
	def(&s.recvs, 16)
	def(&s.inline, 32)
	return s
}

// cqEntries is more than any test has outstanding.
const cqEntries = 1024

// pool holds the objects that the queue pairs of one side share.
type pool struct {
	*suite
	provider verbs.Provider
	domain   verbs.Domain
	cq       verbs.CQ
	srq      verbs.SRQ
	mr       verbs.MR
	mem      []byte
	size     size
	// got holds completions that were polled and that no test has requested yet.
	got []verbs.WC
}

// memory returns memory outside of the Go heap.
func (s *suite) memory(n int) []byte {
	s.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	s.need("mmap", err)
	s.later(func() {
		if err := unix.Munmap(b); err != nil {
			s.Error(err)
		}
	})
	return b
}

const allAccess = verbs.LocalWrite | verbs.RemoteRead | verbs.RemoteWrite

func (s *suite) pool(p verbs.Provider, d verbs.Device, z size) *pool {
	s.Helper()
	q := &pool{suite: s, provider: p, size: z, mem: s.memory(z.bytes)}
	var err error
	q.domain, err = d.OpenDomain()
	s.need("open a domain", err)
	s.closes("domain", q.domain)
	q.mr = q.register(q.mem, allAccess)
	q.cq, err = q.domain.CreateCQ(cqEntries)
	s.need("create a completion queue", err)
	s.closes("completion queue", q.cq)
	if z.shared > 0 {
		q.srq, err = q.domain.CreateSRQ(z.shared)
		s.need("create a shared receive queue", err)
		s.closes("shared receive queue", q.srq)
	}
	return q
}

func (p *pool) register(b []byte, a verbs.Access) verbs.MR {
	p.Helper()
	mr, err := p.domain.Register(b, a)
	p.need("register memory", err)
	p.closes("memory region", mr)
	return mr
}

// end is one end of a connection.
type end struct {
	*pool
	ep     verbs.Endpoint
	qp     verbs.QP
	events chan verbs.Event
}

func (p *pool) end(ep verbs.Endpoint) *end {
	p.Helper()
	// The buffer holds more events than there are kinds, because OnEvent's function must not block.
	e := &end{pool: p, ep: ep, events: make(chan verbs.Event, 16)}
	c := verbs.QPConfig{Domain: p.domain, SendCQ: p.cq, RecvCQ: p.cq, Sends: p.size.sends, Recvs: p.size.recvs,
		InlineBytes: p.size.inline}
	if p.srq != nil {
		c.SRQ, c.Recvs = p.srq, 0
	}
	p.closes("endpoint", ep)
	var err error
	e.qp, err = ep.CreateQP(c)
	p.need("create a queue pair", err)
	ep.OnEvent(func(v verbs.Event) { e.events <- v })
	return e
}

// params returns parameters with which messages wait for a receive without limit.
func params() verbs.Params {
	return verbs.Params{ResponderResources: 4, InitiatorDepth: 4, RetryCount: 7, RNRRetryCount: 7}
}

// pair returns the two ends of a new connection.
func (s *suite) pair(z size, p verbs.Params) (target, host *end) {
	s.Helper()
	z = z.orUsual()
	l := s.listen()
	he := s.resolve(l)
	h := s.pool(s.cfg.Host, he.Device(), z).end(he)
	connected := s.connect(h, p)
	te, err := l.Accept()
	s.need("accept from the listener", err)
	g := s.pool(s.cfg.Target, te.Device(), z).end(te)
	s.need("accept", te.Accept(p))
	s.need("connect", <-connected)
	s.established(g)
	return g, h
}

func (s *suite) connect(h *end, p verbs.Params) <-chan error {
	connected := make(chan error, 1)
	ctx := s.context()
	go func() { connected <- h.ep.Connect(ctx, p) }()
	return connected
}

// established waits until the target's end is established.
func (s *suite) established(e *end) {
	s.Helper()
	if v := e.event(); v != verbs.Established {
		s.fatal("event %q, want %q", v, verbs.Established)
	}
}

// event returns the next event of the end.
func (e *end) event() verbs.Event {
	e.Helper()
	select {
	case v := <-e.events:
		return v
	case <-e.context().Done():
		e.fatal("no event")
		panic("unreachable")
	}
}

// soon returns the time at which a wait that begins now gives up.
func (p *pool) soon() time.Time { return time.Now().Add(p.cfg.Timeout) }

// completions waits for n completions and returns them.
func (p *pool) completions(n int) []verbs.WC {
	p.Helper()
	p.need("set a deadline", p.cq.SetDeadline(p.soon()))
	for len(p.got) < n {
		if p.poll() > 0 {
			continue
		}
		p.need("arm", p.cq.Arm())
		if p.poll() > 0 {
			continue
		}
		if err := p.cq.Wait(); errors.Is(err, os.ErrDeadlineExceeded) {
			p.fatal("%d completions, want %d: %+v", len(p.got), n, p.got)
		} else {
			p.need("wait", err)
		}
	}
	got := p.got[:n:n]
	p.got = p.got[n:]
	return got
}

func (p *pool) poll() int {
	p.Helper()
	var wcs [16]verbs.WC
	n, err := p.cq.Poll(wcs[:])
	p.need("poll", err)
	p.got = append(p.got, wcs[:n]...)
	return n
}

// send returns a work request over n bytes of the end's memory, starting at off.
func (e *end) send(op verbs.Op, id uint64, off, n int, f verbs.Flags) verbs.SendWR {
	return verbs.SendWR{ID: id, QP: e.qp.Handle(), Addr: e.mr.Addr() + uint64(off), Len: uint32(n), LKey: e.mr.LKey(),
		Op: op, Flags: f}
}

// to sets the remote address of a request to the peer's memory, starting at off.
func to(wr verbs.SendWR, peer *end, off int) verbs.SendWR {
	wr.RemoteAddr, wr.RKey = peer.mr.Addr()+uint64(off), peer.mr.RKey()
	return wr
}

func (p *pool) recv(id uint64, off, n int) verbs.RecvWR {
	return verbs.RecvWR{ID: id, Addr: p.mr.Addr() + uint64(off), Len: uint32(n), LKey: p.mr.LKey()}
}

func (e *end) post(wrs ...verbs.SendWR) {
	e.Helper()
	if n, err := e.domain.PostSend(wrs); n != len(wrs) || err != nil {
		e.fatal("PostSend took %d of %d: %v", n, len(wrs), err)
	}
}

func (e *end) postRecv(wrs ...verbs.RecvWR) {
	e.Helper()
	post := e.qp.PostRecv
	if e.srq != nil {
		post = e.srq.PostRecv
	}
	if n, err := post(wrs); n != len(wrs) || err != nil {
		e.fatal("PostRecv took %d of %d: %v", n, len(wrs), err)
	}
}

// wants checks the ID and the status of a completion and, if it succeeded, the operation.
func (e *end) wants(c verbs.WC, id uint64, op verbs.Op, status verbs.WCStatus) {
	e.Helper()
	if c.ID != id || c.Status != status || c.QPNum != e.qp.Num() || status == verbs.StatusOK && c.Op != op {
		e.Errorf("completion %+v (%v), want ID %d of queue pair %d, operation %d, %v", c, c.Status, id, e.qp.Num(), op,
			status)
	}
}

// done waits for one completion, which must be successful.
func (e *end) done(id uint64, op verbs.Op) verbs.WC {
	e.Helper()
	c := e.completions(1)[0]
	e.wants(c, id, op, verbs.StatusOK)
	return c
}

// gone waits for the event that ends a connection. The event Fatal may precede it.
func (e *end) gone() {
	e.Helper()
	for {
		switch v := e.event(); v {
		case verbs.Disconnected:
			return
		case verbs.Fatal, verbs.Established:
		default:
			e.fatal("event %q, want %q", v, verbs.Disconnected)
		}
	}
}
