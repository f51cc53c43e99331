//go:build rdma && cgo

package verbs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/rdma/verbstest"
)

// address is an address of an RDMA device of this machine, from the environment.
func address(t *testing.T, name string) netip.Addr {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		t.Skipf("%s is not set: it names an address of an RDMA device of this machine (make test-vm has one)", name)
	}
	a, err := netip.ParseAddr(v)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return a
}

func open(t *testing.T) verbs.Provider {
	t.Helper()
	p, err := verbs.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestConformance(t *testing.T) {
	for _, family := range []string{"JBOFD_RDMA_ADDR", "JBOFD_RDMA_ADDR6"} {
		t.Run(family, func(t *testing.T) {
			a := address(t, family)
			verbstest.Run(t, verbstest.Config{Target: open(t), Host: open(t), Addr: a})
		})
	}
	t.Run("OneProvider", func(t *testing.T) {
		a := address(t, "JBOFD_RDMA_ADDR")
		p := open(t)
		verbstest.Run(t, verbstest.Config{Target: p, Host: p, Addr: a})
	})
}

func TestOpenSaysWhatIsMissing(t *testing.T) {
	if _, err := os.Stat("/dev/infiniband/rdma_cm"); err == nil {
		t.Skip("nothing is missing: the machine has /dev/infiniband/rdma_cm")
	}
	_, err := verbs.Open()
	if !errors.Is(err, verbs.ErrUnavailable) || !strings.Contains(err.Error(), "rdma_ucm") &&
		!strings.Contains(err.Error(), "no RDMA device") {
		t.Error(err)
	}
	t.Log(err)
}

// testTimeout bounds each wait of a test. It is long because the guest is slow.
const testTimeout = time.Minute

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	return ctx
}

// side has the resources of one end of a connection.
type side struct {
	domain verbs.Domain
	cq     verbs.CQ
	mr     verbs.MR
	mem    []byte
}

func newSide(t *testing.T, d verbs.Device) *side {
	t.Helper()
	var s side
	var err error
	s.mem, err = unix.Mmap(-1, 0, 64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	ok(t, err)
	s.domain, err = d.OpenDomain()
	ok(t, err)
	s.mr, err = s.domain.Register(s.mem, verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite)
	ok(t, err)
	s.cq, err = s.domain.CreateCQ(256)
	ok(t, err)
	return &s
}

func (s *side) close() error {
	return errors.Join(s.cq.Close(), s.mr.Close(), s.domain.Close(), unix.Munmap(s.mem))
}

func (s *side) qp(e verbs.Endpoint) (verbs.QP, error) {
	return e.CreateQP(verbs.QPConfig{Domain: s.domain, SendCQ: s.cq, RecvCQ: s.cq, Sends: 16, Recvs: 16})
}

// completions waits for n of them.
func (s *side) completions(t *testing.T, n int) (all []verbs.WC) {
	t.Helper()
	ok(t, s.cq.SetDeadline(time.Now().Add(testTimeout)))
	for len(all) < n {
		ok(t, s.cq.Arm())
		var wcs [16]verbs.WC
		m, err := s.cq.Poll(wcs[:])
		ok(t, err)
		if all = append(all, wcs[:m]...); m == 0 {
			ok(t, s.cq.Wait())
		}
	}
	return all
}

var usual = verbs.Params{ResponderResources: 4, InitiatorDepth: 4, RetryCount: 7, RNRRetryCount: 7}

// link is a connection within this process.
type link struct {
	target, host     *side
	te, he           verbs.Endpoint
	tqp, hqp         verbs.QP
	tevents, hevents chan verbs.Event
}

func connect(t *testing.T, p verbs.Provider, l verbs.Listener, to netip.Addr) *link {
	t.Helper()
	k := &link{tevents: make(chan verbs.Event, 16), hevents: make(chan verbs.Event, 16)}
	var err error
	k.he, err = p.Resolve(within(t), netip.AddrPortFrom(to, l.Addr().Port()))
	ok(t, err)
	k.host = newSide(t, k.he.Device())
	k.hqp, err = k.host.qp(k.he)
	ok(t, err)
	k.he.OnEvent(func(e verbs.Event) { k.hevents <- e })
	connected := make(chan error, 1)
	ctx := within(t)
	go func() { connected <- k.he.Connect(ctx, usual) }()
	k.te, err = l.Accept()
	ok(t, err)
	k.target = newSide(t, k.te.Device())
	k.tqp, err = k.target.qp(k.te)
	ok(t, err)
	k.te.OnEvent(func(e verbs.Event) { k.tevents <- e })
	ok(t, k.te.Accept(usual))
	ok(t, <-connected)
	expect(t, k.tevents, verbs.Established)
	return k
}

func expect(t *testing.T, events chan verbs.Event, want verbs.Event) {
	t.Helper()
	select {
	case e := <-events:
		if e != want {
			t.Fatalf("event %q, want %q", e, want)
		}
	case <-within(t).Done():
		t.Fatalf("no event, want %q", want)
	}
}

// talk sends a message from host to target.
func (k *link) talk(t *testing.T) {
	t.Helper()
	_, err := k.tqp.PostRecv([]verbs.RecvWR{{ID: 1, Addr: k.target.mr.Addr(), Len: 64, LKey: k.target.mr.LKey()}})
	ok(t, err)
	_, err = k.host.domain.PostSend([]verbs.SendWR{{ID: 2, QP: k.hqp.Handle(), Addr: k.host.mr.Addr(), Len: 32,
		LKey: k.host.mr.LKey(), Flags: verbs.FlagSignaled}})
	ok(t, err)
	for _, s := range []*side{k.target, k.host} {
		if c := s.completions(t, 1)[0]; c.Status != verbs.StatusOK {
			t.Fatalf("%+v", c)
		}
	}
}

func (k *link) close() error {
	return errors.Join(k.he.Close(), k.te.Close(), k.host.close(), k.target.close())
}

func none(t *testing.T, p verbs.Provider) {
	t.Helper()
	if c := p.Counts(); c != (verbs.Counts{}) {
		t.Errorf("left open: %+v", c)
	}
}

// resources returns the RDMA objects that the system counts for this process, including those of librdmacm.
func resources(t *testing.T) string {
	t.Helper()
	var left []string
	for _, kind := range []string{"qp", "cm_id", "cq", "mr", "pd", "srq"} {
		var stderr bytes.Buffer
		cmd := exec.Command("rdma", "resource", "show", kind)
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("rdma resource show %s: %v: %s", kind, err, stderr.String())
		}
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, fmt.Sprintf(" pid %d ", os.Getpid())) {
				left = append(left, kind+" "+line)
			}
		}
	}
	return strings.Join(left, "")
}

