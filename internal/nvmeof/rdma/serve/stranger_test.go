package serve_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/target/kvtest"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// startStrangers starts hosts that connect, misbehave and go, until chaos.stop is closed.
func (c *chaos) startStrangers(seed uint64) *sync.WaitGroup {
	var wg sync.WaitGroup
	for i := range uint64(2) {
		rng := rand.New(rand.NewPCG(seed, 1000+i))
		wg.Go(func() {
			for n := uint64(0); ; n++ {
				select {
				case <-c.stop:
					return
				case <-time.After(time.Duration(rng.IntN(5000)) * time.Microsecond):
				}
				if s := c.newStranger(rng, i<<32|n); s != nil {
					s.misbehave()
					s.close()
				}
			}
		})
	}
	return &wg
}

// stranger is a misbehaving host: everything that it does may fail.
type stranger struct {
	c      *chaos
	rng    *rand.Rand
	id     uint64
	ep     verbs.Endpoint
	domain verbs.Domain
	cq     verbs.CQ
	mr     verbs.MR
	mem    []byte
	qp     verbs.QP
	// sent counts capsules, done the completed ones, whose memory is free.
	sent, done int
	// cntlid is the controller's, of an admin queue.
	cntlid uint16
	over   atomic.Bool
}

// Parts of stranger.mem: receives, capsules, and data.
const (
	strangeSends    = 32
	strangeCapsule  = 9216
	strangeCapsules = 4096
	strangeData     = strangeCapsules + strangeSends*strangeCapsule
	strangeDataLen  = 64 << 10
	strangeBytes    = strangeData + strangeDataLen
)

func (c *chaos) newStranger(rng *rand.Rand, id uint64) *stranger {
	s := &stranger{c: c, rng: rng, id: id}
	var err error
	if s.ep, err = c.strangers.Resolve(context.Background(), netip.AddrPortFrom(targetAddr, 4420)); err != nil {
		return nil // the target's device is gone
	}
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	s.domain, err = s.ep.Device().OpenDomain()
	must(err)
	s.cq, err = s.domain.CreateCQ(4 * strangeSends)
	must(err)
	s.mem = make([]byte, strangeBytes)
	s.mr, err = s.domain.Register(s.mem, verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite)
	must(err)
	s.qp, err = s.ep.CreateQP(verbs.QPConfig{Domain: s.domain, SendCQ: s.cq, RecvCQ: s.cq, Sends: strangeSends,
		Recvs: 64})
	must(err)
	s.ep.OnEvent(func(e verbs.Event) {
		if e != verbs.Established {
			s.over.Store(true)
		}
	})
	return s
}

func (s *stranger) close() {
	_ = s.ep.Close()
	for _, o := range []interface{ Close() error }{s.cq, s.mr, s.domain} {
		if err := o.Close(); err != nil {
			s.c.t.Error(err)
		}
	}
}

// misbehave does one random forbidden thing.
func (s *stranger) misbehave() {
	switch s.rng.IntN(8) {
	case 0: // private data of chance
		b := make([]byte, s.rng.IntN(verbs.MaxRequestData))
		for i := range b {
			b[i] = byte(s.rng.IntN(3))
		}
		_ = s.request(b)
	case 1: // goes before it is answered
		r := strangeRequest(0, 31)
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(s.rng.IntN(1000))*time.Microsecond)
		_ = s.ep.Connect(ctx, s.params(r[:]))
		cancel()
	case 2: // says nothing
		if s.connect(0, 31) {
			s.wait(time.Duration(s.rng.IntN(20)) * time.Millisecond)
		}
	case 3: // garbage
		if s.connect(uint16(s.rng.IntN(3)), 8) {
			s.garbage(1 + s.rng.IntN(10))
			s.wait(time.Duration(s.rng.IntN(10)) * time.Millisecond)
		}
	default:
		s.receive(4)
		if s.connect(0, 31) && s.associate() {
			if s.rng.IntN(3) == 0 {
				s.flood(s.identify)
				s.wait(time.Duration(s.rng.IntN(10)) * time.Millisecond)
			} else {
				s.openQueue()
			}
		}
	}
}

func strangeRequest(qid uint16, hsqsize uint16) (r cm.Request) {
	r.SetQID(qid)
	r.SetHRQSIZE(64)
	r.SetHSQSIZE(hsqsize)
	return r
}

func (s *stranger) params(private []byte) verbs.Params {
	return verbs.Params{PrivateData: private, ResponderResources: oneOf[uint8](s.rng, 1, 4, 16), RetryCount: 7,
		RNRRetryCount: oneOf[uint8](s.rng, 0, 3, 7)}
}

