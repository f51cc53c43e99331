package tcp_test

import (
	"encoding/binary"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/qpair/qpairtest"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// pending is an R2T that the host has not answered in full.
type pending struct {
	cid, ttag uint16
	off, left uint32
}

// conversation returns what a random host sends to a target that answers at once: mostly valid PDUs and sometimes
// invalid ones, with the digests and the alignment of the driver.
func conversation(t *rapid.T, d *driver) (stream []byte) {
	var r2ts []pending
	say := func(b []byte) {
		stream = append(stream, b...)
		at := len(d.unparsed)
		d.receive(b)
		d.take()
		for b := d.unparsed[at:]; len(b) > 0; {
			ch := (*pdu.Common)(b)
			if ch.Type() == pdu.TypeR2T {
				p := (*pdu.Data)(b)
				r2ts = append(r2ts, pending{p.CCCID(), p.TTAG(), p.Offset(), p.Length()})
			}
			b = b[ch.PLEN():]
		}
	}
	rare := rapid.IntRange(0, 40)
	cid := uint16(0)
	for range rapid.IntRange(1, 25).Draw(t, "pdus") {
		wrong := flaw{header: rare.Draw(t, "bad header") == 1, data: rare.Draw(t, "bad data") == 1}
		if len(r2ts) > 0 && (len(r2ts) > 4 || rapid.Bool().Draw(t, "answer")) {
			i := rapid.IntRange(0, len(r2ts)-1).Draw(t, "r2t")
			p := &r2ts[i]
			n := min(p.left, rapid.Uint32Range(1, 6000).Draw(t, "bytes"))
			off := p.off
			if rare.Draw(t, "wrong offset") == 1 {
				off++
			}
			flags := uint8(0)
			if n == p.left {
				flags = pdu.FlagLast
			}
			say(encode(d.in, pdu.TypeH2CData, flags, dataHeader(p.cid, p.ttag, off, n),
				qpairtest.Pattern(int(p.cid), int(off+n))[off:], wrong))
			p.off += n
			if p.left -= n; p.left == 0 {
				r2ts = append(r2ts[:i], r2ts[i+1:]...)
			}
			continue
		}
		cid++
		r := request{cid: cid, nsid: rapid.Uint32Range(1, 3).Draw(t, "nsid"),
			slba: rapid.Uint64Range(0, 300).Draw(t, "slba"), nlb: rapid.Uint32Range(1, 8).Draw(t, "nlb"),
			op: rapid.SampledFrom([]uint8{nvme.CmdRead, nvme.CmdWrite, nvme.CmdCompare, nvme.CmdFlush, nvme.CmdDSM,
				nvme.CmdWriteUncorr}).Draw(t, "op")}
		r.transfer = r.nlb << 9
		if r.nsid == 2 {
			r.transfer = r.nlb << 12
		}
		r.inline = r.op != nvme.CmdRead && r.transfer <= 4096 && rapid.Bool().Draw(t, "inline")
		if r.inline || rare.Draw(t, "unwanted data") == 1 {
			r.data = qpairtest.Pattern(int(cid), int(min(r.transfer, 4096)))
		}
		say(d.capsule(r, wrong))
		if r.op == nvme.CmdCompare && rapid.Bool().Draw(t, "fused") {
			r.cid, r.op, r.fuse = cid+1, nvme.CmdWrite, nvme.FuseSecond
			first := r
			first.cid, first.op, first.fuse = cid+2, nvme.CmdCompare, nvme.FuseFirst
			cid += 2
			say(d.capsule(first, flaw{}))
			say(d.capsule(r, wrong))
		}
	}
	return stream
}

// The calls of the driver and the bytes to the host do not depend on how the stream is split, whether data is read into
// place, and how often memory was short.
func TestSplittingTheStreamChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dgst, hpda := rapid.Uint8Range(0, 3).Draw(t, "dgst"), rapid.Uint8Range(0, 31).Draw(t, "hpda")
		queue := qpairtest.IOQueue(rapid.IntRange(3, 20).Draw(t, "entries"), rapid.Bool().Draw(t, "noflow"))
		fresh := func() *driver {
			d := newDriver(config)
			d.Auto = true
			d.attach(queue, hpda, dgst)
			return d
		}
		whole := fresh()
		stream := conversation(t, whole)

		cut := fresh()
		most := rapid.SampledFrom([]int{1, 7, 100, 5000}).Draw(t, "most")
		place := rapid.Bool().Draw(t, "place")
		scarce := rapid.Bool().Draw(t, "scarce")
		for len(stream) > 0 {
			n := min(len(stream), rapid.IntRange(1, most).Draw(t, "cut"))
			piece := stream[:n]
			stream = stream[n:]
			if place && len(cut.unused) == 0 {
				if p := cut.c.Place(); p != nil {
					k := copy(p, piece)
					cut.c.Placed(k)
					piece = piece[k:]
				}
			}
			cut.Refuse = scarce && rapid.Bool().Draw(t, "refuse")
			cut.receive(piece)
			if cut.c.Stalled() {
				cut.Refuse = false
				cut.receive(nil)
			}
			cut.take()
		}
		if !equal(whole, cut) {
			t.Fatalf("whole:\n%s%v\ncut:\n%s%v", whole.Log.String(), whole.sent(), cut.Log.String(), cut.sent())
		}
		if text := cut.sent(); len(cut.unparsed) > 0 {
			t.Fatalf("what was sent does not parse:\n%s", text)
		}
	})
}

