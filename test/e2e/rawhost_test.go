package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/testutil/hangup"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// rawHost is a host that sends individual PDUs, so that it can violate the protocol. One goroutine uses it.
type rawHost struct {
	t      testing.TB
	c      net.Conn
	format pdu.Format
	maxH2C uint32
	in     [1 << 16]byte
}

// raw opens a connection that is closed when the test ends.
func (d *daemon) raw() *rawHost {
	d.t.Helper()
	h, err := dialRaw(d.t, d.addr)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(h.close)
	return h
}

func dialRaw(t testing.TB, addr string) (*rawHost, error) {
	c, err := net.DialTimeout("tcp", addr, wait)
	return &rawHost{t: t, c: c}, err
}

func (h *rawHost) close() { hangup.Close(h.t, h.c) }

// send sends bytes unchanged. It fails the test only on a timeout, because the target may have closed the connection.
func (h *rawHost) send(parts ...[]byte) {
	h.t.Helper()
	var all []byte
	for _, p := range parts {
		all = append(all, p...)
	}
	_ = h.c.SetWriteDeadline(time.Now().Add(wait))
	if _, err := h.c.Write(all); errors.Is(err, os.ErrDeadlineExceeded) {
		h.t.Fatal(err)
	}
}

// next reads one PDU from the target, or returns io.EOF after the target has closed the connection.
func (h *rawHost) next() ([]byte, error) {
	_ = h.c.SetReadDeadline(time.Now().Add(wait))
	if _, err := io.ReadFull(h.c, h.in[:pdu.CommonLen]); err != nil {
		return nil, err
	}
	n := (*pdu.Common)(h.in[:]).PLEN()
	if n < pdu.CommonLen || int(n) > len(h.in) {
		return nil, fmt.Errorf("the target sent a PDU of %d bytes", n)
	}
	_, err := io.ReadFull(h.c, h.in[pdu.CommonLen:n])
	return h.in[:n], err
}

// icreq returns an ICReq.
func icreq() *pdu.IC {
	p := new(pdu.IC)
	p.Common().Set(pdu.TypeICReq, 0, pdu.ICLen, 0, pdu.ICLen)
	return p
}

// initialize exchanges ICReq and ICResp.
func (h *rawHost) initialize(digests bool) {
	h.t.Helper()
	q := icreq()
	if digests {
		q.SetDGST(3)
		h.format = pdu.Format{HeaderDigest: true, DataDigest: true}
	}
	h.send(q[:])
	p, err := h.next()
	if err != nil || (*pdu.Common)(p).Type() != pdu.TypeICResp {
		h.t.Fatalf("instead of an ICResp: %x, %v", p, err)
	}
	h.maxH2C = (*pdu.IC)(p).MAXH2CDATA()
}

// frame makes a PDU from the rest of a header (behind the common header) and data, with the digests negotiated.
func (h *rawHost) frame(t pdu.Type, flags uint8, rest, data []byte) []byte {
	return frame(h.format, t, flags, rest, data)
}

func frame(f pdu.Format, t pdu.Type, flags uint8, rest, data []byte) []byte {
	b := append(make([]byte, pdu.CommonLen), rest...)
	hlen, plen, pdo := len(b), len(b), 0
	if f.HeaderDigest {
		flags |= pdu.FlagHDGST
		plen += pdu.DigestLen
	}
	if len(data) > 0 {
		pdo = plen
		plen += len(data)
		if f.DataDigest {
			flags |= pdu.FlagDDGST
			plen += pdu.DigestLen
		}
	}
	(*pdu.Common)(b).Set(t, flags, uint8(hlen), uint8(pdo), uint32(plen))
	if f.HeaderDigest {
		b = binary.LittleEndian.AppendUint32(b, pdu.Digest(b))
	}
	b = append(b, data...)
	if len(data) > 0 && f.DataDigest {
		b = binary.LittleEndian.AppendUint32(b, pdu.Digest(data))
	}
	return b
}

// capsule makes a command capsule and fills in the SGL: in-capsule data if there is any, otherwise n bytes by the
// transport.
func (h *rawHost) capsule(e nvme.SQE, data []byte, n int) []byte {
	return capsule(h.format, e, data, n)
}

func capsule(f pdu.Format, e nvme.SQE, data []byte, n int) []byte {
	e.SetPSDT(nvme.PSDTSGL)
	if len(data) > 0 {
		e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
		e.SGL().SetLength(uint32(len(data)))
	} else {
		e.SGL().SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
		e.SGL().SetLength(uint32(n))
	}
	return frame(f, pdu.TypeCapsuleCmd, 0, e[:], data)
}

// login holds the parameters of a Connect command.
type login struct {
	host, sub string
	qid       uint16
	cntlid    uint16
	entries   uint16
	katoMS    uint32
	cid       uint16
	// noSQFlow: without submission queue flow control, as Linux has it.
	noSQFlow bool
}