func TestClosedProviderLeavesNothingInTheSystem(t *testing.T) {
	a := address(t, "JBOFD_RDMA_ADDR")
	if _, err := exec.LookPath("rdma"); err != nil {
		t.Skip("the tool rdma (iproute2) is missing")
	}
	p, err := verbs.Open()
	ok(t, err)
	l, err := p.Listen(netip.AddrPortFrom(netip.IPv4Unspecified(), 0), 8)
	ok(t, err)
	for range 5 {
		k := connect(t, p, l, a)
		k.talk(t)
		ok(t, k.close())
	}
	if err := p.Close(); err == nil {
		t.Error("a provider with a listener was closed")
	}
	ok(t, l.Close())
	none(t, p)
	ok(t, p.Close())
	ok(t, p.Close())
	if left := resources(t); left != "" {
		t.Errorf("left in the system:\n%s", left)
	}
	if _, err := p.Listen(netip.AddrPortFrom(a, 0), 8); err == nil {
		t.Error("a closed provider listens")
	}
}

func TestRequestsBeyondTheBacklogAreRejected(t *testing.T) {
	a := address(t, "JBOFD_RDMA_ADDR")
	p := open(t)
	l, err := p.Listen(netip.AddrPortFrom(a, 0), 2)
	ok(t, err)
	type host struct {
		e verbs.Endpoint
		s *side
	}
	var hosts []host
	results := make(chan error, 5)
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	for range cap(results) {
		e, err := p.Resolve(ctx, l.Addr())
		ok(t, err)
		s := newSide(t, e.Device())
		_, err = s.qp(e)
		ok(t, err)
		hosts = append(hosts, host{e, s})
		go func() { results <- e.Connect(ctx, usual) }()
	}
	for range cap(results) - 2 {
		var r *verbs.RejectedError
		if err := <-results; !errors.As(err, &r) {
			t.Errorf("a request beyond the backlog: %v", err)
		}
	}
	ok(t, l.Close()) // waiting requests are rejected as well
	for range 2 {
		var r *verbs.RejectedError
		if err := <-results; !errors.As(err, &r) {
			t.Errorf("a request that nobody took: %v", err)
		}
	}
	cancel()
	for _, h := range hosts {
		ok(t, errors.Join(h.e.Close(), h.s.close()))
	}
	none(t, p)
}

