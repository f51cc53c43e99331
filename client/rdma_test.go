package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostverbs"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// openRDMAQPair connects to s and opens a queue pair.
func openRDMAQPair(t testing.TB, s *script, o Options) (*Controller, *QPair) {
	t.Helper()
	o.QPairs = max(o.QPairs, 1)
	c, _ := connect(t, o)
	q, err := c.OpenQPair(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.Close() })
	return c, q
}

func allocBuffer(t testing.TB, c *Controller, n int) []byte {
	t.Helper()
	b, free, err := c.AllocBuffer(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := free(); err != nil {
			t.Error(err)
		}
		if err := free(); err != nil {
			t.Errorf("second free: %v", err)
		}
	})
	return b
}

// TestRDMAQPairReadsBackWhatItWrote holds for every way data can travel: in the capsule, through
// borrowed memory, in place; and for buffers at odd places of registered memory.
func TestRDMAQPairReadsBackWhatItWrote(t *testing.T) {
	s := newRDMAScript(t, 32<<20)
	c, q := openRDMAQPair(t, s, quick(s))
	region := allocBuffer(t, c, 24<<20)
	rng := rand.New(rand.NewPCG(1, *seed))
	for _, size := range []int{512, 4096, 8192, 8704, 128 << 10, 1 << 20, 2 << 20} {
		for _, direct := range []bool{false, true} {
			if size > 1<<20 && !direct {
				continue
			}
			const n = 8
			var cmds []Command
			want := make([][]byte, n)
			used := 0
			buffer := func() []byte {
				if !direct {
					return make([]byte, size)
				}
				used += size + 4
				return region[used-size-4+3:][:size]
			}
			for i := range n {
				if direct && i == n/2 && size > 1<<20 {
					break
				}
				b := buffer()
				for k := 0; k < size; k += 8 {
					binary.LittleEndian.PutUint64(b[k:], rng.Uint64())
				}
				want[i] = bytes.Clone(b)
				c := Command{Data: b, Tag: uint64(i)}
				SetRW(&c, OpWrite, 1, uint64(i*size/512), uint32(size/512))
				cmds = append(cmds, c)
			}
			run(t, q, cmds)
			used = 0
			for i := range cmds {
				cmds[i].Data = buffer()
				clear(cmds[i].Data)
				cmds[i].SQE.SetOpcode(OpRead)
			}
			run(t, q, cmds)
			for i := range cmds {
				if !bytes.Equal(cmds[i].Data, want[i]) {
					t.Fatalf("size %d, direct %t, command %d: data differ", size, direct, i)
				}
			}
		}
	}
	long := Command{Data: make([]byte, 1<<20+512)}
	SetRW(&long, OpRead, 1, 0, 2049)
	if _, err := q.Submit([]Command{long}); !errors.Is(err, ErrInvalid) {
		t.Errorf("1 MiB and a block of ordinary memory: %v, want ErrInvalid", err)
	}
}