// FuzzReceive sends arbitrary bytes to a connected queue, in pieces of cut bytes unless that is 0. The bits of flags:
// 1:0 digests, 2 no flow control and data read into place, 3 the admin queue, 4 a driver that never answers, 7:5 HPDA.
// With an odd cut the host has credits on.
func FuzzReceive(f *testing.F) {
	in := pdu.Format{}
	d := &driver{in: in}
	capsules := func(rs ...request) (b []byte) {
		for _, r := range rs {
			b = append(b, d.capsule(r, flaw{})...)
		}
		return b
	}
	write := request{op: nvme.CmdWrite, cid: 1, nsid: 1, nlb: 1, inline: true, transfer: 512,
		data: qpairtest.Pattern(1, 512)}
	fetched := request{op: nvme.CmdWrite, cid: 2, nsid: 1, nlb: 1, transfer: 512}
	read := request{op: nvme.CmdRead, cid: 3, nsid: 2, nlb: 1, transfer: 4096}
	first := request{op: nvme.CmdCompare, cid: 4, nsid: 1, nlb: 1, transfer: 512, fuse: nvme.FuseFirst}
	second := request{op: nvme.CmdWrite, cid: 5, nsid: 1, nlb: 1, inline: true, transfer: 512,
		data: qpairtest.Pattern(5, 512), fuse: nvme.FuseSecond}
	dsm := request{op: nvme.CmdDSM, cid: 6, nsid: 1, inline: true, transfer: 16, data: make([]byte, 16)}
	h2c := encode(in, pdu.TypeH2CData, pdu.FlagLast, dataHeader(2, 1<<11|1, 0, 512), qpairtest.Pattern(2, 512), flaw{})
	f.Add(uint8(0), uint16(0), capsules(write, read, dsm))
	f.Add(uint8(0), uint16(1), append(capsules(write, fetched), h2c...))
	f.Add(uint8(4), uint16(100), append(capsules(write, fetched), h2c...))
	f.Add(uint8(0), uint16(33), capsules(first, second, second, first, read))
	f.Add(uint8(0), uint16(0), pdu.AppendTerm(nil, pdu.TypeH2CTermReq, &pdu.FatalError{FES: 1}, nil))
	f.Add(uint8(8), uint16(0), capsules(connectRequest(9), read))
	store := kvRequest(nvme.CmdKVStore, 7, 300)
	store.inline, store.data = true, qpairtest.Pattern(7, 300)
	f.Add(uint8(0), uint16(77), capsules(store, kvRequest(nvme.CmdKVRetrieve, 8, 1000),
		kvRequest(nvme.CmdKVList, 9, 64), kvRequest(nvme.CmdKVDelete, 10, 0), kvRequest(nvme.CmdKVStore, 11, 5000)))
	for dgst := uint8(1); dgst < 4; dgst++ {
		d.in, _ = formats(0, dgst)
		f.Add(dgst, uint16(50), capsules(write, read, first, second))
		f.Add(dgst, uint16(0), icReq(0, 3, dgst, 0))
	}
	f.Fuzz(func(t *testing.T, flags uint8, cut uint16, stream []byte) {
		d := newDriver(config)
		d.Auto = flags&16 == 0
		queue := qpairtest.IOQueue(6, flags&4 != 0)
		if flags&8 != 0 {
			queue.QID, queue.Table = 0, nil
		}
		d.attach(queue, flags>>5, flags&3)
		d.c.SetCredits(cut%2 == 1)
		for len(stream) > 0 && !d.c.Closed() {
			n := len(stream)
			if cut > 0 {
				n = min(n, int(cut))
			}
			if p := d.c.Place(); p != nil && flags&4 != 0 {
				n = copy(p, stream)
				d.c.Placed(n)
				d.receive(nil)
			} else {
				d.receive(stream[:n])
			}
			stream = stream[n:]
			if n := d.c.Outstanding(); n < len(d.Given) || n > 6 {
				t.Fatalf("%d commands outstanding, of which the driver has %d", n, len(d.Given))
			}
		}
		if text := d.sent(); len(d.unparsed) > 0 {
			t.Fatalf("what was sent does not parse:\n%s", text)
		}
		if (d.c.Fatal() != nil || d.c.PeerFatal() != nil) != d.c.Closed() {
			t.Fatal("closed without a reason, or a reason without being closed")
		}
		// Every slot is conserved: when all commands that the driver has and all that wait for data are answered, with
		// the other halves of their pairs, at most the first of a fused pair is left.
		d.c.Fetching(func(slot int) {
			for _, i := range []int{slot, d.c.Pair(slot)} {
				if i >= 0 && !slices.Contains(d.Given, i) {
					d.Given = append(d.Given, i)
				}
			}
		})
		for _, slot := range d.Given {
			d.c.Respond(slot, nvme.TransientTransportError, 0)
		}
		if n := d.c.Outstanding(); n > 1 {
			t.Fatalf("%d commands outstanding after all were answered", n)
		}
	})
}

