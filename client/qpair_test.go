package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"jbofd/client/internal/hostconn"
	"jbofd/client/internal/hosttcp"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/testutil/loopback"
)

func openScriptQPair(t testing.TB, s *script, o hosttcp.Options) *QPair {
	t.Helper()
	if o.InCapsuleBytes == 0 {
		o.InCapsuleBytes = s.inCapsule
	}
	if o.MaxR2T == 0 {
		o.MaxR2T = 4
	}
	w, err := hostconn.DialTCP(context.Background(), s.addr(), netip.Addr{}, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Handshake(context.Background()); err != nil {
		t.Fatal(err)
	}
	p := &QPair{id: 1, w: w, base: time.Now(), spin: DefaultSpin}
	t.Cleanup(func() { p.Close() })
	return p
}

// TestQPairReadsBackWhatItWrote for every way of transferring data: in the capsule, after R2Ts, copied from the receive
// buffer, read directly into place; with digests and without.
func TestQPairReadsBackWhatItWrote(t *testing.T) {
	for _, digests := range []bool{false, true} {
		for _, size := range []int{512, 4096, 8192, 16384, 128 << 10, 1 << 20} {
			t.Run(fmt.Sprintf("digests=%t/size=%d", digests, size), func(t *testing.T) {
				s := newScript(t, 8<<20)
				p := openScriptQPair(t, s, hosttcp.Options{Depth: 16, HeaderDigest: digests, DataDigest: digests})
				const n = 8
				var cmds []Command
				want := make([][]byte, n)
				rng := rand.New(rand.NewPCG(1, uint64(size)))
				for i := range n {
					want[i] = make([]byte, size)
					for k := 0; k < size; k += 8 {
						binary.LittleEndian.PutUint64(want[i][k:], rng.Uint64())
					}
					c := Command{Data: want[i], Tag: uint64(i)}
					SetRW(&c, OpWrite, 1, uint64(i*size/512), uint32(size/512))
					cmds = append(cmds, c)
				}
				run(t, p, cmds)
				got := make([][]byte, n)
				for i := range n {
					got[i] = make([]byte, size)
					cmds[i].Data = got[i]
					cmds[i].SQE.SetOpcode(OpRead)
				}
				run(t, p, cmds)
				for i := range n {
					if !bytes.Equal(got[i], want[i]) {
						t.Fatalf("command %d: data differ", i)
					}
				}
			})
		}
	}
}

// run submits cmds and waits for all of them.
func run(t testing.TB, p *QPair, cmds []Command) {
	t.Helper()
	n, err := p.Submit(cmds)
	if err != nil || n != len(cmds) {
		t.Fatalf("Submit: %d of %d, %v", n, len(cmds), err)
	}
	comps := make([]Completion, len(cmds))
	for done := 0; done < len(cmds); {
		n, err := p.Poll(comps, 5*time.Second)
		if err != nil || n == 0 {
			t.Fatalf("Poll: %d, %v", n, err)
		}
		for _, c := range comps[:n] {
			if !c.Status.OK() {
				t.Fatalf("tag %d: %s", c.Tag, c.Status)
			}
			if cmds[c.Tag].SQE.Opcode() == OpRead && int(c.Received) != len(cmds[c.Tag].Data) {
				t.Fatalf("tag %d: %d bytes of %d", c.Tag, c.Received, len(cmds[c.Tag].Data))
			}
		}
		done += n
	}
}

func BenchmarkQPairRead4K(b *testing.B) {
	for _, depth := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("QD%d", depth), func(b *testing.B) {
			s := newScript(b, 8<<20)
			p := openScriptQPair(b, s, hosttcp.Options{Depth: depth})
			cmds := make([]Command, depth)
			comps := make([]Completion, depth)
			bufs := make([][]byte, depth)
			for i := range cmds {
				bufs[i] = make([]byte, 4096)
				cmds[i] = Command{Data: bufs[i], Tag: uint64(i)}
				SetRW(&cmds[i], OpRead, 1, uint64(i), 8)
			}
			b.ReportAllocs()
			b.ResetTimer()
			out := min(depth, b.N)
			if _, err := p.Submit(cmds[:out]); err != nil {
				b.Fatal(err)
			}
			sent := out
			for done := 0; done < b.N; {
				n, err := p.Poll(comps, -1)
				if err != nil {
					b.Fatal(err)
				}
				done += n
				k := min(n, b.N-sent)
				for i := range k {
					t := comps[i].Tag
					cmds[i] = Command{Data: bufs[t], Tag: t}
					SetRW(&cmds[i], OpRead, 1, t, 8)
				}
				if k > 0 {
					if _, err := p.Submit(cmds[:k]); err != nil {
						b.Fatal(err)
					}
					sent += k
				}
			}
		})
	}
}

