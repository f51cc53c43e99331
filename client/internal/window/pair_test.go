package window

import (
	"context"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hosttcp"
	"jbofd/internal/credit"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// wire is a queue machine whose target is the test.
type wire struct {
	t testing.TB
	m *hosttcp.QPair
	p *Pair
	// sent has the CIDs of the capsules sent and not answered, units their units.
	sent  []uint16
	units map[uint16]int
	woken int
}

func newWire(t testing.TB, g *Gate, depth int) *wire {
	w := &wire{t: t, m: hosttcp.New(hosttcp.Options{Depth: depth}), units: map[uint16]int{}}
	w.p = g.NewPair(w.m, func() { w.woken++ })
	for b := w.m.SendBufs(); len(b) > 0; b = w.m.SendBufs() {
		w.m.Sent(len(b[0])) // the ICReq
	}
	var ic pdu.IC
	ic.Common().Set(pdu.TypeICResp, 0, pdu.ICLen, 0, pdu.ICLen)
	ic.SetMAXH2CDATA(128 << 10)
	w.receive(ic[:])
	return w
}

func (w *wire) receive(b []byte) {
	w.t.Helper()
	_, rx := w.m.RecvBufs()
	if err := w.m.Received(copy(rx, b)); err != nil {
		w.t.Fatal(err)
	}
}

// send takes what the machine sends.
func (w *wire) send() (cids []uint16) {
	for bufs := w.m.SendBufs(); len(bufs) > 0; bufs = w.m.SendBufs() {
		b := bufs[0]
		n := len(b)
		for ; len(b) > 0; b = b[pdu.CapsuleCmdLen:] {
			e := (*pdu.CapsuleCmd)(b).SQE()
			cids = append(cids, e.CID())
			w.units[e.CID()] = credit.Units(int(e.SGL().Length()))
		}
		w.m.Sent(n)
	}
	w.sent = append(w.sent, cids...)
	return cids
}

func (w *wire) outstanding() (n int) {
	for _, cid := range w.sent {
		n += w.units[cid]
	}
	return n
}

// answer completes the k-th outstanding command with a status: no data comes for a read
// that fails.
func (w *wire) answer(k int, c nvme.Credit) {
	cid := w.sent[k]
	w.sent = append(w.sent[:k], w.sent[k+1:]...)
	var p pdu.CapsuleResp
	p.Common().Set(pdu.TypeCapsuleResp, 0, pdu.CapsuleRespLen, 0, pdu.CapsuleRespLen)
	p.CQE().SetCID(cid)
	p.CQE().SetStatus(nvme.InternalError)
	p.CQE().SetDW1(uint32(c))
	w.receive(p[:])
	var comps [4]host.Completion
	if n := w.m.Completions(comps[:]); n != 1 {
		w.t.Fatalf("%d completions", n)
	}
	w.p.Completed(comps[:1])
}

func TestAPairHoldsBackWhatHasNoCredit(t *testing.T) {
	g := newGate(4)
	w := newWire(t, g, 16)
	var cmds []host.Command
	for range 6 {
		cmds = append(cmds, read(1, 8<<10))
	}
	cmds = append(cmds, read(2, 1<<20)) // another SSD
	if n, err := w.p.Submit(cmds); n != 7 || err != nil {
		t.Fatal(n, err)
	}
	if got := w.send(); len(got) != 3 || w.p.Held() != 4 {
		t.Fatalf("%d sent, %d held; want 2 of the first SSD and 1 of the other, and 4", len(got), w.p.Held())
	}
	more := make([]host.Command, 12)
	for i := range more {
		more[i] = read(1, 4096)
	}
	if n, err := w.p.Submit(more); n != 9 || err != host.ErrQueueFull {
		t.Errorf("a queue of 16 with 7 in it took %d: %v", n, err)
	}
	for held := w.p.Held(); held > 0; held = w.p.Held() {
		w.answer(0, nvme.MakeCredit(4, 4))
		w.send()
		if w.p.Held() >= held && w.outstanding() < 3 {
			t.Fatalf("nothing goes although only %d units are outstanding", w.outstanding())
		}
	}
	for len(w.sent) > 0 {
		w.answer(0, 0)
	}
	if s := g.State(1); s.Outstanding != 0 || s.Waiting != 0 || s.Waits != 13 {
		t.Errorf("at the end: %+v", s)
	}
}

func TestTheFirstCompletionTellsTheDriveOfANamespace(t *testing.T) {
	// In virtual time no credit is given back while the test stands still.
	synctest.Test(t, func(t *testing.T) {
		g := newGate(4)
		w := newWire(t, g, 16)
		cmds := []host.Command{read(77, 8<<10), read(77, 8<<10), read(77, 8<<10)}
		w.p.Submit(cmds)
		if len(w.send()) != 3 {
			t.Fatal("limited by nobody knows what")
		}
		w.answer(0, 0)
		w.answer(0, nvme.MakeCredit(4, 3))
		w.p.Submit(cmds)
		if n := len(w.send()); n != 1 || g.State(77).SSD != 4 || g.State(1).Units != 3 {
			t.Errorf("%d sent, %+v", n, g.State(77))
		}
		g.Map(1, 9) // a namespace that has moved
		w.p.Submit([]host.Command{read(1, 4096)})
		w.send()
		w.answer(len(w.sent)-1, nvme.MakeCredit(9, 5))
		if s := g.State(1); s.SSD != 9 || s.Units != 5 || s.Outstanding != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// TestAStalledWindowReleasesOneCommand: a goroutine has filled the window through its queue pair, does not collect
// completions, and waits for something else.
func TestAStalledWindowReleasesOneCommand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(2)
		w := newWire(t, g, 8)
		w.p.Submit([]host.Command{read(1, 4096), read(1, 4096)})
		w.send()
		begin := time.Now()
		var tickets [1]Ticket
		for range 2 {
			if err := g.Acquire(context.Background(), nil, []host.Command{read(1, 4096)}, tickets[:]); err != nil {
				t.Fatal(err)
			}
			g.Release(tickets[0], 0)
		}
		if d := time.Since(begin); d < stallTime || d > 4*stallTime {
			t.Errorf("two commands went after %v", d)
		}
		other := newWire(t, g, 8)
		other.p.Submit([]host.Command{read(1, 4096)})
		other.p.Park()
		time.Sleep(2 * stallTime)
		synctest.Wait()
		if other.woken != 1 || !other.p.Granted() {
			t.Errorf("a queue pair that waits was woken %d times", other.woken)
		}
		w.p.Close()
		other.p.Close()
		if s := g.State(1); s.Outstanding != 0 || s.Waiting != 0 || s.Overdrawn != 3 {
			t.Errorf("left over: %+v; three units were sent beyond the credit", s)
		}
	})
}

func TestPairsTakeTurnsAndWakeEachOther(t *testing.T) {
	g := newGate(1)
	a, b := newWire(t, g, 8), newWire(t, g, 8)
	cmds := []host.Command{read(1, 4096), read(1, 4096), read(1, 4096)}
	a.p.Submit(cmds)
	a.send()
	b.p.Submit(cmds)
	if len(b.send()) != 0 || b.p.Granted() || b.p.Park() {
		t.Fatal("both have the one unit")
	}
	a.answer(0, nvme.MakeCredit(4, 1)) // a's second command was first
	if len(a.send()) != 1 || b.woken != 0 {
		t.Fatal("the room went to somebody else")
	}
	a.answer(0, nvme.MakeCredit(4, 1)) // now it is b's turn
	if len(a.send()) != 0 || b.woken != 1 || !b.p.Granted() {
		t.Fatalf("b was woken %d times", b.woken)
	}
	b.p.Unpark()
	b.p.Advance()
	if len(b.send()) != 1 || b.p.Granted() {
		t.Fatal("b was woken for nothing")
	}
	b.p.Close() // with one outstanding and two held back
	if len(a.p.out) != 0 || !a.p.Granted() {
		t.Fatal("what b left is not a's")
	}
	a.p.Advance()
	if len(a.send()) != 1 {
		t.Fatal("a does not go on")
	}
	a.answer(0, 0)
	if s := g.State(1); s.Outstanding != 0 || s.Waiting != 0 {
		t.Errorf("at the end: %+v", s)
	}
}

func TestAFusedPairIsSentTogether(t *testing.T) {
	g := newGate(3)
	w := newWire(t, g, 8)
	first, second := read(1, 4096), read(1, 4096)
	first.SQE.SetFuse(nvme.FuseFirst)
	second.SQE.SetFuse(nvme.FuseSecond)
	w.p.Submit([]host.Command{read(1, 8<<10), first, second, read(1, 4096)})
	if n := len(w.send()); n != 1 {
		t.Fatalf("%d sent: half of the pair went", n)
	}
	w.answer(0, 0)
	if n := len(w.send()); n != 3 {
		t.Fatalf("%d sent, want the pair and the last", n)
	}
	for len(w.sent) > 0 {
		w.answer(0, 0)
	}
	if s := g.State(1); s.Outstanding != 0 {
		t.Errorf("at the end: %+v", s)
	}
}

func TestPairsAllocateNothing(t *testing.T) {
	g := newGate(4)
	w := newWire(t, g, 16)
	cmds := []host.Command{read(1, 4096)}
	step := func() {
		for range 8 {
			if _, err := w.p.Submit(cmds); err != nil {
				t.Fatal(err)
			}
		}
		for w.m.Outstanding() > 0 {
			for b := w.m.SendBufs(); len(b) > 0; b = w.m.SendBufs() {
				for c := b[0]; len(c) > 0; c = c[pdu.CapsuleCmdLen:] {
					w.sent = append(w.sent, (*pdu.CapsuleCmd)(c).SQE().CID())
				}
				w.m.Sent(len(b[0]))
			}
			w.answer(0, nvme.MakeCredit(4, 4))
		}
	}
	step()
	w.sent = w.sent[:0]
	if n := testing.AllocsPerRun(100, step); n != 0 {
		t.Errorf("%v allocations", n)
	}
	var tickets [1]Ticket
	if n := testing.AllocsPerRun(100, func() {
		if err := g.Acquire(context.Background(), nil, cmds, tickets[:]); err != nil {
			t.Fatal(err)
		}
		g.Release(tickets[0], nvme.MakeCredit(4, 4))
	}); n != 0 {
		t.Errorf("Acquire and Release: %v allocations", n)
	}
}

// TestPairsConserveTheWindow does random things with several queue pairs and compares the units outstanding with the
// credit: at each send at most the credit is outstanding, or one command. With odd seeds the credit changes, and only
// the state at the end is checked, because commands that were released before a decrease are still sent.
func TestPairsConserveTheWindow(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		g := newGate(10)
		units := 10
		wires := []*wire{newWire(t, g, 8), newWire(t, g, 8), newWire(t, g, 8)}
		check := func(w *wire) {
			n, sum := 0, 0
			for _, o := range wires {
				n += len(o.sent)
				sum += o.outstanding()
			}
			for _, cid := range w.send() {
				n++
				sum += w.units[cid]
				if sum > units && n > 1 && seed%2 == 0 {
					t.Fatalf("seed %d: %d units on the wire, the credit is %d", seed, sum, units)
				}
			}
		}
		for range 2000 {
			w := wires[rng.IntN(len(wires))]
			switch rng.IntN(3) {
			case 0:
				if _, err := w.p.Submit([]host.Command{read(1, 1+rng.IntN(20<<10))}); err != nil &&
					err != host.ErrQueueFull {
					t.Fatal(err)
				}
			case 1:
				if len(w.sent) > 0 {
					c := nvme.Credit(0)
					if rng.IntN(2) == 0 {
						if seed%2 == 1 {
							units = 1 + rng.IntN(20)
						}
						c = nvme.MakeCredit(4, units)
					}
					w.answer(rng.IntN(len(w.sent)), c)
				}
			case 2:
				if w.p.Granted() {
					w.p.Advance()
				}
			}
			check(w)
		}
		wires[0].p.Close()
		for steps := 0; wires[1].m.Outstanding()+wires[1].p.Held()+wires[2].m.Outstanding()+
			wires[2].p.Held() > 0; steps++ {
			if steps > 1000 {
				t.Fatalf("seed %d: stuck: %+v", seed, g.State(1))
			}
			w := wires[1+steps%2]
			if w.p.Granted() {
				w.p.Advance()
			}
			w.send()
			if len(w.sent) > 0 {
				w.answer(0, 0)
			}
		}
		if s := g.State(1); s.Outstanding != 0 || s.Waiting != 0 {
			t.Fatalf("seed %d: left over: %+v", seed, s)
		}
	}
}