// quiet is a Handler that answers at once, Connect too, and allocates nothing.
type quiet struct {
	c    *tcp.Conn
	mem  []byte
	data []byte
}

func (q *quiet) Buffer(_, n int) []byte { return q.mem[:n] }
func (q *quiet) Execute(slot int) {
	switch {
	case q.c.NeedsFetch(slot):
		q.c.RequestData(slot, q.mem[:q.c.Slot(slot).Plan.ToController])
	case q.c.Slot(slot).Plan.ToHost > 0:
		q.c.RespondData(slot, q.data[:q.c.Slot(slot).Plan.ToHost], 0)
	default:
		q.c.Respond(slot, nvme.Success, 0)
	}
}
func (q *quiet) Admin(slot int) {
	if !q.c.Connected() {
		q.c.Attach(qpairtest.IOQueue(16, true))
	}
	q.c.Respond(slot, nvme.Success, 0)
}
func (q *quiet) Fetched(slot int, _ bool) { q.c.Respond(slot, nvme.Success, 0) }
func (q *quiet) Unused(int)               {}
func (q *quiet) Failed(int, nvme.Status)  {}
func (q *quiet) Paired(int, int)          {}
func (q *quiet) Paused() bool             { return false }

// TestCommandsAllocateNothing checks Receive, Place, Placed, Take, Respond, RespondData and RequestData, with and
// without digests, and with credits.
func TestCommandsAllocateNothing(t *testing.T) {
	for k := uint8(0); k < 8; k++ {
		dgst := k & 3
		q := &quiet{mem: make([]byte, 64<<10), data: make([]byte, 64<<10)}
		q.c = tcp.New(config, q)
		d := &driver{}
		d.in, d.out = formats(0, dgst)
		q.c.Receive(icReq(0, 0, dgst, 0))
		q.c.Receive(d.capsule(connectRequest(0), flaw{}))
		if !q.c.Connected() {
			t.Fatal("not connected")
		}
		q.c.SetCredits(k&4 != 0)
		var out tcp.Out
		take := func() {
			q.c.Take(&out)
			out.Reset()
		}
		batch := append(d.capsule(request{op: nvme.CmdRead, cid: 1, nsid: 2, nlb: 1, transfer: 4096}, flaw{}),
			d.capsule(request{op: nvme.CmdWrite, cid: 2, nsid: 2, nlb: 1, inline: true, transfer: 4096,
				data: q.data[:4096]}, flaw{})...)
		batch = append(batch, d.capsule(request{op: nvme.CmdFlush, cid: 3, nsid: 2}, flaw{})...)
		batch = append(batch, d.capsule(request{op: nvme.CmdRead, cid: 4, nsid: 9, nlb: 1, transfer: 4096}, flaw{})...)
		fetched := d.capsule(request{op: nvme.CmdWrite, cid: 5, nsid: 2, nlb: 2, transfer: 8192}, flaw{})
		ttag := uint16(0)
		h2c := encode(d.in, pdu.TypeH2CData, pdu.FlagLast, dataHeader(5, 0, 0, 8192), q.data[:8192], flaw{})
		head := len(h2c) - 8192
		if d.in.DataDigest {
			head -= pdu.DigestLen
		}
		run := func() {
			q.c.Receive(batch)
			take()
			q.c.Receive(fetched)
			// The R2T's TTAG, as a host reads it.
			q.c.Take(&out)
			ttag = binary.LittleEndian.Uint16(out.Segs[0][10:])
			out.Reset()
			(*pdu.Data)(h2c).SetTTAG(ttag)
			if d.in.HeaderDigest {
				pdu.PutDigest(h2c[pdu.DataLen:], pdu.Digest(h2c[:pdu.DataLen]))
			}
			q.c.Receive(h2c[:head])
			n := copy(q.c.Place(), h2c[head:])
			q.c.Placed(n)
			q.c.Receive(h2c[head+n:])
			take()
			if q.c.Fatal() != nil || q.c.Outstanding() != 0 {
				t.Fatalf("%v, %d outstanding", q.c.Fatal(), q.c.Outstanding())
			}
		}
		run()
		run()
		if n := testing.AllocsPerRun(50, run); n != 0 {
			t.Errorf("digests %d, credits %v: %v allocations", dgst, k&4 != 0, n)
		}
	}
}