// TestRDMAVerbsPerIO: a read and a write take a RECV and a SEND at the host, whatever their data; a batch
// takes a crossing and a doorbell; data in registered memory borrows none.
func TestRDMAVerbsPerIO(t *testing.T) {
	s := newRDMAScript(t, 1<<20)
	o := quick(s)
	o.QueueDepth, o.KATO = 64, -1
	c, q := openRDMAQPair(t, s, o)
	region := allocBuffer(t, c, 1<<20)
	const n = 32
	for _, v := range []struct {
		op   uint8
		size int
	}{{OpRead, 4096}, {OpWrite, 4096}, {OpWrite, 16384}} {
		for _, direct := range []bool{false, true} {
			cmds := make([]Command, n)
			for i := range cmds {
				cmds[i] = Command{Tag: uint64(i), Data: region[i*v.size:][:v.size]}
				if !direct {
					cmds[i].Data = make([]byte, v.size)
				}
				SetRW(&cmds[i], v.op, 1, uint64(i), uint32(v.size/512))
			}
			before, crossings := s.rdma.host.Stats(), s.rdma.host.Crossings()
			if k, err := q.Submit(cmds); k != n || err != nil {
				t.Fatal(k, err)
			}
			if got := s.rdma.host.Crossings() - crossings; got != 1 {
				t.Errorf("%d crossings to submit %d commands, want 1", got, n)
			}
			if got := s.rdma.host.Stats().Doorbells - before.Doorbells; got != 1 {
				t.Errorf("%d doorbells to submit %d commands, want 1", got, n)
			}
			comps := make([]Completion, n)
			for done := 0; done < n; {
				k, err := q.Poll(comps, -1)
				if err != nil {
					t.Fatal(err)
				}
				done += k
			}
			after := s.rdma.host.Stats()
			if sends, recvs := after.Sends-before.Sends, after.Recvs-before.Recvs; sends != n || recvs != n {
				t.Errorf("opcode %#x, %d bytes, direct %t: %d commands took %d SENDs and %d RECVs", v.op, v.size, direct, n, sends, recvs)
			}
			if w, r := after.Writes-before.Writes, after.Reads-before.Reads; w != 0 || r != 0 {
				t.Errorf("the host posts %d WRITEs and %d READs", w, r)
			}
			if d := after.Doorbells - before.Doorbells; d > 1+n/16+1 {
				t.Errorf("%d doorbells for %d commands", d, n)
			}
			// A response each, and a completion for every sixteenth SEND.
			if k := after.Completions - before.Completions; k != n+n/16 {
				t.Errorf("%d completions for %d commands, want %d", k, n, n+n/16)
			}
		}
	}
}

