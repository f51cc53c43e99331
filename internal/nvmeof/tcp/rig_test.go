package tcp_test

import (
	"bytes"
	"fmt"
	"strings"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/qpair/qpairtest"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/units"
)

// driver is the Handler, and the host at the other end: it makes PDUs from commands and reads what the machine sends.
type driver struct {
	*qpairtest.Recorder
	c *tcp.Conn

	in, out  pdu.Format // as negotiated
	unparsed []byte     // sent by the machine, not yet described
	unused   []byte     // received, not used by the machine
	total    int        // bytes sent by the machine
	spare    tcp.Out
}

func newDriver(cfg tcp.Config) *driver {
	d := &driver{}
	d.start(cfg, d)
	return d
}

// start makes the machine, whose handler is h: the driver, or one with the driver in it.
func (d *driver) start(cfg tcp.Config, h qpair.Handler) {
	d.Recorder = qpairtest.NewRecorder(func(n int) []byte { return make([]byte, n) })
	d.c = tcp.New(cfg, h)
	d.Machine = d.c
}

var config = tcp.Config{InCapsuleBytes: 4096, MaxH2CDataBytes: 8192, Limits: qpairtest.Limits}

// receive passes bytes to the machine, after those that it has not used yet.
func (d *driver) receive(b []byte) {
	d.unused = append(d.unused, b...)
	n := d.c.Receive(d.unused)
	d.unused = d.unused[n:]
}

// take appends what the machine sends to unparsed.
func (d *driver) take() {
	var o tcp.Out
	o, d.spare = d.spare, o
	d.c.Take(&o)
	n := 0
	for _, s := range o.Segs {
		d.unparsed = append(d.unparsed, s...)
		n += len(s)
	}
	if n != o.Bytes {
		panic(fmt.Sprintf("Out says %d bytes, there are %d", o.Bytes, n))
	}
	d.total += n
	o.Reset()
	d.spare = o
}

// sent describes the PDUs sent since the last call.
func (d *driver) sent() string {
	d.take()
	var s strings.Builder
	for len(d.unparsed) > 0 {
		text, n := describe(d.unparsed, d.out)
		s.WriteString(text + "\n")
		if n == 0 {
			break
		}
		d.unparsed = d.unparsed[n:]
	}
	return s.String()
}

// describe describes the PDU from the controller at the beginning of b and returns its length. n is 0 if b does not
// begin with a valid PDU.
func describe(b []byte, f pdu.Format) (text string, n int) {
	if len(b) < pdu.CommonLen {
		return fmt.Sprintf("BROKEN: %d bytes of a header", len(b)), 0
	}
	ch := (*pdu.Common)(b)
	if err := pdu.CheckHeader(b, false, f); err != nil {
		return "BROKEN: " + err.Error(), 0
	}
	n = int(ch.PLEN())
	if len(b) < n {
		return fmt.Sprintf("BROKEN: %d of %d bytes of a %v", len(b), n, ch.Type()), 0
	}
	b = b[:n]
	hlen := int(ch.HLEN())
	digests := ch.Type() != pdu.TypeICResp && ch.Type() != pdu.TypeC2HTermReq
	if digests && f.HeaderDigest && pdu.GetDigest(b[hlen:]) != pdu.Digest(b[:hlen]) {
		return "BROKEN: header digest of a " + ch.Type().String(), 0
	}
	data := ""
	if l := pdu.DataLength(b, f); l > 0 {
		body := b[ch.PDO():][:l]
		data = fmt.Sprintf(" pdo %d data %s", ch.PDO(), qpairtest.Sum(body))
		if f.DataDigest && pdu.GetDigest(b[int(ch.PDO())+l:]) != pdu.Digest(body) {
			return "BROKEN: data digest of a " + ch.Type().String(), 0
		}
	}
	var flags []string
	for i, name := range []string{"HDGST", "DDGST", "LAST", "SUCCESS"} {
		if ch.Flags()>>i&1 != 0 {
			flags = append(flags, name)
		}
	}
	text = fmt.Sprintf("<- %v", ch.Type())
	if len(flags) > 0 {
		text += " " + strings.Join(flags, "+")
	}
	switch ch.Type() {
	case pdu.TypeICResp:
		p := (*pdu.IC)(b)
		text += fmt.Sprintf(" pfv %d cpda %d hdgst %t ddgst %t maxh2cdata %d", p.PFV(), p.PDA(), p.HeaderDigest(),
			p.DataDigest(), p.MAXH2CDATA())
	case pdu.TypeC2HTermReq:
		p := (*pdu.Term)(b)
		text += fmt.Sprintf(" fes %d fei %#x: %v; quotes %d bytes", p.FES(), p.FEI(), p.FES(), n-pdu.TermLen)
	case pdu.TypeCapsuleResp:
		e := (*pdu.CapsuleResp)(b).CQE()
		text += fmt.Sprintf(" cid %#x sqhd %d result %#x %v", e.CID(), e.SQHD(), e.Result64(), e.Status())
	default:
		p := (*pdu.Data)(b)
		text += fmt.Sprintf(" cid %#x ttag %#x offset %d length %d", p.CCCID(), p.TTAG(), p.Offset(), p.Length())
	}
	return text + data, n
}