func (s *stranger) request(private []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return s.ep.Connect(ctx, s.params(private))
}

func (s *stranger) connect(qid, hsqsize uint16) bool {
	r := strangeRequest(qid, hsqsize)
	return s.request(r[:]) == nil
}

// receive posts receives, all into the same place.
func (s *stranger) receive(n int) {
	for range n {
		_, _ = s.qp.PostRecv([]verbs.RecvWR{{ID: 1 << 32, Addr: s.mr.Addr(), Len: strangeCapsules, LKey: s.mr.LKey()}})
	}
}

// send sends a capsule; it reports whether the queue pair has taken it.
func (s *stranger) send(capsule []byte) bool {
	if s.sent-s.done == strangeSends {
		return false
	}
	at := strangeCapsules + s.sent%strangeSends*strangeCapsule
	s.sent++
	n := copy(s.mem[at:at+strangeCapsule], capsule)
	_, err := s.domain.PostSend([]verbs.SendWR{{ID: 1, QP: s.qp.Handle(), Op: verbs.OpSend, Flags: verbs.FlagSignaled,
		Addr: s.mr.Addr() + uint64(at), Len: uint32(n), LKey: s.mr.LKey()}})
	if err != nil {
		s.sent--
	}
	return err == nil
}

// wait polls until there is a response, the connection has ended, or the time is over. It reports whether there was a
// response.
func (s *stranger) wait(d time.Duration) (response bool) {
	var wcs [16]verbs.WC
	end := time.Now().Add(d)
	for !s.over.Load() && !response {
		_ = s.cq.SetDeadline(end)
		_ = s.cq.Arm()
		n, err := s.cq.Poll(wcs[:])
		for _, w := range wcs[:n] {
			if w.ID == 1 {
				s.done++
			}
			response = response || w.ID == 1<<32 && w.Status == verbs.StatusOK
		}
		if err != nil || n == 0 && s.cq.Wait() != nil {
			break
		}
	}
	return response
}

// do sends a command and waits for its response, whose status it ignores.
func (s *stranger) do(e *nvme.SQE) bool { return s.send(e[:]) && s.wait(time.Second) }

// keyed makes the command's SGL name n bytes of s, or something wrong.
func (s *stranger) keyed(e *nvme.SQE, n uint32, wrong int) {
	key, addr := s.mr.RKey(), s.mr.Addr()+strangeData
	switch wrong {
	case 1:
		key++
	case 2:
		addr = s.mr.Addr() + strangeBytes - 512
	case 3:
		n /= 2
	}
	e.SetPSDT(nvme.PSDTSGL)
	e.SGL().SetKeyed(nvme.SGLSubtypeAddress, addr, n, key)
}

// associate makes the connection an admin queue, whose controller it enables.
func (s *stranger) associate() bool {
	var e nvme.SQE
	s.connectCommand(&e, 0, 31, nvme.CNTLIDDynamic)
	e.Connect().SetKATO(1000) // else the target would never miss a host that is cut off
	if !s.do(&e) {
		return false
	}
	s.cntlid = (*nvme.CQE)(s.mem).ConnectCNTLID()
	p := e.Property()
	p.Init(nvme.FabricsPropertySet, nvme.PropCC)
	p.SetVALUE(uint64(nvme.CC(0).WithEN(true).WithCSS(oneOf[uint8](s.rng, nvme.CCCSSNVM, nvme.CCCSSIOCS)).WithIOSQES(
		nvme.CCIOSQES64).WithIOCQES(nvme.CCIOCQES16)))
	return s.do(&e)
}

func (s *stranger) connectCommand(e *nvme.SQE, qid, sqsize, cntlid uint16) {
	d := (*nvme.ConnectData)(s.mem[strangeData:])
	*d = nvme.ConnectData{}
	d.SetHostID(uuid.UUID{15: byte(s.id), 14: byte(s.id >> 8), 13: byte(s.id >> 32), 12: 1})
	d.SetHostNQN("nqn.2026-11.example.jbofd:stranger")
	d.SetSubNQN(testNQN)
	d.SetCNTLID(cntlid)
	q := e.Connect()
	q.Init()
	q.SetQID(qid)
	q.SetSQSIZE(sqsize)
	s.keyed(e, nvme.ConnectDataSize, 0)
}