func TestHandleOfAClosedQueuePairIsRefused(t *testing.T) {
	a := address(t, "JBOFD_RDMA_ADDR")
	p := open(t)
	l, err := p.Listen(netip.AddrPortFrom(a, 0), 8)
	ok(t, err)
	k := connect(t, p, l, a)
	old := k.hqp.Handle()
	again, err := p.Resolve(within(t), l.Addr())
	ok(t, err)
	ok(t, k.he.Close())
	q, err := k.host.qp(again) // in the place of the closed one
	ok(t, err)
	if q.Handle() == old {
		t.Error("a handle names two queue pairs")
	}
	for _, h := range []uint64{old, 1 << 40, 1<<64 - 1} {
		if n, err := k.host.domain.PostSend([]verbs.SendWR{{QP: h}}); n != 0 || !errors.Is(err, net.ErrClosed) {
			t.Errorf("handle %#x: %d, %v", h, n, err)
		}
	}
	if n, err := k.hqp.PostRecv(make([]verbs.RecvWR, 1)); n != 0 || !errors.Is(err, net.ErrClosed) {
		t.Errorf("receive: %d, %v", n, err)
	}
	if err := k.host.cq.Close(); err == nil {
		t.Error("a completion queue in use was closed")
	}
	ok(t, errors.Join(again.Close(), k.close(), l.Close()))
	none(t, p)
}