// connectCapsule returns the capsule of a Connect command.
func connectCapsule(f pdu.Format, l login) []byte {
	var e nvme.SQE
	c := e.Connect()
	c.Init()
	c.SetQID(l.qid)
	if l.entries == 0 {
		l.entries = 32
	}
	c.SetSQSIZE(l.entries - 1)
	c.SetKATO(l.katoMS)
	if l.noSQFlow {
		c.SetCATTR(nvme.CATTRDisableSQFlow)
	}
	e.SetCID(l.cid)
	var data nvme.ConnectData
	data.SetHostID(uuid.UUID{1, 2, 3, 15: byte(len(l.host))})
	data.SetCNTLID(0xffff)
	if l.qid != 0 {
		data.SetCNTLID(l.cntlid)
	}
	data.SetSubNQN(l.sub)
	data.SetHostNQN(l.host)
	return capsule(f, e, data[:], 0)
}

// connect connects a queue and returns the response.
func (h *rawHost) connect(l login) nvme.CQE {
	h.t.Helper()
	h.send(connectCapsule(h.format, l))
	return h.response()
}

// response reads PDUs up to a response capsule.
func (h *rawHost) response() nvme.CQE {
	h.t.Helper()
	for {
		p, err := h.next()
		if err != nil {
			h.t.Fatalf("instead of a response: %v", err)
		}
		switch (*pdu.Common)(p).Type() {
		case pdu.TypeCapsuleResp:
			return *(*pdu.CapsuleResp)(p).CQE()
		case pdu.TypeC2HTermReq:
			t := (*pdu.Term)(p)
			h.t.Fatalf("instead of a response, a TermReq: %v, fei %#x", t.FES(), t.FEI())
		}
	}
}

// do executes a command without data.
func (h *rawHost) do(e nvme.SQE) nvme.CQE {
	h.t.Helper()
	h.send(h.capsule(e, nil, 0))
	return h.response()
}

// propertySet makes a Property Set.
func propertySet(off uint32, v uint64, cid uint16) nvme.SQE {
	var e nvme.SQE
	e.Property().Init(nvme.FabricsPropertySet, off)
	e.Property().SetVALUE(v)
	e.SetCID(cid)
	return e
}

// enable is CC with EN and the entry sizes.
const enable = 1 | 6<<16 | 4<<20

// admin makes the connection the admin queue of an enabled controller and returns its identifier.
func (h *rawHost) admin(l login) (cntlid uint16) {
	h.t.Helper()
	c := h.connect(l)
	if !c.Status().OK() {
		h.t.Fatalf("Connect: %v", c.Status())
	}
	cntlid = c.ConnectCNTLID()
	if c := h.do(propertySet(nvme.PropCC, enable, 1)); !c.Status().OK() {
		h.t.Fatalf("enabling the controller: %v", c.Status())
	}
	return cntlid
}

// rawQueue builds an association of two raw connections: admin queue and I/O queue 1.
func (d *daemon) rawQueue(host, sub string, katoMS uint32, entries uint16) (admin, io *rawHost) {
	d.t.Helper()
	admin, io = d.raw(), d.raw()
	admin.initialize(false)
	cntlid := admin.admin(login{host: host, sub: sub, katoMS: katoMS})
	io.initialize(false)
	if c := io.connect(login{host: host, sub: sub, qid: 1, cntlid: cntlid, entries: entries}); !c.Status().OK() {
		d.t.Fatalf("Connect of the I/O queue: %v", c.Status())
	}
	return admin, io
}

// rw returns a Read or Write.
func rw(opcode uint8, cid uint16, slba units.LBA, nlb units.Blocks) (e nvme.SQE) {
	e.SetOpcode(opcode)
	e.SetCID(cid)
	e.SetNSID(1)
	e.SetSLBA(slba)
	e.SetNLB(nlb)
	return e
}

// h2cData makes an H2CData header's rest.
func h2cData(cid, ttag uint16, off, n uint32) []byte {
	var p pdu.Data
	p.SetCCCID(cid)
	p.SetTTAG(ttag)
	p.SetOffset(off)
	p.SetLength(n)
	return p[pdu.CommonLen:]
}

// r2t reads up to the next R2T and returns its TTAG.
func (h *rawHost) r2t() (ttag uint16) {
	h.t.Helper()
	for {
		p, err := h.next()
		if err != nil {
			h.t.Fatalf("instead of an R2T: %v", err)
		}
		if (*pdu.Common)(p).Type() == pdu.TypeR2T {
			return (*pdu.Data)(p).TTAG()
		}
	}
}

// ended reads until the target has closed the connection, and returns the TermReq that came before it, if any.
func (h *rawHost) ended() *pdu.Term {
	h.t.Helper()
	var term *pdu.Term
	for {
		p, err := h.next()
		var ne net.Error
		if errors.As(err, &ne) && ne.Timeout() {
			h.t.Fatalf("the target has not closed the connection within %v", wait)
		}
		if err != nil {
			return term // closed, or reset because of what it did not read
		}
		if (*pdu.Common)(p).Type() == pdu.TypeC2HTermReq {
			term = new(pdu.Term)
			copy(term[:], p)
		}
	}
}