// garbage sends random capsules, to no namespace.
func (s *stranger) garbage(n int) {
	for range n {
		b := make([]byte, oneOf(s.rng, 0, 1, 63, 64, 65, 4160, 8256, 8300, 9000))
		for i := range b {
			b[i] = byte(s.rng.IntN(256))
		}
		if len(b) >= nvme.SQESize {
			e := (*nvme.SQE)(b)
			e.SetNSID(0x99)
		}
		s.send(b)
	}
}

func (s *stranger) identify() []byte {
	var e nvme.SQE
	e.SetOpcode(nvme.AdminIdentify)
	e.SetCID(uint16(s.rng.IntN(64)))
	e.Identify().SetCNS(nvme.CNSController)
	s.keyed(&e, 4096, s.wrong())
	return e[:]
}

// wrong says what is wrong with a descriptor; usually nothing.
func (s *stranger) wrong() int { return max(0, s.rng.IntN(40)-36) }

// flood sends as many commands as the queue pair takes and ignores the responses.
func (s *stranger) flood(command func() []byte) {
	s.receive(oneOf(s.rng, 0, 1, 8, 50))
	for n := s.rng.IntN(300); n > 0 && !s.over.Load(); n-- {
		if !s.send(command()) {
			s.wait(100 * time.Microsecond)
		}
		if s.rng.IntN(16) == 0 {
			s.receive(s.rng.IntN(8))
		}
	}
}

// openQueue opens an I/O queue of the controller and floods it.
func (s *stranger) openQueue() {
	io := s.c.newStranger(s.rng, s.id)
	if io == nil {
		return
	}
	defer io.close()
	size := oneOf[uint16](s.rng, 1, 3, 32)
	if !io.connect(1, size) {
		return
	}
	var e nvme.SQE
	io.connectCommand(&e, 1, size, s.cntlid)
	io.receive(1)
	if !io.do(&e) {
		return
	}
	io.flood(io.rw)
	switch s.rng.IntN(3) {
	case 0:
		io.wait(time.Duration(s.rng.IntN(10)) * time.Millisecond)
	case 1:
		_ = s.ep.Disconnect() // the controller first
	}
}

// kv returns a key-value command for keys that no worker uses.
func (s *stranger) kv() []byte {
	op := oneOf[uint8](s.rng, nvme.CmdKVStore, nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVRetrieve, nvme.CmdKVList,
		nvme.CmdKVDelete, nvme.CmdKVExist)
	n := oneOf(s.rng, 0, 16, 4096, 8192, 65536)
	if op == nvme.CmdKVDelete || op == nvme.CmdKVExist {
		n = 0
	}
	e := kvtest.Command(op, kvNSID, fmt.Sprint("strange", s.rng.IntN(5)), n)
	e.SetCID(uint16(s.rng.IntN(64)))
	if op == nvme.CmdKVStore && n <= 8192 && s.rng.IntN(2) == 0 {
		e.SetPSDT(nvme.PSDTSGL)
		e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
		e.SGL().SetLength(uint32(n))
		return append(e[:], make([]byte, n)...)
	}
	s.keyed(&e, uint32(n), s.wrong())
	if s.rng.IntN(20) == 0 {
		e.KV().SetLenBytes(s.rng.Uint32())
	}
	return e[:]
}

// rw returns a read or write of blocks that no worker uses, or a key-value command.
func (s *stranger) rw() []byte {
	if s.rng.IntN(3) == 0 {
		return s.kv()
	}
	blocks := oneOf(s.rng, 1, 2, 3, 16)
	var e nvme.SQE
	e.SetOpcode(oneOf[uint8](s.rng, nvme.CmdRead, nvme.CmdWrite, nvme.CmdWrite, nvme.CmdFlush))
	e.SetCID(uint16(s.rng.IntN(64)))
	e.SetNSID(1 + uint32(s.rng.IntN(2)))
	e.SetNLB(units.Blocks(blocks))
	e.SetSLBA(testBytes/blockBytes - 64 + units.LBA(s.rng.IntN(48)))
	if e.Opcode() == nvme.CmdWrite && blocks <= 2 && s.rng.IntN(2) == 0 {
		e.SetPSDT(nvme.PSDTSGL)
		e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
		e.SGL().SetLength(uint32(blocks * blockBytes))
		return append(e[:], make([]byte, blocks*blockBytes)...)
	}
	if e.Opcode() == nvme.CmdFlush {
		e.SetNLB(1)
		blocks = 0
	}
	s.keyed(&e, uint32(blocks*blockBytes), s.wrong())
	return e[:]
}