// TestRDMAQPairDoesNotAllocate through a model of the device, in place and through borrowed memory, spinning
// and sleeping. The peer answers from memory made beforehand.
func TestRDMAQPairDoesNotAllocate(t *testing.T) {
	n := memverbs.New(memverbs.Config{Seed: 1, Live: true})
	defer n.Close()
	hp := n.NewProvider(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.2")})
	tp := n.NewProvider(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.1")})
	ln, err := tp.Listen(netip.MustParseAddrPort("10.0.0.1:4420"), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		if err := answerQuietly(ln); err != nil {
			t.Error(err)
		}
	}()
	m, err := hostverbs.NewMemory(hp, hostverbs.MinPoolBytes)
	if err != nil {
		t.Fatal(err)
	}
	w, err := hostverbs.Dial(testContext(t), hostverbs.Config{Address: "10.0.0.1:4420", QID: 1, Depth: 4, InCapsuleBytes: 4096, Direct: true, Memory: m})
	if err != nil {
		t.Fatal(err)
	}
	region, free, err := m.Alloc(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	cmds := make([]Command, 3)
	comps := make([]Completion, 4)
	for _, spin := range []time.Duration{-1, time.Millisecond} {
		for _, direct := range []bool{false, true} {
			p := &QPair{id: 1, w: w, base: time.Now(), spin: spin}
			bufs := [3][]byte{make([]byte, 4096), make([]byte, 4096), make([]byte, 16384)}
			if direct {
				bufs = [3][]byte{region[:4096], region[4096:8192], region[8192:24576]}
			}
			allocs := testing.AllocsPerRun(200, func() {
				for i, op := range []uint8{OpRead, OpWrite, OpWrite} {
					cmds[i].Data = bufs[i]
					SetRW(&cmds[i], op, 1, 0, 8)
				}
				if k, err := p.Submit(cmds); k != len(cmds) || err != nil {
					t.Fatal(k, err)
				}
				for done := 0; done < len(cmds); {
					k, err := p.Poll(comps, 5*time.Second)
					if err != nil || k == 0 {
						t.Fatal(k, err)
					}
					done += k
				}
			})
			if allocs != 0 {
				t.Errorf("spin %s, direct %t: %v allocs for three I/Os", spin, direct, allocs)
			}
		}
	}
	if err := errors.Join(w.Close(), free(), m.Close()); err != nil {
		t.Error(err)
	}
	wg.Wait()
	ln.Close()
	if err := errors.Join(hp.Close(), tp.Close(), n.Faults()); err != nil {
		t.Error(err)
	}
}

// answerQuietly takes one connection, of depth 4 and with 4 KiB in the capsule, and answers reads and writes with
// success, until it ends. It allocates nothing on the way.
func answerQuietly(ln verbs.Listener) (err error) {
	ep, err := ln.Accept()
	if err != nil {
		return err
	}
	d, err := ep.Device().OpenDomain()
	if err != nil {
		return err
	}
	cq, err := d.CreateCQ(64)
	if err != nil {
		return err
	}
	qp, err := ep.CreateQP(verbs.QPConfig{Domain: d, SendCQ: cq, RecvCQ: cq, Sends: 16, Recvs: 5})
	if err != nil {
		return err
	}
	const stride = nvme.SQESize + 4096
	// Capsules, responses, data.
	mem := make([]byte, 5*stride+5*16+16384)
	mr, err := d.Register(mem, verbs.LocalWrite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ep.Close(), cq.Close(), mr.Close(), d.Close()) }()
	recv := make([]verbs.RecvWR, 1)
	post := func(i uint64) error {
		recv[0] = verbs.RecvWR{ID: i, Addr: mr.Addr() + i*stride, Len: stride, LKey: mr.LKey()}
		_, err := qp.PostRecv(recv)
		return err
	}
	for i := range uint64(5) {
		if err := post(i); err != nil {
			return err
		}
	}
	if err := ep.Accept(verbs.Params{InitiatorDepth: 4, RetryCount: 7, RNRRetryCount: 7}); err != nil {
		return err
	}
	wcs := make([]verbs.WC, 16)
	sends := make([]verbs.SendWR, 0, 2)
	for {
		k, err := cq.Poll(wcs)
		if err != nil {
			return err
		}
		for i := range wcs[:k] {
			if wcs[i].Status != verbs.StatusOK {
				return nil
			}
			id := wcs[i].ID
			if id >= 5 {
				continue
			}
			e := (*nvme.SQE)(mem[id*stride:])
			g := e.SGL()
			off := 5*stride + id*16
			cqe := (*nvme.CQE)(mem[off:])
			*cqe = nvme.CQE{}
			cqe.SetCID(e.CID())
			sends = sends[:0]
			w := verbs.SendWR{ID: 99, QP: qp.Handle(), Op: verbs.OpWrite, Addr: mr.Addr() + 5*stride + 5*16, Len: g.KeyedLength(), LKey: mr.LKey(),
				RemoteAddr: g.Address(), RKey: g.Key(), Flags: verbs.FlagSignaled}
			if g.Type() == nvme.SGLTypeKeyedDataBlock && g.KeyedLength() > 0 {
				if e.Opcode() == OpWrite {
					w.Op = verbs.OpRead
				}
				sends = append(sends, w)
			}
			sends = append(sends, verbs.SendWR{ID: 99, QP: qp.Handle(), Op: verbs.OpSend, Addr: mr.Addr() + off, Len: 16, LKey: mr.LKey(),
				Flags: verbs.FlagSignaled | verbs.FlagFence})
			if err := post(id); err != nil {
				return err
			}
			if _, err := d.PostSend(sends); err != nil {
				return err
			}
		}
		if k > 0 {
			continue
		}
		if err := cq.Arm(); err != nil {
			return err
		}
		if k, err = cq.Poll(wcs[:0]); err != nil {
			return err
		}
		if err := cq.SetDeadline(time.Now().Add(time.Millisecond)); err != nil {
			return err
		}
		_ = cq.Wait() // what came before Arm is seen a millisecond later
	}
}

// TestRDMAWithoutMemoryCommandsWait: what cannot borrow memory waits and goes on; nothing is lost,
// nothing stops.
func TestRDMAWithoutMemoryCommandsWait(t *testing.T) {
	s := newRDMAScript(t, 32<<20)
	o := quick(s)
	o.BounceBytes = 4 << 20
	o.QPairs, o.Queues, o.QueueDepth = 2, 1, 32
	c, n := connect(t, o)
	ctx := testContext(t)
	var q [2]*QPair
	for i := range q {
		var err error
		if q[i], err = c.OpenQPair(ctx); err != nil {
			t.Fatal(err)
		}
		defer q[i].Close()
	}
	batch := func(op uint8) []Command {
		cmds := make([]Command, 24)
		for i := range cmds {
			cmds[i] = Command{Data: bytes.Repeat([]byte{byte(i + 1)}, 1<<20), Tag: uint64(i)}
			SetRW(&cmds[i], op, 1, uint64(i)*2048, 2048)
		}
		return cmds
	}
	run(t, q[0], batch(OpWrite))
	reads := batch(OpRead)
	for i := range reads {
		clear(reads[i].Data)
	}
	run(t, q[0], reads)
	for i := range reads {
		if reads[i].Data[0] != byte(i+1) || reads[i].Data[1<<20-1] != byte(i+1) {
			t.Errorf("read %d brought %d", i, reads[i].Data[0])
		}
	}
	// One queue pair has all the memory it can get, and nobody polls it; the others go on.
	if k, err := q[0].Submit(batch(OpRead)); k != 24 || err != nil {
		t.Fatal(k, err)
	}
	run(t, q[1], batch(OpWrite))
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			b := make([]byte, 1<<20)
			if _, err := n.ReadAt(ctx, b, int64(g)<<20); err != nil || b[0] != byte(g+1) {
				t.Errorf("read: %d, %v", b[0], err)
			}
		}()
	}
	wg.Wait()
	// A fused pair needs two pieces, and gets them.
	if err := n.CompareAndWrite(ctx, bytes.Repeat([]byte{1}, 1<<20), bytes.Repeat([]byte{9}, 1<<20), 0); err != nil {
		t.Error(err)
	}
	if s.disk[0] != 9 {
		t.Error("nothing was written")
	}
	comps := make([]Completion, 24)
	for done := 0; done < 24; {
		k, err := q[0].Poll(comps, 5*time.Second)
		if err != nil || k == 0 {
			t.Fatal(k, err)
		}
		done += k
	}
}

