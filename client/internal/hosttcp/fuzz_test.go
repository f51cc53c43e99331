package hosttcp

import (
	"bytes"
	"encoding/binary"
	"testing"

	"jbofd/client/internal/host"
	"jbofd/client/internal/host/hosttest"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// FuzzHostileTarget runs a host that submits, sends, collects and detaches against a target that sends anything, from
// well-formed PDUs with arbitrary fields to arbitrary bytes. For any input: no panic; no byte outside the buffers of
// outstanding commands changes; each command completes at most once; what the host sends is well formed; after an error
// nothing is sent.
func FuzzHostileTarget(f *testing.F) {
	le := binary.LittleEndian
	cid := func(b []byte, v uint16) []byte { return le.AppendUint16(b, v) }
	// submit a read of 2 KiB, send, C2HData for it, collect
	f.Add(uint8(0), cid([]byte{0, 0, 4, 1, 255, 2, 0}, 0x400))
	f.Add(uint8(3), append(cid([]byte{0, 0, 4, 1, 255, 2, 0}, 0x400), 0, 4, 0xc, 0, 4))
	f.Add(uint8(0), append(cid([]byte{0, 1, 200, 1, 255, 3}, 0x400), 0, 0, 200, 1, 255, 1, 255, 4, 0, 4))
	f.Add(uint8(4), []byte{0, 1, 1, 1, 255, 5, 0, 4, 1, 7, 4, 1, 1, 6, 40, 5, 0, 24, 0, 24, 0, 0, 0, 1, 2, 3})
	f.Fuzz(func(t *testing.T, mode uint8, script []byte) {
		tp := hosttest.NewTape(script)
		o := Options{Depth: 1 + int(mode>>4&3), HeaderDigest: mode&1 != 0, DataDigest: mode&2 != 0,
			MaxR2T:    1 + int(mode>>6),
			RecvBytes: 4096}
		if mode&4 != 0 {
			o.InCapsuleBytes = 8192
		}
		p := &peer{q: New(o)}
		p.drain(0)
		if mode&8 == 0 {
			if err := p.feed(p.icResp(uint8(mode&1)*3, mode&3, 4096)); err != nil {
				t.Fatal(err)
			}
			p.rx = pdu.Format{HeaderDigest: o.HeaderDigest, DataDigest: o.DataDigest}
			p.tx = p.rx
			p.tx.AlignBytes = (int(mode&1)*3 + 1) * 4
		}
		var bufs []*hosttest.Guarded
		var sent []byte
		feed := func(b []byte) {
			dead := p.q.Err() != nil
			err := p.feed(b)
			if dead && err == nil && len(b) > 0 {
				t.Fatal("a failed queue took bytes")
			}
			if len(b) > 0 && (err != nil) != (p.q.Err() != nil) {
				t.Fatalf("Received says %v, Err says %v", err, p.q.Err())
			}
		}
		header := func(dataLen int) []byte {
			c, tt := tp.U16(), tp.U16()
			return dataHeader(c, tt, uint32(tp.U8())*64, uint32(dataLen))
		}
		for steps := 0; tp.Len() > 0 && steps < 200; steps++ {
			switch op := tp.U8(); op % 9 {
			case 0: // submit
				kind := tp.U8()
				n := int(tp.U8()) * 512
				c := host.Command{Tag: uint64(len(bufs))}
				c.SQE.SetOpcode([]uint8{nvme.CmdRead, nvme.CmdWrite, nvme.CmdFlush, nvme.CmdCompare}[kind%4])
				if kind%4 == 2 {
					n = 0
				}
				g := hosttest.NewGuarded(n)
				c.Data = g.Buf
				if _, err := p.q.Submit(&c); err == nil {
					g.Submitted()
					bufs = append(bufs, g)
				} else if err == host.ErrQueueFull && p.q.Free() != 0 || err == host.ErrDataDirection {
					t.Fatal(err)
				}
			case 1: // send
				limit := int(tp.U8())
				for taken := 0; limit == 255 || taken < limit*16; {
					segs := p.q.SendBufs()
					if len(segs) == 0 {
						break
					}
					s := segs[0]
					if limit != 255 {
						s = s[:min(len(s), limit*16-taken)]
					}
					sent = append(sent, s...)
					p.q.Sent(len(s))
					taken += len(s)
				}
				for len(sent) >= pdu.CommonLen && len(sent) >= int((*pdu.Common)(sent).PLEN()) {
					n := int((*pdu.Common)(sent).PLEN())
					if d := p.describe(sent[:n]); bytes.Contains([]byte(d), []byte("BAD")) {
						t.Fatalf("the host sent: %s", d)
					}
					sent = sent[n:]
				}
			case 2: // C2HData
				flags := tp.U8() & (pdu.FlagLast | pdu.FlagSuccess)
				n := int(tp.U8()) * 64
				feed(p.pdu(pdu.TypeC2HData, flags, header(n), make([]byte, n), op > 240, op > 200))
			case 3: // R2T
				h := header(0)
				le.PutUint32(h[8:], uint32(tp.U16())*64)
				feed(p.pdu(pdu.TypeR2T, 0, h, nil, op > 240, false))
			case 4: // CapsuleResp
				feed(p.resp(tp.U16(), nvme.Status(tp.U8()), 0))
			case 5: // collect
				comps := make([]host.Completion, 1+int(tp.U8()%8))
				for _, c := range comps[:p.q.Completions(comps)] {
					bufs[c.Tag].Complete(t, &c)
				}
			case 6: // bytes
				feed(tp.Bytes(int(tp.U8())))
			case 7: // detach
				c := tp.U16()
				tag := -1
				for i := range p.q.slots {
					s := &p.q.slots[i]
					if s.busy && host.CID(uint16(i), s.gen) == c {
						tag = int(s.tag)
					}
				}
				if p.q.Detach(c) != (tag >= 0) {
					t.Fatalf("Detach(%#x) is wrong about the command being outstanding", c)
				}
				if tag >= 0 {
					bufs[tag].Detach()
				}
			case 8:
				p.q.Tick(op > 128)
				p.chunk = int(tp.U8())
			}
			hosttest.CheckAll(t, bufs)
			if n := p.q.Free() + p.q.Outstanding(); n != p.q.Depth() {
				t.Fatalf("%d slots of %d", n, p.q.Depth())
			}
		}
	})
}

// TestHotPathDoesNotAllocate checks Submit, SendBufs, Sent, RecvBufs, Received and Completions, for every way of moving
// data.
func TestHotPathDoesNotAllocate(t *testing.T) {
	for _, digests := range []bool{false, true} {
		const depth = 8
		p := &peer{q: New(Options{Depth: depth, HeaderDigest: digests, DataDigest: digests, MaxR2T: 2,
			InCapsuleBytes: 8192})}
		p.drain(0)
		dgst := uint8(0)
		if digests {
			dgst = 3
		}
		if err := p.feed(p.icResp(0, dgst, 16384)); err != nil {
			t.Fatal(err)
		}
		p.rx = pdu.Format{HeaderDigest: digests, DataDigest: digests}
		p.tx = p.rx
		read, write, large := make([]byte, 4096), make([]byte, 4096), make([]byte, 65536)
		comps := make([]host.Completion, depth)
		// One round: three commands, their answers, in PDUs prepared for the CID that the round will see.
		round := func(answers []byte) {
			for _, c := range []host.Command{{Data: read}, {Data: write}, {Data: large}} {
				op := uint8(nvme.CmdWrite)
				if &c.Data[0] == &read[0] {
					op = nvme.CmdRead
				}
				c.SQE.SetOpcode(op)
				if _, err := p.q.Submit(&c); err != nil {
					t.Fatal(err)
				}
			}
			flush := func() {
				for {
					segs := p.q.SendBufs()
					if len(segs) == 0 {
						return
					}
					n := 0
					for _, s := range segs {
						n += len(s)
					}
					p.q.Sent(n)
				}
			}
			flush()
			for len(answers) > 0 {
				direct, rx := p.q.RecvBufs()
				n := copy(direct, answers)
				n += copy(rx, answers[n:])
				if err := p.q.Received(n); err != nil {
					t.Fatal(err)
				}
				answers = answers[n:]
				flush()
			}
			if n := p.q.Completions(comps); n != 3 {
				t.Fatalf("%d completions", n)
			}
		}
		build := func() []byte {
			// The free slots are a stack, so the next CIDs are known.
			var cids [3]uint16
			for k := range cids {
				i := p.q.free[len(p.q.free)-1-k]
				cids[k] = host.CID(i, host.NextGeneration(p.q.slots[i].gen))
			}
			b := p.pdu(pdu.TypeR2T, 0, dataHeader(cids[2], 5, 0, 65536), nil, false, false)
			b = append(b, p.pdu(pdu.TypeC2HData, pdu.FlagLast|pdu.FlagSuccess, dataHeader(cids[0], 0, 0, 4096),
				make([]byte,
					4096), false, false)...)
			b = append(b, p.resp(cids[1], 0, 0)...)
			return append(b, p.resp(cids[2], 0, 0)...)
		}
		const rounds = 100
		// AllocsPerRun makes one run more, as a warm-up.
		var answers [rounds + 1][]byte
		gens := make([]uint16, depth)
		for i := range p.q.slots {
			gens[i] = p.q.slots[i].gen
		}
		free := append([]uint16(nil), p.q.free...)
		for r := range answers {
			answers[r] = build()
			// Predict the free list: three slots are taken, and returned in order of completion.
			n := len(p.q.free)
			a, b, c := p.q.free[n-1], p.q.free[n-2], p.q.free[n-3]
			for _, i := range []uint16{a, b, c} {
				p.q.slots[i].gen = host.NextGeneration(p.q.slots[i].gen)
			}
			p.q.free[n-3], p.q.free[n-2], p.q.free[n-1] = a, b, c
		}
		copy(p.q.free, free)
		for i := range gens {
			p.q.slots[i].gen = gens[i]
		}
		k := 0
		if got := testing.AllocsPerRun(rounds, func() { round(answers[k]); k++ }); got != 0 {
			t.Errorf("digests %t: %v allocs per round", digests, got)
		}
	}
}

// TestCIDsAreNeverFFFF: FFFFh is reserved, and generations wrap without it.
func TestCIDsAreNeverFFFF(t *testing.T) {
	p := &peer{q: New(Options{Depth: host.MaxDepth})}
	p.drain(0)
	if err := p.feed(p.icResp(0, 0, 4096)); err != nil {
		t.Fatal(err)
	}
	var c host.Command
	c.SQE.SetOpcode(nvme.CmdFlush)
	p.q.free = p.q.free[:1] // only the slot at the bottom: the last one
	comps := make([]host.Completion, 1)
	seen := map[uint16]bool{}
	const generations = 63 // of a slot
	for range 3 * generations {
		cid, err := p.q.Submit(&c)
		if err != nil {
			t.Fatal(err)
		}
		if cid == 0xFFFF {
			t.Fatal("CID FFFFh")
		}
		seen[cid] = true
		p.drain(0)
		if err := p.feed(p.resp(cid, 0, 0)); err != nil {
			t.Fatal(err)
		}
		if p.q.Completions(comps) != 1 {
			t.Fatal("no completion")
		}
	}
	if len(seen) != generations {
		t.Errorf("%d CIDs for one slot, want %d", len(seen), generations)
	}
}