// TestQPairDoesNotAllocate through a real socket, reading and writing, spinning and blocking. The peer
// answers from memory made beforehand.
func TestQPairDoesNotAllocate(t *testing.T) {
	ln := loopback.Listen(t)
	defer ln.Close()
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		c, err := ln.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		var ic pdu.IC
		if _, err := io.ReadFull(c, ic[:]); err != nil {
			t.Error(err)
			return
		}
		ic.Common().Set(pdu.TypeICResp, 0, pdu.ICLen, 0, pdu.ICLen)
		ic.SetMAXH2CDATA(4096)
		if _, err := c.Write(ic[:]); err != nil {
			t.Error(err)
			return
		}
		in := make([]byte, 72+4096)
		read := make([]byte, 24+4096)
		(*pdu.Common)(read).Set(pdu.TypeC2HData, pdu.FlagLast|pdu.FlagSuccess, 24, 24, uint32(len(read)))
		(*pdu.Data)(read).SetLength(4096)
		resp := make([]byte, 24)
		(*pdu.Common)(resp).Set(pdu.TypeCapsuleResp, 0, 24, 0, 24)
		for {
			if _, err := io.ReadFull(c, in[:72]); err != nil {
				return
			}
			out := read
			if e := (*pdu.CapsuleCmd)(in).SQE(); e.Opcode() == OpWrite {
				if _, err := io.ReadFull(c, in[72:]); err != nil {
					return
				}
				out = resp
				(*pdu.CapsuleResp)(resp).CQE().SetCID(e.CID())
			} else {
				(*pdu.Data)(read).SetCCCID(e.CID())
			}
			if _, err := c.Write(out); err != nil {
				return
			}
		}
	}()
	w, err := hostconn.DialTCP(context.Background(), ln.Addr().String(), netip.Addr{},
		hosttcp.Options{Depth: 4, InCapsuleBytes: 8192})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Handshake(context.Background()); err != nil {
		t.Fatal(err)
	}
	for _, spin := range []time.Duration{-1, time.Millisecond} {
		p := &QPair{id: 1, w: w, base: time.Now(), spin: spin}
		cmds := make([]Command, 2)
		comps := make([]Completion, 4)
		bufs := [2][]byte{make([]byte, 4096), make([]byte, 4096)}
		n := testing.AllocsPerRun(200, func() {
			for i, op := range []uint8{OpRead, OpWrite} {
				cmds[i].Data = bufs[i]
				SetRW(&cmds[i], op, 1, 0, 8)
			}
			if k, err := p.Submit(cmds); k != 2 || err != nil {
				t.Fatal(k, err)
			}
			for done := 0; done < 2; {
				k, err := p.Poll(comps, 5*time.Second)
				if err != nil || k == 0 {
					t.Fatal(k, err)
				}
				done += k
			}
		})
		if n != 0 {
			t.Errorf("spin %s: %v allocs for two I/Os", spin, n)
		}
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
}

func TestPollWaitsForTheGivenTime(t *testing.T) {
	s := newScript(t, 1<<20)
	defer s.stall("read")()
	p := openScriptQPair(t, s, hosttcp.Options{Depth: 4})
	checkPollTimes(t, p)
}

// checkPollTimes checks how long Poll waits on a queue pair whose reads are not answered, until it is interrupted.
func checkPollTimes(t *testing.T, p *QPair) {
	t.Helper()
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
	// A deadline that has passed does not persist: the response to a flush arrives.
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

func TestSubmitSaysWhichCommandIsWrong(t *testing.T) {
	s := newScript(t, 1<<20)
	p := openScriptQPair(t, s, hosttcp.Options{Depth: 4})
	good, bad := Command{}, Command{Data: make([]byte, 512)}
	good.SQE.SetOpcode(OpFlush)
	bad.SQE.SetOpcode(OpFlush)
	n, err := p.Submit([]Command{good, bad, good})
	if n != 1 || !errors.Is(err, ErrInvalid) {
		t.Errorf("%d, %v", n, err)
	}
	// The queue pair continues; a full queue is not an error.
	n, err = p.Submit([]Command{good, good, good, good})
	if n != 3 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

func TestLossOfTheTargetFailsTheQPair(t *testing.T) {
	s := newScript(t, 1<<20)
	defer s.stall("read")()
	p := openScriptQPair(t, s, hosttcp.Options{Depth: 4})
	c := Command{Data: make([]byte, 512)}
	SetRW(&c, OpRead, 1, 0, 1)
	if _, err := p.Submit([]Command{c}); err != nil {
		t.Fatal(err)
	}
	s.cut()
	if _, err := p.Poll(make([]Completion, 1), -1); !errors.Is(err, ErrConnectionLost) {
		t.Errorf("%v, want ErrConnectionLost", err)
	}
}

// interruptedConn is interrupted after Poll has checked for an interruption and before it waits.
type interruptedConn struct {
	hostconn.Conn
	interrupt func()
}

func (c *interruptedConn) SetReadDeadline(t time.Time) error {
	if f := c.interrupt; f != nil {
		c.interrupt = nil
		f()
	}
	return c.Conn.SetReadDeadline(t)
}

// TestInterruptIsNotLostWhenPollBeginsToWait: Poll moves the deadline with which Interrupt wakes it.
func TestInterruptIsNotLostWhenPollBeginsToWait(t *testing.T) {
	s := newScript(t, 512)
	p := openScriptQPair(t, s, hosttcp.Options{Depth: 4})
	p.spin = -1
	p.w = &interruptedConn{Conn: p.w, interrupt: p.Interrupt}
	const wait = 5 * time.Second
	start := time.Now()
	if _, err := p.Poll(make([]Completion, 1), wait); !errors.Is(err, ErrClosed) || time.Since(start) >= wait {
		t.Errorf("%v after %s, want ErrClosed at once", err, time.Since(start))
	}
}