// BenchmarkPair measures what the gate adds to a command of a queue pair: a batch of 32 is submitted to the machine,
// answered and collected, with and without the gate.
func BenchmarkPair(b *testing.B) {
	for _, x := range []struct {
		name  string
		gate  bool
		units int
	}{{"without", false, 0}, {"no limit", true, 0}, {"never full", true, 1000}, {"half waits", true, 16}} {
		b.Run(x.name, func(b *testing.B) {
			g := New()
			g.Map(1, 4)
			g.Grant(nvme.MakeCredit(4, x.units))
			w := newWire(b, g, 64)
			cmds := make([]host.Command, 32)
			comps := make([]host.Completion, 32)
			var p pdu.CapsuleResp
			p.Common().Set(pdu.TypeCapsuleResp, 0, pdu.CapsuleRespLen, 0, pdu.CapsuleRespLen)
			p.CQE().SetStatus(nvme.InternalError)
			p.CQE().SetDW1(uint32(nvme.MakeCredit(4, x.units)))
			for i := range cmds {
				cmds[i] = read(1, 4096)
			}
			var cids []uint16
			b.ReportAllocs()
			for b.Loop() {
				if x.gate {
					if n, err := w.p.Submit(cmds); n != 32 || err != nil {
						b.Fatal(n, err)
					}
				} else {
					for i := range cmds {
						if _, err := w.m.Submit(&cmds[i]); err != nil {
							b.Fatal(err)
						}
					}
				}
				for left := 32; left > 0; {
					cids = cids[:0]
					for bufs := w.m.SendBufs(); len(bufs) > 0; bufs = w.m.SendBufs() {
						for c := bufs[0]; len(c) > 0; c = c[pdu.CapsuleCmdLen:] {
							cids = append(cids, (*pdu.CapsuleCmd)(c).SQE().CID())
						}
						w.m.Sent(len(bufs[0]))
					}
					_, rx := w.m.RecvBufs()
					n := 0
					for _, cid := range cids {
						p.CQE().SetCID(cid)
						n += copy(rx[n:], p[:])
					}
					if err := w.m.Received(n); err != nil {
						b.Fatal(err)
					}
					n = w.m.Completions(comps)
					if x.gate {
						w.p.Completed(comps[:n])
					}
					left -= n
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/32, "ns/command")
		})
	}
}
