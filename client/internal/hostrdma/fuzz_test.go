package hostrdma

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

// tape reads values from a fuzzer's input.
type tape struct{ b []byte }

func (t *tape) u8() uint8 {
	if len(t.b) == 0 {
		return 0
	}
	v := t.b[0]
	t.b = t.b[1:]
	return v
}

func (t *tape) u16() uint16 { return uint16(t.u8()) | uint16(t.u8())<<8 }

// guarded is a command's buffer between two guard areas.
type guarded struct {
	all, buf []byte
	write    bool
	want     []byte // of a write
	out      bool   // the queue has it
	detached bool
	copy     []byte // its content when it was given back
}

const fence = 64

func newGuarded(n int) *guarded {
	all := bytes.Repeat([]byte{0xA5}, n+2*fence)
	return &guarded{all: all, buf: all[fence : fence+n : fence+n]}
}

func (g *guarded) intact() bool {
	f := bytes.Repeat([]byte{0xA5}, fence)
	return bytes.Equal(g.all[:fence], f) && bytes.Equal(g.all[len(g.all)-fence:], f)
}

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
		tp := &tape{script}
		o := Options{Depth: 1 + int(mode>>4&7), InlineBytes: int(mode&1) * 64, InCapsuleBytes: int(mode>>1&1) * 4096}
		p := newPeer(o, 2+int(mode>>2&3))
		var bufs []*guarded
		inFlight := map[uint64][]byte{} // capsules by the ID of their SEND
		sent := map[uint16]bool{}
		check := func() {
			for i, g := range bufs {
				if !g.intact() {
					t.Fatalf("command %d: a byte next to its buffer has changed", i)
				}
				if (g.detached || !g.out) && !bytes.Equal(g.buf, g.copy) {
					t.Fatalf("command %d: its buffer has changed after it was given back", i)
				}
			}
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
		for steps := 0; len(tp.b) > 0 && steps < 300; steps++ {
			switch op := tp.u8(); op % 9 {
			case 0: // submit
				kind := tp.u8()
				n := int(tp.u8()) * 512
				c := host.Command{Tag: uint64(len(bufs))}
				c.SQE.SetOpcode([]uint8{nvme.CmdRead, nvme.CmdWrite, nvme.CmdFlush, nvme.CmdCompare}[kind%4])
				c.SQE.SetFuse(nvme.Fuse(kind >> 6 % 3))
				if kind%4 == 2 {
					n = 0
				}
				g := newGuarded(n)
				if g.write = kind&1 != 0; g.write {
					copy(g.buf, pattern(c.Tag, n))
					g.want = bytes.Clone(g.buf)
				}
				c.Data = g.buf
				if _, err := p.q.Submit(&c); err == nil {
					g.out = true
					bufs = append(bufs, g)
				} else if err == host.ErrQueueFull && p.q.Free() != 0 || err == host.ErrDataDirection ||
					err == host.ErrDataLength {
					t.Fatal(err)
				}
			case 1: // post
				for _, w := range p.post(int(tp.u8())) {
					b := p.capsule(&w)
					inFlight[w.ID] = bytes.Clone(b)
					e := (*nvme.SQE)(b)
					i := host.SlotOf(e.CID())
					g := bufs[p.q.slots[i].tag]
					delete(sent, e.CID())
					data := b[nvme.SQESize:]
					if e.SGL().Type() == nvme.SGLTypeKeyedDataBlock {
						data = p.mem.has[uint16(i)]
						if int(e.SGL().KeyedLength()) != len(g.buf) || len(data) != len(g.buf) {
							t.Fatalf("a command of %d bytes tells of %d", len(g.buf), e.SGL().KeyedLength())
						}
					}
					if g.write && !bytes.Equal(data, g.want) {
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
					c := p.response(tp.u16(), nvme.Status(tp.u8()), 1)
					if op > 240 {
						c.Len = uint32(tp.u8())
					}
					completed(c)
				}
			case 4: // the right response for a slot
				i := int(tp.u8()) % p.q.Depth()
				if s := &p.q.slots[i]; s.busy && len(p.recvs) > 0 {
					if s.toHost {
						for k := range p.mem.has[uint16(i)] {
							p.mem.has[uint16(i)][k] = byte(k)
						}
					}
					completed(p.response(host.CID(uint16(i), s.gen), nvme.Status(tp.u8()%2), 0))
				}
			case 5: // collect
				comps := make([]host.Completion, 1+int(tp.u8()%8))
				for _, c := range comps[:p.q.Completions(comps)] {
					g := bufs[c.Tag]
					if !g.out {
						t.Fatalf("command %d completed twice", c.Tag)
					}
					if !sent[c.CID] {
						t.Fatalf("command %d completed before its SEND", c.Tag)
					}
					if int(c.Received) > len(g.buf) {
						t.Fatalf("command %d received %d bytes of %d", c.Tag, c.Received, len(g.buf))
					}
					g.out = false
					if !g.detached {
						g.copy = bytes.Clone(g.buf)
					}
				}
			case 6: // the device says what it likes
				c := wr.Completion{ID: uint64(tp.u8()&1)<<63 | uint64(tp.u16())<<16 | uint64(tp.u16()),
					Status: wr.Status(tp.u8() % 8), Len: 16}
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
				i := int(tp.u8()) % p.q.Depth()
				s := &p.q.slots[i]
				c := host.CID(uint16(i), s.gen)
				if p.q.Detach(c) != s.busy {
					t.Fatalf("Detach(%#x) is wrong about the command being outstanding", c)
				}
				if g := bufs; s.busy && !g[s.tag].detached {
					g := g[s.tag]
					g.detached = true
					// The caller may change the buffer now.
					for k := range g.buf {
						g.buf[k] ^= 0xFF
					}
					g.copy = bytes.Clone(g.buf)
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
