package client

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/nvmeof/rdma/verbs"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the RDMA networks")

// rdmaNet is a host and a target in one network.
type rdmaNet struct {
	net          *memverbs.Network
	host, target *memverbs.Provider
	// reject, if set, is the status with which connections of a queue are refused.
	reject func(qid uint16) cm.Status
	// respond, if set, returns the responses to send instead of capsule.
	respond func(c *scriptConn, capsule []byte) [][]byte
}

// scriptRDMA is the script's side of an RDMA connection.
type scriptRDMA struct {
	s      *script
	conn   *scriptConn
	ep     verbs.Endpoint
	domain verbs.Domain
	qp     verbs.QP
	cq     verbs.CQ
	recvs  []byte
	recvMR verbs.MR
	stride int

	mu   sync.Mutex
	next uint64
	// then has the functions to call when a work request of the send queue completes, by ID, with true for success;
	// nil: none.
	then map[uint64]func(bool)
}

const sendID = 1 << 32

// newRDMAScript is newScript over RDMA. At the end of the test, neither side may have anything open.
func newRDMAScript(t testing.TB, diskBytes int) *script {
	t.Logf("-seed %d", *seed)
	n := memverbs.New(memverbs.Config{Seed: *seed, Live: true})
	r := &rdmaNet{
		net:    n,
		host:   n.NewProvider(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.2")}),
		target: n.NewProvider(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.1")}),
	}
	ln, err := r.target.Listen(netip.MustParseAddrPort("0.0.0.0:4420"), 64)
	if err != nil {
		t.Fatal(err)
	}
	s := &script{t: t, rdma: r, address: "rdma://10.0.0.1:4420", disk: make([]byte, diskBytes), inCapsule: 8192,
		seen: map[string]int{}}
	s.stop = func() { ln.Close() }
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		for {
			ep, err := ln.Accept()
			if err != nil {
				return
			}
			s.wg.Add(1)
			go func() {
				defer s.wg.Done()
				if err := s.serveRDMA(ep); err != nil && !errors.Is(err, net.ErrClosed) &&
					!errors.Is(err, verbs.ErrDeviceRemoved) {
					t.Errorf("script target: %v", err)
				}
			}()
		}
	}()
	t.Cleanup(func() {
		s.stop()
		s.cut()
		s.wg.Wait()
		for name, p := range map[string]*memverbs.Provider{"host": r.host, "target": r.target} {
			if err := p.Close(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := n.Faults(); err != nil {
			t.Error(err)
		}
		n.Close()
	})
	return s
}

func (s *script) serveRDMA(ep verbs.Endpoint) (err error) {
	c := &scriptRDMA{s: s, ep: ep, then: map[uint64]func(bool){}}
	c.conn = &scriptConn{s: s, wire: c, raw: true}
	defer func() { err = errors.Join(err, c.close()) }()
	p := ep.Peer()
	r, fault := cm.Parse(p.PrivateData, p.ResponderResources, cm.Limits{MaxEntries: 1025, MaxQID: 1024})
	if fault != nil {
		return errors.Join(fault, ep.Reject(fault.Reject()))
	}
	if s.rdma.reject != nil {
		if st := s.rdma.reject(r.QID()); st != 0 {
			return ep.Reject((&cm.Fault{Status: st}).Reject())
		}
	}
	if c.domain, err = ep.Device().OpenDomain(); err != nil {
		return err
	}
	entries := int(r.HSQSIZE()) + 1
	if c.cq, err = c.domain.CreateCQ(16 * entries); err != nil {
		return err
	}
	if c.qp, err = ep.CreateQP(verbs.QPConfig{Domain: c.domain, SendCQ: c.cq, RecvCQ: c.cq, Sends: 8 * entries,
		Recvs: entries}); err != nil {
		return err
	}
	c.stride = nvme.SQESize + s.inCapsule
	c.recvs = make([]byte, entries*c.stride)
	if c.recvMR, err = c.domain.Register(c.recvs, verbs.LocalWrite); err != nil {
		return err
	}
	for i := range entries {
		if err := c.postRecv(i); err != nil {
			return err
		}
	}
	ended := make(chan struct{})
	var once sync.Once
	ep.OnEvent(func(e verbs.Event) {
		if e != verbs.Established {
			once.Do(func() { close(ended) })
		}
	})
	var a cm.Accept
	a.SetCRQSIZE(uint16(entries))
	if err := ep.Accept(verbs.Params{PrivateData: a[:], InitiatorDepth: min(p.ResponderResources, 8), RetryCount: 7,
		RNRRetryCount: 7}); err != nil {
		return err
	}
	s.mu.Lock()
	s.conns = append(s.conns, func() { _ = ep.Disconnect() })
	s.mu.Unlock()
	wcs := make([]verbs.WC, 16)
	for {
		n, err := c.cq.Poll(wcs)
		if err != nil {
			return err
		}
		for i := range wcs[:n] {
			if !c.completed(&wcs[i]) {
				return nil
			}
		}
		if n > 0 {
			continue
		}
		if err := c.cq.Arm(); err != nil {
			return err
		}
		if n, _ := c.cq.Poll(wcs[:1]); n > 0 {
			if !c.completed(&wcs[0]) {
				return nil
			}
			continue
		}
		select {
		case <-ended:
			return nil
		default:
		}
		if err := c.cq.Wait(); err != nil {
			return err
		}
	}
}

func (s *scriptRDMA) close() error {
	errs := []error{s.ep.Close()}
	s.mu.Lock()
	for _, f := range s.then {
		if f != nil {
			f(false)
		}
	}
	s.mu.Unlock()
	if s.cq != nil {
		errs = append(errs, s.cq.Close())
	}
	if s.recvMR != nil {
		errs = append(errs, s.recvMR.Close())
	}
	if s.domain != nil {
		errs = append(errs, s.domain.Close())
	}
	return errors.Join(errs...)
}

func (s *scriptRDMA) postRecv(i int) error {
	_, err := s.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), Addr: s.recvMR.Addr() + uint64(i*s.stride),
		Len: uint32(s.stride), LKey: s.recvMR.LKey()}})
	return err
}

