package client

import (
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"jbofd/client/internal/hostverbs"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// TestRDMAVerbsPerIO: a read and a write take a RECV and a SEND at the host, whatever their data; a batch takes one
// call into libibverbs and one doorbell; data in registered memory needs no bounce buffer.
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
				t.Errorf("opcode %#x, %d bytes, direct %t: %d commands took %d SENDs and %d RECVs", v.op, v.size,
					direct, n, sends,
					recvs)
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
	w, err := hostverbs.Dial(testContext(t), hostverbs.Config{Address: "10.0.0.1:4420", QID: 1, Depth: 4,
		InCapsuleBytes: 4096, Direct: true, Memory: m})
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
// success, until it ends. It allocates nothing meanwhile.
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
			w := verbs.SendWR{ID: 99, QP: qp.Handle(), Op: verbs.OpWrite, Addr: mr.Addr() + 5*stride + 5*16,
				Len: g.KeyedLength(), LKey: mr.LKey(),
				RemoteAddr: g.Address(), RKey: g.Key(), Flags: verbs.FlagSignaled}
			if g.Type() == nvme.SGLTypeKeyedDataBlock && g.KeyedLength() > 0 {
				if e.Opcode() == OpWrite {
					w.Op = verbs.OpRead
				}
				sends = append(sends, w)
			}
			sends = append(sends, verbs.SendWR{ID: 99, QP: qp.Handle(), Op: verbs.OpSend, Addr: mr.Addr() + off,
				Len:   16,
				LKey:  mr.LKey(),
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