// flaw says what is wrong with a PDU.
type flaw struct{ header, data bool }

// encode makes a PDU of the host, with the digests and padding negotiated.
func encode(f pdu.Format, t pdu.Type, flags uint8, header, data []byte, wrong flaw) []byte {
	h := append(make([]byte, pdu.CommonLen, 256), header...)
	if t == pdu.TypeICReq || t == pdu.TypeH2CTermReq {
		f = pdu.Format{}
	}
	plen, pdo := len(h), 0
	if f.HeaderDigest {
		flags |= pdu.FlagHDGST
		plen += pdu.DigestLen
	}
	if len(data) > 0 && t != pdu.TypeH2CTermReq {
		pdo = f.DataOffset(len(h))
		plen = pdo
		if f.DataDigest {
			flags |= pdu.FlagDDGST
			plen += pdu.DigestLen
		}
	}
	(*pdu.Common)(h).Set(t, flags, uint8(len(h)), uint8(pdo), uint32(plen+len(data)))
	if f.HeaderDigest {
		d := pdu.Digest(h)
		if wrong.header {
			d = 0xBAD
		}
		h = append(h, 0, 0, 0, 0)
		pdu.PutDigest(h[len(h)-4:], d)
	}
	h = append(h, make([]byte, max(0, pdo-len(h)))...)
	h = append(h, data...)
	if pdo > 0 && f.DataDigest {
		d := pdu.Digest(data)
		if wrong.data {
			d++
		}
		h = append(h, 0, 0, 0, 0)
		pdu.PutDigest(h[len(h)-4:], d)
	}
	return h
}

func icReq(pfv uint16, hpda, dgst uint8, maxR2T uint32) []byte {
	var p pdu.IC
	p.SetPFV(pfv)
	p.SetPDA(hpda)
	p.SetDGST(dgst)
	p.SetMAXR2T(maxR2T)
	return encode(pdu.Format{}, pdu.TypeICReq, 0, p[pdu.CommonLen:], nil, flaw{})
}

// formats returns the formats that an ICReq negotiates for the two directions.
func formats(hpda, dgst uint8) (in, out pdu.Format) {
	in = pdu.Format{HeaderDigest: dgst&1 != 0, DataDigest: dgst&2 != 0}
	out = in
	out.AlignBytes = (int(hpda) + 1) * 4
	return in, out
}

func dataHeader(cid, ttag uint16, off, n uint32) []byte {
	var p pdu.Data
	p.SetCCCID(cid)
	p.SetTTAG(ttag)
	p.SetOffset(off)
	p.SetLength(n)
	return p[pdu.CommonLen:]
}

// request describes a command of the host.
type request struct {
	op     uint8
	cid    uint16
	nsid   uint32
	slba   uint64
	nlb    uint32
	fuse   nvme.Fuse
	inline bool
	// transfer is the length in the SGL; data is the data in the capsule.
	transfer uint32
	data     []byte
	change   func(*nvme.SQE)
}

func (d *driver) capsule(r request, wrong flaw) []byte {
	var e nvme.SQE
	e.SetOpcode(r.op)
	e.SetCID(r.cid)
	e.SetNSID(r.nsid)
	e.SetSLBA(units.LBA(r.slba))
	e.SetNLB(units.Blocks(max(r.nlb, 1)))
	e.SetFuse(r.fuse)
	e.SetPSDT(nvme.PSDTSGL)
	e.SGL().SetLength(r.transfer)
	if r.inline {
		e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
	} else {
		e.SGL().SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
	}
	if r.change != nil {
		r.change(&e)
	}
	return encode(d.in, pdu.TypeCapsuleCmd, 0, e[:], r.data, wrong)
}

// connectRequest is a Connect with its data in the capsule.
func connectRequest(cid uint16) request {
	data := qpairtest.ConnectData()
	return request{cid: cid, inline: true, transfer: nvme.ConnectDataSize, data: data[:], change: func(e *nvme.SQE) {
		sgl := *e.SGL()
		e.Connect().Init()
		e.SetCID(cid)
		*e.SGL() = sgl
	}}
}

// attach connects the queue of a new machine.
func (d *driver) attach(a qpair.Attachment, hpda, dgst uint8) {
	d.receive(icReq(0, hpda, dgst, 0))
	d.in, d.out = formats(hpda, dgst)
	auto := d.Auto
	d.Auto = false
	d.receive(d.capsule(connectRequest(0), flaw{}))
	delete(d.Bufs, 0)
	d.c.Attach(a)
	d.c.Respond(0, nvme.Success, 1)
	d.Auto = auto
	d.take()
	d.unparsed, d.Given = nil, nil
	d.Log.Reset()
}

// equal reports whether two drivers have recorded and sent the same.
func equal(a, b *driver) bool {
	return a.Log.String() == b.Log.String() && bytes.Equal(a.unparsed, b.unparsed) && a.c.Closed() == b.c.Closed() &&
		a.c.Outstanding() == b.c.Outstanding()
}