// completed handles a completion; false: the connection has ended.
func (s *scriptRDMA) completed(w *verbs.WC) bool {
	if w.ID&sendID != 0 {
		s.mu.Lock()
		f := s.then[w.ID]
		delete(s.then, w.ID)
		s.mu.Unlock()
		if f != nil {
			f(w.Status == verbs.StatusOK)
		}
		if w.Status != verbs.StatusOK && w.Status != verbs.StatusFlushed && w.Status != verbs.StatusRetryExceeded &&
			w.Status != verbs.StatusRemoteInvalid {
			s.s.t.Errorf("script target: %s", w.Status)
		}
		return w.Status == verbs.StatusOK
	}
	if w.Status != verbs.StatusOK {
		return false
	}
	b := slices.Clone(s.recvs[int(w.ID)*s.stride:][:w.Len])
	if err := s.postRecv(int(w.ID)); err != nil {
		return false
	}
	e := nvme.SQE(b)
	g := e.SGL()
	switch {
	case e.PSDT() != nvme.PSDTSGL:
		s.s.t.Errorf("script target: PSDT %d", e.PSDT())
	case g.Type() == nvme.SGLTypeDataBlock:
		if g.Subtype() != nvme.SGLSubtypeOffset || g.Address() != 0 || int(g.Length()) != len(b)-nvme.SQESize ||
			!toTarget(&e) {
			s.s.t.Errorf("script target: capsule of %d bytes with SGL %x", len(b), *g)
		}
		if s.conn.qid == 0 {
			if e.Opcode() != nvme.OpFabrics || e.Connect().QID() == 0 {
				s.s.t.Error("script target: in-capsule data on the admin queue")
			}
		}
		s.conn.command(e, b[nvme.SQESize:])
	case g.Type() != nvme.SGLTypeKeyedDataBlock || g.Subtype() != nvme.SGLSubtypeAddress || len(b) != nvme.SQESize:
		s.s.t.Errorf("script target: capsule of %d bytes with SGL %x", len(b), *g)
	case toTarget(&e) && g.KeyedLength() > 0:
		buf := make([]byte, g.KeyedLength())
		s.transfer(verbs.OpRead, &e, buf, func(ok bool) {
			if ok {
				s.conn.command(e, buf)
			}
		})
	default:
		s.conn.command(e, nil)
	}
	return true
}

// transfer moves b to or from the memory that a command names.
func (s *scriptRDMA) transfer(op verbs.Op, e *nvme.SQE, b []byte, then func(bool)) {
	g := e.SGL()
	s.post(verbs.SendWR{Op: op, RemoteAddr: g.Address(), RKey: g.Key()}, b, then)
}

// post posts a work request with b as its local data.
func (s *scriptRDMA) post(w verbs.SendWR, b []byte, then func(bool)) {
	mr, err := s.domain.Register(b, verbs.LocalWrite)
	if err != nil {
		return // the device is gone
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	w.ID, w.QP, w.Addr, w.Len, w.LKey, w.Flags = sendID|s.next, s.qp.Handle(), mr.Addr(), uint32(len(b)), mr.LKey(),
		verbs.FlagSignaled
	s.then[w.ID] = func(ok bool) {
		if err := mr.Close(); err != nil {
			s.s.t.Error(err)
		}
		if then != nil {
			then(ok)
		}
	}
	if _, err := s.domain.PostSend([]verbs.SendWR{w}); err != nil {
		delete(s.then, w.ID)
		_ = mr.Close()
		if errors.Is(err, verbs.ErrQueueFull) {
			s.s.t.Errorf("script target: %v", err)
		}
	}
}

func (s *scriptRDMA) reply(cid uint16, st nvme.Status, result uint64) {
	var e nvme.CQE
	e.SetCID(cid)
	e.SetStatus(st)
	e.SetResult64(result)
	capsules := [][]byte{e[:]}
	if f := s.s.rdma.respond; f != nil {
		capsules = f(s.conn, e[:])
	}
	for _, b := range capsules {
		s.post(verbs.SendWR{Op: verbs.OpSend}, b, nil)
	}
}

func (s *scriptRDMA) read(e *nvme.SQE, data []byte) {
	if k := e.SGL().KeyedLength(); int(k) != len(data) {
		panic(fmt.Sprintf("%d bytes for a buffer of %d", len(data), k))
	}
	// Copy b, which is read when the request is carried out.
	s.transfer(verbs.OpWrite, e, slices.Clone(data), nil)
	s.reply(e.CID(), 0, 0)
}

func (s *scriptRDMA) event(cid uint16, dw0 uint32) { s.reply(cid, 0, uint64(dw0)) }
