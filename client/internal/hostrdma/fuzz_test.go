package hostrdma

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"jbofd/client/internal/host"
	"jbofd/client/internal/host/hosttest"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

// FuzzHostileTarget runs a host that submits, posts, collects and detaches against an arbitrary target and device. For
// any input: no panic; no byte outside the buffers of outstanding commands changes; each command completes at most
// once, after its SEND; a capsule does not change while its SEND is in flight and carries what the caller gave; memory
// is lent only to commands that are outstanding; receives are posted for all responses; after an error nothing is sent.
func FuzzHostileTarget(f *testing.F) {
	cid := func(b []byte, v uint16) []byte { return binary.LittleEndian.AppendUint16(b, v) }
	// submit a read and a write, post, SEND completed, responses, collect
	f.Add(uint8(0x31), append(cid(cid([]byte{0, 0, 4, 0, 1, 200, 1, 0, 2, 3}, 0x400), 0), 4, 8))
	f.Add(uint8(0x71), append(cid([]byte{0, 0, 4, 0, 1, 9, 1, 1, 2, 3}, 0x401), 0, 4, 8, 1, 0, 6, 0, 4))
	f.Add(uint8(0x02), append(cid([]byte{0, 0, 4, 0, 4, 4, 0, 5, 4, 1, 0, 2, 3}, 0x400), 0, 1, 0, 3, 1, 4, 0, 4, 8, 7,
		1))
	f.Fuzz(func(t *testing.T, mode uint8, script []byte) {
		tp := hosttest.NewTape(script)
		o := Options{Depth: 1 + int(mode>>4&7), InlineBytes: int(mode&1) * 64, InCapsuleBytes: int(mode>>1&1) * 4096}
		p := newPeer(o, 2+int(mode>>2&3))
		var bufs []*hosttest.Guarded
		var writes [][]byte             // what each command writes, nil if it does not
		inFlight := map[uint64][]byte{} // capsules by the ID of their SEND
		sent := map[uint16]bool{}
		check := func() {
			hosttest.CheckAll(t, bufs)
			for _, w := range p.posted {
				if !bytes.Equal(p.capsule(&w), inFlight[w.ID]) {
					t.Fatalf("the capsule of %#x changes while its SEND is in flight", w.ID)
				}
			}
			if n := p.q.Free() + p.q.Outstanding(); n != p.q.Depth() {
				t.Fatalf("%d slots of %d", n, p.q.Depth())
			}
			if p.mem.out > p.q.Outstanding() {
				t.Fatalf("memory is lent to %d of %d commands", p.mem.out, p.q.Outstanding())
			}
			if p.q.Err() == nil && len(p.recvs) < p.q.Depth() {
				t.Fatalf("%d receives for up to %d responses", len(p.recvs), p.q.Depth())
			}
		}
		completed := func(c wr.Completion) {
			dead := p.q.Err()
			err := p.q.Completed([]wr.Completion{c})
			if err != p.q.Err() {
				t.Fatalf("Completed says %v, Err says %v", err, p.q.Err())
			}
			if dead != nil && err != dead && !errors.Is(dead, ErrFlushed) {
				t.Fatalf("the error changes from %v to %v", dead, err)
			}
			p.postRecvs()
		}
		for steps := 0; tp.Len() > 0 && steps < 300; steps++ {
			switch op := tp.U8(); op % 9 {
			case 0: // submit
				kind := tp.U8()
				n := int(tp.U8()) * 512
				c := host.Command{Tag: uint64(len(bufs))}
				c.SQE.SetOpcode([]uint8{nvme.CmdRead, nvme.CmdWrite, nvme.CmdFlush, nvme.CmdCompare}[kind%4])
				c.SQE.SetFuse(nvme.Fuse(kind >> 6 % 3))
				if kind%4 == 2 {
					n = 0
				}
				g := hosttest.NewGuarded(n)
				var written []byte
				if kind&1 != 0 {
					copy(g.Buf, hosttest.Pattern(c.Tag, n))
					written = bytes.Clone(g.Buf)
				}
				c.Data = g.Buf
				if _, err := p.q.Submit(&c); err == nil {
					g.Submitted()
					bufs, writes = append(bufs, g), append(writes, written)
				} else if err == host.ErrQueueFull && p.q.Free() != 0 || err == host.ErrDataDirection ||
					err == host.ErrDataLength {
					t.Fatal(err)
				}
			case 1: // post
				for _, w := range p.post(int(tp.U8())) {
					b := p.capsule(&w)
					inFlight[w.ID] = bytes.Clone(b)
					e := (*nvme.SQE)(b)
					i := host.SlotOf(e.CID())
					tag := p.q.slots[i].tag
					n := len(bufs[tag].Buf)
					delete(sent, e.CID())
					data := b[nvme.SQESize:]
					if e.SGL().Type() == nvme.SGLTypeKeyedDataBlock {
						data = p.mem.has[uint16(i)]
						if int(e.SGL().KeyedLength()) != n || len(data) != n {
							t.Fatalf("a command of %d bytes tells of %d", n, e.SGL().KeyedLength())
						}
					}
					if w := writes[tag]; w != nil && !bytes.Equal(data, w) {
						t.Fatal("a write carries other data than it was given")
					}
				}
				if len(p.posted) > p.q.Depth() {
					t.Fatalf("%d SENDs in flight", len(p.posted))
				}
			case 2: // SENDs completed
				before := len(p.posted)
				done := p.posted
				if c, ok := p.sent(); ok {
					for _, w := range done[:before-len(p.posted)] {
						sent[uint16(w.ID)] = true
					}
					completed(c)
				}
			case 3: // a response
				if len(p.recvs) > 0 {
					c := p.response(tp.U16(), nvme.Status(tp.U8()), 1)
					if op > 240 {
						c.Len = uint32(tp.U8())
					}
					completed(c)
				}
			case 4: // the right response for a slot
				i := int(tp.U8()) % p.q.Depth()
				if s := &p.q.slots[i]; s.busy && len(p.recvs) > 0 {
					if s.toHost {
						for k := range p.mem.has[uint16(i)] {
							p.mem.has[uint16(i)][k] = byte(k)
						}
					}
					completed(p.response(host.CID(uint16(i), s.gen), nvme.Status(tp.U8()%2), 0))
				}
			case 5: // collect
				comps := make([]host.Completion, 1+int(tp.U8()%8))
				for _, c := range comps[:p.q.Completions(comps)] {
					bufs[c.Tag].Complete(t, &c)
					if !sent[c.CID] {
						t.Fatalf("command %d completed before its SEND", c.Tag)
					}
				}
			case 6: // the device says what it likes
				c := wr.Completion{ID: uint64(tp.U8()&1)<<63 | uint64(tp.U16())<<16 | uint64(tp.U16()),
					Status: wr.Status(tp.U8() % 8), Len: 16}
				if k := slices.IndexFunc(p.posted, func(w wr.Send) bool { return w.ID == c.ID }); k >= 0 &&
					c.Status == wr.StatusOK {
					// The SEND may have been posted, although it did not request a completion.
					for _, w := range p.posted[:k+1] {
						sent[uint16(w.ID)] = true
					}
					p.posted = p.posted[k+1:]
				}
				completed(c)
			case 7: // detach
				i := int(tp.U8()) % p.q.Depth()
				s := &p.q.slots[i]
				c := host.CID(uint16(i), s.gen)
				if p.q.Detach(c) != s.busy {
					t.Fatalf("Detach(%#x) is wrong about the command being outstanding", c)
				}
				if s.busy {
					bufs[s.tag].Detach()
				}
			case 8:
				p.q.Tick(op > 128)
			}
			check()
		}
	})
}