// TestRDMAHostileTargets: responses that cannot be end the connection with an error that says what.
func TestRDMAHostileTargets(t *testing.T) {
	for name, v := range map[string]struct {
		respond func(capsule []byte) [][]byte
		want    string
	}{
		"short":     {func(b []byte) [][]byte { return [][]byte{b[:8]} }, "8 bytes"},
		"long":      {func(b []byte) [][]byte { return [][]byte{append(b, 0, 0)} }, "more than 16 bytes"},
		"unknown":   {func(b []byte) [][]byte { b[12] ^= 0x15; return [][]byte{b} }, "not outstanding"},
		"duplicate": {func(b []byte) [][]byte { return [][]byte{b, b} }, "CID"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newRDMAScript(t, 1<<20)
			c, q := openRDMAQPair(t, s, quick(s))
			s.mu.Lock()
			s.rdma.respond = func(c *scriptConn, b []byte) [][]byte {
				if c.qid != q.ID() {
					return [][]byte{b}
				}
				return v.respond(b)
			}
			s.mu.Unlock()
			cmd := Command{Data: make([]byte, 4096)}
			SetRW(&cmd, OpRead, 1, 0, 8)
			if _, err := q.Submit([]Command{cmd}); err != nil {
				t.Fatal(err)
			}
			var err error
			for comps := make([]Completion, 1); err == nil; {
				_, err = q.Poll(comps, -1)
			}
			if !errors.Is(err, ErrProtocol) || !errors.Is(err, ErrConnectionLost) || !strings.Contains(err.Error(), v.want) {
				t.Errorf("%v, want ErrProtocol with %q", err, v.want)
			}
			// The controller has other connections, which go on.
			if _, err := c.NamespaceIDs(testContext(t)); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestRDMABreaksOfEveryKindAreLosses: the controller connects anew and operations go on.
func TestRDMABreaksOfEveryKindAreLosses(t *testing.T) {
	for name, harm := range map[string]func(*memverbs.Endpoint){
		"cut": (*memverbs.Endpoint).Cut, "fatal": (*memverbs.Endpoint).Break,
	} {
		t.Run(name, func(t *testing.T) {
			s := newRDMAScript(t, 1<<20)
			c, n := connect(t, quick(s))
			for range 3 {
				before := c.Losses()
				for _, e := range s.rdma.net.Endpoints() {
					if e.Local().Addr() == netip.MustParseAddr("10.0.0.2") && e.QPNum() != 0 {
						harm(e)
						break
					}
				}
				eventually(t, "the loss", func() bool { return c.Losses() > before })
				if _, err := n.WriteAt(testContext(t), make([]byte, 8192), 0, 0); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestRDMADeviceRemoved: with another device the controller goes on, and its buffers are known there.
func TestRDMADeviceRemoved(t *testing.T) {
	s := newRDMAScript(t, 8<<20)
	c, q := openRDMAQPair(t, s, quick(s))
	n, err := c.Namespace(testContext(t), 1)
	if err != nil {
		t.Fatal(err)
	}
	region := allocBuffer(t, c, 2<<20)
	other := allocBuffer(t, c, 1<<20)
	for i := range region {
		region[i] = 3
	}
	s.rdma.host.RemoveDevice(s.rdma.host.Devices()[0])
	if _, err := q.Poll(make([]Completion, 1), -1); !errors.Is(err, ErrConnectionLost) {
		t.Errorf("%v, want ErrConnectionLost", err)
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "all of the old device is closed", func() bool {
		k := s.rdma.host.Counts()
		return k.Domains == 0 && k.MRs == 0 && k.QPs == 0 && k.CQs == 0
	})
	s.rdma.host.AddDevice(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.2")})
	if _, err := n.WriteAt(testContext(t), make([]byte, 512), 0, 0); err != nil {
		t.Fatal(err)
	}
	if q, err = c.OpenQPair(testContext(t)); err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	w := Command{Data: region} // only in place: it is longer than what a command can borrow
	SetRW(&w, OpWrite, 1, 0, 4096)
	run(t, q, []Command{w})
	r := Command{Data: other}
	SetRW(&r, OpRead, 1, 0, 2048)
	run(t, q, []Command{r})
	if other[0] != 3 || other[len(other)-1] != 3 {
		t.Error("the data did not come back")
	}
}

// TestRDMAMemoryEndsWithTheController whatever is closed first.
func TestRDMAMemoryEndsWithTheController(t *testing.T) {
	s := newRDMAScript(t, 1<<20)
	o := quick(s)
	o.QPairs = 1
	c, _ := connect(t, o)
	b, free, err := c.AllocBuffer(4096)
	if err != nil {
		t.Fatal(err)
	}
	q, err := c.OpenQPair(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	cmd := Command{Data: make([]byte, 512)}
	SetRW(&cmd, OpRead, 1, 0, 1)
	run(t, q, []Command{cmd})
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.AllocBuffer(4096); !errors.Is(err, ErrClosed) {
		t.Errorf("AllocBuffer after Close: %v, want ErrClosed", err)
	}
	b[0] = 1 // still memory
	if err := errors.Join(free(), q.Close(), q.Close(), c.Close()); err != nil {
		t.Error(err)
	}
	if k := s.rdma.host.Counts(); k != (verbs.Counts{}) {
		t.Errorf("left open: %+v", k)
	}
}

// TestRDMARejectSaysWhy: the status of a refused connection is named, and nothing stays open.
func TestRDMARejectSaysWhy(t *testing.T) {
	for _, qid := range []uint16{0, 2} {
		s := newRDMAScript(t, 1<<20)
		s.rdma.reject = func(q uint16) cm.Status {
			if q == qid {
				return cm.NoResources
			}
			return 0
		}
		_, err := Connect(testContext(t), quick(s))
		var r *verbs.RejectedError
		if err == nil || !errors.As(err, &r) || !strings.Contains(err.Error(), "no resources") || !strings.Contains(err.Error(), fmt.Sprintf("queue %d", qid)) {
			t.Errorf("%v, want a reject of queue %d for want of resources", err, qid)
		}
		if k := s.rdma.host.Counts(); k != (verbs.Counts{}) {
			t.Errorf("left open: %+v", k)
		}
	}
}

// TestRDMAShortResourcesAreErrors: a device that lacks something makes Connect fail, and nothing stays open.
func TestRDMAShortResourcesAreErrors(t *testing.T) {
	for name, limit := range map[string]func(*verbs.Attr){
		"queue pairs": func(a *verbs.Attr) { a.MaxQPs = 1 },
		"depth":       func(a *verbs.Attr) { a.MaxQPWRs = 4 },
		"completions": func(a *verbs.Attr) { a.MaxCQEs = 4 },
		"regions":     func(a *verbs.Attr) { a.MaxMRs = 1 },
		"length":      func(a *verbs.Attr) { a.MaxMRBytes = 4096 },
	} {
		t.Run(name, func(t *testing.T) {
			s := newRDMAScript(t, 1<<20)
			s.rdma.host.Devices()[0].SetAttr(limit)
			_, err := Connect(testContext(t), quick(s))
			if !errors.Is(err, verbs.ErrResources) {
				t.Errorf("%v, want ErrResources", err)
			}
			if k := s.rdma.host.Counts(); k != (verbs.Counts{}) {
				t.Errorf("left open: %+v", k)
			}
		})
	}
}

func TestRDMAPollWaitsAsLongAsItIsTold(t *testing.T) {
	s := newRDMAScript(t, 1<<20)
	_, p := openRDMAQPair(t, s, quick(s))
	defer s.stall("read")()
	comps := make([]Completion, 4)
	c := Command{Data: make([]byte, 512)}
	SetRW(&c, OpRead, 1, 0, 1)
	if _, err := p.Submit([]Command{c}); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Poll(comps, 0); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	start := time.Now()
	if n, err := p.Poll(comps, 30*time.Millisecond); n != 0 || err != nil || time.Since(start) < 30*time.Millisecond {
		t.Fatalf("%d, %v after %s", n, err, time.Since(start))
	}
	// A deadline that has passed does not stay: a flush, which is answered, arrives.
	c = Command{Tag: 5}
	c.SQE.SetOpcode(OpFlush)
	if _, err := p.Submit([]Command{c}); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Poll(comps, -1); n != 1 || err != nil || comps[0].Tag != 5 {
		t.Fatal(n, err)
	}
	got := make(chan error)
	go func() {
		_, err := p.Poll(comps, -1)
		got <- err
	}()
	p.Interrupt()
	if err := <-got; !errors.Is(err, ErrClosed) {
		t.Errorf("after Interrupt: %v, want ErrClosed", err)
	}
	if _, err := p.Submit([]Command{c}); !errors.Is(err, ErrClosed) {
		t.Errorf("Submit after Interrupt: %v, want ErrClosed", err)
	}
}

// TestRDMACancelledReadInRegisteredMemory: not even memory that the target could reach changes after a call of
// a Namespace has returned.
func TestRDMACancelledReadInRegisteredMemory(t *testing.T) {
	s := newRDMAScript(t, 1<<20)
	for i := range s.disk {
		s.disk[i] = 1
	}
	c, n := connect(t, quick(s))
	b := allocBuffer(t, c, 1<<20)
	late := make(chan func(), 1)
	s.mu.Lock()
	s.answer = func(c *scriptConn, e *nvme.SQE) bool {
		if c.qid == 0 || e.Opcode() != nvme.CmdRead {
			return false
		}
		cp := *e
		late <- func() { c.io(&cp, nil) }
		return true
	}
	s.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	got := make(chan error, 1)
	go func() {
		_, err := n.ReadAt(ctx, b, 0)
		got <- err
	}()
	write := <-late
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	before := s.rdma.target.Stats().Writes
	s.mu.Lock()
	s.answer = nil
	write()
	s.mu.Unlock()
	if _, err := n.ReadAt(testContext(t), make([]byte, 4096), 0); err != nil {
		t.Fatal(err)
	}
	if s.rdma.target.Stats().Writes < before+1 {
		t.Fatal("the target wrote nothing")
	}
	if !bytes.Equal(b, make([]byte, len(b))) {
		t.Error("the buffer changed after the call had returned")
	}
}

func TestRDMAIsNotThereWithoutTheTag(t *testing.T) {
	if p, err := verbs.Open(); !errors.Is(err, verbs.ErrUnavailable) {
		if err == nil {
			err = p.Close()
		}
		t.Skipf("this machine has RDMA, or fails in another way: %v", err)
	}
	_, err := Connect(testContext(t), Options{Address: "rdma://127.0.0.1", SubNQN: "nqn.x"})
	if !errors.Is(err, ErrUnsupported) || !errors.Is(err, verbs.ErrUnavailable) {
		t.Errorf("%v, want ErrUnsupported", err)
	}
}

func TestAddressNamesTheTransport(t *testing.T) {
	for _, v := range []struct {
		o         Options
		want, err string
	}{
		{o: Options{Address: "10.0.0.1"}, want: "tcp://10.0.0.1:4420"},
		{o: Options{Address: "10.0.0.1:1"}, want: "tcp://10.0.0.1:1"},
		{o: Options{Address: "tcp://10.0.0.1:1/"}, want: "tcp://10.0.0.1:1"},
		{o: Options{Address: "rdma://10.0.0.1"}, want: "rdma://10.0.0.1:4420"},
		{o: Options{Address: "rdma://[fe80::1]:5"}, want: "rdma://[fe80::1]:5"},
		{o: Options{Address: "fe80::1", Transport: RDMA}, want: "rdma://[fe80::1]:4420"},
		{o: Options{Address: "rdma://10.0.0.1:1", Transport: RDMA}, want: "rdma://10.0.0.1:1"},
		{o: Options{Address: "10.0.0.1", discovery: true}, want: "tcp://10.0.0.1:8009"},
		{o: Options{Address: "rdma://10.0.0.1", discovery: true}, want: "rdma://10.0.0.1:4420"},
		{o: Options{Address: "rdma://10.0.0.1", Transport: TCP}, err: `Transport "tcp"`},
		{o: Options{Address: "fc://10.0.0.1"}, err: "rdma://host:port"},
		{o: Options{Address: "rdma://"}, err: "Address is empty"},
		{o: Options{Address: "10.0.0.1", Transport: "fc"}, err: `"tcp" or "rdma"`},
		{o: Options{Address: "rdma://10.0.0.1", DataDigest: true}, err: "DataDigest"},
		{o: Options{Address: "rdma://10.0.0.1", BounceBytes: 4096}, err: "BounceBytes"},
	} {
		v.o.SubNQN = "nqn.x"
		o, err := v.o.withDefaults()
		switch {
		case v.err != "":
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), v.err) {
				t.Errorf("%q, %q: %v, want %q", v.o.Address, v.o.Transport, err, v.err)
			}
		case err != nil || o.URL() != v.want:
			t.Errorf("%q, %q: %s, %v, want %s", v.o.Address, v.o.Transport, o.URL(), err, v.want)
		}
	}
	e := DiscoveryEntry{Transport: "rdma", Host: "fe80::1", Service: "4420"}
	if e.URL() != "rdma://[fe80::1]:4420" {
		t.Error(e.URL())
	}
}

// TestAllocBufferOverTCP is memory like any other.
func TestAllocBufferOverTCP(t *testing.T) {
	s := newScript(t, 1<<20)
	c, n := connect(t, quick(s))
	b := allocBuffer(t, c, 4096)
	if _, err := n.WriteAt(testContext(t), b, 0, 0); err != nil {
		t.Error(err)
	}
	if _, _, err := c.AllocBuffer(0); !errors.Is(err, ErrInvalid) {
		t.Errorf("%v, want ErrInvalid", err)
	}
}

var _ host.Conn = (*hostverbs.Conn)(nil)