func TestIdleUsesNoCPU(t *testing.T) {
	a := address(t, "JBOFD_RDMA_ADDR")
	p := open(t)
	l, err := p.Listen(netip.AddrPortFrom(a, 0), 8)
	ok(t, err)
	k := connect(t, p, l, a)
	used := func() time.Duration {
		var u unix.Rusage
		ok(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
		return time.Duration(unix.TimevalToNsec(u.Utime) + unix.TimevalToNsec(u.Stime))
	}
	ok(t, k.host.cq.Arm())
	ok(t, k.host.cq.SetDeadline(time.Now().Add(2*time.Second)))
	before := used()
	if err := k.host.cq.Wait(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	if d := used() - before; d > 100*time.Millisecond {
		t.Errorf("%v of processor time in 2 s without work", d)
	}
	ok(t, errors.Join(k.close(), l.Close()))
}

// Hosts that connect, send, disconnect, are cut off or time out, all at once, and a target that does the same to them.
func TestConnectStormLeavesNothing(t *testing.T) {
	a := address(t, "JBOFD_RDMA_ADDR")
	p := open(t)
	l, err := p.Listen(netip.AddrPortFrom(netip.IPv6Unspecified(), 0), 8)
	ok(t, err)
	to := netip.AddrPortFrom(a, l.Addr().Port())
	var hosts, targets sync.WaitGroup
	var ts *side
	var once sync.Once
	connected, accepted := 0, 0
	var mu sync.Mutex
	targets.Go(func() {
		for i := 0; ; i++ {
			e, err := l.Accept()
			if err != nil {
				return
			}
			once.Do(func() { ts = newSide(t, e.Device()) })
			targets.Go(func() {
				defer e.Close()
				switch i % 5 {
				case 0:
					return
				case 1:
					// It may have been closed already.
					_ = e.Reject([]byte("no"))
					return
				}
				gone := make(chan struct{})
				var gonce sync.Once
				e.OnEvent(func(v verbs.Event) {
					if v == verbs.Disconnected {
						gonce.Do(func() { close(gone) })
					}
				})
				q, err := ts.qp(e)
				if err != nil {
					if !errors.Is(err, verbs.ErrUnreachable) {
						t.Error(err)
					}
					return
				}
				if e.Accept(usual) != nil {
					return
				}
				mu.Lock()
				accepted++
				mu.Unlock()
				wr := []verbs.SendWR{{QP: q.Handle(), Addr: ts.mr.Addr(), Len: 8, LKey: ts.mr.LKey()}}
				for n := 0; ; n++ {
					select {
					case <-gone:
						return
					case <-time.After(time.Millisecond):
					}
					// Sometimes to a queue pair that is closed meanwhile.
					if _, err := ts.domain.PostSend(wr); err != nil || n == 50 {
						return
					}
				}
			})
		}
	})
	for w := range 8 {
		hosts.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(w)))
			for range 12 {
				ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
				if r.IntN(3) == 0 {
					cancel()
					ctx, cancel = context.WithTimeout(context.Background(), time.Duration(r.IntN(60))*time.Millisecond)
				}
				if e, err := p.Resolve(ctx, to); err == nil {
					s := newSide(t, e.Device())
					if _, err := s.qp(e); err != nil {
						t.Error(err)
					}
					if e.Connect(ctx, usual) == nil {
						mu.Lock()
						connected++
						mu.Unlock()
						if r.IntN(2) == 0 {
							if err := e.Disconnect(); err != nil {
								t.Error(err)
							}
						}
					}
					if err := errors.Join(e.Close(), s.close()); err != nil {
						t.Error(err)
					}
				} else if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, verbs.ErrUnreachable) {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	hosts.Wait()
	ok(t, l.Close())
	targets.Wait()
	if ts != nil {
		ok(t, ts.close())
	}
	none(t, p)
	t.Logf("%d hosts connected, %d accepted", connected, accepted)
	if connected == 0 {
		t.Error("nobody has connected")
	}
}

// TestRemovedDevice removes a soft RoCE link and creates it again: JBOFD_RDMA_LINK is its name and its interface, which
// has the address.
func TestRemovedDevice(t *testing.T) {
	a := address(t, "JBOFD_RDMA_ADDR")
	v := strings.Fields(os.Getenv("JBOFD_RDMA_LINK"))
	if len(v) != 2 {
		t.Skip(`JBOFD_RDMA_LINK is not set to the link that may be removed and its interface ("rxe0 tgt0")`)
	}
	run := func(args ...string) error {
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		out, err := exec.CommandContext(ctx, "rdma", args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("rdma %v: %w: %s", args, err, out)
		}
		return nil
	}
	p := open(t)
	// remove begins the removal, which waits until the process has closed everything.
	remove := func() <-chan error {
		done := make(chan error, 1)
		go func() { done <- run("link", "delete", v[0]) }()
		return done
	}
	restore := func() { ok(t, run("link", "add", v[0], "type", "rxe", "netdev", v[1])) }
	wild, err := p.Listen(netip.AddrPortFrom(netip.IPv4Unspecified(), 0), 8)
	ok(t, err)
	var last verbs.Device
	for round := range 3 {
		bound, err := p.Listen(netip.AddrPortFrom(a, 0), 8)
		ok(t, err)
		k := connect(t, p, wild, a)
		k.talk(t)
		if k.te.Device() == last {
			t.Error("the device that came back is the one that went")
		}
		last = k.te.Device()
		_, err = k.tqp.PostRecv([]verbs.RecvWR{{ID: 1, Addr: k.target.mr.Addr(), Len: 64, LKey: k.target.mr.LKey()}})
		ok(t, err)
		accepted := make(chan error, 1)
		go func() {
			_, err := bound.Accept()
			accepted <- err
		}()
		if round == 1 { // nothing is connected, but a domain exists
			ok(t, errors.Join(k.te.Close(), k.he.Close()))
		}
		removed := remove()
		select {
		case <-last.Removed():
		case <-within(t).Done():
			t.Fatal("nobody said that the device was removed")
		}
		if round != 1 {
			for e := range k.tevents {
				if e == verbs.Removed {
					break
				}
			}
		}
		if err := <-accepted; !errors.Is(err, verbs.ErrDeviceRemoved) {
			t.Errorf("accept on the removed device's address: %v", err)
		}
		if _, err := last.OpenDomain(); !errors.Is(err, verbs.ErrDeviceRemoved) {
			t.Errorf("a domain on a removed device: %v", err)
		}
		if err := k.te.Accept(usual); err == nil {
			t.Error("a connection was accepted over a removed device")
		}
		if round == 2 { // the listener's order does not matter
			ok(t, bound.Close())
		}
		ok(t, k.close())
		ok(t, <-removed)
		ok(t, bound.Close())
		if _, err := p.Listen(netip.AddrPortFrom(a, 0), 8); !errors.Is(err, verbs.ErrNoDevice) {
			t.Errorf("listen without the device: %v", err)
		}
		restore()
	}
	// Only the wildcard listener is open.
	k := connect(t, p, wild, a)
	ok(t, k.close())
	ok(t, <-remove())
	restore()
	k = connect(t, p, wild, a)
	k.talk(t)
	ok(t, errors.Join(k.close(), wild.Close()))
	none(t, p)
}
