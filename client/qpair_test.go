package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/client/internal/hostconn"
	"jbofd/client/internal/hosttcp"
)

func openScriptQPair(t testing.TB, s *script, o hosttcp.Options) *QPair {
	t.Helper()
	if o.InCapsuleBytes == 0 {
		o.InCapsuleBytes = s.inCapsule
	}
	if o.MaxR2T == 0 {
		o.MaxR2T = 4
	}
	w, err := hostconn.Dial(context.Background(), s.addr(), o)
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

// TestQPairReadsBackWhatItWrote holds for every way data can travel: in the capsule, after
// R2Ts, copied from the receive buffer, read straight into place; with digests and without.
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