// TestHotPathDoesNotAllocate checks Submit, Sends, Sent, Recvs, Posted, Completed and Completions, for every way of
// moving data.
func TestHotPathDoesNotAllocate(t *testing.T) {
	p := newPeer(Options{Depth: 8, InCapsuleBytes: 4096, Direct: true, InlineBytes: 64}, 8)
	mem := &slab{has: make([][]byte, 8), lender: p.mem}
	for i := range mem.has {
		mem.has[i] = make([]byte, 64<<10)
	}
	p.q.opts.Memory = mem
	data := [][]byte{make([]byte, 4096), make([]byte, 4096), make([]byte, 65536), p.mem.direct[:8192]}
	ops := []uint8{nvme.CmdRead, nvme.CmdWrite, nvme.CmdWrite, nvme.CmdRead}
	cmds := make([]host.Command, len(ops))
	comps := make([]host.Completion, len(ops))
	wcs := make([]wr.Completion, 0, 8)
	var recvs ringOfRecvs
	for _, r := range p.recvs {
		recvs.push(r)
	}
	var e nvme.CQE
	n := testing.AllocsPerRun(1000, func() {
		for i := range cmds {
			cmds[i].Data = data[i]
			cmds[i].SQE.SetOpcode(ops[i])
			if _, err := p.q.Submit(&cmds[i]); err != nil {
				t.Fatal(err)
			}
		}
		wcs = wcs[:0]
		ws := p.q.Sends()
		for i := range ws {
			e.SetCID(uint16(ws[i].ID))
			r := recvs.pop()
			copy(p.q.opts.Region[r.Addr-regionAddr:], e[:])
			wcs = append(wcs, wr.Completion{ID: r.ID, Len: 16})
			if ws[i].Flags&wr.FlagSignaled != 0 {
				wcs = append(wcs, wr.Completion{ID: ws[i].ID})
			}
		}
		p.q.Sent(len(ws))
		if err := p.q.Completed(wcs); err != nil {
			t.Fatal(err)
		}
		rs := p.q.Recvs()
		for _, r := range rs {
			recvs.push(r)
		}
		p.q.Posted(len(rs))
		if k := p.q.Completions(comps); k != len(cmds) {
			t.Fatalf("%d completions", k)
		}
	})
	if n != 0 {
		t.Errorf("%v allocs for %d commands", n, len(cmds))
	}
}

// slab is a lender that allocates nothing.
type slab struct {
	*lender
	has [][]byte
}

func (s *slab) Get(slot uint16, n int) ([]byte, uint64, uint32, bool) {
	return s.has[slot][:n], pieceAddr, 1, true
}
func (s *slab) Put(uint16) {}

type ringOfRecvs struct {
	at      [64]wr.Recv
	head, n int
}

func (r *ringOfRecvs) push(w wr.Recv) { r.at[(r.head+r.n)%len(r.at)] = w; r.n++ }
func (r *ringOfRecvs) pop() wr.Recv {
	w := r.at[r.head]
	r.head = (r.head + 1) % len(r.at)
	r.n--
	return w
}
